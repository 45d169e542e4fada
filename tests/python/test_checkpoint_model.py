"""Models on disk: the Hugging Face layout, in both directions, bitwise."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import castor
from castor.checkpoint.container import read_header
from helpers import boost, copies, equal, plugin
from zoo import CASES, gpt2, llama, tower, tower_batch

BOOSTER = castor.Booster(plugin=plugin())


def trained(name: str, **settings: Any) -> Any:
    case = CASES[name]
    boosted = boost(case.model(), **settings)
    for seed in range(2):
        boosted.step(case.loss(boosted.model(**case.batch(seed)), case.batch(seed)))
    return boosted.model


def assert_same_state(actual: nn.Module, expected: nn.Module | Mapping[str, torch.Tensor]) -> None:
    state = expected.state_dict() if isinstance(expected, nn.Module) else expected
    own = actual.state_dict()
    assert own.keys() == state.keys()
    for key, tensor in state.items():
        assert own[key].dtype == tensor.dtype, key
        assert equal(own[key], tensor), key


def other_values(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)
    return model


# --- round trips --------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "mixtral", "bert"])
def test_round_trip_through_transformers_is_bitwise(
    name: str, precision: str, tmp_path: Path
) -> None:
    model = trained(name, precision=precision)
    BOOSTER.save_model(model, tmp_path / "castor")
    theirs, info = type(model).from_pretrained(tmp_path / "castor", output_loading_info=True)
    assert not any(info.values())
    assert theirs.config.architectures == [type(model).__name__]
    assert_same_state(theirs, model)
    theirs.save_pretrained(tmp_path / "theirs")
    back = boost(other_values(CASES[name].model()), precision=precision).model
    result = BOOSTER.load_model(back, tmp_path / "theirs")
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert_same_state(back, model)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ({"memory": "1GiB"}, {"memory": "1200KiB", "placement_policy": "cpu"}),
        ({"memory": "1200KiB"}, {"placement_policy": "cuda"}),
        ({"placement_policy": "cuda"}, {"placement_policy": "static", "offload_optim_frac": 1.0}),
    ],
)
def test_budget_and_policy_may_change(
    saved: dict[str, Any], loaded: dict[str, Any], tmp_path: Path
) -> None:
    model = trained("gpt2", **saved)
    BOOSTER.save_model(model, tmp_path / "model")
    back = boost(other_values(CASES["gpt2"].model()), **loaded).model
    BOOSTER.load_model(back, tmp_path / "model")
    assert_same_state(back, model)


def test_weights_that_are_on_the_device_are_saved_as_they_are(tmp_path: Path) -> None:
    boosted = boost(tower())
    boosted.step(boosted.model(**tower_batch(0)))
    with torch.no_grad():
        boosted.model(**tower_batch(1))  # leaves chunks on the device
        boosted.model.head.weight.fill_(3.0)
    BOOSTER.save_model(boosted.model, tmp_path / "model")
    assert_same_state(boosted.model, load_file(tmp_path / "model" / "model.safetensors"))
    assert bool((boosted.model.head.weight == 3.0).all())


def test_plain_model_saves_and_loads(tmp_path: Path) -> None:
    model = tower()
    BOOSTER.save_model(model, tmp_path / "model")
    back = other_values(tower())
    BOOSTER.load_model(back, tmp_path / "model")
    assert_same_state(back, model)


def test_part_of_a_boosted_model_saves_and_loads(tmp_path: Path) -> None:
    boosted = boost(tower(), precision="bf16")
    BOOSTER.save_model(boosted.model.layers, tmp_path / "layers")
    before = copies(boosted.model.parameters())
    boosted.step(boosted.model(**tower_batch(0)))
    BOOSTER.load_model(boosted.model.layers, tmp_path / "layers")
    for param, value in zip(boosted.model.layers.parameters(), before, strict=False):
        assert equal(param, value)


def test_float32_checkpoint_reaches_the_masters_exactly(tmp_path: Path) -> None:
    plain = CASES["llama"].model()
    plain.save_pretrained(tmp_path / "plain")
    built = boost(CASES["llama"].model(), precision="bf16")
    loaded = boost(other_values(CASES["llama"].model()), precision="bf16")
    loaded.booster.load_model(loaded.model, tmp_path / "plain")
    assert_same_state(loaded.model, built.model)
    case = CASES["llama"]
    for seed in range(3):
        losses = [b.step(b.model(**case.batch(seed)).loss) for b in (built, loaded)]
        assert losses[0] == losses[1]


# --- the files ----------------------------------------------------------------------------------


def test_shards_and_index_are_those_of_hugging_face(tmp_path: Path) -> None:
    model = trained("gpt2")
    BOOSTER.save_model(model, tmp_path / "m", size_per_shard="40KB")
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "m").glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in model.parameters())
    for file in files:
        with safe_open(tmp_path / "m" / file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert all(index["weight_map"][key] == file for key in opened.keys())  # noqa: SIM118
            size = sum(opened.get_tensor(key).nbytes for key in opened.keys())  # noqa: SIM118
            assert size <= 40_000 or len(list(opened.keys())) == 1
    assert_same_state(hf.AutoModelForCausalLM.from_pretrained(tmp_path / "m"), model)
    back = boost(other_values(CASES["gpt2"].model())).model
    BOOSTER.load_model(back, tmp_path / "m")
    assert_same_state(back, model)


def test_shard_false_writes_one_file(tmp_path: Path) -> None:
    BOOSTER.save_model(trained("gpt2"), tmp_path / "m", shard=False, size_per_shard="10KB")
    assert [path.name for path in (tmp_path / "m").glob("*.safe*")] == ["model.safetensors"]


@pytest.mark.parametrize("name", ["gpt2", "t5", "bert"])
def test_tied_weights_are_saved_once_as_transformers_does(name: str, tmp_path: Path) -> None:
    model = CASES[name].model()
    BOOSTER.save_model(model, tmp_path / "castor")
    model.save_pretrained(tmp_path / "theirs")
    theirs = read_header(tmp_path / "theirs" / "model.safetensors")
    assert read_header(tmp_path / "castor" / "model.safetensors").keys() == theirs.keys()
    assert len(theirs) < len(model.state_dict())


def test_every_type_and_layout_comes_back_through_the_library(tmp_path: Path) -> None:
    values = torch.arange(24).reshape(2, 3, 4) % 2
    types = (
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
        torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn,
    )  # fmt: skip
    model = nn.Module()
    for i, dtype in enumerate(types):
        model.register_buffer(f"plain{i}", values.to(dtype))
        model.register_buffer(f"transposed{i}", values.to(dtype).transpose(0, 2))
    model.register_buffer("conjugate", torch.randn(3, dtype=torch.complex64).conj())
    model.register_buffer("scalar", torch.tensor(2.5))
    model.register_buffer("empty", torch.empty(0, 3))
    model.register_buffer("large", torch.randn(3, 1500, 1500).transpose(0, 2))
    model.register_buffer("wide", torch.randn(2, 1500, 1500).transpose(1, 2))
    BOOSTER.save_model(model, tmp_path / "m")
    loaded = load_file(tmp_path / "m" / "model.safetensors")
    header = (tmp_path / "m" / "model.safetensors").read_bytes()[:8]
    assert int.from_bytes(header, "little") % 8 == 0
    assert loaded.keys() == model.state_dict().keys()
    for key, value in model.state_dict().items():
        assert loaded[key].dtype == value.dtype
        assert bits(loaded[key]) == bits(value), key
    expected = {key: bits(value) for key, value in model.state_dict().items()}
    for buffer in model.buffers():
        buffer.zero_()
    BOOSTER.load_model(model, tmp_path / "m")
    assert {key: bits(value) for key, value in model.state_dict().items()} == expected


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.resolve_conj().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


class Tokenizer:
    def save_pretrained(self, directory: Path) -> None:
        (Path(directory) / "tokenizer.json").write_text('{"words": []}')


def test_overwriting_replaces_what_is_castors_and_keeps_the_rest(tmp_path: Path) -> None:
    model, directory = trained("gpt2"), tmp_path / "m"
    BOOSTER.save_model(model, directory, size_per_shard="40KB", tokenizer=Tokenizer())
    (directory / "README.md").write_text("mine")
    (directory / "runs").mkdir()
    (directory / "runs" / "log").write_text("mine too")
    BOOSTER.save_model(model, directory)
    names = {path.name for path in directory.iterdir()}
    assert names == {
        "README.md", "runs", "tokenizer.json", "model.safetensors", "config.json",
        "generation_config.json", "castor-manifest.json",
    }  # fmt: skip
    assert (directory / "runs" / "log").read_text() == "mine too"
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    (directory / "tokenizer.json").write_text('{"words": 00}')  # carried over with its checksum
    with pytest.raises(castor.CheckpointError, match=r"tokenizer\.json is damaged"):
        BOOSTER.load_model(model, directory)


def test_saving_over_a_foreign_checkpoint_replaces_its_weights(tmp_path: Path) -> None:
    first, second = CASES["gpt2"].model(), other_values(CASES["gpt2"].model())
    first.save_pretrained(tmp_path / "m", max_shard_size="40KB")
    BOOSTER.save_model(second, tmp_path / "m")
    assert [path.name for path in (tmp_path / "m").glob("*.safe*")] == ["model.safetensors"]
    assert_same_state(hf.AutoModelForCausalLM.from_pretrained(tmp_path / "m"), second)


# --- keys that differ ---------------------------------------------------------------------------


def saved_state(state: dict[str, torch.Tensor], directory: Path) -> Path:
    directory.mkdir()
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def differing_state() -> dict[str, torch.Tensor]:
    state = {key: value.clone() for key, value in tower().state_dict().items()}
    del state["layers.2.weight"], state["head.bias"]
    state["alien.weight"] = torch.zeros(2)
    state["layers.0.extra"] = torch.zeros(1)
    state["layers.1.bias"] = torch.zeros(3)
    return state


def test_differing_keys_are_reported_in_torchs_words(tmp_path: Path) -> None:
    state = differing_state()
    with pytest.raises(RuntimeError) as theirs:
        tower().load_state_dict(state)
    boosted = boost(tower())
    before = copies(boosted.model.parameters())
    with pytest.raises(castor.CheckpointError) as raised:
        BOOSTER.load_model(boosted.model, saved_state(state, tmp_path / "m"))
    assert str(raised.value) == str(theirs.value)
    for param, value in zip(boosted.model.parameters(), before, strict=True):
        assert equal(param, value)


def test_strict_false_loads_what_matches_and_tells_the_rest(tmp_path: Path) -> None:
    state = differing_state()
    del state["layers.1.bias"]
    expected = tower().load_state_dict(state, strict=False)
    boosted = boost(other_values(tower()))
    result = BOOSTER.load_model(boosted.model, saved_state(state, tmp_path / "m"), strict=False)
    assert result.missing_keys == expected.missing_keys
    assert sorted(result.unexpected_keys) == sorted(expected.unexpected_keys)
    assert equal(boosted.model.layers[0].weight, tower().layers[0].weight)
    state["layers.1.bias"] = torch.zeros(3)
    with pytest.raises(castor.CheckpointError, match=r"size mismatch for layers\.1\.bias"):
        BOOSTER.load_model(boosted.model, saved_state(state, tmp_path / "n"), strict=False)


def test_checkpoint_of_the_base_model_loads_into_the_headed_one(tmp_path: Path) -> None:
    model = CASES["gpt2"].model()
    model.transformer.save_pretrained(tmp_path / "base")
    back = boost(other_values(CASES["gpt2"].model())).model
    state = torch.get_rng_state()
    BOOSTER.load_model(back, tmp_path / "base")
    assert equal(torch.get_rng_state(), state)
    assert_same_state(back, model)


def test_checkpoint_of_another_architecture_is_refused_with_both_reasons(tmp_path: Path) -> None:
    BOOSTER.save_model(llama(), tmp_path / "llama")
    model = boost(gpt2()).model
    before = copies(model.parameters())
    with pytest.raises(castor.CheckpointError, match="Missing key"):
        BOOSTER.load_model(model, tmp_path / "llama")
    for param, value in zip(model.parameters(), before, strict=True):
        assert equal(param, value)


def test_shapes_of_another_size_are_refused_after_renaming_too(tmp_path: Path) -> None:
    gpt2(width=32).transformer.save_pretrained(tmp_path / "base")
    with pytest.raises(castor.CheckpointError, match=r"size mismatch for transformer\.wte"):
        BOOSTER.load_model(boost(gpt2()).model, tmp_path / "base")


# --- what cannot be saved or loaded -------------------------------------------------------------


@pytest.mark.parametrize(("argument", "value"), [("prefix", "a"), ("use_safetensors", False)])
def test_arguments_of_others_are_refused_by_name(argument: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match=argument):
        BOOSTER.save_model(tower(), tmp_path / "m", **{argument: value})
    assert not list(tmp_path.iterdir())


class WithExtraState(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"calls": 1}

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError(state)


def test_extra_state_of_a_module_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(castor.CheckpointError, match=r"'0\._extra_state'"):
        BOOSTER.save_model(nn.Sequential(WithExtraState(2, 2)), tmp_path / "m")
    assert not list(tmp_path.iterdir())


def test_tensors_without_values_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(castor.CheckpointError, match=r"'weight'.*meta"):
        BOOSTER.save_model(nn.Linear(2, 2, device="meta"), tmp_path / "m")
    model = nn.Module()
    model.register_buffer("table", torch.eye(3).to_sparse())
    with pytest.raises(castor.CheckpointError, match="'table'"):
        BOOSTER.save_model(model, tmp_path / "m")
    assert not list(tmp_path.iterdir())


def test_pickled_checkpoints_are_not_read(tmp_path: Path) -> None:
    torch.save(tower().state_dict(), tmp_path / "pytorch_model.bin")
    converted = "holds no checkpoint.* castor convert .*pytorch_model.bin TARGET --to hf"
    for path in (tmp_path, tmp_path / "pytorch_model.bin"):
        with pytest.raises(castor.CheckpointError, match=converted):
            BOOSTER.load_model(tower(), path)


def test_a_path_of_another_kind_is_answered_with_what_loads_it(tmp_path: Path) -> None:
    run = boost(tower())
    with pytest.raises(castor.CheckpointError, match="There is no such directory"):
        BOOSTER.load_model(run.model, tmp_path / "missing")
    step = BOOSTER.save(tmp_path / "run", run.model, run.optimizer)
    for path in (tmp_path / "run", step):
        with pytest.raises(castor.CheckpointError, match=f"load_model {step / 'model'}$"):
            BOOSTER.load_model(run.model, path)
    assert BOOSTER.load_model(run.model, step / "model").missing_keys == []
    with pytest.raises(castor.CheckpointError, match="load_model reads them"):
        BOOSTER.load(step / "model", run.model, run.optimizer)


def test_arguments_in_another_order_are_type_errors(tmp_path: Path) -> None:
    run: Any = boost(tower())
    with pytest.raises(TypeError, match=r"the directory is a Tower; give a path.* take it first"):
        BOOSTER.save(run.model, tmp_path / "run", run.optimizer)
    with pytest.raises(TypeError, match="model is a AdamW"):
        BOOSTER.load(tmp_path / "run", run.optimizer, run.model)
    with pytest.raises(TypeError, match="the directory is a Tower"):
        BOOSTER.save_model(tmp_path / "model", run.model)
    assert not list(tmp_path.iterdir())


def test_size_per_shard_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="size_per_shard"):
        BOOSTER.save_model(tower(), tmp_path / "m", size_per_shard="many")
    with pytest.raises(ValueError, match=r"1024 is a number of bytes here, and of MiB in Colossal"):
        BOOSTER.save_model(tower(), tmp_path / "m", size_per_shard=1024)
    BOOSTER.save_model(tower(), tmp_path / "m", size_per_shard=2**20)
