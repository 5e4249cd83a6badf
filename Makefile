# make env         the environment in .venv, from requirements.txt
# make quickstart  train a tiny text-to-image model from scratch on real digits and look at what it draws
# make test        lint, format check, types, tests
# make slurm       Debian's SLURM for the tests that start one, where it can be installed (a part of make test)
# make format      rewrite the sources in the project's format
# make docs        rewrite docs/config.md from the schema
# make audit     known weaknesses of the pinned packages (needs the network)
# make clean       remove the environment and caches; runs and data stay

# Python 3.11 or 3.12 for the pinned versions: make PYTHON=python3.12 env
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/requirements.stamp

# Two threads on two busy cores are slower than one by an order of magnitude.
export OMP_NUM_THREADS := 1
# The environment is installed without bytecode; where nobody may write it, every process compiles torch again: 10 s.
export PYTHONDONTWRITEBYTECODE :=

# Tests with bounds on rounding; they run again with the kernels of another CPU.
NUMERICAL := tests/conformance tests/unit/diffusion tests/unit/optim

.PHONY: env test slurm quickstart format docs audit clean

env: $(STAMP)

# Made anew when requirements.txt changes, so that nothing of the old set stays behind. Without --no-compile pip would
# spend a minute on compiling twenty thousand files of which a run imports a tenth.
$(STAMP): requirements.txt
	rm -rf $(VENV)
	$(PYTHON) -c 'import sys; sys.exit(None if (3, 10) <= sys.version_info < (3, 13) else "Python 3.10 to 3.12 is needed (make PYTHON=python3.12)")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile -r requirements.txt
	# What a run imports gets its bytecode here, instead of at the first start or by all workers of the tests at once.
	$(BIN)/python -c 'from sd_training.log import quiet_libraries; quiet_libraries(); import sd_training.build.run'
	cp requirements.txt $@

# More workers than cores, because tests also wait: for clocks, for SLURM, for limits of time.
WORKERS := $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 2 ? 3 : 4)))

# Types are checked beside the tests that wait, which come first.
test: env slurm
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy & types=$$!; \
	SLURM_TEST_LOGS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder && wait $$types
	ATEN_CPU_CAPABILITY=default $(BIN)/python -m pytest -n 2 -q $(NUMERICAL)

slurm:
	@if command -v slurmctld >/dev/null || [ -x /usr/sbin/slurmctld ]; then :; \
	elif [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
		echo "SLURM is not installed, and only root can do it, by apt-get: its tests will be skipped"; \
	elif apt-get update -qq >/dev/null && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
		--no-install-recommends slurmctld slurmd slurm-client munge >/dev/null; then :; \
	else echo "SLURM could not be installed by apt-get: its tests will be skipped"; fi

quickstart: env
	$(BIN)/python scripts/quickstart.py

format: env
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: env
	$(BIN)/python -m tests.config_docs

# In an environment of its own: an auditor that brought packages into the one it audits would change it.
audit:
	$(PYTHON) -m venv $(VENV)-audit
	$(VENV)-audit/bin/python -m pip install --quiet --no-compile pip-audit
	$(VENV)-audit/bin/pip-audit --requirement requirements.txt --no-deps --disable-pip

clean:
	rm -rf $(VENV) $(VENV)-audit .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
