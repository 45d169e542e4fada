"""Builds, repairs and tries a castor wheel for each Python, with extensions for each torch.

    wheel_matrix.py --python 3.11 3.12 --torch 2.11 2.15 --jemalloc PREFIX --hwloc PREFIX

Each wheel is installed into environments with each stock torch, and its selftest runs there with an
empty environment, no compiler on PATH and the sources out of reach. A Python that this machine
lacks, or a torch that the index lacks, is reported as SKIPPED (with --require: as a failure). Ends
with a table of times; exits 1 if a pair failed. Run with the interpreter of an environment that has
the "wheel" extra; a pair that is that environment's own is compiled there, where ccache knows it.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import Version

from requirements import requirements
from torch_env import UnavailableError, installed_torch, make_torch_env, minor_version
from wheel_check import STRICT, mapped_libraries, problems_of_wheel
from wheel_repair import repair

ROOT = Path(__file__).resolve().parent.parent
MAX_INSTALL_SECONDS = 60.0
MAX_SELFTEST_SECONDS = 20.0


@dataclass
class Pair:
    """A Python and a torch that a wheel is made for, and how far it came."""

    python: str
    torch: str
    result: str = "FAILED"
    detail: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    interpreter: Path = field(default_factory=Path)
    raw: Path | None = None
    """The wheel as it was compiled."""

    @property
    def name(self) -> str:
        """Names its directories under --work: of CMake, and with "-env" of the environment."""
        return f"py{self.python}-torch{self.torch}"

    @property
    def is_own(self) -> bool:
        """True if this script runs with that Python and that torch."""
        here = installed_torch()
        own_python = f"{sys.version_info.major}.{sys.version_info.minor}"
        return here is not None and (own_python, minor_version(here)) == (self.python, self.torch)


def call(
    command: list[str | Path], *, env: dict[str, str] | None = None, cwd: Path | None = None
) -> str:
    """Runs a command and returns its output; SystemExit with all of it if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, cwd=cwd)
    if done.returncode != 0:
        command_line = " ".join(map(str, command))
        raise SystemExit(
            f"{command_line}\nexited with {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    return done.stdout


def build(pair: Pair, python: Path, work: Path, arguments: argparse.Namespace) -> Path:
    """Compiles a wheel against the torch of `python`, and does not repair it."""
    environment = dict(os.environ)
    if pair.is_own:
        python = Path(sys.executable)
    else:
        # The build backend stays out of the environment that users' torch stands for.
        tools = work / "tools"
        if not tools.exists():
            call(
                [
                    python,
                    "-m",
                    "pip",
                    "install",
                    "--quiet",
                    "--target",
                    tools,
                    "scikit-build-core>=1.1",
                ]
            )
        environment["PYTHONPATH"] = str(tools)
    out = work / "raw"
    shutil.rmtree(out, ignore_errors=True)
    settings = [
        # As deep as the build directory of an ordinary install: ccache sees paths relative to it.
        f"build-dir={arguments.work.resolve() / pair.name}",
        f"cmake.define.CASTOR_JEMALLOC_ROOT={arguments.jemalloc.resolve()}",
        f"cmake.define.CASTOR_HWLOC_ROOT={arguments.hwloc.resolve()}",
        f"cmake.define.CASTOR_WERROR={'ON' if arguments.werror else 'OFF'}",
        f"cmake.define.CASTOR_CUDA={'ON' if arguments.cuda else 'AUTO'}",
    ]
    call(
        [
            *(
                python,
                "-m",
                "pip",
                "wheel",
                ROOT,
                "--no-build-isolation",
                "--no-deps",
                "--no-index",
            ),
            *("--wheel-dir", out),
            *(f"--config-settings={setting}" for setting in settings),
        ],
        env=environment,
    )
    (wheel,) = out.glob("*.whl")
    return wheel


def smoke_test(pair: Pair, python: Path, wheel: Path) -> str:
    """Installs the wheel beside a stock torch and runs its selftest; says in a line what was seen.

    Raises:
        SystemExit: Something failed, took too long, or was loaded from outside the environment.
    """
    pip: list[str | Path] = [python, "-m", "pip"]
    # What a user's shell without a compiler gives, and less.
    bare = {"PATH": "/nonexistent", "HOME": "/nonexistent"}
    # All that castor requires beside torch; the wheel itself is then installed without an index.
    call([*pip, "install", "--quiet", *requirements([])])
    with tempfile.TemporaryDirectory(prefix="castor-smoke-") as directory:
        cwd = Path(directory)
        before = mapped_libraries(python, "torch", cwd, bare)
        start = time.perf_counter()
        call([*pip, "install", "--quiet", "--no-index", wheel])
        call([*pip, "check"])
        pair.seconds["install"] = time.perf_counter() - start
        try:
            start = time.perf_counter()
            said = call([python, *STRICT, "-m", "castor.selftest"], cwd=cwd, env=bare)
            pair.seconds["selftest"] = time.perf_counter() - start
            added = mapped_libraries(python, "castor", cwd, bare) - before
        finally:
            call([*pip, "uninstall", "--quiet", "--yes", "castor-torch"])
    site = python.parent.parent / "lib"
    outside = sorted(path for path in added if not Path(path).is_relative_to(site))
    if outside:
        raise SystemExit(f"castor loads libraries from outside its environment: {outside}")
    if not any(Path(path).name.startswith("libtbb") for path in added):
        raise SystemExit(f"castor's own TBB was not loaded; it added {sorted(added)}")
    for phase, limit in (("install", MAX_INSTALL_SECONDS), ("selftest", MAX_SELFTEST_SECONDS)):
        if pair.seconds[phase] > limit:
            raise SystemExit(
                f"{phase} took {pair.seconds[phase]:.1f} s; {limit:.0f} s is the limit"
            )
    return f"{said.splitlines()[-1]}; adds {', '.join(sorted(Path(p).name for p in added))}"


def compile_pair(pair: Pair, arguments: argparse.Namespace) -> None:
    """Makes the environment of a pair and compiles its wheel; the pair says how far that came."""
    work = arguments.work.resolve() / f"{pair.name}-env"
    start = time.perf_counter()
    try:
        pair.interpreter = make_torch_env(work / "venv", pair.python, pair.torch)
        pair.seconds["torch"] = time.perf_counter() - start
        start = time.perf_counter()
        pair.raw = build(pair, pair.interpreter, work, arguments)
        pair.seconds["build"] = time.perf_counter() - start
    except UnavailableError as error:
        pair.result, pair.detail = ("FAILED" if arguments.require else "SKIPPED"), str(error)
    except (SystemExit, OSError, subprocess.CalledProcessError) as error:
        pair.detail = str(error)


def make(pairs: list[Pair], arguments: argparse.Namespace) -> None:
    """Makes the wheel of one Python and tries it with each torch; the pairs say how far that came.

    A wheel is made only if none of the pairs failed.
    """
    for pair in pairs:
        compile_pair(pair, arguments)
    compiled = [pair for pair in pairs if pair.raw is not None]
    if not compiled or any(pair.result == "FAILED" for pair in pairs if pair.raw is None):
        for pair in compiled:
            pair.detail = "it was compiled; the wheel needs the other torches as well"
        return
    try:
        wheel = repair([pair.raw for pair in compiled if pair.raw], arguments.dist.resolve())
        if problems := problems_of_wheel(wheel):
            raise SystemExit(f"{wheel.name}: " + "; ".join(problems))
    except (SystemExit, OSError) as error:
        for pair in compiled:
            pair.detail = str(error)
        return
    size = wheel.stat().st_size / 2**20
    for pair in compiled:
        try:
            seen = smoke_test(pair, pair.interpreter, wheel)
            pair.result, pair.detail = "ok", f"{wheel.name} ({size:.2f} MiB): {seen}"
        except (SystemExit, OSError) as error:
            pair.detail = str(error)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", nargs="+", required=True, metavar="X.Y", help="Python versions")
    parser.add_argument("--torch", nargs="+", required=True, metavar="X.Y", help="torch versions")
    parser.add_argument("--jemalloc", type=Path, required=True, help="made by build_jemalloc.sh")
    parser.add_argument("--hwloc", type=Path, required=True, help="made by build_hwloc.sh")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="where wheels go")
    parser.add_argument("--work", type=Path, default=ROOT / "build", help="where it builds")
    parser.add_argument("--werror", action="store_true", help="compiler warnings are errors")
    parser.add_argument("--cuda", action="store_true", help="no CUDA toolkit is an error")
    parser.add_argument("--require", action="store_true", help="a pair that is skipped fails")
    parser.add_argument(
        "--discard",
        action="store_true",
        help="remove each environment (5 GB) when its pair is done",
    )
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    arguments = parse(argv)
    pairs = []
    for python in arguments.python:
        of_python = [Pair(python, torch) for torch in sorted(arguments.torch, key=Version)]
        make(of_python, arguments)
        for pair in of_python:
            print(f"wheel {pair.name}: {pair.result}: {pair.detail}", flush=True)
            if arguments.discard:
                shutil.rmtree(arguments.work / f"{pair.name}-env", ignore_errors=True)
        pairs += of_python
    print()
    for pair in pairs:
        times = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in pair.seconds.items())
        print(f"{pair.name:<20} {pair.result:<8} {times}")
    return int(any(pair.result == "FAILED" for pair in pairs))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
