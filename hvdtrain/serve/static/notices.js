// Notices, announced by screen readers.
import { h } from "./dom.js";

const SAID_MS = 6000;

export function say(text) {
  place("said", text, SAID_MS);
}

export function complain(error) {
  const text = error instanceof Error ? error.message : String(error);
  if (!(error instanceof Error) || error.name === "ApiError") place("complaints", text, 0);
  else {
    console.error(error);
    place("complaints", `Error in this page: ${text}`, 0);
  }
}

function place(id, text, gone_ms) {
  const region = document.getElementById(id);
  const close = h(
    "button",
    { type: "button", class: "plain", onclick: () => notice.remove() },
    h("span", { "aria-hidden": "true" }, "✕"),
    h("span", { class: "unseen" }, "Close"),
  );
  const notice = h("div", { class: "notice" }, h("p", {}, text), close);
  region.replaceChildren(notice);
  if (gone_ms) setTimeout(() => notice.remove(), gone_ms);
}
