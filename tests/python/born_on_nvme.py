"""Boosts a model that was born lazily and whose parameters live on NVMe; run by test_born_on_nvme.

Usage: python born_on_nvme.py FOLDER BUILDING. Prints JSON: the peak resident bytes of the boost
above those before it, without what it maps of files, and a checksum of each parameter.
"""

import hashlib
import json
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import castor
from castor import GeminiPlugin, LazyInitContext

WIDTH, LAYERS, VOCABULARY = 512, 10, 2048
HOST_MEMORY = 32 * 2**20
CHUNK = 3 * 2**20


def config(layers: int = LAYERS) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=3 * WIDTH,
        num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=8, use_cache=False,
    )  # fmt: skip


def build(building: str, folder: Path, layers: int = LAYERS) -> Any:
    torch.manual_seed(3)
    if building == "from_pretrained":
        return LlamaForCausalLM.from_pretrained(folder / "pretrained")
    if building == "bf16":
        return AutoModelForCausalLM.from_config(config(layers), dtype=torch.bfloat16)
    return LlamaForCausalLM(config(layers))


def boost(model: Any, folder: Path) -> castor.Booster:
    plugin = GeminiPlugin(
        device="cpu", device_memory="64MiB", host_memory=HOST_MEMORY, nvme_path=folder,
        precision="bf16", optim_state_format="split_int8", chunk_bytes=CHUNK,
    )  # fmt: skip
    booster = castor.Booster(plugin=plugin)
    booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    return booster


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


class Peak:
    """The most resident memory that no file backs, looked at every millisecond."""

    def __init__(self) -> None:
        self._before = self._peak = self._now()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @staticmethod
    def _now() -> int:
        return status("RssAnon") + status("RssShmem")

    def _watch(self) -> None:
        while not self._stop.wait(0.001):
            self._peak = max(self._peak, self._now())

    def stop(self) -> int:
        self._stop.set()
        self._thread.join()
        return self._peak - self._before


def checksums(model: Any) -> dict[str, str]:
    """Of the fp32 values that the masters have."""
    session = castor.runtime.engine.engine_of(model).session
    names = [name for name, _ in model.named_parameters()]
    index_of = castor.runtime.engine.engine_of(model).index_of
    return {
        name: hashlib.sha256(session.master(index_of[param]).numpy().tobytes()).hexdigest()
        for name, param in zip(names, model.parameters(), strict=True)
    }


def main() -> None:
    folder, building = Path(sys.argv[1]), sys.argv[2]
    with LazyInitContext():
        small = build("config", folder, 1)
    booster = boost(small, folder)  # code is loaded, pools are made
    del small, booster
    with LazyInitContext():
        model = build(building, folder)
    peak = Peak()
    booster = boost(model, folder)
    peak_bytes = peak.stop()
    found = {
        "peak_bytes": peak_bytes,
        "nvme_weight_bytes": booster.report().nvme_weight_bytes,
        "checksums": checksums(model),
        "next_random": torch.rand(3).tolist(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
