//! The `millrace` program: flags in, text or JSON out.
//!
//! `args` defines the command line; each command has its own module. Below the commands are `admin`
//! and `remote` (clients of a node), `answer`, `output`, `style`, `tool_core` and `failure`.
//!
//! Exit codes: 0 success, 1 the key does not exist or damage was found, 2 wrong usage or a failure.
//! A closed pipe is not a failure.
#![deny(unsafe_code)]

mod admin;
mod allocator;
mod answer;
mod args;
mod bench;
mod disk;
mod disk_image;
mod disk_move;
mod events;
mod failure;
mod kv;
mod output;
mod remote;
mod serve;
mod style;
mod tool_core;
mod top;
mod upgrade;

use std::io::Write;
use std::process::ExitCode;

use clap::{CommandFactory, Parser};

use args::{Cli, Command};
use failure::{Failure, Verdict};

fn main() -> ExitCode {
    // Exits with 2 on wrong usage, and with 0 after --help and --version.
    let cli = Cli::parse();
    match run(cli.command) {
        Ok(Verdict::Good) => ExitCode::SUCCESS,
        Ok(Verdict::Bad) => ExitCode::from(1),
        Err(failure) if failure.is_quiet() => ExitCode::SUCCESS,
        Err(failure) => {
            // If standard error is closed too, there is no way to report the failure.
            let _ = writeln!(std::io::stderr(), "millrace: {failure}");
            ExitCode::from(2)
        }
    }
}

fn run(command: Command) -> Result<Verdict, Failure> {
    if matches!(command, Command::Kv { command: args::KvCommand::Compact(_) }) {
        // It waits for them; no thread may take them instead.
        reactor::block_signals();
    }
    if !matches!(command, Command::Serve(_)) {
        node::start_tool_log()?;
    }
    match command {
        Command::Serve(args) => serve::run(args)?,
        Command::Kv { command } => return crate::kv::run(command),
        Command::Disk { command } => disk::run(command)?,
        Command::Events(args) => events::run(&args)?,
        Command::Top(args) => top::run(&args)?,
        Command::Upgrade(args) => upgrade::run(args)?,
        Command::Bench(args) => bench::run(args)?,
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "millrace", &mut script);
            print(&script)?;
        }
        Command::Man { command } => print(&manual(&command)?)?,
    }
    Ok(Verdict::Good)
}

/// The manual page of a command; of the whole program when none is named.
fn manual(names: &[String]) -> Result<Vec<u8>, Failure> {
    let mut all = Cli::command();
    // Builds the commands' full names: a page says `millrace kv scan`, not `scan`.
    all.build();
    let all = all.mut_subcommands(in_full);
    let mut command = &all;
    for name in names {
        command = command
            .find_subcommand(name)
            .ok_or_else(|| Failure::new(format!("no command is named '{}'", names.join(" "))))?;
    }
    let mut page = Vec::new();
    clap_mangen::Man::new(command.clone())
        .render(&mut page)
        .map_err(|error| Failure::new(format!("cannot write the manual page: {error}")))?;
    Ok(page)
}

/// Shows the flags that the short help hides.
fn in_full(command: clap::Command) -> clap::Command {
    command.mut_args(|arg| arg.hide_short_help(false)).mut_subcommands(in_full)
}

fn print(bytes: &[u8]) -> Result<(), Failure> {
    let mut out = output::Out::new();
    out.bytes(bytes)?;
    Ok(out.flush()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_has_a_manual_page_under_its_full_name() {
        let page = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(ToString::to_string).collect();
            manual(&names).map(|page| String::from_utf8(page).unwrap())
        };
        assert!(page(&[]).unwrap().contains("millrace \\- Serves"));
        let scan = page(&["kv", "scan"]).unwrap();
        assert!(scan.contains("millrace\\-kv\\-scan \\- List keys"), "{scan}");
        assert!(scan.contains("\nRead the data before damage"), "{scan}");
        assert!(page(&["kv", "drop"]).is_err());
    }
}
