"""`castor export`: PEFT's and save_pretrained's bits, GGUF read back, cards, and refusals."""

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tokenizers import Regex, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import small_model
from byte_tokens import byte_level_bpe
from castor import cli
from castor.checkpoint import files
from castor.errors import Error, IoError, UsageError
from castor.lazy import is_lazy
from castor.recipes import exports
from castor.recipes.exports import Export, read_weights, write_export

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

TEXT = "castor trains models 12345 that don't fit.\n\n  Zwei Wörter."
SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3,
}  # fmt: skip
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def made(
    folder: Path,
    family: str = "Llama",
    *,
    dtype: torch.dtype = torch.float32,
    split: str | None = None,
    **changes: Any,
) -> Path:
    """A model of random weights, norms and biases too, with a tokenizer of this file's text."""
    torch.manual_seed(5)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.1)
    model.to(dtype).save_pretrained(folder)
    words = byte_level_bpe([Path(__file__).read_text()], 512, small_model.SPECIAL, every_byte=True)
    if split is not None:
        words.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", bos_token="<s>", eos_token="</s>",
        pad_token="<pad>", chat_template=small_model.TEMPLATE,
    ).save_pretrained(folder)  # fmt: skip
    return folder


def adapted(base: Path, folder: Path, **settings: Any) -> Path:
    """Adapters of random weights on a base."""
    torch.manual_seed(6)
    model = AutoModelForCausalLM.from_pretrained(base)
    config = LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **settings)
    adapters = get_peft_model(model, config)
    for param in adapters.parameters():
        if param.requires_grad:
            param.data += 0.1 * torch.randn_like(param)
    adapters.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("exports") / "base16", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def adapters(base: Path) -> Path:
    return adapted(base, base.parent / "lora", target_modules="all-linear", r=4)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def by_peft(base: Path, adapters: Path, folder: Path, **loading: Any) -> Path:
    model = AutoModelForCausalLM.from_pretrained(base, **loading)
    merged = PeftModel.from_pretrained(model, adapters).merge_and_unload()
    merged.save_pretrained(folder, max_shard_size="200KB")
    return folder


@pytest.mark.parametrize(
    ("tied", "settings"),
    [
        (False, {"target_modules": "all-linear", "modules_to_save": ["lm_head"], "r": 4}),
        (False, {"target_modules": ["q_proj", "embed_tokens"], "use_rslora": True}),
        (False, {"target_modules": ["o_proj", "down_proj"], "use_dora": True}),
        (True, {"target_modules": ["q_proj"], "alpha_pattern": {"layers.0.*": 3}}),
        (True, {"modules_to_save": ["lm_head"]}),
    ],
)
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning")
@pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied:UserWarning")
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
def test_merged_files_are_those_of_peft_and_save_pretrained_byte_for_byte(
    tmp_path: Path, tied: bool, settings: dict[str, Any]
) -> None:
    base = made(tmp_path / "base", dtype=torch.bfloat16, tie_word_embeddings=tied)
    adapters = adapted(base, tmp_path / "adapters", **settings)
    expected = by_peft(base, adapters, tmp_path / "expected")
    out = tmp_path / "out"
    write_export(
        Export(path=adapters, out=out, merge_adapter=True, shard_bytes=200_000, tokenizer=base)
    )
    assert len(list(expected.glob("*.safetensors"))) > 1
    for path in expected.iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes(), path.name
    model = AutoModelForCausalLM.from_pretrained(out)
    words = AutoTokenizer.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    assert words(TEXT)["input_ids"] == AutoTokenizer.from_pretrained(base)(TEXT)["input_ids"]
    assert words.chat_template == AutoTokenizer.from_pretrained(base).chat_template


def test_another_type_is_rounded_once(base: Path, adapters: Path, tmp_path: Path) -> None:
    wide = made(tmp_path / "wide")
    for source, dtype, merged_in in (
        (base, "float32", torch.float32),
        (base, "float16", torch.float32),
        (wide, "bfloat16", torch.float32),
    ):
        expected = by_peft(source, adapters, tmp_path / "expected", dtype=merged_in)
        out = tmp_path / f"{source.name}-{dtype}"
        write_export(Export(path=adapters, out=out, merge_adapter=True, base=source, dtype=dtype))
        found = tensors(out)
        for key, value in tensors(expected).items():
            assert torch.equal(found[key], value.to(exports.DTYPES[dtype])), key
        assert json.loads((out / "config.json").read_text())["dtype"] == dtype


def test_no_weight_stays_in_memory(base: Path, adapters: Path) -> None:
    weights = read_weights(base, adapters, None)
    for tensor in weights.tensors.values():
        assert not is_lazy(tensor.compute())
    assert all(is_lazy(param) for param in weights.model.parameters())


def test_a_whole_model_keeps_its_bits(place: Path, tmp_path: Path) -> None:
    said = write_export(Export(path=place / "model", out=tmp_path / "out"))
    before, after = tensors(place / "model"), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    size = sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    assert said.endswith(f"out: LlamaForCausalLM in float32, 1 file, {size / 1e6:.1f} MB")


# --- the card -----------------------------------------------------------------------------------


def test_adapters_are_exported_with_a_card_of_recipe_and_scores(
    base: Path, adapters: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(adapters, tmp_path / "run")
    (run / "recipe.yaml").write_text(
        f"model: {{path: {base}}}\nmethod: {{name: sft, adapter: lora}}\n"
        "data: {train: /home/me/secret/chats.jsonl}\n"
    )
    (run / "evaluation").mkdir()
    old = {"results": {"arc_easy": {"acc,none": 0.1}, "piqa": {"acc,none": 0.625}}}
    new = {
        "results": {
            "arc_easy": {"alias": "arc_easy", "acc,none": 0.25, "acc_stderr,none": 0.0089},
            "gsm8k": {"exact_match,strict-match": 0.5, "exact_match_stderr,strict-match": "N/A"},
        }
    }
    for at, (name, document) in enumerate((("b", old), ("a", new))):
        path = run / "evaluation" / f"results_{name}.json"
        path.write_text(json.dumps(document))
        os.utime(path, (at, at))
    (run / "checkpoint-2").mkdir()
    (run / "checkpoint-2" / "results.json").write_text('{"results": {"piqa": {"acc,none": 0.0}}}')
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    (base / "LICENSE").write_text("The license.")
    out = tmp_path / "published"
    said = write_export(Export(path=run, out=out, dtype="bfloat16"))
    assert said.startswith(f"{out}: adapters of base16, 28 tensors, ")
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), out)
    stored, before = tensors(out), tensors(adapters)
    assert all(torch.equal(stored[key], before[key].bfloat16()) for key in before)
    AutoTokenizer.from_pretrained(out)
    card = ModelCard.load(out / "README.md")
    assert card.data.library_name == "peft"
    assert card.data.license == "apache-2.0"
    assert card.data.tags == ["castor", "sft"]
    scores = {
        (one.dataset_name, one.metric_type): one.metric_value for one in card.data.eval_results
    }
    assert scores == {
        ("arc_easy", "acc"): 0.25,
        ("piqa", "acc"): 0.625,
        ("gsm8k", "exact_match (strict-match)"): 0.5,
    }
    assert "| arc_easy | acc | 0.2500 | 0.0089 |" in card.text
    assert "train: chats.jsonl" in card.text
    assert "secret" not in card.text
    assert str(base.parent) not in card.text
    assert f"| torch | {torch.__version__.split('+')[0]}" in card.text

    write_export(Export(path=run, out=tmp_path / "merged", merge_adapter=True))
    merged = ModelCard.load(tmp_path / "merged" / "README.md")
    assert merged.data.library_name == "transformers"
    assert "(sft, lora), which began with `base16`" in merged.text
    assert (tmp_path / "merged" / "LICENSE").read_text() == "The license."

    (tmp_path / "recipe.yaml").write_text("method: {name: dpo, adapter: full}\n")
    write_export(Export(path=tmp_path / "merged", out=tmp_path / "again"))
    assert "dpo" not in (tmp_path / "again" / "README.md").read_text()

    (run / "results.json").write_text("[]")
    with pytest.raises(UsageError, match=r"results\.json is no results file of castor evaluate"):
        write_export(Export(path=run, out=tmp_path / "other"))
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/cache/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de2", "Qwen/Qwen3-0.6B"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("/data/me/model", "model"),
        ("../models/model", "model"),
        ("gpt2", "gpt2"),
    ],
)
def test_a_base_model_has_its_name_on_the_hub(path: str, name: str) -> None:
    from castor.recipes.model_card import base_name

    assert base_name(path) == name


# --- GGUF ---------------------------------------------------------------------------------------


def read(folder: Path) -> tuple[gguf.GGUFReader, Path]:
    (file,) = folder.glob("*.gguf")
    return gguf.GGUFReader(file), file


def fields(reader: gguf.GGUFReader) -> dict[str, Any]:
    return {name: field.contents() for name, field in reader.fields.items()}


def restored(tensor: Any, architecture: str, heads: dict[str, int]) -> torch.Tensor:
    """A tensor of a file as transformers has it."""
    values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
    values = values.reshape([int(size) for size in reversed(tensor.shape)])
    part = tensor.name.split(".")[-2]
    if architecture == "llama" and part in heads:
        pairs = values.reshape(heads[part], -1, 2, *values.shape[1:])
        values = pairs.swapaxes(1, 2).reshape(values.shape)
    return values


@pytest.mark.parametrize(
    ("family", "split", "architecture", "pre"),
    [
        ("Llama", None, "llama", "gpt-2"),
        ("Mistral", QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|"), "llama", "llama-bpe"),
        ("Qwen2", QWEN, "qwen2", "qwen2"),
        ("Qwen3", QWEN, "qwen3", "qwen2"),
    ],
)
def test_a_gguf_file_has_every_tensor_and_loads_with_the_same_logits(
    tmp_path: Path, family: str, split: str | None, architecture: str, pre: str
) -> None:
    changes = {"sliding_window": None} if family == "Mistral" else {}
    changes |= {"head_dim": 128, "tie_word_embeddings": True} if family == "Qwen3" else {}
    folder = made(tmp_path / "model", family, split=split, **changes)
    out = tmp_path / "out"
    write_export(Export(path=folder, out=out, layout="gguf"))
    reader, file = read(out)
    assert file.name == "out-F32.gguf"
    model = AutoModelForCausalLM.from_pretrained(folder)
    words = AutoTokenizer.from_pretrained(folder)
    config, known = model.config, fields(reader)

    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    expected = {
        names.get_name(key, try_suffixes=(".weight", ".bias")): value
        for key, value in tensors(folder).items()
    }
    assert {tensor.name for tensor in reader.tensors} == expected.keys()
    heads = {"attn_q": 4, "attn_k": 2}
    for tensor in reader.tensors:
        assert tensor.tensor_type == gguf.GGMLQuantizationType.F32
        assert torch.equal(restored(tensor, architecture, heads), expected[tensor.name])

    head_dim = getattr(config, "head_dim", None) or 16
    told = {name.removeprefix(f"{architecture}."): value for name, value in known.items()}
    assert told["general.architecture"] == architecture
    assert told["general.name"] == "out"
    assert told["context_length"] == 128
    assert told["embedding_length"] == 64
    assert told["block_count"] == 2
    assert told["feed_forward_length"] == 128
    assert told["attention.head_count"] == 4
    assert told["attention.head_count_kv"] == 2
    assert told["attention.key_length"] == told["attention.value_length"] == head_dim
    assert told["rope.dimension_count"] == head_dim
    assert told["rope.freq_base"] == pytest.approx(config.rope_parameters["rope_theta"])
    assert told["attention.layer_norm_rms_epsilon"] == pytest.approx(config.rms_norm_eps)
    assert told["vocab_size"] == len(told["tokenizer.ggml.tokens"]) == 512
    assert told["tokenizer.ggml.model"] == "gpt2"
    assert told["tokenizer.ggml.pre"] == pre
    assert told["tokenizer.chat_template"] == words.chat_template
    assert told["tokenizer.ggml.bos_token_id"] == 1
    assert told["tokenizer.ggml.eos_token_id"] == 2
    assert told["tokenizer.ggml.unknown_token_id"] == 0
    assert told["tokenizer.ggml.padding_token_id"] == 3
    assert told["tokenizer.ggml.add_bos_token"] is False

    loaded = AutoModelForCausalLM.from_pretrained(out, gguf_file=file.name, dtype=torch.float32)
    ids = torch.tensor([words(TEXT)["input_ids"]])
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=0, atol=1e-5)
    again = AutoTokenizer.from_pretrained(out, gguf_file=file.name)
    assert again(TEXT)["input_ids"] == ids[0].tolist()
    card = ModelCard.load(out / "README.md")
    assert card.data.library_name == "gguf"


def test_tokens_have_their_types_and_the_template_its_begin(tmp_path: Path) -> None:
    from tokenizers import processors

    folder = made(tmp_path / "model", vocab_size=520)
    words = AutoTokenizer.from_pretrained(folder)
    words.add_tokens(["<tool>"])
    words.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    words.save_pretrained(folder)
    write_export(Export(path=folder, out=tmp_path / "out", layout="gguf"))
    known = fields(read(tmp_path / "out")[0])
    tokens, types = known["tokenizer.ggml.tokens"], known["tokenizer.ggml.token_type"]
    kinds = dict(zip(tokens, map(gguf.TokenType, types), strict=True))
    assert kinds["</s>"] == gguf.TokenType.CONTROL
    assert kinds["<tool>"] == gguf.TokenType.USER_DEFINED
    assert kinds["a"] == gguf.TokenType.NORMAL
    assert tokens[-1] == "[PAD519]"
    assert kinds["[PAD519]"] == gguf.TokenType.UNUSED
    assert known["tokenizer.ggml.add_bos_token"] is True


def test_other_types_are_rounded_once_and_vectors_stay_exact(
    base: Path, adapters: Path, tmp_path: Path
) -> None:
    exact = tensors(by_peft(base, adapters, tmp_path / "merged", dtype=torch.float32))
    rounded = {
        "bfloat16": lambda values: values.bfloat16().float(),
        "float16": lambda values: values.half().float(),
        "q8_0": lambda values: torch.from_numpy(
            gguf.dequantize(
                gguf.quantize(values.numpy(), gguf.GGMLQuantizationType.Q8_0),
                gguf.GGMLQuantizationType.Q8_0,
            )
        ),
    }
    files = {"bfloat16": "BF16", "float16": "F16", "q8_0": "Q8_0"}
    for dtype, round_to in rounded.items():
        out = tmp_path / dtype
        write_export(Export(path=adapters, out=out, layout="gguf", dtype=dtype, merge_adapter=True))
        reader, file = read(out)
        assert file.name == f"{dtype}-{files[dtype]}.gguf"
        found = {one.name: restored(one, "llama", {}) for one in reader.tensors}
        kinds = {one.name: one.tensor_type.name for one in reader.tensors}
        norm, down = "layers.1.input_layernorm.weight", "layers.1.mlp.down_proj.weight"
        assert kinds["blk.1.attn_norm.weight"] == "F32"
        assert torch.equal(found["blk.1.attn_norm.weight"], exact[f"model.{norm}"])
        assert kinds["blk.1.ffn_down.weight"] == files[dtype]
        assert torch.equal(found["blk.1.ffn_down.weight"], round_to(exact[f"model.{down}"]))
        file_type = gguf.LlamaFileType[f"MOSTLY_{files[dtype]}"]
        assert fields(reader)["general.file_type"] == file_type


def test_scaled_rotary_frequencies_are_in_the_file(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
    }  # fmt: skip
    folder = made(tmp_path / "model", rope_parameters=scaling, tie_word_embeddings=True)
    write_export(Export(path=folder, out=tmp_path / "out", layout="gguf"))
    found = {one.name: one.data for one in read(tmp_path / "out")[0].tensors}
    assert "output.weight" not in found  # tied
    model = AutoModelForCausalLM.from_pretrained(folder)
    plain = 10000.0 ** -(torch.arange(0, 16, 2) / 16)
    scaled = plain / torch.from_numpy(found["rope_freqs.weight"].copy())
    torch.testing.assert_close(scaled, model.model.rotary_emb.inv_freq)
    assert not torch.allclose(scaled, plain)

    linear = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    folder = made(tmp_path / "linear", rope_parameters=linear)
    write_export(Export(path=folder, out=tmp_path / "linear-out", layout="gguf"))
    known = fields(read(tmp_path / "linear-out")[0])
    assert known["llama.rope.scaling.type"] == "linear"
    assert known["llama.rope.scaling.factor"] == 4.0


# --- refusals -----------------------------------------------------------------------------------


def refused(expected: str, path: Path, out: Path, **arguments: Any) -> None:
    before = sorted(out.iterdir()) if out.is_dir() else out.exists()
    with pytest.raises(Error, match=expected):
        write_export(Export(path=path, out=out, **arguments))
    assert (sorted(out.iterdir()) if out.is_dir() else out.exists()) == before
    assert not list(out.parent.glob(".tmp-castor*"))


def test_what_contradicts_itself_is_told(
    place: Path, base: Path, adapters: Path, tmp_path: Path
) -> None:
    out, model = tmp_path / "out", place / "model"
    refused("--format onnx: give one of safetensors, gguf", model, out, layout="onnx")
    refused("--dtype q8_0: safetensors has float32, bfloat16, float16", model, out, dtype="q8_0")
    refused("whole model without adapters: leave --merge-ad", model, out, merge_adapter=True)
    refused("a GGUF file holds a whole model: give --merge-adapter", adapters, out, layout="gguf")
    refused("a GGUF model is one file", model, out, layout="gguf", shard_bytes=10)
    refused("give one without .gguf", model, tmp_path / "model.gguf", layout="gguf")
    refused("leave --base out, or give --merge-adapter", adapters, out, base=base)
    refused("whole model and --base was given: leave --base out", model, out, base=base)
    refused("are in one another: give another folder", model, model / "out")
    refused("there is no folder .*nowhere", tmp_path / "nowhere", out)


def test_a_folder_that_holds_something_is_kept(place: Path, tmp_path: Path) -> None:
    model, out = place / "model", tmp_path / "out"
    out.mkdir()
    write_export(Export(path=model, out=out))  # empty
    refused("out is there and not empty: give another folder or --overwrite", model, out)
    (out / "old.txt").write_text("old")
    write_export(Export(path=model, out=out, overwrite=True, layout="gguf"))
    assert sorted(path.name for path in out.iterdir()) == ["README.md", "out-F32.gguf"]
    other = tmp_path / "other"
    other.mkdir()
    (other / "letter.txt").write_text("Dear")
    refused(
        "holds no model, and --overwrite replaces exported models", model, other, overwrite=True
    )


def test_a_full_disk_leaves_nothing_behind(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(exports, "write_card", full)
        refused("No space left on device .*free some space", place / "model", tmp_path / "out")
    monkeypatch.setattr(files, "free_bytes", lambda _: 1000)
    with pytest.raises(IoError, match="1000 bytes are free"):
        write_export(Export(path=place / "model", out=tmp_path / "out", layout="gguf"))
    assert not list(tmp_path.iterdir())


def test_models_that_do_not_belong_together_are_refused(
    base: Path, adapters: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    other = made(tmp_path / "other", hidden_size=128)
    refused("do not fit the base", adapters, out, merge_adapter=True, base=other)
    speechless = shutil.copytree(base, tmp_path / "speechless")
    for path in speechless.glob("tokenizer*"):
        path.unlink()
    refused("there is no tokenizer; give its folder with --tokenizer", speechless, out)
    small = made(tmp_path / "small", vocab_size=100)
    refused("they do not belong together", small, out)
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    quantised = shutil.copytree(base, tmp_path / "quantised")
    (quantised / "config.json").write_text(json.dumps(config))
    told = "quantised by bitsandbytes, which castor evaluate, chat, serve and export do not load"
    refused(told, adapters, out, merge_adapter=True, base=quantised)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning")
def test_adapters_of_tied_weights_are_not_merged(tmp_path: Path) -> None:
    tied = made(tmp_path / "tied", tie_word_embeddings=True)
    adapters = adapted(tied, tmp_path / "adapters", target_modules=["lm_head"])
    told = "change .*embed_tokens.weight, a tensor that several layers share"
    refused(told, adapters, tmp_path / "out", merge_adapter=True, tokenizer=tied)


def spaced(words: Any) -> None:
    words.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()


def by_words(words: Any) -> None:
    words.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\w+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


@pytest.mark.parametrize(
    ("told", "family", "changes", "change"),
    [
        (r"GGUF files of llama, mistral, qwen2, qwen3, and this model is gpt2", "GPT2", {}, None),
        ("no GGUF file of a mistral model with sliding_window 64", "Mistral",
         {"sliding_window": 64}, None),
        ("of a llama model with hidden_act 'gelu'", "Llama", {"hidden_act": "gelu"}, None),
        ("of a qwen3 model with an attention_bias", "Qwen3", {"attention_bias": True}, None),
        ("the tokenizer is no byte-level BPE", "Llama", {}, spaced),
        ("splits texts otherwise than gpt-2, smollm, llama-bpe, qwen2 do", "Llama", {}, by_words),
    ],
)  # fmt: skip
def test_what_llama_cpp_would_compute_otherwise_is_refused(
    tmp_path: Path,
    told: str,
    family: str,
    changes: dict[str, Any],
    change: Callable[[Any], None] | None,
) -> None:
    folder = made(tmp_path / "model", family, **changes)
    if change is not None:
        words = AutoTokenizer.from_pretrained(folder)
        change(words)
        words.save_pretrained(folder)
    refused(told, folder, tmp_path / "out", layout="gguf")


def test_values_that_a_type_does_not_hold_are_refused(tmp_path: Path) -> None:
    folder = made(tmp_path / "model", intermediate_size=80)
    told = "down_proj.weight has rows of 80 values, and Q8_0 packs multiples of 32"
    refused(told, folder, tmp_path / "out", layout="gguf", dtype="q8_0")
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = 1e6
    model.save_pretrained(folder)
    told = r"blk\.0\.ffn_up\.weight has values above float16's 65504: give --dtype bfloat16"
    refused(told, folder, tmp_path / "out", layout="gguf", dtype="float16")


def test_the_command_prints_a_line_or_an_error(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["castor", "export", str(place / "model"), str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", [*command, "--format", "gguf", "--dtype", "bfloat16"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    assert "out-BF16.gguf, llama of 57 tensors, " in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*command, "--max-shard-size", "1MB"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == (
        f"castor: error: {tmp_path / 'out'} is there and not empty: give another folder or "
        "--overwrite\n"
    )
