#!/usr/bin/env bash
# Builds the static, position-independent jemalloc 5.3 that castor's host tier links.
#
#   scripts/build_jemalloc.sh [PREFIX]        (default PREFIX: build/jemalloc in this repository)
#
# Debian's own libjemalloc, shared or pic, cannot be loaded into Python ("cannot allocate memory in
# static TLS block"). Its source package, built without initial-exec TLS, can. apt fetches the
# source and checks its signatures; it does so with lists and caches of its own in a temporary
# directory, so the machine's apt configuration is read but never changed, and root is not needed.
#
# Does nothing when PREFIX already holds the library. JOBS sets the make jobs (default 2).
# Exit codes, so that a caller can fall back to the mmap arena:
#   0 built, or already there      3 a package is missing (named on stderr)
#   2 wrong usage                  4 the source could not be fetched or verified
#                                  5 configure, make or the check of the result failed
set -euo pipefail

readonly EXIT_USAGE=2 EXIT_PACKAGE=3 EXIT_FETCH=4 EXIT_BUILD=5

say() { printf 'build_jemalloc: %s\n' "$*" >&2; }
fail() {
  local -r code=$1
  shift
  say "$*"
  exit "$code"
}

if (($# > 1)) || [[ ${1:-} == -* ]]; then
  fail $EXIT_USAGE "usage: $0 [PREFIX]"
fi
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
prefix=$(realpath -m -- "${1:-$repository/build/jemalloc}")
jobs=${JOBS:-2}

installed() { [[ -f $prefix/lib/libjemalloc_pic.a && -f $prefix/include/jemalloc/jemalloc.h ]]; }

if installed; then
  say "already built in $prefix"
  exit 0
fi

# --- what the build needs -------------------------------------------------------------------------
missing=()
need() { command -v "$1" >/dev/null || missing+=("$2"); }
need apt-get apt
need dpkg-source dpkg-dev
need make build-essential
need cc build-essential
need gpgv gpgv
if ((${#missing[@]})); then
  packages=$(printf '%s\n' "${missing[@]}" | sort -u | paste -sd' ')
  fail $EXIT_PACKAGE "missing packages: $packages (as root: apt-get install $packages)"
fi

# --- where the source is: the machine's own archive, else the distribution's ------------------------
# shellcheck source=/dev/null
. /etc/os-release
codename=${VERSION_CODENAME:-}
case ${ID:-} in
  debian) component=main default_uri=http://deb.debian.org/debian ;;
  ubuntu) component=universe default_uri=http://archive.ubuntu.com/ubuntu ;;
  *) fail $EXIT_FETCH "the source package comes from Debian or Ubuntu, and this is ${ID:-unknown}" ;;
esac
keyring=/usr/share/keyrings/$ID-archive-keyring.gpg
[[ -f $keyring ]] || fail $EXIT_PACKAGE \
  "missing packages: $ID-archive-keyring or $ID-keyring ($keyring does not exist)"

# The format's words are apt's, not the shell's.
# shellcheck disable=SC2016
uri=$(apt-get indextargets --format '$(RELEASE) $(COMPONENT) $(REPO_URI)' 'Created-By: Packages' |
  awk -v release="$codename" -v component="$component" \
    '$1 == release && $2 == component { print $3; exit }')
uri=${uri:-$default_uri}

# --- a private apt ----------------------------------------------------------------------------------
work=$(mktemp -d "${TMPDIR:-/tmp}/castor-jemalloc.XXXXXX")
trap 'rm -rf -- "$work"' EXIT
chmod 755 "$work"
mkdir -p "$work"/{lists/partial,archives/partial,source}
echo "deb-src [signed-by=$keyring] $uri $codename $component" >"$work/sources.list"
if ((EUID == 0)) && id _apt >/dev/null 2>&1; then
  chown -R _apt "$work"/lists "$work"/archives "$work"/source  # apt downloads as this user
fi
apt=(apt-get -q
  -o Dir::Etc::SourceList="$work/sources.list"
  -o Dir::Etc::SourceParts=/dev/null
  -o Dir::State::Lists="$work/lists"
  -o Dir::Cache="$work"
  -o Dir::Cache::Archives="$work/archives"
  -o Acquire::AllowInsecureRepositories=false
  -o APT::Get::AllowUnauthenticated=false)

say "fetching the jemalloc source package of $codename from $uri"
cd "$work/source"
if ! { "${apt[@]}" -o APT::Update::Error-Mode=any update &&
  "${apt[@]}" source --only-source jemalloc; } >"$work/apt.log" 2>&1; then
  cat "$work/apt.log" >&2
  fail $EXIT_FETCH "the source package could not be fetched from $uri, or was not verified"
fi
cd "$work"/source/jemalloc-*/

# --- build --------------------------------------------------------------------------------------
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
    make install_lib_static install_include
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
