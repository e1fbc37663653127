"""``--file-times``: at the end, how long the tests of each file took, the slowest first."""

from __future__ import annotations

from collections import Counter

import pytest

# Above a blank line.
_SHOWN = 10


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--file-times", action="store_true", help="show how long the tests of each file took"
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Add up the reports; with several workers those of all."""
    if not terminalreporter.config.getoption("file_times"):
        return
    reports = [
        report
        for reports in terminalreporter.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport)
    ]
    seconds: Counter[str] = Counter()
    for report in reports:
        seconds[report.nodeid.partition("::")[0]] += report.duration  # type: ignore[assignment]
    tests = Counter(report.nodeid.partition("::")[0] for report in reports if report.when == "call")
    terminalreporter.section("time by file")
    for number, (file, time_s) in enumerate(seconds.most_common()):
        if number == _SHOWN:
            terminalreporter.write_line("")
        terminalreporter.write_line(f"{time_s:7.1f} s {tests[file]:5d} tests  {file}")
