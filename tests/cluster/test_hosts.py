from __future__ import annotations

import sys

import pytest

from hvdtrain.cluster.hosts import (
    Host,
    parse_hostfile,
    parse_hosts,
    slurm_hosts,
    slurm_task_counts,
    ssh_user,
)
from hvdtrain.errors import ConfigurationError
from tests.cluster import environments as env
from tests.harness.jobs import REPOSITORY


def hosts(*rows: tuple[str, int] | tuple[str, int, int]) -> list[Host]:
    return [
        Host(name=name, slots=slots, max_slots=more[0] if more else None)
        for name, slots, *more in rows
    ]


NODES = ["node01", "node02", "node03", "node04", "node07"]

LISTS = {
    "slots": ("a:4", [("a", 4)]),
    "several": ("a:4,b:2,c", [("a", 4), ("b", 2), ("c", 1)]),
    "spaces": (" a:4, b ", [("a", 4), ("b", 1)]),
    "domain": ("gpu-1.rack_2.example.org:8", [("gpu-1.rack_2.example.org", 8)]),
    "ipv4": ("10.0.0.1:2,10.0.0.2", [("10.0.0.1", 2), ("10.0.0.2", 1)]),
    "ipv6": ("[fe80::1]:4", [("fe80::1", 4)]),
    "ipv6-bare-is-no-slots": ("fe80::1:4", [("fe80::1:4", 1)]),
    "ipv6-zone": ("[FE80::1%eth0]:2,fe80::2%ib0.1", [("FE80::1%eth0", 2), ("fe80::2%ib0.1", 1)]),
    "nodes": ("node[01-04,07]:2", [(name, 2) for name in NODES]),
    "nodes-and-others": (
        "z:3,n[2-3]:2,[::1]:4,a",
        [("z", 3), ("n2", 2), ("n3", 2), ("::1", 4), ("a", 1)],
    ),
    "order-in-two-dimensions": (
        "r[2,1]n[3,1]:2",
        [("r2n3", 2), ("r2n1", 2), ("r1n3", 2), ("r1n1", 2)],
    ),
    "widths": ("n[9-10,09-10]", [("n9", 1), ("n10", 2), ("n09", 1)]),
    "digits-around": ("n1[0-1]5-ib", [("n105-ib", 1), ("n115-ib", 1)]),
    "same-again": ("a:2,b:1,A:3", [("a", 5), ("b", 1)]),
}


@pytest.mark.parametrize(("text", "expected"), LISTS.values(), ids=LISTS)
def test_parse_hosts(text: str, expected: list[tuple[str, int]]) -> None:
    assert parse_hosts(text) == hosts(*expected)


BAD_LISTS = {
    "empty": ("", "a host is missing"),
    "comma-at-end": ("a:4,", "a host is missing"),
    "no-slots-after-colon": ("a:", "'' is not a number of slots"),
    "slots-no-number": ("a:four", "'four' is not a number of slots"),
    "slots-zero": ("a:0", "slots of a must be at least 1, got 0"),
    "slots-not-ascii": ("a:²", "is not a number of slots"),
    "two-colons": ("a:4:4", "'a:4:4' is not a valid IPv6 address"),
    "ipv6-bad": ("[fe80::1::2]:4", "'fe80::1::2' is not a valid IPv6 address"),
    "ipv6-zone": ("fe80::1%", "has an invalid zone"),
    "group-and-nodes": ("n[1-2]@all", "'n[1-2]' is not a valid user name"),
    "user-empty": ("@a:2", "'@a' is not a valid host"),
    "user-option": ("-oProxyCommand=x@a", "'-oProxyCommand=x' is not a valid user name"),
    "user-twice": ("me@you@a", "'me@you' is not a valid user name"),
    "users-of-one-host": ("me@a,you@a", "a has two users, me and you"),
    "wildcard": ("n*[1-2]", "is not a valid host"),
    "option-short": ("a,-x:2", "'-x' is not a valid host"),
    "dot-first": (".a", "is not a valid host"),
    "letters": ("knödel", "is not a valid host"),
    "unclosed": ("n[1-2", "is not a valid host"),
    "nested": ("n[1,[2]]", "is not a valid host"),
    "range-empty": ("n[1,,2]", "'' in [1,,2] is neither"),
    "range-of-three": ("n[1-2-3]", "'1-2-3' in"),
    "range-backwards": ("n[3-1]", "the range 3-1 in [3-1] is invalid"),
    "range-widths": ("n[01-100]", "the range 01-100 in [01-100] is invalid"),
}


@pytest.mark.parametrize(("text", "problem"), BAD_LISTS.values(), ids=BAD_LISTS)
def test_invalid_lists(text: str, problem: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        parse_hosts(text)
    message = str(raised.value)
    assert problem in message
    assert repr(text) in message
    assert "a:4,b:4" in message


FILES = {
    "openmpi": (
        "a slots=4 max_slots=8\nb slots=2 max-slots=2\nc\n",
        [("a", 4, 8), ("b", 2, 2), ("c", 1)],
    ),
    "openmpi-keys": ("a SLOTS=4 Max_Slots=8\nb MAX-SLOTS=3", [("a", 4, 8), ("b", 3, 3)]),
    "hydra": ("a:4\nb:2\nc", [("a", 4), ("b", 2), ("c", 1)]),
    "comments": (
        "# all\na slots=4 # the first\n\t# b slots=4\nc:2\t#d\n#\n",
        [("a", 4), ("c", 2)],
    ),
    "windows": ("a slots=4\r\n\r\n# c\r\nb:2\r\n", [("a", 4), ("b", 2)]),
    "old-mac": ("a slots=4\rb:2\r", [("a", 4), ("b", 2)]),
    "byte-order-mark": ("\ufeffa:2\nb", [("a", 2), ("b", 1)]),
    "same-again": ("Node1 slots=2\nb\nNODE1:3\nnode1", [("Node1", 6), ("b", 1)]),
    "same-in-a-list": ("n2:4\nn[1-3]:2", [("n2", 6), ("n1", 2), ("n3", 2)]),
    "same-max-slots": ("a:2 max_slots=4\na:1 max_slots=1", [("a", 3, 5)]),
    "same-max-slots-once": ("a:2 max_slots=4\na:1\nb:1\nb:1 max_slots=2", [("a", 3), ("b", 2)]),
}


@pytest.mark.parametrize(("text", "expected"), FILES.values(), ids=FILES)
def test_parse_hostfile(text: str, expected: list[tuple[str, int]]) -> None:
    assert parse_hostfile(text, "hostfiles/cluster") == hosts(*expected)


@pytest.mark.parametrize(
    "key",
    ["slots_max", "slots-max", "max_cpu", "cpu-max", "max-count", "count_max", "cpu", "count"],
)
def test_synonyms_of_open_mpi(key: str) -> None:
    most = 3 if "max" in key else None
    assert parse_hostfile(f"a {key}=3", "hosts/mine") == [Host(name="a", slots=3, max_slots=most)]


@pytest.mark.parametrize(
    "line", ["me@a slots=2", "me@a:2", "a slots=2 user=me", "a:2 username=me", "a:2 user-name=me"]
)
def test_the_user_of_a_host(line: str) -> None:
    expected = Host(name="a", slots=2, user="me")
    assert parse_hostfile(line, "hosts/mine") == [expected]
    assert parse_hosts("me@a:2,a") == [Host(name="a", slots=3, user="me")]


def test_users_of_lists_and_addresses() -> None:
    assert parse_hosts("me@n[1-2]:2,you@[fe80::1]:4,b") == [
        Host(name="n1", slots=2, user="me"),
        Host(name="n2", slots=2, user="me"),
        Host(name="fe80::1", slots=4, user="you"),
        Host(name="b", slots=1),
    ]


def test_all_hosts_have_the_same_user_for_ssh() -> None:
    assert ssh_user(parse_hosts("me@a,me@b:2")) == "me"
    assert ssh_user(parse_hosts("a,b")) is None
    assert ssh_user([]) is None
    for differ in ("me@a,you@b", "me@a,b"):
        with pytest.raises(ConfigurationError, match=r"got me for a, (you|none) for b; give each"):
            ssh_user(parse_hosts(differ))


@pytest.mark.parametrize("name", ["cluster.example", "local"])
def test_the_hostfiles_of_the_repository(name: str) -> None:
    path = REPOSITORY / "hostfiles" / name
    assert parse_hostfile(path.read_text(), str(path))


# Text, number of the invalid line, that line, reason.
BAD_FILES = {
    "slots-behind-space": ("a 4", 1, "a 4", "'4' is neither slots=N, max_slots=N nor user=NAME"),
    "user": ("a user=-x", 1, "a user=-x", "'-x' is not a valid user name"),
    "user-twice": ("me@a user_name=me", 1, "me@a user_name=me", "a has both me@ and user=me"),
    "max-too-small": (
        "a:4 max_slots=2",
        1,
        "a:4 max_slots=2",
        "max_slots of a must be at least its slots, 4, got 2",
    ),
    "slots-and-synonym": ("a slots=2 cpu=2", 1, "a slots=2 cpu=2", "slots is given twice"),
    "colon-and-slots": ("a:2 slots=2", 1, "a:2 slots=2", "a has both :2 and slots=2"),
    "comment-is-shown": ("a b # c", 1, "a b # c", "'b' is neither"),
    "byte-order-mark-later": ("a\n\ufeffb", 2, "\ufeffb", "is not a valid host"),
}


@pytest.mark.parametrize(("text", "number", "line", "reason"), BAD_FILES.values(), ids=BAD_FILES)
def test_invalid_hostfiles(text: str, number: int, line: str, reason: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        parse_hostfile(text, "hosts/mine")
    message = str(raised.value)
    assert message.startswith(f"hosts/mine, line {number}: {line!r} is invalid: ")
    assert reason in message
    assert "slots=4 (and max_slots=8), or :4" in message


@pytest.mark.parametrize("text", ["", "\n\n", "# a\n  # b", "\ufeff", "\r\n"])
def test_an_empty_hostfile_is_an_error(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^hosts/mine contains no hosts\. Expected"):
        parse_hostfile(text, "hosts/mine")


TWO_NODES = [("node1", 3), ("node2", 1)]

ALLOCATIONS = {
    "none": ({}, None),
    "not-slurm": (env.OPENMPI_5, None),
    "sbatch-script": (env.SBATCH_SCRIPT, TWO_NODES),
    "salloc-shell": (env.SALLOC_SHELL, TWO_NODES),
    "srun": (env.SRUN_PMIX, [("node1", 2), ("node2", 1)]),
    "salloc-interactive-step": (
        {**env.SALLOC_INTERACTIVE_STEP, "SLURM_JOB_NODELIST": "node[1-2]"},
        TWO_NODES,
    ),
    "packed": (
        {"SLURM_JOB_NODELIST": "a[01-03],b7", "SLURM_TASKS_PER_NODE": "2(x3),1"},
        [("a01", 2), ("a02", 2), ("a03", 2), ("b7", 1)],
    ),
    "dimensions": (
        {"SLURM_JOB_NODELIST": "r[1-2]n[1-2]", "SLURM_TASKS_PER_NODE": "1,2,3,4"},
        [("r1n1", 1), ("r1n2", 2), ("r2n1", 3), ("r2n2", 4)],
    ),
    "no-counts": ({"SLURM_JOB_NODELIST": "a[1-2]"}, [("a1", 1), ("a2", 1)]),
}


@pytest.mark.parametrize(("environ", "expected"), ALLOCATIONS.values(), ids=ALLOCATIONS)
def test_slurm_allocations(environ: dict[str, str], expected: list[tuple[str, int]] | None) -> None:
    assert slurm_hosts(environ) == (None if expected is None else hosts(*expected))


def test_a_heterogeneous_allocation_is_an_error_that_names_all_hosts() -> None:
    groups = {
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_ID": "9",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "a[1-2]",
        "SLURM_TASKS_PER_NODE_HET_GROUP_0": "2(x2)",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "a2,b1",
        "SLURM_TASKS_PER_NODE_HET_GROUP_1": "1,3",
    }
    # A script of sbatch also has the first group's variables, unlike a shell of salloc.
    first = {"SLURM_JOB_NODELIST": "a[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)"}
    for environ in (groups, {**groups, **first}):
        with pytest.raises(ConfigurationError, match=r"2 groups.*-H a1:2,a2:3,b1:3; .*group=0-1 "):
            slurm_hosts(environ)
    assert slurm_hosts({**first, "SLURM_HET_SIZE": "1"}) == hosts(("a1", 2), ("a2", 2))


def test_slurm_task_counts() -> None:
    assert slurm_task_counts("2(x3),1") == [2, 2, 2, 1]
    assert slurm_task_counts("1,2(x2),3") == [1, 2, 2, 3]
    assert slurm_task_counts("4") == [4]


BAD_ALLOCATIONS = {
    "fewer-counts": ("node[1-3]", "2", "there are 3 nodes, but task counts for 1"),
    "counts": ("node[1-2]", "2;1", "'2;1' is not a task count"),
    "no-tasks": ("node[1-2]", "1,0", "slots of node2 must be at least 1, got 0"),
    "range": ("node[2-1]", "2", "the range 2-1"),
    "not-set": ("None assigned", None, "'None assigned' is not a valid host"),
}


@pytest.mark.parametrize(
    ("nodes", "tasks", "problem"), BAD_ALLOCATIONS.values(), ids=BAD_ALLOCATIONS
)
def test_invalid_slurm_allocations(nodes: str, tasks: str | None, problem: str) -> None:
    environ = {"SLURM_JOB_NODELIST": nodes}
    if tasks is not None:
        environ["SLURM_TASKS_PER_NODE"] = tasks
    with pytest.raises(ConfigurationError) as raised:
        slurm_hosts(environ)
    message = str(raised.value)
    assert problem in message
    assert f"SLURM_JOB_NODELIST={nodes!r} and SLURM_TASKS_PER_NODE={tasks!r}" in message
    assert "with -H or --hostfile" in message
    assert "unset" in message


@pytest.mark.parametrize(
    ("text", "loaded"),
    [
        ("a:4,10.0.0.1:2,[fe80::1]:4", []),
        ("a[1-2]", ["ClusterShell", "ClusterShell.RangeSet"]),
    ],
    ids=["plain", "nodes"],
)
def test_clustershell_loads_only_for_lists(text: str, loaded: list[str], run_command) -> None:
    program = (
        "import sys\n"
        "from hvdtrain.cluster.hosts import parse_hosts\n"
        f"parse_hosts({text!r})\n"
        "print(sorted(name for name in sys.modules if name.startswith('ClusterShell')))"
    )
    done = run_command([sys.executable, "-c", program])
    assert (done.returncode, done.stdout) == (0, f"{loaded}\n"), done
