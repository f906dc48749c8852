// A line of a number's last minute.

import { byId } from "./dom.js";

const LENGTH = 60;

export class Spark {
  constructor(tile) {
    this.values = [];
    this.svg = byId("spark").content.firstElementChild.cloneNode(true);
    tile.append(this.svg);
  }

  push(value, top = 0) {
    this.values.push(value);
    if (this.values.length > LENGTH) this.values.shift();
    const highest = Math.max(top, ...this.values) || 1;
    const step = 100 / (LENGTH - 1);
    const from = 100 - (this.values.length - 1) * step;
    const points = this.values.map((v, i) => `${(from + i * step).toFixed(1)} ${(27 - (v / highest) * 25).toFixed(1)}`);
    const line = `M${points.join("L")}`;
    this.svg.querySelector(".line").setAttribute("d", line);
    this.svg.querySelector(".area").setAttribute("d", `${line}L100 28L${from.toFixed(1)} 28Z`);
  }
}
