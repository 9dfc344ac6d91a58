//! The `railfs` program: see `railfs::cli`.

#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    railfs::cli::main(std::env::args_os())
}
