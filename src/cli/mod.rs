//! The command line: `devices`, `serve`, `generate`, `bench`, `synth`.
//! Deliberately absent: anything that the service needs too.

mod devices;
mod synth;

/// Runs the program; the exit status is 2 for what the user can mend, 1 for the rest.
pub fn main() -> std::process::ExitCode {
    std::process::ExitCode::SUCCESS
}
