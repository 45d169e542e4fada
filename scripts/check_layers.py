"""Checks the layers of castor: who may include or import whom.

Usage: check_layers.py [ROOT]. Prints "file:line: rule: what is wrong" for each violation, and
exits 1 if there is one. A layer of csrc includes itself and the layers that LAYERS names for it, so
no file includes upward. csrc/cuda takes ELEMENT_HEADERS besides. Each third-party library has the
layers that include it. In Python a module imports only what stands before it in PY_ORDER.
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CORE = "core"
_RANKS = frozenset({CORE, "host", "io", "optim"})
_STORE = _RANKS | {"parallel", "ranks"}
_TORCH = _STORE | {"cuda", "store"}
# The layers that a layer of csrc may include, besides itself.
LAYERS: dict[str, frozenset[str]] = {
    CORE: frozenset(),
    **dict.fromkeys(("host", "io", "optim", "parallel", "cuda"), frozenset({CORE})),
    "ranks": _RANKS,
    "store": _STORE,
    "torch": _TORCH,
    "c10d": _TORCH | {"torch"},
    "python": _TORCH | {"torch", "c10d"},
}
TORCH_LAYERS = frozenset({"torch", "c10d", "python"})

# What csrc/cuda may take of csrc/optim: the functions of one element and what they work on, so that
# a kernel and a CPU loop are one source.
ELEMENT_HEADERS = frozenset(
    f"optim/{name}.h"
    for name in (
        *("adam", "adam_check", "adam_element", "adam_rule", "block_moments", "element_check"),
        *("element_state", "elementwise", "gradient", "lion_element", "lion_rule", "moment_codec"),
        *("pairs", "rounding", "sgd_element", "sgd_rule", "split_master", "state_format"),
        *("stochastic", "update_rule"),
    )
)

# Third-party and system headers that only some layers may include: (pattern, layers, name).
OWNED_HEADERS: tuple[tuple[str, frozenset[str], str], ...] = (
    (r"tbb/|oneapi/|execution$", frozenset({"parallel"}), "TBB"),
    (r"hwloc", frozenset({"host"}), "hwloc"),
    (r"jemalloc", frozenset({"host"}), "jemalloc"),
    (r"sys/mman\.h$|numa(if)?\.h$", frozenset({"host"}), "memory mapping"),
    (r"liburing", frozenset({"io"}), "liburing"),
    (r"xxh", frozenset({"io"}), "xxhash"),
    (r"torch/|ATen/|c10/", TORCH_LAYERS, "torch"),
    (r"pybind11/", frozenset({"python"}), "pybind11"),
    (r"Python\.h$", TORCH_LAYERS, "the Python C API"),
    (r"cuda|cublas|nccl|nvtx|cub/|thrust/", frozenset({"cuda", "torch"}), "CUDA"),
)

STARTS_THREADS = frozenset({"thread", "future"})

# fmt: off
STD_HEADERS = frozenset({
    "algorithm", "any", "array", "atomic", "barrier", "bit", "bitset", "cassert", "cctype",
    "cerrno", "cfenv", "cfloat", "charconv", "chrono", "cinttypes", "climits", "clocale",
    "cmath", "compare", "complex", "concepts", "condition_variable", "coroutine", "csetjmp",
    "csignal", "cstdarg", "cstddef", "cstdint", "cstdio", "cstdlib", "cstring", "ctime",
    "cuchar", "cwchar", "cwctype", "deque", "exception", "filesystem", "format", "forward_list",
    "fstream", "functional", "future", "initializer_list", "iomanip", "ios", "iosfwd",
    "iostream", "istream", "iterator", "latch", "limits", "list", "locale", "map", "memory",
    "memory_resource", "mutex", "new", "numbers", "numeric", "optional", "ostream", "queue",
    "random", "ranges", "ratio", "regex", "scoped_allocator", "semaphore", "set",
    "shared_mutex", "source_location", "span", "sstream", "stack", "stdexcept", "stop_token",
    "streambuf", "string", "string_view", "syncstream", "system_error", "thread", "tuple",
    "type_traits", "typeindex", "typeinfo", "unordered_map", "unordered_set", "utility",
    "valarray", "variant", "vector", "version",
})
# fmt: on

# Each set may import from the sets before it, never from its own level or a later one.
# A package may import within itself.
PY_ORDER: tuple[frozenset[str], ...] = (
    frozenset({"_C", "_cuda", "collections_paused"}),
    frozenset({"_loader"}),
    frozenset({"errors"}),
    frozenset({"config", "lazy"}),
    frozenset({"runtime"}),
    frozenset({"optim", "distributed", "checkpoint", "activations"}),
    frozenset({"estimate"}),
    frozenset({"plugins"}),
    frozenset({"booster_checkpoints", "data"}),
    frozenset({"booster", "io_bench"}),
    frozenset({"report", "doctor", "integrations", "launch", "one_call", "selftest"}),
    frozenset({"model_files", "options", "estimate_cache", "planner"}),
    frozenset({"cli_estimates", "recipes"}),
    frozenset({"cli"}),
    frozenset({"__init__", "__main__"}),
)
# The runtime is told what to do by EngineSettings, and knows no plugin's arguments.
PLUGIN_SETTINGS = re.compile(r"castor\.config\.(settings|\w+Config)\b")
# Who may import what castor otherwise never does.
OWNED_IMPORTS = {
    "transformers": frozenset({"distributed", "estimate", "integrations", "recipes"}),
    **{
        name: frozenset({"recipes"})
        for name in (
            *("datasets", "fastapi", "gguf", "gradio", "lm_eval", "pandas", "pyarrow", "pydantic"),
            *("trl", "uvicorn"),
        )
    },
}
DYNAMIC_IMPORTS = frozenset({"import_module", "__import__"})

INCLUDE = re.compile(r"^\s*#\s*include\s*([<\"])([^>\"]+)[>\"]")
CXX_SUFFIXES = frozenset({".h", ".hpp", ".cuh", ".cc", ".cpp", ".cu", ".inc"})


@dataclass(frozen=True, order=True)
class Violation:
    """One broken rule. `line` counts from 1."""

    path: Path
    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.message}"


def without_block_comments(text: str) -> str:
    """Blanks /* ... */ and keeps the line breaks in it."""
    return re.sub(r"/\*.*?\*/", lambda match: "\n" * match[0].count("\n"), text, flags=re.DOTALL)


def include_problem(layer: str, header: str, quoted: bool) -> tuple[str, str] | None:
    """(rule, message) when `layer` may not include `header`, else None."""
    target = header.split("/")[0]
    if quoted and "/" in header and target in LAYERS:
        if target in LAYERS[layer] | {layer}:
            return None
        if layer == "cuda" and header in ELEMENT_HEADERS:
            return None
        if layer == CORE:
            return "core-is-alone", f"core includes nothing above itself; found {header}"
        allowed = ", ".join(sorted(LAYERS[layer]))
        return "include-order", f"{layer} may include itself and {allowed}, not {header}"
    if quoted:
        return (
            "project-include-style",
            f'write project includes as "<layer>/<file>", not "{header}"',
        )
    for pattern, owners, name in OWNED_HEADERS:
        if re.match(pattern, header) and layer not in owners:
            where = ", ".join(f"csrc/{owner}" for owner in sorted(owners))
            return "one-includer", f"{name} is included only by {where}; found <{header}>"
    if layer == CORE and header in STARTS_THREADS:
        return "core-starts-no-threads", f"<{header}> is forbidden in core; use the Executor seam"
    if layer == CORE and header not in STD_HEADERS:
        return "core-is-alone", f"<{header}> is not a C++ standard header"
    return None


def check_cxx(root: Path) -> Iterator[Violation]:
    """Include rules of every C++ file under csrc."""
    for path in sorted((root / "csrc").rglob("*")):
        if path.suffix not in CXX_SUFFIXES or not path.is_file():
            continue
        relative = path.relative_to(root)
        layer = relative.parts[1]
        if layer not in LAYERS:
            yield Violation(relative, 1, "known-layer", f"csrc/{layer} is no layer of castor")
            continue
        lines = without_block_comments(path.read_text(encoding="utf-8")).split("\n")
        for number, line in enumerate(lines, start=1):
            match = INCLUDE.match(line)
            problem = match and include_problem(layer, match[2], match[1] == '"')
            if problem:
                yield Violation(relative, number, *problem)


def imported_modules(tree: ast.AST, package: list[str]) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, wherever in the file; `from x import y` gives x.y."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{stem}.{alias.name}"
        elif isinstance(node, ast.Call) and is_dynamic_import(node):
            yield node.lineno, ast.literal_eval(node.args[0])


def is_dynamic_import(call: ast.Call) -> bool:
    """True for import_module("name") and __import__("name"), however they are spelled."""
    return (
        ast.unparse(call.func).split(".")[-1] in DYNAMIC_IMPORTS
        and len(call.args) > 0
        and isinstance(call.args[0], ast.Constant)
        and isinstance(call.args[0].value, str)
    )


def rank_of(unit: str) -> int | None:
    """Position of a unit (a module or package right below castor) in PY_ORDER."""
    return next((rank for rank, units in enumerate(PY_ORDER) if unit in units), None)


def import_problem(unit: str, name: str) -> tuple[str, str] | None:
    """(rule, message) when the unit may not import the dotted name, else None."""
    parts = name.split(".")
    if unit not in OWNED_IMPORTS.get(parts[0], {unit}):
        return "no-transformers", f"castor works on any model: it never imports {parts[0]}"
    if parts[0] != "castor":
        return None
    if unit == "runtime" and PLUGIN_SETTINGS.match(name):
        return "runtime-knows-no-plugin", f"castor.runtime may not import {name}, a plugin's"
    target = parts[1] if len(parts) > 1 else "__init__"
    if target == unit:
        return None
    own_rank = rank_of(unit)
    target_rank = rank_of(target)
    if target_rank is None:  # `from castor import Name`: a name of the package's __init__
        target_rank = len(PY_ORDER) - 1
    if own_rank is not None and target_rank < own_rank:
        return None
    order = " <- ".join("|".join(sorted(units)) for units in PY_ORDER)
    return "import-order", f"castor.{unit} may not import {name}; the order is {order}"


def check_python(root: Path) -> Iterator[Violation]:
    """Import rules of every module under python/castor."""
    top = root / "python" / "castor"
    for path in sorted(top.rglob("*.py")):
        relative = path.relative_to(root)
        inside = path.relative_to(top)
        unit = inside.parts[0].removesuffix(".py")
        if rank_of(unit) is None:
            yield Violation(
                relative, 1, "known-module", f"castor.{unit} has no place in PY_ORDER; give it one"
            )
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(relative))
        package = ["castor", *inside.parts[:-1]]
        for line, name in imported_modules(tree, package):
            problem = import_problem(unit, name)
            if problem:
                yield Violation(relative, line, *problem)


def main(arguments: list[str]) -> int:
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    violations = sorted([*check_cxx(root), *check_python(root)])
    for violation in violations:
        print(violation)
    if violations:
        print(f"layers: {len(violations)} violations", file=sys.stderr)
        return 1
    print("layers: clean")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
