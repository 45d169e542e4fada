# castor: `make demo`, `make test` and `make ci` set up what they need, from a fresh Debian 12 on.
#
#   make demo     train a GPT in a device budget it does not fit, and show what moved
#   make test     what to run before a commit: lint, Python tests but for slow ones and ranks, C++ tests under ASan+UBSan
#   make ci       all that CI runs: the whole suite, TSan, browser, documentation, wheel
#   make bench    steps, Adam, copies and plans against their peers, a page of the results in build/bench, docs/status.md
#   make bench-storage    what NVMe and building large models cost, in the same places
#   make study    loss curves of the optimizer state formats: 13 minutes on two cores
#   make asan-torch | tsan-torch    the Python tests in which threads meet, with castor._C under ASan+UBSan, TSan
#   make whole    the Python tests in every cell of their grids, of which CI runs a part: hours on two cores
#   make simgpu   suites of the CPU device on the asynchronous simulated GPU, with three seeds of delays
#   make integration    scripts of TRL, and in CASTOR_PUBLISHED of others, Lightning, with castor and without
#   make docs     the documentation, in build/docs/index.html
#   make wheel    a wheel in dist/ for each Python, with extensions for each torch asked for, tried in clean environments
#   make wheels   the same for every torch that castor knows
#   make torches  the Python tests on each torch that castor knows, as in make test: TORCHES selects
#   make oldest-torch    the same on the oldest one alone, as CI does where it has the time
#   make gpu-archive    what scripts/gpu_check.sh --wheel needs on a machine with a GPU, torch and nothing else
#   make pages    train a small GPT and take the screenshots of docs/images
#   make lint | package | cpp | pytest | integration | simgpu | docs | asan | tsan | asan-torch | tsan-torch | wheel | bench | bench-storage | study | clean
#
# Set-up is kept in .venv and build/; stamps in both make a second run cheap.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.SUFFIXES:
MAKEFLAGS += --no-builtin-rules

PYTHON ?= python3
# The torch releases in the range of pyproject.toml, oldest first.
TORCHES ?= 2.11 2.12 2.13 2.14 2.15
# The torch release to install, as a version pattern: the newest.
CASTOR_TORCH ?= $(lastword $(TORCHES)).*
TORCH_MINOR := $(CASTOR_TORCH:.*=)
# `make wheel` makes one wheel for each Python, with extensions for each torch; a pair that this machine
# cannot make is SKIPPED, or fails the target with WHEEL_ARGS=--require.
WHEEL_PYTHONS ?= 3.11 3.12
WHEEL_TORCHES ?= $(TORCH_MINOR)
WHEEL_ARGS ?=
# The Python and the torch of the machine that `make gpu-archive` packs for.
GPU_PYTHON ?= 3.12
GPU_TORCH ?= 2.11
# Where `make pages` writes its screenshots; `make test` leaves the committed ones alone.
PAGES ?= docs/images
# More arguments for pytest and for ctest.
PYTEST_ARGS ?=
CTEST_ARGS ?=
JOBS ?= $(shell nproc)

VENV := .venv
BUILD := build
STAMPS := $(BUILD)/stamps
# What stands in the environment goes with it when it is deleted.
VENV_STAMPS := $(VENV)/stamps
# The environment's tools, by absolute path, and no user site-packages in between.
BIN := $(CURDIR)/$(VENV)/bin
JEMALLOC := $(CURDIR)/$(BUILD)/jemalloc
HWLOC := $(CURDIR)/$(BUILD)/hwloc

export PYTHONNOUSERSITE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)
export CMAKE_GENERATOR := Ninja
# Objects are the same in every clone, so that a fresh one starts from a warm ccache.
export CCACHE_BASEDIR := $(CURDIR)
export CCACHE_NOHASHDIR := 1
# The hub cannot answer in CI, and nothing here needs it.
export HF_HUB_OFFLINE := 1

CXX_SOURCES := $(shell find csrc cmake tests/simulated_device tests/simulated_gpu -type f) CMakeLists.txt
PY_SOURCES := $(shell find python -type f -not -name '*.pyc')
CXX_FORMATTED := find csrc tests/cpp tests/simulated_device tests/simulated_gpu benchmarks examples -type f \
	\( -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh' \) -print0

.PHONY: demo test ci tools pytest-fast whole pages browser lint lint-format lint-ruff lint-mypy lint-layers lint-prose lint-threads package cpp pytest integration simgpu docs asan tsan asan-torch tsan-torch wheel wheels torches room oldest-torch gpu-archive bench bench-storage study install clean help FORCE

help:
	@sed -n '2,/^$$/s/^# \{0,1\}//p' Makefile

# An idle OpenMP thread soon sleeps instead of spinning for milliseconds: where something else wants the
# cores, torch's kernels otherwise wait for each other's spin loops (4 to 10 times slower on two shared
# cores). Not for bench, which measures torch as it comes.
demo pages pytest pytest-fast whole integration simgpu: export GOMP_SPINCOUNT ?= 1000

# What `make install` has built already serves as well.
demo: $(or $(wildcard $(VENV_STAMPS)/castor),$(VENV_STAMPS)/castor-demo)
	@$(BIN)/python examples/train_gpt.py --demo

# A warning is an error, which a user's newer compiler may give; a missing simulated device is one, not a skip.
test ci: export CASTOR_WERROR := ON
test ci: export CASTOR_REQUIRE_SIMULATED_DEVICE := 1
test:
	@scripts/run_phases.sh tools install+asan lint+package pytest-fast

# CI ends a run after 90 minutes. On a slow machine what comes last is skipped, and says so.
OLDEST_TORCH_BEGINS ?= 3300
ci: export CASTOR_REQUIRE_BROWSER := 1
# What optimisation may change: numbers, and copies through torch. The sanitizers' builds run every C++ test.
ci: export CPP_LAYERS := optim cuda torch
ci: export PAGES := $(BUILD)/pages
# The wheel of the Python that all else was tested with: another one's is a whole compilation more.
ci: export WHEEL_PYTHONS = $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
ci:
	@scripts/run_phases.sh tools install+asan browser lint+package cpp pages+docs pytest tsan wheel \
	  --skip-after $(OLDEST_TORCH_BEGINS) room oldest-torch

# Downloads of Python packages leave the cores to the sanitizer's build, which needs these alone.
tools: $(STAMPS)/system $(STAMPS)/jemalloc

install: $(VENV_STAMPS)/castor

# What tests/browser looks at the pages with, and a font to draw them in.
browser: $(STAMPS)/browser

pages: $(VENV_STAMPS)/castor $(STAMPS)/browser
	@mkdir -p $(PAGES)
	@$(BIN)/python scripts/screenshots.py $(PAGES)

## Set-up ----------------------------------------------------------------------------------------

$(STAMPS)/system: scripts/setup_system.sh
	@scripts/setup_system.sh
	@mkdir -p $(@D) && touch $@

$(STAMPS)/browser: scripts/setup_system.sh
	@scripts/setup_system.sh chromium fonts-dejavu-core
	@mkdir -p $(@D) && touch $@

# Changes when another torch is asked for, and then everything that stands on torch is redone.
$(VENV_STAMPS)/torch: FORCE
	@mkdir -p $(@D)
	@echo '$(CASTOR_TORCH)' | cmp --quiet - $@ || echo '$(CASTOR_TORCH)' >$@

$(VENV_STAMPS)/venv: $(STAMPS)/system $(VENV_STAMPS)/torch pyproject.toml scripts/requirements.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "$(PYTHON) is older than Python 3.10; run make PYTHON=python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python scripts/requirements.py build test pages dev wheel >$(VENV_STAMPS)/requirements.txt
	@echo "python packages: torch $(CASTOR_TORCH) and $$(paste -s -d' ' $(VENV_STAMPS)/requirements.txt)"
	@$(BIN)/python -m pip install --quiet 'torch==$(CASTOR_TORCH)' -r $(VENV_STAMPS)/requirements.txt
	@touch $@

# Holds the CMake definition that follows from the outcome: without jemalloc the host tier uses mmap.
$(STAMPS)/jemalloc: $(STAMPS)/system scripts/build_jemalloc.sh scripts/debian_source.sh
	@if scripts/build_jemalloc.sh $(JEMALLOC); then \
	  echo "--config-settings=cmake.define.CASTOR_JEMALLOC_ROOT=$(JEMALLOC)" >$@; \
	else \
	  echo "jemalloc could not be built (see above): the host tier falls back to mmap." \
	       "\`rm $@\` and make again to retry." >&2; \
	  echo "--config-settings=cmake.define.CASTOR_JEMALLOC_ROOT=" >$@; \
	fi

# A plain install, not an editable one: what is tested is what the wheel holds. CMake's build
# directory is kept (build/<wheel tag>), so only what changed is compiled.
# $(call install_castor,DEFINITIONS): each definition of CMake, as NAME=VALUE.
define install_castor
	@echo "building castor"
	@PATH="$(BIN):$$PATH" scripts/install_castor.sh $(BIN)/python $$(cat $(STAMPS)/jemalloc) \
	  --config-settings=build-dir='$(BUILD)/{wheel_tag}-torch$(TORCH_MINOR)' \
	  $(1:%=--config-settings=cmake.define.%)
	@touch $@
endef
CASTOR_DEPENDS := $(VENV_STAMPS)/venv $(STAMPS)/jemalloc scripts/install_castor.sh pyproject.toml $(CXX_SOURCES) $(PY_SOURCES)

$(VENV_STAMPS)/castor: $(CASTOR_DEPENDS)
	$(call install_castor,CASTOR_BUILD_SIMULATED_DEVICE=ON CASTOR_CUDA=AUTO CASTOR_WERROR=$${CASTOR_WERROR:-OFF})

# What training needs and no more: no simulated devices, and kernels where there is a GPU to run them.
HAS_GPU := $(wildcard /dev/nvidiactl)
$(VENV_STAMPS)/castor-demo: $(CASTOR_DEPENDS)
	$(call install_castor,CASTOR_BUILD_SIMULATED_DEVICE=OFF CASTOR_CUDA=$(if $(HAS_GPU),AUTO,OFF) CASTOR_WERROR=OFF)

# The peer of benchmarks/io.py, and what DeepSpeed reads and writes NVMe with.
$(STAMPS)/io-peers: scripts/setup_system.sh
	@scripts/setup_system.sh fio libaio-dev
	@mkdir -p $(@D) && touch $@

$(VENV_STAMPS)/bench: $(VENV_STAMPS)/castor $(STAMPS)/io-peers
	@$(BIN)/python scripts/requirements.py bench >$(VENV_STAMPS)/requirements-bench.txt
	@$(BIN)/python -m pip install --quiet --no-build-isolation -r $(VENV_STAMPS)/requirements-bench.txt
	@touch $@

$(VENV_STAMPS)/integration: $(VENV_STAMPS)/castor
	@$(BIN)/python scripts/requirements.py integration >$(VENV_STAMPS)/requirements-integration.txt
	@$(BIN)/python -m pip install --quiet 'torch==$(CASTOR_TORCH)' \
	  -r $(VENV_STAMPS)/requirements-integration.txt
	@touch $@

$(VENV_STAMPS)/docs: $(VENV_STAMPS)/venv
	@$(BIN)/python scripts/requirements.py docs >$(VENV_STAMPS)/requirements-docs.txt
	@$(BIN)/python -m pip install --quiet -r $(VENV_STAMPS)/requirements-docs.txt
	@touch $@

## Checks ----------------------------------------------------------------------------------------

lint: lint-format lint-ruff lint-mypy lint-layers lint-prose lint-threads

lint-format: $(STAMPS)/system
	@$(CXX_FORMATTED) | xargs -0 --no-run-if-empty clang-format --dry-run -Werror
	@echo "clang-format: clean"

lint-ruff: $(VENV_STAMPS)/venv
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

lint-mypy: $(VENV_STAMPS)/venv
	@$(BIN)/mypy

lint-layers: $(VENV_STAMPS)/venv
	@$(BIN)/python scripts/check_layers.py

# Docstrings begin with their subject.
lint-prose: $(VENV_STAMPS)/venv
	@$(BIN)/python scripts/check_prose.py

# Members that name their mutex (core/mutex.h) are used only while it is held.
lint-threads: $(VENV_STAMPS)/venv
	@grep -rlE --include='*.cc' 'MutexLock|CASTOR_GUARDED_BY' csrc | \
	  xargs -n 1 -P $(JOBS) clang++ -std=c++20 -fsyntax-only -Wthread-safety -Werror -Wno-inconsistent-missing-override -Icsrc \
	    $$($(BIN)/python scripts/torch_includes.py)
	@echo "clang's thread-safety analysis: clean"

# What was installed, and that _C.pyi and _cuda.pyi name what the extensions hold.
package: $(VENV_STAMPS)/castor
	@$(BIN)/python scripts/check_install.py
	@$(BIN)/python -m mypy.stubtest castor._C $$($(BIN)/python scripts/check_install.py --cuda) \
	  --ignore-unused-allowlist \
	  --mypy-config-file pyproject.toml --allowlist scripts/stubtest_allowlist.txt

# $(call cxx,NAME,CMAKE ARGUMENTS,TEST ENVIRONMENT,LAYERS): configure, build and run the tests in build/NAME,
# those of some layers or all.
define cxx
	@cmake -S . -B $(BUILD)/$(1) -DCASTOR_BUILD_TESTS=ON -DCASTOR_WERROR=ON $(2) >$(BUILD)/$(1).log \
	  || { cat $(BUILD)/$(1).log; exit 1; }
	@cmake --build $(BUILD)/$(1) $(if $(4),--target $(4:%=tests/cpp/%/all))
	@for folder in $(or $(4:%=$(BUILD)/$(1)/tests/cpp/%),$(BUILD)/$(1)); do \
	  $(3) ctest --test-dir $$folder --output-on-failure --no-tests=error -j $(JOBS) $(CTEST_ARGS); \
	  grep -h '^\[  SKIPPED \] [^ ]*$$' $$folder/Testing/Temporary/LastTest.log || true; done
endef

jemalloc_definition = -DCASTOR_JEMALLOC_ROOT=$$(sed 's/.*=//' $(STAMPS)/jemalloc)

CPP_LAYERS ?=
cpp: $(STAMPS)/jemalloc $(VENV_STAMPS)/venv
	$(call cxx,cpp,-DCMAKE_BUILD_TYPE=Release -DCASTOR_BUILD_TORCH_TESTS=ON \
	  -DPython_EXECUTABLE=$(abspath $(BIN)/python) $(jemalloc_definition),,$(CPP_LAYERS))
# The programs of make bench stand on seams of the core and of the torch layer: they are compiled
# here, so that they follow.
	@cmake -S benchmarks/cpp -B $(BUILD)/benchmarks -DPython_EXECUTABLE=$(BIN)/python >$(BUILD)/benchmarks.log \
	  || { cat $(BUILD)/benchmarks.log; exit 1; }
	@cmake --build $(BUILD)/benchmarks

asan: $(STAMPS)/jemalloc
	$(call cxx,asan,-DCMAKE_BUILD_TYPE=Debug -DCASTOR_SANITIZE=address $(jemalloc_definition),\
	  ASAN_OPTIONS=detect_stack_use_after_return=1:strict_init_order=1:check_initialization_order=1 \
	  UBSAN_OPTIONS=print_stacktrace=1)

# Without jemalloc: TSan cannot see the locks inside it, and would call the reuse of a block a race.
# setarch -R: GCC 12's TSan does not know the address layouts of newer kernels.
tsan: $(STAMPS)/system
	$(call cxx,tsan,-DCMAKE_BUILD_TYPE=Debug -DCASTOR_SANITIZE=thread -DCASTOR_JEMALLOC_ROOT=,\
	  TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1 \
	  $$(setarch -R true 2>/dev/null && echo setarch -R))

# $(call sanitized,KIND,TESTS): castor and the simulated devices, compiled with a sanitizer in
# build/sanitized/KIND and installed there beside the Python sources, and tests against them. Below
# build/sanitized, so that no other run of the tests takes the simulated devices for its own. Not in
# `make test`: most of the compile time is torch's headers.
define sanitized
	@mkdir -p $(BUILD)/sanitized
	@cmake -S . -B $(BUILD)/sanitized/$(1) -DCASTOR_SANITIZE=$(1) -DCMAKE_BUILD_TYPE=Release \
	  -DCASTOR_BUILD_PYTHON=ON -DCASTOR_BUILD_SIMULATED_DEVICE=ON -DCASTOR_BUILD_TESTS=OFF -DCASTOR_CUDA=OFF \
	  -DCASTOR_JEMALLOC_ROOT= -DPython_EXECUTABLE=$(BIN)/python >$(BUILD)/sanitized/$(1).log \
	  || { cat $(BUILD)/sanitized/$(1).log; exit 1; }
	@CCACHE_SLOPPINESS=pch_defines,time_macros cmake --build $(BUILD)/sanitized/$(1)
	@rm -rf $(BUILD)/sanitized/$(1)/site
	@cmake --install $(BUILD)/sanitized/$(1) --prefix $(BUILD)/sanitized/$(1)/site >>$(BUILD)/sanitized/$(1).log
	@cp -r python/castor $(BUILD)/sanitized/$(1)/site
	@scripts/sanitized_pytest.sh $(1) $(BUILD)/sanitized/$(1) $(BIN)/python $(2) $(PYTEST_ARGS)
endef

# Where most threads meet, and where objects of C++ outlive each other; without what repeats one thing over
# many models and formats.
SANITIZED_TESTS := $(patsubst %,tests/python/test_%.py,streams overlap partial_gradients threads lifetimes \
	copied_optimizers writes nvme_faults nvme_abuse nvme_weights_shared offloaded_blocks) \
	$(addprefix --deselect=tests/python/test_,overlap.py::test_every_mode_gives_the_same_weights \
	offloaded_blocks.py::test_loss_gradients_and_random_state_are_plain_pytorchs \
	nvme_faults.py::test_any_operation_of_a_run_may_fail)

asan-torch: $(VENV_STAMPS)/venv
	$(call sanitized,address,$(SANITIZED_TESTS))

tsan-torch: $(VENV_STAMPS)/venv
	$(call sanitized,thread,$(SANITIZED_TESTS))

$(STAMPS)/hwloc: $(STAMPS)/system scripts/build_hwloc.sh scripts/debian_source.sh
	@scripts/build_hwloc.sh $(HWLOC)
	@touch $@

# A wheel has no fallback to mmap: here jemalloc has to be there.
wheel: $(VENV_STAMPS)/venv $(STAMPS)/jemalloc $(STAMPS)/hwloc
	@scripts/build_jemalloc.sh $(JEMALLOC)
	@$(BIN)/python scripts/wheel_matrix.py --python $(WHEEL_PYTHONS) --torch $(WHEEL_TORCHES) \
	  --jemalloc $(JEMALLOC) --hwloc $(HWLOC) --dist dist --work $(BUILD) --werror $(WHEEL_ARGS)

# Each in an environment of its own, .venv-torchX.Y (5 GB).
torches:
	@failed=; for torch in $(TORCHES); do echo "==== torch $$torch"; \
	  $(MAKE) --no-print-directory pytest-fast VENV=.venv-torch$$torch CASTOR_TORCH="$$torch.*" || failed="$$failed $$torch"; done; \
	if [ -n "$$failed" ]; then echo "failed with torch:$$failed" >&2; exit 1; fi

# The oldest torch's environment takes 6 GiB, and its downloads 3 more. A disk that lacks them gives up what the
# other phases are done with, the environment of the newest torch last.
room:
	@scripts/make_room.sh 11 $(BUILD)/asan $(BUILD)/tsan $(wildcard $(BUILD)/py*-env) $(VENV)

oldest-torch:
	@$(MAKE) --no-print-directory torches TORCHES=$(firstword $(TORCHES))

# With kernels, or not at all; git is asked which tests there are.
wheels:
	@$(MAKE) --no-print-directory wheel WHEEL_TORCHES="$(TORCHES)" WHEEL_ARGS="--require $(WHEEL_ARGS)"

gpu-archive: $(VENV_STAMPS)/venv
	@$(MAKE) --no-print-directory wheel WHEEL_PYTHONS=$(GPU_PYTHON) WHEEL_TORCHES=$(GPU_TORCH) WHEEL_ARGS="--require --cuda $(WHEEL_ARGS)"
	@$(BIN)/python scripts/gpu_archive.py --output dist/castor-gpu.tar.gz \
	  --wheel dist/castor_torch-*+torch$(GPU_TORCH)-cp$(subst .,,$(GPU_PYTHON))-*.whl \
	  --python $(BUILD)/py$(GPU_PYTHON)-torch$(GPU_TORCH)-env/venv/bin/python \
	  -DCASTOR_HWLOC_ROOT=$(HWLOC) $(jemalloc_definition)

# Tests compute with one thread each: files go to as many processes as there are cores.
pytest: $(VENV_STAMPS)/castor
	@$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile $(PYTEST_ARGS)

# Without slow tests, and of several ranks one or two for each feature.
FAST := not browser and not slow and (not ranks or smoke)
pytest-fast: $(VENV_STAMPS)/castor
	@$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile -m '$(FAST)' $(PYTEST_ARGS)

# tests/python/grids.py says what a run without this leaves out.
whole simgpu: export CASTOR_WHOLE_GRID := 1
# The families of transformers that are not in the suite's table as well.
whole: pytest
	@$(BIN)/python tests/python/types_of_families.py

# Scripts that other projects publish run where their clones are: tests/integration/test_published.py.
integration: export CASTOR_PUBLISHED ?=
integration: $(VENV_STAMPS)/integration
	@$(BIN)/python -m pytest tests/integration $(PYTEST_ARGS)

# The asynchronous simulated GPU: tests made for it with each seed of delays, then suites of the CPU
# device on it with each. A seed took 26 minutes on two cores that others were busy on.
SIMGPU_SEEDS ?= 1 2 3
SIMGPU_OWN := cuda cuda_session gpu_ranks gpu_parallel streams simulated_gpu simulated_group simulated_device simulated_nvme simulated_rules embeddings async_loader packed
SIMGPU_SUITES := parity checkpoint_resume checkpoint_model checkpoint_optimizer checkpoint_faults \
	checkpoint_damage checkpoint_dataloader partial_gradients hybrid nvme nvme_abuse nvme_weights \
	nvme_weights_shared passes states untrained writes recomputed_blocks auto_activations offloaded_blocks \
	tiled_blocks tiled_logits activations_on_nvme tight_budgets shared_budget generation \
	tensor_parallel stage_calls fused_rules
comma := ,
simgpu: export CASTOR_REQUIRE_SIMULATED_DEVICE := 1
simgpu: $(VENV_STAMPS)/castor
	@CASTOR_SIMULATED_GPU_SEEDS=$(subst $() ,$(comma),$(strip $(SIMGPU_SEEDS))) \
	  $(BIN)/python -m pytest $(SIMGPU_OWN:%=tests/python/test_%.py) $(PYTEST_ARGS)
	@for seed in $(SIMGPU_SEEDS); do echo "seed $$seed"; CASTOR_TEST_DEVICE=simgpu:$$seed \
	  $(BIN)/python -m pytest $(SIMGPU_SUITES:%=tests/python/test_%.py) $(PYTEST_ARGS); done

# Always all of it: an incremental build repeats no warning of a page that has not changed since.
docs: $(VENV_STAMPS)/castor $(VENV_STAMPS)/docs
	@$(BIN)/python -m sphinx --fail-on-warning --keep-going --fresh-env --quiet docs $(BUILD)/docs
	@echo "documentation: $(BUILD)/docs/index.html"

# About 20 minutes on two cores; the first run also compiles DeepSpeed's CPU Adam, 4 minutes more.
# QUICK=1 tries the scripts in 2 minutes, and writes nothing to benchmarks/results and docs/status.md.
QUICK ?=
STORAGE_BENCHMARKS := $(addprefix benchmarks/,io.py checkpoints.py nvme.py beyond.py build.py llama8b.py)
BENCHMARKS := $(filter-out $(addprefix benchmarks/,builds.py deepspeed_settings.py formats.py page.py) $(STORAGE_BENCHMARKS), \
	$(wildcard benchmarks/[!_]*.py))

bench: TIMED := $(BENCHMARKS)
bench-storage: TIMED := $(STORAGE_BENCHMARKS)
bench bench-storage: $(VENV_STAMPS)/bench
	@failed=; for script in $(TIMED); do \
	  echo "==== $$script"; start=$$SECONDS; \
	  $(BIN)/python "$$script" $(if $(QUICK),--quick) || failed="$$failed $$script"; \
	  echo "$$script took $$((SECONDS - start)) s"; \
	done; \
	$(BIN)/python benchmarks/page.py $(if $(QUICK),--quick) --output $(BUILD)/bench/index.html; \
	$(if $(QUICK),,$(BIN)/python scripts/status.py;) \
	if [ -n "$$failed" ]; then echo "failed:$$failed" >&2; exit 1; fi

study: $(VENV_STAMPS)/castor
	@$(BIN)/python benchmarks/formats.py

clean:
	rm -rf $(BUILD) $(VENV) dist .mypy_cache .ruff_cache .pytest_cache
