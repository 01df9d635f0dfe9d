//! The description of a command: the shape of a row in the command table.

/// The commands that the node executes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandId {
    Append,
    Auth,
    Bgsave,
    Bitcount,
    Bitfield,
    BitfieldRo,
    Bitop,
    Bitpos,
    Client,
    ClientCaching,
    ClientGetname,
    ClientGetredir,
    ClientHelp,
    ClientId,
    ClientInfo,
    ClientKill,
    ClientList,
    ClientNoEvict,
    ClientNoTouch,
    ClientPause,
    ClientReply,
    ClientSetinfo,
    ClientSetname,
    ClientTracking,
    ClientTrackinginfo,
    ClientUnblock,
    ClientUnpause,
    Command,
    CommandCount,
    CommandDocs,
    CommandGetkeys,
    CommandGetkeysandflags,
    CommandHelp,
    CommandInfo,
    CommandList,
    Config,
    ConfigGet,
    ConfigHelp,
    ConfigResetstat,
    ConfigRewrite,
    ConfigSet,
    Copy,
    Dbsize,
    Debug,
    Decr,
    Decrby,
    Del,
    Discard,
    Dump,
    Echo,
    Exec,
    Exists,
    Expire,
    Expireat,
    Expiretime,
    Flushall,
    Flushdb,
    Function,
    FunctionDelete,
    FunctionDump,
    FunctionFlush,
    FunctionHelp,
    FunctionKill,
    FunctionList,
    FunctionStats,
    Get,
    Getbit,
    Getdel,
    Getex,
    Getrange,
    Getset,
    Hello,
    Incr,
    Incrby,
    Incrbyfloat,
    Info,
    Keys,
    Lastsave,
    Latency,
    LatencyDoctor,
    LatencyGraph,
    LatencyHelp,
    LatencyHistogram,
    LatencyHistory,
    LatencyLatest,
    LatencyReset,
    Lcs,
    Memory,
    MemoryDoctor,
    MemoryHelp,
    MemoryMallocStats,
    MemoryPurge,
    MemoryStats,
    MemoryUsage,
    Mget,
    Move,
    MrDelrange,
    MrGet,
    MrIndex,
    MrInfo,
    MrRange,
    MrStretch,
    Mset,
    Msetnx,
    Multi,
    Object,
    ObjectEncoding,
    ObjectFreq,
    ObjectHelp,
    ObjectIdletime,
    ObjectRefcount,
    Persist,
    Pexpire,
    Pexpireat,
    Pexpiretime,
    Ping,
    Psetex,
    Pttl,
    Quit,
    Randomkey,
    Rename,
    Renamenx,
    Reset,
    Restore,
    Save,
    Scan,
    Select,
    Set,
    Setbit,
    Setex,
    Setnx,
    Setrange,
    Shutdown,
    Slowlog,
    SlowlogGet,
    SlowlogHelp,
    SlowlogLen,
    SlowlogReset,
    Strlen,
    Subscribe,
    Substr,
    Swapdb,
    Time,
    Touch,
    Ttl,
    Type,
    Unlink,
    Unsubscribe,
    Unwatch,
    Watch,
}

impl CommandId {
    /// The number of commands.
    pub(crate) const COUNT: usize = Self::Watch as usize + 1;
}

/// The positions of a command's keys among its arguments. A `first` of zero means that it has none;
/// a negative `last` counts from the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyPositions {
    /// Index of the first key.
    pub first: i64,
    /// Index of the last key.
    pub last: i64,
    /// Distance from key to key.
    pub step: i64,
    /// What the command does to them, in Redis's words.
    pub flags: &'static [&'static str],
    /// What it does to the keys after the first one, where that differs.
    pub rest: Option<&'static [&'static str]>,
}

/// A word of a command's syntax.
#[derive(Clone, Copy, Debug)]
pub struct Argument {
    /// Its name.
    pub name: &'static str,
    /// `key`, `string`, `integer`, `pattern`, `pure-token`, `oneof` or `block`.
    pub kind: &'static str,
    /// The word before it, or the word itself.
    pub token: Option<&'static str>,
    /// `optional`, `multiple`.
    pub flags: &'static [&'static str],
    /// The parts of a `oneof` or a `block`.
    pub parts: &'static [Argument],
    /// The number of the key specification that a key belongs to.
    pub key_spec: i64,
}

impl Argument {
    /// A required argument of a kind.
    pub const fn new(name: &'static str, kind: &'static str) -> Self {
        Self { name, kind, token: None, flags: &[], parts: &[], key_spec: 0 }
    }

    /// A literal word.
    pub const fn word(name: &'static str, token: &'static str) -> Self {
        Self { kind: "pure-token", token: Some(token), ..Self::new(name, "") }
    }

    /// An alternative.
    pub const fn one_of(name: &'static str, parts: &'static [Argument]) -> Self {
        Self { parts, ..Self::new(name, "oneof") }
    }

    /// Several words that belong together.
    pub const fn block(name: &'static str, parts: &'static [Argument]) -> Self {
        Self { parts, ..Self::new(name, "block") }
    }

    /// Names the key specification that a key belongs to.
    pub const fn of_keys(self, key_spec: i64) -> Self {
        Self { key_spec, ..self }
    }

    /// Adds the word before it.
    pub const fn after(self, token: &'static str) -> Self {
        Self { token: Some(token), ..self }
    }

    /// Adds flags.
    pub const fn flagged(self, flags: &'static [&'static str]) -> Self {
        Self { flags, ..self }
    }
}

/// A row of the command table.
#[derive(Clone, Copy, Debug)]
pub struct Spec {
    /// The command.
    pub id: CommandId,
    /// Its name in lower case, `container|name` for a subcommand.
    pub name: &'static str,
    /// The number of arguments including the name; if negative, the minimum number.
    pub arity: i64,
    /// Redis's command flags.
    pub flags: &'static [&'static str],
    /// Its keys.
    pub keys: KeyPositions,
    /// Redis's access categories.
    pub categories: &'static [&'static str],
    /// Redis's hints for proxies.
    pub tips: &'static [&'static str],
    /// Its group in the documentation.
    pub group: &'static str,
    /// What it does, in one line.
    pub summary: &'static str,
    /// The version of Redis that introduced it; ours for commands that Redis does not have.
    pub since: &'static str,
    /// Its complexity.
    pub complexity: &'static str,
    /// The version that deprecated it, and its replacement.
    pub deprecated: Option<(&'static str, &'static str)>,
    /// Its syntax.
    pub arguments: &'static [Argument],
    /// The subcommands of a container.
    pub subcommands: &'static [Spec],
}

const NO_KEYS: KeyPositions = KeyPositions { first: 0, last: 0, step: 0, flags: &[], rest: None };

impl Spec {
    /// A command without keys, arguments and subcommands.
    pub const fn new(
        id: CommandId,
        name: &'static str,
        arity: i64,
        group: &'static str,
        summary: &'static str,
    ) -> Self {
        Self {
            id,
            name,
            arity,
            flags: &[],
            keys: NO_KEYS,
            categories: &[],
            tips: &[],
            group,
            summary,
            since: "1.0.0",
            complexity: "O(1)",
            deprecated: None,
            arguments: &[],
            subcommands: &[],
        }
    }

    pub(crate) const fn flags(
        self,
        flags: &'static [&'static str],
        categories: &'static [&'static str],
    ) -> Self {
        Self { flags, categories, ..self }
    }

    pub(crate) const fn one_key(self, flags: &'static [&'static str]) -> Self {
        self.keys(1, 1, flags)
    }

    pub(crate) const fn many_keys(self, flags: &'static [&'static str]) -> Self {
        self.keys(1, -1, flags)
    }

    /// Keys at consecutive positions.
    pub(crate) const fn keys(self, first: i64, last: i64, flags: &'static [&'static str]) -> Self {
        Self { keys: KeyPositions { first, last, step: 1, flags, rest: None }, ..self }
    }

    /// Adds what it does to the keys after the first one.
    pub(crate) const fn rest(self, flags: &'static [&'static str]) -> Self {
        Self { keys: KeyPositions { rest: Some(flags), ..self.keys }, ..self }
    }

    /// Alternating keys and values.
    pub(crate) const fn pairs(self, flags: &'static [&'static str]) -> Self {
        Self { keys: KeyPositions { first: 1, last: -1, step: 2, flags, rest: None }, ..self }
    }

    pub(crate) const fn since(self, since: &'static str) -> Self {
        Self { since, ..self }
    }

    pub(crate) const fn costs(self, complexity: &'static str) -> Self {
        Self { complexity, ..self }
    }

    pub(crate) const fn tips(self, tips: &'static [&'static str]) -> Self {
        Self { tips, ..self }
    }

    pub(crate) const fn takes(self, arguments: &'static [Argument]) -> Self {
        Self { arguments, ..self }
    }

    pub(crate) const fn contains(self, subcommands: &'static [Spec]) -> Self {
        Self { subcommands, ..self }
    }

    pub(crate) const fn deprecated(self, since: &'static str, by: &'static str) -> Self {
        Self { deprecated: Some((since, by)), ..self }
    }

    /// The positions of its keys among `count` arguments.
    pub(crate) fn key_indexes(&self, count: usize) -> impl Iterator<Item = usize> + Clone + use<> {
        let KeyPositions { first, last, step, .. } = self.keys;
        let end = match last < 0 {
            true => count.saturating_sub(last.unsigned_abs() as usize) + 1,
            false => last as usize + 1,
        };
        let first = if first == 0 { end } else { first as usize };
        (first..end.min(count)).step_by(step.max(1) as usize)
    }

    /// Whether a client may send it before it has given the password.
    pub fn is_for_all(&self) -> bool {
        self.flags.contains(&"no_auth")
    }

    /// Whether it changes keys.
    pub fn writes(&self) -> bool {
        self.flags.contains(&"write")
    }

    /// Whether it takes `count` arguments, including the name.
    pub fn takes_count(&self, count: usize) -> bool {
        takes_count(self.arity, count)
    }
}

/// Whether a command of this arity takes `count` arguments, including the name.
pub(crate) fn takes_count(arity: i64, count: usize) -> bool {
    let count = i64::try_from(count).unwrap_or(i64::MAX);
    if arity >= 0 { count == arity } else { count >= -arity }
}
