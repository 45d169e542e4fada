"""The facts of `castor doctor`: versions, processor, memory, kernel, measured bandwidths."""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import os
import platform
import resource
import shutil
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch

from castor import _C, io_bench
from castor._loader import BUILD_INFO
from castor.config.memory import (
    CGROUPS,
    PROC,
    cgroup_folders,
    host_memory,
    read_small,
    usable_bytes,
)
from castor.runtime.device import make_backend
from castor.runtime.rank_cores import RankPlace, places_of_ranks

# --- Measures a directory that is to be the NVMe tier ---------------------------------------------

FILE_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class NvmePath:
    """A directory and its device."""

    path: str
    direct: bool
    """Transfers go past the page cache (O_DIRECT)."""
    file: str
    """The file that was measured on, and how it is opened: O_DIRECT, or buffered and why."""
    engine: str
    """Name and settings of the I/O engine."""
    free_bytes: int
    """Free bytes for this user, before the file was made."""
    block_bytes: int
    """With `depth`, the setting with the least memory in flight within 5% of the best mixed
    bandwidth: what `castor io-bench` suggests."""
    depth: int
    read_bytes_per_second: float
    """At that setting, as the next two."""
    write_bytes_per_second: float
    mixed_bytes_per_second: float
    """Half reads and half writes, both counted."""
    full_duplex: bool
    """Reading and writing at once is clearly faster than one after the other."""


def measure_nvme(
    path: str | os.PathLike[str], *, file_bytes: int = FILE_BYTES, seconds: float = 0.3
) -> NvmePath:
    """Measures a directory with a file of its own, for about 10 seconds.

    Args:
        path: A directory on the device.
        file_bytes: Size of the file, 4 MiB or more. It is removed afterwards.
        seconds: Of each of the 27 measurements.

    Raises:
        castor.IoError: The directory cannot be used, has no room, or the device failed.
        OSError: The directory does not exist.
    """
    free = shutil.disk_usage(path).free
    report = io_bench.measure(path, file_bytes=file_bytes, seconds=seconds)
    setting = report.suggested()
    rates = {mix: report.at(mix, setting.block_bytes, setting.depth) for mix in io_bench.MIXES}
    return NvmePath(
        path=os.fspath(path),
        direct=report.direct,
        file=report.file,
        engine=setting.engine,
        free_bytes=free,
        block_bytes=setting.block_bytes,
        depth=setting.depth,
        read_bytes_per_second=rates["read"].bytes_per_second,
        write_bytes_per_second=rates["write"].bytes_per_second,
        mixed_bytes_per_second=rates["mixed"].bytes_per_second,
        full_duplex=report.full_duplex,
    )


# --- The facts of `castor doctor`: versions, processor, memory, kernel, measured bandwidths -------

_MEASURED_BYTES, _LEAST_BYTES = 512 << 20, 32 << 20
_MEMORY_SHARE = 8  # measuring takes at most this part of the available memory
_TRIED_LOCKED_BYTES = 8 << 30
_REPETITIONS = 5
_IO_URING_SETUP = 425  # the same on every architecture
_IO_URING_PARAMS_BYTES = 120
_CAP_IPC_LOCK = 14


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU that torch sees."""

    name: str
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class NumaNode:
    """A NUMA node by the operating system's number."""

    os_index: int
    memory_bytes: int
    num_cpus: int


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts of a machine; None where something does not exist or has no limit."""

    castor: str
    torch: str
    python: str
    compiler: str
    """Compiler of castor._C."""
    hwloc: str
    """Its version, or "none"."""
    jemalloc: str
    """Its version, or "none"."""
    gpu_module: bool
    """castor was built with its GPU parts."""
    torch_cuda: str | None
    """CUDA version of the torch that is installed."""
    gpus: tuple[Gpu, ...]
    nvidia_driver: bool
    """The machine has an NVIDIA driver, whatever torch sees."""
    cpu: str
    architecture: str
    adam_isa: str
    """Instruction set that Adam's dispatch takes: "baseline", "avx2" or "avx512"."""
    num_cpus: int
    """Processors that the machine has online."""
    num_usable_cpus: int
    """Processors that this process may run on (affinity mask)."""
    cpu_quota: float | None
    """Cores' worth of time that the cgroup grants."""
    torch_threads: int
    load: float
    """Load average of the last minute, before anything was measured."""
    memory_bytes: int
    available_bytes: int
    """Memory that the machine could give now."""
    memory_limit_bytes: int | None
    """Memory that the cgroup grants."""
    usable_bytes: int
    """Sum of GeminiPlugin's default budgets in this memory."""
    numa_nodes: tuple[NumaNode, ...] | None
    """None without hwloc."""
    ranks: tuple[RankPlace, ...] | None
    """Cores and nodes that `castor run` would give to as many ranks; empty: any."""
    host_arena: str
    """Source of the host tier's memory."""
    huge_pages: str | None
    """Setting of transparent huge pages: "always", "madvise" or "never"."""
    io_uring: str | None
    """Name of the error that io_uring_setup gives, such as "EPERM"; None if it works."""
    memlock_bytes: int | None
    """Memory that the process may lock (RLIMIT_MEMLOCK)."""
    may_exceed_memlock: bool
    """The process has CAP_IPC_LOCK, for which the limit does not hold."""
    measured_bytes: int
    """Size of the arrays that the bandwidths were measured with."""
    dram_bytes_per_second: float
    """In-place update on every core, reads and writes counted."""
    adam_bytes_per_second: float
    """The fp32 Adam of the host on every core, `ADAM_BYTES_PER_PARAM` for each parameter."""
    half_adam_bytes_per_second: float | None
    """The same on half of the cores; None where there is only one."""
    copy_bytes_per_second: float
    """Copy between host and CPU device, each byte counted once."""
    gpu_h2d_bytes_per_second: float | None
    """Bandwidth from pinned memory to the first GPU."""
    gpu_d2h_bytes_per_second: float | None
    locked_bytes: int | None
    """Host memory that the system page-locked for the first GPU."""
    tried_locked_bytes: int
    """Host memory that it was asked to lock."""
    nvme: NvmePath | None
    """Facts of the directory that was asked for."""


def gather(*, nvme: str | os.PathLike[str] | None = None, nproc: int | None = None) -> Facts:
    """Looks at this machine and measures its memory: a few seconds.

    Args:
        nvme: A directory to measure too, which takes 10 seconds more.
        nproc: Ranks whose places are asked for.

    Raises:
        Error: There is too little memory to measure with.
        castor.IoError, OSError: As `measure_nvme`.
    """
    load = os.getloadavg()[0]
    nvme_path = None if nvme is None else measure_nvme(nvme)  # first: it is what may be refused
    memory = host_memory()
    size = max(_LEAST_BYTES, min(_MEASURED_BYTES, memory.available_bytes // _MEMORY_SHARE))
    nodes = _C.numa_nodes()
    usable = usable_bytes(memory.available_bytes)
    cores = len(os.sched_getaffinity(0))
    tried = min(_TRIED_LOCKED_BYTES, usable)
    has_gpu_module = importlib.util.find_spec("castor._cuda") is not None
    locked = None
    if torch.cuda.is_available() and has_gpu_module:
        locked = _C.lockable_bytes(make_backend(torch.device("cuda", 0), 0), tried)
    h2d, d2h = _gpu_link(size) if torch.cuda.is_available() else (None, None)
    return Facts(
        castor=_C.__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        compiler=BUILD_INFO.compiler,
        hwloc=BUILD_INFO.hwloc,
        jemalloc=BUILD_INFO.jemalloc,
        gpu_module=has_gpu_module,
        torch_cuda=torch.version.cuda,
        gpus=_gpus(),
        nvidia_driver=Path("/proc/driver/nvidia/version").exists(),
        cpu=cpu_name(Path("/proc/cpuinfo").read_text(encoding="utf-8")),
        architecture=platform.machine(),
        adam_isa=_C.adam_isa(),
        num_cpus=os.cpu_count() or 1,
        num_usable_cpus=cores,
        cpu_quota=cpu_quota(),
        torch_threads=torch.get_num_threads(),
        load=load,
        memory_bytes=memory.total_bytes,
        available_bytes=memory.machine_available_bytes,
        memory_limit_bytes=memory.limit_bytes,
        usable_bytes=usable,
        numa_nodes=None
        if nodes is None
        else tuple(NumaNode(os_index=i, memory_bytes=b, num_cpus=n) for i, b, n in nodes),
        ranks=None if nproc is None else tuple(places_of_ranks(nproc)),
        host_arena=_C.host_arena(),
        huge_pages=chosen(read_small(Path("/sys/kernel/mm/transparent_hugepage/enabled"))),
        io_uring=io_uring_error(),
        memlock_bytes=_memlock_bytes(),
        may_exceed_memlock=_has_capability(_CAP_IPC_LOCK),
        measured_bytes=size,
        dram_bytes_per_second=_C.in_place_bandwidth(size // 4, _REPETITIONS),
        adam_bytes_per_second=_C.adam_bandwidth(size // 16, _REPETITIONS),
        half_adam_bytes_per_second=None
        if cores == 1
        else _C.adam_bandwidth(size // 16, _REPETITIONS, num_threads=cores // 2),
        copy_bytes_per_second=_C.copy_bandwidth(size // 2, _REPETITIONS),
        gpu_h2d_bytes_per_second=h2d,
        gpu_d2h_bytes_per_second=d2h,
        locked_bytes=locked,
        tried_locked_bytes=tried,
        nvme=nvme_path,
    )


def _gpus() -> tuple[Gpu, ...]:
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return tuple(Gpu(name=p.name, memory_bytes=p.total_memory) for p in properties)


def _gpu_link(size: int) -> tuple[float, float]:
    """Bytes per second to the first GPU and back: medians of copies of pinned memory."""
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    device = torch.zeros(size, dtype=torch.uint8, device="cuda")
    rates = []
    for target, source in ((device, host), (host, device)):
        seconds = []
        for _ in range(_REPETITIONS + 1):  # the first one is not counted
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1e3)
        rates.append(size / statistics.median(seconds[1:]))
    return rates[0], rates[1]


def cpu_name(cpuinfo: str) -> str:
    """The processor's name in the text of /proc/cpuinfo; the architecture where it has none."""
    for line in cpuinfo.splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def chosen(setting: str | None) -> str | None:
    """The word in brackets of a kernel setting such as "always [madvise] never"."""
    if setting is None or "[" not in setting:
        return None
    return setting.split("[", 1)[1].split("]", 1)[0]


def cpu_quota(*, proc: Path = PROC, cgroups: Path = CGROUPS) -> float | None:
    """Cores' worth of time that the cgroups of this process grant, of version 1 and 2.

    Args:
        proc: Where the proc file system is.
        cgroups: Where cgroups are mounted.

    Returns:
        The least; None where no group has a limit.
    """
    quotas: list[float] = []
    for version, folder in cgroup_folders("cpu", proc=proc, cgroups=cgroups):
        if version == 2:
            quota = (read_small(folder / "cpu.max") or "max").split()
            if quota[0] != "max":
                quotas.append(int(quota[0]) / int(quota[1]))
        elif (us := int(read_small(folder / "cpu.cfs_quota_us") or -1)) > 0:
            quotas.append(us / int(read_small(folder / "cpu.cfs_period_us") or 100_000))
    return min(quotas, default=None)


def io_uring_error() -> str | None:
    """Name of the error that the system call io_uring_setup gives here; None if it works."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    params = ctypes.create_string_buffer(_IO_URING_PARAMS_BYTES)
    descriptor = libc.syscall(ctypes.c_long(_IO_URING_SETUP), ctypes.c_uint(1), params)
    if descriptor < 0:
        number = ctypes.get_errno()
        return errno.errorcode.get(number, str(number))
    os.close(descriptor)
    return None


def _memlock_bytes() -> int | None:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _has_capability(number: int) -> bool:
    for line in (read_small(Path("/proc/self/status")) or "").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> number & 1)
    return False
