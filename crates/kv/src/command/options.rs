//! The options of single commands, parsed.

use resp::{Protocol, parse_i64};

use crate::command::args::Args;
use crate::command::commands::{
    Ask, CHANNEL, ClientCommand, ClientFilter, ClientType, Command, Debug, Hello, IndexQuery,
    Library, ListFilter, Login, NameFilter, ReplyMode, Scan, SlowLogCommand, StretchQuery,
    TrackingRequest, WriteCommand,
};
use crate::command::help;
use crate::command::operation::{Condition, ExpireIf, Operation, PutReply, Transfer, When};
use crate::command::range::{Extent, RangeBound, RangeQuery};
use crate::command::refusal::Refusal;
use crate::command::said::Said;

/// How many keys `SCAN` examines by default.
pub(super) const SCAN_COUNT: u64 = 10;

/// The longest time from now that a key may have, in milliseconds: a deadline has 63 bits. The time
/// of the change, which is not known here, is less than the difference.
const FROM_NOW_MS_MAX: i64 = i64::MAX - (1 << 42);

/// When a key ends by an option of `SET` and its like.
fn when<'a>(name: &str, time: &'a [u8], invalid: &'static str) -> Result<When, Refusal<'a>> {
    let time = integer(time)?;
    let of_seconds = matches!(name, "ex" | "exat");
    let ms = if of_seconds { time.checked_mul(1000) } else { Some(time) };
    let is_absolute = matches!(name, "exat" | "pxat");
    match ms {
        Some(ms) if ms > 0 && is_absolute => Ok(When::At(ms)),
        Some(ms) if ms > 0 && ms <= FROM_NOW_MS_MAX => Ok(When::In(ms)),
        _ => Err(Refusal::Text(invalid)),
    }
}

/// `SETEX` and `PSETEX`.
pub(super) fn set_until<'a>(
    args: Args<'a>,
    name: &str,
    invalid: &'static str,
) -> Result<WriteCommand<'a>, Refusal<'a>> {
    let when = when(name, args.get(2), invalid)?;
    Ok(WriteCommand::PutUntil(args.get(1), args.get(3), when))
}

/// `GETEX` with its options. A time that is refused is so only if the key is there.
pub(super) fn get_until(args: Args<'_>) -> Result<Command<'_>, Refusal<'_>> {
    const INVALID: &str = "ERR invalid expire time in 'getex' command";
    let key = args.get(1);
    if args.len() == 2 {
        return Ok(Command::One(key, Ask::Value));
    }
    // An option may be repeated, and the last one counts; two different ones exclude each other.
    let (mut option, mut time, mut at) = (None, None, 2);
    while at < args.len() {
        let all = ["persist", "ex", "px", "exat", "pxat"];
        let name = all.into_iter().find(|name| args.is(at, name)).ok_or(Refusal::SYNTAX)?;
        if option.is_some_and(|other| other != name) {
            return Err(Refusal::SYNTAX);
        }
        option = Some(name);
        at += 1;
        if name != "persist" {
            if at == args.len() {
                return Err(Refusal::SYNTAX);
            }
            time = Some(args.get(at));
            at += 1;
        }
    }
    let found = match (option, time) {
        (Some(name), Some(time)) => match when(name, time, INVALID) {
            Ok(when) => when,
            Err(Refusal::Text(text)) => When::Refused(text),
            Err(_) => When::Refused(NO_INTEGER),
        },
        _ => When::Never,
    };
    Ok(Command::Write(WriteCommand::ModifyUntil(Operation::GetExpire, key, b"", found)))
}

const NO_INTEGER: &str = "ERR value is not an integer or out of range";

/// `EXPIRE` and its kin with their conditions. `unit_ms` is the unit of their time.
pub(super) fn expire<'a>(
    args: Args<'a>,
    unit_ms: i64,
    is_absolute: bool,
    invalid: &'static str,
) -> Result<WriteCommand<'a>, Refusal<'a>> {
    let mut only = ExpireIf::default();
    for at in 3..args.len() {
        match () {
            () if args.is(at, "nx") => only.none = true,
            () if args.is(at, "xx") => only.some = true,
            () if args.is(at, "gt") => only.later = true,
            () if args.is(at, "lt") => only.earlier = true,
            () => {
                return Err(Refusal::Quoting {
                    before: "ERR Unsupported option ",
                    word: args.get(at),
                    after: "",
                });
            }
        }
    }
    if only.none && (only.some || only.later || only.earlier) {
        return Err(Refusal::Text(
            "ERR NX and XX, GT or LT options at the same time are not compatible",
        ));
    }
    if only.later && only.earlier {
        return Err(Refusal::Text("ERR GT and LT options at the same time are not compatible"));
    }
    let ms = integer(args.get(2))?.checked_mul(unit_ms);
    let when = match ms {
        Some(ms) if is_absolute => When::At(ms),
        Some(ms) if ms <= FROM_NOW_MS_MAX => When::In(ms),
        _ => return Err(Refusal::Text(invalid)),
    };
    Ok(WriteCommand::ModifyUntil(Operation::Expire(only), args.get(1), b"", when))
}

/// `SET` with its options.
pub(super) fn set(args: Args<'_>) -> Result<WriteCommand<'_>, Refusal<'_>> {
    let (mut only, mut old, mut keeps, mut expiry) = (None, false, false, None);
    let mut at = 3;
    while at < args.len() {
        let word = args.get(at);
        let is = |name: &str| word.eq_ignore_ascii_case(name.as_bytes());
        // The same option may be repeated, but not combined with another one of its kind.
        let same_expiry = |name| expiry.is_none_or(|(known, _)| known == name);
        if is("nx") && only != Some(Condition::Existing) {
            only = Some(Condition::Missing);
        } else if is("xx") && only != Some(Condition::Missing) {
            only = Some(Condition::Existing);
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
    let when = match expiry {
        Some((name, time)) => when(name, time, "ERR invalid expire time in 'set' command")?,
        None if keeps => When::Keep,
        None => When::Never,
    };
    let (key, value) = (args.get(1), args.get(2));
    let reply = if old { PutReply::Old } else { PutReply::Ok };
    Ok(match (only, reply) {
        (None, PutReply::Ok) if when == When::Never => WriteCommand::Put(key, value),
        (None, PutReply::Ok) if when != When::Keep => WriteCommand::PutUntil(key, value, when),
        _ => WriteCommand::ModifyUntil(Operation::PutIf { only, reply }, key, value, when),
    })
}

pub(super) fn integer(word: &[u8]) -> Result<i64, Refusal<'_>> {
    parse_i64(word).ok_or(Refusal::NOT_AN_INTEGER)
}

pub(super) fn stretch(args: Args<'_>) -> Result<StretchQuery, Refusal<'_>> {
    let number = |at: usize| match u64::try_from(integer(args.get(at))?) {
        Ok(number) => Ok(number),
        Err(_) => Err(Refusal::Text("ERR file, from and bytes must not be negative")),
    };
    let bytes = usize::try_from(number(3)?).unwrap_or(usize::MAX).min(StretchQuery::BYTES_MAX);
    let tells_next = match args.len() {
        4 => false,
        5 if args.get(4).eq_ignore_ascii_case(b"NEXT") => true,
        _ => return Err(Refusal::SYNTAX),
    };
    Ok(StretchQuery { file: number(1)?, from: number(2)?, bytes, tells_next })
}

pub(super) fn index(args: Args<'_>) -> Result<IndexQuery<'_>, Refusal<'_>> {
    // All 64 bits, as a signed number.
    let seed = integer(args.get(1))?.cast_unsigned();
    let mut query = IndexQuery { seed, after: None, count: IndexQuery::KEYS_MAX };
    let mut at = 2;
    while at < args.len() {
        if args.is(at, "after") && at + 1 < args.len() {
            query.after = Some(args.get(at + 1));
        } else if args.is(at, "count") && at + 1 < args.len() {
            query.count = match usize::try_from(integer(args.get(at + 1))?) {
                Ok(count) if count > 0 => count.min(IndexQuery::KEYS_MAX),
                _ => return Err(Refusal::Text("ERR count must be positive")),
            };
        } else {
            return Err(Refusal::SYNTAX);
        }
        at += 2;
    }
    Ok(query)
}

pub(super) fn auth(args: Args<'_>) -> Result<Command<'_>, Refusal<'_>> {
    match args.len() {
        2 => Ok(Command::Auth(Login { user: None, password: args.get(1) })),
        3 => Ok(Command::Auth(Login { user: Some(args.get(1)), password: args.get(2) })),
        _ => Err(Refusal::SYNTAX),
    }
}

pub(super) fn shutdown(args: Args<'_>) -> Result<Command<'_>, Refusal<'_>> {
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

pub(super) fn hello(args: Args<'_>) -> Result<Command<'_>, Refusal<'_>> {
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

/// `COPY` with its options.
pub(super) fn copy(args: Args<'_>) -> Result<WriteCommand<'_>, Refusal<'_>> {
    let (from, to, mut how) = (args.get(1), args.get(2), Transfer::Copy);
    let mut at = 3;
    while at < args.len() {
        if args.is(at, "replace") {
            how = Transfer::CopyOver;
        } else if args.is(at, "db") && at + 1 < args.len() {
            at += 1;
            database(args.get(at))?;
        } else {
            return Err(Refusal::SYNTAX);
        }
        at += 1;
    }
    match from == to {
        true => Err(Refusal::SAME_OBJECT),
        false => Ok(WriteCommand::Transfer(how, from, to)),
    }
}

/// `RESTORE` with its options.
pub(super) fn restore(args: Args<'_>) -> Result<WriteCommand<'_>, Refusal<'_>> {
    let (mut over, mut idle, mut frequency, mut absolute) = (false, false, false, false);
    let mut at = 4;
    while at < args.len() {
        let has_value = at + 1 < args.len();
        if args.is(at, "replace") {
            over = true;
        } else if args.is(at, "idletime") && has_value && !frequency {
            idle = true;
            at += 1;
            if integer(args.get(at))? < 0 {
                return Err(Refusal::Text("ERR Invalid IDLETIME value, must be >= 0"));
            }
        } else if args.is(at, "freq") && has_value && !idle {
            frequency = true;
            at += 1;
            if !(0..=255).contains(&integer(args.get(at))?) {
                return Err(Refusal::Text("ERR Invalid FREQ value, must be >= 0 and <= 255"));
            }
        } else if args.is(at, "absttl") {
            absolute = true;
        } else {
            return Err(Refusal::SYNTAX);
        }
        at += 1;
    }
    let (refused, when) = match parse_i64(args.get(2)) {
        Some(0) => (None, When::Never),
        Some(..0) => (Some("ERR Invalid TTL value, must be >= 0"), When::Never),
        Some(ms) if absolute => (None, When::At(ms)),
        Some(ms) => (None, When::In(ms)),
        None => (Some(NO_INTEGER), When::Never),
    };
    Ok(WriteCommand::Restore { key: args.get(1), payload: args.get(3), over, refused, when })
}

/// `MEMORY USAGE key [SAMPLES count]`.
pub(super) fn memory_usage(args: Args<'_>) -> Result<Command<'_>, Refusal<'_>> {
    let mut at = 3;
    while at < args.len() {
        if !args.is(at, "samples") || at + 1 == args.len() || integer(args.get(at + 1))? < 0 {
            return Err(Refusal::SYNTAX);
        }
        at += 2;
    }
    let key = args.get(2);
    Ok(Command::One(key, Ask::Memory(key.len())))
}

pub(super) fn client_set_info(args: Args<'_>) -> Result<ClientCommand<'_>, Refusal<'_>> {
    let (what, error) = match () {
        () if args.is(2, "lib-name") => {
            (Library::Name, "ERR lib-name cannot contain spaces, newlines or special characters.")
        }
        () if args.is(2, "lib-ver") => {
            (Library::Version, "ERR lib-ver cannot contain spaces, newlines or special characters.")
        }
        () => {
            return Err(Refusal::Quoting {
                before: "ERR Unrecognized option '",
                word: args.get(2),
                after: "'",
            });
        }
    };
    let word = args.get(3);
    match word.len() <= LIBRARY_BYTES_MAX && client_name(word).is_ok() {
        true => Ok(ClientCommand::SetLibrary(what, word)),
        false => Err(Refusal::Text(error)),
    }
}

/// The longest name or version of a client's library.
const LIBRARY_BYTES_MAX: usize = 1024;

pub(super) fn client_no_touch(args: Args<'_>) -> Result<Command<'_>, Refusal<'_>> {
    match args.is(2, "on") || args.is(2, "off") {
        true => Ok(Command::Say(Said::Ok)),
        false => Err(Refusal::SYNTAX),
    }
}

pub(super) fn slow_log_get(args: Args<'_>) -> Result<Command<'_>, Refusal<'_>> {
    if args.len() > 3 {
        return Err(Refusal::WrongSubcommand { container: "SLOWLOG", word: args.get(1) });
    }
    let count = match args.len() {
        2 => Some(10),
        _ => parse_i64(args.get(2)),
    };
    let count = match count {
        Some(-1) => Some(usize::MAX),
        count => count.and_then(|count| usize::try_from(count).ok()),
    };
    let count = count.ok_or(Refusal::Text("ERR count should be greater than or equal to -1"))?;
    Ok(Command::SlowLog(SlowLogCommand::Get(count)))
}

/// The subcommands of `DEBUG` that clients' tests use and that harm nobody.
pub(super) fn debug(args: Args<'_>) -> Result<Command<'_>, Refusal<'_>> {
    let is = |name: &str, count: usize| args.is(1, name) && args.len() == count;
    let debug = match () {
        () if is("object", 3) => Debug::Object(args.get(2)),
        () if is("protocol", 3) => Debug::Protocol(args.get(2)),
        () if args.is(1, "reload") || is("loadaof", 2) => Debug::Reload,
        () if is("sleep", 3) => Debug::Sleep { ns: seconds(args.get(2)) },
        () if is("set-active-expire", 3)
            || is("quicklist-packed-threshold", 3)
            || is("pause-cron", 3)
            || is("log", 3)
            || is("change-repl-id", 2)
            || is("config-rewrite-force-all", 2)
            || args.is(1, "replybuffer") =>
        {
            Debug::Accepted
        }
        () if is("help", 2) => return Ok(Command::Say(Said::Help(help::DEBUG))),
        () => return Err(Refusal::WrongSubcommand { container: "DEBUG", word: args.get(1) }),
    };
    Ok(Command::Debug(debug))
}

/// A time in seconds, which may have decimals, as nanoseconds; at most an hour.
fn seconds(word: &[u8]) -> u64 {
    let text = str::from_utf8(word).unwrap_or_default();
    (text.parse::<f64>().unwrap_or(0.0).clamp(0.0, 3600.0) * 1e9) as u64
}

/// `MOVE`: a key is moved to where it is, or there is no such database.
pub(super) fn move_key(args: Args<'_>) -> Result<WriteCommand<'_>, Refusal<'_>> {
    database(args.get(2))?;
    Err(Refusal::SAME_OBJECT)
}

/// `SWAPDB`: the only database is swapped with itself.
pub(super) fn swap_databases(args: Args<'_>) -> Result<Command<'_>, Refusal<'_>> {
    let index = |at, text| {
        let index = parse_i64(args.get(at)).and_then(|index| i32::try_from(index).ok());
        index.ok_or(Refusal::Text(text))
    };
    let first = index(1, "ERR invalid first DB index")?;
    let second = index(2, "ERR invalid second DB index")?;
    match (first, second) {
        (0, 0) => Ok(Command::Say(Said::Ok)),
        _ => Err(Refusal::NO_DATABASE),
    }
}

pub(super) fn select(args: Args<'_>) -> Result<Command<'_>, Refusal<'_>> {
    database(args.get(1))?;
    Ok(Command::Select)
}

/// Checks the index of a database.
fn database(word: &[u8]) -> Result<(), Refusal<'_>> {
    let index = integer(word)?;
    if i32::try_from(index).is_err() {
        return Err(Refusal::Text(
            "ERR value is out of range, value must between -2147483648 and 2147483647",
        ));
    }
    if index != 0 {
        return Err(Refusal::Text("ERR DB index is out of range"));
    }
    Ok(())
}

/// Longest name of a connection in bytes: it is held, and repeated in every list.
const CLIENT_NAME_BYTES_MAX: usize = 1024;

/// Checks a connection's name: one word in a list.
pub(super) fn client_name(name: &[u8]) -> Result<&[u8], Refusal<'_>> {
    if name.len() > CLIENT_NAME_BYTES_MAX {
        return Err(Refusal::Text("ERR Client names cannot be longer than 1024 bytes."));
    }
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
    } else if is("pubsub") {
        Ok(ClientType::PubSub)
    } else if is("master") || is("replica") || is("slave") {
        Ok(ClientType::Other)
    } else {
        Err(Refusal::Quoting { before: "ERR Unknown client type '", word, after: "'" })
    }
}

pub(super) fn client_kill(args: Args<'_>) -> Result<ClientFilter<'_>, Refusal<'_>> {
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

pub(super) fn client_list(args: Args<'_>) -> Result<ListFilter<'_>, Refusal<'_>> {
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
    Refusal::WrongSubcommand { container: "CLIENT", word: args.get(1) }
}

pub(super) fn client_no_evict(args: Args<'_>) -> Result<ClientCommand<'_>, Refusal<'_>> {
    match args.is(2, "on") || args.is(2, "off") {
        true => Ok(ClientCommand::NoEvict),
        false => Err(Refusal::SYNTAX),
    }
}

pub(super) fn client_reply(args: Args<'_>) -> Result<ClientCommand<'_>, Refusal<'_>> {
    let modes = [("on", ReplyMode::On), ("off", ReplyMode::Off), ("skip", ReplyMode::Skip)];
    let found = modes.into_iter().find(|(word, _)| args.is(2, word));
    found.map(|(_, mode)| ClientCommand::Reply(mode)).ok_or(Refusal::SYNTAX)
}

pub(super) fn client_caching(args: Args<'_>) -> ClientCommand<'_> {
    ClientCommand::Caching(match (args.is(2, "yes"), args.is(2, "no")) {
        (true, _) => Some(true),
        (_, true) => Some(false),
        _ => None,
    })
}

pub(super) fn client_tracking(args: Args<'_>) -> Result<ClientCommand<'_>, Refusal<'_>> {
    let mut request = TrackingRequest {
        on: args.is(2, "on"),
        redirect: None,
        broadcast: false,
        opt_in: false,
        opt_out: false,
        no_loop: false,
        options: args.from(3),
    };
    let mut at = 3;
    while at < args.len() {
        let has_word = at + 1 < args.len();
        match () {
            () if args.is(at, "redirect") && has_word => {
                if request.redirect.is_some() {
                    return Err(Refusal::Text(TWO_TARGETS));
                }
                at += 1;
                request.redirect = Some(integer(args.get(at))?);
            }
            () if args.is(at, "prefix") && has_word => at += 1,
            () if args.is(at, "bcast") => request.broadcast = true,
            () if args.is(at, "optin") => request.opt_in = true,
            () if args.is(at, "optout") => request.opt_out = true,
            () if args.is(at, "noloop") => request.no_loop = true,
            () => return Err(Refusal::SYNTAX),
        }
        at += 1;
    }
    match request.on || args.is(2, "off") {
        true => Ok(ClientCommand::Tracking(request)),
        false => Err(Refusal::SYNTAX),
    }
}

const TWO_TARGETS: &str = "ERR A client can only redirect to a single other client";

/// `SUBSCRIBE`: nothing is published but invalidations.
pub(super) fn subscribe(args: Args<'_>) -> Result<Command<'_>, Refusal<'_>> {
    let channels = args.from(1);
    match channels.iter().all(|channel| channel == CHANNEL) {
        true => Ok(Command::Subscribe(channels)),
        false => Err(Refusal::Text(OTHER_CHANNEL)),
    }
}

const OTHER_CHANNEL: &str =
    "ERR there is one channel, __redis__:invalidate: nothing else is published here";

pub(super) fn client_pause(args: Args<'_>) -> Result<ClientCommand<'_>, Refusal<'_>> {
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

pub(super) fn client_unblock(args: Args<'_>) -> Result<ClientCommand<'_>, Refusal<'_>> {
    if args.len() > 4 {
        return Err(too_many(args));
    }
    if args.len() == 4 && !args.is(3, "timeout") && !args.is(3, "error") {
        return Err(Refusal::Text("ERR CLIENT UNBLOCK reason should be TIMEOUT or ERROR"));
    }
    integer(args.get(2))?;
    Ok(ClientCommand::Unblock)
}

pub(super) fn command_list(args: Args<'_>) -> Result<NameFilter<'_>, Refusal<'_>> {
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

pub(super) fn scan(args: Args<'_>) -> Result<Scan<'_>, Refusal<'_>> {
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
pub(super) fn scan_cursor(word: &[u8]) -> Option<u64> {
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

/// The ends of a range.
pub(super) fn range_ends(args: Args<'_>) -> Result<(RangeBound<'_>, RangeBound<'_>), Refusal<'_>> {
    const BOUND: Refusal<'_> = Refusal::Text("ERR min or max not valid string range item");
    let start = RangeBound::parse_start(args.get(1)).ok_or(BOUND)?;
    Ok((start, RangeBound::parse_end(args.get(2)).ok_or(BOUND)?))
}

pub(super) fn range(args: Args<'_>) -> Result<RangeQuery<'_>, Refusal<'_>> {
    let (start, end) = range_ends(args)?;
    let extent = Extent { values: true, ..Extent::KEYS };
    let mut query = RangeQuery { start, end, reverse: false, extent };
    let mut at = 3;
    while at < args.len() {
        if args.is(at, "reverse") {
            query.reverse = true;
            at += 1;
        } else if args.is(at, "novalues") {
            query.extent.values = false;
            at += 1;
        } else if at + 1 < args.len() && (args.is(at, "limit") || args.is(at, "bytes")) {
            let most = integer(args.get(at + 1))?;
            let most = u64::try_from(most)
                .map_err(|_| Refusal::Text("ERR value is out of range, must be positive"))?;
            match args.is(at, "limit") {
                true => query.extent.keys = most,
                false => query.extent.bytes = most,
            }
            at += 2;
        } else {
            return Err(Refusal::SYNTAX);
        }
    }
    Ok(query)
}
