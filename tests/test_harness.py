"""The harness itself: a pass must mean that every rank passed."""

from __future__ import annotations

import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.harness.jobs import REPOSITORY

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(180)]


@pytest.fixture
def run_tests(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """Run the given test functions in a pytest of their own that uses the harness."""

    def run(body: str, *arguments: str) -> pytest.RunResult:
        monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
        pytester.makeconftest('pytest_plugins = ("tests.harness.plugin",)')
        pytester.makepyprojecttoml("[tool.pytest.ini_options]\ntimeout = 6\n")
        header = """
            import os, signal, sys, time
            import pytest

            def rank():
                return int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
        """
        pytester.makepyfile(test_it=textwrap.dedent(header) + textwrap.dedent(body))
        return pytester.runpytest_subprocess("-rA", "-p", "no:cacheprovider", *arguments)

    return run


def test_all_ranks_pass_in_one_job(run_tests) -> None:
    result = run_tests(
        """
        JOBS = []

        @pytest.fixture(scope="module")
        def job():
            return os.getppid()

        @pytest.mark.ranks(1, 2, 3)
        @pytest.mark.parametrize("value", [1, 2])
        def test_size(rank_count, value, job):
            if rank_count > 1:
                assert rank() < rank_count
                JOBS.append(job)

        @pytest.mark.ranks(2)
        def test_same_processes():
            assert len(JOBS) == 2

        def test_alone():
            assert "OMPI_COMM_WORLD_RANK" not in os.environ
        """
    )
    result.assert_outcomes(passed=8)


def test_a_rank_that_fails_fails_the_test_and_the_next_ones_run(run_tests) -> None:
    result = run_tests(
        """
        @pytest.mark.ranks(2)
        def test_first():
            pass

        @pytest.mark.ranks(2)
        def test_second():
            print("seen by", rank())
            assert rank() != 1, "rank one says no"

        @pytest.mark.ranks(2)
        def test_third():
            pass
        """
    )
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*rank 1 of 2 failed in call*", "*rank one says no*"])
    assert "rank 0 of 2 failed" not in result.stdout.str()


def test_errors_in_fixtures_count(run_tests) -> None:
    result = run_tests(
        """
        @pytest.fixture
        def broken_end():
            yield
            assert rank() == 0, "teardown fails"

        @pytest.mark.ranks(2)
        def test_it(broken_end):
            pass
        """
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*rank 1 of 2 failed in teardown*", "*teardown fails*"])


def test_a_crash_fails_the_test_that_ran(run_tests) -> None:
    result = run_tests(
        """
        @pytest.mark.ranks(2)
        def test_first():
            pass

        @pytest.mark.ranks(2)
        def test_second():
            print("last words of", rank())
            if rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(30)

        @pytest.mark.ranks(2)
        def test_third():
            pass
        """
    )
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        ["*MPI job ended with exit code*", "*rank 1 of 2 was still in it*", "last words of 1"]
    )


def test_a_hang_ends_in_time_and_shows_where(run_tests) -> None:
    started = time.monotonic()
    result = run_tests(
        """
        @pytest.mark.ranks(2)
        def test_hangs():
            if rank() == 0:
                time.sleep(300)

        @pytest.mark.ranks(2)
        @pytest.mark.timeout(20)
        def test_slow():
            time.sleep(7)
        """
    )
    assert time.monotonic() - started < 60
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["*not every rank was done after 6 s*", "*rank 0 of 2 was still in it*", "*in test_hangs*"]
    )


def test_a_crash_at_exit_is_seen(run_tests) -> None:
    result = run_tests(
        """
        import atexit

        @pytest.mark.ranks(2)
        def test_first():
            if rank() == 1:
                atexit.register(os._exit, 7)
        """
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*exited with code 7 after all tests had passed*"])


def test_skips_and_expected_failures_must_be_the_same_everywhere(run_tests) -> None:
    result = run_tests(
        """
        @pytest.mark.ranks(2)
        def test_skipped():
            pytest.skip("no reason")

        @pytest.mark.ranks(2)
        @pytest.mark.xfail(reason="known")
        def test_expected():
            raise AssertionError

        @pytest.mark.ranks(2)
        def test_skipped_once():
            if rank() == 0:
                pytest.skip("only here")
        """
    )
    result.assert_outcomes(skipped=1, xfailed=1, failed=1)
    result.stdout.fnmatch_lines(["*ranks do not agree*"])


def test_no_process_outlives_a_session(run_tests, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    run_tests(
        f"""
        @pytest.mark.ranks(2)
        def test_hangs():
            with open({str(pids)!r}, "a") as file:
                file.write(f"{{os.getpid()}}\\n")
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(300)
        """
    ).assert_outcomes(failed=1)
    found = pids.read_text().split()
    assert len(found) == 2
    assert not [pid for pid in found if _runs(pid)]


def _runs(pid: str) -> bool:
    """False also for a process that has ended but that nobody has reaped yet."""
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_without_mpirun_a_test_is_skipped_or_fails(run_tests, monkeypatch) -> None:
    monkeypatch.setattr("tests.harness.jobs._mpirun", lambda: None)
    body = """
        import tests.harness.jobs
        tests.harness.jobs._mpirun = lambda: None

        @pytest.mark.ranks(2)
        def test_it():
            pass

        def test_launch(launch):
            launch(2, "pass")
    """
    monkeypatch.delenv("HVDTRAIN_TEST_REQUIRE", raising=False)
    result = run_tests(body)
    result.assert_outcomes(skipped=2)
    result.stdout.fnmatch_lines(["*mpirun is neither beside this Python nor on PATH*"])
    monkeypatch.setenv("HVDTRAIN_TEST_REQUIRE", "mpi")
    run_tests(body).assert_outcomes(failed=2)


def test_launch_returns_what_the_job_did(launch) -> None:
    done = launch(
        2,
        """
        import os, sys
        rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]
        print("rank", rank, sys.argv[1], os.environ["EXTRA"])
        print("to stderr", file=sys.stderr)
        sys.exit(3 if rank == "1" else 0)
        """,
        "argument",
        env={"EXTRA": "extra"},
    )
    assert done.returncode == 3, done
    assert "rank 1 argument extra" in done.stdout
    assert "to stderr" in done.stderr
    assert 0 < done.seconds < 30


def test_launch_alone_has_no_launcher(launch) -> None:
    done = launch(None, "import os; print([n for n in os.environ if n.startswith('OMPI_COMM')])")
    assert (done.returncode, done.stdout) == (0, "[]\n")


def test_run_command_ends_a_program_that_hangs_with_its_children(run_command, tmp_path) -> None:
    pid_file = tmp_path / "pid"
    program = f"""
import pathlib, subprocess
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
pathlib.Path({str(pid_file)!r}).write_text(str(child.pid))
child.wait(timeout=60)
"""
    done = run_command([sys.executable, "-c", program], timeout_s=2.0, may_time_out=True)
    assert done.timed_out
    assert done.seconds < 10
    assert not _runs(pid_file.read_text())
