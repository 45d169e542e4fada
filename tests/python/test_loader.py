"""Importing castor where it does not fit: another torch, another Python, a library that is gone."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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


DAMAGES: dict[str, Callable[[Path], object]] = {
    "none": lambda _: None,
    "torch": for_another_torch,
    "another record": with_another_record,
    "damaged record": lambda package: (folder(package) / "_build_info.json").write_text("{}"),
    "no record": without_record,
    "no extension": without_extension,
    "python": for_another_python,
    "libtbb": without_tbb,
}
LONG = ("torch._dynamo", "torch.distributed.tensor", "torch.distributed.pipelining", "sympy")
# torch is imported once; each copy in a process forked then, as python forks none with threads.
IMPORT = f"""
import json, os, sys, torch
for path in sys.argv[1:]:
    if os.fork() == 0:
        sys.path.insert(0, path)
        try:
            import castor
            found = castor.__file__, [name for name in {LONG} if name in sys.modules]
        except BaseException as error:
            found = f"{{type(error).__name__}}: {{error}}", []
        print(json.dumps(found), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[Any]]]:
    """What importing damaged copies of the package, in otherwise empty directories, has come to.

    The file of the package or the error, and what long parts of torch were imported with it.
    """
    sites = {name: tmp_path_factory.mktemp("site") for name in DAMAGES}
    for name, site in sites.items():
        own = Path(castor.__file__).parent
        shutil.copytree(own, site / "castor", ignore=shutil.ignore_patterns("__pycache__"))
        for libraries in own.parent.glob("castor_torch.libs"):  # auditwheel put it beside
            shutil.copytree(libraries, site / libraries.name)
        DAMAGES[name](site / "castor")
    command = [sys.executable, "-c", IMPORT, *map(str, sites.values())]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=sites["none"].parent
    )
    found = dict(zip(DAMAGES, map(json.loads, done.stdout.splitlines()), strict=True))
    assert found["none"][0] == str(sites["none"] / "castor" / "__init__.py")
    yield found
    for site in sites.values():
        shutil.rmtree(site)


def test_whole_copy_of_the_package_imports(imported: dict[str, list[Any]]) -> None:
    assert imported["none"][0].endswith("castor/__init__.py")


def test_parts_of_torch_that_take_long_are_imported_by_who_needs_them(
    imported: dict[str, list[Any]],
) -> None:
    assert imported["none"][1] == []


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("torch", ["torch 1.99,", f"torch {torch.__version__} is", '"torch==1.99.*"']),
        ("another record", ["built for torch 1.99,", "reinstall"]),
        ("damaged record", ["KeyError", "reinstall"]),
        ("no record", ["_build_info.json", "FileNotFoundError", "reinstall"]),
        ("no extension", ["lacks its extension", "--no-build-isolation"]),
        ("python", ["another Python", "cpython-399", "reinstall"]),
        ("libtbb", ["libtbb.so.", "not to be found", "apt-get install libtbb12"]),
    ],
)
def test_import_that_cannot_work_says_what_to_do(
    damage: str, words: list[str], imported: dict[str, list[Any]]
) -> None:
    message, _ = imported[damage]
    assert message.startswith("ImportError: ")
    assert "\n" not in message
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
