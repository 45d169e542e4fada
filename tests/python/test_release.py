"""Models that castor is taken off: they and their optimizers are ordinary again."""

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import castor
from castor.runtime.engine import engine_of
from helpers import LR, Boosted, assert_same_weights, boost, copies, go_on
from zoo import CASES, tower, tower_batch

TIGHT = "160KiB"


def plain_steps(model: Any, optimizer: Any, first: int, steps: int = 3) -> list[float]:
    losses = []
    for seed in range(first, first + steps):
        loss = model(**tower_batch(seed, width=32))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_ordinary(model: nn.Module, optimizer: Any) -> None:
    """Nothing of castor's is on them."""
    untouched = tower()
    for mine, other in zip(model.modules(), untouched.modules(), strict=True):
        for name, value in vars(other).items():
            if name.endswith("hooks") or "_hooks_" in name:
                assert len(vars(mine)[name]) == len(value), name
        assert "forward" not in vars(mine)
    assert "castor" not in type(optimizer).step.__module__
    assert not hasattr(optimizer, "_castor")


@pytest.mark.parametrize("where", ["memory", "tight", "resident", "NVMe", "forward", "backward"])
def test_training_goes_on_as_that_of_a_copy(where: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "memory": {},
        "tight": {"memory": TIGHT},
        "resident": {"placement_policy": "cuda"},
        "NVMe": {"nvme_path": tmp_path, "nvme_offload_fraction": 1.0, "host_memory": "400KiB"},
        "forward": {"overlap": "forward"},
        "backward": {
            "overlap": "backward", "nonfinite": "ignore", "enable_gradient_accumulation": False,
        },
    }[where]  # fmt: skip
    boosted = boost(tower(), **settings)
    go_on(boosted, 0, 3)
    model, optimizer = copy.deepcopy((boosted.model, boosted.optimizer))
    expected = plain_steps(model, optimizer, 3)
    session = weakref.ref(engine_of(boosted.model).session)
    boosted.booster.release(boosted.model)
    gc.collect()
    assert session() is None
    assert not list(tmp_path.iterdir())
    assert_ordinary(boosted.model, boosted.optimizer)
    assert plain_steps(boosted.model, boosted.optimizer, 3) == expected
    assert_same_weights(boosted.model, copies(model.parameters()))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_masters_stay_where_the_optimizer_can_hold_them(precision: str) -> None:
    model = tower()
    optimizer = castor.HybridAdam(model.parameters(), lr=LR)
    boosted = boost(model, optimizer=optimizer, precision=precision, initial_scale=256.0)
    go_on(boosted, 0, 3)
    twin = copy.deepcopy((boosted.model, boosted.optimizer))
    boosted.booster.release(boosted.model)
    batches = [tower_batch(seed, width=32) for seed in range(3, 6)]
    for either, optimizer in (twin, (boosted.model, boosted.optimizer)):
        for batch in batches:
            inputs = {k: v.to(either.layers[0].weight.dtype) if v.is_floating_point() else v
                      for k, v in batch.items()}  # fmt: skip
            either(**inputs).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(boosted.model, copies(twin[0].parameters()))


def test_masters_are_not_dropped_without_a_word() -> None:
    boosted = boost(tower(), precision="bf16")
    go_on(boosted, 0, 2)
    with pytest.raises(castor.UsageError, match=r"^released, this boosted AdamW would lose the"):
        boosted.booster.release(boosted.model)
    go_on(boosted, 2, 1)  # nothing was changed
    boosted.booster.release(boosted.model, drop_states=True)
    assert not boosted.optimizer.state
    assert boosted.model.layers[0].weight.dtype == torch.bfloat16
    assert type(boosted.optimizer) is torch.optim.AdamW


@pytest.mark.parametrize("made", ["before", "after"])
def test_schedulers_stay(made: str) -> None:
    model = tower()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    schedulers = [LambdaLR(optimizer, lambda step: 1 / (step + 1))] if made == "before" else []
    boosted = boost(model, optimizer=optimizer)
    schedulers = schedulers or [LambdaLR(optimizer, lambda step: 1 / (step + 1))]
    go_on(boosted, 0, 1)
    schedulers[0].step()
    boosted.booster.release(model)
    plain_steps(model, optimizer, 1, 1)
    schedulers[0].step()  # warns where it has not seen the step
    assert optimizer.param_groups[0]["lr"] == pytest.approx(LR / 3)


@pytest.mark.parametrize("activations", ["recompute", "offload", "auto", "recompute+tile:2"])
def test_forwards_are_the_models_own_again(activations: str) -> None:
    case = CASES["llama"]
    model: Any = case.model()
    model.activation_checkpointing_enable()
    before = [dict(vars(module)) for module in model.model.layers.modules()]
    with pytest.warns(UserWarning, match="gradient checkpointing gives way"):
        boosted = boost(model, activations=activations, tile_logits=8)
    for seed in range(2):
        boosted.step(case.loss(model(**case.batch(seed)), case.batch(seed)))
    boosted.booster.release(model)
    assert "forward" not in vars(model.lm_head)
    for module, own in zip(model.model.layers.modules(), before, strict=True):
        for name in ("forward", "gradient_checkpointing", "_gradient_checkpointing_func"):
            assert vars(module).get(name) is own.get(name)
    case.loss(model(**case.batch(2)), case.batch(2)).backward()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_released_model_may_be_changed_and_boosted_anew() -> None:
    peft = pytest.importorskip("peft")
    case = CASES["llama"]
    base: Any = case.model()
    expected: Any = copy.deepcopy(base)
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], r=2))
    boosted = boost(model)
    for seed in range(2):
        boosted.step(case.loss(model(**case.batch(seed)), case.batch(seed)))
    boosted.booster.release(model)
    boosted.booster.release(boost(expected).model)
    merged = model.merge_and_unload()
    assert type(merged) is type(expected)
    merged.requires_grad_(True)
    optimizer = torch.optim.AdamW(merged.parameters(), lr=LR)
    again = boost(merged, optimizer=optimizer, max_norm=1.0)
    with pytest.raises(castor.UsageError, match="is boosted already"):
        boost(merged)
    again.step(case.loss(merged(**case.batch(3)), case.batch(3)))
    merged.extra = 1
    again.booster.release(merged)
    merged.layer = nn.Linear(2, 2)


def test_several_optimizers_are_all_released() -> None:
    model = tower()
    parts = [list(model.layers.parameters()), list(model.head.parameters())]
    optimizers = [
        torch.optim.AdamW(parts[0], lr=LR),
        torch.optim.SGD(parts[1], lr=LR, momentum=0.9),
    ]
    booster = castor.Booster(castor.GeminiPlugin(device="cpu", device_memory="64MiB"))
    booster.boost(model, optimizers)
    for seed in range(2):
        booster.backward(model(**tower_batch(seed, width=32)), optimizers[0])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    momentum = [optimizers[1].state[param]["momentum_buffer"].clone() for param in parts[1]]
    booster.release(model)
    assert [type(optimizer) for optimizer in optimizers] == [torch.optim.AdamW, torch.optim.SGD]
    for param, expected in zip(parts[1], momentum, strict=True):
        assert torch.equal(optimizers[1].state[param]["momentum_buffer"], expected)


def test_what_is_not_boosted_cannot_be_released() -> None:
    boosted: Boosted = boost(tower())
    booster = boosted.booster
    with pytest.raises(castor.UsageError, match="is not boosted"):
        booster.release(tower())
    booster.release(boosted.model)
    with pytest.raises(castor.UsageError, match="is not boosted"):
        booster.release(boosted.model)
    with pytest.raises(castor.UsageError, match="is not boosted"):
        booster.report(boosted.model)
