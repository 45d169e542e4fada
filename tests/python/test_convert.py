"""Checkpoints converted between castor's, Hugging Face's, torch.save's and DCP's layouts."""

import ctypes
import errno
import json
import os
import pickle
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim import SGD, Adam, AdamW, RMSprop

import castor
import convert_cases
from castor.checkpoint.convert import Layout, convert, kind_of
from castor.config.names import Precision
from castor.estimate.model import build_by_name
from convert_cases import loaded_by_torch, saved_by_torch
from helpers import FORMATS, LR, Boosted, assert_same_weights, boost, copies, equal, plugin
from rank_processes import run, run_python, succeeded
from test_async_saves import contents
from test_checkpoint_faults import failing
from zoo import CASES, tower, tower_batch

BOOSTER = castor.Booster(plugin=plugin())
GPT2 = CASES["gpt2"]  # its output layer is the embedding
TIE = ["lm_head.weight=transformer.wte.weight"]
LAYOUTS: list[Layout] = ["hf", "torch", "dcp", "castor"]

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled:UserWarning"  # what dcp.load says on one process
)


def trained(steps: int = 2, model: nn.Module | None = None, **settings: Any) -> Boosted:
    boosted = boost(model or GPT2.model(), **settings)
    train(boosted, 0, steps)
    return boosted


def train(boosted: Boosted, first: int, steps: int) -> list[float]:
    batches = map(GPT2.batch, range(first, first + steps))
    return [boosted.step(GPT2.loss(boosted.model(**batch), batch)) for batch in batches]


def train_plainly(model: nn.Module, optimizer: Any, first: int, steps: int) -> list[float]:
    losses = []
    for seed in range(first, first + steps):
        batch = GPT2.batch(seed)
        loss = GPT2.loss(model(**batch), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def save(boosted: Boosted, directory: Path) -> Path:
    return Path(boosted.booster.save(directory, boosted.model, boosted.optimizer))


@pytest.fixture(scope="module")
def gpt2_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 run of two steps, not to be changed."""
    return save(trained(), tmp_path_factory.mktemp("gpt2"))


def only(directory: Path, *expected: str) -> bool:
    return sorted(path.name for path in directory.iterdir()) == sorted(expected)


# --- round trips --------------------------------------------------------------------------------


@pytest.mark.parametrize("through", ["dcp", "torch"])
@pytest.mark.parametrize(("precision", "state_format"), FORMATS)
def test_a_run_comes_back_byte_for_byte(
    precision: str, state_format: str, through: Layout, tmp_path: Path
) -> None:
    boosted = trained(precision=precision, optim_state_format=state_format, initial_scale=2.0**8)
    path = save(boosted, tmp_path / "run")
    convert(tmp_path / "run", tmp_path / "there", through)
    convert(tmp_path / "there", tmp_path / "back", "castor")
    assert contents(tmp_path / "back") == contents(path)
    boosted.booster.load(tmp_path / "back", boosted.model, boosted.optimizer)


@pytest.mark.parametrize("through", ["dcp", "torch"])
def test_several_optimizers_come_back_byte_for_byte(through: Layout, tmp_path: Path) -> None:
    model = tower()
    first, *rest = model.parameters()
    optimizers = [AdamW([first], lr=LR), SGD(rest, lr=LR, momentum=0.9)]
    booster = castor.Booster(plugin=plugin())
    model, optimizers, *_ = booster.boost(model, optimizers)
    loss = model(**tower_batch(0))
    booster.backward(loss, optimizers[0])
    for optimizer in optimizers:
        optimizer.step()
    path = booster.save(tmp_path / "run", model, optimizers)
    convert(tmp_path / "run", tmp_path / "there", through)
    convert(tmp_path / "there", tmp_path / "back", "castor")
    assert contents(tmp_path / "back") == contents(path)


class Odd(nn.Module):
    """Tensors of many kinds: frozen, tied, empty, of no dimension, whole numbers, truth values."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.norm = nn.BatchNorm1d(32)
        self.last = nn.Linear(32, 32, bias=False)
        self.last.weight = self.first.weight
        self.frozen = nn.Parameter(torch.randn(32), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("mask", torch.rand(5) < 0.5)
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("bytes", torch.arange(7, dtype=torch.uint8))
        self.register_buffer("wide", torch.randn(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.last(self.norm(self.first(x) + self.frozen)) * self.scale).square().mean()


@pytest.mark.parametrize("through", ["dcp", "torch"])
def test_tensors_of_every_kind_come_back(through: Layout, tmp_path: Path) -> None:
    torch.manual_seed(0)
    boosted = boost(Odd())
    boosted.step(boosted.model(tower_batch(0)["x"]))
    path = save(boosted, tmp_path / "run")
    convert(path, tmp_path / "there", through)
    convert(tmp_path / "there", tmp_path / "back", "castor")
    assert contents(tmp_path / "back") == contents(path)
    if through == "torch":
        state = torch.load(tmp_path / "there" / "model.pt")
        assert state.keys() == boosted.model.state_dict().keys()
        assert all(equal(value, state[key]) for key, value in boosted.model.state_dict().items())


def test_shards_become_one_file_and_one_file_shards(tmp_path: Path, gpt2_run: Path) -> None:
    model = GPT2.model()
    BOOSTER.load_model(model, gpt2_run / "model")
    BOOSTER.save_model(model, tmp_path / "shards", size_per_shard="50KB")
    BOOSTER.save_model(model, tmp_path / "one")
    convert(tmp_path / "shards", tmp_path / "to one", "hf")
    convert(tmp_path / "one", tmp_path / "to shards", "hf", max_bytes=50_000)
    assert contents(tmp_path / "to one") == contents(tmp_path / "one")
    assert contents(tmp_path / "to shards") == contents(tmp_path / "shards")
    assert len(list((tmp_path / "to shards").glob("*.safetensors"))) > 3


def test_a_single_safetensors_file_is_a_source(tmp_path: Path) -> None:
    save_file({"a": torch.randn(3), "b": torch.arange(2)}, tmp_path / "some.safetensors")
    convert(tmp_path / "some.safetensors", tmp_path / "dcp", "dcp")
    convert(tmp_path / "dcp", tmp_path / "hf", "hf")
    there, back = (
        load_file(path)
        for path in (tmp_path / "some.safetensors", tmp_path / "hf" / "model.safetensors")
    )
    assert there.keys() == back.keys()
    assert all(equal(back[key], there[key]) for key in there)


# --- Hugging Face's layout ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "t5", "mixtral"])
def test_hf_of_a_run_is_what_save_model_writes(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    boosted = boost(case.model())
    batch = case.batch(0)
    boosted.step(case.loss(boosted.model(**batch), batch))
    save(boosted, tmp_path / "run")
    BOOSTER.save_model(boosted.model, tmp_path / "saved", size_per_shard="100KB")
    done = convert(
        tmp_path / "run", tmp_path / "converted", "hf", max_bytes=100_000, build=build_by_name
    )
    assert contents(tmp_path / "converted") == contents(tmp_path / "saved")
    assert [what.partition(" ")[0] for what in done.left_out] == ["states", "trainer"]
    published = type(case.model()).from_pretrained(tmp_path / "converted")
    assert_same_weights(boosted.model, published.parameters())


@pytest.mark.parametrize("state_format", ["fp32", "split", "split_bf16", "split_int8"])
def test_masters_become_float32_weights(state_format: str, tmp_path: Path) -> None:
    boosted = trained(precision="bf16", optim_state_format=state_format)
    save(boosted, tmp_path / "run")
    full = boost(GPT2.model())
    full.booster.load(tmp_path / "run", full.model, full.optimizer)
    BOOSTER.save_model(full.model, tmp_path / "saved")
    convert(tmp_path / "run", tmp_path / "converted", "hf", dtype="fp32")
    assert contents(tmp_path / "converted") == contents(tmp_path / "saved")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_float32_weights_are_rounded_as_a_boosted_model_does(
    precision: Precision, tmp_path: Path, gpt2_run: Path
) -> None:
    half = boost(GPT2.model(), precision=precision, optim_state_format="fp32")
    half.booster.load(gpt2_run, half.model, half.optimizer)
    BOOSTER.save_model(half.model, tmp_path / "saved")
    convert(gpt2_run, tmp_path / "converted", "hf", dtype=precision)
    assert contents(tmp_path / "converted") == contents(tmp_path / "saved")
    # Of a run, the float32 weights are kept as masters: nothing is lost.
    convert(gpt2_run, tmp_path / "half", "castor", dtype=precision)
    convert(tmp_path / "half", tmp_path / "back", "castor", dtype="fp32")
    assert contents(tmp_path / "back") == contents(gpt2_run)
    again = boost(GPT2.model(), precision=precision, optim_state_format="fp32")
    again.booster.load(tmp_path / "half", again.model, again.optimizer)
    assert train(again, 2, 2) == train(half, 2, 2)


def test_quantised_weights_keep_their_type(tmp_path: Path) -> None:
    tensors = {"w": torch.ones(3).to(torch.float8_e4m3fn), "w.scale": torch.ones(1)}
    save_file(tensors, tmp_path / "q.safetensors")
    with pytest.raises(castor.CheckpointError, match=r"'w' of .* is torch.float8_e4m3fn: quantis"):
        convert(tmp_path / "q.safetensors", tmp_path / "hf", "hf", dtype="fp32")
    convert(tmp_path / "q.safetensors", tmp_path / "dcp", "dcp")
    convert(tmp_path / "dcp", tmp_path / "hf", "hf")
    back = load_file(tmp_path / "hf" / "model.safetensors")
    assert torch.equal(back["w"].view(torch.uint8), tensors["w"].view(torch.uint8))


# --- torch's scripts ----------------------------------------------------------------------------


def plain_pair() -> tuple[nn.Module, AdamW]:
    model = GPT2.model()
    return model, AdamW(model.parameters(), lr=0.5)


def test_a_plain_loop_goes_on_from_the_dcp_export(tmp_path: Path, gpt2_run: Path) -> None:
    convert(gpt2_run, tmp_path / "dcp", "dcp")
    model, optimizer = plain_pair()
    loaded_by_torch(tmp_path / "dcp", model, optimizer)
    expected, own = plain_pair()
    BOOSTER.load_model(expected, gpt2_run / "model")
    BOOSTER.load_optimizer(own, gpt2_run / "optimizer", model=expected)
    assert_same_weights(model, copies(expected.parameters()))
    for mine, theirs in zip(optimizer.state.values(), own.state.values(), strict=True):
        assert mine.keys() == theirs.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(equal(mine[key], theirs[key]) for key in theirs)
    losses = train_plainly(model, optimizer, 2, 3)
    assert losses == train_plainly(expected, own, 2, 3)
    assert_same_weights(model, copies(expected.parameters()))
    boosted = boost(GPT2.model())
    boosted.booster.load(gpt2_run, boosted.model, boosted.optimizer)
    # AdamW's own arithmetic: HybridAdam, below, has castor's bits.
    torch.testing.assert_close(losses, train(boosted, 2, 3), rtol=0, atol=1e-5)


@pytest.mark.parametrize("through", ["dcp", "torch"])
def test_a_plain_loop_of_hybrid_adam_has_the_bits_of_the_boosted_one(
    through: Layout, tmp_path: Path, gpt2_run: Path
) -> None:
    convert(gpt2_run, tmp_path / "there", through)
    model = GPT2.model()
    optimizer = castor.HybridAdam(model.parameters(), lr=0.5)
    if through == "dcp":
        loaded_by_torch(tmp_path / "there", model, optimizer)
    else:
        model.load_state_dict(torch.load(tmp_path / "there" / "model.pt"))
        optimizer.load_state_dict(torch.load(tmp_path / "there" / "optimizer.pt"))
    boosted = boost(GPT2.model())
    boosted.booster.load(gpt2_run, boosted.model, boosted.optimizer)
    assert train_plainly(model, optimizer, 2, 3) == train(boosted, 2, 3)
    assert_same_weights(boosted.model, model.parameters())


def test_a_torch_checkpoint_becomes_a_run(tmp_path: Path) -> None:
    """As torch's own script writes it, with what castor does not take."""
    model, optimizer = plain_pair()
    optimizer.param_groups[0]["lr"] = LR
    train_plainly(model, optimizer, 0, 3)
    saved_by_torch(tmp_path / "dcp", model, optimizer)
    done = convert(tmp_path / "dcp", tmp_path / "run", "castor", tie=TIE)
    assert (done.kind, done.left_out) == ("torch.distributed.checkpoint", [])
    back = boost(GPT2.model())
    assert back.booster.load(tmp_path / "run", back.model, back.optimizer).step == 3
    BOOSTER.save_model(model, tmp_path / "model")
    BOOSTER.save_optimizer(optimizer, tmp_path / "optimizer", model=model)
    # A run's tensors are in the model's order, save_model's in that of save_pretrained.
    weights, plain = (
        load_file(tmp_path / folder / "model.safetensors") for folder in ("run/model", "model")
    )
    assert weights.keys() == plain.keys()
    assert all(equal(weights[name], plain[name]) for name in plain)
    assert contents(tmp_path / "run" / "optimizer") == contents(tmp_path / "optimizer")


@pytest.mark.slow
def test_one_to_two_to_three_to_one_is_bitwise(tmp_path: Path, gpt2_run: Path) -> None:
    convert(gpt2_run, tmp_path / "dcp", "dcp")
    for size in (2, 3):
        assert succeeded(run(convert_cases.sharded, size, tmp_path)) == [f"{LR}\n"] * size
        shutil.rmtree(tmp_path / "dcp")
        shutil.copytree(tmp_path / f"of {size}", tmp_path / "dcp")
    convert(tmp_path / "dcp", tmp_path / "run", "castor", tie=TIE)
    back, boosted = boost(GPT2.model()), boost(GPT2.model())
    assert back.booster.load(tmp_path / "run", back.model, back.optimizer).step == 2
    boosted.booster.load(gpt2_run, boosted.model, boosted.optimizer)
    assert train(back, 2, 2) == train(boosted, 2, 2)
    one, other = (
        load_file(p / "optimizer" / "optimizer.safetensors") for p in (gpt2_run, tmp_path / "run")
    )
    assert one.keys() == other.keys()
    assert all(equal(other[key], one[key]) for key in one)


def test_hf_becomes_dcp_and_a_tied_key_is_named(tmp_path: Path) -> None:
    model = GPT2.model()
    model.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "dcp", "dcp", tie=TIE)
    own = GPT2.build()
    state = {"model": own.state_dict()}
    torch_dcp.load(state, checkpoint_id=tmp_path / "dcp")
    assert_same_weights(own, copies(model.parameters()))
    assert (tmp_path / "dcp" / "config.json").exists()
    with pytest.raises(castor.CheckpointError, match="it has no 'nothing'"):
        convert(tmp_path / "hf", tmp_path / "x", "dcp", tie=["lm_head.weight=nothing"])
    with pytest.raises(castor.CheckpointError, match="differ in the source"):
        convert(
            *(tmp_path / "hf", tmp_path / "x", "dcp"),
            tie=["transformer.h.0.ln_1.bias=transformer.h.0.ln_1.weight"],
        )


# --- files of torch.save ------------------------------------------------------------------------


@pytest.mark.parametrize("named", [True, False])
def test_adamws_state_dict_goes_both_ways(named: bool, tmp_path: Path) -> None:
    model = tower()
    optimizer = AdamW(model.named_parameters() if named else model.parameters(), lr=LR)
    model(**tower_batch(0)).backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    names = [name for name, _ in model.named_parameters()]
    given = None if named else names
    if not named:
        with pytest.raises(castor.CheckpointError, match="parameters by position alone"):
            convert(tmp_path / "optimizer.pt", tmp_path / "castor", "castor")
    convert(tmp_path / "optimizer.pt", tmp_path / "castor", "castor", names=given)
    BOOSTER.save_optimizer(optimizer, tmp_path / "saved", model=model)
    assert contents(tmp_path / "castor") == contents(tmp_path / "saved")
    boosted = boost(tower())
    BOOSTER.load_optimizer(boosted.optimizer, tmp_path / "castor", model=boosted.model)

    convert(tmp_path / "castor", tmp_path / "torch", "torch")
    back = torch.load(tmp_path / "torch" / "optimizer.pt")
    own = optimizer.state_dict()
    assert back["param_groups"] == [{**own["param_groups"][0], "param_names": names}]
    assert back["state"].keys() == own["state"].keys()
    for key, entry in own["state"].items():
        assert all(equal(back["state"][key][name], value) for name, value in entry.items())


def test_names_of_other_parameters_are_refused(tmp_path: Path) -> None:
    model = tower()
    optimizer = Adam(model.parameters(), lr=LR)
    model(**tower_batch(0)).backward()
    optimizer.step()
    file = tmp_path / "both.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, file)
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(castor.CheckpointError, match=rf"{len(names)} parameters, and 1 names"):
        convert(file, tmp_path / "run", "castor", names=names[:1])
    with pytest.raises(castor.CheckpointError, match=r"of shape .* whose shape is .*not those of"):
        convert(file, tmp_path / "run", "castor", names=names[::-1])
    done = convert(file, tmp_path / "run", "castor", names=names)
    assert done.left_out == ["epoch"]
    description = json.loads((tmp_path / "run" / "optimizer" / "optimizer.json").read_bytes())
    assert description["optimizer"] == "Adam"


def test_states_of_other_optimizers_are_refused(tmp_path: Path) -> None:
    model = tower()
    optimizer = RMSprop(model.named_parameters(), lr=LR)
    model(**tower_batch(0)).backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "rms.pt")
    with pytest.raises(castor.CheckpointError, match=r"has states \['square_avg', 'step'\]"):
        convert(tmp_path / "rms.pt", tmp_path / "castor", "castor")


# --- what is no source, and what is damaged -----------------------------------------------------


def test_the_kind_is_seen_from_the_contents(tmp_path: Path, gpt2_run: Path) -> None:
    for layout in ("hf", "torch", "dcp"):
        convert(gpt2_run, tmp_path / layout, layout)  # type: ignore[arg-type]
        assert kind_of(tmp_path / layout) == layout
    assert kind_of(gpt2_run) == kind_of(gpt2_run.parent) == "run"
    assert kind_of(gpt2_run / "optimizer") == "optimizer"
    assert kind_of(gpt2_run / "model") == "hf"
    assert kind_of(tmp_path / "torch" / "model.pt") == "torch"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("x")
    for path, what in (
        (tmp_path / "other", r"\(notes.txt\)"),
        (tmp_path / "other" / "notes.txt", r"\(a file of another kind\)"),
        (tmp_path / "no", r"\(nothing\)"),
    ):
        with pytest.raises(castor.CheckpointError, match=rf"no checkpoint .* {what}; it reads"):
            convert(path, tmp_path / "x", "hf")


def test_what_a_layout_does_not_hold_is_refused(tmp_path: Path, gpt2_run: Path) -> None:
    for arguments, message in (
        ((gpt2_run / "optimizer", "hf"), "has no weights"),
        ((gpt2_run / "model", "castor"), "no run goes on from weights alone"),
    ):
        with pytest.raises(castor.CheckpointError, match=message):
            convert(arguments[0], tmp_path / "x", arguments[1])  # type: ignore[arg-type]
    with pytest.raises(castor.CheckpointError, match="leave --names out"):
        convert(gpt2_run, tmp_path / "x", "dcp", names=["a"])
    with pytest.raises(ValueError, match="leave --shard-size out"):
        convert(gpt2_run, tmp_path / "x", "dcp", max_bytes=100)
    assert only(tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damage_of_what_castor_wrote_is_named(
    damage: str, layout: Layout, tmp_path: Path, gpt2_run: Path
) -> None:
    convert(gpt2_run, tmp_path / "source", layout)
    file = max(
        (p for p in (tmp_path / "source").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size
    )
    damage_file(file, damage)
    with pytest.raises(castor.CheckpointError, match=file.name):
        convert(tmp_path / "source", tmp_path / "x", "hf")
    assert only(tmp_path, "source")


def damage_file(file: Path, damage: str) -> None:
    raw = bytearray(file.read_bytes())
    if damage == "remove":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(raw[: len(raw) // 2])
    else:
        raw[len(raw) // 2] ^= 1
        file.write_bytes(raw)


@pytest.mark.parametrize("damage", ["cut", "remove"])
def test_damage_of_what_torch_wrote_is_named(damage: str, tmp_path: Path) -> None:
    model, optimizer = plain_pair()
    train_plainly(model, optimizer, 0, 1)
    saved_by_torch(tmp_path / "dcp", model, optimizer)
    (file,) = (tmp_path / "dcp").glob("*.distcp")
    damage_file(file, damage)
    with pytest.raises(castor.CheckpointError, match=file.name):
        convert(tmp_path / "dcp", tmp_path / "x", "castor")
    torch.save(model.state_dict(), tmp_path / "m.pt")
    damage_file(tmp_path / "m.pt", "cut")
    with pytest.raises(castor.CheckpointError, match=r"m\.pt by torch\.load"):
        convert(tmp_path / "m.pt", tmp_path / "x", "hf")
    damage_file(tmp_path / "dcp" / ".metadata", "cut")
    with pytest.raises(castor.CheckpointError, match=r"cannot read .*\.metadata"):
        convert(tmp_path / "dcp", tmp_path / "x", "castor")
    assert only(tmp_path, "dcp", "m.pt")


def test_a_box_that_is_missing_is_named(tmp_path: Path) -> None:
    torch_dcp.save(
        {"model": {"a": torch.ones(3), "b": torch.ones(2)}}, checkpoint_id=tmp_path / "d"
    )
    with open(tmp_path / "d" / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    metadata.storage_data = {
        index: place for index, place in metadata.storage_data.items() if index.fqn != "model.b"
    }
    (tmp_path / "d" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(castor.CheckpointError, match=r"lacks a part of 'model\.b'; it is damaged"):
        convert(tmp_path / "d", tmp_path / "x", "hf")


def test_what_dcp_holds_beside_a_model_is_named(tmp_path: Path) -> None:
    weights = {"a": torch.ones(3)}
    torch_dcp.save({"model": weights, "loader": {"at": 3}}, checkpoint_id=tmp_path / "d")
    assert convert(tmp_path / "d", tmp_path / "x", "hf").left_out == ["loader"]
    torch_dcp.save(weights, checkpoint_id=tmp_path / "flat")
    convert(tmp_path / "flat", tmp_path / "y", "hf")
    assert load_file(tmp_path / "y" / "model.safetensors").keys() == {"a"}
    torch_dcp.save({"app": {"net": weights}}, checkpoint_id=tmp_path / "app")
    with pytest.raises(castor.CheckpointError, match=r"holds \['app'\]: neither 'model' nor"):
        convert(tmp_path / "app", tmp_path / "z", "hf")
    flat = {"state.a.exp_avg": torch.ones(3), "param_groups.a.lr": 1.0}
    torch_dcp.save({"model": weights, "optimizer": flat}, checkpoint_id=tmp_path / "f")
    with pytest.raises(castor.CheckpointError, match="without flatten_optimizer_state_dict"):
        convert(tmp_path / "f", tmp_path / "z", "castor")


class Hostile:
    """What would run if it were unpickled."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return (os.mkdir, ("hacked",))


def test_pickles_of_others_run_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(castor.CheckpointError, match=r"mkdir, which is none of DCP's classes"):
        convert(tmp_path / "dcp", tmp_path / "x", "hf")
    torch.save({"w": Hostile()}, tmp_path / "h.pt")
    with pytest.raises(castor.CheckpointError, match="weights_only"):
        convert(tmp_path / "h.pt", tmp_path / "x", "hf")
    torch_dcp.save({"model": {"w": torch.ones(1), "h": Hostile()}}, checkpoint_id=tmp_path / "d2")
    with pytest.raises(castor.CheckpointError, match=r"cannot read 'model\.h'"):
        convert(tmp_path / "d2", tmp_path / "x", "hf")
    assert only(tmp_path, "dcp", "h.pt", "d2")


# --- the target ---------------------------------------------------------------------------------


def test_a_target_is_replaced_only_by_force(tmp_path: Path, gpt2_run: Path) -> None:
    convert(gpt2_run, tmp_path / "t", "hf")
    before = contents(tmp_path / "t")
    with pytest.raises(castor.CheckpointError, match="exists; name another target, or replace it"):
        convert(gpt2_run, tmp_path / "t", "dcp")
    assert contents(tmp_path / "t") == before
    convert(gpt2_run, tmp_path / "t", "dcp", force=True)
    assert kind_of(tmp_path / "t") == "dcp"
    assert not (tmp_path / "t" / "model.safetensors").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letters.txt").write_text("dear")
    with pytest.raises(castor.CheckpointError, match="--force replaces checkpoints only"):
        convert(gpt2_run, tmp_path / "other", "hf", force=True)
    for target in (gpt2_run, gpt2_run.parent, gpt2_run / "hf"):
        with pytest.raises(castor.CheckpointError, match="are in one another"):
            convert(gpt2_run, target, "hf", force=True)
    assert only(tmp_path, "other", "t")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_disk_that_fails_at_any_sync_leaves_nothing(
    layout: Layout, tmp_path: Path, gpt2_run: Path
) -> None:
    for n in range(1, 100):
        with failing("fsync", n, errno.EIO):
            try:
                convert(gpt2_run, tmp_path / "t", layout)
                break
            except castor.IoError:
                assert only(tmp_path)
    assert n > 5


def test_a_kill_leaves_nothing_under_the_targets_name(tmp_path: Path, gpt2_run: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from castor.checkpoint import convert, torch_layout\n"
        "torch_layout.seal_part = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "convert.convert(Path(sys.argv[1]), Path(sys.argv[2]), 'dcp')\n"
    )
    target = tmp_path / "targets" / "t"
    target.parent.mkdir()
    done = run_python(script, gpt2_run, target)
    assert done.returncode == -signal.SIGKILL
    assert not target.exists()
    assert len(list(target.parent.iterdir())) == 1
    convert(gpt2_run, target, "dcp")
    assert only(target.parent, "t")


# --- memory -------------------------------------------------------------------------------------


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise AssertionError


M_MMAP_THRESHOLD = -3
"""Of mallopt(3): blocks as large are the system's again when they are freed. glibc raises it by
itself, up to 32 MiB, and then keeps freed tensors in a heap with holes."""


@pytest.fixture
def freed_memory_goes() -> Iterator[None]:
    libc = ctypes.CDLL(None)
    assert libc.mallopt(M_MMAP_THRESHOLD, 2**20) == 1
    yield
    libc.mallopt(M_MMAP_THRESHOLD, 2**25)


@pytest.mark.cpu_device("the process's memory is measured")
@pytest.mark.usefixtures("freed_memory_goes")
@pytest.mark.parametrize(
    ("through", "layout"),
    [("hf", layout) for layout in LAYOUTS if layout != "castor"]  # of weights alone
    + [("dcp", layout) for layout in LAYOUTS],
)
@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_memory_is_that_of_a_few_tensors(
    through: Layout,
    dtype: Precision | None,
    layout: Layout,
    tmp_path: Path,
) -> None:
    """16 tensors of 4 MiB: memory that the kernel cannot take back grows by that of six.

    Rounding has the exact tensor and the rounded one; torch's reader bytes, box and whole of one.
    The least of two: on a busy machine malloc sometimes keeps a freed tensor in another arena.
    """
    tensors = {f"layers.{i}.weight": torch.full((2**20,), float(i)) for i in range(16)}
    if layout == "castor":
        state = {"step": torch.tensor(1.0), "exp_avg": tensors["layers.0.weight"]}
        document = {
            "model": tensors,
            "optimizer": {
                "state": {key: state | {"exp_avg_sq": value} for key, value in tensors.items()},
                "param_groups": [{"lr": 1.0, "params": list(tensors)}],
            },
        }
    else:
        document = {"model": tensors}
    torch_dcp.save(document, checkpoint_id=tmp_path / "dcp")
    source = tmp_path / "dcp"
    if through == "hf":
        convert(source, tmp_path / "hf", "hf")
        source = tmp_path / "hf"
    del document, tensors
    warm = tmp_path / "warm"  # imports, threads and caches are not the point
    save_file({"w": torch.ones(2**16)}, tmp_path / "w.safetensors")
    small = "dcp" if layout == "castor" else layout
    convert(tmp_path / "w.safetensors", warm, small, dtype=dtype)
    most = 6 * 4 * 2**20 + 2**20
    grown: list[int] = []
    for name in ("t", "again"):
        if grown and grown[0] < most:
            break
        ctypes.CDLL(None).malloc_trim(0)  # what is free already would be taken again unseen
        before = anonymous_bytes()
        with sampled() as peak:
            convert(source, tmp_path / name, layout, dtype=dtype)
        grown.append(peak() - before)
    assert min(grown) < most


@contextmanager
def sampled() -> Iterator[Callable[[], int]]:
    """Gives the most anonymous memory that a thread has seen."""
    most, over = [anonymous_bytes()], threading.Event()

    def watch() -> None:
        while not over.wait(0.001):
            most.append(max(most.pop(), anonymous_bytes()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield lambda: most[0]
    finally:
        over.set()
        watcher.join()


# --- the command --------------------------------------------------------------------------------


def test_the_command_says_what_it_did(tmp_path: Path, gpt2_run: Path) -> None:
    def command(*arguments: object) -> subprocess.CompletedProcess[str]:
        return run_python("-W", "error", "-m", "castor", "convert", *map(str, arguments))

    done = command(gpt2_run.parent, tmp_path / "hf", "--to", "hf", "--shard-size", "100KB")
    assert (done.returncode, done.stderr) == (0, "")
    assert "castor run" in done.stdout
    assert "left out: states of 1 optimizer" in done.stdout
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    again = command(gpt2_run, tmp_path / "hf", "--to", "hf")
    assert again.returncode == 1
    assert again.stderr.startswith("castor: error: ")
    assert "--force" in again.stderr
    for options, said in (
        (["--to", "onnx"], "--to onnx: give one of hf, torch, dcp, castor"),
        (["--to", "hf", "--dtype", "int4"], "--dtype int4: give one of fp32, bf16, fp16"),
    ):
        wrong = command(gpt2_run, tmp_path / "x", *options)
        assert wrong.returncode == 1
        assert said in wrong.stderr
