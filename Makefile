# The words used by hand and in CI. Needs python3 (3.11 or newer), make and pip.
PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python
WORKERS = 2

.PHONY: demo test check gates slow proofs docs site lowest lowest-torch pythons lint types bench gpu slurm clean

demo: $(VENV)/demo-ready            ## make a volume, denoise it, write a report of what was done
	$(RUN) -m penstock generate volume demo/noisy.ome.zarr --shape 96 240 240 --overwrite
	$(RUN) -m penstock infer --in-spec demo/noisy.ome.zarr --out-spec demo/denoised.ome.zarr \
		--model-type denoise-tiny --patch 64 --overlap 16 --overwrite
	$(RUN) -m penstock report demo/denoised.ome.zarr --output demo/report.html --overwrite

# Each worker imports and collects all again, for 10 s of a CPU. CI has no CPU for a second one, as
# the slow tests run beside these.
test: $(VENV)/ready                 ## the default tests
	OMP_NUM_THREADS=1 $(RUN) $(COVERED) -m pytest -n $(WORKERS) --dist worksteal

check: COVERED = -m coverage run    ## what CI runs
check: WORKERS = 1
check: slow lint types gates lowest pythons  # the longest first, where several run at a time

gates: test                         ## how much of the package the default tests reach
	$(RUN) tests/coverage_gates.py

# The commands of README and docs take longest, and begin first.
slow: site                          ## the slow tests, README and docs, and laws with many examples
	SITE=build/site OMP_NUM_THREADS=1 $(RUN) -m pytest -m "(slow or docs or hypothesis) and not long" \
		--hypothesis-profile many -n 3 --dist worksteal tests/test_docs.py tests

LOWEST = $(addprefix tests/, data/test_bad_stores.py data/test_chips.py data/test_generate.py \
	data/test_killed_sinks.py data/test_netcdf.py data/test_normalize.py data/test_packed.py \
	data/test_remote_stores.py data/test_scenes.py data/test_sinks.py data/test_sources.py data/test_tiff.py \
	inference/test_job.py inference/test_plan.py inference/test_run.py \
	instruments/test_gpus.py loading/test_contenders.py loading/test_faults.py \
	loading/test_loader_lightning.py loading/test_server_errors.py reports/test_csv.py \
	reports/test_figures.py training/test_detector.py training/test_loop.py \
	training/test_tracking.py)

# Each worker of xdist would load all libraries again, and the slow tests run beside these.
lowest: $(VENV)-lowest/ready        ## data, inference, loaders and training on the lowest versions allowed
	OMP_NUM_THREADS=1 $(VENV)-lowest/bin/python -m pytest $(LOWEST)

# No part of `make check`: torch of that age comes with gigabytes of CUDA libraries.
lowest-torch: $(VENV)-lowest-torch/ready ## the same, and all that computes, with the lowest torch too
	OMP_NUM_THREADS=1 $(VENV)-lowest-torch/bin/python -m pytest -n 2 --dist worksteal $(LOWEST) \
		$(addprefix tests/, bench inference loading models training)

# Tests that need nothing but the core.
CORE = $(addprefix tests/, test_platforms.py base/test_labels.py base/test_threads.py \
	base/test_words.py bench/test_boundary.py bench/test_launch.py bench/test_suite_presets.py \
	bench/test_sweep.py cli/test_doctor.py cli/test_help.py \
	cluster/test_place.py cluster/test_slurm_jobs.py \
	cluster/test_slurm_submit.py data/test_grid.py \
	data/test_normalize.py data/test_volumes.py data/test_weather.py \
	data/test_windows.py \
	instruments/test_environment.py instruments/test_ledger.py instruments/test_page_cache.py instruments/test_sampler.py \
	loading/test_fields.py loading/test_order.py \
	reports/test_cells.py reports/test_compare.py reports/test_csv.py reports/test_headlines.py \
	reports/test_model_report.py reports/test_queue_model.py \
	reports/test_run_sources.py reports/test_runs.py \
	reports/test_tune.py scaling/test_broken_logs.py scaling/test_folders.py \
	scaling/test_intervals.py scaling/test_laws.py scaling/test_logs.py scaling/test_ranks.py \
	scaling/test_sentences.py scaling/test_shapes.py scaling/test_simulate.py \
	scaling/test_simulate_verb.py scaling/test_sources.py scaling/test_study.py \
	scaling/test_tables.py scaling/test_tracked.py scaling/test_trackers.py)

# The newest Python of this machine: CI's environment is made of the oldest. By hand, all of them:
# make pythons PYTHONS="python3.12 python3.13"
PYTHONS = $(lastword $(wildcard $(foreach n,12 13 14,/usr/bin/python3.$n /usr/local/bin/python3.$n \
	$(HOME)/.pyenv/versions/3.$n.*/bin/python3.$n)))

pythons:                            ## the core alone, and its tests, on another Python
	for python in $(PYTHONS); do $$python --version && \
		$$python -m venv --clear $(VENV)-other && \
		$(VENV)-other/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
			-e . pytest hypothesis && \
		$(VENV)-other/bin/python -m pytest -q $(CORE) || exit 1; done

proofs: $(VENV)/ready               ## before a release: tests whose law a quicker one holds too
	OMP_NUM_THREADS=1 $(RUN) -m pytest -m "long or hypothesis" --hypothesis-profile most \
		-n 2 --dist worksteal

docs: $(VENV)/ready                 ## every command of README and docs, in order
	OMP_NUM_THREADS=1 $(RUN) -m pytest -m docs tests/test_docs.py

site: $(VENV)/ready                 ## the site, in build/site: open build/site/index.html
	OMP_NUM_THREADS=1 $(RUN) -m sphinx -b html -W --keep-going -E -q -d build/doctrees docs build/site

lint: $(VENV)/ready
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check

types: $(VENV)/ready
	$(RUN) -m mypy

bench: $(VENV)/ready                ## benchmarks of this machine, recorded in benchmarks/
	$(RUN) benchmarks/infer.py
	$(RUN) benchmarks/harness.py
	$(RUN) benchmarks/refusals.py
	$(RUN) benchmarks/loader.py
	$(RUN) benchmarks/loader_remote.py
	$(RUN) benchmarks/drain.py
	$(RUN) benchmarks/preprocess.py
	$(RUN) benchmarks/detector.py
	$(RUN) benchmarks/trackers.py

gpu: $(VENV)/ready                  ## tests that need a CUDA device
	$(RUN) -m pytest -m gpu

slurm: $(VENV)/ready                ## tests on two SLURMs of two nodes, started here (root, slurm-wlm, iproute2)
	$(RUN) -m pytest -n 2 --dist loadfile -m slurm tests/cluster

# torch goes in by exact version: asked for in a range, or by another package, pip would fetch the
# newest build with gigabytes of CUDA libraries. What is never imported need not be compiled.
PIP = $(RUN) -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

$(VENV)/demo-ready: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || \
		{ echo "there is no $(PYTHON); install Python 3.11 or newer, or name one: make demo PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("$(PYTHON) is Python %d.%d, and Penstock needs 3.11 or newer; name one: make demo PYTHON=python3.12" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$$(grep '^torch==' constraints.txt)" -e '.[demo]' || \
		{ echo "pip could not install it; without a network, PIP_INDEX_URL may name an index of yours"; exit 1; }
	touch $@

# Tests import so much that it is compiled at once, on all cores, and not while they run. Some
# packages bring templates that are no Python, and of some next to nothing is imported: a fifth of
# what would be compiled. pytest compiles the tests itself, in 6 s: here once, and not in each of its
# workers.
UNCOMPILED = /(tests?|testing|_inductor|_vendor|aiohttp|cfnlint|databricks|distutils|dns|dulwich|fontTools|$\
	huggingface_hub|imageio|lexers|moto|mypyc?|physics|pip|pydicom|quantization|sentry_sdk|setuptools|$\
	sklearn|timm|transformers|wcwidth)/

$(VENV)/ready: $(VENV)/demo-ready
	$(PIP) -e '.[test,docs]'
	$(RUN) -m compileall -qq -j 0 -x '$(UNCOMPILED)' $(VENV)/lib src || true
	$(RUN) -m pytest --collect-only -qq >/dev/null || true
	touch $@

INSTALL_LOWEST = $(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
	-c $(1) "$$(grep '^torch==' $(1))" -e '.[all,track]' hypothesis pytest pytest-xdist

$(VENV)-lowest/ready: pyproject.toml constraints.txt lowest.txt
	$(PYTHON) -m venv $(VENV)-lowest
	{ grep -v '^torch' lowest.txt; grep -E '^torch(vision)?==' constraints.txt; } > $(@D)/pins.txt
	$(call INSTALL_LOWEST,$(@D)/pins.txt)
	touch $@

$(VENV)-lowest-torch/ready: pyproject.toml lowest.txt
	$(PYTHON) -m venv $(VENV)-lowest-torch
	$(call INSTALL_LOWEST,lowest.txt)
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-lowest $(VENV)-lowest-torch $(VENV)-other build demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
