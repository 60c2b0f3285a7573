PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
# Tests run side by side; each worker loads the demo model, so no more than four.
WORKERS := -n logical --maxprocesses 4 --dist worksteal

# Compiled modules are kept: each worker and each process that a test starts would compile again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-versions test-instructions check slow docs notebooks sanitize emulate wheel wheel-arm programs

demo: .venv/installed
	$(BIN)/kvkeep generate --model smollm2-135m "What is photosynthesis?"

test: .venv/installed programs
	$(BIN)/pytest -q $(WORKERS)

# The suite as other processors run it: with each further instruction set of the native library that this processor
# has, and with older ones of torch and oneDNN. `make test` uses the best. Sums are rounded differently in each.
test-instructions: .venv/installed programs
	@failed=; for setting in \
	  $$(PYTHONPATH=tests $(BIN)/python -m support.instruction_sets | tail -n +2 | sed s/^/KVKEEP_INSTRUCTIONS=/) \
	  ATEN_CPU_CAPABILITY=avx2 ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=AVX2 ONEDNN_MAX_CPU_ISA=AVX512_CORE; do \
	  echo "with $$setting"; env $$setting $(BIN)/python -m pytest -q $(WORKERS) || failed="$$failed $$setting"; \
	done; test -z "$$failed" || { echo "failed with$$failed"; exit 1; }

slow: .venv/installed programs
	$(BIN)/pytest -q $(WORKERS) -m slow

# The model libraries' tests and the documents' examples, with the oldest, the pinned and the newest versions of torch
# and transformers; an environment of some GB for each.
test-versions: .venv/installed
	$(BIN)/python tools/versions.py

check: .venv/installed docs
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -q README.md docs

# The documentation as a site, in build/site. Warnings are errors.
docs: .venv/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

notebooks: .venv/installed
	$(BIN)/python tools/notebooks.py

# A real server for the store's tests, and a browser for the page's. Without them, those are skipped.
PROGRAMS := redis-server chromium chromedriver

programs:
	@lacking=0; for program in $(PROGRAMS); do command -v $$program >/dev/null || lacking=1; done; \
	test $$lacking = 0 || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && \
	  apt-get update -qq && apt-get install -qqy --no-install-recommends \
	  redis-server chromium chromium-driver >/dev/null; } || \
	  echo "not all of $(PROGRAMS): the tests of those that lack are skipped"

# Without what they ask for: LitGPT an older huggingface-hub than transformers needs, kvpress an
# older transformers.
LITGPT := litgpt lightning lightning-utilities torchmetrics pytorch-lightning jsonargparse
KVPRESS := kvpress cachetools fire termcolor

# The native kernels' tests.
KERNELS := tests/attention tests/test_linears.py tests/layer/test_native_step.py tests/layer/test_native_packed.py

# With kernels that stop at any access outside of memory.
sanitize: .venv/installed
	$(BIN)/pip wheel -q --no-deps -C cmake.define.KVKEEP_SANITIZE=ON -w build/sanitize .
	$(BIN)/python -m zipfile -e build/sanitize/kvkeep-*.whl build/sanitize
	KVKEEP_NATIVE=build/sanitize/kvkeep/attention/_native.so ASAN_OPTIONS=detect_leaks=0 \
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	$(BIN)/python -m pytest -q $(KERNELS)

# With the code of AVX-512 compiled for AVX2.
emulate: .venv/installed
	$(BIN)/pip wheel -q --no-deps -C cmake.define.KVKEEP_EMULATE=ON -w build/emulate .
	$(BIN)/python -m zipfile -e build/emulate/kvkeep-*.whl build/emulate
	KVKEEP_NATIVE=build/emulate/kvkeep/attention/_native.so $(BIN)/python -m pytest -q $(KERNELS)

# What is published: the source, a wheel with the native library for Linux, one without it for all other platforms,
# and the wheel of kvkeep-lab. Both wheels of kvkeep are built from the source archive. auditwheel refuses a library
# that needs more than the platform has, whose glibc is 2.28.
DIST := dist
PLATFORM := manylinux_2_28_$(shell uname -m)
wheel: export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 1700000000)
wheel: .venv/installed
	rm -rf build/wheel $(DIST)
	$(BIN)/python -m build --outdir build/wheel
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m auditwheel repair --plat $(PLATFORM) --only-plat \
	  --wheel-dir $(DIST) build/wheel/kvkeep-*.whl
	$(BIN)/python -m pip wheel -q --no-deps -C wheel.cmake=false -w $(DIST) build/wheel/kvkeep-*.tar.gz
	$(BIN)/python -m pip wheel -q --no-deps -w $(DIST) ./lab
	mv build/wheel/kvkeep-*.tar.gz $(DIST)

# The wheel for Linux on 64-bit ARM, by a cross-compiler (Debian's g++-aarch64-linux-gnu). tests/native checks its
# numbers in an emulator.
ARM := SYSTEM_NAME=Linux SYSTEM_PROCESSOR=aarch64 CXX_COMPILER=aarch64-linux-gnu-g++
wheel-arm: .venv/installed
	rm -rf build/wheel-arm
	_PYTHON_HOST_PLATFORM=linux-aarch64 $(BIN)/pip wheel -q --no-deps -w build/wheel-arm \
	  $(addprefix -C cmake.define.CMAKE_,$(ARM)) .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m auditwheel repair --only-plat --wheel-dir $(DIST) \
	  build/wheel-arm/kvkeep-*.whl

# torch first and by its exact version: that build is for the CPU, and what is installed after it
# must not choose another.
.venv/installed: pyproject.toml lab/pyproject.toml constraints.txt $(wildcard native/*)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt torch==2.13.0
	SKBUILD_CMAKE_DEFINE=KVKEEP_INSTRUCTIONS=host \
	  $(BIN)/pip install -q -c constraints.txt -e ".[dev]" -e "./lab[lm-eval,plot]"
	$(BIN)/pip install -q -c constraints.txt --no-deps $(LITGPT) $(KVPRESS)
	touch $@
