// Where the time of a job went.
import { h, setVisible } from "./dom.js";
import { percent } from "./format.js";

const NAMES = {
  kept: "steps that were kept",
  lost: "steps that were lost",
  waiting: "waiting for other ranks",
  input: "waiting for input",
  start: "start",
  validation: "validation",
  checkpoints: "checkpoints",
  restarts: "between attempts",
  end: "end",
  other: "other",
};
const LEAST = 0.001;

// What the last start of a job came to; undefined where that is not known yet.
export function summaryOf(events) {
  const last = events.findLast(({ kind }) => kind === "summary" || kind === "began");
  return last?.kind === "summary" ? last : undefined;
}

export class Shares {
  constructor() {
    this.bar = h("div", { class: "shares", "aria-hidden": "true" });
    this.list = h("ul", { class: "legend" });
    this.element = h(
      "section",
      { class: "card", hidden: true },
      h("h2", {}, "Where the time went"),
      this.bar,
      this.list,
    );
  }

  update(events) {
    const summary = summaryOf(events);
    setVisible(this.element, summary !== undefined);
    if (!summary || summary === this.shown) return;
    this.shown = summary;
    const shares = Object.keys(NAMES)
      .map((kind) => [kind, summary[kind] ?? 0])
      .filter(([, share]) => share >= LEAST);
    this.bar.replaceChildren(
      ...shares.map(([kind, share]) => {
        const part = h("span", { "data-share": kind });
        part.style.flexGrow = String(share);
        return part;
      }),
    );
    this.list.replaceChildren(
      ...shares.map(([kind, share]) =>
        h(
          "li",
          {},
          h("i", { class: "dot", "data-share": kind }),
          h("span", {}, NAMES[kind]),
          h("b", {}, percent(share)),
        ),
      ),
    );
  }
}
