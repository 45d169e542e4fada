"""castor evaluate: lm-eval's numbers in half of the parameters' memory, its files, what it refuses."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from castor import cli

lm_eval = pytest.importorskip("lm_eval")

from lm_eval.tasks import TaskManager  # noqa: E402

from castor.errors import UsageError  # noqa: E402
from castor.recipes import evaluation  # noqa: E402
from castor.recipes.evaluate import show  # noqa: E402
from castor.recipes.evaluation import Questions  # noqa: E402

SENTENCES = [
    "A chunk holds parameters.", "The device has a budget.", "The host keeps the weights.",
    "A step ends with an update.", "Ranks exchange gradients.", "The plan is made once.",
    "NVMe holds what memory does not.", "Each block runs once.",
]  # fmt: skip
TASKS = ("choices", "pages", "answers")
YAML = {
    "choices": """
        output_type: multiple_choice
        doc_to_text: "{{text}} Is it so?"
        doc_to_target: "{{label}}"
        doc_to_choice: ["yes, it is", "no", "perhaps so"]
        fewshot_split: test
        num_fewshot: 1
        metric_list: [{metric: acc}, {metric: acc_norm}]
    """,
    "pages": """
        output_type: loglikelihood_rolling
        doc_to_text: ""
        doc_to_target: "{{page}}"
        metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
    """,
    "answers": """
        output_type: generate_until
        doc_to_text: "{{text}}"
        doc_to_target: "{{text}}"
        generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 8, do_sample: true, temperature: 0.7}
        metric_list: [{metric: exact_match}, {metric: chrf}]
    """,
}


@pytest.fixture(scope="module")
def folder(place: Path) -> Path:
    return place / "model"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tasks over one file of rows, and a group of two of them."""
    place = tmp_path_factory.mktemp("tasks")
    pages = [" ".join(SENTENCES[i:] + SENTENCES[:i]) * (1 + 4 * (i == 2)) for i in range(8)]
    rows = [
        json.dumps({"text": text, "label": i % 3, "page": pages[i]}) + "\n"
        for i, text in enumerate(SENTENCES)
    ]
    (place / "rows.jsonl").write_text("".join(rows), encoding="utf-8")
    for name, text in YAML.items():
        write_task(place, name, text)
    group = "group: both\ntask: [choices, pages]\n"
    (place / "both.yaml").write_text(group, encoding="utf-8")
    return place


def write_task(place: Path, name: str, text: str) -> Path:
    head = (
        f"task: {name}\ndataset_path: json\ntest_split: test\n"
        f"dataset_kwargs: {{data_files: {{test: {place / 'rows.jsonl'}}}}}\n"
    )
    lines = "".join(line.strip() + "\n" for line in text.strip().splitlines())
    path = place / f"{name}.yaml"
    path.write_text(head + lines, encoding="utf-8")
    return path


def parameter_bytes(folder: Path) -> int:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return sum(file.get_tensor(name).nbytes for name in file.keys())


def budget(folder: Path) -> dict[str, Any]:
    half = parameter_bytes(folder) // 2
    return {"device": "cpu", "device_memory": half, "host_memory": "64MiB"}


@pytest.fixture(scope="module")
def evaluated(folder: Path, tasks: Path) -> dict[str, Any]:
    questions = Questions(
        tasks=TASKS, include=tasks, batch_size=3, max_length=96, log_samples=True
    )
    found = evaluation.evaluate(folder, questions, settings=budget(folder))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def plain(folder: Path, tasks: Path) -> dict[str, Any]:
    found: dict[str, Any] = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder), "max_length": 96},
        tasks=list(TASKS),
        device="cpu",
        batch_size=3,
        task_manager=TaskManager(include_path=tasks, include_defaults=False),
    )
    return found


def test_numbers_are_those_of_lm_eval(evaluated: dict[str, Any], plain: dict[str, Any]) -> None:
    assert set(evaluated["results"]) == set(TASKS)
    for part in ("results", "n-samples", "higher_is_better", "versions", "n-shot"):
        assert evaluated[part] == plain[part], part
    for task in TASKS:
        for mine, other in zip(evaluated["samples"][task], plain["samples"][task], strict=True):
            assert mine == other
    seeds = ("random_seed", "numpy_seed", "torch_seed", "fewshot_seed")
    assert [evaluated["config"][name] for name in seeds] == [plain["config"][name] for name in seeds]


def test_device_memory_stays_in_half_of_the_parameters(
    evaluated: dict[str, Any], folder: Path
) -> None:
    half = parameter_bytes(folder) // 2
    assert evaluated["castor"]["device_budget_bytes"] == half
    assert 0 < evaluated["castor"]["peak_device_bytes"] <= half
