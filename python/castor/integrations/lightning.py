"""Lightning's Trainer, its loops, callbacks and checkpoints, over boosted models."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.optim import Optimizer

from castor.booster import Booster
from castor.errors import UsageError
from castor.integrations.common import boost, boosted, check_plugin, plugin_of, unwrapped
from castor.plugins import GeminiPlugin
from castor.runtime.ranks import rank_and_size

_CLIPS = "the Trainer clips by its own gradient_clip_val"
_PRECISIONS = {
    "bf16": "bf16", "bf16-mixed": "bf16", "bf16-true": "bf16",
    "16": "fp16", "16-mixed": "fp16", "16-true": "fp16",
}  # fmt: skip
"""A Trainer's to the plugin's; others are Lightning's own, which CastorStrategy refuses."""
_OPTIMIZER = "castor_optimizer"
"""Of a checkpoint, under optimizer_states: the name of the directory beside it."""


class CastorStrategy(SingleDeviceStrategy):  # type: ignore[misc]
    """A strategy whose models train with castor: `Trainer(strategy=CastorStrategy(plugin))`.

    `fit` boosts the LightningModule with its optimizer, validation, test and prediction without
    one; `strategy.castor` is the Booster. The Trainer clips (`gradient_clip_val`), accumulates,
    evaluates, saves and resumes as ever. A checkpoint holds all but the optimizer, which is in a
    directory beside it that has its name and `.castor_optimizer`; with it `fit(ckpt_path=...)` goes
    on bitwise in every state format. Precision is the plugin's: leave the Trainer's at 32.

    Args:
        plugin: How to train.

    Raises:
        NotImplementedError: The plugin's precision is fp16, or there are several ranks.
        UsageError: Plugin and Trainer would both do the same.
    """

    strategy_name = "castor"
    optimizers: list[Any]

    def __init__(self, plugin: GeminiPlugin) -> None:
        check_plugin(plugin, _CLIPS)
        _, size = rank_and_size()
        if size > 1:
            raise NotImplementedError(
                f"{size} ranks train in a loop of one's own, with transformers' Trainer or over "
                "accelerate so far: start one process of Lightning's Trainer"
            )
        super().__init__(device="cpu" if plugin.config.device == "cpu" else "cuda:0")
        self.castor = Booster(plugin)
        self._root: _Root | None = None
        self._loaded_from = Path()

    def model_to_device(self) -> None:
        """Nothing: castor places its chunks."""

    def setup(self, trainer: Any) -> None:
        """Lightning's, then boosts.

        Raises:
            NotImplementedError: The module has several optimizers.
            UsageError: The Trainer has a precision of its own.
        """
        precision = self.precision_plugin.precision
        if precision != "32-true":
            raise UsageError(
                f"the Trainer has precision={precision!r}, which castor's plugin decides: give "
                "GeminiPlugin precision='bf16', and leave the Trainer's out"
            )
        super().setup(trainer)
        own = [unwrapped(optimizer) for optimizer in self.optimizers]
        if len(own) > 1:
            raise NotImplementedError(
                f"configure_optimizers gives {len(own)} optimizers, and castor steps one a model: "
                "give one with param_groups"
            )
        if self._root is None or self._root.module is not self.lightning_module:
            self._root = _Root(self.lightning_module)
            if not own:
                boost(self.castor, self._root, [])
        if own and not boosted(own[0]):
            boost(self.castor, self._root, own)
            self.optimizers = own  # Lightning's wrappers are of the boosted one

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """What a checkpoint has of it; save_checkpoint names the directory."""
        if not boosted(optimizer):
            state: dict[str, Any] = super().optimizer_state(optimizer)
            return state
        return {_OPTIMIZER: ""}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Lightning's, and the optimizer beside it, first: a checkpoint never lacks its own."""
        states = checkpoint.get("optimizer_states") or []
        own = [state for state in states if _OPTIMIZER in state]
        if own:
            directory = Path(f"{filepath}.{_OPTIMIZER}.{checkpoint['global_step']}")
            directory.parent.mkdir(parents=True, exist_ok=True)
            optimizer = unwrapped(self.optimizers[0])
            self.castor.save_optimizer(optimizer, directory, model=self._root)
            own[0][_OPTIMIZER] = directory.name
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        _remove_optimizers(filepath, keep=own[0][_OPTIMIZER] if own else "")

    def remove_checkpoint(self, filepath: Any) -> None:
        """Lightning's, and the optimizer beside it."""
        super().remove_checkpoint(filepath)
        _remove_optimizers(filepath)

    def load_checkpoint(self, checkpoint_path: Any, **keywords: Any) -> dict[str, Any]:
        """Lightning's."""
        self._loaded_from = Path(checkpoint_path)
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, **keywords)
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Of one that castor saved the directory beside it, of others as Lightning does.

        Raises:
            CheckpointError: The directory is damaged.
            UsageError: It is not there.
        """
        state = checkpoint["optimizer_states"][0]
        if _OPTIMIZER not in state:
            super().load_optimizer_state_dict(checkpoint)
            return
        directory = self._loaded_from.parent / state[_OPTIMIZER]
        if not directory.is_dir():
            raise UsageError(
                f"the optimizer of {self._loaded_from} is in {directory}, which is not there: move "
                "both together"
            )
        self.castor.load_optimizer(unwrapped(self.optimizers[0]), directory, model=self._root)

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
            return self._root(step, *args, **kwargs)  # type: ignore[misc]


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
    """A Trainer's arguments, with castor's strategy.

    Raises:
        UsageError: They ask for another strategy, or for several devices.
    """
    for name, known in (("strategy", ("auto",)), ("devices", ("auto", -1, "-1", 1, "1", [0]))):
        if asked.get(name, "auto") not in known:
            raise UsageError(
                f"the script's Trainer has {name}={asked[name]!r}, and castor run trains it in one "
                f"process with castor's strategy: leave {name} out"
            )
    followed: dict[str, Any] = {}
    precision = str(asked.get("precision"))
    if precision in _PRECISIONS:
        followed["precision"] = _PRECISIONS[precision]
    if asked.get("accelerator") == "cpu":
        followed["device"] = "cpu"
    root = asked.get("default_root_dir")
    plugin = plugin_of(settings, followed, _CLIPS, Path(root) if root is not None else None)
    chosen = {
        "strategy": CastorStrategy(plugin),
        "devices": 1,
        "accelerator": "cpu" if plugin.config.device == "cpu" else "gpu",
    }
    if precision in _PRECISIONS:
        chosen["precision"] = "32-true"
    return {**asked, **chosen}


class _Root(nn.Module):
    """What is boosted: a module whose forward is a step of the LightningModule's."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, step: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.module, step)(*args, **kwargs)


def _remove_optimizers(filepath: Any, *, keep: str = "") -> None:
    path = Path(filepath)
    for directory in path.parent.glob(f"{path.name}.{_OPTIMIZER}.*"):
        if directory.name != keep:
            shutil.rmtree(directory)
