//! The texts of `HELP`.

use resp::Writer;

/// `CLIENT HELP`.
pub const CLIENT: &[&str] = &[
    "CLIENT <subcommand> [<arg> [value] [opt] ...]. Subcommands are:",
    "CACHING (YES|NO)",
    "    Refused: connections are not tracked.",
    "GETNAME",
    "    Tell this connection's name.",
    "GETREDIR",
    "    Tell where tracking messages go: -1, there are none.",
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
    "PAUSE <milliseconds> [WRITE|ALL]",
    "    Hold back all commands, or only writes, for a while.",
    "REPLY (ON|OFF|SKIP)",
    "    Turn this connection's replies on and off.",
    "SETNAME <name>",
    "    Name this connection.",
    "TRACKINGINFO",
    "    Tell whether this connection is tracked: it is not.",
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
    "    Change settings; only requirepass can be changed.",
    "HELP",
    "    Print this help.",
];

/// Writes a help text line by line.
pub fn write(lines: &[&str], writer: &mut Writer<'_>) {
    writer.array(lines.len());
    lines.iter().for_each(|line| writer.simple(line));
}
