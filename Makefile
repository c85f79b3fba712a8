# make demo   train a small burst network on real digits, run it on integer levels, see what it costs
# make test   lint, types, dependency rules, tests
# make test-gpu   what needs a GPU, with the PyTorch that sees it: make test-gpu PYTHON=/path/to/its/python
# make coverage   the tests again with the lines they reach; fails below 97 %
# make docs       the documentation site, build/site/index.html: opens from the disk, offline
# make sanitize   the native library's tests with AddressSanitizer and UndefinedBehaviorSanitizer
# make web        build/web: pages that run the small networks of models/ in a browser
# make fuzz       files changed at random and sealed again, SECONDS=60 of them: each is refused in one line, or gives its old result
# make report     build/report/report.html and its figures, from the records under results
# make wheels     wheels for Linux, x86-64 and aarch64, in dist; this machine's is installed and run (docs/howto/install.md)
# make figures    those of these figures that lie in docs/figures again
# All set up .venv by themselves; the second time they start at once.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-gpu pytest coverage lint format report figures docs sanitize fuzz web wheels wheels-emulated clean
.DELETE_ON_ERROR:

demo: .venv/.train
	@$(BIN)/lbq demo

# the lint beside the tests: together they keep two cores busy
test: .venv/.dev
	@$(MAKE) --no-print-directory -j2 lint pytest

# each worker gets a half of the files in their order, so that what a file prepares once is seldom prepared by both; many
# tests start Python again, which would compile every module again if none was kept
pytest: .venv/.dev
	@env -u MAKEFLAGS -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# not in .venv, whose PyTorch knows no GPU; without the settings of pyproject.toml, which ask for plugins, and without plugins.
# A process for each file, JOBS at a time, as most of the time is the compiling of kernels.
JOBS ?= 8
GPU_TESTS := $(wildcard tests/kernels/gpu/test_*.py tests/kernels/test_*.py) tests/training/test_cuda_graph.py tests/engine/test_gpu_engine.py \
  tests/engine/test_attention.py tests/engine/test_engine.py tests/engine/test_threads.py
test-gpu:
	@$(PYTHON) -c "import torch; torch.cuda.is_available() or exit('$(PYTHON): its PyTorch sees no GPU; name another one: make test-gpu PYTHON=...')"
	@$(MAKE) --no-print-directory -k -j$(JOBS) --output-sync $(addprefix on-gpu/,$(GPU_TESTS))
on-gpu/%:
	@PYTHONPATH="src:.:$$PYTHONPATH" PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(PYTHON) -m pytest -c /dev/null --rootdir=. -p no:cacheprovider -q $* $(ONLY) || [ $$? -eq 5 ] # 5: all of a file is skipped
on-gpu/tests/engine/test_engine.py: ONLY = -k test_the_gpu_engine_gives_the_same_bits

# not a part of `make test`: watching every line takes half as long again
coverage: .venv/.dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal --cov

lint: .venv/.dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache --no-logo

# the native library with AddressSanitizer and UndefinedBehaviorSanitizer, under its tests; needs gcc or clang
SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g -O1
sanitize: .venv/.dev
	@LBQ_NATIVE_CFLAGS="$(SANITIZE)" $(BIN)/python setup.py -q build_ext --force --build-lib build/sanitize --build-temp build/sanitize
	@LBQ_NATIVE_LIBRARY="$$(ls build/sanitize/lbq/native/_lbq*)" LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libstdc++.so.6)" \
	  ASAN_OPTIONS=detect_leaks=0 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/engine tests/kernels/test_cpu.py tests/counting/test_tally.py \
	  -n 2 -p no:cacheprovider -k "not compiled and not well_formed and not stale and not fork and not in_memory_once"

# what is wrong with one lies in tests/fuzz/found afterwards, where a test reads it again; needs Linux
SECONDS ?= 60
fuzz: .venv/.dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --seconds $(SECONDS)

report: .venv/.train
	@rm -rf build/report
	@$(BIN)/lbq report results results/timesteps -o build/report/report.html --title "LBQ: our runs beside the published numbers"
	@$(BIN)/lbq report results results/timesteps --format svg -o build/report/figures

# README.md and docs show the figures that lie in docs/figures; for another, copy it there once
figures: report
	@for file in docs/figures/*.svg; do cp build/report/figures/$${file##*/} docs/figures/ || exit 1; done

docs: .venv/.docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "build/site/index.html"

web: .venv/.web
	@$(BIN)/lbq export models/digits_resnet8w16_t2_lbq.lbq --format web -o build/web/digits.html
	@$(BIN)/lbq export models/cifar10_resnet14w32_t1_lbq.lbq --format web -o build/web/cifar10.html

# make wheels TARGETS=all: for macOS and Windows too; make wheels-emulated: also run the aarch64 wheel, under qemu-user-static
wheels: .venv/.wheels
	@rm -rf dist
	@$(BIN)/python release/wheels.py build $(TARGETS) -o dist
	@$(BIN)/python release/wheels.py check dist

wheels-emulated: .venv/.wheels
	@$(BIN)/python release/emulate.py dist

format: .venv/.dev
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# constraints.txt pins torch exactly: pip then takes a small CPU build where the index offers one
SOURCES := pyproject.toml setup.py constraints.txt $(wildcard src/lbq/native/*.c src/lbq/native/*.h)
.venv/.train: $(SOURCES) | .venv/bin/python
	@echo "installing lbq[train] into .venv (once)"
	@$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[train]'
	@touch $@

.venv/.dev: $(SOURCES) | .venv/bin/python
	@echo "installing the development tools into .venv (once)"
	@$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[train,dev]'
	@touch .venv/.train $@

.venv/.wheels: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing the compiler of wheels into .venv (once)"
	@$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[wheels]'
	@touch $@

# the site reads docstrings from the sources and needs no torch
.venv/.docs: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing the tools of the documentation into .venv (once)"
	@$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

# zig compiles WebAssembly; no torch
.venv/.web: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing lbq[web] into .venv (once)"
	@$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[web]'
	@touch $@

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("lbq needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": make PYTHON=python3.12 demo" if sys.version_info < (3, 11) else 0)'
	@$(PYTHON) -m venv .venv || { rm -rf .venv; echo "python3 -m venv failed; on Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info
