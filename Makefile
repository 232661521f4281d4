# Set-up once, then: `make demo` runs the main job, `make test` the tests, `make check` lint, format and types;
# `make bench-store`, `make bench-extract` and `make bench-train` measure (a quarter of an hour each, up to 15 GB of disk,
# nothing else running).
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
LAKE ?= demo-lake

.PHONY: demo test check bench-store bench-extract bench-train grid clean

$(VENV)/installed: pyproject.toml requirements.lock
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'layerlake needs Python 3.11 or newer: make PYTHON=python3.12 ...')"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements.lock -e '.[dev]'
	mkdir -p $(VENV)/typing
	ln -sfn "$(CURDIR)" $(VENV)/typing/layerlake
	touch $@

demo: $(VENV)/installed
	@PATH="$(CURDIR)/$(BIN):$$PATH" LAKE="$(LAKE)" sh demo.sh

test: $(VENV)/installed
	$(BIN)/python -m pytest tests -q

check: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

bench-store: $(VENV)/installed
	$(BIN)/python tests/bench/store.py --out bench-store.json

bench-extract: $(VENV)/installed
	$(BIN)/python tests/bench/extract.py --out bench-extract.json

bench-train: $(VENV)/installed
	$(BIN)/python tests/bench/train.py --out bench-train.json

grid: $(VENV)/installed
	$(BIN)/python tests/bench/grid.py

clean:
	rm -rf $(VENV) demo-lake profile.png build dist *.egg-info
