//! The program: parses arguments and hands over to `ostinato::cli`.

/// jemalloc gives memory that was freed back to the system within seconds, by a thread of its own where nothing else
/// runs. glibc's allocator keeps what each thread's arena has ever held (docs/performance.md has both). It is the
/// allocator of the whole process (`override_allocator_on_supported_platforms`), of drivers too: a CPU driver's compiler
/// allocates more than all of our own code.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> std::process::ExitCode {
    ostinato::cli::main()
}
