//! A [`Link`]: one connection, plain or secured.
//!
//! One task reads. What is to be sent waits in a queue, which a task of the link's own sends in
//! order; with TLS it seals at most [`SEAL_BYTES`] at a time, so that others get their turns. The
//! callers bound what waits there; [`Link::until_short`] helps.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fmt;
use std::io::{Read, Write};
use std::rc::Rc;

use reactor::{Buf, Class, Core, Event, Part, Slice, Socket};

use crate::wire::{Frame, HEADER_BYTES, Kind, Violation, check};

/// Most bytes of one receive.
const RECEIVE_BYTES: usize = 64 << 10;
/// Most bytes that are sealed in one turn.
const SEAL_BYTES: usize = 64 << 10;

/// Fewer parts in the queue are little.
const SHORT: usize = 1024;

/// Why a link cannot go on.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Broken {
    /// The peer has closed it.
    Ended,
    Io(String),
    Tls(String),
    Violation(Violation),
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Broken::Ended => f.write_str("the connection was closed"),
            Broken::Io(why) => f.write_str(why),
            Broken::Tls(why) => write!(f, "TLS: {why}"),
            Broken::Violation(what) => what.fmt(f),
        }
    }
}

impl From<Violation> for Broken {
    fn from(violation: Violation) -> Broken {
        Broken::Violation(violation)
    }
}

impl From<std::io::Error> for Broken {
    fn from(error: std::io::Error) -> Broken {
        Broken::Io(error.to_string())
    }
}

impl From<rustls::Error> for Broken {
    fn from(error: rustls::Error) -> Broken {
        Broken::Tls(error.to_string())
    }
}

/// One connection; see the module text. It is closed when it is dropped.
pub(crate) struct Link {
    shared: Rc<Shared>,
    /// Received data that has not been read.
    input: RefCell<Vec<u8>>,
}

/// What a link and its sending task share.
struct Shared {
    socket: Socket,
    tls: Option<RefCell<rustls::Connection>>,
    queue: RefCell<VecDeque<Part>>,
    /// Notified after each change of the queue, and of what TLS wants to send.
    changed: Event,
    /// Parts that were taken from the queue are being sent.
    sending: Cell<bool>,
    closed: Cell<bool>,
}

/// A frame as it has come.
pub(crate) struct Received {
    pub frame: Frame,
    /// The data of a write.
    pub data: Option<Buf>,
    /// Any other payload.
    pub payload: Vec<u8>,
}

impl Link {
    pub fn new(core: &Core, socket: Socket, tls: Option<rustls::Connection>) -> Link {
        let tls = tls.map(|mut tls| {
            // The callers bound what they send.
            tls.set_buffer_limit(None);
            RefCell::new(tls)
        });
        let shared = Rc::new(Shared {
            socket,
            tls,
            queue: RefCell::default(),
            changed: Event::new(),
            sending: Cell::new(false),
            closed: Cell::new(false),
        });
        core.spawn(Class::Background, send_all(core.clone(), shared.clone()));
        Link { shared, input: RefCell::default() }
    }

    /// Sends a frame with its payload.
    pub fn send(&self, frame: Frame, payload: &[u8]) {
        let mut bytes = frame.encode(payload).to_vec();
        bytes.extend_from_slice(payload);
        self.shared.queue.borrow_mut().push_back(Part::Bytes(bytes));
        self.shared.changed.notify_all();
    }

    /// Sends a frame with data, which is not copied.
    pub fn send_data(&self, frame: Frame, data: &Slice) {
        let mut queue = self.shared.queue.borrow_mut();
        queue.push_back(Part::Bytes(frame.encode(data).to_vec()));
        queue.push_back(Part::Slice(data.clone()));
        drop(queue);
        self.shared.changed.notify_all();
    }

    /// Suspends until all of it is sent, or cannot be.
    pub async fn sent(&self) {
        let Shared { queue, sending, closed, changed, .. } = &*self.shared;
        let is_sent = || queue.borrow().is_empty() && !sending.get();
        changed.wait_until(|| closed.get() || is_sent()).await;
    }

    /// Suspends until little waits to be sent, or nothing is sent any more.
    pub async fn until_short(&self) {
        let Shared { queue, closed, changed, .. } = &*self.shared;
        changed.wait_until(|| closed.get() || queue.borrow().len() < SHORT).await;
    }

    /// Ends the connection, in both directions.
    pub fn close(&self) {
        self.shared.close();
    }

    /// The next frame. `admit` is asked before the data of a write is received, and waits for room.
    /// A dropped future loses bytes: then the link must be closed.
    pub async fn next<F: Future<Output = Result<Buf, Broken>>>(
        &self,
        admit: impl FnOnce(usize) -> F,
    ) -> Result<Received, Broken> {
        self.fill(HEADER_BYTES).await?;
        let mut header = [0; HEADER_BYTES];
        header.copy_from_slice(&self.input.borrow()[..HEADER_BYTES]);
        self.input.borrow_mut().drain(..HEADER_BYTES);
        let frame = Frame::decode(&header)?;
        let len = frame.payload_bytes as usize;
        if frame.kind == Kind::Write {
            let data = self.receive(admit(len).await?, len).await?;
            check(&header, &data[..len])?;
            return Ok(Received { frame, data: Some(data), payload: Vec::new() });
        }
        self.fill(len).await?;
        let payload: Vec<u8> = self.input.borrow_mut().drain(..len).collect();
        check(&header, &payload)?;
        Ok(Received { frame, data: None, payload })
    }

    /// Suspends until there are so many bytes of input.
    async fn fill(&self, len: usize) -> Result<(), Broken> {
        while self.input.borrow().len() < len {
            self.more().await?;
        }
        Ok(())
    }

    /// Receives `len` bytes into a buffer.
    async fn receive(&self, mut buf: Buf, len: usize) -> Result<Buf, Broken> {
        let mut at = 0;
        loop {
            {
                let mut input = self.input.borrow_mut();
                let count = input.len().min(len - at);
                buf[at..at + count].copy_from_slice(&input[..count]);
                input.drain(..count);
                at += count;
            }
            if at == len {
                return Ok(buf);
            }
            if self.shared.tls.is_some() {
                self.more().await?;
                continue;
            }
            // What follows the data must stay in the socket.
            if len < buf.len() {
                buf.set_len(len);
            }
            let (received, back) = self.shared.socket.recv_into(buf, at).await;
            buf = back;
            match received? {
                0 => return Err(Broken::Ended),
                count => at += count,
            }
        }
    }

    /// Receives some bytes.
    async fn more(&self) -> Result<(), Broken> {
        let Shared { socket, tls, changed, .. } = &*self.shared;
        let Some(tls) = tls else {
            let input = self.input.take();
            let (received, input) = socket.recv(input, RECEIVE_BYTES).await;
            self.input.replace(input);
            return match received? {
                0 => Err(Broken::Ended),
                _ => Ok(()),
            };
        };
        let (received, bytes) = socket.recv(Vec::new(), RECEIVE_BYTES).await;
        if received? == 0 {
            return Err(Broken::Ended);
        }
        let opened = open(&mut tls.borrow_mut(), &bytes, &mut self.input.borrow_mut());
        // Its answer in a handshake, or an alert.
        changed.notify_all();
        opened
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.close();
    }
}

impl Shared {
    fn close(&self) {
        self.closed.set(true);
        self.socket.shutdown();
        self.changed.notify_all();
    }

    /// What is to be sent next; nothing for now, or nothing ever again.
    fn parts(&self) -> Result<Vec<Part>, Broken> {
        let mut queue = self.queue.borrow_mut();
        let Some(tls) = &self.tls else { return Ok(queue.drain(..).collect()) };
        let mut tls = tls.borrow_mut();
        if !tls.is_handshaking()
            && let Some(first) = queue.pop_front()
        {
            let bytes = first.as_slice();
            let now = bytes.len().min(SEAL_BYTES);
            // Writing to memory does not fail.
            tls.writer().write_all(&bytes[..now])?;
            if now < bytes.len() {
                let rest = match first {
                    Part::Bytes(bytes) => Part::Bytes(bytes[now..].to_vec()),
                    Part::Slice(slice) => Part::Slice(slice.slice(now..slice.len())),
                };
                queue.push_front(rest);
            }
        }
        let mut sealed = Vec::new();
        while tls.wants_write() {
            tls.write_tls(&mut sealed)?;
        }
        Ok(if sealed.is_empty() { Vec::new() } else { vec![Part::Bytes(sealed)] })
    }
}

/// Takes received bytes, and appends the data in them.
fn open(tls: &mut rustls::Connection, mut bytes: &[u8], data: &mut Vec<u8>) -> Result<(), Broken> {
    let before = data.len();
    while !bytes.is_empty() {
        // It takes nothing more while a message is longer than it may be.
        if tls.read_tls(&mut bytes)? == 0 {
            return Err(Broken::Ended);
        }
        let state = tls.process_new_packets()?;
        let from = data.len();
        data.resize(from + state.plaintext_bytes_to_read(), 0);
        tls.reader().read_exact(&mut data[from..])?;
        if state.peer_has_closed() && data.len() == before {
            return Err(Broken::Ended);
        }
    }
    Ok(())
}

/// Sends what waits, until the link is closed.
async fn send_all(core: Core, shared: Rc<Shared>) {
    while !shared.closed.get() {
        let Ok(parts) = shared.parts() else { return shared.close() };
        if parts.is_empty() {
            shared.changed.wait().await;
            continue;
        }
        shared.sending.set(true);
        let (sent, _) = shared.socket.send_parts(parts, &Cell::default()).await;
        shared.sending.set(false);
        if sent.is_err() {
            // The reading task learns it, too.
            return shared.close();
        }
        shared.changed.notify_all();
        if shared.tls.is_some() {
            core.yield_now().await;
        }
    }
}
