"""Checks the installed castor: complete, typed, free of the sources and of absolute library paths.

Run with the interpreter that has castor; exits 1 and names what is wrong. With --cuda it prints the
name of the module with the GPU parts, or nothing where castor was built without them.
"""

import importlib
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

MODELS = tuple(
    f"estimate/models/{name}.json"
    for name in (
        *("gpt-oss-20b", "llama-3.1-70b", "llama-3.1-8b", "mixtral-8x7b", "qwen3-14b"),
        "qwen3-32b",
    )
)
PAGE = tuple(
    f"report/page/{name}"
    for name in (
        *("page.html", "page.css"),
        *("base.js", "step.js", "transfers.js", "training.js", "page.js"),
    )
)
SOURCES = Path(__file__).resolve().parent.parent


def problems() -> list[str]:
    castor = importlib.import_module("castor")
    extension = importlib.import_module("castor._C")
    package = Path(castor.__file__ or "").resolve().parent
    library = Path(extension.__file__ or "").resolve()
    found = []
    if package.is_relative_to(SOURCES / "python"):
        found.append(f"castor is imported from the sources ({package}), not from an installation")
    if library.parent.parent != package / "_extensions":
        found.append(f"castor._C lies outside the package's _extensions: {library}")
    if not (library.parent / "_build_info.json").is_file():
        found.append(f"{library.parent} lacks _build_info.json")
    found += [
        f"the wheel lacks castor/{name}"
        for name in ("py.typed", "_C.pyi", "estimate/presets.json", *MODELS, *PAGE)
        if not (package / name).is_file()
    ]
    version = importlib.metadata.version("castor-torch")
    if version != castor.__version__:
        found.append(f"the wheel is {version}, castor.__version__ is {castor.__version__}")
    dynamic = subprocess.run(
        ["readelf", "--dynamic", str(library)], capture_output=True, text=True, check=True
    ).stdout
    run_paths = re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", dynamic)
    if run_paths != ["$ORIGIN"]:
        found.append(f"the run path of castor._C is {run_paths}, not $ORIGIN alone")
    return found


def main(arguments: list[str]) -> int:
    if arguments == ["--cuda"]:
        loader = importlib.import_module("castor._loader")
        print("" if loader.BUILD_INFO.cuda == "none" else "castor._cuda")
        return 0
    found = problems()
    for problem in found:
        print(f"installed castor: {problem}", file=sys.stderr)
    if found:
        return 1
    print("installed castor: complete, typed, run path $ORIGIN")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
