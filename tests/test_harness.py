"""The harness for tests on several ranks."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import pytest

from tests.agent.processes import alive, assert_all_end
from tests.harness.jobs import PATIENCE, REPOSITORY

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(180)]


@pytest.fixture
def run_tests(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, forked_python: list[str]):
    """Run test functions in a separate pytest with the harness."""

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


def test_a_failing_rank_fails_only_its_test(run_tests) -> None:
    result = run_tests(
        """
        @pytest.mark.ranks(2)
        def test_first():
            pass

        @pytest.mark.ranks(2)
        def test_second():
            print("output of", rank())
            assert rank() != 1, "rank one failed"

        @pytest.mark.ranks(2)
        def test_third():
            pass
        """
    )
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*rank 1 of 2 failed in call*", "*rank one failed*"])
    assert "rank 0 of 2 failed" not in result.stdout.str()


def test_errors_in_fixtures(run_tests) -> None:
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


def test_a_crash_fails_the_running_test(run_tests) -> None:
    result = run_tests(
        """
        @pytest.mark.ranks(2)
        def test_first():
            pass

        @pytest.mark.ranks(2)
        def test_second():
            print("output of", rank())
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
        ["*MPI job ended with exit code*", "*rank 1 of 2 was running it*", "output of 1"]
    )


def test_a_hang_times_out_shows_the_stack_and_leaves_no_processes(
    run_tests, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    result = run_tests(
        f"""
        @pytest.mark.ranks(2)
        @pytest.mark.timeout(4)
        def test_hangs():
            with open({str(pids)!r}, "a") as file:
                file.write(f"{{os.getpid()}}\\n")
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if rank() == 0:
                time.sleep(300)
        """
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            # The time-out of the session is longer.
            f"*not all ranks ended the test within {4 * PATIENCE} s*",
            "*rank 0 of 2 was running it*",
            "*in test_hangs*",
        ]
    )
    ranks = pids.read_text().split()
    assert len(ranks) == 2
    # Forks end after their placeholder processes, and take a while to free memory.
    assert_all_end(list(map(int, ranks)), within_s=10)


def test_a_crash_at_exit_fails(run_tests) -> None:
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


def test_outcomes_must_agree_between_ranks(run_tests) -> None:
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
    result.stdout.fnmatch_lines(["*ranks have different outcomes*"])


def test_files_are_removed_after_the_session(run_tests, tmp_path: Path) -> None:
    # Killed ranks remove neither Open MPI's shared memory nor a test's files.
    paths = tmp_path / "paths"
    run_tests(
        f"""
        @pytest.mark.ranks(2)
        def test_is_killed():
            from mpi4py import MPI
            MPI.COMM_WORLD.barrier()
            if rank() == 0:
                shared = os.environ["OMPI_MCA_btl_sm_backing_directory"]
                with open({str(paths)!r}, "w") as file:
                    print(shared, len(os.listdir(shared)), os.environ["TMPDIR"], file=file)
            MPI.COMM_WORLD.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        """
    ).assert_outcomes(failed=1)
    shared, files, temporary = paths.read_text().split()
    assert int(files) > 0
    assert not Path(shared).exists()
    assert not Path(temporary).exists()


def test_the_order_of_tests(run_tests, pytester: pytest.Pytester) -> None:
    few, more, starts = (
        f"import pytest\n@pytest.mark.{marker}\ndef test_it(): pass\n"
        for marker in ("ranks(2)", "ranks(3, 2)", "mpi")
    )
    pytester.makepyfile(test_a=few, test_b=more, test_c=starts + "def test_quick(): pass")
    result = run_tests("def test_one(): pass", "--collect-only", "-q")
    assert [line for line in result.outlines if "::" in line] == [
        *("test_c.py::test_quick", "test_it.py::test_one"),
        *("test_b.py::test_it[np2]", "test_b.py::test_it[np3]"),
        *("test_c.py::test_it", "test_a.py::test_it[np2]"),
    ]


def test_a_missing_mpirun_skips_or_fails(run_tests, monkeypatch) -> None:
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
    result.stdout.fnmatch_lines(["*mpirun is neither next to this Python nor on PATH*"])
    monkeypatch.setenv("HVDTRAIN_TEST_REQUIRE", "mpi")
    run_tests(body).assert_outcomes(failed=2)


STATE = """
    import json, os, random, sys, tempfile
    import numpy as np

    same = [sys.argv, __name__, __file__, sys.path[0], os.getcwd(), os.environ["EXTRA"]]
    same += [os.getpgid(0) == os.getpid(), os.isatty(0), os.isatty(1)]
    same += [os.path.isdir(tempfile.gettempdir()), len(os.listdir("/proc/self/fd"))]
    own = [hash("text"), random.random(), np.random.random()]
    os.write(1, (json.dumps([same, own, "tensorflow" in sys.modules]) + "\\n").encode())
"""


def test_a_fork_is_like_a_fresh_program(launch) -> None:
    states = {}
    for fresh in (True, False):
        done = launch(2, STATE, "argument", fresh=fresh, env={"EXTRA": "extra"})
        assert done.returncode == 0, done
        states[fresh] = [json.loads(line) for line in done.stdout.splitlines()]
    assert [same for same, _, _ in states[True]] == [same for same, _, _ in states[False]]
    assert [imported for *_, imported in states[True] + states[False]] == [False] * 2 + [True] * 2
    for one, other in zip(*(own for _, own, _ in states[False]), strict=True):
        assert one != other


@pytest.mark.parametrize(
    "ending", ["", "sys.exit(259)", "sys.exit('why')", "1 / 0", "raise KeyboardInterrupt"]
)
def test_a_fork_ends_like_a_fresh_program(launch, ending: str) -> None:
    # It runs exit functions, waits for threads, and flushes output.
    program = f"""
        import atexit, sys, threading, time

        atexit.register(print, "at exit")
        def late():
            time.sleep(0.2)
            print("late", end=" ")
        threading.Thread(target=late).start()
        print("started", end=" ")
        {ending}
    """
    ends = []
    for fresh in (True, False):
        done = launch(None, program, fresh=fresh)
        ends.append((done.returncode, done.stdout, done.stderr.splitlines()[-1:]))
    assert ends[0] == ends[1]
    assert ends[0][1] == "started late at exit\n"


def test_variables_of_python_are_respected(launch) -> None:
    done = launch(None, "import sys; print(sys.flags.dev_mode)", env={"PYTHONDEVMODE": "1"})
    assert done.stdout == "True\n", done


def test_signals_of_a_fork(launch, tmp_path: Path) -> None:
    done = launch(None, "import os; os.kill(os.getpid(), 11)")
    assert (done.returncode, done.stderr.count("Segmentation fault")) == (128 + 11, 1), done
    program = """
        import os, pathlib, signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: pathlib.Path(sys.argv[2]).touch())
        pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
        time.sleep(60)
        time.sleep(60)
    """
    pid, signalled = tmp_path / "pid", tmp_path / "signalled"
    done = launch(None, program, str(pid), str(signalled), timeout_s=2.0, may_time_out=True)
    assert done.timed_out
    assert signalled.exists()
    assert_all_end([int(pid.read_text())], within_s=10)


def test_run_command_kills_a_hanging_program_and_its_children(run_command, tmp_path) -> None:
    pid_file = tmp_path / "pid"
    program = f"""
import pathlib, subprocess
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
pathlib.Path({str(pid_file)!r}).write_text(str(child.pid))
child.wait(timeout=60)
"""
    done = run_command([sys.executable, "-c", program], timeout_s=2.0, may_time_out=True)
    assert done.timed_out
    assert not alive(int(pid_file.read_text()))


def test_backends_of_keras(run_tests, environment) -> None:
    environment("torch")
    environment("jax")
    result = run_tests(
        """
        @pytest.mark.ranks(2)
        @pytest.mark.backends("tensorflow", "torch", "jax")
        def test_backend(keras_backend):
            import keras
            assert keras.backend.backend() == keras_backend
            assert (keras_backend == "tensorflow") == ("tensorflow" in sys.modules)
            assert keras_backend != "jax" or rank() == 0

        @pytest.mark.backends("torch")
        def test_alone(keras_backend):
            assert keras_backend in sys.executable
        """
    )
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(["*rank 1 of 2 failed in call*"])
