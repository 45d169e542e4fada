"""Lightning's Trainer, its loops, callbacks and checkpoints, over boosted models."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from castor.booster import Booster
from castor.errors import UsageError
from castor.integrations.common import boost, boosted, check_plugin, plugin_of, unwrapped
from castor.integrations.data_parallel import DistributedDataParallel, wrapper_of
from castor.integrations.several_modules import boosted_around
from castor.plugins import GeminiPlugin
from castor.runtime.ranks import launched_size, ranks_of_node

_CLIPS = "the Trainer clips by its own gradient_clip_val"
_PRECISIONS = {
    "bf16": "bf16", "bf16-mixed": "bf16", "bf16-true": "bf16",
    "16": "fp16", "16-mixed": "fp16", "16-true": "fp16",
}  # fmt: skip
"""A Trainer's to the plugin's; others are Lightning's own, which CastorStrategy refuses."""
_DDP: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp_find_unused_parameters_false": {},
    "ddp_find_unused_parameters_true": {"find_unused_parameters": True},
}
"""Names of Lightning's strategies that castor's takes the place of, on several ranks."""
_OPTIMIZER = "castor_optimizer"
"""Key of a checkpoint's optimizer_states for the name of the directory beside the checkpoint."""


class CastorStrategy(Strategy):  # type: ignore[misc]
    """A strategy whose models train with castor: `Trainer(strategy=CastorStrategy(plugin))`.

    `fit` boosts the LightningModule with its optimizer, validation, test and prediction without
    one; `strategy.castor` is the Booster. The Trainer clips (`gradient_clip_val`), accumulates,
    evaluates, saves and resumes as ever. A checkpoint holds all but the optimizer, which is in a
    directory beside it that has its name and `.castor_optimizer`; with it `fit(ckpt_path=...)` goes
    on bitwise in every state format; several optimizers have one each. Precision is the plugin's:
    leave the Trainer's at 32; in fp16 a torch.amp.GradScaler scales the loss. Where
    `castor run --nproc` or torchrun has started several ranks, those of a machine are the Trainer's
    `devices`, and all train one model, as with Lightning's "ddp".

    Args:
        plugin: How to train.
        **options: Of DistributedDataParallel, where there are several ranks.

    Raises:
        UsageError: Plugin and Trainer would both do the same, or options are given to one process.
    """

    strategy_name = "castor"
    optimizers: list[Any]
    castor: Booster
    _root: _Root | None
    _wrapper: DistributedDataParallel | None
    """Around the root, of a fit on several ranks."""
    _loaded_from: Path

    def __new__(cls, *_: Any, **__: Any) -> CastorStrategy:
        """One for this process alone, or one of several ranks."""
        if cls is CastorStrategy:
            cls = _RanksStrategy if launched_size() > 1 else _ProcessStrategy
        made: CastorStrategy = object.__new__(cls)
        return made

    def _begin(self, plugin: GeminiPlugin) -> None:
        self.castor = Booster(plugin)
        self._root = self._wrapper = None
        self._loaded_from = Path()

    def model_to_device(self) -> None:
        """Nothing: castor places its chunks."""

    def setup(self, trainer: Any) -> None:
        """Lightning's, then boosts.

        Raises:
            UsageError: The Trainer has a precision of its own, or other devices than ranks.
        """
        precision: str = cast(Any, self).precision_plugin.precision
        if precision != "32-true":
            raise UsageError(
                f"the Trainer has precision={precision!r}, which castor's plugin decides: give "
                "GeminiPlugin precision='bf16', and leave the Trainer's out"
            )
        # Not trainer.num_devices, which is what the strategy has.
        here = len(trainer._accelerator_connector._parallel_devices)
        if here * trainer.num_nodes != launched_size():
            raise UsageError(
                f"the Trainer has devices={here} and num_nodes={trainer.num_nodes}, and "
                f"{launched_size()} ranks were started: castor trains on one device a rank; give "
                f"as many devices, or start the ranks with `castor run --nproc {here}` or torchrun"
            )
        if self.castor.plugin.config.precision == "fp16":  # type: ignore[attr-defined]
            self.precision_plugin = _ScaledLoss(self.root_device.type)
        Strategy.setup(self, trainer)
        own = [unwrapped(optimizer) for optimizer in self.optimizers]
        if self._root is None or self._root.module is not self.lightning_module:
            known = boosted_around(self.lightning_module)  # by another Trainer's strategy
            self._root = known if isinstance(known, _Root) else _Root(self.lightning_module)
            self._wrapper = wrapper_of(self._root)
            if not own and known is not self._root:
                boost(self.castor, self._root, [])
        if own and not boosted(own[0]):
            self._boost(self._root, own)
            self.optimizers = own  # Lightning's wrappers are of the boosted ones

    def _boost(self, root: _Root, optimizers: list[Optimizer]) -> None:
        boost(self.castor, root, optimizers)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns the optimizer's entry in a checkpoint; save_checkpoint adds the directory."""
        if not boosted(optimizer):
            state: dict[str, Any] = super().optimizer_state(optimizer)
            return state
        return {_OPTIMIZER: ""}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Lightning's, and the optimizers beside it, first: a checkpoint never lacks its own.

        Every rank calls it, as the Trainer does.
        """
        states = checkpoint.get("optimizer_states") or []
        kept = []
        for i, (state, optimizer) in enumerate(zip(states, self.optimizers, strict=False)):
            if _OPTIMIZER in state:
                ordinal = f".{i}" if i else ""
                directory = Path(f"{filepath}.{_OPTIMIZER}.{checkpoint['global_step']}{ordinal}")
                directory.parent.mkdir(parents=True, exist_ok=True)
                self.castor.save_optimizer(unwrapped(optimizer), directory, model=self._root)
                state[_OPTIMIZER] = directory.name
                kept.append(directory.name)
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        if self.is_global_zero:
            _remove_optimizers(filepath, keep=kept)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Lightning's, and the optimizer beside it."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            _remove_optimizers(filepath)

    def load_checkpoint(self, checkpoint_path: Any, **keywords: Any) -> dict[str, Any]:
        """Lightning's."""
        self._loaded_from = Path(checkpoint_path)
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, **keywords)
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads the directories beside a checkpoint of castor's, and others as Lightning does.

        Raises:
            CheckpointError: A directory is damaged.
            UsageError: One is not there.
        """
        states = checkpoint["optimizer_states"]
        if not any(_OPTIMIZER in state for state in states):
            super().load_optimizer_state_dict(checkpoint)
            return
        for state, optimizer in zip(states, self.optimizers, strict=True):
            directory = self._loaded_from.parent / state[_OPTIMIZER]
            if not directory.is_dir():
                raise UsageError(
                    f"the optimizer of {self._loaded_from} is in {directory}, which is not there: "
                    "move both together"
                )
            self.castor.load_optimizer(unwrapped(optimizer), directory, model=self._root)

    def teardown(self) -> None:
        """Lightning's, but model and optimizer stay where they are."""
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # The steps, through the root, whose forward is castor's forward pass.
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's."""
        return self._run("training_step", self.precision_plugin.train_step_context(), args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's."""
        return self._run("validation_step", self.precision_plugin.val_step_context(), args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's."""
        return self._run("test_step", self.precision_plugin.test_step_context(), args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's."""
        return self._run("predict_step", self.precision_plugin.predict_step_context(), args, kwargs)

    def _run(
        self,
        step: str,
        context: AbstractContextManager[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        with context:
            return (self._wrapper or self._root)(step, *args, **kwargs)  # type: ignore[misc]


class _ProcessStrategy(CastorStrategy, SingleDeviceStrategy):  # type: ignore[misc]
    """Strategy of one process."""

    def __init__(self, plugin: GeminiPlugin, **options: Any) -> None:
        check_plugin(plugin, _CLIPS)
        if options:
            raise UsageError(
                f"CastorStrategy was given {', '.join(options)} for DistributedDataParallel, and "
                "one process was started: leave them out, or start ranks with castor run --nproc"
            )
        SingleDeviceStrategy.__init__(
            self, device="cpu" if plugin.config.device == "cpu" else "cuda:0"
        )
        self._begin(plugin)


class _RanksStrategy(CastorStrategy, DDPStrategy):  # type: ignore[misc]
    """Strategy of several ranks, which exchange all but gradients by Lightning's own means."""

    def __init__(self, plugin: GeminiPlugin, **options: Any) -> None:
        check_plugin(plugin, _CLIPS)
        DDPStrategy.__init__(self, **options)
        if self._ddp_comm_hook is not None or self._model_averaging_period is not None:
            raise NotImplementedError(
                "the strategy has ddp_comm_hook or model_averaging_period, and castor reduces "
                "gradients itself: leave them out"
            )
        self._begin(plugin)

    def _boost(self, root: _Root, optimizers: list[Optimizer]) -> None:
        if self._layer_sync is not None:  # sync_batchnorm=True; it keeps the parameters
            self._layer_sync.apply(root)
        self._wrapper = self._wrapper or DistributedDataParallel(root, **self._ddp_kwargs)
        with self._wrapper.keeping_its_buffers():
            super()._boost(root, optimizers)

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return model  # castor's wrapper is around the root

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        """In manual optimization a backward is within the step, behind which its kind is said."""
        if self._wrapper is not None and not self.lightning_module.automatic_optimization:
            self._wrapper.synchronise_as_asked()

    def _run(self, *call: Any) -> Any:
        output = super()._run(*call)
        # So Lightning has DDP's forwards end: it shares no more buffers behind the first one.
        if self._wrapper is not None and not self.lightning_module.automatic_optimization:
            self._wrapper.require_forward_param_sync = False
        return output

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Around all but the last micro-batch of a step."""
        with nullcontext() if self._wrapper is None else self._wrapper.no_sync():
            yield

    def teardown(self) -> None:
        """Ends as the strategy of one process does."""
        self.cluster_environment.teardown()
        super().teardown()


def enter_trainers(settings: Mapping[str, Any]) -> None:
    """From now on every Trainer of Lightning's that is made in this process trains with castor.

    Its strategy is CastorStrategy. Precision follows the Trainer's (`precision="bf16-mixed"`), and
    the device the CPU where it says `accelerator="cpu"`, unless they are among the settings. All
    that were given or followed are written to castor.json in `default_root_dir`, where there is
    one.

    Args:
        settings: GeminiPlugin's arguments, as JSON holds them.
    """
    made = Trainer.__init__

    @functools.wraps(made)
    def init(trainer: Trainer, **keywords: Any) -> None:
        made(trainer, **_on_castor(settings, keywords))

    Trainer.__init__ = init


def _on_castor(settings: Mapping[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """A Trainer's arguments, with castor's strategy."""
    size, here = launched_size(), ranks_of_node()
    nodes = max(1, size // here)
    strategy, options = asked.get("strategy", "auto"), {}
    if size > 1 and type(strategy) is DDPStrategy:
        options = _options_of(strategy)
    elif size > 1 and strategy in _DDP:
        options = _DDP[strategy]
    elif strategy != "auto":
        raise UsageError(
            f"the script's Trainer has strategy={strategy!r}, and castor run trains it with "
            "castor's: leave strategy out, or start ranks with --nproc for 'ddp'"
        )
    known = ["auto", -1, "-1", here, str(here), list(range(here))]
    for name, values in (("devices", known), ("num_nodes", [nodes])):
        if name in asked and asked[name] not in values:
            raise UsageError(
                f"the script's Trainer has {name}={asked[name]!r}, and {here} ranks were started "
                f"on each of {nodes} machines: leave {name} out, or start as many with castor run "
                "--nproc and --nodes"
            )
    followed: dict[str, Any] = {}
    precision = str(asked.get("precision"))
    if precision in _PRECISIONS:
        followed["precision"] = _PRECISIONS[precision]
    if asked.get("accelerator") == "cpu":
        followed["device"] = "cpu"
    root = asked.get("default_root_dir") if os.environ.get("RANK", "0") == "0" else None
    plugin = plugin_of(settings, followed, _CLIPS, Path(root) if root is not None else None)
    chosen = {
        "strategy": CastorStrategy(plugin, **options),
        "devices": here,
        "num_nodes": nodes,
        "accelerator": "cpu" if plugin.config.device == "cpu" else "gpu",
    }
    if precision in _PRECISIONS:
        chosen["precision"] = "32-true"
    return {**asked, **chosen}


def _options_of(strategy: DDPStrategy) -> dict[str, Any]:
    """Returns the options that a script gave to Lightning's own strategy."""
    return {
        **strategy._ddp_kwargs,
        "ddp_comm_hook": strategy._ddp_comm_hook,
        "model_averaging_period": strategy._model_averaging_period,
        "process_group_backend": strategy._process_group_backend,
        "timeout": strategy._timeout,
    }


class _Root(nn.Module):
    """The module that is boosted; its forward is a step of the LightningModule."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, step: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.module, step)(*args, **kwargs)


class _ScaledLoss(MixedPrecision):  # type: ignore[misc]
    """Lightning's scaling of the loss, without its autocast: the weights are fp16 themselves."""

    def __init__(self, device: str) -> None:
        super().__init__("16-mixed", device, GradScaler(device))

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Nothing: operators compute in the type of the weights."""
        yield


def _remove_optimizers(filepath: Any, *, keep: Sequence[str] = ()) -> None:
    path = Path(filepath)
    for directory in path.parent.glob(f"{path.name}.{_OPTIMIZER}.*"):
        if directory.name not in keep:
            shutil.rmtree(directory)
