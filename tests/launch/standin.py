"""A stand-in for a training program, which reports, saves, resumes and handles preemption.

Run ``python -m tests.launch.standin FOLDER`` on every rank. FOLDER/checkpoint contains the number
of steps at the last checkpoint, and FOLDER/steps a line "attempt size step" for each step that
rank 0 has completed. ``--fault RANK STEP CODE`` runs Python code on a rank before a step, in the
first attempt only. ``--hold STEP`` repeats the allreduce of a step until a rank is signalled, also
in the first attempt only.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvdtrain.monitor import report

PREEMPTED = 75


class Standin:
    def __init__(self, arguments: argparse.Namespace) -> None:
        import mpi4py

        # A rank with an exception would wait for the others in MPI_Finalize.
        mpi4py.rc.finalize = False
        from mpi4py import MPI

        self.finalize = MPI.Finalize
        self.arguments = arguments
        self.comm: Any = MPI.COMM_WORLD
        self.rank = self.comm.Get_rank()
        self.attempt = os.environ.get("HVDTRAIN_ATTEMPT", "1")
        self.folder = Path(arguments.folder)
        self.received = 0
        self.waiting = ""
        self.is_first = self.attempt == "1" and "SLURM_RESTART_COUNT" not in os.environ
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
            signal.signal(number, self.handle)

    def handle(self, number: int, frame: object) -> None:
        self.received = number

    def run(self) -> None:
        report.watch(lambda: self.waiting)
        done = self.resume()
        report.phase("training")
        while done < self.arguments.steps:
            self.inject_fault(done + 1)
            stop = self.agree()
            while done + 1 == self.arguments.hold and self.is_first and not stop:
                stop = self.agree()
            done += 1
            report.step(done, 0)
            if self.rank == 0:
                with (self.folder / "steps").open("a") as file:
                    file.write(f"{self.attempt} {self.comm.Get_size()} {done}\n")
            if stop or done % self.arguments.every == 0:
                self.save(done)
            if stop:
                # A repeated signal would kill a Python that is exiting.
                for number in (signal.SIGUSR1, signal.SIGUSR2):
                    signal.signal(number, signal.SIG_IGN)
                self.finalize()
                sys.exit(PREEMPTED)
        self.finalize()

    def agree(self) -> bool:
        """Compute, and return whether any rank was signalled. All ranks get the same answer."""
        time.sleep(self.arguments.step_s)
        self.waiting = "allreduce(gradients)"
        stop = self.survive(lambda: self.comm.allreduce(self.received != 0))
        self.waiting = ""
        return bool(stop)

    def survive(self, operation: Callable[[], Any]) -> Any:
        """Run an operation on all ranks. After a loss, run it again on the remaining ranks."""
        from mpi4py import MPI

        while True:
            try:
                return operation()
            except MPI.Exception:
                if not self.arguments.elastic:
                    raise
                self.comm.Revoke()
                self.comm = self.comm.Shrink()
                self.finalize = lambda: os._exit(0)

    def resume(self) -> int:
        path = self.folder / "checkpoint"
        done = int(path.read_text()) if self.rank == 0 and path.exists() else 0
        done = int(self.comm.bcast(done))
        if done:
            report.resumed(done)
        return done

    def save(self, done: int) -> None:
        report.phase("checkpoint")
        if self.rank == 0:
            new = self.folder / "new"
            new.write_text(str(done))
            new.rename(self.folder / "checkpoint")
            report.saved(done)
        self.survive(lambda: self.comm.barrier())
        report.phase("training")

    def inject_fault(self, step: int) -> None:
        for rank, at, code in self.arguments.fault:
            if (int(rank), int(at)) == (self.rank, step) and (
                self.is_first or self.arguments.always
            ):
                exec(code, {"os": os, "sys": sys, "time": time, "signal": signal})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--step-s", type=float, default=0.02)
    parser.add_argument("--fault", nargs=3, action="append", default=[])
    parser.add_argument("--hold", type=int, default=0, help="a step, in the first attempt")
    parser.add_argument("--elastic", action="store_true", help="continue without a lost rank")
    parser.add_argument("--always", action="store_true", help="faults in every attempt")
    Standin(parser.parse_args()).run()


if __name__ == "__main__":
    main()
