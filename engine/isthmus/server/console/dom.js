// Making and finding elements. Text always goes in as text: nothing that a model or a client wrote becomes markup.

export const byId = (id) => document.getElementById(id);

export function make(tag, { text, className, ...rest } = {}, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  for (const [name, value] of Object.entries(rest)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// In the name space of a drawing that is on the page already.
export function draw(svg, tag, attributes = {}) {
  const element = document.createElementNS(svg.namespaceURI, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
