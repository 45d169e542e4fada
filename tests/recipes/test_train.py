"""`castor train`: plain TRL's losses in a part of its memory, repeats, resumes, and methods."""

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from castor.config import parse_bytes
from castor.errors import Error, UsageError
from castor.recipes import train
from castor.recipes.recipe import Recipe, dump, load
from grids import some
from rank_processes import run_python

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning"),
]

DEVICE = 6 * 2**20
"""Bytes of the budget; parameters, gradients and moments alone take 15.6 MiB in plain PyTorch."""
STEPS = 4
SETTINGS = {
    "precision": "fp32", "device": "cpu", "device_memory": "6MiB", "host_memory": "256MiB",
}  # fmt: skip
RECIPE = """\
model: {{path: {place}/model}}
data: {{train: {place}/{rows}, held_out: 0, max_length: 64, packing: {packing}}}
method: {{name: {method}, adapter: {adapter}}}
train: {{max_steps: 4, batch_size: 2, learning_rate: 1e-3, seed: 3, warmup: 0, weight_decay: 0.01}}
memory: {{precision: fp32, device: cpu, device_memory: 6MiB, host_memory: 256MiB}}
log: {{every: 1}}
output: {{dir: {place}/{name}, save_every: 2, keep: null}}
"""


def recipe_file(
    place: Path,
    name: str,
    method: str = "sft",
    *,
    adapter: str = "full",
    rows: str = "chats.jsonl",
    packing: bool = False,
    more: str = "",
) -> Path:
    text = RECIPE.format(
        place=place, name=name, method=method, adapter=adapter, rows=rows,
        packing=str(packing).lower(),
    )  # fmt: skip
    file = place / f"{name}.yaml"
    file.write_text(text + more)
    return file


def castor(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "castor", *arguments)


def logged(run: Path, name: str = "loss") -> list[float]:
    state = json.loads((run / "trainer_state.json").read_text())
    return [float(entry[name]) for entry in state["log_history"] if name in entry]


def weights(run: Path) -> bytes:
    return (run / "model.safetensors").read_bytes()


def run_script(name: str, *arguments: str | Path, settings: dict[str, str] = SETTINGS) -> None:
    """Runs a script of this folder as `castor run` does, under some settings."""
    script = Path(__file__).with_name(name)
    command = ("-m", "castor.integrations.script", json.dumps(settings), script, *arguments)
    done = run_python(*command, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def trained(place: Path) -> Path:
    """A run of `castor train`, from the command's function on."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        assert train.start(recipe_file(place, "trained"), [], dry_run=False) == 0
    assert "of a budget of 6.0 MiB" in said.getvalue()
    return place / "trained"


@pytest.fixture(scope="module")
def others(place: Path, trained: Path) -> Path:
    """Runs that one process trains, as castor train does one."""
    again = load(trained / "recipe.yaml", [f"output.dir={place / 'again'}"])
    resumed = load(trained / "recipe.yaml", [f"output.dir={place / 'resumed'}"])
    shutil.copytree(trained / "checkpoint-2", place / "resumed" / "checkpoint-2")
    (place / "resumed" / "checkpoint-3").mkdir()  # a killed process had just begun it
    files = []
    for name, recipe in (("again", again), ("resumed", resumed)):
        files.append(place / f"{name}.yaml")
        files[-1].write_text(dump(recipe))
    small = load(recipe_file(place, "unpacked", adapter="lora"), ["memory.device_memory=1900KiB"])
    cut = load(
        recipe_file(place, "pretrained", "pretrain", rows="text.jsonl"), ["data.truncation=right"]
    )
    for recipe in (small, cut):
        files.append(place / f"{Path(recipe.output.dir).name}.yaml")
        files[-1].write_text(dump(recipe))
    files += [
        recipe_file(place, "adapters", adapter="lora", packing=True),
        recipe_file(place, "preferred", "dpo", rows="pairs.jsonl"),
        recipe_file(place, "rewarded", "reward", rows="pairs.jsonl"),
        recipe_file(place, "packed-texts", "pretrain", rows="text.jsonl", packing=True),
    ]
    run_script("several.py", *files)
    return place


PLAIN = {
    "trained": ("SFT", "chats", {"assistant_only_loss": True}),
    "unpacked": ("SFT", "chats", {"assistant_only_loss": True}),
    "preferred": ("DPO", "pairs", {"beta": 0.1}),
    "rewarded": ("Reward", "pairs", {}),
    "pretrained": ("SFT", "text", {"packing": False}),
}
"""Runs of castor train, and the Trainer of TRL that trains the same, its rows and settings."""


@pytest.mark.parametrize("name", PLAIN)
def test_losses_are_those_of_plain_trl_in_less_than_half_of_its_memory(
    others: Path, tmp_path: Path, name: str
) -> None:
    import peft
    import transformers
    import trl
    from datasets import Dataset

    method, file, more = PLAIN[name]
    rows = [json.loads(line) for line in (others / f"{file}.jsonl").read_text().splitlines()]
    arguments = getattr(trl, f"{method}Config")(
        output_dir=str(tmp_path), max_steps=STEPS, per_device_train_batch_size=2,
        learning_rate=1e-3, lr_scheduler_type="cosine", weight_decay=0.01, seed=3, bf16=False,
        use_cpu=True, activation_checkpointing=False, logging_steps=1, save_strategy="no",
        report_to=[], disable_tqdm=True, max_length=64, **more,
    )  # fmt: skip
    transformers.set_seed(3)  # new adapters and scores begin with random weights
    plain = getattr(trl, f"{method}Trainer")(
        model=str(others / "model"),
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(others / "model"),
        peft_config=peft.LoraConfig(task_type="CAUSAL_LM") if name == "unpacked" else None,
    )
    parameters = list(plain.model.parameters())
    trained = sum(one.numel() for one in parameters if one.requires_grad)
    taken = 4 * sum(one.numel() for one in parameters) + 12 * trained  # without activations
    budget = load(others / f"{name}.yaml").memory["device_memory"]
    assert parse_bytes(budget, "device_memory") <= taken / 2
    plain.train()
    for figure in ("loss", "grad_norm"):
        expected = [entry[figure] for entry in plain.state.log_history if figure in entry]
        assert len(expected) == STEPS
        assert logged(others / name, figure) == pytest.approx(list(map(float, expected)), rel=1e-5)


def test_the_recipe_in_a_run_repeats_it_bit_for_bit(trained: Path, others: Path) -> None:
    assert weights(others / "again") == weights(trained)
    assert logged(others / "again") == logged(trained)
    kept = load(trained / "recipe.yaml")
    assert kept.versions["torch"] == torch.__version__.split("+")[0]
    assert "trl" in kept.versions


def test_a_run_that_was_stopped_ends_with_the_bits_of_one_that_was_not(
    trained: Path, others: Path
) -> None:
    assert weights(others / "resumed") == weights(trained)
    assert logged(others / "resumed") == logged(trained)
    for name in ("grad_norm", "num_tokens"):
        assert logged(others / "resumed", name) == logged(trained, name) != []


def test_every_method_trains(others: Path) -> None:
    for name in ("preferred", "rewarded", "pretrained", "packed-texts"):
        changed = load_file(others / name / "model.safetensors")
        before = load_file(others / "model" / "model.safetensors")
        assert any(not torch.equal(changed[key], before[key]) for key in before if key in changed)
        assert len(logged(others / name)) == STEPS
    assert logged(others / "preferred")[0] == pytest.approx(0.6931, abs=1e-4)  # log 2
    adapters = load_file(others / "adapters" / "adapter_model.safetensors")
    assert all("lora_" in key for key in adapters)
    assert any(value.any() for key, value in adapters.items() if "lora_B" in key)


def test_the_same_command_says_that_a_finished_run_is_finished(
    trained: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.start(recipe_file(place, "trained"), [], dry_run=False) == 0
    assert f"is finished after {STEPS} steps" in capsys.readouterr().err


@pytest.mark.ranks
def test_two_ranks_have_the_losses_of_one_process_with_the_same_global_batch(
    place: Path, trained: Path
) -> None:
    given = ("--set", "parallel.nproc=2", "--set", "train.batch_size=1")
    done = castor("train", recipe_file(place, "ranks"), *given)
    assert done.returncode == 0, done.stderr[-4000:]
    for name in ("loss", "grad_norm"):
        assert logged(place / "ranks", name) == pytest.approx(logged(trained, name), rel=1e-5)


def test_a_folder_with_another_run_is_refused(trained: Path, place: Path) -> None:
    with pytest.raises(UsageError, match=r"holds a run with train\.seed: 3, and the recipe says 4"):
        train.start(recipe_file(place, "trained"), ["train.seed=4"], dry_run=False)
    (place / "strange" / "checkpoint-1").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"holds checkpoints and no recipe\.yaml"):
        train.start(recipe_file(place, "strange"), [], dry_run=False)


def test_a_dry_run_prints_the_plan_and_writes_nothing(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = recipe_file(place, "planned")
    assert train.start(file, ["data.packing=true", "data.held_out=4"], dry_run=True) == 0
    said = capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(place / "model")
    num_params = sum(param.numel() for param in model.parameters())
    assert f"parameters: {num_params:,}, of which {num_params:,} train" in said
    assert "steps: 4 of 2 x 1 x 1 sequences" in said
    assert "of a budget of 6.0 MiB" in said
    assert said.rstrip().endswith("nothing was trained")
    assert not (place / "planned").exists()
    assert train.start(file, ["memory.device_memory=1MiB"], dry_run=True) == 1
    assert "the budgets do not hold a step" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"data\.max_length is 257, and .* at most 256 tokens"):
        train.start(file, ["data.max_length=257"], dry_run=True)


PREDICTED = {
    "packed": ("full", ["data.packing=true", "data.max_length=256", "train.batch_size=1"]),
    "padded": ("full", ["train.batch_size=4"]),
    "adapted": ("lora", ["data.packing=true", "data.max_length=256", "memory.activations=keep"]),
}
"""Adapter and settings of recipes whose memory is predicted and measured."""


def test_the_plan_predicts_the_peak_of_a_run(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    room = {"device": "cpu", "device_memory": "256MiB", "host_memory": "256MiB"}
    for name, (adapter, given) in PREDICTED.items():
        settings = {"precision": "bf16", **room}
        settings |= dict(one[7:].split("=") for one in given if one.startswith("memory."))
        more = [f"memory.{key}={value}" for key, value in settings.items()]
        recipe = load(recipe_file(place, name, adapter=adapter), [*more, *given])
        (place / f"{name}.yaml").write_text(dump(recipe))
        (place / name).mkdir()
        capsys.readouterr()
        assert train.start(place / f"{name}.yaml", [], dry_run=True) == 0
        said = re.search(r"device: ([\d.]+) MiB", capsys.readouterr().out)
        assert said
        run_script("several.py", place / f"{name}.yaml", settings=settings)
        entries = map(json.loads, (place / name / "log.jsonl").read_text().splitlines())
        peak = max(one["device_bytes"] for one in entries if "loss" in one) / 2**20
        assert peak <= float(said[1]) <= 1.25 * peak, name


def recipe_of(place: Path, *overrides: str, method: str = "sft") -> Recipe:
    return load(recipe_file(place, "counted", method), overrides)


@pytest.mark.parametrize(
    ("overrides", "rows", "steps"),
    [
        ([], 100, 4),
        (["train.max_steps=null"], 5, 3),
        (["train.max_steps=null", "train.epochs=2", "train.gradient_accumulation=2"], 5, 4),
        (["train.max_steps=null", "parallel.nproc=2"], 5, 2),
        (["train.max_steps=null", "train.epochs=0.5"], 100, 25),
    ],
)
def test_steps_are_counted_as_the_trainer_does(
    place: Path, overrides: list[str], rows: int, steps: int
) -> None:
    assert train.num_steps(recipe_of(place, *overrides), rows) == steps


def test_packed_documents_do_not_see_each_other(place: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(place / "model").eval()
    first, second = [5, 6, 7, 8, 9], [30, 31, 32]
    collate = train.Collator(3)
    apart = [{"input_ids": ids, "labels": ids} for ids in (first, second)]
    packed = {
        "input_ids": first + second,
        "labels": first + second,
        "seq_lengths": [5, 3],
    }
    batch, together = collate(apart), collate([packed])
    assert batch["attention_mask"].tolist() == [[1] * 5, [1, 1, 1, 0, 0]]
    assert batch["labels"][1].tolist() == [30, 31, 32, -100, -100]
    assert batch["input_ids"][1].tolist() == [30, 31, 32, 3, 3]
    assert "attention_mask" not in together
    assert together["labels"].tolist() == [[-100, 6, 7, 8, 9, -100, 31, 32]]
    with torch.no_grad():
        found = model(**together).logits[0]
        expected = model(**batch).logits
    torch.testing.assert_close(found[:5], expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[5:], expected[1, :3], rtol=1e-5, atol=1e-5)


def test_checkpoints_that_are_not_complete_are_left_out_and_removed(tmp_path: Path) -> None:
    for name, state in (("2", "{}"), ("10", "{}"), ("12", '{"cut'), ("14", None), ("best", "{}")):
        (tmp_path / f"checkpoint-{name}").mkdir()
        if state is not None:
            (tmp_path / f"checkpoint-{name}" / "trainer_state.json").write_text(state)
    assert train.last_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
    assert (tmp_path / "checkpoint-14").is_dir()
    train.last_checkpoint(tmp_path, remove_incomplete=True)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["checkpoint-10", "checkpoint-2", "checkpoint-best"]
    assert train.last_checkpoint(tmp_path / "nothing") is None


def changed_model(place: Path, tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "model"
    shutil.copytree(place / "model", path)
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["LlamaModel"]}, "names LlamaModel, and sft trains a model that"),
        ({"architectures": None}, "names no architecture, and sft trains"),
        ({"quantization_config": {"quant_method": "gptq"}}, "is quantised already"),
        ({"vocab_size": 100}, r"has 5\d\d tokens, and the model .* embeds 100"),
    ],
)
def test_a_model_that_does_not_suit_is_refused(
    place: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    model = changed_model(place, tmp_path, **changes)
    with pytest.raises(UsageError, match=said):
        train.start(recipe_file(place, "refused"), [f"model.path={model}"], dry_run=True)


@pytest.mark.parametrize(
    ("file", "content", "given", "said"),
    [
        ("config.json", "[]", "", r"config\.json holds a list and no settings by name"),
        ("config.json", '{"a":', "", r"config\.json is no JSON: .* line 1 column 6"),
        ("model.safetensors", "x", "", r"model\.safetensors is no safetensors file, or was cut"),
        ("model.safetensors", None, "", "holds no weights; give the folder of a whole model"),
        ("tokenizer.json", "{", "", "has no tokenizer that transformers can read"),
        ("t.jinja", "a\n{% for x in %}", "data.chat_template={model}/t.jinja",
         r"t\.jinja, line 2: the chat template is no Jinja: Expected an expression"),
        ("x", "", "output.dir={model}/x/y", "output.dir is .*/x/y, and .*/x is no folder that"),
        ("x", "", "method.lora.target_modules=[all_linear]", "PEFT refuses that for .* not found"),
    ],
)  # fmt: skip
def test_a_broken_file_is_named_before_anything_trains(
    place: Path, tmp_path: Path, file: str, content: str | None, given: str, said: str
) -> None:
    model = changed_model(place, tmp_path)
    (model / file).unlink(missing_ok=True)
    if content is not None:
        (model / file).write_text(content)
    recipe = recipe_file(place, "refused", adapter="lora" if "lora" in given else "full")
    sets = [f"model.path={model}", *filter(None, [given.format(model=model)])]
    with pytest.raises(Error, match=said):
        train.start(recipe, sets, dry_run=True)
    assert not (place / "refused").exists()


def test_an_adapter_is_refused_as_the_model(place: Path, tmp_path: Path) -> None:
    model = changed_model(place, tmp_path)
    (model / "adapter_config.json").write_text("{}")
    with pytest.raises(UsageError, match="holds an adapter, and a recipe begins with a whole"):
        train.start(recipe_file(place, "refused"), [f"model.path={model}"], dry_run=True)


def test_qlora_without_bitsandbytes_says_what_to_install(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ModuleNotFoundError, match="pip install bitsandbytes, or give adapter"):
        train.start(recipe_file(place, "four", adapter="qlora"), [], dry_run=True)


def test_training_without_castor_in_the_process_is_refused(place: Path) -> None:
    with pytest.raises(UsageError, match="trains in the process that castor train starts"):
        train.fit(recipe_of(place))


KILLED = some(
    tuple(f"{adapter}-{seed}" for adapter in ("full", "lora") for seed in (1, 2, 3)),
    *("full-1", "full-3", "lora-2"),
)
"""Recipes, and seeds of the moments at which their runs are killed."""


@pytest.fixture(scope="module")
def killed(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of killed.py, of all weights and of adapters."""
    folder = tmp_path_factory.mktemp("killed")
    more = ["train.max_steps=12", "output.save_every=2", "output.keep=2"]
    for adapter in ("full", "lora"):
        given = ["method.lora.lora_dropout=0.1"] if adapter == "lora" else []
        recipe = load(recipe_file(place, "killed", adapter=adapter), [*more, *given])
        (folder / f"{adapter}.yaml").write_text(dump(recipe))
    run_script("killed.py", folder, *KILLED)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", KILLED)
def test_a_run_that_is_killed_within_a_step_and_goes_on_ends_with_the_same_bits(
    killed: Path, name: str
) -> None:
    ends = json.loads((killed / "ends.json").read_text())
    adapter = name.partition("-")[0]
    assert ends[adapter] == [0]
    first, _, second = ends[name]
    assert (first, second) == (-signal.SIGALRM, 0)
    file = "model.safetensors" if adapter == "full" else "adapter_model.safetensors"
    plain, resumed = killed / adapter, killed / name
    assert (resumed / file).read_bytes() == (plain / file).read_bytes()
    assert logged(resumed) == logged(plain)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_same_command_goes_on_where_a_signal_ended_it(
    place: Path, trained: Path, how: signal.Signals
) -> None:
    name = f"ended-by-{how.name}"
    file = recipe_file(place, name)
    run = place / name
    with subprocess.Popen(
        [sys.executable, "-m", "castor", "train", str(file)],
        start_new_session=True, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        end = time.monotonic() + 240
        while not (run / "checkpoint-2" / "trainer_state.json").is_file():
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.01)
        if how == signal.SIGTERM:
            process.send_signal(how)
        else:  # a terminal sends Ctrl-C to the whole group
            os.killpg(process.pid, how)
        _, said = process.communicate(timeout=120)
    assert process.returncode == (-how if how == signal.SIGKILL else 128 + how)
    assert "Traceback" not in said
    assert not (run / "trainer_state.json").exists()
    done = castor("train", file)
    assert done.returncode == 0, done.stderr[-4000:]
    assert weights(run) == weights(trained)
    assert logged(run) == logged(trained)
