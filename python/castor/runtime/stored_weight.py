"""Placeholders in state dicts for parameters on NVMe, which get memory on demand."""

from __future__ import annotations

import copy
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from castor.errors import IoError

if TYPE_CHECKING:
    from castor.runtime.engine import Engine


class StoredWeight(torch.Tensor):
    """A parameter on NVMe in a state_dict: the parameter for operators, a copy for addresses.

    Operators of torch read and write the parameter itself, as they do through any state_dict. Code
    that asks for memory, as savers do (data_ptr, a storage, numpy, pickle, copy.deepcopy), gets the
    memory of a copy. The copy is in a file in the run's nvme_path, mapped into memory: it takes
    disk space and pages that the kernel may write out, and nothing of the host budget. The copy is
    updated each time it is asked for. Writes to its memory do not reach the parameter. The file is
    removed with the last tensor over it.
    """

    copy_on_disk: CopyOnDisk

    @staticmethod
    def over(tensor: torch.Tensor, copy_on_disk: CopyOnDisk) -> StoredWeight:
        """Makes a StoredWeight of `tensor`, which lies over the memory of a parameter on NVMe."""
        weight: StoredWeight = tensor.as_subclass(StoredWeight)
        weight.copy_on_disk = copy_on_disk
        return weight

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            for given in args:
                if (
                    type(result) is torch.Tensor
                    and type(given) is StoredWeight
                    and given.copy_on_disk.is_of(result)
                ):
                    return StoredWeight.over(result, given.copy_on_disk)
        return result

    def in_memory(self) -> torch.Tensor:
        """Returns the current values as an ordinary tensor over the copy's storage.

        Raises:
            IoError: The disk of nvme_path has no room for the copy, or the parameter cannot be
                read.
        """
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            flat = self.copy_on_disk.current()
            return flat.view(self.dtype).as_strided(
                self.size(), self.stride(), self.storage_offset()
            )

    def data_ptr(self) -> int:
        """Returns the address of the copy."""
        return self.in_memory().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Returns the storage of the copy: the parameter's bytes and no others."""
        return self.in_memory().untyped_storage()

    def storage(self) -> Any:
        """Returns untyped_storage, typed."""
        return self.in_memory().storage()

    def _typed_storage(self) -> Any:
        return self.in_memory()._typed_storage()

    def numpy(self, *, force: bool = False) -> Any:
        """Returns an array over the copy."""
        return self.in_memory().numpy(force=force)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.in_memory().__array__(*args, **kwargs)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self.in_memory().__dlpack__(*args, **kwargs)

    def tolist(self) -> Any:
        """Returns the values as numbers."""
        return self.in_memory().tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.in_memory().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return copy.deepcopy(self.in_memory(), memo)


class CopyOnDisk:
    """A copy of one parameter, in a nameless file that is mapped into memory when it is needed."""

    def __init__(self, weight: torch.Tensor, name: str, directory: Path) -> None:
        """Takes no space yet.

        Args:
            weight: A detached alias of the parameter.
            name: Name of the parameter, for errors.
            directory: Directory of the run's NVMe tier.
        """
        self._weight = weight
        self._storage = weight.untyped_storage()._cdata
        self._name = name
        self._directory = directory
        self._flat: torch.Tensor | None = None

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies over the parameter's memory."""
        return bool(tensor.untyped_storage()._cdata == self._storage)

    def current(self) -> torch.Tensor:
        """Returns all elements as they are now, in the order of the parameter's memory.

        Raises:
            IoError: See StoredWeight.in_memory.
        """
        values = self._weight.as_strided((self._weight.numel(),), (1,))
        if self._flat is None:
            self._flat = self._mapped(values).copy_(values)
        elif not torch.equal(self._flat, values):  # written since; pages of equal values stay clean
            self._flat.copy_(values)
        return self._flat

    def _mapped(self, values: torch.Tensor) -> torch.Tensor:
        if values.numel() == 0:
            return torch.empty(0, dtype=values.dtype)
        try:
            with tempfile.TemporaryFile(dir=self._directory, buffering=0) as file:
                os.posix_fallocate(file.fileno(), 0, values.nbytes)  # a full disk is found here
                memory = mmap.mmap(file.fileno(), values.nbytes)
        except OSError as error:
            raise IoError(
                error.errno,
                f"{error.strerror}. The memory of parameter '{self._name}', which is on NVMe, was "
                f"asked for (torch.save, safetensors, numpy), and takes {values.nbytes} bytes in "
                f"{self._directory}: free them, or write the model with booster.save_model, which "
                "takes none",
                str(self._directory),
            ) from error
        return torch.frombuffer(memory, dtype=values.dtype)


class StoredWeights:
    """Puts the copies of an engine's parameters on NVMe into its state dicts."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        # Copies by parameter: state dicts and tied keys share one, as the parameter has one memory.
        self._copies: weakref.WeakValueDictionary[int, CopyOnDisk] = weakref.WeakValueDictionary()

    def lend(
        self, engine: Engine, module: nn.Module, state: dict[str, Any], prefix: str, _: Any
    ) -> None:
        """Replaces parameters on NVMe in a state dict; a state_dict hook of `module`.

        With keep_vars=True the state dict keeps the parameters themselves.
        """
        for name, param in module._parameters.items():
            index = None if param is None else engine.index_of.get(param)
            value = state.get(prefix + name)
            if (
                index is not None
                and isinstance(value, torch.Tensor)
                and value is not param
                and engine.session.weight_stored(index)
                and not engine.being_loaded
            ):
                copied = self._copies.get(index)
                if copied is None:
                    copied = CopyOnDisk(value, engine.names[index], self._directory)
                    self._copies[index] = copied
                state[prefix + name] = StoredWeight.over(value, copied)
