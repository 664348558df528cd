# Needs Linux, Python 3.11-3.13 and make. Everything else is installed into .venv.
VENV ?= .venv
HOME_FOLDER ?= $(or $(DLRM_HOME),.dlrm)
# Index of PyTorch's own CPU wheels, used only for torch.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
LOCK ?= $(if $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1 && echo yes),requirements/cuda.lock,requirements/cpu.lock)
PYTHON ?= $(firstword $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1 && echo $$p; done))
# Extras to install in addition to the lock, such as EXTRAS=ray. Rebuilding an environment keeps its extras.
EXTRAS ?=
RUN = $(VENV)/bin/python
# Test processes: a third of the time is waiting. One that has no more fast tests takes over half of another's; a file
# of slow tests stays with one process, because they share what takes longest. Files with few tests come first as often
# as others do: theirs are the longest.
TESTERS ?= 3
TEST = $(RUN) -m pytest -n $(TESTERS) --dist worksteal
PREFECT_PORT ?= 4200
MLFLOW_PORT ?= 5000
MODEL ?= demo
SERVE_PORT ?= 5001
PROCESSES ?= 1
# For deploy: concurrent trainings, and whether an ingest starts a training. Empty keeps the current setting.
TRAININGS ?=
CHAIN ?=
SCHEDULES ?= 100000
MINUTES ?= 10
# Other commands learn the home from DLRM_HOME, and so find the authentication string of its servers.
ifneq ($(HOME_FOLDER),$(or $(DLRM_HOME),.dlrm))
export DLRM_HOME := $(HOME_FOLDER)
endif
export DO_NOT_TRACK = 1
export PREFECT_SERVER_ANALYTICS_ENABLED = false
export MLFLOW_DISABLE_TELEMETRY = true
export MLFLOW_SERVER_ENABLE_JOB_EXECUTION = false
export RAY_USAGE_STATS_ENABLED = 0
export NO_MKDOCS_2_WARNING = 1

.DEFAULT_GOAL := help
.PHONY: help setup demo quality docs screenshots paper test test-slow test-all test-gpu simulate fuzz lint check nightly ui serve serve-mlflow worker deploy doctor lock clean

help:  ## print this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1@/' | column -t -s@

setup:  ## create .venv with every dependency at its locked version; EXTRAS='ray postgres' adds extras
	@VENV='$(VENV)' LOCK='$(LOCK)' PYTHON='$(PYTHON)' TORCH_INDEX='$(TORCH_INDEX)' EXTRAS='$(EXTRAS)' \
		requirements/environment.sh

demo: setup  ## run everything on generated data: ingest, sharded training, registered model
	@$(RUN) -m flows.end_to_end configs/demo.yaml
	@echo "to look at the result: make ui"

paper: setup  ## run the efficiency study of configs/paper on this machine; reports go to docs/efficiency
	@$(RUN) -m flows.ingest configs/generated.yaml  # the rows of e6_quality
	@for config in configs/paper/e[1-8]_*.yaml; do $(RUN) -m flows.characterize $$config report=docs/efficiency || exit 1; done

quality: setup  ## train every config of configs/quality.json that has its data here, and judge NE and AUC
	@$(RUN) -m benchmarks.quality

docs: setup  ## generate the reference pages and build docs/ into site/; a broken link is an error
	@$(RUN) -m flows.reference
	@NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict
	@echo "open site/index.html"

screenshots: setup  ## make the screenshots of docs/images anew; needs Chromium
	@$(RUN) docs/screenshots.py

test: setup  ## run the fast tests, which need no extra
	@$(TEST)

test-slow: setup  ## run one slow test for each promise, and the tests that need extras
	@$(TEST) --dist loadfile --no-loadscope-reorder -m '(slow or extra) and not nightly and not gpu' --timeout=900 --durations=25

test-all: setup  ## run every test that needs no GPU; fails if a fast test takes over 3 seconds of processor time
	@$(TEST) -m 'not gpu' --timeout=900 --fast-seconds=3

ON_A_DEVICE = test_trainer.py test_restore.py test_step.py test_learner.py test_metrics.py test_options.py state/test_checkpoint.py

test-gpu: setup  ## run the tests that need CUDA devices, and the trainer's tests on one
	@DLRM_TEST_DEVICE=cuda $(RUN) -m pytest -m gpu --timeout=900
	@DLRM_TEST_DEVICE=cuda $(RUN) -m pytest -m 'not gpu' --timeout=900 \
		$(addprefix tests/pipeline/training/,$(ON_A_DEVICE))

simulate: setup  ## look for broken promises in SCHEDULES simulated schedules of faults
	@$(RUN) -m tests.simulation schedules=$(SCHEDULES)

fuzz: setup  ## give damaged files and messages to all readers for MINUTES minutes
	@$(RUN) -m tests.fuzz minutes=$(MINUTES)

lint: setup  ## run ruff and mypy
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy

check: setup  ## run linters and the fast tests, side by side
	@$(RUN) -m ruff check . && $(RUN) -m ruff format --check .
	@$(RUN) -m mypy & types=$$!; trap 'kill $$types 2>/dev/null || true' EXIT; $(TEST) && wait $$types

nightly: lint test-all  ## run everything: linters, all tests, simulated faults and damaged files
	@$(MAKE) --no-print-directory simulate SCHEDULES=20000
	@$(MAKE) --no-print-directory fuzz MINUTES=5

ui: setup  ## run Prefect and MLflow on loopback; Ctrl-C stops both
	@$(RUN) -m flows.ui $(HOME_FOLDER) prefect_port=$(PREFECT_PORT) mlflow_port=$(MLFLOW_PORT)

serve: setup  ## serve the champion of MODEL over HTTP on loopback, port SERVE_PORT, in PROCESSES; Ctrl-C stops it
	@$(RUN) -m flows.serve $(MODEL) port=$(SERVE_PORT) processes=$(PROCESSES)

serve-mlflow: setup  ## the same with MLflow's own server, which does not follow the champion
	@PATH="$(abspath $(VENV))/bin:$$PATH" MLFLOW_TRACKING_URI="$${MLFLOW_TRACKING_URI:-sqlite:///$(HOME_FOLDER)/mlflow/mlflow.db}" \
		$(VENV)/bin/mlflow models serve -m "models:/$(MODEL)@champion" --env-manager local --host 127.0.0.1 --port $(SERVE_PORT)

deploy: setup  ## set up the server of `make ui`, or that at PREFECT_API_URL; CHAIN=true trains after each ingest
	@$(RUN) -m flows.deploy setup $(if $(CHAIN),chain=$(CHAIN)) $(if $(TRAININGS),trainings=$(TRAININGS))

worker: setup  ## run a worker for the deployments of the server of `make ui`, or of that at PREFECT_API_URL
	@$(RUN) -m flows.runtime.access $(VENV)/bin/prefect worker start --pool dlrm

doctor: setup  ## check this installation
	@$(RUN) -m flows.doctor prefect_port=$(PREFECT_PORT) mlflow_port=$(MLFLOW_PORT)

lock:  ## resolve the dependencies again (needs uv)
	@uv pip compile pyproject.toml --extra cpu --extra dev --universal --python-version 3.11 --no-annotate \
		--override requirements/overrides-cpu.txt $(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS),--extra-index-url $(TORCH_INDEX)) \
		--custom-compile-command "make lock" -q -o requirements/cpu.lock
	@uv pip compile pyproject.toml --extra cuda --extra dev --universal --python-version 3.11 --no-annotate \
		--custom-compile-command "make lock" -q -o requirements/cuda.lock
	@# An extra's lock holds the packages that it adds, resolved together with the main lock.
	@for extra in ray postgres avro objects; do \
		uv pip compile pyproject.toml --extra cpu --extra dev --extra $$extra --universal --python-version 3.11 --no-annotate --no-header \
			--override requirements/overrides-cpu.txt $(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS),--extra-index-url $(TORCH_INDEX)) \
			--constraint requirements/cpu.lock -q > requirements/.all; \
		{ head -n 2 requirements/cpu.lock; grep -vxFf requirements/cpu.lock requirements/.all; } > requirements/$$extra.lock; \
	done
	@rm requirements/.all

clean:  ## remove the environment, unless a process runs from it; data and models in .dlrm stay
	@VENV='$(VENV)' requirements/environment.sh clean
