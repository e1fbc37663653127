"""Derives the state of a job's hosts and the causes of problems from its pods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from hvdtrain.cluster.managed_hosts import HostState, ManagedHost
from hvdtrain.exit_codes import ExitCode
from hvdtrain.pods.names import ROLE_LABEL, Object

__all__ = [
    "ending_launchers",
    "find_condition",
    "launchers_of",
    "managed_hosts",
    "pod_problem",
    "workers_of",
]

_START_PROBLEMS = {
    "ErrImagePull": "its image can't be pulled",
    "ImagePullBackOff": "its image can't be pulled",
    "ErrImageNeverPull": "its image is not on the node and must not be pulled",
    "InvalidImageName": "its image name is not valid",
    "CreateContainerConfigError": "its container can't be configured",
    "CreateContainerError": "its container can't be created",
    "RunContainerError": "its container can't be started",
    "CrashLoopBackOff": "its container fails repeatedly",
}
# How much longer than its grace period a pod may take to end.
_LATE_S = 30.0


def launchers_of(pods: Sequence[Object]) -> list[Object]:
    """Return the pods of the current and earlier launchers, the oldest first."""
    launchers = [pod for pod in pods if _role(pod) == "launcher"]
    return sorted(launchers, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")))


def workers_of(pods: Sequence[Object]) -> list[Object]:
    """Return the pods that run ranks."""
    return [pod for pod in pods if _role(pod) == "worker"]


def _role(pod: Object) -> str:
    return str((pod["metadata"].get("labels") or {}).get(ROLE_LABEL, ""))


def ending_launchers(pods: Sequence[Object], now_s: float) -> list[str]:
    """Return the names of terminating launcher pods. Their ranks may still save a checkpoint."""
    # If a pod should have ended long ago, its node does not answer.
    return [
        str(pod["metadata"]["name"])
        for pod in launchers_of(pods)
        if pod["status"].get("phase") == "Running"
        and (ends := pod["metadata"].get("deletionTimestamp"))
        and now_s < datetime.fromisoformat(ends).timestamp() + _LATE_S
    ]


def managed_hosts(
    pods: Sequence[Object], addresses: Mapping[str, str], *, slots: int
) -> tuple[ManagedHost, ...]:
    """Return a ``ManagedHost`` for each worker. ``addresses`` maps its pod to its hostname."""
    by_name = {pod["metadata"]["name"]: pod for pod in workers_of(pods)}
    return tuple(
        _managed_host(by_name.get(name), address, slots=slots)
        for name, address in addresses.items()
    )


def _managed_host(pod: Object | None, address: str, *, slots: int) -> ManagedHost:
    if pod is None:
        return ManagedHost(
            name=address, slots=slots, state="missing", why="its pod does not exist yet"
        )
    status = pod["status"]
    is_ready = find_condition(status, "Ready", "True") is not None
    state: HostState = "there" if is_ready else "missing"
    why = "" if is_ready else pod_problem(status) or "its pod is starting"
    if pod["metadata"].get("deletionTimestamp"):
        # Ranks of a running pod may still save a checkpoint.
        state = "going" if status.get("phase") == "Running" else "missing"
        why = _deletion_reason(status)
    uid = str(pod["metadata"]["uid"])
    return ManagedHost(name=address, slots=slots, state=state, generation=uid, why=why)


def _deletion_reason(status: Object) -> str:
    # Set by Kubernetes 1.26 and later.
    if disruption := find_condition(status, "DisruptionTarget", "True"):
        return f"{disruption.get('reason')}: {disruption.get('message', '')}".rstrip(": ")
    return "its pod is deleted"


def find_condition(status: Object | None, kind: str, value: str) -> Object | None:
    """Return the condition ``kind`` of a pod or Job if it has this ``value``, or else None."""
    for condition in (status or {}).get("conditions") or ():
        if (condition["type"], condition["status"]) == (kind, value):
            return dict(condition)
    return None


def pod_problem(status: Object) -> str:
    """Return why a pod does not run or has failed, in Kubernetes' words; empty if it is fine."""
    if status.get("phase") == "Failed" and status.get("reason"):
        # The pod was evicted, or its node no longer exists.
        return f"{status['reason']}: {status.get('message', '')}".rstrip(": ")
    if unscheduled := find_condition(status, "PodScheduled", "False"):
        return f"not scheduled: {unscheduled.get('message') or unscheduled.get('reason')}"
    for container in status.get("containerStatuses") or ():
        state = container.get("state") or {}
        waiting = state.get("waiting") or {}
        if (reason := waiting.get("reason")) in _START_PROBLEMS:
            previous = (container.get("lastState") or {}).get("terminated")
            details = _failure(previous) or waiting.get("message") or reason
            return f"{_START_PROBLEMS[reason]}: {details}"
        if failure := _failure(state.get("terminated")):
            return f"its container ended: {failure}"
    return ""


def _failure(terminated: Object | None) -> str:
    """Return the last line that a failed container printed; empty if it did not fail."""
    if not terminated or terminated.get("exitCode") in (0, ExitCode.PREEMPTED):
        return ""
    *_, last = str(terminated.get("message") or "").strip().splitlines() or [""]
    return last or f"exit code {terminated.get('exitCode')}"
