#!/usr/bin/env bash
# Guess: --use_cache keeps a model's answers apart from another model's. The README says that it skips what was evaluated
# in runs of the same (model, task) pairs, so one path serves all of a sweep's checkpoints.
# What happens: the key of an answer is the request's text and arguments. Neither the model nor its path is in it or in
# the file. The second model is never asked, and its table shows the first one's scores under its own name: each
# checkpoint of a run scores what the first did, to the last digit. Nothing is said. A path for each model avoids it.
# Seen with lm-eval 0.4.13 (Linux, Python 3.11) on 2026-11-30. Downloads 300 MB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet lm-eval==0.4.13 datasets==5.2.0 numpy==2.4.6
mkdir tasks
cat >tasks/parity.yaml <<'YAML'
task: parity
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
output_type: multiple_choice
test_split: test
doc_to_text: "Is {{number}} even?"
doc_to_choice: ["yes", "no"]
doc_to_target: answer
metric_list: [{metric: acc}]
YAML
for number in 1 2 3 4; do
    echo "{\"number\": $number, \"answer\": $((number % 2))}" >>rows.jsonl
done
cat >cached.py <<'PY'
import importlib.metadata

from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

print("lm-eval", importlib.metadata.version("lm_eval"), flush=True)


class Parity(LM):
    """A model that knows which numbers are even."""

    def __init__(self):
        super().__init__()
        self.asked = 0

    def choose(self, number):
        return "no" if number % 2 else "yes"

    def loglikelihood(self, requests):
        self.asked += len(requests)
        found = []
        for request in requests:
            question, answer = request.args
            right = answer.strip() == self.choose(int(question.split()[1]))
            found.append((-0.1 if right else -5.0, right))
        return found

    def loglikelihood_rolling(self, requests):
        raise NotImplementedError

    def generate_until(self, requests):
        raise NotImplementedError


class Wrong(Parity):
    """Another model: its answers are all wrong."""

    def choose(self, number):
        return "yes" if number % 2 else "no"


manager = TaskManager(include_path="tasks", include_defaults=False)
for name, model, path in (
    ("right, a path of its own", Parity(), "first"),
    ("wrong, a path of its own", Wrong(), "second"),
    ("wrong, the path of the right one", Wrong(), "first"),
):
    results = simple_evaluate(model, tasks=["parity"], task_manager=manager, use_cache=path, bootstrap_iters=0)
    accuracy = results["results"]["parity"]["acc,none"]
    print(f"{name}: accuracy {accuracy:.2f}, asked {model.asked} times", flush=True)
PY
HF_HOME=$folder/home env/bin/python cached.py 2>errors.txt | tee out.txt || { cat errors.txt; exit 1; }
grep -qx "right, a path of its own: accuracy 1.00, asked 8 times" out.txt
grep -qx "wrong, a path of its own: accuracy 0.00, asked 8 times" out.txt
grep -qx "wrong, the path of the right one: accuracy 1.00, asked 0 times" out.txt
