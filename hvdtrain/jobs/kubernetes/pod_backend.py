"""The Kubernetes queue: plans, creates, describes and deletes the objects of jobs."""

from __future__ import annotations

import functools
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import yaml

from hvdtrain.errors import ConfigurationError, HvdtrainError, JobError
from hvdtrain.jobs.folder import JobFolder, JobRequest
from hvdtrain.jobs.kubernetes.manifests import PodJob, container_of, job_objects, make_keys
from hvdtrain.jobs.kubernetes.pod_options import PodOptions, read_pod_options
from hvdtrain.jobs.queue_watcher import QueueAnswer, QueueWatcher
from hvdtrain.jobs.spec import JobSpec, exported_variables, is_secret
from hvdtrain.jobs.state import GONE, NO_ANSWER, RESTARTABLE, JobState, QueueState
from hvdtrain.pods.cluster_api import DELETE_TIMEOUT_S, ClusterApi
from hvdtrain.pods.names import JOB_LABEL, STOP, Object, resource_of, rights_text
from hvdtrain.pods.pod_states import find_condition, launchers_of, pod_problem, workers_of

__all__ = [
    "PodBackend",
    "PodPlan",
    "awaits_objects",
    "job_state",
    "object_name",
    "pod_job",
    "queue_state",
]

# Pods of a StatefulSet get a label that consists of the StatefulSet's name, a hyphen and a hash. A
# label may have 63 characters.
_MOST_NAME_CHARACTERS = 45
_MOST_PROBLEMS = 3
NO_VOLUME = "its folder is not on a volume"
ALL_GONE = (
    f"its pods no longer exist, and its log and history are lost because {NO_VOLUME}. To keep "
    "them, submit jobs with --volume CLAIM:/PATH and a --jobs-dir below that path."
)
# The shortest time between two queries of a namespace.
INTERVAL_S = 5.0
# How long after a submission its objects may still be created. This can take long, because objects
# of the previous run are deleted first.
_CREATED_WITHIN_S = DELETE_TIMEOUT_S + 60.0
# Creation times are whole seconds of the cluster's clock.
_CLOCK_TOLERANCE_S = 2.0
_HOST_OPTIONS = ("-H", "--hosts", "-hostfile", "--hostfile")
_PREVIEW_COMMENT = """\
# The Secret contains private keys of this job: don't commit it to a repository.
"""


def object_name(name: str) -> str:
    """Return the name of a job's objects, which is a valid DNS label."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower())[-_MOST_NAME_CHARACTERS:].strip("-")


def pod_job(
    folder: Path, spec: JobSpec, environ: Mapping[str, str], *, ranks: int | None
) -> PodJob:
    """Return the job that a specification describes.

    ``environ`` contains the values of exported secrets, which are not part of the specification.

    Raises:
        ConfigurationError: If the job can't run in pods as described.
    """
    if ranks is None:
        raise ConfigurationError("a job on Kubernetes needs -np, the number of ranks.")
    if named := [word for word in spec.options if word.partition("=")[0] in _HOST_OPTIONS]:
        raise ConfigurationError(
            f"{named[0]} names hosts, but a job on Kubernetes runs in its own pods; remove this "
            "option."
        )
    secrets = {}
    for variable in filter(is_secret, exported_variables(spec.options)):
        if variable not in environ:
            raise ConfigurationError(f"-x {variable} exports a variable that is not set; set it.")
        secrets[variable] = environ[variable]
    pods = read_pod_options(spec.backend.options)
    return PodJob(
        name=object_name(folder.name),
        ranks=ranks,
        options=spec.options,
        program=spec.program,
        folder=str(folder) if _is_shared(folder, pods) else "",
        variables=spec.variables,
        secrets=secrets,
        pods=pods,
    )


class PodPlan(NamedTuple):
    """A job and its Kubernetes objects."""

    job: PodJob
    objects: list[Object]

    def preview(self) -> str:
        """Return the objects as YAML for ``kubectl apply -f -``."""
        return _PREVIEW_COMMENT + yaml.safe_dump_all(self.objects, sort_keys=False)


@dataclass(frozen=True, kw_only=True)
class _NamespaceAnswer(QueueAnswer):
    """All jobs in a namespace, or the error of the query."""

    error: str = ""
    jobs: Mapping[str, Object] = field(default_factory=dict)  # by name
    pods: Mapping[str, Sequence[Object]] = field(default_factory=dict)  # by the name of their job
    # why pods can't be created, by the name of their Job or StatefulSet
    problems: Mapping[str, str] = field(default_factory=dict)


class PodBackend:
    """The queue of the cluster that a job's options choose; see ``JobBackend``."""

    def __init__(self) -> None:
        self._watchers: dict[tuple[str, str], QueueWatcher[_NamespaceAnswer]] = {}

    def plan(self, request: JobRequest) -> PodPlan:
        """Return the job's objects."""
        job = pod_job(request.job.path, request.spec, request.environ, ranks=request.ranks)
        return PodPlan(job, job_objects(job, make_keys()))

    def submit(self, plan: PodPlan) -> None:
        """Create all of the job's objects, or none if one of them can't be created."""
        pods = plan.job.pods
        api = ClusterApi.of_context(pods.context, pods.namespace)
        rights = dict.fromkeys(("create", *resource_of(one)) for one in plan.objects)
        if missing := [right for right in rights if not api.may(*right)]:
            raise JobError(
                f"you may not {rights_text(missing)} in namespace {api.namespace}. Ask for these "
                "permissions, or give the launcher an existing account with --service-account."
            )
        api.create(plan.objects)

    def describe(self, jobs: Mapping[Path, JobSpec]) -> Mapping[Path, QueueState]:
        """Return the state of each job, derived from its pods."""
        return {folder: self._describe(folder, spec) for folder, spec in jobs.items()}

    def log_lines(
        self, job: JobFolder, spec: JobSpec, after: str
    ) -> Sequence[tuple[str, str]] | None:
        """Return the output of the launcher pods; None if the job's folder contains the log."""
        pods = read_pod_options(spec.backend.options)
        if _is_shared(job.path, pods):
            return None
        name, lines, answer = object_name(job.name), [], self._answer(pods)
        launchers = launchers_of(answer.pods.get(name, ()))
        if not launchers and name not in answer.jobs:
            raise JobError(f"{job.name} has no log: {ALL_GONE}")
        api = ClusterApi.of_context(pods.context, pods.namespace)
        for pod in launchers:
            if pod["status"].get("phase") == "Pending":
                continue
            container = container_of(pod)["name"]
            try:
                text = api.log(pod["metadata"]["name"], container, after)
            except JobError:
                # The node of an earlier launcher may be gone.
                if pod is launchers[-1]:
                    raise
                continue
            # Not splitlines(), which also splits at other characters.
            for line in filter(None, text.split("\n")):
                at, _, content = line.partition(" ")
                if at > after:
                    lines.append((at, content))
        return lines

    def cancel(self, job: JobFolder, spec: JobSpec, *, is_queued: bool, save: bool) -> None:
        """Delete the objects of a queued job, or ask a started job to stop."""
        pods = read_pod_options(spec.backend.options)
        is_shared = _is_shared(job.path, pods)
        if not (is_queued or save) and is_shared:
            # Works even if the cluster can't be reached from here.
            job.request_stop(signal.SIGTERM)
            return
        api = ClusterApi.of_context(pods.context, pods.namespace)
        name = object_name(job.name)
        if is_queued and not is_shared:
            # A job that has lost a worker is shown as queued, but its ranks may still run.
            phases = [pod["status"].get("phase") for pod in launchers_of(api.pods(name))]
            is_queued = "Running" not in phases
        if is_queued:
            found = api.job(name)
            if found is None or found["metadata"].get("deletionTimestamp"):
                # If it were cancelled now, the submitting process would still create the objects.
                raise JobError(f"{job.name} is being submitted; stop it again in a moment.")
            api.delete(name)
            job.mark_cancelled()
        else:
            api.patch_job(name, {"metadata": {"annotations": {STOP: "save" if save else "now"}}})

    def _describe(self, folder: Path, spec: JobSpec) -> QueueState:
        name = object_name(folder.name)
        try:
            options = read_pod_options(spec.backend.options)
            answer = self._answer(options)
        except HvdtrainError as error:
            return QueueState("Kubernetes", NO_ANSWER, str(error))
        job, pods = answer.jobs.get(name), answer.pods.get(name, ())
        if awaits_objects(job, created_s=spec.created_s, now_s=time.time()):
            state, reason = "PENDING", ""
        elif job is None:
            state, reason = GONE, ""
        else:
            state, reason = queue_state(job, pods)
            if not reason and not (launchers_of(pods) and workers_of(pods)):
                reason = answer.problems.get(name) or answer.problems.get(f"{name}-worker", "")
        known = None if _is_shared(folder, options) else job_state(state, reason, pods)
        return QueueState("Kubernetes", state, reason, known)

    def _answer(self, pods: PodOptions) -> _NamespaceAnswer:
        """Return the newest answer about the namespace of the pods."""
        key = (pods.context, pods.namespace)
        watcher = QueueWatcher(functools.partial(_ask, *key), INTERVAL_S)
        answer = self._watchers.setdefault(key, watcher).answer()
        if answer.error:
            raise JobError(answer.error)
        return answer


def _ask(context: str, namespace: str) -> _NamespaceAnswer:
    """Ask a cluster about all jobs in a namespace."""
    started_s = time.time()
    pods: dict[str, list[Object]] = {}
    try:
        api = ClusterApi.of_context(context, namespace)
        jobs = {job["metadata"]["name"]: job for job in api.jobs()}
        for pod in api.pods():
            pods.setdefault(pod["metadata"]["labels"][JOB_LABEL], []).append(pod)
        problems = api.creation_problems()
    except JobError as error:
        return _NamespaceAnswer(started_s=started_s, ended_s=time.time(), error=str(error))
    return _NamespaceAnswer(
        started_s=started_s, ended_s=time.time(), jobs=jobs, pods=pods, problems=problems
    )


def awaits_objects(job: Object | None, *, created_s: float, now_s: float) -> bool:
    """Return whether the submitting process may still create or replace a job's objects."""
    # The wait is limited because the cluster's clock may differ.
    if not created_s <= now_s < created_s + _CREATED_WITHIN_S:
        return False
    if job is None:
        return True
    # The Job of the previous run is deleted first.
    made = datetime.fromisoformat(job["metadata"]["creationTimestamp"])
    return made.timestamp() < created_s - _CLOCK_TOLERANCE_S


def queue_state(job: Object, pods: Sequence[Object]) -> tuple[str, str]:
    """Return a job's state by its pods, as ``derive_status`` expects it, and the reason."""
    phases = [pod["status"].get("phase") for pod in launchers_of(pods)]
    problems = [(pod["metadata"]["name"], pod_problem(pod["status"])) for pod in pods]
    reason = "; ".join([f"{name}: {text}" for name, text in problems if text][:_MOST_PROBLEMS])
    metadata = job.get("metadata") or {}
    # The Job records the end of its last launcher with a delay.
    is_stopped = bool(
        STOP in (metadata.get("annotations") or {}) or metadata.get("deletionTimestamp")
    )
    has_failed = find_condition(job.get("status"), "Failed", "True") is not None
    if "Running" in phases:
        return ("RUNNING" if is_stopped else RESTARTABLE), reason
    if "Pending" in phases or not (phases or is_stopped or has_failed):
        return "PENDING", reason
    if "Succeeded" in phases:
        return "COMPLETED", reason
    if is_stopped:
        return "CANCELLED", reason
    # Unless the Job has failed for good, it starts another launcher.
    return ("FAILED" if has_failed else "REQUEUED"), reason


def job_state(state: str, reason: str, pods: Sequence[Object]) -> JobState | None:
    """Return the state of a job whose pods can't write to its folder; None while pending."""
    if state in ("PENDING", "REQUEUED"):
        return None
    if state in (RESTARTABLE, "RUNNING"):
        ready = [find_condition(pod["status"], "Ready", "True") for pod in workers_of(pods)]
        if not ready or not all(ready):
            return JobState(phase="queued")
        return JobState(
            phase="running", verdict=f"{NO_VOLUME}; hvdtrain logs prints the log of its pods"
        )
    if state == GONE:
        return JobState(phase="ended", since_s=time.time(), cause="lost", verdict=ALL_GONE)
    return JobState(
        phase="ended",
        since_s=_ended_s(pods),
        code=0 if state == "COMPLETED" else None,
        cause={"COMPLETED": "done", "CANCELLED": "ordered"}.get(state, "failed"),
        verdict=reason,
    )


def _ended_s(pods: Sequence[Object]) -> float:
    """Return when the last launcher ended, in seconds since 1970; the current time if unknown."""
    for pod in reversed(launchers_of(pods)):
        for container in pod["status"].get("containerStatuses") or ():
            if at := ((container.get("state") or {}).get("terminated") or {}).get("finishedAt"):
                return datetime.fromisoformat(at).timestamp()
    return time.time()


def _is_shared(folder: Path, pods: PodOptions) -> bool:
    """Return whether pods can write to a folder of this machine."""
    return any(folder.is_relative_to(path) for path in pods.shared_paths())
