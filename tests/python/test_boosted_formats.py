"""State formats of boosted models: trajectories, states in every direction, bytes, refusals."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW, RMSprop

import castor
from castor import HybridAdam
from castor.checkpoint.container import bytes_of
from castor.checkpoint.optimizer import state_of_optimizer
from castor.runtime.engine import engine_of
from helpers import (
    GIB,
    LR,
    Boosted,
    assert_close,
    assert_equal,
    assert_same_weights,
    boost,
    copies,
    equal,
    exact_state,
    go_on,
    plugin,
)
from zoo import tower

FORMATS = ("fp32", "split", "split_bf16", "split_int8")
SPLIT_FORMATS = FORMATS[1:]
ROUNDING_FORMATS = FORMATS[2:]
STATE_BYTES = {"fp32": 12, "split": 10, "split_bf16": 6, "split_int8": 4}
BLOCK = castor._C.MOMENT_BLOCK


def bf16(model: nn.Module, state_format: str | None, memory: int = GIB, **settings: Any) -> Boosted:
    return boost(model, memory, precision="bf16", optim_state_format=state_format, **settings)


# --- trajectories -------------------------------------------------------------------------------


def representable(model: nn.Module) -> nn.Module:
    """The model with float32 weights that bf16 holds."""
    return model.bfloat16().float()


def grads(params: list[nn.Parameter], step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=generator).bfloat16() for p in params]


@pytest.mark.parametrize("own_seed", [True, False], ids=["of HybridAdam", "of the plugin"])
@pytest.mark.parametrize("state_format", FORMATS)
def test_boosted_takes_the_steps_of_the_standalone_optimizer(
    state_format: str, own_seed: bool
) -> None:
    alone = list(representable(tower()).bfloat16().parameters())
    settings = {"optim_state_format": state_format, "seed": 5}
    own = HybridAdam(alone, lr=1e-2, weight_decay=0.1, **settings)
    model = representable(tower())
    optimizer = HybridAdam(
        model.parameters(), lr=1e-2, weight_decay=0.1, **(settings if own_seed else {})
    )
    boosted = boost(model, optimizer=optimizer, precision="bf16", **({} if own_seed else settings))
    assert (optimizer.optim_state_format, optimizer.seed) == (state_format, 5)
    params = list(model.parameters())
    for step in range(8):
        for mine, other, grad in zip(params, alone, grads(alone, step), strict=True):
            mine.grad, other.grad = grad.clone(), grad
        own.step()
        optimizer.step()
        boosted.optimizer.zero_grad()
    assert_same_weights(model, alone)
    for mine, other in zip(params, alone, strict=True):
        for key in ("step", "exp_avg", "exp_avg_sq", *(["scales"] if "8" in state_format else [])):
            value = own.state[other][key]
            assert optimizer.state[mine][key].dtype == value.dtype
            assert equal(optimizer.state[mine][key], value), key
    assert_equal(
        exact_state(boosted)[len(alone) : 2 * len(alone)],
        [entry["master"] for entry in own.state_dict()["state"].values()],
    )


@pytest.mark.parametrize("state_format", ROUNDING_FORMATS)
def test_the_seed_decides_the_bits(state_format: str) -> None:
    runs = [bf16(tower(), state_format, seed=seed) for seed in (1, 1, 2)]
    for run in runs:
        go_on(run, steps=8)
    weights = [copies(run.model.parameters()) for run in runs]
    assert_equal(weights[0], weights[1])
    assert not all(equal(a, b) for a, b in zip(weights[0], weights[2], strict=True))


def test_16_bits_default_to_split_and_others_to_fp32() -> None:
    formats = {
        precision: engine_of(boost(tower(), precision=precision).model).session.optim_state_format
        for precision in ("fp32", "bf16", "fp16")
    }
    assert formats == {"fp32": "fp32", "bf16": "split", "fp16": "fp32"}
    assert engine_of(bf16(tower(), "fp32").model).session.optim_state_format == "fp32"


# --- writes by user code ------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [True, False], ids=["model", "submodule"])
@pytest.mark.parametrize("state_format", FORMATS)
def test_loaded_weights_are_their_own_masters(state_format: str, whole: bool) -> None:
    boosted = bf16(tower(), state_format)
    go_on(boosted)
    torch.manual_seed(5)
    other = tower().bfloat16()
    nn.init.normal_(other.layers[1].weight)
    kept = exact_state(boosted)
    if whole:
        boosted.model.load_state_dict(other.state_dict())
    else:
        boosted.model.layers.load_state_dict(other.layers.state_dict())
    boosted.optimizer.param_groups[0]["lr"] = 0.0
    go_on(boosted, 4, 1)
    names = [name for name, _ in boosted.model.named_parameters()]
    masters = exact_state(boosted)[len(names) : 2 * len(names)]
    for name, master, old in zip(names, masters, kept[len(names) :], strict=False):
        new = dict(other.named_parameters())[name]
        if whole or name.startswith("layers"):
            edited = new.detach() != old.bfloat16()
            assert equal(master[edited], new.detach().float()[edited]), name
        else:
            assert equal(master, old), name


def test_a_write_on_the_host_takes_effect_and_leaves_the_others_their_masters() -> None:
    boosted = bf16(tower(), "split")
    go_on(boosted)
    before = engine_of(boosted.model).session.master(0).clone()
    weight = boosted.model.layers[0].weight
    with torch.no_grad():
        weight[0] = 0.3
    after = engine_of(boosted.model).session.master(0)
    assert equal(after[1:], before[1:])
    assert equal(after.bfloat16(), weight)
    assert (after[0] - weight[0].float()).abs().max() <= 2**-10  # half a step


@pytest.mark.parametrize("state_format", SPLIT_FORMATS)
def test_a_copy_of_the_model_loads_weights_of_its_own(state_format: str) -> None:
    boosted = bf16(tower(), state_format)
    go_on(boosted)
    state = exact_state(boosted)
    twin = copy.deepcopy(boosted.model)
    twin.load_state_dict(tower().bfloat16().state_dict())
    assert_equal(exact_state(boosted), state)


# --- states -------------------------------------------------------------------------------------


@pytest.mark.parametrize("state_format", FORMATS)
def test_optimizer_state_has_the_type_of_the_format(state_format: str) -> None:
    boosted = bf16(tower(), state_format)
    go_on(boosted, steps=1)
    dtype = {"split_bf16": torch.bfloat16, "split_int8": torch.uint8}.get(
        state_format, torch.float32
    )
    for param, entry in boosted.optimizer.state.items():
        assert entry["exp_avg"].shape == entry["exp_avg_sq"].shape == param.shape
        assert entry["exp_avg"].dtype == entry["exp_avg_sq"].dtype == dtype
        assert ("scales" in entry) == (state_format == "split_int8")
        if "scales" in entry:
            assert entry["scales"].shape == (-(-param.numel() // BLOCK), 2)
    for entry in boosted.optimizer.state_dict()["state"].values():
        assert entry["exp_avg"].dtype == entry["exp_avg_sq"].dtype == torch.float32


@pytest.mark.parametrize("state_format", FORMATS)
def test_resumed_run_goes_on_bitwise(state_format: str, tmp_path: Path) -> None:
    boosted = bf16(tower(), state_format, seed=3)
    go_on(boosted)
    boosted.booster.save(tmp_path / "run", boosted.model, boosted.optimizer)
    torch.manual_seed(17)
    other = tower(width=32)
    back = bf16(other, state_format, seed=4)  # the seed of the run comes with it
    go_on(back, 9, 2)
    back.booster.load(tmp_path / "run", back.model, back.optimizer)
    assert_equal(exact_state(back), exact_state(boosted))
    assert go_on(back, 4, 6) == go_on(boosted, 4, 6)
    assert_equal(exact_state(back), exact_state(boosted))


@pytest.mark.parametrize("state_format", FORMATS)
def test_state_dict_gives_the_moments_back_bitwise(state_format: str) -> None:
    boosted, back = (bf16(tower(), state_format, seed=seed) for seed in (3, 4))
    go_on(boosted)
    state = copy.deepcopy(boosted.optimizer.state_dict())
    assert state.get("rounding_seed") == (3 if state_format in ROUNDING_FORMATS else None)
    go_on(back, 9, 2)
    back.optimizer.load_state_dict(state)
    pairs = zip(boosted.optimizer.state.values(), back.optimizer.state.values(), strict=True)
    for mine, theirs in pairs:
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            assert equal(value, theirs[key]), key
    assert back.optimizer.state_dict().get("rounding_seed") == state.get("rounding_seed")


@pytest.mark.parametrize("state_format", FORMATS)
def test_a_state_loaded_while_updates_are_under_way_replaces_what_they_leave(
    state_format: str,
) -> None:
    model = nn.Linear(2048, 2048, bias=False)  # an update takes milliseconds
    boosted = bf16(model, state_format, overlap="forward")
    x = torch.ones(1, 2048)
    boosted.step(boosted.model(x).square().mean())
    state = copy.deepcopy(boosted.optimizer.state_dict())
    boosted.step(boosted.model(x).square().mean())
    boosted.optimizer.load_state_dict(state)  # at once
    loaded = boosted.optimizer.state_dict()["state"][0]
    for key, value in state["state"][0].items():
        assert equal(loaded[key], value), key


@pytest.mark.parametrize("target", ["adamw", *FORMATS])
@pytest.mark.parametrize("source", FORMATS)
def test_checkpoints_hold_every_format_for_every_other(
    source: str, target: str, tmp_path: Path
) -> None:
    boosted = bf16(tower(), source)
    go_on(boosted)
    directory = tmp_path / "optimizer"
    boosted.booster.save_optimizer(boosted.optimizer, directory)
    expected = exact_state(boosted)
    num = len(list(boosted.model.parameters()))
    if target == "adamw":
        plain = tower()
        own = AdamW(plain.parameters())
        boosted.booster.load_optimizer(own, directory, model=plain)
        assert_equal(copies(plain.parameters()), expected[num : 2 * num])
        moments = [e[k] for e in own.state.values() for k in ("exp_avg", "exp_avg_sq")]
        assert_equal(moments, expected[2 * num :])
        return
    back = bf16(tower(), target)
    back.model.load_state_dict(boosted.model.state_dict())
    back.booster.load_optimizer(back.optimizer, directory)
    state = exact_state(back)
    assert_equal(state[: 2 * num], expected[: 2 * num])
    tolerance = {"split_bf16": 2**-8, "split_int8": 2**-4}.get(target, 0.0)
    if source == target:
        tolerance = 0.0
    for mine, theirs in zip(state[2 * num :], expected[2 * num :], strict=True):
        largest = theirs.abs().max().item()
        assert_close(mine, theirs, rtol=tolerance, atol=tolerance * largest / 64)


@pytest.mark.parametrize("target", FORMATS)
@pytest.mark.parametrize("source", FORMATS)
def test_an_optimizer_that_has_stepped_alone_goes_on_boosted(source: str, target: str) -> None:
    model = representable(tower()).bfloat16()
    params = list(model.parameters())
    alone = HybridAdam(params, lr=1e-2, optim_state_format=source, seed=2)
    for step in range(3):
        for param, grad in zip(params, grads(params, step), strict=True):
            param.grad = grad
        alone.step()
    state = copy.deepcopy(alone.state_dict())
    twin = copy.deepcopy(model)
    model.zero_grad()
    optimizer = HybridAdam(params, lr=1e-2, optim_state_format=target, seed=2)
    optimizer.load_state_dict(state)
    boosted = boost(model, optimizer=optimizer, precision="bf16")
    other = HybridAdam(twin.parameters(), lr=1e-2, optim_state_format=target, seed=2)
    other.load_state_dict(state)
    for step in range(3, 6):
        pairs = zip(model.parameters(), twin.parameters(), grads(params, step), strict=True)
        for mine, theirs, grad in pairs:
            mine.grad, theirs.grad = grad.clone(), grad
        optimizer.step()
        other.step()
    assert_same_weights(boosted.model, twin.parameters())


def test_a_state_without_moments_starts_from_zero() -> None:
    boosted = bf16(tower(), "split_int8")
    go_on(boosted)
    groups = boosted.optimizer.state_dict()["param_groups"]
    boosted.optimizer.load_state_dict({"state": {}, "param_groups": groups})
    assert not boosted.optimizer.state
    session = engine_of(boosted.model).session
    for i in range(len(list(boosted.model.parameters()))):
        states = session.states(i)
        assert not states[2].any()
        decoded = castor._C.load_moments("split_int8", *states)
        assert not any(moment.any() for moment in decoded)


def test_a_save_makes_float32_tensors_only_when_it_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boosted = bf16(tower(), "split_int8")
    go_on(boosted, steps=1)
    calls: list[Any] = []
    decode = castor._C.load_moments

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return decode(*arguments)

    monkeypatch.setattr(castor._C, "load_moments", counted)
    state = state_of_optimizer(boosted.optimizer, None)
    numel = sum(p.numel() for p in boosted.model.parameters())
    assert bytes_of(state.tensors) >= 12 * numel
    assert not calls
    boosted.booster.save_optimizer(boosted.optimizer, tmp_path / "optimizer")
    assert len(calls) == 2 * len(list(boosted.model.parameters()))


# --- bytes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("state_format", FORMATS)
def test_host_bytes_are_exact(state_format: str) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
    numel = 6 * 64 * 64  # multiples of a block: no gaps
    boosted = bf16(model, state_format)
    scales = numel // BLOCK * 8 if state_format == "split_int8" else 0
    expected = numel * (2 + 2 + STATE_BYTES[state_format]) + scales
    assert boosted.booster.memory(model).host_bytes == expected
    payloads = engine_of(model).session.chunks()
    moments = sum(chunk["payloads"]["exp_avg"][1] for chunk in payloads)
    assert (
        moments == numel * {"fp32": 4, "split": 4, "split_bf16": 2, "split_int8": 1}[state_format]
    )


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("state_format", SPLIT_FORMATS)
def test_split_formats_are_for_bf16(state_format: str, precision: str) -> None:
    match = rf"optim_state_format='{state_format}'.*precision is '{precision}'"
    with pytest.raises(ValueError, match=match):
        plugin(precision=precision, optim_state_format=state_format)
    model = tower()
    optimizer = HybridAdam(model.parameters(), optim_state_format=state_format)
    before = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(ValueError, match=f"HybridAdam.*{match}"):
        boost(model, optimizer=optimizer, precision=precision)
    assert [p.data_ptr() for p in model.parameters()] == before


def test_plugin_and_optimizer_that_contradict_each_other_are_refused() -> None:
    model = tower()
    optimizer = HybridAdam(model.parameters(), optim_state_format="fp32", seed=1)
    with pytest.raises(ValueError, match=r"GeminiPlugin\(optim_state_format='split'\).*'fp32'"):
        bf16(model, "split", optimizer=optimizer)
    with pytest.raises(ValueError, match=r"GeminiPlugin\(seed=2\) and HybridAdam\(seed=1\)"):
        bf16(model, None, optimizer=optimizer, seed=2)
    boosted = bf16(model, "fp32", optimizer=optimizer, seed=1)
    assert engine_of(boosted.model).session.optim_state_format == "fp32"


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"optim_state_format": "split_int4"}, ValueError),
        ({"seed": -1}, ValueError),
        ({"seed": 2**64}, ValueError),
        ({"seed": 1.0}, TypeError),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(settings))):
        plugin(precision="bf16", **settings)


def test_other_optimizers_have_no_split_state() -> None:
    model = tower()
    with pytest.raises(NotImplementedError, match="RMSprop steps itself"):
        bf16(model, "split", optimizer=RMSprop(model.parameters(), lr=LR))
