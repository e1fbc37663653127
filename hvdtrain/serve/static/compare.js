// Compares up to eight jobs: their results, their curves, and the settings that differ.
import { get, jobPath, now, session } from "./api.js";
import { Curves, join, swatch } from "./charts.js";
import { field, h, newId } from "./dom.js";
import { NONE, count, isNumber, number, span } from "./format.js";
import { showError } from "./notices.js";
import { compareLink, jobLink } from "./router.js";
import { Series } from "./series.js";
import { badge } from "./status.js";
import { joinWords } from "./words.js";

const MOST = 8;
const POINTS = 600;
// Synonyms among the flags of hvdtrain run.
const SAME = { "--num-proc": "-np", "--hosts": "-H", "--env": "-x" };

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
        showError(`${name}: ${error.message}`);
        return null;
      }
    }),
  );
  // now() needs the session, which has the server's time.
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
  const labels = jobs.map(({ name }) => name);
  const curves = new Curves(
    "compare",
    [
      ["loss", { title: "Loss", labels }],
      ["rate", { title: "Samples per second", labels, fromZero: true }],
    ],
    { layout: "charts two" },
  );
  const diff = differences(jobs);
  main.append(
    h("section", { class: "card flush" }, outcomes(jobs)),
    curves.element,
    h(
      "section",
      { class: "settings", "aria-labelledby": "settings" },
      h("h2", { id: "settings" }, "Settings that differ"),
      diff.length
        ? table("Settings of each job", jobs, diff, (text) => (text ? h("code", {}, text) : NONE))
        : h(
            "p",
            { class: "hint" },
            jobs.length > 1 ? "All settings are the same." : "Add a job to compare.",
          ),
    ),
  );

  curves.update((over, name) => {
    const tables = jobs.map(({ series }) => series.columns(over, name));
    const last = tables.map(([, ys], at) => `${labels[at]}: ${number(ys.findLast(isNumber))}`);
    return [join(tables), { words: last.join("; ") }];
  });
  return () => curves.destroy();
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
      "Duration",
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
  return table("Results", jobs, rows, (cell) => cell);
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

// A form that adds a job to the comparison and suggests the newest jobs.
function adder(jobs) {
  const list = newId("jobs");
  const names = h("datalist", { id: list });
  const input = h("input", {
    type: "text",
    list,
    spellcheck: "false",
    placeholder: "Name of a job",
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

// Splits words into flags with their values, and all other words.
function flagsOf(words) {
  const flags = new Map();
  const rest = [];
  let flag = null;
  const add = (name, value) => flags.set(name, [...(flags.get(name) ?? []), value]);
  for (const word of words) {
    const isFlag = /^-[-\w]*[a-zA-Z]/.test(word);
    if (isFlag && flag) add(flag, "");
    if (isFlag && word.startsWith("--") && word.includes("=")) {
      const at = word.indexOf("=");
      add(canonical(word.slice(0, at)), word.slice(at + 1));
      flag = null;
    } else if (isFlag) flag = canonical(word);
    else if (flag) {
      add(flag, word);
      flag = null;
    } else rest.push(word);
  }
  if (flag) add(flag, "");
  return { flags, rest };
}

const canonical = (flag) => SAME[flag] ?? flag;

// Returns the name and text of each setting of a job.
function settingsOf(job) {
  const options = flagsOf(job.options);
  const program = flagsOf(job.program);
  const settings = new Map([["program", joinWords(program.rest)]]);
  for (const [flag, values] of program.flags) settings.set(`program ${flag}`, joinValues(values));
  // The last value of a flag is used, except for -x, which collects all values.
  for (const [flag, values] of options.flags)
    settings.set(flag, joinValues(flag === "-x" ? values : values.slice(-1)));
  if (options.rest.length) settings.set("other options", joinWords(options.rest));
  settings.set("working directory", job.folder);
  settings.set("ranks", job.ranks ? String(job.ranks) : "");
  settings.set(
    "hosts",
    Object.entries(job.hosts)
      .map(([host, ranks]) => `${host}: ${ranks}`)
      .join(", "),
  );
  return settings;
}

const joinValues = (values) => values.map((value) => value || "yes").join(", ");

// Returns a row for each setting that differs: its name, and its text for each job.
function differences(jobs) {
  const all = jobs.map(settingsOf);
  const names = [...new Set(all.flatMap((settings) => [...settings.keys()]))];
  return names
    .map((name) => [name, ...all.map((settings) => settings.get(name) ?? "")])
    .filter(([, first, ...others]) => others.some((text) => text !== first));
}
