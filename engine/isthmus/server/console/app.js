// The page: asks the server how it is once a second while somebody looks, and shows the parts what it says.

import { isWaitingForKey, startKey, state } from "./api.js";
import { Chat } from "./chat.js";
import { byId, setText } from "./dom.js";
import { Live } from "./live.js";
import { startTheme } from "./theme.js";

const EVERY_MS = 1000;
const PATIENCE_MS = 5000;

function showStatus(status, text) {
  byId("status").dataset.status = status;
  setText(byId("status"), text);
}

function startTabs() {
  const main = document.querySelector("main");
  const buttons = { chat: byId("show-chat"), live: byId("show-live") };
  for (const [view, button] of Object.entries(buttons)) {
    button.addEventListener("click", () => {
      main.dataset.view = view;
      for (const [name, one] of Object.entries(buttons)) one.setAttribute("aria-pressed", name === view);
    });
  }
}

function start() {
  startTheme();
  startTabs();
  const chat = new Chat();
  const live = new Live();

  function lose(error) {
    live.lose();
    showStatus("dead", error.status === 401 ? "needs a key" : "not reached");
  }

  async function look() {
    if (document.hidden || isWaitingForKey()) return;
    const found = await state(AbortSignal.timeout(PATIENCE_MS)).catch(lose);
    if (!found) return;
    showStatus(found.status, found.status === "starting" ? found.stage : found.is_paused ? "paused" : found.status);
    setText(byId("model"), found.model);
    document.title = `${found.model} · Isthmus`;
    live.show(found, chat.requestIds);
  }

  async function watch() {
    for (;;) {
      const pause = new Promise((done) => setTimeout(done, EVERY_MS));
      await look();
      await pause;
    }
  }

  startKey(look);
  document.addEventListener("visibilitychange", look);
  watch();
}

start();
