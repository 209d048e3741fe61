#!/bin/sh
# Installs what the build wants from the system, where that is allowed: a C++ compiler, Python's headers and venv,
# and liburing (without which the thread I/O engine serves). Says what is missing otherwise, and goes on.
#   usage: system_packages.sh [PACKAGE]    that one instead; the status is 2 if it cannot be installed
set -u

wanted=""
if [ $# != 0 ]; then
    wanted=" $*"
else
    command -v c++ >/dev/null 2>&1 || wanted="$wanted g++"
    command -v pkg-config >/dev/null 2>&1 || wanted="$wanted pkg-config"
    pkg-config --exists liburing 2>/dev/null || [ -n "${LIBURING_ROOT:-}" ] || wanted="$wanted liburing-dev"
    python3 -c 'import ensurepip' 2>/dev/null || wanted="$wanted python3-venv"
    python3 -c 'import os, sysconfig; open(os.path.join(sysconfig.get_path("include"), "Python.h"))' 2>/dev/null ||
        wanted="$wanted python3-dev"
fi
[ -n "$wanted" ] || exit 0

as_root=""
if [ "$(id -u)" != 0 ]; then
    if command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then as_root="sudo -n"; else as_root="refused"; fi
fi
if command -v apt-get >/dev/null 2>&1 && [ "$as_root" != refused ]; then
    export DEBIAN_FRONTEND=noninteractive
    apt() { $as_root apt-get -qq -o DPkg::Lock::Timeout=60 "$@"; } # another installation may be under way
    # shellcheck disable=SC2086
    apt update && apt install -y --no-install-recommends $wanted >/dev/null && exit 0
fi
if [ $# != 0 ]; then
    echo "Not installed (no permission, or no apt-get):$wanted. As root: apt install$wanted"
    exit 2
fi
echo "Not installed (no permission, or no apt-get):$wanted. Without liburing-dev the build goes on with the thread I/O engine."
