// The name, state and actions of a job.
import { jobPath, post } from "./api.js";
import { ask, askChanges } from "./dialog.js";
import { h, setText, setVisible } from "./dom.js";
import { showMessage } from "./notices.js";
import { compareLink, jobLink } from "./router.js";
import { setBadge } from "./status.js";
import { joinWords } from "./words.js";

export class JobHead {
  constructor(job, about) {
    this.job = job;
    this.state = h("span", { class: "state", role: "status" });
    this.live = h("span", { class: "live" });
    this.program = h("code", { class: "program" });
    const button = (words, act, kind = "") =>
      h("button", { type: "button", class: kind, onclick: act }, words);
    this.stop = button("Stop", () => this.#stop(false), "danger");
    this.save = button("Stop and save", () => this.#stop(true));
    this.restart = button("Restart…", () => this.#restart());
    this.clone = button("Clone…", () => this.#clone());
    const actions = about.read_only ? [] : [this.restart, this.clone, this.save, this.stop];
    this.element = h(
      "div",
      { class: "head job" },
      h(
        "div",
        {},
        h("div", { class: "title" }, h("h1", { "data-title": job.name }, job.name), this.state, this.live),
        this.program,
      ),
      h(
        "div",
        { class: "actions", role: "group", "aria-label": "Actions" },
        actions,
        h("a", { class: "button", href: compareLink([job.name]) }, "Compare"),
      ),
    );
  }

  update(job) {
    this.job = job;
    setBadge(this.state, job.status);
    setText(this.program, joinWords(job.program));
    setVisible(this.restart, job.is_over);
    // A job in an unknown state can be neither stopped nor restarted.
    const stoppable = !job.is_over && job.status !== "unknown";
    setVisible(this.stop, stoppable);
    // A queued job can't save a checkpoint.
    setVisible(this.save, stoppable && job.status !== "queued");
    if (job.is_over) this.stop.disabled = this.save.disabled = false;
    setVisible(this.live, !job.is_over);
  }

  setLive(alive) {
    this.live.classList.toggle("broken", !alive);
    setText(this.live, alive ? "live" : "reconnecting…");
  }

  #stop(save) {
    const { name } = this.job;
    ask({
      title: save ? `Save a checkpoint and stop ${name}?` : `Stop ${name}?`,
      body: h(
        "p",
        {},
        save
          ? "Ranks that use hvdtrain.Checkpoint save a checkpoint, then the job ends."
          : "The ranks end at once. Steps after the newest checkpoint are lost.",
      ),
      verb: save ? "Stop and save" : "Stop",
      danger: true,
      act: async () => {
        await post(jobPath(name, "/stop"), { save });
        this.stop.disabled = this.save.disabled = true;
        showMessage(`${name} is being stopped.`);
      },
    });
  }

  #restart() {
    const { job } = this;
    askChanges({
      title: `Restart ${job.name}`,
      verb: "Restart",
      intro:
        job.saved === null
          ? "It starts from the beginning, without a checkpoint. Its log and history are kept."
          : `It resumes from the checkpoint of step ${job.saved}. Its log and history are kept.`,
      job,
      act: async (changes) => {
        await post(jobPath(job.name, "/restart"), changes);
        showMessage(`${job.name} was restarted.`);
      },
    });
  }

  #clone() {
    const { job } = this;
    askChanges({
      title: `Clone ${job.name}`,
      verb: "Start the clone",
      intro: "The clone is a new job with the same options and program, unless you change them.",
      job,
      act: async (changes) => {
        const { name } = await post(jobPath(job.name, "/clone"), changes);
        showMessage(`${name} was submitted.`);
        location.assign(jobLink(name));
      },
    });
  }
}
