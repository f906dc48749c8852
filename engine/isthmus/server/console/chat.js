// The playground: a conversation, answered token by token.

import { chat } from "./api.js";
import { byId, make } from "./dom.js";
import { count, seconds } from "./format.js";
import { prose } from "./prose.js";

const NUMBERS = ["temperature", "top_p", "max_tokens", "top_k", "repetition_penalty", "seed"];
const NEAR_END = 60;

export class Chat {
  constructor() {
    this.talk = byId("talk");
    this.welcome = byId("welcome");
    this.box = byId("message");
    this.messages = [];
    this.stopper = null;
    this.requestIds = new Set();
    this.listen();
  }

  listen() {
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.box.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    this.box.addEventListener("input", () => this.fit());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.stopper) this.stop();
    });
    byId("stop").addEventListener("click", () => this.stop());
    byId("clear").addEventListener("click", () => this.clear());
    for (const button of byId("ideas").querySelectorAll("button")) {
      button.addEventListener("click", () => {
        this.box.value = button.textContent;
        this.send();
      });
    }
    for (const range of byId("settings").querySelectorAll("input[type=range]")) {
      const show = () => {
        range.parentElement.querySelector("output").textContent = Number(range.value).toFixed(2);
      };
      range.addEventListener("input", show);
      show();
    }
  }

  fit() {
    this.box.style.height = "auto";
    this.box.style.height = `${Math.min(this.box.scrollHeight, 180)}px`;
  }

  stop() {
    this.stopper?.abort();
  }

  clear() {
    this.stop();
    this.messages = [];
    this.talk.replaceChildren(this.welcome);
    byId("clear").disabled = true;
    this.box.focus();
  }

  async send() {
    const text = this.box.value.trim();
    if (!text || this.stopper) return;
    this.welcome.remove();
    this.box.value = "";
    this.fit();
    this.messages.push({ role: "user", content: text });
    this.talk.append(make("div", { className: "turn user" }, make("p", { text })));
    byId("clear").disabled = false;
    const turn = new Turn(this.talk);
    this.stopper = new AbortController();
    this.busy(true);
    try {
      await this.answer(turn);
    } catch (error) {
      if (error.name === "AbortError") turn.end("stopped");
      else turn.fail(error.message);
    } finally {
      this.stopper = null;
      this.busy(false);
      byId("announce").textContent = turn.summary;
    }
    const said = turn.text;
    if (said) this.messages.push({ role: "assistant", content: said });
    else this.messages.pop();
  }

  async answer(turn) {
    const messages = this.withSystem();
    const options = { stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
    const body = { messages, ...options, ...sampling() };
    for await (const event of chat(body, this.stopper.signal, (id) => this.requestIds.add(id))) {
      turn.take(event);
    }
    turn.end(turn.finish ?? "ended");
  }

  withSystem() {
    const system = byId("system").value.trim();
    return system ? [{ role: "system", content: system }, ...this.messages] : this.messages;
  }

  busy(isBusy) {
    this.talk.setAttribute("aria-busy", isBusy);
    byId("stop").hidden = !isBusy;
    byId("send").hidden = isBusy;
    if (isBusy) byId("announce").textContent = "The answer is being written";
    else byId("speed").textContent = "";
  }
}

// What is set; what is left empty is for the server to say.
function sampling() {
  const given = NUMBERS.map((name) => [name, byId(name).value]).filter(([, value]) => value !== "");
  return Object.fromEntries(given.map(([name, value]) => [name, Number(value)]));
}

// One answer on its way.
class Turn {
  constructor(talk) {
    this.talk = talk;
    this.text = "";
    this.thought = "";
    this.tokens = 0;
    this.finish = null;
    this.start = performance.now();
    this.first = null;
    this.last = null;
    this.summary = "";
    this.frame = 0;
    this.body = make("div", { className: "prose" });
    this.meta = make("p", { className: "meta" });
    this.element = make("div", { className: "turn answer writing" }, this.body, this.meta);
    talk.append(this.element);
    talk.scrollTop = talk.scrollHeight;
  }

  take(event) {
    this.tokens = event.usage?.completion_tokens ?? this.tokens;
    const [choice] = event.choices ?? [];
    if (!choice) return;
    const delta = choice.delta ?? {};
    const thought = delta.reasoning_content ?? delta.reasoning ?? "";
    const content = delta.content ?? "";
    if (content || thought) {
      this.last = performance.now();
      this.first ??= this.last;
      this.text += content;
      this.thought += thought;
      this.frame ||= requestAnimationFrame(() => this.paint());
    }
    this.finish = choice.finish_reason ?? this.finish;
  }

  paint() {
    this.frame = 0;
    const isAtEnd = this.talk.scrollHeight - this.talk.scrollTop - this.talk.clientHeight < NEAR_END;
    const thinking = this.thought && make("details", { className: "thought" }, make("summary", { text: "Thoughts" }), ...prose(this.thought));
    this.body.replaceChildren(...(thinking ? [thinking] : []), ...prose(this.text));
    byId("speed").textContent = this.speed() ? `${this.speed()} tokens/s` : "";
    if (isAtEnd) this.talk.scrollTop = this.talk.scrollHeight;
  }

  speed() {
    const took = (this.last - this.first) / 1000;
    return this.tokens > 1 && took > 0 ? ((this.tokens - 1) / took).toFixed(1) : null;
  }

  end(how) {
    cancelAnimationFrame(this.frame);
    this.paint();
    this.element.classList.remove("writing");
    const facts = [`${count(this.tokens)} tokens`];
    if (this.speed()) facts.push(`${this.speed()} tokens/s`);
    if (this.first !== null) facts.push(`first after ${seconds((this.first - this.start) / 1000)}`);
    facts.push(how);
    this.meta.textContent = facts.join(" · ");
    this.summary = `Answer ${how}: ${facts.join(", ")}`;
    this.talk.scrollTop = this.talk.scrollHeight;
  }

  fail(message) {
    this.end("failed");
    this.element.classList.add("failed");
    this.element.append(make("p", { className: "error", text: message, role: "alert" }));
    this.summary = `The answer failed: ${message}`;
  }
}
