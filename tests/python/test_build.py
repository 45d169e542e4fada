"""Building castor from source: what a machine lacks is named with the package that brings it."""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

REPOSITORY = Path(__file__).resolve().parents[2]
PROJECT = {"dependencies": ["torch>=2.11,<2.16"]}

needs_cmake = pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not on PATH")


def configure(build: Path, *arguments: str, **variables: str) -> str:
    """Configures with `arguments` and `variables` set, which must fail; its output on one line."""
    environment = {k: v for k, v in os.environ.items() if k not in ("CXX", "CMAKE_GENERATOR")}
    done = subprocess.run(
        [str(shutil.which("cmake")), "-S", str(REPOSITORY), "-B", str(build), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment | variables,
    )
    assert done.returncode != 0
    return " ".join((done.stdout + done.stderr).split())


@needs_cmake
@pytest.mark.parametrize(
    ("package", "debian"),
    [("TBB", "libtbb-dev"), ("Python", "python3-dev"), ("GTest", "libgtest-dev")],
)
def test_missing_library_is_named_with_its_debian_package(
    tmp_path: Path, package: str, debian: str
) -> None:
    said = configure(
        tmp_path,
        f"-DCMAKE_DISABLE_FIND_PACKAGE_{package}=ON",
        "-DCASTOR_BUILD_TESTS=ON",
        "-DCASTOR_CUDA=OFF",
        f"-DCASTOR_BUILD_PYTHON={'ON' if package == 'Python' else 'OFF'}",
    )
    assert f"apt-get install {debian}" in said


@needs_cmake
def test_missing_compiler_is_named_with_its_debian_package(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    make = shutil.which("ninja") or shutil.which("make")
    assert make is not None
    (tools / Path(make).name).symlink_to(make)
    generator = "Ninja" if make.endswith("ninja") else "Unix Makefiles"
    said = configure(tmp_path / "build", f"-G{generator}", PATH=str(tools))
    assert "apt-get install build-essential" in said


@needs_cmake
def test_missing_torch_says_how_to_build(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    said = configure(
        tmp_path / "build",
        "-DCASTOR_BUILD_PYTHON=ON",
        "-DCASTOR_BUILD_TESTS=OFF",
        "-DCASTOR_CUDA=OFF",
        f"-DPython_EXECUTABLE={bare / 'bin' / 'python'}",
    )
    assert "cannot import torch" in said
    assert "--no-build-isolation" in said


@pytest.fixture
def provider() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "torch_requirement", REPOSITORY / "cmake" / "torch_requirement.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("state", ["wheel", "editable", "metadata_wheel"])
def test_wheel_requires_the_minor_version_of_torch_it_is_built_with(
    provider: ModuleType, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.12.1+cpu")
    provider.build_state(state)
    assert provider.dynamic_metadata({}, PROJECT) == {"dependencies": ["torch==2.12.*"]}


@pytest.mark.parametrize("version", ["2.10.1", "2.16.0+cpu", "3.0.0"])
def test_a_torch_that_castor_does_not_know_is_refused_before_anything_is_built(
    provider: ModuleType, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    provider.build_state("wheel")
    with pytest.raises(SystemExit, match=rf"torch<2\.16,>=2\.11.*torch {re.escape(version)} is"):
        provider.dynamic_metadata({}, PROJECT)


@needs_cmake
def test_cmake_refuses_a_torch_that_castor_does_not_know(tmp_path: Path) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from types import SimpleNamespace\n__version__ = '2.10.1'\n"
        "version = SimpleNamespace(cuda=None)\ncompiled_with_cxx11_abi = lambda: True\n"
    )
    said = configure(
        tmp_path / "build",
        "-DCASTOR_BUILD_PYTHON=ON",
        "-DCASTOR_BUILD_TESTS=OFF",
        "-DCASTOR_CUDA=OFF",
        f"-DPython_EXECUTABLE={sys.executable}",
        PYTHONPATH=str(tmp_path),
    )
    assert "torch>=2.11,<2.16" in said
    assert "has torch 2.10.1" in said


def test_build_and_installation_know_the_same_torch() -> None:
    document = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    known = [line for line in document["project"]["dependencies"] if line.startswith("torch>")]
    assert [x for x in document["build-system"]["requires"] if x.startswith("torch>")] == known
    assert known == PROJECT["dependencies"]


def test_sdist_requires_no_particular_torch(provider: ModuleType) -> None:
    provider.build_state("sdist")
    assert provider.dynamic_metadata({}, PROJECT) == {"dependencies": []}


def test_wheel_without_torch_or_cmake_says_what_to_install(
    provider: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider.build_state("wheel")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match="apt-get install cmake"):
        provider.dynamic_metadata({}, PROJECT)

    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(SystemExit, match=r"torch.*>=2\.11.*--no-build-isolation"):
        provider.dynamic_metadata({}, PROJECT)
