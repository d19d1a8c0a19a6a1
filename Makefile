# `make help` lists the targets. The first target creates .venv with all dependencies. Later targets
# reuse .venv until pyproject.toml or constraints.txt changes.

PYTHON ?= python3
ARGS ?=
PART ?=
DEVICE ?= cuda

BIN := .venv/bin
READY := .venv/ready
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --editable '.[dev]' --constraint constraints.txt

# A second environment with the additional packages of tests/integrations. It extends .venv.
WITH := .venv-integrations
WITH_READY := $(WITH)/ready
WITH_INSTALL := $(WITH)/bin/python -m pip install --disable-pip-version-check --editable '.[integrations]' \
    --constraint constraints.txt --constraint constraints-integrations.txt

# A third environment beside .venv, with the libraries that manyhands replaces.
ORIGINALS := .venv-originals
ORIGINALS_READY := $(ORIGINALS)/ready
ORIGINALS_INSTALL := $(ORIGINALS)/bin/python -m pip install --disable-pip-version-check \
    --requirement requirements-originals.txt

# A fourth environment beside .venv, with the version of torch that mh.start(survive=True) needs.
SURVIVE := .venv-survive
SURVIVE_READY := $(SURVIVE)/ready
SURVIVE_INSTALL := $(SURVIVE)/bin/python -m pip install --disable-pip-version-check \
    --requirement requirements-survive.txt

# Create an environment that sees the packages of .venv, and install into it: $(call BESIDE_VENV,folder,install).
# addsitedir also reads .pth files, such as coverage's for subprocesses of tests.
define BESIDE_VENV
@echo "Creating $(1); the first time this takes a minute ..."
@$(BIN)/python -m venv $(1)
@$(BIN)/python -c 'import sysconfig; folders = {sysconfig.get_path(name) for name in ("purelib", "platlib")}; \
    [print("import site; site.addsitedir(%r)" % folder) for folder in sorted(folders)]' \
    >"$$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth"
@$(2) --quiet --quiet || { \
    echo; \
    echo "Installing into $(1) failed: see pip's error above. For pip's full output, run:"; \
    echo "    $(2)"; \
    exit 1; } >&2
@touch $(1)/ready
endef

.PHONY: help demo test test-integrations test-originals survive quick gpu coverage lint docs docs-serve clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1|\2/p' Makefile | while IFS='|' read -r target text; do \
	    printf '  %-22s %s\n' "$$target" "$$text"; done
	@echo
	@echo "  PYTHON=python3.12 chooses the interpreter for a new .venv (Python 3.10 or later)."

demo: $(READY) ## demonstration: train for a few minutes, then show a page with figures
	@$(BIN)/manyhands demo $(ARGS)

test: $(READY) ## run the tests; ARGS='-k name -x' goes to pytest, COVERAGE=1 measures coverage
	@$(if $(COVERAGE),rm -rf .coverage && mkdir .coverage)
	@$(BIN)/python $(if $(COVERAGE),-m coverage run) -m pytest \
	    --numprocesses auto --maxprocesses 4 --dist worksteal $(ARGS)

test-integrations: $(WITH_READY) ## run the tests with trainers and launchers; ARGS and COVERAGE as above
	@$(WITH)/bin/python $(if $(COVERAGE),-m coverage run) -m pytest tests/integrations \
	    --numprocesses auto --maxprocesses 4 --dist worksteal $(ARGS)

test-originals: $(ORIGINALS_READY) ## run the comparisons with fairscale and adaptdl
	@$(ORIGINALS)/bin/python -m pytest tests/test_migrating*.py \
	    --numprocesses auto --maxprocesses 4 --dist worksteal $(ARGS)

survive: $(SURVIVE_READY) ## run the tests of mh.start(survive=True) with torch 2.15 (6 GB)
	@$(SURVIVE)/bin/python -m pytest tests/engines/test_survive*.py -m "long or not long" \
	    --numprocesses auto --maxprocesses 4 --dist worksteal $(ARGS)

quick: $(READY) ## run the tests without ranks, in under 20 seconds
	@$(BIN)/python -m pytest --quiet -m quick $(ARGS) $$(grep -rl "pytest.mark.quick" tests)

gpu: ## run tests and benchmarks on a GPU; PART=1 to 4, PYTHON=... with a CUDA build of torch
	@$(PYTHON) benchmarks/gpu.py --device $(DEVICE) $(PART:%=--part %)

coverage: $(READY) ## report the coverage of test and test-integrations, including ranks
	@$(BIN)/python -m coverage combine --quiet
	@$(BIN)/python -m coverage report

lint: $(READY) ## check style, formatting and types
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

docs: $(READY) ## build the documentation in site/
	@# without --quiet, because --strict counts only displayed warnings
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict >.docs.log 2>&1 || { grep -v INFO .docs.log; exit 1; }
	@rm -f .docs.log
	@echo "The documentation is in site/index.html. Search needs a server: make docs-serve"

docs-serve: $(READY) ## serve the documentation with search on http://127.0.0.1:8000
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

clean: ## remove environments and build results
	rm -rf .venv $(WITH) $(ORIGINALS) $(SURVIVE) site build dist .coverage .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find src tests -name __pycache__ -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { \
	    echo "No '$(PYTHON)' found. Install Python 3.10 or later, or run: make PYTHON=/path/to/python3"; \
	    exit 1; } >&2
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "manyhands requires Python 3.10 or later; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)."; \
	    echo "Run, for example: make PYTHON=python3.12"; \
	    exit 1; } >&2
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "'$(PYTHON)' cannot create virtual environments: the module venv is missing."; \
	    echo "Install the package python3-venv (Debian, Ubuntu), or run: make PYTHON=/path/to/python3"; \
	    exit 1; } >&2
	@echo "Creating .venv; the first time this takes a minute or more, mostly for torch ..."
	@$(PYTHON) -m venv .venv || { \
	    echo "Could not create .venv. Run 'make clean', then try again."; \
	    exit 1; } >&2
	@$(INSTALL) --quiet --quiet || { \
	    echo; \
	    echo "Installing into .venv failed: see pip's error above. For pip's full output, run:"; \
	    echo "    $(INSTALL)"; \
	    echo "GPUs or an unusual Python may require different versions: see the top of constraints.txt."; \
	    exit 1; } >&2
	@touch $@

$(WITH_READY): $(READY) pyproject.toml constraints.txt constraints-integrations.txt
	$(call BESIDE_VENV,$(WITH),$(WITH_INSTALL))

$(ORIGINALS_READY): $(READY) requirements-originals.txt
	$(call BESIDE_VENV,$(ORIGINALS),$(ORIGINALS_INSTALL))

$(SURVIVE_READY): $(READY) requirements-survive.txt
	$(call BESIDE_VENV,$(SURVIVE),$(SURVIVE_INSTALL))
