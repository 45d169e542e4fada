"""The calls of Booster that save and load checkpoints."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from castor import checkpoint
from castor.config import parse_bytes
from castor.errors import UsageError
from castor.optim.torch_step import torch_step_of
from castor.plugins.protocol import list_of_optimizers
from castor.runtime.boosted_model import BoostedModel, boosted_models_holding, compiled_from
from castor.runtime.engine import Engine, engines_holding, turns
from castor.runtime.rank_group import RankGroup

# --- Reads Booster's arguments for checkpoints ----------------------------------------------------


def absolute(path: str | Path) -> Path:
    """Returns the absolute path, which stays valid when the working directory changes.

    Raises:
        TypeError: It is no path.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"the directory is a {type(path).__name__}; give a path as a string or a Path. save "
            "and load take it first, and other methods after what they save or load"
        )
    return Path(path).resolve()


def shard_bytes(shard: bool, size_per_shard: int | str) -> int | None:
    """Returns the bytes of tensors that one file may hold; None: no limit.

    Raises:
        ValueError: `size_per_shard` is no size, or an integer below 1 MiB, which was probably
            meant in MiB, as in Colossal-AI.
    """
    max_bytes = parse_bytes(size_per_shard, "size_per_shard")
    if isinstance(size_per_shard, int) and size_per_shard < 2**20:
        raise ValueError(
            f"size_per_shard={size_per_shard} is a number of bytes here, and of MiB in "
            f"Colossal-AI: write '{size_per_shard}MiB', or '{size_per_shard}B'"
        )
    return max_bytes if shard else None


def check_only(**arguments: tuple[Any, Any]) -> None:
    """Checks arguments that have one supported value, each given as (value, supported value).

    Raises:
        NotImplementedError: An argument has another value.
    """
    for name, (value, supported) in arguments.items():
        if value != supported:
            raise NotImplementedError(f"{name}={value!r} is not supported; {supported!r} is")


# --- The calls of Booster that save and load checkpoints ------------------------------------------

Result = TypeVar("Result")


class Checkpoints:
    """The methods of Booster that write and read files; of several ranks every one calls them."""

    _latest: weakref.ref[nn.Module] | None
    """The model boosted last."""

    def save_model(
        self,
        model: nn.Module,
        directory: str | Path,
        *,
        shard: bool = True,
        size_per_shard: int | str = "2GB",
        tokenizer: Any = None,
        prefix: str | None = None,
        use_safetensors: bool = True,
        use_async: bool = False,
    ) -> None:
        """Writes the model as Hugging Face's save_pretrained does: from_pretrained reads it.

        Parameters and persistent buffers go to safetensors files in the working dtype, tied ones
        once, streamed from where they lie: the extra memory is two 4 MiB pieces at most, and the
        weights of one layer where transformers names or fuses them otherwise in files. The
        directory appears as a whole; a kill at any moment leaves what was there before. Files in
        it that castor did not write stay.

        Of a peft.PeftModel the adapters are written, one file each, as its own save_pretrained
        does; PEFT reads them.

        Args:
            model: Boosted or plain.
            directory: Created or replaced; its parent must exist.
            shard: Whether weights may go to several files.
            size_per_shard: Bytes of tensors in one file: "2GB", or a number, from 1 MiB on.
            tokenizer: Saved along, by its save_pretrained.
            prefix: Only None is supported.
            use_safetensors: Only True is supported.
            use_async: Whether to return before the weights are written; see wait_for_saves.

        Raises:
            CheckpointError: The model holds something other than dense tensors, or PEFT's adapters
                without being a PeftModel.
            IoError: Not enough room (checked before), a read-only disk, a missing parent.
            NotImplementedError: An argument asks for what this version lacks.
            UsageError: use_async=True of a model that is not boosted.
        """
        check_only(prefix=(prefix, None), use_safetensors=(use_safetensors, True))
        path, max_bytes = absolute(directory), shard_bytes(shard, size_per_shard)

        def save(reading: checkpoint.Reading | None) -> checkpoint.Saving:
            return checkpoint.save_model(
                model, path, max_bytes=max_bytes, tokenizer=tokenizer, reading=reading
            )

        facts = {"the directory of a model that is saved": str(path), "size_per_shard": max_bytes}
        self._save(save, model, use_async=use_async, facts=facts)

    def load_model(self, model: nn.Module, directory: str | Path, *, strict: bool = True) -> Any:
        """Reads a checkpoint of this architecture, castor's or any in Hugging Face's layout.

        Tensors go one by one from the file to their place, cast to the model's dtype; in 16-bit
        precisions the fp32 masters get the stored values, so load the optimizer afterwards. All is
        verified first: castor's own checkpoints by checksum, others by structure. Pickled files
        are never read.

        Where the names on disk are not the model's (a Mixtral's experts one by one, a base model's
        checkpoint), its from_pretrained reads them into a lazy model, tensor by tensor.

        Args:
            model: Boosted or plain.
            directory: Holds model.safetensors, or shards and their index; for a peft.PeftModel,
                or adapter_model.safetensors and adapter_config.json of the same adapters.
            strict: Whether missing and unexpected keys are errors.

        Returns:
            torch's named tuple (missing_keys, unexpected_keys).

        Raises:
            CheckpointError: The checkpoint is damaged, or keys (strict) or shapes do not match, in
                the words of torch's load_state_dict and the names of the files; or these have two
                values for a tied weight. The model was not changed.
        """
        checkpoint.wait()
        path = absolute(directory)
        with turns(self._engines(model, (), held=False), "a load"):
            return checkpoint.ready_on_all(
                self._shared(model),
                lambda: checkpoint.prepare_load_model(model, path, strict=strict),
            ).apply()

    def save_optimizer(
        self,
        optimizer: Optimizer,
        directory: str | Path,
        *,
        model: nn.Module | None = None,
        shard: bool = True,
        size_per_shard: int | str = "2GB",
        prefix: str | None = None,
        use_async: bool = False,
    ) -> None:
        """Writes the optimizer's state as torch.optim lays it out, by parameter name.

        safetensors files hold "<parameter>.exp_avg" and so on, with "<parameter>.master" in 16-bit
        precisions; optimizer.json holds the groups and the loss scale.

        Args:
            optimizer: Boosted, or any torch optimizer whose state is tensors and numbers.
            directory: As in save_model.
            model: Names the parameters of an optimizer that is not boosted.
            shard: Whether tensors may go to several files.
            size_per_shard: Bytes of tensors in one file: "2GB", or a number, from 1 MiB on.
            prefix: Only None is supported.
            use_async: Whether to return before the states are written; see wait_for_saves.

        Raises:
            CheckpointError: The state holds something else; the message names it.
            IoError: As in save_model.
            UsageError: Nothing tells the parameters' names; use_async=True of an optimizer whose
                states are not castor's; or ranks have parts of the model, and it is not boosted.
            NotImplementedError: An argument asks for what this version lacks.
        """
        check_only(prefix=(prefix, None))
        model = _model_of(optimizer, model)
        path, max_bytes = absolute(directory), shard_bytes(shard, size_per_shard)

        def save(reading: checkpoint.Reading | None) -> checkpoint.Saving:
            return checkpoint.save_optimizer(
                optimizer, path, model=model, max_bytes=max_bytes, reading=reading
            )

        facts = {"the directory of states that are saved": str(path), "size_per_shard": max_bytes}
        self._save(save, model, [optimizer], use_async=use_async, facts=facts)

    def load_optimizer(
        self, optimizer: Optimizer, directory: str | Path, *, model: nn.Module | None = None
    ) -> None:
        """Reads what save_optimizer wrote, into a boosted or a plain optimizer of the same kind.

        Load the model first. Adam, AdamW and HybridAdam read each other's states. Masters go where
        the optimizer keeps them; a float32 parameter is its own master and takes their value.

        Args:
            optimizer: Over the same parameters, in any order.
            directory: What save_optimizer was given.
            model: Names the parameters of an optimizer that is not boosted.

        Raises:
            CheckpointError: Damaged, or of another optimizer; nothing was changed.
            UsageError: Nothing tells the parameters' names.
        """
        checkpoint.wait()
        model, path = _model_of(optimizer, model), absolute(directory)
        with turns(self._engines(None, [optimizer], held=False), "a load"):
            checkpoint.ready_on_all(
                self._shared(model),
                lambda: checkpoint.prepare_load_optimizer(optimizer, path, model),
            ).apply()

    def save_lr_scheduler(self, lr_scheduler: Any, path: str | Path) -> None:
        """Writes a scheduler's state as one JSON file, with a checksum in it.

        Raises:
            CheckpointError: The state holds what JSON cannot; the message names the key.
            IoError: As in save_model.
        """
        checkpoint.wait()
        self._once(None, lambda: checkpoint.save_lr_scheduler(lr_scheduler, absolute(path)))

    def load_lr_scheduler(self, lr_scheduler: Any, path: str | Path) -> None:
        """Reads what save_lr_scheduler wrote.

        Raises:
            CheckpointError: The file is damaged, or of another class of scheduler.
        """
        checkpoint.wait()
        checkpoint.load_lr_scheduler(lr_scheduler, absolute(path))

    def save(
        self,
        directory: str | Path,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        lr_scheduler: Any = None,
        dataloader: Any = None,
        *,
        step: int | None = None,
        extra: Any = None,
        keep: int | None = None,
        size_per_shard: int | str = "2GB",
        use_async: bool = False,
    ) -> Path:
        """Writes all that a run needs to go on bitwise, as `directory`/step-00000040.

        Call it between optimizer.step() and the next forward; gradients are not saved. Beside the
        objects given it holds the random states of torch, Python and numpy, and the step count.
        Every rank calls it, and all write, with the random states and data positions of all.

        Args:
            directory: The run's; created if only its parent exists.
            model: Boosted or plain.
            optimizer: As in save_optimizer, or all that the model was boosted with.
            lr_scheduler: Anything with state_dict.
            dataloader: A DataLoader that went through boost, or anything with state_dict.
            step: Optimizer steps so far; by default those that the boosted model has taken.
            extra: Numbers, strings, lists, dicts, small tensors: load returns them.
            keep: How many checkpoints up to this step remain; older ones go once this is durable.
            size_per_shard: Bytes of tensors in one file: "2GB", or a number, from 1 MiB on.
            use_async: Whether to return before all is written; see wait_for_saves.

        Returns:
            The checkpoint's directory; with use_async=True it will be there.

        Raises:
            CheckpointError, IoError, UsageError: As in the methods for the parts.
        """
        path, max_bytes = absolute(directory), shard_bytes(True, size_per_shard)
        shared = self._shared(model)
        process = checkpoint.process_state(dataloader)
        processes = [process] if shared is None else shared.gather(process)
        optimizers = list_of_optimizers(optimizer)

        def save(reading: checkpoint.Reading | None) -> checkpoint.Saving:
            return checkpoint.save(
                path, model, optimizers, lr_scheduler, processes,
                step=step, extra=extra, keep=keep, max_bytes=max_bytes, reading=reading,
            )  # fmt: skip

        facts = {
            "the directory of a run that is saved": str(path),
            "step": step,
            "keep": keep,
            "size_per_shard": max_bytes,
            "the optimizers that are saved": [type(one).__name__ for one in optimizers],
            "whether a dataloader is saved": dataloader is not None,
        }
        return self._save(save, model, optimizers, use_async=use_async, facts=facts)

    def load(
        self,
        directory: str | Path,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        lr_scheduler: Any = None,
        dataloader: Any = None,
    ) -> checkpoint.CheckpointInfo:
        """Takes a run up where `save` left it, budgets and placement may differ.

        The first iteration over `dataloader` goes on after the last batch handed out before. Every
        rank calls it; one that the saved run lacked takes rank 0's position, not its random states.

        Args:
            directory: A run's directory (its latest whole checkpoint is read) or one checkpoint.
            model: As saved.
            optimizer: None leaves the saved state unread; so for the next two.
            lr_scheduler: As saved.
            dataloader: As saved, over the same data.

        Returns:
            The step, what was given as extra, and the path.

        Raises:
            CheckpointError: Nothing whole is there, a byte differs from what was saved, or an
                object does not fit; nothing was changed.
        """
        checkpoint.wait()
        shared, path = self._shared(model), absolute(directory)
        rank = shared.ranks.rank if shared and shared.ranks else 0
        optimizers = list_of_optimizers(optimizer)
        with turns(self._engines(model, optimizers, held=False), "a load"):
            return checkpoint.ready_on_all(
                shared,
                lambda: checkpoint.prepare_load(
                    path, model, optimizers, lr_scheduler, dataloader, rank=rank
                ),
            ).apply()

    def latest(self, directory: str | Path) -> Path | None:
        """The whole checkpoint of the highest step in a run's directory, None without one."""
        checkpoint.wait()
        return checkpoint.latest(absolute(directory))

    def wait_for_saves(self) -> None:
        """Returns when a save with use_async=True is on the disk; at once where none is under way.

        Such a save returns when it has taken what is of the moment, and a thread writes weights and
        states while training goes on, as they were at the call: from copies, in at most half of the
        host memory that is left. What would write a part that finds none waits until it is read.
        Until somebody waits for it the thread takes a fortieth of the cores. One is under way at a
        time. All that saves or loads, latest, and the end of the process begin with this one.

        Raises:
            IoError, CheckpointError, Error: What stopped it; raised once.
        """
        checkpoint.wait()

    def _shared(self, model: nn.Module | None) -> BoostedModel | None:
        """Returns the model's record, or the last one's, where several ranks share it."""
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(f"model is a {type(model).__name__}; give a torch.nn.Module")
        latest = self._latest() if model is None and self._latest else model
        boosted = [] if latest is None else boosted_models_holding(latest)
        if len(boosted) > 1 and boosted[0].shared:
            what = f"the model holds {len(boosted)} boosted ones, which several ranks"
            raise NotImplementedError(f"{what} save and load one by one: give each")
        return boosted[0] if boosted and boosted[0].shared else None

    def _save(
        self,
        save: Callable[[checkpoint.Reading | None], checkpoint.Saving],
        model: nn.Module | None,
        optimizers: Sequence[Optimizer] = (),
        *,
        use_async: bool,
        facts: Mapping[str, Any],
    ) -> Path:
        checkpoint.wait()
        for engine in engines_holding(compiled_from(model)) if model is not None else ():
            engine.check_modules()
        shared = self._shared(model)
        savers = _savers(shared, optimizers)
        if shared is not None:
            checkpoint.check_equal_saves(shared, savers, {**facts, "use_async": use_async})
        engines = self._engines(model, optimizers, held=use_async)
        with turns(engines, "a save"):
            if not use_async and savers is None:
                return self._once(model, lambda: checkpoint.at_once(save(None)), optimizers)
            share = None
            if isinstance(shared, Engine) and savers is not None:
                first = shared.ranks is None or shared.ranks.rank == 0
                share = checkpoint.Share(savers, writes_replicated=first)
            return checkpoint.save_reading(engines, share, save, later=use_async)

    def _engines(
        self, model: nn.Module | None, optimizers: Sequence[Optimizer], *, held: bool
    ) -> Sequence[Engine]:
        """The engines of what is saved; `held`: they hold all of it while training goes on."""
        engines: list[Engine] = []
        for optimizer in optimizers:
            driver = checkpoint.driver_of(optimizer)
            if held and (driver is None or not driver.fused):
                raise UsageError(
                    f"use_async=True of a {type(optimizer).__name__} whose states are not castor's "
                    "to hold while it steps; save with use_async=False"
                )
            if driver is not None:
                engines.append(driver.engine)
        if model is not None:
            engines += engines_holding(compiled_from(model))
        if held and not engines:
            raise UsageError(
                f"use_async=True of a {type(model).__name__} that is not in chunks: nothing would "
                "hold its next update back; boost it with GeminiPlugin, or save with "
                "use_async=False"
            )
        return list(dict.fromkeys(engines))

    def _once(
        self,
        model: nn.Module | None,
        work: Callable[[], Result],
        optimizers: Sequence[Optimizer] = (),
    ) -> Result:
        """Runs `work` on one of the ranks that share the model, and returns its result on all."""
        shard_finder = checkpoint.LocalShards(model, optimizers)
        shared = self._shared(model)
        return work() if shared is None else shared.on_first(work, shard_finder)


def _model_of(optimizer: Optimizer, model: nn.Module | None) -> nn.Module | None:
    """Returns the model that names the parameters of an optimizer."""
    step = torch_step_of(optimizer)
    return step.model() if model is None and step is not None else model


def _savers(shared: BoostedModel | None, optimizers: Sequence[Optimizer]) -> RankGroup | None:
    """Returns the ranks that write a checkpoint together; None: rank 0 writes all."""
    if not isinstance(shared, Engine):
        return None
    drivers = [checkpoint.driver_of(optimizer) for optimizer in optimizers]
    fused = all(driver is not None and driver.fused for driver in drivers)
    return shared.savers if fused or shared.model_shards is not None else None
