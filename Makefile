# `make demo` and `make test` need Python 3.11+ and make; all else is installed into .venv.
PYTHON ?= python3
BIN := .venv/bin
BUILDERS := 'pip>=25' 'setuptools>=77' wheel
# Python compiles what it imports, once: that is a tenth of what pip would compile.
OPTIONS := --disable-pip-version-check --no-compile -c constraints.txt
PIP := $(BIN)/python -m pip install $(OPTIONS)

# Where the environment keeps Python from writing what it compiled, each of the demo's workers would compile it again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test quick lint conformance judges mutants campaign catalogue readme codec accuracy routing drafts plots report

setup: .venv/installed .venv/installed-dev

# DeepSpeed is built without isolation: its set-up imports torch, and an isolated build would fetch another one.
# A recent pip resolves in half the time; the pip of $(PYTHON) installs it sooner than `ensurepip` installs its own one.
.venv/installed: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("zinfer needs Python 3.11 or newer: run `make PYTHON=python3.12 ..`") if sys.version_info < (3, 11) else 0'
	@echo "installing into .venv: torch, transformers and DeepSpeed are 1 to 4 GB, which pip fetches once"
	$(PYTHON) -m venv --without-pip .venv
	$(PYTHON) -m pip --python $(BIN)/python install $(OPTIONS) --quiet $(BUILDERS) || \
	  { $(BIN)/python -m ensurepip && $(PIP) --quiet --upgrade $(BUILDERS); }
	DS_BUILD_OPS=0 $(PIP) --no-build-isolation -e '.[engines]'
	@touch $@

# TensorRT-RTX builds plans without a GPU, so that the tests of `zinfer build` run anywhere.
.venv/installed-dev: .venv/installed
	$(PIP) --no-build-isolation -e '.[tensorrt-rtx,dev]'
	@touch $@

demo: .venv/installed
	@$(BIN)/zinfer demo

# Two processes share the cores: more threads in each would get into each other's way.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Run the tests that load no torch and draw no report.
quick: setup
	$(BIN)/python -m pytest --quick -n 2

# Compare small random models of every causal type of the installed transformers, in every way, with `generate`.
conformance: setup
	$(BIN)/python -m tests.conformance
	$(BIN)/python -m tests.readme

# Let tools of others judge: lm-evaluation-harness and MLPerf LoadGen, as clients of zinfer.
judges: setup
	$(PIP) --no-build-isolation -e '.[judges]'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow tests/test_judges.py

# Plant a dozen faults into copies of zinfer, and see that the tests of each catch it; four minutes.
mutants: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow tests/test_mutants.py

# Kill, starve and feed damaged inputs to every command, some 3,700 times; hours on two cores, minutes on 16.
campaign: setup
	$(BIN)/python -m tests.campaign --count 75 --ordinary 0.02 --jobs $$(nproc) -o sweeps/results/reliability.jsonl
	$(BIN)/python -m tests.readme

# Count the layers of the catalogue's models anew, after a change of models.toml or of transformers.
catalogue: .venv/installed
	$(BIN)/python -m tests.shapes

# Write the tables of README.md and docs/*.md anew from the records.
readme: setup
	$(BIN)/python -m tests.readme

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Measure the codec on trained weights: of a small model that is trained first (better on a GPU), and of two downloads.
codec: .venv/installed .scratch/trained/model.safetensors .scratch/published/resemblyzer.safetensors
	$(BIN)/zinfer codec --dtype bf16 .scratch/trained .scratch/published/*.safetensors

# Measure the accuracy that an 8-bit KV cache and weights in fewer bits cost that model, on source code outside its
# training data.
accuracy: .venv/installed .scratch/trained/model.safetensors
	$(BIN)/zinfer accuracy --model .scratch/trained --offload cpu --kv-cache-dtype auto,int8,fp8 \
	  --weights int4 --weights int8 --weights fp8 \
	  --prompt-file .scratch/trained/held-out.txt --input-len 384 --output-len 128 --samples 64 --batch-size 64

# Measure which experts a small mixture needs, trained first (minutes on one core), on source it was not trained on.
routing: .venv/installed .scratch/mixture/model.safetensors
	$(BIN)/zinfer routing --model .scratch/mixture --prompt-file .scratch/mixture/held-out.txt --samples 32

# Measure drafts: the text of that small model, and the bytes of a model of 74 GB (a GPU, and 90 GB of host memory). A
# smaller one, trained likewise, drafts for it with the bytes and layers of a model of 0.8 GB, as does one without
# training, which is always wrong.
DRAFT := --hidden-size 1024 --intermediate-size 4096 --layers 24
drafts: .venv/installed .scratch/padded/requests.jsonl .scratch/draft/requests.jsonl .scratch/untrained/requests.jsonl
	$(BIN)/zinfer sweep -m .scratch/padded --engine stream --offload cpu -O weight_codec=none \
	  --draft none,ngram,.scratch/draft,.scratch/untrained \
	  --requests .scratch/padded/requests.jsonl --num-requests 1x --in-flight 1,32,96

.scratch/padded/requests.jsonl: tests/padded.py .scratch/trained/model.safetensors
	$(BIN)/python -m tests.padded .scratch/trained $(@D)

.scratch/draft/requests.jsonl: tests/padded.py .scratch/small/model.safetensors
	$(BIN)/python -m tests.padded .scratch/small $(@D) $(DRAFT)

.scratch/untrained/requests.jsonl: tests/padded.py .scratch/small-untrained/model.safetensors
	$(BIN)/python -m tests.padded .scratch/small-untrained $(@D) $(DRAFT)

.scratch/small/model.safetensors: tests/trained.py
	$(BIN)/python -m tests.trained $(@D) --hidden-size 256 --layers 4

.scratch/small-untrained/model.safetensors: tests/trained.py
	$(BIN)/python -m tests.trained $(@D) --hidden-size 256 --layers 4 --steps 0

.scratch/mixture/model.safetensors: tests/trained.py
	$(BIN)/python -m tests.trained $(@D) --experts 32 --hidden-size 128 --steps 500 --batch 4

.scratch/trained/model.safetensors: tests/trained.py
	$(BIN)/python -m tests.trained $(@D)

.scratch/published/resemblyzer.safetensors: tests/published.py
	$(BIN)/python -m tests.published .scratch/published

# Figures and the report that are in git show the records in git alone: those of these machines.
SHIPPED := nvidia-h100-80gb-hbm3,nvidia-h100-80gb-hbm3-x2,nvidia-h100-80gb-hbm3-x2-32-cores-10-gib,nvidia-h100-80gb-hbm3-x4,nvidia-h200,nvidia-h200-16-cores-125-gib,nvidia-h200-x2,nvidia-h200-x4

plots: .venv/installed
	$(BIN)/zinfer plot --machine $(SHIPPED) --format svg

report: .venv/installed
	$(BIN)/zinfer report --machine $(SHIPPED) -o plots/report.html
