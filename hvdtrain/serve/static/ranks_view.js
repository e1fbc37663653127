// The ranks of a job: their step times over time, and their current values.
import { get, jobPath } from "./api.js";
import { colour, h, setText, setVisible } from "./dom.js";
import { NONE, bytes, clock, count, isNumber, number, seconds } from "./format.js";

const ROWS = 240;
const EVERY_MS = 10_000;
const SHOWN = 16;
const HEIGHT = 260;
// Step times relative to the median, and the colour for this time or more.
const HEAT = [[2, "--red"], [1.3, "--amber-line"], [1.1, "--heat-2"], [0, "--heat-1"]];
const COLUMNS = [
  ["Step", "step", count], ["Phase", "phase", (word) => word || NONE],
  ["Own step time", "own_s", seconds], ["Waited for ranks", "waited_s", seconds],
  ["Waited for input", "input_s", seconds], ["Memory", "rss_mb", mebibytes], ["Cores", "cpu", number],
  ["GPU %", "gpu", number], ["GPU memory", "gpu_mb", mebibytes],
];
// Columns that are hidden if no rank reports them.
const OPTIONAL = ["input_s", "gpu", "gpu_mb"];

function mebibytes(mb) {
  return isNumber(mb) ? bytes(mb * 2 ** 20) : NONE;
}

export class RanksView {
  constructor(name) {
    this.name = name;
    this.all = false;
    this.canvas = h("canvas", { role: "img" });
    this.times = h("p", { class: "heat-times hint" }, h("span"), h("span"));
    this.head = h("thead");
    this.body = h("tbody");
    this.more = h("button", { type: "button", class: "plain", onclick: () => this.#toggle() });
    this.element = h(
      "section",
      { class: "card ranks", "aria-labelledby": "ranks", hidden: true },
      h("h2", { id: "ranks" }, "Ranks"),
      h("div", { class: "heat" }, this.canvas, this.times),
      h("p", { class: "heat-legend hint" }, "Own step time:", HEAT.toReversed().map(([from, name]) => h("span", {}, h("i", { class: "dot", "data-heat": name.slice(2) }), from ? `${from} times the median` : "as long as the others"))),
      h("div", { class: "scroll" }, h("table", {}, this.head, this.body)),
      this.more,
    );
  }

  async start() {
    await this.#load();
    this.timer = setInterval(() => !document.hidden && this.#load().catch(() => {}), EVERY_MS);
  }

  destroy() {
    clearInterval(this.timer);
  }

  async #load() {
    const { rows, now } = await get(jobPath(this.name, "/ranks"), { count: ROWS });
    this.rows = rows;
    this.now = now;
    setVisible(this.element, rows.length > 0);
    if (rows.length) this.#draw();
  }

  #toggle() {
    this.all = !this.all;
    this.#draw();
  }

  #draw() {
    const last = this.now;
    const ranks = last.step.map((_, rank) => rank);
    // If there are too many ranks, show only the slowest ones.
    const own = (rank) => last.own_s[rank] ?? 0;
    const listed = this.all || ranks.length <= SHOWN ? ranks : ranks.toSorted((a, b) => own(b) - own(a)).slice(0, SHOWN);
    const columns = COLUMNS.filter(([, field]) => last[field] || !OPTIONAL.includes(field));
    this.head.replaceChildren(h("tr", {}, ["Rank", ...columns.map(([label]) => label)].map((label) => h("th", { scope: "col", class: label === "Phase" ? "" : "numeric" }, label))));
    this.body.replaceChildren(
      ...listed.map((rank) =>
        h("tr", {}, h("th", { scope: "row", class: "numeric" }, String(rank)), columns.map(([, field, format]) => h("td", { class: field === "phase" ? "" : "numeric" }, format(last[field]?.[rank])))),
      ),
    );
    setVisible(this.more, ranks.length > SHOWN);
    setText(this.more, this.all ? `Only the ${SHOWN} slowest` : `All ${count(ranks.length)} ranks`);
    this.#paint(ranks.length);
  }

  #paint(ranks) {
    const colours = HEAT.map(([from, name]) => [from, colour(name)]);
    const height = Math.max(1, Math.min(22, Math.floor(HEIGHT / ranks)));
    const width = Math.max(2, Math.min(24, Math.floor(960 / this.rows.length)));
    this.canvas.width = width * this.rows.length;
    this.canvas.height = height * ranks;
    this.canvas.style.height = `${height * ranks}px`;
    const pen = this.canvas.getContext("2d");
    let slowest = [0, 0];
    this.rows.forEach((row, at) => {
      const own_s = row.own_s ?? [];
      const known = own_s.filter(isNumber).sort((a, b) => a - b);
      if (!known.length) return;
      const median = known[(known.length - 1) >> 1] || 1e-6;
      own_s.forEach((value, rank) => {
        if (!isNumber(value)) return;
        const factor = value / median;
        if (at === this.rows.length - 1 && factor > slowest[0]) slowest = [factor, rank];
        pen.fillStyle = colours.find(([from]) => factor >= from)[1];
        pen.fillRect(at * width, rank * height, width - (width > 4), height - (height > 4));
      });
    });
    const words = slowest[0] ? ` Slowest now: rank ${slowest[1]}, ${slowest[0].toFixed(1)} times the median.` : "";
    this.canvas.setAttribute("aria-label", `Step time of each of ${count(ranks)} ranks over time.${words}`);
    setText(this.times.firstChild, clock(this.rows[0].time));
    setText(this.times.lastChild, clock(this.rows.at(-1).time));
  }
}
