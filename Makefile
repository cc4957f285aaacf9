# Two commands: `make release` and `make test`. Everything else here is what they need.
#
#   make release [FRESH=1] [KEEP=1] [RETRY=1]   one release on this machine, traffic shift included
#   make test | test-all                        fast tests | the slow ones too
#   make other-torch                            a second environment, with another torch, for the slow tests
#   make ui                                     review in MLflow's UI
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
HOME_DIR := $(or $(ATTENTION_RELEASE_HOME),data)
CANDIDATE ?= data/candidates/torch-flash-cpu.yaml
UI_PORT ?= 5000
# What the plan of test_cross_version is recorded under beside constraints.txt's; any version that pip can fetch.
OTHER_TORCH ?= 2.14.1
OTHER  := $(VENV)-torch-$(OTHER_TORCH)
PYTEST := $(BIN)/python -m pytest
WORKERS ?= 2
TELEMETRY := eval "$$($(PYTHON) flows/telemetry.py)"

.PHONY: release test test-all lint ui model other-torch setup clean
.DEFAULT_GOAL := release

release: setup model
	@if [ -n "$(FRESH)" ]; then $(BIN)/python -m flows down >/dev/null && rm -rf "$(HOME_DIR)/lake" "$(HOME_DIR)"/state/mlflow "$(HOME_DIR)"/state/*--*; fi
	@$(BIN)/python -m flows release $(CANDIDATE) $(if $(RETRY),--retry); code=$$?; \
	if [ -z "$(KEEP)" ]; then $(BIN)/python -m flows down >/dev/null || exit $$?; \
	elif [ $$code -eq 0 ]; then $(BIN)/python -m flows up || exit $$?; fi; exit $$code

# WORKERS processes share the fast tests, each with one thread; a slow test has all cores to itself.
# Bytecode is kept whatever the environment says: tests start a hundred processes that import the same modules.
test test-all: export PYTHONDONTWRITEBYTECODE =

test: setup
	@$(MAKE) --no-print-directory -j 2 --output-sync model lint
	@OMP_NUM_THREADS=1 $(PYTEST) -n $(WORKERS) --dist worksteal -m "not slow and not gpu"

test-all: test
	@$(MAKE) --no-print-directory other-torch || echo "not run: tests/attention/test_cross_version.py (see above)"
	@$(PYTEST) -m "slow and not gpu" && echo "not run here: tests marked gpu (they need a CUDA device)"

lint: setup
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

ui: setup
	@$(TELEMETRY); echo "MLflow on http://127.0.0.1:$(UI_PORT)/#/experiments?workflowType=machine_learning (Ctrl-C ends it)"; \
	MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false $(BIN)/mlflow server --host 127.0.0.1 --port $(UI_PORT) --workers 1 \
	  --backend-store-uri "sqlite:///$(abspath $(HOME_DIR))/state/mlflow/mlflow.db" \
	  --artifacts-destination "file://$(abspath $(HOME_DIR))/state/mlflow/artifacts"

model: setup
	@$(BIN)/python -m data.model_setup

other-torch: $(OTHER)/installed

# Only torch and what it pins differ from $(VENV): what both layers of `attention replay` import is the same.
$(OTHER)/installed: pyproject.toml constraints.txt
	@echo "other-torch: torch $(OTHER_TORCH) in $(OTHER) (up to 6 GB, 4 minutes and more)"
	@$(PYTHON) -m venv $(OTHER)
	@grep -vE '^(torch|triton)==' constraints.txt >$(OTHER)/constraints.txt
	@$(OTHER)/bin/pip install --disable-pip-version-check -c $(OTHER)/constraints.txt "torch==$(OTHER_TORCH)" -e '.[model]'
	@touch $@

setup: $(VENV)/installed

# torch first and pinned: with no torch there, another package would choose one by itself. Bytecode comes last, on all
# cores (pip uses one), and never fails: packages carry files that are no Python of ours.
$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || \
	  { echo "error: $(PYTHON) is not Python 3.11 to 3.13: run make PYTHON=python3.12" >&2; exit 2; }
	@echo "setup: a virtual environment in $(VENV), pinned by constraints.txt (2 to 4 minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install -q --no-compile --disable-pip-version-check -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	@$(BIN)/pip install -q --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@$(BIN)/python -m compileall -qq -j 0 $(abspath $(VENV))/lib || true
	@touch $@

clean:
	@$(BIN)/python -m flows down >/dev/null 2>&1 || true
	rm -rf $(VENV) $(VENV)-torch-* .pytest_cache .mypy_cache .ruff_cache *.egg-info
