# The words used by hand and in CI. Needs python3 (3.11 or newer), make and pip.
PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python

.PHONY: demo test check docs lowest pythons lint types bench gpu slurm clean

demo: $(VENV)/demo-ready            ## make a volume, denoise it, show before and after
	$(RUN) -m penstock demo

test: $(VENV)/ready                 ## the default tests: five minutes on two cores
	OMP_NUM_THREADS=1 $(RUN) $(COVERED) -m pytest -n 2 --dist worksteal

# The commands of README and docs take longest, and begin first.
check: COVERED = -m coverage run    ## what CI runs
check: lint types test lowest pythons
	$(RUN) tests/coverage_gates.py
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 --dist worksteal -m "slow or docs" --maxfail 3 \
		tests/test_docs.py tests

LOWEST = tests/data/test_sources.py tests/data/test_tiff.py tests/data/test_sinks.py tests/data/test_killed_sinks.py \
	tests/data/test_remote_stores.py tests/data/test_bad_stores.py tests/data/test_grid.py tests/inference/test_stitch.py tests/data/test_normalize.py \
	tests/inference/test_plan.py tests/inference/test_job.py tests/inference/test_run.py tests/reports/test_figures.py

lowest: $(VENV)-lowest/ready        ## stores, grid and inference on the lowest versions allowed
	OMP_NUM_THREADS=1 $(VENV)-lowest/bin/python -m pytest -n 2 --dist worksteal $(LOWEST)

# Pythons of this machine that CI's environment is not made of.
PYTHONS = $(wildcard $(foreach n,10 12 13 14,/usr/bin/python3.$n /usr/local/bin/python3.$n \
	$(HOME)/.pyenv/versions/3.$n.*/bin/python3.$n))

pythons:                            ## the core alone, and its tests, on each other Python there is
	for python in $(PYTHONS); do $$python --version && \
		$$python -m venv --clear $(VENV)-other && \
		$(VENV)-other/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
			-e . pytest pytest-xdist hypothesis && \
		$(VENV)-other/bin/python -m pytest -q -n 2 --dist worksteal -m "not slow" $(CORE) || exit 1; done

docs: $(VENV)/ready                 ## every command of README and docs, in order
	OMP_NUM_THREADS=1 $(RUN) -m pytest -m docs tests/test_docs.py

lint: $(VENV)/ready
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check

types: $(VENV)/ready
	$(RUN) -m mypy

bench: $(VENV)/ready                ## benchmarks of this machine, recorded in benchmarks/
	$(RUN) benchmarks/infer.py
	$(RUN) benchmarks/harness.py
	$(RUN) benchmarks/loader.py
	$(RUN) benchmarks/loader_remote.py
	$(RUN) benchmarks/drain.py
	$(RUN) benchmarks/preprocess.py
	$(RUN) benchmarks/detector.py
	$(RUN) benchmarks/trackers.py

gpu: $(VENV)/ready                  ## tests that need a CUDA device
	$(RUN) -m pytest -m gpu

slurm: $(VENV)/ready                ## tests on a SLURM of two nodes, started here (root, slurm-wlm, iproute2)
	$(RUN) -m pytest -m slurm tests/cluster/test_slurm_cluster.py

# torch goes in by exact version: asked for in a range, or by another package, pip would fetch the
# newest build with gigabytes of CUDA libraries. What is never imported need not be compiled.
PIP = $(RUN) -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

$(VENV)/demo-ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$$(grep '^torch==' constraints.txt)" -e '.[demo]'
	touch $@

$(VENV)/ready: $(VENV)/demo-ready
	$(PIP) -e '.[test]'
	touch $@

$(VENV)-lowest/ready: pyproject.toml lowest.txt
	$(PYTHON) -m venv $(VENV)-lowest
	$(VENV)-lowest/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
		-c lowest.txt "$$(grep '^torch==' lowest.txt)" -e '.[infer,plot]' \
		hypothesis pytest pytest-xdist zarr
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-lowest $(VENV)-other demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
