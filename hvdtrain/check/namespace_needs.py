"""What a job in pods needs of its namespace, by the objects that it is made of; pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from hvdtrain.jobs.kubernetes.manifests import (
    Object,
    PodJob,
    job_objects,
    mpijob_objects,
    resource_of,
)
from hvdtrain.jobs.kubernetes.pod_backend import pod_job
from hvdtrain.jobs.kubernetes.pod_options import PodOptions, read_pod_options
from hvdtrain.jobs.kubernetes.ssh_keys import SshKeys
from hvdtrain.jobs.spec import Backend, JobSpec

__all__ = [
    "CLASSES_PATH",
    "CREATE_PODS",
    "KUEUE_PATH",
    "NODES_PATH",
    "OPERATOR_PATH",
    "VERSION_PATH",
    "WORKER",
    "NamespaceAnswers",
    "Needs",
    "PodSet",
    "Question",
    "Right",
    "creates",
    "needs_of",
    "planned_job",
]

KUEUE_GROUP = "kueue.x-k8s.io"
KUEUE_PATH = f"/apis/{KUEUE_GROUP}"
OPERATOR_PATH = "/apis/kubeflow.org"
NODES_PATH = "/api/v1/nodes"
CLASSES_PATH = "/apis/storage.k8s.io/v1/storageclasses"
VERSION_PATH = "/version"
_NAME = "hvdtrain-check"
LAUNCHER = "launcher"
WORKER = "worker"
# In which a LocalQueue may be served.
_KUEUE_VERSIONS = ("v1beta1", "v1beta2")
# What becomes of a job, its commands see and bring about with these.
_OF_JOBS = ("get", "patch", "delete")


class Right(NamedTuple):
    """Something that a user may do or not; its fields are those of ``ClusterApi.may``."""

    verb: str
    resource: str
    group: str = ""
    everywhere: bool = False

    @property
    def what(self) -> str:
        """The resource with its group, as kubectl writes it: ``statefulsets.apps/scale``."""
        name, slash, part = self.resource.partition("/")
        return f"{name}{f'.{self.group}' if self.group else ''}{slash}{part}"

    def __str__(self) -> str:
        return f"{self.verb} {self.what}"


CREATE_PODS = Right("create", "pods")


class Question(NamedTuple):
    """A path of the cluster's API, and the right that reading it takes; None for nobody's."""

    path: str
    right: Right | None = None


@dataclass(frozen=True, kw_only=True)
class PodSet:
    """Pods that are alike: as many of ``pod`` as ``count`` says."""

    role: str
    count: int
    pod: Object


@dataclass(frozen=True, kw_only=True)
class NamespaceAnswers:
    """What a cluster says.

    Attributes:
        said: What there is at the paths of questions, None for nothing; those that this user may
            not read are missing.
        refused: Rights that this user does not have.
        pods: By their role pods as the cluster would have them, or why it would not; those that
            were not tried are missing.
    """

    said: Mapping[str, Object | None] = field(default_factory=dict)
    refused: frozenset[Right] = frozenset()
    pods: Mapping[str, Object | str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a job asks of a namespace.

    Attributes:
        namespace: Its name.
        options: What was asked for.
        objects: What would be created.
    """

    namespace: str
    options: PodOptions
    objects: tuple[Object, ...]

    def path(self, resource: str, name: str = "", *, api: str = "/api/v1") -> str:
        """Where objects of this namespace are, or one of them."""
        collection = f"{api}/namespaces/{self.namespace}/{resource}"
        return f"{collection}/{name}" if name else collection

    @property
    def namespace_path(self) -> str:
        """Where the namespace itself is."""
        return f"/api/v1/namespaces/{self.namespace}"

    def queue_paths(self) -> list[str]:
        """Where Kueue's queue may be."""
        return [
            self.path("localqueues", self.options.queue, api=f"{KUEUE_PATH}/{version}")
            for version in _KUEUE_VERSIONS
        ]

    def pod_sets(self) -> list[PodSet]:
        """The pods that its objects would have."""
        sets = []
        for one in self.objects:
            spec = one.get("spec") or {}
            if one["kind"] == "Job":
                sets.append(PodSet(role=LAUNCHER, count=1, pod=spec["template"]))
            elif one["kind"] == "StatefulSet":
                sets.append(PodSet(role=WORKER, count=spec["replicas"], pod=spec["template"]))
            for role, part in (spec.get("mpiReplicaSpecs") or {}).items():
                count, pod = part["replicas"], part["template"]
                sets.append(PodSet(role=role.lower(), count=count, pod=pod))
        return sets

    def claims(self) -> dict[str, bool]:
        """The persistent volume claims of its pods, and whether they write to them."""
        found: dict[str, bool] = {}
        for pods in self.pod_sets():
            for volume in pods.pod["spec"].get("volumes") or ():
                if source := volume.get("persistentVolumeClaim"):
                    name = source["claimName"]
                    found[name] = found.get(name, False) or not source.get("readOnly")
        return found

    def pull_secrets(self) -> list[str]:
        """The secrets with which its image is pulled."""
        specs = [pods.pod["spec"] for pods in self.pod_sets()]
        names = [one["name"] for spec in specs for one in spec.get("imagePullSecrets") or ()]
        return list(dict.fromkeys(names))

    def rights(self) -> list[Right]:
        """What who submits it has to be allowed to do."""
        rights = [creates(one) for one in self.objects]
        # Nobody can give the launcher's account more than they have themselves.
        rules = [rule for one in self.objects for rule in one.get("rules") or ()]
        for rule in rules:
            for group in rule["apiGroups"]:
                for resource in rule["resources"]:
                    rights += [Right(verb, resource, group) for verb in rule["verbs"]]
        owner = creates(self.objects[0])
        rights += [Right(verb, owner.resource, owner.group) for verb in _OF_JOBS]
        rights += [Right(verb, "pods") for verb in ("get", "list")]
        rights.append(Right("get", "pods/log"))
        return list(dict.fromkeys(rights))

    def questions(self) -> Iterator[Question]:
        """What is to be read; the namespace first."""
        yield Question(self.namespace_path, Right("get", "namespaces"))
        yield Question(VERSION_PATH)
        if self.options.mpijob:
            yield Question(OPERATOR_PATH)
        if self.options.queue:
            yield Question(KUEUE_PATH)
            for path in self.queue_paths():
                yield Question(path, Right("get", "localqueues", KUEUE_GROUP))
        yield Question(self.path("resourcequotas"), Right("list", "resourcequotas"))
        yield Question(NODES_PATH, Right("list", "nodes", everywhere=True))
        claims = self.claims()
        for name in claims:
            right = Right("get", "persistentvolumeclaims")
            yield Question(self.path("persistentvolumeclaims", name), right)
        if claims:
            right = Right("list", "storageclasses", "storage.k8s.io", everywhere=True)
            yield Question(CLASSES_PATH, right)
        for name in self.pull_secrets():
            yield Question(self.path("secrets", name), Right("get", "secrets"))
        if account := self.options.service_account:
            yield Question(self.path("serviceaccounts", account), Right("get", "serviceaccounts"))

    def trial_pods(self) -> dict[str, Object]:
        """One pod of each role, to try whether the namespace takes it."""
        return {pods.role: self._trial(pods.pod) for pods in self.pod_sets()}

    def _trial(self, pod: Object) -> Object:
        spec = dict(pod["spec"])
        if spec.get("serviceAccountName") == _NAME:
            # The job's own account does not exist yet, and a pod needs one that does.
            del spec["serviceAccountName"]
        about = {**pod.get("metadata", {}), "generateName": f"{_NAME}-"}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": spec}


def needs_of(job: PodJob, namespace: str) -> Needs:
    """What a job needs, of which keys and secrets don't matter."""
    nobodys = SshKeys(user_private="", user_public="", host_private="", host_public="")
    objects = mpijob_objects(job) if job.pods.mpijob else job_objects(job, nobodys)
    return Needs(namespace=namespace, options=job.pods, objects=tuple(objects))


def planned_job(words: Iterable[str], ranks: int) -> PodJob:
    """A job of which nothing is known but its pods.

    Args:
        words: Options of pods as ``add_pod_options`` keeps them; an image need not be named.
        ranks: How many ranks it has.

    Raises:
        ConfigurationError: An option can't be read.
    """
    # Of options that don't repeat the last one wins.
    backend = Backend("kubernetes", (f"--image={_NAME}", *words))
    spec = JobSpec(options=(), program=("true",), folder="", backend=backend)
    shared = read_pod_options(backend.options).shared_paths()
    return pod_job(Path(*shared[:1], _NAME), spec, {}, ranks=ranks)


def creates(one: Object) -> Right:
    """The right that creating an object takes."""
    return Right("create", *resource_of(one))
