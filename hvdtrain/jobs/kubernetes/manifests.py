"""Builds the Kubernetes objects of a job.

The launcher and the workers are pods with the same image. A Job runs the launcher and replaces the
launcher's pod if the pod is lost. The Job owns all other objects, so deleting the Job removes
everything. A StatefulSet runs the workers, and a headless Service gives them names. Workers run
sshd as an ordinary user on a high port, with keys from this job's own Secret. A ConfigMap contains
the hostfile. The launcher may only read pods, scale its workers and end its Job; workers can't
access the API. If the job's folder is not on a volume, the launcher pod's log is the job's only
record.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvdtrain.jobs.folder import JOB_FOLDER, JOBS_DIR
from hvdtrain.jobs.kubernetes.pod_options import PodOptions, Toleration
from hvdtrain.pods.names import (
    FOLDER,
    JOB_LABEL,
    KEYS_FOLDER,
    ROLE_LABEL,
    SSH_FOLDER,
    SSH_PORT,
    Object,
    launcher_host,
    worker_addresses,
)

__all__ = ["KEY_FILES", "PodJob", "container_of", "job_objects", "make_keys"]

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
GPU = "nvidia.com/gpu"
# In common images, ssh reads all configuration files in this folder.
SSH_CONFIG = "/etc/ssh/ssh_config.d/hvdtrain.conf"
# How many lost launcher pods are replaced.
MOST_LAUNCHERS = 100
# How long a job's objects are kept after its end, together with the logs of its pods.
KEPT_S = 7 * 24 * 3600
# How long a deleted pod may take to save a checkpoint.
GRACE_S = 60
# Keys are readable by all, because the container may run as any user. The container then makes
# private copies of the keys.
_KEY_MODE = 0o444
_CONTAINER = "hvdtrain"
_SHM = "/dev/shm"
_RBAC = "rbac.authorization.k8s.io"
_API_VERSIONS = {
    "Job": "batch/v1",
    "StatefulSet": "apps/v1",
    "Role": f"{_RBAC}/v1",
    "RoleBinding": f"{_RBAC}/v1",
}
# The host key alias of all workers. It is needed because pods and their addresses change.
HOST_ALIAS = "hvdtrain"
# The launcher's private key, its public key, the workers' private key, their public key.
KEY_FILES = ("id_ed25519", "authorized_keys", "ssh_host_ed25519_key", "known_hosts")


def make_keys() -> Mapping[str, str]:
    """Return new Ed25519 keys for a job, keyed by the names in ``KEY_FILES``."""
    (user_private, user_public), (host_private, host_public) = _key_pair(), _key_pair()
    texts = (user_private, f"{user_public}\n", host_private, f"{HOST_ALIAS} {host_public}\n")
    return dict(zip(KEY_FILES, texts, strict=True))


def _key_pair() -> tuple[str, str]:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    return private.decode(), public.decode()


@dataclass(frozen=True, kw_only=True)
class PodJob:
    """A job that runs in pods."""

    name: str  # the name of the job and of its objects
    ranks: int  # the number of ranks
    options: tuple[str, ...]  # the options of ``hvdtrain run``
    program: tuple[str, ...]  # the program of every rank
    folder: str  # the job's folder if pods can write to it; else empty
    variables: Mapping[str, str]  # environment variables of the launcher
    secrets: Mapping[str, str]  # environment variables of the launcher that are kept in a Secret
    pods: PodOptions

    @property
    def workers(self) -> int:
        """The number of worker pods."""
        return -(-self.ranks // self.pods.ranks_per_pod)

    @property
    def labels(self) -> dict[str, str]:
        """The labels of all objects of the job."""
        return {"app.kubernetes.io/managed-by": "hvdtrain", JOB_LABEL: self.name}


def job_objects(job: PodJob, keys: Mapping[str, str]) -> list[Object]:
    """Return a job's objects in the order of creation. The first object owns the others."""
    secret = {**keys, **job.secrets}
    files = {"hostfile": _hostfile(job), "ssh_config": _ssh_config(job)}
    return [
        _launcher(job),
        *([] if job.pods.service_account else _service_account(job)),
        _object(job, "Secret", stringData=secret),
        _object(job, "ConfigMap", data=files),
        _service(job, job.name, "worker"),
        # Workers of Intel MPI and MPICH connect to the hostname of the launcher.
        _service(job, launcher_host(job.name), "launcher"),
        _workers(job),
    ]


def _hostfile(job: PodJob) -> str:
    slots, hosts = job.pods.ranks_per_pod, worker_addresses(job.name, job.workers).values()
    return "".join(f"{host} slots={slots}\n" for host in hosts)


def _ssh_config(job: PodJob) -> str:
    lines = [
        f"Host *.{job.name}",
        f"Port {SSH_PORT}",
        # The launcher's private copy: ssh refuses keys that others can read.
        f"IdentityFile {SSH_FOLDER}/id_ed25519",
        "IdentitiesOnly yes",
        f"UserKnownHostsFile {KEYS_FOLDER}/known_hosts",
        f"HostKeyAlias {HOST_ALIAS}",
        "StrictHostKeyChecking yes",
        "BatchMode yes",
    ]
    return "\n    ".join(lines) + "\n"


def _launcher(job: PodJob) -> Object:
    """Return the Job that runs ``hvdtrain run``."""
    pod = _pod(job, "launcher")
    run = ["run", "-np", str(job.ranks), "--hostfile", f"{FOLDER}/hostfile", *job.options]
    folder = {JOB_FOLDER: job.folder} if job.folder else {JOBS_DIR: ""}
    container = container_of(pod)
    container["command"] = [
        *(job.pods.python, "-P", "-m", "hvdtrain.pods.launcher", job.name),
        *("--", *run, "--", *job.program),
    ]
    container["env"] = [
        *(container.get("env") or ()),
        *({"name": name, "value": text} for name, text in {**job.variables, **folder}.items()),
        *(
            {"name": name, "valueFrom": {"secretKeyRef": {"name": job.name, "key": name}}}
            for name in job.secrets
        ),
    ]
    host = launcher_host(job.name)
    pod["spec"] |= {
        # Each start creates a new pod, so that the log of the previous one is kept.
        "restartPolicy": "Never",
        # The launcher looks up hostname.subdomain in DNS, because /etc/hosts has only the hostname.
        "hostname": host,
        "subdomain": host,
        "serviceAccountName": job.pods.service_account or job.name,
    }
    spec = {"backoffLimit": MOST_LAUNCHERS, "ttlSecondsAfterFinished": KEPT_S, "template": pod}
    launcher = _object(job, "Job", spec=spec)
    if job.pods.queue:
        spec["suspend"] = True
        launcher["metadata"]["labels"][QUEUE_LABEL] = job.pods.queue
    return launcher


def _workers(job: PodJob) -> Object:
    """Return the StatefulSet of the pods that run ranks."""
    pod = _pod(job, "worker")
    pod["spec"]["automountServiceAccountToken"] = False
    container = container_of(pod)
    worker = [job.pods.python, "-P", "-m", "hvdtrain.pods.worker"]
    container["command"] = worker
    container["ports"] = [{"name": "ssh", "containerPort": SSH_PORT}]
    container["readinessProbe"] = {"tcpSocket": {"port": "ssh"}, "periodSeconds": 2}
    # Lets a deleted pod run until its ranks have saved a checkpoint.
    drain = {"exec": {"command": [*worker, "drain"]}}
    container["lifecycle"] = {**(container.get("lifecycle") or {}), "preStop": drain}
    resources = dict(job.pods.resources)
    if job.pods.gpus_per_rank:
        resources[GPU] = str(job.pods.gpus_per_rank * job.pods.ranks_per_pod)
    if resources:
        container["resources"] = {"requests": resources, "limits": dict(resources)}
    if all(mount.get("mountPath") != _SHM for mount in container["volumeMounts"]):
        # Ranks in a pod reduce through shared memory. By default, a container has only 64 MiB.
        _mount(pod, "hvdtrain-shm", {"emptyDir": {"medium": "Memory"}}, _SHM)
    spec = {
        "replicas": job.workers,
        "serviceName": job.name,
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": _selector(job, "worker")},
        "template": pod,
    }
    return _object(job, "StatefulSet", f"{job.name}-worker", spec=spec)


def _service(job: PodJob, name: str, role: str) -> Object:
    """Return a headless Service, which gives DNS names to the pods of a role."""
    spec = {
        "clusterIP": "None",
        # Workers get names before sshd runs, so that the launcher can report which ones are not
        # ready. The launcher's name must not resolve to a launcher that is terminating.
        "publishNotReadyAddresses": role == "worker",
        "selector": _selector(job, role),
        "ports": [{"name": "ssh", "port": SSH_PORT}],
    }
    return _object(job, "Service", name, spec=spec)


def _service_account(job: PodJob) -> list[Object]:
    """Return the launcher's account, which may read pods, scale its workers and end its Job."""
    rules = [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]},
        {
            "apiGroups": ["apps"],
            "resources": ["statefulsets", "statefulsets/scale"],
            "resourceNames": [f"{job.name}-worker"],
            "verbs": ["get", "patch"],
        },
        {
            "apiGroups": ["batch"],
            "resources": ["jobs"],
            "resourceNames": [job.name],
            "verbs": ["get", "patch"],
        },
    ]
    role = {"apiGroup": _RBAC, "kind": "Role", "name": job.name}
    account = {"kind": "ServiceAccount", "name": job.name}
    return [
        _object(job, "ServiceAccount"),
        _object(job, "Role", rules=rules),
        _object(job, "RoleBinding", roleRef=role, subjects=[account]),
    ]


def _object(job: PodJob, kind: str, name: str = "", **content: Any) -> Object:
    metadata = {"name": name or job.name, "labels": job.labels}
    if job.pods.namespace:
        metadata["namespace"] = job.pods.namespace
    version = _API_VERSIONS.get(kind, "v1")
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **content}


def _selector(job: PodJob, role: str) -> dict[str, str]:
    return {JOB_LABEL: job.name, ROLE_LABEL: role}


def _pod(job: PodJob, role: str) -> Object:
    """Return the pod template of a role: the user's template with the options applied."""
    pods = job.pods
    template = copy.deepcopy(dict(pods.template))
    metadata = template.get("metadata") or {}
    labels = {**(metadata.get("labels") or {}), **job.labels, **_selector(job, role)}
    pod: Object = {"metadata": {"labels": labels}, "spec": template.get("spec") or {}}
    if metadata.get("annotations"):
        pod["metadata"]["annotations"] = metadata["annotations"]
    spec = pod["spec"]
    spec.setdefault("terminationGracePeriodSeconds", GRACE_S)
    if pods.node_selector:
        spec["nodeSelector"] = {**(spec.get("nodeSelector") or {}), **pods.node_selector}
    for taint in pods.tolerations:
        _append(spec, "tolerations", _toleration(taint))
    for name in pods.pull_secrets:
        _append(spec, "imagePullSecrets", {"name": name})
    container = container_of(pod)
    container["image"] = pods.image
    # Keeps the last lines of the log in the pod's status.
    container["terminationMessagePolicy"] = "FallbackToLogsOnError"
    if pods.folder:
        container["workingDir"] = pods.folder
    for number, volume in enumerate(pods.volumes):
        claim = {"claimName": volume.claim, "readOnly": volume.read_only}
        source = {"persistentVolumeClaim": claim}
        _mount(pod, f"volume-{number}", source, volume.path, readOnly=volume.read_only)
    _mount(pod, "hvdtrain", {"configMap": {"name": job.name}}, FOLDER)
    _mount(pod, "hvdtrain", None, SSH_CONFIG, subPath="ssh_config")
    items = [{"key": name, "path": name} for name in KEY_FILES]
    secret = {"secretName": job.name, "defaultMode": _KEY_MODE, "items": items}
    _mount(pod, "hvdtrain-keys", {"secret": secret}, KEYS_FOLDER)
    return pod


def container_of(pod: Object) -> Object:
    """Return the container named ``hvdtrain``, or the first one."""
    containers: list[Object] = pod["spec"].setdefault("containers", [])
    if not containers:
        containers.append({"name": _CONTAINER})
    named = [container for container in containers if container.get("name") == _CONTAINER]
    return [*named, *containers][0]


def _mount(pod: Object, name: str, source: Object | None, path: str, **options: Any) -> None:
    if source is not None:
        _append(pod["spec"], "volumes", {"name": name, **source})
    _append(container_of(pod), "volumeMounts", {"name": name, "mountPath": path, **options})


def _toleration(taint: Toleration) -> Object:
    toleration: Object = {"operator": "Equal" if taint.value else "Exists"}
    return toleration | {name: text for name, text in vars(taint).items() if text}


def _append(content: Object, name: str, value: Object) -> None:
    content[name] = [*(content.get(name) or ()), value]
