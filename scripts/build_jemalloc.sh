#!/usr/bin/env bash
# Builds the static, position-independent jemalloc 5.3 that castor's host tier links.
#
#   scripts/build_jemalloc.sh [PREFIX]        (default PREFIX: build/jemalloc in this repository)
#
# Debian's own libjemalloc, shared or pic, cannot be loaded into Python ("cannot allocate memory in
# static TLS block"). Its source package, built without initial-exec TLS, can.
#
# Does nothing when PREFIX already holds the library. JOBS sets the make jobs (default 2).
# Exit codes: see scripts/debian_source.sh. After any but 0 a caller can fall back to the mmap arena.
set -euo pipefail

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/debian_source.sh
. "$repository/scripts/debian_source.sh"

if (($# > 1)) || [[ ${1:-} == -* ]]; then
  fail $EXIT_USAGE "usage: $0 [PREFIX]"
fi
prefix=$(realpath -m -- "${1:-$repository/build/jemalloc}")
jobs=${JOBS:-2}

installed() {
  [[ -f $prefix/lib/libjemalloc_pic.a && -f $prefix/include/jemalloc/jemalloc.h &&
    -f $prefix/share/licenses/jemalloc.txt ]]
}

if installed; then
  say "already built in $prefix"
  exit 0
fi
require_build_tools
fetch_source jemalloc

# No cache-oblivious padding: a block takes whole pages and not one more. Hidden, privately named
# symbols: another jemalloc in the same process is never mixed up with this one. Run-time options are
# set where they are relied on, in csrc/host/jemalloc_arena.cc.
say "building with $jobs jobs"
if ! {
  ./configure --prefix="$prefix" \
    --enable-static --disable-shared --disable-cxx --disable-doc \
    --disable-initial-exec-tls --disable-cache-oblivious --without-export \
    --with-jemalloc-prefix=je_ --with-private-namespace=castor_je_ \
    CFLAGS='-O2 -fPIC -fvisibility=hidden' &&
    make -j"$jobs" build_lib_static &&
    make install_lib_static install_include &&
    install -D --mode=644 COPYING "$prefix/share/licenses/jemalloc.txt"
} >"$work/build.log" 2>&1; then
  tail -n 40 "$work/build.log" >&2
  fail $EXIT_BUILD "the build failed; its last lines are above"
fi
installed || fail $EXIT_BUILD "the build left no library in $prefix"
version=$(sed -n 's/^#define JEMALLOC_VERSION "\(.*\)"$/\1/p' "$prefix/include/jemalloc/jemalloc.h")
if [[ $version != 5.3.* ]]; then
  rm -f "$prefix"/lib/libjemalloc*.a
  fail $EXIT_BUILD "$codename has jemalloc $version; castor is tested with 5.3 only"
fi
say "installed $prefix/lib/libjemalloc_pic.a"
