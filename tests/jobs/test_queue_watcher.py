from __future__ import annotations

from types import SimpleNamespace

import pytest

from hvdtrain.jobs import queue_watcher
from hvdtrain.jobs.queue_watcher import QueueAnswer, QueueWatcher


@pytest.mark.parametrize(
    ("query_s", "later_s", "queries"),
    [
        pytest.param(1.0, 4.9, 1, id="new enough"),
        pytest.param(1.0, 5.0, 2, id="too old"),
        pytest.param(20.0, 19.9, 1, id="a slow queue"),
        pytest.param(20.0, 20.0, 2, id="a slow queue, later"),
        pytest.param(1.0, -60.0, 2, id="the clock was set back"),
    ],
)
def test_how_often_a_queue_is_asked(
    monkeypatch: pytest.MonkeyPatch, query_s: float, later_s: float, queries: int
) -> None:
    now_s, answers = [1000.0], []
    monkeypatch.setattr(queue_watcher, "time", SimpleNamespace(time=lambda: now_s[0]))

    def ask() -> QueueAnswer:
        started_s = now_s[0]
        now_s[0] += query_s
        answers.append(QueueAnswer(started_s=started_s, ended_s=now_s[0]))
        return answers[-1]

    watcher = QueueWatcher(ask, interval_s=5.0)
    assert watcher.answer() is watcher.answer()
    now_s[0] += later_s
    assert watcher.answer() is answers[-1]
    assert len(answers) == queries
