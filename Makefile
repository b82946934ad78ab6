# Every target but gpu and gpu-peers makes its own .venv first; the stamp makes a second call instant.
PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
INSTALLED := .venv/.installed
TESTING := .venv/.testing

# Idle OpenMP threads sleep instead of spinning on the core that a link worker needs. Set before torch loads.
export OMP_WAIT_POLICY := PASSIVE
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
# Kept bytecode, whatever this shell says of it: tests start many processes, and each would compile all modules anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup run test soak fuzz fuzz-checkpoints reserved check check-models gate lint bench gpu gpu-peers clean
.DELETE_ON_ERROR:

run: $(INSTALLED)  ## the main job: tables, figures, trace
	$(BIN)/flexhybrid compare $(ARGS)

setup: $(INSTALLED)  ## .venv with all that is needed

test: $(TESTING)
	$(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)

soak: $(INSTALLED)  ## a job killed at hundreds of points and resumed
	$(BIN)/python tests/soak.py $(ARGS)

fuzz: $(TESTING)  ## random cases against oracles of their own, for four minutes
	PYTHONPATH=. $(BIN)/python tests/fuzz.py $(ARGS)

fuzz-checkpoints: $(TESTING)  ## 2,000 broken and odd checkpoints: refused in one line, or transformers' tokens; half an hour
	PYTHONPATH=.:tests $(BIN)/python tests/runtime/models/fuzz_checkpoints.py $(ARGS)

reserved: $(TESTING)  ## what CUDA's allocator would reserve under 200 random policies, against their plans
	PYTHONPATH=.:tests $(BIN)/python tests/fake_cuda/reserved.py $(ARGS)

check-models: $(TESTING)  ## every decoder type of transformers, tiny, against its own generate; writes docs/models.md
	PYTHONPATH=.:tests $(BIN)/python tests/check_models.py --table docs/models.md $(ARGS)

check: lint test  ## all that a change must pass: format, lint, types, tests

lint: $(TESTING)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

bench: $(TESTING)  ## every figure that has a bar, in one table and results/bench.json
	$(BIN)/python -m experiments.bench $(ARGS)

gate: $(INSTALLED)  ## the reproduced rows anew, unless they are worse; ARGS="--only kvpr", ARGS=--accept
	$(BIN)/python -m experiments.reproduce.gate $(ARGS)

gpu:  ## with the machine's own python3 and torch, no .venv
	$(PYTHON) -m experiments.gpu $(ARGS)

gpu-peers:  ## FlexGen, in a folder that goes along to a GPU machine without a network
	$(PYTHON) -m pip install --quiet --no-deps --upgrade --target experiments/peers/installed flexgen==0.1.8 attrs tqdm

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis

# torch comes first and alone: whichever build pip finds for this machine then settles what the rest needs. The files of
# requirements are complete: there is nothing for pip to work out. editable_mode=compat makes a .pth file, with which a
# script next to a clone called flexhybrid finds the package, not the clone.
$(INSTALLED): requirements.txt setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "flexhybrid needs Python 3.11 or later: make PYTHON=...")'
	$(PYTHON) -m venv .venv || { echo "On Debian: apt install python3-venv" >&2; exit 1; }
	@echo "setup 1 of 3: torch, the largest by far: 0.2 GB to fetch where it is for a CPU, some 3 GB with CUDA; some minutes"
	$(BIN)/python -m pip install --quiet $$(grep '^torch==' requirements.txt)
	@echo "setup 2 of 3: what else jobs need, 0.2 GB: a minute or two"
	$(BIN)/python -m pip install --quiet --no-deps -r requirements.txt
	@echo "setup 3 of 3: flexhybrid itself: seconds"
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --config-settings editable_mode=compat -e .
	touch $@

# Kept apart: whoever only runs jobs waits half as long.
$(TESTING): $(INSTALLED) requirements-test.txt
	@echo "setup for tests, lint and bench: a minute or two"
	$(BIN)/python -m pip install --quiet --no-deps -r requirements-test.txt
	touch $@
