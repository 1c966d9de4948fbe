# Everything starts here; every target is safe to run again. Needs Python 3.11+ with venv, git and make.
#   make demo       eight answers from a real model
#   make lab        JupyterLab with the notebooks
#   make test       the tests        make test-slow   the long ones
#   make notebooks  run every notebook from top to bottom, in place
#   make clean      remove the environment (fetched models stay: they lie in ~/.cache/nanovllm)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
# The first Python that is new enough. `make lab PYTHON=/path/to/python` chooses one.
PYTHON ?= $(shell for python in python3 python3.11 python3.12 python3.13 python3.14; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$python" && break; done)
# The maintainers' tests. Those in tests/chNN grade the exercises; a bare `pytest` runs them.
# The long ones come first, so that no core waits for the other at the end.
LONG := tests/engine tests/notebooks tests/maintainer tests/browser
TESTS := $(LONG) $(filter-out $(LONG) tests/ch%,$(patsubst %/,%,$(wildcard tests/*/))) $(wildcard tests/test_*.py)

# Files of tests side by side, one thread each: two cores are busy then, and no two threads wait for each other.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# For notebooks that import torch first; what it does is told in nanovllm/__init__.py, which sets it otherwise.
export GOMP_SPINCOUNT ?= 2000

.PHONY: help setup model demo lab test test-slow notebooks clean

help:
	@sed -n 's/^#   //p' Makefile

setup: $(VENV)/.installed

# Installed means: the stamp is newer than what it was made from, and the environment belongs to this very folder.
HERE := $(shell $(BIN)/python -I -c 'import nanovllm, os; print(os.path.samefile(nanovllm.__path__[0], "nanovllm"))' 2>/dev/null)
ifneq ($(HERE),True)
.PHONY: $(VENV)/.installed
endif
$(VENV)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer was not found; name one: make ... PYTHON=/path/to/python"; exit 1; }
	@test "$(HERE)" = True || { echo "Making $(VENV) with $(PYTHON)"; $(PYTHON) -m venv --clear $(VENV); }
	$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	@touch $@

model: setup
	@folder=$$($(BIN)/python -m nanovllm model get --quiet) && echo "The model lies in $$folder"

demo: model
	@$(BIN)/python -m nanovllm demo

lab: model
	@$(BIN)/python -m jupyterlab $(if $(filter 0,$(shell id -u)),--allow-root) \
		--ServerApp.root_dir="$(CURDIR)" --LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb

test: model
	$(PYTEST) -m "not slow" $(TESTS)

test-slow: model
	$(PYTEST) -m slow $(TESTS)

notebooks: model
	$(BIN)/python -m nanovllm.workbook.notebooks

clean:
	rm -rf $(VENV) *.egg-info build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find nanovllm tests exercises solutions notebooks -name __pycache__ -type d -prune -exec rm -rf {} +
