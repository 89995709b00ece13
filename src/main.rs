//! The program's entry point: calls `ostinato::cli::main`, which parses the arguments and runs the command.

/// The allocator of the whole process, drivers included (`override_allocator_on_supported_platforms`): the compiler
/// inside a CPU driver allocates more memory than all of this crate's own code. jemalloc returns freed memory to the
/// system within seconds, from a background thread, even when no other code runs. glibc's allocator keeps all memory
/// that each thread's arena has ever held (docs/performance.md compares both).
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> std::process::ExitCode {
    ostinato::cli::main()
}
