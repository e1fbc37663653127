"""Makes environments that are missing or out of date; see ``tests.environments``."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.environments import HERE, folder_of, requirements_of, stamp_of

HOROVODS = ("horovod", "horovod-keras3")
LIGHT = sorted({path.stem for path in HERE.glob("*.txt")} - {"packages", *HOROVODS})
# Installed without what they depend on: Horovod is built here, and its TensorFlow asks for Keras 2.
ALONE = ("horovod", "keras")
# The last Python that the TensorFlow which Horovod builds against runs on.
HOROVODS_PYTHON = "python3.11"
BUILD = {
    "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
    "HOROVOD_WITH_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_PYTORCH": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITH_MPI": "1",
    "HOROVOD_WITH_GLOO": "1",
    # Not optimised: it builds in half the time, and how fast Horovod is doesn't matter here.
    "HOROVOD_DEBUG": "1",
}
PIP = ("--disable-pip-version-check", "--quiet")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.environments", description=__doc__)
    known = [*LIGHT, *HOROVODS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}")
    names = parser.parse_args().names or LIGHT
    if unknown := set(names) - set(known):
        parser.error(f"{', '.join(sorted(unknown))}: expected some of {', '.join(known)}")
    for name in names:
        stamp, content = stamp_of(name)
        if stamp.exists() and stamp.read_text() == content:
            continue
        print(f"making {folder_of(name)}", flush=True)
        if name in HOROVODS:
            make_horovod(name)
        else:
            make_light(name)
        stamp.write_text(content)


def make_light(name: str) -> None:
    """An MPI of its own; everything else is that of the Python which runs this."""
    folder = folder_of(name)
    run(sys.executable, "-m", "venv", "--clear", "--without-pip", folder)
    if requirements := requirements_of(name):
        prefix = ("--prefix", folder, "--ignore-installed")
        run(sys.executable, "-m", "pip", *PIP, "install", *prefix, *requirements)
    where = {"base": str(folder), "platbase": str(folder)}
    packages = Path(sysconfig.get_path("purelib", vars=where))
    # Not a mere path: the project itself is found through a .pth file of that folder.
    parent = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (packages / "parent.pth").write_text(parent)


def make_horovod(name: str) -> None:
    """Horovod with MPI and Gloo, as its users have it; the wheel is kept, as it takes minutes."""
    python = shutil.which(HOROVODS_PYTHON)
    if python is None:
        sys.exit(f"Horovod needs {HOROVODS_PYTHON} on PATH, and there is none.")
    folder = folder_of(name)
    run(python, "-m", "venv", "--clear", folder)
    pip = (folder / "bin" / "python", "-m", "pip", *PIP)
    alone = {re.split(r"\W", text)[0]: text for text in requirements_of(name)}
    alone = {package: text for package, text in alone.items() if package in ALONE}
    run(*pip, "install", *(text for text in requirements_of(name) if text not in alone.values()))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "hvdtrain-tests")
    if not (wheels := list(cache.glob("horovod-*.whl"))):
        print("building Horovod, which takes some minutes", flush=True)
        path = os.pathsep.join([str(folder / "bin"), os.environ.get("PATH", os.defpath)])
        build = ("wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", cache)
        run(*pip, *build, alone["horovod"], env={**os.environ, **BUILD, "PATH": path})
        wheels = list(cache.glob("horovod-*.whl"))
    others = (text for package, text in alone.items() if package != "horovod")
    run(*pip, "install", "--no-deps", *wheels, *others)


def run(*argv: str | os.PathLike[str], env: dict[str, str] | None = None) -> None:
    done = subprocess.run(list(map(os.fspath, argv)), env=env, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(os.fspath, argv))}: exit code {done.returncode}")


if __name__ == "__main__":
    main()
