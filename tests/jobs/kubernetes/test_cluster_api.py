"""What is asked of a cluster, where there is none."""

from __future__ import annotations

import dataclasses
import json
import socket
import time
from pathlib import Path

import pytest

from hvdtrain.errors import JobError
from hvdtrain.jobs.kubernetes import cluster_api
from hvdtrain.jobs.kubernetes.pod_backend import PodBackend
from hvdtrain.jobs.spec import Backend, JobSpec
from hvdtrain.jobs.state import NO_ANSWER

pytest.importorskip("kubernetes")


def test_a_cluster_that_says_nothing_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        server = {"server": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "silent", "cluster": server}],
            "users": [{"name": "me", "user": {"token": "x"}}],
            "contexts": [{"name": "here", "context": {"cluster": "silent", "user": "me"}}],
            "current-context": "here",
        }
        (path := tmp_path / "config").write_text(json.dumps(config))
        default = "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION"
        monkeypatch.setattr(default, str(path))
        monkeypatch.setattr(cluster_api, "TIMEOUT_S", 0.2)
        begun = time.monotonic()
        with pytest.raises(JobError, match="the cluster does not answer"):
            cluster_api.ClusterApi.of_context("", "").job("train")
        assert time.monotonic() - begun < 10
        # Of many jobs it is asked once.
        spec = JobSpec(
            options=(),
            program=("a",),
            folder="/",
            backend=Backend("kubernetes", ("--image=i",)),
        )
        silent.settimeout(0.1)
        while _takes(silent):
            pass
        unreadable = dataclasses.replace(spec, backend=Backend("kubernetes", ("--colour=red",)))
        ((_, word, why, _),) = PodBackend().describe({Path("/jobs/a"): unreadable}).values()
        assert (word, "is no option" in why) == (NO_ANSWER, True)
        answers = PodBackend().describe({Path(f"/jobs/{number}"): spec for number in range(5)})
        assert {answer.word for answer in answers.values()} == {NO_ANSWER}
        assert [_takes(silent) for _ in range(2)] == [True, False]


def _takes(server: socket.socket) -> bool:
    """Whether somebody has connected."""
    try:
        server.accept()[0].close()
    except TimeoutError:
        return False
    return True
