"""Importing castor where it does not fit: another torch, another Python, a library that is gone."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import castor
from castor import _loader
from castor._loader import BuildInfo, check_torch, explain


def built_for(version: str) -> BuildInfo:
    return BuildInfo(
        castor="0.1.0",
        python="3.11",
        torch=version,
        torch_cuda="none",
        cuda="none",
        compiler="GNU 12.2.0",
        tbb="2021.8.0",
        hwloc="none",
        jemalloc="none",
        liburing="none",
    )


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package that a test may damage: castor in an otherwise empty directory."""
    copy = tmp_path / "site" / "castor"
    shutil.copytree(
        Path(castor.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__")
    )
    # What auditwheel put beside the package.
    for libraries in Path(castor.__file__).parent.parent.glob("castor_torch.libs"):
        shutil.copytree(libraries, copy.parent / libraries.name)
    return copy


def import_castor(package: Path) -> tuple[int, str]:
    """Exit status and last line of stderr of a process that imports this copy."""
    environment = os.environ | {"PYTHONPATH": str(package.parent)}
    done = subprocess.run(
        [sys.executable, "-c", "import castor; print(castor.__file__)"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=package.parent,
    )
    if done.returncode == 0:
        assert done.stdout.strip() == str(package / "__init__.py")
    return done.returncode, (done.stderr.strip().splitlines() or [""])[-1]


def test_whole_copy_of_the_package_imports(package: Path) -> None:
    assert import_castor(package) == (0, "")


def test_parts_of_torch_that_take_long_are_imported_by_who_needs_them() -> None:
    parts = ("torch._dynamo", "torch.distributed.tensor", "torch.distributed.pipelining", "sympy")
    code = f"import sys, castor; print([name for name in {parts} if name in sys.modules])"
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"


def folder(package: Path) -> Path:
    """The folder of the extensions for the torch of this environment."""
    minor = ".".join(torch.__version__.split(".")[:2])
    return package / "_extensions" / f"torch{minor}"


def for_another_torch(package: Path) -> None:
    folder(package).rename(package / "_extensions" / "torch1.99")


def with_another_record(package: Path) -> None:
    path = folder(package) / "_build_info.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"torch": "1.99.3"}))


def without_record(package: Path) -> None:
    (folder(package) / "_build_info.json").unlink()


def without_extension(package: Path) -> None:
    next(folder(package).glob("_C.*.so")).unlink()


def for_another_python(package: Path) -> None:
    extension = next(folder(package).glob("_C.*.so"))
    extension.rename(extension.with_name("_C.cpython-399-x86_64-linux-gnu.so"))


def without_tbb(package: Path) -> None:
    """Renames libtbb in the extension's list of libraries; a wheel's has a hash in its name."""
    extension = next(folder(package).glob("_C.*.so"))
    content = extension.read_bytes()
    assert content.count(b"\0libtbb") == 1
    start = content.index(b"\0libtbb")
    end = content.index(b"\0", start + 1)
    gone = b"\0libtbb.so.99".ljust(end - start, b"9")[: end - start]
    extension.write_bytes(content[:start] + gone + content[end:])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (for_another_torch, ["torch 1.99,", f"torch {torch.__version__} is", '"torch==1.99.*"']),
        (with_another_record, ["built for torch 1.99,", "reinstall"]),
        (
            lambda package: (folder(package) / "_build_info.json").write_text("{}"),
            ["KeyError", "reinstall"],
        ),
        (without_record, ["_build_info.json", "FileNotFoundError", "reinstall"]),
        (without_extension, ["lacks its extension", "--no-build-isolation"]),
        (for_another_python, ["another Python", "cpython-399", "reinstall"]),
        (without_tbb, ["libtbb.so.", "not to be found", "apt-get install libtbb12"]),
    ],
    ids=[
        "torch",
        "another record",
        "damaged record",
        "no record",
        "no extension",
        "python",
        "libtbb",
    ],
)
def test_import_that_cannot_work_says_what_to_do(
    package: Path, damage: Callable[[Path], object], words: list[str]
) -> None:
    damage(package)
    status, message = import_castor(package)
    assert status == 1
    assert message.startswith("ImportError: ")
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    "here", ["2.11.0", "2.11.1", "2.11.0+cpu", "2.11.0+cu130", "2.11.0a0+git1"]
)
def test_any_build_of_the_same_minor_version_fits(here: str) -> None:
    check_torch(built_for("2.11.0"), here)


@pytest.mark.parametrize("here", ["2.10.0", "2.16.0+cpu", "2.1.1", "3.11.0", "2.110.0"])
def test_another_minor_version_is_refused_with_both_ways_out(here: str) -> None:
    built = ".".join(torch.__version__.split(".")[:2])
    with pytest.raises(ImportError) as raised:
        _loader.extension_path(here)
    message = str(raised.value)
    assert f"torch {here} is installed" in message
    assert f'"torch=={built}.*"' in message
    assert f"a castor built for torch {'.'.join(here.split('.')[:2])} " in message
    with pytest.raises(ImportError):
        check_torch(built_for("2.11.0"), here)


def test_unresolved_symbol_names_both_builds() -> None:
    error = explain(ImportError("/x/_C.so: undefined symbol: _ZN3c105Error"), built_for("2.11.0"))
    assert "undefined symbol: _ZN3c105Error" in str(error)
    assert "for torch 2.11.0" in str(error)
    assert f"torch {torch.__version__}" in str(error)
