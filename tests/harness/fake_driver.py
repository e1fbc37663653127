"""The fixture ``fake_driver``: GPUs that exist only in a description.

``fake_driver.c`` explains the description. A process that is started with the variables of
``environ`` loads the fake libcuda and NVML, as it would load the real ones.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness.required import skip_or_fail

__all__ = ["GIB", "TWO_GPUS", "A", "B", "FakeDriver", "uuid_of"]

GIB = 1 << 30
_SOURCE = Path(__file__).with_name("fake_driver.c")


def uuid_of(digit: str, kind: str = "GPU") -> str:
    """Return the UUID that consists of one hexadecimal digit."""
    return f"{kind}-{digit * 8}-{digit * 4}-{digit * 4}-{digit * 4}-{digit * 12}"


A, B = uuid_of("a"), uuid_of("b")
# Two different GPUs: A has memory errors, and B is in use. CUDA's first GPU is NVML's second.
TWO_GPUS = f"""
gpu {A}
model NVIDIA T4
bus 0000:3B:00.0
memory {16 * GIB}
ecc 2
gpu {B}
model NVIDIA H100
bus 0000:5E:00.0
memory {80 * GIB}
speed 9
process 1 {2 * GIB}
"""


@dataclass(frozen=True)
class FakeDriver:
    """A folder with the libraries, and a folder for descriptions."""

    libraries: Path
    folder: Path

    def environ(self, description: str, name: str = "gpus") -> dict[str, str]:
        """Write a description, and return the variables of processes that see its GPUs."""
        file = self.folder / name
        lines = (line.strip() for line in description.splitlines())
        file.write_text("".join(f"{line}\n" for line in lines if line))
        paths = filter(None, [str(self.libraries), os.environ.get("LD_LIBRARY_PATH")])
        return {"LD_LIBRARY_PATH": os.pathsep.join(paths), "FAKE_GPUS": str(file)}


@pytest.fixture(scope="session")
def _libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None:
        skip_or_fail("gcc", "gcc is missing")
    folder = tmp_path_factory.mktemp("driver")
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        options = ["-shared", "-fPIC", "-Wall", "-Werror", f"-Wl,-soname,{name}"]
        subprocess.run(["gcc", *options, "-o", folder / name, _SOURCE], check=True, timeout=60)
    return folder


@pytest.fixture
def fake_driver(_libraries: Path, tmp_path: Path) -> FakeDriver:
    """A driver for processes that a test starts."""
    return FakeDriver(_libraries, tmp_path)
