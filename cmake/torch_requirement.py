"""Pins torch in a wheel's requirements: a provider of dynamic metadata for scikit-build-core.

torch's C++ ABI holds within a minor version only: a castor compiled against torch 2.11.0 needs
torch==2.11.*. The sdist, compiled where it is installed, keeps the range of pyproject.toml. This
also runs before CMake is looked for, and says which package brings CMake.
"""

import importlib.metadata
import importlib.util
import re
import shutil
from collections.abc import Mapping
from typing import Any

_state = "sdist"


def build_state(state: str) -> None:
    """Called by scikit-build-core with "sdist", "wheel", "editable" or "metadata_..."."""
    global _state
    _state = state


def dynamic_wheel(_settings: Mapping[str, Any]) -> dict[str, bool]:
    """The requirements of a wheel are not those of the sdist."""
    return {"dependencies": True}


def dynamic_metadata(
    _settings: Mapping[str, Any], _project: Mapping[str, Any]
) -> dict[str, list[str]]:
    """Called by scikit-build-core; what it returns is appended to [project]."""
    if _state == "sdist":
        return {"dependencies": []}
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(
            "castor is compiled against the torch it will run with, and this Python has none: "
            'pip install "torch>=2.9", then build with pip install --no-build-isolation'
        ) from None
    release = re.match(r"(\d+)\.(\d+)", version)
    if release is None:
        raise SystemExit(f"torch has the version {version!r}, which castor cannot read")
    if shutil.which("cmake") is None and importlib.util.find_spec("cmake") is None:
        raise SystemExit("castor needs CMake 3.24 or newer to build: apt-get install cmake")
    return {"dependencies": [f"torch=={release[1]}.{release[2]}.*"]}
