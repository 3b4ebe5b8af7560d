# Hearth's front door: `make help` lists what can be asked for. CMake does the building, in build/.
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
FUZZ_SECONDS ?= 60
DEMO_PROMPT ?= What is a hearth?

# configure DIR ARGS: runs CMake where it has not run yet; ninja runs it again by itself when it must.
configure = test -f $(1)/build.ninja || cmake -S . -B $(1) -G Ninja $(2) >/dev/null

help: ## this list
	@echo "Hearth runs a large language model on this machine. Two commands to begin with:"
	@echo "  make demo    and    make test"
	@echo
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## install the packages that building needs (tools/packages.txt), if any is missing
	@tools/setup.sh build

build: setup ## build/hearth
	@$(call configure,build)
	@ninja -C build hearth

demo: build ## set up, build, get a small model, and answer a question
	@model=$$(python3 tools/get_model.py) && \
	printf '\n$$ build/hearth run %s -p "%s" --temp 0\n' "$$model" "$(DEMO_PROMPT)" && \
	build/hearth run "$$model" -p "$(DEMO_PROMPT)" --temp 0

test: ## set up, build, and run every test
	@tools/test.sh

test-more: ## sanitizers, a minute of each fuzz target, aarch64 under qemu
	@tools/test_more.sh

gpu-test: build ## the tests of the CUDA backend, on a machine with a GPU
	@ninja -C build test_cuda test_cuda_ops && build/test_cuda && build/test_cuda_ops
	@tools/venv.sh && build/venv/bin/python -m pytest -q -rs tests/test_gpu.py

check: ## the rules of the house: arrows between rooms, sizes, names
	@tools/check.sh

asan: ## the C tests and a part of the Python tests with the address and undefined-behaviour sanitizers
	@tools/test_more.sh asan

ubsan: ## the same with the undefined-behaviour sanitizer alone
	@tools/test_more.sh ubsan

tsan: ## the C tests that use threads with the thread sanitizer
	@tools/test_more.sh tsan

fuzz: ## each fuzz target for FUZZ_SECONDS (60)
	@FUZZ_SECONDS=$(FUZZ_SECONDS) tools/test_more.sh fuzz

aarch64: ## cross-build for aarch64 and run the tests under qemu
	@tools/test_more.sh aarch64

format: ## clang-format over the C sources
	@clang-format -i $$(find src tests -name '*.[ch]')

clean: ## remove build/
	@rm -rf build

.PHONY: help setup build demo test test-more gpu-test check asan ubsan tsan fuzz aarch64 format clean
