"""Prints torch's version, C++ ABI, library directory and include directories as a CMake list."""

from pathlib import Path

import torch

# Not torch.utils.cpp_extension.include_paths(): that module needs setuptools and looks for CUDA.
root = Path(torch.__file__).parent
include = root / "include"
print(
    torch.__version__.split("+")[0],
    int(torch.compiled_with_cxx11_abi()),
    root / "lib",
    include,
    include / "torch" / "csrc" / "api" / "include",
    sep=";",
)
