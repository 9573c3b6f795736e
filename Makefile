# Everything a fresh machine needs is installed here, into .venv.
#
#   make demo      a real model answers on this machine's processor
#   make test      all tests but the slow ones      make test-all   those too
#   make lint      ruff, formatter, mypy, table of file sizes
#   make bench     speed on the processor, beside other programs on the same weights
#   make bench-gpu speed on the GPU, with the Python that PYTHON names (its own torch and cuda packages)
#
# PYTHON=python3.12 chooses another Python for .venv; TORCH="torch==2.13.0 --index-url URL" another build of torch.
# Tests run in TEST_PROCESSES processes, a file in one of them; those marked `alone` follow in one process.
PYTHON ?= python3
TORCH ?= torch==2.13.0
LLAMA_CPP ?= xllamacpp==2026.10.11549
TEST_PROCESSES ?= 2
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
CODE := megakernel models tests bench

.PHONY: demo test test-all lint format bench bench-gpu clean

$(VENV)/core: pyproject.toml
	@echo "installing the light core into $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install -e ".[gguf]"
	@command -v g++ >/dev/null || command -v clang++ >/dev/null || \
	  { echo "no C++ compiler found: installing the ziglang wheel"; $(PIP) install -e ".[compiler]"; }
	@touch $@

# torch first and exactly, so that nothing after it chooses another.
$(VENV)/dev: $(VENV)/core
	@echo "installing $(TORCH) and the developer tools into $(VENV)"
	@$(PIP) install $(TORCH)
	@$(PIP) install -e ".[dev]"
	@sh tests/install_clang.sh
	@command -v ld.lld-22 >/dev/null || $(PIP) install -e ".[compiler]"
	@sh tests/install_browser.sh
	@touch $@

$(VENV)/bench: $(VENV)/dev
	@$(PIP) install --no-deps $(LLAMA_CPP) || echo "$(LLAMA_CPP) is not to be had here: no comparison with llama.cpp"
	@touch $@

demo: $(VENV)/core
	$(BIN)/megakernel fetch-demo
	$(BIN)/megakernel generate demo --chat --max-tokens 96 "Explain in two sentences why the sky is blue."

test: SOME := and not slow
test test-all: $(VENV)/dev
	@status=0; \
	$(BIN)/python -m pytest tests -q -m "not alone $(SOME)" -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder || status=1; \
	$(BIN)/python -m pytest $$(grep -rl --include="test_*.py" "mark\.alone" tests) -q -m "alone $(SOME)" || status=1; \
	exit $$status

lint: $(VENV)/dev
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy
	$(BIN)/python -m tests.sizes

format: $(VENV)/dev
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

bench: $(VENV)/bench
	$(BIN)/python -m bench.cpu

bench-gpu:
	$(PYTHON) -m bench.gpu

clean:
	rm -rf $(VENV) build *.egg-info
