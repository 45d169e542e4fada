"""Runs micro-batches through the stages of a model (torch.distributed.pipelining)."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from castor.config.names import PipelineStyle
from castor.distributed.device_copies import brought_from_host, taken_to_host
from castor.distributed.inputs import check_inputs
from castor.distributed.microbatches import (
    NO_LOSS,
    Asked,
    Microbatches,
    Pass,
    giving_logits,
    named,
    put_schedule,
)
from castor.distributed.pipeline_parallel import PipelineParallel
from castor.distributed.split_backward import Enter, SplitBackward
from castor.distributed.stage_runs import FOR_THE_LOSS, OF_THE_LAST_STAGE, run_collectively
from castor.distributed.staged_forward import (
    EncoderForward,
    StagedForward,
    check_encodes,
    check_outputs,
    complete,
    refuse_submodules,
)
from castor.errors import UsageError
from castor.runtime.engine import Engine, engines_holding


class PipelineSchedule:
    """The pipeline schedule of one model. Holds no module."""

    def __init__(
        self,
        model: nn.Module,
        parallel: PipelineParallel,
        style: PipelineStyle,
        microbatches: Microbatches,
    ) -> None:
        """Prepares the schedule; runs nothing.

        Args:
            model: The boosted model.
            parallel: Its stages.
            style: Order of forward and backward passes.
            microbatches: Division of batches into micro-batches.
        """
        self._model = weakref.ref(model)
        self._parallel = parallel
        self._style = style
        self._microbatches = microbatches
        self._known: tuple[tuple[Any, ...], list[_Stage], Any] | None = None

    def start(self) -> None:
        """Installs the forwards of stages, and has schedule_of find this schedule, after boost."""
        model = self._model()
        put_schedule(model, self)
        assert model is not None
        forward = StagedForward(model, self._parallel)
        model.forward = forward
        refuse_submodules(model, self._parallel)
        if encoder := self._parallel.encoder:
            encoder.forward = EncoderForward(encoder, self._parallel, forward.send_hidden)

    def run(self, batch: Any, asked: Asked) -> Pass:
        """Runs all micro-batches of a batch forward, and backward too if gradients are enabled.

        Collective: every rank is given the same batch.

        Args:
            batch: Arguments of the model by name.
            asked: Options of the run: criterion, loss scale, results.

        Raises:
            TypeError: The batch is no mapping, or the loss is no scalar.
            UsageError: The batch cannot be divided evenly, inputs or a loss are missing, or ranks
                were given different batches or options.
            NotImplementedError: The batch asks for outputs that no rank of a pipeline has.
            Error: A rank with another stage is gone or could not go on, so this one cannot either.
            Exception: The model or the criterion raised it on this rank.
        """
        parallel, model = self._parallel, self._model()
        parallel.check_connected()
        assert model is not None
        batch, training = named(batch), torch.is_grad_enabled()
        alike = {
            "whether there are gradients": training,
            "whether there is a criterion": asked.criterion is not None,
            "return_loss": asked.loss,
        }
        check_inputs(parallel.ranks, model, (), dict(batch), asked=alike)
        if parallel.encoder:
            check_encodes(model, batch)
            batch = complete(model, batch)
        microbatches = self._microbatches.of(batch, parallel.device)
        check_outputs(model, batch)
        parallel.ask_for_router_logits(model, batch)
        if parallel.sequences and training:
            check_inputs(parallel.sequences.ranks, model, (), dict(batch))
        if asked.needs_loss and asked.criterion is None and FOR_THE_LOSS.isdisjoint(batch):
            raise UsageError(NO_LOSS)  # on every rank, since only the last stage would find out
        stages, schedule = self._prepare(microbatches, training=training)
        for stage in stages:
            stage.begin(microbatches, asked)

        def work() -> float | None:
            if training:
                parallel.begin()
            # torch passes on numbers of micro-batches: stages know the micro-batches themselves.
            numbers = torch.arange(len(microbatches))
            run = schedule.step if training else schedule.eval
            with parallel.awaiting():
                run(number=numbers, target=numbers, return_outputs=False)
            losses = torch.stack(last.losses).tolist() if last and last.losses else []
            return sum(one / len(microbatches) for one in losses) if losses else None

        last = next((stage for stage in stages if stage.is_last), None)
        try:
            everyone = run_collectively(parallel, model, work)
            outputs = last.outputs if last and asked.outputs else None
        except BaseException:
            self._known = None  # micro-batches are under way in it
            raise
        finally:
            for stage in stages:
                stage.end()
        loss = torch.tensor(next(x for x in everyone if x is not None)) if asked.loss else None
        return Pass(loss=loss, outputs=outputs)

    def _prepare(
        self, microbatches: Sequence[Mapping[str, Any]], *, training: bool
    ) -> tuple[list[_Stage], Any]:
        """Returns the stages and torch's schedule for micro-batches of this shape.

        The last result is kept, and returned again for the same shape.
        """
        parallel, transfer, model = self._parallel, self._parallel.modules.transfer, self._model()
        assert model is not None
        rows, length = transfer.size_of(microbatches[0])
        cuts, count = parallel.modules.cuts, parallel.num_stages
        behind = [transfer.behind_encoder(microbatches[0], block) for block in cuts]
        if parallel.sequences and training:
            length = parallel.sequences.tokens_of_rank(length)
        key = (rows, length, behind[-1], len(microbatches), training, transfer.routers.asked)
        if self._known and self._known[0] == key:
            return self._known[1], self._known[2]
        self._known = None  # its buffers
        hidden = [
            transfer.empty(rows, length + more, block, device="meta").requires_grad_(training)
            for block, more in zip(cuts, behind, strict=True)
        ]
        loss = torch.empty(1, device="meta", requires_grad=training)
        (engine,) = engines_holding(model)
        enter = _entering(engine)
        group, device = parallel.transport
        stages, theirs = [], []
        for number in parallel.modules.own:
            stage = _Stage(self._model, parallel, number)
            stages.append(stage)
            theirs.append(
                _PipelineStage(
                    enter, stage, number, count, device,
                    input_args=hidden[number] if number else (),
                    output_args=loss if number == count - 1 else hidden[number + 1],
                    group=group,
                )
            )  # fmt: skip
        options = {
            "n_microbatches": len(microbatches),
            "loss_fn": stages[-1].scaled,
            "scale_grads": False,
        }
        schedule: Any
        if self._style == "zbv":
            schedule = ScheduleZBVZeroBubble(theirs, **options)  # type: ignore[arg-type]
        elif len(theirs) > 1:
            schedule = ScheduleInterleaved1F1B(theirs, **options)  # type: ignore[arg-type]
        elif self._style == "1f1b" and training:
            schedule = Schedule1F1B(theirs[0], **options)  # type: ignore[arg-type]
        else:
            schedule = ScheduleGPipe(theirs[0], **options)  # type: ignore[arg-type]
        self._known = key, stages, schedule
        return stages, schedule


class _PipelineStage(PipelineStage):
    """A stage that may compute gradients of weights later than those of its inputs.

    Its inputs and outputs are in host memory where ranks exchange them through the host.
    """

    def __init__(self, enter: Enter, stage: _Stage, *args: Any, **kwargs: Any) -> None:
        super().__init__(stage, *args, **kwargs)
        self._enter = enter
        self._stage = stage

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        return []  # communicators exist; a stage beside one of its own rank would send to itself

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[Any, Any]:
        """Runs a backward pass, or half of one: torch's own halves bypass AccumulateGrad (0034)."""
        with self._stage.parallel.computing():
            if backward_type == "input":
                split = SplitBackward(
                    bwd_kwargs["stage_output"],
                    bwd_kwargs["output_grads"],
                    bwd_kwargs["input_values"],
                )
                return split.of_inputs(), split
            if backward_type == "weight":
                bwd_kwargs["param_groups"].of_weights(self._enter)
                return (), None
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    # torch's ZBV schedule asks for gradients between two stages of a rank even when there are none.
    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Returns the gradient for the previous stage, on this rank."""
        local = super().get_local_bwd_output
        return local(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Takes the gradient from the next stage, on this rank."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)


class _Stage(nn.Module):
    """Module that torch takes for the stage: hidden states in, hidden states or the loss out."""

    def __init__(
        self, model: weakref.ref[nn.Module], parallel: PipelineParallel, number: int
    ) -> None:
        super().__init__()
        self._model = model
        self.parallel = parallel
        self._number = number
        forward = model().forward  # type: ignore[union-attr]
        self._takes_cache = "use_cache" in inspect.signature(forward).parameters
        self.is_last = number == parallel.num_stages - 1
        self._current: list[dict[str, Any]] = []
        self._asked: Asked | None = None
        self.losses: list[torch.Tensor] = []
        self.outputs: list[Any] = []

    def begin(self, microbatches: list[dict[str, Any]], asked: Asked) -> None:
        """Takes the micro-batches that follow."""
        self._current, self._asked = microbatches, asked
        self.losses, self.outputs = [], []

    def end(self) -> None:
        """Lets go of the micro-batches and their results."""
        self._current, self._asked = [], None
        self.losses, self.outputs = [], []

    def scaled(self, loss: torch.Tensor, _number: torch.Tensor) -> torch.Tensor:
        """Returns a micro-batch's share of the scaled loss, with which backward begins."""
        assert self._asked is not None
        return loss[0] / len(self._current) * self._asked.scale

    def forward(self, *received: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        """Runs one micro-batch.

        Args:
            received: Stage input, see StageTransfer.join; empty: this is the first stage.
            number: Number of the micro-batch, of shape (1,).
        """
        with self.parallel.computing():
            return self._computed(received, int(number))

    def _computed(self, received: tuple[torch.Tensor, ...], number: int) -> torch.Tensor:
        model, asked = self._model(), self._asked
        assert model is not None
        assert asked is not None
        part = self._current[number]
        own = dict(part)
        if not self.is_last:
            own = {name: value for name, value in part.items() if name not in OF_THE_LAST_STAGE}
        if self._takes_cache:
            own.setdefault("use_cache", False)
        if self.parallel.sequences:
            self.parallel.sequences.joins = self.is_last
        with self.parallel.modules.running(self._number) as transfer:
            if received:
                transfer.received = brought_from_host(received[0], self.parallel.device)
            tensor = self.parallel.tensor
            vocab_parallel_loss = tensor.loss if tensor else None
            with giving_logits(asked, self.parallel.sequences, vocab_parallel_loss):
                outputs = model(**own)
            sent = transfer.sent
        if not self.is_last:
            assert sent is not None
            sent = sent.clone() if sent._is_view() else sent.contiguous()
            return self._to_transport(sent)
        if asked.outputs:
            self.outputs.append(outputs)
        if not asked.needs_loss:
            return torch.zeros(1, device=self.parallel.transport[1])
        loss = asked.loss_of(outputs, part)
        self.losses.append(loss.detach())
        return self._to_transport(loss.float().reshape(1))

    def _to_transport(self, x: torch.Tensor) -> torch.Tensor:
        _, device = self.parallel.transport
        return x if x.device == device else taken_to_host(x)


def _entering(engine: Engine) -> Enter:
    """Returns a function that enters the modules of parameters as backward does.

    So the engine brings the chunks of these parameters to the device.
    """
    owners: dict[torch.Tensor, int] = {}
    for module, position in engine.positions.items():
        for param in module._parameters.values():
            if param is not None:
                owners.setdefault(param, position)
    session = engine.session

    def enter(params: Sequence[torch.Tensor]) -> None:
        for position in dict.fromkeys(owners[param] for param in params if param in owners):
            session.enter_backward(position)

    return enter
