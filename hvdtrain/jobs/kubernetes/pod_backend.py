"""From what was asked for to the objects of a cluster: read, checked, created."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import yaml

from hvdtrain.errors import ConfigurationError, HvdtrainError, JobError
from hvdtrain.jobs.backend import JobRequest, QueueState
from hvdtrain.jobs.folder import JobFolder
from hvdtrain.jobs.kubernetes.manifests import PodJob, container_of, job_objects, make_keys
from hvdtrain.jobs.kubernetes.pod_options import PodOptions, read_pod_options
from hvdtrain.jobs.spec import JobSpec, asked_for, is_secret
from hvdtrain.jobs.state import GOES_ON, GONE, NO_ANSWER, JobState
from hvdtrain.pods.cluster_api import DELETE_TIMEOUT_S, ClusterApi, SilentClusterError
from hvdtrain.pods.names import STOP, Object, resource_of, rights_text
from hvdtrain.pods.pod_states import find_condition, launchers_of, trouble_of, workers_of

__all__ = [
    "PodBackend",
    "PodPlan",
    "is_awaited",
    "object_name",
    "pod_job",
    "seen_state",
    "state_of",
]

# A StatefulSet's pods have a label with its name, a hyphen and a hash, of at most 63 letters.
_MOST_LETTERS = 45
_MOST_TOLD = 3
NO_VOLUME = "no volume has its folder"
ALL_GONE = (
    f"its pods are gone, and with them its log and its history: {NO_VOLUME}. Submit jobs with "
    "--volume CLAIM:/PATH and a --jobs-dir below that path to keep them."
)
# For so long a cluster that has not answered is not asked how jobs are.
SILENT_S = 30.0
# For so long after its submission a job may have no objects yet: those of its run before go first.
_CREATED_WITHIN_S = DELETE_TIMEOUT_S + 60.0
# The time of a Job is that of a whole second, by the cluster's clock.
_CLOCKS_DIFFER_S = 2.0
_NAMES_HOSTS = ("-H", "--hosts", "-hostfile", "--hostfile")
_HAS_A_KEY = """\
# The Secret holds private keys of this job alone: keep it out of repositories that others read.
"""


def object_name(name: str) -> str:
    """The name of a job's objects: a label of DNS."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower())[-_MOST_LETTERS:].strip("-")


def pod_job(
    folder: Path, spec: JobSpec, environ: Mapping[str, str], *, ranks: int | None
) -> PodJob:
    """Read what was asked for.

    Args:
        folder: The job's folder, which pods write where they see it.
        spec: What was asked for.
        environ: The variables of who asks, where secrets that ranks are to get have their values.
        ranks: How many there are to be.

    Raises:
        ConfigurationError: It can't run in pods as it is.
    """
    if ranks is None:
        raise ConfigurationError(
            "a job on Kubernetes needs -np: there are as many pods as it says."
        )
    if named := [word for word in spec.options if word.partition("=")[0] in _NAMES_HOSTS]:
        raise ConfigurationError(
            f"{named[0]} names hosts; on Kubernetes they are the job's own pods. Leave it out."
        )
    secrets = {}
    for variable in asked_for(spec.options):
        if is_secret(variable):
            if variable not in environ:
                raise ConfigurationError(
                    f"-x {variable} asks for a variable that is not set here; set it first."
                )
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
    """The objects of a job.

    Attributes:
        job: The job.
        objects: Its objects.
    """

    job: PodJob
    objects: list[Object]

    def preview(self) -> str:
        """Return the objects as ``kubectl apply -f -`` reads them."""
        return _HAS_A_KEY + yaml.safe_dump_all(self.objects, sort_keys=False)


class PodBackend:
    """Clusters of Kubernetes, each as the job's own options name it."""

    def __init__(self) -> None:
        # Who looks at many jobs waits for a cluster that says nothing once, and not for each.
        self._silent_until: dict[tuple[str, str], float] = {}

    def plan(self, request: JobRequest) -> PodPlan:
        """Return the job's objects; see ``JobBackend``."""
        job = pod_job(request.job.path, request.spec, request.environ, ranks=request.ranks)
        return PodPlan(job, job_objects(job, make_keys()))

    def submit(self, plan: PodPlan) -> None:
        """Create the job's objects, all or none; see ``JobBackend``."""
        pods = plan.job.pods
        api = ClusterApi.of_context(pods.context, pods.namespace)
        needed = dict.fromkeys(("create", *resource_of(one)) for one in plan.objects)
        if missing := [right for right in needed if not api.may(*right)]:
            raise JobError(
                f"you may not {rights_text(missing)} in namespace {api.namespace}. Ask for a role "
                "that may, or name an account of the launcher's with --service-account."
            )
        api.create(plan.objects)

    def describe(self, jobs: Mapping[Path, JobSpec]) -> Mapping[Path, QueueState]:
        """Return the state of each job's pods; see ``JobBackend``."""
        return {folder: self._state(folder, spec) for folder, spec in jobs.items()}

    def log_lines(
        self, job: JobFolder, spec: JobSpec, after: str
    ) -> Sequence[tuple[str, str]] | None:
        """Return what launchers have printed if they don't see the folder; see ``JobBackend``."""
        pods = read_pod_options(spec.backend.options)
        if _is_shared(job.path, pods):
            return None
        name, found = object_name(job.name), []
        with self._looked_at(pods) as api:
            launchers = launchers_of(api.pods(name))
            if not launchers and api.job(name) is None:
                raise JobError(f"{job.name} has no log: {ALL_GONE}")
            for pod in launchers:
                if pod["status"].get("phase") == "Pending":
                    continue
                container = container_of(pod)["name"]
                try:
                    text = api.log(pod["metadata"]["name"], container, after)
                except JobError:
                    # Of a launcher before the last, whose node is gone.
                    if pod is launchers[-1]:
                        raise
                    continue
                # Not at other characters that end lines for str.splitlines: no time follows them.
                for line in filter(None, text.split("\n")):
                    at, _, said = line.partition(" ")
                    if at > after:
                        found.append((at, said))
        return found

    def cancel(self, job: JobFolder, spec: JobSpec, *, is_queued: bool, save: bool) -> None:
        """Delete the objects of a queued job, ask a running one to stop; see ``JobBackend``."""
        pods = read_pod_options(spec.backend.options)
        is_shared = _is_shared(job.path, pods)
        if not (is_queued or save) and is_shared:
            # Also if the cluster can't be reached from here.
            job.request_stop(signal.SIGTERM)
            return
        api = ClusterApi.of_context(pods.context, pods.namespace)
        name = object_name(job.name)
        if is_queued and not is_shared:
            # By its pods a job that has lost a worker is queued, too, but ranks may run.
            phases = [pod["status"].get("phase") for pod in launchers_of(api.pods(name))]
            is_queued = "Running" not in phases
        if is_queued:
            if (found := api.job(name)) is None or found["metadata"].get("deletionTimestamp"):
                # Who submits it would create its objects all the same.
                raise JobError(f"{job.name} is just being submitted; stop it again in a moment.")
            api.delete(name)
            job.cancel()
        else:
            api.patch_job(name, {"metadata": {"annotations": {STOP: "save" if save else "now"}}})

    def _state(self, folder: Path, spec: JobSpec) -> QueueState:
        """Return what the cluster says of a job; ``NO_ANSWER`` if it does not answer."""
        name, listed = object_name(folder.name), []
        try:
            pods = read_pod_options(spec.backend.options)
            with self._looked_at(pods) as api:
                found = api.job(name)
                if is_awaited(found, created_s=spec.created_s, now_s=time.time()):
                    word, why = "PENDING", ""
                elif found is None:
                    word, why = GONE, ""
                else:
                    listed = api.pods(name)
                    word, why = state_of(found, listed)
                    if not why and not (launchers_of(listed) and workers_of(listed)):
                        why = api.why_not_created(name)
        except HvdtrainError as error:
            return QueueState("Kubernetes", NO_ANSWER, str(error))
        state = None if _is_shared(folder, pods) else seen_state(word, why, listed)
        return QueueState("Kubernetes", word, why, state)

    @contextlib.contextmanager
    def _looked_at(self, pods: PodOptions) -> Iterator[ClusterApi]:
        """The cluster of those pods, unless that has not answered just now."""
        key = (pods.context, pods.namespace)
        if time.monotonic() < self._silent_until.get(key, 0.0):
            raise SilentClusterError("the cluster did not answer a moment ago")
        try:
            yield ClusterApi.of_context(pods.context, pods.namespace)
        except SilentClusterError:
            self._silent_until[key] = time.monotonic() + SILENT_S
            raise


def is_awaited(found: Object | None, *, created_s: float, now_s: float) -> bool:
    """Return whether a job's objects are still to come: who submits it is about to create them.

    Args:
        found: The Job that the cluster has by its name; None for none.
        created_s: When the job was submitted, in seconds since 1970.
        now_s: The time now. With the clock of the cluster it may differ, so this never lasts.
    """
    if not created_s <= now_s < created_s + _CREATED_WITHIN_S:
        return False
    if found is None:
        return True
    # That of an earlier run is removed first.
    made = datetime.fromisoformat(found["metadata"]["creationTimestamp"])
    return made.timestamp() < created_s - _CLOCKS_DIFFER_S


def state_of(job: Object, pods: Sequence[Object]) -> tuple[str, str]:
    """The state of a job by its pods, as ``status_of`` takes it, and the reason for it.

    Args:
        job: The Job.
        pods: Its pods.
    """
    phases = [pod["status"].get("phase") for pod in launchers_of(pods)]
    troubles = [(pod["metadata"]["name"], trouble_of(pod["status"])) for pod in pods]
    why = "; ".join([f"{name}: {trouble}" for name, trouble in troubles if trouble][:_MOST_TOLD])
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


def _is_shared(folder: Path, pods: PodOptions) -> bool:
    """Whether pods see a folder that they may write into."""
    return any(folder.is_relative_to(path) for path in pods.shared_paths())
