"""Jobs in pods of a real Kubernetes cluster, and ``hvdtrain check`` of its namespaces.

The scenarios mostly wait for pods, so several run at the same time.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.check.on_kubernetes import CHECKS
from tests.environments import folder_of, missing_environment
from tests.harness.jobs import REPOSITORY, Completed
from tests.harness.required import skip_or_fail
from tests.kubernetes.cluster import KubernetesCluster
from tests.kubernetes.image import IMAGE, USER_ID

CRD = "HVDTRAIN_TEST_MPIJOB_CRD"
TRAINING = Path(__file__).with_name("pod_training.py")
STANDIN = "tests.launch.standin"
JOBS = "/apis/batch/v1/namespaces/default/jobs"
# Without this, the objects of a deleted Job would be kept.
WITH_PODS = "?propagationPolicy=Background"
PODS = "/api/v1/namespaces/default/pods"
ELASTIC = ("--elastic", "--preempt-grace-s", "150")
# Time limit in seconds for following a log to its end. It is five times the usual duration, because
# machines may be busy.
FOLLOWED_S = 700
# The number of scenarios that run at the same time.
AT_ONCE = 4
_SUBMITTING = threading.Lock()

pytestmark = [pytest.mark.timeout(1200), pytest.mark.more]


class Commands:
    """Runs ``hvdtrain`` as a user of the cluster.

    Args:
        cluster: The cluster.
        own: A folder of this scenario.
        jobs: The folder of jobs.
    """

    def __init__(self, cluster: KubernetesCluster, own: Path, jobs: Path | None = None) -> None:
        self.cluster = cluster
        self.own = own
        # By default pods see this folder.
        self.jobs = jobs or cluster.folder / "jobs"
        self.backend = "tensorflow"
        self._template = own / "pod.json"
        template = cluster.pod_template()
        # For busy machines.
        template["spec"]["terminationGracePeriodSeconds"] = 180
        self._template.write_text(json.dumps(template))

    def without_volume(self) -> Commands:
        """Return commands whose jobs have folders that pods don't see."""
        return Commands(self.cluster, self.own, self.own / "jobs")

    def run(self, *words: str, code: int = 0, timeout_s: float = 300) -> Completed:
        """Run a command to its end."""
        argv = [sys.executable, "-m", "hvdtrain", *words]
        done = self.cluster.run(
            argv,
            timeout_s=timeout_s,
            env={"HVDTRAIN_JOBS_DIR": str(self.jobs), "KERAS_BACKEND": self.backend},
        )
        assert done.returncode == code, done
        return done

    def submit(
        self,
        *words: str,
        ranks: int,
        options: tuple[str, ...] = (),
        pods: tuple[str, ...] = (),
        code: int = 0,
    ) -> str:
        """Submit a job, and return its name, or the error."""
        where = [
            "--image",
            IMAGE,
            "--template",
            str(self._template),
            "--pod-python",
            sys.executable,
        ]
        where += ["--pod-folder", str(self.cluster.folder)]
        argv = ["submit", "--on", "kubernetes", "-np", str(ranks), *options]
        argv += [*where, *pods, "--", *words]
        with _SUBMITTING:
            done = self.run(*argv, code=code)
            # Names of jobs in other folders differ by the second.
            time.sleep(1.0)
        return done.stdout.strip() if code == 0 else done.stderr

    def view(self, name: str) -> dict[str, Any]:
        """Return a job of ``hvdtrain jobs --json``."""
        jobs = map(json.loads, self.run("jobs", "--json").stdout.splitlines())
        (view,) = [job for job in jobs if job["name"] == name]
        return dict(view)

    def wait_for(
        self, name: str, ready: Callable[[dict[str, Any]], bool], timeout_s: float = 300
    ) -> dict[str, Any]:
        """Wait until ``hvdtrain jobs`` shows a job that is ``ready``."""
        deadline = time.monotonic() + timeout_s
        while not ready(view := self.view(name)):
            assert time.monotonic() < deadline, (view, self.cluster.ask(PODS))
            # Look rarely, because each look starts a process, and pods need the cores.
            time.sleep(1.0)
        return view

    def wait_until(self, name: str, what: str, ready: Any, timeout_s: float = 300) -> Any:
        """Wait until the recorded state of a job is ``ready``."""
        path = self.jobs / name / "state.json"
        deadline = time.monotonic() + timeout_s
        while not ready(state := json.loads(path.read_text())):
            over = time.monotonic() > deadline
            assert not over, (what, state, self.run("logs", name).stdout[-3000:])
            time.sleep(0.3)
        return state

    def events(self, name: str, kind: str) -> list[dict[str, Any]]:
        """Return the events of a job."""
        events = map(json.loads, (self.jobs / name / "events.jsonl").read_text().splitlines())
        return [event for event in events if event["kind"] == kind]

    def pods(self, name: str, role: str) -> list[dict[str, Any]]:
        """Return the pods of a job."""
        labels = f"hvdtrain/job={objects_named(name)},hvdtrain/role={role}"
        return list(self.cluster.ask(f"{PODS}?labelSelector={labels}")["items"])

    def delete_pod(self, pod: str, *, warned: bool = True) -> None:
        """Delete a pod, by default with its grace period."""
        how = "" if warned else "?gracePeriodSeconds=0"
        assert self.cluster.ask(f"{PODS}/{pod}{how}", method="DELETE")["metadata"]["name"] == pod

    def scale(self, name: str, workers: int) -> None:
        """Scale the workers, as ``kubectl scale`` does."""
        path = f"/apis/apps/v1/namespaces/default/statefulsets/{objects_named(name)}-worker/scale"
        done = self.cluster.ask(path, {"spec": {"replicas": workers}}, method="PATCH")
        assert done["spec"]["replicas"] == workers


def objects_named(name: str) -> str:
    """Return the name of a job's objects."""
    return name.replace("_", "-")


def a_training_loses_no_sample_with_a_pod(commands: Commands) -> None:
    if reason := missing_environment("jax"):
        skip_or_fail("jax", reason)
    python = str(folder_of("jax") / "bin" / "python")
    program = (python, str(TRAINING), str(commands.cluster.folder / "trained"))
    commands.backend = "jax"
    name = commands.submit(*program, ranks=2, options=ELASTIC)
    commands.wait_until(name, "a step", lambda state: (state["step"] or 0) > 3)
    commands.delete_pod(f"{objects_named(name)}-worker-1")
    log = commands.run("logs", "-f", name, timeout_s=FOLLOWED_S).stdout
    assert commands.view(name)["status"] == "done", log[-3000:]
    # On a busy machine rank 0 starts alone, before the new pod is ready.
    began, *again = (sorted(at["hosts"].values()) for at in commands.events(name, "began"))
    assert (began, again[-1] in ([1], [1, 1])) == ([1, 1], True), again
    first, *others = commands.events(name, "ended")[:-1]
    assert (first["cause"], first["saved"]) == ("preempted", first["step"]), first
    assert [end["saved"] for end in others] == [end["step"] for end in others], others
    assert f"resuming from the checkpoint of step {first['step']}" in log
    assert "visits [2.0]\n" in log, log[-3000:]


def a_job_without_a_volume_has_its_log_in_its_pods(commands: Commands) -> None:
    outside = commands.without_volume()
    print_rank = (
        "from mpi4py.MPI import COMM_WORLD as world; print('rank', world.rank, 'of', world.size)"
    )
    other = outside.submit(sys.executable, "-c", print_rank, ranks=2)
    followed = outside.run("logs", "-f", other, timeout_s=FOLLOWED_S).stdout
    assert f"[0 {other}-worker-0] rank 0 of 2\n" in followed
    second = f"[1 {other}-worker-1] rank 1 of 2\n"
    assert outside.run("logs", "--rank", "1", other).stdout == second
    assert outside.run("logs", other).stdout == followed
    last = outside.run("logs", "-t", "-n", "1", "--grep", "of 2", other).stdout
    assert re.fullmatch(r"20[-\d]+ [:\d]+ \[[01] .*\] rank [01] of 2\n", last)
    assert outside.view(other)["status"] == "done"
    commands.cluster.ask(f"{JOBS}/{objects_named(other)}{WITH_PODS}", method="DELETE")
    log = f"{PODS}?labelSelector=hvdtrain/job={other}"
    commands.cluster.wait_for("end of its pods", log, lambda found: not found["items"])
    gone = (
        "its pods no longer exist, and its log and history are lost because its folder is not on "
        "a volume."
    )
    assert f"{other} has no log: {gone}" in outside.run("logs", other, code=1).stderr
    assert outside.view(other)["status"] == "done", "the end was recorded"
    (outside.jobs / other / "state.json").write_text('{"phase": "queued"}')
    # Soon after the submission the objects would be awaited.
    described = json.loads((spec := outside.jobs / other / "spec.json").read_text())
    spec.write_text(json.dumps({**described, "created_s": 1.0}))
    view = outside.view(other)
    assert (view["status"], view["verdict"].partition(" To keep them")[0]) == ("lost", gone)


def the_mpi_operator_accepts_the_documented_mpijob(commands: Commands) -> None:
    # The API server drops fields that the definition does not have.
    path = Path(os.environ.get(CRD, ""))
    if not path.is_file():
        skip_or_fail("mpijob", f"{CRD} is not the path of kubeflow.org_mpijobs.yaml")
    cluster = commands.cluster
    (definition,) = yaml.safe_load_all(path.read_text())
    cluster.ask("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition)
    mpijobs = "/apis/kubeflow.org/v2beta1/namespaces/default/mpijobs"
    cluster.wait_for("MPIJobs", mpijobs, lambda found: "items" in found)
    document = (REPOSITORY / "docs" / "kubernetes.md").read_text()
    (text,) = re.findall(r"```yaml\n(apiVersion: kubeflow.*?)```", document, re.DOTALL)
    manifest = yaml.safe_load(text)
    created = cluster.ask(mpijobs, manifest)
    assert created["kind"] == "MPIJob", created
    assert list(_dropped(manifest, created)) == []
    # The API server validates pods more strictly than the definition.
    for role, replicas in manifest["spec"]["mpiReplicaSpecs"].items():
        pod = {"metadata": {"name": "one"}, **replicas["template"]}
        created = cluster.ask(f"{PODS}?dryRun=All", pod)
        assert created["kind"] == "Pod", (role, created)
        assert list(_dropped(pod["spec"], created["spec"])) == []


def _dropped(wanted: Any, found: Any, place: str = "") -> Iterator[str]:
    """Yield the paths of values that are missing in another object."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        for name, value in wanted.items():
            yield from _dropped(value, found.get(name), f"{place}.{name}")
    elif isinstance(wanted, list) and isinstance(found, list):
        for number, value in enumerate(wanted):
            yield from _dropped(value, found[number], f"{place}.{number}")
    elif str(wanted) != str(found):
        yield place


def a_failed_job_is_not_restarted_and_releases_its_workers(commands: Commands) -> None:
    program = "from mpi4py import MPI; 1 / (MPI.COMM_WORLD.rank - 1)"
    name = commands.submit(sys.executable, "-c", program, ranks=2)
    view = commands.wait_for(name, lambda job: job["status"] == "failed")
    assert "ZeroDivisionError" in view["verdict"], view
    cluster = commands.cluster
    job = cluster.wait_for(
        "failed Job",
        f"{JOBS}/{name}",
        lambda one: any(c["type"] == "Failed" for c in one["status"].get("conditions", ())),
    )
    assert job["status"].get("failed") == 1
    cluster.wait_for(
        "freed workers",
        f"{PODS}?labelSelector=hvdtrain/job={name},hvdtrain/role=worker",
        lambda found: not found["items"],
    )


def an_unschedulable_job_shows_the_reason_and_can_be_stopped(commands: Commands) -> None:
    name = commands.submit(sys.executable, "-c", "pass", ranks=1, pods=("--gpus-per-rank", "8"))
    log = f"{PODS}?labelSelector=hvdtrain/job={name}"
    commands.cluster.wait_for("pods", log, lambda found: len(found["items"]) == 2)
    view = commands.wait_for(name, lambda job: job["status"] == "queued")
    assert "worker-0: not scheduled" in view["verdict"], view
    assert "Insufficient nvidia.com/gpu" in view["verdict"], view
    commands.run("stop", "--wait", "240", name)
    assert commands.view(name)["status"] == "stopped"
    commands.run("restart", name)
    commands.cluster.wait_for("pods", log, lambda found: len(found["items"]) == 2)
    commands.run("stop", "--wait", "240", name)
    assert commands.view(name)["status"] == "stopped"
    commands.cluster.wait_for("end of its pods", log, lambda found: not found["items"])


def no_step_is_lost_when_pods_are_deleted_and_scaled(commands: Commands) -> None:
    folder = commands.cluster.folder / "steady"
    folder.mkdir()
    lengths = ("--steps", "9999", "--step-s", "0.05", "--every", "20", "--elastic")
    program = (sys.executable, "-m", STANDIN, str(folder), *lengths)
    name = commands.submit(*program, ranks=2, options=ELASTIC)

    attempts = 0

    def advances(ranks: int) -> None:
        """Wait until a later attempt with this number of ranks has completed steps."""
        nonlocal attempts
        began = commands.wait_until(
            name,
            f"attempt of {ranks} ranks after attempt {attempts}",
            lambda state: (
                state["attempt"] > attempts
                and (state["ranks"], state["phase"]) == (ranks, "running")
            ),
        )
        attempts = began["attempt"]
        commands.wait_until(
            name, "a step", lambda state: (state["step"] or 0) > (began["step"] or 0) + 5
        )

    advances(2)
    worker = f"{objects_named(name)}-worker-1"
    commands.delete_pod(worker)
    advances(2)
    commands.scale(name, 3)
    advances(3)
    (launcher,) = commands.pods(name, "launcher")
    commands.delete_pod(launcher["metadata"]["name"])
    advances(3)
    commands.scale(name, 2)
    # Long before the grace period of the pods ends.
    commands.wait_until(name, "fewer ranks", lambda state: state["ranks"] == 2, timeout_s=160)
    advances(2)
    ended = commands.events(name, "ended")
    assert [event["saved"] for event in ended] == [event["step"] for event in ended], ended
    assert {event["cause"] for event in ended} == {"preempted", "ordered"}, ended
    # Without a grace period training resumes from the last checkpoint.
    commands.delete_pod(worker, warned=False)
    advances(2)
    *_, last = commands.events(name, "ended")
    assert last["cause"] == "preempted"
    assert last["step"] - 20 <= last["saved"] <= last["step"]
    host = f"{worker}.{objects_named(name)}"
    assert f"host {host} was removed: " in last["words"]
    log = commands.run("logs", name).stdout
    assert f"{host} (its pod is deleted) will be removed; saving a checkpoint to restart" in log
    assert "checkpoint written; restarting with 1 more rank" in log
    commands.run("stop", "--save", "--wait", "240", name)
    view = commands.view(name)
    assert (view["status"], view["saved"]) == ("stopped", view["step"])
    commands.cluster.wait_for(
        "freed workers",
        f"{PODS}?labelSelector=hvdtrain/job={objects_named(name)},hvdtrain/role=worker",
        lambda found: not found["items"],
    )


def a_job_without_a_volume_is_stopped_and_restarted(commands: Commands) -> None:
    outside = commands.without_volume()
    program = "import time; print('here', flush=True); time.sleep(600)"
    name = outside.submit(sys.executable, "-c", program, ranks=1)
    for attempt in range(2):
        outside.wait_for(name, lambda job: job["status"] == "running")
        deadline = time.monotonic() + 200
        while not outside.run("logs", "-n", "1", "--grep", "here", name).stdout:
            assert time.monotonic() < deadline
            time.sleep(1.0)
        outside.run("stop", "--wait", "240", name)
        assert outside.view(name)["status"] == "stopped"
        if attempt == 0:
            outside.run("restart", name)
    assert outside.run("logs", name).stdout.count("] here") == 1


def a_launcher_waits_for_the_ranks_of_the_previous_one(commands: Commands) -> None:
    # The ranks save a checkpoint, so that no step is repeated.
    outside = commands.without_volume()
    folder = commands.cluster.folder / "slow"
    folder.mkdir()
    lengths = ("--steps", "3", "--step-s", "6", "--every", "99")
    name = outside.submit(sys.executable, "-m", STANDIN, str(folder), *lengths, ranks=1)
    deadline = time.monotonic() + 200
    while not (folder / "steps").exists():
        assert time.monotonic() < deadline, outside.view(name)
        time.sleep(0.2)
    (launcher,) = outside.pods(name, "launcher")
    outside.delete_pod(launcher["metadata"]["name"])
    statuses: list[str] = []

    def is_done(job: dict[str, Any]) -> bool:
        statuses.append(job["status"])
        return bool(job["code"] == 0)

    outside.wait_for(name, is_done)
    assert {statuses[0], *statuses[:-1]} <= {"running", "queued"}
    steps = [line.split()[-1] for line in (folder / "steps").read_text().splitlines()]
    assert steps == ["1", "2", "3"]


def errors_of_the_cluster_are_shown(commands: Commands) -> None:
    nothing = (sys.executable, "-c", "pass")
    name = commands.submit(*nothing, ranks=1, pods=("--image", "localhost/nothing:1"))
    missing = "its image is not on the node"
    commands.wait_for(name, lambda job: missing in job["verdict"], timeout_s=200)
    commands.run("stop", "--wait", "240", name)
    commands.cluster.ask("/api/v1/namespaces", {"metadata": {"name": "narrow"}})
    quota = {"metadata": {"name": "one"}, "spec": {"hard": {"pods": "1"}}}
    commands.cluster.ask("/api/v1/namespaces/narrow/resourcequotas", quota)
    name = commands.submit(*nothing, ranks=2, pods=("--namespace", "narrow"))
    commands.wait_for(name, lambda job: "exceeded quota: one" in job["verdict"])
    commands.run("stop", "--wait", "240", name)
    error = commands.submit(*nothing, ranks=2, pods=("--namespace", "nowhere"), code=1)
    assert 'namespaces "nowhere" not found' in error


_SUM = """
import os
from mpi4py import MPI

print("sum", MPI.COMM_WORLD.allreduce(1), "of user", os.getuid(), os.environ["KERAS_BACKEND"])
"""


def pods_of_a_user_other_than_root(commands: Commands) -> None:
    template = commands.cluster.pod_template()
    template["spec"]["securityContext"] = {"runAsUser": USER_ID, "runAsNonRoot": True}
    file = commands.own / "user.json"
    file.write_text(json.dumps(template))
    outside = commands.without_volume()
    name = outside.submit(sys.executable, "-c", _SUM, ranks=2, pods=("--template", str(file)))
    outside.run("logs", "-f", name, timeout_s=FOLLOWED_S)
    for rank in ("0", "1"):
        assert (
            f"sum 2 of user {USER_ID} tensorflow"
            in outside.run("logs", "--rank", rank, name).stdout
        )


def mpich_in_pods(commands: Commands) -> None:
    _runs_with(commands, "mpich")


def intel_mpi_in_pods(commands: Commands) -> None:
    _runs_with(commands, "intel-mpi")


def _runs_with(commands: Commands, mpi: str) -> None:
    if reason := missing_environment(mpi):
        skip_or_fail(mpi, reason)
    python = str(folder_of(mpi) / "bin" / "python")
    name = commands.submit(python, "-c", _SUM, ranks=2, pods=("--pod-python", python))
    log = commands.run("logs", "-f", name, timeout_s=FOLLOWED_S).stdout
    assert log.count("sum 2 of user 0 tensorflow") == 2, log
    assert commands.view(name)["mpi"].startswith(("MPICH", "Intel"))


Scenario = Callable[[Commands], None]

# The longest first.
JOBS_IN_PODS: tuple[Scenario, ...] = (
    no_step_is_lost_when_pods_are_deleted_and_scaled,
    a_training_loses_no_sample_with_a_pod,
    a_job_without_a_volume_is_stopped_and_restarted,
    a_launcher_waits_for_the_ranks_of_the_previous_one,
    a_failed_job_is_not_restarted_and_releases_its_workers,
    an_unschedulable_job_shows_the_reason_and_can_be_stopped,
    a_job_without_a_volume_has_its_log_in_its_pods,
    mpich_in_pods,
    intel_mpi_in_pods,
    pods_of_a_user_other_than_root,
    errors_of_the_cluster_are_shown,
    the_mpi_operator_accepts_the_documented_mpijob,
)


@pytest.fixture(scope="module")
def running(
    kubernetes: KubernetesCluster,
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[Callable[..., None], Future[None]]]:
    """Run the scenarios of all selected tests."""
    selected = [
        item.callspec.params["scenario"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.module is request.module
    ]
    pool = ThreadPoolExecutor(AT_ONCE)
    futures = {}
    for scenario in selected:
        commands = Commands(kubernetes, tmp_path_factory.mktemp("scenario"))
        argument = kubernetes if scenario in CHECKS else commands
        futures[scenario] = pool.submit(scenario, argument)
    yield futures
    pool.shutdown(wait=False, cancel_futures=True)


@pytest.mark.parametrize("scenario", [*JOBS_IN_PODS, *CHECKS], ids=lambda one: one.__name__)
def test_on_a_cluster(
    running: dict[Callable[..., None], Future[None]], scenario: Callable[..., None]
) -> None:
    running[scenario].result()
