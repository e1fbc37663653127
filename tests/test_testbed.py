"""The test cluster of four hosts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.harness.jobs import REPOSITORY, clean_environment
from tests.testbed.cluster import Cluster
from tests.testbed.faults import disk
from tests.testbed.processes import in_networks

pytestmark = pytest.mark.timeout(90)


def test_ssh_reaches_each_host(cluster: Cluster) -> None:
    for source in (None, "node1"):
        for host in cluster.hosts:
            done = cluster.run(["ssh", host, "hostname"], host=source, timeout_s=20)
            assert (done.stdout, done.stderr) == (f"{host}\n", ""), done


@pytest.mark.parametrize("place", ["/tmp", "/dev/shm"])
def test_hosts_have_separate_folders(cluster: Cluster, place: str) -> None:
    path = f"{place}/only-on-node1-{os.getpid()}"
    assert cluster.run(["touch", path], host="node1", timeout_s=20).returncode == 0
    assert cluster.run(["ls", path], host="node1", timeout_s=20).returncode == 0
    assert cluster.run(["ls", path], host="node2", timeout_s=20).returncode != 0
    assert not Path(path).exists()


def test_cut_and_reconnect_a_host(cluster: Cluster) -> None:
    argv = ["ssh", "-o", "ConnectTimeout=1", "node2", "hostname"]
    cluster.cut("node2")
    try:
        assert cluster.run(argv, timeout_s=20).returncode == 255
        assert cluster.run(["ssh", "node3", "hostname"], timeout_s=20).stdout == "node3\n"
        assert cluster.run(["hostname"], host="node2", timeout_s=20).stdout == "node2\n"
    finally:
        cluster.restore("node2")
    assert cluster.run(argv, timeout_s=20).stdout == "node2\n"


def test_fill_and_free_a_disk(cluster: Cluster) -> None:
    with disk(cluster, "node3", cluster.folder / "small", 65536) as small:
        place = cluster.folder / "small" / "data"

        def write(size: int) -> int:
            argv = ["dd", "if=/dev/zero", f"of={place}", f"bs={size}", "count=1"]
            return cluster.run(argv, host="node3", timeout_s=20).returncode

        assert write(32768) == 0
        assert (small.path / "data").stat().st_size == 32768
        (small.path / "data").unlink()
        small.fill(8192)
        assert write(4096) == 0
        assert write(32768) == 1
        small.free()
        assert write(32768) == 0
        assert not any((cluster.folder / "small").iterdir()), "only node3 has the disk"
    assert cluster.run(["ls", place.parent], host="node3", timeout_s=20).stdout == ""


def test_stop_and_start_sshd(cluster: Cluster) -> None:
    cluster.stop_sshd("node3")
    try:
        refused = cluster.run(["ssh", "node3", "hostname"], timeout_s=20)
    finally:
        cluster.start_sshd("node3")
    assert "Connection refused" in refused.stderr
    assert cluster.run(["ssh", "node3", "hostname"], timeout_s=20).stdout == "node3\n"


def test_processes_by_host(cluster: Cluster) -> None:
    marker = f"MARKED_BY={os.getpid()}"
    name, value = marker.split("=")
    started = [
        cluster.start(["sleep", "60"], host=host, env={name: value}) for host in (None, "node1")
    ]
    started.append(cluster.start(["ssh", "node4", f"{marker} exec sleep 60"]))
    deadline = time.monotonic() + 20
    while len(processes := cluster.processes(marker)) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in started:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)
    assert sorted(host for host, _, _ in processes) == ["head", "node1", "node4"]
    assert {argv for _, _, argv in processes} == {("sleep", "60")}
    assert {process.pid for process in started[:2]} <= {pid for _, pid, _ in processes}
    assert [process.returncode for process in started[:2]] == [-signal.SIGTERM] * 2
    os.kill(next(pid for host, pid, _ in processes if host == "node4"), signal.SIGKILL)


def test_run_kills_all_processes_after_the_time_out(cluster: Cluster) -> None:
    marker = f"TAKES_TOO_LONG={os.getpid()}"
    name, value = marker.split("=")
    # In a separate process group, and ignoring SIGTERM.
    script = "import os, signal, time; signal.signal(15, signal.SIG_IGN); os.setpgid(0, 0) if " + (
        "os.fork() == 0 else None; print('started', flush=True); time.sleep(60)"
    )
    with pytest.raises(TimeoutError, match=r"started(.|\n)*--- slurmctld"):
        cluster.run([sys.executable, "-c", script], host="node1", timeout_s=2, env={name: value})
    assert cluster.processes(marker) == []


# Builds a separate cluster, leaves programs running on it, and ends in different ways.
BUILD_AND_END = """
import json, os, signal, sys
from tests.testbed import slurm
from tests.testbed.cluster import MARK, Cluster
from tests.testbed.processes import with_environment, network_of

def report():
    pids = with_environment(cluster._mark)
    networks = {network_of(pid) for pid in pids} - {network_of(os.getpid())}
    print(json.dumps([str(cluster.folder.parent), sorted(networks)]), flush=True)

def broken():
    report()
    return ["false"]

ending = sys.argv[1]
cluster = Cluster()
if ending == "half-built":
    slurm.slurmd_argv = broken
with cluster:
    report()
    cluster.start(["srun", "-N2", "sleep", "1000"])
    cluster.start(["sleep", "1000"], env={MARK: None})
    cluster.run(["ssh", "node2", "setsid sleep 1000 >/dev/null 2>&1 &"], timeout_s=20)
    if ending in ("SIGKILL", "SIGTERM"):
        os.kill(os.getpid(), signal.Signals[ending])
"""


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("ending", "code"), [("closed", 0), ("half-built", 1), ("SIGTERM", -15), ("SIGKILL", -9)]
)
def test_a_cluster_leaves_nothing(ending: str, code: int) -> None:
    before = _machine()
    # Unlike run_command, this doesn't end orphans, which must end by themselves.
    done = subprocess.run(
        [sys.executable, "-c", BUILD_AND_END, ending],
        capture_output=True,
        text=True,
        env=clean_environment(),
        timeout=60,
    )
    assert done.returncode == code, done
    folder, networks = json.loads(done.stdout.splitlines()[0])
    assert len(networks) == 5
    deadline = time.monotonic() + (10 if code < 0 else 0)
    while (left := _left(folder, networks)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left
    assert _machine() == before


def _left(folder: str, networks: list[int]) -> list[str]:
    """Return the remaining processes and folders of a cluster."""
    processes = [f"process {pid}" for pid in in_networks(networks)]
    return processes + [folder] * Path(folder).exists()


def _machine() -> dict[str, list[str]]:
    """Return the state that a cluster could change outside of its namespaces."""
    return {
        "links": sorted(os.listdir("/sys/class/net")),
        "namespaces": [str(path) for path in Path("/run").glob("netns/*")],
        "mounts": Path("/proc/self/mountinfo").read_text().splitlines(),
        "run": sorted(str(path) for path in Path("/run").glob("**/*")),
        "control groups": sorted(str(path) for path in Path("/sys/fs/cgroup").glob("*/*slurm*")),
        "home": sorted(str(path) for path in Path.home().glob(".ssh/*")),
    }


@pytest.mark.parametrize(("required", "outcome"), [("", "skipped"), ("mpi,cluster", "errors")])
def test_missing_packages_skip_or_fail(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, required: str, outcome: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("HVDTRAIN_TEST_REQUIRE", required)
    pytester.makeconftest(
        """
        from tests.testbed import plugin

        plugin.missing_requirements = lambda: "needs what is not here"
        pytest_plugins = ("tests.harness.plugin", "tests.testbed.plugin")
        """
    )
    pytester.makepyfile(
        """
        import pytest

        def test_by_fixture(cluster): ...

        @pytest.mark.cluster
        def test_by_marker(): ...

        @pytest.mark.mpi
        def test_with_mpi(): ...

        def test_quick(): ...
        """
    )
    result = pytester.runpytest_subprocess("-v", "-rA", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=2, **{outcome: 2})
    order = ["*test_quick *", "*test_by_fixture *", "*test_by_marker *", "*test_with_mpi *"]
    result.stdout.fnmatch_lines(order)
    result.stdout.fnmatch_lines(["*needs what is not here*"])
