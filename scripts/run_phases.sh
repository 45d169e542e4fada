#!/usr/bin/env bash
# Runs make targets one after the other, and those joined by + at the same time; closes with the time each took.
# One that fails does not stop the ones after it, so that a run tells all there is to mend; the exit
# status is 1 if any failed. The last lines say what failed, for a reader who has only those: the tests that
# a target names as FAILED or in ERROR, or else its own last lines.
# Temporary files of a target are removed with its end, unless it failed. The free GiB beside its time are those
# of the working directory and, where that is another disk, of temporary files.
# Targets behind --skip-after SECONDS are skipped where the run has taken longer than that by then.
# Usage: run_phases.sh TARGET[+TARGET...]... [--skip-after SECONDS TARGET...]
set -uo pipefail

logs=build/phases
mkdir -p "$logs"
report=()
failed=()

free_gib() { df --output=avail --block-size=1G . "${TMPDIR:-/tmp}" | tail -n +2 | tr -d ' ' | uniq | paste -s -d/; }

run() { # prints a target's output and keeps it; writes its result, seconds and the free disk to a file
  local phase=$1 start=$SECONDS result=FAILED temporary
  temporary=$(mktemp -d)
  printf '\n==== %s\n' "$phase"
  TMPDIR=$temporary "${MAKE:-make}" --no-print-directory --keep-going "$phase" 2>&1 | tee "$logs/$phase.log" && result=ok
  [[ $result == FAILED ]] || rm -rf "$temporary"
  echo "$result $((SECONDS - start)) $(free_gib)" >"$logs/$phase.result"
}

limit=
while [[ $# -gt 0 ]]; do
  if [[ $1 == --skip-after ]]; then
    limit=$2
    shift 2
    continue
  fi
  group=$1
  shift
  if [[ -n $limit && $SECONDS -gt $limit ]]; then
    report+=("$(printf '%-12s skipped: %d s were over, of %d in which it may begin' "$group" "$SECONDS" "$limit")")
    continue
  fi
  IFS=+ read -ra phases <<<"$group"
  for phase in "${phases[@]}"; do
    run "$phase" &
  done
  wait
  for phase in "${phases[@]}"; do
    read -r result seconds free <"$logs/$phase.result"
    report+=("$(printf '%-12s %-6s %5d s %6s GiB free' "$phase" "$result" "$seconds" "$free")")
    [[ $result == ok ]] || failed+=("$phase")
  done
done

printf '\n==== phases\n'
printf '%s\n' "${report[@]}"
printf '%-12s %-6s %5d s\n' total "" "$SECONDS"
if [[ ${#failed[@]} -gt 0 ]]; then
  for phase in "${failed[@]}"; do
    printf '\n== %s\n' "$phase"
    { grep -E '^(FAILED|ERROR) |^\[  FAILED  \] [^ ]+$|(==ERROR|WARNING): [A-Za-z]+Sanitizer|: runtime error: |\(Failed\)$' "$logs/$phase.log" || tail -n 12 "$logs/$phase.log"; } | cut -c 1-400
  done
  echo "failed: ${failed[*]}"
  exit 1
fi
