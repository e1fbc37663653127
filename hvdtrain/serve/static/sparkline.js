// A small curve that fits into a line of text.
import { svg } from "./dom.js";

const WIDTH = 64;
const HEIGHT = 20;
const EDGE = 2;

export class Sparkline {
  constructor() {
    this.line = svg("polyline", {});
    this.element = svg(
      "svg",
      { class: "sparkline", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, width: WIDTH, height: HEIGHT, role: "img" },
      this.line,
    );
  }

  // words: the description for screen readers.
  update(values, words) {
    const least = Math.min(...values);
    const range = Math.max(...values) - least || 1;
    const points = values.map((value, at) => {
      const x = EDGE + (at / Math.max(1, values.length - 1)) * (WIDTH - 2 * EDGE);
      const y = HEIGHT - EDGE - ((value - least) / range) * (HEIGHT - 2 * EDGE);
      return `${x.toFixed(1)},${y.toFixed(1)}`;
    });
    const text = points.join(" ");
    if (this.line.getAttribute("points") !== text) this.line.setAttribute("points", text);
    this.element.setAttribute("aria-label", words);
    this.element.toggleAttribute("hidden", values.length < 2);
  }
}
