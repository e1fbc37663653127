"""The objects of a job on Kubernetes, made of what was asked for; nothing is created here.

Launcher and workers are pods of the same image. A Job has the launcher, and starts it again where
its pod is lost; it owns everything else, so that deleting it leaves nothing. A StatefulSet has the
workers, whose names a headless Service makes known: sshd runs in them, as an ordinary user on a
high port, with keys that a Secret has for this job alone. A ConfigMap has the hostfile. The
launcher may look at the job's pods and scale its workers, and nothing else; workers may do nothing.
Where the job's folder is on no volume, the launcher keeps none: the log of its pod is all there is.
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
# Where an image's ssh reads more of its configuration.
SSH_CONFIG = "/etc/ssh/ssh_config.d/hvdtrain.conf"
# How often the launcher's pod may be lost.
MOST_LAUNCHERS = 100
# How long the objects of a job that has ended are kept, with the logs of its pods.
KEPT_S = 7 * 24 * 3600
# For a checkpoint, once a pod is told to end.
GRACE_S = 60
# Whoever an image's user is reads them, and makes a copy of his own; nobody else is in the pod.
_KEY_MODE = 0o444
_CONTAINER = "hvdtrain"
_SHM = "/dev/shm"
# The name by which all workers of a job are known, wherever they are.
HOST_ALIAS = "hvdtrain"
# The launcher's key, who may come in, the workers' key, and who they are.
KEY_FILES = ("id_ed25519", "authorized_keys", "ssh_host_ed25519_key", "known_hosts")


def make_keys() -> Mapping[str, str]:
    """Return new Ed25519 keys of a job, by the names of ``KEY_FILES``."""
    (user_private, user_public), (host_private, host_public) = _pair(), _pair()
    texts = (user_private, f"{user_public}\n", host_private, f"{HOST_ALIAS} {host_public}\n")
    return dict(zip(KEY_FILES, texts, strict=True))


def _pair() -> tuple[str, str]:
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
    """A job that is to run in pods.

    Attributes:
        name: Its name, which its objects have.
        ranks: How many there are.
        options: The options of ``hvdtrain run``.
        program: What each rank runs.
        folder: Where its folder is for its pods; empty where they see none.
        variables: What the launcher has in its environment.
        secrets: The same, of what is kept in a Secret.
        pods: What its pods are to be.
    """

    name: str
    ranks: int
    options: tuple[str, ...]
    program: tuple[str, ...]
    folder: str
    variables: Mapping[str, str]
    secrets: Mapping[str, str]
    pods: PodOptions

    @property
    def workers(self) -> int:
        """How many pods have ranks."""
        return -(-self.ranks // self.pods.ranks_per_pod)

    @property
    def labels(self) -> dict[str, str]:
        """The labels of all that belongs to it."""
        return {"app.kubernetes.io/managed-by": "hvdtrain", JOB_LABEL: self.name}


def hostfile_text(job: PodJob) -> str:
    """The workers and their ranks, as ``hvdtrain run --hostfile`` reads them."""
    slots, hosts = job.pods.ranks_per_pod, worker_addresses(job.name, job.workers).values()
    return "".join(f"{host} slots={slots}\n" for host in hosts)


def ssh_config_text(job: PodJob) -> str:
    """What ssh has to know to reach the workers, and that they are no others."""
    lines = [
        f"Host *.{job.name}",
        f"Port {SSH_PORT}",
        # Copied there by the launcher: ssh refuses a key that more than its owner may read.
        f"IdentityFile {SSH_FOLDER}/id_ed25519",
        "IdentitiesOnly yes",
        f"UserKnownHostsFile {KEYS_FOLDER}/known_hosts",
        # One key for all of them, as pods and their addresses come and go.
        f"HostKeyAlias {HOST_ALIAS}",
        "StrictHostKeyChecking yes",
        "BatchMode yes",
    ]
    return "\n    ".join(lines) + "\n"


def job_objects(job: PodJob, keys: Mapping[str, str]) -> list[Object]:
    """All objects of a job, in the order in which they are to be created; the first owns the rest.

    Args:
        job: The job.
        keys: Its ssh keys, as ``make_keys`` returns them.
    """
    return [
        _launcher_job(job),
        *([] if job.pods.service_account else _rights(job)),
        _secret(job, {**keys, **job.secrets}),
        _config_map(job),
        _service(job, job.name, "worker"),
        # Workers of Intel MPI and MPICH come back to the launcher by the name that it has itself.
        _service(job, launcher_host(job.name), "launcher"),
        _workers(job),
    ]


def _queue(job: PodJob) -> dict[str, str]:
    return {QUEUE_LABEL: job.pods.queue} if job.pods.queue else {}


def _launcher_job(job: PodJob) -> Object:
    pod = _launcher_pod(job)
    # By the two together it can ask whether DNS has its name: the first alone is in its /etc/hosts.
    pod["spec"]["hostname"] = pod["spec"]["subdomain"] = launcher_host(job.name)
    pod["spec"]["serviceAccountName"] = job.pods.service_account or job.name
    _wire(pod, job)
    return _object(
        job,
        "batch/v1",
        "Job",
        job.name,
        spec={
            "backoffLimit": MOST_LAUNCHERS,
            "ttlSecondsAfterFinished": KEPT_S,
            "template": pod,
            **({"suspend": True} if job.pods.queue else {}),
        },
        labels=_queue(job),
    )


def _workers(job: PodJob) -> Object:
    pod = _worker_pod(job)
    container = container_of(pod)
    container["command"] = [job.pods.python, "-P", "-m", "hvdtrain.pods.worker"]
    container["ports"] = [{"name": "ssh", "containerPort": SSH_PORT}]
    container["readinessProbe"] = {"tcpSocket": {"port": "ssh"}, "periodSeconds": 2}
    # A pod that is to end does so once its ranks have saved what they have.
    drain = {"command": [job.pods.python, "-P", "-m", "hvdtrain.pods.worker", "drain"]}
    container["lifecycle"] = {**(container.get("lifecycle") or {}), "preStop": {"exec": drain}}
    _wire(pod, job)
    return _object(
        job,
        "apps/v1",
        "StatefulSet",
        f"{job.name}-worker",
        spec={
            "replicas": job.workers,
            "serviceName": job.name,
            # None waits for the one before it.
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": _selector(job, "worker")},
            "template": pod,
        },
    )


def _service(job: PodJob, name: str, role: str) -> Object:
    """A headless Service, by which pods of that role have names."""
    return _object(
        job,
        "v1",
        "Service",
        name,
        spec={
            "clusterIP": "None",
            # Workers' names are there before sshd is: who waits for them sees who is still missing.
            # That of the launcher is no more that of one which is to end.
            "publishNotReadyAddresses": role == "worker",
            "selector": _selector(job, role),
            "ports": [{"name": "ssh", "port": SSH_PORT}],
        },
    )


def _config_map(job: PodJob) -> Object:
    data = {"hostfile": hostfile_text(job), "ssh_config": ssh_config_text(job)}
    return {**_object(job, "v1", "ConfigMap", job.name), "data": data}


def _secret(job: PodJob, files: Mapping[str, str]) -> Object:
    return {**_object(job, "v1", "Secret", job.name), "stringData": dict(files)}


def _rights(job: PodJob) -> list[Object]:
    """An account for the launcher, that may see the job's pods, and scale and end the job's own."""
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
    group = "rbac.authorization.k8s.io"
    return [
        _object(job, "v1", "ServiceAccount", job.name),
        {**_object(job, f"{group}/v1", "Role", job.name), "rules": rules},
        {
            **_object(job, f"{group}/v1", "RoleBinding", job.name),
            "roleRef": {"apiGroup": group, "kind": "Role", "name": job.name},
            "subjects": [{"kind": "ServiceAccount", "name": job.name}],
        },
    ]


def _object(
    job: PodJob,
    version: str,
    kind: str,
    name: str,
    *,
    spec: Mapping[str, Any] | None = None,
    labels: Mapping[str, str] | None = None,
) -> Object:
    metadata = {"name": name, "labels": {**job.labels, **(labels or {})}}
    if job.pods.namespace:
        metadata["namespace"] = job.pods.namespace
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": metadata,
        **({} if spec is None else {"spec": dict(spec)}),
    }


def _selector(job: PodJob, role: str) -> dict[str, str]:
    return {JOB_LABEL: job.name, ROLE_LABEL: role}


def _launcher_pod(job: PodJob) -> Object:
    """The pod that runs ``hvdtrain run``; it takes no part in the training."""
    run = ["run", "-np", str(job.ranks), "--hostfile", f"{FOLDER}/hostfile", *job.options]
    words = ["hvdtrain.pods.launcher", job.name, "--", *run, "--", *job.program]
    pod = _pod(job, "launcher")
    # Whatever it is started again for, a new pod does it, and the log of this one is kept.
    pod["spec"]["restartPolicy"] = "Never"
    container = container_of(pod)
    container["command"] = [job.pods.python, "-P", "-m", *words]
    container["env"] = [*(container.get("env") or ()), *_variables(job)]
    return pod


def _worker_pod(job: PodJob) -> Object:
    """A pod in which ranks are started, and which has what they need."""
    pod = _pod(job, "worker")
    pod["spec"]["automountServiceAccountToken"] = False
    wanted = dict(job.pods.resources)
    if job.pods.gpus_per_rank:
        wanted[GPU] = str(job.pods.gpus_per_rank * job.pods.ranks_per_pod)
    container = container_of(pod)
    if wanted:
        container["resources"] = {"requests": wanted, "limits": dict(wanted)}
    mounts = container.get("volumeMounts") or ()
    if all(mount.get("mountPath") != _SHM for mount in mounts):
        # Ranks of a pod add up there, and a container's own has 64 MiB.
        _mount(pod, "hvdtrain-shm", {"emptyDir": {"medium": "Memory"}}, _SHM)
    return pod


def _pod(job: PodJob, role: str) -> Object:
    """A pod as the template has it, with what was asked for."""
    pods = job.pods
    given = copy.deepcopy(dict(pods.template))
    about = given.get("metadata") or {}
    labels = {**(about.get("labels") or {}), **job.labels, **_selector(job, role)}
    pod: Object = {"metadata": {"labels": labels}, "spec": given.get("spec") or {}}
    if about.get("annotations"):
        pod["metadata"]["annotations"] = about["annotations"]
    spec = pod["spec"]
    spec.setdefault("terminationGracePeriodSeconds", GRACE_S)
    if pods.node_selector:
        spec["nodeSelector"] = {**(spec.get("nodeSelector") or {}), **pods.node_selector}
    for taint in pods.tolerations:
        _add(spec, "tolerations", _toleration(taint))
    for name in pods.pull_secrets:
        _add(spec, "imagePullSecrets", {"name": name})
    container = container_of(pod)
    container["image"] = pods.image
    # The last lines stay in what is said of the pod, as long as it is there.
    container["terminationMessagePolicy"] = "FallbackToLogsOnError"
    if pods.folder:
        container["workingDir"] = pods.folder
    for number, volume in enumerate(pods.volumes):
        claim = {"claimName": volume.claim, "readOnly": volume.read_only}
        source = {"persistentVolumeClaim": claim}
        _mount(pod, f"volume-{number}", source, volume.path, readOnly=volume.read_only)
    return pod


def _wire(pod: Object, job: PodJob) -> None:
    """Let a pod find the others, and let it in there."""
    _mount(pod, "hvdtrain", {"configMap": {"name": job.name}}, FOLDER)
    _mount(pod, "hvdtrain", None, SSH_CONFIG, subPath="ssh_config")
    items = [{"key": name, "path": name} for name in KEY_FILES]
    secret = {"secretName": job.name, "defaultMode": _KEY_MODE, "items": items}
    _mount(pod, "hvdtrain-keys", {"secret": secret}, KEYS_FOLDER)


def container_of(pod: Object) -> Object:
    """Return the container that hvdtrain runs in: the one of that name, or the first."""
    containers: list[Object] = pod["spec"].setdefault("containers", [])
    if not containers:
        containers.append({"name": _CONTAINER})
    for container in containers:
        if container.get("name") == _CONTAINER:
            return container
    return containers[0]


def _mount(pod: Object, name: str, source: Object | None, path: str, **more: Any) -> None:
    if source is not None:
        _add(pod["spec"], "volumes", {"name": name, **source})
    _add(container_of(pod), "volumeMounts", {"name": name, "mountPath": path, **more})


def _toleration(taint: Toleration) -> Object:
    found: Object = {"operator": "Equal" if taint.value else "Exists"}
    for name in ("key", "value", "effect"):
        if text := getattr(taint, name):
            found[name] = text
    return found


def _add(content: Object, name: str, value: Object) -> None:
    content[name] = [*(content.get(name) or ()), value]


def _variables(job: PodJob) -> list[Object]:
    folder = {JOB_FOLDER: job.folder} if job.folder else {JOBS_DIR: ""}
    variables = {**job.variables, **folder}
    plain: list[Object] = [{"name": name, "value": text} for name, text in variables.items()]
    kept = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": job.name, "key": name}}}
        for name in job.secrets
    ]
    return plain + kept
