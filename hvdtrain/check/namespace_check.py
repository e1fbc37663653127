"""``hvdtrain check --on kubernetes``: would a namespace accept a job?

The API server itself judges the objects that the job would create, in a dry run: its validation,
quotas, limits and admission policies apply, and nothing is created. Whether nodes have room is the
scheduler's decision, which is not predicted here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from hvdtrain.errors import JobError
from hvdtrain.jobs.kubernetes.manifests import KEY_FILES, PodJob, job_objects
from hvdtrain.jobs.kubernetes.pod_backend import pod_job
from hvdtrain.jobs.kubernetes.pod_options import read_pod_options
from hvdtrain.jobs.spec import Backend, JobSpec
from hvdtrain.pods.cluster_api import ClusterApi
from hvdtrain.pods.names import Object, resource_of, rights_text
from hvdtrain.remote.problem import Problem, show_problem, state_word
from hvdtrain.text import format_table

__all__ = ["check_namespace"]

# The number of ranks if -np is not given: the smallest job that needs a network.
DEFAULT_RANKS = 2
_NAME = "hvdtrain-check"
_PACKAGES = ("kubernetes", "cryptography")
_KUEUE = ("v1beta1", "v1beta2")


class _Row(NamedTuple):
    what: str
    found: str
    problems: Sequence[Problem] = ()


def check_namespace(words: Sequence[str], ranks: int | None) -> list[Problem]:
    """Check the namespace that pod options name, and return the problems.

    Args:
        words: The options as ``add_pod_options`` keeps them.
        ranks: The number of ranks of the job.

    Raises:
        ConfigurationError: The options can't be read.
    """
    job = _planned_job(words, ranks or DEFAULT_RANKS)
    rows: list[_Row] = []
    if missing := [name for name in _PACKAGES if find_spec(name) is None]:
        packages = Problem(
            found=f"not installed here: {', '.join(missing)}",
            expected="the Python packages with which hvdtrain asks clusters",
            remedy=f"{sys.executable} -m pip install 'hvdtrain[kubernetes]'",
        )
        rows.append(_Row("packages", "missing", [packages]))
    else:
        try:
            rows += _check(job, ClusterApi.of_context(job.pods.context, job.pods.namespace))
        except JobError as error:
            silent = Problem(
                found=str(error),
                expected="a cluster that answers, by kubectl's configuration and its context",
                remedy="kubectl get pods has to work here; kubectl config get-contexts lists the "
                "contexts, of which --context names one, and KUBECONFIG the file",
            )
            rows.append(_Row("cluster", "no answer", [silent]))
    problems = [problem for row in rows for problem in row.problems]
    problems.sort(key=lambda problem: not problem.error)
    cells = [(row.what, state_word(row.problems), row.found) for row in rows]
    table = format_table(("what", "state", "found"), cells, left=(0, 1, 2))
    print("\n\n".join([table, *map(show_problem, problems)]))
    return problems


def _planned_job(words: Sequence[str], ranks: int) -> PodJob:
    """Return a job with these pod options; an image need not be named."""
    # The last one of repeated options counts.
    backend = Backend("kubernetes", (f"--image={_NAME}", *words))
    spec = JobSpec(options=(), program=("true",), folder="", backend=backend)
    shared = read_pod_options(backend.options).shared_paths()
    return pod_job(Path(*shared[:1], _NAME), spec, {}, ranks=ranks)


def _check(job: PodJob, api: ClusterApi) -> Iterator[_Row]:
    """Ask the cluster about all that the job needs.

    Raises:
        JobError: The cluster does not answer.
    """
    version = (api.read("/version") or {}).get("gitVersion", "of unknown version")
    yield _Row("cluster", f"Kubernetes {version.removeprefix('v')}")
    path = f"/api/v1/namespaces/{api.namespace}"
    if api.may("get", "namespaces") and api.read(path) is None:
        missing = Problem(
            found=f"there is no namespace {api.namespace}",
            expected="the namespace of --namespace, or else that of kubectl's context",
            remedy="kubectl get namespaces lists the namespaces; kubectl create namespace "
            f"{api.namespace} creates it",
        )
        yield _Row(f"namespace {api.namespace}", "absent", [missing])
        return
    yield _Row(f"namespace {api.namespace}", "there")
    objects = job_objects(job, dict.fromkeys(KEY_FILES, ""))
    pods = _pods(objects)
    yield _rights(api, objects)
    yield _trial(api, [*objects, *pods])
    claims = [
        volume["persistentVolumeClaim"]["claimName"]
        for pod in pods
        for volume in pod["spec"].get("volumes") or ()
        if "persistentVolumeClaim" in volume
    ]
    for resource, names in {
        "secrets": job.pods.pull_secrets,
        "serviceaccounts": filter(None, [job.pods.service_account]),
        "persistentvolumeclaims": dict.fromkeys(claims),
    }.items():
        for name in names:
            if api.may("get", resource):
                yield _existing(api, resource, name, api.read(f"{path}/{resource}/{name}"))
    if (queue := job.pods.queue) and api.may("get", "localqueues", "kueue.x-k8s.io"):
        group = "/apis/kueue.x-k8s.io"
        paths = [f"{group}/{v}/namespaces/{api.namespace}/localqueues/{queue}" for v in _KUEUE]
        found = next(filter(None, map(api.read, paths)), None)
        yield _existing(api, "localqueues.kueue.x-k8s.io", queue, found)


def _rights(api: ClusterApi, objects: Sequence[Object]) -> _Row:
    """Compare the user's rights with those that submitting, watching and stopping take."""
    owner = resource_of(objects[0])
    wanted = [("create", *resource_of(one)) for one in objects]
    wanted += [(verb, *owner) for verb in ("get", "patch", "delete")]
    wanted += [("get", "pods", ""), ("list", "pods", ""), ("get", "pods/log", "")]
    # Nobody can give the launcher's account more rights than they have.
    for rule in (rule for one in objects for rule in one.get("rules") or ()):
        wanted += [
            (verb, resource, group)
            for group in rule["apiGroups"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        ]
    wanted = list(dict.fromkeys(wanted))
    refused = [right for right in wanted if not api.may(*right)]
    found = f"{len(wanted) - len(refused)} of {len(wanted)}"
    if not refused:
        return _Row("rights", found)
    lacking = Problem(
        found=f"you may not {rights_text(refused)} in namespace {api.namespace}",
        expected="the rights to create, see and end all that a job is made of",
        remedy="ask for them, as the role admin has them: kubectl create rolebinding NAME "
        f"--clusterrole=admin --user=YOU -n {api.namespace}; with --service-account NAME no "
        "roles are needed",
    )
    return _Row("rights", found, [lacking])


def _trial(api: ClusterApi, objects: Sequence[Object]) -> _Row:
    """Create the objects, and one pod of each role, in a dry run."""
    problems = []
    allowed = [one for one in objects if api.may("create", *resource_of(one))]
    for one in allowed:
        try:
            api.create_one(one, dry_run=True)
        except JobError as error:
            refused = Problem(
                found=str(error),
                expected="objects that the namespace's quotas, limits and policies accept",
                remedy="change what the message names: --resources, -np, or all else of a pod by "
                "--template",
                # The policy runs in a program that can't judge without side effects.
                error="does not support dry run" not in str(error),
            )
            problems.append(refused)
    return _Row("objects", f"{len(allowed) - len(problems)} of {len(objects)} accepted", problems)


def _existing(api: ClusterApi, resource: str, name: str, found: Object | None) -> _Row:
    what = f"{resource.partition('.')[0]} {name}"
    if found is None:
        absent = Problem(
            found=f"there is no {name} among {resource} in namespace {api.namespace}",
            expected="all that the job refers to",
            remedy=f"kubectl -n {api.namespace} get {resource} lists the names",
        )
        return _Row(what, "absent", [absent])
    modes = (found.get("spec") or {}).get("accessModes") or ()
    if resource == "persistentvolumeclaims" and "ReadWriteMany" not in modes:
        narrow = Problem(
            found=f"claim {name} is {', '.join(modes)}",
            expected="ReadWriteMany: launcher and workers have it at the same time",
            remedy="take a claim of a storage class for many nodes, such as NFS, CephFS or Lustre",
            error=False,
        )
        return _Row(what, ", ".join(modes), [narrow])
    return _Row(what, "there")


def _pods(objects: Sequence[Object]) -> list[Object]:
    """Return one pod of each role, as the controllers would create it."""
    pods = []
    for one in objects:
        if (template := one.get("spec", {}).get("template")) is None:
            continue
        spec = dict(template["spec"])
        if spec.get("serviceAccountName") == _NAME:
            # A pod needs an account that exists, and the job's own doesn't yet.
            del spec["serviceAccountName"]
        metadata = {**template.get("metadata", {}), "generateName": f"{_NAME}-"}
        pods.append({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    return pods
