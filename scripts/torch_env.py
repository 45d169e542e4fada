"""Environments that hold a stock torch and nothing of castor: what a wheel is built and tried in.

A torch wheel with its CUDA libraries is a download of 3 GB. Where the environment that runs this
has the same release, the files that fit are linked from it instead; pip fetches the rest.
"""

import errno
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement


class UnavailableError(Exception):
    """A Python that this machine lacks, or a torch that the index lacks; the message says which."""


def minor_version(version: str) -> str:
    """Gives "2.11" for "2.11.0+cu130"."""
    return ".".join(version.split("+")[0].split(".")[:2])


def find_python(version: str) -> Path:
    """An interpreter of the minor version, such as "3.12", that can make environments.

    Looks at this one, at python3.12 on PATH and at pyenv's versions.

    Raises:
        UnavailableError: There is none.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    on_path = shutil.which(f"python{version}")
    candidates = [
        Path(sys.executable),
        *([Path(on_path)] if on_path else []),
        *sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True),
    ]
    code = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
    for candidate in candidates:
        # A pyenv shim is on PATH whether or not its version is switched on; it then fails here.
        done = subprocess.run([candidate, "-c", code], capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.strip() == version:
            return candidate
    raise UnavailableError(
        f"no Python {version} with venv on this machine (looked at python{version} on PATH and in "
        f"{pyenv})"
    )


def requirement_closure(name: str) -> Iterator[importlib.metadata.Distribution]:
    """The installed distribution and, once each, all it requires in this environment."""
    waiting, seen = [name], set()
    while waiting:
        current = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if current in seen:
            continue
        seen.add(current)
        try:
            distribution = importlib.metadata.distribution(current)
        except importlib.metadata.PackageNotFoundError:
            continue  # pip will fetch it
        yield distribution
        for line in distribution.requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)


def fits_any_python(distribution: importlib.metadata.Distribution) -> bool:
    """True for a wheel of plain Python or of libraries that no extension module is part of."""
    tags = re.findall(r"^Tag: (\S+)", distribution.read_text("WHEEL") or "", re.MULTILINE)
    return bool(tags) and all(re.match(r"py[\d.py]*-none-", tag) for tag in tags)


def link_distribution(distribution: importlib.metadata.Distribution, target: Path) -> None:
    """Links a distribution's files into another site-packages, without scripts and byte code."""
    for file in distribution.files or []:
        if file.parts[0] == ".." or "__pycache__" in file.parts:
            continue
        source, destination = Path(str(file.locate())), target / file
        destination.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source, destination)
        except FileExistsError:
            continue
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK):
                raise
            shutil.copy2(source, destination)


def installed_torch() -> str | None:
    """Torch's version in the environment that runs this."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def make_torch_env(directory: Path, python: str, torch: str) -> Path:
    """Makes an environment with torch, or takes the one that a former run completed.

    Args:
        directory: Where; made if it is not there.
        python: Minor version, such as "3.12".
        torch: Minor version, such as "2.11".

    Returns:
        The environment's interpreter.

    Raises:
        UnavailableError: No such Python here, or no such torch for it on the index.
        CalledProcessError: pip failed otherwise; its output has been printed.
    """
    interpreter = directory / "bin" / "python"
    complete = directory / "complete"
    if complete.exists():
        return interpreter
    base = find_python(python)
    shutil.rmtree(directory, ignore_errors=True)
    # Where `base` is an environment itself, venv goes back to the interpreter behind it.
    subprocess.run([base, "-m", "venv", directory], check=True)
    here = installed_torch()
    same_python = python == f"{sys.version_info.major}.{sys.version_info.minor}"
    wanted = f"torch=={torch}.*"
    if here is not None and minor_version(here) == torch:
        site = directory / "lib" / f"python{python}" / "site-packages"
        for distribution in requirement_closure("torch"):
            if same_python or fits_any_python(distribution):
                link_distribution(distribution, site)
        wanted = f"torch=={here}"
    pip: list[str | Path] = [
        interpreter,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-warn-script-location",
        wanted,
    ]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        if "No matching distribution found for torch" in done.stderr:
            raise UnavailableError(f"the package index has no torch {torch} for Python {python}")
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        done.check_returncode()
    complete.touch()
    return interpreter
