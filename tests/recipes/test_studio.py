"""castor studio without a browser: its token, its workspace, and commands that outlive it."""

from __future__ import annotations

import asyncio
import http.client
import importlib.util
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from castor import cli
from castor.errors import UsageError
from castor.recipes.studio import studio
from castor.recipes.studio_gate import TokenGate
from castor.recipes.studio_jobs import Job, Workspace, entries

TOKEN = "t0ken"
RECIPE = """\
model: {{path: {place}/model}}
data: {{train: {place}/chats.jsonl, held_out: 2, max_length: 64, packing: false}}
method: {{name: sft}}
train: {{max_steps: {steps}, batch_size: 1, learning_rate: 1e-3}}
memory: {{precision: fp32, device: cpu, device_memory: 6MiB, host_memory: 256MiB}}
log: {{every: 1}}
output: {{dir: runs/{name}, save_every: 1000}}
"""


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace.at(tmp_path / "studio")


def wait_for(condition: Any, seconds: float = 240.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


# -- the token


def asked(
    path: str = "/", *, query: str = "", kind: str = "http", **headers: str
) -> list[dict[str, Any]]:
    """Messages with which the gate answers a request; the application behind it says "inside"."""

    async def inside(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"inside"})

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    given = {"host": "127.0.0.1:7860", **headers}
    scope = {
        "type": kind,
        "path": path,
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
    }
    asyncio.run(TokenGate(inside, token=TOKEN, port=7860)(scope, None, send))  # type: ignore[arg-type]
    return sent


COOKIE = f"other=1; castor-studio-7860={TOKEN}"


def test_a_request_without_the_token_is_refused() -> None:
    for headers in (
        {},
        {"cookie": "castor-studio-7860=wrong"},
        {"cookie": f"castor-studio-7861={TOKEN}"},
        {"cookie": "castor-studio-7860=\xe9; ;;=,"},
        {"authorization": f"Bearer {TOKEN}"},
    ):
        assert asked(**headers)[0]["status"] == 403
    for query in ("token=", "token=wrong", "token=%C3%A9"):
        assert asked(query=query)[0]["status"] == 403
    assert asked(kind="websocket") == [{"type": "websocket.close", "code": 1008, "reason": ""}]


def test_the_address_with_the_token_gives_a_cookie_that_opens_the_page() -> None:
    start, _ = asked(query=f"a=1&token={TOKEN}")
    headers = dict(start["headers"])
    assert (start["status"], headers[b"location"]) == (303, b"http://127.0.0.1:7860/?a=1")
    assert headers[b"set-cookie"] == (
        f"castor-studio-7860={TOKEN}; HttpOnly; Path=/; SameSite=strict".encode()
    )
    start, body = asked(cookie=COOKIE)
    assert body["body"] == b"inside"
    assert b"default-src 'self'" in dict(start["headers"])[b"content-security-policy"]
    elsewhere, _ = asked("//evil.example/", query=f"token={TOKEN}")
    assert dict(elsewhere["headers"])[b"location"] == b"http://127.0.0.1:7860//evil.example/"


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example:7860"},
        {"host": "127.0.0.1.evil.example:7860"},
        {"origin": "http://127.0.0.1:8888"},
        {"origin": "https://evil.example"},
        {"origin": "null"},
    ],
)
def test_pages_of_other_origins_cannot_use_the_cookie(headers: dict[str, str]) -> None:
    assert asked(cookie=COOKIE, **headers)[0]["status"] == 403
    assert asked(cookie=COOKIE, origin="http://127.0.0.1:7860")[0]["status"] == 200


# -- the workspace


def test_a_workspace_is_its_owners_alone_and_names_stay_in_it(workspace: Workspace) -> None:
    assert stat.S_IMODE(workspace.root.stat().st_mode) == 0o700
    for name in ("", "..", "../x", "/etc/passwd", ".hidden", "a/b", "a\n", "é"):
        with pytest.raises(UsageError, match="cannot name a file"):
            workspace.path("recipes", name)
    assert workspace.path("recipes", "sft-2.1", ".yaml").parent == workspace.root / "recipes"


def test_uploads_are_kept_beside_each_other(workspace: Workspace, tmp_path: Path) -> None:
    names = []
    for folder in ("a", "b"):
        upload = workspace.root / "uploads" / folder / "my chats?.jsonl"
        upload.parent.mkdir()
        upload.write_text("{}")
        names.append(workspace.add_data(upload).name)
    assert names == ["my_chats_.jsonl", "my_chats_-2.jsonl"]
    outside = tmp_path / "secret.txt"
    outside.write_text("secret")
    (workspace.root / "uploads" / "link").symlink_to(outside)
    for path in (outside, workspace.root / "uploads" / ".." / "x", workspace.root / "uploads/link"):
        with pytest.raises(UsageError, match="was not uploaded"):
            workspace.add_data(path)
    assert outside.exists()


def test_of_a_step_that_was_repeated_the_last_entry_counts(tmp_path: Path) -> None:
    assert entries(tmp_path) == []
    lines = [
        {"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 2, "eval_loss": 2.5},
        {"step": 2, "loss": 1.0}, {"step": 3, "loss": 0.5},
    ]  # fmt: skip
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "log.jsonl").write_text(text + '{"step": 4, "lo')
    assert entries(tmp_path) == [lines[0], lines[3], lines[2], lines[4]]


# -- commands


def test_a_command_is_what_a_user_would_type(workspace: Workspace) -> None:
    job = workspace.start("init", "m", ["init", "sft", "--model", "no such", "--data", "x.jsonl"])
    assert job.command == "castor init sft --model 'no such' --data x.jsonl"
    wait_for(lambda: not job.running)
    assert job.status == 1
    assert job.state() == "failed (exit status 1)"
    assert job.log().startswith("castor: error: ")
    later = workspace.start("version", "m", ["--version"])
    wait_for(lambda: not later.running)
    assert later.state() == "finished"
    assert Workspace.at(workspace.root).jobs() == [later, job]
    assert workspace.jobs("init", "m") == [job]
    assert workspace.jobs("init", "n") == []


def test_a_process_with_the_same_id_is_not_taken_for_the_command(workspace: Workspace) -> None:
    folder = workspace.root / "jobs" / "00001"
    folder.mkdir()
    facts = {"kind": "train", "subject": "r", "arguments": ["train", "r"], "started": 0.0}
    facts |= {"process": os.getpid(), "process_started": 1}
    (folder / "job.json").write_text(json.dumps(facts))
    job = Job.read(folder)
    assert not job.running
    assert job.state() == "killed: nobody noted how it ended"
    job.stop()  # sends nothing


def test_of_overwritten_lines_the_last_stays(workspace: Workspace) -> None:
    folder = workspace.root / "jobs" / "00001"
    folder.mkdir()
    (folder / "log.txt").write_bytes(b"a\r\n 10%\r 20%\r\n\xff\rend\r")
    assert Job(folder, "train", "r", [], 0.0, 1, 1).log() == "a\n 20%\nend"


def test_training_outlives_its_studio_stops_with_a_checkpoint_and_resumes(
    workspace: Workspace, place: Path
) -> None:
    steps = 400
    recipe = workspace.root / "recipes" / "long.yaml"
    recipe.write_text(RECIPE.format(place=place, name="long", steps=steps))
    start = (
        "import sys; from pathlib import Path; from castor.recipes.studio_jobs import Workspace; "
        "Workspace.at(Path(sys.argv[1])).start("
        "'train', 'recipes/long.yaml', ['train', 'recipes/long.yaml'])"
    )
    subprocess.run([sys.executable, "-c", start, str(workspace.root)], check=True)
    [job] = workspace.jobs("train")  # the process that has started it is gone
    run = workspace.run_of(job.subject)
    assert run == workspace.root / "runs" / "long"
    wait_for(lambda: len(entries(run)) > 3)
    assert job.state() == "running"
    job.stop()
    wait_for(lambda: not job.running)
    assert job.state() == "stopped"
    [checkpoint] = run.glob("checkpoint-*")
    stopped_at = int(checkpoint.name.removeprefix("checkpoint-"))
    assert 3 < stopped_at < steps
    last = [one for one in entries(run) if "loss" in one][-1]
    assert last["step"] == stopped_at
    assert 0 < last["device_bytes"] <= 6 * 2**20
    assert last["host_bytes"] > 0
    assert last["tokens_per_second"] > 0
    assert {"loss", "grad_norm", "learning_rate", "of_steps"} <= set(last)

    again = workspace.start("train", job.subject, job.arguments)
    wait_for(lambda: [one for one in entries(run) if one["step"] > stopped_at])
    os.killpg(json.loads((again.folder / "job.json").read_text())["process"], signal.SIGKILL)
    wait_for(lambda: not again.running)
    assert again.state().startswith("killed")
    assert f"goes on from {checkpoint}" in again.log()


# -- the page


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, str, Path]]:
    """Port, token and workspace of a studio."""
    root = tmp_path_factory.mktemp("page") / "studio"
    command = ["studio", "--workspace", str(root), "--port", "0", "--max-upload", "1KiB"]
    with subprocess.Popen(
        [sys.executable, "-m", "castor", *command],
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        said = next(line for line in process.stderr if "token" in line)
        found = re.search(r"http://127\.0\.0\.1:(\d+)/\?token=(\S+)", said)
        assert found
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield int(found[1]), found[2], root
        process.terminate()
        process.wait(30)


def fetch(
    port: int, path: str, *, method: str = "GET", body: bytes = b"", **headers: str
) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, body or None, headers)
    reply = connection.getresponse()
    text = reply.read().decode("utf-8", "replace")
    connection.close()
    return reply.status, text


def upload(port: int, size: int, **headers: str) -> tuple[int, str]:
    body = (
        b'--b\r\nContent-Disposition: form-data; name="files"; filename="x.jsonl"\r\n\r\n'
        + b"x" * size
        + b"\r\n--b--\r\n"
    )
    kind = {"Content-Type": "multipart/form-data; boundary=b"}
    return fetch(port, "/gradio_api/upload", method="POST", body=body, **kind, **headers)


def test_every_route_needs_the_token(running: tuple[int, str, Path]) -> None:
    port, token, root = running
    for path in ("/", "/config", "/gradio_api/info", "/theme.css", "/gradio_api/file=x"):
        assert fetch(port, path)[0] == 403
        assert fetch(port, f"{path}?token=wrong")[0] == 403
    assert upload(port, 10)[0] == 403
    assert fetch(port, "/gradio_api/queue/join", method="POST", body=b"{}")[0] == 403
    assert not list((root / "uploads").rglob("*.jsonl"))
    cookie = {"Cookie": f"castor-studio-{port}={token}"}
    assert fetch(port, f"/?token={token}")[0] == 303
    status, page = fetch(port, "/", **cookie)
    assert status == 200
    assert "fonts.googleapis" not in page
    assert "fonts.gstatic" not in fetch(port, "/theme.css", **cookie)[1]


def test_nothing_outside_of_uploads_is_served(running: tuple[int, str, Path]) -> None:
    port, token, root = running
    cookie = {"Cookie": f"castor-studio-{port}={token}"}
    status, found = upload(port, 10, **cookie)
    assert status == 200
    [uploaded] = json.loads(found)
    assert Path(uploaded).is_relative_to(root / "uploads")
    assert fetch(port, f"/gradio_api/file={uploaded}", **cookie) == (200, "x" * 10)
    secret = root / "jobs" / "secret.txt"
    secret.write_text("secret")
    for path in ("/etc/passwd", secret, root / "uploads/../jobs/secret.txt", Path(__file__)):
        assert fetch(port, f"/gradio_api/file={path}", **cookie)[0] == 403


def test_a_path_that_was_not_uploaded_is_not_taken(running: tuple[int, str, Path]) -> None:
    port, token, root = running
    cookie = {"Cookie": f"castor-studio-{port}={token}"}
    config = json.loads(fetch(port, "/config", **cookie)[1])
    [event] = [
        one["id"]
        for one in config["dependencies"]
        if any(kind == "upload" for _, kind in one["targets"])
    ]
    secret = root.parent / "secret.jsonl"
    secret.write_text("secret")
    file = {"path": str(secret), "meta": {"_type": "gradio.FileData"}}
    body = {"fn_index": event, "data": [[file]], "session_hash": "s"}
    kind = {"Content-Type": "application/json"}
    status, _ = fetch(
        port, "/gradio_api/queue/join", method="POST", body=json.dumps(body).encode(),
        **kind, **cookie,
    )  # fmt: skip
    assert status == 200
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/gradio_api/queue/data?session_hash=s", headers=cookie)
    said = next(
        line for line in iter(connection.getresponse().readline, b"") if b"completed" in line
    ).decode()
    connection.close()
    assert '"success":false' in said
    assert not list((root / "data").iterdir())
    assert "secret" not in "".join(str(one) for one in (root / "uploads").rglob("*"))


def test_a_larger_upload_is_refused(running: tuple[int, str, Path]) -> None:
    port, token, _ = running
    status, _ = upload(port, 2000, Cookie=f"castor-studio-{port}={token}")
    assert status == 413


def test_tabs_of_evaluation_and_export_are_there_where_the_commands_are(
    workspace: Workspace,
) -> None:
    # In a process of its own: gradio leaves an event loop open.
    code = (
        "import sys; from pathlib import Path\n"
        "from castor.recipes.studio_jobs import Workspace\n"
        "from castor.recipes.studio_page import _Page\n"
        "for has in ((), ('evaluate', 'export')):\n"
        "    blocks = _Page(Workspace.at(Path(sys.argv[1])), has).blocks.blocks.values()\n"
        "    print(*(one.label for one in blocks if type(one).__name__ == 'Tab'))"
    )
    command = [sys.executable, "-c", code, str(workspace.root)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True,
        env={**os.environ, "GRADIO_ANALYTICS_ENABLED": "False"},
    )  # fmt: skip
    always = ["Data", "Model", "Recipe", "Train", "Chat", "Compare", "Deploy", "Commands"]
    assert [line.split() for line in done.stdout.splitlines()] == [
        always,
        [*always[:6], "Evaluate", "Export", *always[6:]],
    ]


def test_output_is_escaped_and_keeps_its_colours() -> None:
    from castor.recipes.studio_jobs import as_html

    shown = as_html("<b>\x1b[2mdim\x1b[0m \x1b[1;32mcounted\x1b[0m", "castor x '<i>'")
    assert "&lt;b&gt;" in shown
    assert '<span class="dim">dim</span>' in shown
    assert '<span class="counted">counted</span>' in shown
    assert "$ castor x &#x27;&lt;i&gt;&#x27;" in shown


def test_evaluations_are_a_table_with_a_column_for_each(tmp_path: Path) -> None:
    from castor.recipes.studio_jobs import evaluations

    assert evaluations(tmp_path).empty
    for name, value in (("after", 0.5), ("before", 0.25)):
        document = {"results": {"task": {"acc": value, "alias": "t"}}, "seed": 3}
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    assert evaluations(tmp_path).to_dict("records") == [
        {"figure": "task.acc", "after": 0.5, "before": 0.25}
    ]


# -- errors


def test_a_port_in_use_is_an_error_in_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        command = ["studio", "--port", str(taken.getsockname()[1]), "--workspace", str(tmp_path)]
        done = subprocess.run(
            [sys.executable, "-m", "castor", *command], capture_output=True, text=True
        )
    assert done.returncode == 1
    assert "is in use by another program; give another one with --port" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_without_gradio_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "gradio" else find(name)
    )
    context = typer.Context(typer.main.get_command(cli.app))
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'castor-torch\[studio\]'"):
        studio(context, port=0)


def test_help_of_castor_imports_no_gradio() -> None:
    code = "import sys, castor.cli; print([m for m in sys.modules if m.startswith('gradio')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
