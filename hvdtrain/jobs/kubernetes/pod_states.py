"""What a cluster says of a job: one word for its state, and the reason; pure functions."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime

from hvdtrain.agent.exit_codes import ExitCode
from hvdtrain.cluster.managed_hosts import HostState, ManagedHost
from hvdtrain.jobs.kubernetes.manifests import ROLE_LABEL, STOP, Object
from hvdtrain.jobs.state import GOES_ON, GONE, JobState

__all__ = [
    "ALL_GONE",
    "ending_launchers",
    "find_condition",
    "hosts_of",
    "launchers_of",
    "seen_state",
    "state_of",
    "troubles_of",
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
_MOST_TOLD = 3
NO_VOLUME = "no volume has its folder"
ALL_GONE = (
    f"its pods are gone, and with them its log and its history: {NO_VOLUME}. Submit jobs with "
    "--volume CLAIM:/PATH and a --jobs-dir below that path to keep them."
)
# How much longer than its grace period a pod may take to end.
_LATE_S = 30.0


def state_of(job: Object, pods: Sequence[Object]) -> tuple[str, str]:
    """The state of a job by its pods, as ``status_of`` takes it, and the reason for it.

    Args:
        job: The Job.
        pods: Its pods.
    """
    phases = [pod["status"].get("phase") for pod in launchers_of(pods)]
    why = "; ".join([*troubles_of(pods)][:_MOST_TOLD])
    about = job.get("metadata") or {}
    # The cluster itself finds that out some time after its last launcher has ended.
    is_stopped = bool(STOP in (about.get("annotations") or {}) or about.get("deletionTimestamp"))
    has_failed = find_condition(job.get("status"), "Failed", "True") is not None
    if "Running" in phases:
        return ("RUNNING" if is_stopped else GOES_ON), why
    if "Pending" in phases or not (phases or is_stopped or has_failed):
        return "PENDING", why
    if "Succeeded" in phases:
        return "COMPLETED", why
    if is_stopped:
        return "CANCELLED", why
    # Unless the cluster has given up, another launcher is to come.
    return ("FAILED" if has_failed else "REQUEUED"), why


def seen_state(word: str, why: str, pods: Sequence[Object]) -> JobState | None:
    """Return the state of a job whose folder its pods don't see; None if it waits for its pods.

    Args:
        word: Its state by its cluster, as ``state_of`` returns it, or ``GONE``.
        why: The reason.
        pods: Its pods.
    """
    if word in ("PENDING", "REQUEUED"):
        return None
    if word in (GOES_ON, "RUNNING"):
        ready = [find_condition(pod["status"], "Ready", "True") for pod in workers_of(pods)]
        if not ready or not all(ready):
            return JobState(phase="queued")
        return JobState(phase="running", verdict=f"{NO_VOLUME}; hvdtrain logs reads its pods' log")
    if word == GONE:
        return JobState(phase="ended", since_s=time.time(), cause="lost", verdict=ALL_GONE)
    return JobState(
        phase="ended",
        since_s=_ended_s(pods),
        code=0 if word == "COMPLETED" else None,
        cause={"COMPLETED": "done", "CANCELLED": "ordered"}.get(word, "failed"),
        verdict=why,
    )


def _ended_s(pods: Sequence[Object]) -> float:
    """When the last launcher ended, in seconds since 1970; now if that is not known."""
    for pod in reversed(launchers_of(pods)):
        for container in pod["status"].get("containerStatuses") or ():
            if at := ((container.get("state") or {}).get("terminated") or {}).get("finishedAt"):
                return datetime.fromisoformat(at).timestamp()
    return time.time()


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
    why = "" if is_ready else _trouble(status) or "its pod starts"
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


def troubles_of(pods: Sequence[Object]) -> Iterator[str]:
    """What keeps pods from running, or has ended them, in Kubernetes' own words."""
    for pod in pods:
        name, status = pod["metadata"]["name"], pod["status"]
        if why := _trouble(status):
            yield f"{name}: {why}"


def _trouble(status: Object) -> str:
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
