// The view of one job.
import { get, jobPath, listen, session } from "./api.js";
import { h, setText, setVisible } from "./dom.js";
import { JobCharts } from "./job_charts.js";
import { Environment, Facts, Tiles } from "./job_facts.js";
import { JobHead } from "./job_head.js";
import { LogView } from "./log_view.js";
import { showError } from "./notices.js";
import { RanksView } from "./ranks_view.js";
import { Series } from "./series.js";
import { Shares } from "./shares.js";
import { Timeline } from "./timeline.js";

const POINTS = 1000;
const TICK_MS = 1000;

export async function jobView({ parts: [name] }) {
  const [about, job, columns] = await Promise.all([
    session(),
    get(jobPath(name)),
    get(jobPath(name, "/metrics"), { count: POINTS }),
  ]);
  return (main) => fill(main, about, job, columns);
}

function fill(main, about, job, columns) {
  const { name } = job;
  let series = new Series(columns);
  const head = new JobHead(job, about);
  const tiles = new Tiles();
  const charts = new JobCharts();
  const ranks = new RanksView(name);
  const log = new LogView(name);
  const facts = new Facts();
  const environment = new Environment(job);
  const timeline = new Timeline();
  const shares = new Shares();
  const verdict = h("pre", { tabindex: 0, role: "region", "aria-labelledby": "why" });
  const why = h("section", { class: "card why", hidden: true }, h("h2", { id: "why" }), verdict);
  main.append(
    head.element,
    why,
    tiles.element,
    charts.element,
    ranks.element,
    log.element,
    h(
      "div",
      { class: "columns" },
      h("div", {}, facts.element, environment.element),
      h("div", {}, timeline.element, shares.element),
    ),
  );

  function draw() {
    head.update(job);
    tiles.update(job, series);
    facts.update(job);
    environment.update(job);
    why.classList.toggle("bad", job.code !== 0);
    setText(
      why.firstElementChild,
      job.status === "queued"
        ? "Why it is queued"
        : job.code === 0
          ? "How it ended"
          : job.status === "failed"
            ? "Why it failed"
            : "Why it ended",
    );
    setText(verdict, job.verdict);
    setVisible(why, job.verdict !== "");
    timeline.update(job);
    shares.update(job.events);
  }

  draw();
  charts.update(series, job);
  log.start(job.log_end).catch(showError);
  ranks.start().catch(showError);

  let hasState = false;
  const unlisten = listen(
    jobPath(name, "/live"),
    {
      job: async (news) => {
        if (news.view === null) return;
        Object.assign(job, news.view ?? {});
        if (news.left_s !== undefined) job.left_s = news.left_s;
        if (series.add(news.metrics)) charts.update(series, job);
        if (news.log_end !== undefined) log.grow(news.log_end);
        draw();
        // The first event has the initial state, which is already shown.
        const more = news.events !== undefined && hasState;
        hasState = true;
        if (!more) return;
        job.events = (await get(jobPath(name))).events;
        draw();
      },
    },
    async (alive) => {
      head.setLive(alive);
      if (!alive || !hasState) return;
      // Load what the page has missed while it was disconnected.
      series = new Series(await get(jobPath(name, "/metrics"), { count: POINTS }));
      charts.update(series, job);
      job.events = (await get(jobPath(name))).events;
      draw();
    },
  );
  const ticking = setInterval(() => {
    tiles.update(job, series);
    if (!job.is_over) timeline.update(job);
  }, TICK_MS);
  return () => {
    unlisten();
    clearInterval(ticking);
    charts.destroy();
    ranks.destroy();
    log.destroy();
  };
}
