# Everything runs in .venv, made once from the tested pins in constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready

.PHONY: test lint types demo benchmark clean

test: $(READY) lint types
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

# One thread: matrices this small gain nothing from more, and lose where the cores are busy.
demo: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/calibrant compare digits-lt --losses ce,ls,mbls,dual-focal,adafocal,cals-alm --seeds 0,1 --output demo
	@echo "Open demo/report.html in a browser."

benchmark: $(READY)
	$(BIN)/python benchmarks/losses.py
	$(BIN)/python benchmarks/metrics.py
	$(BIN)/python benchmarks/calibrators.py
	$(BIN)/python benchmarks/training.py

# torch comes first and by itself: its pin then satisfies whatever the other packages ask for.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis
