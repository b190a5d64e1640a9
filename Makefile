# make demo, make test, make test-all, make asan, make lint, make docs, make wheel: each sets up .venv first, once. Needs Python >= 3.11, g++ and make.
# PYTHON is the Python to build on: a torch >= 2.11 that it has is used. Where it has none, TORCH is installed.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
INSTALL := $(PIP) install --no-build-isolation
# as a module, wherever it is installed
CLANG_FORMAT := $(BIN)/python -c 'import clang_format; clang_format.clang_format()'
CXX_FILES = $(shell find csrc tests -name '*.cpp' -o -name '*.h' -o -name '*.cuh')

.PHONY: demo test test-all asan lint format docs dev build wheel clean distclean
.DELETE_ON_ERROR:

demo: build
	$(BIN)/python examples/demo.py

# There is a process for each core, so each has one thread, but in kernels' tests, which ask for more; and threads that
# wait leave the core to others. What was compiled for CUDA once, by its content, is not compiled again.
PYTEST = OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest --numprocesses auto --dist worksteal \
	--kernels=build/test-kernels

# Every feature once. ARGS goes to pytest: make test ARGS='tests/passes -x'.
test: build
	$(PYTEST) -m 'not slow' $(ARGS)

# Every test: those of `make test`, those marked slow, and more random programs.
test-all: build
	$(PYTEST) --hypothesis-profile all $(ARGS)

# The kernels with AddressSanitizer and UndefinedBehaviorSanitizer, on hostile calls and random graphs; ARGS='--seed 0 --count 10000' for more, GNNC_ISA for another
# instruction set. Python itself knows nothing of the sanitizer, so its libraries come first.
asan: build
	$(BIN)/cmake -S . -B build/asan -G Ninja -DPython_EXECUTABLE="$$PWD/$(BIN)/python" \
		-DCMAKE_MAKE_PROGRAM="$$PWD/$(BIN)/ninja" -DGNNC_SANITIZE=address,undefined
	$(BIN)/cmake --build build/asan
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
		ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 \
		$(BIN)/python -W ignore tests/fuzz.py --library build/asan/libgnnc_cpu.so --hostile build/asan/last-call $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check
	$(BIN)/python -m pyright --pythonpath $(BIN)/python
	$(CLANG_FORMAT) --dry-run -Werror $(CXX_FILES)

format: $(VENV)/.dev
	$(BIN)/python -m ruff check --fix
	$(BIN)/python -m ruff format
	$(CLANG_FORMAT) -i $(CXX_FILES)

docs: $(VENV)/.docs
	$(BIN)/python -m mkdocs build --strict

dev: $(VENV)/.dev

# A wheel in dist/, for every torch >= 2.11: `pip install dist/gnnc-*.whl`.
wheel: $(VENV)/.gnnc
	$(PIP) wheel --no-build-isolation --no-deps --wheel-dir dist .

# Brings the C++ library up to date; Python files need no build.
build: $(VENV)/.gnnc
	@$(BIN)/python -m cmake --build build/editable

clean:
	rm -rf build dist site gnnc/*.so $(VENV)/.gnnc
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)

# Prints the folders of PYTHON's own packages if torch >= 2.11 is among them.
define FIND_TORCH
import re, sys
from importlib import metadata, util
if sys.version_info < (3, 11):
    sys.exit(f"gnnc needs Python 3.11 or newer; this is {sys.version.split()[0]} (choose with make PYTHON=...)")
if util.find_spec("torch"):
    version = metadata.version("torch")
    if tuple(map(int, re.findall(r"\d+", version)[:2])) >= (2, 11):
        print(f"using the installed torch {version}", file=sys.stderr)
        print(*[path for path in sys.path if path.endswith("-packages")], sep="\n")
endef
export FIND_TORCH

$(VENV)/.torch:
	$(PYTHON) -c "$$FIND_TORCH" > .torch-folders || { rm .torch-folders; exit 1; }
	$(PYTHON) -m venv $(VENV)
	if [ -s .torch-folders ]; then \
		mv .torch-folders "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch.pth"; \
	else \
		rm .torch-folders && echo "no torch >= 2.11 here: installing $(TORCH)" && $(PIP) install "$(TORCH)"; \
	fi
	touch $@

$(VENV)/.gnnc: $(VENV)/.torch pyproject.toml CMakeLists.txt
	$(PIP) install "scikit-build-core>=0.11" "cmake>=3.22" ninja
	$(INSTALL) -e '.[test]'
	touch $@

$(VENV)/.dev: $(VENV)/.gnnc
	$(INSTALL) -e '.[dev]'
	touch $@

$(VENV)/.docs: $(VENV)/.gnnc
	$(INSTALL) -e '.[docs]'
	touch $@
