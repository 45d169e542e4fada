"""Runs all that needs a GPU, in phases of at most nine minutes, and keeps the result of each test.

    gpu_check.sh --wheel FILE [--phase NAME]...
        a wheel that was built elsewhere, beside it what castor and its tests need (make
        gpu-archive): no compiler and no network
    gpu_check.sh [--phase NAME]...
        builds castor here first

Without --phase all phases run, one after the other. A phase that is run again goes on where it
ended: tests with a result are left out. The folder of results holds machine.json, results.jsonl (a
line for each test, written when it is over), gpu.json (of benchmarks/gpu.py), log.txt and
summary.json. A missing GPU is a failure of every phase, or a skip with --allow-no-gpu. What each
line proves stands in docs/status.md. PYTHON names an interpreter with the torch to use.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from gpu_phases import (
    GRACE_SECONDS,
    Batch,
    Command,
    Phase,
    Results,
    gtest_event,
    run_phase,
    write_summary,
)

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
from _gpu_session import CONTENDERS, TOKENS  # noqa: E402

PHASE_SECONDS = 540.0
BUILD_SECONDS = 3600.0
LARGE = "test_cuda_large.py"
"""Of tests/python: what a phase of its own runs."""
TEST_SECONDS = 150.0
"""Of one test, before it counts as hanging."""


@dataclass(frozen=True, kw_only=True)
class Castor:
    """The castor that is tested."""

    python: Path
    """An interpreter that imports it, pytest and transformers."""
    gpu_tests: Path
    """The program of tests/cpp/cuda/gpu_*_test.cc."""
    prepare: Phase
    """Installs or builds it."""
    made_by: str
    """The test of `prepare` after which it is there."""
    identity: str
    """Which castor this is: results of another one do not count."""
    mark: Path
    """Holds the identity of what is there."""
    env: dict[str, str] = field(default_factory=dict)

    def is_ready(self) -> bool:
        """Whether the phase that makes it is over."""
        return self.mark.is_file() and self.mark.read_text() == self.identity


def from_wheel(wheel: Path, work: Path) -> Castor:
    """Installs a wheel and what lies beside it into an environment of its own."""
    if not wheel.is_file():
        raise SystemExit(f"gpu_check: --wheel {wheel}: there is no such file")
    environment = work / "gpu-env"
    python = environment / "bin" / "python"
    install = [sys.executable, str(ROOT / "scripts/gpu_environment.py"), str(wheel)]
    prepare = Phase(
        name="install",
        what=f"{wheel.name} and what it needs, into {environment}",
        parts=[
            Command(test="install", argv=[*install, str(environment)]),
            *installed_checks(python, {}),
        ],
    )
    return Castor(
        python=python,
        gpu_tests=ROOT / "tests/cpp/cuda_gpu_tests",
        prepare=prepare,
        made_by="install",
        identity=hashlib.sha256(wheel.read_bytes()).hexdigest()[:16],
        mark=environment / "identity",
    )


def from_source(work: Path) -> Castor:
    """Builds castor and its C++ tests with CMake; tests see the sources with the modules built."""
    build = work / "gpu-cpp"
    package = build / "package"
    env = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(package), os.environ.get("PYTHONPATH")]))
    }
    configure = [
        *("cmake", "-S", str(ROOT), "-B", str(build), "-DCASTOR_CUDA=ON", "-DCASTOR_WERROR=ON"),
        *("-DCASTOR_BUILD_PYTHON=ON", "-DCASTOR_BUILD_TESTS=ON", "-DCMAKE_BUILD_TYPE=Release"),
        *(f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_CUDA_FLAGS=-Xptxas=-v"),
        *architectures(),
    ]
    pack = f"""
        rm -rf "{package}" && mkdir -p "{package}" && cp -r "{ROOT}/python/castor" "{package}/"
        cmake --install "{build}" --prefix "{package}"
    """
    jobs = str(len(os.sched_getaffinity(0)))
    prepare = Phase(
        name="build",
        what=f"castor and its C++ tests, in {build}",
        limit=BUILD_SECONDS,
        parts=[
            Command(test="configure", argv=configure),
            Command(
                test="compile",
                argv=["cmake", "--build", str(build), "-j", jobs],
                limit=BUILD_SECONDS,
            ),
            Command(test="package", argv=["bash", "-euc", pack]),
            *installed_checks(Path(sys.executable), env),
        ],
    )
    return Castor(
        python=Path(sys.executable),
        gpu_tests=build / "tests/cpp/cuda/cuda_gpu_tests",
        prepare=prepare,
        made_by="package",
        identity=source_identity(),
        mark=package / "identity",
        env=env,
    )


def source_identity() -> str:
    """The commit and, where files differ from it, how."""
    outputs = [
        subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, check=False).stdout
        for words in (["rev-parse", "HEAD"], ["diff", "HEAD"])
    ]
    return hashlib.sha256(b"".join(outputs)).hexdigest()[:16]


def architectures() -> list[str]:
    """Compiles kernels for the GPUs that are here, so that ptxas's report is theirs."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    said = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    found = sorted({line.replace(".", "") for line in said.split() if re.match(r"\d+\.\d+$", line)})
    return [f"-DCMAKE_CUDA_ARCHITECTURES={';'.join(f'{f}-real' for f in found)}"] if found else []


def installed_checks(python: Path, env: dict[str, str]) -> list[Command]:
    """That castor, castor._cuda and the CPU device work, before anything needs a GPU."""
    load = "from castor._loader import load_cuda; print(load_cuda().runtime_version())"
    return [
        Command(test="castor._cuda loads", argv=[str(python), "-c", load], env=env),
        Command(test="selftest", argv=[str(python), "-m", "castor.selftest"], env=env),
    ]


def test_files() -> list[Path]:
    """Those of tests/python with a test that needs a GPU: marked, or by the fixture gpu."""
    files = sorted((ROOT / "tests/python").glob("test_*.py"))
    needs = re.compile(r"pytest\.mark\.cuda\b|^from accelerator import", re.MULTILINE)
    return [file for file in files if needs.search(file.read_text(encoding="utf-8"))]


def cuda_libraries(python: Path) -> str:
    """The folder of the libcudart that torch loads."""
    code = "import torch; print(open('/proc/self/maps').read())"
    said = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False).stdout
    found = re.search(r" (/\S+)/libcudart\.so", said)
    return found[1] if found else ""


def pytest_batch(castor: Castor, work: Path, name: str, what: list[str], limit: float) -> Batch:
    """Runs tests of tests/python that carry the marker cuda."""
    paths = [str(ROOT / "scripts"), *filter(None, [castor.env.get("PYTHONPATH")])]
    argv = [
        *(str(castor.python), "-m", "pytest", "-p", "gpu_results", "--rootdir", str(ROOT)),
        *("-c", str(ROOT / "pyproject.toml"), "--continue-on-collection-errors"),
        # Not /tmp, which may be memory.
        *("--basetemp", str(work / "gpu-tmp"), "-o", f"cache_dir={work / 'gpu-cache'}"),
        *("-o", f"faulthandler_timeout={0.9 * limit:.0f}"),
        # The versions of other packages are those of the machine.
        *("-W", "default::DeprecationWarning", "-W", "default::FutureWarning"),
        *what,
    ]
    env = castor.env | {
        "PYTHONPATH": os.pathsep.join(paths),
        "CASTOR_TEST_SECONDS": f"{0.9 * limit:.0f}",
    }
    return Batch(name=name, argv=lambda _: argv, env=env, limit=limit)


def make_phases(castor: Castor, work: Path, results: Path, seconds: float) -> list[Phase]:
    """All phases, in the order in which they run."""
    machine = [sys.executable, str(ROOT / "scripts/gpu_machine.py"), str(results / "machine.json")]
    phases = [
        Phase(
            name="machine",
            what="the GPU, the machine, torch",
            parts=[Command(test="gpu", argv=machine, limit=120)],
        ),
        castor.prepare,
    ]

    def gpu_tests(finished: list[str]) -> list[str]:
        libraries = f"LD_LIBRARY_PATH={cuda_libraries(castor.python)}"
        return ["env", libraries, str(castor.gpu_tests), f"--gtest_filter=*-{':'.join(finished)}"]

    phases.append(
        Phase(
            name="cpp",
            what="the C++ tests of copies, pinned memory and kernels",
            parts=[
                Batch(
                    name="cuda_gpu_tests",
                    argv=gpu_tests,
                    parse=gtest_event,
                    limit=TEST_SECONDS,
                )
            ],
        )
    )
    for file in test_files():
        if file.name == LARGE:
            continue
        name = file.stem.replace("test_", "pytest-", 1).replace("_", "-")
        what = ["-m", "cuda", str(file)]
        batch = pytest_batch(castor, work, "pytest", what, TEST_SECONDS)
        phases.append(Phase(name=name, what=f"tests/python/{file.name}", parts=[batch]))

    def bench(test: str, *arguments: str) -> Command:
        script = [str(castor.python), str(ROOT / "benchmarks/gpu.py")]
        output = ["--output", str(results / "gpu.json")]
        return Command(test=test, argv=[*script, *arguments, *output], env=castor.env, limit=200)

    parts = [bench("copies", "--part", "copies"), bench("kernels", "--part", "kernels")]
    phases.append(Phase(name="bench-parts", what="benchmarks/gpu.py, without a model", parts=parts))
    for tokens in TOKENS:
        parts = [
            bench(name, "--part", "steps", "--tokens", str(tokens), "--contenders", name)
            for name in CONTENDERS
        ]
        what = f"benchmarks/gpu.py, steps of {tokens} tokens"
        phases.append(Phase(name=f"bench-{tokens}", what=what, parts=parts))
    large = ["-m", "cuda", "-s", str(ROOT / "tests/python" / LARGE)]
    batch = pytest_batch(castor, work, "pytest", large, seconds)
    phases.append(Phase(name="18b", what="a GPT of 18B parameters under 24 GiB", parts=[batch]))
    return phases


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu_check.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--wheel", type=Path, help="a castor wheel; without it castor is built here"
    )
    parser.add_argument("--phase", action="append", metavar="NAME", help="again for another")
    parser.add_argument("--results", type=Path, default=ROOT / "build/gpu", help="folder")
    parser.add_argument("--work", type=Path, default=ROOT / "build", help="folder of what is made")
    parser.add_argument(
        "--limit", type=float, default=PHASE_SECONDS, help="seconds of a phase (%(default).0f)"
    )
    parser.add_argument("--again", action="store_true", help="run again what has not passed")
    parser.add_argument("--allow-no-gpu", action="store_true", help="a missing GPU is a skip")
    parser.add_argument("--list", action="store_true", help="name the phases and end")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    arguments = parse(argv)
    work, folder = arguments.work.resolve(), arguments.results.resolve()
    os.environ["CASTOR_REQUIRE_CUDA"] = "0" if arguments.allow_no_gpu else "1"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if arguments.wheel is not None:
        castor = from_wheel(arguments.wheel.resolve(), work)
    else:
        castor = from_source(work)
    seconds = arguments.limit - GRACE_SECONDS
    phases = make_phases(castor, work, folder, seconds)
    names = [phase.name for phase in phases]
    if arguments.list:
        print("\n".join(names))
        return 0
    wanted = arguments.phase or names
    if unknown := [name for name in wanted if name not in names]:
        raise SystemExit(f"gpu_check: no phase {', '.join(unknown)}; there are {', '.join(names)}")
    results = Results(folder, castor.identity, again=arguments.again)
    tried = False
    for phase in phases:
        if phase.name not in wanted:
            continue
        if phase.name != "machine" and not tried and not castor.is_ready():
            tried = True
            results.forget(castor.prepare.name)
            run_phase(castor.prepare, results, castor.prepare.limit or seconds)
            if castor.made_by in results.finished(castor.prepare.name, ("passed",)):
                castor.mark.write_text(castor.identity)
        if phase.name in ("machine", castor.prepare.name) or castor.is_ready():
            results.replace_failed(phase.name, "(castor)")
            run_phase(phase, results, phase.limit or seconds)
        else:
            error = f"there is no castor to test: the phase {castor.prepare.name} says why"
            results.add(phase.name, "(castor)", "failed", 0.0, error=error)
    good = write_summary(phases, results)
    print(f"gpu_check: results in {folder}, {'nothing failed' if good else 'FAILED'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
