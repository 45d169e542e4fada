"""Prints what a compiler needs to find the headers of torch and Python: -isystem options."""

import sysconfig
from importlib.util import find_spec
from pathlib import Path

found = find_spec("torch")
assert found is not None
assert found.origin is not None
headers = Path(found.origin).parent / "include"
for path in (headers, headers / "torch/csrc/api/include", sysconfig.get_paths()["include"]):
    print("-isystem", path)
