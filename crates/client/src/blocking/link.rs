//! The link of a blocking client with a cache: the connection on which tracking is on.
//!
//! All reads that the cache does not answer go over the link, so that the server tracks their keys
//! there; everything else goes over the sockets of the threads. A thread of its own receives: it
//! stores and hands out replies, and does what invalidations say, in the order of the stream.
//!
//! Locks: `writer` is held while a request is queued and written; `queue` for a moment, also within
//! `writer`. The receiving thread never takes `writer` while bytes are waiting, so a server that
//! sends before it receives cannot stop it.
//!
//! When the link ends, the cache is closed, the waiting threads read on their own sockets, and the
//! next miss makes the thread connect again.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use resp::Reply;

use super::socket::{Socket, is_passing};
use crate::backoff::Backoff;
use crate::cache::Cache;
use crate::command::{Command, Touches, settle};
use crate::error::{Error, Result};
use crate::options::Target;
use crate::seal::Seal;

/// Requests that wait for their replies.
const PENDING_MAX: usize = 4096;

#[derive(Debug)]
struct Pending {
    sent: Instant,
    touches: Touches,
    back: Option<SyncSender<Reply>>,
}

#[derive(Debug, Default)]
struct Queue {
    pending: VecDeque<Pending>,
    /// A read has missed the cache while there was no link.
    wanted: bool,
    /// The client was dropped.
    closed: bool,
}

/// The sending side.
#[derive(Debug)]
struct Writer {
    stream: TcpStream,
    seal: Seal,
}

#[derive(Debug)]
pub(super) struct Link {
    target: Arc<Target>,
    cache: Arc<Cache>,
    writer: Mutex<Option<Writer>>,
    queue: Mutex<Queue>,
    changed: Condvar,
}

impl Link {
    /// Connects, and starts the thread that receives.
    pub fn start(target: &Arc<Target>, cache: &Arc<Cache>) -> Result<Arc<Link>> {
        let link = Arc::new(Link {
            target: target.clone(),
            cache: cache.clone(),
            writer: Mutex::new(None),
            queue: Mutex::new(Queue::default()),
            changed: Condvar::new(),
        });
        let socket = link.connect()?;
        let thread = link.clone();
        std::thread::Builder::new()
            .name("millrace-link".to_owned())
            .spawn(move || thread.run(socket))
            .map_err(|error| Error::broken(&error))?;
        Ok(link)
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a read and waits for its reply. `None`: there is no link, or it broke.
    ///
    /// # Errors
    /// The deadline has passed.
    pub fn ask(&self, command: Command, deadline: Instant) -> Result<Option<Reply>> {
        let Some(answered) = self.send(&command.bytes, command.touches, deadline)? else {
            return Ok(None);
        };
        let left = deadline.saturating_duration_since(Instant::now());
        match answered.recv_timeout(left) {
            Ok(reply) => Ok(Some(reply)),
            Err(RecvTimeoutError::Disconnected) => Ok(None),
            Err(RecvTimeoutError::Timeout) => Err(Error::timeout()),
        }
    }

    /// Waits until all invalidations are handled that the server sent before this call. If it does
    /// not answer, the cache is emptied.
    pub fn wait_coherent(&self, deadline: Instant) {
        let ping = Command::read(&[b"PING"]);
        if !matches!(self.ask(ping, deadline), Ok(Some(_))) {
            self.cache.clear();
        }
    }

    /// Ends the thread.
    pub fn close(&self) {
        self.queue().closed = true;
        self.changed.notify_all();
        // Its read ends.
        if let Ok(writer) = self.writer.try_lock()
            && let Some(writer) = writer.as_ref()
        {
            let _ = writer.stream.shutdown(Shutdown::Both);
        }
    }

    fn send(
        &self,
        bytes: &[u8],
        touches: Touches,
        deadline: Instant,
    ) -> Result<Option<Receiver<Reply>>> {
        let mut writer = self.writer(deadline)?;
        if writer.is_none() {
            self.queue().wanted = true;
            self.changed.notify_all();
            return Ok(None);
        }
        let (back, answered) = sync_channel(1);
        {
            let mut queue = self.queue();
            if queue.pending.len() >= PENDING_MAX {
                return Ok(None);
            }
            queue.pending.push_back(Pending { sent: Instant::now(), touches, back: Some(back) });
        }
        self.write(&mut writer, bytes);
        Ok(Some(answered))
    }

    /// The right to write. Another thread may have it for as long as the server takes nothing.
    fn writer(&self, deadline: Instant) -> Result<MutexGuard<'_, Option<Writer>>> {
        let mut turns = 0_u32;
        loop {
            match self.writer.try_lock() {
                Ok(writer) => return Ok(writer),
                Err(TryLockError::Poisoned(poisoned)) => return Ok(poisoned.into_inner()),
                Err(TryLockError::WouldBlock) if Instant::now() >= deadline => {
                    return Err(Error::timeout());
                }
                Err(TryLockError::WouldBlock) if turns < 100 => std::thread::yield_now(),
                Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_micros(100)),
            }
            turns += 1;
        }
    }

    /// Writes a request that is queued. If that fails, the link is at its end.
    fn write(&self, writer: &mut Option<Writer>, bytes: &[u8]) {
        let failed = match writer.as_mut() {
            Some(writer) => match writer.seal.seal(bytes) {
                Ok(sealed) => writer.stream.write_all(&sealed).is_err(),
                Err(_) => true,
            },
            None => false,
        };
        if failed && let Some(writer) = writer.take() {
            let _ = writer.stream.shutdown(Shutdown::Both);
        }
    }

    // ---- the thread

    fn connect(&self) -> Result<Socket> {
        let sent = Instant::now();
        let deadline = sent + self.target.options.connect_timeout;
        let socket = Socket::connect(&self.target, true, deadline)?;
        let broken = |error: io::Error| Error::broken(&error);
        let stream = socket.stream.try_clone().map_err(broken)?;
        let options = &self.target.options;
        stream.set_write_timeout(Some(options.timeout)).map_err(broken)?;
        // Also how soon the thread notices that a reply is late.
        let turn = self.cache.heartbeat().min(options.timeout / 4);
        stream.set_read_timeout(Some(turn.max(Duration::from_millis(1)))).map_err(broken)?;
        // No read misses the cache before this; the greeting has turned tracking on.
        self.cache.open(sent);
        self.cache.serve_ahead(socket.facts.reads_ahead);
        self.cache.serve_index(socket.facts.indexes);
        let seal = socket.wire.seal.clone();
        *self.writer.lock().unwrap_or_else(PoisonError::into_inner) = Some(Writer { stream, seal });
        Ok(socket)
    }

    fn run(self: Arc<Link>, socket: Socket) {
        let (mut next, mut backoff) = (Some(socket), Backoff::default());
        loop {
            if let Some(mut socket) = next.take() {
                self.receive(&mut socket);
                // Whoever is writing gets an error.
                let _ = socket.stream.shutdown(Shutdown::Both);
                self.end();
            }
            let mut queue = self.queue();
            loop {
                if queue.closed {
                    return;
                }
                let now = Instant::now();
                queue = match backoff.until() {
                    Some(until) if now < until => {
                        let wait = self.changed.wait_timeout(queue, until - now);
                        wait.unwrap_or_else(PoisonError::into_inner).0
                    }
                    _ if queue.wanted => break,
                    _ => self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner),
                };
            }
            queue.wanted = false;
            drop(queue);
            match self.connect() {
                Ok(socket) => {
                    backoff.succeeded();
                    next = Some(socket);
                }
                Err(_) => backoff.failed(Instant::now()),
            }
            if self.queue().closed {
                self.end();
                return;
            }
        }
    }

    /// Receives until the link ends.
    fn receive(&self, socket: &mut Socket) {
        let mut buffer = vec![0; 64 << 10];
        let (heartbeat, timeout) = (self.cache.heartbeat(), self.target.options.timeout);
        let mut renewed = Instant::now();
        let mut heard = renewed;
        loop {
            loop {
                match socket.wire.next() {
                    Ok(Some(reply)) => match self.received(reply) {
                        Some(Some(sent)) => renewed = sent,
                        Some(None) => {}
                        None => return,
                    },
                    Ok(None) => break,
                    Err(_) => return,
                }
            }
            // The writer may be taken: then whoever has it gets a reply, after which this is tried
            // again.
            self.ask_ahead();
            self.ask_page();
            let now = Instant::now();
            let front = {
                let queue = self.queue();
                if queue.closed {
                    return;
                }
                queue.pending.front().map(|pending| pending.sent)
            };
            match front {
                // A long reply may take longer, as long as something of it comes.
                Some(sent) if now.saturating_duration_since(sent.max(heard)) > timeout => return,
                None if now.saturating_duration_since(renewed) >= heartbeat => self.ping(),
                _ => {}
            }
            match socket.stream.read(&mut buffer) {
                Ok(0) => return,
                // What TLS answers by itself goes with the next request.
                Ok(count) => match socket.wire.feed(&buffer[..count]) {
                    Ok(()) => heard = Instant::now(),
                    Err(_) => return,
                },
                Err(error) if is_passing(&error) => {}
                Err(_) => return,
            }
        }
    }

    /// Handles a reply, and tells when its request was sent, or a message. `None`: it answers
    /// nothing.
    fn received(&self, reply: Reply) -> Option<Option<Instant>> {
        if let Reply::Push(message) = &reply {
            self.cache.pushed(message);
            return Some(None);
        }
        let pending = self.queue().pending.pop_front()?;
        settle(Some(&self.cache), &pending.touches, Some(std::slice::from_ref(&reply)));
        self.cache.renew(pending.sent);
        if let Some(back) = pending.back {
            // The thread may have given up.
            let _ = back.try_send(reply);
        }
        Some(Some(pending.sent))
    }

    fn ping(&self) {
        // Another thread is sending: its reply serves as well.
        let Ok(mut writer) = self.writer.try_lock() else { return };
        if writer.is_none() {
            return;
        }
        let (touches, back) = (Touches::Nothing, None);
        self.queue().pending.push_back(Pending { sent: Instant::now(), touches, back });
        self.write(&mut writer, &Command::read(&[b"PING"]).bytes);
    }

    /// Asks for what is to be read ahead, unless another thread is sending.
    pub fn ask_ahead(&self) {
        if !self.cache.wants_chunk() {
            return;
        }
        let Ok(mut writer) = self.writer.try_lock() else { return };
        while writer.is_some()
            && self.queue().pending.len() < PENDING_MAX
            && let Some(fetch) = self.cache.next_chunk()
        {
            let Command { bytes, touches, .. } = Command::chunk(fetch);
            self.queue().pending.push_back(Pending { sent: Instant::now(), touches, back: None });
            self.write(&mut writer, &bytes);
        }
    }

    /// Asks for the next page of the index, unless another thread is sending.
    fn ask_page(&self) {
        let Ok(mut writer) = self.writer.try_lock() else { return };
        if writer.is_some()
            && self.queue().pending.len() < PENDING_MAX
            && let Some(page) = self.cache.next_page(Instant::now())
        {
            let Command { bytes, touches, .. } = Command::page(page);
            self.queue().pending.push_back(Pending { sent: Instant::now(), touches, back: None });
            self.write(&mut writer, &bytes);
        }
    }

    /// The link has ended.
    fn end(&self) {
        self.cache.close();
        if let Some(writer) = self.writer.lock().unwrap_or_else(PoisonError::into_inner).take() {
            let _ = writer.stream.shutdown(Shutdown::Both);
        }
        // Wakes the threads that wait.
        self.queue().pending.clear();
    }
}
