# Two commands do everything on a fresh Debian or Ubuntu machine with Rust, a C++ compiler and make.
#   make demo   installs what is missing, builds, serves the demo model and talks to it
#   make test   installs what the tests need and passes them
#   make install   builds and installs the program, completions, manual pages and the systemd unit (PREFIX, DESTDIR)
#   make dist      builds an archive and a Debian package with checksums in target/dist
#   make test-dist      installs that package on a bare Debian root and uses it (tests/install/run.sh)
#   make test-newcomer  passes the README's commands on a bare Debian root, with the seconds that each takes
#   make test-clients   runs LangChain, LiteLLM and Open WebUI against the demo model (tests/clients/run.sh)
#   make test-soak      runs mixed traffic for 18 minutes and requires that the server's memory does not grow
#   make test-drivers   compiles every pipeline with the drivers of GPUs that are not there (docs/hardware.md)
# Further: make test-full also passes the long tests that repeat in depth what others prove (docs/decisions/testing.md).

CARGO ?= cargo

# What `ostinato --version` shows.
COMMIT := $(shell git rev-parse --short=12 HEAD 2>/dev/null)
PREFIX ?= /usr/local

.PHONY: demo test test-full test-drivers test-soak test-dist test-newcomer test-clients build setup setup-test fmt install dist

demo: setup build
	@deploy/demo.sh

build:
	@OSTINATO_COMMIT=$(COMMIT) $(CARGO) build --release --locked

install: build
	@deploy/package.sh install "$(DESTDIR)" "$(PREFIX)"

# The program that is packed is smaller than that of `make build`, and takes longer to build. Identical functions are folded
# where the linker, of which Rust brings its own on x86_64, can, and only small functions are inlined.
COMMA := ,
FOLD = $(if $(filter x86_64,$(shell uname -m)),-C link-arg=-Wl$(COMMA)--icf=all)
INLINE = -C llvm-args=-inline-threshold=75
dist:
	@RUSTFLAGS="$(RUSTFLAGS) $(FOLD) $(INLINE)" OSTINATO_COMMIT=$(COMMIT) $(CARGO) build --profile distributed --locked --no-default-features
	@deploy/package.sh dist

test-dist: dist
	@deploy/setup.sh install
	@tests/install/run.sh package

test-newcomer:
	@deploy/setup.sh install
	@tests/install/run.sh source

test-clients: build
	@tests/clients/run.sh

setup:
	@deploy/setup.sh run

setup-test:
	@deploy/setup.sh test

# In a clean clone nothing is compiled twice, so files for incremental compilation are not written: 80 s of CPU less. Where
# there are some, the next change profits from them.
test: export CARGO_INCREMENTAL := $(if $(wildcard $(or $(CARGO_TARGET_DIR),target)/debug/incremental),1,0)
test: setup-test
	$(CARGO) fmt --check
	$(CARGO) clippy --all-targets --locked -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --no-deps --locked
	deploy/deny.sh
	CARGO="$(CARGO)" tests/run.py

test-full: test
	$(CARGO) test --locked --test model -- --ignored batches:: demo:: fallback:: grammar:: split:: tensor::
	OSTINATO_DEMO_TASKS=10 $(CARGO) test --locked --test model -- demo::
	$(CARGO) test --locked --test kernels -- --ignored codes::several_rows
	OSTINATO_TEST_EVERY_CASE=1 CARGO="$(CARGO)" tests/run.py kernels
	OSTINATO_TEST_EVERY_CASE=1 $(CARGO) test --locked --test model -- families:: experts:: transformers:: split:: tensor:: \
		grammar::rows_follow speculation::a_draft_head_changes quantised::the_demo_model
	OSTINATO_TEST_EVERY_CASE=1 $(CARGO) test --locked --lib -- gguf::write
	OSTINATO_TEST_EVERY_CASE=1 $(CARGO) test --locked --test program -- fleet::
	OSTINATO_HOSTILE_SECONDS=60 $(CARGO) test --locked --test hostile -- everything_at_once
	OSTINATO_TEST_GPU_ASSISTED=1 $(CARGO) test --locked --test kernels -- sampling:: stream:: draft::
	for tests in "codes:: --skip packed_matrices --skip integer_dot_products" moe:: flash:: tiled:: \
		"delta:: --skip tokens_that_may_be_taken_back --skip rows_that_decode_beside_prompts --test-threads=1" \
		"forward:: --skip forward::attention_of --test-threads=1"; do \
		OSTINATO_TEST_GPU_ASSISTED=1 OSTINATO_TEST_DRIVER=SwiftShader $(CARGO) test --locked --test kernels -- $$tests || exit 1; \
	done
	OSTINATO_TEST_GPU_ASSISTED=1 OSTINATO_TEST_DRIVER=SwiftShader VK_LAYER_GPUAV_SHARED_MEMORY_DATA_RACE=0 \
		$(CARGO) test --locked --test kernels -- forward::attention_of tokens_that_may_be_taken_back \
		rows_that_decode_beside_prompts integer_dot_products
	OSTINATO_TEST_GPU_ASSISTED=1 $(CARGO) test --locked --test kernels -- --ignored gpu_assisted

# OSTINATO_SOAK_SECONDS sets another duration; the slope that is accepted of a shorter run is greater.
test-soak: setup-test
	$(CARGO) test --release --locked --test program -- --exact soak::memory_that_is_freed_is_given_back --ignored --nocapture

test-drivers:
	@deploy/setup.sh drivers
	$(CARGO) build --locked
	tests/drivers/run.py

fmt:
	$(CARGO) fmt
