// The engine at work, from the server's state, once a second.

import { byId, make, setText } from "./dom.js";
import { bytes, count, duration, percent, seconds, short } from "./format.js";
import { Spark } from "./spark.js";
import { Timeline } from "./timeline.js";

const REASONS = {
  capacity: "for blocks",
  seats: "for a seat",
  slots: "for a prefill slot",
  held: "held back",
  "in flight": "in flight",
  budget: "for the next step",
};
const SHORTEST_S = 0.05;

export class Live {
  constructor() {
    this.tiles = Object.fromEntries(
      ["running", "waiting", "output", "kv", "prefix", "preempted"].map((name) => [name, new Tile(name)]),
    );
    this.timeline = new Timeline();
    this.before = null;
    this.welcome = byId("welcome-device"); // which is not on the page while there is a conversation
  }

  // mine: ids of the requests that this page has made.
  show(state, mine) {
    const { now, totals, engine } = state;
    setText(byId("uptime"), `up ${duration(state.uptime_s)}${state.num_restarts ? `, engine restarted ${state.num_restarts} times` : ""}`);
    if (now && totals && engine) this.numbers(now, totals, engine, state);
    this.timeline.show(state.live, state.recent, mine);
    latency(state.latency);
    requests(state.live, state.now, mine);
    if (engine) {
      setText(this.welcome, engine.device);
      engineCard(engine);
    }
    if (state.platforms) platforms(state.platforms, engine);
  }

  // The server cannot be reached: nothing is known.
  lose() {
    this.before = null;
  }

  numbers(now, totals, engine, state) {
    const { running, waiting, output, kv, prefix, preempted } = this.tiles;
    const rates = this.rates(totals);
    running.show(count(now.num_running), `of ${count(engine.max_num_seqs)} seats${state.is_paused ? ", paused" : ""}`, now.num_running);
    const why = Object.entries(now.waiting_by_reason).map(([reason, n]) => `${count(n)} ${REASONS[reason] ?? reason}`);
    if (now.num_swapped) why.push(`${count(now.num_swapped)} swapped out`);
    waiting.show(count(now.num_waiting), why.join(", ") || "nobody waits", now.num_waiting);
    output.show(rates ? short(rates.output) : "–", rates ? `${short(rates.prompt)} prompt tokens/s` : "", rates?.output ?? 0);
    const used = state.num_used_blocks[0];
    kv.show(percent(now.kv_usage), `${count(used)} of ${count(engine.num_blocks[0])} blocks`, now.kv_usage, 1);
    kv.element.dataset.level = now.kv_usage > 0.95 ? "high" : "";
    const share = totals.prefix_cache_queries ? totals.prefix_cache_hits / totals.prefix_cache_queries : 0;
    const cached = `${short(totals.prefix_cache_hits)} of ${short(totals.prefix_cache_queries)} tokens`;
    prefix.show(percent(share), engine.enable_prefix_caching ? cached : "the cache is off", rates?.hits ?? 0, 1);
    const lost = `${short(totals.num_preempted_tokens)} tokens lost, ${short(totals.num_swapped_out_blocks)} blocks swapped`;
    preempted.show(count(totals.num_preemptions), totals.num_preemptions ? lost : "none so far", rates?.preemptions ?? 0);
  }

  rates(totals) {
    const at = performance.now() / 1000;
    const before = this.before;
    this.before = { at, totals };
    if (!before || at - before.at < SHORTEST_S || totals.num_steps < before.totals.num_steps) return null;
    const rise = (name) => totals[name] - before.totals[name];
    const took = at - before.at;
    return {
      output: rise("num_decode_tokens") / took,
      prompt: rise("num_prefill_tokens") / took,
      preemptions: rise("num_preemptions"),
      hits: rise("prefix_cache_queries") ? rise("prefix_cache_hits") / rise("prefix_cache_queries") : 0,
    };
  }
}

class Tile {
  constructor(name) {
    this.element = byId(`tile-${name}`);
    this.value = this.element.querySelector(".value");
    this.sub = this.element.querySelector(".sub");
    this.spark = new Spark(this.element);
  }

  show(value, sub, point, top) {
    setText(this.value, value);
    setText(this.sub, sub);
    this.spark.push(point, top);
  }
}

function latency(found) {
  setText(byId("latency-note"), found.num_requests ? `last ${count(found.num_requests)} requests` : "no request yet");
  for (const row of byId("latency").querySelectorAll("tbody tr")) {
    const values = found[row.dataset.of];
    row.querySelectorAll("td").forEach((cell, index) => {
      setText(cell, values ? seconds(values[["p50", "p95", "p99"][index]]) : "–");
    });
  }
}

const phase = (one) => {
  if (one.status !== "running") return one.status === "waiting" ? "queue" : "swapped";
  return one.first_token === null ? "prefill" : "decode";
};

function stateOf(one) {
  const name = { queue: "waiting", swapped: one.status, prefill: "prefill", decode: "decode" }[phase(one)];
  const reason = one.waits_for ? ` ${REASONS[one.waits_for] ?? one.waits_for}` : "";
  const again = one.preemptions ? ` ↺${one.preemptions}` : "";
  return make("td", {}, make("span", { className: "dot", "data-phase": phase(one) }), `${name}${reason}${again}`);
}

function requests(live, now, mine) {
  const body = byId("requests").querySelector("tbody");
  body.replaceChildren(
    ...live.slice(0, 40).map((one) => {
      const id = make("td", { className: "id", text: one.id, title: one.http_id ?? one.id });
      if (mine.has(one.http_id)) id.append(make("span", { className: "tenant", text: "yours" }));
      if (one.tenant) id.append(make("span", { className: "tenant", text: one.tenant }));
      const prompt = one.cached_tokens ? `${count(one.prompt_tokens)} (${count(one.cached_tokens)} cached)` : count(one.prompt_tokens);
      return make("tr", {}, id, stateOf(one), make("td", { text: prompt }),
        make("td", { text: `${count(one.output_tokens)} of ${count(one.max_tokens - one.prompt_tokens)}` }),
        make("td", { text: count(one.blocks) }), make("td", { text: seconds(one.arrived) }));
    }),
  );
  if (!live.length) body.append(make("tr", { className: "none" }, make("td", { colspan: 6, text: "No request is being served." })));
  const total = now ? now.num_running + now.num_waiting + now.num_swapped : 0;
  setText(byId("requests-note"), total > 40 ? `the first 40 of ${count(total)}` : `${count(total)} now`);
}

function engineCard(engine) {
  setText(byId("engine-note"), `${engine.platform}, ${engine.dtype}`);
  const parts = [
    ["weights", engine.weights_bytes],
    ["activations", engine.activations_bytes],
    ["KV pool", engine.kv_pool_bytes],
  ];
  const total = parts.reduce((sum, [, size]) => sum + size, 0) || 1;
  const ledger = byId("ledger");
  if (!ledger.childElementCount) {
    ledger.append(...parts.map(([name]) => make("span", { "data-part": name })));
  }
  parts.forEach(([, size], index) => {
    ledger.children[index].style.flexGrow = Math.max(size / total, size ? 0.01 : 0);
  });
  ledger.setAttribute("aria-label", `Memory: ${parts.map(([name, size]) => `${name} ${bytes(size)}`).join(", ")}`);
  facts([
    ["Device", engine.device],
    ...parts.map(([name, size]) => [name[0].toUpperCase() + name.slice(1), size ? bytes(size) : "not measured", name]),
    ["Blocks", `${engine.num_blocks.map(count).join(" + ")} of ${count(engine.block_size)} tokens`],
    ["Context", `${count(engine.max_model_len)} tokens`],
    ["Step", `up to ${count(engine.max_num_batched_tokens)} tokens, ${engine.policy}`],
  ]);
}

function facts(rows) {
  byId("facts").replaceChildren(
    ...rows.flatMap(([name, value, part]) => {
      const term = make("dt", { text: name });
      if (part) term.dataset.part = part;
      return [term, make("dd", { text: value })];
    }),
  );
}

function platforms(reports, engine) {
  const usable = ({ priority }) => (priority > 0 ? "yes" : priority < 0 ? "if named" : "no");
  byId("platforms").querySelector("tbody").replaceChildren(
    ...reports.map((one) => {
      const name = make("td", { text: one.name });
      const isUsed = engine && one.name === engine.platform;
      if (isUsed) name.append(make("span", { className: "tenant", text: "in use" }));
      return make("tr", isUsed ? { className: "used" } : {}, name, make("td", { text: usable(one) }),
        make("td", { text: count(one.device_count) }), make("td", { className: "why", text: one.reason }));
    }),
  );
}
