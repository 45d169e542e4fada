"""Scenarios of simnccl, the simulated GPU's process group: see test_simulated_group.py.

`python simulated_group_cases.py NAME DIRECTORY`, on each rank. CASTOR_TEST_DEVICE gives the seed of
the streams' delays.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import distributed

import simulated_gpu
from simulated import compute_as_asked

dist: Any = distributed
"""torch.distributed without its types: a call returns None on ranks outside of the group."""
DEVICE = f"{simulated_gpu.NAME}:0"
MIB = 2**20
HOUR = timedelta(hours=1)

TYPES = (torch.float32, torch.bfloat16, torch.int64)
Operation = Callable[[torch.Tensor], torch.Tensor]


def join() -> tuple[int, int]:
    """Joins the other ranks; returns this rank and how many there are."""
    dist.init_process_group(f"cpu:gloo,{simulated_gpu.NAME}:{simulated_gpu.BACKEND}")
    return dist.get_rank(), dist.get_world_size()


def new_group(**settings: Any) -> Any:
    return dist.new_group(backend=simulated_gpu.BACKEND, **settings)


def backend_of(group: Any) -> Any:
    """The SimulatedGroup of a process group."""
    return group._get_backend(torch.device(DEVICE))


def simgpu() -> Any:
    return torch.simgpu  # type: ignore[attr-defined]


def synchronize() -> None:
    simgpu().synchronize()


@contextlib.contextmanager
def late(rank: int) -> Iterator[None]:
    """Rank 1's stream is held until the hosts of both are at the end of it."""
    with simgpu()._held() if rank == 1 else contextlib.nullcontext():
        yield
        dist.all_reduce(torch.zeros(1))


def refused(call: Callable[[], Any]) -> str:
    """The message of the RuntimeError that `call` raises."""
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def values(_: Path) -> None:
    """Every operation gives on the GPU what gloo gives on the CPU."""
    rank, size = join()
    for dtype in TYPES:
        source = torch.randint(-8, 8, (2 * size, 3), generator=_generator(rank)).to(dtype)
        for name, operation in _operations(rank, size).items():
            expected = operation(source.clone())
            assert torch.equal(operation(source.to(DEVICE)).cpu(), expected), (name, dtype)
    source = torch.arange(6, dtype=torch.float32, device=DEVICE) + rank
    dist.all_reduce(source, dist.ReduceOp.AVG)
    assert source.tolist() == [i + (size - 1) / 2 for i in range(6)]
    _lists(rank, size)
    _coalesced(rank, size)
    empty = torch.empty(0, device=DEVICE)
    dist.all_reduce(empty)
    dist.all_gather([empty] * size, empty)
    dist.barrier(device_ids=[0])
    dist.destroy_process_group()


def _generator(rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(100 + rank)


def _operations(rank: int, size: int) -> dict[str, Operation]:
    def reduced(op: Any) -> Operation:
        def run(source: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(source, op)
            return source

        return run

    def gathered(source: torch.Tensor) -> torch.Tensor:
        output = source.new_empty(size * len(source), 3)
        dist.all_gather_into_tensor(output, source)
        return output

    def scattered(source: torch.Tensor) -> torch.Tensor:
        output = source.new_empty(len(source) // size, 3)
        dist.reduce_scatter_tensor(output, source)
        return output

    def sent_by_last(source: torch.Tensor) -> torch.Tensor:
        dist.broadcast(source, size - 1)
        return source

    def exchanged(source: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(source)
        dist.all_to_all_single(output, source)
        return output

    def exchanged_unevenly(source: torch.Tensor) -> torch.Tensor:
        """Rank r sends r rows to each rank, so that rank 0 sends none."""
        output = source.new_empty(sum(range(size)), 3)
        rows = source[:1].expand(rank * size, 3).contiguous()
        dist.all_to_all_single(output, rows, list(range(size)), [rank] * size)
        return output

    def passed_on(source: torch.Tensor) -> torch.Tensor:
        """Even ranks send to the next one, outside a batch."""
        if rank % 2 == 0:
            dist.send(source, rank + 1)
        else:
            dist.recv(source, rank - 1)
        return source

    ops = dist.ReduceOp
    return {
        **{f"all_reduce {op}": reduced(op) for op in (ops.SUM, ops.MAX, ops.MIN, ops.PRODUCT)},
        "all_gather_into_tensor": gathered, "reduce_scatter_tensor": scattered,
        "broadcast": sent_by_last, "all_to_all_single": exchanged,
        "all_to_all_single, uneven": exchanged_unevenly, "send and recv": passed_on,
    }  # fmt: skip


def _lists(rank: int, size: int) -> None:
    source = torch.full((3,), float(rank), device=DEVICE)
    outputs = [torch.empty(3, device=DEVICE) for _ in range(size)]
    dist.all_gather(outputs, source)
    assert [output.tolist() for output in outputs] == [[float(i)] * 3 for i in range(size)]
    inputs = [torch.full((i + 1,), 10.0 * rank + i, device=DEVICE) for i in range(size)]
    outputs = [torch.empty(rank + 1, device=DEVICE) for _ in range(size)]
    dist.all_to_all(outputs, inputs)
    assert [output.tolist() for output in outputs] == [
        [10.0 * i + rank] * (rank + 1) for i in range(size)
    ]


def _coalesced(rank: int, size: int) -> None:
    """torch calls the coalesced forms inside startCoalescing() and outside."""
    for device in (None, torch.device(DEVICE)):
        sums = [torch.full((2,), float(rank), device=DEVICE) for _ in range(3)]
        with dist._coalescing_manager(device=device):
            for tensor in sums:
                dist.all_reduce(tensor)
        assert all(tensor.tolist() == [sum(range(size))] * 2 for tensor in sums)
        outputs = [torch.empty(size, device=DEVICE) for _ in range(2)]
        with dist._coalescing_manager(device=device, async_ops=True) as manager:
            for i, output in enumerate(outputs):
                dist.all_gather_into_tensor(output, torch.full((1,), rank + 0.5 * i, device=DEVICE))
        manager.wait()
        assert [output.tolist() for output in outputs] == [
            [r + 0.5 * i for r in range(size)] for i in range(2)
        ]


def ring(_: Path) -> None:
    """All ranks send to the next one and receive from the one before, several tensors at a time."""
    rank, size = join()
    for first in (dist.isend, dist.irecv):
        sent = [torch.full((n,), float(rank), device=DEVICE) for n in (5, 300_000)]
        received = [torch.empty_like(tensor) for tensor in sent]
        operations = [
            dist.P2POp(op, tensor, (rank + step) % size)
            for op, step, tensors in ((dist.isend, 1, sent), (dist.irecv, -1, received))
            for tensor in tensors
        ]
        operations.sort(key=lambda operation: operation.op is not first)
        (work,) = dist.batch_isend_irecv(operations)
        work.wait()
        for tensor in received:
            assert torch.equal(tensor.cpu(), torch.full(tensor.shape, float((rank - 1) % size)))
    dist.destroy_process_group()


def waits(_: Path) -> None:
    """The host waits for nothing, and streams for each other."""
    rank, _size = join()
    dist.all_reduce(torch.zeros(1, device=DEVICE))  # connects, which the host waits for
    synchronize()
    _host_goes_on_while_streams_are_held(rank)
    _tensors_are_kept_until_wait(rank)
    _barrier_holds_the_host()
    _late_ranks_have_a_day()
    dist.destroy_process_group()


def _host_goes_on_while_streams_are_held(rank: int) -> None:
    source = torch.zeros(1000, device=DEVICE)
    output = torch.empty(2000, device=DEVICE)
    dist.barrier(device_ids=[0])
    with simgpu()._held():
        source.add_(rank + 1)
        sums = dist.all_reduce(source, async_op=True)
        gathered = dist.all_gather_into_tensor(output, source, async_op=True)
        gathered.wait()
        doubled = output * 2
        assert not sums.is_completed()
        assert not gathered.is_completed()
    assert doubled.tolist() == [6.0] * 2000
    for work in (sums, gathered):
        assert work.is_completed()
        assert work.exception() is None


def _tensors_are_kept_until_wait(rank: int) -> None:
    """The other rank is late, so that memory that is let go early would be written before it."""
    output = torch.empty(2000, device=DEVICE)
    source = torch.full((1000,), rank + 1.0, device=DEVICE)
    place = source.data_ptr()
    dist.barrier(device_ids=[0])
    with late(rank):
        work = dist.all_gather_into_tensor(output, source, async_op=True)
        del source
        kept = torch.full((1000,), 7.0, device=DEVICE)
        assert kept.data_ptr() != place
        work.wait()
        free = torch.full((1000,), 8.0, device=DEVICE)
        assert free.data_ptr() == place
        result = output.clone()
    assert result.tolist() == [1.0] * 1000 + [2.0] * 1000
    # Without wait() they are kept until the operation is over.
    source = torch.full((1000,), rank + 3.0, device=DEVICE)
    with late(rank):
        work = dist.all_gather_into_tensor(output, source, async_op=True)
        del source, work
        torch.full((1000,), 9.0, device=DEVICE)
    synchronize()
    assert output.tolist() == [3.0] * 1000 + [4.0] * 1000


def _barrier_holds_the_host() -> None:
    begin = time.monotonic()
    simgpu()._sleep(100_000)
    dist.barrier(device_ids=[0])
    assert time.monotonic() - begin >= 0.1


def _late_ranks_have_a_day() -> None:
    """A group's timeout is that of its connecting."""
    made: list[Any] = []
    gloo = dist.ProcessGroupGloo

    def keep(*arguments: Any) -> Any:
        made.append(gloo(*arguments))
        return made[-1]

    with mock.patch.object(dist, "ProcessGroupGloo", keep):
        dist.all_reduce(torch.zeros(1, device=DEVICE), group=new_group(timeout=HOUR))
    synchronize()
    (host,) = made
    assert host.options._timeout == 24 * HOUR


def memory_and_counts(_: Path) -> None:
    """A communicator's memory is no tensor's, and what ranks hand over is counted."""
    rank, _size = join()
    group = new_group()
    free, total = simgpu().mem_get_info()
    before = simgpu().gpu.counts()
    source = torch.ones(256, device=DEVICE)
    reserved = simgpu().memory_reserved()
    free -= reserved - (total - free)
    dist.all_reduce(source, group=group)
    assert simgpu().mem_get_info() == (free - 8 * MIB, total)
    assert simgpu().memory_reserved() == reserved
    dist.broadcast(source, 0, group=group)
    if rank == 0:
        dist.send(source, 1, group=group)
    else:
        dist.recv(source, 0, group=group)
    after = simgpu().gpu.counts()
    assert after["collectives"] - before["collectives"] == 3
    handed_over = after["collective_bytes"] - before["collective_bytes"]
    assert handed_over == source.nbytes * (3 if rank == 0 else 1)
    dist.destroy_process_group(group)
    assert simgpu().mem_get_info() == (free, total)
    _wrong_tensors()
    dist.destroy_process_group()


def _wrong_tensors() -> None:
    backend = backend_of(dist.group.WORLD)
    rows = torch.ones(4, 4, device=DEVICE)
    assert "contiguous" in refused(lambda: dist.all_reduce(rows.t()[:2]))
    assert "dense tensors of the simulated GPU" in refused(lambda: backend.allreduce(torch.ones(2)))
    assert "SUM, AVG" in refused(lambda: dist.all_reduce(rows, dist.ReduceOp.BAND))


def peer_ends(_: Path) -> None:
    """Rank 1 ends without a word. Rank 0's stream hangs until abort(), and its process ends."""
    rank, _size = join()
    source = torch.ones(4, device=DEVICE)
    dist.all_reduce(source)
    synchronize()
    if rank == 1:
        os._exit(0)
    time.sleep(0.3)
    works = [dist.all_reduce(source, async_op=True) for _ in range(2)]
    works[0].wait()
    source.fill_(5)
    time.sleep(0.5)
    assert not works[0].is_completed()
    threading.Timer(0.2, backend_of(dist.group.WORLD).abort).start()
    synchronize()
    assert source.tolist() == [5.0] * 4
    for work in works:
        assert work.is_completed()
        assert "the communicator was aborted" in str(work.exception())
    for call in (lambda: dist.all_reduce(source), lambda: dist.send(source, 1)):
        assert "the communicator was aborted" in refused(call)


def peer_never_comes(directory: Path) -> None:
    """Rank 1 lives and takes no part in a collective, a message, and a group's first call."""
    rank, _size = join()
    source = torch.ones(4, device=DEVICE)
    groups = [new_group(), new_group()]
    late = dist.new_group(backend=simulated_gpu.HASTY)
    for group in groups:
        dist.all_reduce(source, group=group)
        if rank == 0:
            dist.send(source, 1, group=group)
        else:
            dist.recv(source, 0, group=group)
    synchronize()
    over = directory / "over"
    if rank == 1:
        while not over.exists():
            time.sleep(0.05)
        os._exit(0)
    works = [
        dist.all_reduce(source, group=groups[0], async_op=True),
        dist.irecv(source, 1, group=groups[0]),
        *dist.batch_isend_irecv(
            [dist.P2POp(op, source, 1, group=groups[1]) for op in (dist.isend, dist.irecv)]
        ),
    ]
    time.sleep(0.3)
    for work in works:
        assert not work.is_completed()
        work.wait()
    for group in groups:
        backend_of(group).abort()
    synchronize()
    assert all(work.is_completed() for work in works)
    assert "rank 1 has not begun" in refused(lambda: dist.all_reduce(source, group=late))
    begin = time.monotonic()
    del works, work
    for group in (*groups, late):
        dist.destroy_process_group(group)
    assert time.monotonic() - begin < 30
    over.touch()


def shares_a_device(_: Path) -> None:
    """Both ranks are given one CASTOR_SIMULATED_GPU_ID."""
    join()
    source = torch.ones(4, device=DEVICE)
    print(simgpu().get_device_properties().uuid)
    print(refused(lambda: dist.all_reduce(source)).splitlines()[0])
    dist.barrier(device_ids=None, group=dist.new_group(backend="gloo"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    compute_as_asked()
    globals()[sys.argv[1]](Path(sys.argv[2]))
