help:
	@echo "make demo | test | test-more | check | build"
build:
	cmake -S . -B build -G Ninja && cmake --build build
.PHONY: help build
