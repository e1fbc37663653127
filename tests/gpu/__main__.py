"""Runs the acceptance suite for GPUs and prints a table of claims, values and verdicts."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hvdtrain.errors import HvdtrainError
from hvdtrain.remote.host_probe import installed_versions
from hvdtrain.text import plural
from tests.gpu.claims import CLAIMS, Claim, Context
from tests.gpu.detect import Hardware, choose_layout, detect
from tests.gpu.jobs import JobError
from tests.gpu.results import Result, conclude, exit_code, format_results, judged, to_json
from tests.harness.jobs import REPOSITORY

LIMIT_S = 600.0
# A claim that would get less time than this does not start.
MIN_CLAIM_S = 20.0
# Factor for the time limits of claims without a GPU.
CPU_PATIENCE = 3.0
EPILOG = """\
exit codes: 0 no claim failed; 1 a claim failed, or none ran; 2 invalid arguments, or a host that
does not answer. docs/gpu.md explains the claims.
"""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse_arguments(argv)
    try:
        hardware = detect(arguments.hostfile, os.environ)
    except HvdtrainError as error:
        print(f"tests.gpu: error: {error}", file=sys.stderr)
        return 2
    print("\n".join(_describe(hardware)), flush=True)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    claims = [claim for claim in CLAIMS if not arguments.only or claim.name in arguments.only]
    results = run_claims(claims, hardware, arguments.folder.absolute(), limit_s=arguments.limit_s)
    print(f"\n{format_results(results)}\n\n{conclude(results, hardware)}")
    if arguments.json is not None:
        content = to_json(results, hardware, installed_versions())
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")
        print(f"results: {arguments.json}")
    return exit_code(results)


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--hostfile",
        metavar="FILE",
        help="hosts and their slots; default: the Slurm job's, or this host",
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the results to FILE")
    parser.add_argument(
        "--folder",
        metavar="DIR",
        type=Path,
        default=REPOSITORY / "runs" / "gpu",
        help="folder for report.txt and temporary files, which all hosts share; default runs/gpu",
    )
    parser.add_argument(
        "--only",
        metavar="NAME",
        nargs="+",
        choices=[claim.name for claim in CLAIMS],
        help=f"run only these claims: {', '.join(claim.name for claim in CLAIMS)}",
    )
    parser.add_argument(
        "--limit-s",
        metavar="S",
        type=float,
        default=LIMIT_S,
        help=f"seconds for all claims together; default {LIMIT_S:g}",
    )
    arguments = parser.parse_args(argv)
    if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
        parser.error(
            f"--json names a folder that does not exist, got {arguments.json}; create the folder"
        )
    return arguments


def _describe(hardware: Hardware) -> list[str]:
    return [
        f"{host.name}: {plural(host.gpus, 'GPU')}"
        + (f" ({', '.join(dict.fromkeys(host.models))})" if host.models else "")
        for host in hardware.hosts
    ]


def run_claims(
    claims: Sequence[Claim], hardware: Hardware, folder: Path, *, limit_s: float
) -> list[Result]:
    """Run the claims one after another, and print each result."""
    deadline = time.monotonic() + limit_s
    results = []
    for claim in claims:
        results.append(_run_claim(claim, hardware, folder, deadline - time.monotonic()))
        last = results[-1]
        print(f"{last.name}: {last.verdict} ({last.measured}) {last.seconds:.0f} s", flush=True)
    return results


def _run_claim(claim: Claim, hardware: Hardware, folder: Path, left_s: float) -> Result:
    layout = choose_layout(claim.needs, hardware)
    reason = layout if isinstance(layout, str) else ""
    if not reason and left_s < MIN_CLAIM_S:
        reason = "the time limit of the suite was reached"
    if reason or isinstance(layout, str):
        return Result(name=claim.name, text=claim.text, verdict="not run", measured=reason)
    started = time.monotonic()
    limit_s = claim.limit_s * (1.0 if layout.gpus else CPU_PATIENCE)
    context = Context(layout=layout, folder=folder, limit_s=min(limit_s, left_s))
    try:
        judgement = claim.test(context)
    except Exception as error:
        # One claim that crashes must not hide the results of the others.
        known = isinstance(error, JobError)
        return Result(
            name=claim.name,
            text=claim.text,
            where=str(layout),
            verdict="fail",
            measured=str(error) if known else f"{type(error).__name__}: {error}",
            seconds=time.monotonic() - started,
        )
    return judged(claim, layout, judgement, time.monotonic() - started)


if __name__ == "__main__":
    sys.exit(main())
