// A row of the table of jobs, which is changed in place: what is selected or focused stays so.
import { now } from "./api.js";
import { h, setText } from "./dom.js";
import { NONE, ago, count, date, number, span } from "./format.js";
import { jobLink } from "./router.js";
import { setBadge } from "./status.js";
import { joinWords, shortProgram } from "./words.js";

export const COLUMNS = [
  ["state", "State"],
  ["name", "Job"],
  ["ranks", "Ranks"],
  ["progress", "Progress"],
  ["loss", "Loss"],
  ["began", "Began"],
  ["took", "Took"],
  ["attempts", "Attempts"],
];
const NUMERIC = ["ranks", "progress", "loss", "took", "attempts"];

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
    setText(
      cells.progress,
      job.step === null
        ? NONE
        : `step ${count(job.step)}${job.epoch === null ? "" : ` · epoch ${job.epoch + 1}`}`,
    );
    setText(cells.loss, number(job.metrics.loss));
    setText(cells.attempts, job.attempt ? String(job.attempt) : NONE);
    this.time.dateTime = new Date(job.created_s * 1000).toISOString();
    this.time.title = date(job.created_s);
    this.tick();
  }

  // What changes by itself as time goes on.
  tick() {
    const { created_s, ended_s, is_over } = this.job;
    setText(this.time, created_s ? ago(now() - created_s) : NONE);
    const end_s = ended_s ?? (is_over ? null : now());
    setText(this.cells.took, end_s === null || !created_s ? NONE : span(end_s - created_s));
  }
}
