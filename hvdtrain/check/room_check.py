"""Whether a namespace's quotas and the cluster's nodes have room for pods; pure functions.

Amounts are Kubernetes' own: ``500m``, ``16Gi``.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from hvdtrain.check.findings import Finding
from hvdtrain.check.namespace_needs import WORKER, Needs, PodSet, creates
from hvdtrain.cluster.ranges import counted, listing
from hvdtrain.jobs.kubernetes.manifests import Object
from hvdtrain.jobs.kubernetes.pod_states import find_condition
from hvdtrain.remote.problem import Problem

__all__ = ["judge_nodes", "judge_quotas"]

Amounts = Mapping[str, Decimal]
_GIB = 2**30
# Pods with such a taint wait until it is gone.
_KEEPS_AWAY = ("NoSchedule", "NoExecute")


def judge_quotas(
    needs: Needs, pod_sets: Sequence[PodSet], quotas: Sequence[Object]
) -> Iterator[Finding]:
    """Compare what is asked for with what each quota allows, and with what it has left.

    Quotas with scopes, which are for some pods alone, are not looked at.
    """
    asked = _asked(needs, pod_sets)
    for quota in quotas:
        spec, status = quota.get("spec") or {}, quota.get("status") or {}
        if spec.get("scopes") or spec.get("scopeSelector"):
            continue
        allowed = _amounts(status.get("hard") or spec.get("hard"))
        used = _amounts(status.get("used"))
        concerned = [key for key in allowed if asked.get(key)]
        left = {key: allowed[key] - used.get(key, Decimal(0)) for key in concerned}
        never = [key for key in concerned if asked[key] > allowed[key]]
        later = [key for key in concerned if left[key] < asked[key] <= allowed[key]]
        name = quota["metadata"]["name"]
        problems = []
        if never:
            problems.append(
                Problem(
                    hosts=(),
                    found=f"quota {name} allows {_compared(allowed, asked, never)}",
                    expected="room in the namespace for all pods of the job",
                    remedy="ask for less (-np, --gpus-per-rank, --resources), or have the quota "
                    f"raised: kubectl -n {needs.namespace} describe quota {name}",
                )
            )
        if later:
            problems.append(
                Problem(
                    hosts=(),
                    found=f"quota {name} has left {_compared(left, asked, later)}",
                    expected="room in the namespace for all pods of the job",
                    remedy="the job will wait for what others use now: "
                    f"kubectl -n {needs.namespace} get pods",
                    error=False,
                )
            )
        rows = [
            f"{_shown(key, left[key])} of {_shown(key, allowed[key], named=False)} left"
            for key in concerned
        ]
        found = ", ".join(rows) or "nothing of what is asked for"
        yield Finding(what=f"quota {name}", found=found, problems=tuple(problems))


def _compared(there: Amounts, asked: Amounts, keys: Sequence[str]) -> str:
    return "; ".join(
        f"{_shown(key, there[key])}, where {_shown(key, asked[key], named=False)} are asked for"
        for key in keys
    )


def judge_nodes(pod_sets: Sequence[PodSet], nodes: Sequence[Object]) -> Finding:
    """See on which nodes workers may be, and for how many of them those are large enough.

    What other pods use there does not count: it may be free when the job's turn comes.
    """
    (workers,) = [pods for pods in pod_sets if pods.role == WORKER]
    wanted = _of_pod(workers.pod, "requests")
    reasons = [_keeps_away(node, workers.pod["spec"]) for node in nodes]
    usable = [
        _amounts(node["status"].get("allocatable")) for node, why in zip(nodes, reasons) if not why
    ]
    found = f"{len(usable)} of {counted(len(nodes), 'node')} for its pods"
    room = sum(_room(node, wanted) for node in usable)
    problem = None
    if not usable:
        problem = _no_node(reasons)
    elif wanted:
        found += f", room for {counted(room, 'worker')}"
        if not room:
            problem = _too_small(wanted, usable)
        elif room < workers.count:
            problem = _too_few(room, workers.count, len(usable))
    return Finding(what="nodes", found=found, problems=(problem,) if problem else ())


def _no_node(reasons: Sequence[str]) -> Problem:
    told = [f"{number} {why}" for why, number in Counter(reasons).most_common()]
    return Problem(
        hosts=(),
        found=f"none of {counted(len(reasons), 'node')} takes its pods: {listing(told)}"
        if reasons
        else "the cluster has no node",
        expected="nodes that are ready, have the labels of --node-selector, and no taint that "
        "isn't tolerated",
        remedy="kubectl describe nodes shows conditions, labels and taints; --toleration names a "
        "taint that doesn't matter",
    )


def _too_small(wanted: Amounts, usable: Sequence[Amounts]) -> Problem:
    most = {key: max(node.get(key, Decimal(0)) for node in usable) for key in wanted}
    # Where each is on some node, all of them together are on none.
    lacking = [key for key in wanted if most[key] < wanted[key]] or list(wanted)
    told = [
        f"{_shown(key, wanted[key])}, where {_shown(key, most[key], named=False)} is the most"
        for key in lacking
    ]
    return Problem(
        hosts=(),
        found=f"no node has what one worker asks for: {'; '.join(told)}",
        expected="nodes that have it as allocatable",
        remedy="ask for less (--gpus-per-rank, --ranks-per-pod, --resources). GPUs that a node "
        "has, but not as allocatable, need NVIDIA's device plugin: kubectl describe nodes",
    )


def _too_few(room: int, workers: int, nodes: int) -> Problem:
    have = "has" if nodes == 1 else "have"
    return Problem(
        hosts=(),
        found=f"{counted(nodes, 'node')} for its pods {have} room for {room} of {workers} workers, "
        "if nothing else runs there",
        expected="room for all of them at the same time",
        remedy="ask for fewer (-np), or less for each (--gpus-per-rank, --resources)",
    )


def _keeps_away(node: Object, pod: Object) -> str:
    """Why pods can't be on a node; empty where they may be."""
    if find_condition(node["status"], "Ready", "True") is None:
        return "not ready"
    spec, labels = node.get("spec") or {}, node["metadata"].get("labels") or {}
    if spec.get("unschedulable"):
        return "closed to new pods (kubectl uncordon opens it)"
    for label, value in (pod.get("nodeSelector") or {}).items():
        if labels.get(label) != value:
            return f"without the label {label}={value}"
    for taint in spec.get("taints") or ():
        tolerations = pod.get("tolerations") or ()
        if taint["effect"] in _KEEPS_AWAY and not any(
            _tolerates(one, taint) for one in tolerations
        ):
            return f"with the taint {taint['key']}={taint.get('value', '')}:{taint['effect']}"
    return ""


def _tolerates(toleration: Object, taint: Object) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("operator") == "Exists":
        return toleration.get("key") in (None, "", taint["key"])
    wanted = (toleration.get("key"), toleration.get("value") or "")
    return wanted == (taint["key"], taint.get("value") or "")


def _room(allocatable: Amounts, wanted: Amounts) -> int:
    """How many pods that want so much a node has room for."""
    return min(
        (int(allocatable.get(key, Decimal(0)) // amount) for key, amount in wanted.items()),
        default=0,
    )


def _asked(needs: Needs, pod_sets: Sequence[PodSet]) -> Amounts:
    """All that is asked for, by the names that quotas have for it."""
    asked: Counter[str] = Counter()
    for one in needs.objects:
        right = creates(one)
        asked[f"count/{right.what}"] += 1
        if not right.group:
            asked[right.resource] += 1
    found = {key: Decimal(number) for key, number in asked.items()}
    for pods in pod_sets:
        parts = {"pods": Decimal(1), "count/pods": Decimal(1)}
        for key, amount in _of_pod(pods.pod, "requests").items():
            parts |= {key: amount, f"requests.{key}": amount}
        for key, amount in _of_pod(pods.pod, "limits").items():
            parts[f"limits.{key}"] = amount
        for key, amount in parts.items():
            found[key] = found.get(key, Decimal(0)) + pods.count * amount
    return found


def _of_pod(pod: Object, kind: str) -> Amounts:
    """What a pod's containers request together, or what they are limited to."""
    found: dict[str, Decimal] = {}
    for container in pod["spec"].get("containers") or ():
        resources = container.get("resources") or {}
        named = resources.get(kind) or {}
        if kind == "requests":
            # What is limited and not requested is requested as far as it is limited.
            named = {**(resources.get("limits") or {}), **named}
        for key, amount in _amounts(named).items():
            found[key] = found.get(key, Decimal(0)) + amount
    return {key: amount for key, amount in found.items() if amount}


def _amounts(texts: Mapping[str, Any] | None) -> Amounts:
    from kubernetes.utils.quantity import parse_quantity

    amounts = {}
    for key, text in (texts or {}).items():
        # The cluster itself complains about those that it can't read.
        with contextlib.suppress(ValueError):
            amounts[key] = parse_quantity(text)
    return amounts


def _shown(key: str, amount: Decimal, *, named: bool = True) -> str:
    """An amount for people, with the name of what it is of."""
    is_bytes = key.endswith(("memory", "storage"))
    text = f"{float(amount / _GIB):.4g}Gi" if is_bytes else f"{float(amount):.6g}"
    return f"{key} {text}" if named else text
