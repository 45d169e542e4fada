"""accelerate.Accelerator, its loops, gradient accumulation and checkpoints, over boosted models."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import accelerate  # type: ignore[import-untyped]
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType  # type: ignore[import-untyped]
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import parallel
from torch.optim import Optimizer

from castor.booster import Booster
from castor.errors import UsageError
from castor.integrations.common import (
    OnCastor,
    boosted,
    check_class,
    check_plugin,
    derived,
    plugin_of,
    unwrapped,
)
from castor.integrations.data_parallel import DistributedDataParallel, wrapper_of
from castor.integrations.several_modules import CalledBySubmodules, root_of
from castor.plugins import GeminiPlugin
from castor.runtime.boosted_model import model_with
from castor.runtime.ranks import launched_size
from castor.runtime.rules import params_of

AnyAccelerator = TypeVar("AnyAccelerator", bound=Accelerator)

_OPTIMIZER = "castor_optimizer"
"""In a directory of save_state, where a boosted optimizer is; the second's has a number."""
_OVERRIDDEN = (
    "prepare",
    "prepare_model",
    "prepare_optimizer",
    "save_state",
    "load_state",
)
_RANKS_OF_CASTOR = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
"""Kinds of accelerate with one process, or with several that each get a replica."""
_CLIPS = "accelerator.clip_grad_norm_ clips"


def accelerator(base: type[AnyAccelerator], plugin: GeminiPlugin) -> type[AnyAccelerator]:
    """An Accelerator class whose `prepare` boosts; everything else stays as it is.

    A model is boosted when its optimizer is prepared, with it or after it; `accelerator.castor` is
    the Booster. Loops accumulate, clip (`clip_grad_norm_`), gather, save and load as ever;
    `save_state` writes the optimizer to `castor_optimizer`, and a run that loads it goes on bitwise
    in every state format. Of `mixed_precision="bf16"` castor makes bf16 weights with fp32 masters,
    without autocast; of "fp16" fp16 weights, and a torch.amp.GradScaler scales the loss, on the CPU
    device too. On several ranks castor averages gradients and shards optimizer states, and
    what `prepare` returns is a DistributedDataParallel of castor's around the model. Models of
    which no parameter requires a gradient are left to accelerate.

    Args:
        base: Accelerator or a class derived from it.
        plugin: How to train.

    Returns:
        A class derived from `base`, made as `base` is.

    Raises:
        ImportError: This accelerate has another Accelerator than the one that castor knows.
        UsageError: `base` is no Accelerator, or plugin and loop would both do the same.
    """
    made = _derived(base, lambda *_: plugin)
    made._castor_plugin = plugin
    check_plugin(plugin, _CLIPS)
    return made


def accelerator_of_settings(
    base: type[AnyAccelerator], settings: Mapping[str, Any]
) -> type[AnyAccelerator]:
    """Makes `accelerator` of the plugin's arguments; those not given follow the Accelerator's.

    Precision is theirs (`mixed_precision="bf16"`, else fp32), and the device the CPU where they say
    `cpu=True`. All that were given or followed are written to castor.json in `project_dir`, where
    there is one.

    Args:
        base: As there.
        settings: GeminiPlugin's arguments, as JSON holds them.

    Raises:
        ImportError, UsageError: As there.
    """

    def plugin_for(precision: str, on_cpu: bool, directory: Path | None) -> GeminiPlugin:
        followed: dict[str, Any] = {"precision": "fp32" if precision == "no" else precision}
        if on_cpu:
            followed["device"] = "cpu"
        first = os.environ.get("RANK", "0") == "0"
        return plugin_of(settings, followed, _CLIPS, directory if first else None)

    return _derived(base, plugin_for)


def _derived(
    base: type[AnyAccelerator], plugin_for: Callable[[str, bool, Path | None], GeminiPlugin]
) -> type[AnyAccelerator]:
    check_class(base, Accelerator, "boosts")
    missing = [name for name in _OVERRIDDEN if not callable(vars(Accelerator).get(name))]
    if missing:
        raise ImportError(
            f"accelerate {accelerate.__version__} has an Accelerator without {', '.join(missing)}: "
            "castor.integrations.accelerate is tested with 1.15"
        )
    return derived(base, _OnCastor, plugin_for)


def check_unsharded(kind: DistributedType, who: str, arguments: str) -> None:
    """Nothing else than castor shards the model.

    Raises:
        NotImplementedError: Something does.
    """
    if kind not in _RANKS_OF_CASTOR:
        raise NotImplementedError(
            f"{who} has distributed_type={kind.value}, and castor shards the model itself: leave "
            f"deepspeed, fsdp and their like out of {arguments}"
        )


def scale_losses(accelerator: Any) -> None:
    """From now on `accelerator.backward` scales the loss, and its optimizers' steps unscale it.

    Args:
        accelerator: Of accelerate's class, which does so itself on some devices, under autocast.
    """
    handler = accelerator.scaler_handler
    options = {} if handler is None else handler.to_kwargs()
    accelerator.scaler = GradScaler(accelerator.device.type, **options)
    accelerator.unscale_gradients = functools.partial(_unscale_gradients, accelerator)


def _unscale_gradients(accelerator: Any, optimizer: Any = None) -> None:
    """Replaces Accelerator.unscale_gradients, which clip_grad_norm_ and clip_grad_value_ call."""
    given = accelerator._optimizers if optimizer is None else optimizer
    for one in given if isinstance(given, list | tuple) else [given]:
        accelerator.scaler.unscale_(unwrapped(one))


@contextmanager
def wrapping_as_castor(accelerator: Any) -> Iterator[None]:
    """Keeps prepared models on their device; on several ranks castor's DDP wraps them."""
    placing, torchs = accelerator.device_placement, parallel.DistributedDataParallel
    accelerator.device_placement = False
    vars(parallel)["DistributedDataParallel"] = DistributedDataParallel
    try:
        yield
    finally:
        accelerator.device_placement = placing
        vars(parallel)["DistributedDataParallel"] = torchs


class _OnCastor(OnCastor):
    """Mixed in before an Accelerator: what it does differently."""

    distributed_type: Any
    project_configuration: Any
    _models: list[nn.Module]
    _optimizers: list[Any]

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        bound = inspect.signature(Accelerator.__init__).bind(self, *arguments, **keywords)
        asked = bound.arguments
        precision = asked.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION")
        on_cpu = bool(asked.get("cpu")) or os.environ.get("ACCELERATE_USE_CPU") in ("1", "true")
        directory = asked.get("project_dir")
        plugin = self._castor_plugin_for(
            str(precision or "no"), on_cpu, None if directory is None else Path(directory)
        )
        own: str = plugin.config.precision
        if precision not in (None, "no", own):
            raise UsageError(
                f"the Accelerator has mixed_precision={str(precision)!r} and GeminiPlugin "
                f"precision={own!r}: give the plugin precision={str(precision)!r}, or leave "
                "mixed_precision out"
            )
        self._precision = own
        self.castor = Booster(plugin)
        asked["mixed_precision"] = "no"
        asked["cpu"] = on_cpu or plugin.config.device == "cpu"
        super().__init__(*bound.args[1:], **bound.kwargs)
        if own == "fp16":
            scale_losses(self)
        where = "its arguments and of accelerate's configuration"
        check_unsharded(self.distributed_type, "the Accelerator", where)

    @property
    def mixed_precision(self) -> str:
        """The plugin's precision, by accelerate's name."""
        return "no" if self._precision == "fp32" else self._precision

    def prepare(self, *args: Any, **keywords: Any) -> Any:
        """Accelerate's; models are boosted with their optimizers."""
        models = [arg for arg in args if isinstance(arg, nn.Module)]
        optimizers = [arg for arg in args if isinstance(arg, Optimizer)]
        self._boost(optimizers, models + self._models)
        return self._super.prepare(*args, **keywords)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Accelerate's, but one that trains stays where it is, and its DDP is castor's."""
        if evaluation_mode or not any(param.requires_grad for param in model.parameters()):
            return self._super.prepare_model(model, device_placement, evaluation_mode)
        with wrapping_as_castor(self):
            return self._super.prepare_model(model, False, evaluation_mode)

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        """Accelerate's; its model, which has been prepared, is boosted with it."""
        self._boost([optimizer], self._models)
        return self._super.prepare_optimizer(optimizer, False)

    def backward(self, loss: torch.Tensor, **keywords: Any) -> None:
        """Accelerate's.

        Raises:
            UsageError: No model trains on castor.
        """
        if not any(boosted(optimizer) for optimizer in self._optimizers):
            raise UsageError(
                "castor trains nothing here: give accelerator.prepare the optimizer, too, with its "
                "model or after it"
            )
        self._super.backward(loss, **keywords)

    @classmethod
    @contextmanager
    def trigger_sync_in_backward(cls, model: nn.Module) -> Iterator[None]:
        """Accelerate's."""
        wrapper = wrapper_of(model)
        with wrapper.synchronising() if wrapper else super().trigger_sync_in_backward(model):  # type: ignore[misc]
            yield

    def save_state(self, *arguments: Any, **keywords: Any) -> Any:
        """Accelerate's, with the boosted optimizers in castor_optimizer; every rank calls it."""
        with self._without_castors():
            location = self._super.save_state(*arguments, **keywords)
        for directory, model, optimizer in self._checkpoints(location):
            self.castor.save_optimizer(optimizer, directory, model=model)
        return location

    def load_state(self, input_dir: Any = None, *arguments: Any, **keywords: Any) -> None:
        """Accelerate's, of what save_state of castor's or of accelerate's has written."""
        directory = self._newest() if input_dir is None else Path(input_dir).expanduser()
        if not (directory / _OPTIMIZER).is_dir():  # one that plain PyTorch saved
            self._super.load_state(str(directory), *arguments, **keywords)
            return
        with self._without_castors():
            self._super.load_state(str(directory), *arguments, **keywords)
        for part, model, optimizer in self._checkpoints(directory):
            self.castor.load_optimizer(optimizer, part, model=model)

    def _boost(self, optimizers: list[Optimizer], models: list[nn.Module]) -> None:
        """Boosts the models of those that are not boosted yet, each with all that it has here."""
        new = [own for own in map(unwrapped, optimizers) if not boosted(own)]
        for known in models:
            self._check_boosted(known)
        while new:
            model = _model_of(new[0], models)
            if model is None:
                raise UsageError(
                    f"the {type(new[0]).__name__} holds no parameter of a model that "
                    "accelerator.prepare has been given: prepare the model with it, or before"
                )
            its_optimizers = [own for own in new if _model_of(own, models) is model]
            root, its_optimizers = root_of(model, its_optimizers, new)
            if isinstance(root, CalledBySubmodules) and launched_size() > 1:
                raise UsageError(
                    f"accelerator.prepare was given a {type(its_optimizers[0]).__name__} over "
                    "several models, whose gradients several ranks cannot average: make one module "
                    "of them"
                )
            self._boost_with(root, *its_optimizers)
            new = [own for own in new if own not in its_optimizers]

    def _trained(self) -> Iterator[tuple[nn.Module, Optimizer]]:
        """Boosted models with their optimizers."""
        for own in map(unwrapped, self._optimizers):
            if boosted(own):
                yield model_with(own._castor.engine), own  # type: ignore[attr-defined]

    def _checkpoints(self, location: Any) -> Iterator[tuple[Path, nn.Module, Optimizer]]:
        for i, (model, optimizer) in enumerate(self._trained()):
            yield Path(location) / (f"{_OPTIMIZER}_{i}" if i else _OPTIMIZER), model, optimizer

    @contextmanager
    def _without_castors(self) -> Iterator[None]:
        """Accelerate knows neither optimizers that are boosted nor what is around models.

        So parameters have the same names in files of any number of ranks.
        """
        optimizers, models = self._optimizers, self._models
        self._optimizers = [one for one in optimizers if not boosted(one)]
        self._models = [_inner(model) for model in models]
        try:
            yield
        finally:
            self._optimizers, self._models = optimizers, models

    def _newest(self) -> Path:
        """Returns the newest of the directories that save_state has named, as accelerate does."""
        project = self.project_configuration
        if not project.automatic_checkpoint_naming:
            raise UsageError(
                "load_state needs a directory, or a ProjectConfiguration with "
                "automatic_checkpoint_naming=True"
            )
        folder = Path(project.project_dir) / "checkpoints"
        return max(folder.iterdir(), key=lambda path: int(path.name.rpartition("_")[2]))


def _inner(model: nn.Module) -> nn.Module:
    """Returns the model that prepare was given for the one that it returned."""
    wrapper = wrapper_of(model)
    return model if wrapper is None else wrapper.module


def _model_of(optimizer: Optimizer, models: list[nn.Module]) -> nn.Module | None:
    """The one whose parameters it holds."""
    held = set(params_of(optimizer))
    found = (model for model in models if held.intersection(model.parameters()))
    return next(map(_inner, found), None)
