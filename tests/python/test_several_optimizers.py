"""A model whose parameters are shared out between several optimizers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Muon, Optimizer

import castor
from castor import Booster
from castor.checkpoint import CheckpointInfo
from castor.errors import CheckpointError, NonFiniteGradientError
from helpers import (
    LR,
    Boosted,
    assert_close_losses,
    assert_close_weights,
    assert_same_weights,
    boost,
    copies,
    losses_of_boosted,
    param_bytes,
    plugin,
    tight_memory,
)
from zoo import CASES, gpt2, tower, tower_batch, tower_loss

Optimizers = list[Optimizer]


def muon_and(adam: type[Optimizer]) -> Callable[[nn.Module], Optimizers]:
    """Matrices of the blocks to Muon, all else to the Adam."""

    def make(model: nn.Module) -> Optimizers:
        matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and ".h." in name]
        others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
        assert matrices
        assert others
        return [Muon(matrices, lr=LR), adam(others, lr=LR, weight_decay=0.01)]  # type: ignore[call-arg]

    return make


def halves(model: nn.Module) -> Optimizers:
    return [
        SGD(model.layers.parameters(), lr=1e-2, momentum=0.9),  # type: ignore[union-attr]
        AdamW(model.head.parameters(), lr=LR),  # type: ignore[union-attr]
    ]


def two_adamw(model: nn.Module) -> Optimizers:
    return [
        AdamW(model.layers.parameters(), lr=LR, weight_decay=0.1),  # type: ignore[union-attr]
        AdamW(model.head.parameters(), lr=2 * LR),  # type: ignore[union-attr]
    ]


def one_adamw(model: nn.Module) -> Optimizer:
    groups = [
        {"params": list(model.layers.parameters()), "lr": LR, "weight_decay": 0.1},  # type: ignore[union-attr]
        {"params": list(model.head.parameters()), "lr": 2 * LR},  # type: ignore[union-attr]
    ]
    return AdamW(groups)


def step(booster: Booster | None, optimizers: Optimizers, loss: torch.Tensor) -> float:
    if booster is None:
        loss.backward()
    else:
        booster.backward(loss, optimizers[0])
    for optimizer in optimizers:
        optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad()
    return loss.item()


def language_model() -> nn.Module:
    torch.manual_seed(3)
    return gpt2()


def gpt2_loss(model: nn.Module, seed: int) -> torch.Tensor:
    case = CASES["gpt2"]
    batch = case.batch(seed)
    return case.loss(model(**batch), batch)


def boosted(
    model: nn.Module,
    make: Callable[[nn.Module], Optimizers],
    memory: int | str = 2**30,
    **settings: Any,
) -> tuple[Booster, Optimizers]:
    booster = Booster(plugin=plugin(memory, **settings))
    given = make(model)
    _, optimizers, *_ = booster.boost(model, given)
    assert optimizers is given
    return booster, optimizers


# Muon orthogonalises in bfloat16, which turns the last bits in which torch's Adam and castor's
# differ into its own last ones: with castor's on both sides there is no difference at all.
@pytest.mark.parametrize("max_norm", [0.0, 0.5])
@pytest.mark.parametrize("adam", [AdamW, castor.HybridAdam])
def test_muon_and_adam_train_gpt2_as_plain_pytorch_in_a_tight_budget(
    adam: type[Optimizer], max_norm: float
) -> None:
    plain = language_model()
    optimizers = muon_and(adam)(plain)
    expected = []
    for i in range(20):
        loss = gpt2_loss(plain, i)
        loss.backward()
        if max_norm:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        expected.append(loss.item())

    model = language_model()
    memory = tight_memory(language_model, gpt2_loss)
    booster, optimizers = boosted(model, muon_and(adam), memory, max_norm=max_norm)
    losses = [step(booster, optimizers, gpt2_loss(model, i)) for i in range(20)]
    assert_close_losses(losses, expected)
    assert_close_weights(model, plain)
    if adam is castor.HybridAdam and not max_norm:
        assert losses == expected
        assert_same_weights(model, copies(plain.parameters()))
    report = booster.report(model)
    assert report.peak_device_bytes <= memory
    assert report.steps == 20
    assert report.divergent_steps == 0
    shown = optimizers[1].state[model.get_parameter("transformer.wte.weight")]
    assert shown.keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_only_what_the_rule_updates_has_states_in_chunks() -> None:
    one, other = tower(), tower()
    alone, _ = boosted(one, lambda model: [AdamW(model.parameters(), lr=LR)])
    shared, _ = boosted(other, halves)
    spared = alone.report(one).host_bytes - shared.report(other).host_bytes
    assert spared == pytest.approx(2 * param_bytes(other.layers), rel=0.02)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_two_fused_ones_take_the_steps_of_one_with_two_groups(precision: str) -> None:
    settings = {"precision": precision, "max_norm": 0.3, "chunk_bytes": "8KiB"}
    settings |= {"initial_scale": 256.0, "growth_interval": 3} if precision == "fp16" else {}
    expected = tower()
    reference = boost(expected, "96KiB", one_adamw(expected), **settings)
    losses = losses_of_boosted(reference, tower_loss, steps=6)
    model = tower()
    booster, optimizers = boosted(model, two_adamw, "96KiB", **settings)
    assert [step(booster, optimizers, tower_loss(model, i)) for i in range(6)] == losses
    assert_same_weights(model, copies(expected.parameters()))
    assert booster.report(model).steps == 6


def test_each_may_step_when_it_likes_and_in_any_order() -> None:
    plain, model = tower(), tower()
    theirs = halves(plain)
    booster, ours = boosted(model, halves, "96KiB", max_norm=0.3, chunk_bytes="8KiB")
    for i in range(8):
        order = (0, 1) if i % 3 else (1, 0)
        for one, params, optimizers in ((None, plain, theirs), (booster, model, ours)):
            loss = tower_loss(params, i)
            if one is None:
                loss.backward()
                torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
            else:
                one.backward(loss, optimizers[0])
            for k in order:
                if k == 0 or i % 2:
                    optimizers[k].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
    assert_close_weights(model, plain)
    assert booster.report(model).steps == 8


def test_one_that_steps_alone_sees_the_gradients_of_its_own_pass() -> None:
    plain, model = tower(), tower()
    theirs = two_adamw(plain)
    booster, ours = boosted(model, two_adamw, max_norm=0.1)
    for i in range(6):  # in turn, as a generator's and its critic's
        loss = tower_loss(plain, i)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        theirs[i % 2].step()
        plain.zero_grad()
        booster.backward(tower_loss(model, i), ours[i % 2])
        ours[i % 2].step()
        model.zero_grad()
    assert_close_weights(model, plain)


@pytest.mark.parametrize("make", [halves, two_adamw])
def test_a_gradient_that_is_not_finite_makes_all_skip_and_counts_once(
    make: Callable[[nn.Module], Optimizers],
) -> None:
    model = tower()
    booster, optimizers = boosted(model, make)
    step(booster, optimizers, tower_loss(model, 0))
    before = copies(model.parameters())
    with pytest.warns(RuntimeWarning, match="skipped an optimizer step") as told:
        step(booster, optimizers, tower_loss(model, 1) * float("inf"))
    assert [Path(warning.filename).name for warning in told] == [Path(__file__).name]
    assert_same_weights(model, before)
    assert booster.report(model).skipped_steps == 1
    step(booster, optimizers, tower_loss(model, 2))
    assert booster.report(model).steps == 3

    model = tower()
    booster, optimizers = boosted(model, make, nonfinite="raise")
    with pytest.raises(NonFiniteGradientError):
        step(booster, optimizers, tower_loss(model, 1) * float("nan"))


@pytest.mark.parametrize("activations", ["auto", "recompute", "offload"])
def test_activations_are_planned_beside_them(activations: str) -> None:
    model = language_model()
    booster, optimizers = boosted(model, muon_and(castor.HybridAdam))
    expected = [step(booster, optimizers, gpt2_loss(model, i)) for i in range(4)]
    ample = booster.report(model).peak_device_bytes
    model = language_model()
    memory = int(0.7 * ample)
    booster, optimizers = boosted(
        model, muon_and(castor.HybridAdam), memory, activations=activations
    )
    assert [step(booster, optimizers, gpt2_loss(model, i)) for i in range(4)] == expected
    report = booster.report(model)
    assert report.peak_device_bytes <= memory
    assert report.recomputed_blocks + report.offloaded_blocks > 0
    assert report.divergent_steps == 0


def test_a_parameter_that_none_holds_is_named() -> None:
    model = tower()
    with pytest.warns(UserWarning, match=r"the optimizers do not hold 1 .*'layers\.0\.bias'"):
        boosted(
            model,
            lambda model: [
                AdamW([p for n, p in model.layers.named_parameters() if n != "0.bias"]),
                SGD(model.head.parameters(), lr=0.1),
            ],
        )
    model(**tower_batch(0)).backward()


def test_a_step_of_ones_own_is_not_beside_forward() -> None:
    with pytest.raises(NotImplementedError, match=r"overlap='forward' .*SGD .*its own step"):
        boosted(tower(), halves, overlap="forward")


def test_settings_that_take_one_optimizer_say_so(tmp_path: Path) -> None:
    for settings in ({"overlap": "forward"}, {"nvme_path": tmp_path}):
        with pytest.raises(NotImplementedError, match=r"boost was given 2 \(AdamW, AdamW\)"):
            boosted(tower(), two_adamw, **settings)
    model = tower()
    twice = [AdamW(model.parameters()), SGD(model.head.parameters(), lr=0.1)]
    with pytest.raises(castor.UsageError, match=r"two optimizers hold parameter 'head\.weight'"):
        Booster(plugin=plugin()).boost(model, twice)
    with pytest.raises(TypeError, match="optimizer is a str"):
        Booster(plugin=plugin()).boost(model, [twice[0], "SGD"])  # type: ignore[list-item]
    for formats in (("split", "split_bf16"),):
        adams = [
            castor.HybridAdam(part.parameters(), optim_state_format=one)
            for part, one in zip((model.layers, model.head), formats, strict=True)
        ]
        with pytest.raises(ValueError, match=r"HybridAdam\(optim_state_format='split'\) and Hybr"):
            Booster(plugin=plugin(precision="bf16")).boost(model, adams)
    assert isinstance(boost(model), Boosted)


@pytest.mark.parametrize("make", [halves, two_adamw])
def test_a_run_resumes_bitwise(make: Callable[[nn.Module], Optimizers], tmp_path: Path) -> None:
    model = tower()
    booster, optimizers = boosted(model, make)
    for i in range(3):
        step(booster, optimizers, tower_loss(model, i))
    booster.save(tmp_path / "run", model, optimizers)
    expected = [step(booster, optimizers, tower_loss(model, i)) for i in range(3, 6)]

    resumed = tower()
    booster, optimizers = boosted(resumed, make, "96KiB", chunk_bytes="8KiB")
    info = booster.load(tmp_path / "run", resumed, optimizers)
    assert isinstance(info, CheckpointInfo)
    assert info.step == 3
    assert [step(booster, optimizers, tower_loss(resumed, i)) for i in range(3, 6)] == expected
    assert_same_weights(resumed, copies(model.parameters()))

    with pytest.raises(castor.UsageError, match="boosted with 2 optimizers, and 1 of them"):
        booster.save(tmp_path / "half", resumed, optimizers[0])
    with pytest.raises(castor.UsageError, match="boosted with 2 optimizers, and 1 of them"):
        booster.load(tmp_path / "run", resumed, optimizers[:1])
    alone = boost(tower())
    with pytest.raises(CheckpointError, match="saved with 2 optimizers, and 1 were given"):
        alone.booster.load(tmp_path / "run", alone.model, alone.optimizer)
    more = tower()
    booster, seven = boosted(
        more,
        lambda model: [AdamW(part.parameters(), lr=LR) for part in (*model.layers, model.head)],
    )
    with pytest.raises(CheckpointError, match="saved with 2 optimizers, and 7 were given"):
        booster.load(tmp_path / "run", more, seven)
    booster.save(tmp_path / "more", more, seven)
    with pytest.raises(CheckpointError, match="saved with 7 optimizers, and 2 were given"):
        booster.load(tmp_path / "more", resumed, optimizers)

    for i, one in enumerate(optimizers):  # each also by itself
        booster.save_optimizer(one, tmp_path / f"own{i}")
        booster.load_optimizer(one, tmp_path / f"own{i}")


def test_models_of_one_wrapper_have_optimizers_of_their_own(tmp_path: Path) -> None:
    pair = nn.ModuleList([tower(), tower()])
    parts = [boosted(one, two_adamw if i else halves) for i, one in enumerate(pair)]
    every = [optimizer for _, optimizers in parts for optimizer in optimizers]
    booster = parts[0][0]
    booster.save(tmp_path / "run", pair, every, step=1)
    assert booster.load(tmp_path / "run", pair, every).step == 1
    with pytest.raises(castor.UsageError, match="boosted with 2 optimizers, and 1 of them"):
        booster.save(tmp_path / "run", pair, every[:3], step=2)


def test_backward_takes_one_of_them() -> None:
    model = tower()
    optimizers = two_adamw(model)
    booster = Booster(plugin=plugin())
    booster.boost(model, optimizers)
    loss = tower_loss(model, 0)
    with pytest.raises(castor.UsageError, match="was given 2 optimizers: give one of them"):
        booster.backward(loss, optimizers)  # type: ignore[arg-type]
    booster.backward(loss, optimizers[1])
