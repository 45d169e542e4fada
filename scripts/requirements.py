"""Prints requirements of pyproject.toml, one a line: the runtime's and those of the extras named.

Usage: requirements.py [EXTRA...]; the extra "build" names the build backend. torch is left out:
the Makefile installs the one version it was asked for.
"""

import re
import sys
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib


def requirements(extras: list[str]) -> list[str]:
    document = tomllib.loads(
        (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    )
    groups = {
        "build": document["build-system"]["requires"],
        **document["project"]["optional-dependencies"],
    }
    wanted = list(document["project"]["dependencies"])
    for extra in extras:
        wanted += groups[extra]
    return [line for line in wanted if not re.match(r"torch\b", line)]


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1:])))
