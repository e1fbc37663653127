from __future__ import annotations

from hvdtrain.check.check_report import format_report
from tests.check.answers import answer, lost, problems


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


def test_errors_come_before_warnings() -> None:
    all_problems = problems(answer("a", folder="other"), answer("b", back_error="no"))
    assert [problem.is_error for problem in all_problems] == [True, False]
