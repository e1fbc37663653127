"""Among the ends of all ranks, the one that the others follow from; and what is said of it."""

from __future__ import annotations

import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from hvdtrain.agent.rank_report import FailureRecord, OomKills
from hvdtrain.collectives import exit_hooks
from hvdtrain.errors import CollectiveTimeoutError, PeerFailedError
from hvdtrain.launch.failure import RankExit, describe, describe_loss, exit_code, first_failure

HEADER = "Traceback (most recent call last):"
FRAME = '  File "train.py", line 3, in <module>'


def trace(*last: str) -> tuple[str, ...]:
    return (HEADER, FRAME, "    step()", *last)


def end(
    rank: int, code: int | None = 1, stderr: tuple[str, ...] = (), *, was_signalled: bool = False
) -> RankExit:
    return RankExit(rank=rank, host="node1", code=code, stderr=stderr, was_signalled=was_signalled)


PEER = trace("hvdtrain.errors.PeerFailedError: rank 2 failed: ValueError: 3")
VALUE = trace("ValueError: 3")
INTERRUPT = trace("KeyboardInterrupt")
CHAINED = (
    *trace("ValueError: 3"),
    "",
    "During handling of the above exception, another exception occurred:",
    "",
    *trace("KeyError: 'x'"),
)
CAUSED = (
    *PEER,
    "",
    "The above exception was the direct cause of the following exception:",
    "",
    *trace("my.package.StepError: 3"),
)
FROM_PEER = (
    *trace("OSError: 3"),
    "",
    "During handling of the above exception, another exception occurred:",
    "",
    *PEER,
)
# TensorFlow turns an error between ranks into one of its own.
WRAPPED_PEER = (
    *trace("tensorflow.python.framework.errors_impl.UnknownError: PeerFailedError: rank 2 failed"),
    "",
    "hvdtrain: rank 0 of 4 stops: rank 2 failed",
)
WRAPPED_TIMEOUT = (
    *trace("tensorflow.python.framework.errors_impl.UnknownError: CollectiveTimeoutError: 5 s"),
    "hvdtrain: rank 0 of 4 failed: CollectiveTimeoutError: 5 s",
)
CRASH = (
    "Fatal Python error: Segmentation fault",
    "",
    "Current thread 0x00007f2c (most recent call first):",
    '  File "train.py", line 3 in <module>',
    "",
    "Extension modules: numpy.core._multiarray_umath (total: 1)",
)
LOST = None

# The ends in the order in which they arrive, and the rank that failed first.
FIRST: dict[str, tuple[list[RankExit], int | None]] = {
    "nobody": ([], None),
    "all-well": ([end(0, 0), end(1, 0)], None),
    "well-with-a-traceback": ([end(0, 0, VALUE)], None),
    "one": ([end(0, 0), end(1, 7)], 1),
    "the-first-of-two": ([end(1, 7), end(0, 1, VALUE)], 1),
    "echo-comes-before": ([end(0, 1, PEER), end(1, 1, PEER), end(2, 1, VALUE)], 2),
    "wrapped-echo-comes-before": ([end(0, 1, WRAPPED_PEER), end(2, 1, VALUE)], 2),
    "echo-before-silent-exit": ([end(0, 1, PEER), end(2, 3)], 2),
    "echo-before-kill": ([end(0, 1, PEER), end(2, 128 + signal.SIGKILL)], 2),
    "echo-before-lost-host": ([end(0, 1, PEER), end(2, LOST)], 2),
    "only-echoes": ([end(1, 1, PEER), end(0, 1, PEER)], 1),
    "handling-an-echo": ([end(1, 1, FROM_PEER), end(0, 1, VALUE)], 0),
    "caused-by-an-echo-but-own": ([end(1, 1, CAUSED), end(0, 1, PEER)], 1),
    "signalled-before": ([end(0, 143, was_signalled=True), end(2, 1, VALUE)], 2),
    "signalled-and-interrupted": ([end(0, 1, INTERRUPT, was_signalled=True), end(2, 1, VALUE)], 2),
    "both-signalled": (
        [end(0, 1, INTERRUPT, was_signalled=True), end(2, 1, VALUE, was_signalled=True)],
        2,
    ),
    "signalled-and-echo": ([end(0, 1, PEER, was_signalled=True), end(2, 5)], 2),
    "signalled-after-its-own-words": ([end(0, 1, PEER), end(2, 1, VALUE, was_signalled=True)], 2),
    "signalled-after-its-crash": ([end(0, 1, PEER), end(2, 139, CRASH, was_signalled=True)], 2),
    "unsignalled-beats-own-words": ([end(0, 1, VALUE, was_signalled=True), end(2, 1, VALUE)], 2),
    "all-signalled": ([end(1, 143, was_signalled=True), end(0, 143, was_signalled=True)], 1),
    "lost-before-a-failure": ([end(0, LOST), end(2, 1, VALUE)], 2),
    "lost-before-an-echo": ([end(2, LOST), end(0, 1, PEER)], 2),
    "lost-before-signalled": ([end(2, LOST), end(0, 143, was_signalled=True)], 2),
    "all-lost": ([end(1, LOST), end(0, LOST)], 1),
}


@pytest.mark.parametrize(("ends", "rank"), FIRST.values(), ids=FIRST)
def test_first_failure(ends: list[RankExit], rank: int | None) -> None:
    found = first_failure(ends)
    assert (found.rank if found else None) == rank


# As faulthandler prints it.
NEVER_MET = (
    "Timeout (0:01:00)!",
    "Thread 0x00007f5250b3cb80 (most recent call first):",
    '  File "/home/me/hvdtrain/collectives/mpi_start.py", line 50 in start_mpi',
    '  File "/home/me/hvdtrain/world.py", line 64 in init',
)
TIMEOUT = trace("hvdtrain.errors.CollectiveTimeoutError: rank 3 did not arrive within 5 s")
CODES: dict[str, tuple[RankExit | None, int]] = {
    "no-failure": (None, 0),
    "own-code": (end(0, 7), 7),
    "255": (end(0, 255), 255),
    "signal": (end(0, 128 + signal.SIGSEGV, CRASH), 139),
    "lost": (end(0, LOST), 137),
    "timeout": (end(0, 1, TIMEOUT), 124),
    "timeout-through-tensorflow": (end(0, 1, WRAPPED_TIMEOUT), 124),
    "timeout-caught-before": (end(0, 1, (*TIMEOUT, *VALUE)), 1),
    "timeout-only-spoken-of": (end(0, 9, ("CollectiveTimeoutError: who?",)), 9),
    "timeout-in-the-start": (end(0, 1, NEVER_MET), 124),
    "timeout-of-the-program": (end(0, 1, NEVER_MET[:2]), 1),
    "timeout-without-dots": (end(0, 1, trace("CollectiveTimeoutError")), 124),
}


@pytest.mark.parametrize(("first", "code"), CODES.values(), ids=CODES)
def test_exit_code(first: RankExit | None, code: int) -> None:
    assert exit_code(first) == code


RECORDS: dict[str, tuple[FailureRecord, tuple[str, ...], int]] = {
    "timeout": (FailureRecord(exception="CollectiveTimeoutError"), VALUE, 124),
    "own": (FailureRecord(exception="ValueError"), TIMEOUT, 1),
    "without-words": (FailureRecord(exception="CollectiveTimeoutError"), (), 124),
}


@pytest.mark.parametrize(("told", "stderr", "code"), RECORDS.values(), ids=RECORDS)
def test_what_a_program_told_counts_more_than_what_it_printed(
    told: FailureRecord, stderr: tuple[str, ...], code: int
) -> None:
    assert exit_code(RankExit(rank=0, host="node1", code=1, told=told, stderr=stderr)) == code


def test_without_last_words_the_record_is_shown() -> None:
    told = FailureRecord(exception="ValueError", traceback="\n".join(VALUE))
    described = describe(RankExit(rank=0, host="node1", code=1, told=told)).splitlines()
    assert described[1:] == ["its last words:", *("  " + line for line in VALUE)]
    printed = RankExit(rank=0, host="node1", code=1, told=told, stderr=("usage: train.py",))
    assert describe(printed).splitlines()[1:] == ["its last words:", "  usage: train.py"]


def killed(**counts: int) -> RankExit:
    code = 128 + signal.SIGKILL
    return RankExit(rank=0, host="node1", code=code, kills=OomKills(**counts))


HOW: dict[str, tuple[RankExit, str]] = {
    "code": (end(0, 7), "exit code 7"),
    "signal": (end(0, 128 + signal.SIGTERM), "ended by signal 15 (SIGTERM)"),
    "out-of-memory": (
        killed(in_group=1, on_host=1, limit_bytes=96 << 20),
        "ended by signal 9 (SIGKILL): killed by the kernel for lack of memory (limit of its "
        "cgroup: 96 MiB)",
    ),
    "out-of-memory-of-the-host": (
        killed(in_group=2, on_host=3),
        "ended by signal 9 (SIGKILL): killed by the kernel for lack of memory (its cgroup shows "
        "no limit, so the host's may have run out)",
    ),
    "perhaps-out-of-memory": (
        killed(on_host=1),
        "ended by signal 9 (SIGKILL); the kernel killed a process on that host for lack of memory "
        "meanwhile, perhaps this one",
    ),
    "perhaps-a-child-in-another-group": (
        killed(in_group=0, on_host=1),
        "ended by signal 9 (SIGKILL); the kernel killed a process on that host for lack of memory "
        "meanwhile, perhaps this one",
    ),
    "killed-by-others": (
        killed(in_group=0, on_host=0, limit_bytes=96 << 20),
        "ended by signal 9 (SIGKILL); by a person or a program, not by the kernel for lack of "
        "memory",
    ),
    "killed-by-whom": (
        end(0, 128 + signal.SIGKILL),
        "ended by signal 9 (SIGKILL); the kernel does that when memory runs out, but its counts "
        "can't be read there (dmesg on the host may tell)",
    ),
    "no-such-signal": (end(0, 255), "exit code 255"),
    "timeout": (end(0, 1, TIMEOUT), "it waited too long for other ranks; exit code 1"),
    "mpi": (
        end(0, 195, ("[b:0] *** An error occurred in PMIx Event Notification",)),
        "MPI ended it, as another rank or what started it was gone; exit code 195",
    ),
    "lost": (
        end(0, LOST),
        "the connection to it was lost; its host died, or its processes were killed (as those of "
        "a container may be that runs out of memory)",
    ),
}


@pytest.mark.parametrize(("first", "how"), HOW.values(), ids=HOW)
def test_how_it_ended_is_told(first: RankExit, how: str) -> None:
    told = describe(first).splitlines()[0]
    assert told == f"rank 0 on node1 failed first: {how}"


def test_who_lacks_memory_is_told_where_to_get_it() -> None:
    for counts in ({"in_group": 1}, {"on_host": 1}):
        advice = describe(killed(**counts)).splitlines()[1]
        assert "smaller batch" in advice
        assert "--mem" in advice
    for first in (killed(in_group=0, on_host=0), killed(), end(0, 137)):
        assert len(describe(first).splitlines()) == 1


def test_a_killed_child_is_told_of_as_well() -> None:
    kills = OomKills(in_group=1, on_host=1, limit_bytes=96 << 20)
    told = describe(RankExit(rank=0, host="node1", code=1, stderr=VALUE, kills=kills)).splitlines()
    assert told[0] == "rank 0 on node1 failed first: exit code 1"
    assert told[1] == (
        "before, the kernel killed a process in its cgroup for lack of memory (limit of its "
        "cgroup: 96 MiB)"
    )
    assert "smaller batch" in told[2]
    assert told[3] == "its last words:"
    # Elsewhere on the host is too far off for a program that says itself what went wrong.
    other = RankExit(rank=0, host="node1", code=1, kills=OomKills(in_group=0, on_host=1))
    assert describe(other) == "rank 0 on node1 failed first: exit code 1"


def excerpt(*stderr: str) -> list[str]:
    told = describe(end(0, 1, stderr)).splitlines()
    assert told[1:2] in ([], ["its last words:"])
    assert all(line.startswith("  ") for line in told[2:])
    return [line[2:] for line in told[2:]]


def test_without_stderr_there_are_no_last_words() -> None:
    assert describe(end(0, 7)) == "rank 0 on node1 failed first: exit code 7"


def test_a_traceback_is_shown_from_its_beginning() -> None:
    warnings = [f"W{number}: slow" for number in range(100)]
    for lines in (VALUE, CHAINED, CAUSED, WRAPPED_PEER):
        assert excerpt(*warnings, *lines) == list(lines)
    assert excerpt(*warnings, *CRASH) == list(CRASH[:-1]), "all but the list of extension modules"


def test_without_a_traceback_the_last_lines_are_shown() -> None:
    assert excerpt("usage: train.py", "train.py: error: no --data") == [
        "usage: train.py",
        "train.py: error: no --data",
    ]
    assert excerpt(*map(str, range(100))) == [str(number) for number in range(85, 100)]


def test_a_long_excerpt_keeps_both_ends() -> None:
    frames = [f"  frame {number}" for number in range(98)]
    shown = excerpt(HEADER, *frames, "RecursionError: too deep")
    assert len(shown) == 61
    assert shown[:2] == [HEADER, "  frame 0"]
    assert shown[30] == "... 40 lines ..."
    assert shown[-2:] == ["  frame 97", "RecursionError: too deep"]
    fits = [HEADER, *frames[:58], "RecursionError: too deep"]
    assert excerpt(*fits) == fits


@pytest.mark.parametrize(
    "code",
    [
        "import hvdtrain; raise hvdtrain.PeerFailedError('rank 2 failed')",
        "import hvdtrain\ntry: 1 / 0\nfinally: raise hvdtrain.PeerFailedError('a\\nb: c')",
        "import hvdtrain\ntry: 1 / 0\nexcept Exception as e: raise hvdtrain.PeerFailedError from e",
    ],
)
def test_pythons_own_tracebacks_are_understood(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, timeout=30, check=False
    )
    echo = end(0, 1, tuple(done.stderr.splitlines()))
    assert first_failure([echo, end(1, 7)]) == end(1, 7)


@pytest.mark.parametrize("error", [PeerFailedError("rank 2 failed"), CollectiveTimeoutError("5 s")])
def test_what_ranks_say_at_their_end_is_understood(
    error: Exception, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = SimpleNamespace(
        closed=False, member=0, numbers=range(4), last_error=error, fail=lambda reason: None
    )
    monkeypatch.setattr(exit_hooks, "_current", engine)
    monkeypatch.setattr(exit_hooks, "FOLLOWER_PAUSE_S", 0.0)
    monkeypatch.setattr(exit_hooks, "_end_within", lambda seconds: None)
    wrapped = RuntimeError(f"2 root error(s) found: {error}")
    records: list[FailureRecord] = []

    def tell(cause: BaseException, error: BaseException) -> None:
        assert error is wrapped
        records.append(FailureRecord(exception=type(cause).__name__))

    exit_hooks._on_exception(sys.__excepthook__, tell, RuntimeError, wrapped, None)
    told = end(0, 1, tuple(capsys.readouterr().err.splitlines()))
    follows = isinstance(error, PeerFailedError)
    for end_of_it in (told, RankExit(rank=0, host="node1", code=1, told=records[0])):
        assert first_failure([end_of_it, end(1, 7)]) == (end(1, 7) if follows else end_of_it)
        assert exit_code(end_of_it) == (1 if follows else 124)


KILLED = 128 + signal.SIGKILL


@pytest.mark.parametrize(
    ("one", "lost"),
    [
        (end(2, KILLED), True),
        (end(2, 128 + signal.SIGSEGV), True),
        (end(2, 1), False),
        (end(2, 75), False),
        (end(2, 255), False),
        (end(2, 0), False),
        (end(2, None), False),
        (end(2, KILLED, was_signalled=True), False),
    ],
)
def test_is_loss(one: RankExit, lost: bool) -> None:
    assert one.is_loss is lost


def test_describe_loss() -> None:
    told = describe_loss(end(2, KILLED), 41, 3, enough=True)
    assert told == "rank 2 on node1 was lost (SIGKILL) after step 41; 3 ranks go on"
    told = describe_loss(end(2, KILLED), None, 1, enough=True)
    assert told == "rank 2 on node1 was lost (SIGKILL); 1 rank goes on"
    memory = RankExit(rank=2, host="node1", code=KILLED, kills=OomKills(in_group=1))
    told = describe_loss(memory, 41, 3, enough=True)
    assert told.startswith("rank 2 on node1 was lost (SIGKILL, for lack of memory) after step 41")
    told = describe_loss(end(2, KILLED), 41, 1, enough=False)
    assert told == "rank 2 on node1 was lost (SIGKILL) after step 41; 1 rank left: too few"
