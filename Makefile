SHELL := bash
PYTHON := .venv/bin/python
READY := .venv/ready
ARGS ?=

# Two processes; whole files, and all tests that share a cluster, go to the same one (tests/conftest.py).
BOTH_CORES := --numprocesses 2 --no-loadscope-reorder
ROLLOUT := miles_async.rollout.fully_async_rollout.generate_rollout_fully_async

.DEFAULT_GOAL := help
.PHONY: help setup setup-gpu run browser test test-unit test-stack sim bench dashboards monitoring inspect report lint format lock clean skip-ls skip-rm

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20
	@printf '\nARGS="…" passes flags on: make run ARGS="--num-rollout 20 --seed 7", make test ARGS="-k staleness"\n'

setup: $(READY) ## Create .venv from requirements/cpu.lock; does nothing when it is up to date

# Only a changed lock or project file installs anything, so a second `make run` starts at once.
$(READY): requirements/cpu.lock pyproject.toml requirements/install.sh
	@bash requirements/install.sh
	@touch $@

setup-gpu: ## On a machine with CUDA: install SGLang with its own dependencies and Mooncake's RDMA build
	@bash requirements/install.sh gpu
	@touch $(READY)

run: $(READY) ## The main job: a tiny model learns arithmetic under fully asynchronous RL
	@$(PYTHON) train_async.py --config configs/arithmetic-cpu.yaml --rollout-function-path $(ROLLOUT) $(ARGS)

# Only tests need it, so `make run` does not wait for it.
browser: ## Debian's Chromium, for the tests of pages
	@bash requirements/browser.sh

test: $(READY) browser ## All tests: unit, simulation, then the real engines (at most 10 minutes)
	@$(PYTHON) -m pytest tests/stack tests/sim tests/unit $(BOTH_CORES) $(ARGS)

test-unit: $(READY) ## Unit tests, seconds
	@$(PYTHON) -m pytest tests/unit $(BOTH_CORES) $(ARGS)

test-stack: $(READY) browser ## Tests on the real engines
	@$(PYTHON) -m pytest tests/stack $(BOTH_CORES) $(ARGS)

sim: $(READY) ## The real pipeline under a virtual clock: scenarios as tables, JSON and plots (ARGS="filtered ladder")
	@$(PYTHON) -m tests.sim.run --figures docs $(ARGS)

bench: $(READY) ## Benchmarks on this machine: tables, and JSON in benchmarks/results/
	@$(PYTHON) -m benchmarks.core_cost
	@$(PYTHON) -m benchmarks.packing
	@$(PYTHON) -m benchmarks.packed_training
	@$(PYTHON) -m benchmarks.checkpoints
	@$(PYTHON) -m benchmarks.publish_gap
	@$(PYTHON) -m benchmarks.overlap
	@$(PYTHON) -m benchmarks.skip_replay
	@$(PYTHON) -m benchmarks.jsonl_start
	@$(PYTHON) -m benchmarks.rollout_worker
	@$(PYTHON) -m benchmarks.page
	@$(PYTHON) -m benchmarks.instrumentation
	@$(PYTHON) -m benchmarks.frozen

dashboards: $(READY) ## Write Grafana's dashboards as JSON from dashboards/content.py
	@$(PYTHON) -m dashboards.build

monitoring: $(READY) ## A real Prometheus with our rules on the runs in runs/, or on a recorded one (RUN=runs/latest)
	@$(PYTHON) -m dashboards.prometheus $(if $(RUN),--recorded $(RUN)) $(ARGS)

skip-ls: $(READY) ## List recordings that --skip-… made (DIR=dump_dir)
	@$(PYTHON) -m miles_async.skip ls $(if $(DIR),--dir $(DIR)) $(ARGS)

skip-rm: $(READY) ## Remove recordings (DIR=dump_dir, ARGS="--steps 5-9"); all of them without --steps
	@$(PYTHON) -m miles_async.skip rm $(if $(DIR),--dir $(DIR)) $(ARGS)

inspect: $(READY) ## Look at a saved batch (ARGS="debug/0.safetensors", or with --sample 7)
	@$(PYTHON) -m workers.inspect_rollout $(ARGS)

report: $(READY) ## One HTML file about a run (RUN=runs/latest), or about two (WITH=runs/other)
	@$(PYTHON) -m miles_async.observability.page.report $(or $(RUN),runs/latest) $(if $(WITH),--with $(WITH)) $(ARGS)

lint: $(READY) ## ruff, mypy --strict and the import rules
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m ruff format --check .
	@$(PYTHON) -m mypy
	@.venv/bin/lint-imports

format: $(READY) ## Let ruff rewrite what it can
	@$(PYTHON) -m ruff check --fix .
	@$(PYTHON) -m ruff format .

lock: ## Renew requirements/cpu.lock from pyproject.toml and requirements/cpu.in
	@bash requirements/lock.sh

clean: ## Remove .venv and caches; keeps runs/ and warm-started models
	@rm -rf .venv .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis *.egg-info build
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
