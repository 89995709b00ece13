# Two commands do everything on a fresh Debian or Ubuntu machine with Rust, a C++ compiler and make.
#   make demo   installs what is missing, builds, serves the demo model and talks to it
#   make test   installs what the tests need and passes them
#   make install   builds and installs the program, completions, manual pages and the systemd unit (PREFIX, DESTDIR)
#   make dist      builds an archive and a Debian package with checksums in target/dist
#   make test-drivers   compiles every pipeline with the drivers of GPUs that are not there (docs/hardware.md)
# Further: make test-full also passes the long tests that repeat in depth what others prove (docs/decisions/testing.md).

CARGO ?= cargo

# What `ostinato --version` shows.
COMMIT := $(shell git rev-parse --short=12 HEAD 2>/dev/null)
PREFIX ?= /usr/local

.PHONY: demo test test-full test-drivers build setup setup-test fmt install dist

demo: setup build
	@deploy/demo.sh

build:
	@OSTINATO_COMMIT=$(COMMIT) $(CARGO) build --release --locked

install: build
	@deploy/package.sh install "$(DESTDIR)" "$(PREFIX)"

dist: build
	@deploy/package.sh dist

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

test-drivers:
	@deploy/setup.sh drivers
	$(CARGO) build --locked
	tests/drivers/run.py

fmt:
	$(CARGO) fmt
