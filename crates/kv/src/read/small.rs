//! Reads with small replies: of single keys, of a few keys, `EXISTS`, `SCAN`, `RANDOMKEY`.

use std::rc::Rc;

use lsm::{IterOptions, Value};
use resp::{Protocol, Writer, parse_i64};

use crate::command::bits::{BitQuery, STEP_BYTES, bit};
use crate::command::commands::{Ask, SCAN_BYTES_MAX, TimeToLive, part};
use crate::command::dump;
use crate::command::fields::{self, FieldOperation};
use crate::command::lcs::{Lcs, LcsOptions};
use crate::command::refusal::{Refusal, engine_error_text};
use crate::core::scan_table;
use crate::core::state::CoreState;
use crate::expiry::Deadline;
use crate::read::stream::KEYS_PER_LOOKUP;
use crate::read::walk::Walk;

/// Maximum number of keys that one `SCAN` examines, whatever `COUNT` says.
const SCAN_KEYS_MAX: u64 = 10_000;

/// The cursor after all others, also written -1: in Redis, too, only the end follows it.
const CURSOR_END: u64 = u64::MAX;

pub(crate) fn write_error(error: &lsm::Error, writer: &mut Writer<'_>) {
    writer.error(&engine_error_text(error));
}

/// Writes the reply to a read of one key.
pub(crate) fn write_answer(value: Option<&[u8]>, ask: Ask, writer: &mut Writer<'_>) {
    match (ask, value) {
        (Ask::Value, Some(value)) => writer.bulk(value),
        (Ask::Value | Ask::Placed, None) => writer.null(),
        // Within a transaction, which does not know where values are.
        (Ask::Placed, Some(value)) => {
            writer.array(1);
            writer.bulk(value);
        }
        (Ask::Length, value) => writer.integer(value.map_or(0, <[u8]>::len) as i64),
        (Ask::Part { start, end }, value) => {
            let value = value.unwrap_or_default();
            writer.bulk(&value[part(value.len(), start, end)]);
        }
        (Ask::Bit(offset), value) => {
            writer.integer(value.is_some_and(|value| bit(value, offset)).into());
        }
        (Ask::Encoding, Some(value)) => writer.bulk(encoding(value).as_bytes()),
        (Ask::Frequency, Some(_)) => writer.error(NO_FREQUENCY),
        (Ask::IdleTime, Some(_)) => writer.integer(0),
        (Ask::Memory(key_bytes), Some(value)) => {
            writer.integer((key_bytes + value.len() + ENTRY_BYTES) as i64);
        }
        (Ask::References, Some(value)) => {
            let shared =
                is_number(value) && parse_i64(value).is_some_and(|n| (0..10_000).contains(&n));
            writer.integer(if shared { i32::MAX.into() } else { 1 });
        }
        (
            Ask::Encoding | Ask::Frequency | Ask::IdleTime | Ask::Memory(_) | Ask::References,
            None,
        ) => writer.null(),
        (Ask::Type, value) => writer.simple(if value.is_some() { "string" } else { "none" }),
        // Without deadlines in the database; else `time_to_live` answers.
        (Ask::TimeToLive(unit), value) => {
            writer.integer(unit.answer(value.map(|_| Deadline::NEVER), 0));
        }
    }
}

/// How Redis would keep a value that was set.
fn encoding(value: &[u8]) -> &'static str {
    match () {
        () if is_number(value) => "int",
        () if value.len() <= EMBEDDED_BYTES_MAX => "embstr",
        () => "raw",
    }
}

/// Whether Redis would keep a value as a number.
fn is_number(value: &[u8]) -> bool {
    value.len() <= 20 && parse_i64(value).is_some()
}

/// The longest value that Redis keeps beside its object.
const EMBEDDED_BYTES_MAX: usize = 44;

/// Bytes of a key and its value in a table besides their own: lengths, and the sequence number.
const ENTRY_BYTES: usize = 16;

const NO_FREQUENCY: &str = "ERR An LFU maxmemory policy is not selected, access frequency not tracked. Please note that \
     when switching between policies at runtime LRU and LFU data will take some time to adjust.";

/// Looks up what a read of one key needs: its value, or an empty one where only its existence is
/// asked for and the value does not fit into memory. Suspends for blocks that are not in memory.
pub(crate) async fn look_up(state: &CoreState, key: &[u8], ask: Ask) -> lsm::Result<Option<Value>> {
    match state.reader.get(state.family, key).await {
        Err(error)
            if error.kind() == lsm::Kind::Memory
                && matches!(ask, Ask::Type | Ask::TimeToLive(_)) =>
        {
            let there =
                state.reader.contains(state.family, &[key]).await.pop().unwrap_or(Err(error))?;
            Ok(there.then(Value::empty))
        }
        answer => answer,
    }
}

/// `TTL` and its kin.
pub(crate) async fn time_to_live(
    state: &Rc<CoreState>,
    key: &[u8],
    unit: TimeToLive,
    protocol: Protocol,
) -> Vec<u8> {
    let mut reply = Vec::new();
    let mut writer = Writer::new(&mut reply, protocol);
    match state.reader.look_up(state.family, key, None).await {
        Ok(found) => {
            let now_ms = state.core.unix_time_ms();
            let deadline = found.map(|(_, deadline)| deadline);
            let deadline = deadline.filter(|deadline| !deadline.has_passed(now_ms));
            state.count_hit(deadline.is_some());
            writer.integer(unit.answer(deadline, now_ms));
        }
        Err(error) => write_error(&error, &mut writer),
    }
    reply
}

/// Writes the reply of `MGET`, or the first error among the values.
pub(crate) fn write_values(values: &[lsm::Result<Option<Value>>], writer: &mut Writer<'_>) {
    if let Some(error) = values.iter().find_map(|value| value.as_ref().err()) {
        return write_error(error, writer);
    }
    writer.array(values.len());
    for value in values {
        match value {
            Ok(Some(value)) => writer.bulk(value),
            _ => writer.null(),
        }
    }
}

/// `EXISTS`: the number of keys that exist, each counted as often as it is named.
pub(crate) async fn exists(
    state: &Rc<CoreState>,
    keys: Vec<Vec<u8>>,
    protocol: Protocol,
) -> Vec<u8> {
    let mut found = 0;
    let mut reply = Vec::new();
    let mut writer = Writer::new(&mut reply, protocol);
    for some in keys.chunks(KEYS_PER_LOOKUP) {
        let some: Vec<&[u8]> = some.iter().map(Vec::as_slice).collect();
        for answer in state.reader.contains(state.family, &some).await {
            match answer {
                Ok(there) => {
                    found += i64::from(there);
                    state.count_hit(there);
                }
                Err(error) => {
                    write_error(&error, &mut writer);
                    return reply;
                }
            }
        }
    }
    writer.integer(found);
    reply
}

/// Whether the bits of a value can be looked at in one go.
pub(crate) fn is_quick(value: Option<&[u8]>) -> bool {
    value.is_none_or(|value| value.len() <= STEP_BYTES)
}

/// Writes the answer to a question about the bits of a short value.
pub(crate) fn write_bits(value: Option<&[u8]>, query: BitQuery, writer: &mut Writer<'_>) {
    match value.map_or(Ok(query.missing()), |value| query.answer(value)) {
        Ok(number) => writer.integer(number),
        Err(error) => writer.error(error),
    }
}

/// `BITCOUNT` and `BITPOS`.
pub(crate) async fn bits(
    state: &Rc<CoreState>,
    key: &[u8],
    query: BitQuery,
    protocol: Protocol,
) -> Vec<u8> {
    let mut reply = Vec::new();
    let mut writer = Writer::new(&mut reply, protocol);
    let value = match state.reader.get(state.family, key).await {
        Ok(value) => value,
        Err(error) => {
            write_error(&error, &mut writer);
            return reply;
        }
    };
    state.count_hit(value.is_some());
    let Some(value) = value.as_ref().filter(|value| !is_quick(Some(value))) else {
        write_bits(value.as_deref(), query, &mut writer);
        return reply;
    };
    match query.begin(value.len()) {
        Ok(mut search) => {
            while search.step(value) {
                state.core.checkpoint().await;
            }
            writer.integer(search.answer());
        }
        Err(error) => writer.error(error),
    }
    reply
}

/// `DUMP`.
pub(crate) async fn dump(state: &Rc<CoreState>, key: &[u8], protocol: Protocol) -> Vec<u8> {
    let mut reply = Vec::new();
    let mut writer = Writer::new(&mut reply, protocol);
    let value = match state.reader.get(state.family, key).await {
        Ok(Some(value)) => value,
        Ok(None) => {
            state.count_hit(false);
            writer.null();
            return reply;
        }
        Err(error) => {
            write_error(&error, &mut writer);
            return reply;
        }
    };
    state.count_hit(true);
    let (header, follows) = dump::header(&value);
    let body: &[u8] = if follows { &value } else { b"" };
    writer.bulk_header(header.len() + body.len() + dump::footer(0).len());
    let mut sum = dump::crc64(0, &header);
    reply.extend_from_slice(&header);
    for part in body.chunks(dump::STEP_BYTES) {
        sum = dump::crc64(sum, part);
        reply.extend_from_slice(part);
        state.core.checkpoint().await;
    }
    reply.extend_from_slice(&dump::footer(sum));
    reply.extend_from_slice(b"\r\n");
    reply
}

/// `DEBUG OBJECT`: Redis's line about a value, as far as it means something here.
pub(crate) async fn describe_value(
    state: &Rc<CoreState>,
    key: &[u8],
    protocol: Protocol,
) -> Vec<u8> {
    let mut reply = Vec::new();
    let mut writer = Writer::new(&mut reply, protocol);
    match state.reader.get(state.family, key).await {
        Ok(Some(value)) => {
            let (header, follows) = dump::header(&value);
            let length = header.len() - 1 + if follows { value.len() } else { 0 };
            let encoding = encoding(&value);
            writer.simple(&format!(
                "Value at:0x0 refcount:1 encoding:{encoding} serializedlength:{length} lru:0 \
                 lru_seconds_idle:0"
            ));
        }
        Ok(None) => writer.error("ERR no such key"),
        Err(error) => write_error(&error, &mut writer),
    }
    reply
}

/// `LCS`. One is computed at a time.
pub(crate) async fn lcs(
    state: &Rc<CoreState>,
    keys: [Vec<u8>; 2],
    options: LcsOptions,
    protocol: Protocol,
) -> Vec<u8> {
    let mut reply = Vec::new();
    let mut writer = Writer::new(&mut reply, protocol);
    let _turn = state.take_turn().await;
    let keys: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
    let found = state.reader.multi_get(state.family, &keys, None).await;
    let mut values = Vec::with_capacity(keys.len());
    for value in found {
        match value {
            Ok(value) => {
                state.count_hit(value.is_some());
                values.push(value);
            }
            Err(error) => {
                write_error(&error, &mut writer);
                return reply;
            }
        }
    }
    let bytes = |at: usize| values.get(at).and_then(Option::as_deref).unwrap_or_default();
    let bytes_max = state.node.settings().value_bytes_max();
    match Lcs::new(bytes(0), bytes(1), options, bytes_max) {
        Ok(mut lcs) => {
            while lcs.step() {
                state.core.checkpoint().await;
            }
            lcs.write(options, &mut writer);
        }
        Err(error) => writer.error(error),
    }
    reply
}

/// Writes the integers within a value.
pub(crate) fn write_fields(
    value: Option<&[u8]>,
    operations: &[FieldOperation],
    writer: &mut Writer<'_>,
) {
    writer.array(operations.len());
    let value = value.unwrap_or_default();
    operations.iter().for_each(|one| writer.integer(fields::get(value, *one)));
}

/// `BITFIELD_RO`.
pub(crate) async fn fields(
    state: &Rc<CoreState>,
    key: &[u8],
    operations: Vec<FieldOperation>,
    protocol: Protocol,
) -> Vec<u8> {
    let mut reply = Vec::new();
    let mut writer = Writer::new(&mut reply, protocol);
    match state.reader.get(state.family, key).await {
        Ok(value) => {
            state.count_hit(value.is_some());
            write_fields(value.as_deref(), &operations, &mut writer);
        }
        Err(error) => write_error(&error, &mut writer),
    }
    reply
}

/// `SCAN` with its options, owned.
pub(crate) struct ScanOrder {
    pub cursor: u64,
    pub pattern: Option<Vec<u8>>,
    pub count: u64,
    pub of_our_type: bool,
}

/// `SCAN`: the next keys and the cursor after them.
pub(crate) async fn scan(state: &Rc<CoreState>, order: ScanOrder, protocol: Protocol) -> Vec<u8> {
    let mut reply = Vec::new();
    let mut writer = Writer::new(&mut reply, protocol);
    match scan_piece(state, &order, protocol).await {
        Ok(Some(piece)) => {
            writer.array(2);
            writer.bulk(piece.cursor.to_string().as_bytes());
            writer.array(piece.keys);
            reply.extend_from_slice(&piece.body);
        }
        // Redis's cursors never expire. Beginning again silently might never end, and ending would
        // lose keys.
        Ok(None) => {
            Refusal::Text("ERR invalid cursor: it is unknown or has expired, begin again at 0")
                .write(&mut writer);
        }
        Err(error) => write_error(&error, &mut writer),
    }
    reply
}

#[derive(Default)]
struct ScanPiece {
    cursor: u64,
    keys: usize,
    body: Vec<u8>,
}

/// `None` when the cursor is unknown.
async fn scan_piece(
    state: &Rc<CoreState>,
    order: &ScanOrder,
    protocol: Protocol,
) -> lsm::Result<Option<ScanPiece>> {
    let mut piece = ScanPiece::default();
    let mut walk = Walk::matching(state, order.pattern.as_deref());
    if order.cursor == CURSOR_END {
        return Ok(Some(piece));
    }
    if order.cursor != 0 {
        let cursor = order.cursor;
        let found = state
            .ask(scan_table::core_of(cursor), move |there| {
                there.scans.borrow_mut().get(cursor).map(<[u8]>::to_vec)
            })
            .await;
        match found.flatten() {
            Some(key) => walk.continue_after(Some(key)),
            None => return Ok(None),
        }
    }
    if !order.of_our_type {
        return Ok(Some(piece));
    }
    for _ in 0..order.count.min(SCAN_KEYS_MAX) {
        if !walk.step().await? {
            return Ok(Some(piece));
        }
        if walk.matches() {
            piece.keys += 1;
            Writer::new(&mut piece.body, protocol).bulk(walk.key());
        }
        if piece.body.len() >= SCAN_BYTES_MAX {
            break;
        }
    }
    piece.cursor = state.scans.borrow_mut().put(walk.key());
    Ok(Some(piece))
}

/// In a database of up to this many keys `RANDOMKEY` walks to a random key, each as likely as
/// another.
const RANDOM_WALK_KEYS: u64 = 1024;

/// `RANDOMKEY`: any of few keys; of many keys the first after a random point between the first and
/// the last.
pub(crate) async fn random_key(state: &Rc<CoreState>, protocol: Protocol) -> Vec<u8> {
    let mut reply = Vec::new();
    let mut writer = Writer::new(&mut reply, protocol);
    match find_random_key(state).await {
        Ok(Some(key)) => writer.bulk(&key),
        Ok(None) => writer.null(),
        Err(error) => write_error(&error, &mut writer),
    }
    reply
}

async fn find_random_key(state: &Rc<CoreState>) -> lsm::Result<Option<Vec<u8>>> {
    let mut iter = state.reader.iter(state.family, IterOptions::default())?;
    let keys = state.reader.approximate_keys(state.family)?;
    if keys <= RANDOM_WALK_KEYS {
        // The count is an estimate: a position beyond the end counts as the last key.
        let mut key = None;
        iter.seek_to_first().await?;
        for _ in 0..=state.core.random_u64() % keys.max(1) {
            if !iter.valid() {
                break;
            }
            key = Some(iter.key().to_vec());
            iter.next().await?;
        }
        return Ok(key);
    }
    iter.seek_to_last().await?;
    let last = iter.key().to_vec();
    iter.seek_to_first().await?;
    if !iter.valid() {
        return Ok(None);
    }
    let point = random_point(iter.key(), &last, state.core.random_u64());
    iter.seek(&point).await?;
    Ok(Some(if iter.valid() { iter.key().to_vec() } else { last }))
}

/// A key between `a` and `b`: their common prefix, then eight bytes chosen uniformly between
/// theirs.
fn random_point(a: &[u8], b: &[u8], random: u64) -> Vec<u8> {
    let common = a.iter().zip(b).take_while(|(a, b)| a == b).count();
    let number = |key: &[u8]| {
        let mut eight = [0; 8];
        let rest = &key[common..key.len().min(common + 8)];
        eight[..rest.len()].copy_from_slice(rest);
        u64::from_be_bytes(eight)
    };
    let (low, high) = (number(a).min(number(b)), number(a).max(number(b)));
    let offset = (u128::from(random) * (u128::from(high - low) + 1)) >> 64;
    let mut point = a[..common].to_vec();
    point.extend_from_slice(&(low + offset as u64).to_be_bytes());
    point
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn reply(value: Option<&[u8]>, ask: Ask) -> String {
        let mut out = Vec::new();
        write_answer(value, ask, &mut Writer::new(&mut out, Protocol::V2));
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn every_read_of_one_key_has_its_reply() {
        for (ask, there, missing) in [
            (Ask::Value, "$3\r\nabc\r\n", "$-1\r\n"),
            (Ask::Length, ":3\r\n", ":0\r\n"),
            (Ask::Part { start: 1, end: -1 }, "$2\r\nbc\r\n", "$0\r\n\r\n"),
            (Ask::Bit(1), ":1\r\n", ":0\r\n"),
            (Ask::Encoding, "$6\r\nembstr\r\n", "$-1\r\n"),
            (Ask::IdleTime, ":0\r\n", "$-1\r\n"),
            (Ask::References, ":1\r\n", "$-1\r\n"),
            (Ask::Type, "+string\r\n", "+none\r\n"),
            (Ask::TimeToLive(TimeToLive::Seconds), ":-1\r\n", ":-2\r\n"),
        ] {
            assert_eq!(reply(Some(b"abc"), ask), there);
            assert_eq!(reply(None, ask), missing);
        }
    }

    proptest! {
        #[test]
        fn a_random_point_lies_between_its_ends(
            a in proptest::collection::vec(any::<u8>(), 0..12),
            b in proptest::collection::vec(any::<u8>(), 0..12),
            random: u64,
        ) {
            let point = random_point(&a, &b, random);
            let pad = |key: &[u8]| {
                let common = a.iter().zip(&b).take_while(|(a, b)| a == b).count();
                let mut key = key[..key.len().min(common + 8)].to_vec();
                key.resize(common + 8, 0);
                key
            };
            let (low, high) = (pad(&a).min(pad(&b)), pad(&a).max(pad(&b)));
            prop_assert!(low <= point && point <= high);
        }
    }

    #[test]
    fn random_points_reach_both_ends() {
        assert_eq!(random_point(b"key1", b"key9", 0), b"key1\0\0\0\0\0\0\0");
        assert_eq!(random_point(b"key1", b"key9", u64::MAX), b"key9\0\0\0\0\0\0\0");
    }
}
