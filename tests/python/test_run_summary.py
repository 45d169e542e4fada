"""What `castor run` says at the end, what it says where nothing is boosted, and how ranks meet."""

import json
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from castor import cli
from castor.errors import UsageError
from castor.launch import ranks
from rank_processes import held_port, run_python

LOOP = """
import sys
import torch
from torch import nn

model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(6):
    loss = model(torch.randn(8, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained with", sys.argv[1:])
"""
OWN = """
import torch
from torch import nn

import castor

def train():
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plugin = castor.GeminiPlugin(device="cpu", device_memory="1MiB", host_memory="64MiB")
    castor.Booster(plugin).boost(model, optimizer)
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

train()  # the model is gone at the end of the process
"""
PLAN = {"layout": {"tp_size": 1}, "nodes": 1, "ranks_per_node": 1}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "plain.py").write_text("print('ran')\n")
    (tmp_path / "quiet.py").write_text("import json  # not castor\n")
    (tmp_path / "other.py").write_text(
        "import subprocess, sys\nsubprocess.check_call([sys.executable, 'plain.py'])\n"
    )
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    """Status, stdout and stderr of `castor run`."""
    monkeypatch.setattr(sys, "argv", ["castor", "run", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    shown = capfd.readouterr()
    assert isinstance(stop.value.code, int)
    return stop.value.code, shown.out, shown.err


def test_what_accelerate_launches_trains_in_the_process_and_is_summarised(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    budget = ["--device", "cpu", "--device-memory", "400KiB", "--host-memory", "64MiB"]
    launch = ["-m", "accelerate.commands.launch", "--cpu", "loop.py", "--its", "own"]
    monkeypatch.setenv("HF_HOME", str(folder))  # no configuration of accelerate's
    status, out, said = run([*budget, "--report", "r.json", *launch], monkeypatch, capfd)
    assert status == 0, said
    assert "trained with ['--its', 'own']" in out
    assert "castor run: Sequential: 6 steps of " in said
    assert "of a budget of 400.0 KiB" in said
    assert "of the last step" in said
    (model,) = json.loads((folder / "r.json").read_text())["models"]
    assert model["steps"] == model["memory"]["steps"] == 6
    assert 0 < model["memory"]["peak_device_bytes"] <= 400 << 10
    assert model["step_seconds"] > 0
    assert not list(folder.glob("castor-record-*"))


def test_a_script_that_boosts_its_model_itself_is_summarised_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    status, _, said = run(["--report", "page.html", "own.py"], monkeypatch, capfd)
    assert status == 0, said
    assert said.startswith("castor run: Linear: 3 steps of ")
    assert said.endswith("castor run: report: page.html\n")
    assert "Linear" in (folder / "page.html").read_text()


def test_speed_is_that_of_all_ranks(folder: Path) -> None:
    done = run_python("-m", "castor", "run", "--nproc", "2", "--report", "r.json", "own.py")
    assert done.returncode == 0, done.stderr
    assert " samples/s of all ranks\n" in done.stderr
    (model,) = json.loads((folder / "r.json").read_text())["models"]
    assert model["rate"] * model["step_seconds"] == pytest.approx(2 * 2)  # of two rows each


@pytest.mark.usefixtures("folder")
def test_settings_do_not_count_for_a_model_that_the_script_boosts_itself(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    budget = ["--device", "cpu", "--device-memory", "2MiB"]
    status, _, said = run([*budget, "own.py"], monkeypatch, capfd)
    first = "castor run: the script boosts its Linear itself, and the plugin that it makes counts"
    assert status == 1
    assert said.startswith(f"{first} there, not device_memory, device\n")
    assert "castor: error: the settings of castor run were not used: the script boosts" in said
    assert "trained nothing" not in said
    assert "of a budget of 1.0 MiB" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plain.py"], "no setting was given and plain.py does not name castor"),
        (["quiet.py"], "no model was boosted: the script ran in plain PyTorch."),
        (["plain.py", "--device-memory", "1GiB"], "--device-memory stands behind plain.py"),
        (["--report", "r.json", "quiet.py"], "r.json was not written: no boosted model"),
        (["--plan", "plan.json", "quiet.py"], "the layout of plan.json was not used"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_it_is_said_when_nothing_is_boosted(
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    status, _, shown = run(arguments, monkeypatch, capfd)
    assert status == 0
    assert said in shown


@pytest.mark.usefixtures("folder")
def test_a_process_that_the_script_started_is_named_where_nothing_trained(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def start_process(command: Sequence[str]) -> int:  # others start it as users' do
        done = run_python(*command)
        print(done.stdout, end="")
        print(done.stderr, end="", file=sys.stderr)
        return done.returncode

    monkeypatch.setattr(sys.modules["castor.launch.run"], "start_process", start_process)
    status, out, said = run(["--device", "cpu", "other.py"], monkeypatch, capfd)
    assert (status, out) == (1, "ran\n")
    assert "castor: error: castor trained nothing" in said
    assert "plain.py ...), which castor run does not follow" in said
    assert "Traceback" not in said


# --- where machines meet ------------------------------------------------------------------------


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which another program listens, which closes what connects to it."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def close() -> None:
            try:
                while True:
                    server.accept()[0].close()
            except OSError:
                return

        thread = threading.Thread(target=close, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.fixture
def port() -> Iterator[int]:
    """At which the test can listen, and which nobody else is given meanwhile."""
    with held_port() as holder:
        yield holder.getsockname()[1]


def test_a_port_of_another_program_is_named(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_HANDSHAKE_SECONDS", 1)
    place = f"localhost:{taken}"
    with (
        pytest.raises(UsageError, match=f"port {taken} of this machine is in use by another"),
        ranks.all_machines(place, 2, 1.0),
    ):
        pass


def test_machines_that_do_not_come_are_counted(port: int) -> None:
    place = f"localhost:{port}"
    # The store has so long to begin as well.
    said = rf"1 of 2 machines came to {place} within 1 s \({socket.gethostname()}\); start"
    with pytest.raises(UsageError, match=said), ranks.all_machines(place, 2, 1.0):
        pass


def test_machines_that_come_meet(port: int) -> None:
    """Each is told of the others, however soon the one that keeps the store leaves."""
    place, met = f"localhost:{port}", []

    def come() -> None:
        with ranks.all_machines(place, 3, 20.0):
            met.append(place)

    machines = [threading.Thread(target=come) for _ in range(3)]
    for machine in machines:
        machine.start()
    for machine in machines:
        machine.join()
    assert met == 3 * [place]


def test_a_machine_that_leaves_before_the_others_have_come_is_named(port: int) -> None:
    """The one that keeps the store, as where somebody stops its command."""
    store = TCPStore("localhost", port, is_master=True, wait_for_workers=False)

    def leave() -> None:
        nonlocal store
        while store.add("castor/machines", 0) == 0:
            time.sleep(0.01)
        del store

    keeper = threading.Thread(target=leave)
    keeper.start()
    said = f"the machine at localhost:{port} left before 2 machines had met there"
    with (
        pytest.raises(UsageError, match=said),
        ranks.all_machines(f"localhost:{port}", 2, 20.0),
    ):
        pass
    keeper.join()


def test_a_host_where_nobody_listens_is_named(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_is_here", lambda *_: False)  # another machine's
    place = f"localhost:{port}"
    with (
        pytest.raises(UsageError, match=f"nothing answers at {place} within 0.2 s; start the same"),
        ranks.all_machines(place, 2, 0.2),
    ):
        pass
