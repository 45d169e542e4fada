#!/usr/bin/env bash
# Guess: a rule that says "use get() instead of an if block" leaves the method get() of a mapping alone, or its fix keeps
# what the code does.
# What happens: in a subclass of dict whose get() is to go through its own __getitem__, SIM401 reports the line in get(),
# and `--fix --unsafe-fixes` makes it `return self.get(name, default)`: the method calls itself. The fixed file is clean,
# and every get() ends in a RecursionError.
# Seen with ruff 0.17.6 (Linux, Python 3.11) on 2026-11-30.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet ruff==0.17.6
cat >lazy.py <<'PY'
class Lazy(dict):
    """Values that are made when they are read."""

    def __getitem__(self, name):
        return super().__getitem__(name)()

    def get(self, name, default=None):
        return self[name] if name in self else default
PY
cat >read.py <<'PY'
from lazy import Lazy

try:
    print("value:", Lazy(one=lambda: 1).get("one"))
except RecursionError:
    print("RecursionError")
PY
env/bin/ruff --version
python3 --version
before=$(env/bin/python read.py)
env/bin/ruff check --isolated --quiet --select SIM401 lazy.py || true
env/bin/ruff check --isolated --quiet --select SIM401 --fix --unsafe-fixes lazy.py
tail -n 2 lazy.py
after=$(env/bin/python read.py)
echo "before the fix: $before; after it: $after"
[[ $before == "value: 1" && $after == "RecursionError" ]]
