"""Prints torch's version, CUDA version ("none" without), C++ ABI, library and include directories.

As a CMake list: separated by semicolons.
"""

from pathlib import Path

import torch

# Not torch.utils.cpp_extension.include_paths(): that module needs setuptools and looks for CUDA.
root = Path(torch.__file__).parent
include = root / "include"
print(
    torch.__version__.split("+")[0],
    torch.version.cuda or "none",
    int(torch.compiled_with_cxx11_abi()),
    root / "lib",
    include,
    include / "torch" / "csrc" / "api" / "include",
    sep=";",
)
