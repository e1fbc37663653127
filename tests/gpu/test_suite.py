"""The suite itself, on CPUs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import jobs
from tests.gpu.__main__ import main, run_claims
from tests.gpu.claims import CLAIMS, Claim, Context, Judgement
from tests.gpu.detect import Hardware, HostGpus, Layout, Requirements
from tests.gpu.jobs import JobError
from tests.gpu.results import Result, conclude, exit_code, format_results, judged
from tests.harness.fake_driver import GIB, FakeDriver, uuid_of
from tests.harness.jobs import PATIENCE, REPOSITORY, clean_environment
from tests.testbed.cluster import Cluster

_GPUS = f"""
gpu {uuid_of("a")}
model NVIDIA H100
bus 0000:1b:00.0
memory {80 * GIB}
gpu {uuid_of("b")}
model NVIDIA H100
bus 0000:1c:00.0
memory {80 * GIB}
"""
NO_GPU = Hardware(hosts=(HostGpus(name="localhost", gpus=0),))


def claim(name: str, result: Any, **changes: Any) -> Claim:
    def test(context: Context) -> Judgement:
        if isinstance(result, Exception):
            raise result
        return Judgement(measured=str(result), holds=result)

    options: dict[str, Any] = {"needs": Requirements(ranks="two"), "limit_s": 5.0, **changes}
    return Claim(name=name, text=f"claim {name}", test=test, **options)


def test_a_claim_that_crashes_fails_and_the_suite_continues(tmp_path: Path) -> None:
    claims = [
        claim("a", JobError("exit code 1\nNcclError: no route")),
        claim("b", ZeroDivisionError("division by zero")),
        claim("c", True),
        claim("d", True, needs=Requirements(ranks="one", gpus=1)),
        claim("e", False, is_timing=True),
        claim("f", None),
    ]
    results = run_claims(claims, NO_GPU, tmp_path, limit_s=60)
    assert [(one.name, one.verdict, one.measured) for one in results] == [
        ("a", "fail", "exit code 1\nNcclError: no route"),
        ("b", "fail", "ZeroDivisionError: division by zero"),
        ("c", "pass", "True"),
        ("d", "not run", "no GPU"),
        ("e", "no verdict", "False"),
        ("f", "no verdict", "None"),
    ]
    assert exit_code(results) == 1
    assert exit_code(results[2:]) == 0
    assert exit_code([results[3]]) == 1, "nothing ran"
    table = format_results(results)
    assert re.search(r"^a +claim a +2 ranks, CPU +exit code 1 +fail$", table, re.MULTILINE)
    assert re.search(r"^ +NcclError: no route$", table, re.MULTILINE)
    last = conclude(results, NO_GPU)
    assert last.startswith("6 claims: 1 pass, 2 fail, 2 no verdict, 1 not run\nThere is no GPU")


def test_times_get_a_verdict_on_gpus() -> None:
    slow = Judgement(measured="1.5 times", holds=False)
    layout = Layout(ranks=1, gpus=1)
    assert judged(claim("a", False, is_timing=True), layout, slow, 1.0).verdict == "fail"


def test_no_claim_starts_after_the_time_limit(tmp_path: Path) -> None:
    (result,) = run_claims([claim("a", True)], NO_GPU, tmp_path, limit_s=1)
    assert (result.verdict, result.measured) == (
        "not run",
        "the time limit of the suite was reached",
    )


def test_a_job_ends_with_its_children_at_its_limit() -> None:
    script = "import subprocess; print('begun'); subprocess.run(['sleep', '4321'])"
    done = jobs.run([sys.executable, "-c", script], limit_s=2)
    assert done.code is None
    assert done.last_lines() == "time limit reached\nbegun"
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert "sleep 4321" not in running.stdout


def test_a_failing_program_shows_its_last_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "PYTHON", ["sh", "-c", "echo no result; echo wrong driver >&2", "sh"])
    with pytest.raises(JobError, match=r"exit code 0\n(.*\n)*.*wrong driver"):
        jobs.run_program(Layout(ranks=1, gpus=0), "equal", limit_s=60)


USAGE_ERRORS = {
    "claim": (["--only", "speed"], "invalid choice: 'speed'"),
    "json": (["--json", "/nowhere/x"], "--json names a folder that does not exist"),
}


@pytest.mark.parametrize(("argv", "message"), USAGE_ERRORS.values(), ids=USAGE_ERRORS)
def test_usage_errors(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(argv)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_a_missing_hostfile_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--hostfile", "/nowhere"]) == 2
    assert "tests.gpu: error: The hostfile /nowhere can't be read" in capsys.readouterr().err


@pytest.mark.mpi
@pytest.mark.more
def test_gpus_that_tensorflow_does_not_see_fail_the_claims(
    fake_driver: FakeDriver, run_command, tmp_path: Path
) -> None:
    argv = [sys.executable, "-m", "tests.gpu", "--folder", str(tmp_path), "--only", "binding"]
    environ = {**fake_driver.environ(_GPUS), "CUDA_VISIBLE_DEVICES": None}
    done = run_command(argv, timeout_s=90, env=environ)
    assert done.returncode == 1, done
    assert done.stdout.startswith("localhost: 2 GPUs (NVIDIA H100)\nbinding: fail (")
    assert "rank 1 uses 0 GPUs" in done.stdout
    assert "1 claim: 1 fail" in done.stdout
    assert "There is no GPU" not in done.stdout


@pytest.fixture
def on_cpus(forked_python: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the environment of test programs and forked ranks for the jobs of the suite."""
    monkeypatch.setattr(jobs, "PYTHON", forked_python)
    for name, value in clean_environment().items():
        monkeypatch.setenv(name, value)


def run_suite(folder: Path, names: list[str]) -> dict[str, Result]:
    file = folder / "results.json"
    argv = ["--folder", str(folder), "--json", str(file), "--limit-s", str(300 * PATIENCE)]
    code = main([*argv, "--only", *names])
    content = json.loads(file.read_text())
    results = {one["name"]: Result(**one) for one in content["results"]}
    assert code == 0, results
    assert content["hardware"]["hosts"][0]["gpus"] == 0
    assert content["versions"]["keras"]
    return results


@pytest.mark.mpi
@pytest.mark.essential
@pytest.mark.usefixtures("on_cpus")
def test_the_suite_on_cpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = run_suite(tmp_path, ["equal", "check", "binding", "pace"])
    assert {name: result.verdict for name, result in results.items()} == {
        "check": "pass",
        "binding": "not run",
        "equal": "pass",
        "pace": "no verdict",
    }
    assert "TensorFlow's ring" in results["equal"].measured
    assert results["binding"].measured == "no GPU"
    assert "== localhost: environment ==" in (tmp_path / "report.txt").read_text()
    shown = capsys.readouterr().out
    assert shown.startswith("localhost: 0 GPUs\n")
    assert "4 claims: 2 pass, 1 no verdict, 1 not run" in shown


@pytest.mark.mpi
@pytest.mark.more
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("on_cpus")
def test_the_other_claims_on_cpus(tmp_path: Path) -> None:
    results = run_suite(
        tmp_path, ["killed", "elastic", "mixed", "compiled", "compressed", "overlap"]
    )
    assert {name: result.verdict for name, result in results.items()} == {
        "killed": "pass",
        "elastic": "pass",
        "mixed": "pass",
        "compiled": "pass",
        "compressed": "pass",
        "overlap": "no verdict",
    }
    assert results["compressed"].values["difference"] > 1e-6, "nothing was rounded"
    assert list(tmp_path.glob("killed-*")) == []


@pytest.mark.mpi
@pytest.mark.more
@pytest.mark.usefixtures("on_cpus")
def test_the_programs_of_gpu_claims_do_not_pass_on_cpus(tmp_path: Path) -> None:
    context = Context(layout=Layout(ranks=2, gpus=0), folder=tmp_path, limit_s=60 * PATIENCE)
    tests = {claim.name: claim.test for claim in CLAIMS}
    bound = tests["binding"](context)
    assert bound.holds is False
    assert "rank 1 uses 0 GPUs; TensorFlow's ring combines gradients, not NCCL" in bound.measured
    placed = tests["placement"](context)
    assert placed.holds is False
    assert "CollectiveReduceV2 on CPU" in placed.measured
    alone, _ = jobs.run_program(
        Layout(ranks=1, gpus=0), "nccl_alone", {"hint": "ring"}, limit_s=60 * PATIENCE
    )
    assert alone == {"correct": True, "device": "/job:localhost/replica:0/task:0/device:CPU:0"}
    with pytest.raises(JobError, match="TensorFlow sees no GPU on this rank"):
        jobs.run_program(
            Layout(ranks=1, gpus=1), "nccl_alone", {"hint": "ring"}, limit_s=60 * PATIENCE
        )


_WITH_FORKED_RANKS = """
import ast, sys
from tests.gpu import jobs
from tests.gpu.__main__ import main
jobs.PYTHON = ast.literal_eval(sys.argv[1])
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.cluster
def test_the_hosts_of_a_hostfile(cluster: Cluster, forked_python: list[str]) -> None:
    hosts = cluster.folder / "hosts"
    hosts.write_text("node1 slots=1\nnode2 slots=1\n")
    argv = [sys.executable, "-c", _WITH_FORKED_RANKS, repr(forked_python), "--hostfile", str(hosts)]
    argv += ["--folder", str(cluster.folder / "gpu"), "--only", "check", "equal"]
    env = {"PYTHONPATH": str(REPOSITORY)}
    done = cluster.run(argv, env=env, timeout_s=120)
    assert done.returncode == 0, done
    assert done.stdout.startswith("node1: 0 GPUs\nnode2: 0 GPUs\n")
    assert "2 claims: 2 pass" in done.stdout
    report = (cluster.folder / "gpu" / "report.txt").read_text()
    assert "== node1: networks ==" in report
    assert "== node2: networks ==" in report
