"""What workers and servers say to each other, as bytes and back."""

import math

import numpy as np
import pytest

import hvdtrain
from hvdtrain import world as state
from hvdtrain.parameter_server.protocol import (
    POSITION_NUMBERS,
    REPLY,
    REPLY_DATA,
    Kind,
    Reply,
    ReplySender,
    Request,
)


def arrived(message):
    """What the other side makes of it, which has room for one message of this kind."""
    buffer = type(message).buffer()
    packed = message.pack()
    assert (packed.dtype, packed.shape) == (buffer.dtype, buffer.shape) == (np.uint8, packed.shape)
    buffer[...] = packed
    return type(message).unpack(buffer)


@pytest.mark.parametrize("kind", Kind)
def test_request(kind):
    request = Request(
        kind, 3, 1 << 40, has_gradient=True, weight=0.1, learning_rate=1e-30, stop=True
    )
    assert arrived(request) == request
    assert isinstance(arrived(request).kind, Kind)
    request = request._replace(signal=15, position=tuple(range(-1, POSITION_NUMBERS - 1)))
    assert arrived(request) == request


def test_request_without_a_learning_rate():
    found = arrived(Request(Kind.PUSH, step=1))
    assert math.isnan(found.learning_rate)
    assert found._replace(learning_rate=0.0) == Request(Kind.PUSH, step=1, learning_rate=0.0)


@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize("refusal", ["", "no", "nö, 不行, нет", "x" * 800])
def test_reply(stop, refusal):
    reply = Reply(7, 1 << 50, stop, 15, 3, error=1, refusal=refusal)
    assert arrived(reply) == reply


def test_refusal_that_is_too_long():
    assert arrived(Reply(0, 0, refusal="x" * 50_000)).refusal == "x" * 800


def test_refusal_that_is_cut_within_a_character():
    """266 characters of three bytes, and the first two of the next one."""
    assert arrived(Reply(0, 0, refusal="不" * 500)).refusal == "不" * 266 + "\ufffd"


@pytest.mark.ranks(3)
def test_answers_go_out_while_the_server_does_something_else():
    """Both workers take theirs only once the server has sent both and changed its weights."""
    hvdtrain.init()
    collectives = state.collectives()
    messages, signals = collectives.messages(), collectives.messages()
    weights = np.zeros(2 << 20, np.float32)
    if collectives.rank == 2:
        sender = ReplySender(messages)
        for worker in (0, 1):
            weights[:] = worker + 1
            sender.send(worker, Reply(step=worker, version=7), [weights])
        weights[:] = -1
        for worker in (0, 1):
            signals.wait(signals.start_send(np.ones(1), worker, 1), "the test")
        sender.finish()
    else:
        signals.wait(signals.start_receive(np.ones(1), 2, 1), "the test")
        packed = Reply.buffer()
        pending = messages.start_receive(packed, 2, REPLY)
        pending += messages.start_receive(weights, 2, REPLY_DATA)
        messages.wait(pending, "the test")
        assert Reply.unpack(packed).step == collectives.rank
        assert (weights == collectives.rank + 1).all()
    collectives.barrier(name="all have theirs")
