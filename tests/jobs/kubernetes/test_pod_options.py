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
REFUSED = {
    "--volume=data": "expected CLAIM:/PATH",
    "--volume=data:relative": "expected CLAIM:/PATH",
    "--volume=data:/x:rw,ro": "expected CLAIM:/PATH",
    "--volume=$(id):/x": "expected CLAIM:/PATH",
    "--toleration=gpu:Never": "expected one of NoSchedule",
    "--resources=cpu": "expected NAME=VALUE",
    "--node-selector==x": "expected NAME=VALUE",
    "--ranks-per-pod=0": "a whole number above 0",
    "--namespace=Mine": "expected a name that Kubernetes takes",
    "--template=/nowhere.yaml": "expected a pod as YAML",
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    add_pod_options(parser)
    return parser


def test_options_are_kept_as_words_and_read_again(tmp_path: Path) -> None:
    (template := tmp_path / "pod.yaml").write_text(POD)
    argv = ["--image", "i", IMAGE, "--volume", "data:/data:ro", "--volume=more:/more"]
    argv += ["--toleration", "gpu=yes:NoSchedule", "--toleration=any", "--node-selector", "a=b"]
    argv += ["--resources", "cpu=4,memory=16Gi", "--gpus-per-rank", "2"]
    argv += ["--template", str(template), "--node-selector=c=d=e"]
    words = _parser().parse_args(argv).pod_words
    # What was asked for stays so, and is known in other folders, too.
    template.unlink()
    pods = read_pod_options(words)
    assert pods.image == "registry.test/train:1", "the last one wins"
    assert pods.volumes == (Volume("data", "/data", True), Volume("more", "/more"))
    assert pods.tolerations == (Toleration("gpu", "yes", "NoSchedule"), Toleration("any"))
    assert pods.node_selector == {"a": "b", "c": "d=e"}
    assert pods.resources == {"cpu": "4", "memory": "16Gi"}
    assert (pods.gpus_per_rank, pods.ranks_per_pod) == (2, 1)
    assert pods.shared_paths() == ["/more", "/data"], "what pods may only read is not for jobs"


@pytest.mark.parametrize(("word", "said"), REFUSED.items(), ids=REFUSED)
def test_what_can_not_be_is_refused_when_it_is_said_and_when_it_is_read(word, said) -> None:
    with pytest.raises(argparse.ArgumentError, match=said):
        _parser().parse_args([word])
    with pytest.raises(ConfigurationError, match=said):
        read_pod_options([IMAGE, word])


def test_there_is_an_image() -> None:
    with pytest.raises(ConfigurationError, match="needs --image"):
        read_pod_options(["--namespace=a"])
    assert read_pod_options([IMAGE]) == PodOptions(image="registry.test/train:1")


def test_a_word_of_another_version_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'--colour=red' is no option"):
        read_pod_options([IMAGE, "--colour=red"])
