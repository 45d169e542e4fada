"""Stage inputs and outputs: hidden states, and other tensors that later stages need."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from castor.distributed.pipeline_plan import PipelinePlan
from castor.errors import UsageError
from castor.runtime.hooks import ModuleHook, Replaced, WrappedForward

# --- Router logits of a mixture of experts in stages; the router loss needs those of all layers ---

# Router logits of earlier stages are sent along with the hidden states, behind them in the last
# dimension. So schedules, transfers and autograd see one tensor, and gradients reach the routers.
#
# Source: Fedus et al. 2021 (Switch Transformer, section 2.2), for the loss; transformers computes
# it.

_RECORDED = "router_logits"
"""Name of router logits in transformers, in _can_record_outputs and in outputs."""
_TOKENS = 3
"""Number of tokens in the trial run of a router."""


@dataclass(frozen=True, kw_only=True)
class Router:
    """The module that chooses the experts of a block's tokens."""

    block: int
    """Number of the block."""
    name: str
    """Name of the router in the model."""
    index: int
    """Index of the logits in its output, if that is a tuple."""
    experts: int
    """Number of experts."""
    in_fp32: bool
    """Whether its logits are in fp32, whatever type the model computes in."""

    def logits(self, output: Any) -> Any:
        """Returns the logits in the router's output."""
        return _logits_of(output, self.index)


class RouterLogits:
    """Router logits of a model in the call under way. Holds no module."""

    def __init__(self, routers: Sequence[Router], *, why_not: str = "") -> None:
        """Begins without logits.

        Args:
            routers: Routers of all blocks, in order.
            why_not: Reason why calls cannot give router logits; empty: they can.
        """
        self._routers = list(routers)
        self._why_not = why_not
        self._asked = False
        self._listens = False
        self._known: dict[int, torch.Tensor] = {}
        """Logits by number of the block, each (rows x tokens, experts)."""

    def ask(self, asked: bool) -> None:
        """Sets whether the calls that follow give router logits.

        Raises:
            NotImplementedError: They are asked for, and castor cannot give them for this model.
        """
        if asked and self._why_not:
            raise NotImplementedError(self._why_not)
        self._asked = asked

    @property
    def asked(self) -> bool:
        """Whether `ask` was last called with True."""
        return self._asked

    def start(self, model: nn.Module, plan: PipelinePlan, blocks: Sequence[range]) -> ExitStack:
        """Records the logits of this process's routers, and adds all to the base model's outputs.

        Args:
            model: The model of these stages.
            plan: Its pipeline plan.
            blocks: Numbers of the blocks of each of this process's stages.

        Returns:
            A stack that restores the model when it is closed.
        """
        before = ExitStack()
        if not self._routers:
            return before
        own = set(itertools.chain(*blocks))
        for router in self._routers:
            if router.block in own:
                hook = ModuleHook(self._note, router)
                module = model.get_submodule(router.name)
                before.callback(module.register_forward_hook(hook).remove)
        base, replaced = model.get_submodule(plan.base), Replaced()
        replaced.put(base, "forward", _CompletedForward(base, self))
        before.callback(replaced.put_back)
        return before

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Encloses a forward pass, whose logits are recorded; blocks recomputed later are not."""
        self._listens = self._asked
        try:
            yield
        finally:
            self._listens = False
            self._known.clear()

    def extent(self, width: int, dtype: torch.dtype, block: int) -> tuple[int, torch.dtype]:
        """Returns the number of elements of a stage input for each token, and their type.

        Args:
            width: Width of a hidden state.
            dtype: Type of hidden states.
            block: Number of the stage's first block.
        """
        routers = self._before(block)
        wide = torch.float32 if any(router.in_fp32 for router in routers) else dtype
        return width + sum(router.experts for router in routers), wide

    def join(self, hidden: torch.Tensor, block: int) -> torch.Tensor:
        """Makes a stage input: (rows, tokens, width + experts of the routers before it).

        Args:
            hidden: Hidden states (rows, tokens, width).
            block: Number of the next stage's first block.
        """
        rows, tokens = hidden.shape[:2]
        known = [self._known[router.block] for router in self._before(block)]
        parts = [logits.reshape(rows, tokens, -1) for logits in known]
        return torch.cat([hidden, *parts], -1) if parts else hidden

    def split(self, received: torch.Tensor, block: int, dtype: torch.dtype) -> torch.Tensor:
        """Splits a stage input; records its router logits and returns its hidden states.

        Args:
            received: Stage input, as join makes it.
            block: Number of the stage's first block.
            dtype: Type of hidden states.

        Returns:
            The hidden states.
        """
        routers = self._before(block)
        if not routers:
            return received
        experts = [router.experts for router in routers]
        width = received.shape[-1] - sum(experts)
        hidden, *parts = received.split([width, *experts], -1)
        for router, part in zip(routers, parts, strict=True):
            logits = part if router.in_fp32 else part.to(dtype)
            self._known[router.block] = logits.flatten(0, 1)
        states: torch.Tensor = hidden.to(dtype)
        return states.contiguous()  # not a view: a block may write into it

    def complete(self, outputs: Any) -> Any:
        """Sets router_logits of a base model's outputs to those of all layers; None if some lack.

        Returns the outputs. It does nothing outside of listening().
        """
        if self._listens:
            known = [self._known.get(router.block) for router in self._routers]
            outputs.router_logits = None if any(x is None for x in known) else tuple(known)
        return outputs

    def _before(self, block: int) -> list[Router]:
        return [router for router in self._routers if router.block < block and self._asked]

    def _note(self, router: Router, _module: nn.Module, _args: Any, output: Any) -> None:
        if self._listens:
            self._known[router.block] = router.logits(output)


class _CompletedForward(WrappedForward):
    """The forward of a base model that adds the router logits of all layers to its outputs."""

    def __init__(self, base: nn.Module, routers: RouterLogits) -> None:
        super().__init__(base)
        self._routers = routers

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward, and adds the router logits."""
        return self._routers.complete(self.wrapped(*args, **kwargs))


def find_routers(model: nn.Module, plan: PipelinePlan) -> RouterLogits:
    """Finds the routers of a full model, by its _can_record_outputs in transformers.

    Args:
        model: The full model, lazy or not.
        plan: Its pipeline plan.
    """
    try:
        return RouterLogits(list(_routers(model, plan)))
    except _UnknownFormError as error:
        return RouterLogits(
            [],
            why_not=f"the router loss of this {type(model).__name__} (output_router_logits) needs "
            f"the router logits of all layers, and pp_size splits these: {error}; turn it off, or "
            "give pp_size=1",
        )


class _UnknownFormError(Exception):
    pass


def _routers(model: nn.Module, plan: PipelinePlan) -> Iterator[Router]:
    base: Any = model.get_submodule(plan.base)
    recorded = (getattr(base, "_can_record_outputs", None) or {}).get(_RECORDED)
    kind = getattr(recorded, "target_class", None)
    if recorded is None or kind is None:
        raise _UnknownFormError(
            "its _can_record_outputs names no class of modules that give them, so castor knows none"
        )
    around = f".{recorded.layer_name.strip('.')}." if recorded.layer_name else "."
    for block, (number, module) in enumerate(model.get_submodule(plan.blocks).named_children()):
        names = [
            f"{plan.blocks}.{number}.{name}"
            for name, part in module.named_modules()
            if isinstance(part, kind) and around in f".{name}."
        ]
        if len(names) > 1:
            raise _UnknownFormError(
                f"block {block} has {len(names)} routers, and castor knows one each"
            )
        for name in names:
            yield _tried(model, name, block, recorded.index)


class _WithoutHooks(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module.forward(*args)


def _tried(model: nn.Module, name: str, block: int, index: int) -> Router:
    """Makes a Router by a trial run on the meta device, from the shape and type of its logits."""
    config: Any = model.config
    module = model.get_submodule(name)
    reduced = torch.bfloat16
    on_meta = {
        key: torch.empty(
            param.shape, dtype=reduced if param.is_floating_point() else param.dtype, device="meta"
        )
        for key, param in module.named_parameters()
    } | {key: torch.empty_like(buffer, device="meta") for key, buffer in module.named_buffers()}
    given = torch.empty((_TOKENS, config.hidden_size), dtype=reduced, device="meta")
    try:
        with torch.no_grad():
            bare = {f"module.{key}": tensor for key, tensor in on_meta.items()}
            output = functional_call(_WithoutHooks(module), bare, (given,))
    except Exception as error:
        raise _UnknownFormError(
            f"'{name}' takes other things than hidden states of shape (tokens, width) "
            f"({type(error).__name__}: {error})"
        ) from error
    logits = _logits_of(output, index)
    ours = isinstance(logits, torch.Tensor) and logits.ndim == 2 and len(logits) == _TOKENS
    if not ours or logits.dtype not in (reduced, torch.float32):
        said = (
            f"{logits.dtype} of shape {tuple(logits.shape)}"
            if isinstance(logits, torch.Tensor)
            else f"a {type(logits).__name__}"
        )
        raise _UnknownFormError(
            f"those of '{name}' are, for {_TOKENS} tokens, {said}, and castor knows "
            "(tokens, experts)"
        )
    return Router(
        block=block,
        name=name,
        index=index,
        experts=logits.shape[1],
        in_fp32=logits.dtype == torch.float32,
    )


def _logits_of(output: Any, index: int) -> Any:
    return output[index] if isinstance(output, tuple) else output


# --- Stage inputs and outputs: hidden states, and other tensors that later stages need ------------

SendHidden = Callable[[int, torch.Tensor], torch.Tensor]
"""Function that takes the place of the block with that number, which another rank has: sends
hidden states to it, or receives its output."""

_INPUTS = ("input_ids", "inputs_embeds")


@dataclass(eq=False)
class StageTransfer:
    """Input and output of the stage that runs."""

    width: int
    """Width of a hidden state."""
    routers: RouterLogits
    """Router logits, which are sent along if they are asked for."""
    encoder_blocks: int = 0
    """Number of encoder blocks, which come before the decoder's; 0: there is one row of blocks."""
    patch: tuple[int, int] | None = None
    """Height and width of a patch in pixels, if the inputs are images."""
    dtype: torch.dtype = torch.float32
    """Type that the model computes in."""
    begin: int = 0
    """Number of the stage's first block."""
    end: int = 0
    """Number of the block after the stage's last one."""
    received: torch.Tensor | None = None
    """Stage input, which was received."""
    sent: torch.Tensor | None = None
    """Stage output, which is to be sent."""
    encoded: torch.Tensor | None = None
    """Output of the encoder, once it is known."""
    send_hidden: SendHidden | None = None
    """Function that sends and receives hidden states where all stages run in one call."""

    @classmethod
    def of(cls, model: nn.Module, plan: PipelinePlan) -> StageTransfer:
        """Makes the transfer of a full model."""
        config: Any = model.config
        encoder_blocks, patch = 0, None
        if plan.encoder:
            encoder_blocks = len(plan.encoder.blocks_of(model))
        if plan.images:
            size = config.patch_size
            patch = (size, size) if isinstance(size, int) else tuple(size)
        return cls(config.hidden_size, find_routers(model, plan), encoder_blocks, patch)

    def size_of(self, batch: Mapping[str, Any]) -> tuple[int, int]:
        """Returns the rows and tokens of a batch's hidden states (the encoder's, if there is one).

        Raises:
            UsageError: The model takes images, or tokens for an encoder, and there are none.
        """
        if self.encoder_blocks:
            rows, tokens = tokens_of(batch).shape[:2]
            return rows, tokens
        if self.patch:
            images = batch.get("pixel_values")
            if not isinstance(images, torch.Tensor) or images.ndim != 4:
                raise UsageError(
                    "the batch has no images: give pixel_values of shape (rows, channels, height, "
                    "width)"
                )
            return self.size_of_images(images)
        inputs = next((name for name in _INPUTS if batch.get(name) is not None), None)
        given = batch[inputs] if inputs else next(x for x in batch.values() if _is_of_tokens(x))
        # Each of several choices in a row (input_ids of three dimensions) is a row for the blocks.
        rows, tokens = given.shape[:2] if inputs != "input_ids" else given.flatten(0, -2).shape
        return rows, tokens

    def behind_encoder(self, batch: Mapping[str, Any], block: int) -> int:
        """Returns the number of decoder tokens in a block's stage input, behind the encoder's.

        Raises:
            UsageError: The model is an encoder-decoder, and the batch has no decoder inputs.
        """
        if not self.encoder_blocks:
            return 0
        tokens: int = tokens_of(batch, of="decoder_").shape[1]
        return tokens if block > self.encoder_blocks else 0

    def size_of_images(self, images: torch.Tensor) -> tuple[int, int]:
        """Returns the rows and tokens of images (rows, channels, height, width).

        There is one token for each full patch, and one before them (the class token).
        """
        assert self.patch is not None
        height, width = (n // of for n, of in zip(images.shape[2:], self.patch, strict=True))
        return len(images), 1 + height * width

    def empty(
        self, rows: int, tokens: int, block: int, *, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """Makes an empty tensor like a block's stage input."""
        elements, dtype = self.routers.extent(self.width, self.dtype, block)
        return torch.empty((rows, tokens, elements), dtype=dtype, device=device)

    def join(self, hidden: torch.Tensor, block: int) -> torch.Tensor:
        """Makes the stage input that begins with a block, from hidden states."""
        return self.routers.join(hidden, block)

    def split(self, received: torch.Tensor, block: int) -> torch.Tensor:
        """Returns the hidden states of a stage input that begins with a block."""
        return self.routers.split(received, block, self.dtype)

    def leave(self, hidden: torch.Tensor) -> None:
        """Makes the stage output: hidden states, behind the encoder's output if there is one."""
        sent = self.join(hidden, self.end)
        self.sent = sent if self.encoded is None else torch.cat([self.encoded, sent], 1)

    def enter(self, received: torch.Tensor, tokens: int) -> torch.Tensor:
        """Returns the hidden states that the stage begins with: the last `tokens` of its input."""
        if self.encoded is not None:
            received = received[:, -tokens:].clone()  # not a view: a block may write into it
        return self.split(received, self.begin)


def _is_of_tokens(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.ndim > 1


def tokens_of(batch: Mapping[str, Any], *, of: str = "") -> torch.Tensor:
    """Returns an encoder's tokens (rows, tokens), or embeddings; of="decoder_": a decoder's.

    Raises:
        UsageError: The batch has neither.
    """
    for name in (f"{of}input_ids", f"{of}inputs_embeds"):
        given = batch.get(name)
        if isinstance(given, torch.Tensor) and given.ndim > 1:
            return given
    raise UsageError(
        f"the batch has no {of}input_ids: an encoder-decoder in stages takes input_ids of shape "
        "(rows, tokens), and labels or decoder_input_ids"
    )
