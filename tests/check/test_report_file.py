from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest

from hvdtrain.check.report_file import format_report_file, reserve
from hvdtrain.cli import main
from tests.check.answers import GPU, answer, lost


def test_a_section_per_host_and_topic() -> None:
    launcher = answer("a", details={"system": "kernel: 6.1"}, backend_gpus=0)
    answers = [
        answer("b", details={"system": "kernel: 5.15", "GPUs": "none"}),
        lost("c", "refused"),
    ]
    text = format_report_file("ready to train\n", launcher, answers, command="hvdtrain check")
    assert text == (
        "Report of hvdtrain check, 1970-01-01 00:01:40 UTC\ncommand: hvdtrain check\n\n"
        "== check ==\nready to train\n\n"
        "== a: MPI ==\nOpen MPI v5.0.11\n\n"
        "== a: Keras' backend ==\ntensorflow: sees 0 GPUs\n\n"
        "== a: GPUs for ranks ==\nnone\n\n"
        "== a: system ==\nkernel: 6.1\n\n"
        "== b: MPI ==\nOpen MPI v5.0.11\n\n"
        "== b: Keras' backend ==\ntensorflow: not imported\n\n"
        "== b: GPUs for ranks ==\nnone\n\n"
        "== b: system ==\nkernel: 5.15\n\n"
        "== b: GPUs ==\nnone\n\n"
        "== c: no answer ==\nrefused: \n"
    )


def test_the_launcher_appears_once_and_missing_details_are_explained() -> None:
    broken = answer("a", mpi="", mpi_error="no MPI", errors={"details": "no answer in time"})
    text = format_report_file("", broken, [broken, answer("b")], command="")
    assert text.count("== a: ") == 4
    assert "== a: MPI ==\nno MPI" in text
    assert "== a: details ==\nno answer in time" in text
    assert "== b: details ==\nthe host has a different hvdtrain" in text


def test_gpus() -> None:
    gpu = dataclasses.replace(
        GPU, used_bytes=3 << 30, processes=((7, "python", 2 << 30),), faults=("2 errors",)
    )
    host = answer("a", gpus=[gpu], gpu_error="CUDA fails")
    assert (
        "== a: GPUs for ranks ==\nCUDA fails\n"
        "GPU 0: NVIDIA H200 GPU-0, driver 570.86\n  memory: 3072 of 144384 MiB in use\n"
        "  process 7: python, 2048 MiB\n  fault: 2 errors\n"
    ) in format_report_file("", host, [host], command="")


def test_the_report_of_this_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.txt"
    main(["check", "--no-allreduce", "--no-import", "--report", str(path)])
    shown = capsys.readouterr().out
    *_, conclusion, note = shown.splitlines()
    assert note == f"report: {path} (it contains host names and addresses)"
    text = path.read_text()
    assert shown.partition("\n\n")[0] in text
    assert f"\n{conclusion}\n\n== localhost: MPI ==\n" in text
    assert "\n== localhost: environment ==\n" in text


def test_an_empty_report_is_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.txt"
    assert main(["check", "-H", "a:no", "--report", str(path)]) == 2
    assert not path.exists()
    with reserve(str(path)):
        assert path.exists()
    assert not path.exists()
    path.touch()
    with reserve(str(path)):
        pass
    assert path.exists(), "it is not new"


def test_a_report_without_the_facts_of_this_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = lost("", "no answer", "killed")
    monkeypatch.setattr(
        "hvdtrain.check.survey.probe_hosts",
        lambda *args, **options: (failed, [answer("b", details={"system": "kernel: 6.1"})]),
    )
    path = tmp_path / "report.txt"
    assert main(["check", "-H", "b", "--report", str(path)]) == 1
    text = path.read_text()
    assert text.startswith(f"Report of hvdtrain check, {time.gmtime().tm_year}-")
    assert "== check ==\nthe probe of this host failed: killed\n" in text
    assert "== b: system ==\nkernel: 6.1\n" in text


@pytest.mark.parametrize("file", ["gone/report.txt", ""], ids=["no folder", "a folder"])
def test_a_file_that_can_not_be_written_is_an_error_before_the_check(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise AssertionError("the check started")

    monkeypatch.setattr("hvdtrain.check.survey.probe_hosts", fail)
    assert main(["check", "--report", str(tmp_path / file)]) == 2
    captured = capsys.readouterr()
    assert "--report can't write its file, got /" in captured.err
    assert captured.out == ""


def test_a_namespace_has_no_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["check", "--on", "kubernetes", "--report", str(tmp_path / "x")]) == 2
    assert "--report describes hosts" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
