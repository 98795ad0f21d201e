SHELL := bash
VENV_PYTHON := .venv/bin/python
READY := .venv/ready
LOCKS := requirements/cpu-3.11.lock requirements/cpu-3.12.lock
# The interpreter for .venv, on the command line only: `make setup PYTHON=python3.12`.
PYTHON :=
PEERS := .venv-peers/ready
ARGS ?=

# Container images often disable byte code. Each of the many processes of a run would then compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

# Two test processes. All tests of a file, and all tests that share a cluster, run in the same one (tests/conftest.py).
BOTH_CORES := --numprocesses 2 --no-loadscope-reorder
# In the order of their longest tests.
FAST_TIERS := tests/run tests/sim tests/processes tests/torch tests/contracts tests/guides tests/unit
ROLLOUT := miles_async.rollout.fully_async_rollout.generate_rollout_fully_async

.DEFAULT_GOAL := help
.PHONY: help doctor plan setup setup-gpu setup-bridge setup-verifiers setup-openenv setup-roll setup-ifbench test-environments run run-tiny run-agents browser test test-all test-unit test-stack test-bridge sim chaos chaos-sim bench bench-peers gpu-check study dashboards dashboard-pictures notebook monitoring inspect report groups docs lint format lock clean cluster-up cluster-down skip-ls skip-rm another-python

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20
	@printf '\nARGS="…" is passed on to the command: make run ARGS="--num-rollout 20 --seed 7", make test ARGS="-k staleness"\n'

setup: $(READY) ## Create .venv from the lock of its Python, or update it (PYTHON=python3.12 instead of 3.11)

# make installs again only if one of these files has changed, so a second `make run` starts at once, or if PYTHON is
# given, because .venv may have another Python.
$(READY): $(LOCKS) pyproject.toml setup.py requirements/install.sh $(if $(PYTHON),another-python)
	@PYTHON=$(PYTHON) bash requirements/install.sh
	@touch $@

setup-gpu: ## The same on a machine with CUDA: SGLang with its own dependencies, Mooncake's RDMA build
	@PYTHON=$(PYTHON) bash requirements/install.sh gpu
	@touch $(READY)

setup-bridge: .venv-bridge/ready ## Create .venv-bridge with Python 3.12 and Megatron-Bridge, for more models (3.4 to 7.5 GB)

.venv-bridge/ready: requirements/cpu-3.12.lock requirements/bridge.lock pyproject.toml setup.py requirements/install.sh
	@VENV=.venv-bridge PYTHON=python3.12 bash requirements/install.sh
	@.venv-bridge/bin/python -m pip install -qq --no-deps --require-hashes --requirement requirements/bridge.lock
	@touch $@

setup-verifiers: .venv-verifiers/ready ## Create .venv-verifiers, in which environments of verifiers run (0.6 GB)

setup-openenv: .venv-openenv/ready ## Create .venv-openenv, in which environments of OpenEnv run (0.5 GB)

setup-roll: .venv-roll/ready ## Create .venv-roll, in which environments of ROLL run (0.4 GB); ROLL=FOLDER names a checkout
	@test -f "$(ROLL)/roll/__init__.py" || { echo "Set ROLL to a checkout of https://github.com/alibaba/ROLL"; exit 1; }
	@echo "$(abspath $(ROLL))" >"$$(.venv-roll/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/roll.pth"

setup-ifbench: $(READY) ## Add IFBench to .venv, for --rm-type ifbench; IFBENCH=FOLDER names a checkout
	@test -f "$(IFBENCH)/ifbench/__init__.py" || { echo "Set IFBENCH to a checkout of https://github.com/allenai/IFBench"; exit 1; }
	@$(VENV_PYTHON) -m pip install -qq --no-deps --require-hashes --requirement requirements/ifbench.lock
	@echo "$(abspath $(IFBENCH))" >"$$($(VENV_PYTHON) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/ifbench.pth"
	@$(VENV_PYTHON) -m nltk.downloader -q -d .venv/nltk_data punkt punkt_tab stopwords averaged_perceptron_tagger_eng || true
	@$(VENV_PYTHON) -c 'import sys; from miles_async.rewards.functions.ifbench import lacking; sys.exit(lacking() and f"rm_type ifbench {lacking()}")'

# The libraries need other versions of packages than SGLang, and than each other.
.venv-verifiers/ready .venv-openenv/ready .venv-roll/ready: .venv-%/ready: requirements/%.lock | $(READY)
	@echo "Creating .venv-$*"
	@$(VENV_PYTHON) -m venv --clear .venv-$*
	@.venv-$*/bin/python -m pip install -qq --no-deps --require-hashes --requirement requirements/$*.lock
	@touch $@

# It installs nothing. Without .venv it works if `python3` has the packages, as in an image.
doctor: ## Show what this machine has, what works on it, and what to set (ARGS=--json for bug reports)
	@python=$(VENV_PYTHON); [ -x $$python ] || python=python3; \
	    $$python -c 'import msgspec, packaging, psutil, pydantic, pynvml' 2>/dev/null || { echo "miles_async is not installed: run make setup"; exit 1; }; \
	    $$python -m workers.doctor $(ARGS)

plan: $(READY) ## Show the memory plan of a job from Megatron's modules (ARGS="--config my.yaml --gpu-memory-gib 80")
	@CUDA_VISIBLE_DEVICES= $(VENV_PYTHON) -m workers.memory_plan $(ARGS)

run: $(READY) ## Train SmolLM2-135M-Instruct: it learns to add two numbers in a few minutes
	@$(VENV_PYTHON) train_async.py --config configs/smollm2-cpu.yaml $(ARGS)

run-tiny: $(READY) ## Train a tiny model with many more, and much shorter, steps
	@$(VENV_PYTHON) train_async.py --config configs/arithmetic-cpu.yaml --rollout-function-path $(ROLLOUT) $(ARGS)

run-agents: $(READY) ## Train an agent whose tools are as slow as a real sandbox, where asynchronous training gains most
	@$(VENV_PYTHON) train_async.py --config configs/slow-tools-cpu.yaml --rollout-function-path $(ROLLOUT) $(ARGS)

# Only tests need a browser, so `make run` does not install one.
browser: ## Install Debian's Chromium, for the tests of the live page and the run report
	@bash requirements/browser.sh

test: $(READY) ## Run the tests that every change must pass: all tiers but tests/stack (at most 8 minutes on two idle cores)
	@$(VENV_PYTHON) -m pytest $(FAST_TIERS) $(BOTH_CORES) $(ARGS)

test-all: $(READY) browser ## Run all tests (about 25 minutes on two idle cores)
	@$(VENV_PYTHON) -m pytest tests/stack $(FAST_TIERS) $(BOTH_CORES) $(ARGS)

test-unit: $(READY) ## Run the unit tests, the contract tests and the tests of guides
	@$(VENV_PYTHON) -m pytest tests/unit tests/contracts tests/guides $(BOTH_CORES) $(ARGS)

test-stack: $(READY) browser ## Run the tests that `make test` leaves out: tests/stack
	@$(VENV_PYTHON) -m pytest tests/stack $(BOTH_CORES) $(ARGS)

test-bridge: setup-bridge ## Run the tests of models of Megatron-Bridge, in .venv-bridge (about four minutes)
	@.venv-bridge/bin/python -m pytest tests/bridge $(BOTH_CORES) $(ARGS)

test-environments: setup-verifiers setup-openenv ## Run the tests of environments with the real libraries
	@$(VENV_PYTHON) -m pytest tests/stack/test_environments.py $(ARGS)

sim: $(READY) ## Simulate scenarios with a virtual clock; write tables, JSON and plots (ARGS="filtered ladder")
	@$(VENV_PYTHON) -m tests.sim.run --figures docs/explanation $(ARGS)

chaos: $(READY) ## Kill and stop processes of real runs at drawn times, one to three minutes each (ARGS="--runs 50 --seed 3")
	@$(VENV_PYTHON) -m benchmarks.chaos $(ARGS)

chaos-sim: $(READY) ## Lose rollout workers and learners in 20,000 simulated runs, about an hour (ARGS="--runs 500 --seed 3")
	@$(VENV_PYTHON) -m benchmarks.chaos.simulated $(ARGS)

bench: $(READY) ## Run the benchmarks; write tables, and JSON files in benchmarks/results/
	@$(VENV_PYTHON) -m benchmarks.core_cost
	@$(VENV_PYTHON) -m benchmarks.packing
	@$(VENV_PYTHON) -m benchmarks.packed_training
	@$(VENV_PYTHON) -m benchmarks.checkpoints
	@$(VENV_PYTHON) -m benchmarks.publish_gap
	@$(VENV_PYTHON) -m benchmarks.overlap
	@$(VENV_PYTHON) -m benchmarks.skip_replay
	@$(VENV_PYTHON) -m benchmarks.jsonl_start
	@$(VENV_PYTHON) -m benchmarks.run_store
	@$(VENV_PYTHON) -m benchmarks.rollout_worker
	@$(VENV_PYTHON) -m benchmarks.token_memory
	@$(VENV_PYTHON) -m benchmarks.message_costs
	@$(VENV_PYTHON) -m benchmarks.agent_endpoint
	@$(VENV_PYTHON) -m benchmarks.page
	@$(VENV_PYTHON) -m benchmarks.engine_attention
	@$(VENV_PYTHON) -m benchmarks.instrumentation
	@$(VENV_PYTHON) -m benchmarks.frozen
	@$(VENV_PYTHON) -m benchmarks.advice
	@$(VENV_PYTHON) -m benchmarks.learner_step
	@$(VENV_PYTHON) -m benchmarks.peers

# As `doctor`: it installs nothing, and without .venv it uses the packages of `python3`.
gpu-check: ## Check what works on this machine's GPUs, in minutes (ARGS="--only attention", ARGS="--device cpu")
	@python=$(VENV_PYTHON); [ -x $$python ] || python=python3; $$python -m benchmarks.gpu_check $(ARGS)

bench-peers: $(PEERS) ## Compare with TRL, in .venv-peers, and with checkouts (SLIME=folder MILES=folder ARGS="step")
	@$(VENV_PYTHON) -m benchmarks.peers $(if $(SLIME),--slime $(SLIME)) $(if $(MILES),--miles $(MILES)) $(ARGS)

# TRL's latest release with the version of torch that pyproject.toml pins: the CPU build, or the public one if no index
# serves the CPU build. Only the comparison uses this environment.
$(PEERS): $(LOCKS) | $(READY)
	@echo "Creating .venv-peers with TRL"
	@$(VENV_PYTHON) -m venv --clear .venv-peers
	@pin=$$(sed -n 's/.*"\(torch==[^"]*\)".*/\1/p' pyproject.toml); \
	    .venv-peers/bin/python -m pip install -qq --no-deps "$$pin+cpu" 2>/dev/null || .venv-peers/bin/python -m pip install -qq "$$pin"
	@.venv-peers/bin/python -m pip install -qq trl
	@touch $@

study: $(READY) ## Measure what staleness costs, in many runs of the main job; an interrupted study continues (ARGS="seeds")
	@$(VENV_PYTHON) -m benchmarks.study $(ARGS)

dashboards: $(READY) ## Write Grafana dashboards in JSON from dashboards/content.py
	@$(VENV_PYTHON) -m dashboards.build

dashboard-pictures: $(READY) ## Draw each dashboard from a run (RUN=runs/latest; ARGS="--port 9090" asks make monitoring)
	@$(VENV_PYTHON) -m dashboards.pictures $(or $(RUN),runs/latest) $(ARGS)

monitoring: $(READY) ## Start Prometheus with the project's alert rules on the runs in runs/, or replay a run (RUN=runs/latest)
	@$(VENV_PYTHON) -m dashboards.prometheus $(if $(RUN),--recorded $(RUN)) $(ARGS)

skip-ls: $(READY) ## List recordings of generation, which --skip-… options make (DIR=dump_dir)
	@$(VENV_PYTHON) -m miles_async.skip ls $(if $(DIR),--dir $(DIR)) $(ARGS)

skip-rm: $(READY) ## Remove recordings of generation (DIR=dump_dir, ARGS="--steps 5-9"; without --steps all of them)
	@$(VENV_PYTHON) -m miles_async.skip rm $(if $(DIR),--dir $(DIR)) $(ARGS)

notebook: $(READY) ## Execute the tutorial docs/windowed-fifo.ipynb again, and keep what it prints
	@$(VENV_PYTHON) docs/notebook.py docs/windowed-fifo.ipynb

inspect: $(READY) ## Show a saved batch (ARGS="debug/0.safetensors", or ARGS="debug/0.safetensors --sample 7")
	@$(VENV_PYTHON) -m workers.inspect_rollout $(ARGS)

report: $(READY) ## Write one HTML file about a run (RUN=runs/latest), or about two (WITH=runs/other)
	@$(VENV_PYTHON) -m miles_async.observability.page.report $(or $(RUN),runs/latest) $(if $(WITH),--with $(WITH)) $(ARGS)

groups: $(READY) ## Show where the groups of a run are (RUN=runs/latest), or the life of one (GROUP=sample_0_17)
	@$(VENV_PYTHON) -m miles_async.observability.trace.groups $(or $(RUN),runs/latest) $(if $(GROUP),--group $(GROUP))

cluster-up: $(READY) ## Start a Ray cluster of three nodes in network namespaces of this machine; needs root (ARGS="--engines 2")
	@$(VENV_PYTHON) -m benchmarks.cluster up $(ARGS)

cluster-down: $(READY) ## End that cluster, and the jobs that run on it
	@$(VENV_PYTHON) -m benchmarks.cluster down

docs: $(READY) ## Build the documentation site in site/; a broken link is an error
	@NO_MKDOCS_2_WARNING=1 $(VENV_PYTHON) -m mkdocs build --strict

lint: $(READY) ## Check style, types (mypy --strict), import rules and the words and sentences of pages
	@$(VENV_PYTHON) -m ruff check .
	@$(VENV_PYTHON) -m ruff format --check .
	@$(VENV_PYTHON) -m mypy
	@.venv/bin/lint-imports
	@$(VENV_PYTHON) -m pytest --quiet --no-header tests/unit/test_retired_words.py

format: $(READY) ## Fix and format the code with ruff
	@$(VENV_PYTHON) -m ruff check --fix .
	@$(VENV_PYTHON) -m ruff format .

lock: ## Resolve requirements/*.lock again from pyproject.toml and requirements/*.in (ARGS=--upgrade)
	@bash requirements/lock.sh $(ARGS)

clean: ## Remove .venv, the other .venv-*, caches and build output; keeps runs/ and warm-started models
	@rm -rf .venv .venv-bridge .venv-peers .venv-verifiers .venv-openenv .venv-roll .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis *.egg-info build dist site
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
