//! Where the front ends of a disk come in. The launcher listens for them and has their sockets, so
//! that a connection outlives the node behind it: see [`vhost::kept`].
//!
//! 1. [`FrontDoor::attach`] gives a node the disk: it gets a packet socket, the *door*, on which
//!    each packet brings one connection. A connection is one more packet socket. Both travel with
//!    the disk when a node hands it over, and the launcher does not notice.
//! 2. One task accepts a connection when the one before it has ended in the node, too. Then it
//!    moves messages one way, commits and replies the other way, as [`Keeper`] says.
//! 3. A node that dies closes its ends. The connection waits, with at most one message, for the
//!    node that is attached next.
//! 4. The front end's end closes the connection's packet socket for writing; the node then ends the
//!    connection, and closes it, too. If the node wants the end, it says so first: a socket that is
//!    closed without a word is that of a node that has died.
//!
//! A descriptor of a front end is only kept when it was admitted ([`reactor::may_admit`]): else
//! closing it could block all disks. Those that are refused are closed on a thread, and until then
//! nobody else connects to the disk.
//!
//! All state is here and none in a future, so the task may be dropped and started again at any
//! time: [`FrontDoor::freeze`], before the launcher's program is replaced. After each change it is
//! recorded ([`FrontDoor::keep`]) if a service manager keeps it for the next launcher.

use std::cell::{Cell, RefCell};
use std::future::pending;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;

use reactor::{
    Class, Core, Either, Event, JoinHandle, Packet, UnixListener, UnixPackets, UnixSocket, race,
};
use serde::{Deserialize, Serialize};
use vhost::kept::{Keeper, KeeperState, OpenMessage, PACKET_BYTES_MAX, Snapshot, Taken};

use super::store::{Change, Kept};
use crate::mutant::{Mutant, is};

/// Pause after a failed accept, and between attempts to send to a full socket, in nanoseconds.
const ACCEPT_NS: u64 = 100_000_000;
const ROOM_NS: u64 = 1_000_000;
/// Attempts before a front end that reads no replies is disconnected: ten seconds.
const ATTEMPTS_MAX: u32 = 10_000;

/// The way in for the front ends of a disk.
pub(crate) struct FrontDoor {
    core: Core,
    /// The disk.
    name: String,
    /// `None` when it has closed.
    listener: RefCell<Option<Rc<UnixListener>>>,
    /// The node's door.
    door: RefCell<Option<UnixPackets>>,
    session: RefCell<Option<Session>>,
    /// Nobody is accepted any more.
    closed: Cell<bool>,
    /// The number of nodes that were attached.
    attached: Cell<u64>,
    /// The number of threads that close descriptors which were not admitted.
    closing: Cell<usize>,
    /// Where the state is kept for another launcher.
    kept: RefCell<Option<Kept>>,
    /// Notified after each change of these by anyone but the task.
    changed: Event,
    task: RefCell<Option<JoinHandle<()>>>,
}

/// A connection.
struct Session {
    /// The front end's socket; `None` when it has gone or was closed.
    socket: Option<UnixSocket>,
    /// The same, while it has yet to be closed.
    gone: Option<UnixSocket>,
    /// The way to the node; `None` when it has died, or has ended the connection.
    packets: Option<UnixPackets>,
    keeper: Keeper,
    /// The node has the open message.
    told: bool,
    /// What has come with descriptors that are not admitted yet.
    arrived: Option<(Vec<u8>, Rc<Vec<OwnedFd>>)>,
}

/// How many bytes came from a front end, and the descriptors with them.
type Bytes = (usize, Vec<OwnedFd>);

/// What the connection waits for.
enum Due {
    /// The front end's socket is to be closed.
    Close(UnixSocket),
    /// These descriptors are to be admitted.
    Admit(Rc<Vec<OwnedFd>>),
    /// A reply has to be sent.
    Reply(UnixSocket),
    /// Bytes of the front end, at most so many; packets of the node.
    Wait(Option<(UnixSocket, usize)>, Option<UnixPackets>),
    /// It has ended.
    Over,
}

/// A door in numbers, for the launcher's next program. Descriptors travel beside it.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct DoorState {
    door: bool,
    session: Option<SessionState>,
}

#[derive(Debug, Serialize, Deserialize)]
struct SessionState {
    packets: bool,
    told: bool,
    pid: u32,
    partial: Vec<u8>,
    partial_descriptors: usize,
    next: u32,
    kept: Vec<u32>,
    document: Vec<u8>,
    numbers: Vec<u32>,
    /// The open message, and the numbers of its descriptors.
    open: Option<(Vec<u8>, u32, u32)>,
    reply: Vec<u8>,
    reply_descriptor: bool,
}

impl DoorState {
    /// Forgets the connection; its descriptors are left over.
    pub(super) fn close(&mut self) {
        self.session = None;
    }
}

impl Session {
    /// Takes a packet of the node.
    fn take(&mut self, name: &str, (bytes, descriptors): Packet) {
        match self.keeper.take(&bytes, descriptors) {
            Ok(Taken::Released(gone)) => {
                self.told &= self.keeper.is_open();
                reactor::drop_in_background(gone);
            }
            Ok(Taken::Close) => self.close(),
            Err(why) => {
                tracing::error!(disk = name, "the node sends {why}: closing the connection");
                self.close();
                self.packets = None;
            }
        }
    }

    fn close(&mut self) {
        self.gone = self.socket.take().or(self.gone.take());
    }

    /// Closes the front end's socket, and lets the node end the connection.
    fn end(&mut self) {
        self.close();
        if let Some(packets) = &self.packets {
            packets.end();
        }
    }

    /// Takes what has come from the front end.
    fn push(&mut self, name: &str, bytes: &[u8], descriptors: Vec<OwnedFd>) {
        if let Err(why) = self.keeper.push(bytes, descriptors) {
            tracing::warn!(disk = name, "the connection was closed: {why}");
            self.end();
        }
    }

    fn due(&mut self) -> Due {
        if let Some(gone) = self.gone.take() {
            return Due::Close(gone);
        }
        if let Some((_, descriptors)) = &self.arrived {
            return Due::Admit(descriptors.clone());
        }
        if let (Some(socket), Some(_)) = (&self.socket, self.keeper.reply()) {
            return Due::Reply(socket.clone());
        }
        if let (Some(packets), Some((bytes, descriptors)), false) =
            (&self.packets, self.keeper.message(), self.told)
        {
            // The node has committed the message before, so there is room; or it has died.
            match packets.try_send(&bytes, &descriptors) {
                Err(error) if !has_gone(&error) => {
                    tracing::error!(pid = self.keeper.pid(), "a message is not passed on: {error}");
                    self.end();
                }
                _ => self.told = true,
            }
        }
        if self.socket.is_none() && self.packets.is_none() {
            return Due::Over;
        }
        let front_end = self.socket.clone().zip(self.keeper.wanted());
        Due::Wait(front_end, self.packets.clone())
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // The launcher may be the last that has the memory of the machine.
        reactor::drop_in_background(std::mem::take(&mut self.keeper));
    }
}

impl FrontDoor {
    pub(crate) fn new(core: &Core, name: &str, listener: UnixListener) -> Rc<FrontDoor> {
        let door = FrontDoor {
            core: core.clone(),
            name: name.to_owned(),
            listener: RefCell::new(Some(Rc::new(listener))),
            door: RefCell::default(),
            session: RefCell::default(),
            closed: Cell::new(false),
            attached: Cell::new(0),
            closing: Cell::new(0),
            kept: RefCell::default(),
            changed: Event::new(),
            task: RefCell::default(),
        };
        let door = Rc::new(door);
        door.thaw();
        door
    }

    /// Gives a node the disk; returns the node's end of its door. A connection that another node
    /// has had continues there.
    pub(crate) fn attach(&self) -> io::Result<OwnedFd> {
        let (ours, theirs) = UnixPackets::pair()?;
        let door = UnixPackets::from_fd(&self.core, ours)?;
        if let Some(session) = &mut *self.session.borrow_mut() {
            // What the node before has sent counts.
            while let Some(packets) = session.packets.clone() {
                match packets.try_recv(PACKET_BYTES_MAX) {
                    Ok(packet) if !packet.0.is_empty() => session.take(&self.name, packet),
                    _ => break,
                }
            }
            session.packets = None;
            if session.socket.is_some() {
                self.pass(session, &door)?;
            }
        }
        self.door.replace(Some(door));
        self.attached.set(self.attached.get() + 1);
        self.keep();
        self.changed.notify_all();
        Ok(theirs)
    }

    /// Passes a connection to the node at a door.
    fn pass(&self, session: &mut Session, door: &UnixPackets) -> io::Result<()> {
        let (ours, theirs) = UnixPackets::pair()?;
        let packets = UnixPackets::from_fd(&self.core, ours)?;
        if is(Mutant::ForgetsTheSession) {
            session.keeper = Keeper::new(session.keeper.pid());
        }
        for (bytes, descriptors) in session.keeper.opening() {
            packets.try_send(&bytes, &descriptors)?;
        }
        door.try_send(&[0], &[theirs.as_fd()])?;
        session.packets = Some(packets);
        if !is(Mutant::PassesOnOnce) {
            session.told = false;
        }
        Ok(())
    }

    /// Accepts nobody any more. A connection that a node has goes on until the node ends it.
    pub(super) fn close(&self) {
        self.closed.set(true);
        self.door.replace(None);
        self.forget();
        self.changed.notify_all();
    }

    /// Whether there is a connection.
    pub(super) fn is_connected(&self) -> bool {
        self.session.borrow().is_some()
    }

    /// Takes what has happened after the state was recorded by another launcher.
    pub(super) fn catch_up(&self, changes: Vec<Change>) {
        let Some(session) = &mut *self.session.borrow_mut() else { return };
        for change in changes {
            match change {
                Change::Received(bytes, descriptors) => {
                    if session.keeper.push(&bytes, descriptors).is_err() {
                        session.end();
                    }
                }
                Change::Sent(count) if session.keeper.reply().is_some() => {
                    drop(session.keeper.sent(count));
                }
                Change::Sent(_) => session.end(),
            }
        }
    }

    /// Keeps the state for another launcher from now on.
    pub(super) fn keep_in(&self, kept: Kept) {
        // What has arrived and is not admitted would be lost: then the next launcher closes the
        // connection.
        let arrived = |session: &Session| session.arrived.is_some();
        let arrived = self.session.borrow().as_ref().is_some_and(arrived);
        self.with_state(false, |state, descriptors| kept.record(state, descriptors));
        if arrived {
            kept.begin();
        }
        if let Some(before) = self.kept.replace(Some(kept)) {
            before.forget();
        }
    }

    /// The number under which the state is kept for another launcher.
    pub(super) fn kept(&self) -> Option<u64> {
        self.kept.borrow().as_ref().map(Kept::number)
    }

    /// Keeps nothing any more.
    pub(super) fn forget(&self) {
        if let Some(kept) = self.kept.take() {
            kept.forget();
        }
    }

    /// Records the state for another launcher, after each change.
    fn keep(&self) {
        let kept = self.kept.borrow();
        let Some(kept) = &*kept else { return };
        if self.session.borrow().as_ref().is_none_or(|session| session.arrived.is_none()) {
            self.with_state(false, |state, descriptors| kept.record(state, descriptors));
        }
    }

    /// Stops to move anything. Nothing is lost: it waits in the sockets.
    pub(crate) fn freeze(&self) {
        if let Some(task) = self.task.take() {
            task.cancel();
        }
    }

    /// Begins or continues to move.
    pub(super) fn thaw(self: &Rc<Self>) {
        self.freeze();
        let door = self.clone();
        self.task.replace(Some(self.core.spawn(Class::Control, door.run())));
    }

    async fn run(self: Rc<Self>) {
        loop {
            if self.session.borrow().is_some() {
                self.pass_on().await;
                self.keep();
                self.serve().await;
                let session = self.session.replace(None);
                let socket = session.and_then(|mut session| session.socket.take());
                if let Some(socket) = socket {
                    self.close_socket(socket);
                }
                self.keep();
            }
            if self.closed.get() {
                if let Some(listener) = self.listener.take() {
                    self.close_elsewhere(async |core: &Core| match Rc::into_inner(listener) {
                        Some(listener) => reactor::close_door(core, listener).await,
                        None => Ok(()),
                    });
                }
                return;
            }
            self.accept().await;
        }
    }

    /// Waits for a node and for a front end.
    async fn accept(&self) {
        let ready = || self.door.borrow().is_some() && self.closing.get() == 0;
        self.changed.wait_until(|| self.closed.get() || ready()).await;
        let closed = self.changed.wait_until(|| self.closed.get());
        let Some(listener) = self.listener.borrow().clone() else { return };
        let socket = match race(closed, listener.accept()).await {
            Either::First(()) => return,
            Either::Second(Ok(socket)) => socket,
            Either::Second(Err(error)) => {
                tracing::warn!(disk = self.name, "accepting a connection: {error}");
                return self.core.sleep_ns(ACCEPT_NS).await;
            }
        };
        let keeper = Keeper::new(socket.peer_pid().unwrap_or(0));
        let session = Session {
            socket: Some(socket),
            gone: None,
            packets: None,
            keeper,
            told: false,
            arrived: None,
        };
        self.session.replace(Some(session));
    }

    /// Passes the connection to the node, if there is one that does not have it.
    async fn pass_on(&self) {
        loop {
            let passed = match (&*self.door.borrow(), &mut *self.session.borrow_mut()) {
                (Some(door), Some(session)) if session.packets.is_none() => {
                    self.pass(session, door)
                }
                _ => return,
            };
            match passed {
                Ok(()) => return,
                Err(error) if has_gone(&error) => {
                    // The node has died; the next one gets it.
                    self.door.replace(None);
                    return tracing::debug!(disk = self.name, "passing a connection on: {error}");
                }
                // The system has no descriptors left, for example.
                Err(error) => {
                    tracing::warn!(disk = self.name, "passing a connection on: {error}");
                    self.core.sleep_ns(ACCEPT_NS).await;
                }
            }
        }
    }

    /// Serves the connection to its end.
    async fn serve(self: &Rc<Self>) {
        let mut bytes = Vec::new();
        loop {
            let attached = self.attached.get();
            let due = match &mut *self.session.borrow_mut() {
                Some(session) => session.due(),
                None => Due::Over,
            };
            let (front_end, packets) = match due {
                Due::Over => return,
                Due::Close(socket) => {
                    self.close_socket(socket);
                    continue;
                }
                Due::Admit(descriptors) => {
                    let closes = self.changed.wait_until(|| self.closed.get());
                    let admitted = reactor::may_admit(&self.core, &descriptors);
                    let admitted = match race(admitted, closes).await {
                        Either::First(admitted) => admitted,
                        Either::Second(()) => Ok(false),
                    };
                    drop(descriptors);
                    self.admit(admitted);
                    self.keep();
                    continue;
                }
                Due::Reply(socket) => {
                    self.reply(&socket).await;
                    self.keep();
                    continue;
                }
                // It was detached, and no node comes for it.
                Due::Wait(_, None) if self.closed.get() => return,
                Due::Wait(front_end, packets) => (front_end, packets),
            };
            let closed = self.closed.get();
            let changed = self
                .changed
                .wait_until(|| self.attached.get() != attached || self.closed.get() != closed);
            bytes.clear();
            let from_front_end = async {
                match front_end {
                    Some((socket, most)) => self.receive(&socket, &mut bytes, most).await,
                    None => pending().await,
                }
            };
            let is_lost = packets.is_none() && self.door.borrow().is_some();
            let from_node = async {
                match packets {
                    Some(packets) => Some(packets.recv(PACKET_BYTES_MAX).await),
                    // A node that is alive could not take it.
                    None if is_lost => {
                        self.core.sleep_ns(ACCEPT_NS).await;
                        None
                    }
                    None => pending().await,
                }
            };
            match race(changed, race(from_node, from_front_end)).await {
                Either::First(()) => {}
                Either::Second(Either::First(Some(packet))) => self.take(packet),
                Either::Second(Either::First(None)) => self.pass_on().await,
                Either::Second(Either::Second(received)) => self.push(received, &bytes),
            }
            self.keep();
        }
    }

    /// Takes what has come from the node.
    fn take(&self, packet: io::Result<Packet>) {
        let Some(session) = &mut *self.session.borrow_mut() else { return };
        match packet {
            Ok(packet) if !packet.0.is_empty() => session.take(&self.name, packet),
            // The node has died, or has ended the connection.
            _ => session.packets = None,
        }
    }

    /// Takes what has come from the front end.
    fn push(&self, received: io::Result<Bytes>, bytes: &[u8]) {
        let Some(session) = &mut *self.session.borrow_mut() else { return };
        match received {
            Ok((0, _)) => session.end(),
            Ok((_, descriptors)) if descriptors.is_empty() => {
                session.push(&self.name, bytes, descriptors);
            }
            Ok((_, descriptors)) => session.arrived = Some((bytes.to_vec(), Rc::new(descriptors))),
            Err(error) => {
                tracing::warn!(disk = self.name, "the connection was closed: receiving: {error}");
                session.end();
            }
        }
    }

    /// Takes what has arrived with descriptors, or closes the connection and them.
    fn admit(self: &Rc<Self>, admitted: io::Result<bool>) {
        let Some(session) = &mut *self.session.borrow_mut() else { return };
        let Some((bytes, descriptors)) = session.arrived.take() else { return };
        let Some(descriptors) = Rc::into_inner(descriptors) else { return session.end() };
        let why = match admitted {
            Ok(true) => {
                self.kept.borrow().iter().for_each(|kept| kept.received(&bytes, &descriptors));
                return session.push(&self.name, &bytes, descriptors);
            }
            Ok(false) => "a descriptor could block this process".to_owned(),
            Err(error) => format!("a descriptor: {error}"),
        };
        tracing::warn!(disk = self.name, "the connection was closed: {why}");
        session.end();
        self.close_elsewhere(async |core: &Core| reactor::close_foreign(core, descriptors).await);
    }

    /// Closes a front end's socket, of which this is the last clone.
    fn close_socket(self: &Rc<Self>, socket: UnixSocket) {
        self.close_elsewhere(async |core: &Core| reactor::close_door(core, socket).await);
    }

    /// Closes what may block. Nobody is accepted until that is done.
    fn close_elsewhere(
        self: &Rc<Self>,
        close: impl AsyncFnOnce(&Core) -> io::Result<()> + 'static,
    ) {
        self.closing.set(self.closing.get() + 1);
        let door = self.clone();
        self.core.spawn(Class::Control, async move {
            if let Err(error) = close(&door.core).await {
                tracing::error!(disk = door.name, "closing what a front end has sent: {error}");
            }
            door.closing.set(door.closing.get() - 1);
            door.changed.notify_all();
        });
    }

    /// Whether descriptors of a front end are being admitted or closed.
    pub(super) fn is_busy(&self) -> bool {
        let arrived = |session: &Session| session.arrived.is_some() || session.gone.is_some();
        self.closing.get() > 0 || self.session.borrow().as_ref().is_some_and(arrived)
    }

    /// Receives from the front end.
    async fn receive(
        &self,
        socket: &UnixSocket,
        bytes: &mut Vec<u8>,
        most: usize,
    ) -> io::Result<(usize, Vec<OwnedFd>)> {
        while reactor::is_background_full() {
            self.core.sleep_ns(ROOM_NS).await;
        }
        loop {
            socket.readable().await?;
            self.kept.borrow().iter().for_each(Kept::begin);
            match socket.try_recv(bytes, most) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.keep(),
                Ok((count @ 1.., descriptors)) => {
                    if descriptors.is_empty() {
                        self.kept.borrow().iter().for_each(|kept| kept.received(bytes, &[]));
                    }
                    return Ok((count, descriptors));
                }
                done => return done,
            }
        }
    }

    /// Sends the reply that is due.
    async fn reply(&self, socket: &UnixSocket) {
        let mut attempts = 0;
        loop {
            {
                let mut session = self.session.borrow_mut();
                let Some(session) = &mut *session else { return };
                let Some((bytes, descriptor)) = session.keeper.reply() else { return };
                self.kept.borrow().iter().for_each(Kept::begin);
                let sent = socket.try_send(bytes, descriptor.as_slice());
                match sent {
                    Ok(count) => {
                        self.kept.borrow().iter().for_each(|kept| kept.sent(count));
                        attempts = 0;
                        reactor::drop_in_background(session.keeper.sent(count));
                    }
                    Err(error) if error.kind() != io::ErrorKind::WouldBlock => {
                        return session.end();
                    }
                    Err(_) if attempts == ATTEMPTS_MAX => {
                        tracing::warn!(disk = self.name, "the front end reads no replies: closing");
                        return session.end();
                    }
                    Err(_) => attempts += 1,
                }
            }
            self.keep();
            if attempts > 0 {
                self.core.sleep_ns(ROOM_NS).await;
            }
        }
    }

    /// Everything, for another program, while frozen.
    pub(crate) fn export(&self) -> io::Result<(DoorState, Vec<OwnedFd>)> {
        self.with_state(true, |state, descriptors| {
            let own = descriptors.iter().map(|fd| fd.try_clone_to_owned());
            Ok((state, own.collect::<io::Result<_>>()?))
        })
    }

    /// Calls `look` with everything, or with everything but the node's door.
    fn with_state<T>(
        &self,
        with_door: bool,
        look: impl FnOnce(DoorState, &[BorrowedFd<'_>]) -> T,
    ) -> T {
        let (door, session) = (self.door.borrow(), self.session.borrow());
        let door = door.as_ref().filter(|_| with_door);
        let listener = self.listener.borrow();
        let mut descriptors: Vec<_> = listener.iter().map(|listener| listener.as_fd()).collect();
        descriptors.extend(door.iter().map(|door| door.as_fd()));
        let mut state = DoorState { door: door.is_some(), session: None };
        // A connection without a front end only waits for the node to end it.
        if let Some((session, socket)) =
            session.as_ref().and_then(|session| Some((session, session.socket.as_ref()?)))
        {
            let (kept, own) = session.keeper.export();
            descriptors.push(socket.as_fd());
            descriptors.extend(session.packets.iter().map(AsFd::as_fd));
            descriptors.extend(own);
            state.session = Some(SessionState {
                packets: session.packets.is_some(),
                told: session.told,
                pid: kept.pid,
                partial: kept.partial,
                partial_descriptors: kept.partial_descriptors,
                next: kept.next,
                kept: kept.kept,
                document: kept.snapshot.document,
                numbers: kept.snapshot.numbers,
                open: kept.open.map(|open| (open.bytes, open.numbers.start, open.numbers.end)),
                reply: kept.reply,
                reply_descriptor: kept.reply_descriptor,
            });
        }
        look(state, &descriptors)
    }

    /// The inverse of [`FrontDoor::export`].
    pub(crate) fn import(
        core: &Core,
        name: &str,
        state: DoorState,
        descriptors: Vec<OwnedFd>,
    ) -> io::Result<Rc<FrontDoor>> {
        let missing = || io::Error::new(io::ErrorKind::InvalidData, "a descriptor is missing");
        let mut descriptors = descriptors.into_iter();
        let mut next = || descriptors.next().ok_or_else(missing);
        let listener = UnixListener::from_fd(core, next()?)?;
        let door = state.door.then(&mut next).transpose()?;
        let door = door.map(|fd| UnixPackets::from_fd(core, fd)).transpose()?;
        let session = match state.session {
            None => None,
            Some(state) => {
                let socket = UnixSocket::from_fd(core, next()?)?;
                let packets = state.packets.then(&mut next).transpose()?;
                let packets = packets.map(|fd| UnixPackets::from_fd(core, fd)).transpose()?;
                let kept = KeeperState {
                    pid: state.pid,
                    partial: state.partial,
                    partial_descriptors: state.partial_descriptors,
                    next: state.next,
                    kept: state.kept,
                    snapshot: Snapshot { document: state.document, numbers: state.numbers },
                    open: state
                        .open
                        .map(|(bytes, from, to)| OpenMessage { bytes, numbers: from..to }),
                    reply: state.reply,
                    reply_descriptor: state.reply_descriptor,
                };
                let keeper = Keeper::import(kept, descriptors.collect()).ok_or_else(missing)?;
                Some(Session {
                    socket: Some(socket),
                    gone: None,
                    packets,
                    keeper,
                    told: state.told,
                    arrived: None,
                })
            }
        };
        let front_door = FrontDoor::new(core, name, listener);
        front_door.door.replace(door);
        front_door.session.replace(session);
        Ok(front_door)
    }
}

/// Whether an error says that the process at the other end has gone.
fn has_gone(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionRefused, ConnectionReset, NotConnected};
    matches!(error.kind(), BrokenPipe | ConnectionRefused | ConnectionReset | NotConnected)
}
