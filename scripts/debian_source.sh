# Sourced by scripts/build_jemalloc.sh and scripts/build_hwloc.sh: fetches a Debian source package.
#
# apt fetches the source and checks its signatures; it does so with lists and caches of its own in a
# temporary directory, so the machine's apt configuration is read but never changed, and root is not
# needed.
#
# Exit codes of the scripts that source this, so that a caller can fall back:
#   0 built, or already there      3 a package is missing (named on stderr)
#   2 wrong usage                  4 the source could not be fetched or verified
#                                  5 configure, make or the check of the result failed
# shellcheck shell=bash

readonly EXIT_USAGE=2 EXIT_PACKAGE=3 EXIT_FETCH=4 EXIT_BUILD=5

say() { printf '%s: %s\n' "$(basename "$0" .sh)" "$*" >&2; }
fail() {
  local -r code=$1
  shift
  say "$*"
  exit "$code"
}

# Names the Debian packages of the tools that fetching and building need, if any is missing.
require_build_tools() {
  local missing=() tool package
  while read -r tool package; do
    command -v "$tool" >/dev/null || missing+=("$package")
  done <<'TOOLS'
apt-get apt
dpkg-source dpkg-dev
make build-essential
cc build-essential
gpgv gpgv
TOOLS
  if ((${#missing[@]})); then
    local packages
    packages=$(printf '%s\n' "${missing[@]}" | sort -u | paste -sd' ')
    fail $EXIT_PACKAGE "missing packages: $packages (as root: apt-get install $packages)"
  fi
}

# fetch_source PACKAGE: makes a temporary directory, removed on exit, names it in $work, fetches
# PACKAGE there and changes into the unpacked source. Sets $codename to the distribution's.
fetch_source() {
  local -r package=$1
  local component default_uri keyring uri
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

  # Where the source is: the machine's own archive, else the distribution's.
  # The format's words are apt's, not the shell's.
  # shellcheck disable=SC2016
  uri=$(apt-get indextargets --format '$(RELEASE) $(COMPONENT) $(REPO_URI)' 'Created-By: Packages' |
    awk -v release="$codename" -v component="$component" \
      '$1 == release && $2 == component { print $3; exit }')
  uri=${uri:-$default_uri}

  work=$(mktemp -d "${TMPDIR:-/tmp}/castor-$package.XXXXXX")
  trap 'rm -rf -- "$work"' EXIT
  chmod 755 "$work"
  mkdir -p "$work"/{lists/partial,archives/partial,source}
  echo "deb-src [signed-by=$keyring] $uri $codename $component" >"$work/sources.list"
  if ((EUID == 0)) && id _apt >/dev/null 2>&1; then
    chown -R _apt "$work"/lists "$work"/archives "$work"/source  # apt downloads as this user
  fi
  local -r apt=(apt-get -q
    -o Dir::Etc::SourceList="$work/sources.list"
    -o Dir::Etc::SourceParts=/dev/null
    -o Dir::State::Lists="$work/lists"
    -o Dir::Cache="$work"
    -o Dir::Cache::Archives="$work/archives"
    -o Acquire::AllowInsecureRepositories=false
    -o APT::Get::AllowUnauthenticated=false)

  say "fetching the $package source package of $codename from $uri"
  cd "$work/source"
  if ! { "${apt[@]}" -o APT::Update::Error-Mode=any update &&
    "${apt[@]}" source --only-source "$package"; } >"$work/apt.log" 2>&1; then
    cat "$work/apt.log" >&2
    fail $EXIT_FETCH "the source package could not be fetched from $uri, or was not verified"
  fi
  cd "$work/source/$package"-*/
}
