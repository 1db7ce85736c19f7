# `make run` and `make test` need nothing but Python >= 3.10 with pip; the first call installs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: run test lab lint mutants clean reproduce

TABLE ?= mnist_table
ARGS ?= base=mnist_d3

run: $(STAMP)
	$(BIN)/python -m treeprop_ray.train name=digits fresh=true engine=ray placement=per_node batch=128 lr=0.006

test: $(STAMP)
	$(BIN)/python -m pytest

# a table of the paper, e.g. make reproduce TABLE=alpha_beta ARGS=base=cifar10_vit; continues when cut
reproduce: $(STAMP)
	$(BIN)/python -m treeprop_ray.tune sweep=$(TABLE) $(ARGS)

# changes one line of the core at a time; every change must make a test fail (about half a minute each)
mutants: $(STAMP)
	$(BIN)/python tests/mutants.py $(ARGS_MUTANTS)

# the laboratory: 100 seeded faults and the fuzz; as root also hosts in network namespaces
lab: $(STAMP)
	PYTHONPATH=.:tests $(BIN)/python -m lab faults=100 seed=1 to=results $(ARGS_LAB)
	PYTHONPATH=.:tests $(BIN)/python -m lab.fuzz lines=1500 files=300 seed=1 to=results

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info

# torch first and pinned: an open range would fetch several gigabytes of CUDA libraries.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@
