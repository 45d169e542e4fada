#!/usr/bin/env bash
# Guess: a test that compares two files as bytes (`assert one == other`, the way byte-for-byte formats are tested)
# fails as quickly in CI as at a desk.
# What happens: pytest shows "Use -v to get more diff" at a desk. Where the variable CI is set it takes that as -v,
# breaks both values into lines and runs difflib's ndiff over them. Its time grows with the square of the length or
# faster: 4,000 random bytes take seconds, a checkpoint of some hundred kilobytes takes many minutes, in which CI
# looks as if it hung. A pytest_assertrepr_compare hook that answers for bytes avoids it.
# Seen with pytest 9.2.0 on 2026-11-28.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet pytest==9.2.0
cat >test_files.py <<'PY'
import random

def test_files():
    draw = random.Random(0)
    assert draw.randbytes(4_000) == draw.randbytes(4_000)
PY
seconds() { # of a run with the variables that are given
    local start
    start=$(date +%s%N)
    env -u CI -u BUILD_NUMBER "$@" env/bin/python -m pytest -q -p no:cacheprovider test_files.py >out.txt && exit 1
    echo $((($(date +%s%N) - start) / 1000000))
}
env/bin/python -m pytest --version
desk=$(seconds PYTEST_DISABLE_PLUGIN_AUTOLOAD=1)
grep -q 'Use -v to get more diff' out.txt
ci=$(seconds PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 CI=true)
grep -q 'Full diff' out.txt
echo "a failed comparison of 4,000 bytes: $desk ms at a desk, $ci ms with CI=true"
((ci > 4 * desk)) || { echo "it is no longer slower with CI=true" >&2; exit 1; }
