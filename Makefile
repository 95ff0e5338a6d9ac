# Every target builds and uses .venv in this folder. `make help` lists them.
PYTHON ?= python3
BIN    := .venv/bin
STAMP  := .venv/.installed
TORCH_BIN   := .venv-torch/bin
TORCH_STAMP := .venv-torch/.installed
PACKAGES := schemas observability broker engine producers consumers cli

.DEFAULT_GOAL := help
.PHONY: help setup torch system demo test unit versions soak fuzz lint typing bench lock docs clean

help: ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 18

setup: system $(STAMP) typing ## everything the other targets need (virtual environment, Java, Maven, kcat)

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "moebus needs Python 3.10 or newer: make PYTHON=/path/to/python3.x")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || { echo "cannot make .venv: install the venv module (Debian: apt-get install python3-venv)"; exit 1; }
	@echo "installing locked dependencies into .venv (about a minute the first time)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements.lock
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

torch: setup $(TORCH_STAMP) ## torch and moebus in .venv-torch, for examples/ and tests/torch (5 GB; Paddle is not there)

# Paddle and torch must not share a process, so they share no environment either. The rest is as locked.
$(TORCH_STAMP): $(STAMP) examples/requirements-torch.txt
	@echo "installing torch into .venv-torch: 5 GB on disk (TORCH=0 make test leaves it out)"
	@$(BIN)/uv venv -q --clear --python $(BIN)/python .venv-torch
	@$(BIN)/uv pip install -q --python $(TORCH_BIN)/python -c requirements.lock -r pyproject.toml -r examples/requirements-torch.txt
	@$(BIN)/uv pip install -q --python $(TORCH_BIN)/python --no-deps --no-build-isolation -e .
	@touch $@

system:
	@sh deploy/system-packages.sh

typing:
	@mkdir -p .typing/moebus
	@for d in $(PACKAGES); do ln -sfn ../../$$d .typing/moebus/$$d; done

demo: setup ## the main job end to end on a real Kafka, under 5 minutes; KEEP=1 leaves it running
	@$(BIN)/moebus demo $(if $(KEEP),--keep)

# Three workers keep two cores busy while some tests wait; files stay whole because some have a broker of their own,
# and go in order of their names: acceptance and chaos, which wait longest, first.
test: setup $(if $(filter 0,$(TORCH)),,torch) ## all tests (starts its own Kafka); TORCH=0 without those of torch
	$(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

unit: setup ## only the tests that take milliseconds
	$(BIN)/python -m pytest -q tests/unit $(ARGS)

versions: setup ## unit tests on the oldest and the newest Python supported, where they are installed
	@sh tests/versions.sh 3.10 3.13

soak: setup ## random traffic against stores and readers, 2 minutes a seed; SEEDS=1,2,3
	$(BIN)/python bench/torture.py --seeds $(or $(SEEDS),1,2,3)

fuzz: setup ## the decoders under atheris, in an environment of its own (Python 3.11); FUZZ_SECONDS=60 each
	@sh tests/fuzz/fuzz.sh $(or $(FUZZ_SECONDS),60)

lint: setup ## ruff and mypy --strict, code and tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(addprefix -p moebus.,$(PACKAGES))
	$(BIN)/mypy tests bench examples

bench: setup ## benchmarks, each beside its peer
	@for f in bench/bench_*.py; do echo "== $$f"; $(BIN)/python $$f || exit 1; done

docs: setup ## regenerate the generated pages
	$(BIN)/python -m moebus.schemas.export docs/schemas
	$(BIN)/python -m moebus.observability.export docs/metrics.md
	$(BIN)/python -m moebus.consumers.control.export docs/lifecycle.md
	$(BIN)/python -m moebus.observability.dashboard deploy/grafana/dashboards/moebus.json

lock: ## resolve pyproject.toml again into requirements.lock
	$(BIN)/uv pip compile -q --universal --python-version 3.10 --generate-hashes --no-annotate --no-emit-index-url --no-header --extra dev pyproject.toml -o requirements.lock

clean: ## remove what make made here
	rm -rf .venv .venv-torch .typing .run build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
