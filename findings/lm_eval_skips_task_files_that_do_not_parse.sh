#!/usr/bin/env bash
# Guess: a folder of tasks (--include_path) with a YAML file that does not parse is an error that names the file.
# What happens: the file is left out, and nothing is printed. Asked for by its name, the task is no registered one. The
# reason is in the log at the level DEBUG alone.
# Seen with lm-eval 0.4.13 (Linux, Python 3.11) on 2026-11-29. Downloads 300 MB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet lm-eval==0.4.13
mkdir tasks
cat >tasks/sound.yaml <<'YAML'
task: sound
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_choice: ["yes", "no"]
doc_to_target: answer
YAML
# The same with a bracket that is never closed.
sed 's/^task: sound/task: unsound/; s/"no"\]/"no"/' tasks/sound.yaml >tasks/unsound.yaml
cat >skips.py <<'PY'
import contextlib
import importlib.metadata
import io
import sys

print("lm-eval", importlib.metadata.version("lm_eval"))
out, err = io.StringIO(), io.StringIO()
with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path="tasks", include_defaults=False)
print("tasks:", manager.all_tasks, "printed:", repr(out.getvalue() + err.getvalue()))
try:
    manager.load(["unsound"])
    raised = "nothing"
except Exception as error:
    raised = f"{type(error).__name__}: {error}"
print("asked for it:", raised.splitlines()[0][:200])
named = "unsound.yaml" in raised + out.getvalue() + err.getvalue()
print("the file is named:", named)
sys.exit(0 if manager.all_tasks == ["sound"] and not named else 1)
PY
env/bin/python skips.py
