//! The command line, defined once: the parser, the help, the completions and the man pages are
//! derived from it.
//!
//! Each command's flags have their own file; `values` is below them.

mod bench;
mod compaction;
mod copies;
mod families;
mod kv;
mod node;
mod serve;
mod values;

use clap::{Parser, Subcommand};

pub use self::bench::BenchArgs;
pub use self::compaction::{CompactArgs, CompactionCommand};
pub use self::copies::{
    BackupCommand, Backups, CheckpointArgs, Copying, IngestArgs, Original, RestoreArgs,
};
pub use self::families::{FamiliesCommand, FamiliesPlace};
pub use self::kv::{Entries, KvCommand, Source, Target};
pub use self::node::{DiskCommand, DiskMoveArgs, EventsArgs, NodeArgs, TopArgs, UpgradeArgs};
pub use self::serve::ServeArgs;

/// Serves and reads RocksDB databases at the disk's speed.
#[derive(Debug, Parser)]
#[command(
    name = "millrace",
    version,
    arg_required_else_help = true,
    after_help = "Start with:\n  \
        millrace serve --data DIR         serve the RocksDB database in DIR to Redis clients\n  \
        millrace kv get KEY --data DIR    read one key\n  \
        millrace kv check --data DIR      verify every byte of it",
    after_long_help = "Start with:\n  \
        millrace serve --data DIR         serve the RocksDB database in DIR to Redis clients\n  \
        millrace kv get KEY --data DIR    read one key\n  \
        millrace kv check --data DIR      verify every byte of it\n\n\
        Exit codes: 0 success; 1 the key does not exist (kv get), damage was \
        found (kv check, kv backup verify and list); 2 wrong usage, or an operation failed.\n\n\
        Sizes are in bytes, or a number with K, M, G or T (powers of 1024)."
)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve a database to Redis clients
    Serve(ServeArgs),
    /// Read, write, list, describe or verify a database
    #[command(subcommand_required = true, arg_required_else_help = true)]
    Kv {
        /// What to do with the database.
        #[command(subcommand)]
        command: KvCommand,
    },
    /// Create disks for virtual machines; attach, resize and watch them on a running node
    #[command(subcommand_required = true, arg_required_else_help = true)]
    Disk {
        /// What to do with disks.
        #[command(subcommand)]
        command: DiskCommand,
    },
    /// Show what has happened to a running node and its disks, and follow what happens
    Events(EventsArgs),
    /// Show the activity of a running node, second by second
    Top(TopArgs),
    /// Replace the program of a running node while guests run and clients are connected
    Upgrade(UpgradeArgs),
    /// Measure how fast a database or a disk is read and written
    Bench(BenchArgs),
    /// Print a shell's completion script
    #[command(after_help = "Example:\n  \
        millrace completions bash > /etc/bash_completion.d/millrace")]
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
    /// Print the manual page, or that of a command
    #[command(after_help = "Examples:\n  \
        millrace man | man -l -\n  \
        millrace man kv scan | man -l -")]
    Man {
        /// The command, such as: kv scan
        command: Vec<String>,
    },
}

#[cfg(test)]
mod tests {
    use ::node::{CoreChoice, Size};
    use clap::CommandFactory;
    use reactor::{DriverKind, PollMode};

    use super::*;

    fn parse(line: &str) -> Result<Cli, String> {
        Cli::try_parse_from(line.split(' ')).map_err(|error| error.to_string())
    }

    #[test]
    fn the_definitions_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_kv_command_needs_exactly_one_place() {
        assert!(parse("millrace kv get k --data d").is_ok());
        assert!(parse("millrace kv get k --connect :6379").is_ok());
        assert!(parse("millrace kv get k").is_err());
        assert!(parse("millrace kv get k --data d --connect :6379").is_err());
        assert!(parse("millrace kv scan --connect :6379 --secondary").is_err());
    }

    #[test]
    fn a_kv_command_rejects_flags_it_would_ignore() {
        for flags in ["--hex", "--column-family one"] {
            for (command, fits) in
                [("get k", true), ("scan", true), ("stat", false), ("check", false)]
            {
                let line = format!("millrace kv {command} --data d {flags}");
                assert_eq!(parse(&line).is_ok(), fits, "{line}");
            }
        }
    }

    #[test]
    fn a_compaction_is_of_a_directory_or_a_node() {
        assert!(parse("millrace kv compact").is_ok());
        assert!(parse("millrace kv compact --from a --to b --hex --admin s --json").is_ok());
        assert!(parse("millrace kv compact --data d --adopt --io epoll").is_ok());
        assert!(parse("millrace kv compact --data d --admin s").is_err());
        assert!(parse("millrace kv compact --adopt").is_err());
    }

    #[test]
    fn a_limit_is_a_number_or_none() {
        let limits = |flags: &str| {
            let line = format!("millrace kv compaction limit {flags}");
            match parse(line.trim_end())?.command {
                Command::Kv {
                    command:
                        KvCommand::Compaction { command: CompactionCommand::Limit { cores, rate, .. } },
                } => Ok((cores, rate)),
                other => Err(format!("{other:?}")),
            }
        };
        assert_eq!(limits("--cores 0.5"), Ok((Some(50), None)));
        assert_eq!(limits("--cores none --rate 10M"), Ok((Some(0), Some(10 << 20))));
        assert_eq!(limits("--rate none"), Ok((None, Some(0))));
        for wrong in ["", "--cores 0", "--cores 0.001", "--cores -1", "--cores x", "--rate 0"] {
            assert!(limits(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_copy_has_a_rate_above_0() {
        for command in
            ["checkpoint d", "backup create b", "backup verify b", "restore b --data d", "ingest f"]
        {
            let line = |rate| format!("millrace kv {command} --rate-limit {rate}");
            assert!(parse(&line("1K")).is_ok(), "{command}");
            for rate in ["0", "0M"] {
                let refused = parse(&line(rate)).unwrap_err();
                assert!(refused.contains("must be above 0"), "{command}: {refused}");
            }
        }
    }

    #[test]
    fn bench_needs_a_case_or_peers() {
        assert!(parse("millrace bench readrandom --data d --cores 0,1").is_ok());
        assert!(parse("millrace bench --peers").is_ok());
        assert!(parse("millrace bench --data d").is_err());
        assert!(parse("millrace bench readseq").is_err());
        assert!(parse("millrace bench locks").is_ok());
        assert!(parse("millrace bench mapped --data d --size 4G").is_ok());
        assert!(parse("millrace bench mapped").is_err());
        assert!(parse("millrace bench vdisk --socket s --rw randrw --verify --cores 0,1").is_ok());
        assert!(parse("millrace bench vdisk --disk null:1G --depth 128 --queues 2").is_ok());
        assert!(parse("millrace bench vdisk --socket s --disk null:1G").is_err());
        assert!(parse("millrace bench vdisk --disk null:1G --idle 32 --queues 2").is_ok());
        assert!(parse("millrace bench vdisk --socket s --idle 32").is_err());
        assert!(parse("millrace bench vdisk --disk null:1G --upgrades 3 --depth 1").is_ok());
        assert!(parse("millrace bench vdisk --disk null:1G --upgrades 3 --restarts 3").is_err());
        assert!(parse("millrace bench vdisk --socket s --restarts 3").is_err());
        assert!(parse("millrace bench vdisk --socket s --bs 1000").is_err());
        assert!(parse("millrace bench readseq --data d --cached").is_err());
        assert!(parse("millrace bench ycsb --data d --workload e").is_ok());
        assert!(parse("millrace bench ycsb --data d").is_err());
        assert!(parse("millrace bench ycsb --data d --workload g").is_err());
        assert!(
            parse("millrace bench readrandomwriterandom --data d --write-percent 101").is_err()
        );
        assert!(parse("millrace bench --peers --only a --only b --plot p.svg").is_ok());
        assert!(parse("millrace bench readseq --data d --plot p.svg").is_err());
        assert!(parse("millrace bench --peers --from a.json --plot p.svg").is_ok());
        assert!(parse("millrace bench --peers --from a.json").is_err());
        assert!(parse("millrace bench readseq --data d --seconds 0").is_err());
        assert!(parse("millrace bench --peers --reverse").is_err());
    }

    #[test]
    fn an_upgrade_can_name_its_program_and_its_node() {
        for line in ["millrace upgrade", "millrace upgrade --to new --admin a.sock --json"] {
            assert!(parse(line).is_ok(), "{line}");
        }
        assert!(parse("millrace upgrade new").is_err());
    }

    #[test]
    fn values_are_parsed_where_they_are_given() {
        let line = "millrace serve --data d --memory 1G --cores 0,1 --poll never --io epoll";
        let Command::Serve(serve) = parse(line).unwrap().command else { panic!("not serve") };
        assert_eq!(serve.memory, Some(Size(1 << 30)));
        assert_eq!(serve.cores, Some(CoreChoice::List(vec![0, 1])));
        assert_eq!(serve.poll, Some(PollMode::Never));
        assert_eq!(serve.io, Some(DriverKind::Epoll));
        assert!(parse("millrace serve --memory lots").unwrap_err().contains("not a size"));
        assert!(parse("millrace serve --poll often").is_err());
    }
}
