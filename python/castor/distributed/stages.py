"""The modules of a process's pipeline stages, and placeholders for modules of other stages.

The model's own forward runs on every stage, from its inputs to its outputs. The placeholder before
a stage's first block returns the hidden states that were received. The one after its last block
keeps those that are to be sent. What the forward computes from other placeholders is not used.
"""

from __future__ import annotations

import bisect
import inspect
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import nn

from castor.distributed.inputs import find_cache
from castor.distributed.pipeline_plan import PipelinePlan
from castor.distributed.stage_transfer import SendHidden, StageTransfer
from castor.errors import UsageError

# --- Placeholders for modules of other pipeline stages, where the model's own forward runs --------

BIAS = "relative_attention_bias"
"""Name, in an attention of transformers' T5, of the embedding that makes the position bias."""


class _Placeholder(nn.Module):
    """Placeholder for a module of another rank; it refuses to be copied or pickled."""

    def __deepcopy__(self, _memo: Any) -> NoReturn:
        self._refuse("copy")

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        self._refuse("pickle")

    def _refuse(self, what: str) -> NoReturn:
        raise UsageError(
            f"other ranks have some stages of this model, and a {what} would lack them: "
            "booster.save_model on all ranks writes the full one"
        )


class PlaceholderBlock(_Placeholder):
    """Placeholder for a block of another stage."""

    def __init__(
        self, index: int, transfer: StageTransfer, *, in_tuples: bool = False, first: int = 0
    ) -> None:
        super().__init__()
        self._index = index
        self._first = first
        self._transfer = transfer
        self._in_tuples = in_tuples

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Takes hidden states of any shape; returns them, or the ones that the stage received."""
        hidden = args[0] if args else kwargs["hidden_states"]
        self._count_tokens(hidden, (*args, *kwargs.values()))
        hidden = self._passed_on(hidden)
        return (hidden, None) if self._in_tuples else hidden

    def _passed_on(self, hidden: torch.Tensor) -> torch.Tensor:
        transfer = self._transfer
        if transfer.send_hidden:
            return transfer.send_hidden(self._index, hidden)
        at_encoders_end = transfer.encoder_blocks  # EncoderForward sends the encoder's output
        if self._index == transfer.end != at_encoders_end:
            transfer.leave(hidden)
        if self._index == transfer.begin - 1 != at_encoders_end - 1:
            assert transfer.received is not None
            return transfer.enter(transfer.received, hidden.shape[1])
        return hidden

    def _count_tokens(self, hidden: torch.Tensor, given: tuple[Any, ...]) -> tuple[Any, int]:
        """Counts the tokens of a call in the cache, if there is one.

        A cache may ask any layer for its number of tokens. So this layer stores one number for each
        token, as its key and as its value.

        Returns:
            The number of tokens in the cache before the call, and the number of keys that a query
            of this layer sees.
        """
        cache = find_cache(given)
        rows, tokens = hidden.shape[:2]
        if cache is None or not self._transfer.send_hidden:
            return 0, tokens
        cache = getattr(cache, "self_attention_cache", cache)
        layer = self._index - self._first
        seen = torch.as_tensor(cache.get_seq_length(layer)).clone()  # a static cache's own tensor
        numbers = hidden.new_zeros((rows, 1, tokens, 1))
        keys, _ = cache.update(numbers, numbers, layer)
        return seen, keys.shape[-2]


class PlaceholderBiasedBlock(PlaceholderBlock):
    """Placeholder for a block of a row whose first block computes the position bias of all."""

    def __init__(
        self,
        index: int,
        transfer: StageTransfer,
        row: range,
        *,
        block: nn.Module,
        first: nn.Module,
        path: str,
    ) -> None:
        """Makes the placeholder; computes nothing.

        Args:
            index: Number of the block.
            transfer: Stage inputs and outputs.
            row: Numbers of the row's blocks.
            block: The block that this placeholder replaces.
            first: The row's first block.
            path: Name, in the first block, of the attention that computes the bias.
        """
        super().__init__(index, transfer, first=row.start)
        self._row = row
        self._names = list(inspect.signature(type(block).forward).parameters)[1:]
        self._path = path
        self._attention = weakref.ref(first.get_submodule(path))
        self._kept = False

    def keep_bias(self) -> None:
        """Takes the embedding of the bias into this module, under the name that it has."""
        attention = self._attention()
        assert attention is not None
        bare = _with_bias_only(attention)
        parent: nn.Module = self
        *around, last = self._path.split(".")
        for name in around:
            inner = nn.Module()
            parent.add_module(name, inner)
            parent = inner
        parent.add_module(last, bare)
        self._attention, self._kept = weakref.ref(bare), True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Takes hidden states and biases; returns them, with the position bias if it is needed."""
        given = dict(zip(self._names, args, strict=False)) | kwargs
        hidden, bias = given["hidden_states"], given.get("position_bias")
        seen, keys = self._count_tokens(hidden, tuple(given.values()))
        if self._index == self._row.start and self._is_needed():
            attention: Any = self._attention()
            bias = attention.compute_bias(
                hidden.shape[1], keys, device=hidden.device, past_seen_tokens=seen
            )
        return self._passed_on(hidden), bias, given.get("encoder_decoder_position_bias")

    def _is_needed(self) -> bool:
        """Whether a later block of the row runs here."""
        transfer = self._transfer
        if transfer.send_hidden:
            return self._kept
        return transfer.begin in self._row[1:]


def _with_bias_only(attention: nn.Module) -> nn.Module:
    """Returns a copy of the attention whose only module is the same embedding of the bias."""
    kind = type(attention)
    bare: nn.Module = kind.__new__(kind)
    nn.Module.__init__(bare)
    for name in vars(attention).keys() - vars(bare).keys():
        setattr(bare, name, vars(attention)[name])
    bare.add_module(BIAS, attention.get_submodule(BIAS))
    return bare


class PlaceholderEnd(_Placeholder):
    """Placeholder for embeddings of the first stage, or for norms and heads of the last."""

    def __init__(
        self, transfer: StageTransfer, *, embeds: bool, tokens: bool, width: int | None = None
    ) -> None:
        """Makes the placeholder; computes nothing.

        Args:
            transfer: Stage inputs and outputs.
            embeds: Whether it replaces embeddings.
            tokens: Whether these are embeddings of tokens (or else of positions, for example).
            width: Number of columns of the replaced module's output; None: as in its input.
        """
        super().__init__()
        self._transfer = transfer
        self._embeds = embeds
        self._tokens = tokens
        self._width = width

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns zeros for embeddings, and otherwise the hidden states, cut to `width` columns.

        Zeros have the shape (rows, tokens, width) for embeddings of tokens, and (1, 1, width) for
        embeddings that are added to these. The latter cannot tell the number of tokens: OPT makes
        positions from a mask that is as long as the cache.
        """
        given = next(x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
        if not self._embeds or given.ndim > 2:
            return given[..., : self._width]  # a view; the input may have fewer columns already
        zero = torch.zeros((), dtype=self._transfer.dtype, device=given.device)
        shape = tuple(given.shape) if self._tokens else (1, 1)
        return zero.expand(*shape, self._transfer.width)


class PlaceholderImages(_Placeholder):
    """Placeholder for the embeddings of images of the first stage."""

    def __init__(self, transfer: StageTransfer) -> None:
        super().__init__()
        self._transfer = transfer

    @property
    def patch_embeddings(self) -> Any:
        """Placeholder for the convolution, from whose weight the model reads its computing type."""
        weight = torch.empty(0, dtype=self._transfer.dtype)
        return SimpleNamespace(projection=SimpleNamespace(weight=weight))

    def forward(self, pixel_values: torch.Tensor, **_: Any) -> torch.Tensor:
        """Returns zeros of shape (rows, tokens, width)."""
        transfer = self._transfer
        zero = torch.zeros((), dtype=transfer.dtype, device=pixel_values.device)
        return zero.expand(*transfer.size_of_images(pixel_values), transfer.width)


# --- The modules of a process's pipeline stages, and placeholders for modules of other stages -----


@dataclass(frozen=True, eq=False)
class Place:
    """A module's place in the model, and its stage."""

    parent: nn.Module
    """The module around it."""
    name: str
    """Its name in the parent."""
    module: nn.Module
    """The module itself."""
    other: nn.Module
    """Placeholder at this place on other stages."""
    stage: int
    """Number of the module's stage."""
    common: nn.Module | None = None
    """Submodule that other stages have as well; None: there is none."""
    common_to: tuple[int, ...] = ()
    """Numbers of these other stages."""

    def params(self) -> Iterator[tuple[nn.Parameter, tuple[int, ...]]]:
        """Yields the module's parameters, each with the stages that have it."""
        common = set(self.common.parameters()) if self.common else set()
        for param in self.module.parameters():
            yield param, (self.stage, *(self.common_to if param in common else ()))

    def put(self, module: nn.Module) -> None:
        """Puts a module here, but not as an attribute, which a boosted model refuses."""
        self.parent._modules[self.name] = module


class StageModules:
    """This process's stages of a model. Holds no module of the model."""

    def __init__(
        self,
        places: Sequence[Place],
        own: Sequence[int],
        cuts: Sequence[int],
        transfer: StageTransfer,
    ) -> None:
        """Puts placeholders where modules of other processes' stages are.

        Args:
            places: Places of all modules that belong to a stage.
            own: Numbers of this process's stages.
            cuts: Number of the first block of each stage of the model, then the number of blocks.
            transfer: Stage inputs and outputs, which the placeholders use.
        """
        self.own = tuple(own)
        self.cuts = list(cuts)
        self.transfer = transfer
        for place in places:
            if place.stage not in own:
                if isinstance(place.other, PlaceholderBiasedBlock) and set(own) & set(
                    place.common_to
                ):
                    place.other.keep_bias()
                place.put(place.other)
        # If there are several stages, placeholders replace the others while one runs.
        self._own = [
            (weakref.ref(place.parent), weakref.ref(place.module), place.name, place.other,
             place.stage)
            for place in places
            if place.stage in own and len(own) > 1
        ]  # fmt: skip

    @property
    def own_blocks(self) -> list[range]:
        """Numbers of the blocks of each of this process's stages."""
        return [range(self.cuts[stage], self.cuts[stage + 1]) for stage in self.own]

    @contextmanager
    def running(self, stage: int) -> Iterator[StageTransfer]:
        """Has the model's forward compute one of this process's stages."""
        transfer = self.transfer
        transfer.begin, transfer.end = self.cuts[stage], self.cuts[stage + 1]
        resting = [
            Place(parent(), name, module(), other, of)  # type: ignore[arg-type]
            for parent, module, name, other, of in self._own
            if of != stage
        ]
        for place in resting:
            place.put(place.other)
        try:
            with transfer.routers.listening():
                yield transfer
        finally:
            for place in resting:
                place.put(place.module)
            transfer.received = transfer.sent = transfer.encoded = None

    @contextmanager
    def running_stages(self, send_hidden: SendHidden) -> Iterator[None]:
        """Has the model's forward compute all of this process's stages."""
        self.transfer.send_hidden = send_hidden
        try:
            with self.transfer.routers.listening():
                yield
        finally:
            self.transfer.send_hidden = None


def places_of(
    model: nn.Module, plan: PipelinePlan, cuts: Sequence[int], transfer: StageTransfer
) -> list[Place]:
    """Returns the places of all modules that belong to a stage; changes nothing.

    Args:
        model: The full model.
        plan: Its pipeline plan.
        cuts: First blocks of the stages; see StageModules.
        transfer: Stage inputs and outputs, which the placeholders use.
    """
    embeddings = None if plan.images else model.get_input_embeddings()  # type: ignore[operator]
    places, first = [], 0
    for row in plan.rows:
        numbers = range(first, first + len(row.blocks_of_row(model)))
        stages = [bisect.bisect_right(cuts, number) - 1 for number in numbers]
        for names, stage in ((row.before, stages[0]), (row.after, stages[-1])):
            for name in names:
                parent, _, short = name.rpartition(".")
                module = model.get_submodule(name)
                other: PlaceholderEnd | PlaceholderImages
                if plan.images and names is row.before:
                    other = PlaceholderImages(transfer)
                else:
                    parts = list(module.modules())
                    embeds = any(isinstance(part, nn.Embedding) for part in parts)
                    tokens = embeddings in parts or plan.encoder is not None
                    width = module.out_features if isinstance(module, nn.Linear) else None
                    other = PlaceholderEnd(transfer, embeds=embeds, tokens=tokens, width=width)
                places.append(Place(model.get_submodule(parent), short, module, other, stage))
        places += _places_of_blocks(model, row, numbers, stages, transfer)
        first = numbers.stop
    return places


def _places_of_blocks(
    model: nn.Module,
    row: PipelinePlan,
    numbers: range,
    stages: Sequence[int],
    transfer: StageTransfer,
) -> Iterator[Place]:
    parent, blocks = model.get_submodule(row.blocks), row.blocks_of_row(model)
    for (short, block), number, stage in zip(blocks.items(), numbers, stages, strict=True):
        if not row.bias:
            in_tuples = row.in_tuples and not _gives_tensor(block)
            other = PlaceholderBlock(number, transfer, in_tuples=in_tuples, first=numbers.start)
            yield Place(parent, short, block, other, stage)
            continue
        first = next(iter(blocks.values()))
        biased = PlaceholderBiasedBlock(
            number, transfer, numbers, block=block, first=first, path=row.bias
        )
        if block is first:
            bias, later = first.get_submodule(f"{row.bias}.{BIAS}"), {*stages} - {stage}
            yield Place(parent, short, block, biased, stage, bias, tuple(later))
        else:
            yield Place(parent, short, block, biased, stage)


def _gives_tensor(block: nn.Module) -> bool:
    """Whether a block's forward is annotated to return a tensor.

    This differs between releases of transformers.
    """
    return inspect.signature(type(block).forward).return_annotation in (
        torch.Tensor,
        "torch.Tensor",
    )
