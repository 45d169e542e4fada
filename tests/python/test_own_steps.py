"""Optimizers that no rule runs step float32 copies on the host: in 16 bits, and on a GPU."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, Adagrad, AdamW, Muon, Optimizer, RMSprop
from torch.utils._python_dispatch import TorchDispatchMode

import castor
import rank_cases
from helpers import (
    LR,
    Boosted,
    assert_same_weights,
    boost,
    copies,
    losses_of_boosted,
    plugin,
)
from rank_processes import assert_go_on_as_one
from zoo import CASES, gpt2, tower, tower_batch

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Counting(Optimizer):
    """Somebody's own: it counts its steps in the group, and looks at all parameters at once."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": LR, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            largest = max(
                param.grad.abs().max() for param in group["params"] if param.grad is not None
            )
            for param in group["params"]:
                if param.grad is not None:
                    seen = self.state[param].setdefault("seen", torch.zeros_like(param))
                    seen.add_(param.grad / largest)
                    param.sub_(seen, alpha=group["lr"] / group["k"])


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "adafactor": lambda params: Adafactor(params, lr=1e-2),
    "adagrad": lambda params: Adagrad(params, lr=1e-2),
    "amsgrad": lambda params: AdamW(params, lr=LR, amsgrad=True),
    "rmsprop": lambda params: RMSprop(params, lr=1e-3, momentum=0.5, centered=True),
    "own": Counting,
}
ALL = OPTIMIZERS | {"muon": lambda params: Muon([p for p in params if p.ndim == 2], lr=LR)}


def tower_loss(model: nn.Module, seed: int) -> torch.Tensor:
    """In float32, of inputs that the model may take as they are."""
    batch = tower_batch(seed)
    first = next(model.parameters())
    logits = model(batch["x"].to(first.device, first.dtype))
    return nn.functional.cross_entropy(logits.float(), batch["labels"].to(first.device))


def of_type(precision: str) -> nn.Module:
    return tower().to(TYPES[precision])


def train_plain(
    model: nn.Module,
    make: Callable[[list[nn.Parameter]], Optimizer],
    steps: int,
    scale: Callable[[list[nn.Parameter]], float] = lambda _: 1.0,
) -> list[float]:
    """Float32 masters beside a model in 16 bits, by hand."""
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = make(masters)
    losses = []
    for i in range(steps):
        loss = tower_loss(model, i)
        loss.backward()
        losses.append(loss.item())
        for param, master in zip(model.parameters(), masters, strict=True):
            master.grad = param.grad.float()  # type: ignore[union-attr]
        factor = scale(masters)
        for master in masters:
            master.grad.mul_(factor)  # type: ignore[union-attr]
        optimizer.step()
        model.zero_grad()
        with torch.no_grad():
            for param, master in zip(model.parameters(), masters, strict=True):
                param.copy_(master)
    return losses


def boosted(precision: str, name: str, memory: int | str = 2**30, **settings: Any) -> Boosted:
    model = of_type(precision)
    optimizer = ALL[name](list(model.parameters()))
    return boost(model, memory, optimizer, precision=precision, **settings)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_in_bf16_are_those_of_masters_by_hand(name: str) -> None:
    plain = of_type("bf16")
    expected = train_plain(plain, OPTIMIZERS[name], 6)
    mine = boosted("bf16", name, chunk_bytes="8KiB")
    assert losses_of_boosted(mine, tower_loss, steps=6) == expected
    assert_same_weights(mine.model, copies(plain.parameters()))
    state = mine.optimizer.state
    for param in mine.model.parameters():
        master = state[param]["master"]
        assert master.dtype == torch.float32
        assert torch.equal(master.bfloat16(), param.detach().cpu())
        assert all(
            value.dtype == torch.float32
            for value in state[param].values()
            if torch.is_tensor(value)
        )
    groups = mine.optimizer.param_groups
    assert [group.get("k", 6) for group in groups] == [6] * len(groups)
    assert all(map(torch.equal, (p for g in groups for p in g["params"]), mine.model.parameters()))


def test_clipping_and_loss_scales_are_of_float32_gradients() -> None:
    def clip(masters: list[nn.Parameter]) -> float:
        norm = torch.stack([m.grad.double().norm() for m in masters]).norm().item()  # type: ignore[union-attr]
        return min(1.0, 0.05 / (norm + 1e-6))

    for precision in ("bf16", "fp16"):
        plain = of_type(precision)
        expected = train_plain(plain, OPTIMIZERS["amsgrad"], 6, clip)
        scale = {"initial_scale": 1.0, "growth_interval": 1000} if precision == "fp16" else {}
        mine = boosted(precision, "amsgrad", max_norm=0.05, **scale)
        losses = losses_of_boosted(mine, tower_loss, steps=6)
        assert losses == pytest.approx(expected, rel=1e-3)
        for param, other in zip(mine.model.parameters(), plain.parameters(), strict=True):
            assert (param.cpu().float() - other.float()).norm() <= 1e-3 * other.float().norm()


def test_fp16_scales_losses_and_skips_what_overflows() -> None:
    mine = boosted("fp16", "adafactor", initial_scale=2.0**10)
    before = copies(mine.model.parameters())
    with pytest.warns(RuntimeWarning, match="skipped an optimizer step"):
        mine.step(tower_loss(mine.model, 0) * 1e6)
    assert_same_weights(mine.model, before)
    assert not mine.optimizer.state
    mine.step(tower_loss(mine.model, 0))
    assert not torch.equal(next(mine.model.parameters()).cpu(), before[0])


def gpt2_in_bf16() -> nn.Module:
    torch.manual_seed(3)
    return gpt2().bfloat16()


def gpt2_loss(model: nn.Module, seed: int) -> torch.Tensor:
    case = CASES["gpt2"]
    batch = {key: value.to(model.device) for key, value in case.batch(seed).items()}  # type: ignore[arg-type]
    return case.loss(model(**batch), batch)


def test_muon_and_adam_train_in_bf16() -> None:
    """Of one model, the one by its own step, the other by the rule, beside each other."""

    def shared_out(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        named = list(model.named_parameters())
        matrices = [p for name, p in named if p.ndim == 2 and ".h." in name]
        return matrices, [p for name, p in named if p.ndim != 2 or ".h." not in name]

    plain = gpt2_in_bf16()
    matrices, others = shared_out(plain)
    masters = [nn.Parameter(p.detach().float()) for p in matrices]
    muon, adam = Muon(masters, lr=LR), castor.HybridAdam(others, lr=LR)
    expected = []
    for i in range(5):
        loss = gpt2_loss(plain, i)
        loss.backward()
        expected.append(loss.item())
        for param, master in zip(matrices, masters, strict=True):
            master.grad = param.grad.float()  # type: ignore[union-attr]
        muon.step()
        adam.step()
        plain.zero_grad()
        with torch.no_grad():
            for param, master in zip(matrices, masters, strict=True):
                param.copy_(master)

    model = gpt2_in_bf16()
    matrices, others = shared_out(model)
    optimizers: list[Optimizer] = [Muon(matrices, lr=LR), castor.HybridAdam(others, lr=LR)]
    booster = castor.Booster(plugin=plugin(precision="bf16", optim_state_format="fp32"))
    booster.boost(model, optimizers)
    for i in range(5):
        loss = gpt2_loss(model, i)
        booster.backward(loss, optimizers[0])
        assert loss.item() == expected[i]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(model, copies(plain.parameters()))
    assert booster.report(model).divergent_steps == 0


def test_weights_that_are_written_become_their_masters() -> None:
    mine = boosted("bf16", "rmsprop")
    mine.step(tower_loss(mine.model, 0))
    param = next(mine.model.parameters())
    with torch.no_grad():
        param[0].fill_(0.375)
    before = mine.optimizer.state[param]["master"].clone()
    mine.step(tower_loss(mine.model, 1))
    master = mine.optimizer.state[param]["master"]
    assert (master[0] - 0.375).abs().max() <= 0.05
    assert (master[1:] - before[1:]).abs().max() <= 0.05


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_run_resumes_bitwise(precision: str, tmp_path: Path) -> None:
    scale = {"initial_scale": 16.0} if precision == "fp16" else {}
    mine = boosted(precision, "rmsprop", **scale)
    losses_of_boosted(mine, tower_loss, steps=3)
    mine.booster.save(tmp_path / "run", mine.model, mine.optimizer)
    state = copy.deepcopy(mine.optimizer.state_dict())
    for i in (3, 4):
        mine.step(tower_loss(mine.model, i))
    again = boosted(precision, "rmsprop", **scale)
    again.booster.load(tmp_path / "run", again.model, again.optimizer)
    for param, entry in zip(
        again.model.parameters(), again.optimizer.state_dict()["state"].values(), strict=True
    ):
        for key, value in entry.items():
            assert value.dtype == torch.float32, (key, param.shape)
    for i in (3, 4):
        again.step(tower_loss(again.model, i))
    assert_same_weights(again.model, copies(mine.model.parameters()))

    again.booster.load(tmp_path / "run", again.model)
    again.optimizer.load_state_dict(state)
    for i in (3, 4):
        again.step(tower_loss(again.model, i))
    assert_same_weights(again.model, copies(mine.model.parameters()))


def test_a_copy_that_would_lose_masters_is_refused() -> None:
    mine = boosted("bf16", "rmsprop")
    mine.step(tower_loss(mine.model, 0))
    with pytest.raises(castor.UsageError, match=r"RMSprop would lose the float32 masters of its"):
        copy.deepcopy(mine.optimizer)


def test_hybrid_adam_steps_itself_beside_a_rule_of_more() -> None:
    model = of_type("bf16")
    first, *rest = model.layers  # type: ignore[misc, union-attr]
    optimizers: list[Optimizer] = [
        SGD(first.parameters(), lr=0.1),
        SGD([p for layer in rest for p in layer.parameters()], lr=0.1),
        castor.HybridAdam(model.head.parameters(), lr=LR),  # type: ignore[union-attr]
    ]
    plain = of_type("bf16")
    adam = castor.HybridAdam(plain.head.parameters(), lr=LR)  # type: ignore[union-attr]
    booster = castor.Booster(plugin=plugin(precision="bf16"))
    booster.boost(model, optimizers)
    booster.backward(tower_loss(model, 0), optimizers[0])
    tower_loss(plain, 0).backward()
    for optimizer in (*optimizers, adam):
        optimizer.step()
    assert_same_weights(model.head, copies(plain.head.parameters()))  # type: ignore[union-attr, arg-type]


@pytest.mark.filterwarnings("ignore:the optimizer does not hold")
@pytest.mark.cpu_device("it is compared with it")
@pytest.mark.parametrize("name", ALL)
def test_on_a_simulated_gpu(simulated: Any, name: str) -> None:
    """As on the CPU device, where fp32 parameters are stepped where they are."""
    for precision in ("fp32", "bf16"):
        expected = boosted(precision, name)
        losses = losses_of_boosted(expected, tower_loss, steps=4)
        model = of_type(precision)
        optimizer = ALL[name](list(model.parameters()))
        settings: dict[str, Any] = {"precision": precision, "chunk_bytes": 2**13}
        mine = simulated.boost(model, 2**20, optimizer=optimizer, **settings)
        assert losses_of_boosted(mine, tower_loss, steps=4) == losses
        assert_same_weights(mine.model, copies(expected.model.parameters()))
        for entry in mine.optimizer.state.values():
            assert {v.device.type for v in entry.values() if torch.is_tensor(v)} == {"cpu"}


class Leaving(TorchDispatchMode):
    """Counts the elements of matrices that operators copy from a device to the host."""

    numel = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and found.device.type == "cpu":
            given = args[0]
            self.numel += given.numel() if given.ndim == 2 and given.device != found.device else 0
        return found  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:the optimizer does not hold")
@pytest.mark.parametrize("simulated", ["gpu, seed 1"], indirect=True)
@pytest.mark.parametrize(("precision", "leave"), [("fp32", 1), ("bf16", 2)])
def test_muon_steps_resident_matrices_on_the_device(
    simulated: Any, precision: str, leave: int
) -> None:
    """Only its momentum goes to the host, and in 16 bits the master."""
    model = of_type(precision)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    settings: dict[str, Any] = {"precision": precision, "placement_policy": "cuda"}
    mine = simulated.boost(model, optimizer=Muon(matrices, lr=LR), **settings)
    for i in range(3):
        mine.booster.backward(tower_loss(mine.model, i), mine.optimizer)
        with Leaving() as leaving:
            mine.optimizer.step()
        mine.optimizer.zero_grad()
        assert leaving.numel == leave * sum(p.numel() for p in matrices)


def test_ranks_save_and_go_on_as_one_process(tmp_path: Path) -> None:
    """Each steps all; the mean of equal gradients is each."""
    assert_go_on_as_one(rank_cases.steps_of_ones_own, tmp_path)
