"""What hvdtrain check makes of a cluster's answers; nothing is asked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.check.findings import Finding, format_findings
from hvdtrain.check.namespace_check import judge_namespace, unknown_as_problem
from hvdtrain.check.namespace_needs import (
    CLASSES_PATH,
    CREATE_PODS,
    KUEUE_PATH,
    NODES_PATH,
    OPERATOR_PATH,
    VERSION_PATH,
    NamespaceAnswers,
    Needs,
    Right,
    needs_of,
    planned_job,
)
from hvdtrain.remote.problem import Problem, show_problem

pytest.importorskip("kubernetes")  # reads amounts

CORE = "/api/v1/namespaces/lab"
DATA = f"{CORE}/persistentvolumeclaims/data"
EIGHT_GPUS = ("--gpus-per-rank", "1", "--ranks-per-pod", "4", "--resources", "cpu=8,memory=64Gi")


def needs(*words: str, ranks: int = 8) -> Needs:
    flags = (word for word in words if word.startswith("--"))
    values = (word for word in words if not word.startswith("--"))
    options = [f"{flag}={value}" for flag, value in zip(flags, values)]
    return needs_of(planned_job(options, ranks), "lab")


def node(name: str, **changes: Any) -> dict[str, Any]:
    well = {
        "labels": {},
        "taints": [],
        "ready": "True",
        "has": {"cpu": "32", "memory": "256Gi", "nvidia.com/gpu": "8", "pods": "110"},
        "unschedulable": False,
    }
    is_so = well | changes
    return {
        "metadata": {"name": name, "labels": is_so["labels"]},
        "spec": {"taints": is_so["taints"], "unschedulable": is_so["unschedulable"]},
        "status": {
            "allocatable": is_so["has"],
            "conditions": [{"type": "Ready", "status": is_so["ready"]}],
        },
    }


def quota(hard: dict[str, str], used: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "share"},
        "spec": {"hard": hard, **spec},
        "status": {"hard": hard, "used": used or {}},
    }


def claim(*modes: str, phase: str = "Bound") -> dict[str, Any]:
    spec = {"accessModes": list(modes), "storageClassName": "nfs"}
    size = {"storage": "1Ti"}
    return {"spec": spec, "status": {"phase": phase, "accessModes": list(modes), "capacity": size}}


WELL: dict[str, Any] = {
    CORE: {"kind": "Namespace"},
    VERSION_PATH: {"gitVersion": "v1.29.4-gke.1"},
    f"{CORE}/resourcequotas": {"items": []},
    NODES_PATH: {"items": [node("a"), node("b")]},
    DATA: claim("ReadWriteMany"),
    CLASSES_PATH: {"items": []},
}


def judge(
    wanted: Needs,
    said: dict[str, Any] | None = None,
    *,
    unread: Sequence[str] = (),
    refused: Sequence[Right] = (),
    pods: dict[str, Any] | None = None,
) -> list[Finding]:
    told = {path: found for path, found in {**WELL, **(said or {})}.items() if path not in unread}
    answers = NamespaceAnswers(said=told, refused=frozenset(refused), pods=pods or {})
    return judge_namespace(wanted, answers)


def problems(*arguments: Any, **more: Any) -> list[Problem]:
    return [problem for one in judge(*arguments, **more) for problem in one.problems]


def the_problem(*arguments: Any, **more: Any) -> Problem:
    (found,) = problems(*arguments, **more)
    return found


def test_all_well() -> None:
    findings = judge(needs(*EIGHT_GPUS, "--volume", "data:/data"))
    assert not [problem for one in findings for problem in one.problems]
    assert not list(unknown_as_problem(findings))
    assert (
        format_findings(findings)
        == """\
what           state  found
cluster        ok     Kubernetes 1.29.4-gke.1
namespace lab  ok     there
rights         ok     18 of 18
pods           ok     1 launcher, 2 workers
nodes          ok     2 of 2 nodes for its pods, room for 4 workers
volume data    ok     Bound, ReadWriteMany, 1Ti"""
    )


def test_an_old_cluster() -> None:
    found = the_problem(needs(), {VERSION_PATH: {"gitVersion": "v1.19.16"}})
    assert (found.found, found.error) == ("its version is v1.19.16", True)


def test_of_a_namespace_that_is_not_there_nothing_else_is_told() -> None:
    found = the_problem(needs("--queue", "no"), {CORE: None}, unread=[NODES_PATH])
    assert found.found == "there is no namespace lab"


def test_rights_that_miss_are_one_problem() -> None:
    of_jobs = [Right(verb, "jobs", "batch") for verb in ("create", "delete")]
    scale = Right("patch", "statefulsets/scale", "apps")
    found = the_problem(needs(), refused=[*of_jobs, scale])
    told = "you may not create jobs.batch; patch statefulsets.apps/scale; delete jobs.batch"
    assert found.found == f"{told} in namespace lab"
    assert "--clusterrole=admin" in found.remedy
    assert "--service-account" not in found.remedy


def test_rights_that_the_launcher_is_to_be_given() -> None:
    roles = Right("create", "roles", "rbac.authorization.k8s.io")
    assert "--service-account NAME" in the_problem(needs(), refused=[roles]).remedy
    with_account = needs("--service-account", "me")
    assert roles not in with_account.rights()
    assert Right("patch", "statefulsets/scale", "apps") in needs().rights()
    assert Right("patch", "statefulsets/scale", "apps") not in with_account.rights()


def test_rights_to_mpijobs() -> None:
    rights = needs("--mpijob", "openmpi").rights()
    assert Right("create", "mpijobs", "kubeflow.org") in rights
    assert not [right for right in rights if right.resource in ("jobs", "statefulsets", "roles")]


def test_no_rights_at_all_may_be_those_of_another_namespace() -> None:
    wanted = needs()
    found = the_problem(wanted, refused=wanted.rights(), unread=[CORE])
    assert found.remedy.endswith("or does --namespace name another one than you mean?")


def test_what_may_not_be_looked_at_is_one_warning() -> None:
    wanted = needs("--volume", "data:/data", "--pull-secret", "registry")
    unread = [NODES_PATH, CLASSES_PATH, f"{CORE}/secrets/registry"]
    pending = {DATA: claim("ReadWriteMany", phase="Pending")}
    findings = judge(wanted, pending, unread=unread, refused=[CREATE_PODS])
    states = {one.what: one.state for one in findings}
    assert [what for what, state in states.items() if state == "unknown"] == [
        *("pods", "nodes", "volume data", "pull secret registry")
    ]
    (warning,) = unknown_as_problem(findings)
    assert not warning.error
    assert warning.found == (
        "you may not create pods, list nodes, list storageclasses.storage.k8s.io, get secrets; "
        "unknown is: pods, nodes, volume data, pull secret registry"
    )


OPERATOR = {
    "absent": (None, "there is no kubeflow.org"),
    "old": ({"versions": [{"version": "v1"}]}, "there is kubeflow.org v1"),
}


@pytest.mark.parametrize(("group", "told"), OPERATOR.values(), ids=OPERATOR)
def test_without_the_mpi_operator(group: Any, told: str) -> None:
    found = the_problem(needs("--mpijob", "intel"), {OPERATOR_PATH: group})
    assert found.found == f"MPIJobs v2beta1 are unknown here: {told}"


def test_with_the_mpi_operator() -> None:
    served = {OPERATOR_PATH: {"versions": [{"version": "v1"}, {"version": "v2beta1"}]}}
    assert not problems(needs("--mpijob", "intel"), served)


def active(is_so: str) -> dict[str, Any]:
    condition = {"type": "Active", "status": is_so, "message": "its ClusterQueue is missing"}
    return {"status": {"conditions": [condition]}}


QUEUES = {
    "no Kueue": (None, None, "Kueue is not installed here"),
    "no queue": ({"versions": []}, None, "there is no queue gpus in namespace lab"),
    "closed": ({"versions": []}, active("False"), "takes no jobs: its ClusterQueue is missing"),
}


@pytest.mark.parametrize(("group", "queue", "told"), QUEUES.values(), ids=QUEUES)
def test_queues_that_take_no_jobs(group: Any, queue: Any, told: str) -> None:
    wanted = needs("--queue", "gpus")
    said = dict.fromkeys(wanted.queue_paths(), queue)
    assert told in the_problem(wanted, {KUEUE_PATH: group, **said}).found


def test_a_queue_of_a_later_version_of_kueue() -> None:
    wanted = needs("--queue", "gpus")
    old, new = wanted.queue_paths()
    assert not problems(wanted, {KUEUE_PATH: {"versions": []}, old: None, new: active("True")})


def test_what_admission_says_of_pods() -> None:
    said = "Pod can't be created in namespace lab: pods is forbidden: violates PodSecurity"
    found = the_problem(needs(), pods={"launcher": {"spec": {}}, "worker": said})
    assert found.found == f"worker: {said}"
    hook = "admission webhook x.test does not support dry run"
    assert not the_problem(needs(), pods={"worker": hook}).error


def test_a_quota_is_told_once() -> None:
    said = 'pods "x" is forbidden: exceeded quota: share, requested: pods=1'
    items = {f"{CORE}/resourcequotas": {"items": [quota({"pods": "0"})]}}
    found = the_problem(needs(ranks=2), items, pods={"worker": said})
    assert found.found == "quota share allows pods 0, where 3 are asked for"
    unread = problems(needs(), pods={"worker": said}, unread=[*items])
    assert [problem.found for problem in unread] == [f"worker: {said}"]


def quotas_of(*items: dict[str, Any]) -> dict[str, Any]:
    return {f"{CORE}/resourcequotas": {"items": list(items)}}


def test_quotas_that_have_room() -> None:
    hard = {"requests.nvidia.com/gpu": "8", "limits.cpu": "16", "memory": "128Gi", "services": "2"}
    (found,) = [
        one
        for one in judge(needs(*EIGHT_GPUS), quotas_of(quota({**hard, "count/x.test": "0"})))
        if one.what == "quota share"
    ]
    assert not found.problems
    assert found.found == (
        "requests.nvidia.com/gpu 8 of 8 left, limits.cpu 16 of 16 left, "
        "memory 128Gi of 128Gi left, services 2 of 2 left"
    )


def test_quotas_without_room() -> None:
    hard = {"requests.nvidia.com/gpu": "10", "limits.cpu": "15500m", "count/jobs.batch": "0"}
    used = {"requests.nvidia.com/gpu": "4", "limits.cpu": "0"}
    never, later = problems(needs(*EIGHT_GPUS), quotas_of(quota(hard, used)))
    assert never.found == (
        "quota share allows limits.cpu 15.5, where 16 are asked for; "
        "count/jobs.batch 0, where 1 are asked for"
    )
    assert never.error
    assert later.found == ("quota share has left requests.nvidia.com/gpu 6, where 8 are asked for")
    assert not later.error, "it waits for what others use"


def test_quotas_for_some_pods_alone_are_left_out() -> None:
    assert not problems(needs(), quotas_of(quota({"pods": "0"}, scopes=["BestEffort"])))


def test_what_the_namespace_adds_to_pods_counts() -> None:
    container = {"resources": {"requests": {"cpu": "2"}, "limits": {"cpu": "3", "memory": "1Gi"}}}
    admitted = {"spec": {"containers": [container, container]}}
    said = quotas_of(quota({"requests.cpu": "1", "requests.memory": "1Gi", "limits.cpu": "1"}))
    found = the_problem(needs(ranks=2), said, pods={"worker": admitted})
    assert found.found == (
        "quota share allows requests.cpu 1, where 8 are asked for; requests.memory 1Gi, where 4Gi "
        "are asked for; limits.cpu 1, where 12 are asked for"
    )


def nodes(*items: dict[str, Any]) -> dict[str, Any]:
    return {NODES_PATH: {"items": list(items)}}


TAINT = {"key": "gpu", "value": "yes", "effect": "NoSchedule"}
NONE = {
    "there": ((), "the cluster has no node"),
    "ready": ((node("a", ready="False"),), "none of 1 node takes its pods: 1 not ready"),
    "open": ((node("a", unschedulable=True),), "1 closed to new pods"),
    "labelled": ((node("a", labels={"zone": "b"}, taints=[TAINT]),), "1 without the label zone=a"),
    "tolerated": (
        (*[node("a", labels={"zone": "a"}, taints=[TAINT])] * 2, node("c", ready="Unknown")),
        "none of 3 nodes takes its pods: 2 with the taint gpu=yes:NoSchedule, 1 not ready",
    ),
}


@pytest.mark.parametrize(("items", "told"), NONE.values(), ids=NONE)
def test_no_node_takes_its_pods(items: Any, told: str) -> None:
    assert told in the_problem(needs("--node-selector", "zone=a"), nodes(*items)).found


@pytest.mark.parametrize("toleration", ["gpu", "gpu=yes", "gpu:NoSchedule", ":NoSchedule"])
def test_taints_that_are_tolerated(toleration: str) -> None:
    tainted = nodes(node("a", taints=[TAINT]))
    assert not problems(needs("--toleration", toleration), tainted)


@pytest.mark.parametrize("toleration", ["cpu", "gpu=no", "gpu:NoExecute"])
def test_taints_that_are_not(toleration: str) -> None:
    tainted = nodes(node("a", taints=[TAINT]))
    assert "with the taint" in the_problem(needs("--toleration", toleration), tainted).found


def test_taints_that_only_prefer() -> None:
    assert not problems(needs(), nodes(node("a", taints=[{**TAINT, "effect": "PreferNoSchedule"}])))


def test_gpus_that_no_node_has() -> None:
    found = the_problem(needs(*EIGHT_GPUS), nodes(node("a", has={"cpu": "64", "memory": "1Ti"})))
    assert found.found == (
        "no node has what one worker asks for: nvidia.com/gpu 4, where 0 is the most"
    )
    assert "device plugin" in found.remedy


def test_each_on_some_node_and_all_on_none() -> None:
    gpus, memory = {"cpu": "8", "nvidia.com/gpu": "4"}, {"cpu": "8", "memory": "64Gi"}
    found = the_problem(needs(*EIGHT_GPUS), nodes(node("a", has=gpus), node("b", has=memory)))
    assert "memory 64Gi, where 64Gi is the most; nvidia.com/gpu 4" in found.found


def test_nodes_for_some_of_the_workers() -> None:
    found = the_problem(needs(*EIGHT_GPUS, ranks=20), nodes(node("a"), node("b")))
    assert found.found == (
        "2 nodes for its pods have room for 4 of 5 workers, if nothing else runs there"
    )


CLAIMS = {
    "absent": (None, "data:/data", "there is no claim data in namespace lab", True),
    "lost": (claim("ReadWriteMany", phase="Lost"), "data:/data", "claim data is Lost", True),
    "pending": (claim("ReadWriteMany", phase="Pending"), "data:/data", "is Pending", True),
    "one node": (claim("ReadWriteOnce"), "data:/data", "for pods of one node alone", False),
    "one pod": (claim("ReadWriteOncePod"), "data:/data", "for one pod alone", True),
    "read": (claim("ReadOnlyMany"), "data:/data", "is ReadOnlyMany", False),
}


@pytest.mark.parametrize(("found", "volume", "told", "error"), CLAIMS.values(), ids=CLAIMS)
def test_claims_that_are_not_as_they_should_be(
    found: Any, volume: str, told: str, error: bool
) -> None:
    problem = the_problem(needs("--volume", volume), {DATA: found})
    assert told in problem.found
    assert problem.error is error


def test_claims_that_do() -> None:
    assert not problems(needs("--volume", "data:/data:ro"), {DATA: claim("ReadOnlyMany")})
    later = {"metadata": {"name": "nfs"}, "volumeBindingMode": "WaitForFirstConsumer"}
    pending = {DATA: claim("ReadWriteMany", phase="Pending"), CLASSES_PATH: {"items": [later]}}
    assert not problems(needs("--volume", "data:/data"), pending)


def test_secrets_and_accounts_that_are_not_there() -> None:
    wanted = needs("--pull-secret", "registry", "--service-account", "me")
    said = {f"{CORE}/secrets/registry": None, f"{CORE}/serviceaccounts/me": None}
    found = [problem.found for problem in problems(wanted, said)]
    assert found == [
        "there is no pull secret registry in namespace lab",
        "there is no account me in namespace lab",
    ]


def test_what_a_template_has_counts(tmp_path: Path) -> None:
    (pod := tmp_path / "pod.yaml").write_text(
        """\
spec:
  imagePullSecrets: [{name: registry}]
  serviceAccountName: of-pods
  containers: [{name: hvdtrain, resources: {limits: {cpu: lots, memory: 512Gi}}}]
  volumes: [{name: x, persistentVolumeClaim: {claimName: data}}]
"""
    )
    wanted = needs("--template", str(pod))
    assert wanted.pull_secrets() == ["registry"]
    assert wanted.claims() == {"data": True}
    assert CORE + "/secrets/registry" in [question.path for question in wanted.questions()]
    secret: dict[str, Any] = {f"{CORE}/secrets/registry": {}}
    assert "memory 512Gi, where 256Gi is the most" in the_problem(wanted, secret).found


def test_pods_that_are_tried_need_nothing_that_is_not_there_yet() -> None:
    launcher, worker = needs().trial_pods().values()
    assert launcher["kind"] == worker["kind"] == "Pod"
    assert "serviceAccountName" not in launcher["spec"]
    assert launcher["spec"]["containers"][0]["image"] == "hvdtrain-check"
    (named, _) = needs("--service-account", "me", "--image", "train:1").trial_pods().values()
    assert named["spec"]["serviceAccountName"] == "me"
    assert named["spec"]["containers"][0]["image"] == "train:1"


def test_a_problem_says_what_to_do() -> None:
    assert (
        show_problem(the_problem(needs("--volume", "data:/data"), {DATA: None}))
        == """\
problem: there is no claim data in namespace lab
  expected: the persistent volume claim of --volume
  do: kubectl -n lab get pvc lists those that there are"""
    )
