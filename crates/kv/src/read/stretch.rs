//! `MR.STRETCH`: the present keys and values of a part of a blob file, for clients that read in the
//! order of the writes.
//!
//! 1. The part is read with one large read, past the cache. Its records may be old.
//! 2. If the connection is tracked, their keys are entered ([`crate::core::tracked_stretches`]).
//! 3. Then the index is asked where the value of each key is. A record is sent only if its value is
//!    there: so what was overwritten before is left out, and whoever overwrites it later finds the
//!    key entered.
//!
//! The reply is bounded: at most [`StretchQuery::BYTES_MAX`] of a file, and the end of the last
//! record. At most two such commands of a connection are executed at a time, and the memory of
//! their replies is admitted first (`connection::replies`), so a client that does not read holds no
//! more than with other commands.

use std::rc::Rc;

use lsm::StretchRecord;
use resp::{Protocol, Writer};

use crate::client::registry::Client;
use crate::command::commands::StretchQuery;
use crate::core::state::CoreState;
use crate::read::small::write_error;

/// Keys that are entered or looked up between two checkpoints.
const KEYS_AT_ONCE: usize = 8;
/// Bytes of a record in a frame besides its key and its value.
const HEADER_BYTES: usize = 16;
/// Values copied between two checkpoints, in bytes.
const BYTES_AT_ONCE: usize = 16 << 10;

const MANY: &str = "ERR too many connections of this core have stretches that are tracked";

/// Makes the reply: where to go on, or 0 at the end of the file; the file to go on in then, if that
/// is asked for; and frames of records.
pub(crate) async fn read(
    state: &Rc<CoreState>,
    client: &Client,
    query: StretchQuery,
    enters: bool,
    protocol: Protocol,
) -> Vec<u8> {
    let mut reply = Vec::new();
    let StretchQuery { file, from, bytes, tells_next } = query;
    let stretch = state.reader.stretch(state.family, file, from, bytes).await;
    let found = stretch.and_then(|it| Ok((it, state.reader.next_blob_file(state.family, file)?)));
    let (stretch, next_file) = match found {
        Ok(found) => found,
        Err(error) => {
            write_error(&error, &mut Writer::new(&mut reply, protocol));
            return reply;
        }
    };
    let begin = |reply: &mut Vec<u8>, next: u64, frames: usize| {
        let mut writer = Writer::new(reply, protocol);
        writer.array(1 + usize::from(tells_next) + frames);
        writer.integer(next as i64);
        if tells_next {
            writer.integer(next_file.unwrap_or_default() as i64);
        }
    };
    let Some(stretch) = stretch else {
        begin(&mut reply, 0, 0);
        return reply;
    };
    let records: Vec<StretchRecord<'_>> = stretch.records().filter(fits).collect();
    let mut present = Vec::with_capacity(records.len());
    for some in records.chunks(KEYS_AT_ONCE) {
        let keys: Vec<&[u8]> = some.iter().map(|record| record.key).collect();
        let late = lsm::mutant("keys_of_stretches_are_entered_late");
        if enters && !late && !state.enter_stretch(client.id, &keys) {
            Writer::new(&mut reply, protocol).error(MANY);
            return reply;
        }
        let places = state.reader.places(state.family, &keys).await;
        if enters && late {
            state.core.sleep_ns(100_000).await;
            state.enter_stretch(client.id, &keys);
        }
        for (record, place) in some.iter().zip(places) {
            // The error of a key is that of a get.
            let is_present = matches!(place, Ok(Some(place)) if place == record.place);
            if is_present || lsm::mutant("stretches_are_not_compared_with_the_index") {
                present.push(*record);
            }
        }
        state.core.checkpoint().await;
    }
    drop(records);
    let frames = divide(&present);
    let length: usize = present.iter().map(size).sum();
    reply.reserve(length + 16 * (frames.len() + 2));
    let next = from.saturating_add(bytes as u64);
    begin(&mut reply, if stretch.has_more { next } else { 0 }, frames.len());
    let mut step = BYTES_AT_ONCE;
    for frame in frames {
        let bytes = frame.iter().map(size).sum();
        Writer::new(&mut reply, protocol).bulk_header(bytes);
        frame.iter().for_each(|record| append(&mut reply, record));
        reply.extend_from_slice(b"\r\n");
        if reply.len() >= step {
            step = reply.len() + BYTES_AT_ONCE;
            state.core.checkpoint().await;
        }
    }
    reply
}

fn size(record: &StretchRecord<'_>) -> usize {
    HEADER_BYTES + record.key.len() + record.value.len()
}

fn fits(record: &StretchRecord<'_>) -> bool {
    size(record) <= StretchQuery::FRAME_BYTES_MAX
}

/// Appends a record as it is in a frame.
fn append(out: &mut Vec<u8>, record: &StretchRecord<'_>) {
    out.extend_from_slice(&(record.key.len() as u32).to_le_bytes());
    out.extend_from_slice(&(record.value.len() as u32).to_le_bytes());
    out.extend_from_slice(&record.place.offset.to_le_bytes());
    out.extend_from_slice(record.key);
    out.extend_from_slice(record.value);
}

/// Divides records into frames, in order.
fn divide<'a, 'b>(records: &'a [StretchRecord<'b>]) -> Vec<&'a [StretchRecord<'b>]> {
    let mut frames = Vec::new();
    let (mut from, mut bytes) = (0, 0);
    for (at, record) in records.iter().enumerate() {
        if bytes + size(record) > StretchQuery::FRAME_BYTES_MAX {
            frames.push(&records[from..at]);
            (from, bytes) = (at, 0);
        }
        bytes += size(record);
    }
    if from < records.len() {
        frames.push(&records[from..]);
    }
    frames
}

#[cfg(test)]
mod tests {
    use super::*;
    use lsm::Place;

    #[test]
    fn frames_are_as_long_as_they_may_be_and_hold_everything() {
        let value = vec![7; StretchQuery::FRAME_BYTES_MAX];
        let place = Place { file: 1, offset: 2 };
        let of = |bytes: usize| StretchRecord { key: b"k", value: &value[..bytes], place };
        let all = StretchQuery::FRAME_BYTES_MAX - HEADER_BYTES - 1;
        assert!(fits(&of(all)) && !fits(&of(all + 1)));
        for lengths in [&[][..], &[all], &[0, all], &[all, 0, 5], &[20_000; 7], &[3; 9]] {
            let records: Vec<_> = lengths.iter().map(|bytes| of(*bytes)).collect();
            let frames = divide(&records);
            assert_eq!(frames.iter().map(|frame| frame.len()).sum::<usize>(), records.len());
            for pair in frames.windows(2) {
                let bytes = |frame: &[StretchRecord<'_>]| frame.iter().map(size).sum::<usize>();
                assert!(bytes(pair[0]) <= StretchQuery::FRAME_BYTES_MAX);
                assert!(bytes(pair[0]) + size(&pair[1][0]) > StretchQuery::FRAME_BYTES_MAX);
            }
        }
        let mut out = Vec::new();
        append(&mut out, &of(3));
        assert_eq!(out, b"\x01\0\0\0\x03\0\0\0\x02\0\0\0\0\0\0\0k\x07\x07\x07");
    }
}
