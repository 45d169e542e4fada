"""Optimizer states on disk: torch AdamW's layout, by parameter name, in every direction bitwise."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, RMSprop

import castor
from helpers import LR, Boosted, boost, copies, equal, plugin
from zoo import CASES, tower, tower_batch

BOOSTER = castor.Booster(plugin=plugin())


def steps(boosted: Boosted, first: int = 0, count: int = 3) -> list[float]:
    return [boosted.step(boosted.model(**tower_batch(i))) for i in range(first, first + count)]


def plain_steps(model: nn.Module, optimizer: Any, first: int = 0, count: int = 3) -> list[float]:
    losses = []
    for i in range(first, first + count):
        loss = model(**{k: v.to(v.dtype) for k, v in tower_batch(i).items()})
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def state_by_name(optimizer: Any, model: nn.Module) -> dict[str, torch.Tensor]:
    names = {param: name for name, param in model.named_parameters()}
    return {
        f"{names[param]}.{key}": torch.as_tensor(value).clone()
        for param, entry in optimizer.state.items()
        for key, value in entry.items()
    }


def assert_same_states(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert actual[key].dtype == value.dtype, key
        assert equal(actual[key], value), key


def save_both(boosted: Boosted, directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    BOOSTER.save_model(boosted.model, directory / "model")
    BOOSTER.save_optimizer(boosted.optimizer, directory / "optimizer", model=boosted.model)


def load_both(model: nn.Module, optimizer: Any, directory: Path) -> None:
    BOOSTER.load_model(model, directory / "model")
    BOOSTER.load_optimizer(optimizer, directory / "optimizer", model=model)


# --- round trips --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "mixtral"])
def test_castor_to_torch_adamw_to_castor_is_bitwise(name: str, tmp_path: Path) -> None:
    case = CASES[name]

    def train(boosted: Boosted, first: int) -> list[float]:
        batches = [case.batch(i) for i in range(first, first + 2)]
        return [boosted.step(case.loss(boosted.model(**b), b)) for b in batches]

    boosted = boost(case.model())
    train(boosted, 0)
    state = state_by_name(boosted.optimizer, boosted.model)
    save_both(boosted, tmp_path / "castor")

    plain = case.model()
    own = AdamW(plain.parameters(), lr=0.5)
    load_both(plain, own, tmp_path / "castor")
    assert_same_states(state_by_name(own, plain), state)
    assert own.param_groups[0]["lr"] == LR
    (tmp_path / "plain").mkdir()
    BOOSTER.save_model(plain, tmp_path / "plain" / "model")
    BOOSTER.save_optimizer(own, tmp_path / "plain" / "optimizer", model=plain)

    back = boost(case.model(), placement_policy="cpu")
    load_both(back.model, back.optimizer, tmp_path / "plain")
    assert_same_states(state_by_name(back.optimizer, back.model), state)
    assert train(back, 2) == train(boosted, 2)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("through", ["castor", "plain float32"])
def test_masters_survive_bitwise(precision: str, through: str, tmp_path: Path) -> None:
    boosted = boost(tower(), precision=precision, initial_scale=2.0**8)
    steps(boosted)
    save_both(boosted, tmp_path / "run")
    stored = load_file(tmp_path / "run" / "optimizer" / "optimizer.safetensors")
    assert stored["layers.0.weight.master"].dtype == torch.float32
    if through == "plain float32":
        plain = tower()
        own = AdamW(plain.parameters())
        load_both(plain, own, tmp_path / "run")
        assert equal(plain.layers[0].weight, stored["layers.0.weight.master"])
        save_both(Boosted(BOOSTER, plain, own), tmp_path / "run")
    back = boost(tower(width=32), precision=precision, initial_scale=2.0**8)
    steps(back, 7, 1)
    load_both(back.model, back.optimizer, tmp_path / "run")
    assert steps(back, 3, 5) == steps(boosted, 3, 5)
    for param, value in zip(back.model.parameters(), boosted.model.parameters(), strict=True):
        assert equal(param, value)


def test_masters_become_the_weights_of_a_float32_run(tmp_path: Path) -> None:
    half = boost(tower(), precision="bf16")
    steps(half)
    save_both(half, tmp_path / "run")
    masters = load_file(tmp_path / "run" / "optimizer" / "optimizer.safetensors")
    full = boost(tower())
    load_both(full.model, full.optimizer, tmp_path / "run")
    for name, param in full.model.named_parameters():
        assert equal(param, masters[f"{name}.master"])


def test_edits_of_16_bit_weights_are_in_the_saved_masters(tmp_path: Path) -> None:
    boosted = boost(tower(), precision="bf16", optim_state_format="fp32")
    steps(boosted)
    with torch.no_grad():
        boosted.model.head.bias[1] = 0.25
    save_both(boosted, tmp_path / "run")
    stored = load_file(tmp_path / "run" / "optimizer" / "optimizer.safetensors")
    master = stored["head.bias.master"]
    assert master[1] == 0.25
    assert not equal(master[2:], boosted.model.head.bias[2:].float())
    back = boost(tower(), precision="bf16", optim_state_format="fp32")
    load_both(back.model, back.optimizer, tmp_path / "run")
    assert steps(back, 3) == steps(boosted, 3)


def test_hybrid_adam_on_its_own_keeps_its_masters(tmp_path: Path) -> None:
    def build() -> tuple[Any, Any]:
        model = tower().to(torch.bfloat16)
        return model, castor.HybridAdam(model.parameters(), lr=LR)

    def run(model: Any, optimizer: Any, first: int) -> list[float]:
        losses = []
        for i in range(first, first + 3):
            batch = tower_batch(i)
            loss = model(batch["x"].bfloat16(), batch["labels"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    model, optimizer = build()
    run(model, optimizer, 0)
    save_both(Boosted(BOOSTER, model, optimizer), tmp_path / "run")
    back, own = build()
    load_both(back, own, tmp_path / "run")
    assert run(back, own, 3) == run(model, optimizer, 3)
    boosted = boost(tower(), precision="bf16")
    load_both(boosted.model, boosted.optimizer, tmp_path / "run")
    save_both(boosted, tmp_path / "again")
    first = load_file(tmp_path / "run" / "optimizer" / "optimizer.safetensors")
    assert_same_states(load_file(tmp_path / "again" / "optimizer" / "optimizer.safetensors"), first)


def test_masters_without_a_place_are_left_with_a_warning(tmp_path: Path) -> None:
    boosted = boost(tower(), precision="bf16")
    steps(boosted)
    save_both(boosted, tmp_path / "run")
    model = tower().to(torch.bfloat16)
    with pytest.warns(RuntimeWarning, match=r"14 parameters.*'layers\.0\.weight'"):
        load_both(model, AdamW(model.parameters()), tmp_path / "run")


@pytest.mark.cpu_device("a GPU has no kernels for it")
@pytest.mark.parametrize(
    "make",
    [
        lambda params: Adagrad(params, lr=0.1),
        lambda params: RMSprop(params, lr=0.01, momentum=0.5, centered=True),
        lambda params: Adafactor(params),
        lambda params: AdamW(params, lr=LR, amsgrad=True),
    ],
    ids=["adagrad", "rmsprop", "adafactor", "amsgrad"],
)
def test_generic_path_goes_on_bitwise(make: Any, tmp_path: Path) -> None:
    def build() -> Boosted:
        model = tower()
        return boost(model, optimizer=make(model.parameters()))

    boosted, back = build(), build()
    steps(boosted)
    steps(back, 5)
    save_both(boosted, tmp_path / "run")
    load_both(back.model, back.optimizer, tmp_path / "run")
    expected = steps(boosted, 3)
    assert steps(back, 3) == expected
    plain = tower()
    own = make(plain.parameters())
    load_both(plain, own, tmp_path / "run")
    assert plain_steps(plain, own, 3) == expected


def test_state_that_is_loaded_is_not_the_file(tmp_path: Path) -> None:
    plain = tower()
    own = AdamW(plain.parameters())
    plain_steps(plain, own)
    save_both(Boosted(BOOSTER, plain, own), tmp_path / "run")
    load_both(plain, own, tmp_path / "run")
    state = state_by_name(own, plain)
    file = tmp_path / "run" / "optimizer" / "optimizer.safetensors"
    file.write_bytes(bytes(file.stat().st_size))  # in place: a mapping would show it
    assert_same_states(state_by_name(own, plain), state)


# --- names and groups ---------------------------------------------------------------------------


def two_groups(model: nn.Module, *, reverse: bool = False) -> Any:
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    groups = [
        {"params": decay[::-1] if reverse else decay, "weight_decay": 0.1},
        {"params": rest, "weight_decay": 0.0, "lr": 3e-3},
    ]
    return AdamW(groups[::-1] if reverse else groups, lr=LR)


def test_order_of_groups_and_parameters_does_not_matter(tmp_path: Path) -> None:
    model = tower()
    boosted = boost(model, optimizer=two_groups(model))
    steps(boosted)
    save_both(boosted, tmp_path / "run")
    other = tower()
    back = boost(other, optimizer=two_groups(other, reverse=True))
    load_both(back.model, back.optimizer, tmp_path / "run")
    assert [group["weight_decay"] for group in back.optimizer.param_groups] == [0.0, 0.1]
    assert steps(back, 3) == steps(boosted, 3)


def test_groups_that_were_apart_are_not_merged(tmp_path: Path) -> None:
    model = tower()
    boosted = boost(model, optimizer=two_groups(model))
    steps(boosted)
    save_both(boosted, tmp_path / "run")
    back = boost(tower())
    with pytest.raises(castor.CheckpointError, match="different groups"):
        BOOSTER.load_optimizer(back.optimizer, tmp_path / "run" / "optimizer")


def test_names_may_come_from_the_groups(tmp_path: Path) -> None:
    plain = tower()
    own = AdamW(plain.named_parameters(), lr=LR)
    plain_steps(plain, own)
    BOOSTER.save_optimizer(own, tmp_path / "o")
    other = tower()
    back = AdamW(other.named_parameters())
    BOOSTER.load_optimizer(back, tmp_path / "o")
    assert_same_states(state_by_name(back, other), state_by_name(own, plain))
    nameless = AdamW(plain.parameters())
    with pytest.raises(castor.UsageError, match="model="):
        BOOSTER.save_optimizer(nameless, tmp_path / "p")
    with pytest.raises(castor.UsageError, match="not in the"):
        BOOSTER.save_optimizer(nameless, tmp_path / "p", model=tower())


def test_shards_of_an_optimizer_load(tmp_path: Path) -> None:
    boosted, back = boost(tower()), boost(tower())
    steps(boosted)
    BOOSTER.save_optimizer(boosted.optimizer, tmp_path / "o", size_per_shard="8KB")
    assert len(list((tmp_path / "o").glob("optimizer-0000*-of-*.safetensors"))) > 3
    BOOSTER.load_optimizer(back.optimizer, tmp_path / "o")
    assert_same_states(
        state_by_name(back.optimizer, back.model), state_by_name(boosted.optimizer, boosted.model)
    )


def test_model_and_optimizer_may_share_a_directory(tmp_path: Path) -> None:
    boosted, back = boost(tower()), boost(tower())
    for _ in range(2):
        steps(boosted)
        BOOSTER.save_model(boosted.model, tmp_path / "both")
        BOOSTER.save_optimizer(boosted.optimizer, tmp_path / "both")
    BOOSTER.load_model(back.model, tmp_path / "both")
    BOOSTER.load_optimizer(back.optimizer, tmp_path / "both")
    assert steps(back, 5) == steps(boosted, 5)


def test_unstepped_and_unused_parameters_stay_without_state(tmp_path: Path) -> None:
    def build() -> Boosted:
        model = tower()
        model.spare = nn.Linear(3, 3)
        return boost(model)

    boosted, back = build(), build()
    BOOSTER.save_optimizer(boosted.optimizer, tmp_path / "fresh")
    steps(boosted)
    BOOSTER.save_optimizer(boosted.optimizer, tmp_path / "o")
    BOOSTER.load_optimizer(back.optimizer, tmp_path / "o")
    assert back.model.spare.weight not in back.optimizer.state
    BOOSTER.load_optimizer(back.optimizer, tmp_path / "fresh")
    assert not back.optimizer.state


# --- what does not fit --------------------------------------------------------------------------


def fails_and_changes_nothing(boosted: Boosted, directory: Path, match: str) -> None:
    before = state_by_name(boosted.optimizer, boosted.model)
    weights = copies(boosted.model.parameters())
    with pytest.raises(castor.CheckpointError, match=match):
        BOOSTER.load_optimizer(boosted.optimizer, directory)
    assert_same_states(state_by_name(boosted.optimizer, boosted.model), before)
    for param, value in zip(boosted.model.parameters(), weights, strict=True):
        assert equal(param, value)


def test_states_of_another_optimizer_are_refused(tmp_path: Path) -> None:
    saved: dict[str, Any] = {
        "shape": boost(tower(width=16)),
        "depth": boost(tower(depth=3)),
    }
    model = tower()
    saved["class"] = boost(model, optimizer=SGD(model.parameters(), lr=0.1, momentum=0.9))
    model = tower()
    saved["amsgrad"] = boost(model, optimizer=Adam(model.parameters(), amsgrad=True))
    for name, boosted in saved.items():
        width = 16 if name == "shape" else 32
        boosted.step(boosted.model(**tower_batch(0, width=width)))
        BOOSTER.save_optimizer(boosted.optimizer, tmp_path / name)
    boosted = boost(tower())
    steps(boosted)
    fails_and_changes_nothing(boosted, tmp_path / "shape", "size mismatch for the optimizer state")
    fails_and_changes_nothing(boosted, tmp_path / "depth", r"layers\.3\.weight")
    fails_and_changes_nothing(boosted, tmp_path / "class", "SGD")
    fails_and_changes_nothing(boosted, tmp_path / "amsgrad", "amsgrad")
    fails_and_changes_nothing(boosted, tmp_path / "nowhere", "nowhere")


class Listing(SGD):
    """Keeps a list, which no tensor file can hold."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["history"] = [{1, 2}]


def test_state_that_json_cannot_hold_is_named(tmp_path: Path) -> None:
    model = tower()
    own = Listing(model.parameters(), lr=0.1)
    own.step()
    with pytest.raises(castor.CheckpointError, match=r"'history' of 'layers\.0\.weight'.*set"):
        BOOSTER.save_optimizer(own, tmp_path / "o", model=model)
    assert not list(tmp_path.iterdir())


def test_loss_scale_is_saved(tmp_path: Path) -> None:
    settings = {"precision": "fp16", "initial_scale": 2.0**10, "growth_interval": 2}
    boosted = boost(tower(), **settings)
    steps(boosted)
    save_both(boosted, tmp_path / "run")
    document = json.loads((tmp_path / "run" / "optimizer" / "optimizer.json").read_text())
    expected = {"scale": 2.0**11, "good_steps": 1, "overflows_left": 2}
    assert document["loss_scaler"] == expected
    back = boost(tower(), **settings)
    load_both(back.model, back.optimizer, tmp_path / "run")
    assert back.optimizer._castor.scaler.state_dict() == expected
