"""From a model folder and a file of chats to a served and exported model, command after command.

Every command runs in a process of its own, as a user types it; then the studio runs them.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import gguf
import openai
import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from castor.recipes.studio_jobs import Job, Workspace
from rank_processes import run_python

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

STEPS = 6
BUDGETS = ("--device", "cpu", "--device-memory", "3MiB", "--host-memory", "64MiB")
"""Less than the 3.9 MiB of the weights."""
TASK = """\
task: facts
dataset_path: json
dataset_kwargs: {data_files: {test: tasks/facts.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: ["yes", "no"]
doc_to_target: "{{answer}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


def castor(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = run_python("-m", "castor", *arguments, directory=folder)
    assert done.returncode == 0, done.stderr[-4000:]
    return done


def write_task(folder: Path) -> None:
    """Writes a task of lm-eval, which names its rows from the working directory on."""
    (folder / "tasks").mkdir()
    (folder / "tasks" / "facts.yaml").write_text(TASK)
    rows = [{"question": f"Is {one} even?", "answer": ("yes", "no")[one % 2]} for one in range(6)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "tasks" / "facts.jsonl").write_text(lines)


@pytest.fixture(scope="module")
def folder(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a user: `model`, `chats.jsonl` and a task, with nothing trained yet."""
    path = tmp_path_factory.mktemp("road")
    shutil.copytree(place / "model", path / "model")
    shutil.copy(place / "chats.jsonl", path)
    write_task(path)
    return path


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    """The first three commands: castor init, data show and train."""
    recipe = castor(folder, "init", "sft", "--model", "model", "--data", "chats.jsonl").stdout
    for old, new in {
        "adapter: full ": "adapter: lora ",
        "epochs: 1 ": f"max_steps: {STEPS} ",
        "gradient_accumulation: 8": "gradient_accumulation: 1",
        "max_length: 256": "max_length: 128",
        "held_out: 0.02": "held_out: 2",
        "precision: bf16": "precision: fp32",
        "  # device_memory: 22GiB": "  device: cpu\n  device_memory: 3MiB",
        "  # host_memory: 48GiB": "  host_memory: 64MiB",
        "every: 10": "every: 1",
    }.items():
        assert old in recipe
        recipe = recipe.replace(old, new, 1)
    (folder / "recipe.yaml").write_text(recipe)
    shown = castor(folder, "data", "show", "recipe.yaml").stdout
    assert "rows: 24 read; packed into " in shown
    assert "left out: 0 broken" in shown
    trained = castor(folder, "train", "recipe.yaml")
    for step in range(1, STEPS + 1):
        assert f"step {step}/{STEPS}  loss " in trained.stdout
    assert "device: at most " in trained.stderr
    assert "of a budget of 3.0 MiB" in trained.stderr
    run = folder / "runs" / "sft"
    entries = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert all(0 < one["device_bytes"] <= 3 * 2**20 for one in entries)
    assert (run / "adapter_model.safetensors").is_file()
    return run


@pytest.fixture(scope="module")
def plain(run: Path, folder: Path) -> Any:
    """The trained model by transformers and PEFT alone, merged."""
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    return PeftModel.from_pretrained(base, run).merge_and_unload().eval()


def greedy(model: Any, words: Any, question: str, count: int) -> str:
    """Returns the answer of transformers' own generate."""
    prompt = words.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True, return_tensors="pt", return_dict=True,
    )  # fmt: skip
    with torch.no_grad():
        found = model.generate(**prompt, max_new_tokens=count, do_sample=False)
    new = found[0, prompt["input_ids"].shape[1] :]
    return str(words.decode(new, skip_special_tokens=True))


def test_the_road_from_chats_to_a_served_and_exported_model(
    folder: Path, run: Path, plain: Any
) -> None:
    evaluated = castor(
        folder, "evaluate", "runs/sft", "--include", "tasks", "--tasks", "facts", *BUDGETS
    )
    assert re.search(r"\|facts\|Yaml +\|none +\| +0\|acc +\|", evaluated.stdout)
    [scores] = (run / "evaluations").glob("results_*.json")
    results = json.loads(scores.read_text())["results"]["facts"]
    assert results["acc,none"] in {one / 6 for one in range(7)}

    words = AutoTokenizer.from_pretrained(run)
    question = "What does castor do?"
    answer = greedy(plain, words, question, 8)
    limits = ("--temperature", "0", "--max-new-tokens", "8")
    chatted = subprocess.run(
        [sys.executable, "-m", "castor", "chat", "runs/sft", *limits, *BUDGETS],
        cwd=folder, input=f"{question}\n", capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    assert chatted.stdout.strip() == answer.strip()

    serve = [sys.executable, "-m", "castor", "serve", "runs/sft", "--port", "0", *BUDGETS]
    with subprocess.Popen(serve, cwd=folder, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        found = next(
            filter(None, (re.search(r"at (http://\S+/v1)", one) for one in process.stderr))
        )
        with openai.OpenAI(base_url=found[1], api_key="none") as client:
            assert [one.id for one in client.models.list()] == ["sft"]
            reply = client.chat.completions.create(
                model="sft", messages=[{"role": "user", "content": question}],
                temperature=0, max_tokens=8,
            )  # fmt: skip
            assert reply.choices[0].message.content == answer
            assert reply.usage is not None
            assert reply.usage.completion_tokens == 8
        process.send_signal(signal.SIGINT)
        process.stderr.read()
    assert process.returncode == 0

    castor(folder, "export", "runs/sft", "exports/sft", "--merge-adapter")
    merged = AutoModelForCausalLM.from_pretrained(folder / "exports" / "sft")
    expected, state = plain.state_dict(), merged.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], value) for key, value in expected.items())
    assert "facts" in (folder / "exports" / "sft" / "README.md").read_text()

    castor(folder, "export", "runs/sft", "exports/gguf", "--merge-adapter", "--format", "gguf")
    check_gguf(folder / "exports" / "gguf", plain)


def check_gguf(exported: Path, plain: Any) -> None:
    """Checks that the file of an export holds the model's weights."""
    [file] = exported.glob("*.gguf")
    tensors = {one.name: one for one in gguf.GGUFReader(file).tensors}
    down = plain.model.layers[5].mlp.down_proj.weight.detach()
    assert torch.equal(torch.tensor(tensors["blk.5.ffn_down.weight"].data), down)


# -- the same by the studio's buttons


class Page:
    """A client of a studio, which does what a browser does with a click."""

    def __init__(self, port: int, token: str) -> None:
        self._port, self._cookie = port, {"Cookie": f"castor-studio-{port}={token}"}
        self.config = json.loads(next(self._lines("GET", "/config")))

    def _lines(self, method: str, path: str, body: Any = None) -> Generator[bytes]:
        """Yields the lines of a reply."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=240)
        headers = {"Content-Type": "application/json", **self._cookie}
        with contextlib.closing(connection):
            connection.request(method, path, json.dumps(body) if body else None, headers)
            with connection.getresponse() as reply:
                assert reply.status == 200
                yield from reply

    def click(self, label: str, *values: Any) -> None:
        """Clicks on a button, with the values of what its function gets, and waits for the end."""
        [button] = [
            one["id"]
            for one in self.config["components"]
            if one["type"] == "button" and one["props"].get("value") == label
        ]
        [event] = [
            one
            for one in self.config["dependencies"]
            if [button, "click"] in [list(target) for target in one["targets"]]
        ]
        assert len(event["inputs"]) == len(values)
        body = {"fn_index": event["id"], "data": values, "session_hash": "s", "trigger_id": button}
        list(self._lines("POST", "/gradio_api/queue/join", body))
        with contextlib.closing(
            self._lines("GET", "/gradio_api/queue/data?session_hash=s")
        ) as told:
            said = next(line for line in told if b"process_completed" in line)
        assert json.loads(said.removeprefix(b"data: "))["success"], said


@pytest.fixture
def studio(run: Path, folder: Path, tmp_path: Path) -> Iterator[tuple[Page, Workspace]]:
    """A studio in whose workspace the run was trained."""
    workspace = Workspace.at(tmp_path / "studio")
    shutil.copytree(run, workspace.root / "runs" / "sft")
    write_task(workspace.root)
    command = [sys.executable, "-m", "castor", "studio", "--port", "0"]
    with subprocess.Popen(
        [*command, "--workspace", str(workspace.root)], stderr=subprocess.PIPE, text=True,
        env={**os.environ, "TQDM_DISABLE": "1"},
    ) as process:  # fmt: skip
        assert process.stderr is not None
        said = next(line for line in process.stderr if "token" in line)
        found = re.search(r"http://127\.0\.0\.1:(\d+)/\?token=(\S+)", said)
        assert found
        yield Page(int(found[1]), found[2]), workspace
        process.terminate()
        process.stderr.read()


def ended(workspace: Workspace, kind: str) -> Job:
    """Returns the newest job of a kind, once it has finished well."""
    job = workspace.jobs(kind)[0]
    end = time.monotonic() + 240
    while job.running:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert job.state() == "finished", job.log()
    return job


def test_the_studio_evaluates_and_exports_a_run(studio: tuple[Page, Workspace], plain: Any) -> None:
    page, workspace = studio
    options = f"--include tasks {' '.join(BUDGETS)}"
    page.click("Evaluate (castor evaluate)", "runs/sft", "facts", "mine", options)
    job = ended(workspace, "evaluate")
    assert job.command.startswith(
        "castor evaluate runs/sft --tasks facts --output evaluations/mine"
    )
    assert "|facts|" in job.log()
    scores = json.loads((workspace.root / "evaluations" / "mine.json").read_text())
    assert "acc,none" in scores["results"]["facts"]
    for kind in ("safetensors", "gguf"):
        page.click("Export (castor export)", "runs/sft", f"exports/{kind}", kind, True)
        ended(workspace, "export")
    merged = AutoModelForCausalLM.from_pretrained(workspace.root / "exports" / "safetensors")
    assert torch.equal(merged.lm_head.weight, plain.lm_head.weight)
    check_gguf(workspace.root / "exports" / "gguf", plain)
    recipe = yaml.safe_load((workspace.root / "runs" / "sft" / "recipe.yaml").read_text())
    assert recipe["method"]["adapter"] == "lora"
