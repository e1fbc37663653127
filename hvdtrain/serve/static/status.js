// The state of a job as a symbol, a colour and a word.
import { h } from "./dom.js";

// States also differ by symbol, so that colour is never the only difference.
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
  running: "hvdtrain run is running",
  restarting: "between two attempts",
  queued: "waiting for slots",
  done: "ended with exit code 0",
  failed: "ended with an exit code other than 0",
  stopped: "stopped on request",
  preempted: "saved a checkpoint because its time was over",
  lost: "hvdtrain run was killed, or its host went down, before it could report the end",
  silent: "runs on a different host and has not reported for a minute",
  unknown: "its state can't be read, or its queue does not answer",
};

export const STATES = Object.keys(SIGNS);

export function sign(status) {
  return h("span", { class: "sign", "aria-hidden": "true" }, SIGNS[status] ?? "?");
}

export function badge(status) {
  return h("span", { class: "badge", "data-state": status, title: MEANINGS[status] }, sign(status), status);
}

// Replaces a badge only if the state has changed.
export function setBadge(holder, status) {
  if (holder.firstElementChild?.dataset.state !== status) holder.replaceChildren(badge(status));
}
