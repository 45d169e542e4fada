"""The checks of `make wheel`: each rule is seen to fail on a wheel that breaks it."""

import importlib
import json
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from castor import _loader

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a script by name; they import each other as neighbours."""
    pytest.importorskip("elftools", reason="the 'wheel' extra (auditwheel) is not installed")
    monkeypatch.syspath_prepend(str(SCRIPTS))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


def write_wheel(directory: Path, version: str, platform: str, **record: str) -> Path:
    """A wheel that holds the extension as it was built here: linked to the system's libraries."""
    extension = _loader.extension_path()
    info = json.loads((extension.parent / "_build_info.json").read_text()) | record
    path = directory / f"castor_torch-{version}-cp311-cp311-{platform}.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        folder = "castor/_extensions/torch2.11"
        wheel.write(extension, f"{folder}/{extension.name}")
        wheel.writestr(f"{folder}/_build_info.json", json.dumps(info))
        wheel.writestr(
            f"castor_torch-{version}.dist-info/METADATA",
            "Metadata-Version: 2.4\nName: castor-torch\nVersion: 0.1.0\n"
            "Requires-Dist: torch<2.16,>=2.11\n",
        )
    return path


def test_wheel_that_was_not_repaired_breaks_every_rule(
    tmp_path: Path, script: Callable[[str], ModuleType]
) -> None:
    path = write_wheel(
        tmp_path, "0.1.0", "linux_x86_64", torch="2.11.0", python="3.10", jemalloc="none"
    )
    found = "\n".join(script("wheel_check").problems_of_wheel(path))
    for expected in (
        "it carries [], not libtbb alone",
        "libtbb",
        "which nothing brings",
        "its version is 0.1.0, and it was built for torch 2.11",
        "it does not require torch==2.11.*",
        "its platform is linux_x86_64",
        "it is for cp311, built with Python 3.10",
        "it was built without jemalloc",
        "it lacks castor/selftest.py",
        "it lacks castor/licenses/onetbb.txt",
        "it lacks castor/licenses/liburing.txt",
    ):
        assert expected in found


def test_wheel_for_a_newer_glibc_than_its_build_machine_is_refused(
    tmp_path: Path, script: Callable[[str], ModuleType]
) -> None:
    path = write_wheel(tmp_path, "0.1.0+torch2.11", "manylinux_2_39_x86_64")
    found = script("wheel_check").problems_of_wheel(path)
    assert "its platform is manylinux_2_39_x86_64" in found


def test_kernels_for_every_gpu_are_asked_for(
    tmp_path: Path, script: Callable[[str], ModuleType]
) -> None:
    check = script("wheel_check")
    path = write_wheel(tmp_path, "0.1.0+torch2.11", "manylinux_2_35_x86_64", cuda="13.0.88")
    found = check.problems_of_wheel(path)
    assert "its record says CUDA 13.0.88, and it holds no _cuda" in found
    extension = _loader.extension_path()
    assert check.problems_of_kernels(extension.read_bytes()) == ["castor._cuda holds no kernels"]
    for module in extension.parent.glob("_cuda.*.so"):  # where castor was built with a toolkit
        binaries = check.kernels_of(module.read_bytes())
        assert binaries
        assert all(binaries)  # for which GPUs, whoever built it has chosen


def raw_wheel(directory: Path, torch: str, script: Callable[[str], ModuleType]) -> Path:
    """A wheel as it is compiled against one torch, with a file in the place of the extension."""
    source = directory / torch / "source"
    folder = source / "castor" / "_extensions" / f"torch{torch}"
    folder.mkdir(parents=True)
    (folder / "_C.so").write_text(torch)
    (source / "castor" / "__init__.py").touch()
    info = source / "castor_torch-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.4\nName: castor-torch\nVersion: 0.1.0\n"
        f"Requires-Dist: torch<2.16,>=2.11\nRequires-Dist: torch=={torch}.*\n"
    )
    (info / "WHEEL").write_text(
        "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: false\n"
        "Tag: cp311-cp311-linux_x86_64\n"
    )
    (info / "RECORD").touch()
    script("wheel_repair").run("wheel", "pack", "-d", directory / torch, source)
    (wheel,) = (directory / torch).glob("*.whl")
    return wheel


@pytest.mark.parametrize(
    ("torches", "requires", "local"),
    [
        (["2.11"], ["torch==2.11.*"], "torch2.11"),
        (["2.11", "2.15"], ["torch!=2.12.*,!=2.13.*,!=2.14.*"], "torch2.11.torch2.15"),
        (["2.11", "2.12", "2.13", "2.14", "2.15"], [], None),
    ],
    ids=["one", "two", "all"],
)
def test_one_wheel_holds_the_extensions_for_several_torches(
    tmp_path: Path,
    script: Callable[[str], ModuleType],
    torches: list[str],
    requires: list[str],
    local: str | None,
) -> None:
    repair = script("wheel_repair")
    wheels = [raw_wheel(tmp_path, torch, script) for torch in torches]
    with zipfile.ZipFile(repair.merge(wheels, tmp_path / "work")) as merged:
        metadata = merged.read("castor_torch-0.1.0.dist-info/METADATA").decode()
        assert repair.torches_of(merged.namelist()) == torches
        for torch in torches:
            content = merged.read(f"castor/_extensions/torch{torch}/_C.so").decode()
            assert content == torch
    lines = [f"Requires-Dist: {line}" for line in ["torch<2.16,>=2.11", *requires]]
    assert [line for line in metadata.splitlines() if "torch" in line][1:] == lines
    assert repair.local_version(torches, repair.known_torches(metadata)) == local


def test_python_that_is_not_there_is_named(script: Callable[[str], ModuleType]) -> None:
    torch_env = script("torch_env")
    with pytest.raises(torch_env.UnavailableError, match=r"no Python 3\.99"):
        torch_env.find_python("3.99")
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert torch_env.find_python(here) == Path(sys.executable)


def test_closure_of_torch_holds_its_libraries_once(script: Callable[[str], ModuleType]) -> None:
    names = [d.name for d in script("torch_env").requirement_closure("torch")]
    assert names[0] == "torch"
    assert len(names) == len(set(names))
    assert "sympy" in names
    assert "pytest" not in names
