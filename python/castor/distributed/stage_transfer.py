"""Stage inputs and outputs: hidden states, and other tensors that later stages need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from castor.distributed.pipeline_plan import PipelinePlan
from castor.distributed.router_logits import RouterLogits, find_routers
from castor.errors import UsageError

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
