//! What the callers ask of the cores.

use std::path::PathBuf;
use std::sync::Arc;

use lsm::{BatchWriter, CfId, Unwritten};
use reactor::Bell;
use reactor::inbox::Sender;
use reactor::reply::ReplySender;

use crate::bounds::Limits;
use crate::door::Weight;
use crate::error::Result;
use crate::value::Value;

/// The way back to the caller.
pub(crate) type Back<T> = ReplySender<Result<T>>;

/// What any core answers.
pub(crate) enum Read {
    Get {
        family: CfId,
        key: Box<[u8]>,
        back: Back<Option<Value>>,
    },
    /// A get that is not of the newest state.
    GetAt {
        snapshot: Arc<Handle>,
        family: CfId,
        key: Box<[u8]>,
        back: Back<Option<Value>>,
    },
    MultiGet {
        snapshot: Option<Arc<Handle>>,
        family: CfId,
        keys: Vec<Box<[u8]>>,
        back: Back<Vec<Option<Value>>>,
    },
    /// Also answers the snapshot's sequence number.
    Snapshot {
        back: Back<(Handle, u64)>,
    },
    Open(Box<OpenCursor>),
    Next {
        cursor: Handle,
        back: Back<Chunk>,
    },
    /// Makes the core panic, or a task of it.
    #[cfg(test)]
    Panic {
        in_task: bool,
        back: Back<()>,
    },
}

/// Opens a cursor and reads its first entries.
pub(crate) struct OpenCursor {
    pub snapshot: Option<Arc<Handle>>,
    pub family: CfId,
    pub limits: Limits,
    pub reverse: bool,
    pub back: Back<Chunk>,
}

/// What the core that owns the database answers.
pub(crate) enum Write {
    Batch {
        batch: BatchWriter,
        /// Of an optimistic transaction.
        condition: Option<Box<Unwritten>>,
        weight: Weight,
        back: Back<()>,
    },
    Sync {
        back: Back<()>,
    },
    Flush {
        back: Back<()>,
    },
    Compact {
        family: CfId,
        limits: Limits,
        back: Back<()>,
    },
    Checkpoint {
        path: PathBuf,
        back: Back<()>,
    },
    ListFamilies {
        back: Back<Vec<String>>,
    },
    FindFamily {
        name: String,
        back: Back<CfId>,
    },
    CreateFamily {
        name: String,
        back: Back<CfId>,
    },
    DropFamily {
        name: String,
        back: Back<()>,
    },
}

/// Entries of a range, and the cursor, if more may follow.
pub(crate) struct Chunk {
    pub bytes: Arc<Vec<u8>>,
    /// Where each key and its value end in `bytes`.
    pub ends: Vec<(u32, u32)>,
    pub cursor: Option<Handle>,
}

/// A snapshot or a cursor of a core, which is released when this is dropped: by the caller, or
/// with a request or an answer that nobody took.
pub(crate) struct Handle {
    pub id: u64,
    /// The core that has it.
    pub core: usize,
    pub releases: Sender<u64>,
    pub bell: Bell,
}

impl Drop for Handle {
    fn drop(&mut self) {
        // A core that has ended has released everything.
        if self.releases.send(self.id).is_ok() {
            self.bell.ring();
        }
    }
}
