//! The command table: every command that the node executes, sorted by name.
//!
//! Names, arities, flags, categories and key positions are those of Redis 7.0, because clients
//! route by them; `MR.DELRANGE` and `MR.RANGE` are ours.

use crate::command::spec::{Argument, CommandId, Spec};

const FAST_CONNECTION: &[&str] = &["@fast", "@connection"];
const SLOW_CONNECTION: &[&str] = &["@slow", "@connection"];
const ADMIN_CONNECTION: &[&str] = &["@admin", "@slow", "@dangerous", "@connection"];
const ADMIN: &[&str] = &["@admin", "@slow", "@dangerous"];
const LOADING: &[&str] = &["loading", "stale"];
const TRANSACTION: &[&str] = &["noscript", "loading", "stale", "fast", "allow_busy"];
const FAST_TRANSACTION: &[&str] = &["@fast", "@transaction"];
const HANDSHAKE: &[&str] = &["noscript", "loading", "stale", "fast", "no_auth", "allow_busy"];
const PER_CLIENT: &[&str] = &["noscript", "loading", "stale"];
const PUBSUB: &[&str] = &["pubsub", "noscript", "loading", "stale"];
const PER_SERVER: &[&str] = &["admin", "noscript", "loading", "stale"];
const READ_FAST: &[&str] = &["readonly", "fast"];
const READ: &[&str] = &["readonly"];
const WRITE: &[&str] = &["write", "denyoom"];
const WRITE_FAST: &[&str] = &["write", "denyoom", "fast"];
const REMOVE: &[&str] = &["write"];
const REMOVE_FAST: &[&str] = &["write", "fast"];
const STRING: &[&str] = &["@write", "@string", "@slow"];
const STRING_FAST: &[&str] = &["@write", "@string", "@fast"];
const ACCESS: &[&str] = &["RO", "access"];
const EXISTENCE: &[&str] = &["RO"];
const CHANGE_PART: &[&str] = &["RW", "update"];
const CHANGE: &[&str] = &["RW", "access", "update"];
const OPTIONAL: &[&str] = &["optional"];
const MULTIPLE: &[&str] = &["multiple"];
const ANY_NUMBER: &[&str] = &["optional", "multiple"];

const KEY: Argument = Argument::new("key", "key");
const KEYS: Argument = KEY.flagged(MULTIPLE);

const VALUE: Argument = Argument::new("value", "string");
const SECONDS: Argument = Argument::new("seconds", "integer");
const MILLISECONDS: Argument = Argument::new("milliseconds", "integer");
const UNIX_SECONDS: Argument = Argument::new("unix-time-seconds", "unix-time");
const UNIX_MILLISECONDS: Argument = Argument::new("unix-time-milliseconds", "unix-time");
const EXPIRE_IF: Argument = Argument::one_of(
    "condition",
    &[
        Argument::word("nx", "NX"),
        Argument::word("xx", "XX"),
        Argument::word("gt", "GT"),
        Argument::word("lt", "LT"),
    ],
)
.flagged(OPTIONAL);
const EXPIRE_FAST: &[&str] = &["@keyspace", "@write", "@fast"];

const PAIRS: &[Argument] = &[Argument::block("key_value", &[KEY, VALUE]).flagged(MULTIPLE)];

const BIT_RANGE: Argument = Argument::block(
    "index",
    &[
        Argument::new("start", "integer"),
        Argument::new("end", "integer").flagged(OPTIONAL),
        Argument::one_of(
            "index_unit",
            &[Argument::word("byte", "BYTE"), Argument::word("bit", "BIT")],
        )
        .flagged(OPTIONAL),
    ],
);

const FIELD: Argument = Argument::block(
    "encoding_offset",
    &[Argument::new("encoding", "string"), Argument::new("offset", "integer")],
);

const FIELD_NUMBER: &[Argument] = &[
    Argument::new("encoding", "string"),
    Argument::new("offset", "integer"),
    Argument::new("value", "integer"),
];

const FLUSH: &[Argument] = &[Argument::one_of(
    "async",
    &[Argument::word("async", "ASYNC"), Argument::word("sync", "SYNC")],
)
.flagged(OPTIONAL)];

const ON_OFF: &[Argument] = &[Argument::word("on", "ON"), Argument::word("off", "OFF")];

const CLIENT_TYPE: Argument = Argument::one_of(
    "client-type",
    &[
        Argument::word("normal", "NORMAL"),
        Argument::word("master", "MASTER"),
        Argument::word("replica", "REPLICA"),
        Argument::word("pubsub", "PUBSUB"),
    ],
)
.after("TYPE")
.flagged(OPTIONAL);

const CLIENT: &[Spec] = &[
    Spec::new(
        CommandId::ClientCaching,
        "client|caching",
        3,
        "connection",
        "Tells whether the keys of the next command are tracked",
    )
    .since("6.0.0")
    .flags(PER_CLIENT, SLOW_CONNECTION)
    .takes(&[Argument::one_of(
        "mode",
        &[Argument::word("yes", "YES"), Argument::word("no", "NO")],
    )]),
    Spec::new(
        CommandId::ClientGetname,
        "client|getname",
        2,
        "connection",
        "Tells this connection's name",
    )
    .since("2.6.9")
    .flags(PER_CLIENT, SLOW_CONNECTION),
    Spec::new(
        CommandId::ClientGetredir,
        "client|getredir",
        2,
        "connection",
        "Tells which connection gets the invalidations",
    )
    .since("6.0.0")
    .flags(PER_CLIENT, SLOW_CONNECTION),
    Spec::new(CommandId::ClientHelp, "client|help", 2, "connection", "Lists the subcommands")
        .since("5.0.0")
        .flags(LOADING, SLOW_CONNECTION),
    Spec::new(CommandId::ClientId, "client|id", 2, "connection", "Tells this connection's number")
        .since("5.0.0")
        .flags(PER_CLIENT, SLOW_CONNECTION),
    Spec::new(CommandId::ClientInfo, "client|info", 2, "connection", "Describes this connection")
        .since("6.2.0")
        .flags(PER_CLIENT, SLOW_CONNECTION)
        .tips(&["nondeterministic_output"]),
    Spec::new(CommandId::ClientKill, "client|kill", -3, "connection", "Closes connections")
        .since("2.4.0")
        .costs("O(N) with N connections")
        .flags(PER_SERVER, ADMIN_CONNECTION)
        .takes(&[Argument::one_of(
            "filter",
            &[
                Argument::new("ip:port", "string"),
                Argument::block(
                    "filters",
                    &[
                        Argument::new("client-id", "integer").after("ID").flagged(OPTIONAL),
                        CLIENT_TYPE,
                        Argument::new("username", "string").after("USER").flagged(OPTIONAL),
                        Argument::new("ip:port", "string").after("ADDR").flagged(OPTIONAL),
                        Argument::new("ip:port", "string").after("LADDR").flagged(OPTIONAL),
                        Argument::new("yes/no", "string").after("SKIPME").flagged(OPTIONAL),
                    ],
                )
                .flagged(MULTIPLE),
            ],
        )]),
    Spec::new(CommandId::ClientList, "client|list", -2, "connection", "Describes all connections")
        .since("2.4.0")
        .costs("O(N) with N connections")
        .flags(PER_SERVER, ADMIN_CONNECTION)
        .tips(&["nondeterministic_output"])
        .takes(&[
            CLIENT_TYPE,
            Argument::new("client-id", "integer").after("ID").flagged(ANY_NUMBER),
        ]),
    Spec::new(
        CommandId::ClientNoEvict,
        "client|no-evict",
        3,
        "connection",
        "Accepted; connections are not evicted here",
    )
    .since("7.0.0")
    .flags(PER_SERVER, ADMIN_CONNECTION)
    .takes(&[Argument::one_of("enabled", ON_OFF)]),
    Spec::new(
        CommandId::ClientNoTouch,
        "client|no-touch",
        3,
        "connection",
        "Accepted; no access times are kept here",
    )
    .since("7.2.0")
    .flags(PER_CLIENT, SLOW_CONNECTION)
    .takes(&[Argument::one_of("enabled", ON_OFF)]),
    Spec::new(
        CommandId::ClientPause,
        "client|pause",
        -3,
        "connection",
        "Holds back all connections' commands for a while",
    )
    .since("2.9.50")
    .flags(PER_SERVER, ADMIN_CONNECTION)
    .takes(&[
        Argument::new("timeout", "integer"),
        Argument::one_of("mode", &[Argument::word("write", "WRITE"), Argument::word("all", "ALL")])
            .flagged(OPTIONAL),
    ]),
    Spec::new(
        CommandId::ClientReply,
        "client|reply",
        3,
        "connection",
        "Turns this connection's replies on and off",
    )
    .since("3.2.0")
    .flags(PER_CLIENT, SLOW_CONNECTION)
    .takes(&[Argument::one_of(
        "on_off_skip",
        &[Argument::word("on", "ON"), Argument::word("off", "OFF"), Argument::word("skip", "SKIP")],
    )]),
    Spec::new(
        CommandId::ClientSetinfo,
        "client|setinfo",
        4,
        "connection",
        "Names the client's library or its version",
    )
    .since("7.2.0")
    .flags(PER_CLIENT, SLOW_CONNECTION)
    .takes(&[Argument::one_of(
        "attr",
        &[
            Argument::new("libname", "string").after("LIB-NAME"),
            Argument::new("libver", "string").after("LIB-VER"),
        ],
    )]),
    Spec::new(CommandId::ClientSetname, "client|setname", 3, "connection", "Names this connection")
        .since("2.6.9")
        .flags(PER_CLIENT, SLOW_CONNECTION)
        .takes(&[Argument::new("connection-name", "string")]),
    Spec::new(
        CommandId::ClientTracking,
        "client|tracking",
        -3,
        "connection",
        "Tells this connection when keys that it has read are written",
    )
    .since("6.0.0")
    .costs("O(1); O(N) with N prefixes")
    .flags(PER_CLIENT, SLOW_CONNECTION)
    .takes(&[
        Argument::one_of("status", ON_OFF),
        Argument::new("client-id", "integer").after("REDIRECT").flagged(OPTIONAL),
        Argument::new("prefix", "string").after("PREFIX").flagged(&[
            "optional",
            "multiple",
            "multiple_token",
        ]),
        Argument::word("bcast", "BCAST").flagged(OPTIONAL),
        Argument::word("optin", "OPTIN").flagged(OPTIONAL),
        Argument::word("optout", "OPTOUT").flagged(OPTIONAL),
        Argument::word("noloop", "NOLOOP").flagged(OPTIONAL),
    ]),
    Spec::new(
        CommandId::ClientTrackinginfo,
        "client|trackinginfo",
        2,
        "connection",
        "Tells how this connection is tracked",
    )
    .since("6.2.0")
    .flags(PER_CLIENT, SLOW_CONNECTION),
    Spec::new(
        CommandId::ClientUnblock,
        "client|unblock",
        -3,
        "connection",
        "Ends another connection's wait; nothing waits here",
    )
    .since("5.0.0")
    .flags(PER_SERVER, ADMIN_CONNECTION)
    .takes(&[
        Argument::new("client-id", "integer"),
        Argument::one_of(
            "timeout_error",
            &[Argument::word("timeout", "TIMEOUT"), Argument::word("error", "ERROR")],
        )
        .flagged(OPTIONAL),
    ]),
    Spec::new(CommandId::ClientUnpause, "client|unpause", 2, "connection", "Ends a pause")
        .since("6.2.0")
        .flags(PER_SERVER, ADMIN_CONNECTION),
];

const NAMES: &[Argument] = &[Argument::new("command-name", "string").flagged(ANY_NUMBER)];

const COMMAND: &[Spec] = &[
    Spec::new(
        CommandId::CommandCount,
        "command|count",
        2,
        "server",
        "Tells how many commands there are",
    )
    .since("2.8.13")
    .flags(LOADING, SLOW_CONNECTION),
    Spec::new(CommandId::CommandDocs, "command|docs", -2, "server", "Documents commands")
        .since("7.0.0")
        .costs("O(N) with N names")
        .flags(LOADING, SLOW_CONNECTION)
        .tips(&["nondeterministic_output_order"])
        .takes(NAMES),
    Spec::new(
        CommandId::CommandGetkeys,
        "command|getkeys",
        -4,
        "server",
        "Finds the keys in a command",
    )
    .since("2.8.13")
    .costs("O(N) with N arguments")
    .flags(LOADING, SLOW_CONNECTION),
    Spec::new(
        CommandId::CommandGetkeysandflags,
        "command|getkeysandflags",
        -4,
        "server",
        "Finds the keys in a command and what happens to them",
    )
    .since("7.0.0")
    .costs("O(N) with N arguments")
    .flags(LOADING, SLOW_CONNECTION),
    Spec::new(CommandId::CommandHelp, "command|help", 2, "server", "Lists the subcommands")
        .since("5.0.0")
        .flags(LOADING, SLOW_CONNECTION),
    Spec::new(CommandId::CommandInfo, "command|info", -2, "server", "Describes commands")
        .since("2.8.13")
        .costs("O(N) with N names")
        .flags(LOADING, SLOW_CONNECTION)
        .tips(&["nondeterministic_output_order"])
        .takes(NAMES),
    Spec::new(CommandId::CommandList, "command|list", -2, "server", "Lists the names of commands")
        .since("7.0.0")
        .costs("O(N) with N commands")
        .flags(LOADING, SLOW_CONNECTION)
        .tips(&["nondeterministic_output_order"])
        .takes(&[Argument::one_of(
            "filterby",
            &[
                Argument::new("module-name", "string").after("MODULE"),
                Argument::new("category", "string").after("ACLCAT"),
                Argument::new("pattern", "pattern").after("PATTERN"),
            ],
        )
        .after("FILTERBY")
        .flagged(OPTIONAL)]),
];

const CONFIG: &[Spec] = &[
    Spec::new(CommandId::ConfigGet, "config|get", -3, "server", "Tells settings by their names")
        .since("2.0.0")
        .costs("O(N) with N patterns")
        .flags(PER_SERVER, ADMIN)
        .takes(&[Argument::new("parameter", "pattern").flagged(MULTIPLE)]),
    Spec::new(CommandId::ConfigHelp, "config|help", 2, "server", "Lists the subcommands")
        .since("5.0.0")
        .flags(LOADING, &["@slow"]),
    Spec::new(
        CommandId::ConfigResetstat,
        "config|resetstat",
        2,
        "server",
        "Sets the counters of INFO back",
    )
    .since("2.0.0")
    .flags(PER_SERVER, ADMIN),
    Spec::new(
        CommandId::ConfigRewrite,
        "config|rewrite",
        2,
        "server",
        "Refused: a node does not write its configuration file",
    )
    .since("2.8.0")
    .flags(PER_SERVER, ADMIN),
    Spec::new(CommandId::ConfigSet, "config|set", -4, "server", "Changes settings")
        .since("2.0.0")
        .costs("O(N) with N settings")
        .flags(PER_SERVER, ADMIN)
        .tips(&["request_policy:all_nodes", "response_policy:all_succeeded"])
        .takes(&[Argument::block(
            "parameter_value",
            &[Argument::new("parameter", "string"), VALUE],
        )
        .flagged(MULTIPLE)]),
];

const FUNCTION: &[Spec] = &[
    Spec::new(
        CommandId::FunctionDelete,
        "function|delete",
        3,
        "scripting",
        "Refused: there are no libraries",
    )
    .since("7.0.0")
    .flags(&["write", "noscript"], &["@write", "@slow", "@scripting"])
    .tips(&["request_policy:all_shards", "response_policy:all_succeeded"])
    .takes(&[Argument::new("library-name", "string")]),
    Spec::new(
        CommandId::FunctionDump,
        "function|dump",
        2,
        "scripting",
        "Gives all libraries as a payload; there are none",
    )
    .since("7.0.0")
    .flags(&["noscript"], &["@slow", "@scripting"]),
    Spec::new(
        CommandId::FunctionFlush,
        "function|flush",
        -2,
        "scripting",
        "Removes all libraries; there are none",
    )
    .since("7.0.0")
    .flags(&["write", "noscript"], &["@write", "@slow", "@scripting"])
    .tips(&["request_policy:all_shards", "response_policy:all_succeeded"])
    .takes(FLUSH),
    Spec::new(CommandId::FunctionHelp, "function|help", 2, "scripting", "Lists the subcommands")
        .since("7.0.0")
        .flags(LOADING, &["@slow", "@scripting"]),
    Spec::new(
        CommandId::FunctionKill,
        "function|kill",
        2,
        "scripting",
        "Refused: no function runs",
    )
    .since("7.0.0")
    .flags(&["noscript", "allow_busy"], &["@slow", "@scripting"])
    .tips(&["request_policy:all_shards", "response_policy:one_succeeded"]),
    Spec::new(
        CommandId::FunctionList,
        "function|list",
        -2,
        "scripting",
        "Lists libraries; there are none",
    )
    .since("7.0.0")
    .flags(&["noscript"], &["@slow", "@scripting"])
    .tips(&["nondeterministic_output_order"])
    .takes(&[
        Argument::new("library-name-pattern", "string").after("LIBRARYNAME").flagged(OPTIONAL),
        Argument::word("withcode", "WITHCODE").flagged(OPTIONAL),
    ]),
    Spec::new(
        CommandId::FunctionStats,
        "function|stats",
        2,
        "scripting",
        "Tells which function runs; none",
    )
    .since("7.0.0")
    .flags(&["noscript", "allow_busy"], &["@slow", "@scripting"])
    .tips(&["nondeterministic_output", "request_policy:all_shards", "response_policy:special"]),
];

const LATENCY: &[Spec] = &[
    Spec::new(
        CommandId::LatencyDoctor,
        "latency|doctor",
        2,
        "server",
        "Tells where to look for latency",
    )
    .since("2.8.13")
    .flags(PER_SERVER, ADMIN)
    .tips(&["nondeterministic_output", "request_policy:all_nodes", "response_policy:special"]),
    Spec::new(
        CommandId::LatencyGraph,
        "latency|graph",
        3,
        "server",
        "Refused: there are no samples",
    )
    .since("2.8.13")
    .flags(PER_SERVER, ADMIN)
    .tips(&["nondeterministic_output", "request_policy:all_nodes", "response_policy:special"])
    .takes(&[Argument::new("event", "string")]),
    Spec::new(CommandId::LatencyHelp, "latency|help", 2, "server", "Lists the subcommands")
        .since("2.8.13")
        .flags(LOADING, &["@slow"]),
    Spec::new(
        CommandId::LatencyHistogram,
        "latency|histogram",
        -2,
        "server",
        "Lists latencies of commands; none are kept",
    )
    .since("7.0.0")
    .flags(PER_SERVER, ADMIN)
    .tips(&["nondeterministic_output", "request_policy:all_nodes", "response_policy:special"])
    .takes(&[Argument::new("command", "string").flagged(ANY_NUMBER)]),
    Spec::new(
        CommandId::LatencyHistory,
        "latency|history",
        3,
        "server",
        "Lists samples of an event; there are none",
    )
    .since("2.8.13")
    .flags(PER_SERVER, ADMIN)
    .tips(&["nondeterministic_output", "request_policy:all_nodes", "response_policy:special"])
    .takes(&[Argument::new("event", "string")]),
    Spec::new(
        CommandId::LatencyLatest,
        "latency|latest",
        2,
        "server",
        "Lists the last samples; there are none",
    )
    .since("2.8.13")
    .flags(PER_SERVER, ADMIN)
    .tips(&["nondeterministic_output", "request_policy:all_nodes", "response_policy:special"]),
    Spec::new(
        CommandId::LatencyReset,
        "latency|reset",
        -2,
        "server",
        "Removes samples; there are none",
    )
    .since("2.8.13")
    .flags(PER_SERVER, ADMIN)
    .tips(&["request_policy:all_nodes", "response_policy:all_succeeded"])
    .takes(&[Argument::new("event", "string").flagged(ANY_NUMBER)]),
];

const MEMORY: &[Spec] = &[
    Spec::new(
        CommandId::MemoryDoctor,
        "memory|doctor",
        2,
        "server",
        "Tells of problems with memory",
    )
    .since("4.0.0")
    .flags(&[], &["@slow"])
    .tips(&["nondeterministic_output", "request_policy:all_shards", "response_policy:special"]),
    Spec::new(CommandId::MemoryHelp, "memory|help", 2, "server", "Lists the subcommands")
        .since("4.0.0")
        .flags(LOADING, &["@slow"]),
    Spec::new(
        CommandId::MemoryMallocStats,
        "memory|malloc-stats",
        2,
        "server",
        "Accepted; the allocator is not asked",
    )
    .since("4.0.0")
    .flags(&[], &["@slow"])
    .tips(&["nondeterministic_output", "request_policy:all_shards", "response_policy:special"]),
    Spec::new(
        CommandId::MemoryPurge,
        "memory|purge",
        2,
        "server",
        "Accepted; memory is returned continuously",
    )
    .since("4.0.0")
    .flags(&[], &["@slow"])
    .tips(&["request_policy:all_shards", "response_policy:all_succeeded"]),
    Spec::new(CommandId::MemoryStats, "memory|stats", 2, "server", "Tells how much memory is used")
        .since("4.0.0")
        .flags(&[], &["@slow"])
        .tips(&["nondeterministic_output", "request_policy:all_shards", "response_policy:special"]),
    Spec::new(
        CommandId::MemoryUsage,
        "memory|usage",
        -3,
        "server",
        "Tells how many bytes a key and its value have",
    )
    .since("4.0.0")
    .flags(READ, &["@read", "@slow"])
    .keys(2, 2, EXISTENCE)
    .takes(&[KEY, Argument::new("count", "integer").after("SAMPLES").flagged(OPTIONAL)]),
];

const OBJECT: &[Spec] = &[
    Spec::new(
        CommandId::ObjectEncoding,
        "object|encoding",
        3,
        "generic",
        "Tells how Redis would keep a value",
    )
    .since("2.2.3")
    .flags(READ, &["@keyspace", "@read", "@slow"])
    .tips(&["nondeterministic_output"])
    .keys(2, 2, EXISTENCE)
    .takes(&[KEY]),
    Spec::new(
        CommandId::ObjectFreq,
        "object|freq",
        3,
        "generic",
        "Refused: accesses are not counted",
    )
    .since("4.0.0")
    .flags(READ, &["@keyspace", "@read", "@slow"])
    .tips(&["nondeterministic_output"])
    .keys(2, 2, EXISTENCE)
    .takes(&[KEY]),
    Spec::new(CommandId::ObjectHelp, "object|help", 2, "generic", "Lists the subcommands")
        .since("6.2.0")
        .flags(LOADING, &["@keyspace", "@slow"]),
    Spec::new(
        CommandId::ObjectIdletime,
        "object|idletime",
        3,
        "generic",
        "Tells how long a key was not accessed; always 0",
    )
    .since("2.2.3")
    .flags(READ, &["@keyspace", "@read", "@slow"])
    .tips(&["nondeterministic_output"])
    .keys(2, 2, EXISTENCE)
    .takes(&[KEY]),
    Spec::new(
        CommandId::ObjectRefcount,
        "object|refcount",
        3,
        "generic",
        "Tells how often Redis would refer to a value",
    )
    .since("2.2.3")
    .flags(READ, &["@keyspace", "@read", "@slow"])
    .tips(&["nondeterministic_output"])
    .keys(2, 2, EXISTENCE)
    .takes(&[KEY]),
];

const SLOWLOG: &[Spec] = &[
    Spec::new(CommandId::SlowlogGet, "slowlog|get", -2, "server", "Lists the last slow commands")
        .since("2.2.12")
        .flags(&["admin", "loading", "stale"], ADMIN)
        .costs("O(N) with N commands")
        .tips(&["request_policy:all_nodes", "nondeterministic_output"])
        .takes(&[Argument::new("count", "integer").flagged(OPTIONAL)]),
    Spec::new(CommandId::SlowlogHelp, "slowlog|help", 2, "server", "Lists the subcommands")
        .since("6.2.0")
        .flags(LOADING, &["@slow"]),
    Spec::new(
        CommandId::SlowlogLen,
        "slowlog|len",
        2,
        "server",
        "Tells how many slow commands there are",
    )
    .since("2.2.12")
    .flags(&["admin", "loading", "stale"], ADMIN)
    .tips(&["request_policy:all_nodes", "response_policy:agg_sum", "nondeterministic_output"]),
    Spec::new(CommandId::SlowlogReset, "slowlog|reset", 2, "server", "Removes the slow commands")
        .since("2.2.12")
        .flags(&["admin", "loading", "stale"], ADMIN)
        .tips(&["request_policy:all_nodes", "response_policy:all_succeeded"]),
];

/// Every command, sorted by name.
pub static TABLE: &[Spec] = &[
    Spec::new(CommandId::Append, "append", 3, "string", "Makes a value longer")
        .since("2.0.0")
        .costs("O(N) with N bytes of the value")
        .flags(WRITE_FAST, STRING_FAST)
        .one_key(&["RW", "insert"])
        .takes(&[KEY, VALUE]),
    Spec::new(CommandId::Auth, "auth", -2, "connection", "Logs in with the password")
        .flags(HANDSHAKE, FAST_CONNECTION)
        .takes(&[
            Argument::new("username", "string").flagged(OPTIONAL),
            Argument::new("password", "string"),
        ]),
    Spec::new(CommandId::Bgsave, "bgsave", -1, "server", "Does what SAVE does, and does not wait")
        .flags(&["admin", "noscript", "no_async_loading"], ADMIN)
        .takes(&[Argument::word("schedule", "SCHEDULE").flagged(OPTIONAL)]),
    Spec::new(CommandId::Bitcount, "bitcount", -2, "bitmap", "Counts the bits of a value")
        .since("2.6.0")
        .costs("O(N) with N bytes of the value")
        .flags(READ, &["@read", "@bitmap", "@slow"])
        .one_key(ACCESS)
        .takes(&[KEY, BIT_RANGE.flagged(OPTIONAL)]),
    Spec::new(
        CommandId::Bitfield,
        "bitfield",
        -2,
        "bitmap",
        "Reads and changes integers in a value",
    )
    .since("3.2.0")
    .costs("O(1) for each operation")
    .flags(WRITE, &["@write", "@bitmap", "@slow"])
    .one_key(&["RW", "access", "update", "variable_flags"])
    .takes(&[
        KEY,
        Argument::one_of(
            "operation",
            &[
                FIELD.after("GET"),
                Argument::block(
                    "write",
                    &[
                        Argument::one_of(
                            "wrap_sat_fail",
                            &[
                                Argument::word("wrap", "WRAP"),
                                Argument::word("sat", "SAT"),
                                Argument::word("fail", "FAIL"),
                            ],
                        )
                        .after("OVERFLOW")
                        .flagged(OPTIONAL),
                        Argument::one_of(
                            "write_operation",
                            &[
                                Argument::block("encoding_offset_value", FIELD_NUMBER).after("SET"),
                                Argument::block("encoding_offset_increment", FIELD_NUMBER)
                                    .after("INCRBY"),
                            ],
                        ),
                    ],
                ),
            ],
        )
        .flagged(MULTIPLE),
    ]),
    Spec::new(CommandId::BitfieldRo, "bitfield_ro", -2, "bitmap", "Reads integers in a value")
        .since("6.0.0")
        .costs("O(1) for each operation")
        .flags(READ_FAST, &["@read", "@bitmap", "@fast"])
        .one_key(ACCESS)
        .takes(&[KEY, FIELD.after("GET").flagged(ANY_NUMBER)]),
    Spec::new(CommandId::Bitop, "bitop", -4, "bitmap", "Combines the bits of values")
        .since("2.6.0")
        .costs("O(N) with N bytes of the values")
        .flags(WRITE, &["@write", "@bitmap", "@slow"])
        .keys(2, -1, &["OW", "update"])
        .rest(ACCESS)
        .takes(&[
            Argument::new("operation", "string"),
            Argument::new("destkey", "key"),
            KEYS.of_keys(1),
        ]),
    Spec::new(
        CommandId::Bitpos,
        "bitpos",
        -3,
        "bitmap",
        "Finds the first bit that is set or clear",
    )
    .since("2.8.7")
    .costs("O(N) with N bytes of the value")
    .flags(READ, &["@read", "@bitmap", "@slow"])
    .one_key(ACCESS)
    .takes(&[KEY, Argument::new("bit", "integer"), BIT_RANGE.flagged(OPTIONAL)]),
    Spec::new(CommandId::Client, "client", -2, "connection", "Contains commands about connections")
        .since("2.4.0")
        .flags(&[], &["@slow"])
        .costs("Depends on the subcommand")
        .contains(CLIENT),
    Spec::new(CommandId::Command, "command", -1, "server", "Describes all commands")
        .since("2.8.13")
        .flags(LOADING, SLOW_CONNECTION)
        .costs("O(N) with N commands")
        .tips(&["nondeterministic_output_order"])
        .contains(COMMAND),
    Spec::new(CommandId::Config, "config", -2, "server", "Contains commands about settings")
        .since("2.0.0")
        .flags(&[], &["@slow"])
        .costs("Depends on the subcommand")
        .contains(CONFIG),
    Spec::new(CommandId::Copy, "copy", -3, "generic", "Gives a key the value of another one")
        .since("6.2.0")
        .costs("O(N) with N bytes of the value")
        .flags(WRITE, &["@keyspace", "@write", "@slow"])
        .keys(1, 2, ACCESS)
        .rest(&["OW", "update"])
        .takes(&[
            Argument::new("source", "key"),
            Argument::new("destination", "key").of_keys(1),
            Argument::new("destination-db", "integer").after("DB").flagged(OPTIONAL),
            Argument::word("replace", "REPLACE").flagged(OPTIONAL),
        ]),
    Spec::new(CommandId::Dbsize, "dbsize", 1, "server", "Estimates the number of keys")
        .flags(READ_FAST, &["@keyspace", "@read", "@fast"])
        .tips(&["request_policy:all_shards", "response_policy:agg_sum"]),
    Spec::new(CommandId::Debug, "debug", -2, "server", "Helps to test; off unless it is enabled")
        .flags(PER_SERVER, ADMIN)
        .costs("Depends on the subcommand"),
    Spec::new(CommandId::Decr, "decr", 2, "string", "Subtracts one from a number")
        .flags(WRITE_FAST, STRING_FAST)
        .one_key(CHANGE)
        .takes(&[KEY]),
    Spec::new(CommandId::Decrby, "decrby", 3, "string", "Subtracts from a number")
        .flags(WRITE_FAST, STRING_FAST)
        .one_key(CHANGE)
        .takes(&[KEY, Argument::new("decrement", "integer")]),
    Spec::new(CommandId::Del, "del", -2, "generic", "Removes keys")
        .costs("O(N) with N keys")
        .flags(REMOVE, &["@keyspace", "@write", "@slow"])
        .tips(&["request_policy:multi_shard", "response_policy:agg_sum"])
        .many_keys(&["RM", "delete"])
        .takes(&[KEYS]),
    Spec::new(
        CommandId::Discard,
        "discard",
        1,
        "transactions",
        "Ends a transaction without executing its commands",
    )
    .since("2.0.0")
    .costs("O(N) with N queued commands")
    .flags(TRANSACTION, FAST_TRANSACTION),
    Spec::new(CommandId::Dump, "dump", 2, "generic", "Gives a value in a form for RESTORE")
        .since("2.6.0")
        .costs("O(N) with N bytes of the value")
        .flags(READ, &["@keyspace", "@read", "@slow"])
        .tips(&["nondeterministic_output"])
        .one_key(ACCESS)
        .takes(&[KEY]),
    Spec::new(CommandId::Echo, "echo", 2, "connection", "Gives its argument back")
        .flags(&["loading", "stale", "fast"], FAST_CONNECTION)
        .takes(&[Argument::new("message", "string")]),
    Spec::new(
        CommandId::Exec,
        "exec",
        1,
        "transactions",
        "Executes the commands since MULTI, all or none",
    )
    .since("1.2.0")
    .costs("That of the commands")
    .flags(&["noscript", "loading", "stale", "skip_slowlog"], &["@slow", "@transaction"]),
    Spec::new(CommandId::Exists, "exists", -2, "generic", "Counts how many of its keys exist")
        .costs("O(N) with N keys")
        .flags(READ_FAST, &["@keyspace", "@read", "@fast"])
        .tips(&["request_policy:multi_shard", "response_policy:agg_sum"])
        .many_keys(EXISTENCE)
        .takes(&[KEYS]),
    Spec::new(
        CommandId::Expire,
        "expire",
        -3,
        "generic",
        "Sets when a key ends, in seconds from now",
    )
    .since("1.0.0")
    .flags(REMOVE_FAST, EXPIRE_FAST)
    .one_key(CHANGE_PART)
    .takes(&[KEY, SECONDS, EXPIRE_IF]),
    Spec::new(
        CommandId::Expireat,
        "expireat",
        -3,
        "generic",
        "Sets when a key ends, in Unix seconds",
    )
    .since("1.2.0")
    .flags(REMOVE_FAST, EXPIRE_FAST)
    .one_key(CHANGE_PART)
    .takes(&[KEY, UNIX_SECONDS, EXPIRE_IF]),
    Spec::new(
        CommandId::Expiretime,
        "expiretime",
        2,
        "generic",
        "Tells when a key ends, in Unix seconds",
    )
    .since("7.0.0")
    .flags(READ_FAST, &["@keyspace", "@read", "@fast"])
    .one_key(ACCESS)
    .takes(&[KEY]),
    Spec::new(CommandId::Flushall, "flushall", -1, "server", "Removes all keys")
        .flags(REMOVE, &["@keyspace", "@write", "@slow", "@dangerous"])
        .tips(&["request_policy:all_shards", "response_policy:all_succeeded"])
        .takes(FLUSH),
    Spec::new(CommandId::Flushdb, "flushdb", -1, "server", "Removes all keys")
        .flags(REMOVE, &["@keyspace", "@write", "@slow", "@dangerous"])
        .tips(&["request_policy:all_shards", "response_policy:all_succeeded"])
        .takes(FLUSH),
    Spec::new(
        CommandId::Function,
        "function",
        -2,
        "scripting",
        "Contains commands about functions; there are none",
    )
    .since("7.0.0")
    .flags(&[], &["@slow"])
    .costs("Depends on the subcommand")
    .contains(FUNCTION),
    Spec::new(CommandId::Get, "get", 2, "string", "Reads a value")
        .flags(READ_FAST, &["@read", "@string", "@fast"])
        .one_key(ACCESS)
        .takes(&[KEY]),
    Spec::new(CommandId::Getbit, "getbit", 3, "bitmap", "Reads a bit of a value")
        .since("2.2.0")
        .flags(READ_FAST, &["@read", "@bitmap", "@fast"])
        .one_key(ACCESS)
        .takes(&[KEY, Argument::new("offset", "integer")]),
    Spec::new(CommandId::Getdel, "getdel", 2, "string", "Reads a value and removes its key")
        .since("6.2.0")
        .flags(REMOVE_FAST, STRING_FAST)
        .one_key(&["RW", "access", "delete"])
        .takes(&[KEY]),
    Spec::new(CommandId::Getex, "getex", -2, "string", "Reads a value and sets when its key ends")
        .since("6.2.0")
        .flags(REMOVE_FAST, STRING_FAST)
        .one_key(CHANGE)
        .takes(&[
            KEY,
            Argument::one_of(
                "expiration",
                &[
                    SECONDS.after("EX"),
                    MILLISECONDS.after("PX"),
                    UNIX_SECONDS.after("EXAT"),
                    UNIX_MILLISECONDS.after("PXAT"),
                    Argument::word("persist", "PERSIST"),
                ],
            )
            .flagged(OPTIONAL),
        ]),
    Spec::new(CommandId::Getrange, "getrange", 4, "string", "Reads a part of a value")
        .since("2.4.0")
        .costs("O(N) with N bytes of the value")
        .flags(READ, &["@read", "@string", "@slow"])
        .one_key(ACCESS)
        .takes(&[KEY, Argument::new("start", "integer"), Argument::new("end", "integer")]),
    Spec::new(CommandId::Getset, "getset", 3, "string", "Reads a value and sets another")
        .flags(WRITE_FAST, STRING_FAST)
        .deprecated("6.2.0", "`SET` with the `!GET` argument")
        .one_key(CHANGE)
        .takes(&[KEY, VALUE]),
    Spec::new(CommandId::Hello, "hello", -1, "connection", "Chooses the protocol")
        .since("6.0.0")
        .flags(HANDSHAKE, FAST_CONNECTION)
        .takes(&[Argument::block(
            "arguments",
            &[
                Argument::new("protover", "integer"),
                Argument::block(
                    "username_password",
                    &[Argument::new("username", "string"), Argument::new("password", "string")],
                )
                .after("AUTH")
                .flagged(OPTIONAL),
                Argument::new("clientname", "string").after("SETNAME").flagged(OPTIONAL),
            ],
        )
        .flagged(OPTIONAL)]),
    Spec::new(CommandId::Incr, "incr", 2, "string", "Adds one to a number")
        .flags(WRITE_FAST, STRING_FAST)
        .one_key(CHANGE)
        .takes(&[KEY]),
    Spec::new(CommandId::Incrby, "incrby", 3, "string", "Adds to a number")
        .flags(WRITE_FAST, STRING_FAST)
        .one_key(CHANGE)
        .takes(&[KEY, Argument::new("increment", "integer")]),
    Spec::new(
        CommandId::Incrbyfloat,
        "incrbyfloat",
        3,
        "string",
        "Adds to a number that may have decimals",
    )
    .since("2.6.0")
    .flags(WRITE_FAST, STRING_FAST)
    .one_key(CHANGE)
    .takes(&[KEY, Argument::new("increment", "double")]),
    Spec::new(CommandId::Info, "info", -1, "server", "Reports on the node")
        .flags(LOADING, &["@slow", "@dangerous"])
        .tips(&["nondeterministic_output", "request_policy:all_shards", "response_policy:special"])
        .takes(&[Argument::new("section", "string").flagged(ANY_NUMBER)]),
    Spec::new(
        CommandId::Keys,
        "keys",
        2,
        "generic",
        "Lists the keys that match a pattern, in order",
    )
    .costs("O(N) with N keys that begin like the pattern")
    .flags(READ, &["@keyspace", "@read", "@slow", "@dangerous"])
    .tips(&["request_policy:all_shards"])
    .takes(&[Argument::new("pattern", "pattern")]),
    Spec::new(CommandId::Lastsave, "lastsave", 1, "server", "Tells when SAVE last was done")
        .flags(&["loading", "stale", "fast"], &["@admin", "@fast", "@dangerous"])
        .tips(&["nondeterministic_output"]),
    Spec::new(CommandId::Latency, "latency", -2, "server", "Contains commands about latency")
        .since("2.8.13")
        .flags(&[], &["@slow"])
        .costs("Depends on the subcommand")
        .contains(LATENCY),
    Spec::new(CommandId::Lcs, "lcs", -3, "string", "Finds the longest common subsequence")
        .since("7.0.0")
        .costs("O(N*M) with N and M bytes of the values")
        .flags(READ, &["@read", "@string", "@slow"])
        .keys(1, 2, ACCESS)
        .takes(&[
            Argument::new("key1", "key"),
            Argument::new("key2", "key"),
            Argument::word("len", "LEN").flagged(OPTIONAL),
            Argument::word("idx", "IDX").flagged(OPTIONAL),
            Argument::new("len", "integer").after("MINMATCHLEN").flagged(OPTIONAL),
            Argument::word("withmatchlen", "WITHMATCHLEN").flagged(OPTIONAL),
        ]),
    Spec::new(CommandId::Memory, "memory", -2, "server", "Contains commands about memory")
        .since("4.0.0")
        .flags(&[], &["@slow"])
        .costs("Depends on the subcommand")
        .contains(MEMORY),
    Spec::new(CommandId::Mget, "mget", -2, "string", "Reads several values")
        .costs("O(N) with N keys")
        .flags(READ_FAST, &["@read", "@string", "@fast"])
        .tips(&["request_policy:multi_shard"])
        .many_keys(ACCESS)
        .takes(&[KEYS]),
    Spec::new(CommandId::Move, "move", 3, "generic", "Refused: there is one database")
        .flags(REMOVE_FAST, &["@keyspace", "@write", "@fast"])
        .one_key(CHANGE)
        .takes(&[KEY, Argument::new("db", "integer")]),
    Spec::new(
        CommandId::MrDelrange,
        "mr.delrange",
        3,
        "generic",
        "Removes all keys of a range at once, and counts them",
    )
    .since("0.1.0")
    .costs("O(N) with N keys in the range, to count them")
    .flags(REMOVE, &["@keyspace", "@write", "@slow"])
    .takes(&[Argument::new("start", "string"), Argument::new("end", "string")]),
    Spec::new(CommandId::MrGet, "mr.get", 2, "string", "Reads a value, and where it is stored")
        .since("0.1.0")
        .flags(READ_FAST, &["@read", "@string", "@fast"])
        .one_key(ACCESS)
        .takes(&[KEY]),
    Spec::new(
        CommandId::MrIndex,
        "mr.index",
        -2,
        "generic",
        "Reads the hashes of keys in order, for clients that keep an index of the database",
    )
    .since("0.1.0")
    .costs("O(N) with N keys")
    .flags(READ, &["@keyspace", "@read", "@slow"])
    .takes(&[
        Argument::new("seed", "integer"),
        Argument::new("after", "string").after("AFTER").flagged(OPTIONAL),
        Argument::new("count", "integer").after("COUNT").flagged(OPTIONAL),
    ]),
    Spec::new(CommandId::MrInfo, "mr.info", 1, "connection", "The version of the MR commands")
        .since("0.1.0")
        .flags(&["loading", "stale", "fast"], &["@fast", "@connection"]),
    Spec::new(
        CommandId::MrRange,
        "mr.range",
        -3,
        "generic",
        "Reads keys and values in order, forward or backward",
    )
    .since("0.1.0")
    .costs("O(N) with N keys in the range")
    .flags(READ, &["@keyspace", "@read", "@slow"])
    .takes(&[
        Argument::new("start", "string"),
        Argument::new("end", "string"),
        Argument::word("reverse", "REVERSE").flagged(OPTIONAL),
        Argument::new("limit", "integer").after("LIMIT").flagged(OPTIONAL),
        Argument::new("bytes", "integer").after("BYTES").flagged(OPTIONAL),
        Argument::word("novalues", "NOVALUES").flagged(OPTIONAL),
    ]),
    Spec::new(
        CommandId::MrStretch,
        "mr.stretch",
        -4,
        "generic",
        "Reads the present keys and values of a part of a blob file, in the order of their writes",
    )
    .since("0.1.0")
    .costs("O(N) with N bytes")
    .flags(READ, &["@keyspace", "@read", "@slow"])
    .takes(&[
        Argument::new("file", "integer"),
        Argument::new("from", "integer"),
        Argument::new("bytes", "integer"),
        Argument::word("next", "NEXT").flagged(OPTIONAL),
    ]),
    Spec::new(CommandId::Mset, "mset", -3, "string", "Sets several values at once")
        .since("1.0.1")
        .costs("O(N) with N keys")
        .flags(WRITE, STRING)
        .tips(&["request_policy:multi_shard", "response_policy:all_succeeded"])
        .pairs(&["OW", "update"])
        .takes(PAIRS),
    Spec::new(
        CommandId::Msetnx,
        "msetnx",
        -3,
        "string",
        "Sets several values at once if none of the keys is there",
    )
    .since("1.0.1")
    .costs("O(N) with N keys")
    .flags(WRITE, STRING)
    .tips(&["request_policy:multi_shard", "response_policy:agg_min"])
    .pairs(&["OW", "insert"])
    .takes(PAIRS),
    Spec::new(CommandId::Multi, "multi", 1, "transactions", "Begins a transaction")
        .since("1.2.0")
        .flags(TRANSACTION, FAST_TRANSACTION),
    Spec::new(
        CommandId::Object,
        "object",
        -2,
        "generic",
        "Contains commands about how values are kept",
    )
    .since("2.2.3")
    .flags(&[], &["@slow"])
    .costs("Depends on the subcommand")
    .contains(OBJECT),
    Spec::new(CommandId::Persist, "persist", 2, "generic", "Takes the end of a key away")
        .since("2.2.0")
        .flags(REMOVE_FAST, EXPIRE_FAST)
        .one_key(CHANGE_PART)
        .takes(&[KEY]),
    Spec::new(
        CommandId::Pexpire,
        "pexpire",
        -3,
        "generic",
        "Sets when a key ends, in milliseconds from now",
    )
    .since("2.6.0")
    .flags(REMOVE_FAST, EXPIRE_FAST)
    .one_key(CHANGE_PART)
    .takes(&[KEY, MILLISECONDS, EXPIRE_IF]),
    Spec::new(
        CommandId::Pexpireat,
        "pexpireat",
        -3,
        "generic",
        "Sets when a key ends, in Unix milliseconds",
    )
    .since("2.6.0")
    .flags(REMOVE_FAST, EXPIRE_FAST)
    .one_key(CHANGE_PART)
    .takes(&[KEY, UNIX_MILLISECONDS, EXPIRE_IF]),
    Spec::new(
        CommandId::Pexpiretime,
        "pexpiretime",
        2,
        "generic",
        "Tells when a key ends, in Unix milliseconds",
    )
    .since("7.0.0")
    .flags(READ_FAST, &["@keyspace", "@read", "@fast"])
    .one_key(ACCESS)
    .takes(&[KEY]),
    Spec::new(CommandId::Ping, "ping", -1, "connection", "Answers")
        .flags(&["fast"], FAST_CONNECTION)
        .tips(&["request_policy:all_shards", "response_policy:all_succeeded"])
        .takes(&[Argument::new("message", "string").flagged(OPTIONAL)]),
    Spec::new(
        CommandId::Psetex,
        "psetex",
        4,
        "string",
        "Sets a value that ends, in milliseconds from now",
    )
    .since("2.6.0")
    .flags(WRITE, STRING)
    .one_key(&["OW", "update"])
    .takes(&[KEY, MILLISECONDS, VALUE]),
    Spec::new(CommandId::Pttl, "pttl", 2, "generic", "Tells a key's time to live in milliseconds")
        .since("2.6.0")
        .flags(READ_FAST, &["@keyspace", "@read", "@fast"])
        .tips(&["nondeterministic_output"])
        .one_key(ACCESS)
        .takes(&[KEY]),
    Spec::new(CommandId::Quit, "quit", -1, "connection", "Closes the connection")
        .flags(HANDSHAKE, FAST_CONNECTION),
    Spec::new(CommandId::Randomkey, "randomkey", 1, "generic", "Gives some key")
        .flags(READ, &["@keyspace", "@read", "@slow"])
        .tips(&["request_policy:all_shards", "nondeterministic_output"]),
    Spec::new(CommandId::Rename, "rename", 3, "generic", "Gives a key another name")
        .costs("O(N) with N bytes of the value")
        .flags(REMOVE, &["@keyspace", "@write", "@slow"])
        .keys(1, 2, &["RW", "access", "delete"])
        .rest(&["OW", "update"])
        .takes(&[KEY, Argument::new("newkey", "key").of_keys(1)]),
    Spec::new(
        CommandId::Renamenx,
        "renamenx",
        3,
        "generic",
        "Gives a key another name if no key has that name",
    )
    .costs("O(N) with N bytes of the value")
    .flags(REMOVE_FAST, &["@keyspace", "@write", "@fast"])
    .keys(1, 2, &["RW", "access", "delete"])
    .rest(&["OW", "insert"])
    .takes(&[KEY, Argument::new("newkey", "key").of_keys(1)]),
    Spec::new(
        CommandId::Reset,
        "reset",
        1,
        "connection",
        "Sets the connection back to its beginning",
    )
    .since("6.2.0")
    .flags(HANDSHAKE, FAST_CONNECTION),
    Spec::new(CommandId::Restore, "restore", -4, "generic", "Sets a value from what DUMP gave")
        .since("2.6.0")
        .costs("O(N) with N bytes of the value")
        .flags(WRITE, &["@keyspace", "@write", "@slow", "@dangerous"])
        .one_key(&["OW", "update"])
        .takes(&[
            KEY,
            Argument::new("ttl", "integer"),
            Argument::new("serialized-value", "string"),
            Argument::word("replace", "REPLACE").flagged(OPTIONAL),
            Argument::word("absttl", "ABSTTL").flagged(OPTIONAL),
            Argument::new("seconds", "integer").after("IDLETIME").flagged(OPTIONAL),
            Argument::new("frequency", "integer").after("FREQ").flagged(OPTIONAL),
        ]),
    Spec::new(
        CommandId::Save,
        "save",
        1,
        "server",
        "Makes all that was written survive a power cut",
    )
    .flags(&["admin", "noscript", "no_async_loading", "no_multi"], ADMIN),
    Spec::new(CommandId::Scan, "scan", -2, "generic", "Lists keys piece by piece, in order")
        .since("2.8.0")
        .costs("O(COUNT) for every call")
        .flags(READ, &["@keyspace", "@read", "@slow"])
        .tips(&["nondeterministic_output", "request_policy:special"])
        .takes(&[
            Argument::new("cursor", "integer"),
            Argument::new("pattern", "pattern").after("MATCH").flagged(OPTIONAL),
            Argument::new("count", "integer").after("COUNT").flagged(OPTIONAL),
            Argument::new("type", "string").after("TYPE").flagged(OPTIONAL),
        ]),
    Spec::new(
        CommandId::Select,
        "select",
        2,
        "connection",
        "Chooses the database; there is only 0",
    )
    .flags(&["loading", "stale", "fast"], FAST_CONNECTION)
    .takes(&[Argument::new("index", "integer")]),
    Spec::new(CommandId::Set, "set", -3, "string", "Sets a value")
        .flags(WRITE, STRING)
        .one_key(&["RW", "access", "update", "variable_flags"])
        .takes(&[
            KEY,
            VALUE,
            Argument::one_of(
                "condition",
                &[Argument::word("nx", "NX"), Argument::word("xx", "XX")],
            )
            .flagged(OPTIONAL),
            Argument::word("get", "GET").flagged(OPTIONAL),
            Argument::one_of(
                "expiration",
                &[
                    SECONDS.after("EX"),
                    MILLISECONDS.after("PX"),
                    UNIX_SECONDS.after("EXAT"),
                    UNIX_MILLISECONDS.after("PXAT"),
                    Argument::word("keepttl", "KEEPTTL"),
                ],
            )
            .flagged(OPTIONAL),
        ]),
    Spec::new(CommandId::Setbit, "setbit", 4, "bitmap", "Sets a bit of a value")
        .since("2.2.0")
        .flags(WRITE, &["@write", "@bitmap", "@slow"])
        .one_key(CHANGE)
        .takes(&[KEY, Argument::new("offset", "integer"), Argument::new("value", "integer")]),
    Spec::new(
        CommandId::Setex,
        "setex",
        4,
        "string",
        "Sets a value that ends, in seconds from now",
    )
    .since("2.0.0")
    .flags(WRITE, STRING)
    .one_key(&["OW", "update"])
    .takes(&[KEY, SECONDS, VALUE]),
    Spec::new(CommandId::Setnx, "setnx", 3, "string", "Sets a value if the key is not there")
        .flags(WRITE_FAST, STRING_FAST)
        .one_key(&["OW", "insert"])
        .takes(&[KEY, VALUE]),
    Spec::new(CommandId::Setrange, "setrange", 4, "string", "Overwrites a part of a value")
        .since("2.2.0")
        .costs("O(N) with N bytes of the value")
        .flags(WRITE, STRING)
        .one_key(CHANGE_PART)
        .takes(&[KEY, Argument::new("offset", "integer"), VALUE]),
    Spec::new(CommandId::Shutdown, "shutdown", -1, "server", "Ends the node in good order")
        .flags(&["admin", "noscript", "loading", "stale", "no_multi", "allow_busy"], ADMIN)
        .takes(&[
            Argument::one_of(
                "nosave_save",
                &[Argument::word("nosave", "NOSAVE"), Argument::word("save", "SAVE")],
            )
            .flagged(OPTIONAL),
            Argument::word("now", "NOW").flagged(OPTIONAL),
            Argument::word("force", "FORCE").flagged(OPTIONAL),
            Argument::word("abort", "ABORT").flagged(OPTIONAL),
        ]),
    Spec::new(CommandId::Slowlog, "slowlog", -2, "server", "Contains commands about slow commands")
        .since("2.2.12")
        .flags(&[], &["@slow"])
        .costs("Depends on the subcommand")
        .contains(SLOWLOG),
    Spec::new(CommandId::Strlen, "strlen", 2, "string", "Tells the length of a value")
        .since("2.2.0")
        .flags(READ_FAST, &["@read", "@string", "@fast"])
        .one_key(EXISTENCE)
        .takes(&[KEY]),
    Spec::new(
        CommandId::Subscribe,
        "subscribe",
        -2,
        "pubsub",
        "Listens to a channel; there is one, __redis__:invalidate",
    )
    .since("2.0.0")
    .costs("O(N) with N channels")
    .flags(PUBSUB, &["@pubsub", "@slow"])
    .takes(&[Argument::new("channel", "string").flagged(MULTIPLE)]),
    Spec::new(CommandId::Substr, "substr", 4, "string", "Reads a part of a value")
        .costs("O(N) with N bytes of the value")
        .flags(READ, &["@read", "@string", "@slow"])
        .deprecated("2.0.0", "`GETRANGE`")
        .one_key(ACCESS)
        .takes(&[KEY, Argument::new("start", "integer"), Argument::new("end", "integer")]),
    Spec::new(CommandId::Swapdb, "swapdb", 3, "server", "Swaps databases; there is only 0")
        .since("4.0.0")
        .flags(REMOVE_FAST, &["@keyspace", "@write", "@fast", "@dangerous"])
        .takes(&[Argument::new("index1", "integer"), Argument::new("index2", "integer")]),
    Spec::new(CommandId::Time, "time", 1, "server", "Tells the time")
        .since("2.6.0")
        .flags(&["loading", "stale", "fast"], &["@fast"])
        .tips(&["nondeterministic_output"]),
    Spec::new(CommandId::Touch, "touch", -2, "generic", "Counts how many of its keys exist")
        .since("3.2.1")
        .costs("O(N) with N keys")
        .flags(READ_FAST, &["@keyspace", "@read", "@fast"])
        .tips(&["request_policy:multi_shard", "response_policy:agg_sum"])
        .many_keys(EXISTENCE)
        .takes(&[KEYS]),
    Spec::new(CommandId::Ttl, "ttl", 2, "generic", "Tells a key's time to live in seconds")
        .flags(READ_FAST, &["@keyspace", "@read", "@fast"])
        .tips(&["nondeterministic_output"])
        .one_key(ACCESS)
        .takes(&[KEY]),
    Spec::new(
        CommandId::Type,
        "type",
        2,
        "generic",
        "Tells the type of a key's value; always string here",
    )
    .flags(READ_FAST, &["@keyspace", "@read", "@fast"])
    .one_key(EXISTENCE)
    .takes(&[KEY]),
    Spec::new(CommandId::Unlink, "unlink", -2, "generic", "Removes keys, as DEL does")
        .since("4.0.0")
        .costs("O(N) with N keys")
        .flags(REMOVE_FAST, &["@keyspace", "@write", "@fast"])
        .tips(&["request_policy:multi_shard", "response_policy:agg_sum"])
        .many_keys(&["RM", "delete"])
        .takes(&[KEYS]),
    Spec::new(CommandId::Unsubscribe, "unsubscribe", -1, "pubsub", "Stops listening to channels")
        .since("2.0.0")
        .costs("O(N) with N channels")
        .flags(PUBSUB, &["@pubsub", "@slow"])
        .takes(&[Argument::new("channel", "string").flagged(ANY_NUMBER)]),
    Spec::new(CommandId::Unwatch, "unwatch", 1, "transactions", "Ends all watches")
        .since("2.2.0")
        .flags(TRANSACTION, FAST_TRANSACTION),
    Spec::new(
        CommandId::Watch,
        "watch",
        -2,
        "transactions",
        "Makes the next EXEC depend on keys being unchanged",
    )
    .since("2.2.0")
    .costs("O(1) for each key")
    .flags(TRANSACTION, FAST_TRANSACTION)
    .many_keys(&["RO"])
    .takes(&[KEYS]),
];
