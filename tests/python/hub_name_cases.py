"""What tests of files' names run on several ranks: `python hub_name_cases.py NAME DIRECTORY`.

Ranks with shards of models write them; the test compares the files with save_pretrained's.
"""

from pathlib import Path
from typing import Any

import transformers as hf

import as_rank
import pipeline_cases
import tensor_cases
from grids import some
from tensor_cases import EXPERTS, decoder
from zoo import Case

SHARD = "40KB"
"""Bytes of a file where a model has several."""

DECODER = decoder(
    "mixtral4", hf.MixtralConfig, num_hidden_layers=4, num_local_experts=4, num_experts_per_tok=2
)
GPT_NEOX = decoder("gpt_neox", hf.GPTNeoXConfig)
CASES: dict[str, tuple[Case, dict[str, Any]]] = some({
    "experts": (EXPERTS["mixtral"], {"ep_size": 2}),
    "uneven experts": (EXPERTS["qwen3_moe"], {"ep_size": 2}),
    "layers": (EXPERTS["qwen3_moe"], {"tp_size": 2}),
    "layers and their experts": (EXPERTS["mixtral"], {"tp_size": 2, "ep_size": 2}),
    "stages": (DECODER, {"pp_size": 2}),
    "gathered states": (EXPERTS["mixtral"], {}),
    "sharded": (GPT_NEOX, {}),
    "nvme": (EXPERTS["mixtral"], {"ep_size": 2, "nvme_path": "", "nvme_offload_fraction": 1.0}),
}, "uneven experts", "layers and their experts", "stages", "sharded", "nvme")  # fmt: skip
"""A model and what divides it between two ranks."""


def write(directory: Path) -> None:
    """All ranks write the files of every case, at once and beside the training."""
    for name, (case, sizes) in CASES.items():
        given = dict(sizes)
        if "nvme_path" in given:
            given["nvme_path"] = directory / "nvme"
            given["nvme_path"].mkdir(exist_ok=True)
        path = directory / name
        path.mkdir(exist_ok=True)
        if "pp_size" in given:
            boosted = pipeline_cases.boost(case, **given)
        else:
            boosted = tensor_cases.boost(case, given.pop("tp_size", 1), **given)
        booster, model, _ = boosted
        booster.save_model(model, path / "one file", shard=False)
        booster.save_model(model, path / "shards", size_per_shard=SHARD)
        booster.save_model(model, path / "beside", size_per_shard=SHARD, use_async=True)
        booster.wait_for_saves()
        booster.load_model(model, path / "shards")
        booster.save_model(model, path / "again", size_per_shard=SHARD)


if __name__ == "__main__":
    as_rank.run({"write": write})
