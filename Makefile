# `make demo` and `make test` need python3 (3.11 or newer) and make, nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q

.PHONY: help demo test check bench clean

help:
	@echo "make demo    install, fetch a small model, answer a question on the CPU"
	@echo "make test    install what the tests need and run them (TESTS=tests/unit for some of them)"
	@echo "make check   lint, types, import contracts"
	@echo "make bench   the side-by-side benchmarks (nothing else should run)"
	@echo "make clean   remove the environment and caches"

# Stamps make the second run quick: an environment is redone only when what it is made from changes.
$(VENV)/.run: pyproject.toml constraints/cpu.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing isthmus into $(VENV) (a few minutes the first time)"
	@$(PIP) install -c constraints/cpu.txt -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@echo "installing what the tests need"
	@$(PIP) install -c constraints/cpu.txt -e '.[dev]'
	@touch $@

MODEL := smollm2-135m-instruct
QUESTION := What is the capital of France, and what is it famous for?

demo: $(VENV)/.run
	@$(BIN)/isthmus pull $(MODEL)
	@echo "> $(QUESTION)"
	@$(BIN)/isthmus chat $(MODEL) --device cpu --temperature 0 --max-tokens 96 --message "$(QUESTION)"

test: $(VENV)/.dev
	@$(BIN)/python -m pytest $(TESTS)

check: $(VENV)/.dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

bench: $(VENV)/.dev
	@$(BIN)/python benchmarks/offline.py
	@$(BIN)/python benchmarks/engine_cost.py

clean:
	rm -rf $(VENV) .nox reports .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build
