//! Lists of the database's files that programs at the admin socket hold while they copy them.
//!
//! The program copies the files itself, with its own rights and its own processor time: a node with
//! a sandbox could not write elsewhere. A hold ends by itself, because its program may be killed;
//! the program renews it. When the node ends, so do all holds: then its successor may remove files,
//! and the program finds that one is missing.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use kv::Shard;
use lsm::{BlobPrefix, FileList, FilePrefix, LiveFiles};
use reactor::{Class, Core};
use serde_json::{Value, json};

use super::open::explain;
use crate::error::{Error, Kind};
use crate::process::working_directory;

/// How long files are kept without a renewal, in nanoseconds.
pub const HOLD_NS: u64 = 60_000_000_000;
/// Most holds at a time.
const HOLDS_MAX: usize = 8;

/// The holds of a node.
pub(crate) struct Holds {
    core: Core,
    /// `None` if the node writes to no database.
    shard: Option<Shard>,
    held: RefCell<BTreeMap<u64, Held>>,
    next: Cell<u64>,
}

struct Held {
    _files: LiveFiles,
    until_ns: u64,
}

impl Holds {
    pub fn new(core: &Core, shard: Option<Shard>) -> Rc<Holds> {
        let core = core.clone();
        // Another process must not renew a hold of this one by its number.
        let next = Cell::new(core.random_u64() >> 12);
        Rc::new(Holds { core, shard, held: RefCell::default(), next })
    }

    /// Begins a hold. Returns its number and the list of files.
    pub async fn begin(self: &Rc<Holds>, log_bytes_max: u64) -> Result<Value, Error> {
        let Some(shard) = &self.shard else {
            return Err(Error::new(Kind::Usage, "this node writes to no database")
                .hint("use --data DIR: a directory that no process writes to is copied directly"));
        };
        if self.held.borrow().len() >= HOLDS_MAX {
            let what = format!("{HOLDS_MAX} programs are copying this database already");
            return Err(Error::new(Kind::System, what));
        }
        let files = shard.live_files(log_bytes_max).await;
        let files = files.map_err(|error| explain(shard.path(), &error))?;
        let hold = self.next.replace(self.next.get() + 1);
        let mut answer = render(files.list());
        answer["hold"] = hold.into();
        let until_ns = self.core.now_ns() + HOLD_NS;
        self.held.borrow_mut().insert(hold, Held { _files: files, until_ns });
        let (holds, core) = (Rc::downgrade(self), self.core.clone());
        self.core.spawn(Class::Control, async move {
            let mut until_ns = until_ns;
            loop {
                core.sleep_ns(until_ns.saturating_sub(core.now_ns())).await;
                let Some(holds) = holds.upgrade() else { return };
                let mut held = holds.held.borrow_mut();
                match held.get(&hold) {
                    Some(renewed) if renewed.until_ns > core.now_ns() => {
                        until_ns = renewed.until_ns;
                    }
                    Some(_) => {
                        held.remove(&hold);
                        tracing::warn!("a program that copies the database has gone");
                        return;
                    }
                    None => return,
                }
            }
        });
        Ok(answer)
    }

    /// Renews a hold.
    pub fn renew(&self, hold: u64) -> Result<Value, Error> {
        match self.held.borrow_mut().get_mut(&hold) {
            Some(held) => {
                held.until_ns = self.core.now_ns() + HOLD_NS;
                Ok(json!({}))
            }
            None => Err(no_hold()),
        }
    }

    /// Ends a hold.
    pub fn release(&self, hold: u64) -> Result<Value, Error> {
        let held = self.held.borrow_mut().remove(&hold);
        held.map(|_| json!({})).ok_or_else(no_hold)
    }
}

fn render(list: &FileList) -> Value {
    let prefix = |file: &FilePrefix| json!({"number": file.number, "bytes": file.bytes});
    let blob =
        |file: &BlobPrefix| json!({"number": file.number, "end": file.end, "count": file.count});
    json!({
        "directory": working_directory().join(&list.directory),
        "sequence": list.sequence,
        "manifest": prefix(&list.manifest),
        "logs": list.logs.iter().map(prefix).collect::<Vec<_>>(),
        "open_blobs": list.open_blobs.iter().map(blob).collect::<Vec<_>>(),
        "within": list.within.as_deref().map(render),
    })
}

fn no_hold() -> Error {
    Error::new(Kind::System, "the node keeps no files for this copy any more")
        .hint("the node was restarted, or waited more than a minute for a sign of life: try again")
}
