// Dialogs that confirm an action or ask for changes to a job.
import { field, h } from "./dom.js";
import { showError } from "./notices.js";
import { joinWords, splitWords } from "./words.js";

// Shows a dialog and calls ``act`` when the user confirms. If that fails, the dialog stays open.
export function ask({ title, body, verb, danger = false, act }) {
  const wrong = h("p", { class: "wrong", role: "alert" });
  const confirm = h("button", { class: danger ? "danger" : "primary" }, verb);
  const cancel = h("button", { type: "button", onclick: () => dialog.close() }, "Cancel");
  const form = h(
    "form",
    { method: "dialog" },
    h("h2", { id: "dialog-title" }, title),
    body,
    wrong,
    h("div", { class: "actions" }, cancel, confirm),
  );
  const dialog = h("dialog", { "aria-labelledby": "dialog-title", onclose: () => dialog.remove() }, form);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    wrong.textContent = "";
    confirm.disabled = true;
    try {
      await act();
      dialog.close();
    } catch (error) {
      if (error.name === "ApiError" || error.name === "Error") wrong.textContent = error.message;
      else showError(error);
    } finally {
      confirm.disabled = false;
    }
  });
  document.body.append(dialog);
  dialog.showModal();
}

// Asks for changes to a job; ``act`` gets the body of the request.
export function askChanges({ title, verb, intro, job, act }) {
  const options = h("input", {
    type: "text",
    spellcheck: "false",
    autocapitalize: "off",
    placeholder: "-np 4 --max-restarts 2",
  });
  const program = h("textarea", { rows: 3, spellcheck: "false", autocapitalize: "off" });
  program.value = joinWords(job.program);
  const body = [
    h("p", {}, intro),
    h(
      "dl",
      { class: "now" },
      h("dt", {}, "Current options"),
      h("dd", {}, h("code", {}, joinWords(job.options) || "none")),
    ),
    field("Further options", options, "They override the current options."),
    field("Program", program, "Quoted as in a shell; variables and wildcards are not expanded."),
  ];
  ask({
    title,
    verb,
    body,
    act: () => {
      const words = splitWords(program.value);
      const same = joinWords(words) === joinWords(job.program);
      return act({ options: splitWords(options.value), program: same ? [] : words });
    },
  });
}
