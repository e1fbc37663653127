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
    change_spec,
    is_secret,
    make_spec,
    remove_secrets,
    secret_values,
)

SPECIAL = ("--name", "$(id)", "a b", "'\"", "line\nline", "<script>", "", "é")


@pytest.mark.parametrize("backend", [LOCAL, Backend("slurm", SPECIAL)])
def test_a_specification_is_restored_from_json(backend: Backend) -> None:
    spec = JobSpec(options=("-np", "2"), program=SPECIAL, folder="/a b", created_s=1.5)
    spec = dataclasses.replace(spec, backend=backend)
    content = json.loads(json.dumps(dataclasses.asdict(spec)))
    assert from_json(JobSpec, content) == spec
    assert from_json(JobSpec, {**content, "added_by_a_later_version": "red"}) == spec


INVALID = {
    "empty": {},
    "string": {"options": [], "program": "rm -rf /"},
    "numbers": {"options": [], "program": [1]},
    "variables": {"options": [], "program": [], "variables": {"A": 1}},
    "versions": {"options": [], "program": [], "versions": ["3.11"]},
    "folder": {"options": [], "program": [], "folder": 7},
    "backend": {"options": [], "program": [], "backend": {"kind": "cloud", "options": []}},
    "backend-options": {
        "options": [],
        "program": [],
        "backend": {"kind": "slurm", "options": "-p"},
    },
    "time": {"options": [], "program": [], "created_s": "now"},
}


@pytest.mark.parametrize("content", INVALID.values(), ids=INVALID)
def test_an_invalid_specification_is_an_error(content) -> None:
    with pytest.raises(JobError):
        from_json(JobSpec, content)


def test_secrets_are_recognized_by_name() -> None:
    secrets = ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "db_password", "PGPASSWORD")
    others = ("PATH", "KEYBOARD", "MONKEY", "OMP_NUM_THREADS", "AUTHOR")
    assert [name for name in (*secrets, *others) if is_secret(name)] == [*secrets]


def test_secrets_are_removed_from_options() -> None:
    options = ["-np", "2", "-x", "HF_TOKEN=a", "--env=MY_KEY=b", "-xMY_KEY=c", "-x", "A=1", "-xB"]
    kept = ["-np", "2", "-x", "HF_TOKEN", "--env=MY_KEY", "-xMY_KEY", "-x", "A=1", "-xB"]
    assert list(remove_secrets(options)) == kept
    assert secret_values(options) == {"HF_TOKEN": "a", "MY_KEY": "c"}


def test_a_specification_has_settings_the_backend_and_exported_variables() -> None:
    environ = {
        "HOME": "/root",
        "HVDTRAIN_MODE": "async-ps",
        "HVDTRAIN_LAUNCHER": "10.0.0.1 4711",
        "KERAS_BACKEND": "jax",
        "EXPORTED": "1",
        "HF_TOKEN": "secret",
    }
    spec = make_spec(["-x", "HF_TOKEN=secret"], ["a"], environ, ["EXPORTED", "HF_TOKEN"])
    assert spec.variables == {
        "HVDTRAIN_MODE": "async-ps",
        "KERAS_BACKEND": "jax",
        "EXPORTED": "1",
    }
    assert "secret" not in json.dumps(dataclasses.asdict(spec))


def test_a_specification_has_installed_versions() -> None:
    before = set(sys.modules)
    spec = make_spec([], ["a"], {})
    assert spec.versions["Python"] == platform.python_version()
    assert spec.versions["Keras"] == importlib.metadata.version("keras")
    assert "TensorFlow" in spec.versions
    assert "tensorflow" not in set(sys.modules) - before
    older = dataclasses.replace(spec, version="0.0.1", versions={"Python": "3.8"})
    assert change_spec(older, []).versions == spec.versions, "packages may have been updated"
    other = dataclasses.replace(older, python="/other/python")
    assert change_spec(other, []).versions == {"Python": "3.8"}


def test_changes_override_the_job() -> None:
    spec = JobSpec(options=("-np", "2"), program=("a", "b"), folder="/")
    changed = change_spec(spec, ["-np", "3"])
    assert (changed.options, changed.program) == (("-np", "2", "-np", "3"), ("a", "b"))
    assert changed.slurm_job == ""
    assert changed.created_s > 0
    changed = change_spec(spec, ["--", "c", "--", "d"])
    assert (changed.options, changed.program) == (("-np", "2"), ("c", "--", "d"))
    assert change_spec(spec, []).program == ("a", "b")
    slurm = Backend("slurm", ("--time=5",))
    on_slurm = change_spec(spec, [], slurm)
    assert on_slurm.backend == slurm
    assert change_spec(on_slurm, []).backend == slurm
    assert change_spec(on_slurm, [], LOCAL).backend == LOCAL
    assert change_spec(on_slurm, [], Backend("slurm")).backend.options == ()


def test_a_job_within_a_foreign_slurm_job_needs_a_queue() -> None:
    spec = JobSpec(options=(), program=("a",), folder="/", slurm_job="7")
    with pytest.raises(JobError, match="ran in Slurm job 7"):
        change_spec(spec, [])
    assert change_spec(spec, [], LOCAL).slurm_job == ""
    assert change_spec(spec, [], Backend("slurm")).backend.kind == "slurm"
