"""Code that the plugins of torch's own classes share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from castor.config.declared import values_of
from castor.config.settings import StepSettings
from castor.distributed import data_rank_and_size
from castor.errors import UsageError
from castor.lazy import Materialisation, check_inactive
from castor.optim.torch_step import step_of
from castor.plugins.by_name import PLUGIN_ARGUMENTS
from castor.plugins.data_parallel import describe_optimizers, loader_of_rank
from castor.plugins.machine import check_own_gpus, choose_torch_device
from castor.runtime.boosted_model import check_not_boosted
from castor.runtime.device_groups import DeviceBackend, backend_of, end_unused_groups
from castor.runtime.input_cast import InputCast
from castor.runtime.memory_sharing import Aliases
from castor.runtime.parallel_dims import ONE_RANK
from castor.runtime.rank_group import RankGroup
from castor.runtime.ranks import describe_parameters, rank_and_size
from castor.runtime.spec import ModelSpec, check_distinct_memory


def check_precision(value: object, name: str) -> None:
    """Raises ValueError or NotImplementedError unless torch's classes train in a precision."""
    if value == "fp16":
        raise NotImplementedError(
            "precision='fp16' needs a loss scale, which plugins of torch's own classes do not "
            "have: use 'bf16', or GeminiPlugin"
        )
    if value not in ("fp32", "bf16"):
        raise ValueError(f"{name} is {value!r}; give 'fp32' or 'bf16'")


def only_neutral(
    neutral: Mapping[str, tuple[object, str]],
) -> Callable[[type, dict[str, Any]], None]:
    """Returns what refuses the arguments that a plugin does not take.

    Args:
        neutral: Known arguments of Colossal-AI's plugin that do nothing here, by name: the value
            that asks for nothing, and what to do instead.
    """

    def check(plugin: type, arguments: dict[str, Any]) -> None:
        name = plugin.__name__
        for argument, value in arguments.items():
            if argument in neutral:
                asks_for_nothing, instead = neutral[argument]
                if value != asks_for_nothing:
                    raise NotImplementedError(
                        f"{argument} may only be {asks_for_nothing!r} in {name}: {instead}"
                    )
            elif argument in PLUGIN_ARGUMENTS:
                raise TypeError(
                    f"{name} has no argument {argument!r}: it is for castor's chunks, and torch's "
                    "own classes train here; leave it out, or use GeminiPlugin"
                )
            else:
                raise TypeError(f"{name} has no argument {argument!r}")

    return check


@dataclass(frozen=True, kw_only=True)
class TorchSettings(StepSettings):
    """Settings that TorchDDPPlugin and TorchFSDPPlugin have in common."""

    device: str
    """Type of the ranks' devices: "cpu" or "cuda"."""
    precision: str

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """Type that passes compute in; None: the parameters' own float32."""
        return torch.bfloat16 if self.precision == "bf16" else None


class TorchPlugin:
    """Base of plugins in which torch's own classes train; castor adds its loop and files."""

    scales_loss = False
    """No precision of these plugins needs a loss scale."""

    def _resolve(
        self, arguments: StepSettings, device: str | torch.device | None, precision: str
    ) -> None:
        """Chooses this rank's device, and makes the settings of the arguments.

        Raises:
            NotImplementedError: The device is neither a CPU nor a CUDA GPU.
            UsageError: There is no such GPU, or none for this rank, or this torch has no CUDA.
        """
        self.device = choose_torch_device(device)
        """Device of this rank; a GPU with its index."""
        self.settings = TorchSettings(
            **values_of(arguments, StepSettings), device=self.device.type, precision=precision
        )

    def prepare_dataloader(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = False,
        **options: Any,
    ) -> DataLoader[Any]:
        """See GeminiPlugin.prepare_dataloader: the same samples in the same order."""
        options |= {"shuffle": shuffle, "seed": seed, "drop_last": drop_last}
        place = data_rank_and_size(ONE_RANK)
        return loader_of_rank(dataset, place, batch_size=batch_size, **options)

    def _check(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Checks that this process can boost the model and its optimizers; changes nothing."""
        check_inactive()
        check_not_boosted(model)
        for optimizer in optimizers:
            kind = type(optimizer).__name__
            if step_of(optimizer) is not None:
                raise UsageError(f"this {kind} is boosted already; use what boost returned")
            if isinstance(optimizer, torch.optim.LBFGS):
                raise NotImplementedError(
                    "LBFGS evaluates the model inside step; castor cannot run it"
                )

    def _join(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> RankGroup | None:
        """Returns the ranks that share the model; None: this process is alone.

        Checks that all ranks were given the same, and changes nothing. Collective.

        Raises:
            UsageError: Two ranks differ, or compute on one GPU, or torch has no backend for their
                GPUs.
        """
        if rank_and_size()[1] == 1:
            return None
        ranks = RankGroup.of_all_ranks(sends_tensors=False)
        ranks.check_equal(
            {
                **describe_parameters(model),
                "the plugin": type(self).__name__,
                "its settings": self.settings,
                **describe_optimizers(model, optimizers),
            }
        )
        if self.device.type != "cpu":
            check_own_gpus(self.device, ranks.all_gather_object)
            end_unused_groups(ranks.all_gather_object)
            self._device_backend(ranks)
        return ranks

    def _device_backend(self, ranks: RankGroup | None) -> DeviceBackend:
        """Returns torch's backend that sends memory of the ranks' GPUs. Collective."""
        found = DeviceBackend.find(self.device, ranks.all_gather_object if ranks else _of_one)
        if found is None:
            missing = backend_of(self.device) is None
            raise UsageError(
                f"{type(self).__name__} sends memory of GPUs between ranks, "
                + (
                    f"for which torch {torch.__version__} has no backend (NCCL): install a torch "
                    "that has it, or pass device='cpu'"
                    if missing
                    else 'which CASTOR_DEVICE_LINK="host" forbids: unset it, or use GeminiPlugin'
                )
            )
        return found

    def _give_values(self, model: nn.Module) -> None:
        """Gives lazy tensors their values, and converts all parameters to float32.

        Raises:
            UsageError: A parameter cannot be trained; the model is unchanged.
        """
        lazy = Materialisation(model)
        try:
            params = ModelSpec.of(model).params
        except BaseException:
            lazy.cancel()
            raise

        def finish(param: nn.Parameter, values: torch.Tensor) -> None:
            param.data = values

        lazy.run(lambda _param, _dtype: None, finish)
        for param in params:
            if param.dtype != torch.float32:
                param.data = param.data.float()

    def _take_device(self) -> None:
        """Makes this rank's GPU torch's current device; does nothing on the CPU."""
        if self.device.type != "cpu":
            torch.get_device_module(self.device).set_device(self.device)

    def _move(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Moves a model and its optimizers' states to this rank's GPU; does nothing on the CPU.

        Parameters and buffers stay the same objects. From now on forwards move their inputs.

        Raises:
            UsageError: Two parameters share memory; the model is unchanged.
        """
        if self.device.type == "cpu":
            return
        spec = ModelSpec.of(model)
        check_distinct_memory(spec)
        aliases = Aliases(model, spec)
        follow = set(map(id, aliases.tensors))
        for param in spec.params:
            grad = param.grad
            param.data = param.data.to(self.device)
            if grad is not None:
                param.grad = grad.to(self.device)
        for buffer in model.buffers():
            if id(buffer) not in follow:
                buffer.data = buffer.data.to(self.device)
        aliases.follow()
        for optimizer in optimizers:
            _move_states(optimizer)
        model.register_forward_pre_hook(InputCast(torch.float32, self.device), with_kwargs=True)


def _of_one(value: Any) -> list[Any]:
    """Gathers values in a process that is alone."""
    return [value]


def _move_states(optimizer: Optimizer) -> None:
    """Moves an optimizer's states to its parameters' devices, as Optimizer.load_state_dict does."""
    for group in optimizer.param_groups:
        steps_on_device = group.get("capturable") or group.get("fused")
        for param in group["params"]:
            state = optimizer.state.get(param, {})
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and (key != "step" or steps_on_device):
                    state[key] = value.to(param.device)
