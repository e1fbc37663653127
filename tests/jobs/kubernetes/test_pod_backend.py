"""The state of a job by its pods, and a cluster that does not answer."""

from __future__ import annotations

import dataclasses
import json
import socket
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.errors import JobError
from hvdtrain.job_commands.stop import stop_job
from hvdtrain.jobs.folder import create_job
from hvdtrain.jobs.job_view import view_job
from hvdtrain.jobs.kubernetes.pod_backend import PodBackend, is_awaited, seen_state, state_of
from hvdtrain.jobs.spec import Backend, JobSpec
from hvdtrain.jobs.state import GOES_ON, GONE, NO_ANSWER, JobState
from hvdtrain.pods import cluster_api


def _pod(role: str = "launcher", **status: Any) -> dict[str, Any]:
    return {"metadata": {"name": role, "labels": {"hvdtrain/role": role}}, "status": status}


def _waits(reason: str, message: str = "") -> dict[str, Any]:
    waiting = {"reason": reason, "message": message}
    return {"phase": "Pending", "containerStatuses": [{"state": {"waiting": waiting}}]}


def _ended(code: int, message: str) -> dict[str, Any]:
    terminated = {"exitCode": code, "message": message}
    return {"phase": "Failed", "containerStatuses": [{"state": {"terminated": terminated}}]}


_UNSCHEDULABLE = {
    "phase": "Pending",
    "conditions": [
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
        }
    ],
}
STATES = {
    "nothing yet": ([], ("PENDING", "")),
    "both run": ([_pod(phase="Running"), _pod("worker", phase="Running")], (GOES_ON, "")),
    "no room": (
        [_pod(phase="Running"), _pod("worker", **_UNSCHEDULABLE)],
        (
            GOES_ON,
            "worker: it has no node: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
        ),
    ),
    "no image": (
        [_pod(**_waits("ImagePullBackOff", 'Back-off pulling image "x"'))],
        ("PENDING", 'launcher: its image can\'t be pulled: Back-off pulling image "x"'),
    ),
    "its container has no hvdtrain": (
        [_pod(**_ended(1, "Traceback ...\nModuleNotFoundError: No module named 'hvdtrain'\n"))],
        (
            "REQUEUED",
            "launcher: its container ended: ModuleNotFoundError: No module named 'hvdtrain'",
        ),
    ),
    "it was killed": (
        [_pod(**_ended(137, ""))],
        ("REQUEUED", "launcher: its container ended: exit code 137"),
    ),
    "it goes on elsewhere": ([_pod(**_ended(75, "preempted"))], ("REQUEUED", "")),
    "image is being pulled": ([_pod(**_waits("ContainerCreating"))], ("PENDING", "")),
    "evicted": (
        [
            _pod(phase="Failed", reason="Evicted", message="The node was low on memory."),
            _pod(phase="Pending"),
        ],
        ("PENDING", "launcher: Evicted: The node was low on memory."),
    ),
    "done": ([_pod(phase="Succeeded")], ("COMPLETED", "")),
    "another launcher is to come": ([_pod(phase="Failed")], ("REQUEUED", "")),
}


@pytest.mark.parametrize(("pods", "state"), STATES.values(), ids=STATES)
def test_pods_tell_how_a_job_is(pods, state) -> None:
    assert state_of({}, pods) == state


def test_a_job_that_was_given_up_has_failed() -> None:
    over = {"status": {"conditions": [{"type": "Failed", "status": "True"}]}}
    assert state_of(over, [_pod(phase="Failed")]) == ("FAILED", "")
    # Somebody has tidied up.
    assert state_of(over, []) == ("FAILED", "")


STOPPED = {
    "told to": {"metadata": {"annotations": {"hvdtrain/stop": "save"}}},
    "deleted": {"metadata": {"deletionTimestamp": "2026-11-27T11:07:23Z"}},
}


@pytest.mark.parametrize("job", STOPPED.values(), ids=STOPPED)
def test_what_was_stopped_waits_for_no_other_launcher(job) -> None:
    """Also before the cluster has found out that its last has ended."""
    assert state_of(job, [_pod(phase="Failed"), _pod(phase="Running")]) == ("RUNNING", "")
    assert state_of(job, [_pod(phase="Failed"), _pod(phase="Failed")]) == ("CANCELLED", "")
    assert state_of(job, []) == ("CANCELLED", "")
    assert state_of(job, [_pod(phase="Succeeded")]) == ("COMPLETED", "")
    # The last was lost with its node, before it could do it.
    assert state_of(job, [_pod(phase="Failed"), _pod(phase="Pending")]) == ("PENDING", "")


_READY = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
SEEN = {
    "it waits": ("PENDING", [], None),
    "its workers start": (GOES_ON, [_pod(phase="Running"), _pod("worker")], ("queued", None, "")),
    "its workers are ready": (GOES_ON, [_pod("worker", **_READY)], ("running", None, "")),
    "one worker is not": (
        GOES_ON,
        [_pod("worker", **_READY), _pod("worker", **_UNSCHEDULABLE)],
        ("queued", None, ""),
    ),
    "done": ("COMPLETED", [], ("ended", 0, "done")),
    "stopped": ("CANCELLED", [], ("ended", None, "ordered")),
    "failed": ("FAILED", [], ("ended", None, "failed")),
    "its objects are gone": (GONE, [], ("ended", None, "lost")),
}


@pytest.mark.parametrize(("word", "pods", "seen"), SEEN.values(), ids=SEEN)
def test_the_state_of_a_job_without_a_volume_is_that_of_its_pods(word, pods, seen) -> None:
    state = seen_state(word, "why", pods)
    assert seen == (None if state is None else (state.phase, state.code, state.cause))


def test_a_job_without_a_volume_ended_when_its_launcher_did() -> None:
    launcher = _pod(**_ended(1, "no"))
    terminated = launcher["status"]["containerStatuses"][0]["state"]["terminated"]
    terminated["finishedAt"] = "2026-11-27T11:07:23Z"
    state = seen_state("FAILED", "launcher: its container ended: no", [launcher])
    assert state is not None
    assert state.since_s == datetime(2026, 11, 27, 11, 7, 23, tzinfo=UTC).timestamp()
    assert state.verdict == "launcher: its container ended: no"


_SUBMITTED_S = datetime(2026, 11, 27, 11, 0, 0, 700_000, tzinfo=UTC).timestamp()
AWAITED = {
    "it has no Job yet": (None, 5, True),
    "the Job of its run before is there": ("2026-11-27T10:00:00Z", 100, True),
    "its Job was created in the same second": ("2026-11-27T11:00:00Z", 5, False),
    "its Job is there": ("2026-11-27T11:00:03Z", 5, False),
    "its Job is gone": (None, 1000, False),
    "the cluster's clock is slow": ("2026-11-27T10:00:00Z", 1000, False),
}


@pytest.mark.parametrize(("made", "after_s", "awaited"), AWAITED.values(), ids=AWAITED)
def test_a_job_waits_for_its_objects_after_its_submission(made, after_s, awaited) -> None:
    found = None if made is None else {"metadata": {"creationTimestamp": made}}
    now_s = _SUBMITTED_S + after_s
    assert is_awaited(found, created_s=_SUBMITTED_S, now_s=now_s) == awaited


_MADE = {"metadata": {"creationTimestamp": "2026-11-27T10:00:00Z"}, "status": {}}


class _Cluster:
    """A cluster whose objects a test sets."""

    def __init__(self, job: Any = None, pods: Any = ()) -> None:
        self.found, self.found_pods = job, list(pods)
        self.printed = ""
        self.asked: list[Any] = []

    def job(self, _name: str) -> Any:
        return self.found

    def pods(self, _name: str) -> Any:
        return self.found_pods

    def log(self, _pod: str, _container: str, _since: str) -> str:
        return self.printed

    def delete(self, _name: str) -> None:
        self.asked.append("delete")

    def patch_job(self, _name: str, content: Any) -> None:
        self.asked.append(content["metadata"]["annotations"])

    def why_not_created(self, _name: str) -> str:
        return ""


def test_readers_end_no_job_that_a_cluster_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may not be created yet, or kubectl may be set to another cluster."""
    cluster = _Cluster()
    monkeypatch.setattr(cluster_api.ClusterApi, "of_context", lambda *_: cluster)
    spec = JobSpec(
        options=(), program=("a",), folder="/", backend=Backend("kubernetes", ("--image=i",))
    )
    job = create_job(tmp_path, dataclasses.replace(spec, created_s=time.time()))
    job.write_state(JobState(phase="queued"))
    assert view_job(job).status == "queued"
    # Restarted: the Job of its run before is still there.
    cluster.found, cluster.found_pods = _MADE, [_pod(phase="Succeeded")]
    assert view_job(job).status == "queued"
    job.write_spec(dataclasses.replace(spec, created_s=1.0))
    cluster.found, cluster.found_pods = None, []
    assert view_job(job).status == "lost"
    cluster.found = _MADE
    cluster.found_pods = [_pod(phase="Running"), _pod("worker", **_READY)]
    assert view_job(job).status == "running"
    cluster.found_pods = [_pod(phase="Succeeded")]
    assert view_job(job).status == "done"
    # An end that a reader has seen is kept.
    cluster.found, cluster.found_pods = None, []
    assert view_job(job).status == "done"


def test_lines_of_a_log_end_where_the_node_ends_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = {**_pod(phase="Running"), "spec": {"containers": [{"name": "launcher"}]}}
    cluster = _Cluster(pods=[pod])
    said = "a\x0bb\x0cc\x1cd\x1de\x1ef\x85g\u2028z z"
    cluster.printed = f"2026-11-29T10:00:00.1Z {said}\n2026-11-29T10:00:00.2Z \n"
    monkeypatch.setattr(cluster_api.ClusterApi, "of_context", lambda *_: cluster)
    spec = JobSpec(
        options=(), program=("a",), folder="/", backend=Backend("kubernetes", ("--image=i",))
    )
    lines = PodBackend().log_lines(create_job(tmp_path, spec), spec, "")
    assert lines == [("2026-11-29T10:00:00.1Z", said), ("2026-11-29T10:00:00.2Z", "")]


@pytest.mark.parametrize(
    ("phase", "asked"), [("Running", {"hvdtrain/stop": "save"}), ("Pending", "delete")]
)
def test_what_has_a_launcher_is_asked_to_save_also_if_a_worker_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str, asked: object
) -> None:
    cluster = _Cluster(_MADE, [_pod(phase=phase), _pod("worker", **_UNSCHEDULABLE)])
    monkeypatch.setattr(cluster_api.ClusterApi, "of_context", lambda *_: cluster)
    spec = JobSpec(
        options=(), program=("a",), folder="/", backend=Backend("kubernetes", ("--image=i",))
    )
    job = create_job(tmp_path, spec)
    job.write_state(JobState(phase="queued"))
    view = view_job(job)
    assert view.status == "queued"
    stop_job(job, view, save=True)
    assert cluster.asked == [asked]


@pytest.mark.parametrize("deleted", [None, "2026-11-27T11:07:23Z"], ids=["none", "deleted"])
def test_what_is_being_submitted_can_not_be_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deleted: str | None
) -> None:
    """It would be marked as stopped, and then start."""
    about = {"creationTimestamp": "2026-11-27T10:00:00Z", "deletionTimestamp": deleted}
    cluster = _Cluster(None if deleted is None else {"metadata": about, "status": {}})
    monkeypatch.setattr(cluster_api.ClusterApi, "of_context", lambda *_: cluster)
    backend = Backend("kubernetes", ("--image=i",))
    spec = JobSpec(options=(), program=("a",), folder="/", created_s=time.time(), backend=backend)
    job = create_job(tmp_path, spec)
    job.write_state(JobState(phase="queued"))
    with pytest.raises(JobError, match="is just being submitted; stop it again in a moment"):
        stop_job(job, view_job(job), save=False)
    assert (view_job(job).status, cluster.asked) == ("queued", [])


def test_a_cluster_that_says_nothing_is_not_waited_for(
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
        begun = time.monotonic()
        with pytest.raises(JobError, match="the cluster does not answer"):
            cluster_api.ClusterApi.of_context("", "").job("train")
        assert time.monotonic() - begun < 10
        # Of many jobs it is asked once.
        spec = JobSpec(
            options=(),
            program=("a",),
            folder="/",
            backend=Backend("kubernetes", ("--image=i",)),
        )
        silent.settimeout(0.1)
        while _takes(silent):
            pass
        unreadable = dataclasses.replace(spec, backend=Backend("kubernetes", ("--colour=red",)))
        ((_, word, why, _),) = PodBackend().describe({Path("/jobs/a"): unreadable}).values()
        assert (word, "is no option" in why) == (NO_ANSWER, True)
        answers = PodBackend().describe({Path(f"/jobs/{number}"): spec for number in range(5)})
        assert {answer.word for answer in answers.values()} == {NO_ANSWER}
        assert [_takes(silent) for _ in range(2)] == [True, False]


def _takes(server: socket.socket) -> bool:
    """Whether somebody has connected."""
    try:
        server.accept()[0].close()
    except TimeoutError:
        return False
    return True
