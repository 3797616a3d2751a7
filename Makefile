# `make demo` and `make test` need Python 3.11+ and make; all else is installed into .venv, in the versions, and with the
# hashes, of requirements/ (`make lock` writes them).
PYTHON ?= python3
BIN := .venv/bin
# The build of torch: cuda, or cpu without NVIDIA's libraries; an environment keeps the one that it was made with.
TORCH ?= $(or $(shell cat .venv/torch 2>/dev/null),cuda)
# Python compiles what it imports, once: that is a tenth of what pip would compile.
OPTIONS := --disable-pip-version-check --no-compile
PIP := $(BIN)/python -m pip install $(OPTIONS)
LOCKED := --no-build-isolation --no-deps --require-hashes -r
PROJECT := --no-build-isolation --no-deps -e .

# Where the environment keeps Python from writing what it compiled, each of the demo's workers would compile it again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test quick lint lock conformance judges campaign calibration catalogue readme codec accuracy routing drafts plots report

setup: .venv/installed .venv/installed-dev

# The lock without what is part of torch's CUDA build alone (and, where nobody tests it, without triton).
CUDA_ONLY := torch|cuda-|nvidia-
ifeq ($(TORCH),cpu)
locked = awk '/^[a-z]/ { skip = /^($(CUDA_ONLY)$(2))/ && !/^nvidia-ml-py/ } !skip' requirements/$(1).txt >.venv/$(1).txt
torch = $(PIP) --no-deps --index-url https://download.pytorch.org/whl/cpu "$$(sed -n 's/^\(torch==[^ ]*\) .*/\1/p' requirements/run.txt)"
else
locked = cp requirements/$(1).txt .venv/$(1).txt
torch =
endif

# DeepSpeed is built without isolation: its set-up imports torch, and an isolated build would fetch another one.
# A recent pip resolves in half the time; the pip of $(PYTHON) installs it sooner than `ensurepip` installs its own one.
.venv/installed: setup.cfg pyproject.toml requirements/build.txt requirements/run.txt
	$(PYTHON) -c 'import sys; sys.exit("zinfer needs Python 3.11 or newer: run `make PYTHON=python3.12 ..`") if sys.version_info < (3, 11) else 0'
	@echo "installing into .venv, with torch for $(TORCH) (README.md says how much that is); pip fetches it once"
	$(PYTHON) -m venv --without-pip .venv
	echo $(TORCH) >.venv/torch
	$(PYTHON) -m pip --python $(BIN)/python install $(OPTIONS) --quiet --require-hashes -r requirements/build.txt || \
	  { $(BIN)/python -m ensurepip && $(PIP) --quiet --require-hashes -r requirements/build.txt; }
	$(torch)
	$(call locked,run,|triton)
	DS_BUILD_OPS=0 $(PIP) $(LOCKED) .venv/run.txt
	$(PIP) $(PROJECT)
	@touch $@

# TensorRT-RTX builds plans without a GPU, so that the tests of `zinfer pack --engine tensorrt` run anywhere.
.venv/installed-dev: .venv/installed requirements/dev.txt
	$(call locked,dev)
	$(PIP) $(LOCKED) .venv/dev.txt
	@touch $@

demo: .venv/installed
	@$(BIN)/zinfer demo

# Two processes share the cores: more threads in each would get into each other's way.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Run the tests that load no torch and take no seconds: a minute on two cores.
quick: setup
	$(BIN)/python -m pytest --quick -n 2 --dist loadfile

# Compare small random models of every causal type of the installed transformers, in every way, with `generate`.
conformance: setup
	$(BIN)/python -m tools.conformance
	$(BIN)/python -m tools.pages

# Let tools of others judge: lm-evaluation-harness and MLPerf LoadGen, as clients of zinfer.
judges: setup
	$(call locked,judges)
	$(PIP) $(LOCKED) .venv/judges.txt
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -p tests.conftest -m slow tools/judges.py

# Kill and starve every command, some 1,000 times; hours, of a case three starts of zinfer or more.
campaign: setup
	$(BIN)/python -m tools.campaign --count 36 --jobs $$(nproc) -o sweeps/results/reliability.jsonl
	$(BIN)/python -m tools.pages

# Fit the calibration that comes with zinfer to the records in sweeps/results.
calibration: .venv/installed
	$(BIN)/python -c 'from pathlib import Path; from zinfer.analysis import calibrate; calibrate.write(Path("zinfer/catalog/calibration.json"))'

# Count the layers of the catalogue's models anew, after a change of models.toml or of transformers.
catalogue: .venv/installed
	$(BIN)/python -m tools.shapes

# Write the tables of README.md and docs/*.md anew from the records.
readme: setup
	$(BIN)/python -m tools.pages

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Write requirements/ anew after a change of setup.cfg; versions stay, unless UPGRADE=--upgrade.
UV := .scratch/uv/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --custom-compile-command 'make lock'
lock:
	$(PYTHON) -m venv .scratch/uv
	.scratch/uv/bin/python -m pip install --disable-pip-version-check --quiet 'uv>=0.9'
	$(UV) $(UPGRADE) setup.cfg --extra engines --extra tensorrt-rtx --extra dev -o requirements/dev.txt
	$(UV) -c requirements/dev.txt setup.cfg --extra engines -o requirements/run.txt
	$(UV) $(UPGRADE) -c requirements/dev.txt setup.cfg --extra engines --extra judges --extra ray -o requirements/judges.txt
	printf 'pip>=25\nsetuptools>=77\nwheel\n' | $(UV) $(UPGRADE) -c requirements/dev.txt - -o requirements/build.txt

# Measure the codec on drawn weights and on trained ones, of a small model that is trained first (better on a GPU).
codec: .venv/installed .scratch/trained/model.safetensors
	$(BIN)/zinfer study codec .scratch/trained

# Measure the accuracy that an 8-bit KV cache and weights in fewer bits cost that model, on source code outside its
# training data.
accuracy: .venv/installed .scratch/trained/model.safetensors
	$(BIN)/zinfer study accuracy --model .scratch/trained --offload cpu --kv-cache-dtype auto,int8,fp8 \
	  --weights int4 --weights int8 --weights fp8 \
	  --prompt-file .scratch/trained/held-out.txt --input-len 384 --output-len 128 --samples 64 --batch-size 64

# Measure which experts a small mixture needs, trained first (minutes on one core), on source it was not trained on.
routing: .venv/installed .scratch/mixture/model.safetensors
	$(BIN)/zinfer study routing --model .scratch/mixture --prompt-file .scratch/mixture/held-out.txt --samples 32

# Measure drafts: the text of that small model, and the bytes of a model of 74 GB (a GPU, and 90 GB of host memory). A
# smaller one, trained likewise, drafts for it with the bytes and layers of a model of 0.8 GB, as does one without
# training, which is always wrong.
DRAFT := --hidden-size 1024 --intermediate-size 4096 --layers 24
drafts: .venv/installed .scratch/padded/requests.jsonl .scratch/draft/requests.jsonl .scratch/untrained/requests.jsonl
	$(BIN)/zinfer sweep -m .scratch/padded --engine stream --offload cpu -O weight_codec=none \
	  --draft none,ngram,.scratch/draft,.scratch/untrained \
	  --requests .scratch/padded/requests.jsonl --num-requests 1x --in-flight 1,32,96

.scratch/padded/requests.jsonl: tools/padded.py .scratch/trained/model.safetensors
	$(BIN)/python -m tools.padded .scratch/trained $(@D)

.scratch/draft/requests.jsonl: tools/padded.py .scratch/small/model.safetensors
	$(BIN)/python -m tools.padded .scratch/small $(@D) $(DRAFT)

.scratch/untrained/requests.jsonl: tools/padded.py .scratch/small-untrained/model.safetensors
	$(BIN)/python -m tools.padded .scratch/small-untrained $(@D) $(DRAFT)

.scratch/small/model.safetensors: tools/trained.py
	$(BIN)/python -m tools.trained $(@D) --hidden-size 256 --layers 4

.scratch/small-untrained/model.safetensors: tools/trained.py
	$(BIN)/python -m tools.trained $(@D) --hidden-size 256 --layers 4 --steps 0

.scratch/mixture/model.safetensors: tools/trained.py
	$(BIN)/python -m tools.trained $(@D) --experts 32 --hidden-size 128 --steps 500 --batch 4

.scratch/trained/model.safetensors: tools/trained.py
	$(BIN)/python -m tools.trained $(@D)

# All figures and reports: those that README and docs show are in git, and drawn anew; git ignores the others.
plots: .venv/installed
	$(BIN)/zinfer plot --machine all --format svg

report: .venv/installed
	$(BIN)/zinfer report sweeps/results/nvidia-h200-x4/bloom-176b-whole-kv.jsonl -o plots/report.html
	$(BIN)/zinfer report --machine all
