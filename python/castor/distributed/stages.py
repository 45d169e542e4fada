"""A model of which one process has some stages: what stands where the others' modules were.

The model's own forward runs on every stage, from its inputs to its outputs. Of the row of blocks,
the one before a stage's first gives the hidden states that were received, the one behind its last
keeps those that are to be sent; what is computed before and behind of stand-ins goes nowhere.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import nn

from castor.distributed.inputs import find_cache
from castor.distributed.pipeline_plan import PipelinePlan
from castor.distributed.router_logits import RouterLogits, find_routers
from castor.errors import UsageError

HandOver = Callable[[int, torch.Tensor], torch.Tensor]
"""Of hidden states where the block of that number is another rank's."""


@dataclass(eq=False)
class Passage:
    """Hidden states on their way into the stage that runs and out of it."""

    width: int
    """Of a hidden state."""
    routers: RouterLogits
    """What goes with them where somebody asks for it."""
    patch: tuple[int, int] | None = None
    """Height and width of what one is of, where the inputs are images."""
    dtype: torch.dtype = torch.float32
    """That models compute in."""
    begin: int = 0
    """The stage's first block."""
    end: int = 0
    """The block behind its last."""
    received: torch.Tensor | None = None
    sent: torch.Tensor | None = None
    hand_over: HandOver | None = None
    """What does it where all stages run in one call; then the other fields are of no use."""

    @classmethod
    def of(cls, model: nn.Module, plan: PipelinePlan) -> Passage:
        """Of a whole model."""
        config: Any = model.config
        patch = None
        if plan.images:
            size = config.patch_size
            patch = (size, size) if isinstance(size, int) else tuple(size)
        return cls(config.hidden_size, find_routers(model, plan), patch)

    def size_of(self, batch: Mapping[str, Any]) -> tuple[int, int]:
        """Rows and tokens of the hidden states of a batch.

        Raises:
            UsageError: The model takes images, and there are none.
        """
        if self.patch:
            images = batch.get("pixel_values")
            if not isinstance(images, torch.Tensor) or images.ndim != 4:
                raise UsageError(
                    "the batch has no images: give pixel_values of shape (rows, channels, height, "
                    "width)"
                )
            return self.size_of_images(images)
        given = next(x for x in batch.values() if isinstance(x, torch.Tensor) and x.ndim > 1)
        rows, tokens = given.shape[:2]
        return rows, tokens

    def size_of_images(self, images: torch.Tensor) -> tuple[int, int]:
        """Rows and tokens of (rows, channels, height, width): whole patches, and one before all."""
        assert self.patch is not None
        height, width = (n // of for n, of in zip(images.shape[2:], self.patch, strict=True))
        return len(images), 1 + height * width

    def empty(self, rows: int, tokens: int, block: int, *, device: str = "cpu") -> torch.Tensor:
        """As what goes to a block; no values."""
        elements, dtype = self.routers.extent(self.width, self.dtype, block)
        return torch.empty((rows, tokens, elements), dtype=dtype, device=device)

    def join(self, hidden: torch.Tensor, block: int) -> torch.Tensor:
        """What goes to a block, of the hidden states that go into it."""
        return self.routers.join(hidden, block)

    def split(self, received: torch.Tensor, block: int) -> torch.Tensor:
        """The hidden states in what has come for a block."""
        return self.routers.split(received, block, self.dtype)


class _Other(nn.Module):
    """Stands for a module of another rank."""

    def __deepcopy__(self, _memo: Any) -> NoReturn:
        self._refuse("copy")

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        self._refuse("pickle")

    def _refuse(self, what: str) -> NoReturn:
        raise UsageError(
            f"other ranks have some stages of this model, and a {what} would lack them: "
            "booster.save_model on all ranks writes the whole one"
        )


class OtherBlock(_Other):
    """Stands for a block of another stage."""

    def __init__(self, index: int, passage: Passage, *, in_tuples: bool) -> None:
        super().__init__()
        self._index = index
        self._passage = passage
        self._in_tuples = in_tuples

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Hidden states in, hidden states out; of any shape."""
        passage = self._passage
        hidden = args[0] if args else kwargs["hidden_states"]
        if passage.hand_over:
            self._count_tokens(hidden, (*args, *kwargs.values()))
            hidden = passage.hand_over(self._index, hidden)
        else:
            if self._index == passage.end:
                passage.sent = passage.join(hidden, passage.end)
            if self._index == passage.begin - 1 and passage.received is not None:
                hidden = passage.split(passage.received, passage.begin)
        return (hidden, None) if self._in_tuples else hidden

    def _count_tokens(self, hidden: torch.Tensor, given: tuple[Any, ...]) -> None:
        """A cache asks any layer how many tokens it has: one number each, for keys and values."""
        cache = find_cache(given)
        if cache is not None:
            rows, tokens = hidden.shape[:2]
            numbers = hidden.new_zeros((rows, 1, tokens, 1))
            cache.update(numbers, numbers, self._index)


class OtherEnd(_Other):
    """Stands for embeddings of the first stage, or norms and heads of the last."""

    def __init__(self, passage: Passage, *, embeds: bool, tokens: bool) -> None:
        super().__init__()
        self._passage = passage
        self._embeds = embeds
        self._tokens = tokens

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """For embeddings zeros, otherwise hidden states as they are.

        Zeros of shape (rows, tokens, width) for tokens, and of (1, 1, width) for what is added to
        them: OPT makes positions of a mask that is as long as all that is cached.
        """
        given = next(x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
        if not self._embeds or given.ndim > 2:
            return given
        zero = torch.zeros((), dtype=self._passage.dtype, device=given.device)
        shape = tuple(given.shape) if self._tokens else (1, 1)
        return zero.expand(*shape, self._passage.width)


class OtherImages(_Other):
    """Stands for the embeddings of images of the first stage."""

    def __init__(self, passage: Passage) -> None:
        super().__init__()
        self._passage = passage

    @property
    def patch_embeddings(self) -> Any:
        """What a model asks for the type that it computes in: of the weights of its convolution."""
        weight = torch.empty(0, dtype=self._passage.dtype)
        return SimpleNamespace(projection=SimpleNamespace(weight=weight))

    def forward(self, pixel_values: torch.Tensor, **_: Any) -> torch.Tensor:
        """Zeros of shape (rows, tokens, width)."""
        passage = self._passage
        zero = torch.zeros((), dtype=passage.dtype, device=pixel_values.device)
        return zero.expand(*passage.size_of_images(pixel_values), passage.width)


@dataclass(frozen=True, eq=False)
class Place:
    """Where a module of the model is, and which stage it belongs to."""

    parent: nn.Module
    name: str
    module: nn.Module
    other: nn.Module
    """What stands there on other stages."""
    stage: int

    def put(self, module: nn.Module) -> None:
        """Not as an attribute: a boosted model refuses those."""
        self.parent._modules[self.name] = module


class StageModules:
    """The stages of a model that this process has. Holds no module of the model."""

    def __init__(
        self, places: Sequence[Place], own: Sequence[int], cuts: Sequence[int], passage: Passage
    ) -> None:
        """Puts stand-ins where modules of other processes' stages are.

        Args:
            places: All that belong to a stage.
            own: Numbers of this process's.
            cuts: The first block of each stage of the model, and the number of blocks.
            passage: Of the stand-ins.
        """
        self.own = tuple(own)
        self.cuts = list(cuts)
        self.passage = passage
        for place in places:
            if place.stage not in own:
                place.put(place.other)
        # Of several stages those that do not run are out of the way meanwhile.
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
    def running(self, stage: int) -> Iterator[Passage]:
        """In it the model's forward computes one stage of this process's."""
        passage = self.passage
        passage.begin, passage.end = self.cuts[stage], self.cuts[stage + 1]
        resting = [
            Place(parent(), name, module(), other, of)  # type: ignore[arg-type]
            for parent, module, name, other, of in self._own
            if of != stage
        ]
        for place in resting:
            place.put(place.other)
        try:
            with passage.routers.listening():
                yield passage
        finally:
            for place in resting:
                place.put(place.module)
            passage.received = passage.sent = None

    @contextmanager
    def together(self, hand_over: HandOver) -> Iterator[None]:
        """In it the model's forward computes all of this process's stages."""
        self.passage.hand_over = hand_over
        try:
            with self.passage.routers.listening():
                yield
        finally:
            self.passage.hand_over = None


def places_of(
    model: nn.Module, plan: PipelinePlan, cuts: Sequence[int], passage: Passage
) -> list[Place]:
    """All modules that belong to a stage; nothing is changed.

    Args:
        model: Whole.
        plan: Of it.
        cuts: As StageModules takes them.
        passage: For what stands where others' modules were.
    """
    last = len(cuts) - 2
    tokens = None if plan.images else model.get_input_embeddings()  # type: ignore[operator]
    places = []
    for names, stage in ((plan.before, 0), (plan.after, last)):
        for name in names:
            parent, _, short = name.rpartition(".")
            module = model.get_submodule(name)
            other: _Other
            if plan.images and names is plan.before:
                other = OtherImages(passage)
            else:
                parts = list(module.modules())
                embeds = any(isinstance(part, nn.Embedding) for part in parts)
                other = OtherEnd(passage, embeds=embeds, tokens=tokens in parts)
            places.append(Place(model.get_submodule(parent), short, module, other, stage))
    blocks = model.get_submodule(plan.blocks)
    stage = 0
    for index, (short, block) in enumerate(blocks.named_children()):
        while index >= cuts[stage + 1]:
            stage += 1
        instead = OtherBlock(index, passage, in_tuples=plan.in_tuples and not _gives_tensor(block))
        places.append(Place(blocks, short, block, instead, stage))
    return places


def _gives_tensor(block: nn.Module) -> bool:
    """Whether its forward says so, which differs between releases of transformers."""
    return inspect.signature(type(block).forward).return_annotation in (
        torch.Tensor,
        "torch.Tensor",
    )
