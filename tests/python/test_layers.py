"""scripts/check_layers.py: every rule is seen to fail on a tree that breaks just that rule."""

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "scripts" / "check_layers.py"


def check(root: Path) -> tuple[int, list[str]]:
    """Exit status and report lines of the check on `root`."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(root)], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout.splitlines()


def write(root: Path, path: str, text: str) -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")


BROKEN = [
    # (file, its text, line reported, rule)
    ("csrc/core/a.h", "#pragma once\n#include <unistd.h>\n", 2, "core-is-alone"),
    ("csrc/core/a.cc", "#include <fcntl.h>\n", 1, "core-is-alone"),
    ("csrc/core/a.cc", "#include <sys/stat.h>\n", 1, "core-is-alone"),
    ("csrc/core/a.cc", "/* one\n two */\n  #  include <stdint.h>\n", 3, "core-is-alone"),
    ("csrc/core/a.cc", '#include "host/arena.h"\n', 1, "core-is-alone"),
    ("csrc/core/a.cc", "#include <thread>\n", 1, "core-starts-no-threads"),
    ("csrc/core/a.cc", "#include <future>\n", 1, "core-starts-no-threads"),
    ("csrc/core/a.cc", "#include <tbb/parallel_for.h>\n", 1, "one-includer"),
    ("csrc/core/a.cc", "#include <execution>\n", 1, "one-includer"),
    ("csrc/core/a.cc", "#include <cuda_runtime.h>\n", 1, "one-includer"),
    ("csrc/core/a.cc", "#include <torch/torch.h>\n", 1, "one-includer"),
    ("csrc/core/a.cc", "#include <Python.h>\n", 1, "one-includer"),
    ("csrc/core/a.cc", '#include "ids.h"\n', 1, "project-include-style"),
    ("csrc/host/a.cc", '#include "optim/adam.h"\n', 1, "include-order"),
    ("csrc/optim/a.cc", '#include "parallel/tbb_executor.h"\n', 1, "include-order"),
    ("csrc/parallel/a.cc", '#include "torch/binding.h"\n', 1, "include-order"),
    ("csrc/io/a.cc", '#include "python/module.h"\n', 1, "include-order"),
    ("csrc/cuda/a.cu", '#include "host/arena.h"\n', 1, "include-order"),
    ("csrc/cuda/a.cu", '#include "optim/convert.h"\n', 1, "include-order"),
    ("csrc/optim/a.cc", '#include "cuda/adam_body.h"\n', 1, "include-order"),
    ("csrc/ranks/a.cc", '#include "store/state_store.h"\n', 1, "include-order"),
    ("csrc/store/a.cc", '#include "torch/session.h"\n', 1, "include-order"),
    ("csrc/store/a.cc", "#include <ATen/ATen.h>\n", 1, "one-includer"),
    ("csrc/torch/a.cc", '#include "c10d/group_backend.h"\n', 1, "include-order"),
    ("csrc/c10d/a.cc", '#include "python/module.h"\n', 1, "include-order"),
    ("csrc/optim/a.cc", "#include <oneapi/tbb.h>\n", 1, "one-includer"),
    ("csrc/torch/a.cc", "#include <tbb/task_arena.h>\n", 1, "one-includer"),
    ("csrc/parallel/a.cc", "#include <hwloc.h>\n", 1, "one-includer"),
    ("csrc/torch/a.cc", "#include <jemalloc/jemalloc.h>\n", 1, "one-includer"),
    ("csrc/io/a.cc", "#include <sys/mman.h>\n", 1, "one-includer"),
    ("csrc/host/a.cc", "#include <liburing.h>\n", 1, "one-includer"),
    ("csrc/host/a.cc", "#include <xxhash.h>\n", 1, "one-includer"),
    ("csrc/parallel/a.cc", "#include <ATen/ATen.h>\n", 1, "one-includer"),
    ("csrc/host/a.cc", "#include <c10/core/Allocator.h>\n", 1, "one-includer"),
    ("csrc/torch/a.cc", "#include <pybind11/pybind11.h>\n", 1, "one-includer"),
    ("csrc/optim/a.cc", "#include <Python.h>\n", 1, "one-includer"),
    ("csrc/extra/a.cc", "#include <vector>\n", 1, "known-layer"),
    ("python/castor/config.py", "import castor.runtime\n", 1, "import-order"),
    ("python/castor/errors.py", "from castor.config import Config\n", 1, "import-order"),
    ("python/castor/runtime/a.py", "from ..plugins import Plugin\n", 1, "import-order"),
    ("python/castor/runtime/a.py", "from castor.config import GeminiConfig\n", 1,
     "runtime-knows-no-plugin"),
    ("python/castor/runtime/a.py", "import castor.config.settings\n", 1,
     "runtime-knows-no-plugin"),
    ("python/castor/optim/a.py", "from castor.distributed import mesh\n", 1, "import-order"),
    ("python/castor/checkpoint/a.py", "\nfrom castor import optim\n", 2, "import-order"),
    ("python/castor/plugins/a.py", "def f():\n    from .. import booster\n", 2, "import-order"),
    ("python/castor/booster.py", "from castor import Booster\n", 1, "import-order"),
    ("python/castor/booster.py", "import castor\n", 1, "import-order"),
    ("python/castor/optim/a.py", "import transformers.models\n", 1, "no-transformers"),
    ("python/castor/cli.py", "import importlib as i\ni.import_module('transformers')\n", 2,
     "no-transformers"),
    ("python/castor/helpers.py", "import os\n", 1, "known-module"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "text", "line", "rule"),
    BROKEN,
    ids=[f"{row[0]}-{row[3]}-{i}" for i, row in enumerate(BROKEN)],
)
def test_broken_rule_is_reported_at_its_line(
    tmp_path: Path, path: str, text: str, line: int, rule: str
) -> None:
    write(tmp_path, path, text)
    status, report = check(tmp_path)
    assert status == 1
    assert len(report) == 1
    assert report[0].startswith(f"{path}:{line}: {rule}: ")


def test_tree_that_keeps_the_rules_is_clean(tmp_path: Path) -> None:
    write(
        tmp_path,
        "csrc/core/a.h",
        '#include "core/ids.h"\n#include <mutex>\n// #include <thread>\n/*\n#include <thread>\n*/\n'
        + "\n" * 194,
    )
    write(
        tmp_path,
        "csrc/host/a.cc",
        '#include "host/a.h"\n#include "core/ids.h"\n#include <sys/mman.h>\n',
    )
    write(tmp_path, "csrc/host/b.cc", "#include <hwloc.h>\n#include <jemalloc/jemalloc.h>\n")
    write(tmp_path, "csrc/parallel/a.cc", "#include <tbb/task_arena.h>\n#include <thread>\n")
    write(
        tmp_path,
        "csrc/torch/a.cc",
        '#include <Python.h>\n#include <c10/core/Allocator.h>\n#include "optim/adam.h"\n',
    )
    write(
        tmp_path,
        "csrc/python/a.cc",
        '#include <pybind11/pybind11.h>\n#include "torch/a.h"\n#include "host/a.h"\n',
    )
    write(
        tmp_path,
        "python/castor/__init__.py",
        "import torch\nfrom castor.booster import Booster\nfrom . import _C\n",
    )
    write(tmp_path, "python/castor/errors.py", "from castor._C import Error\n")
    write(
        tmp_path,
        "python/castor/optim/a.py",
        "from .b import c\nfrom ..runtime import d\nfrom castor import config\n",
    )
    write(
        tmp_path,
        "python/castor/booster.py",
        "import castor.plugins.a\nfrom castor.errors import UsageError\n",
    )
    assert check(tmp_path) == (0, ["layers: clean"])


def test_repository_keeps_the_rules() -> None:
    status, report = check(REPOSITORY)
    assert status == 0, "\n".join(report)
