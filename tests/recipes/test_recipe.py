"""Recipes: what is read, what is refused with file, line and nearest name, and what is written."""

from pathlib import Path

import pytest

from castor.errors import UsageError
from castor.recipes import require
from castor.recipes.init import init
from castor.recipes.recipe import RecipeError, dump, load

METHODS = ["sft", "dpo", "reward", "pretrain"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a model's config and a file of rows."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "rows.jsonl").write_text("{}\n")
    return tmp_path


def written(here: Path, method: str = "sft", **replaced: str) -> Path:
    text = init(method, "model", "rows.jsonl")
    for old, new in replaced.items():
        assert old in text
        text = text.replace(old, new, 1)
    (here / "recipe.yaml").write_text(text)
    return Path("recipe.yaml")


def replacing(here: Path, old: str, new: str) -> Path:
    return written(here, **{old: new})


@pytest.mark.parametrize("method", METHODS)
def test_what_init_prints_is_a_recipe_that_stays_the_same_when_it_is_written(
    here: Path, method: str
) -> None:
    recipe = load(written(here, method))
    assert recipe.method.name == method
    assert recipe.model.path == str(here / "model")
    assert recipe.data.train == str(here / "rows.jsonl")
    assert recipe.output.dir == str(here / "runs" / method)
    (here / "resolved.yaml").write_text(dump(recipe))
    again = load("resolved.yaml")
    assert again == recipe
    assert dump(again) == dump(recipe)


def test_defaults_that_depend_on_the_method_are_written_out(here: Path) -> None:
    dpo = load(written(here, "dpo"), ["train.learning_rate=null", "method.adapter=lora"])
    assert (dpo.method.beta, dpo.data.packing) == (0.1, False)
    assert dpo.train.learning_rate == pytest.approx(1e-5)
    assert dpo.method.lora is not None
    assert dpo.method.lora.r == 8
    assert load(written(here, "pretrain")).data.loss_on == "all"
    assert load(written(here)).memory == {"precision": "bf16"}
    assert load(written(here, "reward")).data.truncation == "drop"
    with pytest.raises(RecipeError, match=r"data\.truncation: right would cut the answers"):
        load(written(here, "reward"), ["data.truncation=right"])


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("epochs:", "epoch:", "line 21: train has no setting 'epoch': did you mean 'epochs'?"),
        ("method:", "methods:", "line 16: a recipe has no setting 'methods': did you mean"),
        ("name: sft", "name: stf", "line 17: method.name is 'stf': input should be 'sft', 'dpo'"),
        (
            "epochs: 1 ",
            "epochs: x ",
            "line 21: train.epochs is 'x': input should be a valid number",
        ),
        ("epochs: 1 ", "epochs: 0 ", "line 21: train.epochs is 0: input should be greater than 0"),
        ("  train: rows.jsonl\n", "", "line 5: data.train is missing; give it"),
        (
            "train: rows.jsonl",
            "train: [{path: a, wieght: 2}]",
            "line 6: data.train.0 has no setting 'wieght': did you mean 'weight'?",
        ),
        ("held_out: 0.02", "held_out: 1.5", "line 9: data.held_out is 1.5: give a share below 1"),
        (
            "  seed: 0",
            "  seed: 0\n  seed: 1",
            "line 31: seed is given a second time, after line 30",
        ),
        ("model:", "model: [", "line 5 is no YAML: expected ',' or ']'"),
        ("  # lora:", "  lora:", "line 19: method.lora describes adapters, and method.adapter is"),
        (
            "precision: bf16",
            "precison: bf16",
            "has no argument 'precison': did you mean 'precision'",
        ),
        (
            "precision: bf16",
            "precision: bf17",
            "line 32: memory: precision is 'bf17'; choose one of",
        ),
        (
            "precision: bf16",
            "device_memory: 22",
            "line 32: memory: device_memory is '22', which has",
        ),
        ("precision: bf16", "device_memory: 22G1B", "line 32: memory: device_memory is '22G1B'"),
        ("precision: bf16", "max_norm: 1.0", "line 32: memory: GeminiPlugin has max_norm=1.0"),
        (
            "precision: bf16",
            "nvme_path: /x",
            "line 32: memory: nvme_path: there is no directory /x",
        ),
        ("packing: true", "beta: 1", "line 12: data has no setting 'beta'"),
    ],
)
def test_a_fault_is_one_sentence_with_file_and_line(
    here: Path, old: str, new: str, said: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        load(replacing(here, old, new))
    assert str(caught.value).startswith("recipe.yaml, line ")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("train.epoch=2", "--set train.epoch=2: train has no setting 'epoch': did you mean"),
        ("memory.precision=x", "--set memory.precision=x: memory: precision is 'x'"),
        ("parallel.nproc=0", "--set parallel.nproc=0: parallel.nproc is 0"),
        ("epochs", "--set epochs: give SECTION.NAME=VALUE"),
        ("method.beta=0.1", "--set method.beta=0.1: method.beta is DPO's"),
        ("model.path.x=1", "--set model.path.x=1: path holds no settings"),
        ("data.chat_template=t.jinja", "data.chat_template: there is no file t.jinja"),
        ("model.random_weights=true", "which only method.name: pretrain"),
        ("train.evaluate_every=5", "data.held_out: 0 leaves no rows to evaluate on"),
        ("train.warmup=10", "train.warmup is 10 steps, and train.max_steps is 3"),
        ("method.name=dpo", "recipe.yaml, line 12: data.packing is for sft and pretrain"),
        ("evaluate={tasks: [a], limit: 2.5}", "evaluate: limit is 2.5; give a number of documents"),
        (
            "evaluate={tasks: [a], confirm_run_unsafe_code: true}",
            "evaluate: a recipe cannot allow tasks to run code of the model's",
        ),
        ("evaluate={taks: [a]}", "evaluate has no setting 'taks': did you mean 'tasks'"),
    ],
)
def test_a_fault_of_an_option_names_the_option(here: Path, given: str, said: str) -> None:
    more = {"train.evaluate_every=5": "data.held_out=0", "train.warmup=10": "train.max_steps=3"}
    with pytest.raises(RecipeError) as caught:
        load(written(here), [given, *filter(None, [more.get(given)])])
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: &x [*x]\n", "a setting holds itself, by an alias"),
        ("model: \0\n", "is no YAML: unacceptable character #x0000: special characters"),
        (
            "future: 1\nversions: {castor-torch: 9.9.9}\n",
            "line 1: a recipe has no setting 'future'.*castor 9.9.9 wrote the recipe, and ",
        ),
    ],
)
def test_a_document_that_is_no_recipe_is_one_sentence(here: Path, text: str, said: str) -> None:
    (here / "strange.yaml").write_text(text)
    with pytest.raises(RecipeError, match=said) as caught:
        load("strange.yaml")
    assert "\n" not in str(caught.value)


def test_options_replace_what_the_file_says(here: Path) -> None:
    options = ["train.epochs=2", "train.learning_rate=1e-4", "memory.device_memory=1GiB"]
    recipe = load(written(here), options)
    assert (recipe.train.epochs, recipe.train.learning_rate) == (2.0, 1e-4)
    assert recipe.memory == {"precision": "bf16", "device_memory": "1GiB"}


def test_a_file_without_settings_is_refused(here: Path) -> None:
    (here / "recipe.yaml").write_text("# nothing\n")
    with pytest.raises(RecipeError, match=r"recipe\.yaml holds no settings; `castor init sft"):
        load("recipe.yaml")


def test_init_refuses_an_unknown_method_and_what_is_not_there(here: Path) -> None:
    with pytest.raises(UsageError, match="there is no method 'stf': did you mean 'sft'"):
        init("stf", "model", "rows.jsonl")
    with pytest.raises(FileNotFoundError, match=r"nothing\.jsonl"):
        init("sft", "model", "nothing.jsonl")
    with pytest.raises(ValueError, match="has no config"):
        init("sft", ".", "rows.jsonl")


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ('{"max_position_embeddings": 256}', 256),
        ('{"n_positions": 1024}', 1024),
        ('{"text_config": {"max_position_embeddings": 512}}', 512),
        ('{"max_position_embeddings": 40960}', 2048),
    ],
)
def test_init_writes_no_longer_sequence_than_the_model_takes(
    here: Path, config: str, length: int
) -> None:
    (here / "model" / "config.json").write_text(config)
    assert load(written(here)).data.max_length == length


def test_init_quotes_names_that_yaml_reads_as_something_else(here: Path) -> None:
    (here / "1, 2: yes.jsonl").write_text("{}\n")
    (here / "recipe.yaml").write_text(init("sft", "model", "1, 2: yes.jsonl"))
    assert load("recipe.yaml").data.train == str(here / "1, 2: yes.jsonl")


def test_a_lacking_library_is_named_with_the_command_that_installs_it() -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        require("castor train", "torch", "no_such_library", "nor_this_one")
    assert str(caught.value) == (
        "castor train needs no_such_library and nor_this_one: pip install 'castor-torch[recipes]'"
    )


def test_a_setting_within_an_option_is_named_by_the_option(here: Path) -> None:
    given = "data.train=[{path: rows.jsonl, weigt: 2}]"
    with pytest.raises(RecipeError, match=r"^--set data\.train=.*has no setting 'weigt': did you"):
        load(written(here), [given])


def test_the_commands_of_the_guide_suit_the_recipe_that_init_writes(here: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs/guides/recipes.md").read_text(encoding="utf-8")
    commands = guide.split("```sh\n")[1].split("```")[0].splitlines()
    asked = [line.split("#")[0].split() for line in commands if line.startswith("castor")]
    recipe = load(written(here))
    assert recipe.method.adapter == "full"  # castor export has nothing to merge then
    assert not any("--merge-adapter" in words for words in asked)
    run = Path(recipe.output.dir).relative_to(here)
    for command in ("evaluate", "chat", "serve", "export"):
        assert [words[2] for words in asked if words[1] == command] == [str(run)]
