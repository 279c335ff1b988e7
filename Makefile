# `make demo` and `make test` work in a fresh clone: each creates what it needs.
VENV   := .venv
PYTHON := $(VENV)/bin/python
MLB    := $(VENV)/bin/mlb
BASE_PYTHON ?= python3
PIP_INSTALL := $(PYTHON) -m pip install --quiet --disable-pip-version-check -c scripts/constraints.txt

.PHONY: demo real test test-slow lint format bench fuzz docs clean

$(VENV)/.installed: pyproject.toml scripts/constraints.txt
	test -x $(PYTHON) || $(BASE_PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP_INSTALL) -e '.[dev]'
	touch $@

demo: $(VENV)/.installed
	MLB=$(MLB) bash scripts/demo.sh

real: $(VENV)/.installed-dev
	MLB=$(MLB) PYTHON=$(PYTHON) bash scripts/real.sh

test: $(VENV)/.installed-dev
	$(PYTHON) -m pytest -q

test-slow: $(VENV)/.installed-dev
	$(PYTHON) -m pytest -q -m slow

lint: $(VENV)/.installed-dev
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

format: $(VENV)/.installed-dev
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

# Guided by coverage where atheris installs; else the same mutations at random.
fuzz: $(VENV)/.installed-dev
	if $(PIP_INSTALL) atheris; then GUIDED=--guided; fi; $(PYTHON) scripts/fuzz.py --seconds 300 --keep . $$GUIDED

docs: $(VENV)/.installed-dev
	$(PYTHON) scripts/docs.py

# Side by side with llama.cpp where $$MLB_BENCH_LLAMA names a Python that has llama-cpp-python.
# The model of `make real` is timed as well where that was run.
bench: $(VENV)/.installed-dev
	$(PYTHON) scripts/bench.py --models "$(wildcard real-out/q4-fit.mlb)"
	$(PYTHON) scripts/bench_convert.py
	$(PYTHON) scripts/bench_embed.py

clean:
	rm -rf demo-out real-out bench-out build dist *.egg-info
