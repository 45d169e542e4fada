#!/usr/bin/env bash
# Runs tests of tests/python against a castor that was compiled with a sanitizer, and fails if one
# fails or the sanitizer has reported anything, in whatever process.
# Usage: sanitized_pytest.sh address|thread BUILD PYTHON ARGUMENT...
#   BUILD: a build directory with CASTOR_SANITIZE, installed into BUILD/site
set -euo pipefail

kind=$1 build=$(realpath "$2") python=$3
shift 3
reports=$build/reports
rm -rf "$reports"
mkdir -p "$reports"

# python itself is not instrumented: the sanitizer has to be there before anything else, and with it
# libstdc++, whose exceptions it follows.
library() { "${CXX:-g++}" -print-file-name="$1"; }
layout=()
case $kind in
  address)
    preloaded=$(library libasan.so):$(library libubsan.so):$(library libstdc++.so.6)
    # Objects of Python on the heap of the sanitizer as well, to see them used after their end.
    # detect_leaks: Python leaves much to the end of the process.
    export PYTHONMALLOC=malloc
    export ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=1:allocator_may_return_null=1:log_path=$reports/asan
    export UBSAN_OPTIONS=print_stacktrace=1:log_path=$reports/ubsan
    ;;
  thread)
    preloaded=$(library libtsan.so):$(library libstdc++.so.6)
    # ignore_interceptors_accesses: torch and Python are not instrumented. Of what they do TSan sees their
    # locks, which it has to, and calls of memcpy, free and the like, but not the atomics that order
    # those. die_after_fork: a data loader's worker may start threads.
    export TSAN_OPTIONS=ignore_interceptors_accesses=1:die_after_fork=0:second_deadlock_stack=1:history_size=4:suppressions=$(realpath "${BASH_SOURCE[0]%/*}")/tsan_suppressions.txt:log_path=$reports/tsan
    # As in the Makefile's target tsan.
    if setarch -R true 2>/dev/null; then layout=(setarch -R); fi
    ;;
  *)
    echo "sanitized_pytest.sh: '$kind' is neither address nor thread" >&2
    exit 2
    ;;
esac

export CASTOR_TEST_BUILD=$build
export CASTOR_REQUIRE_SIMULATED_DEVICE=1
export PYTHONPATH=$build/site
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-1000}

status=0
"${layout[@]}" env LD_PRELOAD="$preloaded" "$python" -m pytest -p no:cacheprovider "$@" || status=$?

shopt -s nullglob
found=("$reports"/*)
if [[ ${#found[@]} -gt 0 ]]; then
  head -n 200 "${found[@]}" >&2
  echo "sanitized_pytest.sh: ${#found[@]} processes with reports, in $reports" >&2
  status=1
fi
exit "$status"
