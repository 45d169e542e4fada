"""The one object a training script talks to."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from castor import checkpoint
from castor.booster_checkpoints import Checkpoints, absolute, check_only
from castor.checkpoint.adapters import with_adapters
from castor.distributed import Asked, Criterion, schedule_of
from castor.errors import UsageError
from castor.optim.released import RunCounts, release_optimizers
from castor.optim.torch_step import step_of
from castor.plugins.protocol import Plugin, list_of_optimizers
from castor.runtime.boosted_model import (
    BoostedStep,
    boosted_model_of,
    compiled_from,
    model_with,
)
from castor.runtime.engine import Engine, engine_of, engines_holding
from castor.runtime.process_groups import end_groups_with, groups_made
from castor.runtime.release import release_model
from castor.runtime.report import MemoryReport, MemoryUse, TorchReport

Model = TypeVar("Model", bound=nn.Module)

_NOT_THERE = {
    "criterion": (Optimizer, LRScheduler, DataLoader),
    "dataloader": (Optimizer, LRScheduler, nn.Module),
    "lr_scheduler": (Optimizer, DataLoader, nn.Module),
}
"""Classes that an argument of boost is not of: each is another argument's."""

_boosters: weakref.WeakKeyDictionary[nn.Module, Booster] = weakref.WeakKeyDictionary()


class Booster(Checkpoints):
    """Boosts models with one plugin; the forward, the loss and the loop stay the user's own.

    Args:
        plugin: How to train.

    Raises:
        TypeError: `plugin` is not a plugin.
    """

    def __init__(self, plugin: Plugin) -> None:
        if isinstance(plugin, type) or not isinstance(plugin, Plugin):
            raise TypeError(f"plugin is a {type(plugin).__name__}; give a GeminiPlugin")
        self.plugin = plugin
        self._latest: weakref.ref[nn.Module] | None = None

    def boost(
        self,
        model: Model,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        criterion: Any = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
    ) -> tuple[Model, Any, Any, Any, Any]:
        """Prepares a training run, in place: every object returned is the one given.

        Args:
            model: Any module on the CPU.
            optimizer: An optimizer over the model's trainable parameters. Adam, AdamW,
                HybridAdam, SGD and castor.optim.Lion run fused on the chunks; others run their own
                step on the host copies (float32 only). Several may share the parameters, in a list:
                gradients are checked and clipped, all together, in the first step after a pass.
                Parameters that none holds get gradients and no update, as in plain PyTorch, and a
                warning names them.
            criterion: Returned as it is.
            dataloader: A torch DataLoader learns to tell its position (state_dict), for
                checkpoints; anything else is returned as it is.
            lr_scheduler: Returned as it is; it may have been made before.

        Returns:
            (model, optimizer, criterion, dataloader, lr_scheduler), None for what was not given.

        Raises:
            UsageError, NotImplementedError: See GeminiPlugin.configure.
            UsageError: Also where ranks shuffle or cut the dataloader's samples differently; the
                model is boosted by then.
            OutOfMemoryError: A budget is too small; nothing was changed.
            TypeError: An argument is another's, such as a scheduler in the dataloader's place;
                nothing was changed.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is a {type(model).__name__}; give a torch.nn.Module")
        _check_order(criterion, dataloader, lr_scheduler)
        with groups_made() as groups:
            boosted = self.plugin.configure(model, list_of_optimizers(optimizer))
        end_groups_with(boosted, groups)
        self._latest = weakref.ref(model)
        _boosters[model] = self
        checkpoint.make_resumable(dataloader)
        checkpoint.check_equal_loaders(boosted_model_of(model), dataloader)
        return model, optimizer, criterion, dataloader, lr_scheduler

    def release(self, model: nn.Module, *, drop_states: bool = False) -> None:
        """Takes castor off a boosted model and its optimizers, in place: they are ordinary again.

        To change the model (adapters merged or added, layers replaced), to hand it on, or to boost
        it anew with other settings. Parameters stay in their host storage, in the precision that
        they have; what is on NVMe comes into memory. Gradients stay what they are.

        Args:
            model: Boosted; the whole of what was given to boost.
            drop_states: Whether its optimizers forget their state. Needed for bf16 and fp16 where
                they are torch's, which cannot hold the float32 masters; HybridAdam's can.

        Raises:
            UsageError: The model is not boosted, the run is broken, or masters would be lost;
                nothing was changed.
            NotImplementedError: It is on a GPU, or several ranks share it.
        """
        engine = engine_of(model)
        self._check_releasable(model, engine, "booster.release")
        with engine.session.turn("booster.release"):
            engine.session.settle()
            release_optimizers(engine, drop_states=drop_states)
            boosted = model_with(engine)
            release_model(boosted, engine)
            _boosters.pop(boosted, None)

    @contextmanager
    def released(
        self, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None = None
    ) -> Iterator[None]:
        """Takes castor off a model for a change of it, and lays its chunks out anew afterwards.

        Inside the block the model and its optimizers are ordinary: layers may be replaced,
        embeddings resized, adapters added, requires_grad changed, groups added to the optimizer.
        What stays keeps its bits: parameters, float32 masters (the entries "master" of the state
        meanwhile), states, step counts and the loss scale. The plan of fetches starts anew. Masters
        and states are in host memory twice for a moment.

        Args:
            model: Boosted; the whole of what was given to boost.
            optimizer: What trains it afterwards, one or a list; None: those that train it now.

        Raises:
            UsageError: The model is not boosted, the run is broken, or there are gradients of a
                step that was not taken; nothing was changed.
            NotImplementedError: It is on a GPU, or several ranks share it.
            Error: What boost raises; the model and its optimizers are ordinary then.
        """
        engine = engine_of(model)
        self._check_releasable(model, engine, "booster.released")
        held = [
            name for name, p in zip(engine.names, engine.params, strict=True) if p.grad is not None
        ]
        if held:
            raise UsageError(
                f"{len(held)} parameters have gradients, the first is '{held[0]}', and chunks are "
                "laid out between two steps: call optimizer.step() or zero_grad() before"
            )
        its_optimizers = sorted(engine.optimizers, key=lambda one: one._castor.position or 0)  # type: ignore[attr-defined]
        given = its_optimizers if optimizer is None else list_of_optimizers(optimizer)
        counts = self._take_off(engine, its_optimizers, "booster.released")
        yield
        self.boost(model, given)
        counts.give(engine_of(model), given)

    def reboost(
        self, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None = None
    ) -> None:
        """Lays the chunks of a boosted model out anew, where requires_grad or groups have changed.

        Arguments and errors are those of `released`, in whose block layers can be changed too.
        """
        with self.released(model, optimizer):
            pass

    def boost_around(self, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer]) -> None:
        """Boosts a model of which parts are boosted already: all of it becomes one boosted model.

        The parts keep the bits that `released` keeps. Their step counts become the highest of them.

        Args:
            model: Holds boosted models, each as a whole, without gradients.
            optimizer: What trains it afterwards, one or a list.

        Raises:
            UsageError: The run of a part is broken; nothing was changed.
            NotImplementedError: A part is on a GPU, or several ranks share it.
            Error: What boost raises; the model and its optimizers are ordinary then.
        """
        engines, given = engines_holding(model), list_of_optimizers(optimizer)
        for engine in engines:
            self._check_releasable(model_with(engine), engine, "booster.boost_around")
        counts = [
            self._take_off(engine, list(engine.optimizers), "booster.boost_around")
            for engine in engines
        ]
        self.boost(model, given)
        max(counts, key=lambda one: one.steps).give(engine_of(model), given)

    def enable_lora(
        self,
        model: nn.Module,
        pretrained_dir: str | Path | None = None,
        lora_config: Any = None,
        bnb_quantization_config: Any = None,
        quantize: bool = False,
    ) -> Any:
        """Freezes the model and gives it adapters to train (LoRA, Hu et al. 2021), before boost.

        Make the optimizer afterwards, of the parameters that require a gradient. save_model writes
        the adapters alone.

        Args:
            model: Not boosted; its modules get adapter layers in place, as PEFT does it.
            pretrained_dir: Adapters to go on with, in PEFT's layout.
            lora_config: A peft.LoraConfig; beside pretrained_dir only where its own is not meant.
            bnb_quantization_config: Only None is supported.
            quantize: Only False is supported.

        Returns:
            A peft.PeftModel over the model: give this one to boost.

        Raises:
            UsageError: The model is boosted, there is neither configuration nor directory, or no
                peft.
            CheckpointError: The directory holds no adapter.
            NotImplementedError: Quantized base weights are asked for.
        """
        check_only(
            bnb_quantization_config=(bnb_quantization_config, None), quantize=(quantize, False)
        )
        directory = None if pretrained_dir is None else absolute(pretrained_dir)
        return with_adapters(model, directory, lora_config)

    def backward(self, loss: torch.Tensor, optimizer: Optimizer | None = None) -> None:
        """Runs backward; in fp16 with the loss scaled, otherwise as `loss.backward()` does.

        Args:
            loss: Scalar tensor.
            optimizer: A boosted optimizer; needed for fp16.

        Raises:
            UsageError: `optimizer` is not boosted, a list, or fp16 has none.
            TypeError: `loss` is not a tensor.
        """
        if not isinstance(loss, torch.Tensor):
            raise TypeError(
                f"booster.backward(loss, optimizer) was given a {type(loss).__name__} as loss; "
                "give the tensor that the model computed, without .item()"
            )
        driver = self._driver(optimizer, "booster.backward(loss, optimizer)")
        if driver is None:
            loss.backward()
        else:
            driver.backward(loss)

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: nn.Module,
        criterion: Criterion | None = None,
        optimizer: Optimizer | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> dict[str, Any]:
        """One batch through all stages of a model, and back unless in torch.no_grad().

        Every rank calls it, with the same batch on ranks of one pipeline. The batch's rows are
        divided into micro-batches, whose gradients add up as accumulated ones do: those of the mean
        of the micro-batches' losses. Step and zero_grad as ever.

        Args:
            data_iter: Its next batch is taken: arguments of the model by name, rows first.
            model: Boosted.
            criterion: (outputs, micro-batch) -> loss; None: outputs.loss, the model's own.
            optimizer: Boosted; needed for fp16.
            return_loss: Whether all ranks are told the loss: it is sent once more.
            return_outputs: Whether the last stage keeps what the model returns.

        Returns:
            "loss": the mean, a scalar on every rank; "outputs": those of each micro-batch, in
            order, on ranks with the last stage. None for what was not asked for or is elsewhere.

        Raises:
            UsageError: The model has no stages, the rows cannot be divided evenly, there is no
                loss, ranks were given different batches, or fp16 has no optimizer.
            TypeError: The batch is no mapping.
            Error: A rank of the pipeline is gone.
        """
        schedule = schedule_of(model)
        engine = engine_of(model)
        call = "booster.execute_pipeline(data_iter, model, criterion, optimizer)"
        driver = self._driver(optimizer, call)
        scale = driver.loss_scale if driver else 1.0
        asked = Asked(criterion=criterion, scale=scale, loss=return_loss, outputs=return_outputs)
        batch = next(data_iter)
        engine.session.set_loss_scale(scale)
        try:
            with engine.unsynchronised():  # until the step: all micro-batches cost one exchange
                done = schedule.run(batch, asked)
        finally:
            engine.session.set_loss_scale(1.0)
        if done.loss is not None and torch.is_grad_enabled():
            engine.history.loss_given(done.loss)
        return {"loss": done.loss, "outputs": done.outputs}

    def _take_off(self, engine: Engine, optimizers: Sequence[Optimizer], call: str) -> RunCounts:
        """Makes a boosted model and its optimizers ordinary, for boosting them anew."""
        with engine.session.turn(call):
            engine.session.settle()
            counts = RunCounts.of(engine, optimizers)
            release_optimizers(engine, drop_states=False, with_masters=True)
            boosted = model_with(engine)
            release_model(boosted, engine)
            _boosters.pop(boosted, None)
        return counts

    def _check_releasable(self, model: nn.Module, engine: Engine, call: str) -> None:
        if engine.ranks or engine.model_shards or engine.device.type != "cpu":
            where = "is on a GPU" if engine.device.type != "cpu" else "is shared by several ranks"
            raise NotImplementedError(
                f"this {type(model).__name__} {where}, and {call} takes models of one "
                "process on the CPU device; write it with booster.save_model, and read that"
            )

    def _driver(self, optimizer: Optimizer | None, call: str) -> BoostedStep | None:
        """Returns a boosted optimizer's driver."""
        if isinstance(optimizer, Sequence):
            raise UsageError(
                f"{call} was given {len(optimizer)} optimizers: give one of them; those of one "
                "model share its backward and its loss scale"
            )
        driver = None if optimizer is None else step_of(optimizer)
        if optimizer is not None and driver is None:
            raise UsageError(f"{call} was given an optimizer that is not boosted")
        if driver is None and self.plugin.scales_loss and torch.is_grad_enabled():
            raise UsageError(f"fp16 needs the loss scale: call {call}")
        return driver

    @contextmanager
    def no_sync(self, model: nn.Module, optimizer: Optimizer | None = None) -> Iterator[None]:
        """Passes in it leave each rank its own gradients; with one process, plain backward.

        The next pass outside, or else the step, brings together what has gathered: micro-batches
        cost one exchange. Until then p.grad is this rank's alone.
        """
        with boosted_model_of(model).unsynchronised():
            yield

    def report(self, model: nn.Module | None = None) -> MemoryReport | TorchReport:
        """Returns the figures of memory and time since boost.

        Args:
            model: A boosted model; by default the one boosted last.

        Returns:
            A TorchReport where torch's own classes train, which have fewer figures.

        Raises:
            UsageError: Nothing has been boosted.
        """
        return boosted_model_of(self._named(model)).report()

    def memory(self, model: nn.Module | None = None) -> MemoryUse:
        """Returns the bytes that device and host hold now.

        Args:
            model: A boosted model; by default the one boosted last.

        Raises:
            UsageError: Nothing has been boosted, or the model has no chunks.
        """
        return MemoryUse(**self._engine(model).session.memory())

    def save_trace(self, path: str | Path, model: nn.Module) -> None:
        """Writes the trace of the model's step as JSON, for GeminiPlugin(trace_file=...).

        Raises:
            UsageError: The model is not boosted, has not finished a step, or has no chunks.
        """
        engine_of(model).save_trace(Path(path))

    def _engine(self, model: nn.Module | None) -> Engine:
        return engine_of(self._named(model))

    def _named(self, model: nn.Module | None) -> nn.Module:
        """The one that was given, or the one boosted last."""
        latest = self._latest() if model is None and self._latest else model
        if latest is None:
            raise UsageError("nothing has been boosted, or the model boosted last is gone: name it")
        return latest


def booster_of(model: nn.Module) -> Booster:
    """The Booster that boosted a model, whoever called it: castor.accelerate, a Trainer.

    Args:
        model: As it was given to boost; torch.compile may have wrapped it since.

    Raises:
        UsageError: It is not boosted.
    """
    booster = _boosters.get(model) or _boosters.get(compiled_from(model))
    if booster is None:
        boosted_model_of(model)  # raises, unless a plugin was called without a Booster
        raise UsageError(f"this {type(model).__name__} was boosted by no Booster")
    return booster


def _check_order(criterion: object, dataloader: object, lr_scheduler: object) -> None:
    """Raises TypeError where an argument of boost stands in another's place."""
    given = {"criterion": criterion, "dataloader": dataloader, "lr_scheduler": lr_scheduler}
    for name, value in given.items():
        if isinstance(value, _NOT_THERE[name]):
            raise TypeError(
                f"{name} is a {type(value).__name__}; the order is boost(model, optimizer, "
                "criterion, dataloader, lr_scheduler), or give it by its name"
            )
