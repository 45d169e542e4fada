"""Builds the C++ programs of benchmarks/cpp."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from _machine import ROOT

_SOURCE = ROOT / "benchmarks" / "cpp"
_BUILD = ROOT / "build" / "benchmarks"


def can_build() -> bool:
    """Whether CMake is installed."""
    return shutil.which("cmake") is not None


def build(program: str) -> Path:
    """Builds a program in Release mode and returns its path.

    Raises:
        RuntimeError: There is no CMake, or it or the compiler failed; the message says what.
    """
    if not can_build():
        raise RuntimeError(f"{program} cannot be built: install cmake and a C++20 compiler")
    configure = ["cmake", "-S", str(_SOURCE), "-B", str(_BUILD)]
    make = ["cmake", "--build", str(_BUILD), "--target", program]
    python = f"-DPython_EXECUTABLE={sys.executable}"
    # Configured once: a build does it again where the sources ask for it.
    for command in [make] if (_BUILD / "CMakeCache.txt").exists() else [[*configure, python], make]:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return _BUILD / program


def run(program: Path | str, *arguments: object) -> Any:
    """The JSON that a program prints.

    Raises:
        RuntimeError: The program failed; the message holds what it said.
    """
    command = [str(program), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout)
