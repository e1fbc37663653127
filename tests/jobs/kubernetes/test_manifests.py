from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from hvdtrain.jobs.kubernetes.manifests import PodJob, job_objects, make_keys
from hvdtrain.jobs.kubernetes.pod_backend import PodPlan
from hvdtrain.jobs.kubernetes.pod_options import PodOptions, Toleration, Volume
from tests.harness.required import skip_or_fail

SPECIAL = ("python", "a b.py", "$(touch x)", "'\"", "line\nline", "{{ x }}", "- a: b", "é")


def _job(job_folder: str = "/jobs/train-1", **pods: Any) -> PodJob:
    return PodJob(
        name="train-1",
        ranks=5,
        options=("--max-restarts", "2"),
        program=SPECIAL,
        folder=job_folder,
        variables={"HVDTRAIN_MODE": "async-ps"},
        secrets={"HF_TOKEN": "secret"},
        pods=PodOptions(image="i", **pods),
    )


def _by_kind(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the first object of each kind."""
    return {one["kind"]: one for one in reversed(objects)}


def _container(pod: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod["spec"]["containers"]
    return container


def test_objects_of_a_job() -> None:
    objects = job_objects(_job(ranks_per_pod=2), make_keys())
    assert [one["kind"] for one in objects] == [
        *("Job", "ServiceAccount", "Role", "RoleBinding"),
        *("Secret", "ConfigMap", "Service", "Service", "StatefulSet"),
    ]
    by_kind = _by_kind(objects)
    launcher = _container(by_kind["Job"]["spec"]["template"])
    assert launcher["command"][-len(SPECIAL) :] == list(SPECIAL)
    assert by_kind["StatefulSet"]["spec"]["replicas"] == 3
    hostfile = by_kind["ConfigMap"]["data"]["hostfile"]
    assert hostfile.splitlines()[-1] == "train-1-worker-2.train-1 slots=2"
    assert launcher["env"] == [
        {"name": "HVDTRAIN_MODE", "value": "async-ps"},
        {"name": "HVDTRAIN_JOB_FOLDER", "value": "/jobs/train-1"},
        {
            "name": "HF_TOKEN",
            "valueFrom": {"secretKeyRef": {"name": "train-1", "key": "HF_TOKEN"}},
        },
    ]
    worker = by_kind["StatefulSet"]["spec"]["template"]
    assert worker["metadata"]["labels"].items() >= by_kind["Service"]["spec"]["selector"].items()
    secrets = [volume for volume in worker["spec"]["volumes"] if "secret" in volume]
    assert "HF_TOKEN" not in str(secrets), "workers get only the keys"
    assert worker["spec"]["automountServiceAccountToken"] is False
    rules = [rule for rule in by_kind["Role"]["rules"] if rule["resources"] != ["pods"]]
    assert all(rule["resourceNames"] for rule in rules), "only its own objects"


def test_workers_have_names_at_once_and_a_terminating_launcher_has_none() -> None:
    objects = job_objects(_job(), make_keys())
    services = {one["metadata"]["name"]: one["spec"] for one in objects if one["kind"] == "Service"}
    early = {name: spec["publishNotReadyAddresses"] for name, spec in services.items()}
    assert early == {"train-1": True, "train-1-launcher": False}
    launcher = _by_kind(objects)["Job"]["spec"]["template"]
    selector = services["train-1-launcher"]["selector"]
    assert launcher["metadata"]["labels"].items() >= selector.items()
    names = launcher["spec"]["hostname"], launcher["spec"]["subdomain"]
    assert names == ("train-1-launcher", "train-1-launcher")


def test_the_preview_is_the_objects_as_yaml() -> None:
    objects = job_objects(_job(), make_keys())
    preview = PodPlan(_job(), objects).preview()
    assert list(yaml.safe_load_all(preview)) == objects
    assert preview.startswith("# The Secret contains private keys")


def test_options_override_the_template() -> None:
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
    job = _job(
        template=template,
        node_selector={"kind": "gpu"},
        tolerations=(Toleration("gpu", "yes", "NoSchedule"),),
        volumes=(Volume("data", "/data", True),),
        gpus_per_rank=2,
        ranks_per_pod=4,
        resources={"cpu": "8"},
        namespace="n",
        queue="q",
        pull_secrets=("s",),
        folder="/w",
    )
    by_kind = _by_kind(job_objects(job, make_keys()))
    assert {one["metadata"]["namespace"] for one in by_kind.values()} == {"n"}
    assert by_kind["Job"]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q"
    assert by_kind["Job"]["spec"]["suspend"] is True
    pod = by_kind["StatefulSet"]["spec"]["template"]
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
    assert template["spec"]["containers"][1]["image"] == "old", "the template is unchanged"


def test_a_launcher_without_a_shared_folder_records_nothing() -> None:
    by_kind = _by_kind(job_objects(_job(job_folder=""), make_keys()))
    env = _container(by_kind["Job"]["spec"]["template"])["env"]
    assert {"name": "HVDTRAIN_JOBS_DIR", "value": ""} in env
    assert "HVDTRAIN_JOB_FOLDER" not in str(env)


@pytest.mark.parametrize(
    ("private", "public"),
    [("id_ed25519", "authorized_keys"), ("ssh_host_ed25519_key", "known_hosts")],
)
def test_each_job_has_new_keys(tmp_path: Path, private: str, public: str) -> None:
    if shutil.which("ssh-keygen") is None:
        skip_or_fail("cluster", "ssh-keygen is not installed")
    files = make_keys()
    assert files[private] != make_keys()[private]
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text(files[private])
    done = subprocess.run(
        ["ssh-keygen", "-y", "-f", key], capture_output=True, text=True, check=True, timeout=20
    )
    assert done.stdout.split()[:2] == files[public].split()[-2:]
