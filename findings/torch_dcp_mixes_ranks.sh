#!/usr/bin/env bash
# Guess: torch.distributed.checkpoint gives each rank back what it saved under a key, or one rank's values for all.
# What happens: a plain tensor of the same key comes back as rank 0's, a number or an object as the last rank's. What
# differs by rank (the state of its random numbers, its place in the data) is so exchanged without a word, and a state of
# tensors and numbers is put together from two ranks. Keys that name the rank keep them apart.
# Seen with torch 2.15.0 (Linux, Python 3.11) on 2026-11-30. Downloads 3 GB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet torch==2.15.0 numpy==2.4.6
cat >mixes.py <<'PY'
import os
import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed, multiprocessing


def run(rank):
    warnings.simplefilter("ignore")
    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    distributed.init_process_group("gloo", init_method="file://" + os.path.abspath("store"), rank=rank, world_size=2)
    saved = {"noise": torch.full((2,), float(rank)), "position": rank, "by rank": {f"position {rank}": rank}}
    dcp.save(saved, checkpoint_id="checkpoint")
    loaded = {"noise": torch.full((2,), -1.0), "position": -1, "by rank": {f"position {rank}": -1}}
    dcp.load(loaded, checkpoint_id="checkpoint")
    noise = int(loaded["noise"][0])
    print(f"rank {rank}: tensor of rank {noise}, number of rank {loaded['position']}, {loaded['by rank']}", flush=True)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    print("torch", torch.__version__, flush=True)
    multiprocessing.spawn(run, nprocs=2)
PY
env/bin/python mixes.py 2>errors.txt | tee out.txt || { cat errors.txt; exit 1; }
grep -qx "rank 0: tensor of rank 0, number of rank 1, {'position 0': 0}" out.txt
grep -qx "rank 1: tensor of rank 0, number of rank 1, {'position 1': 1}" out.txt
