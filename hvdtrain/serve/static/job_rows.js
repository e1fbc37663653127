// A row of the table of jobs, updated in place to keep selection and focus.
import { now } from "./api.js";
import { h, setText } from "./dom.js";
import { NONE, ago, count, date, number, percent, span } from "./format.js";
import { jobLink } from "./router.js";
import { Sparkline } from "./sparkline.js";
import { setBadge } from "./status.js";
import { joinWords, shortProgram } from "./words.js";

export const COLUMNS = [
  ["state", "State"],
  ["name", "Job"],
  ["ranks", "Ranks"],
  ["progress", "Step"],
  ["loss", "Loss"],
  ["goodput", "Goodput"],
  ["began", "Submitted"],
  ["took", "Duration"],
  ["attempts", "Attempts"],
];
const NUMERIC = ["ranks", "progress", "loss", "goodput", "took", "attempts"];

export function cellClass(column) {
  return NUMERIC.includes(column) ? `${column} numeric` : column;
}

export class JobRow {
  constructor(name, selected, select) {
    this.box = h("input", {
      type: "checkbox",
      "aria-label": `Select ${name}`,
      onchange: () => select(this.box.checked),
    });
    this.box.checked = selected;
    this.program = h("span", { class: "program" });
    this.time = h("time");
    this.curve = new Sparkline();
    this.loss = h("span");
    this.took = h("span");
    this.left = h("span", { class: "second" });
    this.step = h("span");
    this.epoch = h("span", { class: "second" });
    this.cells = Object.fromEntries(
      COLUMNS.map(([column, label]) => [
        column,
        h(column === "name" ? "th" : "td", {
          class: cellClass(column),
          "data-label": label,
          scope: column === "name" && "row",
        }),
      ]),
    );
    this.cells.name.append(h("a", { href: jobLink(name) }, name), this.program);
    this.cells.began.append(this.time);
    this.cells.loss.append(this.curve.element, this.loss);
    this.cells.took.append(this.took, this.left);
    this.cells.progress.append(this.step, this.epoch);
    this.cells.goodput.title = "The fraction of the time spent in steps that were kept";
    this.element = h(
      "tr",
      {},
      h("td", { class: "pick" }, h("label", { class: "hit" }, this.box)),
      Object.values(this.cells),
    );
  }

  update(job) {
    this.job = job;
    const { cells } = this;
    setBadge(cells.state, job.status);
    setText(this.program, shortProgram(job.program));
    this.program.title = joinWords(job.program);
    setText(cells.ranks, job.ranks ? count(job.ranks) : NONE);
    const of = job.total_steps === null ? "" : ` of ${count(job.total_steps)}`;
    setText(this.step, job.step === null ? NONE : `${count(job.step)}${of}`);
    setText(this.epoch, job.epoch === null ? "" : `epoch ${job.epoch + 1}`);
    this.#drawCurve(job);
    setText(cells.goodput, job.goodput === null ? NONE : percent(job.goodput));
    setText(cells.attempts, job.attempt ? String(job.attempt) : NONE);
    this.time.dateTime = new Date(job.created_s * 1000).toISOString();
    this.time.title = date(job.created_s);
    this.tick();
  }

  #drawCurve({ metrics, curve }) {
    const { values } = curve;
    const isLoss = curve.of === "loss";
    const last = isLoss ? metrics.loss : values.at(-1);
    const what = isLoss ? "Loss" : "Samples per second";
    this.cells.loss.title = values.length ? what : "";
    this.curve.update(values, `${what} from ${number(values[0])} to ${number(values.at(-1))}`);
    setText(this.loss, last === undefined ? NONE : `${number(last)}${isLoss ? "" : "/s"}`);
  }

  // Updates the times.
  tick() {
    const { created_s, ended_s, is_over, left_s } = this.job;
    setText(this.time, created_s ? ago(now() - created_s) : NONE);
    const end_s = ended_s ?? (is_over ? null : now());
    setText(this.took, end_s === null || !created_s ? NONE : span(end_s - created_s));
    setText(this.left, left_s === null ? "" : `${span(left_s)} left`);
  }
}
