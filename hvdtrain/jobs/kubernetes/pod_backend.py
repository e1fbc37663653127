"""From what was asked for to the objects of a cluster: read, checked, created."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from hvdtrain.errors import ConfigurationError, JobError
from hvdtrain.jobs.backend import Answer
from hvdtrain.jobs.folder import JOB_FOLDER, JobFolder
from hvdtrain.jobs.kubernetes.cluster_api import ClusterApi
from hvdtrain.jobs.kubernetes.manifests import Object, PodJob, job_objects, mpijob_objects
from hvdtrain.jobs.kubernetes.pod_options import PodOptions, read_pod_options
from hvdtrain.jobs.kubernetes.pod_states import state_of
from hvdtrain.jobs.kubernetes.ssh_keys import make_keys
from hvdtrain.jobs.spec import JobSpec, asked_for, is_secret
from hvdtrain.jobs.state import GONE, NO_ANSWER

__all__ = ["PodBackend", "as_yaml", "object_name", "objects_of", "pod_job"]

# A StatefulSet's pods have a label with its name, a hyphen and a hash, of at most 63 letters.
_MOST_LETTERS = 45
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
    shared = any(folder.is_relative_to(path) for path in pods.shared_paths())
    return PodJob(
        name=object_name(folder.name),
        ranks=ranks,
        options=spec.options,
        program=spec.program,
        variables={**spec.variables, **({JOB_FOLDER: str(folder)} if shared else {})},
        secrets=secrets,
        pods=pods,
    )


def objects_of(job: PodJob) -> list[Object]:
    """Its objects, with keys that nobody else has; the first owns the others."""
    return mpijob_objects(job) if job.pods.mpijob else job_objects(job, make_keys())


def as_yaml(objects: Sequence[Object]) -> str:
    """Write objects as ``kubectl apply -f -`` reads them."""
    keeps = any(one["kind"] == "Secret" for one in objects)
    return (_HAS_A_KEY if keeps else "") + yaml.safe_dump_all(objects, sort_keys=False)


class PodBackend:
    """Clusters of Kubernetes, each as the job's own options name it."""

    def plan(
        self, folder: Path, spec: JobSpec, environ: Mapping[str, str], *, ranks: int | None
    ) -> str:
        """The job's objects as YAML; see ``JobBackend``."""
        return as_yaml(objects_of(pod_job(folder, spec, environ, ranks=ranks)))

    def hand_over(
        self, job: JobFolder, spec: JobSpec, environ: Mapping[str, str], *, ranks: int | None
    ) -> None:
        """Create the job's objects; see ``JobBackend``.

        Nothing of the job is there where its pods don't see its folder, this user may not, or the
        cluster refuses.
        """
        wanted = pod_job(job.path, spec, environ, ranks=ranks)
        if JOB_FOLDER not in wanted.variables:
            raise JobError(
                "its folder is on no volume that its pods may write to. Name one with "
                "--volume CLAIM:/PATH, and a folder below it with --jobs-dir."
            )
        objects = objects_of(wanted)
        api = ClusterApi.of_context(wanted.pods.context, wanted.pods.namespace)
        if refused := api.refused_rights(objects):
            raise JobError(
                f"you may not {', '.join(refused)} in namespace {api.namespace}. Ask for a role "
                "that may, or name an account of the launcher's with --service-account."
            )
        api.replace_old(objects[0]["kind"], wanted.name)
        api.create(objects)

    def ask(self, jobs: Mapping[str, JobSpec]) -> Mapping[str, Answer]:
        """What the state of each job's pods is; see ``JobBackend``."""
        return {name: Answer("Kubernetes", *_state(name, spec)) for name, spec in jobs.items()}

    def fetch(self, job: JobFolder, spec: JobSpec) -> None:
        """Nothing: the launcher writes into the job's folder itself."""

    def stop(self, job: JobFolder, spec: JobSpec, *, waits: bool, save: bool) -> bool:
        """Delete what waits; leave word for what runs; see ``JobBackend``."""
        if not waits:
            job.request_stop()
            return False
        pods, api = _of_job(spec)
        api.delete(_owner(pods), object_name(job.name))
        return True


def _state(name: str, spec: JobSpec) -> tuple[str, str]:
    """What the cluster says of a job, as ``state_of``; ``NO_ANSWER`` where it says nothing."""
    try:
        pods, api = _of_job(spec)
        if not api.has(_owner(pods), object_name(name)):
            return GONE, ""
        return state_of(api.pods(object_name(name)))
    except JobError as error:
        return NO_ANSWER, str(error)


def _of_job(spec: JobSpec) -> tuple[PodOptions, ClusterApi]:
    """What was asked for of a job's pods, and their cluster."""
    pods = read_pod_options(spec.backend.options)
    return pods, ClusterApi.of_context(pods.context, pods.namespace)


def _owner(pods: PodOptions) -> str:
    """The kind of the object that owns the others."""
    return "MPIJob" if pods.mpijob else "Job"
