//! From arguments to [`Command`]s: names, counts and options checked, numbers parsed, nothing
//! executed yet.
//!
//! [`parse`] checks in Redis's order (does the command exist, does it take this number of
//! arguments, would it write, are its options valid), so that a client that makes several mistakes
//! gets the same error first.

use resp::parse_i64;

use crate::command::args::Args;
use crate::command::bits::{self, BitOperation, BitQuery};
use crate::command::commands::{
    Ask, ClientCommand, Command, Describe, SlowLogCommand, TimeToLive, Transaction, WriteCommand,
};
use crate::command::fields::{self, FieldOperation};
use crate::command::help;
use crate::command::lcs::LcsOptions;
use crate::command::long_double::LongDouble;
use crate::command::lookup::{self, Lookup};
use crate::command::operation::{Condition, ExpireIf, Operation, PutReply, Transfer};
use crate::command::options::{
    auth, client_caching, client_kill, client_list, client_name, client_no_evict, client_no_touch,
    client_pause, client_reply, client_set_info, client_tracking, client_unblock, command_list,
    copy, debug, expire, get_until, hello, index, integer, memory_usage, move_key, range,
    range_ends, restore, scan, select, set, set_until, shutdown, slow_log_get, stretch, subscribe,
    swap_databases,
};
use crate::command::refusal::Refusal;
use crate::command::said::{self, Said};
use crate::command::spec::{CommandId, Spec, takes_count};

/// The permissions of a connection.
#[derive(Clone, Copy, Debug)]
pub struct Permissions {
    /// The node takes writes. If not, Redis's commands that write are refused as such.
    pub write: bool,
    /// The client has given the password, or needs none.
    pub enter: bool,
    /// `DEBUG` is allowed.
    pub debug: bool,
}

const NO_DEBUG: &str = "ERR DEBUG command not allowed. If the enable-debug-command option is set to \"local\", you \
     can run it from a local connection, otherwise you need to set this option in the configuration file, and then \
     restart the server.";

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
        Self { rejected: command.is_err(), command, id: None, name: "NULL" }
    }
}

/// Parses a command from its words.
pub fn parse(args: Args<'_>, permissions: Permissions) -> Parsed<'_> {
    // The most frequent commands.
    if permissions.enter && args.len() == 2 && args.is(0, "get") {
        return Parsed::of(CommandId::Get, "get", Ok(Command::One(args.get(1), Ask::Value)));
    }
    if permissions.enter && permissions.write && args.len() == 3 && args.is(0, "set") {
        let put = WriteCommand::Put(args.get(1), args.get(2));
        return Parsed::of(CommandId::Set, "set", Ok(Command::Write(put)));
    }
    parse_any(args, permissions)
}

fn parse_any(args: Args<'_>, permissions: Permissions) -> Parsed<'_> {
    let second = (args.len() > 1).then(|| args.get(1));
    let spec = match lookup::find(args.get(0), second) {
        Some(Lookup::Ours(spec)) => spec,
        other => return Parsed::no_row(without_row(args, other, permissions)),
    };
    let rejection = if !spec.takes_count(args.len()) {
        Refusal::WrongCount(spec.name)
    } else if !permissions.enter && !spec.is_for_all() {
        Refusal::NO_PASSWORD
    } else if spec.id == CommandId::Debug && !permissions.debug {
        Refusal::Text(NO_DEBUG)
    } else if spec.writes() && !permissions.write {
        Refusal::ReadOnly
    } else {
        return Parsed::of(spec.id, spec.name, parse_options(args, spec));
    };
    let rejection = if spec.id == CommandId::Exec { rejection.of_exec() } else { rejection };
    let parsed = Parsed::of(spec.id, spec.name, Err(rejection));
    Parsed { rejected: true, ..parsed }
}

/// Commands that are not in the table: those that are refused by name.
fn without_row<'a>(
    args: Args<'a>,
    known: Option<Lookup>,
    permissions: Permissions,
) -> Result<Command<'a>, Refusal<'a>> {
    match known {
        Some(Lookup::NoSubcommand(container)) => {
            Err(Refusal::UnknownSubcommand { container: container.name, word: args.get(1) })
        }
        Some(Lookup::NoWrite(container)) if !permissions.write => {
            Err(Refusal::UnknownSubcommand { container, word: args.get(1) })
        }
        Some(Lookup::Write(name, arity)) if !permissions.write => {
            Err(match takes_count(arity, args.len()) {
                false => Refusal::WrongCount(name),
                true if !permissions.enter => Refusal::NO_PASSWORD,
                true => Refusal::ReadOnly,
            })
        }
        Some(Lookup::Ours(_) | Lookup::NoWrite(_) | Lookup::Write(..)) | None => {
            Err(Refusal::UnknownCommand(args))
        }
    }
}

/// Parses the options of a command of the table, after its argument count and permission have been
/// checked.
fn parse_options<'a>(args: Args<'a>, spec: &'static Spec) -> Result<Command<'a>, Refusal<'a>> {
    match spec.id {
        CommandId::Swapdb => return swap_databases(args),
        CommandId::FunctionDelete => return Err(Refusal::Text("ERR Library not found")),
        CommandId::FunctionFlush => return Ok(Command::Say(said::function_flush(args)?)),
        _ => {}
    }
    if spec.writes() {
        return write(args, spec);
    }
    let client = |command| Ok(Command::Client(command));
    let describe = |command| Ok(Command::Describe(command));
    let one = |ask| Ok(Command::One(args.get(1), ask));
    let say = |said| Ok(Command::Say(said));
    let object = |ask| Ok(Command::One(args.get(2), ask));
    let get_keys =
        |flags| Ok(Command::Describe(Describe::GetKeys { command: args.from(2), flags }));
    match spec.id {
        CommandId::Auth => auth(args),
        CommandId::Bgsave if args.len() > 2 => Err(Refusal::SYNTAX),
        CommandId::Bgsave if args.len() == 2 && !args.is(1, "schedule") => Err(Refusal::SYNTAX),
        CommandId::Bgsave => Ok(Command::BackgroundSave),
        CommandId::Bitcount => Ok(Command::Bits(args.get(1), BitQuery::parse_count(args))),
        CommandId::BitfieldRo => match fields::parse(args)?.iter().any(FieldOperation::writes) {
            true => Err(Refusal::Text("ERR BITFIELD_RO only supports the GET subcommand")),
            false => Ok(Command::Fields(args)),
        },
        CommandId::Bitpos => Ok(Command::Bits(args.get(1), BitQuery::parse_find(args)?)),
        // A container without a subcommand has too few arguments, so it never gets here.
        CommandId::Client
        | CommandId::Config
        | CommandId::Function
        | CommandId::Latency
        | CommandId::Memory
        | CommandId::Object
        | CommandId::Slowlog => Err(Refusal::WrongCount(spec.name)),
        // Tracking does not exist, so it is never on.
        CommandId::ClientCaching => client(client_caching(args)),
        CommandId::ClientTracking => client(client_tracking(args)?),
        CommandId::Subscribe => subscribe(args),
        CommandId::Unsubscribe => Ok(Command::Unsubscribe(args.from(1))),
        CommandId::ClientGetname => client(ClientCommand::GetName),
        CommandId::ClientGetredir => client(ClientCommand::GetRedir),
        CommandId::ClientHelp => client(ClientCommand::Help),
        CommandId::ClientId => client(ClientCommand::Id),
        CommandId::ClientInfo => client(ClientCommand::Info),
        CommandId::ClientKill => client(ClientCommand::Kill(client_kill(args)?)),
        CommandId::ClientList => client(ClientCommand::List(client_list(args)?)),
        CommandId::ClientNoEvict => client(client_no_evict(args)?),
        CommandId::ClientNoTouch => client_no_touch(args),
        CommandId::ClientPause => client(client_pause(args)?),
        CommandId::ClientReply => client(client_reply(args)?),
        CommandId::ClientSetinfo => client(client_set_info(args)?),
        CommandId::ClientSetname => client(ClientCommand::SetName(client_name(args.get(2))?)),
        CommandId::ClientTrackinginfo => client(ClientCommand::TrackingInfo),
        CommandId::ClientUnblock => client(client_unblock(args)?),
        CommandId::ClientUnpause => client(ClientCommand::Unpause),
        CommandId::Command => describe(Describe::Info(args.from(1))),
        CommandId::CommandCount => describe(Describe::Count),
        CommandId::CommandDocs => described(args.from(2), Describe::Docs),
        CommandId::CommandGetkeys => get_keys(false),
        CommandId::CommandGetkeysandflags => get_keys(true),
        CommandId::CommandHelp => describe(Describe::Help),
        CommandId::CommandInfo => described(args.from(2), Describe::Info),
        CommandId::CommandList => describe(Describe::List(command_list(args)?)),
        CommandId::ConfigGet => Ok(Command::ConfigGet(args.from(2))),
        CommandId::ConfigHelp => Ok(Command::ConfigHelp),
        CommandId::ConfigResetstat => Ok(Command::ConfigResetStat),
        CommandId::ConfigRewrite => Ok(Command::ConfigRewrite),
        CommandId::ConfigSet if args.len() % 2 == 1 => Err(Refusal::SYNTAX),
        CommandId::ConfigSet => Ok(Command::ConfigSet(args.from(2))),
        CommandId::Dbsize => Ok(Command::DbSize),
        CommandId::Debug => debug(args),
        CommandId::Discard => Ok(Command::Transaction(Transaction::Discard)),
        CommandId::Dump => Ok(Command::Dump(args.get(1))),
        CommandId::FunctionDump => say(Said::NoFunctionsDumped),
        CommandId::FunctionHelp => say(Said::Help(help::FUNCTION)),
        CommandId::FunctionKill => Err(Refusal::Text("NOTBUSY No scripts in execution right now.")),
        CommandId::FunctionList => say(said::function_list(args)?),
        CommandId::FunctionStats => say(Said::NoFunctions),
        CommandId::LatencyDoctor => say(Said::Text(said::LATENCY)),
        CommandId::LatencyGraph => Err(Refusal::Quoting {
            before: "ERR No samples available for event '",
            word: args.get(2),
            after: "'",
        }),
        CommandId::LatencyHelp => say(Said::Help(help::LATENCY)),
        CommandId::LatencyHistogram => say(Said::NoEntries),
        CommandId::LatencyHistory | CommandId::LatencyLatest => say(Said::Nothing),
        CommandId::LatencyReset => say(Said::Integer(0)),
        CommandId::Lcs => Ok(Command::Lcs(args.get(1), args.get(2), LcsOptions::parse(args)?)),
        CommandId::MemoryDoctor => say(Said::Text(said::MEMORY)),
        CommandId::MemoryHelp => say(Said::Help(help::MEMORY)),
        CommandId::MemoryMallocStats => say(Said::Text(said::ALLOCATOR)),
        CommandId::MemoryPurge => say(Said::Ok),
        CommandId::MemoryStats => Ok(Command::MemoryStats),
        CommandId::MemoryUsage => memory_usage(args),
        CommandId::ObjectEncoding => object(Ask::Encoding),
        CommandId::ObjectFreq => object(Ask::Frequency),
        CommandId::ObjectHelp => say(Said::Help(help::OBJECT)),
        CommandId::ObjectIdletime => object(Ask::IdleTime),
        CommandId::ObjectRefcount => object(Ask::References),
        CommandId::SlowlogGet => slow_log_get(args),
        CommandId::SlowlogHelp => say(Said::Help(help::SLOWLOG)),
        CommandId::SlowlogLen => Ok(Command::SlowLog(SlowLogCommand::Len)),
        CommandId::SlowlogReset => Ok(Command::SlowLog(SlowLogCommand::Reset)),
        CommandId::Time => Ok(Command::Time),
        CommandId::Echo => Ok(Command::Echo(args.get(1))),
        CommandId::Exec => Ok(Command::Transaction(Transaction::Exec)),
        CommandId::Exists | CommandId::Touch => Ok(Command::Exists(args.from(1))),
        CommandId::Get => one(Ask::Value),
        CommandId::Getbit => one(Ask::Bit(bits::parse_offset(args.get(2), None)?)),
        CommandId::Getrange | CommandId::Substr => {
            one(Ask::Part { start: integer(args.get(2))?, end: integer(args.get(3))? })
        }
        CommandId::Hello => hello(args),
        CommandId::Info => Ok(Command::Info(args.from(1))),
        CommandId::Keys => Ok(Command::Keys(args.get(1))),
        CommandId::Lastsave => Ok(Command::LastSave),
        CommandId::Mget => Ok(Command::MGet(args.from(1))),
        CommandId::MrGet => one(Ask::Placed),
        CommandId::MrInfo => Ok(Command::Say(Said::Extensions)),
        CommandId::MrRange => Ok(Command::Range(range(args)?)),
        CommandId::MrIndex => Ok(Command::Index(index(args)?)),
        CommandId::MrStretch => Ok(Command::Stretch(stretch(args)?)),
        CommandId::Multi => Ok(Command::Transaction(Transaction::Multi)),
        CommandId::Ping if args.len() > 2 => Err(Refusal::WrongCount(spec.name)),
        CommandId::Ping => Ok(Command::Ping((args.len() > 1).then(|| args.get(1)))),
        CommandId::Pttl => one(Ask::TimeToLive(TimeToLive::Milliseconds)),
        CommandId::Ttl => one(Ask::TimeToLive(TimeToLive::Seconds)),
        CommandId::Expiretime => one(Ask::TimeToLive(TimeToLive::EndSeconds)),
        CommandId::Pexpiretime => one(Ask::TimeToLive(TimeToLive::EndMilliseconds)),
        CommandId::Quit => Ok(Command::Quit),
        CommandId::Randomkey => Ok(Command::RandomKey),
        CommandId::Reset => Ok(Command::Reset),
        CommandId::Scan => Ok(Command::Scan(scan(args)?)),
        CommandId::Save => Ok(Command::Save),
        CommandId::Select => select(args),
        CommandId::Shutdown => shutdown(args),
        CommandId::Strlen => one(Ask::Length),
        CommandId::Type => one(Ask::Type),
        CommandId::Unwatch => Ok(Command::Transaction(Transaction::Unwatch)),
        CommandId::Watch => Ok(Command::Transaction(Transaction::Watch(args.from(1)))),
        CommandId::Append
        | CommandId::Bitfield
        | CommandId::Bitop
        | CommandId::Copy
        | CommandId::Decr
        | CommandId::Decrby
        | CommandId::Del
        | CommandId::Flushall
        | CommandId::Flushdb
        | CommandId::FunctionDelete
        | CommandId::FunctionFlush
        | CommandId::Expire
        | CommandId::Expireat
        | CommandId::Getdel
        | CommandId::Getex
        | CommandId::Getset
        | CommandId::Incr
        | CommandId::Incrby
        | CommandId::Incrbyfloat
        | CommandId::Move
        | CommandId::MrDelrange
        | CommandId::Mset
        | CommandId::Msetnx
        | CommandId::Persist
        | CommandId::Pexpire
        | CommandId::Pexpireat
        | CommandId::Psetex
        | CommandId::Rename
        | CommandId::Renamenx
        | CommandId::Restore
        | CommandId::Set
        | CommandId::Setbit
        | CommandId::Setex
        | CommandId::Setnx
        | CommandId::Setrange
        | CommandId::Swapdb
        | CommandId::Unlink => write(args, spec),
    }
}

/// Parses a command that writes, after its argument count has been checked.
fn write<'a>(args: Args<'a>, spec: &'static Spec) -> Result<Command<'a>, Refusal<'a>> {
    let key = args.get(1);
    let modify = |kind, operand| Ok(WriteCommand::Modify(kind, key, operand));
    let command = match spec.id {
        CommandId::Append => modify(Operation::Append, args.get(2)),
        CommandId::Bitfield => {
            fields::parse(args)?;
            Ok(WriteCommand::Fields(args))
        }
        CommandId::Bitop => match BitOperation::parse(args.get(1)) {
            None => Err(Refusal::SYNTAX),
            Some(BitOperation::Not) if args.len() != 4 => {
                Err(Refusal::Text("ERR BITOP NOT must be called with a single source key."))
            }
            Some(operation) => Ok(WriteCommand::Combine(operation, args.get(2), args.from(3))),
        },
        CommandId::Copy => copy(args),
        CommandId::Decr => modify(Operation::Add(-1), b""),
        CommandId::Decrby => match integer(args.get(2))?.checked_neg() {
            Some(by) => modify(Operation::Add(by), b""),
            None => Err(Refusal::Text("ERR decrement would overflow")),
        },
        CommandId::Del | CommandId::Unlink => Ok(WriteCommand::Delete(args.from(1))),
        CommandId::Flushall | CommandId::Flushdb => match args.len() {
            1 => Ok(WriteCommand::Clear),
            2 if args.is(1, "async") || args.is(1, "sync") => Ok(WriteCommand::Clear),
            _ => Err(Refusal::SYNTAX),
        },
        CommandId::Expire => {
            expire(args, 1000, false, "ERR invalid expire time in 'expire' command")
        }
        CommandId::Expireat => {
            expire(args, 1000, true, "ERR invalid expire time in 'expireat' command")
        }
        CommandId::Pexpire => {
            expire(args, 1, false, "ERR invalid expire time in 'pexpire' command")
        }
        CommandId::Pexpireat => {
            expire(args, 1, true, "ERR invalid expire time in 'pexpireat' command")
        }
        CommandId::Persist => {
            let only = ExpireIf { persist: true, ..ExpireIf::default() };
            modify(Operation::Expire(only), b"")
        }
        CommandId::Psetex => set_until(args, "px", "ERR invalid expire time in 'psetex' command"),
        CommandId::Setex => set_until(args, "ex", "ERR invalid expire time in 'setex' command"),
        CommandId::Getex => return get_until(args),
        CommandId::Getdel => Ok(WriteCommand::GetDelete(key)),
        CommandId::Getset => {
            modify(Operation::PutIf { only: None, reply: PutReply::Old }, args.get(2))
        }
        CommandId::Incr => modify(Operation::Add(1), b""),
        CommandId::Incrby => modify(Operation::Add(integer(args.get(2))?), b""),
        CommandId::Incrbyfloat => {
            let by = LongDouble::parse(args.get(2))
                .ok_or(Refusal::Text("ERR value is not a valid float"))?;
            modify(Operation::AddFloat(by), b"")
        }
        CommandId::MrDelrange => {
            let (start, end) = range_ends(args)?;
            Ok(WriteCommand::DeleteRange(start, end))
        }
        CommandId::Mset | CommandId::Msetnx if args.len().is_multiple_of(2) => {
            Err(Refusal::WrongCount(spec.name))
        }
        CommandId::Mset => Ok(WriteCommand::PutAll(args.from(1))),
        CommandId::Msetnx => Ok(WriteCommand::PutAllIfNone(args.from(1))),
        CommandId::Move => move_key(args),
        CommandId::Rename => Ok(WriteCommand::Transfer(Transfer::Rename, key, args.get(2))),
        CommandId::Renamenx => Ok(WriteCommand::Transfer(Transfer::RenameIfNone, key, args.get(2))),
        CommandId::Restore => restore(args),
        CommandId::Set => set(args),
        CommandId::Setbit => {
            let offset = bits::parse_offset(args.get(2), None)?;
            let on = match parse_i64(args.get(3)) {
                Some(0) => false,
                Some(1) => true,
                _ => return Err(Refusal::Text("ERR bit is not an integer or out of range")),
            };
            modify(Operation::SetBit { offset, on }, b"")
        }
        CommandId::Setnx => {
            let only = Some(Condition::Missing);
            modify(Operation::PutIf { only, reply: PutReply::Flag }, args.get(2))
        }
        CommandId::Setrange => {
            let offset = usize::try_from(integer(args.get(2))?)
                .map_err(|_| Refusal::Text("ERR offset is out of range"))?;
            modify(Operation::SetRange(offset), args.get(3))
        }
        _ => Err(Refusal::SYNTAX),
    };
    command.map(Command::Write)
}

/// Names that `COMMAND DOCS` and `COMMAND INFO` describe at once: several times all there are.
const DESCRIBED_MAX: usize = 1024;

fn described<'a>(
    names: Args<'a>,
    how: fn(Args<'a>) -> Describe<'a>,
) -> Result<Command<'a>, Refusal<'a>> {
    match names.len() {
        ..=DESCRIBED_MAX => Ok(Command::Describe(how(names))),
        _ => Err(Refusal::Text("ERR more than 1024 names of commands")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::args::tests::with;
    use crate::command::commands::{IndexQuery, part};
    use crate::command::options::{SCAN_COUNT, scan_cursor};
    use crate::command::range::{Extent, RangeBound};
    use resp::{Protocol, Writer};

    const READS: Permissions = Permissions { write: false, enter: true, debug: false };

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
        ("client tracking", "-ERR wrong number of arguments for 'client|tracking' command"),
        ("client tracking x", "-ERR syntax error"),
        ("client tracking on x", "-ERR syntax error"),
        ("client tracking on redirect", "-ERR syntax error"),
        ("client tracking on prefix", "-ERR syntax error"),
        ("client tracking on redirect x", "-ERR value is not an integer or out of range"),
        (
            "client tracking on redirect 1 redirect 2",
            "-ERR A client can only redirect to a single other client",
        ),
        ("subscribe", "-ERR wrong number of arguments for 'subscribe' command"),
        (
            "subscribe __redis__:invalidate news",
            "-ERR there is one channel, __redis__:invalidate: nothing else is published here",
        ),
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
            assert!(matches!(
                parse(args, READS).command,
                Ok(Command::One(b"k", Ask::TimeToLive(_)))
            ))
        });
    }

    #[test]
    fn ranges_take_their_options_in_any_order() {
        with("mr.range (a + novalues limit 5 bytes 100 reverse", |args| {
            let Ok(Command::Range(query)) = parse(args, READS).command else { panic!() };
            assert_eq!(query.start, RangeBound::Exclusive(b"a"));
            assert_eq!(query.end, RangeBound::Open);
            let extent = Extent { values: false, keys: 5, bytes: 100 };
            assert_eq!((query.reverse, query.extent), (true, extent));
        });
        assert_eq!(outcome("mr.range a b"), "-ERR min or max not valid string range item");
        assert_eq!(
            outcome("mr.range - + limit -1"),
            "-ERR value is out of range, must be positive"
        );
        assert_eq!(outcome("mr.range - + limit"), "-ERR syntax error");
        assert_eq!(outcome("mr.range - + bytes"), "-ERR syntax error");
        assert_eq!(outcome("mr.range - + foo"), "-ERR syntax error");
        assert!(outcome("mr.delrange - +").starts_with("-READONLY"));
        let count = "-ERR wrong number of arguments for 'mr.delrange' command";
        assert_eq!(outcome("mr.delrange -"), count);
        assert_eq!(outcome("mr.delrange - + x"), count);
        assert_eq!(outcome("mr.range -"), "-ERR wrong number of arguments for 'mr.range' command");
    }

    #[test]
    fn pages_of_the_index_are_parsed_and_bounded() {
        with("mr.index -7 count 99999999 after a", |args| {
            let Ok(Command::Index(query)) = parse(args, READS).command else { panic!() };
            let count = IndexQuery::KEYS_MAX;
            assert_eq!(query, IndexQuery { seed: u64::MAX - 6, after: Some(b"a"), count });
        });
        with("mr.index 1", |args| {
            let Ok(Command::Index(query)) = parse(args, READS).command else { panic!() };
            assert_eq!((query.seed, query.after, query.count), (1, None, IndexQuery::KEYS_MAX));
        });
        assert_eq!(outcome("mr.index 1 count 0"), "-ERR count must be positive");
        assert_eq!(outcome("mr.index 1 count -1"), "-ERR count must be positive");
        assert_eq!(outcome("mr.index 1 after"), "-ERR syntax error");
        assert!(outcome("mr.index x").starts_with("-ERR value is not an integer"));
        assert!(outcome("mr.index").starts_with("-ERR wrong number of arguments"));
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
