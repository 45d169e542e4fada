"""Names and shapes of files: save_pretrained's bytes, whatever the model has in memory."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import nn

import castor
import hub_name_cases
from castor.checkpoint import hub_names
from castor.checkpoint.convert import convert
from castor.estimate.model import build_by_name
from helpers import boost, plugin
from hub_name_cases import SHARD
from rank_processes import run, succeeded
from zoo import tower

BOOSTER = castor.Booster(plugin=plugin())
TEXT: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS: dict[str, Any] = TEXT | {
    "num_key_value_heads": 2, "moe_intermediate_size": 24, "num_experts_per_tok": 2,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip


def llava() -> Any:
    text = hf.LlamaConfig(**TEXT, num_key_value_heads=2)
    vision = hf.CLIPVisionConfig(**VISION)
    config = hf.LlavaConfig(vision_config=vision, text_config=text, image_token_index=3)
    return hf.LlavaForConditionalGeneration(config)


def qwen2_vl() -> Any:
    text = TEXT | {
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]},
    }
    vision = {"embed_dim": 32, "hidden_size": 32, "depth": 1, "num_heads": 4, "patch_size": 14}
    return hf.Qwen2VLForConditionalGeneration(
        hf.Qwen2VLConfig(text_config=text, vision_config=vision)
    )


def t5() -> Any:
    return hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    )


def deepseek_v3() -> Any:
    latent = {
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "num_key_value_heads": 4,
    }  # fmt: skip
    return hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**(EXPERTS | latent)))


MODELS: dict[str, Any] = {
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**TEXT, num_local_experts=4)),
    "qwen3_moe": lambda: hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**EXPERTS, num_experts=4)),
    "gpt_neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**TEXT)),
    "deepseek_v3": deepseek_v3,
    "llava": llava,
    "qwen2_vl": qwen2_vl,
    "t5": t5,
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=64)
    ),
}


def made(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name]()


def files(directory: Path) -> dict[str, bytes]:
    """All that save_pretrained writes."""
    return {
        path.name: path.read_bytes()
        for path in directory.iterdir()
        if path.name != "castor-manifest.json"
    }


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def spoilt(model: Any) -> Any:
    """The model with other values."""
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)
    return model


def assert_same(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    own = model.state_dict()
    assert own.keys() == expected.keys()
    assert [key for key, value in own.items() if not torch.equal(value, expected[key])] == []


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", list(MODELS))
def test_files_are_those_of_save_pretrained_and_come_back(
    name: str, precision: Any, tmp_path: Path
) -> None:
    model = boost(made(name), precision=precision).model
    expected = state(model)
    for size in ("5GB", "20KB"):
        theirs, ours = tmp_path / f"theirs {size}", tmp_path / f"ours {size}"
        model.save_pretrained(theirs, max_shard_size=size)
        BOOSTER.save_model(model, ours, size_per_shard=size)
        assert files(ours) == files(theirs)
        for directory in (theirs, ours):
            result = BOOSTER.load_model(spoilt(model), directory)
            assert (result.missing_keys, result.unexpected_keys) == ([], [])
            assert_same(model, expected)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_vl", "gpt2"])
def test_so_are_those_written_beside_the_training_with_weights_on_nvme(
    name: str, tmp_path: Path
) -> None:
    settings = {"nvme_path": tmp_path, "nvme_offload_fraction": 1.0}
    booster, model, _ = boost(made(name), host_memory="64MiB", **settings)
    made(name).save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    booster.save_model(model, tmp_path / "ours", size_per_shard="20KB", use_async=True)
    booster.wait_for_saves()
    assert files(tmp_path / "ours") == files(tmp_path / "theirs")
    booster.load_model(spoilt(model), tmp_path / "theirs")
    assert_same(model, state(made(name)))


@pytest.mark.parametrize("name", ["mixtral", "qwen2_vl", "llava"])
def test_a_lazy_model_of_such_files_writes_them_again(name: str, tmp_path: Path) -> None:
    made(name).save_pretrained(tmp_path / "theirs")
    with castor.LazyInitContext():
        lazy = type(made(name)).from_pretrained(tmp_path / "theirs")
    model = boost(lazy).model
    BOOSTER.save_model(model, tmp_path / "ours")
    plain = type(model).from_pretrained(tmp_path / "theirs")
    plain.save_pretrained(tmp_path / "again")  # the config has gained types of its parts
    assert files(tmp_path / "ours") == files(tmp_path / "again")
    BOOSTER.load_model(spoilt(model), tmp_path / "theirs")
    assert_same(model, state(made(name)))


def test_a_model_keeps_the_names_of_the_files_that_it_was_read_from(tmp_path: Path) -> None:
    made("mixtral").save_pretrained(tmp_path / "own names", save_original_format=False)
    model = hf.MixtralForCausalLM.from_pretrained(tmp_path / "own names")
    boost(model)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    BOOSTER.save_model(model, tmp_path / "ours", size_per_shard="20KB")
    assert files(tmp_path / "ours") == files(tmp_path / "theirs")
    assert (
        "model.layers.0.mlp.experts.down_proj"
        in (tmp_path / "ours" / "model.safetensors.index.json").read_text()
    )


def test_files_with_the_names_of_the_model_are_read_as_well(tmp_path: Path) -> None:
    model = made("mixtral")
    (tmp_path / "old").mkdir()
    save_file(state(model), tmp_path / "old" / "model.safetensors")
    expected = state(model)
    BOOSTER.load_model(spoilt(model), tmp_path / "old")
    assert_same(model, expected)


def test_other_models_are_written_as_before(tmp_path: Path) -> None:
    model = tower()
    BOOSTER.save_model(model, tmp_path / "m", size_per_shard="2KB")
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_bytes())
    assert list(index["metadata"]) == ["total_size"]
    assert index["weight_map"].keys() == model.state_dict().keys()


# --- conversions --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mixtral", "gpt_neox", "qwen2_vl", "t5"])
@pytest.mark.parametrize("size", [None, 20_000])
def test_conversions_write_the_same_files_and_lead_back(
    name: str, size: int | None, tmp_path: Path
) -> None:
    booster, model, optimizer = boost(made(name))
    expected = state(model)
    model.save_pretrained(tmp_path / "theirs", max_shard_size=size or "5GB")
    theirs = files(tmp_path / "theirs")
    booster.save(tmp_path / "run", model, optimizer)

    def converted(source: str, to: Any) -> Path:
        target = tmp_path / f"{source} {to}"
        convert(
            tmp_path / source, target, to, max_bytes=size if to == "hf" else None,
            build=build_by_name,
        )  # fmt: skip
        return target

    assert files(converted("run", "hf")) == theirs
    assert files(converted("run hf", "hf")) == theirs
    assert files(converted("theirs", "hf")) == theirs
    for to in ("torch", "dcp"):
        assert files(converted(converted("run", to).name, "hf")) == theirs
    for source in ("theirs", "run hf"):
        weights = torch.load(converted(source, "torch") / "model.pt")
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[key], value) for key, value in expected.items())
        assert files(converted(f"{source} torch", "hf")) == theirs


def test_a_run_knows_the_names_that_its_model_was_read_by(tmp_path: Path) -> None:
    made("mixtral").save_pretrained(tmp_path / "own names", save_original_format=False)
    model = hf.MixtralForCausalLM.from_pretrained(tmp_path / "own names")
    booster, model, optimizer = boost(model)
    booster.save(tmp_path / "run", model, optimizer)
    convert(tmp_path / "run", tmp_path / "hf", "hf", build=build_by_name)
    model.save_pretrained(tmp_path / "theirs")
    assert files(tmp_path / "hf") == files(tmp_path / "theirs")


# --- what is wrong in files ---------------------------------------------------------------------


def rewritten(directory: Path, change: Any) -> Path:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize(("name", "kept", "alias"), [
    ("gpt2", "transformer.wte.weight", "lm_head.weight"),
    ("t5", "shared.weight", "encoder.embed_tokens.weight"),
])  # fmt: skip
def test_two_values_of_a_tied_weight_are_named(
    name: str, kept: str, alias: str, tmp_path: Path
) -> None:
    model = made(name)
    model.save_pretrained(tmp_path / "m")
    expected = state(model)
    rewritten(tmp_path / "m", lambda tensors: tensors.update({alias: tensors[kept].clone()}))
    BOOSTER.load_model(spoilt(model), tmp_path / "m")
    assert_same(model, expected)
    rewritten(tmp_path / "m", lambda tensors: tensors[alias].add_(1))
    with pytest.raises(castor.CheckpointError, match="differ in the file") as raised:
        BOOSTER.load_model(model, tmp_path / "m", strict=False)
    for said in (kept, alias, str(tmp_path / "m" / "model.safetensors")):
        assert said in str(raised.value)
    assert_same(model, expected)


def test_so_are_those_of_a_model_without_transformers(tmp_path: Path) -> None:
    model = nn.Module()
    model.a = nn.Linear(2, 2, bias=False)
    model.b = nn.Linear(2, 2, bias=False)
    model.b.weight = model.a.weight
    save_file({"a.weight": torch.zeros(2, 2), "b.weight": torch.ones(2, 2)},
              tmp_path / "model.safetensors")  # fmt: skip
    with pytest.raises(castor.CheckpointError, match=r"'a\.weight' and 'b\.weight'"):
        BOOSTER.load_model(model, tmp_path)


def test_what_is_missing_or_too_much_has_the_names_of_the_file(tmp_path: Path) -> None:
    model = made("mixtral")
    model.save_pretrained(tmp_path / "m")
    expected = state(model)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.block_sparse_moe.gate.alien"] = torch.zeros(1)
        for expert in range(4):
            del tensors[f"model.layers.1.block_sparse_moe.experts.{expert}.w2.weight"]
        del tensors["model.layers.1.block_sparse_moe.gate.weight"]

    rewritten(tmp_path / "m", change)
    with pytest.raises(castor.CheckpointError) as raised:
        BOOSTER.load_model(model, tmp_path / "m")
    assert 'Missing key(s) in state_dict: "model.layers.1.block_sparse' in str(raised.value)
    assert '"model.layers.1.block_sparse_moe.experts.2.w2.weight"' in str(raised.value)
    assert 'Unexpected key(s) in state_dict: "model.layers.0.block_sparse_moe.gate.alien"' in str(
        raised.value
    )
    result = BOOSTER.load_model(spoilt(model), tmp_path / "m", strict=False)
    assert sorted(result.missing_keys) == [
        *(f"model.layers.1.block_sparse_moe.experts.{i}.w2.weight" for i in range(4)),
        "model.layers.1.block_sparse_moe.gate.weight",
    ]
    assert result.unexpected_keys == ["model.layers.0.block_sparse_moe.gate.alien"]
    untouched = {"model.layers.1.mlp.experts.down_proj", "model.layers.1.mlp.gate.weight"}
    for key in untouched:
        expected[key] += 1
    assert_same(model, expected)


def test_an_expert_that_is_missing_among_others_is_named(tmp_path: Path) -> None:
    model = made("mixtral")
    model.save_pretrained(tmp_path / "m")
    expected = state(model)
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    rewritten(tmp_path / "m", lambda tensors: tensors.pop(name))
    with pytest.raises(castor.CheckpointError, match=f'Missing key.*"{name}"'):
        BOOSTER.load_model(model, tmp_path / "m")
    with pytest.raises(castor.CheckpointError, match=f'"{name}".*give all of them, or none'):
        BOOSTER.load_model(model, tmp_path / "m", strict=False)
    assert_same(model, expected)


# --- memory -------------------------------------------------------------------------------------


def test_a_save_holds_the_experts_of_one_layer_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(**(EXPERTS | {"num_hidden_layers": 6}), num_experts=8)
    )
    groups: list[hub_names.Group] = []
    peak = 0

    class Watched(hub_names.Group):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            groups.append(self)

        def _value(self, place: int) -> torch.Tensor:
            nonlocal peak
            value = super()._value(place)
            peak = max(peak, value.nbytes + sum(group.bytes_held for group in groups))
            return value

    monkeypatch.setattr(hub_names, "Group", Watched)
    BOOSTER.save_model(model, tmp_path / "m")
    experts = model.model.layers[0].mlp.experts
    one_layer = sum(param.nbytes for param in experts.parameters())
    largest_tensor = max(param.nbytes for param in experts.parameters())
    assert len(groups) == 12
    assert largest_tensor < peak <= one_layer + largest_tensor // 2
    assert all(group.bytes_held == 0 for group in groups)


# --- several ranks ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("of two")
    succeeded(run(hub_name_cases.write, 2, path))
    return path


@pytest.mark.parametrize("name", list(hub_name_cases.CASES))
def test_ranks_write_the_files_of_save_pretrained(name: str, of_two: Path, tmp_path: Path) -> None:
    model: Any = hub_name_cases.CASES[name][0].model()
    model.save_pretrained(tmp_path / "one file")
    model.save_pretrained(tmp_path / "shards", max_shard_size=SHARD)
    for written, expected in (
        ("one file", "one file"), ("shards", "shards"), ("beside", "shards"), ("again", "shards"),
    ):  # fmt: skip
        assert files(of_two / name / written) == files(tmp_path / expected)
