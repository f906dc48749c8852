// The little of Markdown that answers are written in, as elements: code, paragraphs, lists, headings, emphasis.

import { make } from "./dom.js";

const INLINE = /(`[^`\n]+`|\*\*[^*\n]+\*\*|\*[^*\s][^*\n]*\*)/;

function inline(parent, text) {
  for (const part of text.split(INLINE)) {
    if (/^`.+`$/.test(part)) parent.append(make("code", { text: part.slice(1, -1) }));
    else if (/^\*\*.+\*\*$/.test(part)) parent.append(make("strong", { text: part.slice(2, -2) }));
    else if (/^\*.+\*$/.test(part)) parent.append(make("em", { text: part.slice(1, -1) }));
    else if (part) parent.append(part);
  }
  return parent;
}

function block(lines) {
  const first = lines[0];
  const heading = /^#{1,6}\s+(.*)$/.exec(first);
  if (heading && lines.length === 1) return inline(make("p", { className: "heading" }), heading[1]);
  const item = /^\s*(?:[-*]|\d+[.)])\s+/;
  if (lines.every((line) => item.test(line))) {
    const list = make(/^\s*\d/.test(first) ? "ol" : "ul");
    if (list.tagName === "OL") list.start = parseInt(first, 10);
    list.append(...lines.map((line) => inline(make("li"), line.replace(item, ""))));
    return list;
  }
  return inline(make("p"), lines.join("\n"));
}

// Text outside of code: blocks are apart by an empty line, and a list begins and ends by itself.
function blocks(text) {
  const isItem = (line) => /^\s*(?:[-*]|\d+[.)])\s+/.test(line);
  const found = [];
  let lines = [];
  const close = () => {
    if (lines.length) found.push(block(lines));
    lines = [];
  };
  for (const line of text.split("\n")) {
    const isBreak = !line.trim() || /^#{1,6}\s/.test(line) || (lines.length && isItem(line) !== isItem(lines[0]));
    if (isBreak) close();
    if (line.trim()) lines.push(line);
    if (/^#{1,6}\s/.test(line)) close();
  }
  close();
  return found;
}

export function prose(text) {
  const parts = text.split(/^```[^\n]*\n?/m);
  return parts.flatMap((part, index) => {
    if (index % 2 === 0) return blocks(part);
    return [make("pre", {}, make("code", { text: part.replace(/\n$/, "") }))];
  });
}
