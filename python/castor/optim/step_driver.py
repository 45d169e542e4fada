"""What a step makes of gradients: unscale, check, clip, apply the optimizers' rules."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from castor.config import GeminiConfig
from castor.errors import OutOfMemoryError, UsageError
from castor.optim.loss_scaler import LossScaler
from castor.optim.nonfinite import nonfinite_error, warn_of_skip
from castor.optim.own_step import OwnStep
from castor.optim.weight_digests import WeightDigests
from castor.runtime.engine import Engine
from castor.runtime.ranks import Peers
from castor.runtime.rules import FusedRule


class ModelStep:
    """What the optimizers of one model share of a step: the gradients, checked and clipped once.

    The first optimizer that steps after a pass does that for all of them, and ends the step. Those
    that step before the next pass take what it found.
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
        """All are over the engine's parameters.

        Args:
            engine: Of the model.
            config: The plugin's.
            optimizers: That will step.
            own: Whether one of them steps itself.
            seed: Of the stochastic rounding of moments.
        """
        self.engine = engine
        self.config = config
        self.num_optimizers = len(optimizers)
        self.scaler = LossScaler(config.loss_scaler) if config.precision == "fp16" else None
        self.copies = config.precision != "fp32" or config.device != "cpu"
        """Whether a step of an optimizer's own runs on copies: see OwnStep."""
        self._in_place = own and not self.copies  # it reads p.grad, which clipping has to scale
        self._warned = False
        self._taken_by: weakref.WeakSet[StepDriver] = weakref.WeakSet()
        self._scale: float | None = None
        # As a standalone HybridAdam numbers them: the same seed gives the same bits.
        self._streams = [0] * len(engine.params)
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for position, param in enumerate(param for group in groups for param in group["params"]):
            self._streams[engine.index_of[param]] = position
        self.seed = seed

    @property
    def seed(self) -> int:
        """Of the stochastic rounding of moments."""
        return self._seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._seed = seed
        self.engine.session.set_rounding(seed, self._streams)

    def scale_for(self, driver: StepDriver, optimizer: Optimizer) -> float | None:
        """What the driver's update multiplies each gradient with; None: the step is skipped.

        Raises:
            UsageError: Ranks step with different options, or have changed gradients differently.
        """
        session = self.engine.session
        self.engine.check_modules()
        passes_since, _ = session.moment()
        if not self._taken_by or driver in self._taken_by or passes_since:
            self._taken_by.clear()
            self._scale = self._collect(driver.position, optimizer)
        else:
            # p.grad may be another tensor now.
            session.bring_together(driver.position)
            self._agreed(0.0, optimizer)
            session.collect_gradients(with_norm=False)
        return self._scale

    def _collect(self, position: int | None, optimizer: Optimizer) -> float | None:
        config = self.config
        check = config.nonfinite != "ignore" or self.scaler is not None
        measures = check or config.max_norm > 0
        session = self.engine.session
        if self.engine.check_step:
            self.engine.check_step()
        self.engine.meet_beside("a step")
        session.bring_together(position)
        if self.engine.parts:
            self.engine.parts.settle_gradients(session, self.engine.params)
        gradients = session.collect_gradients(with_norm=measures)
        norm = gradients.norm / gradients.scale
        if self.engine.parts and measures:
            norm = self.engine.parts.norm(self.engine.params, gradients.squares) / gradients.scale
        norm = self._agreed(norm if measures else 0.0, optimizer)
        self.engine.gradient_norm = norm if measures else None
        overflow = check and not math.isfinite(norm)
        if self.scaler and gradients.num_gradients:
            self.scaler.update(overflow=overflow)
        if overflow:
            return None
        scale = 1.0 / gradients.scale
        if config.max_norm > 0:
            scale *= min(1.0, config.max_norm / (norm + 1e-6))
        if self._in_place and scale != 1.0:
            self.engine.session.scale_gradients(scale)
            return 1.0
        return scale

    def _agreed(self, norm: float, optimizer: Optimizer) -> float:
        """The norm that ranks step by, which is rank 0's; collective, where all are at this step.

        Buffers that forwards have written become rank 0's here, too.

        Sums of ranks that compute on other devices may differ in their last bits.

        Raises:
            UsageError: Another has other options, or a norm that is not of the same gradients.
        """
        engine, options = self.engine, _options_of(optimizer)
        for ranks in engine.parts.peers if engine.parts else ():
            norm, _ = _agree(ranks, norm, options)
        if engine.ranks:
            norm, written = _agree(engine.ranks, norm, options, beside=engine.buffers.written())
            engine.buffers.share({number for of_rank in written for number in of_rank})
        return norm

    def taken_by(self, driver: StepDriver, *, skipped: bool) -> None:
        """The driver has updated its parameters, or left the update out."""
        first = not self._taken_by
        self._taken_by.add(driver)
        if not first:
            return
        self.engine.session.finish_step()
        self.engine.blocks.step_ended()
        self.engine.step_skipped = skipped
        self.engine.history.step_ended(self.engine.session.step_figures(), skipped=skipped)
        if skipped:
            self.engine.skipped_steps += 1
            self._tell_of_skip()

    def _tell_of_skip(self) -> None:
        if self.config.nonfinite == "raise" and self.scaler is None:
            raise nonfinite_error(self._first_nonfinite(), self.engine.gradient_norm)
        if not self._warned:
            self._warned = True
            what_next = f"; loss scale is now {self.scaler.scale:g}" if self.scaler else ""
            # Past this class, the driver, step and the two decorators that torch puts on it.
            warn_of_skip(self._first_nonfinite(), what_next, stacklevel=7)

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
        """Of an optimizer that is about to be boosted.

        Args:
            optimizer: Over the model's parameters.
            model_step: Of the model.
            rule: That runs it; None: its own step does.
            position: In the list of the model's optimizers; None: it is the only one.
        """
        self.engine = model_step.engine
        self.model_step = model_step
        self.rule = rule
        self.position = position
        self._digests: WeightDigests | None = None
        """Of what its own steps leave on each of several ranks."""
        if not rule and self.engine.ranks:
            self._digests = WeightDigests(self.engine.session, self.engine.index_of)
        copies = not rule and model_step.copies
        self.own_step = OwnStep(optimizer, self._digests) if copies else None
        """Where the optimizer's own step cannot have the parameters themselves."""
        self.num_updated = 0
        """Parameters that it holds."""
        self.group_of = [_NO_GROUP] * len(self.engine.params)
        for g, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                self.group_of[self.engine.index_of[param]] = g
                self.num_updated += param.requires_grad

    @property
    def fused(self) -> bool:
        """Whether a rule updates the chunks; else the optimizer's own step does."""
        return self.rule is not None

    @property
    def num_optimizers(self) -> int:
        """Of the model."""
        return self.model_step.num_optimizers

    @property
    def scaler(self) -> LossScaler | None:
        """Of fp16's losses."""
        return self.model_step.scaler

    @property
    def loss_scale(self) -> float:
        """What the loss of the next backward is multiplied with."""
        return self.scaler.scale if self.scaler else 1.0

    def backward(self, loss: torch.Tensor) -> None:
        """Differentiates a loss, in fp16 scaled; see Booster.backward."""
        self.engine.history.loss_given(loss)
        self.engine.session.set_loss_scale(self.loss_scale)
        try:
            (loss * self.loss_scale if self.scaler else loss).backward()
        except OutOfMemoryError as error:
            self.engine.blocks.explain(error)
            raise
        finally:
            self.engine.session.set_loss_scale(1.0)

    def step(self, optimizer: Optimizer, generic_step: Callable[[], Any]) -> None:
        """Updates the parameters from the gradients held now, or skips the step.

        Where it raises something else than NonFiniteGradientError, no step is counted: nothing has
        moved, and it may be called again, or the run is broken.
        """
        groups = self.rule.checked(optimizer.param_groups) if self.rule else []
        scale = self.model_step.scale_for(self, optimizer)
        if scale is not None:
            if self.rule:
                self.engine.session.update(groups, self.group_of, scale)
            elif self.own_step:
                self.own_step(generic_step, scale)
            else:
                generic_step()
                self._look_at(optimizer)
            if self._digests:
                self._digests.tell()
        self.model_step.taken_by(self, skipped=scale is None)

    def _look_at(self, optimizer: Optimizer) -> None:
        if self._digests:
            for group in optimizer.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        self._digests.add(param, param)

    def arm(self, optimizer: Optimizer) -> None:
        """Before a forward whose backward may update chunks: tells the options of now."""
        if self.rule:
            groups = self.rule.checked(optimizer.param_groups)
            self.engine.session.arm_updates(groups, self.group_of)


def _options_of(optimizer: Optimizer) -> dict[str, Any]:
    """Those that are numbers or flags, by how a loop writes them."""
    options = {}
    for g, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            told = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
            if isinstance(told, int | float | tuple):
                options[f"param_groups[{g}]['{name}']"] = told
    return options


def _agree(
    ranks: Peers, norm: float, options: dict[str, Any], *, beside: Any = None
) -> tuple[float, list[Any]]:
    """Rank 0's norm, and what each gives `beside`; see ModelStep._agreed."""
    everyone = ranks.gather_at("a step", (norm, options, beside))
    first, of_first, _ = everyone[0]
    for rank, (theirs, their_options, _) in enumerate(everyone):
        if their_options != of_first:
            raise _options_differ(rank, of_first, their_options)
        if not _same_norm(first, theirs):
            raise UsageError(
                f"the ranks' gradients differ in a step: their norm is {first:g} on rank 0 and "
                f"{theirs:g} on rank {rank}. After backward all ranks have one mean, and one of "
                "them has changed p.grad since: change it alike on every rank (noise from a "
                "generator that all have seeded alike), or under booster.no_sync, before ranks "
                "bring them together"
            )
    return float(first), [given for *_, given in everyone]


def _options_differ(rank: int, first: dict[str, Any], theirs: dict[str, Any]) -> UsageError:
    """What rank 0 and another step with."""
    names = [*first, *theirs]
    name = next(name for name in names if first.get(name) != theirs.get(name))
    return UsageError(
        f"rank 0 and rank {rank} step with different options: {name} is {first.get(name)} and "
        f"{theirs.get(name)}. Each updates a part of every weight by its own: change them alike on "
        "all ranks, and give a scheduler that looks at a metric (ReduceLROnPlateau) the mean of "
        "all ranks', not each its own"
    )


def _same_norm(one: float, other: float) -> bool:
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.isfinite(one) == math.isfinite(other)
    return math.isclose(one, other, rel_tol=_SAME_NORM)


_SAME_NORM = 1e-4
"""What other orders of a norm's sums may come to, and more."""

_NO_GROUP = -1
"""Of a parameter that another optimizer updates, or none, in castor._C."""
