//! The texts of `HELP`.

use resp::Writer;

/// `CLIENT HELP`.
pub const CLIENT: &[&str] = &[
    "CLIENT <subcommand> [<arg> [value] [opt] ...]. Subcommands are:",
    "CACHING (YES|NO)",
    "    Tell whether the keys of the next command are tracked.",
    "GETNAME",
    "    Tell this connection's name.",
    "GETREDIR",
    "    Tell which connection gets the invalidations: 0 this one, -1 none.",
    "ID",
    "    Tell this connection's number.",
    "INFO",
    "    Describe this connection.",
    "KILL <ip:port>",
    "    Close the connection from an address.",
    "KILL <option> <value> [<option> <value> [...]]",
    "    Close all connections that pass every option:",
    "    ID <number>, ADDR <ip:port>, LADDR <ip:port>, USER <name>,",
    "    TYPE (NORMAL|MASTER|REPLICA|PUBSUB), SKIPME (YES|NO)",
    "LIST [TYPE (NORMAL|MASTER|REPLICA|PUBSUB)|ID <number> [...]]",
    "    Describe connections.",
    "NO-EVICT (ON|OFF)",
    "    Accepted without effect: connections are not evicted.",
    "NO-TOUCH (ON|OFF)",
    "    Accepted without effect: no access times are kept.",
    "PAUSE <milliseconds> [WRITE|ALL]",
    "    Hold back all commands, or only writes, for a while.",
    "REPLY (ON|OFF|SKIP)",
    "    Turn this connection's replies on and off.",
    "SETINFO (LIB-NAME|LIB-VER) <word>",
    "    Name the client's library, or its version.",
    "SETNAME <name>",
    "    Name this connection.",
    "TRACKING (ON|OFF) [REDIRECT <number>] [BCAST] [PREFIX <prefix> [...]]",
    "         [OPTIN] [OPTOUT] [NOLOOP]",
    "    Tell this connection when keys that it has read are written.",
    "TRACKINGINFO",
    "    Tell how this connection is tracked.",
    "UNBLOCK <number> [TIMEOUT|ERROR]",
    "    Accepted without effect: no command waits.",
    "UNPAUSE",
    "    End a pause.",
    "HELP",
    "    Print this help.",
];

/// `COMMAND HELP`.
pub const COMMAND: &[&str] = &[
    "COMMAND <subcommand> [<arg> [value] [opt] ...]. Subcommands are:",
    "(no subcommand)",
    "    Describe all commands.",
    "COUNT",
    "    Tell how many commands there are.",
    "DOCS [<command-name> ...]",
    "    Document commands, all when none is named.",
    "GETKEYS <full-command>",
    "    Find the keys in a command.",
    "GETKEYSANDFLAGS <full-command>",
    "    Find the keys in a command and what happens to them.",
    "INFO [<command-name> ...]",
    "    Describe commands, all when none is named.",
    "LIST [FILTERBY (MODULE <name>|ACLCAT <category>|PATTERN <pattern>)]",
    "    List names of commands.",
    "HELP",
    "    Print this help.",
];

/// `CONFIG HELP`.
pub const CONFIG: &[&str] = &[
    "CONFIG <subcommand> [<arg> [value] [opt] ...]. Subcommands are:",
    "GET <pattern> [<pattern> ...]",
    "    Tell the settings whose names match.",
    "RESETSTAT",
    "    Set the counters of INFO back.",
    "REWRITE",
    "    Refused: the configuration file is yours to write.",
    "SET <name> <value> [<name> <value> ...]",
    "    Change requirepass, slowlog-log-slower-than, slowlog-max-len and",
    "    tracking-table-max-keys.",
    "HELP",
    "    Print this help.",
];

/// `DEBUG HELP`.
pub const DEBUG: &[&str] = &[
    "DEBUG <subcommand> [<arg> [value] [opt] ...]. Subcommands are:",
    "OBJECT <key>",
    "    Describe the value of a key.",
    "PROTOCOL <type>",
    "    Answer a value of this type: string, integer, double, bignum, null,",
    "    array, set, map, attrib, push, verbatim, true, false.",
    "RELOAD, LOADAOF",
    "    Make everything survive a power cut, as SAVE does.",
    "SLEEP <seconds>",
    "    Answer after this time. Other connections are served meanwhile.",
    "CHANGE-REPL-ID, CONFIG-REWRITE-FORCE-ALL, LOG <message>, PAUSE-CRON <0|1>,",
    "QUICKLIST-PACKED-THRESHOLD <size>, REPLYBUFFER ..., SET-ACTIVE-EXPIRE <0|1>",
    "    Accepted without effect.",
    "HELP",
    "    Print this help.",
];

/// `FUNCTION HELP`.
pub const FUNCTION: &[&str] = &[
    "FUNCTION <subcommand> [<arg> [value] [opt] ...]. Subcommands are:",
    "DELETE <library>",
    "    Refused: there are no libraries.",
    "DUMP",
    "    Give all libraries as a payload: there are none.",
    "FLUSH [ASYNC|SYNC]",
    "    Remove all libraries: there are none.",
    "KILL",
    "    Refused: no function runs.",
    "LIST [LIBRARYNAME <pattern>] [WITHCODE]",
    "    List libraries: there are none.",
    "STATS",
    "    Tell which function runs: none.",
    "HELP",
    "    Print this help.",
];

/// `LATENCY HELP`.
pub const LATENCY: &[&str] = &[
    "LATENCY <subcommand> [<arg> [value] [opt] ...]. Subcommands are:",
    "DOCTOR",
    "    Tell where to look for latency.",
    "GRAPH <event>",
    "    Refused: there are no samples.",
    "HISTOGRAM [<command> ...]",
    "    List latencies of commands: none are kept.",
    "HISTORY <event>",
    "    List samples of an event: there are none.",
    "LATEST",
    "    List the last samples: there are none.",
    "RESET [<event> ...]",
    "    Remove samples: there are none.",
    "HELP",
    "    Print this help.",
];

/// `MEMORY HELP`.
pub const MEMORY: &[&str] = &[
    "MEMORY <subcommand> [<arg> [value] [opt] ...]. Subcommands are:",
    "DOCTOR",
    "    Tell of problems with memory.",
    "MALLOC-STATS",
    "    Accepted: the allocator's own report is not given.",
    "PURGE",
    "    Accepted: memory is returned continuously.",
    "STATS",
    "    Tell how much memory is used.",
    "USAGE <key> [SAMPLES <count>]",
    "    Tell how many bytes a key and its value have.",
    "HELP",
    "    Print this help.",
];

/// `OBJECT HELP`.
pub const OBJECT: &[&str] = &[
    "OBJECT <subcommand> [<arg> [value] [opt] ...]. Subcommands are:",
    "ENCODING <key>",
    "    Tell how Redis would keep the value.",
    "FREQ <key>",
    "    Refused: accesses are not counted.",
    "IDLETIME <key>",
    "    Tell how long the key was not accessed: 0, no access times are kept.",
    "REFCOUNT <key>",
    "    Tell how often Redis would refer to the value.",
    "HELP",
    "    Print this help.",
];

/// `SLOWLOG HELP`.
pub const SLOWLOG: &[&str] = &[
    "SLOWLOG <subcommand> [<arg> [value] [opt] ...]. Subcommands are:",
    "GET [<count>]",
    "    List the last slow commands (default: 10, -1 means all). Each is a number,",
    "    the time, its microseconds, its words, the client's address and its name.",
    "LEN",
    "    Tell how many slow commands there are.",
    "RESET",
    "    Remove them.",
    "HELP",
    "    Print this help.",
];

/// Writes a help text line by line.
pub fn write(lines: &[&str], writer: &mut Writer<'_>) {
    writer.array(lines.len());
    lines.iter().for_each(|line| writer.simple(line));
}
