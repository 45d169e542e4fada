"""Plants the faults of mutants.toml one at a time, and tells which test finds each.

Usage: mutants.py [--only NAME ...] [--suite test|ci] [--list], with the Python of the environment
that `make install` makes. The faults are planted in a worktree of HEAD, build/mutants/tree, which
is compiled in a folder of its own with the settings of `make install`. Of each fault the listed
tests run first. What none of them finds is planted again for the whole suite: the tests of
`make test` (C++ tests without a sanitizer), or those of `make ci`. Prints a line for each fault and
exits with 1 if more than MISSES are not found. --list checks the table and runs nothing.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / "build" / "mutants" / "tree"
BUILD = TREE / "build" / "release"  # as deep as build/*: ccache finds what other builds compiled
SITE = BUILD / "site"
MODULES = ("castor_python", "castor_simulated_device", "castor_simulated_gpu")
WHOLE_SUITE = ("ctest", "pytest")
MISSES = {"test": 3, "ci": 0}
LISTED_SECONDS, SUITE_SECONDS = 1200, 4 * 3600
"""Limits of a run. A fault that makes a test hang is found by that test."""


class TableError(Exception):
    """A line of the table that is not in its file exactly once."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A row of the table; mutants.toml says what the fields mean."""

    name: str
    file: str
    line: str
    fault: str
    breaks: str
    tests: list[str]

    def planted(self, text: str) -> str:
        """Returns the file's text with the fault in it."""
        lines = text.splitlines(keepends=True)
        places = [i for i, line in enumerate(lines) if line.strip() == self.line]
        if len(places) != 1:
            raise TableError(f"{self.name}: {self.file} has {len(places)} times: {self.line}")
        (place,) = places
        lines[place] = lines[place].replace(self.line, self.fault)
        return "".join(lines)


def read_table(tree: Path) -> dict[str, Fault]:
    """Returns the faults by name, after a check of their lines against a tree."""
    table = (ROOT / "scripts" / "mutants.toml").read_text(encoding="utf-8")
    faults = [Fault(**row) for row in tomllib.loads(table)["fault"]]
    for fault in faults:
        fault.planted((tree / fault.file).read_text(encoding="utf-8"))
    return {fault.name: fault for fault in faults}


def is_cpp(test: str) -> bool:
    """Whether a listed test is PROGRAM:FILTER of GoogleTest, and not a file or test of pytest."""
    return ":" in test and "::" not in test


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


class Tree:
    """The worktree in which faults are planted, and the castor that is built of it."""

    def __init__(self, suite: str) -> None:
        """Makes the worktree, or brings it to HEAD, and configures its build."""
        head = git(ROOT, "rev-parse", "HEAD")
        if (TREE / ".git").exists():
            git(TREE, "checkout", "--quiet", "--force", "--detach", head)
        else:
            git(ROOT, "worktree", "add", "--quiet", "--force", "--detach", str(TREE), head)
        fast = re.search(r"^FAST := (.*)$", (TREE / "Makefile").read_text(encoding="utf-8"), re.M)
        assert fast, "the Makefile has no marker expression FAST"
        self._marks = ["-m", fast[1]] if suite == "test" else []
        self._jobs = os.environ.get("JOBS", str(os.cpu_count()))
        binaries = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self._env = os.environ | {
            "PATH": binaries, "PYTHONPATH": str(SITE), "PYTHONNOUSERSITE": "1",
            "CASTOR_TEST_BUILD": str(BUILD), "CASTOR_REQUIRE_SIMULATED_DEVICE": "1",
            "GOMP_SPINCOUNT": "1000", "HF_HUB_OFFLINE": "1", "CMAKE_GENERATOR": "Ninja",
            "CMAKE_BUILD_PARALLEL_LEVEL": self._jobs, "CCACHE_BASEDIR": str(TREE),
            "CCACHE_NOHASHDIR": "1",
        }  # fmt: skip
        stamp = ROOT / "build" / "stamps" / "jemalloc"  # ends with =FOLDER
        jemalloc = stamp.read_text(encoding="utf-8").strip().rpartition("=")[2]
        switched_on = ("PYTHON", "SIMULATED_DEVICE", "TESTS", "TORCH_TESTS")
        self._do(
            "cmake", "-S", ".", "-B", str(BUILD), "-DCMAKE_BUILD_TYPE=Release",
            *(f"-DCASTOR_BUILD_{part}=ON" for part in switched_on), "-DCASTOR_CUDA=OFF",
            f"-DCASTOR_JEMALLOC_ROOT={jemalloc}", f"-DPython_EXECUTABLE={sys.executable}",
        )  # fmt: skip

    @contextmanager
    def planted(self, fault: Fault) -> Iterator[None]:
        """Encloses what runs with the fault in the tree."""
        path = TREE / fault.file
        text = path.read_text(encoding="utf-8")
        path.write_text(fault.planted(text), encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(text, encoding="utf-8")

    def find(self, tests: Iterable[str]) -> tuple[str | None, float]:
        """Builds what each of the tests needs, and runs them until one fails.

        Returns:
            (name of the test that failed, None if all have passed; seconds of the tests).
        """
        seconds = 0.0
        for test in tests:
            cpp = is_cpp(test)
            targets = ["all"] if test == "ctest" else [test.partition(":")[0]] if cpp else MODULES
            self._do("cmake", "--build", str(BUILD), "--target", *targets)
            if not cpp and test != "ctest":
                self._do("cmake", "--install", str(BUILD), "--prefix", str(SITE))
                shutil.copytree(TREE / "python" / "castor", SITE / "castor", dirs_exist_ok=True)
            start = time.monotonic()
            found = self._failed(test)
            seconds += time.monotonic() - start
            if found:
                return found, seconds
        return None, seconds

    def _failed(self, test: str) -> str | None:
        """Returns the name of the first test that fails, dies or hangs; None: all pass."""
        if is_cpp(test):
            program, _, pattern = test.partition(":")
            path = BUILD / "tests" / "cpp" / program.removesuffix("_tests") / program
            command = [str(path), f"--gtest_filter={pattern}", "--gtest_fail_fast"]
            failed, begun = r"^\[  FAILED  \] ([^\s,]+)", r"^\[ RUN      \] (\S+)"
        elif test == "ctest":
            command = ["ctest", "--test-dir", str(BUILD), "--stop-on-failure", "-j", self._jobs]
            command += ["--output-on-failure"]
            # Of a program that dies there is only ctest's own line.
            failed = r"^(?:\[  FAILED  \]|\s*\d+ -) ([^\s,]+)"
            begun = r"^\s*Start +\d+: (.+)"
        else:
            # Its own test finds every fault: the table's line is gone.
            without = "--ignore=tests/python/test_mutants.py"
            pytest = [sys.executable, "-u", "-m", "pytest", "-x", "-v", "-p", "no:cacheprovider"]
            which = ["-n", self._jobs, "--dist", "loadfile"] if test == "pytest" else [test]
            command = [*pytest, without, *self._marks, *which]
            failed, begun = r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", r"(tests/\S+\.py::\S+)"
        limit = SUITE_SECONDS if test in WHOLE_SUITE else LISTED_SECONDS
        status, output = self._run(command, limit)
        if status == 0 or (status == 5 and "pytest" in command):  # 5: the marks select none of them
            return None
        if names := re.findall(failed, output, re.M):
            return str(names[0])
        if status is None or status < 0:
            last = [test, *re.findall(begun, output, re.M)][-1]
            return f"{last} ({'hangs' if status is None else f'dies: {status}'})"
        raise SystemExit(f"{output[-8000:]}\nno test has failed, and it has: {' '.join(command)}")

    def _do(self, *command: str) -> None:
        status, output = self._run(command, SUITE_SECONDS)
        if status != 0:
            raise SystemExit(f"{output[-8000:]}\nfailed: {' '.join(command)}")

    def _run(self, command: Sequence[str], limit: float) -> tuple[int | None, str]:
        """Returns (status, output); kills what is not over after `limit` seconds: status None."""
        with tempfile.TemporaryFile("w+", errors="replace") as said:
            process = subprocess.Popen(
                command, cwd=TREE, env=self._env, stdin=subprocess.DEVNULL, stdout=said,
                stderr=said, start_new_session=True,
            )  # fmt: skip
            status = None
            try:
                with suppress(subprocess.TimeoutExpired):
                    status = process.wait(limit)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            said.seek(0)
            return status, said.read()


def must_pass(tree: Tree, tests: Iterable[str]) -> None:
    """Stops the program if a test fails without a fault: it would find every one."""
    for test in tests:
        found, seconds = tree.find([test])
        if found:
            raise SystemExit(f"without a fault {found} fails: it would find each of them")
        print(f"without a fault {test} passes in {seconds:.0f} s", flush=True)


def search(tree: Tree, faults: Iterable[Fault], tests: Sequence[str] = ()) -> list[Fault]:
    """Prints what finds each fault, of `tests` or those listed; returns those not found."""
    missed = []
    for fault in faults:
        with tree.planted(fault):
            found, seconds = tree.find(tests or fault.tests)
        by = f"found by {found} after {seconds:.0f} s" if found else f"NOT FOUND: {fault.breaks}"
        print(f"{fault.name:31} {fault.file:46} {by}", flush=True)
        missed += [] if found else [fault]
    return missed


def main() -> int:
    table = read_table(ROOT)
    parser = argparse.ArgumentParser(description="Checks that the tests find faults.")
    parser.add_argument("--only", nargs="+", default=table, metavar="NAME", choices=table)
    parser.add_argument("--suite", choices=MISSES, default="test", help="tests of make test or ci")
    parser.add_argument("--list", action="store_true", help="check and print the table")
    options = parser.parse_args()
    faults = [table[name] for name in options.only]
    if options.list:
        for fault in faults:
            print(f"{fault.name:31} {fault.file:46} {fault.breaks}")
        return 0
    tree = Tree(options.suite)
    read_table(TREE)
    must_pass(tree, dict.fromkeys(test for fault in faults for test in fault.tests))
    missed = search(tree, faults)
    if missed:
        print(f"the whole suite, for {len(missed)} that the listed tests do not find", flush=True)
        must_pass(tree, WHOLE_SUITE)
        missed = search(tree, missed, WHOLE_SUITE)
    print(f"found {len(faults) - len(missed)} of {len(faults)}")
    return int(len(missed) > (MISSES[options.suite] if len(faults) == len(table) else 0))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except TableError as error:
        sys.exit(f"mutants.toml: {error}")
