"""What CMake has built for the tests alone, and never installs."""

from __future__ import annotations

import json
import os
import sysconfig
from pathlib import Path

import pytest
import torch

BUILD = Path(__file__).resolve().parents[2] / "build"
WANTED = os.environ.get("CASTOR_TEST_BUILD")
"""The build directory that castor and all of it come from; None: the newest one that has it."""


def newest(folder: str, module: str) -> Path | None:
    """The extension module of tests/`folder` for this torch; None: nobody has compiled it."""
    builds = filter(_is_for_this_torch, BUILD.glob("*") if WANTED is None else [Path(WANTED)])
    name = f"{module}{sysconfig.get_config_var('EXT_SUFFIX')}"
    built = [path for build in builds if (path := build / "tests" / folder / name).exists()]
    return max(built, key=lambda path: path.stat().st_mtime, default=None)


def _is_for_this_torch(build: Path) -> bool:
    record = build / "csrc" / "python" / "_build_info.json"
    if not record.is_file():
        return False
    built: str = json.loads(record.read_text())["torch"]
    return built.split(".")[:2] == torch.__version__.split(".")[:2]


def require(folder: str, module: str) -> Path:
    """As newest; skips the test, or fails it with CASTOR_REQUIRE_SIMULATED_DEVICE=1, without."""
    if (built := newest(folder, module)) is not None:
        return built
    where = BUILD if WANTED is None else WANTED
    problem = f"no {module} in {where}: configure with -DCASTOR_BUILD_SIMULATED_DEVICE=ON"
    if os.environ.get("CASTOR_REQUIRE_SIMULATED_DEVICE") == "1":
        pytest.fail(problem)
    pytest.skip(problem)
