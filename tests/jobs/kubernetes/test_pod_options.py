from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from hvdtrain.errors import ConfigurationError
from hvdtrain.jobs.kubernetes.pod_options import (
    PodOptions,
    Toleration,
    Volume,
    add_pod_options,
    read_pod_options,
)

IMAGE = "--image=registry.test/train:1"
POD = """\
spec:
  containers:
  - name: hvdtrain
    volumeMounts:
    - {name: data, mountPath: /data}
    - {name: programs, mountPath: /programs, readOnly: true}
"""
INVALID = {
    "--volume=data": "expected CLAIM:/PATH",
    "--volume=data:relative": "expected CLAIM:/PATH",
    "--volume=data:/x:rw,ro": "expected CLAIM:/PATH",
    "--volume=$(id):/x": "expected CLAIM:/PATH",
    "--toleration=gpu:Never": "expected one of NoSchedule",
    "--resources=cpu": "expected NAME=VALUE",
    "--node-selector==x": "expected NAME=VALUE",
    "--ranks-per-pod=0": "a whole number above 0",
    "--namespace=Mine": "expected a Kubernetes name",
    "--template=/nowhere.yaml": "expected a pod as YAML",
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    add_pod_options(parser)
    return parser


def test_options_are_stored_and_read(tmp_path: Path) -> None:
    (template := tmp_path / "pod.yaml").write_text(POD)
    argv = ["--image", "i", IMAGE, "--volume", "data:/data:ro", "--volume=more:/more"]
    argv += ["--toleration", "gpu=yes:NoSchedule", "--toleration=any", "--node-selector", "a=b"]
    argv += ["--resources", "cpu=4,memory=16Gi", "--gpus-per-rank", "1", "--gpus-per-rank=2"]
    argv += ["--template", str(template), "--node-selector=c=d=e"]
    words = _parser().parse_args(argv).pod_words
    # The content of the file is stored.
    template.unlink()
    pods = read_pod_options(words)
    assert pods.image == "registry.test/train:1", "the last value wins"
    assert pods.volumes == (Volume("data", "/data", True), Volume("more", "/more"))
    assert pods.tolerations == (Toleration("gpu", "yes", "NoSchedule"), Toleration("any"))
    assert pods.node_selector == {"a": "b", "c": "d=e"}
    assert pods.resources == {"cpu": "4", "memory": "16Gi"}
    assert (pods.gpus_per_rank, pods.ranks_per_pod) == (2, 1)
    assert pods.shared_paths() == ["/more", "/data"], "read-only volumes can't have jobs"


@pytest.mark.parametrize(("word", "message"), INVALID.items(), ids=INVALID)
def test_invalid_values_are_errors(word: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentError, match=message):
        _parser().parse_args([word])
    with pytest.raises(ConfigurationError, match=message):
        read_pod_options([IMAGE, word])


def test_an_image_is_required() -> None:
    with pytest.raises(ConfigurationError, match="needs --image"):
        read_pod_options(["--namespace=a"])
    assert read_pod_options([IMAGE]) == PodOptions(image="registry.test/train:1")


def test_an_unknown_option_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="'--colour=red' is not an option"):
        read_pod_options([IMAGE, "--colour=red"])
