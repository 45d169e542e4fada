"""Encoder-decoders in pipeline stages, which have encoder blocks, decoder blocks or both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from castor.distributed.device_copies import broadcast
from castor.distributed.inputs import by_name, check_inputs
from castor.distributed.pipeline_parallel import PipelineParallel
from castor.distributed.pipeline_plan import SHIFT
from castor.distributed.stage_runs import run_collectively
from castor.distributed.stage_transfer import SendHidden, tokens_of
from castor.errors import UsageError
from castor.runtime.own_forward import WrappedForward


class EncoderForward(WrappedForward):
    """The forward of an encoder, whose output is known on each stage with decoder blocks.

    generate calls the encoder by itself, on all ranks.
    """

    def __init__(
        self, encoder: nn.Module, parallel: PipelineParallel, send_hidden: SendHidden
    ) -> None:
        """Wraps the forward that the encoder has now.

        Args:
            encoder: The encoder of a boosted model.
            parallel: Stages of the model.
            send_hidden: Sends hidden states between ranks where all stages run in one call.
        """
        super().__init__(encoder)
        self._parallel = parallel
        self._send_hidden = send_hidden

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward; the last hidden states are real where this stage knows them.

        Outside of the model's forward the call is collective, and without gradients.

        Raises:
            UsageError: Ranks were given different arguments, or have disconnected from each other.
            Error: A rank with another stage is gone or could not go on, so this one cannot either.
            Exception: The encoder raised it on this rank.
        """
        parallel, encoder = self._parallel, self.module
        if parallel.running:
            return self._in_model(args, kwargs)
        parallel.check_connected()
        named = by_name(self.wrapped, args, kwargs)
        check_inputs(parallel.ranks, encoder, (), named)
        given: list[Any] = []

        def work() -> None:
            with parallel.modules.running_stages(self._send_hidden):
                given.append(self._in_model((), named))

        run_collectively(parallel, encoder, work)
        return given[0]

    def _in_model(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        transfer = self._parallel.modules.transfer
        outputs = self.wrapped(*args, **kwargs)
        states = outputs.last_hidden_state
        if transfer.send_hidden:
            outputs.last_hidden_state = self._of_last(states)
            return outputs
        if transfer.begin >= transfer.encoder_blocks:
            assert transfer.received is not None
            outputs.last_hidden_state = transfer.received[:, : states.shape[1]].contiguous()
        transfer.encoded = outputs.last_hidden_state
        if transfer.end == transfer.encoder_blocks:
            transfer.sent = transfer.encoded
        return outputs

    def _of_last(self, states: torch.Tensor) -> torch.Tensor:
        """Broadcasts the hidden states of the rank with the encoder's last block."""
        parallel = self._parallel
        group, sent_from = parallel.transport
        owner = parallel.rank_of_block[parallel.modules.transfer.encoder_blocks - 1]
        return broadcast(
            states if owner == parallel.ranks.rank else None,
            states.shape,
            states.dtype,
            group=group,
            source=owner,
            device=states.device,
            sent_from=sent_from,
        )


def complete(model: nn.Module, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an encoder-decoder's arguments, with decoder inputs made from labels if needed.

    All stages need decoder inputs, and only the last one gets labels.

    Args:
        model: A model of transformers.
        kwargs: Arguments of its forward, by name.

    Raises:
        UsageError: There are no inputs for the encoder or for the decoder.
    """
    if kwargs.get("encoder_outputs") is None:
        tokens_of(kwargs)
    labels, found = kwargs.get("labels"), dict(kwargs)
    named = ("decoder_input_ids", "decoder_inputs_embeds")
    if labels is not None and all(kwargs.get(name) is None for name in named):
        found["decoder_input_ids"] = getattr(model, SHIFT)(labels)
    tokens_of(found, of="decoder_")
    return found


def check_encodes(model: nn.Module, batch: Mapping[str, Any]) -> None:
    """Checks that a batch of a schedule has the encoder's inputs, not its outputs.

    Raises:
        UsageError: The batch has encoder_outputs.
    """
    if batch.get("encoder_outputs") is not None:
        raise UsageError(
            f"the batch has encoder_outputs, and the stages of this {type(model).__name__} compute "
            "them of input_ids; leave them out"
        )
