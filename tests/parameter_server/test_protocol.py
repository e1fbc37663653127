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


def received(message):
    """Copy a message to a receive buffer, and unpack it."""
    buffer = type(message).buffer()
    packed = message.pack()
    assert (packed.dtype, packed.shape) == (buffer.dtype, buffer.shape) == (np.uint8, packed.shape)
    buffer[...] = packed
    return type(message).unpack(buffer)


@pytest.mark.parametrize("kind", Kind)
def test_a_request_is_received_unchanged(kind):
    request = Request(
        kind, 3, 1 << 40, has_gradient=True, weight=0.1, learning_rate=1e-30, stop=True
    )
    assert received(request) == request
    assert isinstance(received(request).kind, Kind)
    request = request._replace(signal=15, position=tuple(range(-1, POSITION_NUMBERS - 1)))
    assert received(request) == request
    assert math.isnan(received(Request(kind)).learning_rate)


@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize("refusal", ["", "no", "nö, 不行, нет", "x" * 800])
def test_a_reply_is_received_unchanged(stop, refusal):
    reply = Reply(7, 1 << 50, stop, 15, 3, error=1, refusal=refusal)
    assert received(reply) == reply


def test_a_long_refusal_is_truncated():
    assert received(Reply(0, 0, refusal="x" * 50_000)).refusal == "x" * 800
    # The text is cut within a character, after 266 characters of three bytes each.
    assert received(Reply(0, 0, refusal="不" * 500)).refusal == "不" * 266 + "\ufffd"


@pytest.mark.ranks(3)
def test_replies_are_sent_in_the_background():
    """Workers receive them after the server has sent both and changed its weights."""
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
    collectives.barrier(name="end")
