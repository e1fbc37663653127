from __future__ import annotations

import dataclasses
import json
import socket
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.cli import main
from hvdtrain.errors import ConfigurationError, JobError
from hvdtrain.jobs import backends
from hvdtrain.jobs.folder import JobFolder
from hvdtrain.jobs.job_view import view_job, view_jobs
from hvdtrain.jobs.kubernetes.pod_backend import (
    PodBackend,
    awaits_objects,
    job_state,
    object_name,
    pod_job,
    queue_state,
)
from hvdtrain.jobs.spec import Backend, JobSpec
from hvdtrain.jobs.state import GONE, NO_ANSWER, RESTARTABLE, JobState
from hvdtrain.jobs.submission import stop_job
from hvdtrain.pods import cluster_api
from hvdtrain.serve.index import JobIndex

_NAME = "train-1"


def _spec(*options: str, pods: tuple[str, ...] = ("--image=i",), created_s: float = 0.0) -> JobSpec:
    backend = Backend("kubernetes", pods)
    return JobSpec(
        options=options, program=("a",), folder="/", backend=backend, created_s=created_s
    )


def test_secrets_come_from_the_environment() -> None:
    environ = {"HF_TOKEN": "t", "MY_KEY": "k", "OTHER_KEY": "o"}
    spec = _spec("-x", "HF_TOKEN", "-xMY_KEY", "--env=PLAIN=1", "-np", "2")
    job = pod_job(Path("/jobs/a"), spec, environ, ranks=2)
    assert job.secrets == {"HF_TOKEN": "t", "MY_KEY": "k"}
    with pytest.raises(ConfigurationError, match="-x HF_TOKEN exports a variable that is not set"):
        pod_job(Path("/jobs/a"), spec, {}, ranks=2)


def test_a_job_folder_on_a_volume_is_shared() -> None:
    spec = _spec(pods=("--image=i", "--volume=data:/jobs"))
    assert pod_job(Path("/jobs/a"), spec, {}, ranks=2).folder == "/jobs/a"
    assert pod_job(Path("/other/a"), spec, {}, ranks=2).folder == ""


def test_options_that_pods_do_not_support() -> None:
    with pytest.raises(ConfigurationError, match="needs -np"):
        pod_job(Path("/a"), _spec(), {}, ranks=None)
    for options in (("-H", "a:2"), ("--hostfile=x",)):
        with pytest.raises(ConfigurationError, match="names hosts, but a job on Kubernetes"):
            pod_job(Path("/a"), _spec(*options), {}, ranks=2)


def test_objects_have_valid_names() -> None:
    assert object_name("train-20261127-044704") == "train-20261127-044704"
    assert object_name("My_Train-20261127-044704-2") == "my-train-20261127-044704-2"
    assert object_name("x" * 60 + "-20261127-044704") == "x" * 29 + "-20261127-044704"


def _pod(role: str = "launcher", **status: Any) -> dict[str, Any]:
    labels = {"hvdtrain/job": _NAME, "hvdtrain/role": role}
    return {"metadata": {"name": role, "labels": labels}, "status": status}


def _waiting(reason: str, message: str = "") -> dict[str, Any]:
    waiting = {"reason": reason, "message": message}
    return {"phase": "Pending", "containerStatuses": [{"state": {"waiting": waiting}}]}


def _failed(code: int, message: str) -> dict[str, Any]:
    terminated = {"exitCode": code, "message": message}
    return {"phase": "Failed", "containerStatuses": [{"state": {"terminated": terminated}}]}


_NO_ROOM = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
_UNSCHEDULABLE = {
    "phase": "Pending",
    "conditions": [
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": _NO_ROOM,
        }
    ],
}
_NO_MODULE = "ModuleNotFoundError: No module named 'hvdtrain'"
STATES = {
    "no-pods": ([], ("PENDING", "")),
    "running": ([_pod(phase="Running"), _pod("worker", phase="Running")], (RESTARTABLE, "")),
    "no-room": (
        [_pod(phase="Running"), _pod("worker", **_UNSCHEDULABLE)],
        (RESTARTABLE, f"worker: not scheduled: {_NO_ROOM}"),
    ),
    "no-image": (
        [_pod(**_waiting("ImagePullBackOff", 'Back-off pulling image "x"'))],
        ("PENDING", 'launcher: its image can\'t be pulled: Back-off pulling image "x"'),
    ),
    "no-hvdtrain": (
        [_pod(**_failed(1, f"Traceback ...\n{_NO_MODULE}\n"))],
        ("REQUEUED", f"launcher: its container ended: {_NO_MODULE}"),
    ),
    "killed": (
        [_pod(**_failed(137, ""))],
        ("REQUEUED", "launcher: its container ended: exit code 137"),
    ),
    "preempted": ([_pod(**_failed(75, "preempted"))], ("REQUEUED", "")),
    "pulling-its-image": ([_pod(**_waiting("ContainerCreating"))], ("PENDING", "")),
    "evicted": (
        [
            _pod(phase="Failed", reason="Evicted", message="The node was low on memory."),
            _pod(phase="Pending"),
        ],
        ("PENDING", "launcher: Evicted: The node was low on memory."),
    ),
    "done": ([_pod(phase="Succeeded")], ("COMPLETED", "")),
    "between-launchers": ([_pod(phase="Failed")], ("REQUEUED", "")),
}


@pytest.mark.parametrize(("pods", "state"), STATES.values(), ids=STATES)
def test_the_state_of_pods(pods, state) -> None:
    assert queue_state({}, pods) == state


@pytest.mark.parametrize("pods", [[_pod(phase="Failed")], []], ids=["failed", "deleted"])
def test_a_job_that_gave_up_is_shown_as_failed(pods) -> None:
    job = {"status": {"conditions": [{"type": "Failed", "status": "True"}]}}
    assert queue_state(job, pods) == ("FAILED", "")


STOPPED = {
    "requested": {"metadata": {"annotations": {"hvdtrain/stop": "save"}}},
    "deleted": {"metadata": {"deletionTimestamp": "2026-11-27T11:07:23Z"}},
}


@pytest.mark.parametrize("job", STOPPED.values(), ids=STOPPED)
def test_a_stopped_job_does_not_wait_for_another_launcher(job) -> None:
    for phases, state in {
        ("Failed", "Running"): "RUNNING",
        ("Failed", "Failed"): "CANCELLED",
        (): "CANCELLED",
        ("Succeeded",): "COMPLETED",
        # The previous launcher was lost with its node before it could stop the job.
        ("Failed", "Pending"): "PENDING",
    }.items():
        assert queue_state(job, [_pod(phase=phase) for phase in phases]) == (state, "")


_READY = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
JOB_STATES = {
    "pending": ("PENDING", [], None),
    "workers-start": (
        RESTARTABLE,
        [_pod(phase="Running"), _pod("worker")],
        ("queued", None, ""),
    ),
    "workers-are-ready": (RESTARTABLE, [_pod("worker", **_READY)], ("running", None, "")),
    "one-worker-is-not-ready": (
        RESTARTABLE,
        [_pod("worker", **_READY), _pod("worker", **_UNSCHEDULABLE)],
        ("queued", None, ""),
    ),
    "done": ("COMPLETED", [], ("ended", 0, "done")),
    "stopped": ("CANCELLED", [], ("ended", None, "ordered")),
    "failed": ("FAILED", [], ("ended", None, "failed")),
    "gone": (GONE, [], ("ended", None, "lost")),
}


@pytest.mark.parametrize(("word", "pods", "expected"), JOB_STATES.values(), ids=JOB_STATES)
def test_the_state_of_a_job_without_a_volume(word, pods, expected) -> None:
    state = job_state(word, "why", pods)
    assert expected == (None if state is None else (state.phase, state.code, state.cause))


def test_a_job_without_a_volume_ended_when_its_launcher_did() -> None:
    launcher = _pod(**_failed(1, "no"))
    terminated = launcher["status"]["containerStatuses"][0]["state"]["terminated"]
    terminated["finishedAt"] = "2026-11-27T11:07:23Z"
    state = job_state("FAILED", "launcher: its container ended: no", [launcher])
    assert state is not None
    assert state.since_s == datetime(2026, 11, 27, 11, 7, 23, tzinfo=UTC).timestamp()
    assert state.verdict == "launcher: its container ended: no"


_SUBMITTED_S = datetime(2026, 11, 27, 11, 0, 0, 700_000, tzinfo=UTC).timestamp()
AWAITED = {
    "no-job-yet": (None, 5, True),
    "job-of-the-previous-run": ("2026-11-27T10:00:00Z", 100, True),
    "created-in-the-same-second": ("2026-11-27T11:00:00Z", 5, False),
    "created": ("2026-11-27T11:00:03Z", 5, False),
    "job-is-gone": (None, 1000, False),
    "slow-clock-of-the-cluster": ("2026-11-27T10:00:00Z", 1000, False),
}


@pytest.mark.parametrize(("created", "after_s", "awaited"), AWAITED.values(), ids=AWAITED)
def test_missing_objects_are_awaited_after_the_submission(created, after_s, awaited) -> None:
    job = None if created is None else {"metadata": {"creationTimestamp": created}}
    now_s = _SUBMITTED_S + after_s
    assert awaits_objects(job, created_s=_SUBMITTED_S, now_s=now_s) == awaited


class _Cluster:
    """A cluster with the objects of one job, which counts queries."""

    def __init__(self) -> None:
        self.found: Any = None
        self.found_pods: list[Any] = []
        self.printed = ""
        self.queries = 0
        self.requests: list[Any] = []

    def job(self, _name: str) -> Any:
        return self.found

    def jobs(self) -> Any:
        self.queries += 1
        return [] if self.found is None else [self.found]

    def pods(self, _name: str = "") -> Any:
        return self.found_pods

    def log(self, _pod: str, _container: str, _since: str) -> str:
        return self.printed

    def delete(self, _name: str) -> None:
        self.requests.append("delete")

    def patch_job(self, _name: str, content: Any) -> None:
        self.requests.append(content["metadata"]["annotations"])

    def creation_problems(self) -> dict[str, str]:
        return {}


_JOB = {"metadata": {"name": _NAME, "creationTimestamp": "2026-11-27T10:00:00Z"}, "status": {}}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> _Cluster:
    cluster = _Cluster()
    monkeypatch.setattr(cluster_api.ClusterApi, "of_context", lambda *_: cluster)
    monkeypatch.setitem(backends._BACKENDS, "kubernetes", PodBackend())
    monkeypatch.setattr("hvdtrain.jobs.kubernetes.pod_backend.INTERVAL_S", 0.0)
    return cluster


def _queued_job(tmp_path: Path, created_s: float = 0.0) -> JobFolder:
    job = JobFolder(tmp_path / _NAME)
    job.path.mkdir()
    job.write_spec(_spec(created_s=created_s))
    job.write_state(JobState(phase="queued"))
    return job


def test_the_status_of_a_job_that_the_cluster_may_not_know(
    tmp_path: Path, cluster: _Cluster
) -> None:
    job = _queued_job(tmp_path, created_s=time.time())
    assert view_job(job).status == "queued", "it may not be created yet"
    cluster.found, cluster.found_pods = _JOB, [_pod(phase="Succeeded")]
    assert view_job(job).status == "queued", "this is the Job of the previous run"
    job.write_spec(dataclasses.replace(job.read_spec(), created_s=1.0))
    cluster.found, cluster.found_pods = None, []
    assert view_job(job).status == "lost"
    cluster.found = _JOB
    cluster.found_pods = [_pod(phase="Running"), _pod("worker", **_READY)]
    assert view_job(job).status == "running", "another cluster was asked before"
    cluster.found_pods = [_pod(phase="Succeeded")]
    assert view_job(job).status == "done"
    cluster.found, cluster.found_pods = None, []
    assert view_job(job).status == "done", "the end was recorded"


def _launcher(phase: str) -> dict[str, Any]:
    return {**_pod(phase=phase), "spec": {"containers": [{"name": "launcher"}]}}


def test_log_lines_end_at_newlines_only(tmp_path: Path, cluster: _Cluster) -> None:
    cluster.found_pods = [_launcher(phase="Running")]
    text = "a\x0bb\x0cc\x1cd\x1de\x1ef\x85g\u2028z z"
    cluster.printed = f"2026-11-29T10:00:00.1Z {text}\n2026-11-29T10:00:00.2Z \n"
    lines = PodBackend().log_lines(JobFolder(tmp_path / _NAME), _spec(), "")
    assert lines == [("2026-11-29T10:00:00.1Z", text), ("2026-11-29T10:00:00.2Z", "")]


def test_the_reason_of_a_refusal_is_shown(tmp_path: Path, cluster: _Cluster) -> None:
    def jobs() -> Any:
        raise cluster_api.RefusedError("jobs can't be read in namespace small: forbidden")

    cluster.jobs = jobs  # type: ignore[method-assign]
    view = view_job(_queued_job(tmp_path))
    assert view.status == "unknown"
    assert "jobs can't be read in namespace small: forbidden" in view.verdict


def test_all_who_wait_for_jobs_share_a_query(
    tmp_path: Path, cluster: _Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(backends._BACKENDS, "kubernetes", PodBackend())
    monkeypatch.setattr("hvdtrain.jobs.kubernetes.pod_backend.INTERVAL_S", 60.0)
    job = _queued_job(tmp_path)
    cluster.found, cluster.found_pods = _JOB, [_launcher(phase="Running")]
    index = JobIndex(tmp_path)
    for _ in range(3):
        index.refresh()
    view_jobs([job, job])
    assert main(["stop", _NAME, "--jobs-dir", str(tmp_path), "--wait", "0.3"]) == 1
    assert cluster.requests == [{"hvdtrain/stop": "now"}]
    assert main(["logs", _NAME, "--jobs-dir", str(tmp_path)]) == 0
    assert cluster.queries == 1


def test_following_a_log_does_not_ask_in_each_poll(
    tmp_path: Path, cluster: _Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    interval_s, polls = 0.5, []
    monkeypatch.setitem(backends._BACKENDS, "kubernetes", PodBackend())
    monkeypatch.setattr("hvdtrain.jobs.kubernetes.pod_backend.INTERVAL_S", interval_s)
    monkeypatch.setattr("hvdtrain.job_commands.logs.QUEUE_POLL_S", 0.01)
    job = _queued_job(tmp_path)
    cluster.found, cluster.found_pods = _JOB, [_launcher(phase="Running")]

    def log(*_: str) -> str:
        polls.append(time.monotonic())
        if len(polls) == 10:
            cluster.found_pods = [_launcher(phase="Succeeded")]
        return ""

    cluster.log = log  # type: ignore[method-assign]
    assert main(["logs", _NAME, "--jobs-dir", str(tmp_path), "-f"]) == 0
    assert (view_job(job).status, len(polls) > 10) == ("done", True)
    assert cluster.queries <= 2 + (polls[-1] - polls[0]) / interval_s


@pytest.mark.parametrize(
    ("phase", "request_"), [("Running", {"hvdtrain/stop": "save"}), ("Pending", "delete")]
)
def test_a_job_with_a_running_launcher_saves_even_if_a_worker_is_lost(
    tmp_path: Path, cluster: _Cluster, phase: str, request_: object
) -> None:
    cluster.found = _JOB
    cluster.found_pods = [_pod(phase=phase), _pod("worker", **_UNSCHEDULABLE)]
    job = _queued_job(tmp_path)
    view = view_job(job)
    assert view.status == "queued"
    stop_job(job, view, save=True)
    assert cluster.requests == [request_]


@pytest.mark.parametrize("deleted", [None, "2026-11-27T11:07:23Z"], ids=["new", "restarted"])
def test_a_job_that_is_being_submitted_can_not_be_stopped(
    tmp_path: Path, cluster: _Cluster, deleted: str | None
) -> None:
    # It would be marked as stopped, and then start.
    if deleted is not None:
        cluster.found = {"metadata": {**_JOB["metadata"], "deletionTimestamp": deleted}}
    job = _queued_job(tmp_path, created_s=time.time())
    with pytest.raises(JobError, match="is being submitted; stop it again in a moment"):
        stop_job(job, view_job(job), save=False)
    assert (view_job(job).status, cluster.requests) == ("queued", [])


def test_a_silent_cluster_is_asked_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("kubernetes")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        server = {"server": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "silent", "cluster": server}],
            "users": [{"name": "me", "user": {"token": "x"}}],
            "contexts": [{"name": "here", "context": {"cluster": "silent", "user": "me"}}],
            "current-context": "here",
        }
        (path := tmp_path / "config").write_text(json.dumps(config))
        default = "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION"
        monkeypatch.setattr(default, str(path))
        monkeypatch.setattr(cluster_api, "TIMEOUT_S", 0.2)
        with pytest.raises(JobError, match="the cluster does not answer"):
            cluster_api.ClusterApi.of_context("", "").job("train")
        silent.settimeout(0.1)
        while _accepts(silent):
            pass
        invalid = _spec(pods=("--colour=red",))
        ((_, state, reason, _),) = PodBackend().describe({Path("/jobs/a"): invalid}).values()
        assert (state, "is not an option" in reason) == (NO_ANSWER, True)
        answers = PodBackend().describe({Path(f"/jobs/{number}"): _spec() for number in range(5)})
        assert {answer.state for answer in answers.values()} == {NO_ANSWER}
        assert [_accepts(silent) for _ in range(2)] == [True, False]


def _accepts(server: socket.socket) -> bool:
    """Return whether a client has connected."""
    try:
        server.accept()[0].close()
    except TimeoutError:
        return False
    return True
