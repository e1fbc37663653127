"""Checks whether a Kubernetes namespace would accept a job.

In a dry run, the API server validates the job's objects against quotas, limits and admission
policies without creating them. Whether the pods could start is not checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from hvdtrain.errors import JobError
from hvdtrain.jobs.kubernetes.manifests import KEY_FILES, PodJob, job_objects
from hvdtrain.jobs.kubernetes.pod_backend import pod_job
from hvdtrain.jobs.kubernetes.pod_options import read_pod_options
from hvdtrain.jobs.spec import Backend, JobSpec
from hvdtrain.pods.cluster_api import ClusterApi
from hvdtrain.pods.names import Object, resource_of, rights_text
from hvdtrain.remote.problem import Problem, format_problem, problem_state
from hvdtrain.text import format_table

__all__ = ["check_namespace"]

# The smallest job whose ranks communicate.
DEFAULT_RANKS = 2
_NAME = "hvdtrain-check"


class _Row(NamedTuple):
    name: str
    result: str
    problems: Sequence[Problem] = ()


def check_namespace(options: Sequence[str], ranks: int | None) -> list[Problem]:
    """Check a namespace, print a report, and return the problems.

    ``options`` are the pod options, as ``add_pod_options`` collects them.

    Raises:
        ConfigurationError: If an option is invalid.
    """
    job = _planned_job(options, ranks or DEFAULT_RANKS)
    rows: list[_Row] = []
    try:
        rows += _check(job, ClusterApi.of_context(job.pods.context, job.pods.namespace))
    except JobError as error:
        problem = Problem(
            summary=str(error),
            expected="a cluster that answers, according to kubectl's configuration and context",
            remedy="make sure that kubectl get pods works here; kubectl config get-contexts "
            "lists the contexts for --context; KUBECONFIG selects the configuration file",
        )
        rows.append(_Row("cluster", "no answer", [problem]))
    problems = [problem for row in rows for problem in row.problems]
    problems.sort(key=lambda problem: not problem.is_error)
    cells = [(row.name, problem_state(row.problems), row.result) for row in rows]
    table = format_table(("what", "state", "result"), cells, left=(0, 1, 2))
    print("\n\n".join([table, *map(format_problem, problems)]))
    return problems


def _planned_job(options: Sequence[str], ranks: int) -> PodJob:
    """Return a job with these pod options. If no image is given, a placeholder is used."""
    # If an option is repeated, its last value is used.
    backend = Backend("kubernetes", (f"--image={_NAME}", *options))
    spec = JobSpec(options=(), program=("true",), folder="", backend=backend)
    shared = read_pod_options(backend.options).shared_paths()
    return pod_job(Path(*shared[:1], _NAME), spec, {}, ranks=ranks)


def _check(job: PodJob, api: ClusterApi) -> Iterator[_Row]:
    """Check whether the cluster would accept the job."""
    version = (api.read("/version") or {}).get("gitVersion", "of unknown version")
    yield _Row("cluster", f"Kubernetes {version.removeprefix('v')}")
    if api.may("get", "namespaces") and api.read(f"/api/v1/namespaces/{api.namespace}") is None:
        missing = Problem(
            summary=f"namespace {api.namespace} does not exist",
            expected="an existing namespace, from --namespace or kubectl's context",
            remedy="choose one from kubectl get namespaces, or create it: kubectl create namespace "
            f"{api.namespace}",
        )
        yield _Row(f"namespace {api.namespace}", "missing", [missing])
        return
    yield _Row(f"namespace {api.namespace}", "exists")
    objects = job_objects(job, dict.fromkeys(KEY_FILES, ""))
    yield _rights(api, objects)
    yield _dry_run(api, [*objects, *_pods(objects)])


def _rights(api: ClusterApi, objects: Sequence[Object]) -> _Row:
    """Check the user's permissions to submit, watch and stop a job."""
    owner = resource_of(objects[0])
    needed = [("create", *resource_of(one)) for one in objects]
    needed += [(verb, *owner) for verb in ("get", "list", "patch", "delete")]
    needed += [("get", "pods", ""), ("list", "pods", ""), ("get", "pods/log", "")]
    # Users can only grant the launcher's account permissions that they have themselves.
    for rule in (rule for one in objects for rule in one.get("rules") or ()):
        needed += [
            (verb, resource, group)
            for group in rule["apiGroups"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        ]
    needed = list(dict.fromkeys(needed))
    missing = [right for right in needed if not api.may(*right)]
    result = f"{len(needed) - len(missing)} of {len(needed)}"
    if not missing:
        return _Row("permissions", result)
    problem = Problem(
        summary=f"you may not {rights_text(missing)} in namespace {api.namespace}",
        expected="permissions to create, watch and delete all objects of a job",
        remedy="ask for the permissions of the role admin: kubectl create rolebinding NAME "
        f"--clusterrole=admin --user=YOU -n {api.namespace}; with --service-account NAME, no "
        "permissions for roles are needed",
    )
    return _Row("permissions", result, [problem])


def _dry_run(api: ClusterApi, objects: Sequence[Object]) -> _Row:
    """Create the objects and one pod of each role in a dry run."""
    problems = []
    allowed = [one for one in objects if api.may("create", *resource_of(one))]
    for one in allowed:
        try:
            api.create_one(one, dry_run=True)
        except JobError as error:
            problem = Problem(
                summary=str(error),
                expected="objects that comply with the namespace's quotas, limits and policies",
                remedy="change the rejected setting with --resources, -np or --template",
                # Some webhooks have side effects and refuse dry runs.
                is_error="does not support dry run" not in str(error),
            )
            problems.append(problem)
    return _Row("objects", f"{len(allowed) - len(problems)} of {len(objects)} accepted", problems)


def _pods(objects: Sequence[Object]) -> list[Object]:
    """Return a pod of each role, as the controllers would create it."""
    pods = []
    for one in objects:
        if (template := one.get("spec", {}).get("template")) is None:
            continue
        spec = dict(template["spec"])
        if spec.get("serviceAccountName") == _NAME:
            # A pod needs an existing account, but the job's own account is not created yet.
            del spec["serviceAccountName"]
        metadata = {**template.get("metadata", {}), "generateName": f"{_NAME}-"}
        pods.append({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    return pods
