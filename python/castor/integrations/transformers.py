"""transformers.Trainer, its loop, its callbacks and its checkpoints, over boosted models."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import transformers
from accelerate.utils import DistributedType  # type: ignore[import-untyped]
from torch.optim import Optimizer
from transformers import Trainer, TrainingArguments

from castor.booster import Booster
from castor.errors import OutOfMemoryError, UsageError
from castor.optim.boosted import StepDriver
from castor.plugins import GeminiPlugin

if TYPE_CHECKING:
    from collections.abc import Iterator

AnyTrainer = TypeVar("AnyTrainer", bound=Trainer)

SETTINGS = "castor.json"
"""In a Trainer's output directory: with which settings it trains."""
_OPTIMIZER = "castor_optimizer"
"""Of a Trainer's checkpoint, where the boosted optimizer is."""
_TORCHS_OPTIMIZER = "optimizer.pt"
"""Where a plain Trainer looks: without that file it would begin with a new optimizer."""
_SCHEDULER = "scheduler.pt"
_OVERRIDDEN = (
    "create_accelerator_and_postprocess",
    "create_optimizer",
    "_prepare_for_training",
    "training_step",
    "_save_optimizer_and_scheduler",
    "_load_optimizer_and_scheduler",
)
_RANKS_OF_CASTOR = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
"""Of accelerate: one process, or several that would get a copy of the model each."""
_PRECISIONS = {"bf16": "bf16", "fp16": "fp16"}
"""A TrainingArguments flag to the plugin's precision."""


def trainer(base: type[AnyTrainer], plugin: GeminiPlugin) -> type[AnyTrainer]:
    """A Trainer class whose models train with castor; everything else stays as it is.

    Its `train` boosts model and optimizer; `trainer.castor` is the Booster. TrainingArguments clip
    (`max_grad_norm`), accumulate, evaluate, save and resume as ever; a resume goes on bitwise in
    every state format, with the optimizer in the checkpoint's `castor_optimizer`. Of `bf16=True`
    castor makes bf16 weights with fp32 masters, without autocast. On several ranks castor averages
    gradients and shards optimizer states; nothing is wrapped in DDP.

    Args:
        base: Trainer or a class derived from it.
        plugin: How to train.

    Returns:
        A class derived from `base`, made as `base` is.

    Raises:
        ImportError: This transformers has another Trainer than the one that castor knows.
        NotImplementedError: The plugin's precision is fp16.
        UsageError: `base` is no Trainer, or plugin and Trainer would both do the same.
    """
    given: Any = base
    if not (isinstance(given, type) and issubclass(given, Trainer)):
        raise UsageError(f"{base!r} is not a class of transformers.Trainer's")
    _check_plugin(plugin)
    return _derived(base, lambda _: plugin)


def trainer_of_settings(base: type[AnyTrainer], settings: Mapping[str, Any]) -> type[AnyTrainer]:
    """As `trainer`, of the plugin's arguments; those that are not given follow TrainingArguments.

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
        chosen = followed | dict(settings)
        if arguments.should_save:
            directory = Path(str(arguments.output_dir))
            directory.mkdir(parents=True, exist_ok=True)
            (directory / SETTINGS).write_text(json.dumps(chosen, indent=2) + "\n")
        plugin = GeminiPlugin(**chosen)
        _check_plugin(plugin)
        return plugin

    return _derived(base, plugin_for)


def _derived(
    base: type[AnyTrainer], plugin_for: Callable[[TrainingArguments], GeminiPlugin]
) -> type[AnyTrainer]:
    _check_version()
    if issubclass(base, _OnCastor):
        raise UsageError(f"{base.__name__} trains with castor already; castor run made it do so")
    made: Any = type(base.__name__, (_OnCastor, base), {"__module__": base.__module__})
    made._castor_plugin_for = staticmethod(plugin_for)
    result: type[AnyTrainer] = made
    return result


class _OnCastor:
    """Mixed in before a Trainer: what it does differently."""

    castor_has_trained = False
    """Whether any of them in this process has."""
    _castor_plugin_for: Callable[[TrainingArguments], GeminiPlugin]
    castor: Booster
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
        for_accelerate = _without_precision(own, plugin)
        super().__init__(
            *(for_accelerate if value is own else value for value in arguments),
            **{name: for_accelerate if value is own else value for name, value in keywords.items()},
        )

    @property
    def place_model_on_device(self) -> bool:
        """Never: castor places its chunks."""
        return False

    @place_model_on_device.setter
    def place_model_on_device(self, _: bool) -> None: ...

    def create_accelerator_and_postprocess(self) -> None:
        """As the Trainer's; nothing else shards the model."""
        self._super.create_accelerator_and_postprocess()
        kind = self.accelerator.distributed_type
        if kind not in _RANKS_OF_CASTOR:
            raise NotImplementedError(
                f"the Trainer has distributed_type={kind.value}, and castor shards the model "
                "itself: leave deepspeed, fsdp and their like out of its arguments"
            )

    def create_optimizer(self, model: Any = None) -> Any:
        """The Trainer's optimizer, boosted with its model."""
        optimizer = self._super.create_optimizer(model)
        own = _unwrapped(optimizer)
        if not isinstance(getattr(own, "_castor", None), StepDriver):
            self.castor.boost(self.model, own)
            _OnCastor.castor_has_trained = True
        return optimizer

    def _prepare_for_training(self, *arguments: Any, **keywords: Any) -> Any:
        with _wrapping_nothing(self.accelerator):
            return self._super._prepare_for_training(*arguments, **keywords)

    def training_step(self, *arguments: Any, **keywords: Any) -> Any:
        """The Trainer's; a budget that is too small for a batch is what auto_find_batch_size knows.

        Raises:
            RuntimeError: It is, and the Trainer may take a smaller batch.
        """
        try:
            return self._super.training_step(*arguments, **keywords)
        except OutOfMemoryError as error:
            if not self.args.auto_find_batch_size:
                raise
            raise RuntimeError(f"{error}\nThe budget is out of memory.") from error

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        own, directory = _unwrapped(self.optimizer), Path(output_dir)
        self.castor.save_optimizer(own, directory / _OPTIMIZER, model=self.model)
        if self.args.should_save:  # on one of the ranks
            (directory / _TORCHS_OPTIMIZER).write_text(
                f"castor wrote the optimizer to {_OPTIMIZER}; resume with a Trainer on castor\n"
            )
            torch.save(self.lr_scheduler.state_dict(), directory / _SCHEDULER)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not (Path(checkpoint) / _OPTIMIZER).is_dir():
            self._super._load_optimizer_and_scheduler(checkpoint)  # one that plain PyTorch saved
            return
        own, directory = _unwrapped(self.optimizer), Path(checkpoint)
        self.castor.load_optimizer(own, directory / _OPTIMIZER, model=self.model)
        self.lr_scheduler.load_state_dict(torch.load(directory / _SCHEDULER, weights_only=True))

    @property
    def _super(self) -> Any:
        """The Trainer's own methods."""
        return super()


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


def _unwrapped(optimizer: Any) -> Optimizer:
    """The optimizer that accelerate has wrapped, or one that it has not."""
    inner: Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


@contextmanager
def _wrapping_nothing(accelerator: Any) -> Iterator[None]:
    """What is prepared stays where it is, and is not wrapped in DDP."""
    placing, kind = accelerator.device_placement, accelerator.state.distributed_type
    accelerator.device_placement = False
    accelerator.state.distributed_type = DistributedType.NO
    try:
        yield
    finally:
        accelerator.device_placement = placing
        accelerator.state.distributed_type = kind


def _check_version() -> None:
    missing = [name for name in _OVERRIDDEN if not isinstance(vars(Trainer).get(name), Callable)]  # type: ignore[arg-type]
    if missing:
        raise ImportError(
            f"transformers {transformers.__version__} has a Trainer without {', '.join(missing)}: "
            "castor.integrations.transformers is tested with 5.23"
        )


def _check_plugin(plugin: GeminiPlugin) -> None:
    config = plugin.config
    if config.precision == "fp16":
        raise NotImplementedError(
            "precision='fp16' needs its loss scaled, which a Trainer on castor does not do yet: "
            "use precision='bf16'"
        )
    if config.max_norm > 0:
        raise UsageError(
            f"GeminiPlugin has max_norm={config.max_norm}, and a Trainer clips by its own "
            "max_grad_norm: leave max_norm out"
        )
    if config.overlap == "backward":
        raise UsageError(
            "overlap='backward' updates parameters before the Trainer has clipped their gradients: "
            "pass overlap='forward'"
        )
