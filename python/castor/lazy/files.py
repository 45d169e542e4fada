"""Checkpoints that are read when the model is boosted."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import safetensors
import torch

from castor.lazy.program import Operation, Value
from castor.lazy.tensor import LazyTensor, Recording

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""Types of the safetensors format."""


_LOADERS = ("peft", "safetensors", "transformers")
"""Packages whose files are lazy. Others may need the values at once."""


@contextmanager
def lazy_files(recording: Recording) -> Iterator[None]:
    """Inside, tensors that loaders read from safetensors files are lazy.

    Loaders are from_pretrained of transformers and PEFT, and safetensors' own load_file. Their
    renaming, fusing and casting of tensors are then recorded like initialisers.
    """
    safe_open = safetensors.safe_open

    def open_lazily(
        filename: Any, framework: str = "pt", device: Any = "cpu", **options: Any
    ) -> Any:
        file = safe_open(filename, framework=framework, device=device, **options)
        on_cpu = framework in ("pt", "torch") and torch.device(device).type == "cpu"
        caller = str(sys._getframe(1).f_globals.get("__name__"))
        of_loader = caller.partition(".")[0] in _LOADERS
        return LazyFile(recording, file) if on_cpu and of_loader else file

    _replace(safe_open, open_lazily)
    try:
        yield
    finally:
        _replace(open_lazily, safe_open)


def _replace(old: Any, new: Any) -> None:
    """Exchanges `safe_open` in safetensors itself and in every module that has imported it.

    transformers imports its model classes when they are first used, which may be inside.
    """
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        if names.get("safe_open") is old:
            names["safe_open"] = new


class LazyFile:
    """An open safetensors file whose tensors are lazy; it stays mapped while they need it."""

    def __init__(self, recording: Recording, file: Any) -> None:
        self._recording = recording
        self._file = file

    def __enter__(self) -> LazyFile:
        """For `with`."""
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing: the tensors still have to be read."""

    def __getattr__(self, name: str) -> Any:
        """keys, metadata and whatever else does not read tensors."""
        return getattr(self._file, name)

    def get_slice(self, key: str) -> LazySlice:
        """A tensor, to be read in part or as a whole."""
        return LazySlice(self._recording, self._file, key)

    def get_tensor(self, key: str) -> torch.Tensor:
        """A tensor, to be read."""
        whole: torch.Tensor = self.get_slice(key)[...]
        return whole

    def get_tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by name, to be read."""
        return {key: self.get_tensor(key) for key in self._file.keys()}  # noqa: SIM118


class LazySlice:
    """A lazy form of what safetensors' get_slice returns."""

    def __init__(self, recording: Recording, file: Any, key: str) -> None:
        self._recording = recording
        self._slice = file.get_slice(key)
        self._read = Read(file=file, key=key)

    def __getattr__(self, name: str) -> Any:
        """get_shape and get_dtype."""
        return getattr(self._slice, name)

    def __getitem__(self, index: Any) -> Any:
        """A part of the tensor, lazy; `...` for all of it."""
        dtype = DTYPES.get(self._slice.get_dtype())
        if dtype is None:
            raise NotImplementedError(
                f"tensor '{self._read.key}' has type {self._slice.get_dtype()}, which "
                "LazyInitContext does not read; call from_pretrained outside"
            )
        value = Value(meta=torch.empty(self._slice.get_shape(), dtype=dtype, device="meta"))
        self._recording.program.operations.append(
            Operation(
                function=self._read,
                args=(),
                kwargs={},
                inputs=frozenset(),
                outputs=(value,),
                writes=frozenset(),
                random=None,
                constants=(),
            )
        )
        whole = LazyTensor(self._recording, value)
        return whole if index is ... else whole[index]


@dataclass(frozen=True, kw_only=True, eq=False)
class Read:
    """Reads one tensor."""

    file: Any
    key: str

    def __call__(self) -> torch.Tensor:
        """Gives the tensor over the file's mapping: private memory is taken by who copies it.

        Raises:
            safetensors.SafetensorError: The file is damaged.
        """
        tensor: torch.Tensor = self.file.get_tensor(self.key)
        return tensor
