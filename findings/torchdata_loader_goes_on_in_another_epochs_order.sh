#!/usr/bin/env bash
# Guess: StatefulDataLoader, which is made for it, goes on in the middle of an epoch with the samples that are left,
# however the loader shuffles. sampler=RandomSampler(data) is what shuffle=True stands for.
# What happens: with shuffle=True it does. With a sampler of torch.utils.data, RandomSampler or WeightedRandomSampler,
# no random state is saved: a new process draws the order of its first epoch, and skips as many samples of that. In
# the middle of a second epoch some samples come twice, others never, without a warning, with workers and without.
# Seen with torchdata 0.11.0, torch 2.15.0 (Linux, Python 3.11) on 2026-12-01. Downloads 3 GB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet torch==2.15.0 torchdata==0.11.0 numpy==2.4.6
cat >resumed.py <<'PY'
from importlib.metadata import version

import torch
from torch.utils.data import RandomSampler, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

DATA = range(100)


def begin(kind):
    """What a script does when it starts: seeds, and makes its loader."""
    torch.manual_seed(0)
    how = {
        "shuffle=True": {"shuffle": True},
        "RandomSampler": {"sampler": RandomSampler(DATA)},
        "WeightedRandomSampler": {"sampler": WeightedRandomSampler([1.0] * 100, 100, replacement=False)},
    }[kind]
    return StatefulDataLoader(DATA, batch_size=10, **how)


print("torchdata", version("torchdata"), "torch", torch.__version__)
for kind in ("shuffle=True", "RandomSampler", "WeightedRandomSampler"):
    loader = begin(kind)
    first_epoch = [batch.tolist() for batch in loader]
    batches = iter(loader)
    before = [next(batches).tolist() for _ in range(4)]
    state = loader.state_dict()
    left = [batch.tolist() for batch in batches]
    resumed = begin(kind)
    resumed.load_state_dict(state)
    after = [batch.tolist() for batch in resumed]
    print(
        f"{kind}: goes on as it would have: {after == left}, as the first epoch did: {after == first_epoch[4:]}, "
        f"{len(set(sum(before + after, [])))} of 100 samples were seen"
    )
PY
env/bin/python -W ignore resumed.py 2>errors.txt | tee out.txt || { cat errors.txt; exit 1; }
grep -q "^shuffle=True: goes on as it would have: True, .* 100 of 100 samples" out.txt
grep -q "^RandomSampler: goes on as it would have: False, as the first epoch did: True, [5-9][0-9] of 100" out.txt
grep -q "^WeightedRandomSampler: goes on as it would have: False, as the first epoch did: True, [5-9][0-9] of 100" out.txt
