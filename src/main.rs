//! The program: parses arguments and hands over to `ostinato::cli`.

fn main() -> std::process::ExitCode {
    ostinato::cli::main()
}
