"""QLoRA: adapters over weights of bitsandbytes, with castor and without: `make integration`."""

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from safetensors.torch import load_file

import castor
from castor.integrations.transformers import trainer

bitsandbytes = pytest.importorskip("bitsandbytes")

pytestmark = [
    pytest.mark.filterwarnings("ignore:Merge lora module to 4-bit linear:UserWarning"),
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

LAYERS = 8


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights, not quantised, as a hub has it. Its layers have biases."""
    path = tmp_path_factory.mktemp("qlora") / "base"
    torch.manual_seed(0)
    config = hf.Qwen2Config(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    hf.Qwen2ForCausalLM(config).save_pretrained(path)
    return path


def quantised(base: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True} | options
    how = hf.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=dtype, **options)
    return hf.AutoModelForCausalLM.from_pretrained(base, quantization_config=how, dtype=dtype)


def adapted(base: Path, dtype: torch.dtype = torch.float32, **options: Any) -> PeftModel:
    model = quantised(base, dtype, **options)
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    found = get_peft_model(model, config)
    for name, param in found.named_parameters():
        if "lora_B" in name:  # zeros leave no gradient to lora_A
            torch.nn.init.normal_(param, std=0.02)
    return found.train()


def batch(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 256, (2, 32), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def optimizer_of(model: Any) -> castor.HybridAdam:
    return castor.HybridAdam([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def boosted(model: Any, **settings: Any) -> tuple[castor.Booster, Any, Any]:
    settings = {"device_memory": "16MiB", "host_memory": "64MiB", "precision": "fp32"} | settings
    booster = castor.Booster(plugin=castor.GeminiPlugin(device="cpu", **settings))
    model, optimizer, *_ = booster.boost(model, optimizer_of(model))
    return booster, model, optimizer


def gradients(model: Any) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.requires_grad]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit: packed bytes in a float type may be NaNs."""
    flat = [x.detach().contiguous().flatten().view(torch.uint8) for x in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*flat)


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(same, one, other))


def kept(model: Any) -> dict[str, tuple[type, torch.Tensor]]:
    return {
        name: (type(param), param.detach().clone())
        for name, param in model.named_parameters()
        if not param.requires_grad
    }


def packed_bytes(model: Any) -> int:
    kind = bitsandbytes.nn.Params4bit
    return sum(p.nbytes for p in model.parameters() if type(p) is kind)


def step(booster: castor.Booster, model: Any, optimizer: Any, seed: int) -> float:
    loss = model(**batch(seed)).loss
    booster.backward(loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())


def tight(model: Any, **settings: Any) -> int:
    """Device bytes beside activations and what is unpacked: half of the packed ones."""
    roomy, model, optimizer = boosted(model, placement_policy="cpu", **settings)
    for seed in range(2):
        step(roomy, model, optimizer, seed)
    return roomy.report(model).peak_nonmodel_bytes + packed_bytes(model) // 2


@pytest.mark.parametrize(
    ("dtype", "quantisation", "settings"),
    [
        (torch.float32, {}, {}),
        (
            torch.float32,
            {"bnb_4bit_use_double_quant": False, "bnb_4bit_quant_type": "fp4"},
            {"activations": "recompute"},
        ),
        (torch.float32, {"bnb_4bit_quant_storage": torch.bfloat16}, {}),
        (torch.float32, {"bnb_4bit_quant_storage": torch.float16}, {"placement_policy": "cpu"}),
        (torch.bfloat16, {}, {"precision": "bf16"}),
        (
            torch.bfloat16,
            {"bnb_4bit_quant_storage": torch.float32},
            {"precision": "bf16", "optim_state_format": "fp32"},
        ),
    ],
)
def test_gradients_have_the_bits_of_plain_pytorch(
    dtype: torch.dtype, quantisation: dict[str, Any], settings: dict[str, Any], base: Path
) -> None:
    plain, mine, other = (adapted(base, dtype, **quantisation) for _ in range(3))
    for model in (plain, mine, other):
        for param in model.parameters():
            if param.requires_grad:  # PEFT makes them in fp32
                param.data = param.data.to(dtype)
    before = kept(plain)
    memory = tight(other, **{k: v for k, v in settings.items() if k != "placement_policy"})
    booster, mine, optimizer = boosted(mine, device_memory=memory, **settings)
    by_hand = optimizer_of(plain)
    for seed in range(4):
        loss = plain(**batch(seed)).loss
        loss.backward()
        own = mine(**batch(seed)).loss
        booster.backward(own, optimizer)
        assert torch.equal(own, loss)
        assert equal(gradients(mine), gradients(plain))
        for one in (by_hand, optimizer):
            one.step()
            one.zero_grad()
    after = kept(mine)
    assert before.keys() == after.keys()
    for name, (kind, values) in before.items():
        assert after[name][0] is kind, name
        assert same(after[name][1], values), name
    assert equal(*([p.detach() for p in model.parameters()] for model in (mine, plain)))
    report = booster.report(mine)
    assert report.peak_device_bytes <= memory
    states = {"fp32": 8 if dtype == torch.float32 else 12}.get(
        settings.get("optim_state_format", "fp32" if dtype == torch.float32 else "split"), 10
    )
    trained = sum(p.numel() for p in mine.parameters() if p.requires_grad)
    frozen = sum(p.nbytes for p in mine.parameters() if not p.requires_grad)
    expected = frozen + trained * (2 * dtype.itemsize + states)
    if settings.get("placement_policy") == "cpu":  # nothing on the device for good
        assert report.host_bytes == pytest.approx(expected, rel=0.03)


def test_evaluation_between_steps_changes_nothing(base: Path) -> None:
    plain, mine = adapted(base), adapted(base)
    booster, mine, optimizer = boosted(mine)
    by_hand = optimizer_of(plain)
    before = kept(mine)
    for seed in range(3):
        loss = plain(**batch(seed)).loss
        loss.backward()
        by_hand.step()
        by_hand.zero_grad()
        assert step(booster, mine, optimizer, seed) == loss.item()
        with torch.no_grad():
            found = mine.eval()(**batch(9)).loss
        mine.train()
        assert all(torch.equal(kept(mine)[name][1], values) for name, (_, values) in before.items())
    with torch.no_grad():  # last: it may repack the layers
        torch.testing.assert_close(found, plain.eval()(**batch(9)).loss, rtol=1e-2, atol=1e-2)


def test_adapters_and_runs_are_saved_and_read(base: Path, tmp_path: Path) -> None:
    booster, model, optimizer = boosted(adapted(base))
    for seed in range(2):
        step(booster, model, optimizer, seed)
    booster.save_model(model, tmp_path / "mine")
    model.save_pretrained(tmp_path / "theirs")
    copy.deepcopy(model).save_pretrained(tmp_path / "copy")
    mine, theirs, of_copy = (
        load_file(tmp_path / name / "adapter_model.safetensors")
        for name in ("mine", "theirs", "copy")
    )
    assert mine.keys() == theirs.keys() == of_copy.keys()
    for key, values in mine.items():
        assert torch.equal(values, theirs[key])
        assert torch.equal(values, of_copy[key])
    again = PeftModel.from_pretrained(quantised(base), tmp_path / "mine")
    assert torch.equal(again.train()(**batch(5)).logits, model(**batch(5)).logits)

    booster.save(tmp_path / "run", model, optimizer)
    other, resumed, its_optimizer = boosted(adapted(base))
    other.load(tmp_path / "run", resumed, its_optimizer)
    assert step(booster, model, optimizer, 7) == step(other, resumed, its_optimizer, 7)
    assert equal(list(resumed.parameters()), list(model.parameters()))
    with pytest.raises(castor.UsageError, match=r"'weight' is set on .* of a boosted model"):
        model.merge_and_unload()


def test_states_and_copies_are_those_of_the_plain_model(base: Path) -> None:
    plain, mine = adapted(base), adapted(base)
    booster, mine, _ = boosted(mine)
    own, theirs = mine.state_dict(), plain.state_dict()
    assert list(own) == list(theirs)
    for key, values in theirs.items():
        assert own[key].dtype == values.dtype
        assert torch.equal(own[key], values), key
    for copied in (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))):
        twin, of_plain = copied(mine), copied(plain)
        loss, expected = (model(**batch(0)).loss for model in (twin, of_plain))
        loss.backward()
        expected.backward()
        assert torch.equal(loss, expected)
        assert equal(gradients(twin), gradients(of_plain))
        for name, param in of_plain.named_parameters():
            assert type(twin.get_parameter(name)) is type(param)
    booster.release(mine)
    merged = mine.merge_and_unload()
    assert torch.isfinite(merged(**batch(0)).loss)


def test_a_whole_quantised_model_is_written_and_read(base: Path, tmp_path: Path) -> None:
    """Its head alone trains."""

    def with_head() -> Any:
        model = quantised(base).requires_grad_(False)
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        return model.train()

    booster, model, optimizer = boosted(with_head())
    step(booster, model, optimizer, 0)
    booster.save_model(model, tmp_path / "mine")
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "mine").train()
    assert torch.equal(again(**batch(1)).logits, model(**batch(1)).logits)
    other, second, _ = boosted(with_head())
    other.load_model(second, tmp_path / "mine")
    assert torch.equal(second(**batch(1)).logits, model(**batch(1)).logits)
    fp4 = quantised(base, bnb_4bit_quant_type="fp4").train()
    fp4.requires_grad_(False).lm_head.requires_grad_(True)
    third, fp4, _ = boosted(fp4)
    with pytest.raises(castor.CheckpointError, match="quantised"):
        third.load_model(fp4, tmp_path / "mine")


def test_the_trainer_trains_as_without_castor(base: Path, tmp_path: Path) -> None:
    def losses(kind: type[hf.Trainer]) -> list[float]:
        model = prepare_model_for_kbit_training(
            quantised(base), gradient_checkpointing_kwargs={"use_reentrant": False}
        )
        torch.manual_seed(1)
        config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        run = kind(
            model=get_peft_model(model, config),
            args=hf.TrainingArguments(
                str(tmp_path / kind.__name__), max_steps=3, per_device_train_batch_size=2,
                use_cpu=True, logging_steps=1, report_to=[], disable_tqdm=True, seed=3,
            ),
            train_dataset=[{key: x[0] for key, x in batch(i).items()} for i in range(8)],
        )  # fmt: skip
        run.train()
        assert (tmp_path / kind.__name__ / "checkpoint-3" / "adapter_model.safetensors").exists()
        return [entry["loss"] for entry in run.state.log_history if "loss" in entry]

    plugin = castor.GeminiPlugin(device="cpu", device_memory="3MiB", host_memory="64MiB")
    # torch's AdamW and the rule round differently in their last bits.
    assert losses(trainer(hf.Trainer, plugin)) == pytest.approx(losses(hf.Trainer), rel=1e-5)


def test_the_guide_trains(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").symlink_to(base)
    page = Path(__file__).parents[2] / "docs" / "guides" / "lora.md"
    (source,) = re.findall(r"^```py\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    exec(compile(source, str(page), "exec"), {"__name__": "__main__"})
    assert (tmp_path / "adapters" / "adapter_model.safetensors").exists()
