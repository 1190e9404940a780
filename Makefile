# Entry points for people. Everything below is CMake presets and scripts; nothing is hidden here.
#   make demo   build a release and run a bundled trained checkpoint
#   make test   build with all checks and run all tests
BUILD := build
# Parallel jobs: bounded by memory too (about 1.5 GB for the compiler on the largest SIMD file).
JOBS ?= $(shell scripts/jobs.sh)
# AUTO: with the kernels where nvcc is.
CUDA ?= AUTO
# Tests without an NVIDIA device only show that the kernels compile: quickly will do.
QUICK ?= $(if $(wildcard /dev/nvidia[0-9]*),OFF,ON)
CTEST_FLAGS ?= --output-on-failure --parallel $(JOBS)

.PHONY: help deps deps-all demo test release asan tsan fuzz faults bench format format-check tidy install clean

help:
	@sed -n 's/^#   //p' Makefile
	@echo "also: deps release asan tsan fuzz faults bench format format-check tidy clean"

deps:
	@scripts/install-deps.sh build

deps-all:
	@scripts/install-deps.sh all

demo: deps
	@scripts/demo.sh

release: deps
	cmake --preset release -DMOESAIC_CUDA=$(CUDA)
	cmake --build $(BUILD)/release -j $(JOBS)

test: deps
	cmake --preset dev -DMOESAIC_CUDA_QUICK=$(QUICK)
	cmake --build $(BUILD)/dev -j $(JOBS)
	ctest --test-dir $(BUILD)/dev $(CTEST_FLAGS)

# All tests under AddressSanitizer and UndefinedBehaviorSanitizer, with clang.
asan: deps-all
	cmake --preset asan
	cmake --build $(BUILD)/asan -j $(JOBS)
	scripts/run-sanitized.sh asan

# The threaded tests under ThreadSanitizer: clang with an OpenMP runtime that TSan understands.
tsan: deps-all
	cmake --preset tsan
	cmake --build $(BUILD)/tsan -j $(JOBS) --target threaded_tests
	scripts/run-sanitized.sh tsan

# FUZZ_SECONDS per target; the corpus and seeds are in fuzz/.
fuzz: deps-all
	scripts/fuzz.sh

faults: deps
	cmake --preset dev -DMOESAIC_CUDA_QUICK=$(QUICK)
	cmake --build $(BUILD)/dev -j $(JOBS)
	ctest --test-dir $(BUILD)/dev $(CTEST_FLAGS) -R '^injected_faults$$'

bench: release
	$(BUILD)/release/bin/moesaic bench --device cpu --shape qwen3-30b --stage experts --tokens 1,4,16,512

format: deps-all
	@scripts/format.sh

format-check: deps-all
	@scripts/format.sh --check

# TIDY_FLAGS=--deep adds the path-sensitive analyzer, file by file (a quarter of an hour on two cores).
tidy: deps-all
	scripts/tidy.sh $(TIDY_FLAGS)

clean:
	rm -rf $(BUILD)
