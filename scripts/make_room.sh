#!/usr/bin/env bash
# Makes room on the disk of the working directory: removes the directories named, in that order, until so many
# GiB are free. Says what it removed; nothing is removed where the room is there. What is missing afterwards is
# left to the command that needs it, whose error names its path.
# Usage: make_room.sh GIB DIRECTORY...
set -euo pipefail

free_gib() { df --output=avail --block-size=1G . | tail -n 1 | tr -d ' '; }

wanted=$1
shift
for directory in "$@"; do
  [[ $(free_gib) -lt $wanted ]] || break
  [[ -d $directory ]] || continue
  echo "make_room: $(free_gib) GiB free, $wanted wanted: removing $directory"
  rm -rf "$directory"
done
echo "make_room: $(free_gib) GiB free"
