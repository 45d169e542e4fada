"""Makes an environment with a castor wheel beside this Python's torch, without a network.

Usage: gpu_environment.py WHEEL DIRECTORY. What castor and its tests need and this Python lacks is
taken from the folder of the wheel, and so is pip.
"""

import importlib.util
import os
import subprocess
import sys
import venv
from pathlib import Path


def pip_of(wheels: Path) -> Path:
    found = sorted(wheels.glob("pip-*.whl"))
    if not found:
        raise SystemExit(f"{wheels} holds no pip-*.whl: scripts/gpu_archive.py puts one there")
    return found[-1]


def make(wheel: Path, directory: Path) -> Path:
    """Makes the environment, or makes it anew, and returns its interpreter.

    Raises:
        SystemExit: This Python has no torch, or pip failed; the message says which and why.
    """
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        raise SystemExit(f"{sys.executable} has no torch; name one that has in PYTHON")
    venv.EnvBuilder(system_site_packages=True, clear=True, symlinks=True).create(directory)
    python = directory / "bin" / "python"
    (site,) = (directory / "lib").glob("python*/site-packages")
    # Where this Python is an environment itself, the new one sees the interpreter behind it only.
    seen = subprocess.run([python, "-c", "import torch"], capture_output=True, check=False)
    if seen.returncode != 0:
        (site / "outer.pth").write_text(f"{Path(torch.origin).parent.parent}\n", encoding="utf-8")
    wheels = wheel.parent
    command: list[str | Path] = [
        *(python, "-m", "pip", "install", "--no-index", "--find-links", wheels),
        *("--no-compile", "--disable-pip-version-check", "--root-user-action=ignore"),
        f"{wheel}[test]",
    ]
    paths = [str(pip_of(wheels)), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, check=False, env=environment)
    if done.returncode != 0:
        raise SystemExit(f"pip could not install {wheel.name} and what it needs from {wheels}")
    return python


def main(arguments: list[str]) -> None:
    if len(arguments) != 2:
        raise SystemExit(__doc__)
    print(make(Path(arguments[0]).resolve(), Path(arguments[1]).resolve()))


if __name__ == "__main__":
    main(sys.argv[1:])
