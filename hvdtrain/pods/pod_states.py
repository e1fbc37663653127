"""The pods of a job as its cluster describes them; pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from hvdtrain.cluster.managed_hosts import HostState, ManagedHost
from hvdtrain.exit_codes import ExitCode
from hvdtrain.pods.names import ROLE_LABEL, Object

__all__ = [
    "ending_launchers",
    "find_condition",
    "hosts_of",
    "launchers_of",
    "trouble_of",
    "workers_of",
]

_CANT_START = {
    "ErrImagePull": "its image can't be pulled",
    "ImagePullBackOff": "its image can't be pulled",
    "ErrImageNeverPull": "its image is not on the node, and may not be pulled",
    "InvalidImageName": "its image has no name that can be one",
    "CreateContainerConfigError": "its container can't be configured",
    "CreateContainerError": "its container can't be made",
    "RunContainerError": "its container can't be started",
    "CrashLoopBackOff": "its container ends again and again",
}
# How much longer than its grace period a pod may take to end.
_LATE_S = 30.0


def launchers_of(pods: Sequence[Object]) -> list[Object]:
    """The pods that are or were launchers, the oldest first."""
    found = [pod for pod in pods if _role(pod) == "launcher"]
    return sorted(found, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")))


def ending_launchers(pods: Sequence[Object], now_s: float) -> list[str]:
    """The pods of earlier launchers whose ranks may still save what they have.

    Args:
        pods: The job's pods.
        now_s: The time in seconds since 1970.
    """
    # One that is still there behind its time is on a node that does not answer any more.
    return [
        str(pod["metadata"]["name"])
        for pod in launchers_of(pods)
        if pod["status"].get("phase") == "Running"
        and (ends := pod["metadata"].get("deletionTimestamp"))
        and now_s < datetime.fromisoformat(ends).timestamp() + _LATE_S
    ]


def workers_of(pods: Sequence[Object]) -> list[Object]:
    """The pods that have ranks."""
    return [pod for pod in pods if _role(pod) == "worker"]


def hosts_of(
    pods: Sequence[Object], addresses: Mapping[str, str], *, slots: int
) -> tuple[ManagedHost, ...]:
    """How the hosts are that a job's workers are.

    Args:
        pods: The job's pods.
        addresses: The name by which each worker is reached, by the name of its pod.
        slots: Ranks that each takes.
    """
    known = {pod["metadata"]["name"]: pod for pod in workers_of(pods)}
    return tuple(
        _host(known.get(name), address, slots=slots) for name, address in addresses.items()
    )


def _host(pod: Object | None, address: str, *, slots: int) -> ManagedHost:
    if pod is None:
        return ManagedHost(name=address, slots=slots, state="missing", why="its pod is to come")
    status = pod["status"]
    is_ready = find_condition(status, "Ready", "True") is not None
    state: HostState = "there" if is_ready else "missing"
    why = "" if is_ready else trouble_of(status) or "its pod starts"
    if pod["metadata"].get("deletionTimestamp"):
        # Its ranks may save what they have, where it is not just a name any more.
        runs = status.get("phase") == "Running"
        state, why = "going" if runs else "missing", _why_deleted(status)
    uid = str(pod["metadata"]["uid"])
    return ManagedHost(name=address, slots=slots, state=state, generation=uid, why=why)


def _why_deleted(status: Object) -> str:
    # Kubernetes 1.26 and later say who does it.
    if disrupted := find_condition(status, "DisruptionTarget", "True"):
        return f"{disrupted.get('reason')}: {disrupted.get('message', '')}".rstrip(": ")
    return "its pod is deleted"


def find_condition(status: Object | None, kind: str, word: str) -> Object | None:
    """The condition of that type in an object's status, if it is so; None for no such."""
    for condition in (status or {}).get("conditions") or ():
        if (condition["type"], condition["status"]) == (kind, word):
            return dict(condition)
    return None


def trouble_of(status: Object) -> str:
    """Return what keeps a pod from running, or has ended it, in Kubernetes' words; or nothing."""
    if status.get("phase") == "Failed" and status.get("reason"):
        # Evicted, or its node is gone.
        return f"{status['reason']}: {status.get('message', '')}".rstrip(": ")
    if homeless := find_condition(status, "PodScheduled", "False"):
        return f"it has no node: {homeless.get('message') or homeless.get('reason')}"
    for container in status.get("containerStatuses") or ():
        state = container.get("state") or {}
        waiting = state.get("waiting") or {}
        if (reason := waiting.get("reason")) in _CANT_START:
            before = (container.get("lastState") or {}).get("terminated")
            said = _last_words(before) or waiting.get("message") or reason
            return f"{_CANT_START[reason]}: {said}"
        if said := _last_words(state.get("terminated")):
            return f"its container ended: {said}"
    return ""


def _last_words(terminated: Object | None) -> str:
    """What a container said last that has ended with a failure; empty for another."""
    if not terminated or terminated.get("exitCode") in (0, ExitCode.PREEMPTED):
        return ""
    *_, last = str(terminated.get("message") or "").strip().splitlines() or [""]
    return last or f"exit code {terminated.get('exitCode')}"


def _role(pod: Object) -> str:
    return str((pod["metadata"].get("labels") or {}).get(ROLE_LABEL, ""))
