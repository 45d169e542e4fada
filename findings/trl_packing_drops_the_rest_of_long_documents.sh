#!/usr/bin/env bash
# Guess: packing puts documents together and loses none of their tokens, whichever strategy of TRL does it.
# What happens: "bfd", SFTConfig's default, cuts what is longer than a sequence and drops the rest, without a count or a
# warning. "wrapped" and "bfd_split" keep every token. A corpus of long documents is trained on their beginnings.
# Seen with trl 1.16.0, datasets 5.2.0, torch 2.15.0 (Linux, Python 3.11) on 2026-11-30. Downloads 3 GB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet torch==2.15.0 trl==1.16.0 transformers==5.24.0 datasets==5.2.0 accelerate==1.15.0 numpy==2.4.6
cat >packs.py <<'PY'
import datasets
import trl
from trl import SFTConfig
from trl.data_utils import pack_dataset

datasets.disable_progress_bars()
documents = datasets.Dataset.from_dict({"input_ids": [list(range(1000)), list(range(60))]})
print("trl", trl.__version__, "datasets", datasets.__version__)
print("default:", SFTConfig.__dataclass_fields__["packing_strategy"].default)
for strategy in ("bfd", "bfd_split", "wrapped"):
    rows = pack_dataset(documents, 128, strategy=strategy)["input_ids"]
    print(f"{strategy}: {sum(map(len, rows))} of 1060 tokens in {len(rows)} sequences")
PY
env/bin/python packs.py 2>errors.txt | tee out.txt || { cat errors.txt; exit 1; }
grep -qx "default: bfd" out.txt
grep -qx "bfd: 188 of 1060 tokens in 2 sequences" out.txt
grep -q "^bfd_split: 1060 of 1060" out.txt
grep -q "^wrapped: 1060 of 1060" out.txt
