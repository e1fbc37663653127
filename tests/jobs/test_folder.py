from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvdtrain.errors import JobError
from hvdtrain.jobs.folder import (
    PATIENCE_S,
    JobFolder,
    all_jobs,
    create_job,
    find_job,
    jobs_directory,
)
from hvdtrain.jobs.spec import JobSpec
from hvdtrain.jobs.state import JobState, ProcessIdentity, own_identity
from tests.harness.required import skip_or_fail

DIRECTORIES = {
    "variable": ({"HVDTRAIN_JOBS_DIR": "/a/jobs", "HOME": "/h"}, "/a/jobs"),
    "empty": ({"HVDTRAIN_JOBS_DIR": "", "HOME": "/h"}, None),
    "xdg": ({"XDG_STATE_HOME": "/s", "HOME": "/h"}, "/s/hvdtrain/jobs"),
    "home": ({"HOME": "/h"}, "/h/.local/state/hvdtrain/jobs"),
    "no-home": ({}, None),
}


@pytest.mark.parametrize(("environ", "path"), DIRECTORIES.values(), ids=DIRECTORIES)
def test_directory_of_jobs(environ, path) -> None:
    assert jobs_directory(environ) == (path and Path(path))


def _spec(*program: str, **fields) -> JobSpec:
    return JobSpec(options=("-np", "2"), program=program, folder="/", created_s=1.0, **fields)


NAMES = {
    "script": (["python", "-u", "/a b/train_mnist.py", "--epochs", "3"], "train_mnist"),
    "module": (["python", "-m", "pkg.train"], "pkg-train"),
    "program": (["/usr/bin/python3.11", "-c", "..."], "python3-11"),
    "path": (["../../etc/passwd"], "passwd"),
    "shell": (["$(rm -rf ~)<script>.py"], "rm-rf-script"),
    "empty": ([".py"], "job"),
    "long": (["x" * 300 + ".py"], "x" * 40),
}


@pytest.mark.parametrize(("program", "name"), NAMES.values(), ids=NAMES)
def test_a_job_is_named_after_its_program(program, name: str, tmp_path: Path) -> None:
    job = create_job(tmp_path / "jobs", _spec(*program))
    assert job.name.rpartition("-")[0].rpartition("-")[0] == name
    assert job.path.parent == tmp_path / "jobs"
    assert job.read_spec().program == tuple(program)


def test_folders_are_private(tmp_path: Path) -> None:
    job = create_job(tmp_path / "a" / "jobs", _spec("a"))
    job.write_state(JobState(phase="queued"))
    for path in (job.path.parent, job.path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in job.path.iterdir()} == {0o600}


def test_jobs_of_the_same_second_have_different_names(tmp_path: Path) -> None:
    names = [create_job(tmp_path, _spec("a.py")).name for _ in range(3)]
    assert names == [names[0], f"{names[0]}-2", f"{names[0]}-3"]
    assert [job.name for job in all_jobs(tmp_path)] == names


def test_a_requeued_slurm_job_keeps_its_folder(tmp_path: Path) -> None:
    first = create_job(tmp_path, _spec("a.py", slurm_job="12"))
    second = create_job(tmp_path, _spec("a.py", "other", slurm_job="12"))
    assert (first.name, second.name) == ("a-slurm12", "a-slurm12-2")
    for job, program in ((first, ["a.py"]), (second, ["a.py", "other"])):
        again = create_job(tmp_path, _spec(*program, slurm_job="12", slurm_restarts=1))
        assert again.name == job.name


def test_jobs_are_found_by_a_prefix_of_their_name(tmp_path: Path) -> None:
    for name in ("train-1", "train-12", "mnist-20260101-120000", ".queue"):
        (tmp_path / name).mkdir()
    assert find_job(tmp_path, "train-1").name == "train-1", "an exact match wins"
    assert find_job(tmp_path, "mn").name == "mnist-20260101-120000"
    with pytest.raises(JobError, match=r"2 jobs start with 'tra'; did you mean train-1, train-12"):
        find_job(tmp_path, "tra")
    with pytest.raises(JobError, match=r"no job 'mnits'; did you mean mnist-2026"):
        find_job(tmp_path, "mnits")
    (tmp_path / "one" / "train-1").mkdir(parents=True)
    with pytest.raises(JobError, match="no job ''; did you mean train-1"):
        find_job(tmp_path / "one", "")
    for unknown in ("zzzzzzzz", "", "..", "../jobs", ".queue", "/etc"):
        with pytest.raises(JobError, match="hvdtrain jobs lists all"):
            find_job(tmp_path, unknown)
    with pytest.raises(JobError, match="no job 'a'"):
        find_job(tmp_path / "nowhere", "a")


def test_the_state_is_replaced_atomically(tmp_path: Path) -> None:
    job = JobFolder(tmp_path)
    assert job.read_state() is None
    assert job.status(None) == "unknown"
    state = JobState(phase="running", launcher=own_identity(), step=7)
    job.write_state(state)
    assert job.read_state() == state
    assert job.status(state) == "running"
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]
    (tmp_path / "state.json").write_text('{"phase": "run')
    assert job.read_state() is None
    (tmp_path / "spec.json").write_text("[]")
    with pytest.raises(JobError, match=r"spec.json is not valid: \[\] is not a JSON object"):
        job.read_spec()


def test_a_full_disk_keeps_the_previous_state(small_disk: Path) -> None:
    job = JobFolder(small_disk)
    job.write_state(JobState(phase="running", step=1))
    (small_disk / "ballast").write_bytes(b"x" * (1000 << 10))
    with pytest.raises(OSError, match="No space"):
        job.write_state(JobState(phase="ended", verdict="x" * 100_000))
    assert job.read_state() == JobState(phase="running", step=1)
    assert not list(small_disk.glob(".state*"))


def test_a_full_disk_leaves_no_incomplete_job(small_disk: Path) -> None:
    spec = JobSpec(options=(), program=("true", "x" * (1 << 20)), folder="/")
    with pytest.raises(OSError, match="No space"):
        create_job(small_disk / "jobs", spec)
    assert all_jobs(small_disk / "jobs") == []


def test_a_job_without_a_specification_is_as_old_as_its_folder(tmp_path: Path) -> None:
    assert JobFolder(tmp_path).created_s() == pytest.approx(time.time(), abs=60)
    assert JobFolder(tmp_path / "gone").created_s() == 0


def test_a_remote_launcher_without_heartbeats_is_silent(tmp_path: Path) -> None:
    job = JobFolder(tmp_path)
    remote = JobState(phase="running", launcher=ProcessIdentity(host="elsewhere", pid=1))
    job.write_state(remote)
    assert job.status(remote) == "running"
    _age_state(job)
    assert job.status(remote) == "silent"
    job.touch_state()
    assert job.status(remote) == "running"


def _age_state(job: JobFolder) -> None:
    before = time.time() - PATIENCE_S - 1
    os.utime(job.path / "state.json", (before, before))


def test_a_stop_request_is_taken_once(tmp_path: Path) -> None:
    job = JobFolder(tmp_path)
    assert job.take_stop_request() is None
    for number in (signal.SIGUSR1, signal.SIGTERM):
        job.request_stop(number)
        assert job.take_stop_request() == number
        assert job.take_stop_request() is None


_IN_A_CONTAINER = """
import sys
from pathlib import Path
from hvdtrain.jobs.folder import JobFolder
from hvdtrain.jobs.state import JobState, own_identity
inside, outside = JobFolder(Path(sys.argv[1])), JobFolder(Path(sys.argv[2]))
inside.write_state(JobState(phase="running", launcher=own_identity()))
print(outside.status(outside.read_state()), flush=True)
sys.stdin.read()
"""


def test_jobs_in_containers_with_the_same_hostname_are_not_lost(tmp_path: Path) -> None:
    inside, outside = JobFolder(tmp_path / "inside"), JobFolder(tmp_path / "outside")
    for job in (inside, outside):
        job.path.mkdir()
    outside.write_state(JobState(phase="running", launcher=own_identity()))
    namespaces = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*namespaces, "true"], capture_output=True).returncode != 0:
        skip_or_fail("namespaces", "this user may not create PID namespaces")
    argv = [*namespaces, "--kill-child", sys.executable, "-c", _IN_A_CONTAINER]
    with subprocess.Popen(
        [*argv, str(inside.path), str(outside.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as container:
        assert container.stdout is not None
        assert container.stdout.readline() == "running\n"
        assert inside.status(inside.read_state()) == "running"
        _age_state(inside)
        assert inside.status(inside.read_state()) == "lost"
        container.communicate(timeout=10)
