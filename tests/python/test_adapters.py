"""PEFT: adapters are written as PEFT writes them, and read back; what cannot be is refused."""

import copy
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

import castor
from helpers import assert_equal, boost, copies
from stored_tower import on_nvme
from zoo import llama

pytestmark = [
    # peft asks transformers for what transformers 6 will rename.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    # It looks for the base model's configuration, which is of no file.
    pytest.mark.filterwarnings("ignore:Could not find a config file in:UserWarning"),
]

BATCH = torch.arange(32).reshape(2, 16) % 64


def base(layers: int = 2) -> Any:
    torch.manual_seed(3)
    return llama(layers=layers)


def adapted(layers: int = 2, **options: Any) -> PeftModel:
    config = LoraConfig(
        r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **options
    )
    return get_peft_model(base(layers), config)


def trained(model: Any, steps: int = 3, **settings: Any) -> Any:
    boosted = boost(model, **settings)
    for _ in range(steps):
        boosted.step(boosted.model(input_ids=BATCH, labels=BATCH).loss)
    return boosted


def files_of(directory: Path) -> dict[str, Any]:
    return {
        str(path.relative_to(directory)): path
        for path in directory.rglob("*")
        if path.is_file() and path.name not in ("castor-manifest.json", "README.md")
    }


def assert_written_as_peft_does(model: Any, mine: Path, theirs: Path) -> None:
    copy.deepcopy(model).save_pretrained(theirs)
    found, expected = files_of(mine), files_of(theirs)
    assert found.keys() == expected.keys()
    for name, path in expected.items():
        if path.suffix == ".json":
            assert json.loads(found[name].read_text()) == json.loads(path.read_text())
            continue
        tensors, others = load_file(found[name]), load_file(path)
        assert tensors.keys() == others.keys()
        for key, tensor in others.items():
            assert torch.equal(tensors[key], tensor), key
            assert tensors[key].dtype == tensor.dtype


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_peft_model_is_written_as_peft_writes_it(precision: str, tmp_path: Path) -> None:
    boosted = trained(adapted(), precision=precision)
    boosted.booster.save_model(boosted.model, tmp_path / "mine")
    assert_written_as_peft_does(boosted.model, tmp_path / "mine", tmp_path / "theirs")
    logits = boosted.model(input_ids=BATCH).logits
    again = PeftModel.from_pretrained(base(), tmp_path / "mine")
    for param in again.parameters():  # and no buffers: rotary frequencies stay float32
        param.data = param.data.to(logits.dtype)
    assert torch.equal(again(input_ids=BATCH).logits, logits)


def test_transformers_reads_it_too(tmp_path: Path) -> None:
    base().save_pretrained(tmp_path / "base")
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    boosted = trained(get_peft_model(loaded, config))
    boosted.booster.save_model(boosted.model, tmp_path / "adapter")
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    expected = boosted.model.eval()(input_ids=BATCH).logits
    assert torch.equal(again(input_ids=BATCH).logits, expected)


def test_several_adapters_and_whole_modules_go_where_peft_looks_for_them(tmp_path: Path) -> None:
    model = adapted(modules_to_save=["lm_head"])
    model.add_adapter("other", LoraConfig(r=2, target_modules=["k_proj"], task_type="CAUSAL_LM"))
    boosted = trained(model)
    boosted.booster.save_model(boosted.model, tmp_path / "mine")
    assert (tmp_path / "mine" / "other" / "adapter_model.safetensors").exists()
    assert_written_as_peft_does(boosted.model, tmp_path / "mine", tmp_path / "theirs")


def test_adapters_stored_on_nvme_are_written(tmp_path: Path) -> None:
    scratch = tmp_path / "nvme"
    scratch.mkdir()
    embedding = 4 * 256 * 48  # bytes, the largest chunk
    boosted = trained(adapted(layers=12), **on_nvme(scratch, embedding), chunk_bytes=embedding)
    boosted.booster.save_model(boosted.model, tmp_path / "mine")
    assert boosted.report().nvme_weight_bytes > 0
    assert_written_as_peft_does(boosted.model, tmp_path / "mine", tmp_path / "theirs")


@pytest.mark.parametrize("by", ["castor", "peft"])
def test_adapters_are_loaded_into_a_boosted_model(by: str, tmp_path: Path) -> None:
    first = trained(adapted(modules_to_save=["lm_head"]))
    if by == "castor":
        first.booster.save_model(first.model, tmp_path / "adapter")
    else:
        copy.deepcopy(first.model).save_pretrained(tmp_path / "adapter")
    second = boost(adapted(modules_to_save=["lm_head"]))
    assert second.booster.load_model(second.model, tmp_path / "adapter") == ([], [])
    assert_equal(copies(second.model.parameters()), copies(first.model.parameters()))
    second.step(second.model(input_ids=BATCH, labels=BATCH).loss)


def test_a_run_of_a_peft_model_goes_on_bitwise(tmp_path: Path) -> None:
    first = trained(adapted())
    first.booster.save(tmp_path / "run", first.model, first.optimizer)
    second = boost(adapted())
    second.booster.load(tmp_path / "run", second.model, second.optimizer)
    for boosted in (first, second):
        boosted.step(boosted.model(input_ids=BATCH, labels=BATCH).loss)
    assert_equal(copies(second.model.parameters()), copies(first.model.parameters()))


def test_adapters_of_another_shape_or_scale_are_refused(tmp_path: Path) -> None:
    first = trained(adapted())
    first.booster.save_model(first.model, tmp_path / "adapter")
    config = LoraConfig(
        r=4, lora_alpha=32, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    other = boost(get_peft_model(base(), config))
    before = copies(other.model.parameters())
    with pytest.raises(castor.CheckpointError, match=r"lora_alpha=16.*'default'.*has 32"):
        other.booster.load_model(other.model, tmp_path / "adapter")
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
    wider = boost(get_peft_model(base(), config))
    with pytest.raises(castor.CheckpointError, match=r"size mismatch for .*lora_A"):
        wider.booster.load_model(wider.model, tmp_path / "adapter")
    with pytest.raises(castor.CheckpointError, match=r"adapter_config\.json: No such file"):
        other.booster.load_model(other.model, tmp_path)
    assert_equal(copies(other.model.parameters()), before)


def test_a_new_kind_of_checkpoint_leaves_nothing_of_the_old_one(tmp_path: Path) -> None:
    model = boost(base())
    model.booster.save_model(model.model, tmp_path / "model")
    boosted = trained(adapted())
    boosted.booster.save_model(boosted.model, tmp_path / "model")
    assert not (tmp_path / "model" / "model.safetensors").exists()
    assert not (tmp_path / "model" / "config.json").exists()
    model.booster.save_model(model.model, tmp_path / "model")
    assert not (tmp_path / "model" / "adapter_config.json").exists()
    hf.AutoModelForCausalLM.from_pretrained(tmp_path / "model")


def test_adapters_in_a_model_of_transformers_are_refused_by_name(tmp_path: Path) -> None:
    model = base()
    peft.inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj"]), model)
    boosted = boost(model)
    with pytest.raises(castor.CheckpointError, match=r"q_proj.*LlamaForCausalLM.*get_peft_model"):
        boosted.booster.save_model(boosted.model, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_prompts_are_written_and_refused_when_they_are_to_be_read(tmp_path: Path) -> None:
    def prompted() -> PeftModel:
        config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
        return get_peft_model(base(), config)

    boosted = trained(prompted())
    boosted.booster.save_model(boosted.model, tmp_path / "mine")
    assert_written_as_peft_does(boosted.model, tmp_path / "mine", tmp_path / "theirs")
    again = boost(prompted())
    with pytest.raises(castor.CheckpointError, match=r"prompt_embeddings.*before boost"):
        again.booster.load_model(again.model, tmp_path / "mine")


def test_the_merged_model_is_that_of_a_copy(tmp_path: Path) -> None:
    boosted = trained(adapted())
    with pytest.raises(castor.UsageError, match=r"merge_and_unload\(\) would change a LoraModel"):
        boosted.model.merge_and_unload()
    merged = copy.deepcopy(boosted.model).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(
        again(input_ids=BATCH).logits, boosted.model.eval()(input_ids=BATCH).logits
    )


@pytest.mark.parametrize(("precision", "state_bytes"), [("fp32", 8), ("bf16", 10)])
def test_a_frozen_base_costs_its_weights_alone(precision: str, state_bytes: int) -> None:
    """State: of fp32 two moments, of bf16 with "split" these and half a master."""
    boosted = boost(adapted(layers=6), precision=precision, placement_policy="cpu")
    params = list(boosted.model.parameters())
    size = params[0].element_size()
    trainable = sum(p.numel() for p in params if p.requires_grad)
    frozen = sum(p.numel() for p in params if not p.requires_grad)
    moved = []
    for _ in range(4):
        before = boosted.report().d2h_bytes
        boosted.step(boosted.model(input_ids=BATCH, labels=BATCH).loss)
        moved.append(boosted.report().d2h_bytes - before)
    expected = frozen * size + trainable * (2 * size + state_bytes)
    assert boosted.report().host_bytes == pytest.approx(expected, rel=0.03)
    assert moved == [trainable * size] * 4


def test_lora_is_enabled_and_gone_on_with(tmp_path: Path) -> None:
    booster = castor.Booster(plugin=castor.GeminiPlugin(device="cpu", device_memory="8MiB"))
    config = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"])
    model = booster.enable_lora(base(), lora_config=config)
    assert isinstance(model, PeftModel)
    trained_by_hand = trained(adapted())
    boosted = trained(model)
    assert_equal(copies(model.parameters()), copies(trained_by_hand.model.parameters()))
    booster.save_model(model, tmp_path / "adapters")
    going_on = booster.enable_lora(base(), tmp_path / "adapters")
    assert_equal(copies(going_on.parameters()), copies(model.parameters()))
    assert [p.requires_grad for p in going_on.parameters()] == [
        p.requires_grad for p in model.parameters()
    ]
    trained(going_on, steps=1)

    with castor.LazyInitContext():
        lazy = booster.enable_lora(base(), lora_config=config)
    trained(lazy)
    assert_equal(copies(lazy.parameters()), copies(model.parameters()))

    with pytest.raises(castor.UsageError, match="give lora_config"):
        booster.enable_lora(base())
    with pytest.raises(TypeError, match="lora_config is a dict"):
        booster.enable_lora(base(), lora_config={})
    with pytest.raises(castor.UsageError, match="boosted"):
        booster.enable_lora(boosted.model, lora_config=config)
    with pytest.raises(castor.CheckpointError, match="holds no adapter"):
        booster.enable_lora(base(), tmp_path)
    with pytest.raises(NotImplementedError, match="quantize=True"):
        booster.enable_lora(base(), lora_config=config, quantize=True)
