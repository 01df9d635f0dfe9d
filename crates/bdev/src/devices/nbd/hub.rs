//! The connection of a device, on the core that has opened it.
//!
//! ```text
//!   inbox --> accepted: jobs, queue --> sent: ClientReplies --> answered: Ticket
//!                          ^                  |
//!                          '---- lost <-------'
//! ```
//!
//! A poller takes requests out of the inbox. One task makes connections, one after the other. While
//! there is one it sends what is queued and receives replies; then it queues again what was not
//! answered, in its order. A [`Ticket`] that is dropped answers with an error, so that no channel
//! waits in vain, whatever ends the hub.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::pin::pin;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use nbdproto::{Action, Answered, ClientHandshake, ClientReplies, Expect, Export, Fault};
use reactor::inbox::{Inbox, Sender};
use reactor::reply::ReplySender;
use reactor::{Bell, Class, Core, Either, Event, Extent, Poller, Socket, race, timeout};

use super::Shared;
use super::dial::Dial;
use crate::io::Status;
use crate::uri::NbdExport;

/// Most requests that wait in an inbox. It is never full: the pieces of a channel are bounded.
pub const REQUESTS_MAX: usize = 1 << 20;
/// How long a connection and its handshake may take, in nanoseconds.
const CONNECT_NS: u64 = 10_000_000_000;
/// A server whose machine is silent for this time is lost, in seconds.
const SILENT_SECONDS: u16 = 20;
/// The first pause before another connection, the longest one while requests wait, and the longest
/// one after they have failed, in nanoseconds.
const PAUSE_NS: u64 = 50_000_000;
const PAUSE_MAX_NS: u64 = 1_000_000_000;
const PAUSE_DOWN_MAX_NS: u64 = 5_000_000_000;
/// A connection that has lasted so long, or on which something was answered, counts as one: the
/// time for another one and the pauses begin anew when it is lost.
const STEADY_NS: u64 = 1_000_000_000;
/// Connections on which a request is sent before it fails.
const ATTEMPTS_MAX: u32 = 16;
/// Requests are sent together up to this many bytes, also with the data of short writes.
const BATCH_BYTES: usize = 64 << 10;
const SHORT_BYTES: usize = 16 << 10;
/// Most bytes of one receive.
const RECEIVE_BYTES: usize = 128 << 10;
/// The error of a server that shuts down: the next one may do the request.
const SHUTDOWN: u32 = 108;

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    Read,
    Write,
    Flush,
    Trim,
    Zeroes { unmap: bool },
    Extents { one: bool },
}

/// A request of a channel or a task, at most as long as the server takes it.
pub struct Request {
    pub what: What,
    pub offset: u64,
    pub len: u32,
    pub fua: bool,
    /// Of a write.
    pub data: Vec<u8>,
    pub ticket: Ticket,
}

/// An answer to a channel.
pub struct Answer {
    /// The request in the channel.
    pub slot: u32,
    /// Where the piece begins in the request's range.
    pub place: u64,
    /// What the piece holds of the channel's room.
    pub bytes: u64,
    pub status: Status,
    /// What was read.
    pub data: Vec<u8>,
}

/// Where the answer to a request goes. A ticket that is dropped answers with an error.
pub struct Ticket(Option<To>);

enum To {
    Channel { answers: Sender<Answer>, bell: Bell, slot: u32, place: u64, bytes: u64 },
    Task(ReplySender<Vec<Extent>>),
}

impl Ticket {
    pub fn of_channel(
        answers: Sender<Answer>,
        bell: Bell,
        slot: u32,
        place: u64,
        bytes: u64,
    ) -> Ticket {
        Ticket(Some(To::Channel { answers, bell, slot, place, bytes }))
    }

    pub fn of_task(answer: ReplySender<Vec<Extent>>) -> Ticket {
        Ticket(Some(To::Task(answer)))
    }

    fn answer(mut self, status: Status, data: Vec<u8>, extents: Vec<Extent>) {
        self.send(status, data, extents);
    }

    fn send(&mut self, status: Status, data: Vec<u8>, extents: Vec<Extent>) {
        match self.0.take() {
            Some(To::Channel { answers, bell, slot, place, bytes }) => {
                // The channel may have gone.
                drop(answers.send(Answer { slot, place, bytes, status, data }));
                bell.ring();
            }
            Some(To::Task(sender)) => sender.send(extents),
            None => {}
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.send(Status::IoError, Vec::new(), Vec::new());
    }
}

/// A request that is accepted and not answered.
struct Job {
    request: Request,
    /// The write is done, and the flush that makes it durable is not.
    flushes: bool,
    attempts: u32,
}

/// A connection after its handshake: what was agreed on, and what came after it.
pub type Connection = (Socket, Export, Vec<u8>);

/// The connection of a device; see the module text.
pub struct Hub {
    core: Core,
    /// For the log.
    name: String,
    export: String,
    dial: Dial,
    reconnect_ns: u64,
    /// What the device relies on.
    agreed: Export,
    shared: Arc<Shared>,
    jobs: RefCell<BTreeMap<u64, Job>>,
    /// Jobs that are to be sent on this connection.
    queue: RefCell<VecDeque<u64>>,
    /// The cookie of the next job.
    next: Cell<u64>,
    /// Requests fail at once while there is no connection, and when one is lost. Set until there
    /// is a steady connection.
    is_down: Cell<bool>,
    is_connected: Cell<bool>,
    /// When the requests fail, unless there is a steady connection before.
    until_ns: Cell<Option<u64>>,
    /// The pause before the next attempt to connect.
    pause_ns: Cell<u64>,
    /// Notified after each change of the fields above, and when the device has gone.
    changed: Event,
}

impl Hub {
    /// Starts the hub of a device, with a first connection.
    pub fn start(
        core: &Core,
        export: &NbdExport,
        dial: Dial,
        shared: Arc<Shared>,
        inbox: Inbox<Request>,
        first: Connection,
    ) {
        let hub = Rc::new(Hub {
            core: core.clone(),
            name: export.to_string(),
            export: export.export.clone(),
            dial,
            reconnect_ns: export.reconnect_ns,
            agreed: first.1.clone(),
            shared,
            jobs: RefCell::default(),
            queue: RefCell::default(),
            next: Cell::new(1),
            is_down: Cell::new(false),
            is_connected: Cell::new(true),
            until_ns: Cell::new(None),
            pause_ns: Cell::new(PAUSE_NS),
            changed: Event::new(),
        });
        let intake = Intake { hub: Rc::downgrade(&hub), inbox, has_seen_end: false };
        let intake = core.add_poller(intake);
        core.spawn(Class::Foreground, async move {
            hub.run(first).await;
            drop(intake);
        });
    }

    fn is_gone(&self) -> bool {
        self.shared.is_gone.load(Ordering::Relaxed)
    }

    fn accept(&self, mut request: Request) {
        let changes = matches!(request.what, What::Write | What::Zeroes { .. } | What::Flush);
        let is_away = self.is_down.get() && !self.is_connected.get();
        if is_away || changes && self.shared.flush_failed.load(Ordering::Relaxed) {
            // Its ticket answers with an error.
            return;
        }
        if request.what == What::Flush && !self.agreed.flushes() {
            // There is nothing that such a server could be asked.
            return request.ticket.answer(Status::Ok, Vec::new(), Vec::new());
        }
        request.fua &= self.agreed.takes_fua() || self.agreed.flushes();
        let cookie = self.next.replace(self.next.get() + 1);
        self.enqueue(cookie, Job { request, flushes: false, attempts: 0 });
    }

    fn enqueue(&self, cookie: u64, job: Job) {
        self.jobs.borrow_mut().insert(cookie, job);
        self.queue.borrow_mut().push_back(cookie);
    }

    /// Fails all requests.
    fn fail_all(&self) {
        self.queue.take();
        drop(self.jobs.take());
    }

    /// The time for a steady connection is over: fails all requests, also those that come while
    /// there is no connection.
    fn go_down(&self, why: &str) {
        if !self.is_down.replace(true) {
            let (server, failed) = (&self.name, self.jobs.borrow().len());
            tracing::error!(%server, failed, "an NBD server stays away: its requests fail: {why}");
        }
        self.fail_all();
    }

    async fn run(&self, first: Connection) {
        let mut connection = first;
        loop {
            let began_ns = self.core.now_ns();
            self.is_connected.set(true);
            let why = self.serve(connection).await;
            self.is_connected.set(false);
            let (Some(why), false) = (why, self.is_gone()) else { break };
            let now_ns = self.core.now_ns();
            if now_ns - began_ns >= STEADY_NS {
                self.is_steady();
            }
            let (server, waiting) = (&self.name, self.jobs.borrow().len());
            match self.until_ns.get() {
                None => {
                    self.until_ns.set(Some(now_ns.saturating_add(self.reconnect_ns)));
                    tracing::warn!(%server, waiting, "the connection to an NBD server is lost: {why}");
                }
                Some(until_ns) => {
                    tracing::debug!(%server, waiting, "lost again: {why}");
                    if now_ns >= until_ns {
                        self.go_down(&why);
                    }
                }
            }
            self.requeue();
            match self.reconnect().await {
                Some(again) => connection = again,
                None => break,
            }
            tracing::debug!(%server, "connected again");
        }
        self.fail_all();
    }

    /// The connection is a good one.
    fn is_steady(&self) {
        if self.until_ns.take().is_some() {
            tracing::info!(server = %self.name, "connected to an NBD server again");
        }
        self.pause_ns.set(PAUSE_NS);
        self.is_down.set(false);
    }

    /// Queues all that is not answered, and fails what has been sent too often.
    fn requeue(&self) {
        let mut jobs = self.jobs.borrow_mut();
        jobs.retain(|_, job| job.attempts < ATTEMPTS_MAX);
        // What was written there and not flushed is written again, too.
        jobs.values_mut().for_each(|job| job.flushes = false);
        self.queue.replace(jobs.keys().copied().collect());
    }

    /// Whether an export can be used in place of the first one.
    fn is_same(&self, export: &Export) -> bool {
        export.replaces(&self.agreed, self.shared.piece_bytes as u32)
    }

    /// Makes another connection; `None` if the device has gone.
    async fn reconnect(&self) -> Option<Connection> {
        let core = &self.core;
        let mut nth: u32 = 0;
        loop {
            let pause_ns = self.pause_ns.get();
            let gone = self.changed.wait_until(|| self.is_gone());
            let until_ns = self.until_ns.get().unwrap_or(0);
            let left_ns = match self.is_down.get() {
                true => u64::MAX,
                false => until_ns.saturating_sub(core.now_ns()),
            };
            let attempt = async {
                // Connections that are lost again and again must not follow one another at once.
                core.sleep_ns(pause_ns.min(left_ns.max(PAUSE_NS))).await;
                let left_ns = left_ns.saturating_sub(pause_ns).max(PAUSE_NS);
                let tried = connect(core, &self.dial, &self.export, nth);
                let late = || io::Error::from(io::ErrorKind::TimedOut);
                timeout(core, left_ns, tried).await.unwrap_or_else(|_| Err(late()))
            };
            let tried = race(gone, attempt).await;
            let longest = if self.is_down.get() { PAUSE_DOWN_MAX_NS } else { PAUSE_MAX_NS };
            self.pause_ns.set((2 * pause_ns).min(longest));
            let why = match tried {
                Either::First(()) => return None,
                Either::Second(Ok(again)) if self.is_same(&again.1) => return Some(again),
                Either::Second(Ok(_)) => "the server has another export of that name".to_owned(),
                Either::Second(Err(error)) => error.to_string(),
            };
            tracing::debug!(server = %self.name, "no connection to an NBD server: {why}");
            if !self.is_down.get() && core.now_ns() >= until_ns {
                self.go_down(&why);
            }
            nth = nth.wrapping_add(1);
        }
    }

    /// Uses a connection until it is lost, and returns why; `None` if the device has gone and
    /// nothing of it is left.
    async fn serve(&self, (socket, agreed, input): Connection) -> Option<String> {
        let replies = RefCell::new(ClientReplies::new(&agreed));
        let stop = Cell::new(false);
        let mut sending = pin!(self.send_all(&socket, &replies, &stop));
        let receiving = self.receive_all(&socket, &replies, input);
        let left = self.changed.wait_until(|| self.is_gone() && self.jobs.borrow().is_empty());
        let ended = race(left, race(receiving, sending.as_mut())).await;
        stop.set(true);
        self.changed.notify_all();
        let why = match ended {
            Either::First(()) => {
                let mut bye = Vec::new();
                Action::Disconnect.encode(&mut bye, 0, 0, 0);
                // A server that takes nothing is not waited for.
                let _ = timeout(&self.core, PAUSE_NS, socket.send(bye)).await;
                socket.shutdown();
                None
            }
            // Requests on their way are dropped: they are repeated, and must not arrive later.
            Either::Second(Either::First(why)) => {
                socket.reset();
                Some(why)
            }
            Either::Second(Either::Second(why)) => {
                socket.reset();
                return Some(why);
            }
        };
        // It has the data of a job.
        sending.await;
        why
    }

    /// Sends what is queued, until `stop` or a failure.
    async fn send_all(
        &self,
        socket: &Socket,
        replies: &RefCell<ClientReplies>,
        stop: &Cell<bool>,
    ) -> String {
        let mut batch = Vec::new();
        loop {
            self.changed.wait_until(|| stop.get() || !self.queue.borrow().is_empty()).await;
            if stop.get() {
                return String::new();
            }
            batch.clear();
            let mut long = None;
            while long.is_none() && batch.len() < BATCH_BYTES {
                let Some(cookie) = self.queue.borrow_mut().pop_front() else { break };
                long = self.encode(cookie, replies, &mut batch);
            }
            let (sent, back) = socket.send(batch).await;
            batch = back;
            if let Err(error) = sent {
                self.put_back(long);
                return error.to_string();
            }
            if let Some((cookie, data)) = long {
                let (sent, data) = socket.send(data).await;
                self.put_back(Some((cookie, data)));
                if let Err(error) = sent {
                    return error.to_string();
                }
            }
        }
    }

    /// Appends a request to the batch. Returns the data to be sent after it, if it is long.
    fn encode(
        &self,
        cookie: u64,
        replies: &RefCell<ClientReplies>,
        batch: &mut Vec<u8>,
    ) -> Option<(u64, Vec<u8>)> {
        let mut jobs = self.jobs.borrow_mut();
        let job = jobs.get_mut(&cookie)?;
        let Request { what, offset, len, fua, .. } = job.request;
        job.attempts += 1;
        // Without the flag a flush follows.
        let fua = fua && self.agreed.takes_fua();
        let (action, expect) = match what {
            _ if job.flushes => (Action::Flush, Expect::Nothing),
            What::Read => (Action::Read, Expect::Data),
            What::Write => (Action::Write { fua }, Expect::Nothing),
            What::Flush => (Action::Flush, Expect::Nothing),
            What::Trim => (Action::Trim { fua }, Expect::Nothing),
            What::Zeroes { unmap } => (Action::WriteZeroes { fua, unmap }, Expect::Nothing),
            What::Extents { one } => (Action::BlockStatus { one }, Expect::Extents),
        };
        let (offset, len) = if action == Action::Flush { (0, 0) } else { (offset, len) };
        replies.borrow_mut().expect(cookie, expect, offset, len);
        action.encode(batch, cookie, offset, len);
        if !matches!(action, Action::Write { .. }) {
            return None;
        }
        if job.request.data.len() <= SHORT_BYTES {
            batch.extend_from_slice(&job.request.data);
            return None;
        }
        Some((cookie, std::mem::take(&mut job.request.data)))
    }

    /// Gives a job its data back, in case that it is sent again.
    fn put_back(&self, data: Option<(u64, Vec<u8>)>) {
        if let Some((cookie, data)) = data
            && let Some(job) = self.jobs.borrow_mut().get_mut(&cookie)
        {
            job.request.data = data;
        }
    }

    /// Receives replies, until the connection is lost.
    async fn receive_all(
        &self,
        socket: &Socket,
        replies: &RefCell<ClientReplies>,
        mut input: Vec<u8>,
    ) -> String {
        loop {
            let mut at = 0;
            loop {
                let (used, answered) = match replies.borrow_mut().take(&input[at..]) {
                    Ok(taken) => taken,
                    Err(fault) => return fault.to_string(),
                };
                at += used;
                match answered {
                    Some(answered) => {
                        if let Err(why) = self.answered(answered) {
                            return why;
                        }
                    }
                    None if used == 0 => break,
                    None => {}
                }
            }
            input.drain(..at);
            let (received, back) = socket.recv(input, RECEIVE_BYTES).await;
            input = back;
            match received {
                Ok(0) => return "the server has ended it".to_owned(),
                Ok(_) => {}
                Err(error) => return error.to_string(),
            }
        }
    }

    /// Answers a request.
    ///
    /// # Errors
    /// When another server has to do it.
    fn answered(&self, answered: Answered) -> Result<(), String> {
        let Answered { cookie, errno, data, extents } = answered;
        if errno == SHUTDOWN {
            return Err("the server shuts down".to_owned());
        }
        self.is_steady();
        let Some(mut job) = self.jobs.borrow_mut().remove(&cookie) else { return Ok(()) };
        let is_flush = job.flushes || job.request.what == What::Flush;
        if is_flush && errno != 0 {
            let server = &self.name;
            tracing::error!(%server, errno, "an NBD server has failed a flush: no more is written");
            self.shared.flush_failed.store(true, Ordering::Relaxed);
        }
        // Which of the writes it has lost is unknown: no flush beside it is good.
        let has_lost =
            self.shared.flush_failed.load(Ordering::Relaxed) && (is_flush || job.request.fua);
        let flushes_next = job.request.fua && !self.agreed.takes_fua() && !is_flush;
        if errno == 0 && flushes_next && !has_lost {
            // With the same cookie, because the sender may still have the data.
            job.flushes = true;
            self.enqueue(cookie, job);
            self.changed.notify_all();
            return Ok(());
        }
        let status = if has_lost { Status::IoError } else { Status::of(errno.cast_signed()) };
        let extent =
            |found: &nbdproto::Extent| Extent { len: found.len.into(), is_hole: found.hole };
        let extents = extents.iter().map(extent).collect();
        job.request.ticket.answer(status, data, extents);
        if self.is_gone() {
            self.changed.notify_all();
        }
        Ok(())
    }
}

/// Connects to a server, and shakes hands.
///
/// # Errors
/// When there is none, it refuses, or it takes longer than 10 s.
pub async fn connect(core: &Core, dial: &Dial, export: &str, nth: u32) -> io::Result<Connection> {
    let late = "the server does not answer".to_owned();
    let late = || io::Error::new(io::ErrorKind::TimedOut, late);
    let made = async {
        let socket = dial.connect(core, nth).await?;
        // A server that cannot be watched is used all the same.
        let _ = socket.fail_if_silent(SILENT_SECONDS);
        shake_hands(socket, export).await
    };
    timeout(core, CONNECT_NS, made).await.unwrap_or_else(|_| Err(late()))
}

async fn shake_hands(socket: Socket, export: &str) -> io::Result<Connection> {
    let violated = |fault: Fault| io::Error::other(fault.to_string());
    let (mut handshake, mut input, mut out) =
        (ClientHandshake::new(export), Vec::new(), Vec::new());
    loop {
        let (used, agreed) = handshake.take(&input, &mut out).map_err(violated)?;
        input.drain(..used);
        if !out.is_empty() {
            let (sent, back) = socket.send(out).await;
            sent?;
            out = back;
            out.clear();
        }
        if let Some(agreed) = agreed {
            return Ok((socket, agreed, input));
        }
        if used == 0 {
            let (received, back) = socket.recv(input, RECEIVE_BYTES).await;
            input = back;
            if received? == 0 {
                return Err(io::Error::new(
                    io::ErrorKind::ConnectionReset,
                    "the server ends the connection",
                ));
            }
        }
    }
}

/// Takes requests out of the inbox in every turn of the core.
struct Intake {
    hub: Weak<Hub>,
    inbox: Inbox<Request>,
    /// The hub knows that the device has gone.
    has_seen_end: bool,
}

impl Intake {
    fn ends(&self, hub: &Hub) -> bool {
        hub.is_gone() && !self.has_seen_end
    }
}

impl Poller for Intake {
    fn poll(&mut self) -> bool {
        let Some(hub) = self.hub.upgrade() else { return false };
        let mut any = self.ends(&hub);
        self.has_seen_end |= any;
        while let Some(request) = self.inbox.pop() {
            hub.accept(request);
            any = true;
        }
        if any {
            hub.changed.notify_all();
        }
        any
    }

    fn pure_check(&mut self) -> bool {
        let ends = self.hub.upgrade().is_some_and(|hub| self.ends(&hub));
        ends || self.inbox.pure_check()
    }

    fn arm(&mut self) -> bool {
        !self.pure_check()
    }

    fn disarm(&mut self) {}
}
