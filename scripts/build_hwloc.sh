#!/usr/bin/env bash
# Builds the static, position-independent hwloc 2 that castor's wheels link.
#
#   scripts/build_hwloc.sh [PREFIX]           (default PREFIX: build/hwloc in this repository)
#
# Debian's shared libhwloc needs libudev, and at every start loads whatever plugins lie in the
# system's hwloc directory (PCI, OpenCL, X11), which in turn load the system's own libhwloc: a wheel
# that carried it would depend on the machine it lands on. castor asks for NUMA nodes and memory
# binding only; for that the core of hwloc is enough, without plugins.
#
# Does nothing when PREFIX already holds the library. JOBS sets the make jobs (default 2).
# Exit codes: see scripts/debian_source.sh.
set -euo pipefail

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/debian_source.sh
. "$repository/scripts/debian_source.sh"

if (($# > 1)) || [[ ${1:-} == -* ]]; then
  fail $EXIT_USAGE "usage: $0 [PREFIX]"
fi
prefix=$(realpath -m -- "${1:-$repository/build/hwloc}")
jobs=${JOBS:-2}

installed() {
  [[ -f $prefix/lib/libhwloc.a && -f $prefix/include/hwloc.h &&
    -f $prefix/share/licenses/hwloc.txt ]]
}

if installed; then
  say "already built in $prefix"
  exit 0
fi
require_build_tools
fetch_source hwloc

# castor._C is linked with --exclude-libs,ALL: its hwloc is never mixed up with another in the process.
say "building with $jobs jobs"
if ! {
  ./configure --prefix="$prefix" \
    --enable-static --disable-shared --with-pic --disable-plugins --disable-io --disable-pci \
    --disable-libudev --disable-libxml2 --disable-cairo --disable-opencl --disable-cuda \
    --disable-nvml --disable-rsmi --disable-levelzero --disable-gl --disable-doxygen \
    --disable-readme CFLAGS='-O2 -fvisibility=hidden' &&
    make -C hwloc -j"$jobs" && make -C include -j"$jobs" &&
    make -C hwloc install && make -C include install &&
    install -D --mode=644 COPYING "$prefix/share/licenses/hwloc.txt"
} >"$work/build.log" 2>&1; then
  tail -n 40 "$work/build.log" >&2
  fail $EXIT_BUILD "the build failed; its last lines are above"
fi
installed || fail $EXIT_BUILD "the build left no library in $prefix"
say "installed $prefix/lib/libhwloc.a"
