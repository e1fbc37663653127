// The state of a job, as a sign, a colour and a word.
import { h } from "./dom.js";

// Each has a sign of its own: colour is never the only difference.
const SIGNS = {
  running: "●",
  restarting: "↻",
  queued: "○",
  done: "✓",
  failed: "✕",
  stopped: "■",
  preempted: "⇤",
  lost: "⚡",
  silent: "…",
  unknown: "?",
};
const MEANINGS = {
  running: "its hvdtrain run is there",
  restarting: "between two attempts",
  queued: "waits for its slots",
  done: "ended with exit code 0",
  failed: "ended with another exit code than 0",
  stopped: "was told to end",
  preempted: "saved what it had because its time was over",
  lost: "its hvdtrain run was killed, or its host went down, without a word",
  silent: "runs on another host, and has not been heard of for a minute",
  unknown: "what it wrote can't be read, or its queue does not answer",
};

export const STATES = Object.keys(SIGNS);

export function sign(status) {
  return h("span", { class: "sign", "aria-hidden": "true" }, SIGNS[status] ?? "?");
}

export function badge(status) {
  return h("span", { class: "badge", "data-state": status, title: MEANINGS[status] }, sign(status), status);
}

// Replaces a badge only where the state is another.
export function setBadge(holder, status) {
  if (holder.firstElementChild?.dataset.state !== status) holder.replaceChildren(badge(status));
}
