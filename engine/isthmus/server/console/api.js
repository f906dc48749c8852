// Speaking to the server: with the key if there is one, and asking for it if there must be.

import { byId } from "./dom.js";

const KEPT = "isthmus-key";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

function headers() {
  const key = sessionStorage.getItem(KEPT);
  return { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) };
}

async function send(path, options) {
  const response = await fetch(path, { ...options, headers: headers() });
  if (response.status === 401) askForKey();
  if (!response.ok) throw new ApiError(response.status, await reason(response));
  return response;
}

async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

export const state = async (signal) => (await send("/console/state", { signal })).json();

// What a stream of server-sent events holds, event by event, until [DONE].
export async function* chat(body, signal, onRequestId) {
  const response = await send("/v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
  onRequestId(response.headers.get("x-request-id"));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.slice("data: ".length);
      if (data === "[DONE]") return;
      const found = JSON.parse(data);
      if (found.error) throw new ApiError(found.error.code, found.error.message);
      yield found;
    }
  }
}

export const isWaitingForKey = () => byId("key-dialog").open;

function askForKey() {
  const dialog = byId("key-dialog");
  byId("key-wrong").textContent = sessionStorage.getItem(KEPT) ? "That key is not one of this server's." : "";
  sessionStorage.removeItem(KEPT);
  if (!dialog.open) dialog.showModal();
}

export function startKey(onKey) {
  byId("key-form").addEventListener("submit", () => {
    sessionStorage.setItem(KEPT, byId("key").value.trim());
    byId("key").value = "";
    byId("key-dialog").addEventListener("close", onKey, { once: true });
  });
}
