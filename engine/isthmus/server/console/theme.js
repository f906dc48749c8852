// Dark or light: as the system says, until somebody chooses.

import { byId } from "./dom.js";

const KEPT = "isthmus-theme";
const dark = matchMedia("(prefers-color-scheme: dark)");

const current = () => document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light");
const other = () => (current() === "dark" ? "light" : "dark");

function show() {
  const button = byId("theme");
  button.textContent = other() === "dark" ? "Dark" : "Light";
  button.setAttribute("aria-label", `Use ${other()} colours`);
}

export function startTheme() {
  const kept = localStorage.getItem(KEPT);
  if (kept) document.documentElement.dataset.theme = kept;
  show();
  dark.addEventListener("change", show);
  byId("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = other();
    localStorage.setItem(KEPT, current());
    show();
  });
}
