"""``hvdtrain check``: is this cluster fit to train?"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence

from hvdtrain.check.check_report import format_report, make_report
from hvdtrain.cluster.hosts import Host, is_this_host, slurm_hosts, ssh_user
from hvdtrain.cluster.placement import place
from hvdtrain.errors import ConfigurationError, LaunchError
from hvdtrain.jobs.kubernetes.pod_options import add_pod_options
from hvdtrain.launch.hosts import add_where, named_hosts
from hvdtrain.remote.problem import Problem, show_problem
from hvdtrain.remote.remote_probe import Answer, Way
from hvdtrain.text import format_list, plural

__all__ = ["add_arguments", "run"]

logger = logging.getLogger(__package__)

FIT, UNFIT = 0, 1
# Without a word on ranks, this host is checked for the fewest that need each other.
DEFAULT_RANKS = 2

_EPILOG = """\
examples:
  hvdtrain check                       this host
  hvdtrain check -H a:4,b:4            over ssh
  hvdtrain check                       in a Slurm job: all its hosts, through srun
  hvdtrain check --on kubernetes -np 8 --gpus-per-rank 1 --volume training:/training
                                       a namespace, for jobs that hvdtrain submit is told so

exit codes: 0 fit to train (warnings may have been printed), 1 not, 2 unusable arguments.
docs/check.md tells what is looked at, docs/kubernetes.md what of a namespace.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``hvdtrain check``; they mean what they mean to ``run``."""
    parser.usage = (
        "hvdtrain check [-np N] [-H a:4,b:4 | --hostfile FILE] [--no-allreduce]\n"
        "       hvdtrain check --on kubernetes [-np N] [--namespace NAME] [options of its pods]"
    )
    parser.epilog = _EPILOG
    add_where(parser)
    parser.add_argument(
        "--no-allreduce", action="store_true", help="only look; start no ranks at the end"
    )
    parser.add_argument(
        "--on", choices=("kubernetes",), help="look at a namespace of a cluster, not at hosts"
    )
    add_pod_options(
        parser.add_argument_group("with --on kubernetes, as hvdtrain submit takes them")
    )


def run(arguments: argparse.Namespace) -> int:
    """Check what ``arguments`` name, print what was found, and return the exit code.

    Raises:
        ConfigurationError: Arguments can't be read, the ranks don't fit on the hosts, or the hosts
            have different users for ssh.
    """
    if arguments.on or arguments.pod_words:
        return _check_namespace(arguments)
    way, hosts = _hosts(arguments, os.environ)
    ranks = _ranks(hosts, arguments.num_proc)
    user = ssh_user(host for host in hosts if not is_this_host(host.name))
    try:
        return _run(arguments, way, ranks, ["-l", user] if user else [])
    except KeyboardInterrupt:
        logger.warning("interrupted")
        return 128 + signal.SIGINT


def _check_namespace(arguments: argparse.Namespace) -> int:
    from hvdtrain.check.namespace_check import check_namespace

    if arguments.hosts is not None or arguments.hostfile is not None:
        flag = "--hostfile" if arguments.hosts is None else "-H"
        raise ConfigurationError(
            f"{flag} names hosts, and --on kubernetes looks at a namespace; give one of them."
        )
    return _conclude(check_namespace(arguments.pod_words or (), arguments.num_proc))


def _run(
    arguments: argparse.Namespace, way: Way, ranks: Mapping[str, int], ssh: Sequence[str]
) -> int:
    from hvdtrain.check.survey import probe_hosts

    here, answers = probe_hosts(ranks, os.environ, way=way, ssh=ssh)
    if here.facts is None:
        words = here.failure.words if here.failure else ""
        logger.error(f"this host can't be asked: {words}")
        return UNFIT
    if way == "here" and arguments.num_proc is None:
        answers = [_with_default_ranks(answer) for answer in answers]
    use_gpus = os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1")
    report = make_report(here, answers, way=way, python=sys.executable, use_gpus=use_gpus)
    print(format_report(report), flush=True)
    problems = list(report.problems)
    if report.fit and not arguments.no_allreduce and sum(ranks.values()) > 1:
        problems += _reduce(arguments, sum(ranks.values()), answers)
    return _conclude(problems)


def _reduce(
    arguments: argparse.Namespace, ranks: int, answers: Sequence[Answer]
) -> Sequence[Problem]:
    """Let all ranks reduce an array; print how it went, and return what went wrong."""
    from hvdtrain.check.survey import judge_allreduce, measure_allreduce, show_allreduce

    try:
        measured = measure_allreduce(ranks, arguments.hosts, arguments.hostfile, os.environ)
    except LaunchError as error:
        problem: Problem | None = Problem(
            found=str(error),
            expected="a launcher that starts ranks on all hosts",
            remedy="as said above",
        )
    else:
        problem = judge_allreduce(measured, answers)
        if problem is None:
            print("\n" + show_allreduce(measured))
            return []
    assert problem is not None
    print("\n" + show_problem(problem))
    return [problem]


def _hosts(arguments: argparse.Namespace, environ: Mapping[str, str]) -> tuple[Way, list[Host]]:
    """The hosts that are meant, and how they are reached."""
    named = named_hosts(arguments.hosts, arguments.hostfile)
    if named is not None:
        return "ssh", named
    allocated = slurm_hosts(environ)
    if allocated is not None:
        return "srun", allocated
    return "here", [Host(name="localhost", slots=arguments.num_proc or DEFAULT_RANKS)]


def _ranks(hosts: Sequence[Host], ranks: int | None) -> dict[str, int]:
    """Ranks of each host; hosts that would get none are checked all the same."""
    counts = {host.name: 0 for host in hosts}
    for entry in place(hosts, ranks):
        counts[entry.host] += 1
    return counts


def _with_default_ranks(answer: Answer) -> Answer:
    """Give a host as many ranks as nobody would call too many for it."""
    facts = answer.facts
    if facts is None:
        return answer
    ranks = min(DEFAULT_RANKS, facts.cores or DEFAULT_RANKS, len(facts.gpus) or DEFAULT_RANKS)
    return dataclasses.replace(answer, ranks=ranks)


def _conclude(problems: Sequence[Problem]) -> int:
    """Print the last line, and return the exit code."""
    errors = [problem for problem in problems if problem.error]
    warnings = len(problems) - len(errors)
    noted = f" ({plural(warnings, 'warning')})" if warnings else ""
    if not errors:
        print(f"\nfit to train{noted}")
        return FIT
    hosts = list(dict.fromkeys(host for problem in errors for host in problem.hosts))
    where = f" on {format_list(hosts)}" if hosts else ""
    print(f"\nnot fit to train: {plural(len(errors), 'problem')}{where}{noted}")
    return UNFIT
