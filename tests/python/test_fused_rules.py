"""SGD and Lion on chunks: the bits of torch's own steps, wherever their states are."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR
from transformers import GPT2Config, GPT2LMHeadModel

import castor
import rank_cases
from castor import Booster, HybridAdam
from castor.checkpoint.convert import convert
from castor.estimate import Workload, estimate
from castor.optim import Lion
from castor.runtime.engine import engine_of
from estimating import SMALL, small_machine, write
from fused_optimizers import MAKERS, Make, boosted_with, states_of
from helpers import (
    Boosted,
    assert_close_losses,
    assert_close_weights,
    assert_equal,
    assert_same_weights,
    boost,
    copies,
    go_on,
    param_bytes,
    plain_steps,
    plugin,
)
from rank_processes import assert_go_on_as_one
from zoo import tower, tower_batch, tower_loss

TIGHT = {"memory": "32KiB", "chunk_bytes": "8KiB"}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """With momentum and without."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    return [
        {"params": decayed, "momentum": 0.9, "weight_decay": 0.1},
        {"params": others, "lr": 0.2},
    ]


def assert_same_as(boosted: Boosted, model: nn.Module, optimizer: Optimizer) -> None:
    assert_same_weights(boosted.model, copies(model.parameters()))
    mine, theirs = boosted.optimizer.state_dict(), optimizer.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    assert {i: entry.keys() for i, entry in mine["state"].items()} == {
        i: entry.keys() for i, entry in theirs["state"].items()
    }
    assert_equal(states_of(boosted.optimizer), states_of(optimizer))


# --- the bits of torch's steps ------------------------------------------------------------------


@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
@pytest.mark.parametrize("name", MAKERS)
def test_a_rule_takes_torchs_steps_bit_for_bit(name: str, overlap: str) -> None:
    settings: dict[str, Any] = {**TIGHT, "overlap": overlap}
    if overlap == "backward":
        settings |= {"nonfinite": "ignore", "enable_gradient_accumulation": False}
    plain = tower()
    own = MAKERS[name](plain.parameters())
    boosted = boosted_with(MAKERS[name], **settings)
    assert boosted.optimizer._castor.fused
    losses = []
    for first in (0, 4):
        expected = plain_steps(plain, own, first)
        losses = go_on(boosted, first)
        assert losses == expected
        for optimizer in (own, boosted.optimizer):
            optimizer.param_groups[0]["lr"] *= 0.5
    assert_same_as(boosted, plain, own)
    report = boosted.report()
    assert report.peak_device_bytes <= report.device_budget_bytes


def test_schedulers_and_groups_are_torchs(tmp_path: Path) -> None:
    plain, model = tower(), tower()
    own, optimizer = (SGD(groups_of(one), lr=0.1) for one in (plain, model))
    boosted = boost(model, optimizer=optimizer)
    assert engine_of(model).session.state_names(0) == ["momentum_buffer"]
    schedulers = [CosineAnnealingLR(one, 8) for one in (own, optimizer)]
    for i in range(4):
        assert go_on(boosted, i, 1) == plain_steps(plain, own, i, 1)
        for scheduler in schedulers:
            scheduler.step()
    assert_same_as(boosted, plain, own)
    assert set(optimizer.state) == {p for p in model.parameters() if p.ndim > 1}


@pytest.mark.parametrize("name", ["plain", "nesterov", "lion"])
@pytest.mark.parametrize(
    ("precision", "state_format"), [("bf16", "fp32"), ("bf16", "split"), ("fp16", "fp32")]
)
def test_masters_take_the_steps_of_float32_weights(
    name: str, precision: str, state_format: str
) -> None:
    settings: dict[str, Any] = {"initial_scale": 8.0} if precision == "fp16" else {}
    boosted = boosted_with(
        MAKERS[name], precision=precision, optim_state_format=state_format, **settings
    )
    session = engine_of(boosted.model).session
    masters = [nn.Parameter(p.detach().clone()) for p in tower().parameters()]
    own = MAKERS[name](masters)
    for i in range(4):
        loss = tower_loss(boosted.model, i)
        boosted.booster.backward(loss, boosted.optimizer)
        for master, param in zip(masters, boosted.model.parameters(), strict=True):
            master.grad = param.grad.float().cpu() / (8.0 if precision == "fp16" else 1.0)
        boosted.optimizer.step()
        boosted.optimizer.zero_grad()
        own.step()
        held = [session.master(k) for k in range(len(masters))]
        assert_equal(held, [master.detach() for master in masters])
    assert_equal(states_of(boosted.optimizer), states_of(own))


@pytest.mark.parametrize("name", ["decay", "dampening", "lion"])
def test_clipping_is_that_of_torch(name: str) -> None:
    plain = tower()
    own = MAKERS[name](plain.parameters())
    boosted = boosted_with(MAKERS[name], max_norm=0.05)
    expected = []
    for i in range(6):
        loss = tower_loss(plain, i)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        own.step()
        own.zero_grad()
        expected.append(loss.item())
    assert_close_losses(go_on(boosted, steps=6), expected)
    assert_close_weights(boosted.model, plain, atol=2.1e-3 if name == "lion" else 1e-6)


# --- where states are ---------------------------------------------------------------------------


def host_bytes(make: Make, **settings: Any) -> int:
    return boosted_with(make, **settings).report().host_bytes


def test_states_take_what_the_rule_keeps() -> None:
    weights = param_bytes(tower())
    without = host_bytes(MAKERS["plain"])
    assert host_bytes(MAKERS["momentum"]) - without == pytest.approx(weights, rel=0.02)
    assert host_bytes(MAKERS["lion"]) == host_bytes(MAKERS["momentum"])
    assert host_bytes(AdamW) - without == pytest.approx(2 * weights, rel=0.02)
    split = {"precision": "bf16", "optim_state_format": "split"}
    assert host_bytes(MAKERS["plain"], **split) == pytest.approx(6 / 8 * without, rel=0.02)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["plain", "nesterov", "lion"])
@pytest.mark.parametrize("weights", [False, True])
def test_states_on_nvme_have_the_same_bits(
    name: str, precision: str, weights: bool, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"precision": precision, "chunk_bytes": "8KiB"}
    reference = boosted_with(MAKERS[name], tower(depth=24), **settings)
    host = {"host_memory": "80KiB"} if weights else {"nvme_offload_fraction": 1.0}
    boosted = boosted_with(MAKERS[name], tower(depth=24), nvme_path=tmp_path, **settings, **host)
    assert go_on(boosted) == go_on(reference)
    assert_same_weights(boosted.model, copies(reference.model.parameters()))
    assert_equal(states_of(boosted.optimizer), states_of(reference.optimizer))
    assert (boosted.report().nvme_bytes > 0) == (weights or name != "plain" or precision == "bf16")
    for entry in boosted.optimizer.state.values():
        assert "step" not in entry
        assert len(entry) == 1


@pytest.mark.parametrize("rule", ["sgd", "sgd_momentum", "lion"])
@pytest.mark.parametrize(
    ("precision", "state_format"), [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "split")]
)
def test_castor_estimate_knows_the_bytes(
    rule: str, precision: Any, state_format: Any, tmp_path: Path
) -> None:
    workload = Workload(sequence=64, precision=precision, state_format=state_format, optimizer=rule)
    found = estimate(write(tmp_path, SMALL), small_machine(), workload)
    config = GPT2Config(**{k: v for k, v in SMALL.items() if k != "model_type"})
    name = {"sgd": "plain", "sgd_momentum": "momentum", "lion": "lion"}[rule]
    boosted = boosted_with(
        MAKERS[name],
        GPT2LMHeadModel(config),
        precision=precision,
        optim_state_format=state_format,
    )
    assert found.host_bytes == boosted.report().host_bytes


def test_an_estimate_of_a_format_that_a_rule_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="with optimizer 'lion' choose one of fp32, split"):
        Workload(optimizer="lion", state_format="split_bf16")
    with pytest.raises(ValueError, match="choose one of adam, lion, sgd, sgd_momentum"):
        Workload(optimizer="sophia")


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("state_format", ["split_bf16", "split_int8"])
@pytest.mark.parametrize("name", ["plain", "momentum", "lion"])
def test_formats_that_round_are_refused_by_name(name: str, state_format: str) -> None:
    model = tower()
    before = copies(model.parameters())
    with pytest.raises(ValueError, match=f"'{state_format}'.* rounds what Adam keeps, and "):
        boosted_with(MAKERS[name], model, precision="bf16", optim_state_format=state_format)
    assert_same_weights(model, before)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("lr", -1.0, r"param_groups\[1\]: SGD: lr must be finite and at least 0"),
        ("momentum", float("nan"), r"param_groups\[1\]: SGD: momentum must be finite"),
        ("weight_decay", -0.1, r"param_groups\[1\]: SGD: weight_decay"),
        ("nesterov", True, r"param_groups\[1\]: SGD: nesterov needs a momentum above 0"),
    ],
)
@pytest.mark.parametrize("overlap", ["none", "forward"])
def test_a_bad_option_of_the_second_group_raises_before_anything_moves(
    option: str, value: Any, message: str, overlap: str
) -> None:
    model = tower()
    boosted = boost(model, optimizer=SGD(groups_of(model), lr=0.1), overlap=overlap)
    go_on(boosted)
    loss = tower_loss(model, 4)
    boosted.booster.backward(loss, boosted.optimizer)
    before = copies(model.parameters()), states_of(boosted.optimizer)
    good = boosted.optimizer.param_groups[1][option]
    boosted.optimizer.param_groups[1][option] = value
    with pytest.raises(ValueError, match=message):
        boosted.optimizer.step()
    assert_same_weights(model, before[0])
    assert_equal(states_of(boosted.optimizer), before[1])
    boosted.optimizer.param_groups[1][option] = good
    boosted.optimizer.step()


def test_a_momentum_without_a_place_is_refused() -> None:
    boosted = boosted_with(MAKERS["plain"])
    go_on(boosted)
    boosted.optimizer.param_groups[0]["momentum"] = 0.9
    loss = tower_loss(boosted.model, 4)
    boosted.booster.backward(loss, boosted.optimizer)
    with pytest.raises(ValueError, match=r"momentum is 0\.9.*no momentum_buffer has a place"):
        boosted.optimizer.step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "Lion: lr must be finite and at least 0"),
        ({"betas": (0.9, 1.0)}, r"Lion: beta2 must be in \[0, 1\)"),
        ({"weight_decay": float("nan")}, "Lion: weight_decay"),
    ],
)
def test_lion_refuses_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Lion(tower().parameters(), **options)


# --- Lion alone ---------------------------------------------------------------------------------


def test_lion_takes_the_authors_step() -> None:
    generator = torch.Generator().manual_seed(3)
    param = nn.Parameter(torch.randn(40, 3, generator=generator, dtype=torch.float64))
    weight, m = param.detach().clone(), torch.zeros(40, 3, dtype=torch.float64)
    optimizer = Lion([param], lr=0.01, betas=(0.8, 0.95), weight_decay=0.3)
    for _ in range(5):
        param.grad = torch.randn(40, 3, generator=generator, dtype=torch.float64)
        optimizer.step()
        update = m * 0.8 + param.grad * 0.2
        weight = weight * (1 - 0.01 * 0.3) - 0.01 * update.sign()
        m = m * 0.95 + param.grad * 0.05
    torch.testing.assert_close(param.detach(), weight)
    torch.testing.assert_close(optimizer.state[param]["exp_avg"], m)
    param.grad = param.grad.to_sparse()
    with pytest.raises(TypeError, match="sparse"):
        optimizer.step()


# --- states, copies and checkpoints -------------------------------------------------------------


@pytest.mark.parametrize("name", MAKERS)
def test_states_are_exchanged_with_plain_torch(name: str) -> None:
    plain, boosted = tower(), boosted_with(MAKERS[name])
    own = MAKERS[name](plain.parameters())
    plain_steps(plain, own)
    boosted.model.load_state_dict(plain.state_dict())
    boosted.optimizer.load_state_dict(own.state_dict())
    assert_same_as(boosted, plain, own)
    assert go_on(boosted, 4) == plain_steps(plain, own, 4)

    back = tower()
    theirs = MAKERS[name](back.parameters())
    back.load_state_dict(boosted.model.state_dict())
    theirs.load_state_dict(copy.deepcopy(boosted.optimizer.state_dict()))
    assert plain_steps(back, theirs, 8) == go_on(boosted, 8)


def test_a_step_before_boost_comes_along() -> None:
    plain, model = tower(), tower()
    own, optimizer = (SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (plain, model))
    plain_steps(plain, own)
    plain_steps(model, optimizer)
    for one in (own, optimizer):
        one.param_groups[0]["momentum"] = 0.0  # the buffer waits
    boosted = boost(model, optimizer=optimizer)
    assert go_on(boosted, 4, 1) == plain_steps(plain, own, 4, 1)
    for one in (own, optimizer):
        one.param_groups[0]["momentum"] = 0.9
    assert go_on(boosted, 5) == plain_steps(plain, own, 5)
    assert_same_as(boosted, plain, own)


def test_states_of_another_shape_or_kind_are_refused() -> None:
    boosted = boosted_with(MAKERS["momentum"])
    go_on(boosted)
    state = copy.deepcopy(boosted.optimizer.state_dict())
    without = boosted_with(MAKERS["plain"])
    with pytest.raises(castor.UsageError, match="'momentum_buffer', for which the model was"):
        without.optimizer.load_state_dict(state)
    state["state"][0]["momentum_buffer"] = torch.zeros(3)
    with pytest.raises(castor.UsageError, match=r"'momentum_buffer' of parameter .* shape \(3,\)"):
        boosted.optimizer.load_state_dict(state)
    adam = boost(tower())
    with pytest.raises(castor.UsageError, match="has no 'exp_avg'"):
        adam.optimizer.load_state_dict(
            {**state, "param_groups": adam.optimizer.state_dict()["param_groups"]}
        )


def test_a_buffer_of_none_is_no_buffer() -> None:
    """As torch.optim.SGD has written it."""
    plain, boosted = tower(), boosted_with(MAKERS["momentum"])
    own = MAKERS["momentum"](plain.parameters())
    state = own.state_dict()
    state["state"] = {i: {"momentum_buffer": None} for i in state["param_groups"][0]["params"]}
    boosted.optimizer.load_state_dict(state)
    assert go_on(boosted) == plain_steps(plain, own)


@pytest.mark.parametrize("name", ["plain", "dampening", "lion"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_goes_on_bitwise(name: str, precision: str, tmp_path: Path) -> None:
    boosted = boosted_with(MAKERS[name], precision=precision)
    go_on(boosted)
    boosted.booster.save(tmp_path / "run", boosted.model, boosted.optimizer)
    expected = go_on(boosted, 4)
    for settings in ({}, {"nvme_path": tmp_path, "nvme_offload_fraction": 1.0}, TIGHT):
        resumed = boosted_with(MAKERS[name], precision=precision, **settings)
        go_on(resumed, 7, 1)
        found = resumed.booster.load(tmp_path / "run", resumed.model, resumed.optimizer)
        assert found.step == 4
        assert go_on(resumed, 4) == expected
        assert_same_weights(resumed.model, copies(boosted.model.parameters()))
        assert_equal(states_of(resumed.optimizer), states_of(boosted.optimizer))


def test_plain_optimizers_load_and_save_the_same_files(tmp_path: Path) -> None:
    plain, boosted = tower(), boosted_with(MAKERS["momentum"])
    own = MAKERS["momentum"](plain.parameters())
    plain_steps(plain, own)
    booster = boosted.booster
    booster.save_optimizer(own, tmp_path / "plain", model=plain)
    booster.save_model(plain, tmp_path / "model")
    booster.load_model(boosted.model, tmp_path / "model")
    booster.load_optimizer(boosted.optimizer, tmp_path / "plain")
    assert_same_as(boosted, plain, own)
    booster.save_optimizer(boosted.optimizer, tmp_path / "boosted")
    for one in ("optimizer.json", "optimizer.safetensors"):
        assert (tmp_path / "plain" / one).read_bytes() == (tmp_path / "boosted" / one).read_bytes()


def test_checkpoints_of_another_rule_are_refused(tmp_path: Path) -> None:
    saved = {name: boosted_with(MAKERS[name]) for name in ("plain", "momentum", "lion")} | {
        "adam": boost(tower())
    }
    for name, boosted in saved.items():
        go_on(boosted)
        boosted.booster.save_optimizer(boosted.optimizer, tmp_path / name)
    for into, name, message in [
        ("lion", "momentum", "that of SGD .* is Lion; load it into its own kind"),
        ("momentum", "lion", "that of Lion .* is SGD; load it into its own kind"),
        ("adam", "lion", "that of Lion"),
        ("lion", "adam", "that of AdamW"),
        ("adam", "plain", "that of SGD"),
        ("plain", "momentum", r"not those of the fused SGD, as it was boosted: .*momentum is 0\.9"),
    ]:
        boosted = saved[into]
        before = copies(boosted.model.parameters()), states_of(boosted.optimizer)
        with pytest.raises(castor.CheckpointError, match=message):
            boosted.booster.load_optimizer(boosted.optimizer, tmp_path / name)
        assert_same_weights(boosted.model, before[0])
        assert_equal(states_of(boosted.optimizer), before[1])
    # There is room for nothing.
    saved["momentum"].booster.load_optimizer(saved["momentum"].optimizer, tmp_path / "plain")
    assert saved["momentum"].optimizer.param_groups[0]["momentum"] == 0
    assert saved["momentum"].optimizer.state_dict()["state"] == {}


@pytest.mark.parametrize("through", ["torch", "dcp"])
@pytest.mark.parametrize("name", ["plain", "momentum", "lion"])
def test_runs_are_converted_to_plain_torch_and_back(
    name: str, through: Any, tmp_path: Path
) -> None:
    boosted = boosted_with(MAKERS[name])
    go_on(boosted)
    boosted.booster.save(tmp_path / "run", boosted.model, boosted.optimizer)
    expected = go_on(boosted, 4)
    convert(tmp_path / "run", tmp_path / "there", through)
    convert(tmp_path / "there", tmp_path / "back", "castor")
    resumed = boosted_with(MAKERS[name])
    resumed.booster.load(tmp_path / "back", resumed.model, resumed.optimizer)
    assert go_on(resumed, 4) == expected
    if through == "torch":
        plain = tower()
        own = MAKERS[name](plain.parameters())
        plain.load_state_dict(torch.load(tmp_path / "there" / "model.pt"))
        own.load_state_dict(torch.load(tmp_path / "there" / "optimizer.pt"))
        assert plain_steps(plain, own, 4) == expected


@pytest.mark.parametrize("name", ["plain", "momentum", "lion"])
def test_a_state_dict_of_torch_becomes_a_run(name: str, tmp_path: Path) -> None:
    plain = tower()
    own = MAKERS[name](plain.named_parameters())
    plain_steps(plain, own)
    torch.save({"model": plain.state_dict(), "optimizer": own.state_dict()}, tmp_path / "plain.pt")
    convert(tmp_path / "plain.pt", tmp_path / "run", "castor")
    boosted = boosted_with(MAKERS[name])
    boosted.booster.load(tmp_path / "run", boosted.model, boosted.optimizer)
    assert go_on(boosted, 4) == plain_steps(plain, own, 4)


@pytest.mark.cpu_device("a model on a GPU is not released")
def test_copies_and_releases_are_ordinary_optimizers() -> None:
    boosted = boosted_with(MAKERS["lion"])
    go_on(boosted)
    model, optimizer = copy.deepcopy((boosted.model, boosted.optimizer))
    assert type(optimizer) is Lion
    expected = go_on(boosted, 4)
    assert plain_steps(model, optimizer, 4) == expected
    boosted.booster.release(boosted.model)
    assert type(boosted.optimizer) is Lion
    assert plain_steps(boosted.model, boosted.optimizer, 8) == plain_steps(model, optimizer, 8)
    masters = boosted_with(MAKERS["momentum"], precision="bf16")
    with pytest.raises(castor.UsageError, match="which a plain SGD cannot hold: write the state"):
        copy.deepcopy(masters.optimizer)


# --- several optimizers -------------------------------------------------------------------------


def parts_of(model: Any) -> Iterator[list[nn.Parameter]]:
    yield list(model.layers.parameters())
    yield list(model.head.parameters())


@pytest.mark.parametrize(
    ("first", "second", "fused"),
    [
        ("plain", "momentum", [True, True]),
        ("lion", "momentum", [True, False]),
        ("momentum", "lion", [False, True]),
    ],
)
def test_several_share_one_rule(first: str, second: str, fused: list[bool]) -> None:
    plain, model = tower(), tower()
    own, optimizers = (
        [MAKERS[name](part) for name, part in zip((first, second), parts_of(one), strict=True)]
        for one in (plain, model)
    )
    booster = Booster(plugin=plugin())
    booster.boost(model, optimizers)
    assert [one._castor.fused for one in optimizers] == fused
    for i in range(4):
        losses = []
        for one, made in ((plain, own), (model, optimizers)):
            loss = one(**tower_batch(i))
            if made is own:
                loss.backward()
            else:
                booster.backward(loss, made[0])
            for optimizer in made:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[0] == losses[1]
    assert_same_weights(model, copies(plain.parameters()))


def test_a_rule_beside_another_needs_its_own_masters() -> None:
    model = tower()
    pair = [
        make(part)
        for make, part in zip((MAKERS["momentum"], HybridAdam), parts_of(model), strict=True)
    ]
    Booster(plugin=plugin(precision="bf16", optim_state_format="fp32")).boost(model, pair)
    assert [one._castor.fused for one in pair] == [False, True]
    model(**tower_batch(0)).backward()
    for one in pair:
        one.step()
    for part, one in zip(parts_of(model), pair, strict=True):
        for param in part:
            kept = "master" in one.state[param]
            assert kept is (one is pair[0])


# --- several ranks ------------------------------------------------------------------------------


def test_ranks_save_and_go_on_as_one_process(tmp_path: Path) -> None:
    """Each has a part of momentum_buffer; the mean of equal gradients is each."""
    assert_go_on_as_one(rank_cases.steps_with_momentum, tmp_path)
