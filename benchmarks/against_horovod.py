"""The same calls of hvdtrain.tensorflow and of a real horovod.tensorflow, in turn.

    make environments NAMES="openmpi4 horovod"
    python benchmarks/against_horovod.py
    python benchmarks/against_horovod.py --json against-horovod.json

Two ranks on this host: allreduce of 4 bytes, eager and in a tf.function, and a grouped allreduce of
the 160 gradients of ResNet-50, 102 MB. Horovod runs in the environment that the tests use, under
its own horovodrun with MPI.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import median

from jobs import run_job

from hvdtrain.bench.measure_gradients import resnet50_shapes

REPOSITORY = Path(__file__).resolve().parents[1]
WORKER = Path(__file__).with_name("collective_calls.py")
JOB_TIMEOUT_S = 600.0
LEAST_SMALL_TIMES = 5.0
LEAST_GROUP_TIMES = 3.0


def main() -> None:
    """Run all in turn, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3, help="of each; default %(default)s")
    parser.add_argument(
        "--small-calls", type=int, default=500, help="of 4 bytes in a run; default %(default)s"
    )
    parser.add_argument(
        "--group-calls", type=int, default=10, help="of 102 MB in a run; default %(default)s"
    )
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    asked = parser.parse_args()
    shapes = [list(shape) for shape in resnet50_shapes()]
    job = {
        "shapes": shapes,
        "chain": 25,
        "small_calls": asked.small_calls,
        "group_calls": asked.group_calls,
    }
    found: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "job.json")
        file.write_text(json.dumps(job))
        for _ in range(asked.runs):
            for name, command in _commands(file).items():
                for what, times in _run(command, file.with_name("times.json")).items():
                    found.setdefault(what, {}).setdefault(name, []).append(median(times))
    print("median of calls, best of runs            horovod     hvdtrain   ratio   asked")
    for what, times in found.items():
        theirs, ours = min(times["horovod"]), min(times["hvdtrain"])
        least = LEAST_GROUP_TIMES if what == "group" else LEAST_SMALL_TIMES
        label = f"{len(shapes)} tensors, 102 MB" if what == "group" else what
        print(
            f"{label:<34}  {theirs * 1e3:9.3f} ms  {ours * 1e3:8.3f} ms  {theirs / ours:5.1f}   "
            f"at least {least:g}"
        )
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=2) + "\n")


def _commands(job: Path) -> dict[str, list[str]]:
    theirs = REPOSITORY / ".venvs" / "horovod" / "bin"
    hvdtrain = Path(sys.executable).with_name("hvdtrain")
    return {
        "horovod": [
            *(str(theirs / "horovodrun"), "--mpi", "-np", "2", "-H", "localhost:2"),
            *(str(theirs / "python"), str(WORKER), "horovod.tensorflow", str(job)),
        ],
        "hvdtrain": [
            *(str(hvdtrain), "run", "-np", "2", "--chief-only", "--"),
            *(sys.executable, str(WORKER), "hvdtrain.tensorflow", str(job)),
        ],
    }


def _run(command: list[str], times: Path) -> dict[str, list[float]]:
    times.unlink(missing_ok=True)
    # Horovod's mpirun is Debian's, which would not start as root otherwise.
    allowed = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    environ = {name: os.environ.get(name, "1") for name in allowed}
    if "horovodrun" in command[0]:
        environ["PATH"] = os.pathsep.join([str(Path(command[0]).parent), os.defpath])
    run_job(command, command[0], environ, JOB_TIMEOUT_S)
    return dict(json.loads(times.read_text()))


if __name__ == "__main__":
    main()
