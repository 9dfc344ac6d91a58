# Everything one does with this repository; `make` alone lists it. The work is in tests/bin/.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup build install uninstall check fmt-check clippy doc-check docs-check tools-check deny fmt test test-lab test-rdma test-systemd test-faults soak test-mutants bench bench-forms bench-rdma demo fuzz clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' | awk -F'|' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: ## Install what building and testing need (Debian packages as root, cargo-nextest)
	@tests/bin/setup.sh

build: ## Build railfs and railfsd, optimised, into target/release
	cargo build --release --workspace --bins

install: ## Put programs, units, mount helper, example files and manual pages in place (DESTDIR, PREFIX; see packaging/)
	@DESTDIR='$(DESTDIR)' PREFIX='$(PREFIX)' HELPER_DIR='$(HELPER_DIR)' CONFIG_DIR='$(CONFIG_DIR)' BIN_DIR='$(BIN_DIR)' packaging/install.sh install

uninstall: ## Take away what `make install` with the same variables put in place
	@DESTDIR='$(DESTDIR)' PREFIX='$(PREFIX)' HELPER_DIR='$(HELPER_DIR)' CONFIG_DIR='$(CONFIG_DIR)' BIN_DIR='$(BIN_DIR)' packaging/install.sh uninstall

check: fmt-check clippy doc-check docs-check tools-check deny ## Format, lints, documentation, links, scripts, licences

fmt-check:
	cargo fmt --all --check

clippy:
	cargo clippy --workspace --all-targets -- -D warnings

doc-check:
	RUSTDOCFLAGS="-D warnings" cargo doc --no-deps --workspace

docs-check:
	@tests/bin/docs.sh
	@python3 tests/bin/mutants.py --check

tools-check:
	@python3 -m unittest discover -q -s tests/bin -p '*_test.py'

deny:
	@if cargo deny --version >/dev/null 2>&1; then cargo deny check bans licenses sources; \
	else echo "SKIPPED cargo-deny: not installed, licences and sources of dependencies were not checked"; fi

fmt: ## Format the code
	cargo fmt --all

test: ## Run everything this machine can run; the last line counts passed, failed, skipped
	@tests/bin/test.sh

test-lab: ## Run only the tests in guests (tests/lab): another kernel, Soft-RoCE
	@tests/bin/lab.sh --only run pair

test-systemd: ## Run only the units, fstab and automount under a real systemd, in a guest
	@tests/bin/lab.sh --only systemd

test-rdma: ## Run only the tests of verbs rails, over Soft-RoCE devices in guests
	@RAILFS_FULL=1 tests/bin/lab.sh --only rdma rdma-pair

test-faults: ## Run the tests of invariants and faults alone: per invariant what was tried, and how often it was violated
	@tests/bin/test.sh faults

soak: ## Everything at once under live mounts, with random faults and a byte checker: make soak MINUTES=60
	@tests/bin/soak.sh "$${MINUTES:-10}"

test-mutants: ## Break each invariant on purpose (docs/invariants.md) and demand that its test turns red
	@python3 tests/bin/mutants.py

bench: ## Measure reads, with the ceilings of this machine beside them
	@tests/bin/call.sh tests/bin/bench.sh

bench-forms: ## Measure io=direct and io=cached side by side
	@tests/bin/call.sh tests/bin/bench.sh forms

bench-rdma: ## Measure RDMA rails over Soft-RoCE devices in a guest, with ib_write_bw beside them
	@tests/bin/call.sh tests/bin/bench.sh rdma

demo: ## Store, mount, read, overwrite and lose a rail, on this machine
	@tests/bin/call.sh tests/bin/demo.sh

fuzz: ## Fuzz every decoder for RAILFS_FUZZ_SECONDS (default 60) in all
	@RAILFS_FUZZ_SECONDS="$${RAILFS_FUZZ_SECONDS:-60}" tests/bin/call.sh tests/fuzz/run.sh

clean: ## Remove what was built
	cargo clean
