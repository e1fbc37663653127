// Charts, drawn by uPlot in the colours of the page.
import { colour, h, setText, svg } from "./dom.js";
import { count, number, span } from "./format.js";
import uPlot from "./vendor/uPlot.esm.js";

const HEIGHT = 200;
const TIME_STEPS = [
  1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800,
];

export const curveColour = (at) => `--curve-${(at % 8) + 1}`;

// Dashes, so that curves can be distinguished without seeing their colours.
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3], [14, 4], [4, 2], [1, 4], [9, 3, 2, 3, 2, 3]];

// A sample of a curve for a legend.
export function swatch(at) {
  const line = svg("line", {
    x1: 0,
    x2: 26,
    y1: 4,
    y2: 4,
    "stroke-width": 2.5,
    "stroke-dasharray": DASHES[at % 8].join(" "),
  });
  line.style.stroke = `var(${curveColour(at)})`;
  return svg("svg", { class: "swatch", viewBox: "0 0 26 8", "aria-hidden": "true" }, line);
}

// A chart with one or more curves over steps or seconds.
//
// format: a function that formats a value. labels: the names of the curves; a single curve needs no
// name. key: charts with the same key zoom together. fromZero: whether the y axis starts at 0.
class Chart {
  constructor({ title, format = number, labels = [""], key = null, fromZero = false }) {
    this.labels = labels;
    this.format = format;
    this.title = title;
    this.key = key;
    this.fromZero = fromZero;
    this.over = "step";
    this.data = [[], ...labels.map(() => [])];
    this.value = h("span", { class: "value" });
    this.box = h("div", { class: "plot", role: "img", "aria-label": title });
    this.none = h("p", { class: "none" }, "No data");
    this.element = h(
      "figure",
      { class: "chart" },
      h("figcaption", {}, h("span", {}, title), this.value),
      this.box,
    );
    this.box.append(this.none);
    this.watcher = new ResizeObserver(() => this.plot?.setSize(this.#size()));
    this.watcher.observe(this.box);
    this.recolour = () => this.#build();
    addEventListener("themechange", this.recolour);
  }

  // Draws columns: x, then y for each curve.
  set(data, over, { value = "", words = "" } = {}) {
    const isNew = over !== this.over || !this.plot;
    // Keep the zoom.
    const zoomed = this.plot && this.#isZoomed();
    this.data = data;
    this.over = over;
    setText(this.value, value);
    this.box.setAttribute("aria-label", `${this.title}. ${words || "No data."}`);
    const some = data.slice(1).some((column) => column.some((y) => y !== null && y !== undefined));
    this.none.hidden = some;
    if (!some) this.#drop();
    else if (isNew) this.#build();
    else this.plot.setData(data, !zoomed);
    if (some && !isNew && zoomed) this.plot.redraw();
  }

  reset() {
    this.plot?.setData(this.data, true);
  }

  destroy() {
    removeEventListener("themechange", this.recolour);
    this.watcher.disconnect();
    this.#drop();
  }

  #isZoomed() {
    const xs = this.plot.data[0];
    const { min, max } = this.plot.scales.x;
    return min > xs[0] || max < xs[xs.length - 1];
  }

  #drop() {
    this.plot?.destroy();
    this.plot = null;
  }

  #size() {
    return { width: Math.max(120, Math.floor(this.box.clientWidth)), height: HEIGHT };
  }

  #build() {
    if (!this.data[0].length) return;
    this.#drop();
    const axis = {
      stroke: colour("--muted"),
      grid: { stroke: colour("--grid"), width: 1 },
      ticks: { show: false },
      font: "11px system-ui, sans-serif",
    };
    const byTime = this.over === "time";
    this.plot = new uPlot(
      {
        ...this.#size(),
        scales: {
          x: { time: false },
          y: this.fromZero ? { range: (_, least, most) => [0, most * 1.1 || 1] } : {},
        },
        axes: [
          {
            ...axis,
            size: 28,
            incrs: byTime ? TIME_STEPS : undefined,
            values: (_, xs) => xs.map((x) => (byTime ? span(x) : count(x))),
            space: byTime ? 70 : 60,
          },
          { ...axis, size: 58, values: (_, ys) => ys.map((y) => this.format(y)) },
        ],
        series: [
          { value: (_, x) => (x === null ? "" : byTime ? span(x) : `step ${count(x)}`) },
          ...this.labels.map((label, at) => this.#curve(label, at)),
        ],
        legend: { show: false },
        cursor: {
          y: false,
          points: { size: 7 },
          drag: { x: true, y: false },
          sync: this.key ? { key: this.key, setSeries: false } : undefined,
        },
        hooks: { setCursor: [(plot) => this.#point(plot)] },
      },
      this.data,
      this.box,
    );
    this.tip = h("div", { class: "tip", hidden: true });
    this.plot.over.append(this.tip);
  }

  #curve(label, at) {
    return {
      label,
      stroke: colour(curveColour(at)),
      dash: DASHES[at % 8],
      width: 1.75,
      points: { show: (plot) => plot.data[0].length === 1 },
    };
  }

  // Shows the values at the cursor.
  #point(plot) {
    const { idx, left } = plot.cursor;
    if (!this.tip) return;
    if (idx === null || idx === undefined || left < 0) {
      this.tip.hidden = true;
      return;
    }
    const x = plot.data[0][idx];
    const lines = this.labels
      .map((label, at) => [label, nearest(plot.data[at + 1], idx), at])
      .filter(([, y]) => y !== null);
    this.tip.replaceChildren(
      h("div", { class: "x" }, this.over === "time" ? span(x) : `step ${count(x)}`),
      ...lines.map(([label, y, at]) => h("div", {}, swatch(at), label && `${label}: `, this.format(y))),
    );
    this.tip.hidden = false;
    const right = left > plot.over.clientWidth / 2;
    this.tip.style.left = right ? "" : `${left + 12}px`;
    this.tip.style.right = right ? `${plot.over.clientWidth - left + 12}px` : "";
  }
}

// Curves of several jobs have different x values.
function nearest(column, at) {
  for (let off = 0; off < 50; off += 1) {
    const y = column[at - off] ?? column[at + off];
    if (y !== null && y !== undefined) return y;
  }
  return null;
}

export const join = (tables) => uPlot.join(tables);

// A section of charts over steps or seconds.
//
// kinds: for each chart, the name of its column and the options of Chart. note: an element above the
// charts.
export class Curves {
  constructor(key, kinds, { layout = "charts", note = null } = {}) {
    this.over = "step";
    this.charts = kinds.map(([name, options]) => [name, new Chart({ key, ...options })]);
    this.buttons = ["step", "time"].map((over) =>
      h("button", { type: "button", onclick: () => this.#choose(over) }, over === "step" ? "steps" : "time"),
    );
    const reset = () => this.charts.forEach(([, chart]) => chart.reset());
    this.element = h(
      "section",
      { class: "curves", "aria-labelledby": "curves" },
      h(
        "div",
        { class: "section" },
        h("h2", { id: "curves" }, "Curves"),
        h("div", { class: "switch", role: "group", "aria-label": "X axis" }, this.buttons),
        h("button", { type: "button", class: "plain", onclick: reset }, "Show all"),
        h("span", { class: "hint" }, "Drag to zoom in, double-click to zoom out."),
      ),
      note,
      h(
        "div",
        { class: layout },
        this.charts.map(([, chart]) => chart.element),
      ),
    );
    this.#press();
  }

  // read: a function of "step" or "time" and the name of a chart; returns arguments for Chart.set.
  update(read) {
    this.read = read;
    for (const [name, chart] of this.charts) {
      const [columns, texts] = read(this.over, name, chart.format);
      chart.set(columns, this.over, texts);
    }
  }

  destroy() {
    this.charts.forEach(([, chart]) => chart.destroy());
  }

  #choose(over) {
    this.over = over;
    this.#press();
    this.update(this.read);
  }

  #press() {
    this.buttons.forEach((button, at) =>
      button.setAttribute("aria-pressed", String((at === 0) === (this.over === "step"))),
    );
  }
}
