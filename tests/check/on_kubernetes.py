"""``hvdtrain check`` for namespaces of a real Kubernetes cluster.

The tests in ``tests/jobs/kubernetes/test_on_a_cluster.py`` run these scenarios.
"""

from __future__ import annotations

import json
import sys

from tests.harness.jobs import Completed
from tests.kubernetes.cluster import KubernetesCluster
from tests.kubernetes.node import GUEST

__all__ = ["CHECKS"]

NAMESPACES = "/api/v1/namespaces"
RBAC = "/apis/rbac.authorization.k8s.io/v1"


def check(cluster: KubernetesCluster, *options: str) -> Completed:
    argv = [sys.executable, "-m", "hvdtrain", "check", "--on", "kubernetes", *options]
    return cluster.run(argv, timeout_s=200)


def states(done: Completed) -> dict[str, str]:
    """Return the state column of the table by the first column."""
    lines = done.stdout.partition("\n\n")[0].splitlines()
    start, end = lines[0].index("state"), lines[0].index("result")
    return {line[:start].strip(): line[start:end].strip() for line in lines[1:]}


def make_namespace(cluster: KubernetesCluster, name: str) -> str:
    """Create a namespace and wait until it accepts pods."""
    cluster.ask(NAMESPACES, {"metadata": {"name": name}})
    account = f"{NAMESPACES}/{name}/serviceaccounts/default"
    cluster.wait_for("default account", account, lambda account: account.get("secrets"))
    return name


def a_namespace_that_is_ready(kubernetes: KubernetesCluster) -> None:
    make_namespace(kubernetes, "fit")
    done = check(kubernetes, "--namespace", "fit", "-np", "3", "--volume", "data:/data")
    assert done.returncode == 0, done
    assert states(done) == {
        "cluster": "ok",
        "namespace fit": "ok",
        "permissions": "ok",
        "objects": "ok",
    }
    assert done.stdout.endswith("\n\nready to train\n")
    for collection in ("/api/v1/{}/pods", "/api/v1/{}/configmaps", "/apis/batch/v1/{}/jobs"):
        objects = kubernetes.ask(collection.format("namespaces/fit"))["items"]
        assert "hvdtrain" not in json.dumps(objects), "a dry run creates nothing"
    done = check(kubernetes, "--namespace", "fit", "--service-account", "me")
    assert done.returncode == 1, done
    assert 'serviceaccount "me" not found' in done.stdout


def a_missing_namespace(kubernetes: KubernetesCluster) -> None:
    done = check(kubernetes, "--namespace", "elsewhere")
    assert done.returncode == 1, done
    assert "problem: namespace elsewhere does not exist" in done.stdout
    assert "not ready to train: 1 problem" in done.stdout


def users_with_few_rights(kubernetes: KubernetesCluster) -> None:
    guest = ("--context", GUEST, "--namespace", make_namespace(kubernetes, "of-others"))
    done = check(kubernetes, *guest)
    assert done.returncode == 1, done
    assert "problem: you may not create jobs.batch, " in done.stdout
    assert "not ready to train: 1 problem" in done.stdout
    # The role edit has all rights but to grant the launcher's account its rights.
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "edit"}
    binding = {
        "metadata": {"name": GUEST},
        "roleRef": role,
        "subjects": [{**role, "kind": "User", "name": GUEST}],
    }
    kubernetes.ask(f"{RBAC}/namespaces/of-others/rolebindings", binding)
    done = check(kubernetes, *guest)
    assert done.returncode == 1, done
    group = "rbac.authorization.k8s.io"
    refused = f"you may not create roles.{group}, rolebindings.{group} in namespace of-others"
    assert refused in done.stdout
    done = check(kubernetes, *guest, "--service-account", "default")
    assert done.returncode == 0, done


def limits_and_quotas_of_a_namespace(kubernetes: KubernetesCluster) -> None:
    namespace = make_namespace(kubernetes, "small")
    hard = {"requests.cpu": "1500m", "requests.memory": "1Gi"}
    quota = {"metadata": {"name": "few"}, "spec": {"hard": hard}}
    kubernetes.ask(f"{NAMESPACES}/small/resourcequotas", quota)
    most = {"type": "Container", "max": {"cpu": "1"}, "default": {"cpu": "1", "memory": "1Mi"}}
    limits = {"metadata": {"name": "most"}, "spec": {"limits": [most]}}
    kubernetes.ask(f"{NAMESPACES}/small/limitranges", limits)
    kubernetes.wait_for(
        "quota",
        f"{NAMESPACES}/small/resourcequotas/few",
        lambda quota: "used" in quota.get("status", {}),
    )
    done = check(
        kubernetes, "--namespace", namespace, "-np", "3", "--resources", "cpu=2,memory=1Mi"
    )
    assert done.returncode == 1, done
    assert states(done)["objects"] == "problem"
    assert "maximum cpu usage per Container is 1" in done.stdout
    kubernetes.ask(f"{NAMESPACES}/small/limitranges/most", method="DELETE")
    done = check(
        kubernetes, "--namespace", namespace, "-np", "3", "--resources", "cpu=2,memory=1Mi"
    )
    assert done.returncode == 1, done
    assert "exceeded quota: few, requested: requests.cpu=2" in done.stdout


def a_missing_context(kubernetes: KubernetesCluster) -> None:
    done = check(kubernetes, "--context", "elsewhere")
    assert done.returncode == 1, done
    assert "problem: no cluster is configured" in done.stdout


CHECKS = (
    a_namespace_that_is_ready,
    a_missing_namespace,
    users_with_few_rights,
    limits_and_quotas_of_a_namespace,
    a_missing_context,
)
