#!/usr/bin/env bash
# Makes sure that the Debian packages castor builds with are installed.
# Root: installs what is missing. Anyone else: prints the one command that would, and exits 1.
# Usage: setup_system.sh [PACKAGE...]: more packages than those to build with.
# CASTOR_SKIP_SYSTEM=1 trusts the machine as it is (another distribution, a container image).
set -euo pipefail

packages=(
  build-essential ca-certificates ccache clang clang-format cmake dpkg-dev git gpgv libgtest-dev
  libhwloc-dev libtbb-dev liburing-dev libxxhash-dev ninja-build pkg-config python3-dev python3-venv
  "$@"
)

if [[ ${CASTOR_SKIP_SYSTEM:-0} == 1 ]]; then
  echo "system packages: not checked (CASTOR_SKIP_SYSTEM=1)"
  exit 0
fi
if ! command -v dpkg-query >/dev/null; then
  echo "This is not a Debian system. Install the equivalents of these packages, then set" >&2
  echo "CASTOR_SKIP_SYSTEM=1: ${packages[*]}" >&2
  exit 1
fi

missing=()
for package in "${packages[@]}"; do
  status=$(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null || true)
  [[ $status == installed ]] || missing+=("$package")
done
if [[ ${#missing[@]} -eq 0 ]]; then
  echo "system packages: all ${#packages[@]} present"
  exit 0
fi
if [[ $(id -u) -ne 0 ]]; then
  echo "Missing Debian packages. Install them and run make again:" >&2
  echo "  sudo apt-get install ${missing[*]}" >&2
  exit 1
fi
echo "system packages: installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update --quiet=2
apt-get install --quiet=2 --yes --no-install-recommends "${missing[@]}"
