# Everything runs in .venv, which `make setup` builds; no other step needs doing by hand.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo test test-unprivileged test-kernel-debian test-kernel-debian-all lint format bench bench-quick clean

PYTHON := .venv/bin/python

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' Makefile

setup: ## install what is missing (Debian packages, .venv); nothing to do: under 2 s
	@scripts/setup

demo: setup ## build an emulated cluster, train over it with DDP and with tlsched, show both
	@$(PYTHON) -m tlsched demo

test: need-root setup ## run every test (root: they build network namespaces)
	@$(PYTHON) -m pytest

test-unprivileged: setup ## run the tests that need no root
	@$(PYTHON) -m pytest -m "not root"

# Emulated, Python is some ten times slower, and the first must end within minutes: so they run the
# tests marked stock_kernel, which ask the kernel, and none twice that would answer alike on any.
ON_DEBIANS_KERNEL = scripts/debian-kernel env TLT_SLOWNESS=10 $(PYTHON) -m pytest \
	-p no:cacheprovider --whole-kernel --timeout 600 tests/ebpf tests/kernel tests/tc

test-kernel-debian: need-root setup ## run tests that depend on the kernel on Debian's own, in QEMU
	@$(ON_DEBIANS_KERNEL) -m "stock_kernel and not lengthy"

test-kernel-debian-all: need-root setup ## the same with all of them (about 15 minutes)
	@DEBIAN_KERNEL_LIMIT_S=2400 $(ON_DEBIANS_KERNEL) -m stock_kernel

lint: setup ## check style and types, change nothing
	@$(PYTHON) -m ruff check
	@$(PYTHON) -m ruff format --check
	@$(PYTHON) -m mypy

format: setup ## put the sources in their one format
	@$(PYTHON) -m ruff check --fix-only
	@$(PYTHON) -m ruff format

bench: setup ## run the benchmarks (about 30 minutes), results under bench/results and in docs/
	@$(PYTHON) -m bench all
	@$(PYTHON) -m bench report

bench-quick: setup ## a short form of each benchmark (under 4 minutes), results under out/bench
	@$(PYTHON) -m bench all --quick --out out/bench

clean: ## remove what building, testing and the demo left (.venv stays)
	@rm -rf build dist out ./*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find tlsched tests bench -type d -name __pycache__ -prune -exec rm -rf {} +

.PHONY: need-root
need-root:
	@[ "$$(id -u)" = 0 ] || { echo "the tests need root: 'sudo make test', or 'make test-unprivileged' for the others" >&2; exit 1; }
