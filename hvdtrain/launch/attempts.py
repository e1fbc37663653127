"""Runs a job: once, or again after a failure that another start can mend."""

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
from hvdtrain.errors import ConfigurationError
from hvdtrain.exit_codes import ENDING, PREEMPTING, ExitCode
from hvdtrain.launch.agent_server import AgentServer
from hvdtrain.launch.commands import Plan, hides_information, is_information
from hvdtrain.launch.console import Console, Screen
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
    find_resources,
    make_command,
    make_plan,
)
from hvdtrain.launch.restart import (
    account,
    announce,
    decide,
    fitting,
    goodput,
    remains,
    summarise,
    without,
)
from hvdtrain.launch.supervisor import Supervisor
from hvdtrain.log import configure_log

__all__ = [
    "caught_signals",
    "end_waiting",
    "find_plan",
    "ignore_signals",
    "pause",
    "run_job",
    "run_plan",
]

logger = logging.getLogger(__package__)

STEP_S = 0.05
# How long the launcher waits at its end for a reader that takes nothing, and after a signal.
PATIENCE_S = 300.0
ENDED_PATIENCE_S = 5.0


def run_job(job: Job, environ: Mapping[str, str]) -> int:
    """Run ``job`` to its end without a record of it, and return the exit code; raises as the rest.

    ``hvdtrain bench`` and ``hvdtrain check`` start jobs so; ``hvdtrain run`` records them.
    """
    site, plan = find_plan(job, environ)
    with caught_signals() as received:
        return run_plan(job, site, plan, environ, received, summarises=False)


def run_plan(
    job: Job,
    site: Resources,
    plan: Plan,
    environ: Mapping[str, str],
    received: Sequence[int],
    *,
    observer: Observer | None = None,
    is_seen: bool = True,
    summarises: bool = True,
) -> int:
    """Run a job to its end, or print its plan; returns the exit code.

    Args:
        received: Signals as they arrive, from ``caught_signals``.
        observer: Receives what happens; None for nobody.
        is_seen: Whether somebody reads stdout and stderr of this process.
        summarises: Whether the last messages summarise where the time went.

    Raises:
        ConfigurationError: The ranks don't fit on the hosts.
        LaunchError: mpirun or srun can't be started.
    """
    with contextlib.ExitStack() as stack:
        out, err = sys.stdout, sys.stderr
        if not is_seen:
            out = err = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        screen = stack.enter_context(_screen(job, out, err, received))
        attempts = _Attempts(
            job,
            site,
            environ,
            received,
            observer or Observer(),
            screen=screen,
            summarises=summarises,
        )
        return attempts.run(plan)


@contextlib.contextmanager
def _screen(job: Job, out: TextIO, err: TextIO, received: Sequence[int]) -> Iterator[Screen]:
    """A screen, closed at the end; a signal that comes then ends the wait for the reader."""
    screen = Screen(out, err)
    try:
        yield screen
    finally:
        signals = len(received)
        patience_s = ENDED_PATIENCE_S if received else PATIENCE_S
        screen.close(patience_s, give_up=lambda: len(received) > signals)
        settings = job.settings
        with_time = settings.log_with_timestamp or job.timestamps
        configure_log(settings.log_level, prefix="hvdtrain run: ", with_time=with_time)


def find_plan(job: Job, environ: Mapping[str, str]) -> tuple[Resources, Plan]:
    """Find where the job can run, and plan which rank runs where.

    Raises:
        ConfigurationError: Hosts can't be read, the ranks don't fit on them, or are fewer than
            ``--min-np``.
        LaunchError: There is no usable mpirun or srun.
    """
    site = find_resources(job, environ)
    plan = make_plan(job, site, site.hosts, job.ranks)
    if (least := job.settings.min_np) > len(plan.places):
        raise ConfigurationError(
            f"--min-np {least} is more than there are ranks, {len(plan.places)}; expected at "
            "most as many. Ask for more ranks, or fewer at least."
        )
    return site, plan


@contextlib.contextmanager
def caught_signals() -> Iterator[list[int]]:
    """Collect the signals that arrive instead of dying of them; undone at the end."""
    received: list[int] = []
    # What was ignored when this process started (nohup) stays ignored.
    caught = [
        number for number in (*ENDING, *PREEMPTING) if signal.getsignal(number) != signal.SIG_IGN
    ]
    previous = {
        number: signal.signal(number, lambda number, frame: received.append(number))
        for number in caught
    }
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def ignore_signals() -> None:
    """Ignore the signals that end a job, for the rest of a process whose job is over."""
    for number in (*ENDING, *PREEMPTING):
        signal.signal(number, signal.SIG_IGN)


def pause(delay_s: float, received: Sequence[int]) -> bool:
    """Wait, unless a signal is received; return whether none was."""
    until = time.monotonic() + delay_s
    while not received and time.monotonic() < until:
        time.sleep(STEP_S)
    return not received


class _Attempts:
    """All attempts at one job; call ``run`` once, from the main thread."""

    def __init__(
        self,
        job: Job,
        site: Resources,
        environ: Mapping[str, str],
        received: Sequence[int],
        observer: Observer,
        *,
        screen: Screen,
        summarises: bool,
    ) -> None:
        self._job = job
        self._observer = observer
        self._site = site
        self._environ = environ
        self._received = received
        self._history: list[Outcome] = []
        self._watch = HostWatch(
            environ,
            ranks=job.ranks or sum(host.slots for host in site.hosts),
            slots=sum(host.slots for host in site.hosts),
            may_grow=bool(job.settings.elastic),
        )
        self._began = time.monotonic()
        self._screen = screen
        self._summarises = summarises
        self._console = Console(
            screen.stdout, screen.stderr, ranks=1, with_host=False, chief_only=False
        )
        settings = job.settings
        configure_log(
            settings.log_level,
            prefix="",
            with_time=settings.log_with_timestamp,
            write=self._notice,
        )

    def run(self, plan: Plan) -> int:
        """Attempt the job until it is done or nothing more can be done; returns its exit code."""
        ranks = len(plan.places)
        hosts: Sequence[Host] = self._site.hosts
        if self._site.remark:
            logger.warning(self._site.remark)
        if self._watch.is_managed and not self._job.dry_run:
            # Since the job was submitted there may have come more, or fewer.
            hosts, fits = self._watch.await_hosts(self._job.settings.min_np, self._received)
            if self._received:
                return end_waiting(self._observer, self._received[0])
            plan = make_plan(self._job, self._site, hosts, fits)
        while True:
            outcome = self._attempt(plan)
            if outcome is None:
                return 0
            outcome = self._with_news(outcome)
            self._history.append(outcome)
            self._record(outcome)
            level = logging.WARNING if outcome.cause in ("ordered", "preempted") else logging.ERROR
            for words in outcome.words:
                logger.log(level, words)
            decision = decide(
                self._history,
                self._job.max_restarts,
                in_slurm=self._site.in_slurm,
                chance=random.random(),
                hosts_return=self._watch.is_managed,
            )
            if not decision.again:
                if decision.why_not:
                    logger.error(decision.why_not)
                return self._over()
            hosts, fits = self._room(hosts, outcome, ranks)
            if self._received:
                return self._over(ordered=True)
            try:
                self._check_enough(hosts, fits)
                # With fewer hosts a rank may lack a GPU, or the job its last worker.
                more_before = plan if fits < ranks else None
                plan = make_plan(self._job, self._site, hosts, fits, more_before=more_before)
            except ConfigurationError as error:
                logger.error(f"the job is not started again: {error}")
                return self._over()
            logger.warning(
                announce(
                    self._history,
                    self._job.max_restarts,
                    delay_s=decision.delay_s,
                    hosts=list(plan.hosts),
                    ranks=fits,
                )
            )
            self._observer.on_event(Restarting())
            if not pause(decision.delay_s, self._received):
                return self._over(ordered=True)

    def _notice(self, text: str) -> None:
        self._console.notice(text)
        self._observer.notice(text)

    def _record(self, outcome: Outcome) -> None:
        self._observer.on_event(
            AttemptEnded(
                code=int(outcome.code),
                cause=outcome.cause,
                step=outcome.step,
                saved=outcome.saved,
                lost_s=round(outcome.lost_s, 1) if outcome.cause != "done" else 0.0,
                words="\n".join(outcome.words),
            )
        )

    def _attempt(self, plan: Plan) -> Outcome | None:
        """Run one attempt at the job; return its outcome, None where only the plan is wanted."""
        job = self._job
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
        hides = is_information if hides_information(self._environ) else None
        with (
            contextlib.closing(
                AgentServer(
                    len(plan.places),
                    console,
                    local=plan.local,
                    hides=hides,
                    heard=self._observer.line,
                    holds_up=lambda: self._screen.holds_up or self._observer.holds_up,
                )
            ) as server,
            tempfile.TemporaryDirectory(prefix="hvdtrain-") as scratch,
        ):
            words = agent_variables(
                job,
                plan,
                self._environ,
                port=server.port,
                secret=server.job,
                attempt=len(self._history) + 1,
            )
            command = make_command(
                job, self._site, plan, {**self._environ, **words}, Path(scratch, "hosts")
            )
            if job.dry_run:
                print(describe_plan(plan, command, job.extra))
                return None
            if job.verbose:
                console.notice(describe_plan(plan, command, job.extra))
            logger.debug("attempt %d: %s", len(self._history) + 1, shlex.join(command.argv))
            self._observer.on_event(
                AttemptBegan(ranks=len(plan.places), hosts=plan.hosts, mpi=self._site.starter.name)
            )
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
            return supervisor.run()

    def _with_news(self, outcome: Outcome) -> Outcome:
        """The outcome, seen with what is known of hosts: to take them away is a preemption."""
        if outcome.cause in ("done", "ordered", "preempted") or not self._watch.is_managed:
            return outcome
        taken = self._watch.taken()
        if not taken:
            return outcome
        words = [f"{name} was taken away: {why}" for name, why in taken.items()]
        return dataclasses.replace(
            outcome, code=ExitCode.PREEMPTED, cause="preempted", words=(*words, *outcome.words)
        )

    def _room(
        self, hosts: Sequence[Host], outcome: Outcome, ranks: int
    ) -> tuple[Sequence[Host], int]:
        """The hosts that the next attempt has, and how many of ``ranks`` they take, or more."""
        if self._watch.is_managed:
            self._observer.on_event(Restarting())
            return self._watch.await_hosts(self._job.settings.min_np, self._received)
        left = self._left(hosts, outcome)
        return left, fitting(left, ranks, oversubscribe=self._job.oversubscribe)

    def _left(self, hosts: Sequence[Host], outcome: Outcome) -> Sequence[Host]:
        """The hosts without those that were lost, or can't be reached any more."""
        missing = outcome.lost_hosts or outcome.code == ExitCode.CANNOT_START
        # Slurm knows its nodes better.
        if not missing or self._site.in_slurm:
            return hosts
        # Seldom needed, and much of hvdtrain check comes with it.
        from hvdtrain.remote.remote_probe import unreachable

        gone = [host for host in outcome.lost_hosts if not is_this_host(host)]
        left = without(hosts, gone)
        # One host that can't be reached keeps the ranks of all others from starting.
        names = [host.name for host in left]
        silent = unreachable(
            names, self._environ, ssh=self._site.ssh, give_up=lambda: bool(self._received)
        )
        return without(left, silent)

    def _check_enough(self, hosts: Sequence[Host], fits: int) -> None:
        least = self._job.settings.min_np
        if fits < max(1, least):
            gone = [host.name for host in self._site.hosts if host not in hosts]
            there = f"{fits} ranks fit on what is left" if fits else "no host is left"
            raise ConfigurationError(
                f"{', '.join(gone)} can't be used, {there}, and --min-np is {least}"
            )

    def _over(self, *, ordered: bool = False) -> int:
        """Return the exit code, after a last word on what was lost and what is left.

        Args:
            ordered: Whether a signal, rather than the last attempt, ended the job.
        """
        wall_s = time.monotonic() - self._began
        summary = summarise(self._history, wall_s) if self._summarises else []
        for words in (*summary, account(self._history), remains(self._history)):
            if words:
                logger.info(words)
        if summary:
            self._observer.on_event(Summary(shares=goodput(self._history, wall_s)))
        last = self._history[-1]
        code, cause, verdict = last.code, last.cause, "\n".join(last.words)
        if ordered:
            code, cause = _code_of(self._received[0]), "ordered"
        self._observer.on_event(JobEnded(code=int(code), cause=cause, verdict=verdict))
        return code


def end_waiting(observer: Observer, number: int) -> int:
    """Report that a signal ended a job before its ranks were started; return its exit code."""
    code = _code_of(number)
    verdict = f"the job was ended by {signal.Signals(number).name} before its turn"
    observer.on_event(JobEnded(code=code, cause="ordered", verdict=verdict))
    return code


def _code_of(number: int) -> int:
    """The exit code after a signal at a time when nothing runs."""
    return ExitCode.PREEMPTED if number in PREEMPTING else 128 + number
