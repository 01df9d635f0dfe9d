//! A core's state: where its requests come in, what is running, and what the callers hold.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use lsm::{Reader, Snapshot, Writer};
use reactor::inbox::{Inbox, Sender, inbox};
use reactor::{Core, Event, PollerSlot};

use super::Plan;
use super::cursors::Cursor;
use super::receiver::Receiver;
use crate::door::{Door, Load};
use crate::request::{Handle, Read, Write};
use crate::shared::Shared;

/// Requests of one kind that wait for a core; callers beyond that wait.
const WAITING_MAX: usize = 1024;
/// Requests of one kind that run on a core; what comes then stays in the inbox.
pub(super) const RUNNING_MAX: usize = 1024;
/// Snapshots and cursors that were released and not yet dropped: there are at most as many as may
/// be held, which the engine bounds.
const RELEASES_MAX: usize = 1 << 20;

/// The state of a core.
pub(super) struct Hall {
    pub core: Core,
    pub shared: Arc<Shared>,
    reader: RefCell<Option<Reader>>,
    writer: RefCell<Option<Writer>>,
    pub reads: Running,
    pub writes: Running,
    pub snapshots: RefCell<BTreeMap<u64, Rc<Snapshot>>>,
    pub cursors: RefCell<BTreeMap<u64, Cursor>>,
    /// A cursor was opened.
    pub opened: Rc<Event>,
    next_handle: Cell<u64>,
    doors: RefCell<Option<Doors>>,
    /// The last request was taken; no more come.
    pub drained: Cell<bool>,
    /// The core was told to stop.
    pub stopping: Cell<bool>,
    /// One of the above has changed.
    pub changed: Event,
    poller: RefCell<Option<PollerSlot>>,
}

/// The callers' ends of the inboxes.
struct Doors {
    reads: Door<Read>,
    writes: Door<Write>,
    releases: Sender<u64>,
}

/// The number of requests that run.
#[derive(Default)]
pub(super) struct Running(Cell<usize>);

impl Running {
    pub fn has_room(&self) -> bool {
        self.0.get() < RUNNING_MAX
    }
}

/// A request that runs, until dropped.
pub(super) struct Runs(Rc<Hall>, fn(&Hall) -> &Running);

impl Drop for Runs {
    fn drop(&mut self) {
        let (hall, running) = (&self.0, (self.1)(&self.0));
        if !running.has_room() {
            // The poller left requests in the inbox.
            hall.core.turn_at(hall.core.now_ns());
        }
        running.0.set(running.0.get() - 1);
        if hall.stopping.get() {
            hall.changed.notify_all();
        }
    }
}

/// The hall of a core, once it has one.
#[derive(Default)]
struct Place(RefCell<Option<Rc<Hall>>>);

impl Hall {
    /// The core's hall. It is made at the first call.
    pub fn of(core: &Core, plan: &Plan) -> Rc<Hall> {
        let place = core.local::<Place>();
        place.0.borrow_mut().get_or_insert_with(|| Hall::install(core, plan)).clone()
    }

    fn install(core: &Core, plan: &Plan) -> Rc<Hall> {
        let bell = core.bell();
        let door = |bytes_max| (Arc::new(Load::new(bytes_max)), bell.clone());
        let (reads, reads_inbox): (Sender<Read>, Inbox<Read>) = inbox(WAITING_MAX);
        let (writes, writes_inbox): (Sender<Write>, Inbox<Write>) = inbox(WAITING_MAX);
        let (releases, releases_inbox) = inbox(RELEASES_MAX);
        let ((reads_room, reads_bell), (writes_room, writes_bell)) =
            (door(usize::MAX), door(plan.batch_bytes));
        let doors = Doors {
            reads: Door { inbox: reads, bell: reads_bell, room: reads_room.clone() },
            writes: Door { inbox: writes, bell: writes_bell, room: writes_room.clone() },
            releases,
        };
        let hall = Rc::new(Hall {
            core: core.clone(),
            shared: plan.shared.clone(),
            reader: RefCell::default(),
            writer: RefCell::default(),
            reads: Running::default(),
            writes: Running::default(),
            snapshots: RefCell::default(),
            cursors: RefCell::default(),
            opened: Rc::default(),
            next_handle: Cell::new(1),
            doors: RefCell::new(Some(doors)),
            drained: Cell::new(false),
            stopping: Cell::new(false),
            changed: Event::new(),
            poller: RefCell::default(),
        });
        let receiver = Receiver::new(
            &hall,
            (reads_inbox, reads_room),
            (writes_inbox, writes_room),
            releases_inbox,
        );
        hall.poller.replace(Some(core.add_poller(receiver)));
        hall.shared.add_bell(bell);
        hall
    }

    /// Begins to answer reads.
    pub fn serve_reads(self: &Rc<Hall>, reader: Reader) -> Door<Read> {
        self.reader.replace(Some(reader));
        super::cursors::watch(self);
        self.with_doors(|doors| doors.reads.clone())
    }

    /// Begins to answer writes.
    pub fn serve_writes(&self, writer: &Writer) -> Door<Write> {
        self.writer.replace(Some(writer.clone()));
        self.with_doors(|doors| doors.writes.clone())
    }

    fn with_doors<T>(&self, f: impl FnOnce(&Doors) -> T) -> T {
        f(self.doors.borrow().as_ref().expect("the doors are dropped at the end only"))
    }

    /// The core's reader.
    ///
    /// # Panics
    /// Before [`Hall::serve_reads`]: nobody has the door then.
    pub fn reader(&self) -> Reader {
        self.reader.borrow().clone().expect("reads come after the reader")
    }

    /// The writer, on the core that owns the database.
    ///
    /// # Panics
    /// Before [`Hall::serve_writes`], or on another core: nobody has the door then.
    pub fn writer(&self) -> Writer {
        self.writer.borrow().clone().expect("writes come after the writer")
    }

    /// Counts a read.
    pub fn read_runs(self: &Rc<Hall>) -> Runs {
        self.reads.0.set(self.reads.0.get() + 1);
        Runs(self.clone(), |hall| &hall.reads)
    }

    /// Counts a write.
    pub fn write_runs(self: &Rc<Hall>) -> Runs {
        self.writes.0.set(self.writes.0.get() + 1);
        Runs(self.clone(), |hall| &hall.writes)
    }

    /// A name for a snapshot or a cursor, for its caller to hold.
    pub fn new_handle(&self) -> Handle {
        let id = self.next_handle.get();
        self.next_handle.set(id + 1);
        self.with_doors(|doors| Handle {
            id,
            core: self.core.id(),
            releases: doors.releases.clone(),
            bell: doors.reads.bell.clone(),
        })
    }

    /// Drops what a caller has released.
    pub fn release(&self, id: u64) {
        let snapshot = self.snapshots.borrow_mut().remove(&id);
        let cursor = self.cursors.borrow_mut().remove(&id);
        drop((snapshot, cursor));
    }

    /// Waits until the core was told to stop and everything that was sent to it is done. No
    /// request is taken afterwards.
    pub async fn finished(&self) {
        let is_done = || self.drained.get() && self.reads.0.get() + self.writes.0.get() == 0;
        self.changed.wait_until(is_done).await;
        drop(self.poller.take());
        self.leave();
    }

    /// Drops everything that holds the database, and the core's reference to this hall, which has
    /// one to the core.
    pub fn leave(&self) {
        let (cursors, snapshots) = (self.cursors.take(), self.snapshots.take());
        let (reader, writer) = (self.reader.take(), self.writer.take());
        let hall = self.core.local::<Place>().0.take();
        drop((cursors, snapshots, reader, writer, hall));
    }
}
