"""``hvdtrain run`` on four hosts, over ssh and under Slurm: plans, failures and signals."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from tests.harness.jobs import REPOSITORY
from tests.launch.jobs import FAULTS, HVDTRAIN, ON_CLUSTER, ClusterJob, program
from tests.testbed.cluster import Cluster
from tests.testbed.faults import bound, empty_folder, ssh_config

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

HOSTS = "node1:1,node2:2,node3:1"
RANKS = 4
WAYS = ["ssh", "slurm"]


def command(way: str, *options: str, body: str, python: Sequence[str] = ("python",)) -> list[str]:
    """Return a command of ``hvdtrain run``, over ssh or in an allocation."""
    if way == "ssh":
        return [*HVDTRAIN, "-H", HOSTS, *options, "--", *program(body, python)]
    nodes = ["--nodes=3", "--nodelist=node1,node2,node3"]
    allocate = ["salloc", "--quiet", *nodes, f"--ntasks={RANKS}", "--overcommit"]
    return [*allocate, *HVDTRAIN, *options, "--", *program(body, python)]


@pytest.mark.parametrize("way", WAYS)
def test_ranks_run_where_planned(cluster: Cluster, way: str) -> None:
    """All ranks get the launcher's backend of Keras."""
    body = "import socket; print(rank, socket.gethostname(), os.environ['KERAS_BACKEND'], sep=':')"
    env = {**ON_CLUSTER, "KERAS_BACKEND": "jax"}
    plan = cluster.run(command(way, "--dry-run", body=body), env=env, timeout_s=60)
    assert plan.returncode == 0, plan
    table = [[*line.split()[:2], "jax"] for line in plan.stdout.splitlines()[1 : RANKS + 1]]
    done = cluster.run(command(way, body=body), env=env, timeout_s=60)
    assert done.returncode == 0, done
    seen = [line.partition("] ")[2].split(":") for line in done.stdout.splitlines()]
    assert sorted(seen) == table


def test_horovodruns_flags_for_ssh_and_mpirun(cluster: Cluster) -> None:
    home = cluster.run(["getent", "passwd", "root"], timeout_s=20).stdout.split(":")[5]
    flags = ["-p", "22", "-i", f"{home}/.ssh/id_ed25519", "--mpi-args=-x MORE=words"]
    wrong = "Host *\nPort 9\nIdentitiesOnly yes\nIdentityFile /nowhere"
    body = "print('more', os.environ['MORE'])"
    with ssh_config(cluster, wrong):
        refused = cluster.run(command("ssh", body=body), env=ON_CLUSTER, timeout_s=60)
        done = cluster.run(command("ssh", *flags, body=body), env=ON_CLUSTER, timeout_s=60)
    assert refused.returncode != 0
    assert "port 9" in refused.stderr
    assert done.returncode == 0, done
    assert done.stdout.count("more words") == RANKS, done


def test_a_hostfile_names_the_user_of_ssh(cluster: Cluster) -> None:
    """In this test, ssh's default user is refused, and max_slots also sets the slots."""
    hostfile = cluster.folder / "hosts"
    hostfile.write_text("root@node1 max_slots=2\nnode2 cpu=1 user_name=root\n")
    options = ["--hostfile", str(hostfile)]
    body = "import socket; print(rank, socket.gethostname(), sep=':')"
    with ssh_config(cluster, "Host *\nUser nobody"):
        done = cluster.run(
            [*HVDTRAIN, *options, "--", *program(body, ("python",))], env=ON_CLUSTER, timeout_s=60
        )
        check = [sys.executable, "-m", "hvdtrain", "check", "--no-allreduce", "--no-import"]
        checked = cluster.run([*check, *options], env=ON_CLUSTER, timeout_s=60)
        refused = cluster.run([*check, "-H", "node1,node2"], env=ON_CLUSTER, timeout_s=60)
    assert done.returncode == 0, done
    seen = [line.partition("] ")[2] for line in done.stdout.splitlines()]
    assert sorted(seen) == ["0:node1", "1:node1", "2:node2"], done
    assert checked.returncode == 0, checked
    assert refused.stdout.count("it does not accept your ssh key") == 1, refused


@pytest.mark.parametrize("way", WAYS)
def test_devices_of_several_hosts_reduce(
    cluster: Cluster, forked_python: list[str], way: str
) -> None:
    body = """
    import hvdtrain, tensorflow as tf
    from hvdtrain import world
    hvdtrain.init()
    reduce = tf.function(
        lambda value: world.device_collectives().allreduce([value], "sum", name="x")[0]
    )
    for _ in range(3):
        total = reduce(tf.fill([100_000], hvdtrain.rank() + 1.0))
    print("total", set(total.numpy().tolist()))
    """
    argv = command(way, "--backend", "nccl", body=body, python=forked_python)
    done = cluster.run(argv, env=ON_CLUSTER, timeout_s=120)
    assert done.returncode == 0, done
    assert done.stdout.count("total {10.0}") == RANKS, done


def test_uneven_hosts_reduce_under_slurm(cluster: Cluster) -> None:
    body = """
    import numpy as np
    from hvdtrain.cluster.topology import read_topology
    from hvdtrain.collectives import create
    from hvdtrain.config import read_settings
    place = read_topology(os.environ)
    engine = create(place, read_settings(os.environ))
    total = engine.allreduce(np.full(100_000, place.rank + 1, np.float32))
    print(place.rank, place.local_rank, place.local_size, set(total.tolist()))
    engine.transport.leave()
    """
    hosts = cluster.folder / "ranks"
    hosts.write_text("node1\n" * 3 + "node2\n")
    places = ["--nodes=2", "--ntasks=4", "--distribution=arbitrary", f"--nodelist={hosts}"]
    argv = ["srun", "--mpi=pmix", "--overcommit", *places, *program(body)]
    done = cluster.run(argv, env=ON_CLUSTER, timeout_s=60)
    assert done.returncode == 0, done
    places_seen = ["0 0 3", "1 1 3", "2 2 3", "3 0 1"]
    assert sorted(done.stdout.splitlines()) == [f"{place} {{10.0}}" for place in places_seen], done


# Compares the weights with those of a single process. To seed TensorFlow, Keras would import it.
TRAINING = """
import sys
sys.path.insert(0, "without_tensorflow")
import hvdtrain
from hvdtrain import world
from tests.trainer.features import classifier, compare, train_arrays
hvdtrain.init()
compare(hvdtrain, classifier, train_arrays)
engine = world.collectives()
place = hvdtrain.rank(), hvdtrain.local_rank(), hvdtrain.local_size()
print(*place, world.framework(), engine.kind, engine.survives_losses, flush=True)
"""


@pytest.fixture
def without_tensorflow(cluster: Cluster) -> None:
    """Make TensorFlow unavailable for TRAINING."""
    folder = cluster.folder / "without_tensorflow"
    folder.mkdir(exist_ok=True)
    (folder / "tensorflow.py").write_text("raise ModuleNotFoundError(__name__)")


def test_training_on_uneven_hosts_equals_one_process(
    cluster: Cluster, without_tensorflow: None, python_with
) -> None:
    hostfile = cluster.folder / "uneven"
    hostfile.write_text("node1 slots=2\nnode2:1  # two dialects\n")
    argv = [*HVDTRAIN, "--hostfile", str(hostfile), "--elastic", "--"]
    argv += program(TRAINING, python_with("jax"))
    env = {**ON_CLUSTER, "KERAS_BACKEND": "jax"}
    done = cluster.run(argv, env=env, timeout_s=120)
    assert done.returncode == 0, done
    lines = sorted(line.rpartition("] ")[2] for line in done.stdout.splitlines())
    places_seen = ["0 0 2", "1 1 2", "2 0 1"]
    assert lines == [f"{place} jax shared_memory True" for place in places_seen], done


def test_training_under_mpirun_with_the_example_hostfile(
    cluster: Cluster, without_tensorflow: None, environment
) -> None:
    """The hostfile contains the command, which doesn't use hvdtrain's launcher."""
    text = (REPOSITORY / "hostfiles" / "cluster.example").read_text()
    command_line = text.partition("#   mpirun ")[2].partition("\n#\n")[0]
    words = command_line.replace("\\\n#", "").split()
    assert words[-2:] == ["python", "examples/mnist.py"], words
    hosts = text.replace("node01 slots=4", "node1 slots=1").replace(
        "node02 slots=4", "node2 slots=1"
    )
    (cluster.folder / "hosts").write_text(hosts)
    known = {"hostfiles/cluster": str(cluster.folder / "hosts"), '"$VIRTUAL_ENV"': sys.prefix}
    words = [known.get(word, word) for word in words[:-2]]
    environ = {
        **ON_CLUSTER,
        "KERAS_BACKEND": "torch",
        "PATH": f"{environment('torch').parent}:{os.environ['PATH']}",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    passed = ["-x", "KERAS_BACKEND", "-x", "PYTHONPATH"]
    argv = [f"{sys.prefix}/bin/mpirun", *words, *passed, "python", "-c", TRAINING]
    done = cluster.run(argv, env=environ, timeout_s=150)
    assert done.returncode == 0, done
    lines = sorted(done.stdout.splitlines())
    assert lines == [f"{place} torch mpi False" for place in ("0 0 1", "1 0 1")], done


# Each fault occurs over ssh or under Slurm, on the first or the last rank.
FAILING = [
    (WAYS[number % 2], fault, (0, RANKS - 1)[number // 2 % 2])
    for number, fault in enumerate(fault for fault in FAULTS if "thread" not in fault)
]


@pytest.mark.parametrize(("way", "fault", "failing"), FAILING)
def test_the_first_failure_is_named(
    cluster: Cluster, request: pytest.FixtureRequest, way: str, fault: str, failing: int
) -> None:
    action, code, words = FAULTS[fault]
    if fault == "out-of-memory":
        request.getfixturevalue("cgroup")
    body = f"""
    import socket
    print("at", socket.gethostname(), flush=True)
    time.sleep(0.3)
    if rank == {failing}: {action}
    time.sleep(60)
    """
    done = cluster.run(command(way, body=body), env=ON_CLUSTER, timeout_s=60)
    assert done.returncode == code, done
    host = done.stdout.partition(f"[{failing} ")[2].partition("] at ")[0]
    assert host in cluster.hosts, done
    _, named, verdict = done.stderr.rpartition(f"rank {failing} on {host} failed first: ")
    assert named, done
    assert words in verdict, done
    assert (code == 1) == ("Traceback (most recent call last):" in verdict), done
    for other in set(range(RANKS)) - {failing}:
        assert f"[{other} " not in done.stderr, "consequences are hidden"


@pytest.fixture
def start(cluster: Cluster, hangups: None) -> Iterator[Callable[[str], ClusterJob]]:
    with contextlib.ExitStack() as stack:

        def begin(way: str) -> ClusterJob:
            job = ClusterJob(cluster, lambda body: command(way, body=body), RANKS, ON_CLUSTER)
            return stack.enter_context(job)

        yield begin


@pytest.mark.parametrize(
    ("way", "name"),
    [
        *(("ssh", name) for name in ("SIGTERM", "SIGHUP", "SIGKILL")),
        *(("slurm", name) for name in ("SIGINT", "SIGKILL")),
    ],
)
def test_a_signal_to_the_launcher_leaves_no_processes(start, way: str, name: str) -> None:
    job = start(way)
    for pid in job.running("hvdtrain run"):
        os.kill(pid, getattr(signal, name))
    job.assert_all_gone()
    assert job.process.wait(timeout=20) != 0


@pytest.mark.parametrize(
    ("way", "victim"), [("ssh", "prterun"), ("ssh", "ssh "), ("ssh", "prted"), ("slurm", "srun")]
)
def test_killing_an_intermediate_process_leaves_no_processes(start, way: str, victim: str) -> None:
    job = start(way)
    pids = job.running(victim)
    if not pids:
        pytest.skip(f"{victim} does not stay while a job runs")
    os.kill(pids[0], signal.SIGKILL)
    job.assert_all_gone(15)
    assert job.process.wait(timeout=20) != 0


def test_scancel_leaves_no_processes(cluster: Cluster, start) -> None:
    job = start("slurm")
    cancelled = cluster.run(["scancel", "--user=root"], timeout_s=20)
    assert cancelled.returncode == 0, cancelled
    job.assert_all_gone()
    assert job.process.wait(timeout=20) != 0


def test_a_host_that_refuses_the_key_is_named(cluster: Cluster) -> None:
    keyless = "Host node2\nIdentityFile /nowhere\nIdentitiesOnly yes\nIdentityAgent none"
    with ssh_config(cluster, keyless):
        done = cluster.run(command("ssh", body="pass"), env=ON_CLUSTER, timeout_s=60)
    assert done.returncode == 125, done
    assert "problem on node2: it does not accept your ssh key" in done.stderr, done
    assert "fix: ssh-copy-id root@node2" in done.stderr, done


@pytest.mark.parametrize("way", WAYS)
def test_a_host_without_this_python_is_named(cluster: Cluster, way: str) -> None:
    with bound(cluster, "node2", empty_folder(cluster), f"{sys.prefix}/bin"):
        done = cluster.run(command(way, body="pass"), env=ON_CLUSTER, timeout_s=60)
    assert done.returncode == 125, done
    assert "problem on node2: the launcher's Python can't be started there" in done.stderr, done
    assert f"expected: {sys.executable}, at the same path on every host" in done.stderr, done


def wait_for_job(cluster: Cluster, job: str, timeout_s: float) -> str:
    """Return the final state of a Slurm job. ``sbatch --wait`` would poll only once a minute."""
    deadline = time.monotonic() + timeout_s
    while True:
        shown = cluster.run(["scontrol", "show", "job", job], timeout_s=20).stdout
        if "JobState=PENDING" not in shown and "EndTime=Unknown" not in shown:
            state = shown.partition("JobState=")[2].split()[0]
            if state not in ("RUNNING", "COMPLETING"):
                return f"{state} {shown.partition('ExitCode=')[2].split()[0]}"
        assert time.monotonic() < deadline, shown
        time.sleep(0.3)


def test_sbatch_with_the_example_script(cluster: Cluster, forked_python: list[str]) -> None:
    body = "import hvdtrain; hvdtrain.init(); print(f'{hvdtrain.rank()} of {hvdtrain.size()}')"
    (cluster.folder / "tiny.py").write_text(body)
    script = REPOSITORY / "slurm" / "train.sh"
    python, *first_words = forked_python
    options = ["--parsable", "--nodes=2", "--ntasks=2", "--output=out.txt", "--time=5"]
    argv = ["sbatch", *options, script, *first_words, "tiny.py"]
    done = cluster.run(argv, env={**ON_CLUSTER, "PYTHON": python}, timeout_s=20)
    assert done.returncode == 0, done
    ended = wait_for_job(cluster, done.stdout.strip(), 100)
    output = (cluster.folder / "out.txt").read_text()
    assert ended == "COMPLETED 0:0", output
    assert "[0 node1] 0 of 2\n" in output
    assert "[1 node2] 1 of 2\n" in output


def test_the_example_script_under_srun(cluster: Cluster, forked_python: list[str]) -> None:
    body = """if True:
        import os, subprocess, sys
        import hvdtrain
        hvdtrain.init()
        code = "import os; from hvdtrain.cluster import rank_process; "
        code += "print(rank_process.find_rank_process(os.environ))"
        rank = int(subprocess.check_output([sys.executable, "-c", code], timeout=60))
        print('size', hvdtrain.size(), 'child', rank == os.getpid(), flush=True)
    """
    (cluster.folder / "tiny.py").write_text(body)
    script = REPOSITORY / "slurm" / "train.sh"
    python, *first_words = forked_python
    argv = ["srun", "--mpi=pmix", "-N4", "-n4", script, *first_words, "tiny.py"]
    done = cluster.run(argv, env={**ON_CLUSTER, "PYTHON": python}, timeout_s=120)
    assert (done.returncode, done.stdout) == (0, "size 4 child True\n" * 4), done


DEVICES = {"head": "br0", "node1": "eth0", "node2": "eth0"}
ADDRESSES = {"head": "fd77::fe", "node1": "fd77::1", "node2": "fd77::2"}


@pytest.fixture
def ipv6_addresses(cluster: Cluster) -> Iterator[dict[str, str]]:
    """Add IPv6 addresses to the hosts."""
    for change in ("add", "del"):
        for host, device in DEVICES.items():
            words = ["addr", change, f"{ADDRESSES[host]}/64", "dev", device]
            if change == "add":
                words.append("nodad")
            done = cluster.run(["ip", "-6", *words], host=host, timeout_s=10)
            assert done.returncode == 0, done
        if change == "add":
            yield ADDRESSES


def test_hosts_named_by_ipv6_address(cluster: Cluster, ipv6_addresses: dict[str, str]) -> None:
    hosts = f"[{ipv6_addresses['node1']}]:1,[{ipv6_addresses['node2']}]:2"
    body = "from mpi4py import MPI; print(MPI.COMM_WORLD.allreduce(rank))"
    done = cluster.run([*HVDTRAIN, "-H", hosts, "--", *program(body)], env=ON_CLUSTER, timeout_s=60)
    assert done.returncode == 0, done
    lines = sorted(done.stdout.splitlines())
    assert [line.partition("] ")[2] for line in lines] == ["3"] * 3, done
    assert [line.split()[1].rstrip("]") for line in lines] == ["node1", "node2", "node2"]
