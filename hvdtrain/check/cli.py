"""The command ``hvdtrain check``."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from hvdtrain.check.host_checks import find_problems
from hvdtrain.check.report_file import reserve, write_report
from hvdtrain.check.software_checks import MPI, versions_for
from hvdtrain.cluster.hosts import Host, is_this_host, slurm_hosts, ssh_user
from hvdtrain.cluster.placement import place, visible_entries
from hvdtrain.errors import ConfigurationError
from hvdtrain.jobs.kubernetes.pod_options import add_pod_options
from hvdtrain.launch.hosts import add_host_arguments, named_hosts
from hvdtrain.remote.problem import (
    Problem,
    answered,
    format_bytes,
    format_problem,
    problem_state,
)
from hvdtrain.remote.remote_probe import Answer, Method, clock_offset_s
from hvdtrain.text import format_list, format_table, plural

__all__ = ["add_arguments", "format_report", "run"]

logger = logging.getLogger(__package__)

READY, NOT_READY = 0, 1
# Without -np, the check assumes the smallest job whose ranks communicate.
DEFAULT_RANKS = 2

_HEAD = ("host", "state", "ranks", "cores", "load", "GPUs", "/dev/shm", "network", "clock")
_LEFT = (0, 1, 5, 7)

_EPILOG = """\
examples:
  hvdtrain check                       this host
  hvdtrain check -H a:4,b:4            hosts over ssh
  hvdtrain check                       in a Slurm job: all its hosts, through srun
  hvdtrain check --report report.txt   also write a file to send with a bug report
  hvdtrain check --on kubernetes -np 8 --gpus-per-rank 1 --volume training:/training
                                       a namespace, for jobs submitted with these options

exit codes: 0 ready to train, perhaps with warnings; 1 not ready; 2 invalid arguments.
docs/check.md and docs/kubernetes.md list the checks.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``hvdtrain check``."""
    parser.usage = (
        "hvdtrain check [-np N] [-H a:4,b:4 | --hostfile FILE] [--no-allreduce]\n"
        "                      [--no-import] [--report FILE]\n"
        "       hvdtrain check --on kubernetes [-np N] [--namespace NAME] [options of its pods]"
    )
    parser.epilog = _EPILOG
    add_host_arguments(parser)
    parser.add_argument(
        "--no-allreduce", action="store_true", help="skip the allreduce over all ranks"
    )
    parser.add_argument(
        "--no-import",
        action="store_true",
        help="do not import the framework of Keras' backend on the hosts, which takes seconds",
    )
    parser.add_argument(
        "--report",
        metavar="FILE",
        help="also write the results and details of all hosts to FILE, for a bug report",
    )
    parser.add_argument(
        "--on", choices=("kubernetes",), help="check a Kubernetes namespace instead of hosts"
    )
    add_pod_options(parser.add_argument_group("with --on kubernetes, as for hvdtrain submit"))


def run(arguments: argparse.Namespace) -> int:
    """Check the hosts or the namespace, print a report, and return the exit code.

    Raises:
        ConfigurationError: If arguments are invalid, the ranks don't fit on the hosts, or the hosts
            have different users for ssh.
    """
    if arguments.on or arguments.pod_words:
        return _check_namespace(arguments)
    with contextlib.ExitStack() as stack:
        if arguments.report is not None:
            stack.enter_context(reserve(arguments.report))
        method, hosts = _hosts(arguments, os.environ)
        # Hosts without ranks are also checked.
        ranks = dict.fromkeys((host.name for host in hosts), 0)
        ranks |= Counter(entry.host for entry in place(hosts, arguments.num_proc))
        user = ssh_user(host for host in hosts if not is_this_host(host.name))
        try:
            return _check_hosts(arguments, method, ranks, ["-l", user] if user else [])
        except KeyboardInterrupt:
            logger.warning("interrupted")
            return 128 + signal.SIGINT


def _check_namespace(arguments: argparse.Namespace) -> int:
    from hvdtrain.check.namespace_check import check_namespace

    if arguments.report is not None:
        raise ConfigurationError(
            "--report describes hosts, but --on kubernetes checks a namespace; omit one of the two."
        )
    if arguments.hosts is not None or arguments.hostfile is not None:
        flag = "--hostfile" if arguments.hosts is None else "-H"
        raise ConfigurationError(
            f"{flag} names hosts, but --on kubernetes checks a namespace; pass only one of the two."
        )
    code, conclusion = _conclude(check_namespace(arguments.pod_words or (), arguments.num_proc))
    print(f"\n{conclusion}")
    return code


def _check_hosts(
    arguments: argparse.Namespace, method: Method, ranks: Mapping[str, int], ssh: Sequence[str]
) -> int:
    from hvdtrain.check.survey import measure_allreduce, probe_hosts

    wants_report = arguments.report is not None
    launcher, answers = probe_hosts(
        ranks,
        os.environ,
        method=method,
        ssh=ssh,
        details=wants_report,
        imports=not arguments.no_import,
    )
    if launcher.facts is None:
        message = launcher.failure.message if launcher.failure else ""
        error = f"the probe of this host failed: {message}"
        logger.error(error)
        if wants_report:
            write_report(arguments.report, error, launcher, answers)
        return NOT_READY
    if method == "local" and arguments.num_proc is None:
        answers = [_with_default_ranks(answer) for answer in answers]
    use_gpus = visible_entries(os.environ) != []
    problems = find_problems(
        launcher, answers, method=method, python=sys.executable, use_gpus=use_gpus
    )
    shown = [format_report(launcher, answers, problems)]
    print(shown[-1], flush=True)
    is_ready = not any(problem.is_error for problem in problems)
    total = sum(ranks.values())
    if is_ready and not arguments.no_allreduce and total > 1:
        result = measure_allreduce(total, arguments.hosts, arguments.hostfile, os.environ, answers)
        if isinstance(result, Problem):
            problems.append(result)
            result = format_problem(result)
        shown.append(result)
        print(f"\n{result}")
    code, conclusion = _conclude(problems)
    print(f"\n{conclusion}")
    if wants_report:
        write_report(arguments.report, "\n\n".join([*shown, conclusion]), launcher, answers)
        print(f"report: {arguments.report} (it contains host names and addresses)")
    return code


def _hosts(arguments: argparse.Namespace, environ: Mapping[str, str]) -> tuple[Method, list[Host]]:
    """Return the method for starting programs on other hosts, and the hosts to check."""
    named = named_hosts(arguments.hosts, arguments.hostfile)
    if named is not None:
        return "ssh", named
    allocated = slurm_hosts(environ)
    if allocated is not None:
        return "srun", allocated
    return "local", [Host(name="localhost", slots=arguments.num_proc or DEFAULT_RANKS)]


def _with_default_ranks(answer: Answer) -> Answer:
    """Reduce the default number of ranks if the host has fewer cores or GPUs."""
    facts = answer.facts
    if facts is None:
        return answer
    gpus = len(facts.usable_gpus) or DEFAULT_RANKS
    ranks = min(DEFAULT_RANKS, facts.cores or DEFAULT_RANKS, gpus)
    return dataclasses.replace(answer, ranks=ranks)


def format_report(launcher: Answer, answers: Sequence[Answer], problems: Sequence[Problem]) -> str:
    """Format the table of hosts, their common versions, and the problems."""
    table = format_table(_HEAD, [_row(answer, problems) for answer in answers], left=_LEFT)
    parts = [table, _versions(launcher, answers), *map(format_problem, problems)]
    return "\n\n".join(filter(None, parts))


def _row(answer: Answer, problems: Iterable[Problem]) -> tuple[str, ...]:
    facts = answer.facts
    if facts is None:
        state = answer.failure.kind if answer.failure else "no answer"
        return (answer.host, state, str(answer.ranks), *["-"] * 6)
    offset_s, error_s = clock_offset_s(answer)
    speed = "" if facts.speed_mbit is None else f" {facts.speed_mbit / 1000:g} Gb/s"
    models = "/".join(dict.fromkeys(gpu.model for gpu in facts.usable_gpus))
    return (
        answer.host,
        problem_state([problem for problem in problems if answer.host in problem.hosts]),
        str(answer.ranks),
        "-" if facts.cores is None else str(facts.cores),
        "-" if facts.load is None else f"{facts.load:.1f}",
        f"{len(facts.usable_gpus)} {models}" if models else "none",
        "-" if facts.shm_free_bytes is None else format_bytes(facts.shm_free_bytes),
        f"{facts.interface} {facts.local_address}{speed}".strip() if facts.local_address else "-",
        f"{0.0 if abs(offset_s) <= error_s else offset_s:+.1f} s",
    )


def _versions(launcher: Answer, answers: Sequence[Answer]) -> str:
    """Return the versions that are the same on the launcher and all hosts, as one line.

    For example: ``all hosts: Python 3.11.7, hvdtrain 0.1.0``.
    """
    facts = [facts for _, facts in answered([launcher, *answers])]
    shared = []
    backend = launcher.facts.backend if launcher.facts else ""
    for title, version in versions_for(backend).items():
        versions = {version(one) for one in facts}
        if len(versions) == 1 and (only := versions.pop()):
            shared.append(only if title == MPI else f"{title} {only}")
    hosts = "all hosts"
    if len(facts) - 1 < len(answers):
        hosts = "all that answered"
    elif len(answers) == 1:
        hosts = answers[0].host
    return f"{hosts}: {', '.join(shared)}" if shared else ""


def _conclude(problems: Sequence[Problem]) -> tuple[int, str]:
    """Return the exit code of the command, and the last line of its output."""
    errors = [problem for problem in problems if problem.is_error]
    warnings = len(problems) - len(errors)
    note = f" ({plural(warnings, 'warning')})" if warnings else ""
    if not errors:
        return READY, f"ready to train{note}"
    hosts = list(dict.fromkeys(host for problem in errors for host in problem.hosts))
    where = f" on {format_list(hosts)}" if hosts else ""
    return NOT_READY, f"not ready to train: {plural(len(errors), 'problem')}{where}{note}"
