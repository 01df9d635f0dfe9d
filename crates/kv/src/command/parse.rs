//! Parsed commands: names, counts and options checked, numbers parsed, nothing executed yet.
//!
//! [`parse`] checks in Redis's order (does the command exist, does it take this number of
//! arguments, would it write, are its options valid), so that a client that makes several mistakes
//! gets the same error first. A command borrows its words from the connection's buffer; code that
//! needs them longer copies them.

use resp::{Protocol, parse_i64};

use crate::command::args::Args;
use crate::command::range::{RangeBound, RangeQuery};
use crate::command::refusal::Refusal;
use crate::command::spec::{CommandId, Spec, takes_count};
use crate::command::table::{self, Known};
use crate::connection::transaction::Transaction;
use crate::read::small::SCAN_BYTES_MAX;
use crate::shard::change::{Kind, Only, PutReply};
use crate::shard::long_double::LongDouble;

/// A command ready to be executed.
#[derive(Clone, Copy, Debug)]
pub enum Command<'a> {
    /// `AUTH`.
    Auth(Login<'a>),
    /// `BGSAVE`.
    BackgroundSave,
    /// `CLIENT ...`.
    Client(ClientCommand<'a>),
    /// `COMMAND ...`.
    Describe(Describe<'a>),
    /// `CONFIG GET` with patterns.
    ConfigGet(Args<'a>),
    /// `CONFIG HELP`.
    ConfigHelp,
    /// `CONFIG RESETSTAT`.
    ConfigResetStat,
    /// `CONFIG REWRITE`.
    ConfigRewrite,
    /// `CONFIG SET`: alternating names and values.
    ConfigSet(Args<'a>),
    /// `DBSIZE`.
    DbSize,
    /// `ECHO`.
    Echo(&'a [u8]),
    /// `HELLO`.
    Hello(Hello<'a>),
    /// `INFO` with sections.
    Info(Args<'a>),
    /// `KEYS` with a pattern.
    Keys(&'a [u8]),
    /// `LASTSAVE`.
    LastSave,
    /// A read of one key.
    One(&'a [u8], Ask),
    /// `MGET`.
    MGet(Args<'a>),
    /// `EXISTS`.
    Exists(Args<'a>),
    /// `MR.RANGE`.
    Range(RangeQuery<'a>),
    /// `PING`, with the message to return.
    Ping(Option<&'a [u8]>),
    /// `QUIT`.
    Quit,
    /// `RANDOMKEY`.
    RandomKey,
    /// `RESET`.
    Reset,
    /// `SAVE`.
    Save,
    /// `SCAN`.
    Scan(Scan<'a>),
    /// `SELECT 0`.
    Select,
    /// `SHUTDOWN`.
    ShutDown,
    /// `MULTI` and its kin.
    Transaction(Transaction),
    /// A command that writes.
    Write(WriteCommand<'a>),
}

/// A command that writes.
#[derive(Clone, Copy, Debug)]
pub enum WriteCommand<'a> {
    /// `SET` without conditions: a key and its value.
    Put(&'a [u8], &'a [u8]),
    /// `MSET`: alternating keys and values.
    PutAll(Args<'a>),
    /// `MSETNX`.
    PutAllIfNone(Args<'a>),
    /// `DEL`, `UNLINK`.
    Delete(Args<'a>),
    /// `GETDEL`.
    GetDelete(&'a [u8]),
    /// `FLUSHDB`, `FLUSHALL`.
    Clear,
    /// A command that depends on the old value: the operation, the key, and the operand.
    Modify(Kind, &'a [u8], &'a [u8]),
}

/// How a command accesses keys, which decides what it waits for on its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Not at all.
    None,
    /// It sees the writes before it.
    Read,
    /// The reads before it do not see it.
    Write,
}

impl Command<'_> {
    /// How it accesses keys.
    pub fn access(&self) -> Access {
        match self {
            Self::Write(_) | Self::Save | Self::BackgroundSave => Access::Write,
            Self::One(..)
            | Self::MGet(_)
            | Self::Exists(_)
            | Self::Range(_)
            | Self::Keys(_)
            | Self::Scan(_)
            | Self::RandomKey
            | Self::DbSize
            | Self::LastSave
            | Self::Info(_) => Access::Read,
            _ => Access::None,
        }
    }

    /// The key whose old value is in the reply.
    pub(crate) fn gives_old_of(&self) -> Option<&[u8]> {
        match self {
            Self::Write(WriteCommand::GetDelete(key)) => Some(key),
            Self::Write(WriteCommand::Modify(kind, key, _)) if kind.gives_old() => Some(key),
            _ => None,
        }
    }

    /// An upper bound of the bytes of its reply, or of the memory needed to make it, where that is
    /// known in advance and not small. `0` for commands whose replies are admitted when their
    /// length is known.
    pub(crate) fn reply_bytes(&self) -> usize {
        match self {
            Self::Echo(message) | Self::Ping(Some(message)) => message.len(),
            Self::Scan(_) => SCAN_BYTES_MAX,
            // Its keys, while they are looked up.
            Self::MGet(keys) | Self::Exists(keys) => {
                keys.iter().map(<[u8]>::len).sum::<usize>() + keys.len() * KEY_BYTES
            }
            Self::Client(ClientCommand::List(_)) | Self::Describe(_) => LIST_BYTES,
            _ => 0,
        }
    }
}

/// Memory of a key that is looked up, besides its bytes.
const KEY_BYTES: usize = 64;

/// The approximate length of lists of clients and of commands.
const LIST_BYTES: usize = 64 * 1024;

/// What a command that reads one key asks about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// `GET`: the value.
    Value,
    /// `STRLEN`.
    Length,
    /// `GETRANGE` and `SUBSTR`: bytes from a first to a last position; negative ones count from the
    /// end.
    Part {
        /// The first byte.
        start: i64,
        /// The last byte.
        end: i64,
    },
    /// `TYPE`.
    Type,
    /// `TTL` and `PTTL`: nothing expires here.
    TimeToLive,
}

/// A user and a password.
#[derive(Clone, Copy, Debug)]
pub struct Login<'a> {
    /// The user; the default user if absent.
    pub user: Option<&'a [u8]>,
    /// The password.
    pub password: &'a [u8],
}

/// `HELLO`'s options.
#[derive(Clone, Copy, Debug, Default)]
pub struct Hello<'a> {
    /// The requested protocol; unchanged if absent.
    pub protocol: Option<Protocol>,
    /// The credentials to log in with.
    pub login: Option<Login<'a>>,
    /// The connection's new name.
    pub name: Option<&'a [u8]>,
}

/// `SCAN`'s options.
#[derive(Clone, Copy, Debug)]
pub struct Scan<'a> {
    /// Where to continue; 0 at the beginning.
    pub cursor: u64,
    /// Pattern of the keys to return; all if absent.
    pub pattern: Option<&'a [u8]>,
    /// How many keys to examine.
    pub count: u64,
    /// Whether the requested type is one that keys here can have.
    pub of_our_type: bool,
}

/// `CLIENT`'s subcommands.
#[derive(Clone, Copy, Debug)]
pub enum ClientCommand<'a> {
    GetName,
    GetRedir,
    Help,
    Id,
    Info,
    Kill(ClientFilter<'a>),
    List(ListFilter<'a>),
    NoEvict,
    Pause { timeout_ms: i64, all: bool },
    Reply(ReplyMode),
    SetName(&'a [u8]),
    TrackingInfo,
    Unblock,
    Unpause,
}

/// `CLIENT REPLY`'s argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyMode {
    On,
    Off,
    Skip,
}

/// Which connections `CLIENT LIST` lists.
#[derive(Clone, Copy, Debug)]
pub enum ListFilter<'a> {
    /// All.
    All,
    /// Those of a type; every connection here is a normal one.
    Type(ClientType),
    /// Those with these numbers, which have been checked.
    Ids(Args<'a>),
}

/// The types of connections that Redis distinguishes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientType {
    Normal,
    Other,
}

/// Which connections `CLIENT KILL` closes: those that match every given field.
#[derive(Clone, Copy, Debug, Default)]
pub struct ClientFilter<'a> {
    /// The client's address.
    pub address: Option<&'a [u8]>,
    /// The node's address.
    pub local_address: Option<&'a [u8]>,
    /// The number.
    pub id: Option<u64>,
    /// The type.
    pub kind: Option<ClientType>,
    /// Spare the connection that asks.
    pub skip_me: bool,
    /// The old form, by address alone: answers `OK` or an error instead of a number.
    pub old_form: bool,
}

/// `COMMAND`'s subcommands.
#[derive(Clone, Copy, Debug)]
pub enum Describe<'a> {
    Count,
    Docs(Args<'a>),
    GetKeys {
        command: Args<'a>,
        flags: bool,
    },
    Help,
    /// All commands if no names are given.
    Info(Args<'a>),
    List(NameFilter<'a>),
}

/// Which names `COMMAND LIST` lists.
#[derive(Clone, Copy, Debug)]
pub enum NameFilter<'a> {
    /// All.
    All,
    /// Those of a module: none.
    Module,
    /// Those of an access category.
    Category(&'a [u8]),
    /// Those that match a pattern.
    Pattern(&'a [u8]),
}

/// How many keys `SCAN` examines by default.
const SCAN_COUNT: u64 = 10;

/// What a connection is allowed to do.
#[derive(Clone, Copy, Debug)]
pub struct May {
    /// The node takes writes. If not, Redis's commands that write are refused as such.
    pub write: bool,
    /// The client has given the password, or needs none.
    pub enter: bool,
}

/// The result of parsing a client's words.
#[derive(Debug)]
pub struct Parsed<'a> {
    /// The command, or why it cannot be executed.
    pub command: Result<Command<'a>, Refusal<'a>>,
    /// Which command of the table it is, if any.
    pub id: Option<CommandId>,
    /// The full name, for lists of connections; Redis's word `NULL` if there is none.
    pub name: &'static str,
    /// It is refused before its options are parsed.
    pub rejected: bool,
}

impl<'a> Parsed<'a> {
    fn of(id: CommandId, name: &'static str, command: Result<Command<'a>, Refusal<'a>>) -> Self {
        Self { command, id: Some(id), name, rejected: false }
    }

    fn no_row(command: Result<Command<'a>, Refusal<'a>>) -> Self {
        let name = match &command {
            Ok(Command::Transaction(command)) => command.name(),
            _ => "NULL",
        };
        Self { rejected: command.is_err(), command, id: None, name }
    }
}

/// Parses a command from its words.
pub fn parse(args: Args<'_>, may: May) -> Parsed<'_> {
    // The most frequent commands.
    if may.enter && args.len() == 2 && args.is(0, "get") {
        return Parsed::of(CommandId::Get, "get", Ok(Command::One(args.get(1), Ask::Value)));
    }
    if may.enter && may.write && args.len() == 3 && args.is(0, "set") {
        let put = WriteCommand::Put(args.get(1), args.get(2));
        return Parsed::of(CommandId::Set, "set", Ok(Command::Write(put)));
    }
    parse_any(args, may)
}

fn parse_any(args: Args<'_>, may: May) -> Parsed<'_> {
    let second = (args.len() > 1).then(|| args.get(1));
    let spec = match table::find(args.get(0), second) {
        Some(Known::Ours(spec)) => spec,
        other => return Parsed::no_row(without_row(args, other, may)),
    };
    let rejection = if !spec.takes_count(args.len()) {
        Refusal::WrongCount(spec.name)
    } else if !may.enter && !spec.is_for_all() {
        Refusal::NO_PASSWORD
    } else if spec.writes() && !may.write {
        Refusal::ReadOnly
    } else {
        return Parsed::of(spec.id, spec.name, checked(args, spec));
    };
    let parsed = Parsed::of(spec.id, spec.name, Err(rejection));
    Parsed { rejected: true, ..parsed }
}

/// Commands that are not in the table: those of transactions, and those that are refused by name.
fn without_row<'a>(
    args: Args<'a>,
    known: Option<Known>,
    may: May,
) -> Result<Command<'a>, Refusal<'a>> {
    match known {
        Some(Known::NoSubcommand(container)) => {
            Err(Refusal::UnknownSubcommand { container: container.name, word: args.get(1) })
        }
        Some(Known::NoWrite(container)) if !may.write => {
            Err(Refusal::UnknownSubcommand { container, word: args.get(1) })
        }
        Some(Known::Write(name, arity)) if !may.write => {
            Err(match takes_count(arity, args.len()) {
                false => Refusal::WrongCount(name),
                true if !may.enter => Refusal::NO_PASSWORD,
                true => Refusal::ReadOnly,
            })
        }
        Some(Known::Transaction(command, arity)) => match takes_count(arity, args.len()) {
            false => Err(command.wrong_count()),
            true if !may.enter => Err(command.no_password()),
            true => Ok(Command::Transaction(command)),
        },
        Some(Known::Ours(_) | Known::NoWrite(_) | Known::Write(..)) | None => {
            Err(Refusal::UnknownCommand(args))
        }
    }
}

/// Parses the options of a command of the table, after its argument count and permission have been
/// checked.
fn checked<'a>(args: Args<'a>, spec: &'static Spec) -> Result<Command<'a>, Refusal<'a>> {
    if spec.writes() {
        return write(args, spec);
    }
    let second = (args.len() > 1).then(|| args.get(1));
    let client = |command| Ok(Command::Client(command));
    let describe = |command| Ok(Command::Describe(command));
    match spec.id {
        CommandId::Auth => auth(args),
        CommandId::Bgsave if args.len() == 1 || args.len() == 2 && args.is(1, "schedule") => {
            Ok(Command::BackgroundSave)
        }
        CommandId::Bgsave => Err(Refusal::SYNTAX),
        // A container without a subcommand has too few arguments, so it never gets here.
        CommandId::Client | CommandId::Config => Err(Refusal::WrongCount(spec.name)),
        // Tracking does not exist, so it is never on.
        CommandId::ClientCaching => Err(Refusal::NOT_TRACKED),
        CommandId::ClientGetname => client(ClientCommand::GetName),
        CommandId::ClientGetredir => client(ClientCommand::GetRedir),
        CommandId::ClientHelp => client(ClientCommand::Help),
        CommandId::ClientId => client(ClientCommand::Id),
        CommandId::ClientInfo => client(ClientCommand::Info),
        CommandId::ClientKill => client(ClientCommand::Kill(client_kill(args)?)),
        CommandId::ClientList => client(ClientCommand::List(client_list(args)?)),
        CommandId::ClientNoEvict if args.is(2, "on") || args.is(2, "off") => {
            client(ClientCommand::NoEvict)
        }
        CommandId::ClientNoEvict => Err(Refusal::SYNTAX),
        CommandId::ClientPause => client(client_pause(args)?),
        CommandId::ClientReply if args.is(2, "on") => client(ClientCommand::Reply(ReplyMode::On)),
        CommandId::ClientReply if args.is(2, "off") => client(ClientCommand::Reply(ReplyMode::Off)),
        CommandId::ClientReply if args.is(2, "skip") => {
            client(ClientCommand::Reply(ReplyMode::Skip))
        }
        CommandId::ClientReply => Err(Refusal::SYNTAX),
        CommandId::ClientSetname => client(ClientCommand::SetName(client_name(args.get(2))?)),
        CommandId::ClientTrackinginfo => client(ClientCommand::TrackingInfo),
        CommandId::ClientUnblock => client(client_unblock(args)?),
        CommandId::ClientUnpause => client(ClientCommand::Unpause),
        CommandId::Command => describe(Describe::Info(args.from(1))),
        CommandId::CommandCount => describe(Describe::Count),
        CommandId::CommandDocs => describe(Describe::Docs(args.from(2))),
        CommandId::CommandGetkeys => {
            describe(Describe::GetKeys { command: args.from(2), flags: false })
        }
        CommandId::CommandGetkeysandflags => {
            describe(Describe::GetKeys { command: args.from(2), flags: true })
        }
        CommandId::CommandHelp => describe(Describe::Help),
        CommandId::CommandInfo => describe(Describe::Info(args.from(2))),
        CommandId::CommandList => describe(Describe::List(command_list(args)?)),
        CommandId::ConfigGet => Ok(Command::ConfigGet(args.from(2))),
        CommandId::ConfigHelp => Ok(Command::ConfigHelp),
        CommandId::ConfigResetstat => Ok(Command::ConfigResetStat),
        CommandId::ConfigRewrite => Ok(Command::ConfigRewrite),
        CommandId::ConfigSet if args.len() % 2 == 1 => Err(Refusal::SYNTAX),
        CommandId::ConfigSet => Ok(Command::ConfigSet(args.from(2))),
        CommandId::Dbsize => Ok(Command::DbSize),
        CommandId::Echo => Ok(Command::Echo(args.get(1))),
        CommandId::Exists => Ok(Command::Exists(args.from(1))),
        CommandId::Get => Ok(Command::One(args.get(1), Ask::Value)),
        CommandId::Getrange | CommandId::Substr => {
            let (start, end) = (integer(args.get(2))?, integer(args.get(3))?);
            Ok(Command::One(args.get(1), Ask::Part { start, end }))
        }
        CommandId::Hello => hello(args),
        CommandId::Info => Ok(Command::Info(args.from(1))),
        CommandId::Keys => Ok(Command::Keys(args.get(1))),
        CommandId::Lastsave => Ok(Command::LastSave),
        CommandId::Mget => Ok(Command::MGet(args.from(1))),
        CommandId::MrRange => Ok(Command::Range(range(args)?)),
        CommandId::Ping if args.len() > 2 => Err(Refusal::WrongCount(spec.name)),
        CommandId::Ping => Ok(Command::Ping(second)),
        CommandId::Pttl | CommandId::Ttl => Ok(Command::One(args.get(1), Ask::TimeToLive)),
        CommandId::Quit => Ok(Command::Quit),
        CommandId::Randomkey => Ok(Command::RandomKey),
        CommandId::Reset => Ok(Command::Reset),
        CommandId::Scan => Ok(Command::Scan(scan(args)?)),
        CommandId::Save => Ok(Command::Save),
        CommandId::Select => select(args),
        CommandId::Shutdown => shutdown(args),
        CommandId::Strlen => Ok(Command::One(args.get(1), Ask::Length)),
        CommandId::Type => Ok(Command::One(args.get(1), Ask::Type)),
        CommandId::Append
        | CommandId::Decr
        | CommandId::Decrby
        | CommandId::Del
        | CommandId::Flushall
        | CommandId::Flushdb
        | CommandId::Getdel
        | CommandId::Getset
        | CommandId::Incr
        | CommandId::Incrby
        | CommandId::Incrbyfloat
        | CommandId::Mset
        | CommandId::Msetnx
        | CommandId::Set
        | CommandId::Setnx
        | CommandId::Setrange
        | CommandId::Unlink => write(args, spec),
    }
}

/// Parses a command that writes, after its argument count has been checked.
fn write<'a>(args: Args<'a>, spec: &'static Spec) -> Result<Command<'a>, Refusal<'a>> {
    let key = args.get(1);
    let modify = |kind, operand| Ok(WriteCommand::Modify(kind, key, operand));
    let command = match spec.id {
        CommandId::Append => modify(Kind::Append, args.get(2)),
        CommandId::Decr => modify(Kind::Add(-1), b""),
        CommandId::Decrby => match integer(args.get(2))?.checked_neg() {
            Some(by) => modify(Kind::Add(by), b""),
            None => Err(Refusal::Text("ERR decrement would overflow")),
        },
        CommandId::Del | CommandId::Unlink => Ok(WriteCommand::Delete(args.from(1))),
        CommandId::Flushall | CommandId::Flushdb => match args.len() {
            1 => Ok(WriteCommand::Clear),
            2 if args.is(1, "async") || args.is(1, "sync") => Ok(WriteCommand::Clear),
            _ => Err(Refusal::SYNTAX),
        },
        CommandId::Getdel => Ok(WriteCommand::GetDelete(key)),
        CommandId::Getset => modify(Kind::PutIf { only: None, reply: PutReply::Old }, args.get(2)),
        CommandId::Incr => modify(Kind::Add(1), b""),
        CommandId::Incrby => modify(Kind::Add(integer(args.get(2))?), b""),
        CommandId::Incrbyfloat => {
            let by = LongDouble::parse(args.get(2))
                .ok_or(Refusal::Text("ERR value is not a valid float"))?;
            modify(Kind::AddFloat(by), b"")
        }
        CommandId::Mset | CommandId::Msetnx if args.len().is_multiple_of(2) => {
            Err(Refusal::WrongCount(spec.name))
        }
        CommandId::Mset => Ok(WriteCommand::PutAll(args.from(1))),
        CommandId::Msetnx => Ok(WriteCommand::PutAllIfNone(args.from(1))),
        CommandId::Set => set(args),
        CommandId::Setnx => {
            let only = Some(Only::Missing);
            modify(Kind::PutIf { only, reply: PutReply::Flag }, args.get(2))
        }
        CommandId::Setrange => {
            let offset = usize::try_from(integer(args.get(2))?)
                .map_err(|_| Refusal::Text("ERR offset is out of range"))?;
            modify(Kind::SetRange(offset), args.get(3))
        }
        _ => Err(Refusal::SYNTAX),
    };
    command.map(Command::Write)
}

/// `SET` with its options.
fn set(args: Args<'_>) -> Result<WriteCommand<'_>, Refusal<'_>> {
    let (mut only, mut old, mut keeps, mut expiry) = (None, false, false, None);
    let mut at = 3;
    while at < args.len() {
        let word = args.get(at);
        let is = |name: &str| word.eq_ignore_ascii_case(name.as_bytes());
        // The same option may be repeated, but not combined with another one of its kind.
        let same_expiry = |name| expiry.is_none_or(|(known, _)| known == name);
        if is("nx") && only != Some(Only::Existing) {
            only = Some(Only::Missing);
        } else if is("xx") && only != Some(Only::Missing) {
            only = Some(Only::Existing);
        } else if is("get") {
            old = true;
        } else if is("keepttl") && expiry.is_none() {
            keeps = true;
        } else if let Some(name) = ["ex", "px", "exat", "pxat"].into_iter().find(|name| is(name))
            && !keeps
            && same_expiry(name)
            && at + 1 < args.len()
        {
            at += 1;
            expiry = Some((name, args.get(at)));
        } else {
            return Err(Refusal::SYNTAX);
        }
        at += 1;
    }
    if let Some((_, time)) = expiry {
        return Err(match integer(time)? {
            ..=0 => Refusal::Text("ERR invalid expire time in 'set' command"),
            _ => Refusal::Text(
                "ERR expiry is not there yet in this version of millrace: SET takes no EX, PX, EXAT and PXAT",
            ),
        });
    }
    let (key, value) = (args.get(1), args.get(2));
    let reply = if old { PutReply::Old } else { PutReply::Ok };
    Ok(match (only, reply) {
        (None, PutReply::Ok) => WriteCommand::Put(key, value),
        _ => WriteCommand::Modify(Kind::PutIf { only, reply }, key, value),
    })
}

fn integer(word: &[u8]) -> Result<i64, Refusal<'_>> {
    parse_i64(word).ok_or(Refusal::NOT_AN_INTEGER)
}

fn auth(args: Args<'_>) -> Result<Command<'_>, Refusal<'_>> {
    match args.len() {
        2 => Ok(Command::Auth(Login { user: None, password: args.get(1) })),
        3 => Ok(Command::Auth(Login { user: Some(args.get(1)), password: args.get(2) })),
        _ => Err(Refusal::SYNTAX),
    }
}

fn shutdown(args: Args<'_>) -> Result<Command<'_>, Refusal<'_>> {
    let (mut abort, mut others, mut save) = (false, false, None);
    for word in args.from(1).iter() {
        let is = |name: &str| word.eq_ignore_ascii_case(name.as_bytes());
        match () {
            () if is("abort") => abort = true,
            () if is("now") || is("force") => others = true,
            () if is("save") && save != Some(false) => save = Some(true),
            () if is("nosave") && save != Some(true) => save = Some(false),
            () => return Err(Refusal::SYNTAX),
        }
    }
    match abort {
        false => Ok(Command::ShutDown),
        true if others || save.is_some() => Err(Refusal::SYNTAX),
        true => Err(Refusal::Text("ERR No shutdown in progress.")),
    }
}

fn hello(args: Args<'_>) -> Result<Command<'_>, Refusal<'_>> {
    let mut hello = Hello::default();
    if args.len() > 1 {
        let version = parse_i64(args.get(1))
            .ok_or(Refusal::Text("ERR Protocol version is not an integer or out of range"))?;
        hello.protocol = Some(match version {
            2 => Protocol::V2,
            3 => Protocol::V3,
            _ => return Err(Refusal::Text("NOPROTO unsupported protocol version")),
        });
    }
    let mut at = 2;
    while at < args.len() {
        let more = args.len() - at - 1;
        if args.is(at, "auth") && more >= 2 {
            let (user, password) = (Some(args.get(at + 1)), args.get(at + 2));
            hello.login = Some(Login { user, password });
            at += 3;
        } else if args.is(at, "setname") && more >= 1 {
            hello.name = Some(client_name(args.get(at + 1))?);
            at += 2;
        } else {
            return Err(Refusal::Quoting {
                before: "ERR Syntax error in HELLO option '",
                word: args.get(at),
                after: "'",
            });
        }
    }
    Ok(Command::Hello(hello))
}

fn select(args: Args<'_>) -> Result<Command<'_>, Refusal<'_>> {
    let index = integer(args.get(1))?;
    if i32::try_from(index).is_err() {
        return Err(Refusal::Text(
            "ERR value is out of range, value must between -2147483648 and 2147483647",
        ));
    }
    if index != 0 {
        return Err(Refusal::Text("ERR DB index is out of range"));
    }
    Ok(Command::Select)
}

/// Checks a connection's name: one word in a list.
fn client_name(name: &[u8]) -> Result<&[u8], Refusal<'_>> {
    if name.iter().all(|byte| matches!(byte, b'!'..=b'~')) {
        Ok(name)
    } else {
        Err(Refusal::Text(
            "ERR Client names cannot contain spaces, newlines or special characters.",
        ))
    }
}

fn client_type(word: &[u8]) -> Result<ClientType, Refusal<'_>> {
    let is = |name: &str| word.eq_ignore_ascii_case(name.as_bytes());
    if is("normal") {
        Ok(ClientType::Normal)
    } else if is("master") || is("replica") || is("slave") || is("pubsub") {
        Ok(ClientType::Other)
    } else {
        Err(Refusal::Quoting { before: "ERR Unknown client type '", word, after: "'" })
    }
}

fn client_kill(args: Args<'_>) -> Result<ClientFilter<'_>, Refusal<'_>> {
    if args.len() == 3 {
        return Ok(ClientFilter {
            address: Some(args.get(2)),
            old_form: true,
            ..ClientFilter::default()
        });
    }
    let mut filter = ClientFilter { skip_me: true, ..ClientFilter::default() };
    let mut at = 2;
    while at < args.len() {
        if at + 1 == args.len() {
            return Err(Refusal::SYNTAX);
        }
        let value = args.get(at + 1);
        if args.is(at, "id") {
            let id = parse_i64(value).and_then(|id| u64::try_from(id).ok()).filter(|&id| id > 0);
            filter.id = Some(id.ok_or(Refusal::Text("ERR client-id should be greater than 0"))?);
        } else if args.is(at, "type") {
            filter.kind = Some(client_type(value)?);
        } else if args.is(at, "addr") {
            filter.address = Some(value);
        } else if args.is(at, "laddr") {
            filter.local_address = Some(value);
        } else if args.is(at, "user") {
            // Every client is the default user.
            if value != b"default" {
                return Err(Refusal::Quoting {
                    before: "ERR No such user '",
                    word: value,
                    after: "'",
                });
            }
        } else if args.is(at, "skipme") {
            filter.skip_me = if args.is(at + 1, "yes") {
                true
            } else if args.is(at + 1, "no") {
                false
            } else {
                return Err(Refusal::SYNTAX);
            };
        } else {
            return Err(Refusal::SYNTAX);
        }
        at += 2;
    }
    Ok(filter)
}

fn client_list(args: Args<'_>) -> Result<ListFilter<'_>, Refusal<'_>> {
    if args.len() == 4 && args.is(2, "type") {
        return Ok(ListFilter::Type(client_type(args.get(3))?));
    }
    if args.len() > 3 && args.is(2, "id") {
        let ids = args.from(3);
        if ids.iter().any(|id| parse_i64(id).is_none()) {
            return Err(Refusal::Text("ERR Invalid client ID"));
        }
        return Ok(ListFilter::Ids(ids));
    }
    if args.len() == 2 { Ok(ListFilter::All) } else { Err(Refusal::SYNTAX) }
}

/// The refusal of a subcommand with too many words; it repeats the client's spelling.
fn too_many(args: Args<'_>) -> Refusal<'_> {
    Refusal::Quoting {
        before: "ERR unknown subcommand or wrong number of arguments for '",
        word: args.get(1),
        after: "'. Try CLIENT HELP.",
    }
}

fn client_pause(args: Args<'_>) -> Result<ClientCommand<'_>, Refusal<'_>> {
    let all = match args.len() {
        3 => true,
        4 if args.is(3, "all") => true,
        4 if args.is(3, "write") => false,
        4 => return Err(Refusal::Text("ERR CLIENT PAUSE mode must be WRITE or ALL")),
        _ => return Err(too_many(args)),
    };
    let timeout_ms = parse_i64(args.get(2))
        .ok_or(Refusal::Text("ERR timeout is not an integer or out of range"))?;
    if timeout_ms < 0 {
        return Err(Refusal::Text("ERR timeout is negative"));
    }
    Ok(ClientCommand::Pause { timeout_ms, all })
}

fn client_unblock(args: Args<'_>) -> Result<ClientCommand<'_>, Refusal<'_>> {
    if args.len() > 4 {
        return Err(too_many(args));
    }
    if args.len() == 4 && !args.is(3, "timeout") && !args.is(3, "error") {
        return Err(Refusal::Text("ERR CLIENT UNBLOCK reason should be TIMEOUT or ERROR"));
    }
    integer(args.get(2))?;
    Ok(ClientCommand::Unblock)
}

fn command_list(args: Args<'_>) -> Result<NameFilter<'_>, Refusal<'_>> {
    if args.len() == 2 {
        return Ok(NameFilter::All);
    }
    if args.len() != 5 || !args.is(2, "filterby") {
        return Err(Refusal::SYNTAX);
    }
    if args.is(3, "module") {
        Ok(NameFilter::Module)
    } else if args.is(3, "aclcat") {
        Ok(NameFilter::Category(args.get(4)))
    } else if args.is(3, "pattern") {
        Ok(NameFilter::Pattern(args.get(4)))
    } else {
        Err(Refusal::SYNTAX)
    }
}

fn scan(args: Args<'_>) -> Result<Scan<'_>, Refusal<'_>> {
    let cursor = scan_cursor(args.get(1)).ok_or(Refusal::Text("ERR invalid cursor"))?;
    let mut scan = Scan { cursor, pattern: None, count: SCAN_COUNT, of_our_type: true };
    let mut at = 2;
    while at < args.len() {
        if at + 1 == args.len() {
            return Err(Refusal::SYNTAX);
        }
        let value = args.get(at + 1);
        if args.is(at, "count") {
            scan.count = u64::try_from(integer(value)?)
                .ok()
                .filter(|&count| count > 0)
                .ok_or(Refusal::SYNTAX)?;
        } else if args.is(at, "match") {
            scan.pattern = (value != b"*").then_some(value);
        } else if args.is(at, "type") {
            scan.of_our_type = value.eq_ignore_ascii_case(b"string");
        } else {
            return Err(Refusal::SYNTAX);
        }
        at += 2;
    }
    Ok(scan)
}

/// Parses a cursor as leniently as Redis: C's `strtoul`, except that it may not begin with white
/// space.
fn scan_cursor(word: &[u8]) -> Option<u64> {
    let (negative, digits) = match word {
        [b'-', rest @ ..] => (true, rest),
        [b'+', rest @ ..] => (false, rest),
        rest => (false, rest),
    };
    if digits.is_empty() {
        return word.is_empty().then_some(0);
    }
    let mut value = 0u64;
    for digit in digits {
        if !digit.is_ascii_digit() {
            return None;
        }
        value = value.checked_mul(10)?.checked_add(u64::from(digit - b'0'))?;
    }
    Some(if negative { value.wrapping_neg() } else { value })
}

fn range(args: Args<'_>) -> Result<RangeQuery<'_>, Refusal<'_>> {
    const BOUND: Refusal<'_> = Refusal::Text("ERR min or max not valid string range item");
    let mut query = RangeQuery {
        start: RangeBound::parse_start(args.get(1)).ok_or(BOUND)?,
        end: RangeBound::parse_end(args.get(2)).ok_or(BOUND)?,
        reverse: false,
        limit: None,
        values: true,
    };
    let mut at = 3;
    while at < args.len() {
        if args.is(at, "reverse") {
            query.reverse = true;
            at += 1;
        } else if args.is(at, "novalues") {
            query.values = false;
            at += 1;
        } else if args.is(at, "limit") && at + 1 < args.len() {
            let limit = integer(args.get(at + 1))?;
            let limit = u64::try_from(limit)
                .map_err(|_| Refusal::Text("ERR value is out of range, must be positive"))?;
            query.limit = Some(limit);
            at += 2;
        } else {
            return Err(Refusal::SYNTAX);
        }
    }
    Ok(query)
}

/// The part of a value of `length` bytes that `GETRANGE` returns; may be empty.
pub fn part(length: usize, start: i64, end: i64) -> std::ops::Range<usize> {
    let length = i64::try_from(length).unwrap_or(i64::MAX);
    if start < 0 && end < 0 && start > end {
        return 0..0;
    }
    let from_end = |position: i64| {
        if position < 0 { length.saturating_add(position).max(0) } else { position }
    };
    let (start, end) = (from_end(start), from_end(end).min(length - 1));
    // An empty value ends at -1.
    if start > end { 0..0 } else { start as usize..end as usize + 1 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::args::tests::with;
    use resp::Writer;

    const READS: May = May { write: false, enter: true };

    /// The error reply to `line`, or the parsed command.
    fn outcome(line: &str) -> String {
        with(line, |args| match parse(args, READS).command {
            Ok(command) => format!("{command:?}"),
            Err(refusal) => {
                let mut out = Vec::new();
                refusal.write(&mut Writer::new(&mut out, Protocol::V2));
                String::from_utf8(out).unwrap().trim_end().to_owned()
            }
        })
    }

    /// The replies of redis-server 7.0.15 on a fresh connection of an empty server.
    const REDIS_ERRORS: &[(&str, &str)] = &[
        ("ping a b", "-ERR wrong number of arguments for 'ping' command"),
        ("echo", "-ERR wrong number of arguments for 'echo' command"),
        ("select 16", "-ERR DB index is out of range"),
        ("select abc", "-ERR value is not an integer or out of range"),
        (
            "select 99999999999",
            "-ERR value is out of range, value must between -2147483648 and 2147483647",
        ),
        ("select -1", "-ERR DB index is out of range"),
        ("hello 4", "-NOPROTO unsupported protocol version"),
        ("hello abc", "-ERR Protocol version is not an integer or out of range"),
        ("hello 1", "-NOPROTO unsupported protocol version"),
        ("hello 99999999999999999999", "-ERR Protocol version is not an integer or out of range"),
        ("hello 2 foo", "-ERR Syntax error in HELLO option 'foo'"),
        ("hello 3 setname", "-ERR Syntax error in HELLO option 'setname'"),
        (
            r#"hello 3 setname "a b""#,
            "-ERR Client names cannot contain spaces, newlines or special characters.",
        ),
        ("hello 3 auth default", "-ERR Syntax error in HELLO option 'auth'"),
        ("auth a b c", "-ERR syntax error"),
        ("auth", "-ERR wrong number of arguments for 'auth' command"),
        ("client", "-ERR wrong number of arguments for 'client' command"),
        ("client foo", "-ERR unknown subcommand 'foo'. Try CLIENT HELP."),
        ("client id 3", "-ERR wrong number of arguments for 'client|id' command"),
        (
            r#"client setname "a b""#,
            "-ERR Client names cannot contain spaces, newlines or special characters.",
        ),
        ("client no-evict x", "-ERR syntax error"),
        ("client no-touch on", "-ERR unknown subcommand 'no-touch'. Try CLIENT HELP."),
        ("client setinfo lib-name x", "-ERR unknown subcommand 'setinfo'. Try CLIENT HELP."),
        ("client reply xx", "-ERR syntax error"),
        ("client pause -1", "-ERR timeout is negative"),
        ("client pause abc", "-ERR timeout is not an integer or out of range"),
        ("client pause 0 xx", "-ERR CLIENT PAUSE mode must be WRITE or ALL"),
        ("client kill", "-ERR wrong number of arguments for 'client|kill' command"),
        ("client kill id abc", "-ERR client-id should be greater than 0"),
        ("client kill id -1", "-ERR client-id should be greater than 0"),
        ("client kill type foo", "-ERR Unknown client type 'foo'"),
        ("client kill user nobody", "-ERR No such user 'nobody'"),
        ("client kill foo bar", "-ERR syntax error"),
        ("client kill id 9999 skipme maybe", "-ERR syntax error"),
        ("client kill id 9999 skipme", "-ERR syntax error"),
        ("client list type foo", "-ERR Unknown client type 'foo'"),
        ("client list type normal x", "-ERR syntax error"),
        ("client list id", "-ERR syntax error"),
        ("client list id abc", "-ERR Invalid client ID"),
        ("client list foo", "-ERR syntax error"),
        ("client unblock abc", "-ERR value is not an integer or out of range"),
        ("client unblock 99 foo", "-ERR CLIENT UNBLOCK reason should be TIMEOUT or ERROR"),
        ("client info x", "-ERR wrong number of arguments for 'client|info' command"),
        ("command count x", "-ERR wrong number of arguments for 'command|count' command"),
        ("command foo", "-ERR unknown subcommand 'foo'. Try COMMAND HELP."),
        ("command list filterby", "-ERR syntax error"),
        ("command list filterby foo bar", "-ERR syntax error"),
        ("command list filterby aclcat admin x", "-ERR syntax error"),
        ("command list foo", "-ERR syntax error"),
        ("command getkeys", "-ERR wrong number of arguments for 'command|getkeys' command"),
        ("command getkeys foo", "-ERR wrong number of arguments for 'command|getkeys' command"),
        ("command getkeys get", "-ERR wrong number of arguments for 'command|getkeys' command"),
        ("command getkeys ping", "-ERR wrong number of arguments for 'command|getkeys' command"),
        ("config", "-ERR wrong number of arguments for 'config' command"),
        ("config foo", "-ERR unknown subcommand 'foo'. Try CONFIG HELP."),
        ("config get", "-ERR wrong number of arguments for 'config|get' command"),
        ("dbsize x", "-ERR wrong number of arguments for 'dbsize' command"),
        ("get", "-ERR wrong number of arguments for 'get' command"),
        ("get a b", "-ERR wrong number of arguments for 'get' command"),
        ("mget", "-ERR wrong number of arguments for 'mget' command"),
        ("exists", "-ERR wrong number of arguments for 'exists' command"),
        ("strlen", "-ERR wrong number of arguments for 'strlen' command"),
        ("getrange nosuch a 1", "-ERR value is not an integer or out of range"),
        ("getrange nosuch 0 b", "-ERR value is not an integer or out of range"),
        ("getrange nosuch 0", "-ERR wrong number of arguments for 'getrange' command"),
        ("scan", "-ERR wrong number of arguments for 'scan' command"),
        ("scan abc", "-ERR invalid cursor"),
        ("scan 0 count", "-ERR syntax error"),
        ("scan 0 count 0", "-ERR syntax error"),
        ("scan 0 count -1", "-ERR syntax error"),
        ("scan 0 count abc", "-ERR value is not an integer or out of range"),
        ("scan 0 foo bar", "-ERR syntax error"),
        ("scan 0 match", "-ERR syntax error"),
        ("scan 0 count 99999999999999999999", "-ERR value is not an integer or out of range"),
        ("scan 18446744073709551616", "-ERR invalid cursor"),
        (r#"scan " 0""#, "-ERR invalid cursor"),
        ("scan 0x", "-ERR invalid cursor"),
        ("keys", "-ERR wrong number of arguments for 'keys' command"),
        ("keys a b", "-ERR wrong number of arguments for 'keys' command"),
        ("type", "-ERR wrong number of arguments for 'type' command"),
        ("randomkey a", "-ERR wrong number of arguments for 'randomkey' command"),
        ("ttl", "-ERR wrong number of arguments for 'ttl' command"),
        ("reset a", "-ERR wrong number of arguments for 'reset' command"),
        ("foo", "-ERR unknown command 'foo', with args beginning with:"),
        (
            r#"foo bar "b a\r\nz""#,
            "-ERR unknown command 'foo', with args beginning with: 'bar' 'b a  z'",
        ),
        (r#""" a"#, "-ERR unknown command '', with args beginning with: 'a'"),
        ("set a", "-ERR wrong number of arguments for 'set' command"),
        (
            "client pause 0 write x",
            "-ERR unknown subcommand or wrong number of arguments for 'pause'. Try CLIENT HELP.",
        ),
        (
            "client UnBlock 1 timeout x",
            "-ERR unknown subcommand or wrong number of arguments for 'UnBlock'. Try CLIENT HELP.",
        ),
        ("client kill id 1 x", "-ERR syntax error"),
        ("client list id 1 2 x", "-ERR Invalid client ID"),
    ];

    #[test]
    fn errors_are_those_of_redis() {
        for (line, error) in REDIS_ERRORS {
            assert_eq!(outcome(line), *error, "{line}");
        }
    }

    #[test]
    fn writes_are_refused_after_their_arguments_are_counted() {
        assert_eq!(outcome("set a b"), "-READONLY You can't write against a read only replica.");
        assert_eq!(outcome("flushall"), "-READONLY You can't write against a read only replica.");
        assert_eq!(outcome("set a"), "-ERR wrong number of arguments for 'set' command");
        assert_eq!(
            outcome("xgroup create k g $"),
            "-READONLY You can't write against a read only replica."
        );
        assert_eq!(
            outcome("xgroup create k"),
            "-ERR wrong number of arguments for 'xgroup|create' command"
        );
        assert_eq!(outcome("xgroup x"), "-ERR unknown subcommand 'x'. Try XGROUP HELP.");
    }

    #[test]
    fn reads_of_one_key_are_parsed() {
        with("GeT k", |args| {
            assert!(matches!(parse(args, READS).command, Ok(Command::One(b"k", Ask::Value))))
        });
        with("getrange k -5 7", |args| {
            assert!(matches!(
                parse(args, READS).command,
                Ok(Command::One(b"k", Ask::Part { start: -5, end: 7 }))
            ));
        });
        with("pttl k", |args| {
            assert!(matches!(parse(args, READS).command, Ok(Command::One(b"k", Ask::TimeToLive))))
        });
    }

    #[test]
    fn ranges_take_their_options_in_any_order() {
        with("mr.range (a + novalues limit 5 reverse", |args| {
            let Ok(Command::Range(query)) = parse(args, READS).command else { panic!() };
            assert_eq!(query.start, RangeBound::Exclusive(b"a"));
            assert_eq!(query.end, RangeBound::Open);
            assert_eq!((query.reverse, query.limit, query.values), (true, Some(5), false));
        });
        assert_eq!(outcome("mr.range a b"), "-ERR min or max not valid string range item");
        assert_eq!(
            outcome("mr.range - + limit -1"),
            "-ERR value is out of range, must be positive"
        );
        assert_eq!(outcome("mr.range - + limit"), "-ERR syntax error");
        assert_eq!(outcome("mr.range - + foo"), "-ERR syntax error");
        assert_eq!(outcome("mr.range -"), "-ERR wrong number of arguments for 'mr.range' command");
    }

    #[test]
    fn options_of_scan_are_parsed() {
        with("scan 17 match a* count 100 type STRING", |args| {
            let Ok(Command::Scan(scan)) = parse(args, READS).command else { panic!() };
            assert_eq!((scan.cursor, scan.pattern, scan.count), (17, Some(&b"a*"[..]), 100));
            assert!(scan.of_our_type);
        });
        with("scan 0 match * type list", |args| {
            let Ok(Command::Scan(scan)) = parse(args, READS).command else { panic!() };
            assert_eq!((scan.pattern, scan.count, scan.of_our_type), (None, SCAN_COUNT, false));
        });
        for (word, cursor) in
            [("", 0), ("+7", 7), ("007", 7), ("-1", u64::MAX), ("18446744073709551615", u64::MAX)]
        {
            assert_eq!(scan_cursor(word.as_bytes()), Some(cursor));
        }
        for word in ["-", "+", "a", " 0", "0x", "18446744073709551616"] {
            assert_eq!(scan_cursor(word.as_bytes()), None, "{word}");
        }
    }

    #[test]
    fn parts_are_cut_as_redis_cuts_them() {
        let hello = "Hello World";
        for (start, end, expected) in [
            (0, 3, "Hell"),
            (-5, -1, "World"),
            (0, -1, "Hello World"),
            (10, 100, "d"),
            (5, 3, ""),
            (-1, -5, ""),
            (-100, 1, "He"),
            (100, 200, ""),
            (-3, 2, ""),
            (i64::MIN, i64::MAX, "Hello World"),
            (i64::MAX, i64::MIN, ""),
        ] {
            assert_eq!(&hello[part(hello.len(), start, end)], expected, "{start} {end}");
        }
        assert_eq!(part(0, 0, -1), 0..0);
        assert_eq!(part(0, i64::MIN, i64::MAX), 0..0);
    }
}
