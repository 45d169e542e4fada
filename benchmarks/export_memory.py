# Question: does castor export merge adapters in the memory of a few tensors?
# Baseline: PEFT's merge_and_unload and transformers' save_pretrained, which hold the whole model.
# Work: LoRA adapters of rank 8 on all linear layers of a Llama of random weights in bfloat16,
#     merged into safetensors files of 100 MB; besides, into a GGUF file of q8_0.
# Memory: the highest anonymous memory of a contender above that before it, each in a process of
#     its own; mapped files count for nothing. The files of castor are compared with the baseline's.
"""Peak memory of an export: `python benchmarks/export_memory.py [--rounds R] [--quick]`."""

from __future__ import annotations

import filecmp
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from _machine import command_line, describe_machine, spread, write_record
from _memory import PeakWatch, anonymous_bytes
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

SHARD = 10**8
PEFT, CASTOR, GGUF = "PEFT", "castor, safetensors", "castor, gguf q8_0"


def prepare(folder: Path, *, quick: bool) -> int:
    """Writes the folders `base` and `adapters`; returns the bytes of the base's weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    layers, width = (2, 256) if quick else (12, 1024)
    config = LlamaConfig(
        vocab_size=8192, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=16, num_key_value_heads=4, max_position_embeddings=512,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    size = sum(param.nbytes for param in model.parameters())
    model.save_pretrained(folder / "base")
    words = Tokenizer(models.BPE(vocab={"<s>": 0, "a": 1}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>")
    tokenizer.save_pretrained(folder / "base")
    adapters = LoraConfig(
        task_type="CAUSAL_LM", r=8, target_modules="all-linear", init_lora_weights=False
    )
    get_peft_model(model, adapters).save_pretrained(folder / "adapters")
    return size


def contend(contender: str, folder: Path) -> None:
    """Runs one contender in this process, and prints its figures as JSON."""
    from castor.recipes import gguf_writer  # noqa: F401  its import is no part of an export
    from castor.recipes.exports import Export, write_export

    base, adapters, out = folder / "base", folder / "adapters", folder / contender
    before, begin = anonymous_bytes(), time.perf_counter()
    watch = PeakWatch()
    if contender == PEFT:
        model: Any = AutoModelForCausalLM.from_pretrained(base)
        merged = PeftModel.from_pretrained(model, adapters).merge_and_unload()
        merged.save_pretrained(out, max_shard_size=SHARD)
    else:
        kind: dict[str, Any] = {"layout": "gguf", "dtype": "q8_0"}
        if contender == CASTOR:
            kind = {"shard_bytes": SHARD}
        write_export(
            Export(path=adapters, out=out, base=base, merge_adapter=True, overwrite=True, **kind)
        )
    print(json.dumps([watch.stop() - before, time.perf_counter() - begin]))


def main() -> None:
    parser = command_line("export_memory", __doc__)
    parser.add_argument("--rounds", type=int, default=3, help="processes of each contender")
    parser.add_argument("--contend", nargs=2, help="a contender and a folder: one such process")
    arguments = parser.parse_args()
    if arguments.contend is not None:
        contend(arguments.contend[0], Path(arguments.contend[1]))
        return
    machine = describe_machine()
    found: dict[str, list[list[float]]] = {PEFT: [], CASTOR: [], GGUF: []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        size = prepare(folder, quick=arguments.quick)
        for _ in range(1 if arguments.quick else arguments.rounds):
            for contender, figures in found.items():
                done = subprocess.run(
                    [sys.executable, __file__, "--contend", contender, temporary],
                    capture_output=True, text=True, check=True,
                )  # fmt: skip
                figures.append(json.loads(done.stdout))
        expected = sorted(path.name for path in (folder / PEFT).iterdir())
        _, unlike, lacking = filecmp.cmpfiles(folder / PEFT, folder / CASTOR, expected, False)
        assert not unlike, unlike
        assert not lacking, lacking
    results = {
        contender: {
            "peak_bytes": spread([peak for peak, _ in figures]),
            "seconds": spread([seconds for _, seconds in figures]),
        }
        for contender, figures in found.items()
    }
    for contender in found:
        peak = results[contender]["peak_bytes"]["median"] / 2**20
        print(f"{contender}: {peak:.0f} MiB above the start, weights of {size / 2**20:.0f} MiB")
    figures = {"weight_bytes": size, "contenders": results}
    write_record(arguments, "export_memory", figures, machine=machine)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    main()
