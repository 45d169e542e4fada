"""transformers.Trainer, its loop, its callbacks and its checkpoints, over boosted models."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from transformers import Trainer, TrainingArguments

from castor.booster import Booster
from castor.errors import UsageError
from castor.integrations.accelerate import check_unsharded, scale_losses, wrapping_as_castor
from castor.integrations.common import (
    OnCastor,
    boosted,
    check_class,
    check_plugin,
    derived,
    plugin_of,
    unwrapped,
)
from castor.integrations.several_modules import CalledBySubmodules, root_of
from castor.plugins import GeminiPlugin
from castor.runtime.boosted_model import model_with
from castor.runtime.ranks import launched_size

AnyTrainer = TypeVar("AnyTrainer", bound=Trainer)

_OPTIMIZER = "castor_optimizer"
"""Directory of a Trainer's checkpoint that holds the boosted optimizer."""
_TORCHS_OPTIMIZER = "optimizer.pt"
"""File that a plain Trainer looks for; without it the Trainer would begin with a new optimizer."""
_SCHEDULER = "scheduler.pt"
_OVERRIDDEN = (
    "create_accelerator_and_postprocess",
    "create_optimizer",
    "_prepare_for_training",
    "_save_optimizer_and_scheduler",
    "_load_optimizer_and_scheduler",
)
_PRECISIONS = {"bf16": "bf16", "fp16": "fp16"}
"""A TrainingArguments flag to the plugin's precision."""
_CLIPS = "a Trainer clips by its own max_grad_norm"


def trainer(base: type[AnyTrainer], plugin: GeminiPlugin) -> type[AnyTrainer]:
    """A Trainer class whose models train with castor; everything else stays as it is.

    Its `train` boosts model and optimizer; `trainer.castor` is the Booster. TrainingArguments clip
    (`max_grad_norm`), accumulate, evaluate, save and resume as ever; a resume goes on bitwise in
    every state format, with the optimizer in the checkpoint's `castor_optimizer`. Of `bf16=True`
    castor makes bf16 weights with fp32 masters, without autocast; of `fp16=True` fp16 weights, and
    a torch.amp.GradScaler scales the loss, on the CPU device too. On several ranks castor averages
    gradients and shards optimizer states, and the DDP that the Trainer puts around its model
    (`model_wrapped`) is castor's.

    Args:
        base: Trainer or a class derived from it.
        plugin: How to train.

    Returns:
        A class derived from `base`, made as `base` is.

    Raises:
        ImportError: This transformers has another Trainer than the one that castor knows.
        UsageError: `base` is no Trainer, or plugin and Trainer would both do the same.
    """
    made = _derived(base, lambda _: plugin)
    made._castor_plugin = plugin  # type: ignore[attr-defined]
    check_plugin(plugin, _CLIPS)
    return made


def trainer_of_settings(base: type[AnyTrainer], settings: Mapping[str, Any]) -> type[AnyTrainer]:
    """Makes `trainer` of the plugin's arguments; those that are not given follow TrainingArguments.

    Precision is theirs (`bf16=True`, else fp32), and the device the CPU where they say `use_cpu`.
    A Trainer writes all that were given or followed to castor.json in its output directory.

    Args:
        base: As there.
        settings: GeminiPlugin's arguments, as JSON holds them.

    Raises:
        ImportError, UsageError: As there.
    """

    def plugin_for(arguments: TrainingArguments) -> GeminiPlugin:
        followed: dict[str, Any] = {"precision": "bf16" if arguments.bf16 else "fp32"}
        if arguments.fp16:
            followed["precision"] = "fp16"
        if arguments.use_cpu:
            followed["device"] = "cpu"
        directory = Path(str(arguments.output_dir)) if arguments.should_save else None
        return plugin_of(settings, followed, _CLIPS, directory)

    return _derived(base, plugin_for)


def _derived(
    base: type[AnyTrainer], plugin_for: Callable[[TrainingArguments], GeminiPlugin]
) -> type[AnyTrainer]:
    check_class(base, Trainer, "trains")
    _check_version()
    return derived(base, _OnCastor, plugin_for)


class _OnCastor(OnCastor):
    """Mixed in before a Trainer: what it does differently."""

    model: torch.nn.Module
    optimizer: Any
    lr_scheduler: Any
    accelerator: Any
    args: TrainingArguments

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        given = [*arguments, *keywords.values()]
        own = next((value for value in given if isinstance(value, TrainingArguments)), None)
        if own is None:
            raise UsageError("a Trainer on castor needs its TrainingArguments: give args=")
        plugin = self._castor_plugin_for(own)
        self.castor = Booster(plugin)
        rest = _on_one_device(_without_precision(own, plugin))
        super().__init__(
            *(rest if value is own else value for value in arguments),
            **{name: rest if value is own else value for name, value in keywords.items()},
        )

    @property
    def place_model_on_device(self) -> bool:
        """Never: castor places its chunks."""
        return False

    @place_model_on_device.setter
    def place_model_on_device(self, _: bool) -> None: ...

    def create_accelerator_and_postprocess(self) -> None:
        """Makes the Trainer's accelerator, and checks that nothing else shards the model."""
        self._super.create_accelerator_and_postprocess()
        check_unsharded(self.accelerator.distributed_type, "the Trainer", "its arguments")
        plugin: Any = self.castor.plugin
        if plugin.config.precision == "fp16":
            scale_losses(self.accelerator)

    def create_optimizer(self, model: Any = None) -> Any:
        """The Trainer's optimizer, boosted with its model, and with a loss that it trains too."""
        optimizer = self._super.create_optimizer(model)
        own = unwrapped(optimizer)
        self._check_boosted(self.model)
        if not boosted(own):
            root, _ = root_of(self.model, [own], [own])
            if isinstance(root, CalledBySubmodules) and launched_size() > 1:
                raise UsageError(
                    f"the Trainer's {type(own).__name__} holds parameters beside those of its "
                    f"{type(self.model).__name__}, as those of a loss, whose gradients several "
                    "ranks cannot average: give the Trainer one module of both"
                )
            self._boost_with(root, own)
        return optimizer

    def _prepare_for_training(self, *arguments: Any, **keywords: Any) -> Any:
        with wrapping_as_castor(self.accelerator):
            return self._super._prepare_for_training(*arguments, **keywords)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        own, directory = unwrapped(self.optimizer), Path(output_dir)
        self.castor.save_optimizer(own, directory / _OPTIMIZER, model=_trained_by(own))
        if self.args.should_save:  # on one of the ranks
            (directory / _TORCHS_OPTIMIZER).write_text(
                f"castor wrote the optimizer to {_OPTIMIZER}; resume with a Trainer on castor\n"
            )
            torch.save(self.lr_scheduler.state_dict(), directory / _SCHEDULER)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not (Path(checkpoint) / _OPTIMIZER).is_dir():
            self._super._load_optimizer_and_scheduler(checkpoint)  # one that plain PyTorch saved
            return
        own, directory = unwrapped(self.optimizer), Path(checkpoint)
        self.castor.load_optimizer(own, directory / _OPTIMIZER, model=_trained_by(own))
        self.lr_scheduler.load_state_dict(torch.load(directory / _SCHEDULER, weights_only=True))


def _trained_by(optimizer: Any) -> torch.nn.Module:
    """Returns the boosted model of an optimizer."""
    return model_with(optimizer._castor.engine)


def _without_precision(arguments: TrainingArguments, plugin: GeminiPlugin) -> TrainingArguments:
    """A copy that leaves the precision to castor."""
    precision = plugin.config.precision
    for flag, asked in _PRECISIONS.items():
        if getattr(arguments, flag) and asked != precision:
            raise UsageError(
                f"TrainingArguments has {flag}=True and GeminiPlugin precision={precision!r}: "
                f"give the plugin precision={asked!r}, or leave {flag} out"
            )
    own = copy.copy(arguments)
    own.bf16 = own.fp16 = False
    own.mixed_precision = "no"
    return own


def _on_one_device(arguments: TrainingArguments) -> TrainingArguments:
    """The same, without the copies that a Trainer of one process makes for every other GPU.

    Its nn.DataParallel would put a whole model on each of them in every forward.
    """
    if arguments.n_gpu > 1:
        warnings.warn(
            f"this process sees {arguments.n_gpu} GPUs, and castor trains on one: batches are of "
            f"{arguments.per_device_train_batch_size}; start one process for each GPU, with "
            f"`castor run --nproc {arguments.n_gpu}` or torchrun, to train on all",
            RuntimeWarning,
            stacklevel=3,  # where the Trainer is made
        )
        arguments._n_gpu = 1
    return arguments


def _check_version() -> None:
    missing = [name for name in _OVERRIDDEN if not isinstance(vars(Trainer).get(name), Callable)]  # type: ignore[arg-type]
    if missing:
        raise ImportError(
            f"transformers {transformers.__version__} has a Trainer without {', '.join(missing)}: "
            "castor.integrations.transformers is tested with 5.23"
        )
