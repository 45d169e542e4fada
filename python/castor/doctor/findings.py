"""The findings of `castor doctor`: one for each fact, with what to change where speed is lost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from castor.doctor.facts import Facts, NvmePath
from castor.io_bench import step_bytes
from castor.runtime.rank_cores import RankPlace

ADAM_BYTES_PER_PARAM = 28
"""DRAM bytes of a step of fp32 Adam: w, m, v read and written, g read."""
SLOW_GPU_LINK = 10e9
"""Bytes per second; PCIe 3.0 x16 with pinned memory gives 12e9."""
LOCKED_BYTES = 64 << 20
"""A limit below this holds few I/O buffers; 8 MiB is the default of many systems."""
_RAISE_MEMLOCK = (
    "ulimit -l unlimited, memlock in /etc/security/limits.conf, LimitMEMLOCK=infinity of a "
    "service, or docker run --ulimit memlock=-1"
)
SLOW_NVME = 1e9
"""Mixed bytes per second; a device on two lanes of PCIe 3.0 gives more."""
CORES_BOUND = 0.7
"""Share of DRAM's bandwidth below which something else bounds Adam."""
MORE_CORES_HELP = 1.3
"""Speed on all cores by that on half of them from which the cores are the bound."""
BUSY = 0.5
"""Load by usable core from which measured figures are those of a shared machine."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the doctor."""

    name: str
    value: str
    change: str | None = None
    """Cause of lost speed, and the remedy; None if nothing is lost."""


def findings(facts: Facts) -> list[Finding]:
    """One finding for each thing looked at, in the order of the output."""
    found = [examine(facts) for examine in _EXAMINATIONS]
    if facts.locked_bytes is not None:
        found.append(_locked(facts.locked_bytes, facts.tried_locked_bytes))
    if facts.ranks is not None:
        found.append(_ranks(facts.ranks))
    if facts.nvme is not None:
        found += [_nvme_path(facts.nvme, facts), _nvme_bandwidth(facts.nvme)]
    return found


def _versions(facts: Facts) -> Finding:
    value = f"castor {facts.castor} by {facts.compiler}, torch {facts.torch}, Python {facts.python}"
    return Finding(name="versions", value=value)


def _gpu(facts: Facts) -> Finding:
    built = "built in" if facts.gpu_module else "not built in"
    toolkit = f"torch for CUDA {facts.torch_cuda}" if facts.torch_cuda else "torch without CUDA"
    seen = ", ".join(f"{g.name} with {_gib(g.memory_bytes)}" for g in facts.gpus) or "no GPU"
    change = None
    if facts.gpus and not facts.gpu_module:
        change = (
            "torch sees a GPU that castor cannot use: reinstall castor from source where a CUDA "
            "toolkit (nvcc) is installed, or as a wheel that has its GPU parts"
        )
    elif facts.nvidia_driver and not facts.torch_cuda:
        change = (
            "the machine has an NVIDIA driver and this torch has no CUDA: install a torch for "
            "CUDA, then castor for it"
        )
    elif facts.nvidia_driver and not facts.gpus:
        change = (
            "the machine has an NVIDIA driver and torch sees no GPU: look at CUDA_VISIBLE_DEVICES, "
            "at nvidia-smi, and, in a container, at its GPU option (docker run --gpus all)"
        )
    return Finding(name="CUDA", value=f"{seen}; GPU parts {built}; {toolkit}", change=change)


def _processor(facts: Facts) -> Finding:
    change = None
    if facts.adam_isa == "baseline" and facts.architecture == "x86_64":
        change = (
            "Adam runs without AVX2: a virtual machine may hide it, so let it pass the host's "
            "processor through (QEMU: -cpu host)"
        )
    value = f"{facts.cpu}, {facts.architecture}; Adam runs its {facts.adam_isa} loops"
    return Finding(name="processor", value=value, change=change)


def _cores(facts: Facts) -> Finding:
    usable = _usable(facts)
    value = f"{facts.num_usable_cpus} of {facts.num_cpus} usable"
    if facts.cpu_quota is not None:
        value += f", cgroup grants the time of {facts.cpu_quota:g}"
    value += f"; torch uses {facts.torch_threads} threads"
    change = None
    if facts.cpu_quota is not None and facts.cpu_quota < facts.num_usable_cpus:
        change = (
            f"castor starts {facts.num_usable_cpus} threads and the cgroup stops them when the "
            f"time of {facts.cpu_quota:g} cores is used up: raise the quota (docker run --cpus), "
            f"or run under taskset with {usable} cores"
        )
    elif facts.torch_threads > usable:
        change = (
            f"torch's {facts.torch_threads} threads wait for each other on {usable} cores: set "
            f"OMP_NUM_THREADS={usable}"
        )
    elif facts.torch_threads < usable // 2:
        change = (
            f"torch computes with {facts.torch_threads} threads where {usable} cores are usable: "
            f"unset OMP_NUM_THREADS, or call torch.set_num_threads({usable})"
        )
    elif facts.num_usable_cpus < facts.num_cpus:
        change = (
            f"this process may run on {facts.num_usable_cpus} of {facts.num_cpus} cores: if that "
            "is not wanted, look for taskset, numactl or the container's cpuset"
        )
    return Finding(name="cores", value=value, change=change)


def _load(facts: Facts) -> Finding:
    change = None
    if facts.load > BUSY * facts.num_usable_cpus:
        change = (
            f"{facts.load:.1f} threads on average wanted a core in the last minute: the bandwidths "
            "below are what they left; run again when the machine is quiet"
        )
    return Finding(name="load", value=f"{facts.load:.1f} in the last minute", change=change)


def _memory(facts: Facts) -> Finding:
    value = (
        f"{_gib(facts.memory_bytes)}, {_gib(facts.available_bytes)} available, "
        f"{_gib(facts.usable_bytes)} for budgets"
    )
    change = None
    if facts.memory_limit_bytes is not None and facts.memory_limit_bytes < facts.memory_bytes:
        value += f", cgroup grants {_gib(facts.memory_limit_bytes)}"
        if facts.memory_limit_bytes < facts.available_bytes:
            change = (
                f"the cgroup grants {_gib(facts.memory_limit_bytes)}, less than the machine has "
                "available, and device_memory and host_memory stay inside by default: raise the "
                "limit (docker run --memory) for a larger model or fewer bytes on NVMe"
            )
    return Finding(name="memory", value=value, change=change)


def _numa(facts: Facts) -> Finding:
    if facts.numa_nodes is None:
        return Finding(
            name="NUMA nodes",
            value="unknown: castor was built without hwloc",
            change="install libhwloc-dev and pkg-config and reinstall castor, or take a wheel, "
            "which carries hwloc",
        )
    nodes = ", ".join(
        f"{node.os_index}: {node.num_cpus} cores, {_gib(node.memory_bytes)}"
        for node in facts.numa_nodes
    )
    change = None
    if len(facts.numa_nodes) > 1:
        first = facts.numa_nodes[0].os_index
        change = (
            "memory of another node is slower: where the model fits one node, run under "
            f"numactl --cpunodebind={first} --membind={first} (the node of the GPU, if there is "
            "one: nvidia-smi topo -m); else numactl --interleave=all"
        )
    return Finding(name="NUMA nodes", value=f"{len(facts.numa_nodes)} ({nodes})", change=change)


def _ranks(ranks: Sequence[RankPlace]) -> Finding:
    places = "; ".join(
        f"{rank}: node {', '.join(map(str, place.nodes))}, {len(place.cores)} cores"
        for rank, place in enumerate(ranks)
    )
    return Finding(name="ranks", value=places or "on any core: one NUMA node, or one rank")


def _host_arena(facts: Facts) -> Finding:
    change = None
    if facts.jemalloc == "none":
        change = (
            "each block of the host tier is a mapping of its own: build jemalloc with "
            "scripts/build_jemalloc.sh and reinstall castor with CASTOR_JEMALLOC_ROOT, or take a "
            "wheel, which carries it"
        )
    return Finding(name="host memory", value=facts.host_arena, change=change)


def _huge_pages(facts: Facts) -> Finding:
    if facts.huge_pages in ("always", "madvise"):
        return Finding(name="huge pages", value=f"{facts.huge_pages}: castor's memory has them")
    if facts.huge_pages is None:
        return Finding(name="huge pages", value="this kernel has no transparent huge pages")
    return Finding(
        name="huge pages",
        value=f"transparent huge pages: {facts.huge_pages}",
        change="Adam takes about 15% longer on small pages: as root, "
        "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
    )


def _io_uring(facts: Facts) -> Finding:
    if facts.io_uring is None:
        return Finding(name="io_uring", value="allowed")
    no_memory = (
        "locked memory has no limit here (RLIMIT_MEMLOCK), so the machine or its container is out "
        "of memory"
    )
    if facts.memlock_bytes is not None:
        no_memory = (
            "its rings do not fit the memory that may be locked (RLIMIT_MEMLOCK, "
            f"{_mebibytes(facts.memlock_bytes)}): {_RAISE_MEMLOCK}"
        )
    reasons = {
        "EPERM": "a container's seccomp profile or sysctl kernel.io_uring_disabled forbids it: "
        "allow io_uring_setup in the profile, or set kernel.io_uring_disabled to 0",
        "ENOSYS": "the kernel lacks it, or a sandbox hides it: take Linux 5.10 or later, and allow "
        "io_uring_setup in the sandbox",
        "ENOMEM": no_memory,
    }
    reason = reasons.get(facts.io_uring, "see io_uring_setup(2) for this error")
    return Finding(
        name="io_uring",
        value=f"refused ({facts.io_uring})",
        change=f"NVMe files can then only be read and written by pread and pwrite: {reason}",
    )


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.3g} MiB"


def _memlock(facts: Facts) -> Finding:
    if facts.memlock_bytes is None:
        return Finding(name="memlock limit", value="none")
    value = _mebibytes(facts.memlock_bytes)
    if facts.may_exceed_memlock:
        return Finding(name="memlock limit", value=f"{value}, not for this process (CAP_IPC_LOCK)")
    change = None
    if facts.memlock_bytes < LOCKED_BYTES:
        change = (
            f"buffers that the kernel pins for I/O count against it, and less than "
            f"{LOCKED_BYTES >> 20} MiB is little: {_RAISE_MEMLOCK}"
        )
    return Finding(name="memlock limit", value=value, change=change)


def _locked(locked_bytes: int, tried_bytes: int) -> Finding:
    name, value = "page-locked memory", f"{_gib(min(locked_bytes, tried_bytes))} for the GPU"
    if locked_bytes >= tried_bytes:
        return Finding(name=name, value=f"{value}, all that was tried")
    return Finding(
        name=name,
        value=f"{value} of {_gib(tried_bytes)} that were tried",
        change="payloads beyond it go to memory that the GPU does not copy from by itself: "
        f"{_RAISE_MEMLOCK}",
    )


def _dram(facts: Facts) -> Finding:
    rate = facts.dram_bytes_per_second
    value = f"{rate / 1e9:.1f} GB/s updating {facts.measured_bytes >> 20} MiB in place"
    return Finding(name="DRAM bandwidth", value=value)


def _adam(facts: Facts) -> Finding:
    rate, half, dram = (
        facts.adam_bytes_per_second,
        facts.half_adam_bytes_per_second,
        facts.dram_bytes_per_second,
    )
    value = (
        f"{rate / 1e9:.1f} GB/s in fp32, {rate / ADAM_BYTES_PER_PARAM / 1e6:.0f} M parameters a "
        f"second, {rate / dram:.0%} of DRAM"
    )
    cores = facts.num_usable_cpus // 2
    if half is not None:
        value += f"; {half / 1e9:.1f} GB/s on {cores} of {facts.num_usable_cpus} cores"
    change = None
    if rate < CORES_BOUND * dram:
        scales = half is not None and rate > MORE_CORES_HELP * half
        change = "the host's memory could feed Adam faster: " + (
            "it is bound by its cores, so give the process more of them"
            if scales
            else "more cores would not help; look at the lines of load, huge pages and NUMA nodes"
        )
        change += (
            f'. On a GPU device_update_fraction="auto" shares the update with it: castor estimate '
            f"--updates {rate / 1e9:.0f}GB/s --device-update-fraction auto tells what that gives"
        )
    return Finding(name="Adam", value=value, change=change)


def _link(facts: Facts) -> Finding:
    value = f"host copy {facts.copy_bytes_per_second / 1e9:.1f} GB/s"
    h2d, d2h = facts.gpu_h2d_bytes_per_second, facts.gpu_d2h_bytes_per_second
    if h2d is None or d2h is None:
        return Finding(name="link", value=value)
    change = None
    if min(h2d, d2h) < SLOW_GPU_LINK:
        change = (
            "the GPU's link is slower than PCIe 3.0 x16: compare nvidia-smi --query-gpu="
            "pcie.link.gen.current,pcie.link.width.current --format=csv with the card's, look at "
            "its slot, and run on the NUMA node of the GPU"
        )
    value += f"; GPU {h2d / 1e9:.1f} GB/s to it and {d2h / 1e9:.1f} GB/s back"
    return Finding(name="link", value=value, change=change)


def _nvme_path(nvme: NvmePath, facts: Facts) -> Finding:
    changes = []
    if not nvme.direct:
        changes.append(
            "transfers go through the page cache, which takes the host memory that the tier is to "
            "save: give a directory on a device's ext4 or xfs, not on tmpfs or overlay (in a "
            "container: a bind mount)"
        )
    if nvme.free_bytes < facts.available_bytes:
        changes.append(
            f"the path has less free space than the host has memory available "
            f"({_gib(facts.available_bytes)}): free some, or give another path"
        )
    return Finding(
        name="NVMe path",
        value=f"{nvme.file}, {_gib(nvme.free_bytes)} free, {nvme.engine}",
        change="; ".join(changes) or None,
    )


def _nvme_bandwidth(nvme: NvmePath) -> Finding:
    read, write, mixed = (
        f"{rate / 1e9:.2f}"
        for rate in (
            nvme.read_bytes_per_second,
            nvme.write_bytes_per_second,
            nvme.mixed_bytes_per_second,
        )
    )
    seconds = {
        name: 2 * step_bytes(1e9, name) / nvme.mixed_bytes_per_second
        for name in ("split", "split_bf16")
    }
    value = (
        f"read {read}, write {write}, mixed {mixed} GB/s with blocks of {nvme.block_bytes >> 10} "
        f"KiB, {nvme.depth} in flight; reads and writes "
        f"{'overlap' if nvme.full_duplex else 'share one bandwidth'}; a step of 1 B parameters "
        f"takes {seconds['split']:.1f} s in split"
    )
    change = None
    if nvme.mixed_bytes_per_second < SLOW_NVME:
        change = (
            "an NVMe device gives more: compare castor io-bench on another path, look at what else "
            "uses the device (iostat -x 1) and at its link (lspci -vv: LnkSta); with this one, "
            f'optim_state_format="split_bf16" takes {seconds["split_bf16"]:.1f} s'
        )
    return Finding(name="NVMe bandwidth", value=value, change=change)


def _usable(facts: Facts) -> int:
    """Cores that affinity and quota leave, at least 1."""
    quota = math.inf if facts.cpu_quota is None else max(1, math.floor(facts.cpu_quota))
    return int(min(facts.num_usable_cpus, quota))


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


_EXAMINATIONS: tuple[Callable[[Facts], Finding], ...] = (
    _versions,
    _gpu,
    _processor,
    _cores,
    _load,
    _memory,
    _numa,
    _host_arena,
    _huge_pages,
    _io_uring,
    _memlock,
    _dram,
    _adam,
    _link,
)
