"""Jobs in real pods, of a real Kubernetes."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.harness.jobs import REPOSITORY, Completed
from tests.kubernetes.cluster import KubernetesCluster
from tests.kubernetes.image import IMAGE

CRD = "HVDTRAIN_TEST_MPIJOB_CRD"
PODS = "/api/v1/namespaces/default/pods"

pytestmark = [pytest.mark.timeout(300), pytest.mark.more]


class Commands:
    """hvdtrain's commands as a user of the cluster has them."""

    def __init__(self, cluster: KubernetesCluster) -> None:
        self.cluster = cluster
        self.jobs = cluster.folder / "jobs"
        self._template = cluster.folder / "pod.json"
        self._template.write_text(json.dumps(cluster.pod_template()))

    def run(self, *words: str, code: int = 0, timeout_s: float = 120) -> Completed:
        """Run a command to its end."""
        argv = [sys.executable, "-m", "hvdtrain", *words]
        done = self.cluster.run(
            argv, timeout_s=timeout_s, env={"HVDTRAIN_JOBS_DIR": str(self.jobs)}
        )
        assert done.returncode == code, done
        return done

    def submit(self, *words: str, ranks: int, pods: tuple[str, ...] = (), code: int = 0) -> str:
        """Submit a job; returns its name, or what was said."""
        where = [
            "--image",
            IMAGE,
            "--template",
            str(self._template),
            "--pod-python",
            sys.executable,
        ]
        where += ["--pod-folder", str(self.cluster.folder)]
        argv = ["submit", "--on", "kubernetes", "-np", str(ranks), *where, *pods, "--", *words]
        done = self.run(*argv, code=code)
        return done.stdout.strip() if code == 0 else done.stderr

    def view(self, name: str) -> dict[str, Any]:
        """A job as programs see it."""
        jobs = map(json.loads, self.run("jobs", "--json").stdout.splitlines())
        (found,) = [job for job in jobs if job["name"] == name]
        return dict(found)

    def wait_for(self, name: str, status: str, timeout_s: float = 120) -> dict[str, Any]:
        """Wait until a job is so."""
        deadline = time.monotonic() + timeout_s
        while (view := self.view(name))["status"] != status:
            assert time.monotonic() < deadline, (view, self.cluster.ask(PODS))
            time.sleep(0.5)
        return view


@pytest.fixture
def commands(kubernetes: KubernetesCluster) -> Commands:
    return Commands(kubernetes)


def test_digits_are_learnt_in_three_pods(commands: Commands) -> None:
    program = (sys.executable, str(REPOSITORY / "examples" / "mnist.py"), "--epochs", "2")
    name = commands.submit(*program, ranks=3)
    done = commands.run("logs", "-f", name, timeout_s=240)
    view = commands.view(name)
    assert view["status"] == "done", (view, done.stdout[-3000:])
    print(done.stdout[-1500:])
    assert sorted(view["hosts"].values()) == [1, 1, 1]
    assert Path(commands.jobs, name, "state.json").exists()


def test_the_operators_own_definition_takes_an_mpijob(commands: Commands) -> None:
    """The operator itself is not there: that its definition takes the object is what is tested."""
    path = os.environ.get(CRD)
    if path is None:
        pytest.skip(f"{CRD} names no definition of MPIJobs, kubeflow.org_mpijobs.yaml")
    cluster = commands.cluster
    (definition,) = yaml.safe_load_all(Path(path).read_text())
    definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    cluster.ask(definitions, definition)
    mpijobs = "/apis/kubeflow.org/v2beta1/namespaces/default/mpijobs"
    cluster.wait_for("MPIJobs", mpijobs, lambda found: "items" in found)
    name = commands.submit(sys.executable, "-c", "pass", ranks=4, pods=("--mpijob=intel",))
    found = cluster.ask(f"{mpijobs}/{name}")
    assert found["spec"]["mpiImplementation"] == "Intel"
    assert found["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"] == 4
    commands.run("stop", name)
    cluster.wait_for("end of it", mpijobs, lambda found: not found["items"])


def test_a_job_that_fails_stays_so_and_frees_its_workers(commands: Commands) -> None:
    program = "import hvdtrain; hvdtrain.init(); 1 / (hvdtrain.rank() - 1)"
    name = commands.submit(sys.executable, "-c", program, ranks=2)
    view = commands.wait_for(name, "failed")
    assert "ZeroDivisionError" in view["verdict"], view
    cluster = commands.cluster
    job = cluster.wait_for(
        "failed Job",
        f"/apis/batch/v1/namespaces/default/jobs/{name}",
        lambda one: any(c["type"] == "Failed" for c in one["status"].get("conditions", ())),
    )
    assert job["status"].get("failed") == 1
    cluster.wait_for(
        "freed workers",
        f"{PODS}?labelSelector=hvdtrain/job={name},hvdtrain/role=worker",
        lambda found: not found["items"],
    )


def test_what_has_no_room_says_so_and_can_be_stopped(commands: Commands) -> None:
    name = commands.submit(sys.executable, "-c", "pass", ranks=1, pods=("--gpus-per-rank", "8"))
    log = f"{PODS}?labelSelector=hvdtrain/job={name}"
    commands.cluster.wait_for("pods", log, lambda found: len(found["items"]) == 2)
    view = commands.wait_for(name, "queued")
    assert "worker-0: it has no node" in view["verdict"], view
    assert "Insufficient nvidia.com/gpu" in view["verdict"], view
    commands.run("stop", name)
    assert commands.view(name)["status"] == "stopped"
    commands.run("restart", name)
    commands.cluster.wait_for("pods", log, lambda found: len(found["items"]) == 2)
    commands.run("stop", name)
    assert commands.view(name)["status"] == "stopped"
    commands.cluster.wait_for("end of its pods", log, lambda found: not found["items"])
