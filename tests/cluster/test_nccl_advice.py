"""Causes and remedies of NCCL's failures, for texts from the sources of NCCL and TensorFlow."""

import pytest

from hvdtrain.cluster.nccl_advice import ProbeReport, explain, remedy_for, socket_problem


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        (
            "Duplicate GPU detected : rank 0 and rank 4 both on CUDA device 7000",
            "a GPU of its own",
        ),
        (
            "Mismatched NCCL version detected : rank 1 version 22705 rank 0 version 22703",
            "the same TensorFlow and nvidia-nccl-cu12",
        ),
        ("Message truncated : received 1024 bytes instead of 256", "the same TensorFlow"),
        ("Bootstrap : no socket interface found", "set NCCL_SOCKET_IFNAME"),
        ("NET/Socket : No usable listening interface found", "set NCCL_SOCKET_IFNAME"),
        (
            "Error while creating shared memory segment /dev/shm/nccl-cjY8K5 (size 10617216), "
            "error: No space left on device (28)",
            "--shm-size=1g or --ipc=host",
        ),
        ("Error: failed to extend /dev/shm/nccl-UbzKZ9 to 9637892 bytes", "--shm-size=1g"),
        (
            "socketPollConnect: connect to 10.0.0.1<45017> returned Connection refused, exceeded "
            "error retry count (35)",
            "all hosts must reach each other",
        ),
        ("socketStartConnect: Connect to 10.0.0.1<45017> failed : No route to host", "NCCL_SOCKET"),
        ("NCCL: remote process exited or there was a network error", "all hosts must reach"),
        ("Call to ibv_modify_qp failed with 110 Connection timed out, on dev", "NCCL_IB_DISABLE=1"),
        ("NCCL: Unable to load NCCL library", "install tensorflow[and-cuda]"),
        (
            "NCCL: unhandled system error (run with NCCL_DEBUG=INFO for details). Set "
            "NCCL_DEBUG=WARN for detail.",
            "set NCCL_DEBUG=INFO",
        ),
        ("Cuda failure 2 'out of memory'", "end other programs on the GPU"),
        ("no result within 60 s", "all hosts must reach each other"),
    ],
)
def test_remedies_for_known_errors(text: str, remedy: str) -> None:
    assert remedy in remedy_for(text)


INTERFACES = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.1"], "eth1": [], "ib0": ["fe80::2"]}


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("", ""),
        ("eth0", ""),
        ("eth", ""),
        ("=eth0:4000", ""),
        ("wlan,ib", ""),
        ("^lo,docker", ""),
        ("^=lo", ""),
        ("bond0", "NCCL_SOCKET_IFNAME=bond0 selects no interface with an address (lo, eth0, ib0)"),
        ("eth1", "NCCL_SOCKET_IFNAME=eth1 selects no interface with an address (lo, eth0, ib0)"),
        ("=eth", "NCCL_SOCKET_IFNAME==eth selects no interface with an address (lo, eth0, ib0)"),
        (
            "^lo,eth,ib",
            "NCCL_SOCKET_IFNAME=^lo,eth,ib selects no interface with an address (lo, eth0, ib0)",
        ),
        ("lo", "NCCL_SOCKET_IFNAME=lo selects the loopback interface"),
    ],
)
def test_network_interfaces(setting: str, problem: str) -> None:
    environ = {"NCCL_SOCKET_IFNAME": setting} if setting else {}
    assert socket_problem(environ, INTERFACES, several_hosts=True) == problem
    if "loopback" in problem:
        assert socket_problem(environ, INTERFACES, several_hosts=False) == ""


FAILED = "NCCL: unhandled system error (run with NCCL_DEBUG=INFO for details)."
DUPLICATE = "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 7000"
SMALL_SHM = "Error while creating shared memory segment /dev/shm/nccl-cjY8K5 (size 10617216)"


@pytest.mark.parametrize(
    ("reports", "text"),
    [
        (
            [ProbeReport("a", ""), ProbeReport("b", FAILED, SMALL_SHM)],
            f"rank 1 (b): {FAILED} ({SMALL_SHM}); /dev/shm is too small; ",
        ),
        (
            [ProbeReport("a", "NCCL: invalid usage", DUPLICATE)] * 2 + [ProbeReport("b", "")],
            f"ranks 0, 1 (a): NCCL: invalid usage ({DUPLICATE}); give each rank a GPU of its own",
        ),
        (
            # The error with a known remedy is the cause of the other.
            [ProbeReport("a", FAILED), ProbeReport("b", FAILED, SMALL_SHM)],
            f"rank 1 (b): {FAILED} ({SMALL_SHM})",
        ),
        (
            [ProbeReport("a", FAILED), ProbeReport("b", FAILED)],
            f"ranks 0, 1 (a, b): {FAILED[:-1]}; set NCCL_DEBUG=INFO",
        ),
    ],
)
def test_the_explanation_names_ranks_hosts_and_a_remedy(
    reports: list[ProbeReport], text: str
) -> None:
    assert explain(reports).startswith(text)
