"""Creates the environments of ``tests.environments`` that are missing or out of date."""

from __future__ import annotations

import argparse
import compileall
import fcntl
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.environments import (
    BELOW,
    CACHE,
    HERE,
    HOROVODS,
    HOROVODS_PYTHON,
    KERAS,
    KUBERNETES,
    OPTIONAL,
    PEERS,
    SYSTEM_MPIRUN,
    build_of,
    folder_of,
    missing_environment,
    requirements_of,
    stamp_of,
)
from tests.environments.kubernetes import build_kubernetes

LIGHT = sorted({path.stem for path in HERE.glob("*.txt")} - {"packages", *HOROVODS, *PEERS})
PIP = ("--disable-pip-version-check", "--quiet")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.environments", description=__doc__)
    known = [*LIGHT, *dict.fromkeys([*HOROVODS, *PEERS, KUBERNETES])]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(known)}")
    parser.add_argument("--check", action="store_true", help="only print which are missing")
    arguments = parser.parse_args()
    names = arguments.names or LIGHT
    if unknown := set(names) - set(known):
        parser.error(f"{', '.join(sorted(unknown))}: expected some of {', '.join(known)}")
    if arguments.check:
        reasons = [reason for name in names if (reason := missing_environment(name))]
        sys.exit("\n".join(reasons) or None)
    CACHE.mkdir(parents=True, exist_ok=True)
    # Other checkouts use the same folder.
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Sorted by name, which puts base environments first.
        for name in sorted({*names, *(BELOW[name] for name in names if name in BELOW)}):
            stamp, content = stamp_of(name)
            if not stamp.exists() or stamp.read_text() != content:
                make(name)
                stamp.write_text(content)


def make(name: str) -> None:
    print(f"creating {folder_of(name)}", flush=True)
    if name == KUBERNETES:
        print("building Kubernetes, which takes several minutes", flush=True)
        build_kubernetes(folder_of(name))
    elif name in BELOW:
        make_over_horovod(name)
    elif name in HOROVODS:
        make_horovod(name)
    else:
        make_light(name)


def make_light(name: str) -> None:
    """Create an environment that finds other packages in the current one."""
    folder = folder_of(name)
    run(sys.executable, "-m", "venv", "--clear", "--without-pip", folder)
    if requirements := requirements_of(name):
        options = ["--prefix", str(folder), "--no-warn-conflicts", "--no-compile"]
        if name != OPTIONAL:
            options.append("--ignore-installed")
        if name in KERAS:
            options.append("--no-deps")
        run(sys.executable, "-m", "pip", *PIP, "install", *options, *requirements)
        # pip compiles on one core.
        compileall.compile_dir(folder, quiet=2, workers=0)
    find_in(folder, Path(sysconfig.get_path("purelib")))


def make_horovod(name: str) -> None:
    """Create an environment with Horovod, built with MPI and Gloo."""
    folder = folder_of(name)
    run(find_horovods_python(), "-m", "venv", "--clear", folder)
    pip = (folder / "bin" / "python", "-m", "pip", *PIP)
    horovod, others = divide(requirements_of(name), "horovod")
    run(*pip, "install", *others)
    print("building Horovod, which takes several minutes", flush=True)
    # The system's MPI, before the MPI of an active environment.
    own, system = folder / "bin", os.path.dirname(SYSTEM_MPIRUN)
    path = os.pathsep.join([str(own), system, os.environ.get("PATH", os.defpath)])
    build = ("install", "--no-build-isolation", "--no-deps", "--no-cache-dir", *horovod)
    run(*pip, *build, env={**os.environ, **build_of(name), "PATH": path})


def make_over_horovod(name: str) -> None:
    """Create an environment with Keras 3 on top of one with Horovod and Keras 2."""
    folder, below = folder_of(name), folder_of(BELOW[name])
    run(find_horovods_python(), "-m", "venv", "--clear", "--without-pip", folder)
    pip = (below / "bin" / "python", "-m", "pip")
    install = (*pip, *PIP, "install", "--prefix", folder)
    alone, others = divide(requirements_of(name), "keras", "mlxtend")
    # Keep the versions of the base environment.
    installed = [line for line in output(*pip, "freeze").splitlines() if "==" in line]
    (constraints := folder / "below.txt").write_text("\n".join(installed))
    run(*install, "--constraint", constraints, *others)
    run(*install, "--no-deps", "--ignore-installed", *alone)
    (packages,) = below.glob("lib/python*/site-packages")
    find_in(folder, packages)
    (folder / "bin" / "horovodrun").symlink_to(below / "bin" / "horovodrun")


def find_in(folder: Path, packages: Path) -> None:
    """Make an environment find other packages in a folder."""
    # addsitedir also reads .pth files, such as the project's own.
    parent = f"import site; site.addsitedir({str(packages)!r})\n"
    (own,) = folder.glob("lib/python*/site-packages")
    (own / "parent.pth").write_text(parent)


def find_horovods_python() -> str:
    python = shutil.which(HOROVODS_PYTHON)
    if python is None:
        sys.exit(f"Horovod needs {HOROVODS_PYTHON} on PATH; install it.")
    return python


def divide(requirements: list[str], *names: str) -> tuple[list[str], list[str]]:
    """Split requirements into those of the given packages and the rest."""
    own = [text for text in requirements if re.split(r"\W", text)[0] in names]
    return own, [text for text in requirements if text not in own]


def output(*argv: str | os.PathLike[str]) -> str:
    return subprocess.run(argv, capture_output=True, text=True, timeout=20, check=True).stdout


def run(*argv: str | os.PathLike[str], env: dict[str, str] | None = None) -> None:
    done = subprocess.run(list(map(os.fspath, argv)), env=env, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(os.fspath, argv))}: exit code {done.returncode}")


if __name__ == "__main__":
    main()
