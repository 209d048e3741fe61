"""The build: what is compiled, and when; what the packages say of themselves.

Compilers of these tests only write down what they were asked to compile.
"""

from __future__ import annotations

import os
import runpy
import tomllib
import warnings
from pathlib import Path
from unittest import mock

import pybind11
import pytest
from pybind11.setup_helpers import Pybind11Extension
from setuptools import Distribution
from setuptools.config.pyprojecttoml import apply_configuration

from infinity import native

ROOT = Path(__file__).parents[2]
SOURCES = ("csrc/a/kernel.cpp", "csrc/a/bindings.cpp", "csrc/a/step.cu")
COMPILER = """#!/bin/sh
for word in "$@"; do
    case "$word" in -DINFINITY_UNIT=k*) echo "${word#*=k}" >> "$UNITS" ;; esac
    case "$before" in -MF) depfile=$word ;; -o) out=$word ;; -c) source=$word ;; esac
    before=$word
done
if [ -n "$source" ]; then
    echo "$(basename "$source")" >> "$ASKED"
    echo "$out: $source $HEADER" > "$depfile"
else
    echo link >> "$ASKED"
fi
echo "$*" > "$out"
"""


class Clone:
    """A folder with three sources and setup.py's own command over them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.folder, self.asked = folder, folder / "asked"
        for name in (*SOURCES, "csrc/a/common.h"):
            self.change(name)
        compiler = folder / "compiler"
        compiler.write_text(COMPILER)
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
        monkeypatch.setenv("ASKED", str(self.asked))
        monkeypatch.setenv("UNITS", str(folder / "units"))
        monkeypatch.setenv("HEADER", str(folder / "csrc/a/common.h"))
        monkeypatch.chdir(folder)
        with (
            mock.patch("setuptools.setup") as setup,
            mock.patch.dict(os.environ, INFINITY_CUDA="0"),
        ):
            runpy.run_path(str(ROOT / "setup.py"))
        self.command = setup.call_args.kwargs["cmdclass"]["build_ext"]
        own = self.command.build_extensions.__globals__
        monkeypatch.setitem(own, "ROOT", folder)
        monkeypatch.setitem(own, "find_nvcc", lambda: str(compiler))

    def change(self, name: str) -> None:
        """Writes a source, later than all that was built from it."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        built = [each.stat().st_mtime_ns for each in self.folder.rglob("*.o")]
        os.utime(path, ns=(max(built, default=0) + 10**9,) * 2)

    def build(self) -> set[str]:
        """Builds, and returns what was compiled and linked."""
        self.asked.write_text("")
        extension = Pybind11Extension("one._C", list(SOURCES), include_pybind11=False)
        command = self.command(Distribution({"ext_modules": [extension]}))
        command.finalize_options()
        command.run()
        return set(self.asked.read_text().split())


@pytest.fixture
def clone(tmp_path, monkeypatch) -> Clone:
    return Clone(tmp_path, monkeypatch)


EVERYTHING = {"kernel.cpp", "bindings.cpp", "step.cu", "link"}


def test_an_unchanged_source_is_not_compiled_again(clone, monkeypatch):
    """Builds twice, then with pip's next folder of pybind11's headers: nothing is compiled. Twins:
    a changed source, a changed header, and other flags."""
    assert clone.build() == EVERYTHING
    assert clone.build() == set()
    monkeypatch.setattr(pybind11, "get_include", lambda: "/another/environment/of/pip")
    assert clone.build() == set()
    monkeypatch.setenv("INFINITY_CUDA_ARCH", "sm_100,compute_100")
    assert clone.build() == {"step.cu", "link"}
    clone.change("csrc/a/kernel.cpp")
    assert clone.build() == {"kernel.cpp", "link"}
    clone.change("csrc/a/common.h")
    assert clone.build() == EVERYTHING


def test_the_gpus_step_is_compiled_once_for_each_rule(clone):
    """Compares the units that the compiler was asked for with the rules that the core knows. Twin:
    another source is compiled once."""
    clone.build()
    units = (clone.folder / "units").read_text().split()
    assert sorted(map(str.upper, units)) == sorted(native.Rule.__members__)
    assert len(list(clone.folder.rglob("*step.cu*.o"))) == len(units)
    assert len(list(clone.folder.rglob("*kernel.cpp*.o"))) == 1


@pytest.mark.parametrize(
    ("cards", "built"),
    [
        ("9.0\n9.0\n", "sm_90"),
        ("8.9\n12.0\n", "sm_120,sm_89"),
        ("", "compute_80"),  # no card
        ("7.5\n", "compute_80"),  # too old for the kernels
        ("9.0\n15.0\n", "compute_80"),  # one is too new for nvcc
        ("Field compute_cap is not a valid field to query.\n", "compute_80"),
    ],
)
def test_machine_code_is_built_for_the_gpus_of_this_machine(cards, built, clone, monkeypatch):
    """Asks setup.py beside an nvidia-smi that tells of ``cards``, and an nvcc up to sm_121. Where
    it has no machine code for each of them, PTX serves. INFINITY_CUDA_ARCH has the last word."""
    known = "sm_75\nsm_80\nsm_89\nsm_90\nsm_120\nsm_121\n"
    for name, said in (("nvidia-smi", cards), ("compiler", known)):
        tool = clone.folder / name
        tool.write_text(f"#!/bin/sh\nprintf '{said}'\n")
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(clone.folder), prepend=os.pathsep)
    monkeypatch.delenv("INFINITY_CUDA_ARCH", raising=False)
    gpus = clone.command.build_extensions.__globals__["gpus"]
    assert gpus() == built.split(",")
    monkeypatch.setenv("INFINITY_CUDA_ARCH", "sm_89, compute_89")
    assert gpus() == ["sm_89", "compute_89"]


def test_another_python_compiles_only_what_includes_its_headers(clone, monkeypatch):
    """Builds for two Pythons by the suffix of their modules, and for the first one again. The twin
    is another machine, for which everything is compiled."""
    assert clone.build() == EVERYTHING
    monkeypatch.setenv("SETUPTOOLS_EXT_SUFFIX", ".cpython-399-x86_64-linux-gnu.so")
    assert clone.build() == {"bindings.cpp", "link"}
    monkeypatch.delenv("SETUPTOOLS_EXT_SUFFIX")
    assert clone.build() == set()
    monkeypatch.setenv("_PYTHON_HOST_PLATFORM", "linux-other")
    assert clone.build() == EVERYTHING


def test_a_build_says_how_long_it_takes_and_names_each_file(clone, capfd):
    """Reads the output of a first build and of a second one, which has nothing to say."""
    clone.build()
    told = capfd.readouterr().out
    files = len(SOURCES) - 1 + len(native.Rule.__members__)
    assert f"files to compile: {files}, on" in told and " min, INFINITY_CUDA=0 leaves" in told
    for source in SOURCES:
        assert f"] {source}" in told
    clone.build()
    assert "files to compile" not in capfd.readouterr().out


def test_a_compiled_module_is_replaced_and_not_written_into(clone):
    """Keeps the module open, as a running process does, and builds a changed one: the open file has
    what it had."""
    clone.build()
    (module,) = clone.folder.glob("build/lib*/one/_C*.so")
    with open(module) as running:
        clone.change("csrc/a/kernel.cpp")
        clone.build()
        assert os.fstat(running.fileno()).st_ino != module.stat().st_ino


@pytest.mark.parametrize(
    ("license", "refused"), [(None, False), ('license = { text = "Apache-2.0" }', True)]
)
def test_the_license_is_said_without_a_warning(license, refused, tmp_path, monkeypatch):
    """Has setuptools read pyproject.toml with warnings as errors. The twin has the table of before,
    which it means to refuse."""
    text = (ROOT / "pyproject.toml").read_text()
    line = next(each for each in text.splitlines() if each.startswith("license ="))
    for name in ("README.md", "LICENSE"):
        (tmp_path / name).write_text("")
    (tmp_path / "infinity").mkdir()
    (tmp_path / "infinity" / "__init__.py").write_text('__version__ = "1.0"')
    (tmp_path / "pyproject.toml").write_text(
        text if license is None else text.replace(line, license)
    )
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if refused:
            with pytest.raises(Exception, match="license"):
                apply_configuration(Distribution(), "pyproject.toml")
            return
        distribution = apply_configuration(Distribution(), "pyproject.toml")
    assert distribution.metadata.license_expression == "Apache-2.0"
    classifiers = tomllib.loads(text)["project"]["classifiers"]
    assert not [each for each in classifiers if each.startswith("License")]


def test_every_file_of_data_is_in_the_packages():
    """Method: files of infinity/ that are no code, against the patterns of pyproject.toml. Twin: a
    file beside them that no pattern names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = project["package-data"]["infinity"]

    def left(names: list[str]) -> list[str]:
        return [name for name in names if not any(map(Path(name).match, patterns))]

    files = [path.relative_to(ROOT / "infinity") for path in (ROOT / "infinity").rglob("*.*")]
    data = [str(path) for path in files if path.suffix not in (".py", ".pyc", ".so")]
    assert len(data) > 10 and not left(data)
    assert left([*data, "tools/plan/machines/notes.txt"]) == ["tools/plan/machines/notes.txt"]
