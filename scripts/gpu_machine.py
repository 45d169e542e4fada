"""Writes what a machine has, as JSON, and fails where it has no GPU that torch can use.

Usage: gpu_machine.py FILE. With CASTOR_REQUIRE_CUDA=1 a missing GPU is exit status 1, else it is a
line that begins with SKIPPED.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))


def output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"
    return (done.stdout + done.stderr).strip()


def text_of(path: str) -> str | None:
    file = Path(path)
    return file.read_text().strip() if file.is_file() else None


def gpu(torch: Any) -> dict[str, Any] | str:
    """Its properties, or why there is none."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0]
    found = torch.cuda.get_device_properties(0)
    return {
        "name": found.name,
        "count": torch.cuda.device_count(),
        "capability": f"{found.major}.{found.minor}",
        "memory_bytes": found.total_memory,
        "multiprocessors": found.multi_processor_count,
    }


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        raise SystemExit(__doc__)
    from _machine import describe_machine

    commit = text_of(str(ROOT / "commit.txt"))
    facts: dict[str, Any] = describe_machine() | {
        "disk_free_bytes": {
            str(path): shutil.disk_usage(path).free for path in (ROOT, Path("/tmp"))
        },
        "memory_limit": text_of("/sys/fs/cgroup/memory.max"),
        "memory_available": output("grep", "MemAvailable", "/proc/meminfo"),
        "locked_memory_limit": output("bash", "-c", "ulimit -l"),
        "nvidia_smi": output("nvidia-smi", "-q") if shutil.which("nvidia-smi") else None,
        "topology": output("nvidia-smi", "topo", "-m") if shutil.which("nvidia-smi") else None,
    }
    if commit is not None:
        facts["commit"] = commit
    try:
        import torch
    except ImportError as error:
        facts["torch"], facts["gpu"] = str(error), "no torch"
    else:
        facts["torch"], facts["torch_cuda"] = torch.__version__, torch.version.cuda
        facts["gpu"] = gpu(torch)
    Path(arguments[0]).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    if isinstance(facts["gpu"], dict):
        print(f"{facts['gpu']['name']}, torch {facts['torch']}")
        return 0
    problem = f"no CUDA device: {facts['gpu']}"
    if os.environ.get("CASTOR_REQUIRE_CUDA") == "1":
        print(f"{problem} (CASTOR_REQUIRE_CUDA is 1)")
        return 1
    print(f"SKIPPED: {problem}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
