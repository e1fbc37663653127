from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from hvdtrain.pods.pod_states import ending_launchers, hosts_of


def _pod(role: str = "launcher", **status: Any) -> dict[str, Any]:
    return {"metadata": {"name": role, "labels": {"hvdtrain/role": role}}, "status": status}


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
