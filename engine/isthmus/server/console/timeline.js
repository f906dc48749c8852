// Requests as bars of a minute that glides to the left: grey in the queue, then prefill, then decode.

import { byId, draw } from "./dom.js";
import { count, seconds } from "./format.js";

const WINDOW_S = 60;
const MAX_ROWS = 16;
const GAP_S = 0.4;
const ROW = 20;
const AXIS = 20;
const still = matchMedia("(prefers-reduced-motion: reduce)");

export class Timeline {
  constructor() {
    this.box = byId("timeline");
    this.svg = this.box.querySelector("svg");
    this.bars = [];
    this.rows = new Map();
    setInterval(() => {
      if (!still.matches && !document.hidden && this.bars.length) this.paint();
    }, 100);
    new ResizeObserver(() => this.paint()).observe(this.box);
  }

  // live, recent: of the server's state.  mine: ids of the requests that this page has made.
  show(live, recent, mine) {
    const now = performance.now() / 1000;
    const known = new Set(live.map((one) => one.id));
    const all = [...recent.filter((one) => !known.has(one.id) && one.ended < WINDOW_S), ...live];
    this.bars = all.map((one) => bar(one, now, mine)).sort((a, b) => a.arrived - b.arrived);
    this.place();
    this.paint();
  }

  // A request keeps its row while it is in sight, and a new one takes the first that is free when it comes.
  place() {
    const ids = new Set(this.bars.map((one) => one.id));
    for (const id of this.rows.keys()) if (!ids.has(id)) this.rows.delete(id);
    const until = Array(MAX_ROWS).fill(-Infinity);
    for (const one of this.bars) {
      const row = this.rows.get(one.id);
      if (row !== undefined) until[row] = Math.max(until[row], one.ended ?? Infinity);
    }
    for (const one of this.bars) {
      if (this.rows.has(one.id)) continue;
      const free = until.findIndex((end) => end + GAP_S < one.arrived);
      if (free < 0) continue;
      this.rows.set(one.id, free);
      until[free] = one.ended ?? Infinity;
    }
    this.bars = this.bars.filter((one) => this.rows.has(one.id));
  }

  paint() {
    const now = performance.now() / 1000;
    const width = this.box.clientWidth;
    const visible = this.bars.filter((one) => (one.ended ?? now) > now - WINDOW_S);
    const rows = Math.max(4, ...visible.map((one) => this.rows.get(one.id) + 1));
    const height = rows * ROW + AXIS;
    const svg = this.svg;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("height", height);
    svg.setAttribute("aria-label", `Timeline of the last minute: ${visible.length} requests`);
    this.box.classList.toggle("empty", !visible.length);
    const x = (moment) => Math.max(0, width * (1 - (now - moment) / WINDOW_S));
    svg.replaceChildren(...grid(svg, width, height), ...visible.map((one) => this.row(one, x, now)));
  }

  row(one, x, now) {
    const group = draw(this.svg, "g", { class: one.classes, "data-id": one.id });
    const y = this.rows.get(one.id) * ROW + 4;
    for (const [phase, from, to] of phases(one, now)) {
      if (x(to) === 0) continue; // out of sight
      const width = Math.max(x(to) - x(from), 1.5);
      group.append(draw(this.svg, "rect", { x: x(from), y, width, height: ROW - 8, rx: 2.5, "data-phase": phase }));
    }
    const end = x(one.ended ?? now);
    if (one.isMine) {
      const [left, width] = [x(one.arrived), x(one.ended ?? now) - x(one.arrived)];
      group.append(draw(this.svg, "rect", { x: left - 2, y: y - 2, width: width + 4, height: ROW - 4, rx: 4, class: "mine" }));
    }
    if (one.finish === "abort" || one.finish === "error") {
      group.append(draw(this.svg, "rect", { x: end - 1.5, y: y - 2, width: 3, height: ROW - 4, rx: 1.5, "data-phase": "cut" }));
    }
    if (one.preemptions) {
      const mark = draw(this.svg, "text", { x: Math.max(end - 6, 0), y: y + 9, "text-anchor": "end", class: "mark" });
      mark.textContent = `↺${one.preemptions}`;
      group.append(mark);
    }
    const title = draw(this.svg, "title");
    title.textContent = story(one, now);
    group.append(title);
    return group;
  }
}

function bar(one, now, mine) {
  const at = (ago) => (ago === null || ago === undefined ? null : now - ago);
  return {
    ...one,
    arrived: at(one.arrived),
    admitted: at(one.admitted),
    first: at(one.first_token),
    ended: at(one.ended),
    finish: one.finish ?? null,
    isMine: mine.has(one.http_id),
    classes: one.ended === undefined ? "request live" : "request",
  };
}

function phases({ arrived, admitted, first, ended }, now) {
  const end = ended ?? now;
  const found = [["queue", arrived, admitted ?? end]];
  if (admitted !== null) found.push(["prefill", admitted, first ?? end]);
  if (first !== null) found.push(["decode", first, end]);
  return found;
}

function story(one, now) {
  const times = phases(one, now).map(([phase, from, to]) => `${phase} ${seconds(to - from)}`);
  const tokens = `${count(one.prompt_tokens)} → ${count(one.output_tokens)} tokens`;
  return [one.id, ...times, tokens, one.finish ?? one.status].join(" · ");
}

function grid(svg, width, height) {
  const marks = width < 420 ? [0, 20, 40, 60] : [0, 10, 20, 30, 40, 50, 60];
  return marks.flatMap((ago) => {
    const x = width * (1 - ago / WINDOW_S);
    const line = draw(svg, "line", { x1: x, x2: x, y1: 0, y2: height - AXIS + 2, class: "grid" });
    const anchor = ago === 0 ? "end" : ago === WINDOW_S ? "start" : "middle";
    const label = draw(svg, "text", { x, y: height - 4, "text-anchor": anchor, class: "axis" });
    label.textContent = ago === 0 ? "now" : `−${ago} s`;
    return [line, label];
  });
}
