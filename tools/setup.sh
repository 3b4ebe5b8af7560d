#!/bin/sh
# setup.sh GROUP...: installs the packages of tools/packages.txt that these groups need and that are missing. Says what it
# installs and why before it does; touches nothing, and needs neither root nor a network, when nothing is missing.
set -eu
cd "$(dirname "$0")/.."
say() { echo "setup: $*" >&2; }

missing=""
for group in "$@"; do
    for package in $(awk -v group="$group" '$1 !~ /^#/ && $2 == group { print $1 }' tools/packages.txt); do
        status=$(dpkg-query -W -f '${db:Status-Abbrev}' "$package" 2>/dev/null || true)
        case "$status" in ii*) ;; *) missing="$missing $package" ;; esac
    done
done
[ -n "$missing" ] || exit 0

if ! command -v apt-get >/dev/null; then
    say "this is no Debian or Ubuntu; install what these packages hold by your system's means:$missing"
    say "then build with: cmake -S . -B build -G Ninja && ninja -C build"
    exit 1
fi

say "these packages are missing and will be installed with apt-get:"
for package in $missing; do
    awk -v p="$package" '$1 == p { $1 = ""; $2 = ""; sub(/^ +/, ""); printf "setup:   %-24s %s\n", p, $0 }' tools/packages.txt >&2
done

root=""
if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || { say "run this as root, or install sudo"; exit 1; }
    root="sudo"
fi
apt() { $root env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 "$@" >&2; }

case "$missing" in *:arm64*)
    if ! dpkg --print-foreign-architectures | grep -qx arm64; then
        say "adding the architecture arm64 to dpkg, for libraries to link against"
        $root dpkg --add-architecture arm64
    fi ;;
esac
apt update || say "the package lists could not be brought up to date; trying with those here"
if ! apt install -y --no-install-recommends $missing; then
    say "apt-get could not install:$missing"
    say "without a network, install them by hand and call make again"
    exit 1
fi
