//! The commands: what is sent, and what the replies mean. No I/O.

use std::ops::Bound;
use std::time::Duration;

use resp::Reply;

use crate::bounds::word;
use crate::cache::{CHUNK_BYTES, Cache, Fetch, Page, Place, Ticket};
use crate::error::{Error, ErrorKind, Result};
use crate::ttl::{Ttl, milliseconds};

/// Words of one command. Below the limit of any server, and few enough to be read at once.
pub(crate) const ARGS_MAX: usize = 200_001;
/// Keys of one `MGET`.
pub(crate) const KEYS_MAX: usize = 10_000;
/// Entries of the first page of a range, whose values may be large, and of the largest page.
const PAGE_FIRST: usize = 16;
const PAGE_MAX: usize = 10_000;
/// The node walks a longer page twice.
const PAGE_BYTES: usize = 100 << 10;

/// Whether a command may be sent again when its answer was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    /// It changes nothing.
    Read,
    /// It must not be made twice.
    Write,
}

/// What the end of a command, however it ends, does to the cache.
#[derive(Clone, Debug)]
pub(crate) enum Touches {
    Nothing,
    /// These keys were written, perhaps.
    Keys(Vec<Vec<u8>>),
    /// Any key was written, perhaps.
    Everything,
    /// The reply tells the values of these keys, in order.
    Fill(Vec<(Ticket, Vec<u8>)>),
    /// The reply tells the value of this key, and where it is.
    Place(Ticket, Vec<u8>),
    /// The reply is a chunk of a stretch.
    Chunk(Fetch),
    /// The reply is a page of the index.
    Page(Page),
}

/// A request, as one piece: its replies come one after the other.
#[derive(Clone, Debug)]
pub(crate) struct Command {
    pub bytes: Vec<u8>,
    /// The number of replies.
    pub replies: usize,
    pub class: Class,
    pub touches: Touches,
}

impl Command {
    fn new(args: &[&[u8]], class: Class, touches: Touches) -> Command {
        let mut bytes = Vec::with_capacity(args.iter().map(|arg| arg.len() + 16).sum());
        resp::write_command(&mut bytes, args);
        Command { bytes, replies: 1, class, touches }
    }

    pub fn read(args: &[&[u8]]) -> Command {
        Command::new(args, Class::Read, Touches::Nothing)
    }

    pub fn get(key: &[u8]) -> Command {
        Command::read(&[b"GET", key])
    }

    /// Reads a key that the cache has missed, with its place if it is asked for.
    pub fn get_missed(with_place: bool, ticket: Ticket, key: &[u8]) -> Command {
        if with_place {
            let touches = Touches::Place(ticket, key.to_vec());
            return Command::new(&[b"MR.GET", key], Class::Read, touches);
        }
        Command::get(key).filling(vec![(ticket, key.to_vec())])
    }

    /// Asks for a chunk of a stretch.
    pub fn chunk(fetch: Fetch) -> Command {
        let [file, from, bytes] =
            [fetch.chunk.file, fetch.chunk.from, CHUNK_BYTES].map(|number| number.to_string());
        let args: [&[u8]; 5] =
            [b"MR.STRETCH", file.as_bytes(), from.as_bytes(), bytes.as_bytes(), b"NEXT"];
        Command::new(&args, Class::Read, Touches::Chunk(fetch))
    }

    /// Asks for a page of the index.
    pub fn page(page: Page) -> Command {
        let (seed, count) = (page.seed.to_string(), page.keys_max.to_string());
        let mut args: Vec<&[u8]> = vec![b"MR.INDEX", seed.as_bytes(), b"COUNT", count.as_bytes()];
        if let Some(after) = &page.after {
            args.extend([&b"AFTER"[..], after]);
        }
        Command::new(&args, Class::Read, Touches::Page(page.clone()))
    }

    pub fn multi_get<'a>(keys: impl IntoIterator<Item = &'a [u8]>) -> Command {
        let mut args: Vec<&[u8]> = vec![b"MGET"];
        args.extend(keys);
        Command::read(&args)
    }

    pub fn set(key: &[u8], value: &[u8], is_cached: bool) -> Command {
        Command::new(&[b"SET", key, value], Class::Write, touched(key, is_cached))
    }

    pub fn set_with_ttl(
        key: &[u8],
        value: &[u8],
        ttl: Duration,
        is_cached: bool,
    ) -> Result<Command> {
        let ms = milliseconds(ttl)?;
        let args: [&[u8]; 5] = [b"SET", key, value, b"PX", ms.as_bytes()];
        Ok(Command::new(&args, Class::Write, touched(key, is_cached)))
    }

    pub fn expire(key: &[u8], ttl: Duration, is_cached: bool) -> Result<Command> {
        let ms = milliseconds(ttl)?;
        let args: [&[u8]; 3] = [b"PEXPIRE", key, ms.as_bytes()];
        Ok(Command::new(&args, Class::Write, touched(key, is_cached)))
    }

    pub fn persist(key: &[u8], is_cached: bool) -> Command {
        Command::new(&[b"PERSIST", key], Class::Write, touched(key, is_cached))
    }

    pub fn ttl(key: &[u8]) -> Command {
        Command::read(&[b"PTTL", key])
    }

    pub fn delete(key: &[u8], is_cached: bool) -> Command {
        Command::new(&[b"DEL", key], Class::Write, touched(key, is_cached))
    }

    pub fn delete_range(start: &[u8], end: &[u8]) -> Command {
        let (start, end) = ([b"[", start].concat(), [b"(", end].concat());
        Command::new(&[b"MR.DELRANGE", &start, &end], Class::Write, Touches::Everything)
    }

    /// Watches a key and reads it, in this order: a write after the read is noticed.
    pub fn watch_and_get(key: &[u8]) -> Command {
        let mut command = Command::read(&[b"WATCH", key]);
        resp::write_command(&mut command.bytes, &[b"GET", key]);
        command.replies = 2;
        command
    }

    pub fn filling(mut self, keys: Vec<(Ticket, Vec<u8>)>) -> Command {
        self.touches = Touches::Fill(keys);
        self
    }
}

fn touched(key: &[u8], is_cached: bool) -> Touches {
    if is_cached { Touches::Keys(vec![key.to_vec()]) } else { Touches::Nothing }
}

/// Tells the cache that a command has ended: with these replies, or without if it failed. Those of
/// a fill must have come on the link.
pub(crate) fn settle(cache: Option<&Cache>, touches: &Touches, replies: Option<&[Reply]>) {
    let Some(cache) = cache else { return };
    match touches {
        Touches::Nothing => {}
        Touches::Keys(keys) => keys.iter().for_each(|key| cache.forget(key)),
        Touches::Everything => cache.clear(),
        Touches::Fill(keys) => match replies {
            Some([Reply::Array(values)]) if values.len() == keys.len() => {
                for ((ticket, key), value) in keys.iter().zip(values) {
                    fill(cache, *ticket, key, value);
                }
            }
            Some([value]) if keys.len() == 1 => fill(cache, keys[0].0, &keys[0].1, value),
            _ => {}
        },
        Touches::Place(ticket, key) => {
            let Some([reply]) = replies else { return cache.answered(None) };
            match reply {
                Reply::Array(words) => {
                    let Some(value) = words.last() else { return cache.answered(None) };
                    fill(cache, *ticket, key, value);
                    let bytes = value.as_bytes().map_or(0, <[u8]>::len);
                    cache.answered(Some((place_of(words), bytes)));
                }
                Reply::Null => {
                    fill(cache, *ticket, key, reply);
                    cache.answered(None);
                }
                _ => cache.answered(None),
            }
        }
        Touches::Chunk(fetch) => {
            // Without a reply the link has ended, and with it the stretch.
            if let Some([reply]) = replies {
                cache.fill_chunk(*fetch, reply);
            }
        }
        Touches::Page(page) => {
            // As for a chunk.
            if let Some([reply]) = replies {
                cache.fill_page(page, reply);
            }
        }
    }
}

/// Where a value is, by the reply to `MR.GET`.
fn place_of(words: &[Reply]) -> Option<Place> {
    match words {
        [Reply::Integer(file), Reply::Integer(offset), _] => {
            Some(Place { file: u64::try_from(*file).ok()?, offset: u64::try_from(*offset).ok()? })
        }
        _ => None,
    }
}

fn fill(cache: &Cache, ticket: Ticket, key: &[u8], reply: &Reply) {
    match reply {
        Reply::Bulk(value) => cache.fill(ticket, key, Some(value)),
        Reply::Null => cache.fill(ticket, key, None),
        _ => {}
    }
}

#[cold]
fn unexpected(reply: &Reply) -> Error {
    match reply {
        Reply::Error(text) => Error::from_reply(text),
        other => {
            let kind = match other {
                Reply::Simple(_) => "a simple string",
                Reply::Integer(_) => "an integer",
                Reply::Bulk(_) => "a string",
                Reply::Null => "null",
                Reply::Array(_) => "an array",
                Reply::Map(_) => "a map",
                _ => "another type",
            };
            Error::protocol(format_args!("it answered {kind} where that is no answer"))
        }
    }
}

/// The only reply of a command.
pub(crate) fn one(replies: Vec<Reply>) -> Result<Reply> {
    let mut replies = replies.into_iter();
    match (replies.next(), replies.next()) {
        (Some(reply), None) => Ok(reply),
        _ => Err(Error::protocol("it sent another number of replies")),
    }
}

pub(crate) fn value(reply: Reply) -> Result<Option<Vec<u8>>> {
    match reply {
        Reply::Bulk(value) => Ok(Some(value)),
        Reply::Null => Ok(None),
        other => Err(unexpected(&other)),
    }
}

/// The reply to [`Command::get_missed`].
pub(crate) fn missed_value(reply: Reply, with_place: bool) -> Result<Option<Vec<u8>>> {
    match reply {
        Reply::Array(mut words) if with_place && matches!(words.len(), 1 | 3) => {
            value(words.pop().unwrap_or(Reply::Null))
        }
        reply => value(reply),
    }
}

pub(crate) fn values(reply: Reply, keys: usize) -> Result<Vec<Option<Vec<u8>>>> {
    match reply {
        Reply::Array(values) if values.len() == keys => values.into_iter().map(value).collect(),
        other => Err(unexpected(&other)),
    }
}

pub(crate) fn ok(reply: &Reply) -> Result<()> {
    match reply {
        Reply::Simple(text) if text == b"OK" => Ok(()),
        other => Err(unexpected(other)),
    }
}

pub(crate) fn count(reply: &Reply) -> Result<u64> {
    match reply {
        Reply::Integer(count) if *count >= 0 => Ok(*count as u64),
        other => Err(unexpected(other)),
    }
}

/// The reply to [`Command::ttl`]. A key that has ended is forgotten by the cache: the server may
/// not have noticed for its part.
pub(crate) fn left(cache: Option<&Cache>, key: &[u8], reply: &Reply) -> Result<Ttl> {
    let Reply::Integer(ms) = reply else { return Err(unexpected(reply)) };
    let ttl = Ttl::of_reply(*ms);
    if ttl == Ttl::NoKey
        && let Some(cache) = cache
    {
        cache.forget(key);
    }
    Ok(ttl)
}

/// The outcome of [`WriteBatch::request`](crate::WriteBatch): alone or in a transaction.
pub(crate) fn written(replies: &[Reply]) -> Result<()> {
    match replies {
        [Reply::Integer(_)] => Ok(()),
        [reply] => ok(reply),
        [multi, queued @ .., exec] => {
            ok(multi)?;
            match exec {
                Reply::Array(done) => {
                    match done.iter().find(|done| matches!(done, Reply::Error(_))) {
                        Some(error) => Err(unexpected(error)),
                        None => Ok(()),
                    }
                }
                Reply::Null => Err(Error::new(
                    ErrorKind::Conflict,
                    "a key that the transaction has read was written meanwhile",
                )),
                // The first command that was refused says more than `EXECABORT`.
                aborted => Err(unexpected(
                    queued.iter().find(|reply| matches!(reply, Reply::Error(_))).unwrap_or(aborted),
                )),
            }
        }
        [] => Err(Error::protocol("it sent no reply")),
    }
}

/// The replies of [`Command::watch_and_get`].
pub(crate) fn watched(replies: Vec<Reply>) -> Result<Option<Vec<u8>>> {
    let mut replies = replies.into_iter();
    match (replies.next(), replies.next()) {
        (Some(watched), Some(got)) => ok(&watched).and_then(|()| value(got)),
        _ => Err(Error::protocol("it sent another number of replies")),
    }
}

/// A key and its value.
pub type Entry = (Vec<u8>, Vec<u8>);

/// Where the reading of a range is.
#[derive(Clone, Debug)]
pub(crate) struct Cursor {
    lower: Bound<Vec<u8>>,
    upper: Bound<Vec<u8>>,
    pub reverse: bool,
    /// Entries of the next page.
    page: usize,
    pub done: bool,
}

impl Cursor {
    pub fn new((lower, upper): (Bound<Vec<u8>>, Bound<Vec<u8>>)) -> Cursor {
        Cursor { lower, upper, reverse: false, page: PAGE_FIRST, done: false }
    }

    /// Reads the next page.
    pub fn command(&self) -> Command {
        let (lower, upper) = (word(&self.lower, b'-'), word(&self.upper, b'+'));
        let (limit, bytes) = (self.page.to_string(), PAGE_BYTES.to_string());
        let mut args: Vec<&[u8]> = vec![b"MR.RANGE", &lower, &upper];
        // Entries may be much larger than those before, and together more than a reply may have.
        args.extend([&b"LIMIT"[..], limit.as_bytes(), b"BYTES", bytes.as_bytes()]);
        if self.reverse {
            args.push(b"REVERSE");
        }
        Command::read(&args)
    }

    /// The entries of a page, and steps behind them.
    pub fn page(&mut self, reply: Reply) -> Result<Vec<Entry>> {
        let Reply::Array(words) = reply else { return Err(unexpected(&reply)) };
        let wrong = || Error::protocol("it sent a page that is none");
        if !words.len().is_multiple_of(2) || words.len() / 2 > self.page {
            return Err(wrong());
        }
        let mut entries = Vec::with_capacity(words.len() / 2);
        let mut words = words.into_iter();
        while let (Some(key), Some(value)) = (words.next(), words.next()) {
            let (Reply::Bulk(key), Reply::Bulk(value)) = (key, value) else { return Err(wrong()) };
            entries.push((key, value));
        }
        let bytes: usize = entries.iter().map(|(key, value)| key.len() + value.len()).sum();
        if entries.len() < self.page && bytes < PAGE_BYTES {
            self.done = true;
        }
        if let Some((key, _)) = entries.last() {
            let end = Bound::Excluded(key.clone());
            *(if self.reverse { &mut self.upper } else { &mut self.lower }) = end;
        }
        let each = bytes / entries.len().max(1) + 16;
        self.page = (PAGE_BYTES / each).clamp(1, (2 * self.page).min(PAGE_MAX));
        Ok(entries)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bulk(text: &str) -> Reply {
        Reply::Bulk(text.as_bytes().to_vec())
    }

    fn error(text: &str) -> Reply {
        Reply::Error(text.as_bytes().to_vec())
    }

    #[test]
    fn a_reply_of_another_type_is_an_error() {
        assert_eq!(value(Reply::Integer(1)).unwrap_err().kind(), ErrorKind::Protocol);
        assert_eq!(
            values(Reply::Array(vec![bulk("a")]), 2).unwrap_err().kind(),
            ErrorKind::Protocol
        );
        assert_eq!(count(&Reply::Integer(-1)).unwrap_err().kind(), ErrorKind::Protocol);
        assert_eq!(ok(&bulk("OK")).unwrap_err().kind(), ErrorKind::Protocol);
        assert_eq!(left(None, b"k", &bulk("1")).unwrap_err().kind(), ErrorKind::Protocol);
        assert_eq!(left(None, b"k", &Reply::Integer(i64::MIN)).unwrap(), Ttl::NoKey);
        assert!(one(vec![]).is_err() && written(&[]).is_err() && watched(vec![bulk("a")]).is_err());
    }

    #[test]
    fn the_outcome_of_a_transaction_is_its_first_error() {
        let done = Reply::Simple(b"OK".to_vec());
        let queued = Reply::Simple(b"QUEUED".to_vec());
        let exec = Reply::Array(vec![done.clone()]);
        assert!(written(&[done.clone(), queued.clone(), exec]).is_ok());
        let conflict = written(&[done.clone(), queued.clone(), Reply::Null]).unwrap_err();
        assert_eq!(conflict.kind(), ErrorKind::Conflict);
        let refused = error("ERR unknown command 'MR.DELRANGE'");
        let aborted = error("EXECABORT Transaction discarded because of previous errors.");
        let unsupported = written(&[done.clone(), refused, aborted]).unwrap_err();
        assert_eq!(unsupported.kind(), ErrorKind::Unsupported);
        let inside = Reply::Array(vec![done.clone(), error("OOM no")]);
        assert_eq!(written(&[done, queued, inside]).unwrap_err().kind(), ErrorKind::Full);
    }

    #[test]
    fn a_cursor_goes_on_behind_the_last_key_and_ends_with_a_short_page() {
        let mut cursor = Cursor::new((Bound::Unbounded, Bound::Excluded(b"z".to_vec())));
        let full = (0..PAGE_FIRST).flat_map(|n| [bulk(&format!("{n:03}")), bulk("v")]).collect();
        assert_eq!(cursor.page(Reply::Array(full)).unwrap().len(), PAGE_FIRST);
        assert!(!cursor.done);
        let next = String::from_utf8(cursor.command().bytes).unwrap();
        assert!(next.contains("(015\r\n") && next.contains("(z\r\n"), "{next}");
        assert!(next.contains("LIMIT\r\n$2\r\n32\r\n"), "{next}");
        assert_eq!(cursor.page(Reply::Array(vec![bulk("k"), bulk("v")])).unwrap().len(), 1);
        assert!(cursor.done);
    }

    #[test]
    fn a_cursor_goes_on_after_a_page_that_is_short_because_it_is_large() {
        let mut cursor = Cursor::new((Bound::Unbounded, Bound::Unbounded));
        let large = vec![bulk("k"), bulk(&"v".repeat(PAGE_BYTES))];
        assert_eq!(cursor.page(Reply::Array(large)).unwrap().len(), 1);
        assert!(!cursor.done);
        assert!(cursor.page(Reply::Array(Vec::new())).unwrap().is_empty());
        assert!(cursor.done);
    }

    #[test]
    fn a_cursor_that_reads_backward_moves_its_upper_end() {
        let mut cursor = Cursor::new((Bound::Unbounded, Bound::Unbounded));
        cursor.reverse = true;
        cursor.page(Reply::Array(vec![bulk("k"), bulk(&"v".repeat(1000))])).unwrap();
        let next = String::from_utf8(cursor.command().bytes).unwrap();
        assert!(next.contains("$1\r\n-\r\n$2\r\n(k\r\n") && next.contains("REVERSE"), "{next}");
    }

    #[test]
    fn a_page_that_lies_is_an_error() {
        let mut cursor = Cursor::new((Bound::Unbounded, Bound::Unbounded));
        assert!(cursor.page(Reply::Array(vec![bulk("k")])).is_err());
        assert!(cursor.page(Reply::Array(vec![bulk("k"), Reply::Null])).is_err());
        assert!(cursor.page(Reply::Array(vec![bulk("k"); 1000])).is_err());
        assert!(cursor.page(Reply::Null).is_err());
    }
}
