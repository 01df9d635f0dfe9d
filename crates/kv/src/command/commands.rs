//! Commands as values: what a request asks for, with all options parsed.
//!
//! A command borrows its words from the connection's buffer; code that needs them longer copies
//! them.

use resp::Protocol;

use crate::command::args::Args;
use crate::command::bits::{BitOperation, BitQuery};
use crate::command::lcs::LcsOptions;
use crate::command::operation::{Operation, Transfer, When};
use crate::command::range::{RangeBound, RangeQuery};
use crate::command::said::Said;
use crate::expiry::Deadline;

/// A command ready to be executed.
#[derive(Clone, Copy, Debug)]
pub enum Command<'a> {
    /// `AUTH`.
    Auth(Login<'a>),
    /// `BGSAVE`.
    BackgroundSave,
    /// `BITCOUNT` and `BITPOS`.
    Bits(&'a [u8], BitQuery),
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
    /// `DEBUG ...`.
    Debug(Debug<'a>),
    /// `DUMP`.
    Dump(&'a [u8]),
    /// `ECHO`.
    Echo(&'a [u8]),
    /// `BITFIELD_RO`, with all its arguments, which have been checked.
    Fields(Args<'a>),
    /// `HELLO`.
    Hello(Hello<'a>),
    /// `INFO` with sections.
    Info(Args<'a>),
    /// `KEYS` with a pattern.
    Keys(&'a [u8]),
    /// `LASTSAVE`.
    LastSave,
    /// `LCS` of the values of two keys.
    Lcs(&'a [u8], &'a [u8], LcsOptions),
    /// `MEMORY STATS`.
    MemoryStats,
    /// A read of one key.
    One(&'a [u8], Ask),
    /// `MGET`.
    MGet(Args<'a>),
    /// `EXISTS`.
    Exists(Args<'a>),
    /// `MR.RANGE`.
    Range(RangeQuery<'a>),
    /// `MR.INDEX`.
    Index(IndexQuery<'a>),
    /// `MR.STRETCH`.
    Stretch(StretchQuery),
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
    /// A command whose reply is known.
    Say(Said),
    /// `SCAN`.
    Scan(Scan<'a>),
    /// `SELECT 0`.
    Select,
    /// `SHUTDOWN`.
    ShutDown,
    /// `SLOWLOG ...`.
    SlowLog(SlowLogCommand),
    /// `SUBSCRIBE`, with channels.
    Subscribe(Args<'a>),
    /// `TIME`.
    Time,
    /// `MULTI` and its kin.
    Transaction(Transaction<'a>),
    /// `UNSUBSCRIBE`, with channels.
    Unsubscribe(Args<'a>),
    /// A command that writes.
    Write(WriteCommand<'a>),
}

/// A command that writes.
#[derive(Clone, Copy, Debug)]
pub enum WriteCommand<'a> {
    /// `SET` without conditions: a key and its value.
    Put(&'a [u8], &'a [u8]),
    /// `SET EX` and its like without conditions: a key, its value, and when it ends.
    PutUntil(&'a [u8], &'a [u8], When),
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
    /// `MR.DELRANGE`: the lower and the upper end.
    DeleteRange(RangeBound<'a>, RangeBound<'a>),
    /// `RENAME`, `RENAMENX`, `COPY`: from the first key to the second.
    Transfer(Transfer, &'a [u8], &'a [u8]),
    /// `BITOP`: the key of the result, and those of the sources.
    Combine(BitOperation, &'a [u8], Args<'a>),
    /// `BITFIELD`, with all its arguments, which have been checked.
    Fields(Args<'a>),
    /// `RESTORE`: the key, the payload, whether it replaces another value, and why it is refused if
    /// it does not meet one.
    Restore {
        key: &'a [u8],
        payload: &'a [u8],
        over: bool,
        refused: Option<&'static str>,
        when: When,
    },
    /// A command that depends on the old value: the operation, the key, and the operand.
    Modify(Operation, &'a [u8], &'a [u8]),
    /// The same for a key that ends.
    ModifyUntil(Operation, &'a [u8], &'a [u8], When),
}

/// The commands of transactions. They are never queued.
#[derive(Clone, Copy, Debug)]
pub enum Transaction<'a> {
    Discard,
    Exec,
    Multi,
    Unwatch,
    /// With the keys to watch.
    Watch(Args<'a>),
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
    /// It goes to the shard like a write, and changes nothing.
    Order,
}

impl Command<'_> {
    /// How it accesses keys.
    pub fn access(&self) -> Access {
        match self {
            Self::Write(_) | Self::Save | Self::BackgroundSave => Access::Write,
            Self::Transaction(Transaction::Unwatch | Transaction::Watch(_)) => Access::Order,
            Self::One(..)
            | Self::Bits(..)
            | Self::Dump(_)
            | Self::Lcs(..)
            | Self::Fields(_)
            | Self::MGet(_)
            | Self::Exists(_)
            | Self::Range(_)
            | Self::Index(_)
            | Self::Stretch(_)
            | Self::Keys(_)
            | Self::Scan(_)
            | Self::RandomKey
            | Self::DbSize
            | Self::LastSave
            | Self::Info(_) => Access::Read,
            Self::Debug(Debug::Object(_)) => Access::Read,
            Self::Auth(..)
            | Self::Debug(_)
            | Self::Client(..)
            | Self::Describe(..)
            | Self::ConfigGet(..)
            | Self::ConfigHelp
            | Self::ConfigResetStat
            | Self::ConfigRewrite
            | Self::ConfigSet(..)
            | Self::Echo(..)
            | Self::Hello(..)
            | Self::MemoryStats
            | Self::Ping(..)
            | Self::Quit
            | Self::Reset
            | Self::Say(_)
            | Self::Select
            | Self::ShutDown
            | Self::SlowLog(_)
            | Self::Subscribe(_)
            | Self::Time
            | Self::Unsubscribe(_)
            | Self::Transaction(..) => Access::None,
        }
    }

    /// The key whose value, or old value, is in the reply.
    pub(crate) fn gives_old_of(&self) -> Option<&[u8]> {
        match self {
            Self::Dump(key) | Self::Write(WriteCommand::GetDelete(key)) => Some(key),
            Self::Write(
                WriteCommand::Modify(kind, key, _) | WriteCommand::ModifyUntil(kind, key, ..),
            ) if kind.gives_old() => Some(key),
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
            Self::Stretch(query) => query.bytes,
            Self::Index(query) => {
                // Once while they are collected, and once in the reply.
                2 * query.count * IndexQuery::HASH_BYTES + query.after.map_or(0, <[u8]>::len)
            }
            // Its keys, while they are looked up.
            Self::MGet(keys) | Self::Exists(keys) => {
                keys.iter().map(<[u8]>::len).sum::<usize>() + keys.len() * KEY_BYTES
            }
            Self::Fields(args) | Self::Write(WriteCommand::Fields(args)) => {
                args.len() * FIELD_BYTES
            }
            Self::Subscribe(channels) | Self::Unsubscribe(channels) => {
                channels.iter().map(<[u8]>::len).sum::<usize>() + channels.len() * KEY_BYTES
            }
            Self::Client(ClientCommand::List(ListFilter::Ids(ids))) => {
                LIST_BYTES + ids.len() * CLIENT_LINE_BYTES
            }
            Self::Client(ClientCommand::List(_)) => LIST_BYTES,
            Self::Describe(describe) => LIST_BYTES + describe.names() * DOCUMENT_BYTES,
            _ => 0,
        }
    }
}

/// A `SCAN`'s reply ends with the key that makes it this long.
pub(crate) const SCAN_BYTES_MAX: usize = 128 * 1024;

/// Bytes of a line of `CLIENT LIST`, about.
const CLIENT_LINE_BYTES: usize = 512;

/// Bytes of what is said about a command, most for containers.
const DOCUMENT_BYTES: usize = 16 * 1024;

/// Memory of a key that is looked up, besides its bytes.
const KEY_BYTES: usize = 64;

/// Bytes of a reply for each argument of `BITFIELD`: an operation has at least three, and its
/// answer is an integer.
const FIELD_BYTES: usize = 8;

/// The approximate length of lists of clients and of commands.
const LIST_BYTES: usize = 64 * 1024;

/// What a command that reads one key asks about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// `GET`: the value.
    Value,
    /// `MR.GET`: where it is in the blob files, and the value.
    Placed,
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
    /// `GETBIT`: the bit at an offset.
    Bit(u64),
    /// `OBJECT ENCODING`: how Redis would keep the value.
    Encoding,
    /// `OBJECT FREQ`: refused, because it is not counted.
    Frequency,
    /// `OBJECT IDLETIME`.
    IdleTime,
    /// `MEMORY USAGE`, with the length of the key.
    Memory(usize),
    /// `OBJECT REFCOUNT`.
    References,
    /// `TYPE`.
    Type,
    /// `TTL` and its kin.
    TimeToLive(TimeToLive),
}

/// `MR.STRETCH`: the records that begin in a part of a blob file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StretchQuery {
    /// The number of the file.
    pub file: u64,
    /// The first byte.
    pub from: u64,
    /// The number of bytes, at most [`StretchQuery::BYTES_MAX`].
    pub bytes: usize,
    /// The reply tells the file that was written after this one.
    pub tells_next: bool,
}

impl StretchQuery {
    /// Bytes of a file that one command can ask for.
    pub const BYTES_MAX: usize = 256 << 10;
    /// The longest frame of a reply; a record that does not fit is left out.
    pub const FRAME_BYTES_MAX: usize = 64 << 10;
}

/// `MR.INDEX`: the hashes of a page of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexQuery<'a> {
    /// The seed of the hash.
    pub seed: u64,
    /// The key after which the page begins; without it at the first key.
    pub after: Option<&'a [u8]>,
    /// The number of keys, at most [`IndexQuery::KEYS_MAX`].
    pub count: usize,
}

impl IndexQuery<'_> {
    /// Keys of one page.
    pub const KEYS_MAX: usize = 32 << 10;
    /// Bytes of a hash.
    pub const HASH_BYTES: usize = size_of::<u64>();
}

/// How a command asks for the end of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimeToLive {
    /// `TTL`: seconds left.
    Seconds,
    /// `PTTL`: milliseconds left.
    Milliseconds,
    /// `EXPIRETIME`: in Unix seconds.
    EndSeconds,
    /// `PEXPIRETIME`: in Unix milliseconds.
    EndMilliseconds,
}

impl TimeToLive {
    /// The reply for a key with a deadline, or for a missing key.
    pub(crate) fn answer(self, found: Option<Deadline>, now_ms: u64) -> i64 {
        let Some(deadline) = found else { return -2 };
        let Some(end_ms) = deadline.unix_ms() else { return -1 };
        let ms = match self {
            Self::Seconds | Self::Milliseconds => end_ms.saturating_sub(now_ms),
            Self::EndSeconds | Self::EndMilliseconds => end_ms,
        };
        let rounded = match self {
            Self::Seconds | Self::EndSeconds => ms.saturating_add(500) / 1000,
            Self::Milliseconds | Self::EndMilliseconds => ms,
        };
        i64::try_from(rounded).unwrap_or(i64::MAX)
    }
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

/// The channel on which connections that speak RESP2 hear invalidations.
pub(crate) const CHANNEL: &[u8] = b"__redis__:invalidate";

/// `CLIENT`'s subcommands.
#[derive(Clone, Copy, Debug)]
pub enum ClientCommand<'a> {
    /// `CACHING`, with `YES` or `NO`; anything else is refused if the connection is tracked.
    Caching(Option<bool>),
    GetName,
    GetRedir,
    Help,
    Id,
    Info,
    Kill(ClientFilter<'a>),
    List(ListFilter<'a>),
    NoEvict,
    Pause {
        timeout_ms: i64,
        all: bool,
    },
    Reply(ReplyMode),
    SetLibrary(Library, &'a [u8]),
    SetName(&'a [u8]),
    Tracking(TrackingRequest<'a>),
    TrackingInfo,
    Unblock,
    Unpause,
}

/// `CLIENT TRACKING`'s options.
#[derive(Clone, Copy, Debug)]
pub struct TrackingRequest<'a> {
    /// `ON`.
    pub on: bool,
    /// `REDIRECT`: the connection that is told.
    pub redirect: Option<i64>,
    /// `BCAST`.
    pub broadcast: bool,
    /// `OPTIN`.
    pub opt_in: bool,
    /// `OPTOUT`.
    pub opt_out: bool,
    /// `NOLOOP`.
    pub no_loop: bool,
    /// The options, which have been checked.
    pub(crate) options: Args<'a>,
}

impl<'a> TrackingRequest<'a> {
    /// The words after `PREFIX`.
    pub fn prefixes(&self) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        let (options, mut at) = (self.options, 0);
        std::iter::from_fn(move || {
            while at < options.len() {
                let is_prefix = options.is(at, "prefix");
                at += if is_prefix || options.is(at, "redirect") { 2 } else { 1 };
                if is_prefix {
                    return Some(options.get(at - 1));
                }
            }
            None
        })
    }
}

/// What `CLIENT SETINFO` sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Library {
    Name,
    Version,
}

/// `DEBUG`'s subcommands.
#[derive(Clone, Copy, Debug)]
pub enum Debug<'a> {
    /// Describe the value of a key.
    Object(&'a [u8]),
    /// Answer a value of a type.
    Protocol(&'a [u8]),
    /// Make everything survive a power cut: what there is to reload here.
    Reload,
    /// Answer later; other connections are served meanwhile.
    Sleep { ns: u64 },
    /// Accepted without effect: there is nothing that it would change.
    Accepted,
}

/// `SLOWLOG`'s subcommands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlowLogCommand {
    /// The last commands, at most so many.
    Get(usize),
    Len,
    Reset,
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
    /// Those of a type.
    Type(ClientType),
    /// Those with these numbers, which have been checked.
    Ids(Args<'a>),
}

/// The types of connections that Redis distinguishes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientType {
    Normal,
    /// Those that subscribe to a channel.
    PubSub,
    /// Masters and replicas, of which there are none.
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

impl Describe<'_> {
    /// How many commands are named.
    fn names(&self) -> usize {
        match self {
            Self::Docs(names) | Self::Info(names) => names.len(),
            _ => 0,
        }
    }
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

    #[test]
    fn the_prefixes_of_a_request_are_the_words_after_prefix() {
        let line = "PREFIX a bcast prefix prefix REDIRECT prefix NOLOOP Prefix ''";
        with(line, |options| {
            let request = TrackingRequest {
                on: true,
                redirect: None,
                broadcast: true,
                opt_in: false,
                opt_out: false,
                no_loop: true,
                options,
            };
            let expected: [&[u8]; 3] = [b"a", b"prefix", b""];
            assert_eq!(request.prefixes().collect::<Vec<_>>(), expected);
        });
    }
}
