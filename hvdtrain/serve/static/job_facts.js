// How far a job is, in numbers, and what it was asked to do.
import { now } from "./api.js";
import { h, setText } from "./dom.js";
import { NONE, count, date, number, seconds, span } from "./format.js";
import { joinWords } from "./words.js";

const HOSTS = 12;

export class Tiles {
  constructor() {
    this.values = {};
    const tiles = ["Step", "Epoch", "Loss", "Samples/s", "Step time", "Ranks", "Took"].map((name) => {
      this.values[name] = h("dd");
      return h("div", { class: "tile" }, h("dt", {}, name), this.values[name]);
    });
    this.element = h("dl", { class: "tiles" }, tiles);
  }

  update(job, series) {
    const { last } = series;
    const end_s = job.ended_s ?? (job.is_over ? null : now());
    const rate = last.rate ?? series.rows.findLast((row) => row.rate !== null)?.rate;
    const texts = {
      Step: count(job.step),
      Epoch: job.epoch === null ? NONE : String(job.epoch + 1),
      Loss: number(last.loss),
      "Samples/s": number(rate),
      "Step time": seconds(last.own_s),
      Ranks: job.ranks ? count(job.ranks) : NONE,
      Took: end_s === null || !job.created_s ? NONE : span(end_s - job.created_s),
    };
    for (const [name, text] of Object.entries(texts)) setText(this.values[name], text);
  }
}

export class Facts {
  constructor() {
    this.list = h("dl", { class: "facts" });
    this.element = h("section", { class: "card" }, h("h2", {}, "What was asked for"), this.list);
    this.values = new Map();
  }

  update(job) {
    this.#set("Program", joinWords(job.program) || NONE, true);
    this.#set("Options", joinWords(job.options) || "none", true);
    this.#set("Working directory", job.folder || NONE, true);
    this.#set("Hosts", hosts(job.hosts));
    this.#set("Attempts", String(job.attempt));
    this.#set("Newest checkpoint", job.saved === null ? "none" : `step ${count(job.saved)}`);
    this.#set("Began", date(job.created_s));
    this.#set("Ended", job.ended_s === null ? NONE : date(job.ended_s));
    this.#set("Exit code", job.code === null ? NONE : String(job.code));
    if (job.slurm_job) this.#set("Slurm job", job.slurm_job);
    this.#set("Job's folder", job.path, true);
  }

  #set(name, text, isCode = false) {
    if (!this.values.has(name)) {
      const value = isCode ? h("code") : h("span");
      this.values.set(name, value);
      this.list.append(h("div", {}, h("dt", {}, name), h("dd", {}, value)));
    }
    setText(this.values.get(name), text);
  }
}

function hosts(ranks) {
  const all = Object.entries(ranks);
  if (!all.length) return NONE;
  const words = all.slice(0, HOSTS).map(([host, number]) => `${host}: ${number}`);
  if (all.length > HOSTS) words.push(`${all.length - HOSTS} more`);
  return words.join(", ");
}
