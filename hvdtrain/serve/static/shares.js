// How a job spent its time.
import { h, setVisible } from "./dom.js";
import { percent } from "./format.js";

const NAMES = {
  kept: "kept steps",
  lost: "lost steps",
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

// Returns the summary of a job's last start; undefined until the job has ended.
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
      h("h2", {}, "Time"),
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
