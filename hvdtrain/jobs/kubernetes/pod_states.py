"""What a cluster says of a job: one word for its state, and the reason; pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hvdtrain.jobs.kubernetes.manifests import ROLE_LABEL, Object

__all__ = ["state_of", "troubles_of"]

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


def state_of(pods: Sequence[Object]) -> tuple[str, str]:
    """The state of a job by its pods, as Slurm names such states, and the reason for it."""
    phases = [pod["status"].get("phase") for pod in pods if _role(pod) == "launcher"]
    why = "; ".join([*troubles_of(pods)][:_MOST_TOLD])
    if "Running" in phases:
        return "RUNNING", why
    if not phases or "Pending" in phases:
        return "PENDING", why
    return ("COMPLETED" if "Succeeded" in phases else "FAILED"), why


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
    for condition in status.get("conditions") or ():
        if (condition["type"], condition["status"]) == ("PodScheduled", "False"):
            return f"it has no node: {condition.get('message') or condition.get('reason')}"
    for container in status.get("containerStatuses") or ():
        waiting = (container.get("state") or {}).get("waiting") or {}
        if (reason := waiting.get("reason")) in _CANT_START:
            said = waiting.get("message") or reason
            return f"{_CANT_START[reason]}: {said}"
    return ""


def _role(pod: Object) -> str:
    return str((pod["metadata"].get("labels") or {}).get(ROLE_LABEL, ""))
