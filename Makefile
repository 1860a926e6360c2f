# Everything runs in .venv, made once from the tested pins in constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
# One thread for each process: more would wait for one another. Three processes, because tests often wait for a
# program that they started: on two cores they take 335 s, two processes 380 s. Compiled files are kept even where
# the environment forbids it: the tests start hundreds of programs.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3
# Copied into .venv: without it, torchvision cannot be imported beside a CPU build of torch.
TORCHVISION := tools/torchvision_beside_cpu_torch.py

.PHONY: check quick test everything fuzz test-oldest lint types demo examples docs benchmark clean

# Before every commit: lint, types and the quick tests, side by side. Under 90 s on two cores.
check: $(READY)
	$(MAKE) --no-print-directory --jobs 3 --output-sync=target lint types quick

# All contracts, golden values, the layers, a short training through the command line, and every doctest.
quick: $(READY)
	$(PYTEST) --dist worksteal -m "not slow" $(wildcard tests/*/test_contract.py tests/*/test_golden.py) \
	    tests/test_architecture.py tests/test_histogram.py tests/test_layout.py tests/test_options.py \
	    tests/test_statistics.py tests/cli/test_train.py src

# Everything. Types are checked beside the tests, which leave a core idle now and then.
test: $(READY) lint
	$(MAKE) --no-print-directory --jobs 2 types everything

everything: $(READY)
	$(PYTEST) --dist worksteal

# Random cases against naive references, from new seeds until the time is spent: make fuzz MINUTES=60
MINUTES ?= 5
fuzz: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --minutes $(MINUTES)

# The oldest versions of the trainers that pyproject.toml allows, which `make test` does not see.
test-oldest: .venv-oldest/ready
	OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest -n 2 --dist loadfile tests/integrations tests/distributed

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

# One thread: matrices this small gain nothing from more, and lose where the cores are busy.
# The picture in README.md: chromium --headless --window-size=1400,1060 --screenshot=docs/images/comparison.png demo/report.html
demo: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/calibrant compare digits-lt --losses "ce,dual-focal,adafocal[evidence=2],cals-alm,ada-scale" --seeds 0,1 --set evaluation_batch_size=512 --jobs 2 --output demo
	@echo "Open demo/report.html in a browser."

# In a temporary folder, because some examples write checkpoints.
examples: $(READY)
	folder=$$(mktemp -d) && cd $$folder && for program in $(CURDIR)/examples/*.py; do \
	    echo "$$program"; OMP_NUM_THREADS=1 $(CURDIR)/$(BIN)/python $$program || exit 1; \
	done; rm -rf $$folder

# The site in build/site. Tutorials run while it is built, so it takes a few minutes; later builds repeat what has changed.
docs: .venv/docs-ready
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -W --keep-going --quiet docs build/site
	@echo "Open build/site/index.html in a browser."

benchmark: $(READY)
	$(BIN)/python benchmarks/losses.py
	$(BIN)/python benchmarks/metrics.py
	$(BIN)/python benchmarks/calibrators.py
	$(BIN)/python benchmarks/training.py

# torch comes first and by itself: its pin then satisfies what the other packages ask for.
$(READY): pyproject.toml constraints.txt $(TORCHVISION)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	packages=$$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))") && \
	    cp $(TORCHVISION) $$packages && \
	    echo "import $(notdir $(TORCHVISION:.py=))" > $$packages/$(notdir $(TORCHVISION:.py=.pth))
	touch $@

.venv/docs-ready: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	touch $@

.venv-oldest/ready: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-oldest.txt torch
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-oldest.txt --editable '.[accelerate,lightning,sklearn,torchmetrics,train,transformers]' hypothesis pytest pytest-xdist
	touch $@

clean:
	rm -rf .venv .venv-oldest .mypy_cache .pytest_cache .ruff_cache .hypothesis build/site
