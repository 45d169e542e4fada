"""Pins torch in a wheel's requirements: a provider of dynamic metadata for scikit-build-core.

torch's C++ ABI holds within a minor version only: a castor compiled against torch 2.11.0 needs
torch==2.11.*. The sdist, compiled where it is installed, keeps the range of pyproject.toml, outside
of which nothing is compiled. This also runs before CMake is looked for, and says which package
brings CMake.
"""

import importlib.metadata
import importlib.util
import shutil
from collections.abc import Mapping
from typing import Any

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

_state = "sdist"


def build_state(state: str) -> None:
    """Called by scikit-build-core with "sdist", "wheel", "editable" or "metadata_..."."""
    global _state
    _state = state


def dynamic_wheel(_settings: Mapping[str, Any]) -> dict[str, bool]:
    """The requirements of a wheel are not those of the sdist."""
    return {"dependencies": True}


def dynamic_metadata(
    _settings: Mapping[str, Any], project: Mapping[str, Any]
) -> dict[str, list[str]]:
    """Called by scikit-build-core with [project]; the result is appended to that.

    Raises:
        SystemExit: There is no torch, one that castor does not know, or no CMake.
    """
    if _state == "sdist":
        return {"dependencies": []}
    known = next(
        requirement
        for requirement in map(Requirement, project["dependencies"])
        if requirement.name == "torch"
    )
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(
            "castor is compiled against the torch it will run with, and this Python has none: "
            f'pip install "{known}", then build with pip install --no-build-isolation'
        ) from None
    try:
        torch = Version(version)
    except InvalidVersion:
        raise SystemExit(f"torch has the version {version!r}, which castor cannot read") from None
    # A build of torch's sources (2.15.0a0+git1) has the interfaces of the release that it precedes.
    if not known.specifier.contains(torch.base_version):
        raise SystemExit(
            f"this castor is built for {known}, and torch {version} is installed: "
            f'pip install "{known}", or take a newer castor'
        )
    if shutil.which("cmake") is None and importlib.util.find_spec("cmake") is None:
        raise SystemExit("castor needs CMake 3.24 or newer to build: apt-get install cmake")
    return {"dependencies": [f"torch=={torch.major}.{torch.minor}.*"]}
