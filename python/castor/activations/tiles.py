"""Runs parts of blocks, such as MLPs, on a piece of the rows at a time."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from castor.activations.block_profile import Tiles
from castor.activations.recompute import (
    RandomStates,
    Recomputation,
    refuse_changeable,
    routes,
    tensors_in,
)
from castor.errors import UsageError
from castor.runtime.blocks import is_compiled
from castor.runtime.hooks import OwnForward, has_own_forward

MLP_NAMES = frozenset({"mlp", "ffn", "ff", "feed_forward", "DenseReluDense"})
"""Names of the part of a block that maps each token by itself."""
_PROBE_ROWS = 64
"""Most rows that are computed again in other pieces, to find out whether rows depend on others; the
rows of a piece if these are fewer."""
_ROWS = -2
"""Dimension of the rows, which are tokens."""


def tiled_submodules(block: nn.Module, name: str, part: str) -> dict[str, nn.Module]:
    """Returns the parts of a block that run in pieces, by their names in the block.

    Args:
        block: The block.
        name: Name of the block in the model.
        part: Name of the part in the block; "": its MLP.

    Raises:
        UsageError: The block has no such part, or the part chooses experts.
    """
    found: dict[str, nn.Module] = {}
    for child, module in block.named_modules():
        wanted = child == part if part else child.rpartition(".")[2] in MLP_NAMES
        if child and wanted and not any(child.startswith(f"{outer}.") for outer in found):
            found[child] = module
    if not found:
        wanted_name = f"part '{part}'" if part else "MLP that is a module of its own"
        parts = ", ".join(repr(child) for child, _ in block.named_children())
        raise UsageError(
            f"activations has tiles for '{name}', a {type(block).__name__} without "
            f"{'such a ' if part else 'an '}{wanted_name}; it has {parts}: name the part that maps "
            "each token by itself, 'tile:N:PART', or recompute the block"
        )
    for child, module in found.items():
        if routes(module):
            raise UsageError(
                f"activations has tiles for '{name}.{child}' ({type(module).__name__}), which "
                "sends tokens to experts: what an expert gets depends on all of them; recompute it "
                "instead"
            )
    return found


def tile_mlps(
    blocks: Mapping[str, nn.Module],
    tiles: Tiles,
    put: Callable[[nn.Module, str, TiledForward], None],
) -> list[nn.Module]:
    """Has the MLPs of blocks run in as many pieces as `tiles` says, where they can.

    Args:
        blocks: The blocks, by name.
        tiles: Number of pieces, read at each forward.
        put: Sets an attribute of a module.

    Returns:
        The MLPs whose forwards were replaced.
    """
    found: list[nn.Module] = []
    for name, block in blocks.items():
        try:
            parts = tiled_submodules(block, name, "")
        except UsageError:
            continue
        for part, module in parts.items():
            compiled = any(map(is_compiled, (block, *module.modules())))
            if compiled or has_own_forward(module) or any(map(_drops, module.modules())):
                continue
            # The outputs of the MLP's two forwards are not compared; those of its block are.
            forward = TiledForward(module, f"{name}.{part}", tiles=tiles, compared=False)
            put(module, "forward", forward)
            found.append(module)
    return found


def _drops(module: nn.Module) -> bool:
    """Whether a module drops elements in training: pieces would draw other random numbers."""
    return isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0


class TiledForward(OwnForward):
    """Forward of a module that maps each row by itself, run on one piece of the rows at a time.

    Each piece is recomputed when backward comes to it, so that the module's inner activations exist
    for one piece at a time. Autograd adds the pieces' gradients up, so that a parameter gets one
    gradient in a pass, as without pieces.

    The first forward checks that the rows do not depend on one another.
    """

    def __init__(self, module: nn.Module, name: str, *, tiles: int | Tiles, compared: bool) -> None:
        """Takes the place of `module.forward`.

        Args:
            module: The module.
            name: Name of the module in the model.
            tiles: Number of pieces; there are fewer if there are fewer rows. With `Tiles` ("auto"),
                a module that cannot run in pieces runs on all rows, without an error.
            compared: Whether the outputs of the two forwards are compared once.
        """
        super().__init__(module)
        self._name = name
        self._tiles = tiles
        self._recomputation = Recomputation(module, name, compared=compared)
        self._unchecked = True
        self.untiled = False
        """Whether "auto" has found that the module cannot run in pieces."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of the class's forward.

        Raises:
            UsageError: Rows depend on one another, the forward draws random numbers, an argument
                or the result cannot be cut into rows, or the forward may change an argument.
        """
        module = self.module
        forward = functools.partial(type(module).forward, module)
        tiles = self._tiles
        number = tiles.number if isinstance(tiles, Tiles) else tiles
        if not module.training or not torch.is_grad_enabled() or self.untiled:
            return forward(*args, **kwargs)
        if isinstance(tiles, Tiles) and number == 1:
            return forward(*args, **kwargs)
        call = _Call(args, kwargs)
        if isinstance(tiles, Tiles) and self._unchecked:
            self.untiled = not self._may_be_cut(call, number)
            self._unchecked = False
            if self.untiled:
                return forward(*args, **kwargs)
        refuse_changeable(self._name, module, (*args, *kwargs.values()))
        if not call.has_rows:
            raise self._refused("is passed something else than tensors with one row a token")
        before = RandomStates(*call.tensors)
        function = functools.partial(call.places, forward)
        pieces = [self._recomputation(function, *piece) for piece in call.pieces(number)]
        if not before.are_now(*call.tensors):
            raise self._refused("draws random numbers (dropout), others than it would as a whole")
        output = _joined(pieces)
        if output is None or output.shape[:-1] != call.shape:
            raise self._refused("gives something else than a tensor with one row a token")
        if self._unchecked:
            if self._rows_depend(call, call.tensors, output.detach(), number):
                raise self._refused("gives rows that depend on other rows")
            self._unchecked = False
        return output

    def _may_be_cut(self, call: _Call, number: int) -> bool:
        """Whether a call would not be refused, tried on one piece without side effects."""
        module = self.module
        try:
            refuse_changeable(self._name, module, call.values)
        except UsageError:
            return False
        if not call.has_rows or call.tensors[0].device.type == "meta":
            return call.has_rows
        copied = self._copy()
        buffers = [buffer._version for buffer in copied.buffers()]
        piece = [tensor.detach() for tensor in next(call.pieces(number))]
        states = RandomStates(*piece)
        with torch.no_grad():
            joined = _joined([call.places(copied, *piece)])
        drawn = not states.are_now(*piece)
        states.restore()
        if drawn or joined is None or joined.shape[:-1] != piece[0].shape[:-1]:
            return False
        depend = self._rows_depend(call, piece, joined, number)
        return not depend and buffers == [buffer._version for buffer in copied.buffers()]

    def _copy(self) -> nn.Module:
        """Returns a copy of the module without hooks, over the same parameters."""
        return copy.deepcopy(self.module, {id(param): param for param in self.module.parameters()})

    def _rows_depend(
        self, call: _Call, tensors: list[torch.Tensor], output: torch.Tensor, number: int
    ) -> bool:
        """Whether rows of the output depend on other rows.

        A copy of the module computes some rows again, all at once and in two pieces. There the rows
        have other neighbours, in another number.

        Args:
            call: Arguments of the module.
            tensors: The arguments with rows, or one piece of them.
            output: Result of the module for `tensors`.
            number: Number of pieces of all rows.
        """
        forward = functools.partial(call.places, self._copy())
        have = tensors[0].shape[_ROWS]
        rows_of_probe = min(_PROBE_ROWS, max(2, -(-call.shape[-1] // number)), have)
        step = max(1, have // rows_of_probe)
        rows = slice(0, step * rows_of_probe, step)
        inputs = [tensor.detach()[..., rows, :] for tensor in tensors]
        # The hooks of a recomputed block around it must not apply. Without `detach`, saved outputs
        # would hold their own graph nodes.
        with saved_tensors_hooks(torch.Tensor.detach, torch.Tensor.detach):
            whole, of_whole = _with_gradients(forward, inputs, 1)
            parts, of_parts = _with_gradients(forward, inputs, 2)
        outputs = [(output[..., rows, :], whole), (parts, whole)]
        gradients = zip(of_parts, of_whole, strict=True)
        return not all(_close(*pair) for pair in (*outputs, *gradients))

    def _refused(self, why: str) -> UsageError:
        return UsageError(
            f"module '{self._name}' ({type(self.module).__name__}) {why}, so it cannot run in "
            "tiles of rows; recompute it, or keep its activations"
        )


def is_tiled(module: nn.Module) -> bool:
    """Whether a module's forward runs in tiles."""
    forward = module.__dict__.get("forward")
    return isinstance(forward, TiledForward) and not forward.untiled


class _Places:
    """Arguments of a forward without their tensors, so that none is kept alive."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._args = [_emptied(value) for value in args]
        self._kwargs = {name: _emptied(value) for name, value in kwargs.items()}

    def __call__(self, forward: Callable[..., Any], *tensors: torch.Tensor) -> Any:
        """Calls a forward with `tensors` in the places of the arguments' tensors."""
        left = iter(tensors)

        def placed(value: Any) -> Any:
            return next(left).contiguous() if value is _TENSOR else value

        args = [placed(value) for value in self._args]
        return forward(*args, **{name: placed(value) for name, value in self._kwargs.items()})


_TENSOR = object()


def _emptied(value: Any) -> Any:
    return _TENSOR if isinstance(value, torch.Tensor) else value


class _Call:
    """Arguments of a forward, whose tensors can be cut into pieces of rows."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.places = _Places(args, kwargs)
        self.values = (*args, *kwargs.values())
        self.tensors = [v for v in self.values if isinstance(v, torch.Tensor)]

    @property
    def has_rows(self) -> bool:
        """Whether all tensors among the arguments are (..., rows, width), with the same rows."""
        found = list(tensors_in(self.values))
        return (
            0 < len(found) == len(self.tensors)
            and all(tensor.dim() > 1 and tensor.shape[:-1] == self.shape for tensor in found)
            and self.shape[-1] > 0
        )

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensors without the width; its last size is the number of rows."""
        return self.tensors[0].shape[:-1]

    def pieces(self, number: int) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yields the tensors, cut into `number` pieces whose sizes differ by one row at most."""
        return zip(*(_cut(tensor, number) for tensor in self.tensors), strict=True)


def _cut(tensor: torch.Tensor, number: int) -> Sequence[torch.Tensor]:
    rows = tensor.shape[_ROWS]
    number = min(number, rows)
    sizes = [rows // number + (i < rows % number) for i in range(number)]
    pieces: tuple[torch.Tensor, ...] = tensor.split(sizes, _ROWS)
    return pieces


def _joined(pieces: list[Any]) -> torch.Tensor | None:
    """Joins the rows of pieces; None: a piece is no floating-point tensor with rows."""
    for piece in pieces:
        if not (isinstance(piece, torch.Tensor) and piece.is_floating_point() and piece.dim() > 1):
            return None
    return torch.cat(pieces, _ROWS)


def _with_gradients(
    forward: Callable[..., torch.Tensor], inputs: list[torch.Tensor], number: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Computes in `number` pieces: the output, and the inputs' gradients of half its square sum."""
    with torch.enable_grad():
        inputs = [tensor.clone().requires_grad_(tensor.is_floating_point()) for tensor in inputs]
        pieces = zip(*(_cut(tensor, number) for tensor in inputs), strict=True)
        output = torch.cat([forward(*piece) for piece in pieces], _ROWS)
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        grads = torch.autograd.grad(output, wanted, output.detach(), materialize_grads=True)
    return output.detach(), list(grads)


def _close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors are equal but for rounding."""
    largest = expected.abs().nan_to_num(0.0, 0.0, 0.0).max().item()
    tolerance = torch.finfo(expected.dtype).eps ** 0.5
    return torch.allclose(found, expected, rtol=0.0, atol=tolerance * largest, equal_nan=True)
