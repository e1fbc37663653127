from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hvdtrain.errors import JobError
from hvdtrain.jobs.spec import Backend, JobSpec
from hvdtrain.serve.policy import Policy


def test_only_what_is_listed_may_be_started(tmp_path: Path) -> None:
    (tmp_path / "work" / "below").mkdir(parents=True)
    (tmp_path / "work" / "link").symlink_to("/etc")
    policy = Policy(folders=[tmp_path / "work"], programs=["python"], backends=["local"])
    spec = JobSpec(options=(), program=("python", "a.py"), folder=str(tmp_path / "work"))
    policy.check(spec)
    policy.check(dataclasses.replace(spec, folder=str(tmp_path / "work" / "below")))
    for folder in (
        "/",
        str(tmp_path),
        str(tmp_path / "work" / "link"),
        f"{tmp_path}/work/../x",
        "",
    ):
        with pytest.raises(JobError, match=r"folder .* may not be used .* \(--allow-folder"):
            policy.check(dataclasses.replace(spec, folder=folder))
    for program in (("sh", "-c", "id"), ("python3",), ("./python",), ()):
        with pytest.raises(JobError, match=r"program .* allowed: python \(--allow-program"):
            policy.check(dataclasses.replace(spec, program=program))
    with pytest.raises(JobError, match="backend 'slurm' may not be used"):
        policy.check(dataclasses.replace(spec, backend=Backend("slurm")))


def test_without_a_list_nothing_may() -> None:
    assert not Policy().allows_something
    with pytest.raises(JobError, match="allowed: none"):
        Policy().check(JobSpec(options=(), program=("python",), folder="/"))
