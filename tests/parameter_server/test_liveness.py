"""Who may still send something, and who has not been heard for too long."""

import math

from hvdtrain.parameter_server.consistency import WorkerLiveness


def stepped(workers, *, now=0.0, silence_s=5.0):
    """All of them have made a step, and have the answer."""
    attendance = WorkerLiveness(workers, silence_s)
    for worker in workers:
        attendance.hear(worker)
        attendance.note_step(worker)
        attendance.answer(worker, now)
    return attendance


def test_silence():
    """Counted from the answer; the chief may take its time."""
    attendance = stepped([0, 1, 2])
    attendance.hear(2)
    attendance.answer(2, 3.0)
    assert attendance.next_silence == 5.0
    assert attendance.fall_silent(4.9) == []
    assert attendance.fall_silent(5.0) == [1]
    assert attendance.fall_silent(6.0) == [], "told once"
    assert attendance.next_silence == 8.0
    assert attendance.training == {0, 1, 2}, "it may come back"
    assert attendance.hear(1)
    assert not attendance.hear(1)
    attendance.answer(1, 7.0)
    assert sorted(attendance.fall_silent(100.0)) == [1, 2]
    assert attendance.next_silence == math.inf


def test_who_waits_for_an_answer_is_not_silent():
    attendance = stepped([0, 1])
    attendance.hear(1)
    assert attendance.next_silence == math.inf
    assert attendance.fall_silent(1000.0) == []


def test_the_first_step_may_take_its_time():
    attendance = WorkerLiveness([0, 1], 5.0)
    attendance.hear(1)
    attendance.answer(1, 0.0)
    assert attendance.next_silence == math.inf


def test_who_trains_no_more_is_not_waited_for():
    attendance = stepped([0, 1, 2])
    attendance.stop_training(1)
    attendance.end(2)
    assert attendance.training == {0}
    assert attendance.there == {0, 1}
    assert attendance.fall_silent(1000.0) == []
    attendance.answer(1, 0.0)
    assert attendance.next_silence == math.inf
