"""Scripts of Lightning and plain loops of PyTorch's examples as published, with castor and without.

`make integration CASTOR_PUBLISHED=DIRECTORY` runs them; in DIRECTORY, beside what
test_published.py asks for, are

    git clone --depth 1 --branch 2.6.6 https://github.com/Lightning-AI/pytorch-lightning
    git clone --depth 1 https://github.com/pytorch/examples

Their examples are copied to where their data is, without a changed line. Images are noise, and the
text is castor's own pages.
"""

import json
import os
import shutil
import struct
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from close import assert_weights_close

PUBLISHED = os.environ.get("CASTOR_PUBLISHED", "")
PAGES = Path(__file__).parents[2] / "docs"
RECORDED = Path(__file__).parent / "recorded.py"

pytestmark = pytest.mark.skipif(
    not PUBLISHED,
    reason="CASTOR_PUBLISHED is not set: clone pytorch-lightning and examples into a directory, "
    "and give its path (see the first lines of test_published_loops.py)",
)


@dataclass(frozen=True, kw_only=True)
class Script:
    """One of them, with arguments for a run of seconds."""

    file: str
    arguments: tuple[str, ...] = ()
    budget: str
    """Device memory."""
    losses: int
    """How many backward passes it runs at least."""


LIMITED = {f"PL_TRAINER_LIMIT_{part}_BATCHES": "2" for part in ("VAL", "TEST", "PREDICT")}
LIMITED["PL_USE_MOCKED_MNIST"] = "1"
"""Lightning reads them."""
LIGHTNING, PLAIN = "pytorch-lightning/examples", "examples"
SCRIPTS = {
    "lightning/transformer": Script(
        file=f"{LIGHTNING}/pytorch/basics/transformer.py", budget="64MiB", losses=20
    ),
    "lightning/autoencoder": Script(
        file=f"{LIGHTNING}/pytorch/basics/autoencoder.py",
        arguments=("--trainer.max_steps", "12"),
        budget="3600KiB",
        losses=12,
    ),
    "lightning/backbone_image_classifier": Script(
        file=f"{LIGHTNING}/pytorch/basics/backbone_image_classifier.py",
        arguments=("--trainer.max_steps", "12"),
        budget="1100KiB",
        losses=12,
    ),
    "fabric/image_classifier": Script(
        file=f"{LIGHTNING}/fabric/image_classifier/train_fabric.py",
        arguments=("--epochs", "2"),
        budget="42MiB",
        losses=16,
    ),
    "examples/mnist": Script(
        file=f"{PLAIN}/mnist/main.py",
        arguments=("--epochs", "2", "--save-model"),
        budget="54MiB",
        losses=16,
    ),
    "examples/vae": Script(
        file=f"{PLAIN}/vae/main.py", arguments=("--epochs", "3"), budget="7MiB", losses=12
    ),
    "examples/mnist_rnn": Script(
        file=f"{PLAIN}/mnist_rnn/main.py", arguments=("--epochs", "2"), budget="11200KiB", losses=16
    ),
}


def write_text(path: Path) -> None:
    """Lightning's WikiText2: as many samples as its scripts keep for tests, and 20 to train on."""
    pages = " ".join(page.read_text(encoding="utf-8") for page in sorted(PAGES.rglob("*.md")))
    words = [word for word in pages.split() if word.isalpha()]
    known = {word for word, _ in Counter(words).most_common(500)}
    words = [word for word in words if word in known]
    count = 35 * 4022
    words = (words * (count // len(words) + 1))[:count]
    path.mkdir()
    lines = [" ".join(words[i : i + 34]) for i in range(0, count, 34)]
    (path / "wikitext-2.txt").write_text("\n".join(lines) + "\n")


def write_images(path: Path, demonstrations: Path) -> None:
    """MNIST as torchvision reads it, and as Lightning's demonstrations do."""
    noise = torch.Generator().manual_seed(4)

    def images(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        shown = torch.randint(0, 256, (count, 28, 28), dtype=torch.uint8, generator=noise)
        return shown, torch.randint(0, 10, (count,), generator=noise)

    raw, complete = path / "MNIST/raw", demonstrations / "MNIST/complete"
    for folder in (raw, complete):
        folder.mkdir(parents=True)
    for split, name, few, many in (
        ("train", "training", 512, 60000),
        ("t10k", "test", 128, 1000),
    ):
        shown, classes = images(few)
        head = struct.pack(">IIII", 0x803, few, 28, 28)
        (raw / f"{split}-images-idx3-ubyte").write_bytes(head + shown.numpy().tobytes())
        head = struct.pack(">II", 0x801, few)
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(
            head + classes.to(torch.uint8).numpy().tobytes()
        )
        torch.save(images(many), complete / f"{name}.pt")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("loops")
    for examples in (LIGHTNING, PLAIN):
        shutil.copytree(Path(PUBLISHED) / examples, path / examples)
    write_images(path / "pytorch-lightning/Datasets", path / LIGHTNING / "Datasets")
    return path


def run(place: Path, name: str, launcher: tuple[str, ...], output: str) -> tuple[dict, dict]:
    """What its recorder wrote, and what its optimizers held."""
    script, cwd = SCRIPTS[name], place / "runs" / name / output
    written = place / "recorded" / name / output
    for folder in (written, cwd / "results"):
        folder.mkdir(parents=True)
    if not (cwd.parent / "data").exists():
        (cwd.parent / "data").symlink_to(place / "pytorch-lightning/Datasets")
    write_text(cwd / "data")
    command = (*launcher, str(RECORDED), str(written), str(place / script.file), *script.arguments)
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=os.environ | LIMITED,
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr[-6000:]}"
    [held] = torch.load(written / "held-0.pt")
    return json.loads((written / "recorded-0.json").read_text()), held


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_computes_what_it_does_without_castor(place: Path, name: str) -> None:
    script = SCRIPTS[name]
    launcher = ("-m", "castor", "run", "--set", "device=cpu", "--set", "host_memory=1GiB")
    found, held = run(place, name, (*launcher, "--device-memory", script.budget), "castor")
    expected, plain = run(place, name, (), "plain")
    assert len(expected["losses"]) == len(found["losses"]) >= script.losses
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert_weights_close(held, plain)
    peak, beside = found["peaks"]
    assert 2 * (peak - beside) <= expected["state_bytes"]
