"""A rank of a session: ``python -m tests.harness FOLDER``.

The rank runs the session's items in order and waits for the other ranks after each item. Once a
rank has failed, all ranks end the session, because other ranks may still wait in a collective.
Ranks synchronize through files, which works in any state of MPI.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.reports import ItemReport, ReportReader, ReportWriter, log_path

__all__ = ["RankPlugin", "main"]

END_S = 30.0
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")


class RankPlugin:
    """A plugin that runs and reports the session's items on this rank."""

    def __init__(self, folder: Path, rank: int, plan: dict[str, Any]) -> None:
        self._order = {nodeid: index for index, nodeid in enumerate(plan["items"])}
        self._item_timeout_s: list[float] = plan["item_timeout_s"]
        self._rank = rank
        self._size: int = plan["size"]
        self._log = log_path(folder, rank)
        self._writer = ReportWriter(folder, rank)
        self._reader = ReportReader(folder, self._size)
        self._reports: list[pytest.TestReport] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep exactly the session's items in their order."""
        selected = {item.nodeid: item for item in items if item.nodeid in self._order}
        if missing := self._order.keys() - selected.keys():
            raise pytest.UsageError(f"rank {self._rank} did not find {sorted(missing)}")
        items[:] = [selected[nodeid] for nodeid in self._order]

    @pytest.hookimpl(optionalhook=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> bool:
        """Disable the timer; the outer pytest times all ranks."""
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Report start and end of an item, and wait for the other ranks."""
        index = self._order[item.nodeid]
        limit_s = self._item_timeout_s[index]
        started = ItemReport(
            index=index, rank=self._rank, time_s=time.time(), log_offset=self._log.stat().st_size
        )
        self._writer.write(started)
        self._reports.clear()
        # Dumps the stacks shortly before the outer pytest ends the session.
        faulthandler.dump_traceback_later(max(limit_s - 1.0, limit_s / 2), exit=False)
        try:
            result = yield
        finally:
            faulthandler.cancel_dump_traceback_later()
        self._writer.write(_summary(self._reports, started))
        if not self._all_passed(index, limit_s + 30.0):
            item.session.shouldstop = f"a rank did not pass {item.nodeid}"
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the phases of the running item."""
        self._reports.append(report)

    def _all_passed(self, index: int, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self._reader.poll()
            ended = self._reader.ended.get(index, {})
            if any(report.outcome == "failed" for report in ended.values()):
                return False
            if len(ended) == self._size:
                return True
            _progress_mpi()
            time.sleep(0.003)
        return False


def _summary(reports: list[pytest.TestReport], started: ItemReport) -> ItemReport:
    """Return the report of the first phase that did not pass, or else of the call."""
    decisive = next((report for report in reports if report.outcome != "passed"), None)
    if decisive is None:
        decisive = next((report for report in reports if report.when == "call"), reports[-1])
    if decisive.outcome == "skipped" and isinstance(decisive.longrepr, tuple):
        text = decisive.longrepr[2]
    else:
        text = decisive.longreprtext
    return ItemReport(
        index=started.index,
        rank=started.rank,
        time_s=time.time(),
        log_offset=started.log_offset,
        outcome=decisive.outcome,
        phase=decisive.when,
        text=text,
        xfail=getattr(decisive, "wasxfail", None),
    )


def _progress_mpi() -> None:
    """Let MPI deliver this rank's messages, because another rank may still wait for them."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        with contextlib.suppress(mpi.Exception):
            mpi.COMM_WORLD.Iprobe()


def _own_rank() -> int:
    for name in _RANK_VARIABLES:
        if name in os.environ:
            return int(os.environ[name])
    raise SystemExit(f"no rank in the environment: none of {', '.join(_RANK_VARIABLES)} is set")


def main() -> int:
    """Run this rank's pytest, whose output goes to the rank's log."""
    folder = Path(sys.argv[1])
    rank = _own_rank()
    log = os.open(log_path(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    plan = json.loads((folder / "plan.json").read_text())
    plugin = RankPlugin(folder, rank, plan)
    arguments = [*plan["arguments"], *dict.fromkeys(item.split("::")[0] for item in plan["items"])]
    code = int(pytest.main(arguments, plugins=[plugin]))
    # Print the stacks if the rank doesn't end. The outer pytest waits longer than this.
    faulthandler.dump_traceback_later(END_S, exit=False)
    return code
