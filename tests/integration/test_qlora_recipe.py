"""A recipe with adapter: qlora, from training to an exported model: `make integration`."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import small_model

pytest.importorskip("bitsandbytes")

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

RECIPE = """\
model: {{path: {place}/model}}
data: {{train: {place}/chats.jsonl, held_out: 0, max_length: 64, packing: false}}
method: {{name: sft, adapter: {adapter}}}
train: {{max_steps: 4, batch_size: 2, learning_rate: 1e-2, seed: 3, warmup: 0}}
memory: {{precision: fp32, device: cpu, device_memory: 6MiB, host_memory: 64MiB}}
log: {{every: 1}}
output: {{dir: {place}/{adapter}}}
"""


def castor(place: Path, *arguments: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "castor", *map(str, arguments)],
        env={**os.environ, "HF_DATASETS_CACHE": str(place / "cache"), "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def entries(run: Path) -> list[dict[str, float]]:
    found = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [one for one in found if "loss" in one]


def test_qlora_trains_near_lora_in_less_memory_and_is_merged_into_the_unquantised_weights(
    tmp_path: Path,
) -> None:
    place = small_model.make(tmp_path)
    for adapter in ("lora", "qlora"):
        (place / f"{adapter}.yaml").write_text(RECIPE.format(place=place, adapter=adapter))
        castor(place, "train", place / f"{adapter}.yaml")
    lora, qlora = (entries(place / adapter) for adapter in ("lora", "qlora"))
    assert [one["loss"] for one in qlora] == pytest.approx([one["loss"] for one in lora], rel=0.02)
    assert [one["loss"] for one in qlora] != [one["loss"] for one in lora]
    assert qlora[-1]["host_bytes"] < lora[-1]["host_bytes"] / 2
    adapters = load_file(place / "qlora" / "adapter_model.safetensors")
    assert all(value.any() for value in adapters.values())

    castor(place, "export", place / "qlora", place / "merged", "--merge-adapter")
    base = AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.float32)
    expected = PeftModel.from_pretrained(base, place / "qlora").merge_and_unload().state_dict()
    merged = AutoModelForCausalLM.from_pretrained(place / "merged").state_dict()
    assert all(torch.equal(merged[key], value) for key, value in expected.items())
    assert "before quantisation" in (place / "merged" / "README.md").read_text()


def test_the_plan_predicts_the_peak_of_qlora(tmp_path: Path) -> None:
    place = small_model.make(tmp_path)
    (place / "qlora.yaml").write_text(RECIPE.format(place=place, adapter="qlora"))
    given = ["device_memory=256MiB", "activations=keep", "precision=bf16"]
    sets = [word for one in given for word in ("--set", f"memory.{one}")]
    sets += ["--set", "data.packing=true", "--set", "data.max_length=256"]
    said = re.search(r"device: ([\d.]+) MiB", castor(place, "train", place / "qlora.yaml",
                                                     "--dry-run", *sets))  # fmt: skip
    castor(place, "train", place / "qlora.yaml", *sets)
    peak = max(one["device_bytes"] for one in entries(place / "qlora")) / 2**20
    assert said
    assert peak <= float(said[1]) <= 1.25 * peak
