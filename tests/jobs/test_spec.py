from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform
import sys

import pytest

from hvdtrain.errors import JobError
from hvdtrain.jobs.files import from_json
from hvdtrain.jobs.spec import (
    LOCAL,
    Backend,
    JobSpec,
    is_secret,
    make_spec,
    secret_values,
    with_changes,
    without_secrets,
)

NASTY = ["--name", "$(id)", "a b", "'\"", "line\nline", "<script>", "", "é"]


def test_words_come_back_as_they_were() -> None:
    spec = JobSpec(options=("-np", "2"), program=tuple(NASTY), folder="/a b", created_s=1.5)
    assert from_json(JobSpec, json.loads(json.dumps(spec.to_json()))) == spec
    spec = dataclasses.replace(spec, backend=Backend("slurm", tuple(NASTY)))
    assert from_json(JobSpec, json.loads(json.dumps(spec.to_json()))) == spec


def test_what_later_versions_add_is_left_out() -> None:
    content = json.loads(json.dumps(JobSpec(options=(), program=("a",), folder="/").to_json()))
    assert from_json(JobSpec, {**content, "colour": "red"}).program == ("a",)


BROKEN = {
    "nothing": {},
    "line": {"options": [], "program": "rm -rf /"},
    "numbers": {"options": [], "program": [1]},
    "variables": {"options": [], "program": [], "variables": {"A": 1}},
    "versions": {"options": [], "program": [], "versions": ["3.11"]},
    "folder": {"options": [], "program": [], "folder": 7},
    "backend": {"options": [], "program": [], "backend": {"kind": "cloud", "options": []}},
    "backends options": {
        "options": [],
        "program": [],
        "backend": {"kind": "slurm", "options": "-p"},
    },
    "time": {"options": [], "program": [], "created_s": "now"},
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_what_is_no_specification_is_refused(content) -> None:
    with pytest.raises(JobError):
        from_json(JobSpec, content)


@pytest.mark.parametrize(
    "name", ["WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "db_password", "PGPASSWORD"]
)
def test_secrets_are_known_by_their_names(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", ["PATH", "KEYBOARD", "MONKEY", "OMP_NUM_THREADS", "AUTHOR"])
def test_other_names_are_no_secrets(name: str) -> None:
    assert not is_secret(name)


def test_options_keep_no_secret() -> None:
    options = ["-np", "2", "-x", "HF_TOKEN=a", "--env=MY_KEY=b", "-xMY_KEY=c", "-x", "A=1", "-xB"]
    kept = ["-np", "2", "-x", "HF_TOKEN", "--env=MY_KEY", "-xMY_KEY", "-x", "A=1", "-xB"]
    assert list(without_secrets(options)) == kept
    assert secret_values(options) == {"HF_TOKEN": "a", "MY_KEY": "c"}


def test_a_specification_holds_what_was_asked_for_alone() -> None:
    environ = {
        "HOME": "/root",
        "HVDTRAIN_MODE": "async-ps",
        "HVDTRAIN_LAUNCHER": "10.0.0.1 4711",
        "ASKED": "1",
        "HF_TOKEN": "secret",
    }
    spec = make_spec(["-x", "HF_TOKEN=secret"], ["a"], environ, ["ASKED", "HF_TOKEN"])
    assert spec.variables == {"HVDTRAIN_MODE": "async-ps", "ASKED": "1"}
    assert "secret" not in json.dumps(spec.to_json())


def test_a_specification_tells_versions_of_what_is_installed() -> None:
    before = set(sys.modules)
    spec = make_spec([], ["a"], {})
    assert spec.versions["Python"] == platform.python_version()
    assert spec.versions["Keras"] == importlib.metadata.version("keras")
    assert "TensorFlow" in spec.versions
    assert "tensorflow" not in set(sys.modules) - before
    # Somebody may have installed others since a job ran.
    older = JobSpec(**{**vars(spec), "version": "0.0.1", "versions": {"Python": "3.8"}})
    assert with_changes(older, []).versions == spec.versions
    other = JobSpec(**{**vars(older), "python": "/other/python"})
    assert with_changes(other, []).versions == {"Python": "3.8"}


def test_changes_come_last() -> None:
    spec = JobSpec(options=("-np", "2"), program=("a", "b"), folder="/")
    changed = with_changes(spec, ["-np", "3"])
    assert (changed.options, changed.program) == (("-np", "2", "-np", "3"), ("a", "b"))
    assert changed.slurm_job == ""
    assert changed.created_s > 0
    changed = with_changes(spec, ["--", "c", "--", "d"])
    assert (changed.options, changed.program) == (("-np", "2"), ("c", "--", "d"))
    assert with_changes(spec, []).program == ("a", "b")
    slurms = Backend("slurm", ("--time=5",))
    assert with_changes(spec, [], slurms).backend == slurms
    on_slurm = JobSpec(**{**vars(spec), "backend": slurms})
    assert with_changes(on_slurm, []).backend == slurms
    assert with_changes(on_slurm, [], LOCAL).backend == LOCAL
    assert with_changes(on_slurm, [], Backend("slurm")).backend.options == ()


def test_what_ran_in_somebodys_slurm_job_is_not_started_just_anywhere() -> None:
    spec = JobSpec(options=(), program=("a",), folder="/", slurm_job="7")
    with pytest.raises(JobError, match="ran in Slurm job 7"):
        with_changes(spec, [])
    assert with_changes(spec, [], LOCAL).slurm_job == ""
    assert with_changes(spec, [], Backend("slurm")).backend.kind == "slurm"
