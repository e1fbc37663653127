"""``hvdtrain bench startup``: start time of ``hvdtrain run`` compared with mpirun."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hvdtrain.bench.options import StartupOptions
from hvdtrain.bench.results import BenchReport, format_seconds
from hvdtrain.bench.start_program import MARK
from hvdtrain.config.keras_backend import configured_backend
from hvdtrain.errors import LaunchError
from hvdtrain.jobs.folder import JOBS_DIR
from hvdtrain.launch.commands import Mpirun, find_mpirun
from hvdtrain.text import plural

__all__ = ["bare_command", "measure"]

MAX_EXTRA_S = 0.3
START_TIMEOUT_S = 300.0
IMPORT, INIT = "import_framework_s", "init_s"
EMPTY, PROBE = "python -c pass", "hvdtrain.init()"
LESS_IMPORT = f"{PROBE}, less import"
PROGRAMS: dict[str, tuple[str, ...]] = {
    EMPTY: (sys.executable, "-P", "-c", "pass"),
    PROBE: (sys.executable, "-P", "-m", "hvdtrain.bench.start_program"),
}


@dataclass(frozen=True, kw_only=True)
class _Starts:
    """The duration of each start, and the times that ``bench/start_program.py`` printed."""

    whole_s: dict[str, list[float]] = field(
        default_factory=lambda: {name: [] for name in (EMPTY, PROBE, LESS_IMPORT)}
    )
    probes: list[dict[str, float]] = field(default_factory=list)

    def add(self, program: str, spent_s: float, output: str) -> None:
        """Add a start of ``program`` that took ``spent_s`` seconds and printed ``output``."""
        self.whole_s[program].append(spent_s)
        for line in output.splitlines():
            if MARK in line:
                probe = json.loads(line.partition(MARK)[2])
                self.probes.append(probe)
                self.whole_s[LESS_IMPORT].append(spent_s - probe[IMPORT])


def measure(options: StartupOptions) -> None:
    """Start two programs alternately with mpirun and ``hvdtrain run``, and report the times."""
    report = BenchReport("startup", options, options.ranks, lambda: True)
    mpirun = find_mpirun(Path(sys.executable).parent, os.environ)
    ours = (sys.executable, "-P", "-m", "hvdtrain", "run", "-np", str(options.ranks), "--")
    bare, extra = bare_command(mpirun, options.ranks)
    run, plain = _Starts(), _Starts()
    # Keep these jobs out of the user's list.
    with tempfile.TemporaryDirectory(prefix="hvdtrain-") as folder:
        environ = {**os.environ, JOBS_DIR: folder}
        for _ in range(options.runs):
            for name, program in PROGRAMS.items():
                plain.add(name, *_start([*bare, *program], {**extra, **os.environ}))
                run.add(name, *_start([*ours, *program], environ))
    _show_starts(report, run, plain)
    _show_parts(report, [*run.probes, *plain.probes])
    report.finish(options.json)


def bare_command(mpirun: Mpirun, ranks: int) -> tuple[list[str], dict[str, str]]:
    """Return the mpirun command, and variables that let it run as root and oversubscribe."""
    argv = [str(mpirun.path), "-np", str(ranks)]
    if mpirun.family == "hydra":
        return argv, {}
    return argv, {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        # Open MPI 4 and 5 use different names for the same setting.
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }


def _start(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[float, str]:
    start = time.perf_counter()
    done = subprocess.run(
        argv,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=START_TIMEOUT_S,
        check=False,
        text=True,
    )
    spent_s = time.perf_counter() - start
    if done.returncode != 0:
        raise LaunchError(
            f"{' '.join(argv)} failed with exit code {done.returncode}: {done.stderr.strip()}; "
            "run it by hand to find the cause."
        )
    return spent_s, done.stdout


def _show_starts(report: BenchReport, run: _Starts, plain: _Starts) -> None:
    cells = []
    for name, ours_s in run.whole_s.items():
        bare_s = plain.whole_s[name]
        for launcher, spent_s in (("hvdtrain run", ours_s), ("mpirun", bare_s)):
            cells.append([name, launcher, *_median_and_best(spent_s)])
        extra_s = statistics.median(ours_s) - statistics.median(bare_s)
        best_s = min(ours_s) - min(bare_s)
        cells.append([name, "difference", *(f"{value:+.3f} s" for value in (extra_s, best_s))])
        if name != PROBE:
            what = f"{name}: hvdtrain run beyond mpirun, medians"
            report.compare(what, extra_s, "at most", MAX_EXTRA_S, "s")
    starts = plural(len(run.whole_s[EMPTY]), "start")
    report.print(f"\nduration of the command, {starts} each, alternating")
    report.print_table(["program", "launcher", "median", "best"], cells, left=(0, 1))
    report.print(
        "less import: duration minus the slowest rank's import of the framework. The import\n"
        "varies most, and does not depend on the launcher."
    )
    report.add(hvdtrain_run_s=run.whole_s, mpirun_s=plain.whole_s)


def _show_parts(report: BenchReport, probes: list[dict[str, float]]) -> None:
    names = {IMPORT: f"import {configured_backend(os.environ)}", INIT: "hvdtrain.init() afterwards"}
    rows = [
        [name, *_median_and_best([probe[part] for probe in probes])] for part, name in names.items()
    ]
    report.print("\ninside the ranks, for the slowest rank of each start")
    report.print_table(["", "median", "best"], rows)
    report.add(probes=probes)


def _median_and_best(seconds: list[float]) -> list[str]:
    return [format_seconds(statistics.median(seconds)), format_seconds(min(seconds))]
