# `make help` lists the targets. The first one that needs it makes .venv with everything
# in it; after that set-up costs nothing until pyproject.toml or constraints.txt changes.

PYTHON ?= python3
ARGS ?=
PART ?=
DEVICE ?= cuda

BIN := .venv/bin
READY := .venv/ready
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --editable '.[dev]' --constraint constraints.txt

# A second environment, for what only tests/integrations needs. It sees the packages of .venv.
WITH := .venv-integrations
WITH_READY := $(WITH)/ready
WITH_INSTALL := $(WITH)/bin/python -m pip install --disable-pip-version-check --editable '.[integrations]' \
    --constraint constraints.txt --constraint constraints-integrations.txt

.PHONY: help demo test test-integrations quick gpu coverage lint docs docs-serve clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1|\2/p' Makefile | while IFS='|' read -r target text; do \
	    printf '  %-22s %s\n' "$$target" "$$text"; done
	@echo
	@echo "  PYTHON=python3.12 chooses the interpreter for a new .venv (Python 3.10 or later)."

demo: $(READY) ## the demonstration: a few minutes, then a page with figures
	@$(BIN)/manyhands demo $(ARGS)

test: $(READY) ## the tests; ARGS='-k name -x' goes to pytest, COVERAGE=1 measures
	@$(if $(COVERAGE),rm -rf .coverage && mkdir .coverage)
	@$(BIN)/python $(if $(COVERAGE),-m coverage run) -m pytest \
	    --numprocesses auto --maxprocesses 4 --dist worksteal $(ARGS)

test-integrations: $(WITH_READY) ## the tests beside trainers and engines; ARGS and COVERAGE as above
	@$(WITH)/bin/python $(if $(COVERAGE),-m coverage run) -m pytest tests/integrations \
	    --numprocesses auto --maxprocesses 4 --dist worksteal $(ARGS)

quick: $(READY) ## the tests that need no ranks: under 20 seconds
	@$(BIN)/python -m pytest --quiet -m quick $(ARGS) $$(grep -rl "pytest.mark.quick" tests)

gpu: ## tests and figures of a GPU, installing nothing; PART=1 to 4, PYTHON=... with a CUDA build of torch
	@$(PYTHON) benchmarks/gpu.py --device $(DEVICE) $(PART:%=--part %)

coverage: $(READY) ## what the last two with COVERAGE=1 have covered, ranks included
	@$(BIN)/python -m coverage combine --quiet
	@$(BIN)/python -m coverage report

lint: $(READY) ## style, formatting and types (of src, tests/helpers and benchmarks)
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

docs: $(READY) ## the documentation, into site/
	@# --strict counts only the warnings that are shown, so not with --quiet
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict >.docs.log 2>&1 || { grep -v INFO .docs.log; exit 1; }
	@rm -f .docs.log
	@echo "The documentation is in site/index.html. Search needs a server: make docs-serve"

docs-serve: $(READY) ## the documentation on http://127.0.0.1:8000, with search; rebuilt after changes
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

clean: ## remove the environments and everything that was built
	rm -rf .venv $(WITH) site build dist .coverage .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find src tests -name __pycache__ -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { \
	    echo "No '$(PYTHON)' found. Install Python 3.10 or later, or name yours: make PYTHON=/path/to/python3"; \
	    exit 1; } >&2
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "manyhands needs Python 3.10 or later, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1)."; \
	    echo "Name a newer one: make PYTHON=python3.12"; \
	    exit 1; } >&2
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "'$(PYTHON)' cannot make virtual environments: its venv module is missing."; \
	    echo "Install it (on Debian and Ubuntu the package is python3-venv) or name another: make PYTHON=..."; \
	    exit 1; } >&2
	@echo "Setting up .venv; the first time this takes a minute or more, most of it for torch ..."
	@$(PYTHON) -m venv .venv || { \
	    echo "Could not make .venv. 'make clean' removes what is left of it; then try again."; \
	    exit 1; } >&2
	@$(INSTALL) --quiet --quiet || { \
	    echo; \
	    echo "Installing into .venv failed; pip's reason stands above. To see all that pip does:"; \
	    echo "    $(INSTALL)"; \
	    echo "A GPU machine or an unusual Python may want other versions: see the top of constraints.txt."; \
	    exit 1; } >&2
	@touch $@

$(WITH_READY): $(READY) pyproject.toml constraints.txt constraints-integrations.txt
	@echo "Setting up $(WITH), beside .venv; the first time this takes a minute ..."
	@$(BIN)/python -m venv $(WITH)
	@# addsitedir reads .pth files as well: coverage has one, for processes that a test starts
	@$(BIN)/python -c 'import sysconfig; folders = {sysconfig.get_path(name) for name in ("purelib", "platlib")}; \
	    [print("import site; site.addsitedir(%r)" % folder) for folder in sorted(folders)]' \
	    >"$$($(WITH)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth"
	@$(WITH_INSTALL) --quiet --quiet || { \
	    echo; \
	    echo "Installing into $(WITH) failed; pip's reason stands above. To see all that pip does:"; \
	    echo "    $(WITH_INSTALL)"; \
	    exit 1; } >&2
	@touch $@
