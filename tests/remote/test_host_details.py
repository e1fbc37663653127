from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

from hvdtrain.remote.host_details import format_variables
from hvdtrain.remote.host_probe import HostFacts, read_facts
from tests.harness.jobs import REPOSITORY


def test_variables_without_secrets() -> None:
    environ = {
        "NCCL_DEBUG": "INFO",
        "CUDA_VISIBLE_DEVICES": "",
        "SLURM_JWT_TOKEN": "abc",
        "HVDTRAIN_PASSWORD": "abc",
        "OMPI_ssh_key": "abc",
        "HVDTRAIN_DB_PWD": "abc",
        "TF_PASSPHRASE": "abc",
        "KERAS_HOME": "https://user:a@b?c@host/path",
        "TF_DATA": "https://host/data?sig=abc&id=abc",
        "HOME": "/root",
        "AWS_SECRET": "abc",
    }
    assert format_variables(environ).splitlines() == [
        "CUDA_VISIBLE_DEVICES=",
        "HVDTRAIN_DB_PWD=(hidden)",
        "HVDTRAIN_PASSWORD=(hidden)",
        "KERAS_HOME=https://(hidden)@host/path",
        "NCCL_DEBUG=INFO",
        "OMPI_ssh_key=(hidden)",
        "SLURM_JWT_TOKEN=(hidden)",
        "TF_DATA=https://host/data?(hidden)",
        "TF_PASSPHRASE=(hidden)",
    ]


def probe(folder: Path, nvidia_smi: str, **request: bool) -> HostFacts:
    """Run the probe with this shell script as nvidia-smi."""
    (program := folder / "nvidia-smi").write_text(f"#!/bin/sh\n{nvidia_smi}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    argv = [sys.executable, "-m", "hvdtrain.remote.host_probe", json.dumps(request)]
    environ = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "NCCL_DEBUG": "INFO"}
    shown = subprocess.check_output(argv, cwd=REPOSITORY, env=environ, text=True, timeout=60)
    facts = read_facts(shown)
    assert facts is not None
    assert "details" not in facts.errors
    return facts


def test_the_probe_collects_details_on_request(tmp_path: Path) -> None:
    details = probe(tmp_path, 'echo "called with $1"', details=True).details
    assert "kernel: Linux" in details["system"]
    assert "MiB available" in details["system"]
    assert "/dev/shm: " in details["system"]
    assert "tensorflow" in details["packages"]
    assert "locked memory (ulimit -l): " in details["limits"]
    assert "127.0.0.1" in details["networks"]
    assert "NCCL_DEBUG=INFO" in details["environment"].splitlines()
    assert details["GPUs"].startswith("called with --query-gpu=index,name,uuid,pci.bus_id")
    assert details["links between GPUs (nvidia-smi topo -m)"] == "called with topo"
    assert details["nvidia-smi"] == "called with"


def test_a_failing_nvidia_smi_is_in_the_details(tmp_path: Path) -> None:
    details = probe(tmp_path, "echo driver mismatch >&2; exit 18", details=True).details
    assert details["nvidia-smi"] == "driver mismatch\nexit code 18"


def test_details_are_not_collected_without_a_request(tmp_path: Path) -> None:
    assert probe(tmp_path, "exit 0").details == {}
