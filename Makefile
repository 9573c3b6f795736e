# Everything a fresh machine needs is installed here, into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# CPU builds of torch are enough for the tests; choose another with TORCH="torch==... --index-url ..."
TORCH ?= torch==2.13.0

.PHONY: demo test test-all lint bench bench-gpu clean

$(VENV)/core: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -e ".[gguf]"
	@command -v g++ >/dev/null || command -v clang++ >/dev/null || $(BIN)/pip install -q -e ".[compiler]"
	@touch $@

$(VENV)/dev: $(VENV)/core
	$(BIN)/pip install -q --disable-pip-version-check "$(TORCH)"
	$(BIN)/pip install -q --disable-pip-version-check -e ".[dev]"
	@touch $@

demo: $(VENV)/core
	$(BIN)/megakernel fetch-demo
	$(BIN)/megakernel generate demo --chat --max-tokens 96 "Explain in two sentences why the sky is blue."

test: $(VENV)/dev
	$(BIN)/python -m pytest tests -q -m "not slow"

test-all: $(VENV)/dev
	$(BIN)/python -m pytest tests -q

lint: $(VENV)/dev
	$(BIN)/ruff check megakernel models tests bench
	$(BIN)/ruff format --check megakernel models tests bench
	$(BIN)/mypy
	$(BIN)/python -m tests.sizes

bench: $(VENV)/dev
	$(BIN)/python -m bench.cpu

bench-gpu:
	$(PYTHON) -m bench.gpu

clean:
	rm -rf $(VENV) build *.egg-info
