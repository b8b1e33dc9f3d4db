# make demo      install into .venv and generate text with the bundled pair
# make test      install what the tests need into .venv and run them
# make lint      ruff and mypy
# make docs      build the documentation into .site; make docs-update rewrites its generated parts
# make sanitize  run the tests of the CPU kernels compiled with AddressSanitizer and UBSan, in an environment of its own
# make neon      compile the CPU kernels for ARM64 and run NEON's in emulation, in an environment of its own
# make oracles   compare with independent implementations, in an environment of its own (large)

PYTHON ?= python3
# What MLX runs on: cpu or cuda13 on Linux; a Mac needs no extra.
BACKEND ?= $(if $(filter Linux,$(shell uname -s)),cpu)
# make demo PROMPT='class Stack:' TOKENS=400; without PROMPT the demo has one of its own.
PROMPT ?=
export PROMPT
TOKENS ?= 200

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
PROJECTS := constraints.txt core/pyproject.toml plugins/gemma4/pyproject.toml plugins/qwen35/pyproject.toml
NATIVE := $(wildcard plugins/cpu/pyproject.toml plugins/cpu/CMakeLists.txt plugins/cpu/native/*)
# As CMake looks for one: without a compiler the plugin installs, and MLX's own operations run.
COMPILER = $(shell for name in $${CXX:-} c++ g++ clang++; do command -v $$name && break; done)
SANITIZER = $(shell command -v g++)
BUILDING = $(if $(COMPILER),Compiling the CPU kernels of plugins/cpu ($(words $(filter %.cpp,$(NATIVE))) C++ files) with \
  $(COMPILER): two minutes on two quick cores and up to seven on slow or busy ones; nothing is shown until it is done.,\
  Installing plugins/cpu without its kernels: no C++ compiler found.)
EXTRA := $(if $(BACKEND),[$(BACKEND)])

.PHONY: demo test lint docs docs-update oracles sanitize neon clean

demo: .venv/.demo
	$(BIN)/spec generate -n $(TOKENS)$(if $(PROMPT), -p "$$PROMPT")

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

# The interpreter is not built with the sanitizers, so their libraries come first; it keeps memory to its end by design.
# Stack frames moved to the heap would lose the alignment that 64-byte vectors need.
sanitize: .venv-sanitize/.installed
	LD_PRELOAD="$(foreach name,asan ubsan stdc++,$(shell $(SANITIZER) -print-file-name=lib$(name).so))" \
	ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=0:strict_string_checks=1 \
	UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	.venv-sanitize/bin/python -m pytest -p no:cacheprovider -p no:faulthandler plugins/cpu/tests

neon: .venv-neon/.installed
	.venv-neon/bin/python tools/neon/check.py

clean:
	rm -rf .venv .venv-oracles .venv-sanitize .venv-neon .site

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	|| { echo "python: found $$($(PYTHON) --version), expected 3.11 or newer. Name one: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv .venv

.venv/.demo: $(PROJECTS) $(NATIVE) | .venv/bin/python
	@echo "Installing mlx-spec, its model plugins and MLX into .venv: downloads, a minute or so the first time."
	$(PIP) install -c constraints.txt -e "./core$(EXTRA)" -e ./plugins/gemma4 -e ./plugins/qwen35
	@echo "$(BUILDING)"
	$(PIP) install -c constraints.txt -e ./plugins/cpu
	@touch $@

.venv/.test: $(PROJECTS) $(NATIVE) examples/mimo/pyproject.toml requirements-dev.txt | .venv/bin/python
	@echo "Installing what the tests need into .venv: downloads, a minute or so the first time."
	@echo "$(BUILDING)"
	$(PIP) install -r requirements-dev.txt
	@touch $@

.venv/.lint: .venv/.test
	$(PIP) install -c constraints.txt ruff mypy
	@touch $@

.venv/.docs: .venv/.test requirements-docs.txt
	$(PIP) install -r requirements-docs.txt
	@touch $@

.venv-sanitize/.installed: $(PROJECTS) $(NATIVE)
	@test -n "$(SANITIZER)" || { echo "sanitize: found no g++, expected one with its sanitizer libraries. Install it." >&2; exit 1; }
	$(PYTHON) -m venv .venv-sanitize
	.venv-sanitize/bin/python -m pip --disable-pip-version-check --quiet install -c constraints.txt -e "./core[testing,cpu]" -e ./plugins/gemma4 -e ./plugins/qwen35
	CXX=$(SANITIZER) .venv-sanitize/bin/python -m pip --disable-pip-version-check --quiet install --force-reinstall --no-deps \
	  --config-settings=cmake.define.SPEC_SANITIZE=ON --config-settings=build-dir=.venv-sanitize/build ./plugins/cpu
	@touch $@

.venv-oracles/.installed: $(PROJECTS) requirements-oracles.txt
	$(PYTHON) -m venv .venv-oracles
	.venv-oracles/bin/python -m pip --disable-pip-version-check --quiet install -r requirements-oracles.txt
	@touch $@

.venv-neon/.installed: requirements-neon.txt constraints.txt
	$(PYTHON) -m venv .venv-neon
	.venv-neon/bin/python -m pip --disable-pip-version-check --quiet install -r requirements-neon.txt
	@touch $@
