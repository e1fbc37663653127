"""Messages between single ranks: nothing lost or mistaken for another, and every wait ends."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import numpy as np
import pytest

from hvdtrain.collectives import fusion as module
from hvdtrain.collectives.engine import single_engine
from hvdtrain.collectives.point_to_point import PointToPoint
from hvdtrain.errors import CollectiveTimeoutError, ConfigurationError
from tests.collectives.engines import EngineCase, everyone, new_engine, shared_engine
from tests.collectives.test_exit_hooks import LIMIT_S, START, _said

TAG, OTHER_TAG = 1, 2
two_or_three = pytest.mark.ranks(2, 3)


def _case(size: int) -> EngineCase:
    return EngineCase(kind="mpi", hosts=(0,) * size)


@pytest.fixture
def engine(rank_count: int) -> Any:
    """Shared with other tests."""
    return shared_engine(_case(rank_count))


def _noise(seed: int, shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 100, shape).astype(dtype)


def _others(engine: Any) -> list[int]:
    return [rank for rank in range(engine.size) if rank != engine.rank]


def _exchange(engine: Any, messages: PointToPoint, shape: tuple[int, ...], dtype: str) -> None:
    """Everyone to everyone, all at once."""
    pending, rooms, kept = [], {}, []
    for other in _others(engine):
        rooms[other] = np.zeros(shape, dtype)
        pending += messages.start_receive(rooms[other], other, TAG)
        kept.append(_noise(10 * engine.rank + other, shape, dtype))
        pending += messages.start_send(kept[-1], other, TAG)
    messages.wait(pending, "the test")
    for other, room in rooms.items():
        np.testing.assert_array_equal(room, _noise(10 * other + engine.rank, shape, dtype))


@two_or_three
@pytest.mark.parametrize("dtype", ["float32", "uint8", "float64", "bool"])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0,), (2_000_003,)])
def test_exchange(engine: Any, shape: tuple[int, ...], dtype: str) -> None:
    """Up to several megabytes, which travel only once both sides are there; and nothing at all."""
    _exchange(engine, engine.messages(), shape, dtype)


@two_or_three
def test_more_than_one_message_of_mpi_holds(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MESSAGE_BYTES", 1 << 10)
    messages = engine.messages()
    assert len(messages.start_send(np.zeros(0), _others(engine)[0], TAG)) == 0
    _exchange(engine, messages, (2 * 1024,), "uint8")
    _exchange(engine, messages, (50 * 1024 + 1,), "float32")


@two_or_three
def test_any_source(engine: Any) -> None:
    """A message comes with its sender; others of another tag are left where they are."""
    messages = engine.messages()
    count = 20
    if engine.rank:
        sent = [np.array([engine.rank, n]) for n in range(count)]
        other = np.array([-engine.rank, -1])
        pending = messages.start_send(other, 0, OTHER_TAG)
        pending += [r for words in sent for r in messages.start_send(words, 0, TAG)]
        messages.wait(pending, "the test")
        return
    words = np.zeros(2, np.int64)
    expected = dict.fromkeys(_others(engine), 0)
    for _ in range(count * len(expected)):
        source = messages.receive_any(words, TAG, "the test")
        assert words.tolist() == [source, expected[source]], "in the order they were sent"
        expected[source] += 1
    assert set(expected.values()) == {count}
    sources = [messages.receive_any(words, OTHER_TAG, "the test") for _ in expected]
    assert sorted(sources) == sorted(expected)


@two_or_three
def test_messages_and_operations_do_not_meet(engine: Any) -> None:
    """Operations go on while messages lie there, also those of other ``PointToPoint``."""
    one, two = engine.messages(), engine.messages()
    other = (engine.rank + 1) % engine.size
    before = (engine.rank - 1) % engine.size
    sent = [np.full(100, number) for number in (1, 2)]
    pending = one.start_send(sent[0], other, TAG)
    pending += two.start_send(sent[1], other, TAG)
    total = engine.allreduce(np.ones(5000), name="gradients")
    np.testing.assert_array_equal(total, np.full(5000, engine.size))
    assert len(engine.allgather(np.arange(3))) == 3 * engine.size
    rooms = [np.zeros(100, np.int64) for _ in "ab"]
    two.wait(two.start_receive(rooms[1], before, TAG), "the test")
    one.wait(one.start_receive(rooms[0], before, TAG), "the test")
    one.wait(pending, "the test")
    assert [set(room.tolist()) for room in rooms] == [{1}, {2}]


@two_or_three
def test_nothing_to_wait_for(engine: Any) -> None:
    messages = engine.messages()
    messages.wait([], "the test")
    messages.wait([], "the test", endless=True)
    empty = np.zeros((0, 4))
    messages.wait(messages.start_receive(empty, _others(engine)[0], TAG), "the test")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", ["wait", "receive_any"])
def test_silent_peer(rank_count: int, way: str) -> None:
    """Whoever waits too long says in what; what comes afterwards is still there to be taken."""
    engine = new_engine(_case(rank_count), timeout_s=0.5)
    messages = engine.messages()
    words = np.array([5.0])
    if engine.rank == 1:
        everyone(2, "the other has given up")
        messages.wait(messages.start_send(words, 0, TAG), "the test")
        return
    room = np.zeros(1)
    pending = messages.start_receive(room, 1, TAG) if way == "wait" else []
    told = r"rank 0 waited 0\.5 s in push, for the test: rank 1 waits in no collective"
    with pytest.raises(CollectiveTimeoutError, match=told):
        _wait(messages, room, pending, "push, for the test")
    everyone(2, "the other has given up")
    _wait(messages, room, pending, "the test")
    assert room == words


def _wait(messages: PointToPoint, room: np.ndarray, pending: list[Any], waiting_in: str) -> None:
    """For what is pending, or for a message from whomever."""
    if pending:
        messages.wait(pending, waiting_in)
    else:
        messages.receive_any(room, TAG, waiting_in)


@pytest.mark.ranks(2)
def test_endless_wait(rank_count: int) -> None:
    """Longer than the time-out, where the other side gives up by itself."""
    engine = new_engine(_case(rank_count), timeout_s=0.2)
    messages = engine.messages()
    words, room = np.array([5.0]), np.zeros(1)
    if engine.rank == 1:
        with pytest.raises(CollectiveTimeoutError, match="rank 0 waits in the end, for the test"):
            messages.receive_any(room, OTHER_TAG, "the test")
        messages.wait(messages.start_send(words, 0, TAG), "the test")
    else:
        pending = messages.start_receive(room, 1, TAG)
        messages.wait(pending, "the end, for the test", endless=True)
        assert room == words


def test_alone() -> None:
    with pytest.raises(ConfigurationError, match="Messages need at least two ranks"):
        single_engine().messages()


WAITS = {
    "wait": "messages.wait(messages.start_receive(room, 1, 1), 'the test')",
    "endless": "messages.wait(messages.start_receive(room, 1, 1), 'the test', endless=True)",
    "large-send": "messages.wait(messages.start_send(np.ones(1 << 20), 1, 1), 'the test')",
    "any-source": "messages.receive_any(room, 1, 'the test')",
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
@pytest.mark.parametrize("how", ["failed", "ended"])
def test_peer_that_does_not_come(launch, how: str, wait: str) -> None:
    """It failed, or its program is over: nobody waits for it until the time is over."""
    body = f"""
        messages = engine.messages()
        room = np.zeros(1)
        if rank == 1:
            time.sleep(0.5)
            {"raise ValueError('mistake')" if how == "failed" else "sys.exit()"}
        {wait}
        print("not reached")
    """
    done = launch(2, START + textwrap.dedent(body))
    assert done.returncode == 1, done
    assert done.seconds < LIMIT_S
    assert done.stdout == ""
    said = _said(done)
    if how == "failed":
        assert said[1] == "failed: ValueError: mistake"
        assert said[0].startswith("stops: rank 1 failed: ValueError: mistake (")
        assert said[0].endswith("Rank 0 was waiting for it in the test and stops too.")
    else:
        assert said[0].startswith("stops: rank 1 ended its program while rank 0 waits for it in ")


DEATH = """
    import signal
    import threading
    from hvdtrain.errors import PeerLostError

    messages = engine.messages()
    room, large = np.zeros(1), np.ones(1 << 20)
    engine.barrier()


    def die():
        os.kill(os.getpid(), signal.SIGKILL)


    def give_up(wait):
        try:
            wait()
        except PeerLostError as error:
            return error.rank, str(error)
        return "nothing was lost"
"""


@pytest.fixture
def survivors(run_command, mpirun, forked_python):
    """Run a program in which rank 2 of three dies; what ranks 0 and 1 said, by rank."""

    def run(body: str) -> dict[int, str]:
        script = START + textwrap.dedent(DEATH) + textwrap.dedent(body)
        argv = mpirun(3, [*forked_python, "-c", script])
        environment = {"HVDTRAIN_ELASTIC": "1"}
        argv = [argv[0], "--with-ft", "ulfm", *argv[1:]]
        done = run_command(argv, timeout_s=90, env=environment)
        said = dict(re.findall(r"^(\d) says (.*)$", done.stdout, re.M))
        assert sorted(said) == ["0", "1"], done
        assert done.seconds < LIMIT_S
        return {int(rank): text for rank, text in said.items()}

    return run


@pytest.mark.parametrize("wait", [*WAITS, "another-send", "another-receive"])
def test_peer_that_died(survivors, wait: str) -> None:
    """Whoever has a message for it, or waits for one, is told; the others exchange theirs."""
    waits = {name: text.replace("1, 1)", "2, 1)") for name, text in WAITS.items()}
    waits["any-source"] = (
        "messages.wait(messages.start_receive(room, 2, 1), 'the test') "
        "if messages.receive_any(room, 1, 'the test', unless=lambda: 2 in messages.lost) is None "
        "else None"
    )
    again = "(give_up(lambda: {0}), {0})"
    waits["another-send"] = again.format(waits["large-send"])
    waits["another-receive"] = again.format(waits["wait"])
    wait = waits[wait].replace("np.ones(1 << 20)", "large")
    body = f"""
        if rank == 2:
            time.sleep(0.3)
            die()
        if rank == 0:
            told = give_up(lambda: {wait})
        other = 1 - rank
        pending = messages.start_receive(room, other, 3)
        pending += messages.start_send(np.array([10.0 + rank]), other, 3)
        messages.wait(pending, "the other")
        if rank == 1:
            told = room.tolist()
        os.write(1, f"{{rank}} says {{told}}\\n".encode())
        engine.barrier()
    """
    said = survivors(body)
    assert said[1] == "[10.0]"
    assert said[0].startswith('(2, "rank 2 died while rank 0 '), said[0]
    assert "Start the job again" in said[0]


def test_messages_after_a_loss(survivors) -> None:
    """Those that there were go on, and new ones know ranks by their first numbers."""
    said = survivors("""
        if rank == 1:
            die()
        engine.barrier()
        for ways in (messages, engine.messages()):
            other = 2 - rank
            pending = ways.start_receive(room, other, 3)
            pending += ways.start_send(np.array([10.0 + rank]), other, 3)
            ways.wait(pending, "the other")
            assert room == 10 + other
            assert ways.lost == {1}
            if rank:
                ways.wait(ways.start_send(large, 0, 4), "the other")
            else:
                assert ways.receive_any(large, 4, "the other") == 2
        memory = engine.share(100)
        assert sorted(memory) == [0, 2]
        memory[rank][:] = rank
        engine.barrier()
        assert (memory[2] == 2).all()
        os.write(1, f"{rank // 2} says {engine.member}\\n".encode())
        engine.barrier()
    """)
    assert said == {0: "0", 1: "2"}
