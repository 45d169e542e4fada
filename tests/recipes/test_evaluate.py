"""castor evaluate: lm-eval's numbers in half of the parameters' memory, its files, and refusals."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lm_eval import simple_evaluate
from lm_eval.loggers import EvaluationTracker
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table
from safetensors.torch import load_file
from transformers import AutoTokenizer

from castor import cli, launch
from castor.errors import UsageError
from castor.recipes import evaluation, train
from castor.recipes.evaluate import Questions, gen_kwargs_of
from castor.recipes.recipe import load

# From Python 3.12 on, where lm-eval forks to estimate the error of chrf.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")

SENTENCES = (
    "A chunk holds parameters.", "The device has a budget.", "The host keeps the weights.",
    "A step ends with an update.", "Ranks exchange gradients.", "The plan is made once.",
    "NVMe holds what memory does not.", "Each block runs once.",
)  # fmt: skip
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
LENGTH, BATCH = 96, 3


@pytest.fixture(scope="module")
def folder(place: Path) -> Path:
    return place / "model"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tasks over one file of rows, and a group of two of them."""
    return write_tasks(tmp_path_factory.mktemp("tasks"))


def write_tasks(place: Path) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    # Pages of one window of LENGTH tokens, and of several.
    pages = [" ".join(SENTENCES[i:] + SENTENCES[:i]) * (1 + 4 * (i == 2)) for i in range(8)]
    rows = [
        json.dumps({"text": text, "label": i % 3, "page": pages[i]}) + "\n"
        for i, text in enumerate(SENTENCES)
    ]
    (place / "rows.jsonl").write_text("".join(rows), encoding="utf-8")
    for name, text in YAML.items():
        write_task(place, name, text)
    (place / "both.yaml").write_text("group: both\ntask: [choices, pages]\n", encoding="utf-8")
    return place


def write_task(place: Path, name: str, text: str) -> Path:
    head = (
        f"task: {name}\ntest_split: test\n"
        f"{'' if 'dataset_path' in text else 'dataset_path: json'}\n"
        f"dataset_kwargs: {{data_files: {{test: {place / 'rows.jsonl'}}}}}\n"
    )
    lines = "".join(line.strip() + "\n" for line in text.strip().splitlines())
    path = place / f"{name}.yaml"
    path.write_text(head + lines, encoding="utf-8")
    return path


def half_of_parameters(folder: Path) -> int:
    return sum(one.nbytes for one in load_file(folder / "model.safetensors").values()) // 2


def budget(folder: Path) -> dict[str, Any]:
    half = half_of_parameters(folder)
    return {"device": "cpu", "device_memory": half, "host_memory": "64MiB"}


def by_lm_eval(folder: Path, tasks: Path, names: tuple[str, ...], **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder), "max_length": LENGTH},
        tasks=list(names),
        device="cpu",
        batch_size=BATCH,
        task_manager=TaskManager(include_path=tasks, include_defaults=False),
        **options,
    )
    return found


@pytest.fixture(scope="module")
def evaluated(folder: Path, tasks: Path) -> dict[str, Any]:
    questions = Questions(
        tasks=TASKS, include=tasks, batch_size=BATCH, max_length=LENGTH, log_samples=True
    )
    found = evaluation.evaluate(folder, questions, settings=budget(folder))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def tracker() -> EvaluationTracker:
    return EvaluationTracker()


@pytest.fixture(scope="module")
def plain(folder: Path, tasks: Path, tracker: EvaluationTracker) -> dict[str, Any]:
    return by_lm_eval(folder, tasks, TASKS, evaluation_tracker=tracker)


def test_numbers_are_those_of_lm_eval(evaluated: dict[str, Any], plain: dict[str, Any]) -> None:
    assert set(evaluated["results"]) == set(TASKS)
    for part in ("results", "n-samples", "higher_is_better", "versions", "n-shot", "samples"):
        assert evaluated[part] == plain[part], part
    for seed in ("random_seed", "numpy_seed", "torch_seed", "fewshot_seed"):
        assert evaluated["config"][seed] == plain["config"][seed]


def test_arguments_of_generation_go_before_the_tasks_own(folder: Path, tasks: Path) -> None:
    given = '{"do_sample": false, "max_gen_toks": 3, "until": ["e"]}'
    questions = Questions(
        tasks=("answers", "pages"), include=tasks, batch_size=BATCH, max_length=LENGTH, limit=3,
        log_samples=True, gen_kwargs=gen_kwargs_of(given),
    )  # fmt: skip
    found = evaluation.evaluate(folder, questions, settings=budget(folder))
    assert found is not None
    arguments = json.loads(given)
    expected = by_lm_eval(
        folder, tasks, ("answers", "pages"), limit=3, log_samples=True, gen_kwargs=arguments
    )
    assert found["samples"] == expected["samples"]
    asked = found["samples"]["answers"][0]["arguments"][0][1]
    assert {name: asked[name] for name in arguments} == arguments
    assert asked["temperature"] == 0.7  # the task's own, which greedy answers do without


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("temprature=0.5", "no argument of generation 'temprature': did you mean 'temperature'"),
        ("use_cache=false", "no argument of generation 'use_cache'"),
        ("0.5", r"--gen-kwargs 0\.5: give NAME=VALUE"),
        ('{"until": [', "is no JSON"),
    ],
)
def test_arguments_of_generation_that_are_none_are_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Questions(tasks=("answers",), gen_kwargs=gen_kwargs_of(text))


def test_arguments_of_generation_need_a_task_that_generates(tasks: Path) -> None:
    questions = Questions(tasks=("pages",), include=tasks, gen_kwargs={"temperature": 0.5})
    with pytest.raises(UsageError, match="none of the tasks pages generates text; leave it out"):
        evaluation.load_tasks(questions, {})


def test_device_memory_stays_in_half_of_the_parameters(
    evaluated: dict[str, Any], folder: Path
) -> None:
    half = half_of_parameters(folder)
    assert evaluated["castor"]["device_budget_bytes"] == half
    assert 0 < evaluated["castor"]["peak_device_bytes"] <= half


def test_files_are_those_of_lm_eval(
    evaluated: dict[str, Any], plain: dict[str, Any], tracker: EvaluationTracker, tmp_path: Path
) -> None:
    written = evaluation.save(evaluated, tmp_path / "mine" / "results_now.json")
    assert [path.name for path in written] == [
        *(f"samples_{task}_now.jsonl" for task in TASKS),
        "results_now.json",
    ]
    tracker.output_path = str(tmp_path / "theirs")
    results = {name: value for name, value in plain.items() if name != "samples"}
    tracker.save_results_aggregated(results, plain["samples"])
    for task in TASKS:
        tracker.save_results_samples(task, plain["samples"][task])
    [theirs] = (tmp_path / "theirs").glob("*/results_*.json")
    mine, other = (json.loads(path.read_text("utf-8")) for path in (written[-1], theirs))
    assert set(mine) - {"castor"} == set(other)
    assert mine["results"] == other["results"]
    assert mine["task_hashes"] == other["task_hashes"]
    for task, path in zip(TASKS, written, strict=False):
        [lines] = theirs.parent.glob(f"samples_{task}_*.jsonl")
        assert path.read_text("utf-8") == lines.read_text("utf-8")


def test_a_full_disk_leaves_no_file(
    evaluated: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = evaluation.write_file

    def full(path: Path, pieces: Any) -> Any:
        if path.suffix == ".json":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return own(path, pieces)

    monkeypatch.setattr(evaluation, "write_file", full)
    with pytest.raises(OSError, match="No space left"):
        evaluation.save(evaluated, tmp_path / "results.json")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves lm-eval's own tasks out, whose 15,000 files take 5 seconds."""

    def manager(**options: Any) -> TaskManager:
        return TaskManager(**options | {"include_defaults": False})

    monkeypatch.setattr(evaluation, "TaskManager", manager)


def run_castor(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    """Runs castor evaluate in this process; returns its exit status."""
    monkeypatch.setattr(sys, "argv", ["castor", "evaluate", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


@pytest.mark.usefixtures("no_index")
def test_a_run_keeps_its_results(
    folder: Path,
    tasks: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = shutil.copytree(folder, tmp_path / "run")
    (run / "recipe.yaml").touch()
    status = run_castor(
        monkeypatch,
        *(run, "--tasks", tasks / "choices.yaml", "--limit", "4", "--num-fewshot", "0"),
        *("--batch-size", "2", "--max-length", str(LENGTH), "--seed", "7", "--device", "cpu"),
        *("--device-memory", f"{half_of_parameters(folder)}B", "--apply-chat-template"),
    )
    shown = capsys.readouterr()
    assert status == 0, shown.err
    [file] = (run / "evaluations").iterdir()
    assert f"castor evaluate: wrote {file}\n" in shown.err
    assert "at most 1." in shown.err
    found = json.loads(file.read_text("utf-8"))
    assert make_table(found) in shown.out
    config = found["config"]
    assert (config["limit"], config["batch_size"], config["random_seed"]) == (4, 2, 7)
    assert found["n-samples"]["choices"]["effective"] == 4
    assert found["n-shot"]["choices"] == 0
    expected = by_lm_eval(
        folder, tasks, ("choices",), limit=4, num_fewshot=0, apply_chat_template=True
    )
    assert found["results"] == expected["results"]
    assert "assistant" in found["chat_template"]
    # Another evaluation stands beside it, with files where they are asked for.
    assert run_castor(
        monkeypatch,
        *(run, "--tasks", "both", "--include", tasks, "--limit", "0.25", "--device", "cpu"),
        *("--max-length", str(LENGTH), "--log-samples", "--output", tmp_path / "two.json"),
    ) == 0  # fmt: skip
    assert {path.name for path in tmp_path.glob("*.json*")} == {
        "two.json", "samples_choices_two.jsonl", "samples_pages_two.jsonl",
    }  # fmt: skip
    assert json.loads((tmp_path / "two.json").read_text("utf-8"))["group_subtasks"] == {
        "both": ["choices", "pages"]
    }


@pytest.mark.usefixtures("no_index")
def test_tasks_are_names_patterns_files_and_folders(tasks: Path) -> None:
    def names(*given: str | Path) -> list[str]:
        found = evaluation.load_tasks(
            Questions(tasks=tuple(map(str, given)), include=tasks), {"pretrained": "tiny"}
        )
        return [getattr(one, "task_name", None) or one.name for one in found]

    assert names("pages", "choices") == ["pages", "choices"]
    assert names("both") == ["both"]
    assert names("[ap]*s") == ["answers", "pages"]
    assert names(tasks) == ["answers", "choices", "pages"]
    assert names(tasks / "answers.yaml") == ["answers"]
    with pytest.raises(UsageError, match=r"Duplicate task 'pages'.*once in --tasks"):
        names("both", "pages")


@pytest.mark.slow
def test_an_unknown_task_is_told_the_nearest(tasks: Path) -> None:
    said = r"there is no task 'boolqq': did you mean 'boolq'\? give a name that"
    with pytest.raises(UsageError, match=said):
        evaluation.load_tasks(Questions(tasks=("pages", "boolqq"), include=tasks), {})


BROKEN: dict[str, tuple[str, str]] = {
    "field": (
        'output_type: generate_until\ndoc_to_text: "{{nothing}}"\ndoc_to_target: x',
        "the task 'field' cannot be loaded: UndefinedError: 'nothing' is undefined; see its YAML",
    ),
    "data": (
        "output_type: generate_until\ndataset_kwargs: {data_files: {test: none.jsonl}}",
        "the task 'data' cannot be loaded: FileNotFoundError: Unable to find .*none.jsonl",
    ),
    "hub": (
        "dataset_path: nobody/nothing\noutput_type: generate_until",
        r"the task 'hub' needs data of the hub: .*bring its cache here \(.*--include",
    ),
    "setting": ("doc_to_txt: x", "the task 'setting' cannot be loaded: TypeError: .*'doc_to_txt'"),
    "syntax": ("metric_list: [", r"syntax\.yaml is no task of lm-eval: while parsing"),
    "code": (
        "output_type: generate_until\ndoc_to_text: x\ndoc_to_target: x\nunsafe_code: true",
        "the task 'code' runs code that the model writes.*--confirm-run-unsafe-code",
    ),
}


@pytest.mark.usefixtures("no_index")
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_task_is_one_sentence(name: str, tasks: Path, tmp_path: Path) -> None:
    text, said = BROKEN[name]
    shutil.copy(tasks / "rows.jsonl", tmp_path)
    write_task(tmp_path, name, text)
    with pytest.raises(UsageError, match=said) as error:
        evaluation.load_tasks(Questions(tasks=(name,), include=tmp_path), {})
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("no_index")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tasks", ","], "tasks names no task"),
        (["--tasks", "pages", "--limit", "0"], "limit is 0; give a number of documents or a"),
        (["--tasks", "pages", "--limit", "2.5"], "limit is 2.5"),
        (["--tasks", "none.yaml"], "there is no file none.yaml; give a YAML file"),
        (["--tasks", "pages", "--include", "none"], "there is no folder none; give one with"),
        (["--tasks", "{empty}"], "empty holds no task: give a folder of lm-eval's YAML files"),
        (["--tasks", "pages", "--log-samples"], "there is no run's folder; give --output"),
        (["--tasks", "pages", "--output", "{file}/x"], "cannot be written; give another folder"),
        (["--tasks", "pages", "--max-length", "999"], "--max-length is 999, and model takes 256"),
        (["--tasks", "answers", "--max-length", "8"], "lm-eval refuses: Invalid configuration: "),
        (["--tasks", "pages", "--device-memory", "64KiB"], "out of device memory: requested "),
        (["--tasks", "pages", "--set", "max_norm=1.0"], "max_norm: a setting of training"),
    ],
)
def test_refusals_are_one_sentence(
    arguments: list[str],
    said: str,
    folder: Path,
    tasks: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    given = [one.format(empty=tmp_path / "empty", file=tmp_path / "file") for one in arguments]
    include = [] if "--include" in given else ["--include", str(tasks)]
    assert run_castor(monkeypatch, folder, *include, *given, "--device", "cpu") == 1
    shown = capsys.readouterr()
    last = shown.err.strip().splitlines()[-1]
    assert last.startswith("castor: error: ")
    assert said in last
    assert not shown.out


def test_a_chat_template_has_to_be_there(folder: Path, tasks: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(folder, tmp_path / "bare")
    words: Any = AutoTokenizer.from_pretrained(folder)
    words.chat_template = None
    (bare / "chat_template.jinja").unlink()
    words.save_pretrained(bare)
    questions = Questions(tasks=("pages",), include=tasks, apply_chat_template=True)
    with pytest.raises(UsageError, match="tokenizer of bare has no chat template: add one"):
        evaluation.evaluate(bare, questions, settings=budget(folder))


@pytest.mark.usefixtures("no_index")
def test_a_recipe_evaluates_what_it_has_trained(
    folder: Path,
    place: Path,
    tasks: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, recipe = tmp_path / "run", tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: {{path: {folder}}}\ndata: {{train: {place / 'chats.jsonl'}}}\n"
        "method: {name: sft}\nmemory: {device: cpu, device_memory: 6MiB, activations: auto}\n"
        f"evaluate: {{tasks: [choices], include: {tasks}, limit: 4, log_samples: true}}\n"
        f"output: {{dir: {run}}}\n",
        encoding="utf-8",
    )

    def trains(*_: Any, **__: Any) -> int:
        shutil.copytree(folder, run, dirs_exist_ok=True)
        return 0

    monkeypatch.setattr(launch, "run", trains)
    assert train.start(recipe, [], dry_run=False) == 0
    shown = capsys.readouterr()
    assert "|choices|" in shown.out
    assert "of a budget of 6.0 MiB" in shown.err
    assert {path.name.split("_")[0] for path in (run / "evaluations").iterdir()} == {
        "results", "samples",
    }  # fmt: skip
    monkeypatch.setattr(launch, "run", lambda *_, **__: 143)  # SIGTERM: a checkpoint, no end
    assert train.start(recipe, ["output.dir=" + str(tmp_path / "other")], dry_run=False) == 143
    assert not (tmp_path / "other" / "evaluations").exists()
    with pytest.raises(UsageError, match="there is no task 'choice': did you mean 'choices'"):
        train.start(recipe, ["evaluate.tasks=[choice]"], dry_run=True)
    with pytest.raises(UsageError, match="evaluate asks a model that generates text"):
        load(recipe, ["method.name=reward"])


@pytest.mark.usefixtures("no_index")
def test_a_rank_without_a_document_is_refused(tasks: Path) -> None:
    questions = Questions(tasks=("choices",), include=tasks, limit=0.2)
    loaded = evaluation.load_tasks(questions, {})
    evaluation.check_ranks(questions, loaded, 2)
    with pytest.raises(
        UsageError, match=r"'choices' has fewer documents \(2\) than .* ranks \(3\)"
    ):
        evaluation.check_ranks(questions, loaded, 3)


@pytest.mark.slow
def test_ranks_divide_the_documents(
    evaluated: dict[str, Any], folder: Path, tasks: Path, tmp_path: Path
) -> None:
    command = [
        *(sys.executable, "-m", "castor", "run", "--nproc", "2", "-m", "castor", "evaluate"),
        *(folder, "--include", tasks, "--tasks", "choices,pages", "--device", "cpu"),
        *("--device-memory", f"{half_of_parameters(folder)}B", "--host-memory", "64MiB"),
        *("--max-length", LENGTH, "--output", tmp_path / "ranks.json", "--log-samples"),
    ]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "stands behind" not in done.stderr
    found = json.loads((tmp_path / "ranks.json").read_text("utf-8"))["results"]
    for task in ("choices", "pages"):
        for name, value in evaluated["results"][task].items():
            # Batches are other ones than in one process: their last bits may differ.
            close = pytest.approx(value, rel=1e-5) if isinstance(value, float) else value
            assert found[task][name] == close
