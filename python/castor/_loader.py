"""Loads the castor._C that was compiled for the torch of this environment.

torch's C++ ABI holds within a minor version only: an extension for another one would fail on a
symbol with an unreadable name, or load and crash later. So castor/_extensions has a folder for each
torch that castor was compiled for, with the extensions and the record of their build. Whether torch
has CUDA does not matter to castor._C, which links no CUDA library; castor._cuda does.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from dataclasses import dataclass, fields
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

from castor.collections_paused import collections_paused

with collections_paused():
    import torch

_REINSTALL = "reinstall castor-torch"
_EXTENSIONS = Path(__file__).parent / "_extensions"
# What brings a library that castor._C names. A wheel carries TBB; from source it is the system's.
_PACKAGES = {
    "libtbb": "apt-get install libtbb12, or install the wheel, which carries it",
    "libhwloc": "apt-get install libhwloc15, or install the wheel, which carries it",
    "libtorch": "this torch is incomplete: reinstall it",
    "libc10": "this torch is incomplete: reinstall it",
    "libstdc++": "apt-get install libstdc++6",
    "libgcc_s": "apt-get install libgcc-s1",
}


@dataclass(frozen=True, kw_only=True)
class BuildInfo:
    """Versions and libraries that castor._C was built with; "none" for what was left out."""

    castor: str
    python: str
    """Major and minor version."""
    torch: str
    torch_cuda: str
    """CUDA version of that torch; castor._C itself uses none of it."""
    cuda: str
    """Version of the toolkit that castor._cuda was built with."""
    compiler: str
    tbb: str
    hwloc: str
    jemalloc: str
    liburing: str


def extension_path(version: str = torch.__version__) -> Path:
    """Returns the file of castor._C for a torch and this Python.

    Args:
        version: torch.__version__, such as "2.11.0+cu130".

    Raises:
        ImportError: There is none. The message says which ones there are, and what to install.
    """
    package, minor = _EXTENSIONS.parent, _minor(version)
    for suffix in EXTENSION_SUFFIXES:
        if (path := _EXTENSIONS / f"torch{minor}" / f"_C{suffix}").exists():
            return path
    built = sorted(_EXTENSIONS.glob("torch*/_C.*.so"))
    if not built:
        raise ImportError(
            f"castor in {package} lacks its extension castor._C: these are sources that were not "
            "built; leave their directory, or install them with "
            "`pip install --no-build-isolation .`",
            name="castor._C",
        )
    same_torch = [path.name for path in built if path.parent.name == f"torch{minor}"]
    if same_torch:
        raise ImportError(
            f"castor in {package} was built for another Python than Python "
            f"{sys.version_info.major}.{sys.version_info.minor} (it holds {same_torch[0]}): "
            f"{_REINSTALL} with this interpreter's pip",
            name="castor._C",
        )
    torches = [path.parent.name.removeprefix("torch") for path in built]
    wanted = " or ".join(f'"torch=={torch}.*"' for torch in torches)
    raise ImportError(
        f"this castor was built for torch {', '.join(torches)}, and torch {version} is installed: "
        f"pip install {wanted}, or a castor built for torch {minor} (a wheel that holds it, or "
        "from source with pip install --no-build-isolation)",
        name="castor._C",
    )


def read_build_info(extension: Path) -> BuildInfo:
    """The record beside the extension.

    Raises:
        ImportError: It is missing or damaged.
    """
    path = extension.parent / "_build_info.json"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return BuildInfo(**{field.name: str(document[field.name]) for field in fields(BuildInfo)})
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ImportError(
            f"castor cannot tell which torch it was built for, because {path} cannot be read "
            f"({type(error).__name__}: {error}): {_REINSTALL}",
            name="castor._C",
        ) from error


def check_torch(info: BuildInfo, version: str) -> None:
    """Compares major and minor version with those of the build.

    Args:
        info: The build's record.
        version: torch.__version__, such as "2.11.0+cu130".

    Raises:
        ImportError: They differ: the folder of the extension was moved or renamed.
    """
    built, here = _minor(info.torch), _minor(version)
    if built != here:
        raise ImportError(
            f"the extension of castor {info.castor} for torch {here} was built for torch {built}, "
            f"says the record beside it: {_REINSTALL}",
            name="castor._C",
        )


def explain(error: ImportError, info: BuildInfo) -> ImportError:
    """An ImportError that says what to do about one that castor._C's loading raised."""
    text = str(error)
    missing = re.match(r"(\S+\.so[\w.]*): cannot open shared object file", text)
    if missing:
        library = missing[1]
        stem = re.split(r"[-_.]", library)[0]
        remedy = _PACKAGES.get(stem, _REINSTALL)
        text = f"castor._C needs the shared library {library}, which is not to be found: {remedy}"
    else:
        text = (
            f"castor._C (built with {info.compiler} for torch {info.torch}) does not load with "
            f"torch {torch.__version__}: {text}. {_REINSTALL.capitalize()}, or build it here"
        )
    return ImportError(text, name="castor._C", path=error.path)


def load_cuda() -> ModuleType:
    """castor._cuda, which `import castor` leaves alone: it needs the CUDA libraries of torch.

    Raises:
        ImportError: castor was built without it, or torch is for another major version of CUDA.
    """
    if BUILD_INFO.cuda == "none":
        raise ImportError(
            f"castor {BUILD_INFO.castor} was built without castor._cuda: install a CUDA toolkit of "
            "torch's major version, put its nvcc on PATH and build castor again",
            name="castor._cuda",
        )
    here = torch.version.cuda or "none"
    if here.split(".")[0] != BUILD_INFO.cuda.split(".")[0]:
        raise ImportError(
            f"castor._cuda was built with CUDA {BUILD_INFO.cuda} and this torch "
            f"{torch.__version__} is for CUDA {here}: install a torch for CUDA "
            f"{BUILD_INFO.cuda.split('.')[0]}, or build castor with this one",
            name="castor._cuda",
        )
    return importlib.import_module("castor._cuda")


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def _load() -> BuildInfo:
    extension = extension_path()
    info = read_build_info(extension)
    check_torch(info, torch.__version__)
    sys.modules["castor"].__path__.append(str(extension.parent))
    try:
        from castor import _C  # noqa: F401
    except ImportError as error:
        raise explain(error, info) from error
    return info


BUILD_INFO = _load()
