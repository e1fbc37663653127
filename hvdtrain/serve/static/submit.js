// The form that submits a job after it has shown the job's plan.
import { post, session } from "./api.js";
import { debounced, field, h, setText } from "./dom.js";
import { showError, showMessage } from "./notices.js";
import { jobLink } from "./router.js";
import { joinWords, splitWords } from "./words.js";

const MODES = [
  ["allreduce", "allreduce: ranks average gradients"],
  ["local-sgd", "local-sgd: ranks average weights"],
  ["async-ps", "async-ps: parameter servers, asynchronous"],
  ["sync-ps", "sync-ps: parameter servers, synchronous"],
  ["towers", "towers: several devices per rank"],
];

export async function submitView() {
  const about = await session();
  return (main) => (about.read_only ? refuse(main) : fill(main, about));
}

function refuse(main) {
  main.append(
    h("h1", {}, "Submit a job"),
    h(
      "section",
      { class: "card off" },
      h(
        "p",
        {},
        "This page can't submit jobs: hvdtrain serve was started with ",
        h("code", {}, "--read-only"),
        ".",
      ),
      h(
        "p",
        {},
        "Without that option, anyone with the token can run programs as the user who started hvdtrain serve.",
      ),
    ),
  );
}

const GPUS = [
  ["", "default"],
  ["1", "one per rank"],
  ["0", "none"],
];

// Returns the options for GPUs. On this machine, one GPU per rank is the default.
function gpuWords(count, backend) {
  if (count === "0") return ["-x", "CUDA_VISIBLE_DEVICES="];
  if (count === "1" && backend === "slurm") return ["--sbatch=--gpus-per-task=1"];
  if (count === "1" && backend === "kubernetes") return ["--gpus-per-rank", "1"];
  return [];
}

const BACKENDS = { local: "this machine's queue", slurm: "Slurm", kubernetes: "Kubernetes" };

function fill(main, { folder: here, backends }) {
  const text = (more = {}) =>
    h("input", { type: "text", spellcheck: "false", autocapitalize: "off", autocomplete: "off", ...more });
  const program = h("textarea", {
    rows: 2,
    required: true,
    spellcheck: "false",
    autocapitalize: "off",
    placeholder: "python train.py --epochs 20",
  });
  const folder = text({ value: here, required: true });
  const ranks = h("input", {
    type: "number",
    min: 1,
    step: 1,
    inputmode: "numeric",
    placeholder: "all slots",
  });
  const hosts = text({ placeholder: "a:4,b:4 or node[01-04]:2" });
  const backend = h(
    "select",
    {},
    backends.map((name) => h("option", { value: name }, BACKENDS[name])),
  );
  const mode = h(
    "select",
    {},
    MODES.map(([name, words]) => h("option", { value: name }, words)),
  );
  const gpus = h(
    "select",
    {},
    GPUS.map(([value, words]) => h("option", { value }, words)),
  );
  const restarts = h("input", { type: "number", min: 0, step: 1, inputmode: "numeric", placeholder: "0" });
  const sbatch = text({ placeholder: "--partition=gpu --time=1:00:00" });
  const options = text({ placeholder: "-x NAME=VALUE --hang-timeout-s 60" });
  const forSlurm = field("sbatch options", sbatch);
  const image = text({ placeholder: "registry.example/train:1" });
  const forImage = field("Pod image", image);
  const pods = text({ placeholder: "--gpus-per-rank 1 --volume data:/data --namespace train" });
  const forPods = field("Pod options", pods);
  const more = field("Other options of hvdtrain run", options);
  more.classList.add("wide");
  const command = h("ol", { class: "words", "aria-label": "The words of the command" });
  const wrong = h("p", { class: "wrong", role: "alert" });
  const plan = h("button", { type: "button", class: "primary", onclick: () => showPlan() }, "Show the plan");
  const start = h("button", { class: "primary", disabled: true }, "Start");
  const planned = h("pre", {
    class: "plan",
    tabindex: 0,
    role: "region",
    "aria-label": "Plan",
    hidden: true,
  });
  const state = h(
    "p",
    { class: "hint", role: "status" },
    "Show the plan before you start the job.",
  );
  const form = h(
    "form",
    { class: "submit" },
    h(
      "div",
      {},
      h(
        "section",
        { class: "card" },
        field("Program", program, "Runs on every rank."),
        field("Working directory", folder),
      ),
      h(
        "section",
        { class: "card fields" },
        field("Ranks", ranks),
        field("Queue", backend),
        field("GPUs", gpus),
        field("Hosts", hosts),
        field("Maximum restarts after failures", restarts),
        field("Training mode", mode),
        forSlurm,
        forImage,
        forPods,
        more,
      ),
    ),
    h(
      "section",
      { class: "card" },
      h("h2", {}, "Command"),
      command,
      wrong,
      h("div", { class: "actions" }, plan, start),
      state,
      planned,
    ),
  );
  main.append(h("h1", {}, "Submit a job"), form);

  function body() {
    const words = [];
    if (ranks.value) words.push("-np", ranks.value);
    if (hosts.value.trim()) words.push("-H", hosts.value.trim());
    if (restarts.value) words.push("--max-restarts", restarts.value);
    if (mode.value !== "allreduce") words.push("--mode", mode.value);
    words.push(...splitWords(options.value));
    if (backend.value !== "local") words.push("--on", backend.value);
    words.push(...gpuWords(gpus.value, backend.value));
    if (backend.value === "slurm") words.push(...splitWords(sbatch.value).map((word) => `--sbatch=${word}`));
    if (backend.value === "kubernetes") words.push("--image", image.value.trim(), ...splitWords(pods.value));
    return { program: splitWords(program.value), options: words, folder: folder.value.trim() };
  }

  let changes = 0;
  function changed() {
    changes += 1;
    forSlurm.hidden = backend.value !== "slurm";
    forImage.hidden = forPods.hidden = backend.value !== "kubernetes";
    if (!start.disabled) setText(state, "The job has changed; show the plan again.");
    start.disabled = true;
    plan.className = "primary";
    planned.hidden = true;
    setText(wrong, "");
    try {
      const { program, options } = body();
      const shown = ["hvdtrain", "submit", ...options, "--", ...program];
      command.replaceChildren(
        ...shown.map((word, at) =>
          h("li", { class: at < 2 || at === options.length + 2 ? "own" : "" }, word === "" ? "''" : word),
        ),
      );
      command.title = joinWords(shown);
    } catch (error) {
      setText(wrong, error.message);
    }
  }

  async function busy(words, act) {
    plan.disabled = start.disabled = true;
    setText(state, words);
    setText(wrong, "");
    try {
      return await act();
    } catch (error) {
      setText(wrong, error.message);
      setText(state, "");
      if (error.name !== "ApiError" && error.name !== "Error") showError(error);
      return null;
    } finally {
      plan.disabled = false;
    }
  }

  async function showPlan() {
    if (!form.reportValidity()) return;
    const version = changes;
    const result = await busy("Planning…", () => post("/api/plan", body()));
    if (!result || version !== changes) return;
    planned.textContent = result.plan;
    planned.hidden = false;
    start.disabled = false;
    plan.className = "";
    setText(state, "Nothing has been started yet.");
  }

  form.addEventListener("input", debounced(changed, 0));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (start.disabled) {
      // The user has pressed Enter in a field.
      await showPlan();
      return;
    }
    const result = await busy("Submitting…", () => post("/api/jobs", body()));
    if (!result) return;
    showMessage(`${result.name} was submitted.`);
    location.assign(jobLink(result.name));
  });
  changed();
}
