"""The step of boosted optimizers: unscales, checks and clips gradients, and updates weights."""

from __future__ import annotations

import functools
import math
import sys
import warnings
import weakref
import zlib
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from castor import _C
from castor.config import GeminiConfig
from castor.errors import OutOfMemoryError, UsageError
from castor.optim.grad_scaler import LossScaler, ScaledGradients, enter_grad_scaler
from castor.optim.nonfinite import nonfinite_error, warn_of_skip
from castor.optim.optimizer_edits import GroupMembers, ShownStates
from castor.optim.own_step import (
    Evaluate,
    OwnStep,
    closure_of,
    evaluates_inside,
    patched_step_of,
    unhooked_step,
    with_closure,
)
from castor.optim.weight_digests import WeightDigests
from castor.runtime.engine import Engine
from castor.runtime.rank_group import RankGroup, check_equal
from castor.runtime.rules import FusedRule, RuleGroup, params_of


def warn_of_cached_casts(optimizer: Optimizer, *, stacklevel: int) -> bool:
    """Warns where a step inside torch.autocast leaves the 16-bit copies of weights as they were.

    autocast caches its copy of each float32 weight until its outermost context ends, so that the
    next forward inside it computes with the weights from before the step.

    Args:
        optimizer: The optimizer that steps.
        stacklevel: As warnings.warn counts, from the caller of this function.

    Returns:
        Whether it warned: there is no such copy of 16-bit weights, nor without the cache.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if not (torch.is_autocast_cache_enabled() and any(p.dtype == torch.float32 for p in params)):
        return False
    warnings.warn(
        "optimizer.step() inside torch.autocast: until its outermost context ends, autocast keeps "
        "16-bit copies of weights, so that the next forwards compute with the weights from before "
        "this step, as in plain PyTorch. Open the context around each forward, or with "
        "cache_enabled=False",
        RuntimeWarning,
        stacklevel=stacklevel + 1,
    )
    return True


class ModelStep:
    """The part of a step that the optimizers of one model share: check and clip of gradients.

    The first optimizer that steps after a pass does it for all of them, and ends the step. The
    optimizers that step before the next pass use its result.
    """

    def __init__(
        self,
        engine: Engine,
        config: GeminiConfig,
        optimizers: Sequence[Optimizer],
        *,
        own: bool,
        seed: int,
    ) -> None:
        """Prepares the steps of optimizers over the engine's parameters.

        Args:
            engine: Engine of the model.
            config: Settings of the plugin.
            optimizers: Optimizers of the model.
            own: Whether one of them runs its own step.
            seed: Seed of the stochastic rounding of moments.
        """
        self.engine = engine
        self.config = config
        self.num_optimizers = len(optimizers)
        self.scaler = LossScaler(config.loss_scaler) if config.precision == "fp16" else None
        self.copies = config.precision != "fp32" or config.device != "cpu"
        """Whether an optimizer's own step runs on copies; see OwnStep."""
        self._in_place = own and not self.copies  # it reads p.grad, which clipping has to scale
        self._warned = False
        self._taken_by: weakref.WeakSet[StepDriver] = weakref.WeakSet()
        self._scale: float | None = None
        self.drivers: weakref.WeakSet[StepDriver] = weakref.WeakSet()
        """Drivers of the model's optimizers."""
        self.shows_unscaled = bool(
            config.precision != "fp32"
            or engine.model_shards
            or (len(optimizers) > 1 and config.max_norm > 0)
        )
        """Whether a torch.amp.GradScaler leaves gradients scaled until the update. It does with
        16-bit gradients, gradients that may not be edited, and several optimizers that clip."""
        # Numbers as in a standalone HybridAdam, so that the same seed gives the same bits.
        self._streams = [0] * len(engine.params)
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for position, param in enumerate(param for group in groups for param in group["params"]):
            self._streams[engine.index_of[param]] = position
        self.seed = seed
        self.shown_states = ShownStates(engine)

    @property
    def seed(self) -> int:
        """Seed of the stochastic rounding of moments."""
        return self._seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._seed = seed
        self.engine.session.set_rounding(seed, self._streams)

    def scale_for(self, driver: StepDriver, optimizer: Optimizer) -> float | None:
        """Returns the factor of each gradient in the driver's update; None: the step is skipped.

        Raises:
            UsageError: Ranks step with different options, or have changed gradients differently.
        """
        session = self.engine.session
        self.engine.check_modules()
        for one in self.drivers:
            one.scaled.take_back()
        passes_since, _ = session.step_position()
        if not self._taken_by or driver in self._taken_by or passes_since:
            self._taken_by.clear()
            self._check_scales()
            self._scale = self._collect(driver.position, optimizer, driver.scaled.scale)
        else:
            # p.grad may be another tensor now.
            session.reduce_gradients(driver.position)
            self._agreed(0.0, optimizer)
            session.collect_gradients(with_norm=False)
        if self._scale is None or self._in_place:
            return self._scale
        return self._scale / driver.scaled.scale

    def _check_scales(self) -> None:
        """Checks that optimizers which clip together have gradients of one GradScaler scale."""
        scales = {driver.scaled.scale for driver in self.drivers}
        if len(scales) > 1 and (self.config.max_norm > 0 or self._in_place):
            raise UsageError(
                f"the gradients of this model's {self.num_optimizers} optimizers carry the scales "
                f"{', '.join(f'{scale:g}' for scale in sorted(scales))} of a GradScaler, and they "
                "are clipped together in the first of their steps: call scaler.unscale_(optimizer) "
                "for each of them before that"
            )

    def _collect(self, position: int | None, optimizer: Optimizer, carried: float) -> float | None:
        """Returns the gradients' factor without a GradScaler's scale, `carried`; None: skip."""
        config = self.config
        check = config.nonfinite != "ignore" or self.scaler is not None
        measures = check or config.max_norm > 0
        session = self.engine.session
        if self.engine.check_step:
            self.engine.check_step()
        self.engine.check_cp_group("a step")
        session.reduce_gradients(position)
        if self.engine.model_shards:
            self.engine.model_shards.settle_gradients(session, self.engine.params)
        gradients = session.collect_gradients(with_norm=measures)
        norm = gradients.norm
        if self.engine.model_shards and measures:
            norm = self.engine.model_shards.norm(self.engine.params, gradients.squares)
        norm /= gradients.scale * carried
        norm = self._agreed(norm if measures else 0.0, optimizer)
        self.engine.gradient_norm = norm if measures else None
        overflow = check and not math.isfinite(norm)
        if self.scaler and gradients.num_gradients and carried == 1.0:
            self.scaler.update(overflow=overflow)
        if overflow:
            return None
        scale = 1.0 / gradients.scale
        if config.max_norm > 0:
            scale *= min(1.0, config.max_norm / (norm + 1e-6))
        if self._in_place and scale != carried:
            self.engine.session.scale_gradients(scale / carried)
            return 1.0
        return scale

    def _agreed(self, norm: float, optimizer: Optimizer) -> float:
        """Returns rank 0's norm, which all ranks step by. Collective.

        Buffers that forwards have written become rank 0's here too. Norms of ranks that compute on
        different devices may differ in their last bits.

        Raises:
            UsageError: Ranks step with different options, or with different gradients.
        """
        engine, options = self.engine, _options_of(optimizer)
        options["the scale of a GradScaler"] = optimizer._castor.scaled.scale  # type: ignore[attr-defined]
        for ranks in engine.model_shards.peers if engine.model_shards else ():
            norm, _ = _agree(ranks, norm, options)
        if engine.ranks:
            options |= optimizer._castor.checksums  # type: ignore[attr-defined]
            norm, written = _agree(engine.ranks, norm, options, extra=engine.buffers.written())
            engine.buffers.broadcast({number for of_rank in written for number in of_rank})
        return norm

    def taken_by(self, driver: StepDriver, optimizer: Optimizer, *, skipped: bool) -> None:
        """Records that an optimizer's driver has updated its parameters, or skipped the update."""
        first = not self._taken_by
        self._taken_by.add(driver)
        self.engine.updates += 1
        driver.scaled.forget()
        if not first:
            return
        self.engine.session.finish_step()
        self.engine.blocks.step_ended()
        self.engine.step_skipped = skipped
        self.engine.history.step_ended(
            self.engine.session.step_figures(),
            skipped=skipped,
            learning_rate=_learning_rate_of(optimizer),
            gradient_norm=self.engine.gradient_norm,
        )
        if skipped:
            self.engine.skipped_steps += 1
            self._tell_of_skip()

    def _tell_of_skip(self) -> None:
        if self.config.nonfinite == "raise" and self.scaler is None:
            raise self.nonfinite_error()
        if not self._warned:
            self._warned = True
            what_next = f"; loss scale is now {self.scaler.scale:g}" if self.scaler else ""
            warn_of_skip(self._first_nonfinite(), what_next, stacklevel=_frames_of_step())

    def nonfinite_error(self) -> Exception:
        """Makes the error that names the first non-finite gradient."""
        return nonfinite_error(self._first_nonfinite(), self.engine.gradient_norm)

    def _first_nonfinite(self) -> str:
        named = zip(self.engine.names, self.engine.params, strict=True)
        bad = (name for name, p in named if p.grad is not None and not p.grad.isfinite().all())
        return next(bad, "?")


class StepDriver:
    """The step of one optimizer of a model."""

    def __init__(
        self,
        optimizer: Optimizer,
        model_step: ModelStep,
        *,
        rule: FusedRule | None,
        position: int | None,
    ) -> None:
        """Drives an optimizer that is about to be boosted.

        Args:
            optimizer: Optimizer over the model's parameters.
            model_step: Shared part of the model's steps.
            rule: Update rule that runs the optimizer; None: it runs its own step.
            position: Position in the list of the model's optimizers; None: it is the only one.
        """
        self.engine = model_step.engine
        self.model_step = model_step
        self.rule = rule
        self.position = position
        self._digests: WeightDigests | None = None
        self._warned_of_autocast = False
        """Checksums of the weights after its own steps, to compare ranks; None: not needed."""
        if not rule and self.engine.ranks:
            self._digests = WeightDigests(self.engine.session, self.engine.index_of)
        copies = not rule and model_step.copies
        self.own_step = OwnStep(optimizer, self._digests) if copies else None
        """Runs the optimizer's own step on copies; None: its step gets the parameters, or a rule
        steps."""
        self.patched_step = patched_step_of(optimizer)
        """Function that user code had set as the optimizer's step before boost; None: none."""
        self._members = GroupMembers(self.engine, fused=rule is not None)
        self._members.follow(optimizer)
        self._edited_states = 0
        self.scaled = ScaledGradients()
        """Gradients that a torch.amp.GradScaler has unscaled."""
        model_step.drivers.add(self)
        enter_grad_scaler()

    @property
    def checksums(self) -> dict[str, int]:
        """Checksums of edits, by names in messages; all ranks have to make the same edits."""
        return {
            "the checksum of the parameters in optimizer.param_groups": self._members.digest,
            "the checksum of what was edited in optimizer.state": self._edited_states,
        }

    @property
    def fused(self) -> bool:
        """Whether an update rule updates the chunks, and not the optimizer's own step."""
        return self.rule is not None

    @property
    def num_optimizers(self) -> int:
        """Number of the model's optimizers."""
        return self.model_step.num_optimizers

    @property
    def scaler(self) -> LossScaler | None:
        """Loss scaler of fp16; None in other precisions."""
        return self.model_step.scaler

    @property
    def loss_scale(self) -> float:
        """Factor of the loss of the next backward."""
        return self.scaler.scale if self.scaler else 1.0

    def backward(self, loss: torch.Tensor) -> None:
        """Differentiates a loss, scaled in fp16; see Booster.backward."""
        with self.engine.session.turn("booster.backward", runs_backward=True):
            self.engine.history.loss_given(loss)
            self.engine.session.set_loss_scale(self.loss_scale)
            try:
                (loss * self.loss_scale if self.scaler else loss).backward()
            except OutOfMemoryError as error:
                self.engine.blocks.explain(error)
                raise
            finally:
                self.engine.session.set_loss_scale(1.0)

    @torch.no_grad()
    def unscale(self, optimizer: Optimizer, scaler: GradScaler, scale: float) -> bool | None:
        """Unscales gradients for a torch.amp.GradScaler, before the step.

        Args:
            optimizer: The boosted optimizer.
            scaler: GradScaler that scaled its loss.
            scale: Scale of the loss.

        Returns:
            Whether a gradient of any rank is not finite; None: there are no gradients.
        """
        engine = self.engine
        engine.session.reduce_gradients(self.position)
        params = params_of(optimizer)
        grads = [param.grad for param in params if param.grad is not None]
        lazily = self.model_step.shows_unscaled
        bad = False
        for grad in grads:
            if not lazily:
                grad.mul_(1.0 / scale)
            if grad.numel():
                bad |= not math.isfinite(torch.linalg.vector_norm(grad, math.inf).item())
        if lazily:
            self.scaled.show(params, scaler, scale)
        if engine.everyone is not None:  # each rank has its shards of the gradients
            bad = any(engine.everyone.all_gather_object(bad))
        return bad if grads or engine.everyone is not None else None

    def take_up_edits(self, optimizer: Optimizer) -> None:
        """Writes edits of `optimizer.state` and `optimizer.param_groups` into the chunks.

        Raises:
            UsageError: An edit has something that the model's chunks have no place for.
        """
        if self.rule:
            self._members.follow(optimizer)
            self.take_up_states(optimizer)

    def take_up_states(self, optimizer: Optimizer) -> None:
        """Writes edits of `optimizer.state` alone into the chunks.

        Raises:
            UsageError: An entry holds something that the update cannot use.
        """
        if self.rule:
            edited = self.model_step.shown_states.take_up(optimizer)
            self._edited_states = zlib.crc32(array("q", edited).tobytes()) if edited else 0

    def turn_of_step(self, args: Sequence[Any], kwargs: dict[str, Any]) -> _C.Turn:
        """Makes the context of a step, for whose end passes of other threads wait."""
        backward = closure_of(args, kwargs) is not None
        return self.engine.session.turn("an optimizer.step()", runs_backward=backward)

    @torch.no_grad()
    def step(self, optimizer: Optimizer, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Updates the parameters from their present gradients, or skips the update.

        An error other than NonFiniteGradientError counts no step. Then either nothing has changed,
        and step may be called again, or the run is broken.

        Args:
            optimizer: The boosted optimizer.
            args: Arguments of the class's step, without the optimizer.
            kwargs: Keyword arguments of the class's step.

        Returns:
            The result of the class's step.
        """
        if torch.is_autocast_enabled(self.engine.device.type) and not self._warned_of_autocast:
            self._warned_of_autocast = warn_of_cached_casts(optimizer, stacklevel=_frames_of_step())
        if self.rule:
            return self._fused_step(optimizer, *args, **kwargs)
        closure = closure_of(args, kwargs)
        if closure is not None and evaluates_inside(optimizer, self.patched_step):
            return self._step_that_evaluates(optimizer, args, kwargs, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            args, kwargs = with_closure(args, kwargs, None)
        scale = self.model_step.scale_for(self, optimizer)
        result = None
        if scale is not None:
            result = self._run_own_step(optimizer, args, kwargs, scale, None)
        self.model_step.taken_by(self, optimizer, skipped=scale is None)
        return result if closure is None else loss

    def _fused_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        assert self.rule is not None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.take_up_edits(optimizer)
        groups = self._options_of_groups(optimizer)
        scale = self.model_step.scale_for(self, optimizer)
        if scale is not None:
            self.engine.session.update(groups, self._members.group_of, scale)
            if self._digests:
                self._digests.tell()
        self.model_step.taken_by(self, optimizer, skipped=scale is None)
        self.model_step.shown_states.show(optimizer)
        return loss

    def _options_of_groups(self, optimizer: Optimizer) -> list[RuleGroup]:
        """Returns the options of every group, by the update rule's names.

        Raises:
            UsageError: An option that the rule does not support was turned on.
            ValueError: An option is out of range.
        """
        assert self.rule is not None
        for position, group in enumerate(optimizer.param_groups):
            for option in self.rule.without:
                if group.get(option):
                    raise UsageError(
                        f"optimizer.param_groups[{position}]['{option}'] was turned on after "
                        f"booster.boost, which gave {type(optimizer).__name__} a fused step "
                        f"without it: set {option} before booster.boost"
                    )
        return self.rule.checked(optimizer.param_groups)

    def _run_own_step(
        self,
        optimizer: Optimizer,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        scale: float,
        evaluate: Evaluate | None,
    ) -> Any:
        """Calls the step of the optimizer's class, or the function that user code set instead."""
        own = self.patched_step or functools.partial(unhooked_step(optimizer), optimizer)
        if self.own_step:
            result = self.own_step(own, args, kwargs, scale, evaluate)
        else:
            if evaluate is not None:
                args, kwargs = with_closure(args, kwargs, lambda: evaluate()[0])
            result = own(*args, **kwargs)
            self._look_at(optimizer)
        if self._digests:
            self._digests.tell()
        return result

    def _step_that_evaluates(
        self,
        optimizer: Optimizer,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        closure: Callable[[], Any],
    ) -> Any:
        """Runs a step that calls its closure itself, as line searches and SAM do.

        Raises:
            NonFiniteGradientError: The gradients of a call are not finite; the step has begun by
                then and cannot be skipped.
            NotImplementedError: The precision is fp16, whose loss scale skips steps.
        """
        if self.scaler:
            raise NotImplementedError(
                f"{type(optimizer).__name__} evaluates its closure inside step, where a step whose "
                "gradients overflow cannot be skipped: use precision='bf16' or 'fp32'"
            )

        def evaluate() -> tuple[Any, float]:
            with torch.enable_grad():
                loss = closure()
            scale = self.model_step.scale_for(self, optimizer)
            if scale is None:
                raise self.model_step.nonfinite_error()
            return loss, scale

        scale: float | None = 1.0
        if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            scale = self.model_step.scale_for(self, optimizer)
        result = None
        if scale is not None:
            result = self._run_own_step(optimizer, args, kwargs, scale, evaluate)
        self.model_step.taken_by(self, optimizer, skipped=scale is None)
        return result

    def _look_at(self, optimizer: Optimizer) -> None:
        if self._digests:
            for group in optimizer.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        self._digests.add(param, param)

    def arm(self, optimizer: Optimizer) -> None:
        """Gives the session the present options before a forward whose backward may update."""
        if self.rule:
            self.take_up_edits(optimizer)
            groups = self._options_of_groups(optimizer)
            self.engine.session.arm_updates(groups, self._members.group_of)


def _frames_of_step() -> int:
    """Counts the frames of castor and torch between the caller of this and the user's step()."""
    own = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))
    frame, count = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(own):
        frame, count = frame.f_back, count + 1
    return count


def _learning_rate_of(optimizer: Optimizer) -> float | None:
    rate = _number_in(optimizer.param_groups[0].get("lr")) if optimizer.param_groups else None
    return float(rate) if isinstance(rate, int | float) else None


def _number_in(option: Any) -> Any:
    """Returns the number in a tensor of one element, and any other option as it is."""
    return option.item() if isinstance(option, torch.Tensor) and option.numel() == 1 else option


def _options_of(optimizer: Optimizer) -> dict[str, Any]:
    """Returns the options that are numbers or flags, by the expression that reads them."""
    options = {}
    for g, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            told = _number_in(value)
            if isinstance(told, int | float | tuple):
                options[f"param_groups[{g}]['{name}']"] = told
    return options


_SAME_OPTIONS = (
    "each updates its shard of every weight by its own options: make the same change on all ranks, "
    "and give a scheduler that looks at a metric (ReduceLROnPlateau) the mean of all ranks', not "
    "each its own"
)


def _agree(
    ranks: RankGroup, norm: float, options: dict[str, Any], *, extra: Any = None
) -> tuple[float, list[Any]]:
    """Returns rank 0's norm, and every rank's `extra`; see ModelStep._agreed."""
    everyone = ranks.all_gather_object((norm, options, extra), place="a step")
    options_of = [theirs for _, theirs, _ in everyone]
    check_equal(options_of, numbers=ranks.numbers, remedy=_SAME_OPTIONS)
    first, lowest = everyone[0][0], ranks.numbers[0]
    for number, (theirs, *_) in zip(ranks.numbers, everyone, strict=True):
        if not _same_norm(first, theirs):
            raise UsageError(
                f"the ranks' gradients differ in a step: their norm is {first:g} on rank {lowest} "
                f"and {theirs:g} on rank {number}. After backward all ranks have one mean, and one "
                "of them has changed p.grad since: make the same change on every rank (noise from "
                "a generator with one seed on all), or make it under booster.no_sync, before the "
                "gradients are reduced"
            )
    return float(first), [given for *_, given in everyone]


def _same_norm(one: float, other: float) -> bool:
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.isfinite(one) == math.isfinite(other)
    return math.isclose(one, other, rel_tol=_SAME_NORM)


_SAME_NORM = 1e-4
"""Largest relative difference of two norms that sums in different orders explain."""
