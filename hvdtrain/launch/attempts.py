"""Runs a job, and restarts it after failures that a restart can recover from."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import random
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from hvdtrain.cluster.hosts import Host, is_this_host
from hvdtrain.cluster.placement import max_ranks
from hvdtrain.errors import ConfigurationError
from hvdtrain.exit_codes import PREEMPTING, ExitCode
from hvdtrain.launch.agent_server import AgentServer
from hvdtrain.launch.commands import Plan
from hvdtrain.launch.console import Console, Screen, early_info_filter
from hvdtrain.launch.failure import Outcome
from hvdtrain.launch.hosts import HostWatch
from hvdtrain.launch.observer import (
    AttemptBegan,
    AttemptEnded,
    JobEnded,
    Observer,
    Restarting,
    Summary,
)
from hvdtrain.launch.plan import (
    Job,
    Resources,
    agent_variables,
    describe_plan,
    find_plan,
    make_command,
    make_plan,
)
from hvdtrain.launch.restart import (
    decide,
    describe_losses,
    describe_restart,
    describe_resume,
    goodput,
    summarise,
)
from hvdtrain.launch.supervisor import Supervisor, caught_signals, pause
from hvdtrain.log import configure_log

__all__ = ["end_waiting", "run_job", "run_plan"]

logger = logging.getLogger(__package__)

# How long the launcher waits before it exits, if the reader of its output reads nothing. After a
# signal, the launcher waits less.
PATIENCE_S = 300.0
STOPPED_PATIENCE_S = 5.0


def run_job(job: Job, environ: Mapping[str, str]) -> int:
    """Run ``job`` without recording it, and return the exit code.

    ``hvdtrain bench`` and ``hvdtrain check`` use this.

    Raises:
        ConfigurationError: If hosts can't be read, or the ranks don't fit on them.
        LaunchError: If mpirun or srun is missing or can't be started.
    """
    resources, plan = find_plan(job, environ)
    with caught_signals() as received:
        return run_plan(job, resources, plan, environ, received, summarises=False)


def run_plan(
    job: Job,
    resources: Resources,
    plan: Plan,
    environ: Mapping[str, str],
    received: Sequence[int],
    *,
    observer: Observer | None = None,
    is_seen: bool = True,
    summarises: bool = True,
) -> int:
    """Run a job to its end, or print its plan, and return the exit code.

    ``received`` comes from ``caught_signals``. If ``is_seen`` is false, nothing is written to
    stdout and stderr. If ``summarises`` is false, no summary is logged.

    Raises:
        ConfigurationError: If the ranks don't fit on the hosts.
        LaunchError: If mpirun or srun can't be started.
    """
    with contextlib.ExitStack() as stack:
        out, err = sys.stdout, sys.stderr
        if not is_seen:
            out = err = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        screen = stack.enter_context(_screen(job, out, err, received))
        attempts = _Attempts(job, resources, environ, received, observer or Observer(), screen)
        stack.callback(attempts.close)
        return attempts.run(plan, summarises=summarises)


@contextlib.contextmanager
def _screen(job: Job, out: TextIO, err: TextIO, received: Sequence[int]) -> Iterator[Screen]:
    """Yield a ``Screen``. At the end, wait until all output is read or another signal arrives."""
    screen = Screen(out, err)
    try:
        yield screen
    finally:
        signals = len(received)
        patience_s = STOPPED_PATIENCE_S if received else PATIENCE_S
        screen.close(patience_s, give_up=lambda: len(received) > signals)
        with_time = job.settings.log_with_timestamp or job.timestamps
        configure_log(job.settings.log_level, prefix="hvdtrain run: ", with_time=with_time)


class _Attempts:
    """Runs all attempts at one job. Call ``run`` once, from the main thread."""

    def __init__(
        self,
        job: Job,
        resources: Resources,
        environ: Mapping[str, str],
        received: Sequence[int],
        observer: Observer,
        screen: Screen,
    ) -> None:
        self._job = job
        self._resources = resources
        self._environ = environ
        self._received = received
        self._observer = observer
        self._screen = screen
        self._history: list[Outcome] = []
        self._supervisor: Supervisor | None = None  # of the last attempt
        slots = sum(host.slots for host in resources.hosts)
        self._watch = HostWatch(
            environ, ranks=job.ranks or slots, slots=slots, may_grow=bool(job.settings.elastic)
        )
        self._started_at = time.monotonic()
        self._console = Console(screen.stdout, screen.stderr, ranks=1)
        configure_log(
            job.settings.log_level,
            prefix="",
            with_time=job.settings.log_with_timestamp,
            write=self._notice,
        )

    def close(self) -> None:
        """Wait until the processes of the last attempt have exited."""
        if self._supervisor is not None:
            self._supervisor.close()

    def run(self, plan: Plan, *, summarises: bool) -> int:
        """Run attempts until the job succeeds or can't be restarted, and return its exit code."""
        ranks = len(plan.places)
        hosts: Sequence[Host] = self._resources.hosts
        if self._resources.warning:
            logger.warning(self._resources.warning)
        if self._watch.is_managed and not self._job.dry_run:
            # Hosts may have joined or left since the job was submitted.
            hosts, room = self._watch.await_hosts(self._job.settings.min_np, self._received)
            if self._received:
                return end_waiting(self._observer, self._received[0])
            plan = make_plan(self._job, self._resources, hosts, room)
        while True:
            outcome = self._attempt(plan)
            if outcome is None:
                return 0
            self._record(self._check_removed_hosts(outcome))
            decision = decide(
                self._history,
                self._job.max_restarts,
                in_slurm=self._resources.in_slurm,
                chance=random.random(),
                hosts_return=self._watch.is_managed,
            )
            if not decision.restart:
                if decision.reason:
                    logger.error(f"the job is not restarted: {decision.reason}")
                break
            hosts, room = self._remaining_hosts(hosts, outcome, ranks)
            if self._received:
                break
            try:
                self._check_room(hosts, room)
                # Fails if the remaining hosts have too few GPUs, or if no worker is left.
                larger = plan if room < ranks else None
                plan = make_plan(self._job, self._resources, hosts, room, larger=larger)
            except ConfigurationError as error:
                logger.error(f"the job is not restarted: {error}")
                break
            logger.warning(
                describe_restart(
                    self._history,
                    self._job.max_restarts,
                    delay_s=decision.delay_s,
                    hosts=list(plan.hosts),
                    ranks=room,
                )
            )
            self._observer.on_event(Restarting())
            if not pause(decision.delay_s, self._received):
                break
        return self._end(stopped=decision.restart and bool(self._received), summarises=summarises)

    def _notice(self, text: str) -> None:
        self._console.notice(text)
        self._observer.notice(text)

    def _record(self, outcome: Outcome) -> None:
        self._history.append(outcome)
        self._observer.on_event(
            AttemptEnded(
                code=int(outcome.code),
                cause=outcome.cause,
                step=outcome.step,
                saved=outcome.saved,
                lost_s=round(outcome.lost_s, 1) if outcome.cause != "done" else 0.0,
                words="\n".join(outcome.messages),
            )
        )
        level = logging.WARNING if outcome.cause in ("ordered", "preempted") else logging.ERROR
        for message in outcome.messages:
            logger.log(level, message)

    def _attempt(self, plan: Plan) -> Outcome | None:
        """Run one attempt and return its outcome; None after a dry run."""
        job, number = self._job, len(self._history) + 1
        console = self._console = Console(
            self._screen.stdout,
            self._screen.stderr,
            ranks=len(plan.places),
            with_host=len(plan.hosts) > 1,
            chief_only=job.chief_only,
            timestamps=job.timestamps,
            collapse=job.collapse,
            environ=self._environ,
        )
        with contextlib.ExitStack() as stack:
            server = AgentServer(
                len(plan.places),
                console,
                local=plan.local,
                is_hidden=early_info_filter(self._environ),
                on_line=self._observer.line,
                holds_up=lambda: self._screen.holds_up or self._observer.holds_up,
            )
            stack.enter_context(contextlib.closing(server))
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="hvdtrain-"))
            variables = agent_variables(
                job, plan, self._environ, port=server.port, secret=server.secret, attempt=number
            )
            environ = {**self._environ, **variables}
            command = make_command(job, self._resources, plan, environ, Path(scratch, "hosts"))
            if job.dry_run:
                print(describe_plan(plan, command, job.extra))
                return None
            if job.verbose:
                console.notice(describe_plan(plan, command, job.extra))
            logger.debug("attempt %d: %s", number, shlex.join(command.argv))
            mpi = self._resources.starter.name
            self._observer.on_event(AttemptBegan(ranks=len(plan.places), hosts=plan.hosts, mpi=mpi))
            self._watch.begin(plan.hosts, len(plan.places))
            supervisor = Supervisor(
                command,
                server,
                console,
                hosts={entry.rank: entry.host for entry in plan.places},
                time_limits=job.time_limits,
                received=self._received,
                observer=self._observer,
                host_watch=self._watch,
                min_np=job.settings.min_np if plan.elastic else None,
                critical=plan.critical,
            )
            outcome = supervisor.run()
            self.close()
            self._supervisor = supervisor
            return outcome

    def _check_removed_hosts(self, outcome: Outcome) -> Outcome:
        """Turn the outcome into a preemption if hosts were removed from the job."""
        if outcome.cause in ("done", "ordered", "preempted") or not self._watch.is_managed:
            return outcome
        removed = self._watch.removed()
        if not removed:
            return outcome
        messages = [f"host {name} was removed: {reason}" for name, reason in removed.items()]
        return dataclasses.replace(
            outcome,
            code=ExitCode.PREEMPTED,
            cause="preempted",
            messages=(*messages, *outcome.messages),
        )

    def _remaining_hosts(
        self, hosts: Sequence[Host], outcome: Outcome, ranks: int
    ) -> tuple[Sequence[Host], int]:
        """Return the hosts for the next attempt, and the number of ranks to start on them."""
        if self._watch.is_managed:
            self._observer.on_event(Restarting())
            return self._watch.await_hosts(self._job.settings.min_np, self._received)
        left = self._reachable_hosts(hosts, outcome)
        limit = max_ranks(left, oversubscribe=self._job.oversubscribe)
        return left, ranks if limit is None else min(ranks, limit)

    def _reachable_hosts(self, hosts: Sequence[Host], outcome: Outcome) -> Sequence[Host]:
        """Return the hosts that were not lost and can be reached."""
        missing = outcome.lost_hosts or outcome.code == ExitCode.CANNOT_START
        # Slurm tracks the state of its nodes.
        if not missing or self._resources.in_slurm:
            return hosts
        # Imported here because it is rarely needed and imports much of hvdtrain check.
        from hvdtrain.remote.remote_probe import unreachable

        lost = {host.lower() for host in outcome.lost_hosts if not is_this_host(host)}
        left = [host for host in hosts if host.name.lower() not in lost]
        # One unreachable host prevents the ranks on all hosts from starting.
        silent = unreachable(
            [host.name for host in left],
            self._environ,
            ssh=self._resources.ssh,
            give_up=lambda: bool(self._received),
        )
        return [host for host in left if host.name not in silent]

    def _check_room(self, hosts: Sequence[Host], room: int) -> None:
        least = self._job.settings.min_np
        if room < max(1, least):
            lost = [host.name for host in self._resources.hosts if host not in hosts]
            left = f"{room} ranks fit on the other hosts" if room else "no host is left"
            raise ConfigurationError(
                f"{', '.join(lost)} can't be used, {left}, and --min-np is {least}"
            )

    def _end(self, *, stopped: bool, summarises: bool) -> int:
        """Log a summary and return the exit code. A signal between attempts sets ``stopped``."""
        wall_s = time.monotonic() - self._started_at
        summary = summarise(self._history, wall_s) if summarises else []
        for line in (*summary, describe_losses(self._history), describe_resume(self._history)):
            if line:
                logger.info(line)
        if summary:
            self._observer.on_event(Summary(shares=goodput(self._history, wall_s)))
        last = self._history[-1]
        code, cause, verdict = last.code, last.cause, "\n".join(last.messages)
        if stopped:
            code, cause = _code_after(self._received[0]), "ordered"
        self._observer.on_event(JobEnded(code=int(code), cause=cause, verdict=verdict))
        return code


def end_waiting(observer: Observer, number: int) -> int:
    """Report that a signal stopped a job before its ranks started, and return the exit code."""
    code = _code_after(number)
    verdict = f"the job was stopped by {signal.Signals(number).name} before its turn"
    observer.on_event(JobEnded(code=code, cause="ordered", verdict=verdict))
    return code


def _code_after(number: int) -> int:
    """Return the exit code after a signal that arrived while no ranks ran."""
    return ExitCode.PREEMPTED if number in PREEMPTING else 128 + number
