# `make run` and `make test` need nothing but Python >= 3.10 with pip; the first call installs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: run test docs notebooks lab lint mutants clean reproduce

TABLE ?= mnist_table
ARGS ?= base=mnist_d3
OUT ?= results/local

run: $(STAMP)
	$(BIN)/python -m treeprop_ray.train name=digits fresh=true engine=ray placement=per_node batch=128 lr=0.006

test: $(STAMP)
	$(BIN)/python -m pytest

# the documentation as a site, build/site/index.html; a broken link fails
docs: $(STAMP)
	$(BIN)/python docs/waves.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# every how-to, also those that start Ray
notebooks: $(STAMP)
	TREEPROP_NOTEBOOKS=1 $(BIN)/python -m pytest -n 0 tests/test_notebooks.py

# a table of the paper, e.g. make reproduce TABLE=alpha_beta ARGS=base=cifar10_vit; continues when cut
reproduce: $(STAMP)
	$(BIN)/python -m treeprop_ray.tune sweep=$(TABLE) $(ARGS)

# changes one line of the core at a time; every change must make a test fail (about half a minute each)
mutants: $(STAMP)
	$(BIN)/python tests/mutants.py $(ARGS_MUTANTS)

# the laboratory: 100 seeded faults and the fuzz; as root also hosts in network namespaces. The same
# call goes on where an earlier one was ended; OUT=results publishes
lab: $(STAMP)
	PYTHONPATH=.:tests $(BIN)/python -m lab faults=100 seed=1 jobs=3 to=$(OUT) $(ARGS_LAB)
	$(BIN)/python -m pytest -m long
	PYTHONPATH=.:tests $(BIN)/python -m lab.fuzz lines=1500 files=300 seed=1 to=$(OUT)

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
