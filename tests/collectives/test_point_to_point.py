"""Point-to-point messages, and time-outs and failures of waits."""

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
from tests.collectives.test_exit_hooks import LIMIT_S, START, _errors

TAG, OTHER_TAG = 1, 2
two_or_three = pytest.mark.ranks(2, 3)


def _case(size: int) -> EngineCase:
    return EngineCase(kind="mpi", hosts=(0,) * size)


@pytest.fixture
def engine(rank_count: int) -> Any:
    return shared_engine(_case(rank_count))


def _noise(seed: int, shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 100, shape).astype(dtype)


def _others(engine: Any) -> list[int]:
    return [rank for rank in range(engine.size) if rank != engine.rank]


def _exchange(engine: Any, messages: PointToPoint, shape: tuple[int, ...], dtype: str) -> None:
    """Exchange messages between all ranks at the same time."""
    pending, buffers, kept = [], {}, []
    for other in _others(engine):
        buffers[other] = np.zeros(shape, dtype)
        pending += messages.start_receive(buffers[other], other, TAG)
        kept.append(_noise(10 * engine.rank + other, shape, dtype))
        pending += messages.start_send(kept[-1], other, TAG)
    messages.wait(pending, "the test")
    for other, buffer in buffers.items():
        np.testing.assert_array_equal(buffer, _noise(10 * other + engine.rank, shape, dtype))


@two_or_three
@pytest.mark.parametrize("dtype", ["float32", "uint8", "float64", "bool"])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0,), (2_000_003,)])
def test_messages_of_all_sizes(engine: Any, shape: tuple[int, ...], dtype: str) -> None:
    _exchange(engine, engine.messages(), shape, dtype)


@two_or_three
def test_large_arrays_are_split_into_messages(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MESSAGE_BYTES", 1 << 10)
    messages = engine.messages()
    assert len(messages.start_send(np.zeros(0), _others(engine)[0], TAG)) == 0
    _exchange(engine, messages, (2 * 1024,), "uint8")
    _exchange(engine, messages, (50 * 1024 + 1,), "float32")


@two_or_three
def test_receive_any_returns_the_sender_and_respects_tags(engine: Any) -> None:
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
        assert words.tolist() == [source, expected[source]], "not in the order of sending"
        expected[source] += 1
    assert set(expected.values()) == {count}
    sources = [messages.receive_any(words, OTHER_TAG, "the test") for _ in expected]
    assert sorted(sources) == sorted(expected)


@two_or_three
def test_channels_and_operations_are_independent(engine: Any) -> None:
    one, two = engine.messages(), engine.messages()
    other = (engine.rank + 1) % engine.size
    before = (engine.rank - 1) % engine.size
    sent = [np.full(100, number) for number in (1, 2)]
    pending = one.start_send(sent[0], other, TAG)
    pending += two.start_send(sent[1], other, TAG)
    total = engine.allreduce(np.ones(5000), name="gradients")
    np.testing.assert_array_equal(total, np.full(5000, engine.size))
    assert len(engine.allgather(np.arange(3))) == 3 * engine.size
    buffers = [np.zeros(100, np.int64) for _ in "ab"]
    two.wait(two.start_receive(buffers[1], before, TAG), "the test")
    one.wait(one.start_receive(buffers[0], before, TAG), "the test")
    one.wait(pending, "the test")
    assert [set(buffer.tolist()) for buffer in buffers] == [{1}, {2}]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", ["wait", "receive_any"])
def test_a_wait_times_out(rank_count: int, way: str) -> None:
    """A later message can still be received."""
    engine = new_engine(_case(rank_count), timeout_s=0.5)
    messages = engine.messages()
    words = np.array([5.0])
    if engine.rank == 1:
        everyone(2, "the other has given up")
        messages.wait(messages.start_send(words, 0, TAG), "the test")
        return
    buffer = np.zeros(1)
    pending = messages.start_receive(buffer, 1, TAG) if way == "wait" else []
    text = r"rank 0 waited 0\.5 s in push, for the test: rank 1 is not waiting in any collective"
    with pytest.raises(CollectiveTimeoutError, match=text):
        _wait(messages, buffer, pending, "push, for the test")
    everyone(2, "the other has given up")
    _wait(messages, buffer, pending, "the test")
    assert buffer == words


def _wait(messages: PointToPoint, buffer: np.ndarray, pending: list[Any], waiting_in: str) -> None:
    if pending:
        messages.wait(pending, waiting_in)
    else:
        messages.receive_any(buffer, TAG, waiting_in)


@pytest.mark.ranks(2)
def test_an_endless_wait_has_no_timeout(rank_count: int) -> None:
    engine = new_engine(_case(rank_count), timeout_s=0.2)
    messages = engine.messages()
    words, buffer = np.array([5.0]), np.zeros(1)
    if engine.rank == 1:
        with pytest.raises(CollectiveTimeoutError, match="rank 0 waits in the end, for the test"):
            messages.receive_any(buffer, OTHER_TAG, "the test")
        messages.wait(messages.start_send(words, 0, TAG), "the test")
    else:
        pending = messages.start_receive(buffer, 1, TAG)
        messages.wait(pending, "the end, for the test", endless=True)
        assert buffer == words


def test_a_single_process_has_no_messages() -> None:
    with pytest.raises(ConfigurationError, match="Messages need at least two ranks"):
        single_engine().messages()


WAITS = {
    "wait": "messages.wait(messages.start_receive(buffer, 1, 1), 'the test')",
    "endless": "messages.wait(messages.start_receive(buffer, 1, 1), 'the test', endless=True)",
    "large-send": "messages.wait(messages.start_send(np.ones(1 << 20), 1, 1), 'the test')",
    "any-source": "messages.receive_any(buffer, 1, 'the test')",
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
@pytest.mark.parametrize("how", ["failed", "ended"])
def test_a_wait_ends_when_the_peer_fails_or_exits(launch, how: str, wait: str) -> None:
    body = f"""
        messages = engine.messages()
        buffer = np.zeros(1)
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
    errors = _errors(done)
    if how == "failed":
        assert errors[1] == "failed: ValueError: mistake"
        assert errors[0].startswith("stops: rank 1 failed: ValueError: mistake (")
        assert errors[0].endswith("Rank 0 was waiting for it in the test and stops too.")
    else:
        assert errors[0].startswith("stops: rank 1 ended its program while rank 0 waits for it in ")


DEATH = """
    import signal
    import threading
    from hvdtrain.errors import PeerLostError

    messages = engine.messages()
    buffer, large = np.zeros(1), np.ones(1 << 20)
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
    """Run a program in which one of three ranks dies, and return the other ranks' output."""

    def run(body: str) -> dict[int, str]:
        script = START + textwrap.dedent(DEATH) + textwrap.dedent(body)
        argv = mpirun(3, [*forked_python, "-c", script])
        environment = {"HVDTRAIN_ELASTIC": "1"}
        argv = [argv[0], "--with-ft", "ulfm", *argv[1:]]
        done = run_command(argv, timeout_s=90, env=environment)
        output = dict(re.findall(r"^(\d) prints (.*)$", done.stdout, re.M))
        assert sorted(output) == ["0", "1"], done
        assert done.seconds < LIMIT_S
        return {int(rank): text for rank, text in output.items()}

    return run


@pytest.mark.parametrize("wait", [*WAITS, "another-send", "another-receive"])
def test_a_wait_for_a_dead_peer_is_an_error(survivors, wait: str) -> None:
    """Messages between other ranks still arrive."""
    waits = {name: text.replace("1, 1)", "2, 1)") for name, text in WAITS.items()}
    waits["any-source"] = (
        "messages.wait(messages.start_receive(buffer, 2, 1), 'the test') "
        "if messages.receive_any(buffer, 1, 'the test', unless=lambda: 2 in messages.lost) is None "
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
            result = give_up(lambda: {wait})
        other = 1 - rank
        pending = messages.start_receive(buffer, other, 3)
        pending += messages.start_send(np.array([10.0 + rank]), other, 3)
        messages.wait(pending, "the other")
        if rank == 1:
            result = buffer.tolist()
        os.write(1, f"{{rank}} prints {{result}}\\n".encode())
        engine.barrier()
    """
    output = survivors(body)
    assert output[1] == "[10.0]"
    assert output[0].startswith('(2, "rank 2 died while rank 0 '), output[0]
    assert "Start the job again" in output[0]


def test_channels_use_initial_ranks_after_a_loss(survivors) -> None:
    output = survivors("""
        if rank == 1:
            die()
        engine.barrier()
        for channel in (messages, engine.messages()):
            other = 2 - rank
            pending = channel.start_receive(buffer, other, 3)
            pending += channel.start_send(np.array([10.0 + rank]), other, 3)
            channel.wait(pending, "the other")
            assert buffer == 10 + other
            assert channel.lost == {1}
            if rank:
                channel.wait(channel.start_send(large, 0, 4), "the other")
            else:
                assert channel.receive_any(large, 4, "the other") == 2
        memory = engine.share(100)
        assert sorted(memory) == [0, 2]
        memory[rank][:] = rank
        engine.barrier()
        assert (memory[2] == 2).all()
        os.write(1, f"{rank // 2} prints {engine.member}\\n".encode())
        engine.barrier()
    """)
    assert output == {0: "0", 1: "2"}
