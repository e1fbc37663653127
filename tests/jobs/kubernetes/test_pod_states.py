from __future__ import annotations

from typing import Any

import pytest

from hvdtrain.jobs.kubernetes.pod_states import state_of


def _pod(role: str = "launcher", **status: Any) -> dict[str, Any]:
    return {"metadata": {"name": role, "labels": {"hvdtrain/role": role}}, "status": status}


def _waits(reason: str, message: str = "") -> dict[str, Any]:
    waiting = {"reason": reason, "message": message}
    return {"phase": "Pending", "containerStatuses": [{"state": {"waiting": waiting}}]}


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
    "both run": ([_pod(phase="Running"), _pod("worker", phase="Running")], ("RUNNING", "")),
    "no room": (
        [_pod(phase="Running"), _pod("worker", **_UNSCHEDULABLE)],
        (
            "RUNNING",
            "worker: it has no node: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
        ),
    ),
    "no image": (
        [_pod(**_waits("ImagePullBackOff", 'Back-off pulling image "x"'))],
        ("PENDING", 'launcher: its image can\'t be pulled: Back-off pulling image "x"'),
    ),
    "image is being pulled": ([_pod(**_waits("ContainerCreating"))], ("PENDING", "")),
    "evicted": (
        [
            _pod(phase="Failed", reason="Evicted", message="The node was low on memory."),
            _pod(phase="Pending"),
        ],
        ("PENDING", "launcher: Evicted: The node was low on memory."),
    ),
    "done": ([_pod(phase="Succeeded")], ("COMPLETED", "")),
    "failed": ([_pod(phase="Failed")], ("FAILED", "")),
}


@pytest.mark.parametrize(("pods", "state"), STATES.values(), ids=STATES)
def test_pods_tell_how_a_job_is(pods, state) -> None:
    assert state_of(pods) == state
