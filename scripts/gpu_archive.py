"""Packs all that gpu_check.sh --wheel needs on a machine with torch and nothing else.

    gpu_archive.py --wheel FILE --python INTERPRETER --output FILE [CMAKE ARGUMENT]...

The archive holds the wheel, wheels of what castor and its tests need beside torch (and of pip),
the tests that need a GPU (those in C++ as a program), benchmarks/gpu.py and the scripts. Unpack it
there, and run castor-gpu/scripts/gpu_check.sh --wheel castor-gpu/wheels/castor_torch-*.whl.
"""

import argparse
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from requirements import requirements

ROOT = Path(__file__).resolve().parent.parent
NAME = "castor-gpu"
MAX_BYTES = 60 * 10**6
OF_TORCH = re.compile(
    r"(torch|triton|sympy|mpmath|networkx|setuptools|cuda-.*|nvidia-.*)$", re.IGNORECASE
)
"""Torch, and what it needs: a machine with torch has them."""
SOURCES = (
    *("tests/python/*.py", "benchmarks/gpu.py", "benchmarks/_gpu*.py", "benchmarks/_machine.py"),
    *("scripts/gpu_*.py", "scripts/gpu_check.sh", "pyproject.toml", "LICENSE"),
)


def call(*command: str | Path) -> str:
    """Runs a command and returns its output; SystemExit with all of it if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def build_gpu_tests(build: Path, definitions: list[str]) -> Path:
    """Compiles the C++ tests that need a GPU; what they load is glibc, libstdc++ and libcudart."""
    fixed = (
        "CASTOR_CUDA=ON",
        "CASTOR_WERROR=ON",
        "CASTOR_BUILD_TESTS=ON",
        "CASTOR_BUILD_PYTHON=OFF",
    )
    options = [f"-D{definition}" for definition in (*fixed, "CASTOR_BUILD_SIMULATED_DEVICE=OFF")]
    call("cmake", "-S", ROOT, "-B", build, *options, "-DCMAKE_BUILD_TYPE=Release", *definitions)
    call("cmake", "--build", build, "--target", "cuda_gpu_tests")
    program = build / "tests/cpp/cuda/cuda_gpu_tests"
    stripped = build / "cuda_gpu_tests"
    call("strip", "-o", stripped, program)
    return stripped


def download_wheels(python: Path, wanted: list[str], directory: Path) -> None:
    """Puts wheels of what is wanted, and of all that it needs beside torch, into a folder.

    Args:
        python: As on the machine with the GPU, with pip.
        wanted: Requirements; some need torch, which that machine has.
        directory: Where they go.
    """
    pip = (python, "-m", "pip", "--quiet", "--disable-pip-version-check")
    report = directory / "report.json"
    only = ("--ignore-installed", "--only-binary=:all:")
    call(*pip, "install", "--dry-run", *only, "--report", report, *wanted)
    found = [entry["metadata"] for entry in json.loads(report.read_text())["install"]]
    report.unlink()
    pins = [f"{one['name']}=={one['version']}" for one in found if not OF_TORCH.match(one["name"])]
    call(*pip, "download", "--no-deps", "--only-binary=:all:", "--dest", directory, *pins)


def commit() -> str:
    """HEAD, and whether files differ from it."""
    head = call("git", "-C", ROOT, "rev-parse", "HEAD").strip()
    return head + (" with changes" if call("git", "-C", ROOT, "status", "--porcelain") else "")


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheel", type=Path, required=True)
    parser.add_argument("--python", type=Path, required=True, help="as on that machine, with pip")
    parser.add_argument("--output", type=Path, required=True, help="the archive, .tar.gz")
    parser.add_argument("--work", type=Path, default=ROOT / "build", help="where it builds")
    arguments, definitions = parser.parse_known_args(argv)
    program = build_gpu_tests(arguments.work.resolve() / "gpu-tests", definitions)
    tracked = call("git", "-C", ROOT, "ls-files", "--", *SOURCES).split()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        wheels = Path(directory)
        download_wheels(arguments.python, ["pip", *requirements(["test"])], wheels)
        shutil.copy(arguments.wheel, wheels)
        with tarfile.open(arguments.output, "w:gz") as archive:
            for name in tracked:
                archive.add(ROOT / name, f"{NAME}/{name}")
            for wheel in sorted(wheels.iterdir()):
                archive.add(wheel, f"{NAME}/wheels/{wheel.name}")
            archive.add(program, f"{NAME}/tests/cpp/cuda_gpu_tests")
            note = tarfile.TarInfo(f"{NAME}/commit.txt")
            data = commit().encode()
            note.size = len(data)
            archive.addfile(note, io.BytesIO(data))
    size = arguments.output.stat().st_size
    if size > MAX_BYTES:
        raise SystemExit(f"{arguments.output} has {size:,} bytes, more than {MAX_BYTES:,}")
    print(f"{arguments.output}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main(sys.argv[1:])
