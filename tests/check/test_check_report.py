"""What hvdtrain check shows of the hosts' answers, exactly; nothing is asked or started."""

from __future__ import annotations

from hvdtrain.check.check_report import format_report, make_report
from tests.check.answers import PYTHON, answer, lost, problems


def test_all_well() -> None:
    found = make_report(answer("a"), [answer("a"), answer("b", 4)], way="ssh", python=PYTHON)
    assert found.fit
    assert (
        format_report(found)
        == """\
host  state  ranks  cores  load  GPUs  /dev/shm  network                 clock
a     ok         2      8   0.2  none    500 MB  eth0 10.0.0.1 10 Gb/s  +0.0 s
b     ok         4      8   0.2  none    500 MB  eth0 10.0.0.2 10 Gb/s  +0.0 s

all hosts: Python 3.11.7, hvdtrain 0.1.0, TensorFlow 2.21.0, Keras 3.15.1, mpi4py 4.1.2, \
Open MPI v5.0.11"""
    )


def test_a_lost_host() -> None:
    words = "ssh: connect to host b port 22: Connection refused"
    answers = [answer("a"), lost("b", "refused", words)]
    found = make_report(answer("a"), answers, way="ssh", python=PYTHON)
    assert not found.fit
    assert (
        format_report(found)
        == """\
host  state    ranks  cores  load  GPUs  /dev/shm  network                 clock
a     ok           2      8   0.2  none    500 MB  eth0 10.0.0.1 10 Gb/s  +0.0 s
b     refused      2      -     -  -            -  -                           -

all that answered: Python 3.11.7, hvdtrain 0.1.0, TensorFlow 2.21.0, Keras 3.15.1, \
mpi4py 4.1.2, Open MPI v5.0.11

problem on b: it refuses connections to its ssh port \
(ssh: connect to host b port 22: Connection refused)
  expected: ssh logs in without a question
  do: start sshd there (systemctl start ssh), or give its port as Port below Host b in \
~/.ssh/config; then try: ssh -o BatchMode=yes b true"""
    )


def test_errors_come_before_warnings() -> None:
    found = problems(answer("a", folder="other"), answer("b", back="", back_error="no"))
    assert [problem.error for problem in found] == [True, False]
