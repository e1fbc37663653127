// The curves of one job, and for whom its ranks wait.
import { Chart } from "./charts.js";
import { h, setText, setVisible } from "./dom.js";
import { isNumber, number, seconds } from "./format.js";

export class JobCharts {
  constructor() {
    this.over = "step";
    this.charts = [
      ["loss", new Chart({ title: "Loss", key: "job" }), number],
      ["rate", new Chart({ title: "Samples per second", key: "job", fromZero: true }), number],
      [
        "own_s",
        new Chart({ title: "Step time of the median rank", format: seconds, key: "job", fromZero: true }),
        seconds,
      ],
    ];
    this.buttons = ["step", "time"].map((over) =>
      h(
        "button",
        { type: "button", "aria-pressed": String(over === this.over), onclick: () => this.#choose(over) },
        over === "step" ? "steps" : "time",
      ),
    );
    this.reset = h(
      "button",
      { type: "button", class: "plain", onclick: () => this.charts.forEach(([, chart]) => chart.reset()) },
      "Show all",
    );
    this.slow = h("p", { class: "slow", role: "status", hidden: true });
    this.element = h(
      "section",
      { class: "curves", "aria-labelledby": "curves" },
      h(
        "div",
        { class: "section" },
        h("h2", { id: "curves" }, "Curves"),
        h("div", { class: "switch", role: "group", "aria-label": "Curves over" }, this.buttons),
        this.reset,
        h("span", { class: "hint" }, "Drag to zoom in, double click to zoom out."),
      ),
      this.slow,
      h(
        "div",
        { class: "charts" },
        this.charts.map(([, chart]) => chart.element),
      ),
    );
  }

  update(series, job) {
    this.series = series;
    this.job = job;
    // Of a job that ended before its first step there is nothing to come.
    setVisible(this.element, series.rows.length > 0 || !job.is_over);
    for (const [name, chart, format] of this.charts) {
      const columns = series.columns(this.over, name);
      const ys = columns[1].filter(isNumber);
      const words = ys.length
        ? `From ${format(ys[0])} to ${format(ys.at(-1))}, least ${format(least(ys))}, most ${format(-least(ys.map((y) => -y)))}.`
        : "";
      chart.set(columns, this.over, { value: ys.length ? format(ys.at(-1)) : "", words });
    }
    const words = whoHoldsUp(series.last, job);
    setVisible(this.slow, words !== "");
    if (words) setText(this.slow, words);
  }

  destroy() {
    this.charts.forEach(([, chart]) => chart.destroy());
  }

  #choose(over) {
    this.over = over;
    this.buttons.forEach((button, at) =>
      button.setAttribute("aria-pressed", String((at === 0) === (over === "step"))),
    );
    this.update(this.series, this.job);
  }
}

function whoHoldsUp({ held_by, slow, slow_factor, slow_host }, job) {
  if (held_by?.length && !job.is_over) return `No rank goes on: the others wait for rank ${held_by.slice(0, 8).join(", ")}${held_by.length > 8 ? ", ..." : ""}.`;
  if (slow === undefined || slow === null) return "";
  const where = slow_host ? ` on ${slow_host}` : "";
  return `Rank ${slow}${where} ${job.is_over ? "was" : "is"} the slowest: a step takes it ${slow_factor} times as long as the others, which wait for it.`;
}

const least = (numbers) => numbers.reduce((a, b) => Math.min(a, b), Infinity);
