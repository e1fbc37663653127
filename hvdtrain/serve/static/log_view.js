// The log of a job: a window that moves over a log of any length.
import { get, jobPath } from "./api.js";
import { debounced, field, h, setText, setVisible } from "./dom.js";
import { bytes } from "./format.js";
import { lineElement } from "./log_lines.js";

// The number of lines per request, and the number of lines that the page keeps.
const PART = 400;
const MOST = 4000;
// Bytes behind the end after which the view jumps to it.
const FAR = 256 << 10;
const NEAR_PX = 30;
const EARLIER_PX = 300;

export class LogView {
  constructor(name) {
    this.name = name;
    this.lines = h("div", { class: "lines" });
    this.before = h("p", { class: "before" });
    this.box = h(
      "div",
      { class: "log", tabindex: 0, role: "region", "aria-label": "Lines of the log" },
      this.before,
      this.lines,
    );
    this.ranks = h("input", { type: "text", placeholder: "all, or 0-3,7", spellcheck: "false", size: 12 });
    this.grep = h("input", { type: "search", placeholder: "Text", spellcheck: "false" });
    const switched = (words, kind, on) =>
      h(
        "label",
        { class: "check" },
        h("input", {
          type: "checkbox",
          checked: on,
          onchange: (event) => this.box.classList.toggle(kind, event.target.checked),
        }),
        words,
      );
    this.follow = h(
      "button",
      { type: "button", class: "follow primary", hidden: true, onclick: () => this.#toEnd() },
      "↓ Follow",
    );
    this.message = h("p", { class: "hint", role: "status" });
    this.box.classList.add("wrap");
    this.element = h(
      "section",
      { class: "logs", "aria-labelledby": "log" },
      h(
        "div",
        { class: "section" },
        h("h2", { id: "log" }, "Log"),
        h("div", { class: "inline" }, field("Ranks", this.ranks), field("Search", this.grep)),
        switched("times", "times", false),
        switched("wrap", "wrap", true),
        this.message,
      ),
      h("div", { class: "logbox" }, this.box, this.follow),
    );
    const choose = debounced(() => this.#reload(), 300);
    this.ranks.addEventListener("input", choose);
    this.grep.addEventListener("input", choose);
    this.box.addEventListener("scroll", () => this.#scrolled(), { passive: true });
    this.generation = 0;
    this.following = true;
    this.end = 0;
  }

  async start(log_end) {
    this.end = log_end;
    await this.#reload();
  }

  // Called when the log has grown.
  grow(log_end) {
    this.end = log_end;
    if (this.following) this.#forward();
    else setVisible(this.follow, true);
  }

  destroy() {
    this.generation += 1;
    this.first = 0;
  }

  #query() {
    return { ranks: this.ranks.value.trim(), grep: this.grep.value, count: PART };
  }

  // Shows the end of the log with the current filters.
  async #reload() {
    this.generation += 1;
    const { generation } = this;
    let part;
    try {
      part = await get(jobPath(this.name, "/log"), this.#query());
    } catch (error) {
      if (generation === this.generation) {
        this.busy = false;
        this.#showError(error);
      }
      return;
    }
    if (generation !== this.generation) return;
    this.#showError(null);
    this.first = part.begin;
    this.next = part.next;
    this.lines.replaceChildren(...this.#elements(part.lines));
    this.busy = false;
    this.following = true;
    this.box.scrollTop = this.box.scrollHeight;
    setVisible(this.follow, false);
    this.#showBefore();
    if (this.next < this.end) this.#forward();
    await this.#backward();
  }

  async #forward() {
    if (this.busy || this.first === undefined) return;
    const { generation } = this;
    this.busy = true;
    try {
      for (let complete = false; !complete && this.next < this.end;) {
        if (this.following && this.end - this.next > FAR && !this.#isFiltered()) {
          await this.#reload();
          return;
        }
        const { end } = this;
        const part = await get(jobPath(this.name, "/log"), { ...this.#query(), begin: this.next });
        if (generation !== this.generation) return;
        // If the log has grown during the request, no further event may follow.
        complete = part.complete && end === this.end;
        this.next = part.next;
        this.#append(part.lines);
        if (!this.following && this.lines.childElementCount >= MOST) break;
      }
    } catch {
      // This is repeated at the next event.
    } finally {
      if (generation === this.generation) this.busy = false;
    }
  }

  #append(lines) {
    this.lines.append(...this.#elements(lines));
    const over = this.lines.childElementCount - MOST;
    if (over > 0) {
      // Measuring the height is slow, and it is not needed at the end of the log.
      const height = this.following ? 0 : this.box.scrollHeight;
      for (let number = 0; number < over; number += 1) this.lines.firstElementChild.remove();
      this.first = this.lines.firstElementChild.positions[0];
      this.#showBefore();
      if (!this.following) this.box.scrollTop -= height - this.box.scrollHeight;
    }
    if (this.following) this.box.scrollTop = this.box.scrollHeight;
  }

  // Loads earlier lines until the view can be scrolled. A search may have to read the whole log.
  async #backward() {
    if (this.back || !this.first) return;
    const { generation } = this;
    this.back = true;
    try {
      while (this.first > 0 && this.box.scrollTop < EARLIER_PX) {
        const { first } = this;
        const part = await get(jobPath(this.name, "/log"), { ...this.#query(), before: first });
        if (generation !== this.generation) break;
        // Lines at the top were removed during the request.
        if (first !== this.first) continue;
        const height = this.box.scrollHeight;
        this.first = part.begin;
        this.lines.prepend(...this.#elements(part.lines));
        this.#showBefore();
        this.box.scrollTop += this.box.scrollHeight - height;
        // Lines at the end are removed. They are loaded again when needed.
        if (this.lines.childElementCount > MOST) this.#dropEnd();
      }
    } catch {
      // This is repeated when the user scrolls.
    } finally {
      this.back = false;
    }
    if (generation !== this.generation) await this.#backward();
  }

  #dropEnd() {
    while (this.lines.childElementCount > MOST) this.lines.lastElementChild.remove();
    this.next = this.lines.lastElementChild.positions[1];
    this.following = false;
    setVisible(this.follow, true);
  }

  #scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = this.box;
    const low = scrollHeight - scrollTop - clientHeight < NEAR_PX;
    this.following = low && (this.following || this.next >= this.end || this.lines.childElementCount < MOST);
    setVisible(this.follow, !this.following);
    if (low && this.next < this.end) this.#forward();
    if (scrollTop < EARLIER_PX) this.#backward();
  }

  #toEnd() {
    if (this.end - this.next > FAR || this.lines.childElementCount >= MOST) this.#reload();
    else {
      this.following = true;
      this.box.scrollTop = this.box.scrollHeight;
      setVisible(this.follow, false);
      this.#forward();
    }
    this.box.focus();
  }

  #elements(lines) {
    return lines.map((line) => lineElement(line, this.grep.value));
  }

  #isFiltered() {
    return Boolean(this.ranks.value.trim() || this.grep.value);
  }

  #showBefore() {
    const searching = this.#isFiltered() && this.first > 0;
    const nothing = this.lines.childElementCount
      ? "Beginning of the log"
      : this.#isFiltered()
        ? "No matching lines"
        : "The log is empty";
    setText(
      this.before,
      this.first > 0 ? `${bytes(this.first)} earlier${searching ? " to search" : ""}` : nothing,
    );
  }

  #showError(error) {
    this.ranks.setAttribute("aria-invalid", String(error !== null));
    setText(this.message, error ? error.message : "");
  }
}
