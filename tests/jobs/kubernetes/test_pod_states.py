from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from hvdtrain.jobs.kubernetes.pod_states import (
    ending_launchers,
    hosts_of,
    seen_state,
    state_of,
)
from hvdtrain.jobs.state import GOES_ON, GONE


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


def test_launchers_that_are_told_to_end_may_still_have_ranks() -> None:
    ends = "2026-11-27T11:07:23Z"
    ends_s = datetime(2026, 11, 27, 11, 7, 23, tzinfo=UTC).timestamp()
    old, gone, new = (_pod(phase=phase) for phase in ("Running", "Failed", "Running"))
    for pod in (old, gone):
        pod["metadata"]["deletionTimestamp"] = ends
    old["metadata"]["name"] = "old"
    pods = [old, gone, new, _worker("w", is_deleted=True, phase="Running")]
    assert ending_launchers(pods, ends_s - 100) == ["old"]
    assert ending_launchers(pods, ends_s + 1) == ["old"]
    # Its node does not answer: nobody could ever say that it has ended.
    assert ending_launchers(pods, ends_s + 60) == []


def _worker(name: str, *, is_deleted: bool = False, **status: Any) -> dict[str, Any]:
    metadata = {"name": name, "uid": f"uid-{name}", "labels": {"hvdtrain/role": "worker"}}
    if is_deleted:
        metadata["deletionTimestamp"] = "2026-11-27T11:07:23Z"
    return {"metadata": metadata, "status": status}


def test_workers_are_hosts() -> None:
    ready = [{"type": "Ready", "status": "True"}]
    disrupted = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "PreemptionByScheduler",
        "message": "for a pod of higher priority",
    }
    pods = [
        _worker("there", phase="Running", conditions=ready),
        _worker("starts", phase="Running", conditions=[{"type": "Ready", "status": "False"}]),
        _worker("deleted", is_deleted=True, phase="Running", conditions=ready),
        _worker("moved", is_deleted=True, phase="Running", conditions=[*ready, disrupted]),
        _worker("gone", is_deleted=True, phase="Pending"),
        _worker("evicted", phase="Failed", reason="Evicted", message="low on memory"),
    ]
    names = [pod["metadata"]["name"] for pod in pods] + ["absent"]
    hosts = hosts_of([_pod(phase="Running"), *pods], {name: f"{name}.a" for name in names}, slots=2)
    assert [host.name for host in hosts] == [f"{name}.a" for name in names]
    assert {host.name.partition(".")[0]: (host.state, host.why) for host in hosts} == {
        "there": ("there", ""),
        "starts": ("missing", "its pod starts"),
        "deleted": ("going", "its pod is deleted"),
        "moved": ("going", "PreemptionByScheduler: for a pod of higher priority"),
        "gone": ("missing", "its pod is deleted"),
        "evicted": ("missing", "Evicted: low on memory"),
        "absent": ("missing", "its pod is to come"),
    }
    assert (hosts[0].slots, hosts[0].generation) == (2, "uid-there")
