"""Whether a namespace of a cluster is fit for a job: from answers to findings; pure functions."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

from hvdtrain.check.findings import UNKNOWN, Finding
from hvdtrain.check.namespace_needs import (
    CLASSES_PATH,
    CREATE_PODS,
    KUEUE_PATH,
    NODES_PATH,
    OPERATOR_PATH,
    VERSION_PATH,
    NamespaceAnswers,
    Needs,
    PodSet,
    Right,
)
from hvdtrain.check.room_check import judge_nodes, judge_quotas
from hvdtrain.cluster.ranges import counted
from hvdtrain.jobs.kubernetes.manifests import Object
from hvdtrain.jobs.kubernetes.pod_states import find_condition
from hvdtrain.remote.problem import Problem

__all__ = ["judge_namespace", "unknown_as_problem"]

OLDEST = (1, 20)
NOT_SEEN = "you may not look"
_MPIJOB_VERSION = "v2beta1"
_EVERYWHERE, _ONE_POD = "ReadWriteMany", "ReadWriteOncePod"
_AT_FIRST_POD = "WaitForFirstConsumer"


def judge_namespace(needs: Needs, answers: NamespaceAnswers) -> list[Finding]:
    """What was looked at, and how it is."""
    there = _namespace(needs, answers)
    findings = [_version(answers), there]
    if there.problems:
        # All else would only say so again.
        return findings
    findings.append(_rights(needs, answers))
    if needs.options.mpijob:
        findings.append(_operator(answers))
    if needs.options.queue:
        findings.append(_queue(needs, answers))
    findings.append(_pods(needs, answers))
    findings += _room(needs, answers)
    findings += [_claim(needs, answers, *claim) for claim in needs.claims().items()]
    findings += _named_objects(needs, answers)
    return findings


def unknown_as_problem(findings: Sequence[Finding]) -> Iterator[Problem]:
    """One warning for all that this user may not look at."""
    unknown = [one for one in findings if one.state == UNKNOWN]
    if unknown:
        rights = dict.fromkeys(one.missing_right for one in unknown)
        yield Problem(
            hosts=(),
            found=f"you may not {', '.join(rights)}; unknown is: "
            f"{', '.join(dict.fromkeys(one.what for one in unknown))}",
            expected="to know before the first job",
            remedy="ask somebody who may, or go on: jobs don't need these rights",
            error=False,
        )


def _version(answers: NamespaceAnswers) -> Finding:
    said = answers.said.get(VERSION_PATH) or {}
    shown = str(said.get("gitVersion", "")) or UNKNOWN
    found = re.match(r"v?(\d+)\.(\d+)", shown)
    problem = Problem(
        hosts=(),
        found=f"its version is {shown}",
        expected=f"Kubernetes {'.'.join(map(str, OLDEST))} or later",
        remedy="have the cluster updated, or name another one with --context",
    )
    is_known = found is not None and (int(found[1]), int(found[2])) >= OLDEST
    return Finding(
        what="cluster",
        found=f"Kubernetes {shown.removeprefix('v')}",
        problems=() if is_known else (problem,),
    )


def _namespace(needs: Needs, answers: NamespaceAnswers) -> Finding:
    what = f"namespace {needs.namespace}"
    if needs.namespace_path not in answers.said:
        # Many may not look at it who may work in it: their rights say whether they do.
        return Finding(what=what, found="you may not look at it itself")
    if answers.said[needs.namespace_path] is not None:
        return Finding(what=what, found="there")
    problem = Problem(
        hosts=(),
        found=f"there is no namespace {needs.namespace}",
        expected="the namespace of --namespace, or else that of kubectl's context",
        remedy="kubectl get namespaces lists those that there are; kubectl create namespace "
        f"{needs.namespace} makes it",
    )
    return Finding(what=what, found="absent", problems=(problem,))


def _rights(needs: Needs, answers: NamespaceAnswers) -> Finding:
    wanted = needs.rights()
    refused = [right for right in wanted if right in answers.refused]
    found = f"{len(wanted) - len(refused)} of {len(wanted)}"
    if not refused:
        return Finding(what="rights", found=found)
    verbs: dict[str, list[str]] = {}
    for right in refused:
        verbs.setdefault(right.verb, []).append(right.what)
    told = "; ".join(f"{verb} {', '.join(whats)}" for verb, whats in verbs.items())
    remedy = (
        "ask for them, as the role admin has them: kubectl create rolebinding NAME "
        f"--clusterrole=admin --user=YOU -n {needs.namespace}"
    )
    if len(refused) == len(wanted) and needs.namespace_path not in answers.said:
        remedy += "; or does --namespace name another one than you mean?"
    elif any(right.resource in ("roles", "rolebindings") for right in refused):
        remedy += "; with --service-account NAME no roles are needed"
    problem = Problem(
        hosts=(),
        found=f"you may not {told} in namespace {needs.namespace}",
        expected="the rights to create, see and end all that a job is made of",
        remedy=remedy,
    )
    return Finding(what="rights", found=found, problems=(problem,))


def _operator(answers: NamespaceAnswers) -> Finding:
    group = answers.said.get(OPERATOR_PATH) or {}
    versions = [one["version"] for one in group.get("versions") or ()]
    has = f"kubeflow.org {', '.join(versions)}" if versions else "no kubeflow.org"
    if _MPIJOB_VERSION in versions:
        return Finding(what="MPI operator", found=has)
    problem = Problem(
        hosts=(),
        found=f"MPIJobs {_MPIJOB_VERSION} are unknown here: there is {has}",
        expected=f"kubeflow.org/{_MPIJOB_VERSION}, as the MPI operator brings it",
        remedy="have the operator installed (https://github.com/kubeflow/mpi-operator), or leave "
        "--mpijob out",
    )
    return Finding(what="MPI operator", found=has, problems=(problem,))


def _queue(needs: Needs, answers: NamespaceAnswers) -> Finding:
    name = needs.options.queue
    what = f"queue {name}"
    remedy = f"kubectl -n {needs.namespace} get localqueues lists those that there are"
    paths = needs.queue_paths()
    if not answers.said.get(KUEUE_PATH):
        told = "Kueue is not installed here, without which a job in a queue never starts"
        remedy = "have it installed (https://kueue.sigs.k8s.io), or leave --queue out"
    elif not any(path in answers.said for path in paths):
        right = Right("get", "localqueues", "kueue.x-k8s.io")
        return Finding(what=what, found=NOT_SEEN, missing_right=str(right))
    elif (queue := next(filter(None, map(answers.said.get, paths)), None)) is None:
        told = f"there is no queue {name} in namespace {needs.namespace}"
    else:
        closed = find_condition(queue.get("status"), "Active", "False")
        if closed is None:
            return Finding(what=what, found="there")
        told = f"queue {name} takes no jobs: {closed.get('message')}"
        remedy = f"kubectl -n {needs.namespace} describe localqueue {name} says more"
    problem = Problem(hosts=(), found=told, expected="a queue that takes jobs", remedy=remedy)
    return Finding(what=what, found="absent", problems=(problem,))


def _pods(needs: Needs, answers: NamespaceAnswers) -> Finding:
    """Whether pods as they would be are taken, by all that has a say in it."""
    roles = ", ".join(counted(pods.count, pods.role) for pods in needs.pod_sets())
    if CREATE_PODS in answers.refused:
        return Finding(what="pods", found=roles, missing_right=str(CREATE_PODS))
    problems = []
    for role, said in answers.pods.items():
        if isinstance(said, str) and not ("exceeded quota" in said and _quotas(needs, answers)):
            problems.append(
                Problem(
                    hosts=(),
                    found=f"{role}: {said}",
                    expected="pods that the namespace's limits and policies let in",
                    remedy="change what they complain about: --resources, or all else of a pod by "
                    "--template; if it is the image, name yours with --image",
                    # A program that has its say, and can't say it without consequences.
                    error="does not support dry run" not in said,
                )
            )
    return Finding(what="pods", found=roles, problems=tuple(problems))


def _room(needs: Needs, answers: NamespaceAnswers) -> Iterator[Finding]:
    pod_sets = _admitted(needs, answers)
    quotas = _quotas(needs, answers)
    if quotas is None:
        right = Right("list", "resourcequotas")
        yield Finding(what="quotas", found=NOT_SEEN, missing_right=str(right))
    yield from judge_quotas(needs, pod_sets, quotas or ())
    if NODES_PATH not in answers.said:
        yield Finding(what="nodes", found=NOT_SEEN, missing_right="list nodes")
    else:
        yield judge_nodes(pod_sets, (answers.said[NODES_PATH] or {}).get("items") or ())


def _quotas(needs: Needs, answers: NamespaceAnswers) -> Sequence[Object] | None:
    path = needs.path("resourcequotas")
    if path not in answers.said:
        return None
    return (answers.said[path] or {}).get("items") or ()


def _admitted(needs: Needs, answers: NamespaceAnswers) -> list[PodSet]:
    """The pods with what the namespace adds to them, where that is known."""
    admitted = []
    for pods in needs.pod_sets():
        tried = answers.pods.get(pods.role)
        admitted.append(dataclasses.replace(pods, pod=tried) if isinstance(tried, dict) else pods)
    return admitted


def _claim(needs: Needs, answers: NamespaceAnswers, name: str, is_written: bool) -> Finding:
    path = needs.path("persistentvolumeclaims", name)
    what = f"volume {name}"
    if path not in answers.said:
        right = Right("get", "persistentvolumeclaims")
        return Finding(what=what, found=NOT_SEEN, missing_right=str(right))
    claim = answers.said[path]
    if claim is None:
        problem = Problem(
            hosts=(),
            found=f"there is no claim {name} in namespace {needs.namespace}",
            expected="the persistent volume claim of --volume",
            remedy=f"kubectl -n {needs.namespace} get pvc lists those that there are",
        )
        return Finding(what=what, found="absent", problems=(problem,))
    status, spec = claim.get("status") or {}, claim.get("spec") or {}
    phase = str(status.get("phase") or "Pending")
    modes = status.get("accessModes") or spec.get("accessModes") or []
    storage = (status.get("capacity") or spec.get("resources", {}).get("requests") or {}).get(
        "storage", ""
    )
    problems = []
    is_unsure = phase == "Pending" and CLASSES_PATH not in answers.said
    if phase != "Bound" and not (is_unsure or _binds_later(spec, phase, answers)):
        problems.append(
            Problem(
                hosts=(),
                found=f"claim {name} is {phase}",
                expected="Bound, or a storage class that binds it for the first pod",
                remedy=f"kubectl -n {needs.namespace} describe pvc {name} says what it waits for",
            )
        )
    if _EVERYWHERE not in modes and (is_written or "ReadOnlyMany" not in modes):
        problems.append(
            Problem(
                hosts=(),
                found=f"claim {name} is {', '.join(modes)}: "
                + ("for one pod alone" if _ONE_POD in modes else "for pods of one node alone"),
                expected=f"{_EVERYWHERE}: launcher and workers have it at the same time",
                remedy="take a claim of a storage class for many nodes, as those of NFS, CephFS "
                "or Lustre are",
                error=_ONE_POD in modes,
            )
        )
    shown = ", ".join(filter(None, [phase, *modes, storage]))
    missing = "list storageclasses.storage.k8s.io" if is_unsure else ""
    return Finding(what=what, found=shown, problems=tuple(problems), missing_right=missing)


def _binds_later(spec: Object, phase: str, answers: NamespaceAnswers) -> bool:
    """Whether a claim that is not bound yet will be, with the first pod."""
    classes = (answers.said.get(CLASSES_PATH) or {}).get("items") or ()
    modes = {one["metadata"]["name"]: one.get("volumeBindingMode") for one in classes}
    return phase == "Pending" and modes.get(spec.get("storageClassName")) == _AT_FIRST_POD


_GONE: Mapping[str, tuple[str, str]] = {
    "secrets": ("pull secret", "the secret of --pull-secret, with which the image is pulled"),
    "serviceaccounts": ("account", "the account of --service-account, whose rights it has"),
}


def _named_objects(needs: Needs, answers: NamespaceAnswers) -> Iterator[Finding]:
    """Secrets and accounts that are to be there already."""
    names = [("secrets", name) for name in needs.pull_secrets()]
    if needs.options.service_account:
        names.append(("serviceaccounts", needs.options.service_account))
    for resource, name in names:
        called, expected = _GONE[resource]
        path = needs.path(resource, name)
        what = f"{called} {name}"
        if path not in answers.said:
            right = Right("get", resource)
            yield Finding(what=what, found=NOT_SEEN, missing_right=str(right))
        elif answers.said[path] is None:
            problem = Problem(
                hosts=(),
                found=f"there is no {called} {name} in namespace {needs.namespace}",
                expected=expected,
                remedy=f"kubectl -n {needs.namespace} get {resource} lists those that there are",
            )
            yield Finding(what=what, found="absent", problems=(problem,))
        else:
            yield Finding(what=what, found="there")
