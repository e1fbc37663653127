// Notices, which screen readers announce.
import { h } from "./dom.js";

const MESSAGE_MS = 6000;

export function showMessage(text) {
  place("messages", text, MESSAGE_MS);
}

export function showError(error) {
  const text = error instanceof Error ? error.message : String(error);
  if (!(error instanceof Error) || error.name === "ApiError") place("errors", text, 0);
  else {
    console.error(error);
    place("errors", `Error in this page: ${text}`, 0);
  }
}

function place(id, text, timeout_ms) {
  const region = document.getElementById(id);
  const close = h(
    "button",
    { type: "button", class: "plain", onclick: () => notice.remove() },
    h("span", { "aria-hidden": "true" }, "✕"),
    h("span", { class: "unseen" }, "Close"),
  );
  const notice = h("div", { class: "notice" }, h("p", {}, text), close);
  region.replaceChildren(notice);
  if (timeout_ms) setTimeout(() => notice.remove(), timeout_ms);
}
