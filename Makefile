# make demo      install into .venv and generate text with the bundled pair
# make test      install what the tests need into .venv and run them
# make lint      ruff and mypy
# make docs      build the documentation into .site; make docs-update rewrites its generated parts
# make oracles   compare with independent implementations, in an environment of its own (large)

PYTHON ?= python3
# What MLX runs on: cpu or cuda13 on Linux; a Mac needs no extra.
BACKEND ?= $(if $(filter Linux,$(shell uname -s)),cpu)
# make demo PROMPT='class Stack:' TOKENS=400; without PROMPT the demo has one of its own.
PROMPT ?=
TOKENS ?= 200

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
PROJECTS := constraints.txt core/pyproject.toml plugins/gemma4/pyproject.toml plugins/qwen35/pyproject.toml
NATIVE := $(wildcard plugins/cpu/pyproject.toml plugins/cpu/CMakeLists.txt plugins/cpu/native/*)
# As CMake looks for one: without a compiler the plugin installs, and MLX's own operations run.
COMPILER = $(shell for name in $${CXX:-} c++ g++ clang++; do command -v $$name && break; done)
KERNELS = $(if $(COMPILER),CPU kernels compiled with $(COMPILER),without CPU kernels (no C++ compiler found))
EXTRA := $(if $(BACKEND),[$(BACKEND)])

.PHONY: demo test lint docs docs-update oracles clean

demo: .venv/.demo
	$(BIN)/spec generate -n $(TOKENS)$(if $(PROMPT), -p '$(PROMPT)')

test: .venv/.test
	$(BIN)/python -m pytest

lint: .venv/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy core/src plugins/gemma4/src plugins/qwen35/src plugins/cpu/src examples/mimo/src

docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --site-dir .site

docs-update: .venv/.test
	$(BIN)/python tools/docs.py --update

oracles: .venv-oracles/.installed
	.venv-oracles/bin/python plugins/gemma4/oracles/check.py
	.venv-oracles/bin/python plugins/qwen35/oracles/check.py
	.venv-oracles/bin/python plugins/qwen35/oracles/check_mtp.py

clean:
	rm -rf .venv .venv-oracles .site

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	|| { echo "python: found $$($(PYTHON) --version), expected 3.11 or newer. Name one: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv .venv

.venv/.demo: $(PROJECTS) $(NATIVE) | .venv/bin/python
	@echo "Installing mlx-spec, its plugins and MLX into .venv, $(KERNELS); this takes some minutes the first time."
	$(PIP) install -c constraints.txt -e "./core$(EXTRA)" -e ./plugins/gemma4 -e ./plugins/qwen35 -e ./plugins/cpu
	@touch $@

.venv/.test: $(PROJECTS) $(NATIVE) examples/mimo/pyproject.toml requirements-dev.txt | .venv/bin/python
	@echo "Installing what the tests need into .venv, $(KERNELS); this takes some minutes the first time."
	$(PIP) install -r requirements-dev.txt
	@touch $@

.venv/.lint: .venv/.test
	$(PIP) install -c constraints.txt ruff mypy
	@touch $@

.venv/.docs: .venv/.test requirements-docs.txt
	$(PIP) install -r requirements-docs.txt
	@touch $@

.venv-oracles/.installed: $(PROJECTS) requirements-oracles.txt
	$(PYTHON) -m venv .venv-oracles
	.venv-oracles/bin/python -m pip --disable-pip-version-check --quiet install -r requirements-oracles.txt
	@touch $@
