//! Replies that are always the same: about what a node does not have, as Redis answers them when
//! nothing is there or the feature is off.

use resp::Writer;

use crate::command::args::Args;
use crate::command::commands::{IndexQuery, StretchQuery};
use crate::command::dump;
use crate::command::help;
use crate::command::refusal::Refusal;

/// A reply that is known in advance.
#[derive(Clone, Copy, Debug)]
pub enum Said {
    Ok,
    Integer(i64),
    /// `MR.INFO`.
    Extensions,
    /// An empty array.
    Nothing,
    /// An empty map.
    NoEntries,
    /// A text for people.
    Text(&'static str),
    /// The lines of `HELP`.
    Help(&'static [&'static str]),
    /// `FUNCTION STATS` without functions.
    NoFunctions,
    /// `FUNCTION DUMP` without functions.
    NoFunctionsDumped,
}

/// The version of the `MR` commands. A later one has all of an earlier one's commands and replies.
const EXTENSIONS_VERSION: i64 = 4;

/// `LATENCY DOCTOR`.
pub(crate) const LATENCY: &str = "Latency is not sampled here: latency-monitor-threshold is 0. SLOWLOG has slow commands, \
     and the metrics have the times of the disk.\n";

/// `MEMORY DOCTOR`.
pub(crate) const MEMORY: &str = "No problem is known: caches, buffers and requests stay within maxmemory. INFO memory says \
     what they use.\n";

/// `MEMORY MALLOC-STATS`.
pub(crate) const ALLOCATOR: &str = "Stats not supported for the current allocator";

impl Said {
    /// Writes the reply.
    pub(crate) fn write(self, writer: &mut Writer<'_>) {
        match self {
            Self::Ok => writer.ok(),
            Self::Integer(value) => writer.integer(value),
            Self::Extensions => {
                let facts = [
                    ("version", EXTENSIONS_VERSION),
                    ("stretch-bytes-max", StretchQuery::BYTES_MAX as i64),
                    ("frame-bytes-max", StretchQuery::FRAME_BYTES_MAX as i64),
                    ("index-keys-max", IndexQuery::KEYS_MAX as i64),
                ];
                writer.map(facts.len());
                for (name, value) in facts {
                    writer.bulk(name.as_bytes());
                    writer.integer(value);
                }
            }
            Self::Nothing => writer.array(0),
            Self::NoEntries => writer.map(0),
            Self::Text(text) => writer.verbatim(b"txt", text.as_bytes()),
            Self::Help(lines) => help::write(lines, writer),
            Self::NoFunctions => {
                writer.map(2);
                writer.bulk(b"running_script");
                writer.null();
                writer.bulk(b"engines");
                writer.map(1);
                writer.bulk(b"LUA");
                writer.map(2);
                writer.bulk(b"libraries_count");
                writer.integer(0);
                writer.bulk(b"functions_count");
                writer.integer(0);
            }
            Self::NoFunctionsDumped => writer.bulk(&dump::footer(0)),
        }
    }
}

/// `FUNCTION LIST [LIBRARYNAME pattern] [WITHCODE]`.
pub(crate) fn function_list(args: Args<'_>) -> Result<Said, Refusal<'_>> {
    let (mut code, mut library) = (false, false);
    let mut at = 2;
    while at < args.len() {
        match () {
            () if !code && args.is(at, "withcode") => code = true,
            () if !library && args.is(at, "libraryname") => {
                if at + 1 == args.len() {
                    return Err(Refusal::Text("ERR library name argument was not given"));
                }
                library = true;
                at += 1;
            }
            () => {
                return Err(Refusal::Quoting {
                    before: "ERR Unknown argument ",
                    word: args.get(at),
                    after: "",
                });
            }
        }
        at += 1;
    }
    Ok(Said::Nothing)
}

/// `FUNCTION FLUSH [ASYNC|SYNC]`.
pub(crate) fn function_flush(args: Args<'_>) -> Result<Said, Refusal<'_>> {
    match args.len() {
        2 => Ok(Said::Ok),
        3 if args.is(2, "sync") || args.is(2, "async") => Ok(Said::Ok),
        3 => Err(Refusal::Text("ERR FUNCTION FLUSH only supports SYNC|ASYNC option")),
        _ => Err(Refusal::WrongSubcommand { container: "FUNCTION", word: args.get(1) }),
    }
}
