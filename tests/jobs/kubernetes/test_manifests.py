from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from hvdtrain.errors import ConfigurationError
from hvdtrain.jobs.kubernetes.manifests import PodJob, job_objects, make_keys
from hvdtrain.jobs.kubernetes.pod_backend import PodPlan, object_name, pod_job
from hvdtrain.jobs.kubernetes.pod_options import PodOptions, Toleration, Volume
from hvdtrain.jobs.spec import Backend, JobSpec
from tests.harness.required import do_without

NASTY = ("python", "a b.py", "$(touch x)", "'\"", "line\nline", "{{ x }}", "- a: b", "é")


def _job(**changes: Any) -> PodJob:
    pods = PodOptions(image="i", **changes.pop("pods", {}))
    known: dict[str, Any] = {
        "name": "train-1",
        "ranks": 5,
        "options": ("--max-restarts", "2"),
        "program": NASTY,
        "folder": "/jobs/train-1",
        "variables": {"HVDTRAIN_MODE": "async-ps"},
        "secrets": {"HF_TOKEN": "secret"},
    }
    return PodJob(**{**known, **changes}, pods=pods)


def _by_kind(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The objects; of several of a kind the first."""
    found: dict[str, dict[str, Any]] = {}
    for one in objects:
        found.setdefault(one["kind"], one)
    return found


def _container(pod: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod["spec"]["containers"]
    return container


def test_a_job_is_objects_of_any_cluster() -> None:
    found = _by_kind(job_objects(_job(pods={"ranks_per_pod": 2}), make_keys()))
    assert list(found) == [
        *("Job", "ServiceAccount", "Role", "RoleBinding"),
        *("Secret", "ConfigMap", "Service", "StatefulSet"),
    ]
    launcher = _container(found["Job"]["spec"]["template"])
    assert launcher["command"][-len(NASTY) :] == list(NASTY)
    assert found["StatefulSet"]["spec"]["replicas"] == 3
    hostfile = found["ConfigMap"]["data"]["hostfile"]
    assert hostfile.splitlines()[-1] == "train-1-worker-2.train-1 slots=2"
    assert launcher["env"] == [
        {"name": "HVDTRAIN_MODE", "value": "async-ps"},
        {"name": "HVDTRAIN_JOB_FOLDER", "value": "/jobs/train-1"},
        {
            "name": "HF_TOKEN",
            "valueFrom": {"secretKeyRef": {"name": "train-1", "key": "HF_TOKEN"}},
        },
    ]
    worker = found["StatefulSet"]["spec"]["template"]
    assert worker["metadata"]["labels"].items() >= found["Service"]["spec"]["selector"].items()
    keys = [volume for volume in worker["spec"]["volumes"] if "secret" in volume]
    assert "HF_TOKEN" not in str(keys), "workers get keys alone"
    assert worker["spec"]["automountServiceAccountToken"] is False
    rights = [rule for rule in found["Role"]["rules"] if rule["resources"] != ["pods"]]
    assert all(rule["resourceNames"] for rule in rights), "its own objects alone"


def test_pods_have_names_and_the_launcher_one_while_it_is_the_only_one() -> None:
    """Of a launcher that is to end the name is no more; a worker that comes has it at once."""
    objects = job_objects(_job(), make_keys())
    services = {one["metadata"]["name"]: one["spec"] for one in objects if one["kind"] == "Service"}
    early = {name: spec["publishNotReadyAddresses"] for name, spec in services.items()}
    assert early == {"train-1": True, "train-1-launcher": False}
    launcher = _by_kind(objects)["Job"]["spec"]["template"]
    selected = services["train-1-launcher"]["selector"]
    assert launcher["metadata"]["labels"].items() >= selected.items()
    named = launcher["spec"]["hostname"], launcher["spec"]["subdomain"]
    assert named == ("train-1-launcher", "train-1-launcher")


def test_words_survive_yaml() -> None:
    objects = job_objects(_job(), make_keys())
    shown = PodPlan(_job(), objects).preview()
    assert list(yaml.safe_load_all(shown)) == objects
    assert shown.startswith("# The Secret holds private keys")


def test_flags_win_over_the_template() -> None:
    template = {
        "metadata": {"labels": {"team": "a", "hvdtrain/job": "other"}, "annotations": {"x": "y"}},
        "spec": {
            "priorityClassName": "low",
            "nodeSelector": {"zone": "a", "kind": "cpu"},
            "tolerations": [{"operator": "Exists", "key": "old"}],
            "containers": [
                {"name": "proxy", "image": "p"},
                {"name": "hvdtrain", "image": "old", "env": [{"name": "A", "value": "1"}]},
            ],
        },
    }
    pods = {
        "template": template,
        "node_selector": {"kind": "gpu"},
        "tolerations": (Toleration("gpu", "yes", "NoSchedule"),),
        "volumes": (Volume("data", "/data", True),),
        "gpus_per_rank": 2,
        "ranks_per_pod": 4,
        "resources": {"cpu": "8"},
        "namespace": "n",
        "queue": "q",
        "pull_secrets": ("s",),
        "folder": "/w",
    }
    found = _by_kind(job_objects(_job(pods=pods), make_keys()))
    assert {one["metadata"]["namespace"] for one in found.values()} == {"n"}
    assert found["Job"]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q"
    assert found["Job"]["spec"]["suspend"] is True
    pod = found["StatefulSet"]["spec"]["template"]
    assert pod["metadata"]["labels"]["team"] == "a"
    assert pod["metadata"]["labels"]["hvdtrain/job"] == "train-1"
    assert pod["metadata"]["annotations"] == {"x": "y"}
    spec = pod["spec"]
    assert spec["priorityClassName"] == "low"
    assert spec["nodeSelector"] == {"zone": "a", "kind": "gpu"}
    assert [taint["key"] for taint in spec["tolerations"]] == ["old", "gpu"]
    proxy, container = spec["containers"]
    assert (proxy["image"], container["image"], container["workingDir"]) == ("p", "i", "/w")
    limits = {"cpu": "8", "nvidia.com/gpu": "8"}
    assert container["resources"] == {"requests": limits, "limits": limits}
    assert template["spec"]["containers"][1]["image"] == "old", "it is left as it was"


def _spec(*options: str, pods: tuple[str, ...] = ("--image=i",)) -> JobSpec:
    backend = Backend("kubernetes", pods)
    return JobSpec(options=options, program=("a",), folder="/", backend=backend)


def test_secrets_come_from_who_submits() -> None:
    environ = {"HF_TOKEN": "t", "MY_KEY": "k", "OTHER_KEY": "o"}
    spec = _spec("-x", "HF_TOKEN", "-xMY_KEY", "--env=PLAIN=1", "-np", "2")
    job = pod_job(Path("/jobs/a"), spec, environ, ranks=2)
    assert job.secrets == {"HF_TOKEN": "t", "MY_KEY": "k"}
    with pytest.raises(ConfigurationError, match="-x HF_TOKEN asks for a variable that is not"):
        pod_job(Path("/jobs/a"), spec, {}, ranks=2)


def test_a_folder_that_pods_see_is_theirs() -> None:
    spec = _spec(pods=("--image=i", "--volume=data:/jobs"))
    assert pod_job(Path("/jobs/a"), spec, {}, ranks=2).folder == "/jobs/a"
    assert pod_job(Path("/other/a"), spec, {}, ranks=2).folder == ""


def test_a_launcher_that_sees_no_folder_keeps_none() -> None:
    found = _by_kind(job_objects(_job(folder=""), make_keys()))
    env = _container(found["Job"]["spec"]["template"])["env"]
    assert {"name": "HVDTRAIN_JOBS_DIR", "value": ""} in env
    assert "HVDTRAIN_JOB_FOLDER" not in str(env)


def test_what_pods_can_not_do_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="needs -np"):
        pod_job(Path("/a"), _spec(), {}, ranks=None)
    for options in (("-H", "a:2"), ("--hostfile=x",)):
        with pytest.raises(ConfigurationError, match="names hosts; on Kubernetes they are"):
            pod_job(Path("/a"), _spec(*options), {}, ranks=2)


@pytest.mark.parametrize(
    ("name", "found"),
    {
        "train-20261127-044704": "train-20261127-044704",
        "My_Train-20261127-044704-2": "my-train-20261127-044704-2",
        "x" * 60 + "-20261127-044704": "x" * 29 + "-20261127-044704",
    }.items(),
)
def test_objects_have_names_that_kubernetes_takes(name: str, found: str) -> None:
    assert object_name(name) == found


def test_keys_are_a_jobs_own(tmp_path: Path) -> None:
    if shutil.which("ssh-keygen") is None:
        do_without("cluster", "ssh-keygen is not installed")
    files = make_keys()
    assert files["id_ed25519"] != make_keys()["id_ed25519"]
    key = tmp_path / "key"
    key.touch(0o600)
    for private, public in (
        ("id_ed25519", "authorized_keys"),
        ("ssh_host_ed25519_key", "known_hosts"),
    ):
        key.write_text(files[private])
        said = subprocess.run(
            ["ssh-keygen", "-y", "-f", key], capture_output=True, text=True, check=True, timeout=20
        )
        assert said.stdout.split()[:2] == files[public].split()[-2:]
