// Two to eight jobs beside each other: their curves, and in what their settings differ.
import { get, jobPath, now, session } from "./api.js";
import { Chart, join, swatch } from "./charts.js";
import { field, h, newId } from "./dom.js";
import { NONE, count, isNumber, number, span } from "./format.js";
import { complain } from "./notices.js";
import { compareLink, jobLink } from "./router.js";
import { Series } from "./series.js";
import { differences } from "./settings.js";
import { badge } from "./status.js";

const MOST = 8;
const POINTS = 600;

export async function compareView({ query }) {
  const names = [...new Set((query.get("jobs") ?? "").split(",").filter(Boolean))].slice(0, MOST);
  const found = await Promise.all(
    names.map(async (name) => {
      try {
        const [job, columns] = await Promise.all([
          get(jobPath(name)),
          get(jobPath(name, "/metrics"), { count: POINTS }),
        ]);
        return { ...job, series: new Series(columns) };
      } catch (error) {
        complain(`${name}: ${error.message}`);
        return null;
      }
    }),
  );
  // Until then nobody knows what time it is there.
  await session();
  return (main) =>
    fill(
      main,
      found.filter((job) => job !== null),
    );
}

function fill(main, jobs) {
  main.append(h("h1", {}, "Compare"), jobs.length < MOST ? adder(jobs) : "");
  if (!jobs.length) return undefined;
  const charts = [
    ["loss", new Chart({ title: "Loss", labels: jobs.map(({ name }) => name), key: "compare" })],
    [
      "rate",
      new Chart({
        title: "Samples per second",
        labels: jobs.map(({ name }) => name),
        key: "compare",
        fromZero: true,
      }),
    ],
  ];
  const buttons = ["step", "time"].map((over) =>
    h("button", { type: "button", onclick: () => draw(over) }, over === "step" ? "steps" : "time"),
  );
  const diff = differences(jobs);
  main.append(
    h("section", { class: "card flush" }, outcomes(jobs)),
    h(
      "section",
      { class: "curves", "aria-labelledby": "curves" },
      h(
        "div",
        { class: "section" },
        h("h2", { id: "curves" }, "Curves"),
        h("div", { class: "switch", role: "group", "aria-label": "Curves over" }, buttons),
        h(
          "button",
          { type: "button", class: "plain", onclick: () => charts.forEach(([, chart]) => chart.reset()) },
          "Show all",
        ),
        h("span", { class: "hint" }, "Drag to zoom in, double click to zoom out."),
      ),
      h(
        "div",
        { class: "charts two" },
        charts.map(([, chart]) => chart.element),
      ),
    ),
    h(
      "section",
      { class: "settings", "aria-labelledby": "settings" },
      h("h2", { id: "settings" }, "Settings that differ"),
      diff.length
        ? table("Settings of each job", jobs, diff, (text) => (text ? h("code", {}, text) : NONE))
        : h(
            "p",
            { class: "hint" },
            jobs.length > 1 ? "None: they were asked for the same." : "Add a job to compare it with.",
          ),
    ),
  );

  function draw(over) {
    buttons.forEach((button, at) =>
      button.setAttribute("aria-pressed", String((at === 0) === (over === "step"))),
    );
    for (const [name, chart] of charts) {
      const columns = join(jobs.map(({ series }) => series.columns(over, name)));
      chart.set(columns, over, {
        words: jobs
          .map(
            ({ name: job, series }) => `${job}: ${number(series.columns(over, name)[1].findLast(isNumber))}`,
          )
          .join("; "),
      });
    }
  }

  draw("step");
  return () => charts.forEach(([, chart]) => chart.destroy());
}

function outcomes(jobs) {
  const rows = [
    ["State", ...jobs.map(({ status }) => badge(status))],
    ["Loss", ...jobs.map(({ series }) => number(series.last.loss))],
    [
      "Samples/s",
      ...jobs.map(({ series }) => number(series.rows.findLast((row) => row.rate !== null)?.rate)),
    ],
    ["Steps", ...jobs.map(({ step }) => count(step))],
    [
      "Took",
      ...jobs.map((job) =>
        job.ended_s || !job.is_over ? span((job.ended_s ?? now()) - job.created_s) : NONE,
      ),
    ],
    ["Attempts", ...jobs.map(({ attempt }) => String(attempt))],
    [
      "",
      ...jobs.map(({ name }) =>
        h(
          "a",
          {
            href: compareLink(jobs.map((job) => job.name).filter((other) => other !== name)),
            "aria-label": `Remove ${name} from the comparison`,
          },
          "remove",
        ),
      ),
    ],
  ];
  return table("What they came to", jobs, rows, (cell) => cell);
}

function table(caption, jobs, rows, cell) {
  const heads = jobs.map(({ name }, at) =>
    h("th", { scope: "col" }, swatch(at), h("a", { href: jobLink(name) }, name)),
  );
  return h(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    h(
      "table",
      { class: "compare" },
      h("caption", { class: "unseen" }, caption),
      h("thead", {}, h("tr", {}, h("td"), heads)),
      h(
        "tbody",
        {},
        rows.map(([name, ...cells]) =>
          h(
            "tr",
            {},
            name ? h("th", { scope: "row" }, name) : h("td"),
            cells.map((one) => h("td", {}, cell(one))),
          ),
        ),
      ),
    ),
  );
}

// Adds a job; the newest are offered.
function adder(jobs) {
  const list = newId("jobs");
  const names = h("datalist", { id: list });
  const input = h("input", {
    type: "text",
    list,
    spellcheck: "false",
    placeholder: "A job's name",
    required: true,
  });
  get("/api/jobs", { count: 100 }).then(
    ({ jobs: known }) =>
      names.append(...known.map(({ name, program }) => h("option", { value: name }, program.join(" ")))),
    () => {},
  );
  return h(
    "form",
    {
      class: "adder",
      onsubmit: (event) => {
        event.preventDefault();
        location.assign(compareLink([...jobs.map(({ name }) => name), input.value.trim()]));
      },
    },
    field("Add a job", input),
    names,
    h("button", {}, "Add"),
  );
}
