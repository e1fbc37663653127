"""``hvdtrain check --on kubernetes``: looks at a namespace, and prints what was found."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hvdtrain.check.findings import format_findings
from hvdtrain.check.namespace_check import judge_namespace, unknown_as_problem
from hvdtrain.check.namespace_needs import planned_job
from hvdtrain.check.namespace_survey import ask_cluster, missing_packages
from hvdtrain.errors import JobError
from hvdtrain.jobs.kubernetes.manifests import PodJob
from hvdtrain.remote.problem import Problem, show_problem

__all__ = ["check_namespace"]

# Without a word on ranks, the fewest that need each other.
DEFAULT_RANKS = 2


def check_namespace(words: Sequence[str], ranks: int | None) -> list[Problem]:
    """Check the namespace that options of pods name, and return what is wrong with it.

    Args:
        words: The options as ``add_pod_options`` keeps them.
        ranks: How many a job would have.

    Raises:
        ConfigurationError: The options can't be read.
    """
    table, problems = _look(planned_job(words, ranks or DEFAULT_RANKS))
    problems.sort(key=lambda problem: not problem.error)
    print("\n\n".join([*table, *map(show_problem, problems)]))
    return problems


def _look(job: PodJob) -> tuple[list[str], list[Problem]]:
    """A table, where there is something to show, and what is wrong."""
    if missing := missing_packages():
        return [], [_without(missing)]
    try:
        needs, answers = ask_cluster(job)
    except JobError as error:
        return [], [_no_answer(error)]
    findings = judge_namespace(needs, answers)
    problems = [problem for one in findings for problem in one.problems]
    return [format_findings(findings)], [*problems, *unknown_as_problem(findings)]


def _without(missing: Sequence[str]) -> Problem:
    return Problem(
        hosts=(),
        found=f"not installed here: {', '.join(missing)}",
        expected="the Python packages with which hvdtrain asks clusters",
        remedy=f"{sys.executable} -m pip install 'hvdtrain[kubernetes]'",
    )


def _no_answer(error: JobError) -> Problem:
    return Problem(
        hosts=(),
        found=str(error),
        expected="a cluster that answers, by kubectl's configuration and its current context",
        remedy="kubectl get pods has to work here; kubectl config get-contexts lists the contexts, "
        "of which --context names one, and KUBECONFIG the file",
    )
