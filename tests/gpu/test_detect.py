"""What runs where, for machines that the tests don't have."""

from __future__ import annotations

import dataclasses

import pytest

from hvdtrain.cluster.hosts import Host
from hvdtrain.errors import ConfigurationError, LaunchError
from tests.check.answers import GPU, answer, lost
from tests.gpu.claims import CLAIMS
from tests.gpu.detect import (
    Hardware,
    HostGpus,
    Layout,
    Requirements,
    choose_layout,
    detect,
    hardware_of,
)


def this_host(gpus: int) -> Hardware:
    return Hardware(hosts=(HostGpus(name="localhost", gpus=gpus),))


def named(**gpus: int) -> Hardware:
    return Hardware(
        hosts=tuple(HostGpus(name=name, gpus=count, named=True) for name, count in gpus.items())
    )


def where(hardware: Hardware) -> dict[str, str]:
    """Return for each claim the ranks and GPUs, or why it does not run."""
    return {claim.name: str(choose_layout(claim.needs, hardware)) for claim in CLAIMS}


def test_no_gpu() -> None:
    assert where(this_host(0)) == {
        **dict.fromkeys(("binding", "nccl", "placement", "fallback"), "no GPU"),
        **dict.fromkeys(("sharing", "example", "host-memory"), "no GPU"),
        **dict.fromkeys(("check", "equal", "killed", "elastic"), "2 ranks, CPU"),
        **dict.fromkeys(("mixed", "compiled", "compressed"), "2 ranks, CPU"),
        **dict.fromkeys(("pace", "pace-xla"), "1 rank, CPU"),
        **dict.fromkeys(("overlap", "bench"), "2 ranks, CPU"),
    }


def test_one_gpu() -> None:
    assert where(this_host(1)) == {
        **dict.fromkeys(("check", "binding", "sharing", "nccl"), "1 rank, 1 GPU"),
        **dict.fromkeys(("pace", "pace-xla"), "1 rank, 1 GPU"),
        **dict.fromkeys(("equal", "killed", "elastic", "mixed", "compiled"), "2 ranks, 1 GPU"),
        **dict.fromkeys(("bench", "example"), "2 ranks, 1 GPU"),
        **dict.fromkeys(("placement", "fallback", "overlap", "host-memory"), "needs 2 GPUs"),
        "compressed": "needs 2 GPUs",
    }


@pytest.mark.parametrize("gpus", [2, 8])
def test_several_gpus(gpus: int) -> None:
    assert where(this_host(gpus)) == {
        **dict.fromkeys(("check", "binding", "bench"), f"{gpus} ranks, {gpus} GPUs"),
        **dict.fromkeys(("sharing", "nccl", "pace", "pace-xla"), "1 rank, 1 GPU"),
        **dict.fromkeys(("equal", "killed", "elastic", "mixed", "compiled"), "2 ranks, 2 GPUs"),
        **dict.fromkeys(("host-memory", "example", "compressed"), "2 ranks, 2 GPUs"),
        **dict.fromkeys(("placement", "fallback", "overlap"), "2 ranks, 2 GPUs"),
    }


def test_options() -> None:
    assert Layout(ranks=2, gpus=2).options == ["-np", "2"]
    assert Layout(ranks=2, gpus=2, hosts="a:1,b:1").options == ["-np", "2", "-H", "a:1,b:1"]
    assert Layout(ranks=2, gpus=1).options == ["-np", "2", "--share-gpus"]
    assert Layout(ranks=2, gpus=0).options == ["-np", "2", "--backend", "nccl"]
    assert Layout(ranks=2, gpus=0, backend="mpi").options == ["-np", "2", "--backend", "mpi"]
    assert Layout(ranks=2, gpus=2, backend="mpi").options == ["-np", "2", "--backend", "mpi"]


LAYOUTS = {
    "all GPUs": (named(a=8, b=4), "all", Layout(ranks=12, hosts="a:8,b:4", gpus=12)),
    "two hosts": (named(a=8, b=4), "two", Layout(ranks=2, hosts="a:1,b:1", gpus=2)),
    "one rank": (named(a=8, b=4), "one", Layout(ranks=1, hosts="a:1", gpus=1)),
    "a host without GPUs": (named(a=0, b=4), "two", Layout(ranks=2, hosts="b:2", gpus=2)),
    "one shared GPU": (named(a=0, b=1), "two", Layout(ranks=2, hosts="b:2", gpus=1)),
    "CPUs of two hosts": (named(a=0, b=0), "all", Layout(ranks=2, hosts="a:1,b:1", gpus=0)),
    "CPUs of three hosts": (
        named(a=0, b=0, c=0),
        "all",
        Layout(ranks=3, hosts="a:1,b:1,c:1", gpus=0),
    ),
    "the CPU of one host": (named(a=0), "two", Layout(ranks=2, hosts="a:2", gpus=0)),
    "an IPv6 address": (
        named(**{"fe80::1": 2}),
        "two",
        Layout(ranks=2, hosts="[fe80::1]:2", gpus=2),
    ),
}


@pytest.mark.parametrize(("hardware", "ranks", "layout"), LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_on_named_hosts(hardware: Hardware, ranks, layout: Layout) -> None:
    assert choose_layout(Requirements(ranks=ranks), hardware) == layout


def test_hardware_from_the_answers_of_hosts() -> None:
    hosts = [Host(name="a", slots=8, user="me"), Host(name="b", slots=1)]
    answers = [answer("a", gpus=[GPU, GPU]), answer("b", gpus=[GPU, GPU])]
    found = hardware_of(answers, hosts, named=True)
    assert [(host.name, host.gpus) for host in found.hosts] == [("me@a", 2), ("b", 1)]
    assert found.hosts[0].models == ("NVIDIA H200", "NVIDIA H200")
    assert found.gpus == 3


def test_gpus_that_can_not_be_used_are_an_error() -> None:
    hosts = [Host(name="a", slots=1)]
    with pytest.raises(LaunchError, match="the GPUs of a can't be used: CUDA fails"):
        hardware_of([answer("a", gpu_error="CUDA fails")], hosts, named=False)
    with pytest.raises(LaunchError, match="no answer in time"):
        hardware_of([answer("a", errors={"GPUs": "no answer in time"})], hosts, named=False)
    lost_gpu = dataclasses.replace(GPU, id="")
    assert hardware_of([answer("a", gpus=[lost_gpu])], hosts, named=False).gpus == 0


def test_a_host_that_does_not_answer_is_an_error() -> None:
    with pytest.raises(LaunchError, match=r"a did not answer \(no route\)"):
        hardware_of(
            [lost("a", "no route", "no route")],
            [Host(name="a", slots=1)],
            named=True,
        )


def test_a_missing_hostfile_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="/nowhere can't be read"):
        detect("/nowhere", {})
