// The curves of one job, and its slowest rank.
import { Curves } from "./charts.js";
import { h, setText, setVisible } from "./dom.js";
import { isNumber, seconds } from "./format.js";

const KINDS = [
  ["loss", { title: "Loss" }],
  ["rate", { title: "Samples per second", fromZero: true }],
  ["own_s", { title: "Step time of the median rank", format: seconds, fromZero: true }],
];

export class JobCharts {
  constructor() {
    this.slow = h("p", { class: "slow", role: "status", hidden: true });
    this.curves = new Curves("job", KINDS, { note: this.slow });
    this.element = this.curves.element;
  }

  update(series, job) {
    // If the job ended before its first step, there is nothing to draw.
    setVisible(this.element, series.rows.length > 0 || !job.is_over);
    this.curves.update((over, name, format) => {
      const columns = series.columns(over, name);
      const ys = columns[1].filter(isNumber);
      if (!ys.length) return [columns, {}];
      const [first, last, least, most] = [ys[0], ys.at(-1), lowest(ys), -lowest(ys.map((y) => -y))].map(format);
      return [columns, { value: last, words: `From ${first} to ${last}, minimum ${least}, maximum ${most}.` }];
    });
    const words = slowestRank(series.last, job);
    setVisible(this.slow, words !== "");
    if (words) setText(this.slow, words);
  }

  destroy() {
    this.curves.destroy();
  }
}

function slowestRank({ held_by, slow, slow_factor, slow_host }, job) {
  if (held_by?.length && !job.is_over) return `No progress: the other ranks wait for rank${held_by.length > 1 ? "s" : ""} ${held_by.slice(0, 8).join(", ")}${held_by.length > 8 ? ", ..." : ""}.`;
  if (slow === undefined || slow === null) return "";
  const where = slow_host ? ` on ${slow_host}` : "";
  return `Rank ${slow}${where} ${job.is_over ? "was" : "is"} the slowest: ${slow_factor} times the usual step time.`;
}

const lowest = (numbers) => numbers.reduce((a, b) => Math.min(a, b), Infinity);
