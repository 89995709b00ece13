# Two commands do everything on a fresh Debian or Ubuntu machine with Rust, a C++ compiler and make.
#   make demo   installs what is missing, builds, serves the demo model and talks to it
#   make test   installs what the tests need and passes them

CARGO ?= cargo

.PHONY: demo test build setup setup-test fmt

demo: setup build
	@deploy/demo.sh

build:
	@$(CARGO) build --release --locked

setup:
	@deploy/setup.sh run

setup-test:
	@deploy/setup.sh test

test: setup-test
	$(CARGO) fmt --check
	$(CARGO) clippy --all-targets --locked -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --no-deps --locked
	deploy/deny.sh
	$(CARGO) test --locked

fmt:
	$(CARGO) fmt
