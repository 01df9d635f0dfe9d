//! Reads with small replies: of single keys, of a few keys, `EXISTS`, `SCAN`, `RANDOMKEY`.

use std::rc::Rc;

use lsm::{IterOptions, Value};
use resp::{Protocol, Writer};

use crate::command::commands::{Ask, SCAN_BYTES_MAX, part};
use crate::command::refusal::{Refusal, engine_error_text};
use crate::core::scan_table;
use crate::core::state::CoreState;
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
        (Ask::Value, None) => writer.null(),
        (Ask::Length, value) => writer.integer(value.map_or(0, <[u8]>::len) as i64),
        (Ask::Part { start, end }, value) => {
            let value = value.unwrap_or_default();
            writer.bulk(&value[part(value.len(), start, end)]);
        }
        (Ask::Type, value) => writer.simple(if value.is_some() { "string" } else { "none" }),
        // As in Redis: -2 without the key, -1 without an expiry.
        (Ask::TimeToLive, value) => writer.integer(if value.is_some() { -1 } else { -2 }),
    }
}

/// Looks up what a read of one key needs: its value, or an empty one where only its existence is
/// asked for and the value does not fit into memory. Suspends for blocks that are not in memory.
pub(crate) async fn look_up(state: &CoreState, key: &[u8], ask: Ask) -> lsm::Result<Option<Value>> {
    match state.reader.get(state.family, key, None).await {
        Err(error)
            if error.kind() == lsm::Kind::Memory && matches!(ask, Ask::Type | Ask::TimeToLive) =>
        {
            let there =
                state.reader.contains(state.family, &[key]).await.pop().unwrap_or(Err(error))?;
            Ok(there.then(Value::empty))
        }
        answer => answer,
    }
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
                    state.count(|stats| match there {
                        true => stats.hits += 1,
                        false => stats.misses += 1,
                    });
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
            (Ask::Type, "+string\r\n", "+none\r\n"),
            (Ask::TimeToLive, ":-1\r\n", ":-2\r\n"),
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
