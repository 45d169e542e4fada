"""What test_device_link.py runs on each rank: `python device_link_cases.py NAME DIRECTORY`.

Each rank has a GPU, simulated or real, as CASTOR_TEST_DEVICE says.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

import castor
from castor.config.names import Reduction
from castor.distributed import ModelParallelGroup, ParallelGroups
from castor.distributed.ring_attention import Ring
from castor.runtime.device_groups import DeviceBackend, DeviceLink
from castor.runtime.parallel_dims import ParallelDims
from castor.runtime.process_groups import own_groups
from simulated import compute_as_asked
from simulated_gpu import NAME
from tensor_cases import write

TYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (1, 17, 64 * 1024, 100_003)
"""Numbers of elements; large sums go by shards, of which the last is padded."""


def device() -> torch.device:
    """Device of this rank."""
    return torch.device("cuda" if os.environ["CASTOR_TEST_DEVICE"] == "cuda" else NAME, 0)


def linked(reduction: Reduction = "ordered") -> ModelParallelGroup:
    """All ranks, as tensor-parallel ranks."""
    castor.launch_from_torch()
    size = int(os.environ["WORLD_SIZE"])
    ranks = ParallelGroups.make(ParallelDims(tp=size)).connect_devices(device(), reduction).layers
    assert ranks is not None
    return ranks


def wait_for_a_lost_rank(ranks: ModelParallelGroup) -> tuple[float, str]:
    """The seconds that a collective waits for a rank that is lost, and the error of the next one.

    Raises:
        AssertionError: The next one has none.
    """
    start = time.monotonic()
    x = torch.ones(1000, device=device())
    ranks.all_reduce(x)
    torch.get_device_module(device()).synchronize()
    waited = time.monotonic() - start
    try:
        ranks.all_reduce(x)
    except castor.Error as error:
        return waited, str(error)
    raise AssertionError("a collective without a rank that is lost ended without an error")


def _values(size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(size, generator=generator) * 100).to(dtype)


def same_bits(_: Path) -> None:
    """Each collective through the devices, and the same through the host."""
    ranks = linked()
    assert ranks.device_link is not None
    own, size = ranks.rank, ranks.size
    for dtype in TYPES:
        for numel in SIZES:
            given = _values(numel, dtype, seed=own)
            assert not ranks.links.sends_from_device(given)
            assert torch.equal(ranks.all_reduce(given.to(device())).cpu(), ranks.all_reduce(given))
            shards = torch.stack([_values(numel, dtype, seed=10 * own + of) for of in range(size)])
            for collective in (ranks.links.all_to_all, ranks.links.all_gather):
                sent = shards if collective == ranks.links.all_to_all else given
                received = {}
                for where in (torch.device("cpu"), device()):
                    received[where.type] = torch.empty_like(shards, device=where)
                    collective(sent.to(where), received[where.type])
                assert torch.equal(received["cpu"], received[device().type].cpu())
            ring = Ring(ranks)
            with ring.turn():
                coming = ring.ring_shift(given.to(device()))
            expected = _values(numel, dtype, seed=(own - 1) % size)
            assert torch.equal(coming.result().cpu(), expected)
    flags = torch.tensor([own % 2 == 0] * 9, device=device())
    everyone = torch.empty((size, 9), dtype=torch.bool, device=device())
    ranks.links.all_gather(flags, everyone)
    assert everyone[:, 0].tolist() == [rank % 2 == 0 for rank in range(size)]


def backend_adds(_: Path) -> None:
    """The backend's own sums: those of the host but for the order, and as many bytes sent."""
    ranks = linked("backend")
    gpu: Any = torch.simgpu.gpu  # type: ignore[attr-defined]
    for dtype, near in zip(TYPES, (1e-5, 8e-2, 1e-2), strict=True):
        for numel in SIZES:
            given = _values(numel, dtype, seed=ranks.rank)
            torch.testing.assert_close(
                ranks.all_reduce(given.to(device())).cpu(),
                ranks.all_reduce(given),
                rtol=near,
                atol=100 * near,
            )
            rows = _values(4 * numel, dtype, seed=ranks.rank).view(4, numel)
            before = gpu.counts()["collectives"]
            torch.testing.assert_close(
                ranks.reduce_scatter(rows.to(device()), 0).cpu(),
                ranks.reduce_scatter(rows, 0),
                rtol=near,
                atol=100 * near,
            )
            assert gpu.counts()["collectives"] == before + 1
    with pytest.raises(ValueError, match="only a backend that adds up"):
        ranks.links.reduce_scatter(rows, rows[0])


def goes_beside(_: Path) -> None:
    """A sum that is begun waits for rank 1, and what rank 0 computes meanwhile does not."""
    for reduction in ("ordered", "backend"):
        ranks = linked(reduction)
        gpu: Any = torch.get_device_module(device())
        values = torch.full((100_000,), 1.0 + ranks.rank, device=device())
        other = torch.ones(1000, device=device())
        gpu.synchronize()
        waits = gpu.gpu.counts()["host_waits"]
        with gpu._held() if ranks.rank == 1 else nullcontext():
            values *= 2
            work = ranks.links.begin_all_reduce(values)
            other *= 3
            assert gpu.gpu.counts()["host_waits"] == waits
            if ranks.rank == 0:
                assert other.cpu().unique().tolist() == [3]
            distributed.all_reduce(torch.zeros(1))  # so long is rank 1's stream held
        work.wait()
        values += 1
        expected = 2 * sum(range(1, ranks.size + 1)) + 1
        assert values.cpu().unique().tolist() == [expected]


def host_goes_on(_: Path) -> None:
    """Collectives on a stream that is held return before it goes on, with the right values."""
    ranks = linked()
    gpu: Any = torch.get_device_module(device())
    x = torch.full((100_000,), 1.0 + ranks.rank, device=device())
    gpu.synchronize()
    with gpu._held():
        x *= 2
        total = ranks.all_reduce(x)
        gathered = torch.empty((ranks.size, len(x)), device=device())
        ranks.links.all_gather(total, gathered)
        coming = Ring(ranks).ring_shift(x)
        passed = coming.result() * 3
        del x, total
    expected = 2 * sum(range(1, ranks.size + 1))
    assert gathered.cpu().unique().tolist() == [expected]
    assert passed.cpu().unique().tolist() == [6 * (1 + (ranks.rank - 1) % ranks.size)]


def alone(_: Path) -> None:
    """A group of one rank, with which a single GPU tries the backend: values, memory, abort."""
    castor.launch_from_torch()
    (name,) = own_groups([[0]], 1)
    ranks = ModelParallelGroup.of(name, [0])
    backend = DeviceBackend.find(device(), lambda value: [value])
    assert backend is not None
    free = backend.free_bytes()
    link = DeviceLink(ranks.links, backend.group([[0]]), device())
    ranks.use_device_link(link)
    print(f"{ranks.link}: {free - backend.free_bytes()} bytes of communicators")
    for numel in SIZES:
        given = _values(numel, torch.bfloat16, seed=0).to(device())
        assert ranks.links.sends_from_device(given)
        assert torch.equal(ranks.all_reduce(given), given)
        for collective in (ranks.links.all_gather, ranks.links.all_to_all):
            received = torch.empty_like(given)
            collective(given, received)
            assert torch.equal(received, given)
        assert torch.equal(Ring(ranks).ring_shift(given).result(), given)
    link.fail()
    with pytest.raises(castor.Error, match="could not go on"):
        ranks.all_reduce(given)
    sys.stdout.flush()
    os._exit(0)


def one_ends(directory: Path) -> None:
    """Rank 1 is killed or stopped, or leaves; the device of rank 0 waits for it."""
    ranks = linked()
    how = os.environ["HOW"]
    if ranks.rank == 1:
        if how == "leaves":
            ranks.leave()
            time.sleep(60)
        os.kill(os.getpid(), {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[how])
    write(directory, "one_ends", wait_for_a_lost_rank(ranks))
    os._exit(0)


def leaves_out(directory: Path) -> None:
    """Whether there is a link between devices."""
    link = linked().device_link
    write(directory, "leaves_out", None if link is None else link.group.size())


if __name__ == "__main__":
    torch.set_num_threads(1)
    compute_as_asked()
    scenario: Callable[[Path], None] = globals()[sys.argv[1]]
    scenario(Path(sys.argv[2]))
