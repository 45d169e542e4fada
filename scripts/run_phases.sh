#!/usr/bin/env bash
# Runs make targets one after the other and closes with the time each took.
# One that fails does not stop the ones after it, so that a run tells all there is to mend; the exit
# status is 1 if any failed.
# Usage: run_phases.sh TARGET...
set -uo pipefail

report=()
failed=()
for phase in "$@"; do
  printf '\n==== %s\n' "$phase"
  start=$SECONDS
  if "${MAKE:-make}" --no-print-directory --keep-going "$phase"; then
    result=ok
  else
    result=FAILED
    failed+=("$phase")
  fi
  report+=("$(printf '%-10s %-6s %5d s' "$phase" "$result" $((SECONDS - start)))")
done

printf '\n==== phases\n'
printf '%s\n' "${report[@]}"
printf '%-10s %-6s %5d s\n' total "" "$SECONDS"
if [[ ${#failed[@]} -gt 0 ]]; then
  echo "failed: ${failed[*]}"
  exit 1
fi
