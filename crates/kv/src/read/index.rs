//! `MR.INDEX`: the hashes of a page of keys, for clients that keep an index of the database and so
//! know by themselves that a key does not exist.
//!
//! Nothing is kept between two pages: the client names the key after which the next one begins.
//! Each page is of its own moment. A key that is not written between the first page and the last is
//! in exactly one of them; the client hears of the others (`CLIENT TRACKING ON BCAST`).
//!
//! Keys whose deadline has passed are among them until they are removed: a client asks for those.
//!
//! A page is bounded in keys, and in bytes that the walk has passed, so that long values in tables
//! do not delay what was asked after it on the connection. Values in blob files are not read.

use std::rc::Rc;

use lsm::IterOptions;
use resp::{Protocol, Writer};
use twox_hash::XxHash3_64;

use crate::command::commands::IndexQuery;
use crate::core::state::CoreState;
use crate::read::small::write_error;

/// Keys between two checkpoints.
const KEYS_PER_CHECK: usize = 64;
/// A page ends with the key that makes the keys and values of tables this long.
const PASSED_BYTES_MAX: usize = 8 << 20;

/// A query, owned.
pub(crate) struct Page {
    seed: u64,
    after: Option<Vec<u8>>,
    count: usize,
}

impl Page {
    pub fn of(query: IndexQuery<'_>) -> Page {
        let IndexQuery { seed, after, count } = query;
        Page { seed, after: after.map(<[u8]>::to_vec), count }
    }
}

/// Makes the reply: the last key of the page, or null if it is the last page, and the hashes.
pub(crate) async fn read(state: &Rc<CoreState>, page: Page, protocol: Protocol) -> Vec<u8> {
    let mut reply = Vec::new();
    let mut hashes = Vec::new();
    let walked = walk(state, page, &mut hashes).await;
    let mut writer = Writer::new(&mut reply, protocol);
    match walked {
        Ok(last) => {
            writer.array(2);
            match last {
                Some(key) => writer.bulk(&key),
                None => writer.null(),
            }
            writer.bulk(&hashes);
        }
        Err(error) => write_error(&error, &mut writer),
    }
    reply
}

async fn walk(
    state: &Rc<CoreState>,
    page: Page,
    hashes: &mut Vec<u8>,
) -> lsm::Result<Option<Vec<u8>>> {
    let options =
        IterOptions { expected: Some(page.count), keys_only: true, ..IterOptions::default() };
    // Not the reader of what has not expired: that looks up the deadline of each key.
    let reader: &lsm::Reader = &state.reader;
    let mut iter = reader.iter(state.family, options)?;
    match &page.after {
        None => iter.seek_to_first().await?,
        Some(after) => {
            iter.seek(after).await?;
            if iter.valid() && iter.key() == &after[..] {
                iter.next().await?;
            }
        }
    }
    let (mut keys, mut passed) = (0, 0);
    while iter.valid() {
        let key = iter.key();
        hashes.extend_from_slice(&XxHash3_64::oneshot_with_seed(page.seed, key).to_le_bytes());
        keys += 1;
        passed += key.len() + iter.value().len();
        if keys >= page.count || passed >= PASSED_BYTES_MAX {
            return Ok(Some(key.to_vec()));
        }
        if keys.is_multiple_of(KEYS_PER_CHECK) {
            state.core.checkpoint().await;
        }
        iter.next().await?;
    }
    Ok(None)
}
