// The list of jobs.
import { get, jobPath, listen, post, session } from "./api.js";
import { ask } from "./dialog.js";
import { debounced, field, h, setText, setVisible } from "./dom.js";
import { count, counted } from "./format.js";
import { COLUMNS, JobRow, cellClass } from "./job_rows.js";
import { showError, showMessage } from "./notices.js";
import { compareLink, setQuery } from "./router.js";
import { STATES, sign } from "./status.js";

const PAGE = 50;
// The most jobs in one response.
const MOST = 100;
// The list is not loaded more often than this. While jobs run, it changes every second.
const PAUSE_MS = 1500;
const TICK_MS = 5000;
const COMPARED = 8;

export async function jobsView({ query }) {
  const filters = { q: query.get("q") ?? "", status: query.get("status") ?? "" };
  const [{ read_only }, first] = await Promise.all([session(), get("/api/jobs", { ...filters, count: PAGE })]);
  return (main) => show(main, filters, first, read_only);
}

const list = (names) =>
  h(
    "ul",
    { class: "names" },
    names.map((name) => h("li", {}, name)),
  );

function show(main, filters, first, read_only) {
  let wanted = PAGE;
  let rows = new Map();
  const selected = new Set();

  const search = h("input", {
    type: "search",
    placeholder: "Name or program",
    value: filters.q,
    spellcheck: "false",
  });
  const chips = h("div", { class: "chips", role: "group", "aria-label": "State" });
  const body = h("tbody");
  const heads = COLUMNS.map(([column, label]) => h("th", { scope: "col", class: cellClass(column) }, label));
  const table = h(
    "table",
    { class: "jobs" },
    h("caption", { class: "unseen" }, "Jobs, the newest first"),
    h(
      "thead",
      {},
      h("tr", {}, h("th", { scope: "col", class: "pick" }, h("span", { class: "unseen" }, "Select")), heads),
    ),
    body,
  );
  const empty = h("div", { class: "empty", hidden: true });
  const more = h("button", { type: "button", onclick: () => enlarge() }, "Show more");
  const total = h("p", { class: "total", role: "status" });
  const selection = h("span", { class: "picked" });
  const compare = h(
    "button",
    { type: "button", onclick: () => location.assign(compareLink([...selected])) },
    "Compare",
  );
  const stop = h("button", { type: "button", class: "danger", onclick: () => stopSelected() }, "Stop");
  const clone = h("button", { type: "button", onclick: () => cloneSelected() }, "Clone");
  const none = h("button", { type: "button", class: "plain", onclick: () => unselect() }, "Select none");
  const bulk = h(
    "div",
    { class: "bulk", role: "group", "aria-label": "Selected jobs", hidden: true },
    selection,
    compare,
    !read_only && clone,
    !read_only && stop,
    none,
  );
  main.append(
    h(
      "div",
      { class: "head" },
      h("h1", {}, "Jobs"),
      h("a", { class: "button primary", href: "#/submit" }, "Submit a job"),
    ),
    h("div", { class: "filters" }, field("Search", search), chips),
    h("div", { class: "scroll" }, table),
    empty,
    h("div", { class: "foot" }, total, more),
    bulk,
  );

  let requests = 0;
  async function load() {
    requests += 1;
    const request = requests;
    const query = { ...filters, count: Math.min(wanted, MOST) };
    const first = await get("/api/jobs", query);
    const jobs = first.jobs;
    for (; jobs.length < Math.min(wanted, first.found);) {
      const next = await get("/api/jobs", { ...query, begin: jobs.length });
      if (!next.jobs.length) break;
      jobs.push(...next.jobs);
    }
    // Ignore responses to earlier requests.
    if (request === requests) draw({ ...first, jobs });
  }

  function draw({ jobs, found, counts }) {
    const kept = new Map();
    for (const job of jobs) {
      const row =
        rows.get(job.name) ?? new JobRow(job.name, selected.has(job.name), (on) => select(job.name, on));
      row.update(job);
      kept.set(job.name, row);
    }
    // Rows are moved only if necessary, because a row that is moved loses the focus.
    for (const [name, row] of rows) if (!kept.has(name)) row.element.remove();
    let before = body.firstElementChild;
    for (const { element } of kept.values()) {
      if (element === before) before = before.nextElementSibling;
      else body.insertBefore(element, before);
    }
    rows = kept;
    drawChips(counts);
    const all = Object.values(counts).reduce((sum, one) => sum + one, 0);
    setVisible(table, jobs.length > 0);
    setVisible(empty, jobs.length === 0);
    if (!jobs.length) {
      const text = all
        ? "No matching jobs."
        : "No jobs yet. Submit one here, or use hvdtrain submit or hvdtrain run in a terminal.";
      if (empty.textContent !== text) empty.replaceChildren(h("p", {}, text));
    }
    setText(total, jobs.length ? `${count(jobs.length)} of ${counted(found, "job")}` : "");
    setVisible(more, jobs.length < found);
  }

  function drawChips(counts) {
    const known = ["", ...STATES.filter((state) => counts[state] || state === filters.status)];
    const key = known.join();
    if (chips.dataset.key !== key) {
      chips.dataset.key = key;
      chips.replaceChildren(
        ...known.map((state) =>
          h(
            "button",
            {
              type: "button",
              class: "chip",
              "data-state": state || "all",
              onclick: () => choose({ status: state }),
            },
            state && sign(state),
            state || "all",
            " ",
            h("span", { class: "count" }),
          ),
        ),
      );
    }
    const all = Object.values(counts).reduce((sum, one) => sum + one, 0);
    known.forEach((state, at) => {
      const chip = chips.children[at];
      chip.setAttribute("aria-pressed", String(state === filters.status));
      setText(chip.querySelector(".count"), count(state ? (counts[state] ?? 0) : all));
    });
  }

  function choose(change) {
    Object.assign(filters, change);
    setQuery(filters);
    wanted = PAGE;
    load().catch(showError);
  }

  async function enlarge() {
    wanted += PAGE;
    const last = body.lastElementChild;
    await load().catch(showError);
    // If the button has disappeared, focus the first new row.
    if (more.hidden) last?.nextElementSibling?.querySelector("a")?.focus();
  }

  function select(name, on) {
    if (on) selected.add(name);
    else selected.delete(name);
    drawBulk();
  }

  function unselect() {
    selected.clear();
    for (const row of rows.values()) row.box.checked = false;
    drawBulk();
    search.focus();
  }

  function drawBulk() {
    setVisible(bulk, selected.size > 0);
    setText(selection, `${counted(selected.size, "job")} selected`);
    compare.disabled = selected.size < 2 || selected.size > COMPARED;
    compare.title = compare.disabled ? `Two to ${COMPARED} jobs can be compared.` : "";
  }

  function stopSelected() {
    const names = [...selected].filter((name) => !rows.get(name)?.job.is_over);
    if (!names.length) {
      showMessage("The selected jobs have already ended.");
      return;
    }
    ask({
      title: `Stop ${counted(names.length, "job")}?`,
      body: [
        list(names),
        h("p", {}, "No checkpoint is saved. To save one first, stop a job on its own page."),
      ],
      verb: "Stop",
      danger: true,
      act: async () => {
        await Promise.all(names.map((name) => post(jobPath(name, "/stop"))));
        unselect();
        showMessage(`${counted(names.length, "job")} being stopped.`);
      },
    });
  }

  function cloneSelected() {
    const names = [...selected];
    ask({
      title: `Clone ${counted(names.length, "job")}?`,
      body: [list(names), h("p", {}, "Each is submitted again with the same options.")],
      verb: "Start the clones",
      act: async () => {
        for (const name of names) {
          await post(jobPath(name, "/clone"));
          // If a later clone fails, a retry must not submit this one again.
          selected.delete(name);
        }
        unselect();
        showMessage(`${counted(names.length, "job")} submitted.`);
      },
    });
  }

  search.addEventListener(
    "input",
    debounced(() => choose({ q: search.value.trim() }), 200),
  );
  draw(first);

  let due = 0;
  let loaded_ms = performance.now();
  const unlisten = listen("/api/live", {
    jobs: () => {
      if (due) return;
      due = setTimeout(
        async () => {
          due = 0;
          loaded_ms = performance.now();
          await load().catch(() => {});
        },
        Math.max(0, loaded_ms + PAUSE_MS - performance.now()),
      );
    },
  });
  const ticking = setInterval(() => rows.forEach((row) => row.tick()), TICK_MS);
  return () => {
    unlisten();
    clearTimeout(due);
    clearInterval(ticking);
  };
}
