#!/usr/bin/env bash
# Guess: the document count in the header of a Megatron .idx file is the number of documents.
# What happens: it is the number of documents + 1, the entries of the table that follows, whose first is 0. A reader that
# takes it for the number of documents reads one entry too few, or counts one document more than there are, though the
# writer's source calls the field the number of documents. The count of sequences beside it is exact.
# Seen with megatron-core 0.16.1, torch 2.15.0 (Linux, Python 3.11) on 2026-11-30. Downloads 3 GB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet torch==2.15.0 numpy==2.4.6 megatron-core==0.16.1
cat >counts.py <<'PY'
import struct
import warnings
from importlib.metadata import version

warnings.simplefilter("ignore")
import numpy
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

builder = IndexedDatasetBuilder("text.bin", dtype=numpy.uint16)
for document in ([1, 2, 3], [4, 5]):
    builder.add_document(torch.tensor(document), [len(document)])
builder.finalize("text.idx")
with open("text.idx", "rb") as file:
    header = file.read(34)
    lengths = numpy.frombuffer(file.read(2 * 4), dtype=numpy.int32).tolist()
    file.read(2 * 8)
    boundaries = numpy.frombuffer(file.read(), dtype=numpy.int64).tolist()
magic, layout, dtype, sequences, documents = struct.unpack("<9sQBQQ", header)
print("megatron-core", version("megatron-core"), "torch", torch.__version__)
print(f"two documents: {sequences} sequences of {lengths} tokens, {documents} 'documents': {boundaries}")
PY
env/bin/python counts.py 2>errors.txt | tee out.txt || { cat errors.txt; exit 1; }
grep -qx "two documents: 2 sequences of \[3, 2\] tokens, 3 'documents': \[0, 1, 2\]" out.txt
