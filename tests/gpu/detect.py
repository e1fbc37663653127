"""Finds hosts and GPUs, and decides from them which claims can run, and on which ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hvdtrain.check.survey import probe_hosts
from hvdtrain.cluster.hosts import Host, is_this_host, slurm_hosts, ssh_user
from hvdtrain.errors import LaunchError
from hvdtrain.launch.hosts import named_hosts
from hvdtrain.remote.remote_probe import Answer, Method
from hvdtrain.text import plural

__all__ = [
    "Hardware",
    "HostGpus",
    "Layout",
    "Ranks",
    "Requirements",
    "choose_layout",
    "detect",
    "hardware_of",
]

Ranks = Literal["one", "two", "all", "several"]
DEFAULT_CPU_RANKS = 2


@dataclass(frozen=True, kw_only=True)
class HostGpus:
    """A host, and the number and models of the GPUs that the suite may use there.

    ``named`` is False for this host and the hosts of a Slurm job, which ``hvdtrain run`` finds.
    """

    name: str
    gpus: int
    models: tuple[str, ...] = ()
    named: bool = False


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """All hosts."""

    hosts: tuple[HostGpus, ...]

    @property
    def gpus(self) -> int:
        return sum(host.gpus for host in self.hosts)


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """What a claim needs."""

    # one rank, two, one per GPU (``all``), or one per GPU but at least two (``several``)
    ranks: Ranks
    gpus: int = 0  # minimum number of GPUs; 0 if the claim also holds on CPUs
    # Whether two ranks need a GPU each. Otherwise they may share the only one.
    own_gpus: bool = False


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the ranks of a job run."""

    ranks: int  # number of ranks
    hosts: str = ""  # value of ``-H``; empty for this host or the Slurm job's
    gpus: int  # number of GPUs that the ranks use
    # value of ``--backend``; if empty, NCCL between GPUs and TensorFlow's ring on CPUs
    backend: str = ""

    @property
    def shares_gpu(self) -> bool:
        return 0 < self.gpus < self.ranks

    @property
    def options(self) -> list[str]:
        """The options of ``hvdtrain run``."""
        options = ["-np", str(self.ranks)]
        if self.hosts:
            options += ["-H", self.hosts]
        if backend := self.backend or ("" if self.gpus else "nccl"):
            options += ["--backend", backend]
        if self.shares_gpu:
            options += ["--share-gpus"]
        return options

    def __str__(self) -> str:
        devices = plural(self.gpus, "GPU") if self.gpus else "CPU"
        return f"{plural(self.ranks, 'rank')}, {devices}"


def choose_layout(needs: Requirements, hardware: Hardware) -> Layout | str:
    """Return where the ranks of a claim run, or why the claim can't run."""
    if hardware.gpus < needs.gpus:
        return "no GPU" if not hardware.gpus else f"needs {needs.gpus} GPUs"
    if not hardware.gpus:
        return _on_cpus(needs.ranks, hardware)
    usable = [host for host in hardware.hosts if host.gpus]
    if needs.ranks == "all" or (needs.ranks == "several" and hardware.gpus > 1):
        return _layout(usable, [host.gpus for host in usable])
    if needs.ranks == "one":
        return _layout(usable[:1], [1])
    if len(usable) > 1:
        return _layout(usable[:2], [1, 1])
    if hardware.gpus > 1:
        return _layout(usable, [2])
    if needs.own_gpus:
        return "needs 2 GPUs"
    return _layout(usable, [2], gpus=1)


def _on_cpus(ranks: Ranks, hardware: Hardware) -> Layout:
    count = 1 if ranks == "one" else max(DEFAULT_CPU_RANKS, len(hardware.hosts))
    count = min(count, DEFAULT_CPU_RANKS) if ranks == "two" else count
    hosts = list(hardware.hosts[:count])
    return _layout(hosts, [-(-count // len(hosts))] * len(hosts), gpus=0)


def _layout(hosts: Sequence[HostGpus], ranks: Sequence[int], *, gpus: int | None = None) -> Layout:
    total = sum(ranks)
    text = ""
    if hosts[0].named:
        names = [f"[{host.name}]" if ":" in host.name else host.name for host in hosts]
        text = ",".join(f"{name}:{count}" for name, count in zip(names, ranks))
    return Layout(ranks=total, hosts=text, gpus=total if gpus is None else gpus)


def hardware_of(answers: Sequence[Answer], hosts: Sequence[Host], *, named: bool) -> Hardware:
    """Return the hardware from the answers of all hosts.

    The number of GPUs is limited to the slots of a hostfile or of a Slurm job.

    Raises:
        LaunchError: If a host did not answer, or if its GPUs can't be used.
    """
    found = []
    for answer, host in zip(answers, hosts):
        if answer.facts is None:
            reason = answer.failure.message if answer.failure else ""
            raise LaunchError(
                f"{host.name} did not answer ({reason}); run hvdtrain check for the remedy"
            )
        if problem := answer.facts.gpu_error or answer.facts.errors.get("GPUs"):
            raise LaunchError(
                f"the GPUs of {host.name} can't be used: {problem}; set CUDA_VISIBLE_DEVICES=-1 to "
                "test on the CPU"
            )
        models = tuple(gpu.model for gpu in answer.facts.usable_gpus)
        name = f"{host.user}@{host.name}" if host.user else host.name
        gpus = min(len(models), host.slots)
        found.append(HostGpus(name=name, gpus=gpus, models=models, named=named))
    return Hardware(hosts=tuple(found))


def detect(hostfile: str | None, environ: Mapping[str, str]) -> Hardware:
    """Find the GPUs of this host, of a Slurm job's hosts, or of those in a hostfile.

    Raises:
        ConfigurationError: If the hostfile can't be read or is not valid.
        LaunchError: If a host did not answer, or if its GPUs can't be used.
    """
    named = named_hosts(None, hostfile)
    allocated = None if named else slurm_hosts(environ)
    hosts = named or allocated or [Host(name="localhost", slots=1 << 10)]
    method: Method = "ssh" if named else "srun" if allocated else "local"
    user = ssh_user(host for host in hosts if not is_this_host(host.name))
    ranks = {host.name: host.slots for host in hosts}
    _, answers = probe_hosts(
        ranks, environ, method=method, ssh=["-l", user] if user and named else []
    )
    return hardware_of(answers, hosts, named=bool(named))
