#!/usr/bin/env bash
# Guess: a loss of DTensors that are sharded over the batch has the value and the gradients of the full tensors, as
# (found - wanted).square().mean() has, or the operator is refused, as DTensor refuses others that it has no rule for.
# What happens: mse_loss, huber_loss, smooth_l1_loss, soft_margin_loss and binary_cross_entropy have no rule of their own.
# DTensor derives one from their decomposition, and then runs the operator itself on each shard, where the gradient of a
# mean is divided by the elements of the shard. With even shards the loss is right, and the gradients are those of the
# full tensors times the number of ranks. With uneven shards the loss is wrong too, and the factor differs by rank.
# Nothing is said. reduction="sum", l1_loss and cross_entropy are right.
# Seen with torch 2.15.0 (Linux, Python 3.11), on the CPU with gloo, on 2026-11-30. Downloads 3 GB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet torch==2.15.0 numpy==2.4.6
cat >losses.py <<'PY'
import os
import warnings

import torch
import torch.nn.functional as F
from torch import distributed, multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

LOSSES = {
    "square().mean()": lambda found, wanted: (found - wanted).square().mean(),
    "l1_loss": F.l1_loss,
    "cross_entropy": lambda found, wanted: F.cross_entropy(found, wanted.argmax(1)),
    'mse_loss, reduction="sum"': lambda found, wanted: F.mse_loss(found, wanted, reduction="sum"),
    "mse_loss": F.mse_loss,
    "huber_loss": F.huber_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "soft_margin_loss": lambda found, wanted: F.soft_margin_loss(found, wanted.sign()),
    "binary_cross_entropy": lambda found, wanted: F.binary_cross_entropy(found.sigmoid(), wanted.sigmoid()),
}


def compare(rank, ranks):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    store = "file://" + os.path.abspath(f"store of {ranks}")
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    for rows in (12, 13):
        torch.manual_seed(0)
        found, wanted = torch.randn(rows, 2), torch.randn(rows, 2)
        for name, loss in LOSSES.items():
            if rows == 13 and name not in ("square().mean()", "mse_loss"):
                continue
            plain = found.clone().requires_grad_()
            value = loss(plain, wanted)
            value.backward()
            sharded = distribute_tensor(found.clone(), mesh, [Shard(0)]).requires_grad_()
            value_of_shards = loss(sharded, distribute_tensor(wanted, mesh, [Shard(0)]))
            value_of_shards.backward()
            factors = sharded.grad.full_tensor() / plain.grad
            between = (value_of_shards.full_tensor() / value).item()
            if rank == 0:
                least, most = f"{factors.min():.2f}", f"{factors.max():.2f}"
                times = least if least == most else f"{least} to {most}"
                print(f"{ranks} ranks, {rows} rows, {name}: loss times {between:.3f}, gradients times {times}", flush=True)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    print("torch", torch.__version__, flush=True)
    for ranks in (2, 3):
        multiprocessing.spawn(compare, (ranks,), nprocs=ranks)
PY
env/bin/python losses.py 2>errors.txt | tee out.txt || { cat errors.txt; exit 1; }
for ranks in 2 3; do
    for name in "square().mean()" l1_loss cross_entropy 'mse_loss, reduction="sum"'; do
        grep -qxF "$ranks ranks, 12 rows, $name: loss times 1.000, gradients times 1.00" out.txt
    done
    for name in mse_loss huber_loss smooth_l1_loss soft_margin_loss binary_cross_entropy; do
        grep -qxF "$ranks ranks, 12 rows, $name: loss times 1.000, gradients times $ranks.00" out.txt
    done
    grep -qxF "$ranks ranks, 13 rows, square().mean(): loss times 1.000, gradients times 1.00" out.txt
done
grep -qxF "2 ranks, 13 rows, mse_loss: loss times 1.012, gradients times 1.86 to 2.17" out.txt
grep -qxF "3 ranks, 13 rows, mse_loss: loss times 0.938, gradients times 2.60 to 4.33" out.txt
