"""castor doctor: what it makes of each fact, how it reads the system, and one run for real."""

import json
import subprocess
import sys
import time
from dataclasses import fields, replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from castor import doctor
from castor.config.memory import host_memory
from castor.doctor import Facts, Finding, Gpu, NumaNode, NvmePath
from castor.doctor.facts import chosen, cpu_name, cpu_quota, io_uring_error, measure_nvme
from castor.runtime.rank_cores import RankPlace

GIB = 1 << 30

GOOD = Facts(
    castor="0.1.0",
    torch="2.11.0+cu130",
    python="3.11.7",
    compiler="GNU 12.2.0",
    hwloc="2.9.0",
    jemalloc="5.3.0",
    gpu_module=True,
    torch_cuda="13.0",
    gpus=(Gpu(name="H200", memory_bytes=139 * GIB),),
    nvidia_driver=True,
    cpu="EPYC",
    architecture="x86_64",
    adam_isa="avx512",
    num_cpus=16,
    num_usable_cpus=16,
    cpu_quota=None,
    torch_threads=16,
    load=0.5,
    memory_bytes=128 * GIB,
    available_bytes=120 * GIB,
    memory_limit_bytes=None,
    usable_bytes=112 * GIB,
    numa_nodes=(NumaNode(os_index=0, memory_bytes=128 * GIB, num_cpus=16),),
    ranks=None,
    host_arena="jemalloc arena 1 over mmap",
    huge_pages="madvise",
    io_uring=None,
    memlock_bytes=None,
    may_exceed_memlock=False,
    measured_bytes=512 << 20,
    dram_bytes_per_second=28e9,
    adam_bytes_per_second=25.2e9,
    half_adam_bytes_per_second=20e9,
    copy_bytes_per_second=14e9,
    gpu_h2d_bytes_per_second=50e9,
    locked_bytes=8 << 30,
    tried_locked_bytes=8 << 30,
    gpu_d2h_bytes_per_second=49e9,
    nvme=None,
)
NVME = NvmePath(
    path="/data",
    direct=True,
    file="/data/castor.io-bench (O_DIRECT)",
    engine="io_uring of depth 16",
    free_bytes=900 * GIB,
    block_bytes=1 << 20,
    depth=16,
    read_bytes_per_second=6.5e9,
    write_bytes_per_second=5e9,
    mixed_bytes_per_second=8e9,
    full_duplex=True,
)
BUFFERED = replace(NVME, direct=False, file="/tmp/castor.io-bench (buffered: tmpfs)")
SMALL = replace(NVME, free_bytes=30 * GIB)
SLOW = replace(NVME, mixed_bytes_per_second=4e8, full_duplex=False)
NODES = tuple(NumaNode(os_index=i, memory_bytes=64 * GIB, num_cpus=8) for i in (0, 1))


def finding(name: str, **changes: object) -> Finding:
    """The finding called `name` of GOOD with other values."""
    facts = replace(GOOD, **changes)  # type: ignore[arg-type]
    return next(found for found in doctor.findings(facts) if found.name == name)


def test_nothing_is_to_change_on_a_good_machine() -> None:
    found = doctor.findings(GOOD)
    assert [finding.name for finding in found if finding.change] == []
    assert len({finding.name for finding in found}) == len(found) == 15
    with_nvme = doctor.findings(replace(GOOD, nvme=NVME))
    assert [finding.name for finding in with_nvme if finding.change] == []
    assert len(with_nvme) == 17


@pytest.mark.parametrize(
    ("name", "changes", "value", "change"),
    [
        ("CUDA", {"gpu_module": False}, "H200 with 139.0 GiB", "castor cannot use"),
        ("CUDA", {"torch_cuda": None, "gpus": ()}, "torch without CUDA", "install a torch for"),
        ("CUDA", {"gpus": ()}, "no GPU", "CUDA_VISIBLE_DEVICES"),
        ("processor", {"adam_isa": "baseline"}, "baseline", "-cpu host"),
        ("cores", {"cpu_quota": 2.5}, "time of 2.5", "taskset with 2 cores"),
        ("cores", {"torch_threads": 32}, "32 threads", "OMP_NUM_THREADS=16"),
        ("cores", {"torch_threads": 1}, "1 threads", "set_num_threads(16)"),
        ("cores", {"num_cpus": 64}, "16 of 64 usable", "cpuset"),
        ("load", {"load": 9.0}, "9.0", "9.0 threads"),
        ("memory", {"memory_limit_bytes": 32 * GIB}, "grants 32.0 GiB", "host_memory"),
        ("NUMA nodes", {"numa_nodes": None, "hwloc": "none"}, "without hwloc", "libhwloc-dev"),
        ("NUMA nodes", {"numa_nodes": NODES}, "2 (0: 8 cores, 64.0 GiB, 1:", "--membind=0"),
        ("host memory", {"jemalloc": "none"}, "over mmap", "build_jemalloc.sh"),
        ("huge pages", {"huge_pages": "never"}, "never", "echo madvise"),
        ("io_uring", {"io_uring": "EPERM"}, "refused (EPERM)", "seccomp"),
        ("io_uring", {"io_uring": "ENOSYS"}, "refused (ENOSYS)", "kernel lacks it"),
        ("io_uring", {"io_uring": "ENOMEM"}, "refused (ENOMEM)", "is out of memory"),
        (
            "io_uring",
            {"io_uring": "ENOMEM", "memlock_bytes": 64 << 10},
            "refused (ENOMEM)",
            "(RLIMIT_MEMLOCK, 0.0625 MiB): ulimit -l unlimited, ",
        ),
        ("io_uring", {"io_uring": "EMFILE"}, "refused (EMFILE)", "io_uring_setup(2)"),
        ("memlock limit", {"memlock_bytes": 8 << 20}, "8 MiB", "LimitMEMLOCK"),
        (
            "page-locked memory",
            {"locked_bytes": 2 << 30},
            "2.0 GiB for the GPU of 8.0",
            "memlock",
        ),
        (
            "Adam",
            {"adam_bytes_per_second": 14e9, "half_adam_bytes_per_second": 7e9},
            "50% of DRAM",
            "bound by its cores, so give the process more",
        ),
        ("Adam", {"adam_bytes_per_second": 14e9}, "50% of DRAM", "more cores would not help"),
        ("link", {"gpu_d2h_bytes_per_second": 6e9}, "6.0 GB/s back", "pcie.link.width"),
        ("NVMe path", {"nvme": BUFFERED}, "(buffered: tmpfs)", "page cache"),
        ("NVMe path", {"nvme": SMALL}, "30.0 GiB free", "available (120.0 GiB)"),
        ("NVMe bandwidth", {"nvme": SLOW}, "takes 50.0 s in split", '"split_bf16" takes 30.0 s'),
    ],
)
def test_finding_says_what_costs_speed_and_what_to_change(
    name: str, changes: dict[str, object], value: str, change: str
) -> None:
    found = finding(name, **changes)
    assert value in found.value
    assert found.change is not None
    assert change in found.change


@pytest.mark.parametrize(
    ("name", "changes", "value"),
    [
        ("CUDA", {"gpus": (), "nvidia_driver": False, "gpu_module": False}, "no GPU"),
        ("processor", {"adam_isa": "baseline", "architecture": "aarch64"}, "aarch64"),
        ("cores", {"torch_threads": 8}, "8 threads"),  # one for each core with two hyper-threads
        ("memory", {"memory_limit_bytes": 124 * GIB}, "grants 124.0 GiB"),
        ("huge pages", {"huge_pages": "always"}, "always"),
        ("huge pages", {"huge_pages": None}, "no transparent huge pages"),
        ("memlock limit", {"memlock_bytes": 8 << 20, "may_exceed_memlock": True}, "CAP_IPC_LOCK"),
        ("memlock limit", {"memlock_bytes": 64 << 20}, "64 MiB"),
        ("DRAM bandwidth", {}, "28.0 GB/s updating 512 MiB in place"),
        (
            "Adam",
            {},
            "25.2 GB/s in fp32, 900 M parameters a second, 90% of DRAM; 20.0 GB/s on 8 of",
        ),
        ("Adam", {"half_adam_bytes_per_second": None}, "900 M parameters a second, 90% of DRAM"),
        ("link", {"gpu_h2d_bytes_per_second": None}, "host copy 14.0 GB/s"),
        ("link", {}, "GPU 50.0 GB/s to it and 49.0 GB/s back"),
        ("NVMe path", {"nvme": NVME}, "(O_DIRECT), 900.0 GiB free, io_uring of depth 16"),
        (
            "NVMe bandwidth",
            {"nvme": NVME},
            "read 6.50, write 5.00, mixed 8.00 GB/s with blocks of 1024 KiB, 16 in flight; reads "
            "and writes overlap",
        ),
    ],
)
def test_finding_that_costs_nothing_asks_for_nothing(
    name: str, changes: dict[str, object], value: str
) -> None:
    found = finding(name, **changes)
    assert value in found.value
    assert found.change is None


def test_output_shows_every_finding_and_counts_those_to_change() -> None:
    text = StringIO()
    facts = replace(GOOD, io_uring="EPERM", host_arena="mmap [red]")
    doctor.show(facts, Console(file=text, width=200, highlight=False))
    shown = text.getvalue()
    for found in doctor.findings(facts):
        assert f"{found.name} " in shown
    assert "mmap [red]" in shown
    assert shown.count("\nchange ") == 1
    assert shown.endswith("castor doctor: 1 of 15 findings can be improved\n")


def test_json_holds_all_facts_and_findings() -> None:
    document = json.loads(doctor.as_json(replace(GOOD, huge_pages="never")))
    assert document.keys() == {"facts", "findings"}
    assert document["facts"].keys() == {field.name for field in fields(Facts)}
    assert document["facts"]["gpus"] == [{"name": "H200", "memory_bytes": 139 * GIB}]
    names = [found["name"] for found in document["findings"] if found["change"]]
    assert names == ["huge pages"]
    assert all(found.keys() == {"name", "value", "change"} for found in document["findings"])


def write(folder: Path, **texts: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name.replace("__", ".")).write_text(text + "\n", encoding="utf-8")


def limits(tmp_path: Path, membership: str) -> tuple[float | None, int | None]:
    """Time and memory that cgroups below `tmp_path` grant a process of theirs."""
    proc = tmp_path / "proc"
    write(proc / "self", cgroup=membership)
    write(proc, meminfo="MemTotal: 1024 kB\nMemAvailable: 512 kB")
    found = host_memory(proc=proc, cgroups=tmp_path)
    return cpu_quota(proc=proc, cgroups=tmp_path), found.limit_bytes


def test_cgroup_2_limits_are_the_smallest_on_the_way_up(tmp_path: Path) -> None:
    write(tmp_path / "a", cpu__max="300000 100000", memory__max="4096")
    write(tmp_path / "a" / "b", cpu__max="max 100000", memory__max="8192")
    assert limits(tmp_path, "0::/a/b\n") == (3.0, 4096)


def test_cgroup_1_limits_are_read_by_controller(tmp_path: Path) -> None:
    write(tmp_path / "cpu" / "a", cpu__cfs_quota_us="150000", cpu__cfs_period_us="100000")
    write(tmp_path / "cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    write(tmp_path / "memory", memory__limit_in_bytes=str((1 << 63) - 4096))
    write(tmp_path / "memory" / "hidden" / "c", memory__limit_in_bytes="65536")
    membership = "5:cpu,cpuacct:/a\n4:memory:/hidden/c\n1:name=systemd:/\n0::/\n"
    assert limits(tmp_path, membership) == (1.5, 65536)


def test_no_cgroup_limit_is_none(tmp_path: Path) -> None:
    write(tmp_path / "memory", memory__limit_in_bytes=str((1 << 63) - 4096))
    assert limits(tmp_path, "4:memory:/\n0::/elsewhere\n") == (None, None)


def test_kernel_setting_and_processor_are_read_from_their_texts() -> None:
    assert chosen("always [madvise] never") == "madvise"
    assert chosen(None) is None
    assert chosen("madvise") is None
    assert cpu_name("processor\t: 0\nmodel name\t: A B\nmodel name\t: C\n") == "A B"
    assert cpu_name("processor\t: 0\n") != ""


def test_io_uring_is_probed_without_leaking_a_descriptor() -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = descriptors()
    results = {io_uring_error() for _ in range(3)}
    assert len(results) == 1
    assert descriptors() == before


def test_command_runs_for_real_in_time_and_without_warnings() -> None:
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "castor", "doctor", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - start
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    facts = json.loads(done.stdout)["facts"]
    assert facts["dram_bytes_per_second"] > 1e8
    assert facts["adam_bytes_per_second"] > 1e8
    assert facts["copy_bytes_per_second"] > 1e8
    assert 1 <= facts["num_usable_cpus"] <= facts["num_cpus"]
    assert seconds < 60


def test_a_directory_is_measured_at_the_setting_that_is_suggested(tmp_path: Path) -> None:
    found = measure_nvme(tmp_path, file_bytes=8 << 20, seconds=0.02)
    assert found.path == str(tmp_path)
    assert found.direct == ("(O_DIRECT)" in found.file)
    assert found.free_bytes > 8 << 20
    assert found.block_bytes in (256 << 10, 1 << 20, 4 << 20)
    assert found.depth in (4, 16, 64)
    for rate in (found.read_bytes_per_second, found.write_bytes_per_second):
        assert rate > 1e6
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_does_not_exist_is_refused_before_anything_is_measured(
    tmp_path: Path,
) -> None:
    with pytest.raises(OSError, match="missing"):
        doctor.gather(nvme=tmp_path / "missing")


def test_where_ranks_would_compute_is_shown_where_it_is_asked_for() -> None:
    places = (RankPlace(nodes=(0,), cores=(0, 1)), RankPlace(nodes=(1, 2), cores=(2, 3, 4)))
    assert finding("ranks", ranks=places).value == "0: node 0, 2 cores; 1: node 1, 2, 3 cores"
    assert "on any core" in finding("ranks", ranks=()).value
