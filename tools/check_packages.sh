#!/bin/sh
# Builds the source distribution and, from it, the wheel; installs that in an environment of its own and trains with it, outside of the
# repository: pip installs a source distribution by the wheel that it builds of it. What the package depends on is borrowed from the project's environment: it is torch, mostly.
#   usage: check_packages.sh <environment of the project> <empty folder>
set -eu
environment=$(cd "$1" && pwd)
rm -rf "$2" && mkdir -p "$2"
place=$(cd "$2" && pwd)
tools=$(cd "$(dirname "$0")" && pwd)
export INFINITY_CUDA=0 PIP_DISABLE_PIP_VERSION_CHECK=1

"$environment/bin/python" setup.py -q egg_info --egg-base "$place" sdist --dist-dir "$place" > "$place/sdist.log" 2>&1
source_archive=$(ls "$place"/*.tar.gz)
for header in $(find csrc -name '*.h' -not -path 'csrc/tests/*'); do
    tar tzf "$source_archive" | grep -q "/$header\$" || { echo "the source distribution lacks $header"; exit 1; }
done
"$environment/bin/pip" wheel -q --no-deps --no-build-isolation --wheel-dir "$place" "$source_archive"
if { tar tzf "$source_archive"; "$environment/bin/python" -m zipfile -l "$place"/*.whl | sed 's,^,wheel/,'; } | grep '^[^/]*/bench/'; then
    echo "a package has the benchmarks of a checkout"; exit 1
fi

borrowed=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$environment/bin/python" "$tools/no_doubles.py" "$source_archive" "$place"/*.whl
# Built from the checkout itself, where the doubles' sources are, the wheel has none either.
"$environment/bin/pip" wheel -q --no-deps --no-build-isolation --wheel-dir "$place/direct" .
"$environment/bin/python" "$tools/no_doubles.py" "$place"/direct/*.whl
"$environment/bin/python" -m venv "$place/clean"
# Of Python 3.11 it has a setuptools that is older than the one that is borrowed.
"$place/clean/bin/pip" uninstall -q -y setuptools
clean=$("$place/clean/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$borrowed" > "$clean/borrowed.pth"
"$place/clean/bin/pip" install -q --no-deps --force-reinstall "$place"/*.whl
(cd "$place" && "$place/clean/bin/python" "$tools/first_step.py" "$clean")
"$place/clean/bin/infinity" --version
echo "$(basename "$source_archive") and its wheel install and train"
rm -rf "$place"
