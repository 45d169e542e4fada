"""What the machine and its containers leave, and what budgets come to by default."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import castor
from castor.config.memory import HostMemory, cgroup_folders, host_memory, share_memory, usable_bytes
from castor.estimate.machine import _data, preset
from helpers import boost
from zoo import tower

GIB = 2**30


@dataclass
class Machine:
    """Fake /proc and /sys/fs/cgroup trees."""

    root: Path

    def __post_init__(self) -> None:
        self.proc, self.cgroups = self.root / "proc", self.root / "cgroup"
        self.write(self.proc / "meminfo", "MemTotal: 25165824 kB\nMemFree: 1 kB\n"
                   "MemAvailable:   20971520 kB\nHugePages_Total: 0\n")  # fmt: skip
        self.member("0::/\n")

    def write(self, path: Path, text: str | int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n", encoding="utf-8")

    def member(self, text: str) -> None:
        self.write(self.proc / "self" / "cgroup", text)

    def group(self, path: str, **figures: str | int) -> None:
        for name, value in figures.items():
            self.write(self.cgroups / path / name.replace("__", "."), value)

    def memory(self) -> HostMemory:
        return host_memory(proc=self.proc, cgroups=self.cgroups)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_machine_without_cgroups_gives_what_is_available(machine: Machine) -> None:
    assert machine.memory() == HostMemory(
        total_bytes=24 * GIB,
        machine_available_bytes=20 * GIB,
        limit_bytes=None,
        available_bytes=20 * GIB,
    )
    assert machine.memory().grantable_bytes == 24 * GIB


def test_cgroup_2_leaves_its_limit_less_what_is_used(machine: Machine) -> None:
    machine.member("0::/user/job\n")
    machine.group("user/job", memory__max=8 * GIB, memory__high="max", memory__current=3 * GIB)
    machine.group("user/job", memory__stat=f"anon {2 * GIB}\nfile {GIB}\ninactive_file {GIB}")
    found = machine.memory()
    assert (found.limit_bytes, found.available_bytes) == (8 * GIB, 6 * GIB)
    assert found.machine_available_bytes == 20 * GIB
    assert found.grantable_bytes == 8 * GIB


def test_cgroup_2_is_throttled_from_memory_high_on(machine: Machine) -> None:
    machine.group(".", memory__max=8 * GIB, memory__high=5 * GIB, memory__current=GIB)
    assert machine.memory().available_bytes == 4 * GIB
    assert machine.memory().limit_bytes == 5 * GIB


def test_each_cgroup_on_the_way_up_counts_with_its_own_use(machine: Machine) -> None:
    machine.member("0::/pod/container\n")
    machine.group("pod/container", memory__max=8 * GIB, memory__current=GIB)
    machine.group("pod", memory__max=10 * GIB, memory__current=9 * GIB)  # of a neighbour's
    assert machine.memory().available_bytes == GIB
    assert machine.memory().limit_bytes == 8 * GIB


def test_cgroup_1_leaves_its_limit_less_what_is_used(machine: Machine) -> None:
    machine.member("12:cpu,cpuacct:/docker/1\n4:memory:/docker/1\n1:name=systemd:/\n0::/\n")
    machine.group("memory", memory__limit_in_bytes=(1 << 63) - 4096, memory__usage_in_bytes=GIB)
    machine.group("memory/docker/1", memory__limit_in_bytes=6 * GIB)
    machine.group("memory/docker/1", memory__usage_in_bytes=3 * GIB)
    machine.group("memory/docker/1", memory__stat=f"inactive_file 1\ntotal_inactive_file {GIB}")
    found = machine.memory()
    assert (found.limit_bytes, found.available_bytes) == (6 * GIB, 4 * GIB)


def test_container_that_does_not_see_its_path_has_the_limits_of_the_mount(machine: Machine) -> None:
    machine.member("4:memory:/docker/hidden\n0::/../elsewhere\n")
    machine.group("memory", memory__limit_in_bytes=2 * GIB, memory__usage_in_bytes=GIB)
    assert machine.memory().available_bytes == GIB


def test_version_2_beside_version_1_is_mounted_deeper(machine: Machine) -> None:
    machine.member("1:name=systemd:/a\n0::/a\n")
    machine.group("unified/a", memory__max=3 * GIB, memory__current=GIB)
    assert machine.memory().available_bytes == 2 * GIB


def test_cgroup_above_its_limit_leaves_nothing(machine: Machine) -> None:
    machine.group(".", memory__max=GIB, memory__current=2 * GIB)
    assert machine.memory().available_bytes == 0


def test_kernel_that_does_not_tell_is_an_error(machine: Machine) -> None:
    machine.write(machine.proc / "meminfo", "MemTotal: 1 kB")
    with pytest.raises(RuntimeError, match="give device_memory and host_memory"):
        machine.memory()


def test_this_machine_is_read() -> None:
    found = host_memory()
    assert 0 < found.available_bytes <= found.machine_available_bytes <= found.total_bytes
    assert found.total_bytes == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# --- budgets ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("available", "usable"),
    [
        (0, 0),
        (100 << 20, 50 << 20),
        (GIB, GIB - (384 << 20)),
        (10 * GIB, 9 * GIB),
        (80 * GIB, 72 * GIB),
        (GIB << 9, 504 * GIB),
    ],
)
def test_the_process_keeps_a_tenth_between_384_mib_and_8_gib(available: int, usable: int) -> None:
    assert usable_bytes(available) == usable


@pytest.mark.parametrize(
    ("device", "host", "shared"),
    [
        (None, None, (4, 12)),
        (1, None, (1, 15)),
        (None, 6, (10, 6)),
        (3, 5, (3, 5)),
        (None, 15, (2, 15)),  # an eighth at least
        (40, None, (40, 2)),
        (40, 50, (40, 50)),
    ],
)
def test_default_budgets_share_what_there_is(
    device: int | None, host: int | None, shared: tuple[int, int]
) -> None:
    given = [None if value is None else value * GIB for value in (device, host)]
    assert share_memory(*given, usable_bytes=16 * GIB) == tuple(value * GIB for value in shared)


def test_budget_is_never_zero() -> None:
    assert share_memory(None, None, usable_bytes=0) == (1, 1)


def test_defaults_of_the_plugin_are_of_what_is_available(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("castor.plugins.machine.host_memory", machine.memory)
    config = castor.GeminiPlugin(device="cpu").config
    budgets = config.device_bytes, config.host_bytes
    assert budgets == share_memory(None, None, usable_bytes=usable_bytes(20 * GIB))


def test_estimates_give_a_host_what_budgets_would_be() -> None:
    described = _data()
    host = described["hosts"][described["presets"]["rtx3090"]["host"]]
    assert preset("rtx3090", "bf16").host_bytes == usable_bytes(host["memory_bytes"])


def test_budgets_above_the_machine_are_taken_with_a_warning() -> None:
    total = host_memory().grantable_bytes
    with pytest.warns(
        RuntimeWarning, match=rf"come to .*\({total + 2 * GIB} bytes\).*nvme_path"
    ) as caught:
        boosted = boost(tower(), memory=total, host_memory=2 * GIB)
    assert boosted.report().device_budget_bytes == total
    assert Path(caught[0].filename).name == "helpers.py"


# --- a container, for real ------------------------------------------------------------------------

CONTAINER = 1536 << 20
RUN = """
import json, sys, torch, castor
settings = {"device": "cpu", "precision": "fp32", "chunk_bytes": "16MiB"}
plugin = castor.GeminiPlugin(nvme_path=sys.argv[1], **settings)
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False) for _ in range(20)))
booster = castor.Booster(plugin)
model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
for _ in range(2):
    booster.backward(model(torch.ones(1, 2048)).square().mean(), optimizer)
    optimizer.step()
    optimizer.zero_grad()
figures = booster.report()
print(json.dumps([figures.device_budget_bytes, figures.host_budget_bytes, figures.nvme_bytes]))
"""


@pytest.fixture
def container() -> Iterator[Path]:
    """A memory cgroup with a limit below this process's own."""
    for version, folder in cgroup_folders("memory"):
        own = folder / f"castor-test-{os.getpid()}"
        limit = own / ("memory.max" if version == 2 else "memory.limit_in_bytes")
        try:
            own.mkdir()
            limit.write_text(str(CONTAINER))
        except OSError:
            if own.exists():
                own.rmdir()
            continue
        yield own
        deadline = time.monotonic() + 60
        while own.exists():  # what ran there may still be leaving
            try:
                own.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        return
    pytest.skip("memory cgroups cannot be made here: it takes root, and a writable /sys/fs/cgroup")


def test_in_a_container_the_rest_goes_to_nvme(container: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *("sh", "-c", 'echo $$ >"$0" && exec "$@"', str(container / "cgroup.procs")),
            *(sys.executable, "-c", RUN, str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    device, host, nvme = json.loads(done.stdout)
    assert device + host < CONTAINER
    assert nvme > 0
