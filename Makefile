# Two commands do everything on a fresh Debian or Ubuntu machine with Rust, a C++ compiler and make.
#   make demo   installs what is missing, builds, serves the demo model and talks to it
#   make test   installs what the tests need and passes them
# Further: make test-full also passes the long tests that repeat in depth what others prove (docs/decisions/testing.md).

CARGO ?= cargo

.PHONY: demo test test-full build setup setup-test fmt

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

test-full: test
	$(CARGO) test --locked --test model -- --ignored batches:: demo::
	$(CARGO) test --locked --test kernels -- --ignored codes::

fmt:
	$(CARGO) fmt
