from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.check.cli import format_report
from hvdtrain.cli import main
from hvdtrain.remote.host_probe import read_facts
from tests.check.answers import answer, lost, problems
from tests.harness.fake_driver import GIB, FakeDriver, uuid_of
from tests.harness.jobs import REPOSITORY, Completed
from tests.testbed.cluster import Cluster
from tests.testbed.faults import bound, empty_folder, ssh_config

CHECK = [sys.executable, "-m", "hvdtrain", "check"]
FOUR = "node1,node2,node3,node4"


def states(done: Completed) -> dict[str, str]:
    """Return the state column of the table by host."""
    lines = done.stdout.partition("\n\n")[0].splitlines()
    start, end = lines[0].index("state"), lines[0].index("ranks")
    return {line.split()[0]: line[start:end].strip() for line in lines[1:]}


# Warnings depend on the machine's load and free memory.
READY = ("ok", "warning")


def test_a_report_without_problems() -> None:
    answers = [answer("a"), answer("b", 4)]
    assert (
        format_report(answer("a"), answers, problems(*answers))
        == """\
host  state  ranks  cores  load  GPUs  /dev/shm  network                 clock
a     ok         2      8   0.2  none    500 MB  eth0 10.0.0.1 10 Gb/s  +0.0 s
b     ok         4      8   0.2  none    500 MB  eth0 10.0.0.2 10 Gb/s  +0.0 s

all hosts: Python 3.11.7, hvdtrain 0.1.0, TensorFlow 2.21.0, Keras 3.15.1, mpi4py 4.1.2, \
Open MPI v5.0.11"""
    )


def test_a_report_with_an_unreachable_host() -> None:
    message = "ssh: connect to host b port 22: Connection refused"
    answers = [answer("a"), lost("b", "refused", message)]
    assert (
        format_report(answer("a"), answers, problems(*answers))
        == """\
host  state    ranks  cores  load  GPUs  /dev/shm  network                 clock
a     ok           2      8   0.2  none    500 MB  eth0 10.0.0.1 10 Gb/s  +0.0 s
b     refused      2      -     -  -            -  -                           -

all that answered: Python 3.11.7, hvdtrain 0.1.0, TensorFlow 2.21.0, Keras 3.15.1, \
mpi4py 4.1.2, Open MPI v5.0.11

problem on b: its ssh port refuses connections \
(ssh: connect to host b port 22: Connection refused)
  expected: ssh logs in without prompting
  fix: start sshd there (systemctl start ssh), or set its Port for Host b in ~/.ssh/config; \
then test with: ssh -o BatchMode=yes b true"""
    )


@pytest.mark.mpi
def test_this_host(run_command) -> None:
    done = run_command([*CHECK], timeout_s=60)
    assert done.returncode == 0, done
    assert states(done).keys() == {"localhost"}
    assert states(done)["localhost"] in READY
    assert "localhost: Python 3." in done.stdout
    assert "allreduce over 2 ranks (shared_memory): 4.0 MB in" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("ready to train")
    assert done.stderr == ""


_GPUS = f"""
gpu {uuid_of("a")}
model NVIDIA H100
memory {80 * GIB}
ecc 2
process 1 {3 * GIB}
gpu {uuid_of("b")}
model NVIDIA T4
memory {16 * GIB}
gpu {uuid_of("c")}
lost 15
"""


def test_gpus(run_command, fake_driver: FakeDriver) -> None:
    driver = fake_driver.environ(_GPUS)
    argv = [*CHECK, "--no-allreduce", "-np", "3"]
    done = run_command(argv, timeout_s=60, env={**driver, "CUDA_VISIBLE_DEVICES": None})
    assert done.returncode == 1, done
    assert " 2 NVIDIA H100/NVIDIA T4 " in done.stdout
    assert "problem on localhost: TensorFlow sees none of its 2 GPUs" in done.stdout
    name = f"GPU 0 (NVIDIA H100, {uuid_of('a')})"
    for line in (
        "problem on localhost: it has 2 GPUs for 3 ranks",
        f"warning on localhost: {name} is faulty: 2 uncorrectable memory errors since the driver",
        f"warning on localhost: {name} is in use by process 1 (",
        "warning on localhost: GPU 2 is faulty: GPU is lost",
        "warning on localhost: GPUs differ: NVIDIA H100, driver 570.86 (80 GiB) on localhost; NVID",
        "ps -fp 1;",
    ):
        assert line in done.stdout, done
    # One rank on the faultless GPU.
    argv = [*CHECK, "--no-allreduce", "--no-import", "-np", "1"]
    done = run_command(argv, timeout_s=60, env={**driver, "CUDA_VISIBLE_DEVICES": "GPU-b"})
    assert done.returncode == 0, done
    assert " 1 NVIDIA T4 " in done.stdout
    assert "GPU 0" not in done.stdout


def test_a_failure_of_cuda(run_command, fake_driver: FakeDriver) -> None:
    driver = fake_driver.environ(f"cuda 802\n{_GPUS}")
    argv = [*CHECK, "--no-allreduce", "--no-import"]
    done = run_command(argv, timeout_s=60, env={**driver, "CUDA_VISIBLE_DEVICES": None})
    assert done.returncode == 1, done
    assert "problem on localhost: CUDA fails: system not yet initialized (code 802)" in done.stdout


def test_no_allreduce_and_no_files_left(run_command, tmp_path: Path) -> None:
    done = run_command([*CHECK, "--no-allreduce", "--no-import"], timeout_s=60)
    assert done.returncode == 0, done
    assert "allreduce" not in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_an_mpi_that_can_not_be_loaded_is_a_problem(run_command) -> None:
    done = run_command([*CHECK, "--no-import"], timeout_s=60, env={"MPI4PY_MPIABI": "nonsense"})
    assert done.returncode == 1, done
    assert "problem on localhost: MPI is missing" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("not ready to train: 1 problem on localhost")


@pytest.mark.mpi
def test_an_allreduce_that_fails_is_a_problem(run_command) -> None:
    done = run_command([*CHECK, "--no-import"], timeout_s=60, env={"OMPI_MCA_pml": "nonsense"})
    assert done.returncode == 1, done
    assert "problem: each host is ready, but an allreduce over all" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("not ready to train: 1 problem")


@pytest.mark.mpi
def test_jax_as_backend(run_command, environment, tmp_path: Path) -> None:
    """TensorFlow may be missing, and JAX may be missing or broken."""
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['tensorflow'] = None")
    env = {"KERAS_BACKEND": "jax", "PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    argv = [str(environment("jax")), *CHECK[1:]]
    done = run_command([*argv, "--report", "report.txt"], timeout_s=60, env=env)
    assert done.returncode == 0, done
    assert "allreduce over 2 ranks (shared_memory): 4.0 MB in" in done.stdout
    assert ", JAX 0." in done.stdout
    assert "TensorFlow" not in done.stdout
    report = (tmp_path / "report.txt").read_text()
    assert "== localhost: Keras' backend ==\njax: sees 0 GPUs\n" in report
    assert "\nKERAS_BACKEND=jax\n" in report

    (tmp_path / "jax.py").write_text("raise ImportError('no jaxlib')")
    done = run_command(argv, timeout_s=60, env=env)
    assert done.returncode == 1, done
    assert "problem on localhost: JAX can't be imported (ImportError: no jaxlib)" in done.stdout
    (tmp_path / "jax.py").unlink()

    done = run_command([*CHECK], timeout_s=60, env=env)
    assert done.returncode == 1, done
    assert "problem on localhost: JAX is missing" in done.stdout
    assert 'fix: python -m pip install "hvdtrain[jax]"; ' in done.stdout


USAGE_ERRORS = {
    "both": (["-H", "a", "--hostfile", "b"], "not allowed with argument -H"),
    "hosts": (["-H", "a:x"], "is invalid"),
    "hostfile": (["--hostfile", "/nowhere/hosts"], "/nowhere/hosts can't be read"),
    "ranks": (["-np", "0"], "got '0'"),
    "too many": (["-np", "5", "-H", "a:2,b:2"], "5 ranks don't fit"),
    "unknown": (["--colour"], "--colour"),
    "hosts and pods": (["--on", "kubernetes", "-H", "a"], "-H names hosts"),
    "volume": (["--volume", "data"], "expected CLAIM:/PATH"),
    "on": (["--on", "slurm"], "invalid choice: 'slurm'"),
}


@pytest.mark.parametrize(("argv", "message"), USAGE_ERRORS.values(), ids=USAGE_ERRORS)
def test_usage_errors_exit_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *argv]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("argv", [["--on", "kubernetes"], ["--gpus-per-rank", "1"]])
def test_a_missing_cluster_is_a_problem(
    argv: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    pytest.importorskip("kubernetes")
    empty = {"apiVersion": "v1", "kind": "Config", "clusters": [], "users": [], "contexts": []}
    (config := tmp_path / "config").write_text(json.dumps(empty))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(config))
    assert main(["check", *argv]) == 1
    shown = capsys.readouterr().out
    assert "problem: no cluster is configured" in shown
    assert shown.endswith("\nnot ready to train: 1 problem\n")


def test_missing_packages_are_a_problem(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes.client", None)
    assert main(["check", "--on", "kubernetes"]) == 1
    shown = capsys.readouterr().out
    assert "problem: jobs on Kubernetes need the kubernetes package: pip install" in shown


def test_the_probe_of_this_host(tmp_path: Path) -> None:
    request = {"names": ["localhost", "no such name"], "folder": str(tmp_path / "gone")}
    request |= {"token_file": "x", "token": "y", "addresses": ["127.0.0.1"], "port": 1}
    argv = [sys.executable, "-m", "hvdtrain.remote.host_probe", json.dumps(request)]
    shown = subprocess.check_output(argv, cwd=REPOSITORY, text=True, timeout=30)
    facts = read_facts(shown)
    assert facts is not None
    assert facts.errors == {}
    assert facts.names["localhost"]
    assert facts.names["no such name"] == []
    assert facts.folder == "absent"
    assert facts.back_error.startswith("127.0.0.1: ")
    assert facts.cores
    assert facts.mpi


def test_the_probe_reports_failed_parts() -> None:
    request = json.dumps({"folder": None, "token_file": "x", "of_a_later_version": 1})
    argv = [sys.executable, "-m", "hvdtrain.remote.host_probe", request]
    facts = read_facts(subprocess.check_output(argv, cwd=REPOSITORY, text=True, timeout=30))
    assert facts is not None
    assert list(facts.errors) == ["folder"]
    assert facts.errors["folder"].startswith("TypeError")
    assert facts.cores


def test_the_probe_imports_nothing_heavy() -> None:
    program = (
        "import sys, hvdtrain.remote.host_probe, hvdtrain.check.cli\n"
        "heavy = {'tensorflow', 'keras', 'numpy', 'mpi4py', 'importlib.metadata'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    argv = [sys.executable, "-c", program]
    assert subprocess.check_output(argv, cwd=REPOSITORY, text=True, timeout=30) == "[]\n"


def check(cluster: Cluster, *argv: str, host: str | None = None) -> Completed:
    # On the cluster's four hosts, which share two cores, importing TensorFlow takes long.
    return cluster.run([*CHECK, "--no-import", *argv], host=host, timeout_s=80)


@pytest.mark.cluster
class TestCluster:
    def test_four_hosts(self, cluster: Cluster) -> None:
        report = cluster.folder / "report.txt"
        done = check(cluster, "-H", FOUR, "--report", str(report))
        assert done.returncode == 0, done
        for host in cluster.hosts:
            assert f"== {host}: networks ==\neth0: {cluster.address(host)}, " in report.read_text()
        assert states(done).keys() == set(FOUR.split(","))
        assert set(states(done).values()) <= set(READY)
        for host in cluster.hosts:
            assert f"eth0 {cluster.address(host)}" in done.stdout
        assert "allreduce over 4 ranks (mpi): 4.0 MB in" in done.stdout
        assert not list(cluster.folder.glob(".hvdtrain-check-*"))

    def test_two_hosts_from_one_of_them(self, cluster: Cluster) -> None:
        hostfile = cluster.folder / "hosts"
        hostfile.write_text("node1 slots=2\nnode2 slots=2\n")
        done = check(cluster, "--hostfile", str(hostfile), host="node1")
        assert done.returncode == 0, done
        assert f"eth0 {cluster.address('node1')}" in done.stdout
        assert "allreduce over 4 ranks (shared_memory)" in done.stdout

    def test_a_dead_host(self, cluster: Cluster) -> None:
        cluster.cut("node3")
        try:
            done = check(cluster, "-H", FOUR)
        finally:
            cluster.restore("node3")
        assert done.returncode == 1, done
        assert states(done)["node3"] in ("timed out", "no route")
        assert {states(done)[host] for host in ("node1", "node2", "node4")} <= set(READY)
        assert "ping -c1 node3" in done.stdout
        assert "not ready to train: 1 problem on node3" in done.stdout
        assert "allreduce" not in done.stdout
        assert done.seconds < 30

    def test_unreachable_hosts(self, cluster: Cluster) -> None:
        keyless = "Host node3\nIdentityFile /nowhere\nIdentitiesOnly yes\nIdentityAgent none\n"
        cluster.stop_sshd("node2")
        try:
            with ssh_config(cluster, f"{keyless}Host node4\nUserKnownHostsFile /dev/null"):
                done = check(cluster, "-H", f"{FOUR},node5")
        finally:
            cluster.start_sshd("node2")
        assert done.returncode == 1, done
        by_host = states(done)
        assert by_host.pop("node1") in READY
        assert by_host == {
            "node2": "refused",
            "node3": "key refused",
            "node4": "host key",
            "node5": "unknown name",
        }
        for text in ("Connection refused", "ssh-copy-id root@node3", "ssh-keygen -R node4"):
            assert text in done.stdout
        assert "not ready to train: 4 problems on node2, node3, node4, node5" in done.stdout

    def test_hosts_without_the_python_and_without_hvdtrain(self, cluster: Cluster) -> None:
        empty = empty_folder(cluster)
        with (
            bound(cluster, "node2", empty, f"{sys.prefix}/bin"),
            bound(cluster, "node3", empty, f"{REPOSITORY}/hvdtrain"),
        ):
            done = check(cluster, "-H", "node1,node2,node3")
        assert done.returncode == 1, done
        assert (states(done)["node2"], states(done)["node3"]) == ("no Python", "no hvdtrain")
        assert f"expected: {sys.executable}, at the same path on every host" in done.stdout

    def test_a_name_that_resolves_to_loopback(self, cluster: Cluster) -> None:
        text = cluster.run(["cat", "/etc/hosts"], timeout_s=20).stdout
        hosts = cluster.folder / "hosts-of-node2"
        address = cluster.address("node1")
        hosts.write_text(text.replace(f"{address} node1", "127.0.1.1 node1"))
        with bound(cluster, "node2", hosts, "/etc/hosts"):
            done = check(cluster, "-H", "node1,node2")
        assert done.returncode == 1, done
        assert states(done)["node2"] == "problem"
        assert "problem on node2: the name node1 resolves to a loopback" in done.stdout

    def test_little_shared_memory(self, cluster: Cluster) -> None:
        mount = ["mount", "--no-mtab", "-t", "tmpfs", "-o", "size=16m", "tmpfs", "/dev/shm"]
        assert cluster.run(mount, host="node2", timeout_s=20).returncode == 0
        try:
            done = check(cluster, "-H", "node1:2,node2:2")
        finally:
            cluster.run(["umount", "--no-mtab", "/dev/shm"], host="node2", timeout_s=20)
        assert done.returncode == 0, done
        assert "warning on node2: /dev/shm has 17 MB free of 17 MB" in done.stdout
        assert "allreduce over 4 ranks (shared_memory)" in done.stdout

    def test_a_folder_that_is_not_shared(self, cluster: Cluster) -> None:
        done = cluster.run(
            [*CHECK, "--no-allreduce", "--no-import", "-H", "node1"], timeout_s=60, cwd="/tmp"
        )
        assert done.returncode == 0, done
        assert "warning on node1: the working directory exists there, but" in done.stdout

    def test_under_slurm(self, cluster: Cluster) -> None:
        argv = ["salloc", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2", *CHECK, "--no-import"]
        done = cluster.run(argv, timeout_s=80)
        assert done.returncode == 0, done
        assert set(states(done).values()) <= set(READY)
        assert len(states(done)) == 2
        assert "allreduce over 4 ranks (shared_memory)" in done.stdout

    def test_under_slurm_without_the_python(self, cluster: Cluster) -> None:
        argv = ["salloc", "--nodes=2", "--nodelist=node1,node2", *CHECK, "--no-import"]
        with bound(cluster, "node2", empty_folder(cluster), f"{sys.prefix}/bin"):
            done = cluster.run(argv, timeout_s=80)
        assert done.returncode == 1, done
        assert states(done)["node1"] in READY
        assert states(done)["node2"] == "no Python"
