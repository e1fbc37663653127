"""Asks a cluster what ``hvdtrain check --on kubernetes`` wants to know."""

from __future__ import annotations

import functools
from importlib.util import find_spec

from hvdtrain.check.namespace_needs import CREATE_PODS, NamespaceAnswers, Needs, Right, needs_of
from hvdtrain.errors import JobError
from hvdtrain.jobs.kubernetes.cluster_api import ClusterApi
from hvdtrain.jobs.kubernetes.manifests import Object, PodJob

__all__ = ["ask_cluster", "missing_packages"]

_PACKAGES = ("kubernetes", "cryptography")


def missing_packages() -> list[str]:
    """The Python packages that jobs on Kubernetes need, and that are not there."""
    return [name for name in _PACKAGES if find_spec(name) is None]


def ask_cluster(job: PodJob) -> tuple[Needs, NamespaceAnswers]:
    """Ask all that matters to a job; nothing is changed.

    Raises:
        JobError: There is no cluster, or it does not answer.
    """
    api = ClusterApi.of_context(job.pods.context, job.pods.namespace)
    needs = needs_of(job, api.namespace)

    @functools.cache
    def may(right: Right) -> bool:
        return api.may(right.verb, right.resource, right.group, everywhere=right.everywhere)

    said: dict[str, Object | None] = {}
    refused = set()
    for path, right in needs.questions():
        if right is None or may(right):
            said[path] = api.read(path)
        else:
            refused.add(right)
    if said.get(needs.namespace_path, {}) is None:
        return needs, NamespaceAnswers(said=said)
    refused |= {right for right in [*needs.rights(), CREATE_PODS] if not may(right)}
    pods = {} if CREATE_PODS in refused else _try_pods(api, needs)
    return needs, NamespaceAnswers(said=said, refused=frozenset(refused), pods=pods)


def _try_pods(api: ClusterApi, needs: Needs) -> dict[str, Object | str]:
    """One pod of each role as the cluster would have it, or why it would not."""
    found: dict[str, Object | str] = {}
    for role, pod in needs.trial_pods().items():
        try:
            found[role] = api.try_to_create(pod)
        except JobError as error:
            found[role] = str(error)
    return found
