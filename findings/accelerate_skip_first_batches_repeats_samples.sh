#!/usr/bin/env bash
# Guess: save_state, and later load_state with skip_first_batches, go on in the middle of a shuffled epoch: each sample
# is seen once in it.
# What happens: the order of a shuffled DataLoader is drawn anew when the loop begins, from the random state in the
# middle of the epoch, and the first batches of that other order are skipped. Some samples come twice, others never.
# Accelerator's DataLoaderConfiguration(use_seedable_sampler=True), which is not the default, keeps the order.
# Seen with accelerate 1.15.0, torch 2.15.0 (Linux, Python 3.11) on 2026-11-30. Downloads 3 GB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet torch==2.15.0 accelerate==1.15.0 numpy==2.4.6
cat >repeats.py <<'PY'
import accelerate
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader


def prepared(seedable):
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable))
    return accelerator, accelerator.prepare(DataLoader(range(12), batch_size=2, shuffle=True))


def seen(seedable):
    accelerator, loader = prepared(seedable)
    samples = []
    for batch in loader:
        samples += batch.tolist()
        if len(samples) == 6:
            accelerator.save_state("state")
            break
    accelerator, loader = prepared(seedable)
    accelerator.load_state("state")
    for batch in accelerator.skip_first_batches(loader, 3):
        samples += batch.tolist()
    return samples


print("accelerate", accelerate.__version__, "torch", torch.__version__)
for seedable in (False, True):
    samples = seen(seedable)
    print(f"use_seedable_sampler={seedable}: {samples}, different ones: {len(set(samples))} of 12")
PY
env/bin/python repeats.py 2>errors.txt | tee out.txt || { cat errors.txt; exit 1; }
grep -q "^use_seedable_sampler=False: .* different ones: [5-9] of 12" out.txt || grep -q "^use_seedable_sampler=False: .* different ones: 1[01] of 12" out.txt
grep -q "^use_seedable_sampler=True: .* different ones: 12 of 12" out.txt
