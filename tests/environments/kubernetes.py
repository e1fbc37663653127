"""Builds the programs of a Kubernetes, from Debian's sources, for tests that run one.

Debian has the sources of Kubernetes 1.20 and no packages of its servers. They are built with the Go
of Debian's release before, as later ones don't take what the sources bring along. apt looks for
both in lists of its own: nothing is installed, and the machine's own sources stay as they are.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

__all__ = ["PROGRAMS", "VERSION", "build_kubernetes"]

VERSION = "v1.20.2"
PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet")
_SOURCES_OF = "bookworm"
_GO_OF = "bullseye"
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_GO = ("golang-1.15-go", "golang-1.15-src")
_GOROOT = "go/usr/lib/go-1.15"
_BUILD_TIMEOUT_S = 3600.0


def build_kubernetes(folder: Path) -> None:
    """Put the programs into ``folder/bin``.

    Raises:
        RuntimeError: A step has failed; the message has its last words.
    """
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "bin").mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="build-", dir=folder) as name:
        work = Path(name)
        _download(work)
        source = work / "source"
        (archive,) = work.glob("kubernetes_*.orig.tar.gz")
        source.mkdir()
        _run("tar", "-xzf", archive, "-C", source, "--strip-components=1", cwd=work)
        for package in work.glob("golang-*.deb"):
            _run("dpkg", "-x", package, work / "go", cwd=work)
        environ = {
            **os.environ,
            "GOROOT": str(work / _GOROOT),
            "GOPATH": str(work / "gopath"),
            "GOCACHE": str(work / "gocache"),
            "HOME": str(work),
            "GOPROXY": "off",
            "GOFLAGS": "",
            "PATH": f"{work / _GOROOT / 'bin'}:{os.environ.get('PATH', os.defpath)}",
        }
        _run(
            "make",
            f"WHAT={' '.join(f'cmd/{program}' for program in PROGRAMS)}",
            "GOLDFLAGS=-s -w",
            f"KUBE_GIT_VERSION={VERSION}",
            cwd=source,
            environ=environ,
        )
        for program in PROGRAMS:
            (built,) = (source / "_output").glob(f"local/bin/*/*/{program}")
            shutil.copy(built, folder / "bin" / program)


def _download(work: Path) -> None:
    """Get the sources and Go into ``work``."""
    site = _debians_site(work)
    signed = f"[signed-by={_KEYRING}] {site}"
    (work / "sources.list").write_text(
        f"deb-src {signed} {_SOURCES_OF} main\ndeb {signed} {_GO_OF} main\n"
    )
    for name in ("lists/partial", "cache/archives/partial"):
        (work / name).mkdir(parents=True)
    own = {
        "Dir::Etc::sourcelist": work / "sources.list",
        "Dir::Etc::sourceparts": "-",
        "Dir::State::Lists": work / "lists",
        "Dir::Cache": work / "cache",
        # It is root's folder, in which apt's own user may not write.
        "APT::Sandbox::User": "root",
    }
    apt = ("apt-get", "--quiet", *(f"--option={name}={value}" for name, value in own.items()))
    _run(*apt, "update", cwd=work)
    _run(*apt, "--download-only", "source", "kubernetes", cwd=work)
    _run(*apt, "download", *_GO, cwd=work)


def _debians_site(work: Path) -> str:
    """Where this machine gets its packages of Debian from."""
    wanted = ("--format", "$(SITE) $(CODENAME) $(COMPONENT)", "Created-By: Packages")
    for line in _run("apt-get", "indextargets", *wanted, cwd=work).splitlines():
        site, *rest = line.split()
        if rest == [_SOURCES_OF, "main"]:
            return site
    raise RuntimeError(f"apt knows no packages of Debian's {_SOURCES_OF} here")


def _run(*argv: str | os.PathLike[str], cwd: Path, environ: dict[str, str] | None = None) -> str:
    words = [os.fspath(word) for word in argv]
    done = subprocess.run(
        words,
        cwd=cwd,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=_BUILD_TIMEOUT_S,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}: exit code {done.returncode}\n{done.stdout[-3000:]}")
    return done.stdout
