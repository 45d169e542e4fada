#!/usr/bin/env bash
# Guess: a column of int64 with a missing value comes in the formats "numpy" and "torch" as int64 with a mask, as objects,
# as float64 that holds integers up to 2**53, or not at all.
# What happens: Arrow makes NaN of what is missing and float64 of the rest, and the formats make float32 of all floating
# point. Integers above 16,777,216 in the same batch are rounded: ids of documents, users or hashes fall together, and
# timestamps in seconds are a minute off. Rows one at a time, and batches without a missing value, are exact, so that
# what a row's id is depends on the rows that it is fetched with. A map() in either format writes the rounded column.
# Nothing is said, and the features say int64.
# Seen with datasets 5.2.0, pyarrow 26.0.1, torch 2.15.0 (Linux, Python 3.11) on 2026-11-30. Downloads 3 GB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet torch==2.15.0 datasets==5.2.0 pyarrow==26.0.1 numpy==2.4.6
cat >rounds.py <<'PY'
import datasets
import pyarrow
import torch

datasets.disable_progress_bars()
print("datasets", datasets.__version__, "pyarrow", pyarrow.__version__, "torch", torch.__version__)
IDS = [1796000001, 1796000002, 1796000061, 1796000062]
rows = datasets.Dataset.from_dict({"id": [*IDS, None, 7]})
print("features:", rows.features["id"].dtype)
for name in ("numpy", "torch"):
    formatted = rows.with_format(name)
    for first, last in ((0, 4), (0, 6)):
        column = formatted[first:last]["id"]
        found = [int(value) for value in column[:4]]
        print(f"{name}, rows {first} to {last}: {column.dtype}, {len(set(found))} of 4 ids, {found}")
    one = int(formatted[0]["id"])
    print(f"{name}, row 0: {one}, {'exact' if one == IDS[0] else 'rounded'}")
    mapped = formatted.map(lambda batch: {"copy": batch["id"]}, batched=True)
    values = mapped.with_format(None)["copy"][:4]
    print(f"{name}, map: {mapped.features['copy'].dtype}, {len(set(values))} of 4 ids")
PY
HF_HOME=$folder/home env/bin/python rounds.py 2>errors.txt | tee out.txt || { cat errors.txt; exit 1; }
grep -qx "features: int64" out.txt
for name in numpy torch; do
    grep -qE "^$name, rows 0 to 4: (torch.)?int64, 4 of 4 ids, " out.txt
    grep -qE "^$name, rows 0 to 6: (torch.)?float32, 1 of 4 ids, " out.txt
    grep -qx "$name, row 0: 1796000001, exact" out.txt
    grep -qx "$name, map: float32, 1 of 4 ids" out.txt
done
