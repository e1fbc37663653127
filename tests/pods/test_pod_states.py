from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from hvdtrain.pods.pod_states import ending_launchers, managed_hosts

DELETED = "2026-11-27T11:07:23Z"


def _pod(name: str, role: str, *, is_deleted: bool = False, **status: Any) -> dict[str, Any]:
    metadata = {"name": name, "uid": f"uid-{name}", "labels": {"hvdtrain/role": role}}
    if is_deleted:
        metadata["deletionTimestamp"] = DELETED
    return {"metadata": metadata, "status": status}


def test_terminating_launchers_may_still_have_ranks() -> None:
    deleted_s = datetime(2026, 11, 27, 11, 7, 23, tzinfo=UTC).timestamp()
    pods = [
        _pod("old", "launcher", is_deleted=True, phase="Running"),
        _pod("gone", "launcher", is_deleted=True, phase="Failed"),
        _pod("new", "launcher", phase="Running"),
        _pod("worker", "worker", is_deleted=True, phase="Running"),
    ]
    assert ending_launchers(pods, deleted_s - 100) == ["old"]
    assert ending_launchers(pods, deleted_s + 1) == ["old"]
    # The pod's node does not answer, so the end of the pod may never be reported.
    assert ending_launchers(pods, deleted_s + 60) == []


def test_workers_become_hosts() -> None:
    ready = [{"type": "Ready", "status": "True"}]
    disrupted = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "PreemptionByScheduler",
        "message": "for a pod of higher priority",
    }
    statuses = {
        "there": {"phase": "Running", "conditions": ready},
        "starts": {"phase": "Running", "conditions": [{"type": "Ready", "status": "False"}]},
        "deleted": {"is_deleted": True, "phase": "Running", "conditions": ready},
        "moved": {"is_deleted": True, "phase": "Running", "conditions": [*ready, disrupted]},
        "gone": {"is_deleted": True, "phase": "Pending"},
        "evicted": {"phase": "Failed", "reason": "Evicted", "message": "low on memory"},
    }
    pods = [_pod(name, "worker", **status) for name, status in statuses.items()]
    addresses = {name: f"{name}.a" for name in (*statuses, "absent")}
    hosts = managed_hosts([_pod("launcher", "launcher"), *pods], addresses, slots=2)
    assert [host.name for host in hosts] == list(addresses.values())
    assert {host.name.partition(".")[0]: (host.state, host.why) for host in hosts} == {
        "there": ("there", ""),
        "starts": ("missing", "its pod is starting"),
        "deleted": ("going", "its pod is deleted"),
        "moved": ("going", "PreemptionByScheduler: for a pod of higher priority"),
        "gone": ("missing", "its pod is deleted"),
        "evicted": ("missing", "Evicted: low on memory"),
        "absent": ("missing", "its pod does not exist yet"),
    }
    assert (hosts[0].slots, hosts[0].generation) == (2, "uid-there")
