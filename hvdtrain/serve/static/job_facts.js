// The progress of a job in numbers, and its specification.
import { now } from "./api.js";
import { h, setText, setVisible } from "./dom.js";
import { NONE, count, date, number, percent, seconds, span } from "./format.js";
import { summaryOf } from "./shares.js";
import { joinWords } from "./words.js";

export class Tiles {
  constructor() {
    this.values = {};
    const tiles = ["Step", "Epoch", "Loss", "Samples/s", "Step time", "Ranks", "Duration", "Remaining", "Goodput"].map((name) => {
      this.values[name] = h("dd");
      return h("div", { class: "tile" }, h("dt", {}, name), this.values[name]);
    });
    this.element = h("dl", { class: "tiles" }, tiles);
  }

  update(job, series) {
    const { last } = series;
    const end_s = job.ended_s ?? (job.is_over ? null : now());
    const rate = last.rate ?? series.rows.findLast((row) => row.rate !== null)?.rate;
    const { kept } = summaryOf(job.events) ?? {};
    const texts = {
      Step: count(job.step),
      Epoch: job.epoch === null ? NONE : String(job.epoch + 1),
      Loss: number(last.loss),
      "Samples/s": number(rate),
      "Step time": seconds(last.own_s),
      Ranks: job.ranks ? count(job.ranks) : NONE,
      Duration: end_s === null || !job.created_s ? NONE : span(end_s - job.created_s),
      Remaining: job.left_s === null ? NONE : span(job.left_s),
      Goodput: kept === undefined ? NONE : percent(kept),
    };
    for (const [name, text] of Object.entries(texts)) setText(this.values[name], text);
    // Show the remaining time of a running job, or the goodput of a job that has ended.
    setVisible(this.values.Remaining.parentElement, !job.is_over);
    setVisible(this.values.Goodput.parentElement, job.is_over);
  }
}

// A list of names and texts. The texts are changed in place.
class FactList {
  constructor(heading) {
    this.list = h("dl", { class: "facts" });
    this.element = h("section", { class: "card" }, h("h2", {}, heading), this.list);
    this.values = new Map();
  }

  set(name, text, isCode = false) {
    if (!this.values.has(name)) {
      const value = isCode ? h("code") : h("span");
      this.values.set(name, value);
      this.append(name, value);
    }
    setText(this.values.get(name), text);
  }

  append(name, value) {
    this.list.append(h("div", {}, h("dt", {}, name), h("dd", {}, value)));
  }
}

export class Facts extends FactList {
  constructor() {
    super("Specification");
  }

  update(job) {
    this.set("Program", joinWords(job.program) || NONE, true);
    this.set("Options", joinWords(job.options) || "none", true);
    this.set("Working directory", job.folder || NONE, true);
    if (job.folder) this.set("TensorBoard", joinWords(["tensorboard", "--logdir", job.folder]), true);
    this.set("Attempts", String(job.attempt));
    this.set("Newest checkpoint", job.saved === null ? "none" : `step ${count(job.saved)}`);
    this.set("Submitted", date(job.created_s));
    this.set("Ended", job.ended_s === null ? NONE : date(job.ended_s));
    this.set("Exit code", job.code === null ? NONE : String(job.code));
    if (job.slurm_job) this.set("Slurm job", job.slurm_job);
    this.set("Job folder", job.path, true);
  }
}

// The software and the hosts of a job.
export class Environment extends FactList {
  constructor({ environment }) {
    super("Environment");
    for (const [name, version] of Object.entries(environment.versions)) this.set(name, version);
    const variables = Object.entries(environment.variables);
    this.set("Variables", variables.map(([name, value]) => `${name}=${value}`).join("\n") || "none", true);
    this.places = h("ul");
    this.append(
      "Ranks on hosts",
      h("div", { class: "places", tabindex: 0, role: "region", "aria-label": "Ranks on hosts" }, this.places),
    );
  }

  update(job) {
    if (job.mpi) this.set("MPI", job.mpi);
    const lines = placesOf(job.hosts);
    const text = lines.join("\n");
    if (text === this.shown) return;
    this.shown = text;
    this.places.replaceChildren(...(lines.length ? lines : [NONE]).map((line) => h("li", {}, line)));
  }
}

// Ranks fill the hosts in order.
function placesOf(hosts) {
  let next = 0;
  return Object.entries(hosts).map(([host, ranks]) => {
    const first = next;
    next += ranks;
    return ranks === 1 ? `${host}: rank ${first}` : `${host}: ranks ${first} to ${next - 1}`;
  });
}
