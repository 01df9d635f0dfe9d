//! A [`TaskChannel`]: a channel for tasks, each of which waits for its own requests.
//!
//! A poller of the core takes the completions, and answers the task that waits. Dropping the
//! channel releases the device; operations in flight hold their buffers until they are done.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::{Rc, Weak};

use reactor::{Buf, Core, Event, OneshotReceiver, OneshotSender, Poller, PollerSlot, oneshot};

use crate::buf_channel::{BufChannel, BufDone, BufIo};
use crate::device::Bdev;
use crate::error::Error;
use crate::io::{Full, Status};

/// One core's access to a device, for tasks; see the module text.
pub struct TaskChannel {
    shared: Rc<Shared>,
    _poller: PollerSlot,
}

struct Shared {
    channel: RefCell<BufChannel>,
    waiting: RefCell<BTreeMap<u64, OneshotSender<BufDone>>>,
    /// The tag of the next request.
    next: Cell<u64>,
    ended: Rc<Event>,
}

impl TaskChannel {
    /// A channel to the device for this core.
    ///
    /// # Errors
    /// As for [`Bdev::channel`].
    pub fn new(device: &Bdev, core: &Core) -> Result<TaskChannel, Error> {
        TaskChannel::telling(device, core, Rc::default())
    }

    /// The same; `ended` is notified when requests have ended.
    ///
    /// # Errors
    /// As for [`Bdev::channel`].
    pub fn telling(device: &Bdev, core: &Core, ended: Rc<Event>) -> Result<TaskChannel, Error> {
        let shared = Rc::new(Shared {
            channel: RefCell::new(BufChannel::new(device, core)?),
            waiting: RefCell::default(),
            next: Cell::new(0),
            ended,
        });
        let pump = Pump { shared: Rc::downgrade(&shared), done: Vec::new() };
        Ok(TaskChannel { shared, _poller: core.add_poller(pump) })
    }

    /// Submits a request, whose tag is ignored: see [`BufChannel::submit`]. The receiver gets its
    /// end, or learns that the channel was dropped.
    ///
    /// # Errors
    /// When [`QUEUE_DEPTH`](crate::QUEUE_DEPTH) requests are in flight: gives the buffer back.
    pub fn submit(
        &self,
        io: BufIo,
        buf: Option<Buf>,
    ) -> Result<OneshotReceiver<BufDone>, (Full, Option<Buf>)> {
        let shared = &self.shared;
        let tag = shared.next.replace(shared.next.get() + 1);
        shared.channel.borrow_mut().submit(BufIo { tag, ..io }, buf)?;
        let (sender, answer) = oneshot();
        shared.waiting.borrow_mut().insert(tag, sender);
        // A memory device has completed it.
        shared.poll(&mut Vec::new());
        Ok(answer)
    }

    /// Runs a request, and gives its buffer back. Suspends until it has ended.
    pub async fn run(&self, io: BufIo, mut buf: Option<Buf>) -> (Status, Option<Buf>) {
        let answer = loop {
            match self.submit(io, buf) {
                Ok(answer) => break answer,
                Err((Full, back)) => buf = back,
            }
            self.shared.ended.wait().await;
        };
        match answer.await {
            Ok(BufDone { status, buf, .. }) => (status, buf),
            Err(reactor::Closed) => (Status::IoError, None),
        }
    }

    /// The device of the channel.
    pub fn device(&self) -> Bdev {
        self.shared.channel.borrow().device().clone()
    }
}

impl std::fmt::Debug for TaskChannel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let in_flight = self.shared.channel.borrow().in_flight();
        write!(f, "TaskChannel({in_flight} requests in flight)")
    }
}

impl Shared {
    /// Answers the tasks whose requests have completed; true if there was one.
    fn poll(&self, done: &mut Vec<BufDone>) -> bool {
        self.channel.borrow_mut().poll(done);
        let any = !done.is_empty();
        for done in done.drain(..) {
            let sender = self.waiting.borrow_mut().remove(&done.tag);
            // The task may have gone.
            let _ = sender.map(|sender| sender.send(done));
        }
        if any {
            self.ended.notify_all();
        }
        any
    }
}

/// Takes the completions in every turn of the core.
struct Pump {
    shared: Weak<Shared>,
    done: Vec<BufDone>,
}

impl Poller for Pump {
    fn poll(&mut self) -> bool {
        self.shared.upgrade().is_some_and(|shared| shared.poll(&mut self.done))
    }

    fn pure_check(&mut self) -> bool {
        self.shared.upgrade().is_some_and(|shared| shared.channel.borrow().ready())
    }

    fn arm(&mut self) -> bool {
        !self.pure_check()
    }

    fn disarm(&mut self) {}
}
