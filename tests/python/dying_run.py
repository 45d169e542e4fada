"""A training run that saves at every step and is killed again and again: each time after a random
number of saves, at a random moment.

Usage: dying_run.py WHAT LIVES SEED DIRECTORY, with WHAT "run" (booster.save), "beside" (the same
with use_async=True), "nvme" ("run" with all optimizer states on NVMe), "weights" (a larger model,
with its parameters and gradients there too) or "model" (save_model over the same directory). Prints
a JSON line with counts; exits 1 when a restart found anything but a whole checkpoint, or went on
with other losses than the run that was never killed, which has everything in memory.

Each life is a fork of this warm process, which itself starts no thread before.
"""

import json
import os
import random
import signal
import sys
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import castor


class Run:
    def __init__(self, scratch: Path | None = None, *, deep: bool = False) -> None:
        nvme = {} if scratch is None else {"nvme_path": scratch, "nvme_offload_fraction": 1.0}
        host_memory = "150KiB" if scratch is not None and deep else "64MiB"
        torch.manual_seed(0)
        width = 48 if deep else 8
        hidden = [nn.Linear(width, width) for _ in range(20 if deep else 0)]
        self.model = nn.Sequential(
            nn.Linear(8, width), *hidden, nn.Dropout(0.2), nn.Linear(width, 1)
        )
        self.optimizer = AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = StepLR(self.optimizer, 5)
        self.loader = DataLoader(TensorDataset(torch.randn(24, 8)), batch_size=4, shuffle=True)
        self.booster = castor.Booster(
            plugin=castor.GeminiPlugin(
                device="cpu",
                device_memory="1MiB",
                host_memory=host_memory,
                chunk_bytes=256,
                **nvme,
            )
        )
        self.booster.boost(self.model, self.optimizer, None, self.loader, self.scheduler)
        on_nvme = self.booster.report(self.model).nvme_weight_bytes > 0
        assert on_nvme == (scratch is not None and deep)

    def parts(self) -> tuple[object, ...]:
        return self.model, self.optimizer, self.scheduler, self.loader

    def losses(self):
        while True:
            for (x,) in self.loader:
                loss = (self.model(x) - 1.0).square().mean()
                self.booster.backward(loss, self.optimizer)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
                yield loss.item()


def log(path: Path, line: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, f"{line}\n".encode())
    os.close(descriptor)


def live_run(
    directory: Path, journal: Path, *, on_nvme: bool, deep: bool = False, beside: bool = False
) -> None:
    """One life of a run: from the newest checkpoint on, until killed."""
    run = Run(directory / "nvme" if on_nvme else None, deep=deep)
    step = 0
    if run.booster.latest(directory / "run") is not None:
        step = run.booster.load(directory / "run", *run.parts()).step  # verifies every byte
    log(journal, f"start {step}")
    begun = step
    for loss in run.losses():
        if beside and step > begun:
            run.booster.wait_for_saves()
            log(journal, f"saved {step}")
        step += 1
        log(journal, f"loss {step} {loss.hex()}")
        run.booster.save(directory / "run", *run.parts(), keep=2, use_async=beside)
        if not beside:
            log(journal, f"saved {step}")


def live_model(directory: Path, journal: Path) -> None:
    """One life of a model that is saved over itself, all weights at one value."""
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    booster = castor.Booster(plugin=castor.GeminiPlugin(device="cpu", device_memory="1MiB"))
    value = 0
    if (directory / "model").exists():
        booster.load_model(model, directory / "model")
        (value,) = {int(v) for p in model.parameters() for v in p.detach().unique()}
    log(journal, f"start {value}")
    while True:
        value += 1
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(float(value))
        booster.save_model(model, directory / "model", size_per_shard="8KB")
        log(journal, f"saved {value}")


def fork(life, *arguments) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            life(*arguments)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return pid


def write_reference(path: Path, steps: int, *, deep: bool) -> None:
    """Writes the losses of a run that nobody kills."""
    losses = Run(deep=deep).losses()
    path.write_text("\n".join(next(losses).hex() for _ in range(steps)))


def steps_of(journal: Path) -> int:
    """Returns the number of the last step that any life has taken."""
    lines = (line.split() for line in journal.read_text().splitlines())
    return max((int(number) for word, number, *_ in lines if word == "loss"), default=0)


def check(journal: Path, reference: list[str]) -> dict[str, int]:
    """Every start is at the last step saved, or the one being saved when the kill came."""
    counts = {"starts": 0, "losses": 0, "saved": 0, "killed_before_rename": 0, "killed_after": 0}
    saved = 0
    for line in journal.read_text().splitlines():
        word, number, *rest = line.split()
        if word == "start":
            assert int(number) in (saved, saved + 1), f"{line} after step {saved} was saved"
            counts["killed_after" if int(number) > saved else "killed_before_rename"] += 1
            counts["starts"] += 1
            saved = int(number)
        elif word == "loss":
            assert rest[0] == reference[int(number) - 1], (
                f"{line}, not {reference[int(number) - 1]}"
            )
            counts["losses"] += 1
        else:
            saved = int(number)
            counts["saved"] += 1
    return counts


def warm_up() -> None:
    """Imports what torch imports late (1.2 s), so that no life has to."""
    layer = nn.Linear(8, 1)
    optimizer = AdamW(layer.parameters())
    scheduler = StepLR(optimizer, 5)
    for (x,) in DataLoader(TensorDataset(torch.ones(4, 8)), shuffle=True):
        layer(x).sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def wait_for(word: bytes, number: int, journal: Path, start: int, pid: int) -> None:
    """Waits until a life has written so many lines with a word; it may die of an error too."""
    while journal.read_bytes()[start:].count(word) < number:
        done, status = os.waitpid(pid, os.WNOHANG)
        assert done == 0, f"a life ended by itself with status {status}"
        time.sleep(0.001)


def main() -> None:
    _, what, number, seed, path = sys.argv
    lives, directory = int(number), Path(path)
    torch.set_num_threads(1)
    warm_up()
    rng = random.Random(seed)
    journal, reference_file = directory / "journal", directory / "reference"
    journal.touch()
    life = {
        "run": partial(live_run, on_nvme=False),
        "beside": partial(live_run, on_nvme=False, beside=True),
        "nvme": partial(live_run, on_nvme=True),
        "weights": partial(live_run, on_nvme=True, deep=True),
        "model": live_model,
    }[what]
    scratch = directory / "nvme" / "castor.scratch"
    if what in ("nvme", "weights"):
        scratch.parent.mkdir()
    for _ in range(lives):
        size = journal.stat().st_size
        pid = fork(life, directory, journal)
        wait_for(b"start", 1, journal, size, pid)
        wait_for(b"saved", rng.randrange(3), journal, size, pid)
        time.sleep(rng.uniform(0.0, 0.8 if what == "weights" else 0.3))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status), f"a life ended by itself with status {status}"
        assert scratch.exists() == scratch.parent.exists()  # the next life reclaims it
    # One more life says what the last kill left.
    size = journal.stat().st_size
    pid = fork(life, directory, journal)
    wait_for(b"saved", 1, journal, size, pid)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    reference = []
    if what != "model":
        writer = partial(write_reference, deep=what == "weights")
        assert os.waitpid(fork(writer, reference_file, steps_of(journal)), 0)[1] == 0
        reference = reference_file.read_text().split()
    left = [*directory.glob(".*-castor-*"), *directory.glob("run/.*-castor-*")]
    print(json.dumps({**check(journal, reference), "left": len(left)}))


if __name__ == "__main__":
    main()
