# Every target makes the virtual environment and installs its requirements, unless that was done before.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help demo test test-long test-slow pretend-device lint format types board bench wheel-test dependencies recipes-page \
	results-page docs docs-serve figures clean

help:
	@echo "make demo        train a zoo of small CNNs on real digits and stitch it: tables, figures, TensorBoard logs"
	@echo "make board       watch the runs in TensorBoard"
	@echo "make test        fast tests, five minutes; make test-long tests recipes, guides and several processes, make test-slow the rest"
	@echo "make pretend-device  test tasks, callbacks and functions on a simulated GPU (tests/pretend_device/README.md)"
	@echo "make lint        ruff, and rates of stilted phrases (tools/prose.py); make format fixes style"
	@echo "make types       mypy"
	@echo "make bench       measure short comparisons with other packages, and list what has become slower; alone on the machine"
	@echo "make wheel-test  build the wheel and run it from another folder"
	@echo "make dependencies  install the wheel with the oldest and the newest dependencies, and run it"
	@echo "make docs        build the site into site/; make docs-serve shows it"
	@echo "make figures     remake the pictures of docs/images that take minutes (ONLY=NAME, ALL=1), and list the changed ones"
	@echo "make recipes-page  write docs/recipes.md from the recipes' headers"
	@echo "make results-page  write docs/results.md and docs/results/ from the files of published results in miniature"

demo: $(VENV)/.installed
	$(BIN)/lightning-sym fit --config zoo/mnist5k --overwrite true
	$(BIN)/lightning-sym fit --config stitching/mnist5k --overwrite true
	@echo "  more    make board, then open the address it prints; lightning-sym is $(BIN)/lightning-sym"

board: $(VENV)/.installed
	$(BIN)/tensorboard --logdir runs

# Compiled tests are kept in any case: to write the asserts of all of them anew takes each process ten seconds.
test test-long: export PYTHONDONTWRITEBYTECODE =

test: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Tests of several processes, whole recipes, and the code of the guides; also part of .ci/run.
test-long: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m 'long and not slow and not pretend_device'

test-slow: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m slow

pretend-device: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m pretend_device -n 2 tests/pretend_device

lint: $(VENV)/.installed-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/prose.py . --worst 0 --limits tools/prose.json

format: $(VENV)/.installed-lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# mypy does not support package-dir: it reads packages and scripts through a folder of links.
SCRIPTS := $(notdir $(basename $(wildcard benchmarks/*.py examples/*.py tools/*.py)))
types: $(VENV)/.installed-types
	$(BIN)/python tools/packages.py
	cd .links && ../$(BIN)/mypy --config-file ../pyproject.toml --cache-dir ../.mypy_cache \
		-p lightning_sym -p published $(addprefix -m ,$(SCRIPTS))

# Peers that are not installed are skipped; --folder of benchmarks/peers.py names code that no package has.
bench: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/peers.py --check $(if $(FOLDERS),--folder $(FOLDERS))

wheel-test: $(VENV)/.installed-test
	.ci/wheel_test.sh $(BIN)/python

# Clean environments with the oldest and the newest dependencies take minutes and gigabytes: not part of .ci/run.
dependencies:
	.ci/dependencies.sh $(PYTHON)

recipes-page: $(VENV)/.installed
	$(BIN)/python tests/docs/recipes_page.py

results-page: $(VENV)/.installed
	PYTHONPATH=examples $(BIN)/python -m published.page
# Strict: a warning (a dead link, a page missing from the navigation) is an error. Needs no network.
docs: $(VENV)/.installed-docs
	$(BIN)/python tools/packages.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "  open    site/index.html; the search works from the disk, too"

docs-serve: $(VENV)/.installed-docs
	$(BIN)/python tools/packages.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve --strict

# Runs the commands of tools/figures.yaml in order, on one thread.
figures: $(VENV)/.installed
	$(BIN)/python tools/figures.py $(if $(ONLY),--only '$(ONLY)') $(if $(ALL),--all)

$(VENV)/.made:
	@$(PYTHON) -c "import sys; sys.exit('Python 3.11 or newer is needed, this is ' + sys.version.split()[0] + '; make PYTHON=python3.12 ...' if sys.version_info < (3, 11) else 0)"
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.made pyproject.toml
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.installed-%: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable ".[$*]"
	@touch $@

clean:
	rm -rf $(VENV) .links build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
