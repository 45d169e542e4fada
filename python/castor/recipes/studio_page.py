"""The page of `castor studio`. A button runs a command of castor, and what is shown is in files."""

from __future__ import annotations

import contextlib
import functools
import html
import inspect
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import fastapi
import gradio as gr
import openai
import pandas as pd
import yaml  # type: ignore[import-untyped]
from huggingface_hub.constants import HF_HUB_CACHE

from castor.errors import UsageError
from castor.recipes.recipe import Method
from castor.recipes.runs import RECIPE
from castor.recipes.studio_jobs import (
    CSS,
    CURVES,
    Job,
    Workspace,
    as_html,
    described,
    entries,
    evaluations,
    frame,
    progress,
)

_COLOURS = {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "80"}
_QUIET = {"TQDM_DISABLE": "1"}
_POLL_SECONDS = 0.3
_ADDRESS = re.compile(r"at (http://\S+/v1), without a key")
_FONTS = ("system-ui", "Segoe UI", "Roboto", "DejaVu Sans", "sans-serif")
_FIXED = ("ui-monospace", "Menlo", "Consolas", "DejaVu Sans Mono", "monospace")


def make_app(workspace: Workspace, has: Sequence[str], upload_bytes: int) -> fastapi.FastAPI:
    """Returns the page as an ASGI application, which lets everybody in.

    Args:
        workspace: Folder of everything that the page shows.
        has: Those of the commands "evaluate" and "export" that castor has.
        upload_bytes: Largest size of an uploaded file.
    """
    app = fastapi.FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    blocks = _Page(workspace, has).blocks
    # gradio 6.31 checks that files of a request were uploaded only where this is set, which
    # launch() does and mount_gradio_app() does not: any path would be read.
    blocks.has_launched = True
    gr.mount_gradio_app(
        app,
        blocks,
        path="/",
        footer_links=[],
        run_history=False,
        ssr_mode=False,
        max_file_size=upload_bytes,
        theme=gr.themes.Default(font=_FONTS, font_mono=_FIXED),
        css=CSS,
    )
    return app


def answers(address: str, messages: Sequence[dict[str, str]]) -> Iterator[str]:
    """Yields the growing answer of a server of `castor serve` to a conversation.

    Raises:
        UsageError: The server refuses, or is gone.
    """
    said, asked = "", list[Any](messages)
    try:
        with openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=900) as server:
            name = server.models.list().data[0].id
            stream = server.chat.completions.create(model=name, messages=asked, stream=True)
            for chunk in stream:
                said += "".join(choice.delta.content or "" for choice in chunk.choices)
                yield said
    except openai.APIConnectionError as error:
        raise UsageError(f"the server at {address} does not answer: {error}") from None
    except openai.APIError as error:
        found = error.body if isinstance(error.body, dict) else {}
        raise UsageError(found.get("message", error.message)) from None


@contextlib.contextmanager
def _as_sentences() -> Iterator[None]:
    """Makes a context whose errors the page shows as one sentence."""
    try:
        yield
    except (UsageError, ValueError, OSError) as said:
        text = html.escape(str(said))
        raise gr.Error(text, title="castor", print_exception=False) from None


def _told(do: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function, or a generator, whose errors the page shows as one sentence."""

    @functools.wraps(do)
    def called(*given: Any) -> Any:
        with _as_sentences():
            return do(*given)

    @functools.wraps(do)
    def followed(*given: Any) -> Any:
        with _as_sentences():
            yield from do(*given)

    return followed if inspect.isgeneratorfunction(do) else called


def _buttons(*labels: str) -> list[gr.Button]:
    """Makes a row of buttons, the first of which stands out."""
    with gr.Row():
        return [
            gr.Button(label, variant="secondary" if number else "primary", min_width=140)
            for number, label in enumerate(labels)
        ]


class _Page:
    """The page's components, and what their buttons do.

    Nothing is held in the page: each second, a tab shows the newest command about what is chosen in
    it, whichever page has started that.
    """

    def __init__(self, workspace: Workspace, has: Sequence[str]) -> None:
        self._place = workspace
        self._lists: dict[Any, Callable[[], list[Any]]] = {}
        self._logs: list[tuple[gr.HTML, Any, Callable[[Job, str], bool]]] = []
        with gr.Blocks(title="castor studio", analytics_enabled=False) as self.blocks:
            gr.Markdown(f"# castor studio\nWorkspace: `{workspace.root}`")
            self._timer = gr.Timer(1.0)
            with gr.Tabs() as tabs:
                for title, make in {
                    "Data": self._data,
                    "Model": self._model,
                    "Recipe": self._recipe,
                    "Train": self._train,
                    "Chat": self._chat,
                    "Compare": self._compare,
                    "Evaluate": self._evaluate,
                    "Export": self._export,
                    "Deploy": self._deploy,
                    "Commands": self._commands,
                }.items():
                    if title in ("Evaluate", "Export") and title.lower() not in has:
                        continue
                    with gr.Tab(title, id=title):
                        make()
            lists, seen = list(self._lists), gr.State([])
            self._on(self.blocks.load, self._filled, lists, lists)
            self._on(tabs.select, self._filled, lists, lists)
            chosen, shown = [one[1] for one in self._logs], [one[0] for one in self._logs]
            self._on(self._timer.tick, self._ticked, [seen, *chosen], [seen, *shown])
        self.blocks.queue(default_concurrency_limit=8)

    # -- what tabs share

    def _on(self, event: Any, do: Callable[..., Any], given: Any, shown: Any, **more: Any) -> None:
        more = {"api_visibility": "private", "show_progress": "hidden", **more}
        event(_told(do), given, shown, **more)

    def _choice(self, label: str, listed: Callable[[], list[Any]], **more: Any) -> gr.Dropdown:
        """Makes a choice of what is in the workspace, which is looked up whenever a tab opens."""
        choice = gr.Dropdown([], label=label, allow_custom_value=True, min_width=280, **more)
        self._lists[choice] = listed
        return choice

    def _log(self, name: str, chosen: Any, *kinds: str) -> None:
        """Makes a place for the output of the newest job of some kinds about what is chosen."""
        self._log_where(name, chosen, lambda job, one: job.kind in kinds and job.subject == one)

    def _log_where(self, name: str, chosen: Any, shows: Callable[[Job, str], bool]) -> None:
        output = gr.HTML(elem_classes="castor-log", elem_id=name, min_width=280)
        self._logs.append((output, chosen, shows))

    def _about(self, tab: str, kind: str) -> tuple[gr.Dropdown, gr.Textbox]:
        """Makes a choice of a run or a model, and options of a command about it."""
        model = self._choice("Run or model", self._runs_and_models, elem_id=f"{tab}-model")
        options = gr.Textbox(label=f"Options of castor {kind}", elem_id=f"{tab}-options")
        self._on(model.change, self._options, model, options)
        return model, options

    def _begin(self, kind: str, model: str, *arguments: str, options: str = "", **more: Any) -> Job:
        """Starts a command about a run or a model."""
        if not model:
            raise UsageError("choose a run or a model")
        command = [kind, model, *arguments, *shlex.split(options)]
        return self._place.start(kind, model, command, **more)

    def _finish(self, job: Job) -> None:
        """Waits for a command."""
        while job.running:
            time.sleep(_POLL_SECONDS)

    def _filled(self, *values: str | None) -> Any:
        """Looks up every choice again; where nothing is chosen, the newest thing is."""
        updates = []
        for value, listed in zip(values, self._lists.values(), strict=True):
            found = listed()
            first = next((one[1] if isinstance(one, tuple) else one for one in found), None)
            if listed == self._runs_and_models and not self._runs():
                first = None  # a run is what these are for
            chosen = {} if value or first is None else {"value": first}
            updates.append(gr.update(choices=found, **chosen))
        return updates

    def _ticked(self, seen: list[str], *values: str | None) -> Any:
        """Shows logs that have grown."""
        jobs, marks, updates = self._place.jobs(), [], []
        for number, (value, (_, _, shows)) in enumerate(zip(values, self._logs, strict=True)):
            job = next((one for one in jobs if value and shows(one, value)), None)
            text = f"{job.log()}[{job.state()}]" if job else ""
            marks.append(f"{job and job.folder.name} {hash(text)}")
            if marks[-1:] == seen[number : number + 1]:
                updates.append(gr.skip())
            else:
                updates.append(as_html(text, job.command) if job else "")
        return [marks, *updates]

    def _now(self, *arguments: str, module: str = "castor") -> str:
        """Runs a command that takes a few seconds, and returns what it printed.

        Raises:
            UsageError: It failed, as its last line says.
        """
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            cwd=self._place.root, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode not in (0, 1) or not done.stdout:
            said = done.stderr.strip().splitlines() or [f"{module} {arguments[0]} failed"]
            raise UsageError(said[-1].removeprefix("castor: error: "))
        return done.stdout

    def _stop(self, kind: str) -> Callable[[str], None]:
        """Returns a handler that stops the jobs of a kind about what is chosen."""

        def stop(subject: str) -> None:
            for job in self._place.jobs(kind, subject):
                job.stop()

        return stop

    def _data_files(self) -> list[str]:
        return self._place.listed("data")

    def _recipe_files(self) -> list[str]:
        return self._place.listed("recipes")

    def _runs(self) -> list[str]:
        return self._place.listed("runs")

    def _models(self) -> list[str]:
        """Returns the models of recipes, and of the hub's cache."""
        cached = [
            one.name.removeprefix("models--").replace("--", "/")
            for one in sorted(Path(HF_HUB_CACHE).glob("models--*"))
        ]
        return list(
            dict.fromkeys([*(str(one["model"]["path"]) for one in self._recipes()), *cached])
        )

    def _runs_and_models(self) -> list[str]:
        return [*self._runs(), *self._models()]

    def _recipes(self) -> Iterator[dict[str, Any]]:
        for name in self._recipe_files():
            try:
                found = yaml.safe_load((self._place.root / name).read_text(encoding="utf-8"))
                found["model"]["path"]
            except (OSError, yaml.YAMLError, KeyError, TypeError):
                continue  # castor train says what is wrong with it
            yield found

    def _recipe_file(self, recipe: str | None) -> Path:
        path = self._place.path("recipes", Path(recipe or "").name)
        if not path.is_file():
            raise UsageError(f"there is no recipe {recipe!r}; create one in the tab Recipe")
        return path

    def _options(self, model: str | None) -> str:
        """Returns the options by which a model gets the budgets that its recipe trains in."""
        kept = self._place.root / (model or "") / RECIPE  # of a run, with the budgets it chose
        runs = [yaml.safe_load(kept.read_text(encoding="utf-8"))] if kept.is_file() else []
        for recipe in [*runs, *self._recipes()]:
            memory = recipe.get("memory") or {}
            if memory == "auto":
                continue
            of = ((recipe.get("output") or {}).get("dir"), recipe["model"]["path"])
            if recipe in runs or model in of:
                names = [one for one in ("device", "device_memory", "host_memory") if one in memory]
                words = [(f"--{one.replace('_', '-')}", str(memory[one])) for one in names]
                return shlex.join(word for pair in words for word in pair)
        return ""

    # -- tabs

    def _data(self) -> None:
        upload = gr.File(
            label="JSON, JSONL, CSV, Parquet, Arrow or text", file_count="multiple", height=140
        )
        chosen = self._choice("File", self._data_files, elem_id="data-file")
        rows = gr.HTML(elem_classes="castor-log", elem_id="data-rows")

        def add(files: list[str] | None) -> Any:
            added = [self._place.add_data(Path(one)) for one in files or []]
            if not added:
                raise UsageError("choose a file to upload")
            name = str(added[-1].relative_to(self._place.root))
            return None, gr.update(choices=self._data_files(), value=name)

        def preview(name: str | None) -> str:
            if not name:
                return ""
            path = self._place.path("data", Path(name).name)
            if path.suffix not in (".json", ".jsonl", ".csv", ".txt"):
                return as_html(f"{name} is no text; the tab Recipe shows rows as the model does")
            with path.open(encoding="utf-8", errors="replace") as file:
                lines = [file.readline(1000).rstrip("\n") for _ in range(5)]
            return as_html("\n".join([*lines, f"... {path.stat().st_size:,} bytes in all"]))

        self._on(upload.upload, add, upload, [upload, chosen])
        self._on(chosen.change, preview, chosen, rows)

    def _model(self) -> None:
        model = self._choice("Model: a folder, or a name in the hub's cache", self._models)
        with gr.Row():
            sequence = gr.Number(1024, label="Tokens of a sequence", precision=0, minimum=2)
            batch = gr.Number(1, label="Sequences in a batch", precision=0, minimum=1)
            tokens = gr.Number(1_000_000, label="Tokens to train on", precision=0, minimum=1)
        kept = self._place.root / "machine.txt"
        options = gr.Textbox(
            label="This machine, as options of castor estimate",
            info="A preset may stand here: --preset rtx3090",
        )
        fits, measure = _buttons("What fits (castor estimate)", "Measure this machine")
        table = gr.Dataframe(
            headers=["adapter", "fits", "device GiB", "host GiB", "tokens/s", "hours"],
            interactive=False, wrap=True, elem_id="fits", label="Estimate",
        )  # fmt: skip

        def remembered() -> str:
            return kept.read_text(encoding="utf-8") if kept.is_file() else ""

        def measured() -> str:
            found = self._now(module="castor.recipes.studio_machine").strip()
            kept.write_text(found, encoding="utf-8")
            return found

        def estimated(model: str, sequence: int, batch: int, tokens: int, options: str) -> Any:
            if not model or not options:
                raise UsageError("choose a model, and measure this machine or name a preset")
            rows = []
            shared = [*shlex.split(options), "--seq", str(sequence), "--batch", str(batch)]
            for name, more in (("full", []), ("lora", ["--lora", "8"]), ("qlora", ["--qlora"])):
                found = json.loads(self._now("estimate", model, *shared, *more, "--json"))
                rate = found["tokens_per_s"] if found["fits"] else None
                rows.append(
                    [
                        name,
                        "yes" if found["fits"] else "no",
                        f"{found['device_bytes'] / 2**30:.2f}",
                        f"{found['host_bytes'] / 2**30:.2f}",
                        f"{rate:,.0f}" if rate else "",
                        f"{tokens / rate / 3600:,.2f}" if rate else "",
                    ]
                )
                yield rows

        inputs = [model, sequence, batch, tokens, options]
        self._on(fits.click, estimated, inputs, table, show_progress="minimal")
        self._on(measure.click, measured, None, options, show_progress="minimal")
        self._on(self.blocks.load, remembered, None, options)

    def _recipe(self) -> None:
        with gr.Accordion("New recipe"):
            with gr.Row():
                method = gr.Dropdown(list(get_args(Method)), value="sft", label="Method")
                model = self._choice("Model", self._models, elem_id="new-model")
                data = self._choice("Data", self._data_files)
                name = gr.Textbox("sft", label="Name")
            [create] = _buttons("Create (castor init)")
        chosen = self._choice("Recipe", self._recipe_files, elem_id="recipe-file")
        text = gr.Code(language="yaml", label="Recipe", lines=16, max_lines=30, elem_id="recipe")
        plan, show, save = _buttons(
            "Plan (castor train --dry-run)", "Show rows (castor data show)", "Save"
        )
        self._log("recipe-output", chosen, "show", "plan")

        def created(method: str, model: str, data: str, name: str) -> Any:
            path = self._place.path("recipes", name, ".yaml")
            if path.exists():
                raise UsageError(f"there is a recipe {name} already; give another name")
            if not model or not data:
                raise UsageError("choose a model, and upload data in the tab Data")
            made = self._now("init", method, "--model", model, "--data", data)
            made = re.sub(r"(?m)^  dir: .*$", f"  dir: runs/{name}", made)
            path.write_text(made, encoding="utf-8")
            return gr.update(choices=self._recipe_files(), value=f"recipes/{path.name}")

        def read(recipe: str | None) -> str:
            return self._recipe_file(recipe).read_text(encoding="utf-8") if recipe else ""

        def saved(recipe: str, text: str) -> None:
            self._recipe_file(recipe).write_text(text, encoding="utf-8")

        def shown(recipe: str, text: str) -> None:
            saved(recipe, text)
            command = ["data", "show", recipe]
            self._place.start("show", recipe, command, environment=_COLOURS | _QUIET)

        def planned(recipe: str, text: str) -> None:
            saved(recipe, text)
            self._place.start("plan", recipe, ["train", recipe, "--dry-run"], environment=_QUIET)

        self._on(create.click, created, [method, model, data, name], chosen)
        self._on(chosen.change, read, chosen, text)
        for button, do in ((save, saved), (show, shown), (plan, planned)):
            self._on(button.click, do, [chosen, text], None)

    def _train(self) -> None:
        recipe = self._choice("Recipe", self._recipe_files, elem_id="train-recipe")
        start, stop = _buttons("Start or resume (castor train)", "Stop (saves a checkpoint)")
        state, plots = gr.Markdown(elem_id="train-state"), []
        with gr.Row():
            for title, series, unit in CURVES:
                colour = {"color": "series", "color_title": " "} if len(series) > 1 else {}
                limits = [0, None] if unit > 1 else None
                plots.append(
                    gr.LinePlot(
                        x="step", y="value", title=title, y_title=" ", height=220, y_lim=limits,
                        min_width=300, visible=False, **colour,
                    )
                )  # fmt: skip
        log, seen = gr.HTML(elem_classes="castor-log", elem_id="train-log"), gr.State("")

        def started(recipe: str) -> None:
            self._recipe_file(recipe)
            run = self._place.run_of(recipe).resolve()
            for job in self._place.jobs("train"):
                if job.running and self._place.run_of(job.subject).resolve() == run:
                    raise UsageError(f"{run} is being trained already; stop it first")
            self._place.start("train", recipe, ["train", recipe])

        def refreshed(recipe: str | None, seen: str) -> Any:
            if not recipe:
                return [gr.skip()] * (3 + len(plots))
            job = next(iter(self._place.jobs("train", recipe)), None)
            found, said = entries(self._place.run_of(recipe)), job.log() if job else ""
            now = f"{recipe} {len(found)} {hash(said)} {job.state() if job else ''}"
            if now == seen:
                return [gr.skip()] * (3 + len(plots))
            curves = [frame(found, series, unit) for _, series, unit in CURVES]
            # Vega warns of plots without points.
            updates = [gr.update(value=one, visible=len(one) > 0) for one in curves]
            shown = as_html(said, job.command, at_end=True) if job else ""
            return [progress(job, found), *updates, shown, now]

        self._on(start.click, started, recipe, None)
        self._on(stop.click, self._stop("train"), recipe, None)
        for event in (recipe.change, self._timer.tick):
            self._on(event, refreshed, [recipe, seen], [state, *plots, log, seen])

    def _chat(self) -> None:
        model, options = self._about("chat", "serve")
        talk = gr.Chatbot(label="Conversation", height=360, buttons=["copy"], elem_id="talk")
        asked = gr.Textbox(label="Message", lines=2, submit_btn=True, elem_id="message")
        anew, free = _buttons("New conversation", "Stop the server")

        def file_of(model: str) -> Path:
            return self._place.root / "chats" / (re.sub(r"\W", "_", model)[-80:] + ".json")

        def kept(model: str | None) -> list[dict[str, str]]:
            file = file_of(model) if model else None
            return json.loads(file.read_text("utf-8")) if file and file.is_file() else []

        def answered(model: str, options: str, text: str) -> Iterator[Any]:
            if not model or not text.strip():
                raise UsageError("choose a run or a model, and write a message")
            messages = [*kept(model), {"role": "user", "content": text}]
            said = "(the model is loaded)"
            yield [*messages, {"role": "assistant", "content": said}], ""
            for said in answers(self._server(model, options), messages):
                yield [*messages, {"role": "assistant", "content": said}], ""
            messages.append({"role": "assistant", "content": said})
            file_of(model).write_text(json.dumps(messages), encoding="utf-8")

        def forgotten(model: str) -> list[Any]:
            file_of(model).unlink(missing_ok=True)
            return []

        self._on(model.change, kept, model, talk)
        self._on(asked.submit, answered, [model, options, asked], [talk, asked])
        self._on(anew.click, forgotten, model, talk)
        self._on(free.click, self._stop("serve"), model, None)

    def _server(self, model: str, options: str) -> str:
        """Returns the address of a server of a model, which is started where none runs."""
        for job in self._place.jobs("serve", model):
            found = _ADDRESS.search(job.log())
            if job.running and found:
                return found[1]
        job = self._begin("serve", model, "--port", "0", options=options, environment=_QUIET)
        while job.running:
            found = _ADDRESS.search(job.log())
            if found:
                return found[1]
            time.sleep(_POLL_SECONDS)
        raise UsageError(f"castor serve ended: {(job.log().strip() or job.state())[-600:]}")

    def _compare(self) -> None:
        with gr.Row():
            before = self._choice("Before", self._models)
            after = self._choice("After", self._runs_and_models)
        prompt = gr.Textbox(label="Message", max_lines=1, elem_id="prompt")
        with gr.Row():
            most = gr.Number(
                128, label="Most tokens of an answer", precision=0, minimum=1, min_width=280
            )
            options = gr.Textbox(label="Options of castor chat", min_width=280)
        [ask] = _buttons("Compare (castor chat, greedy)")
        with gr.Row():
            for name, chosen in (("answer-before", before), ("answer-after", after)):
                self._log(name, chosen, "chat")

        def compared(before: str, after: str, prompt: str, most: int, options: str) -> None:
            if not (before and after and prompt.strip()):
                raise UsageError("choose two models, and write a message")
            for model in (before, after):  # one after the other: a device holds one of them
                limits = ["--temperature", "0", "--max-new-tokens", str(most)]
                more = {"text": f"{prompt}\n", "environment": _QUIET}
                self._finish(self._begin("chat", model, *limits, options=options, **more))

        self._on(after.change, self._options, after, options)
        self._on(ask.click, compared, [before, after, prompt, most, options], None)

    def _evaluate(self) -> None:
        model, options = self._about("evaluate", "evaluate")
        with gr.Row():
            tasks = gr.Textbox(label="Tasks, separated by commas", elem_id="tasks")
            name = gr.Textbox("evaluation", label="Name of the result")
        [start] = _buttons("Evaluate (castor evaluate)")
        self._log("evaluate-output", model, "evaluate")
        table = gr.Dataframe(interactive=False, wrap=True, label="All evaluations")

        def evaluated(model: str, tasks: str, name: str, options: str) -> Any:
            to = self._place.path("evaluations", name, ".json").relative_to(self._place.root)
            given = ("--tasks", tasks, "--output", str(to))
            self._finish(self._begin("evaluate", model, *given, options=options))
            return tabled()

        def tabled() -> pd.DataFrame:
            return evaluations(self._place.root / "evaluations")

        self._on(start.click, evaluated, [model, tasks, name, options], table)
        self._on(self.blocks.load, tabled, None, table)

    def _export(self) -> None:
        model = self._choice("Run or model", self._runs_and_models)
        with gr.Row():
            to = gr.Textbox("exports/model", label="Folder or file to write")
            kind = gr.Radio(["safetensors", "gguf"], value="safetensors", label="Format")
            merge = gr.Checkbox(label="Merge the adapters into the weights")
        [start] = _buttons("Export (castor export)")
        self._log("export-output", model, "export")

        def exported(model: str, to: str, kind: str, merge: bool) -> None:
            merging = ["--merge-adapter"] if merge else []
            self._begin("export", model, to, "--format", kind, *merging)

        self._on(start.click, exported, [model, to, kind, merge], None)

    def _deploy(self) -> None:
        model, options = self._about("deploy", "serve")
        with gr.Row():
            port = gr.Number(8000, label="Port", precision=0, minimum=0, maximum=65535)
            key = gr.Textbox(label="API key that clients must show", type="password")
        start, stop = _buttons("Deploy (castor serve)", "Stop")
        self._log("deploy-output", model, "serve")

        def deployed(model: str, port: int, key: str, options: str) -> None:
            environment = _QUIET | ({"CASTOR_API_KEY": key} if key else {})
            given = ("--port", str(port))
            self._begin("serve", model, *given, options=options, environment=environment)

        self._on(start.click, deployed, [model, port, key, options], None)
        self._on(stop.click, self._stop("serve"), model, None)

    def _commands(self) -> None:
        gr.Markdown("Everything that was started here, also by an earlier page.")
        chosen = self._choice("Command", lambda: [described(one) for one in self._place.jobs()])
        [stop] = _buttons("Stop")
        self._log_where("command-output", chosen, lambda job, number: job.folder.name == number)

        def stopped(number: str | None) -> None:
            for job in self._place.jobs():
                if job.folder.name == number:
                    job.stop()

        self._on(stop.click, stopped, chosen, None)
