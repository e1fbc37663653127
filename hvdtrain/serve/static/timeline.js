// The events of a job (attempts, lost ranks and checkpoints), as a drawing and as a list.
import { now } from "./api.js";
import { h } from "./dom.js";
import { clock, count, counted, date, span } from "./format.js";

// The maximum number of marks. More marks would overlap.
const MARKS = 40;
const SHOWN = 60;
// For longer jobs the date is also shown.
const LONG_S = 12 * 3600;
const CAUSES = { done: "done", ordered: "stopped", preempted: "stopped" };

export class Timeline {
  constructor() {
    this.bar = h("div", { class: "track", "aria-hidden": "true" });
    this.ends = h("div", { class: "ends", "aria-hidden": "true" });
    this.list = h("ol", { class: "events" });
    this.element = h(
      "section",
      { class: "card timeline" },
      h("h2", {}, "Events"),
      this.bar,
      this.ends,
      this.list,
    );
  }

  update({ events, is_over, created_s, ended_s }) {
    const last_s = events.at(-1)?.time ?? created_s;
    const end_s = is_over ? Math.max(last_s, ended_s ?? 0) : now();
    const begin_s = Math.min(created_s || last_s, events[0]?.time ?? last_s);
    this.#draw(events, begin_s, Math.max(end_s, begin_s + 1), is_over);
    if (this.shown === events) return;
    this.shown = events;
    this.list.replaceChildren(...items(events, begin_s));
  }

  #draw(events, begin_s, end_s, is_over) {
    const place = (element, from_s, to_s) => {
      const at = (time_s) => (100 * (time_s - begin_s)) / (end_s - begin_s);
      element.style.left = `${at(from_s)}%`;
      if (to_s !== undefined) element.style.width = `${at(to_s) - at(from_s)}%`;
      return element;
    };
    const parts = [];
    let began = null;
    for (const event of events) {
      if (event.kind === "began") began = event;
      if (event.kind !== "ended" || !began) continue;
      parts.push(
        place(
          h("span", { class: "attempt", "data-cause": CAUSES[event.cause] ?? "failed" }),
          began.time,
          event.time,
        ),
      );
      began = null;
    }
    if (began)
      parts.push(
        place(
          h("span", { class: "attempt", "data-cause": is_over ? "failed" : "running" }),
          began.time,
          end_s,
        ),
      );
    for (const event of sample(events.filter(({ kind }) => kind === "checkpoint")))
      parts.push(place(h("span", { class: "mark saved" }), event.time));
    for (const event of sample(events.filter(({ kind }) => kind === "loss")))
      parts.push(place(h("span", { class: "mark lost" }), event.time));
    this.bar.replaceChildren(...parts);
    const when = end_s - begin_s > LONG_S ? date : clock;
    this.ends.replaceChildren(h("span", {}, when(begin_s)), h("span", {}, is_over ? when(end_s) : "now"));
  }
}

function sample(events) {
  const step = Math.ceil(events.length / MARKS);
  return events.filter((_, at) => at % step === 0);
}

function items(events, begin_s) {
  const rows = [];
  for (let at = 0; at < events.length; at += 1) {
    const event = events[at];
    if (event.kind === "checkpoint") {
      // Consecutive checkpoints share one row.
      let many = 1;
      while (events[at + 1]?.kind === "checkpoint") {
        at += 1;
        many += 1;
      }
      rows.push(
        item(
          events[at],
          "saved",
          many === 1
            ? `checkpoint of step ${count(event.step)}`
            : `${counted(many, "checkpoint")}, the last of step ${count(events[at].step)}`,
          begin_s,
        ),
      );
    } else if (event.kind === "began") {
      const hosts = Object.keys(event.hosts).length;
      rows.push(
        item(
          event,
          "began",
          `attempt ${event.attempt} began: ${counted(event.ranks, "rank")} on ${counted(hosts, "host")}`,
          begin_s,
        ),
      );
    } else if (event.kind === "ended") {
      rows.push(
        item(
          event,
          CAUSES[event.cause] ?? "failed",
          ended(event),
          begin_s,
          event.cause === "done" ? "" : event.words,
        ),
      );
    } else if (event.kind === "loss") {
      rows.push(
        item(
          event,
          "lost",
          `rank ${event.rank} on ${event.host} was lost${event.step === null ? "" : ` at step ${count(event.step)}`}`,
          begin_s,
          event.words,
        ),
      );
    }
  }
  const left_out = rows.length - SHOWN;
  if (left_out <= 0) return rows;
  return [
    ...rows.slice(0, SHOWN / 2),
    h("li", { class: "more" }, `${counted(left_out, "event")} not shown`),
    ...rows.slice(-SHOWN / 2),
  ];
}

function ended({ attempt, cause, code, step, lost_s }) {
  const how =
    cause === "done"
      ? "ended successfully"
      : cause === "ordered"
        ? "was stopped"
        : cause === "preempted"
          ? "was preempted"
          : `failed with exit code ${code}`;
  const where = step === null || step === undefined ? "" : ` at step ${count(step)}`;
  return `attempt ${attempt} ${how}${where}${lost_s >= 1 ? `; ${span(lost_s)} of work lost` : ""}`;
}

function item(event, kind, text, begin_s, words = "") {
  const when = h(
    "time",
    { datetime: new Date(event.time * 1000).toISOString(), title: date(event.time) },
    `+${span(event.time - begin_s)}`,
  );
  const more = words && h("details", {}, h("summary", {}, "details"), h("pre", {}, words));
  return h("li", { "data-kind": kind }, when, h("div", {}, text, more));
}
