//! The task that drives the shared connection of an asynchronous client.
//!
//! One request through it:
//!
//! 1. A caller puts a [`Request`] into the inbox, which has a bounded number of places, and waits
//!    for the answer or its deadline.
//! 2. The driver, if it has no connection, makes one. It appends the requests that wait to what is
//!    to be sent, and remembers each in `pending`, in this order.
//! 3. It writes and reads whatever the socket can take and give. Replies belong to the oldest
//!    pending request. Messages between them are for the cache, in the order of the stream.
//! 4. When the connection ends, the cache is closed. Requests of which nothing was sent, and reads,
//!    stay for the next connection; writes fail with an unknown outcome.
//!
//! **Deadlines** belong to the caller. [`Request::state`] settles whether a request was sent when
//! its caller gave up: it moves from `WAITING` either to `SENT`, by the driver, or to `GIVEN_UP`,
//! by the caller; the driver leaves out what was given up. The driver itself only watches the
//! connection: if requests are pending and nothing has arrived for the timeout, the connection is
//! dead.
//!
//! **Cancellation**: dropping a caller's future before its request is sent is giving up. After
//! that, the request goes on without it; the driver receives its replies and settles the cache.
//!
//! The task ends when all handles are gone and nothing is pending.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::Poll;
use std::time::Duration;

use resp::Reply;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep_until};

use super::socket::Socket;
use crate::backoff::Backoff;
use crate::cache::Cache;
use crate::command::{Class, Command, Touches, settle};
use crate::error::{Error, Result};
use crate::options::Target;
use crate::seal::Seal;

/// Requests that wait in the inbox, and as many that wait for their replies.
pub(super) const REQUESTS_MAX: usize = 1024;
/// Bytes that are encoded and not sent. One request may exceed it.
const OUT_BYTES_MAX: usize = 1 << 20;
const BUFFER_BYTES: usize = 64 << 10;
/// Reads between two looks at the inbox.
const READS_MAX: usize = 8;

const WAITING: u8 = 0;
const SENT: u8 = 1;
const GIVEN_UP: u8 = 2;

/// Whether a request was sent; see [the module](self).
#[derive(Debug, Default)]
pub(super) struct State(AtomicU8);

impl State {
    fn change(&self, to: u8) -> bool {
        let changed = self.0.compare_exchange(WAITING, to, Ordering::AcqRel, Ordering::Acquire);
        changed.is_ok()
    }

    /// Gives a request up. Whether nothing of it is or will be sent.
    pub fn give_up(&self) -> bool {
        self.change(GIVEN_UP)
    }
}

#[derive(Debug)]
pub(super) struct Request {
    pub command: Command,
    pub state: Arc<State>,
    pub back: oneshot::Sender<Result<Vec<Reply>>>,
    pub deadline: Instant,
}

#[derive(Debug)]
struct Pending {
    /// `None`: a request of the driver's own.
    request: Option<Request>,
    /// What that does to the cache.
    touches: Touches,
    replies: Vec<Reply>,
    replies_wanted: usize,
    /// Where it begins in everything that the connection sends.
    begin: u64,
    sent: std::time::Instant,
}

pub(super) struct Driver {
    pub target: Arc<Target>,
    pub cache: Option<Arc<Cache>>,
    pub inbox: mpsc::Receiver<Request>,
    /// To be sent before what is in the inbox.
    pub again: VecDeque<Request>,
}

impl Driver {
    /// Drives a connection, and those after it.
    pub async fn run(mut self, first: Socket) {
        let (mut socket, mut backoff) = (Some(first), Backoff::default());
        loop {
            if let Some(socket) = socket.take() {
                let (ended, error) = self.serve(socket).await;
                // Before the first request on the next connection.
                if let Some(cache) = &self.cache {
                    cache.close();
                }
                let Some(error) = error else { return };
                match ended.served {
                    true => backoff.succeeded(),
                    // It was of no use, and the next one may be as useless.
                    false => backoff.failed(std::time::Instant::now()),
                }
                self.sort(ended, &error);
            }
            if self.again.is_empty() {
                match self.inbox.recv().await {
                    Some(request) => self.again.push_back(request),
                    None => return,
                }
            }
            if let Some(until) = backoff.until() {
                sleep_until(until.into()).await;
            }
            self.again.retain(|request| !request.back.is_closed());
            let Some(deadline) = self.again.iter().map(|request| request.deadline).max() else {
                continue;
            };
            let sent = std::time::Instant::now();
            match Socket::connect(&self.target, self.cache.is_some(), deadline).await {
                Ok(connected) => {
                    if let Some(cache) = &self.cache {
                        cache.open(sent);
                        cache.serve_ahead(connected.facts.reads_ahead);
                        cache.serve_index(connected.facts.indexes);
                    }
                    socket = Some(connected);
                }
                Err(error) => {
                    backoff.failed(std::time::Instant::now());
                    let keep = self.target.options.retry && error.is_passing();
                    for request in std::mem::take(&mut self.again) {
                        match keep && Instant::now() < request.deadline {
                            true => self.again.push_back(request),
                            false => answer(&self.cache, request, Err(error.clone())),
                        }
                    }
                }
            }
        }
    }

    /// After the end of a connection: what can be sent again, and what cannot.
    fn sort(&mut self, ended: Ended, error: &Error) {
        let mut again = VecDeque::new();
        for pending in ended.pending {
            let Some(request) = pending.request else { continue };
            let sent = pending.begin < ended.written;
            let safe = !sent || request.command.class == Class::Read;
            if safe && self.target.options.retry && error.is_passing() && !request.back.is_closed()
            {
                if !sent {
                    // Its caller may give it up again.
                    request.state.0.store(WAITING, Ordering::Release);
                }
                again.push_back(request);
            } else if safe {
                answer(&self.cache, request, Err(error.clone()));
            } else {
                answer(&self.cache, request, Err(error.clone().of_sent_write()));
            }
        }
        again.append(&mut self.again);
        self.again = again;
    }

    /// Serves a connection until it ends, with its error, or until no handle is left.
    async fn serve(&mut self, mut socket: Socket) -> (Ended, Option<Error>) {
        let mut state = Serving {
            cache: self.cache.clone(),
            seal: socket.wire.seal.clone(),
            pending: VecDeque::new(),
            out: Vec::new(),
            out_at: 0,
            written: 0,
            heard: std::time::Instant::now(),
            renewed: std::time::Instant::now(),
            ended: false,
            served: false,
        };
        let mut buffer = vec![0; BUFFER_BYTES];
        let timeout = self.target.options.timeout;
        let mut timer = pin!(sleep_until(Instant::from_std(state.alarm(timeout))));
        let error = loop {
            while state.has_room() {
                match self.again.pop_front() {
                    Some(request) => {
                        if let Err(error) = state.take(request) {
                            return (state.end(), Some(error));
                        }
                    }
                    None => break,
                }
            }
            if !state.ended
                && let Err(error) = state.ask_ahead().and_then(|()| state.write(&socket))
            {
                return (state.end(), Some(error));
            }
            if state.ended && state.pending.is_empty() {
                return (state.end(), None);
            }
            // It may go off early: then it is set again.
            let alarm = Instant::from_std(state.alarm(timeout));
            if alarm < timer.deadline() || timer.is_elapsed() {
                timer.as_mut().reset(alarm);
            }
            let can_take = state.has_room() && !state.ended;
            let wants_write = state.out_at < state.out.len();
            let event = poll_fn(|cx| {
                if can_take && let Poll::Ready(request) = self.inbox.poll_recv(cx) {
                    return Poll::Ready(Event::Request(request.map(Box::new)));
                }
                if let Poll::Ready(ready) = socket.stream.poll_read_ready(cx) {
                    return Poll::Ready(Event::Readable(ready));
                }
                if wants_write && let Poll::Ready(ready) = socket.stream.poll_write_ready(cx) {
                    return Poll::Ready(Event::Writable(ready));
                }
                timer.as_mut().poll(cx).map(|()| Event::Alarm)
            });
            let outcome = match event.await {
                Event::Request(Some(request)) => {
                    let mut taken = state.take(*request);
                    while taken.is_ok() && state.has_room() {
                        match self.inbox.try_recv() {
                            Ok(request) => taken = state.take(request),
                            Err(_) => break,
                        }
                    }
                    // Most often the socket can take them at once.
                    taken.and_then(|()| state.write(&socket))
                }
                Event::Request(None) => {
                    state.ended = true;
                    Ok(())
                }
                Event::Readable(Ok(())) => state.read(&mut socket, &mut buffer),
                Event::Writable(Ok(())) => state.write(&socket),
                Event::Readable(Err(error)) | Event::Writable(Err(error)) => {
                    Err(Error::broken(&error))
                }
                Event::Alarm => {
                    let now = std::time::Instant::now();
                    match state.is_dead(now, timeout) {
                        true => Err(Error::timeout()),
                        false => state.ping_if_due(now).and_then(|()| state.write(&socket)),
                    }
                }
            };
            if let Err(error) = outcome {
                break error;
            }
        };
        (state.end(), Some(error))
    }
}

enum Event {
    /// `None`: no handle is left.
    Request(Option<Box<Request>>),
    Readable(io::Result<()>),
    Writable(io::Result<()>),
    Alarm,
}

struct Ended {
    pending: VecDeque<Pending>,
    written: u64,
    /// It has answered something.
    served: bool,
}

/// The state of a connection.
struct Serving {
    cache: Option<Arc<Cache>>,
    seal: Seal,
    pending: VecDeque<Pending>,
    out: Vec<u8>,
    out_at: usize,
    /// Bytes that the socket has taken.
    written: u64,
    heard: std::time::Instant,
    renewed: std::time::Instant,
    /// No handle is left.
    ended: bool,
    served: bool,
}

impl Serving {
    fn end(self) -> Ended {
        Ended { pending: self.pending, written: self.written, served: self.served }
    }

    fn has_room(&self) -> bool {
        self.pending.len() < REQUESTS_MAX && self.out.len() - self.out_at < OUT_BYTES_MAX
    }

    fn take(&mut self, request: Request) -> Result<()> {
        let repeated = request.state.0.load(Ordering::Acquire) == SENT;
        if (!repeated && !request.state.change(SENT)) || request.back.is_closed() {
            // It was not sent, or only reads.
            return Ok(());
        }
        let wanted = request.command.replies;
        let sealed = self.seal.seal(&request.command.bytes).map(Cow::into_owned);
        self.append(sealed, wanted, Some(request), Touches::Nothing)
    }

    fn append(
        &mut self,
        sealed: Result<Vec<u8>>,
        replies_wanted: usize,
        request: Option<Request>,
        touches: Touches,
    ) -> Result<()> {
        if self.out_at > 0 {
            self.out.drain(..self.out_at);
            self.out_at = 0;
        }
        let now = std::time::Instant::now();
        if self.pending.is_empty() {
            self.heard = now;
        }
        self.pending.push_back(Pending {
            request,
            touches,
            replies: Vec::new(),
            replies_wanted,
            begin: self.written + self.out.len() as u64,
            sent: now,
        });
        self.out.extend_from_slice(&sealed?);
        Ok(())
    }

    fn write(&mut self, socket: &Socket) -> Result<()> {
        while self.out_at < self.out.len() {
            match socket.stream.try_write(&self.out[self.out_at..]) {
                Ok(count) => {
                    self.out_at += count;
                    self.written += count as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(Error::broken(&error)),
            }
        }
        self.out.clear();
        self.out_at = 0;
        if self.out.capacity() > OUT_BYTES_MAX {
            self.out.shrink_to(OUT_BYTES_MAX);
        }
        Ok(())
    }

    fn read(&mut self, socket: &mut Socket, buffer: &mut [u8]) -> Result<()> {
        for _ in 0..READS_MAX {
            match socket.stream.try_read(buffer) {
                Ok(0) => return Err(Error::ended()),
                Ok(count) => {
                    self.heard = std::time::Instant::now();
                    socket.wire.feed(&buffer[..count])?;
                    self.out.extend_from_slice(&self.seal.seal(&[])?);
                    while let Some(reply) = socket.wire.next()? {
                        self.received(reply)?;
                    }
                    if count < buffer.len() {
                        return Ok(());
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(Error::broken(&error)),
            }
        }
        Ok(())
    }

    fn received(&mut self, reply: Reply) -> Result<()> {
        if let Reply::Push(message) = &reply {
            if let Some(cache) = &self.cache {
                cache.pushed(message);
            }
            return Ok(());
        }
        let Some(front) = self.pending.front_mut() else {
            return Err(Error::protocol("it answered what was not asked"));
        };
        front.replies.push(reply);
        if front.replies.len() < front.replies_wanted {
            return Ok(());
        }
        let Some(pending) = self.pending.pop_front() else { return Ok(()) };
        self.served = true;
        if let Some(cache) = &self.cache {
            self.renewed = self.renewed.max(pending.sent);
            cache.renew(pending.sent);
        }
        match pending.request {
            Some(request) => answer(&self.cache, request, Ok(pending.replies)),
            None => settle(self.cache.as_deref(), &pending.touches, Some(&pending.replies)),
        }
        Ok(())
    }

    /// When to look whether the connection is dead, or to send a ping.
    fn alarm(&self, timeout: Duration) -> std::time::Instant {
        let dead = match self.pending.is_empty() {
            true => None,
            false => Some(self.heard + timeout),
        };
        let ping = self.cache.as_ref().filter(|_| self.pending.is_empty());
        let ping = ping.map(|cache| self.renewed + cache.heartbeat());
        let idle = std::time::Instant::now() + Duration::from_secs(3600);
        dead.into_iter().chain(ping).min().unwrap_or(idle)
    }

    fn is_dead(&self, now: std::time::Instant, timeout: Duration) -> bool {
        !self.pending.is_empty() && now >= self.heard + timeout
    }

    fn ping_if_due(&mut self, now: std::time::Instant) -> Result<()> {
        let Some(cache) = &self.cache else { return Ok(()) };
        if self.pending.is_empty() && now >= self.renewed + cache.heartbeat() {
            let ping = Command::read(&[b"PING"]);
            let sealed = self.seal.seal(&ping.bytes).map(Cow::into_owned);
            return self.append(sealed, 1, None, Touches::Nothing);
        }
        Ok(())
    }

    /// Asks for what is to be read ahead, and for the index.
    fn ask_ahead(&mut self) -> Result<()> {
        while self.has_room()
            && let Some(fetch) = self.cache.as_ref().and_then(|cache| cache.next_chunk())
        {
            let Command { bytes, touches, .. } = Command::chunk(fetch);
            let sealed = self.seal.seal(&bytes).map(Cow::into_owned);
            self.append(sealed, 1, None, touches)?;
        }
        let now = std::time::Instant::now();
        if self.has_room()
            && let Some(page) = self.cache.as_ref().and_then(|cache| cache.next_page(now))
        {
            let Command { bytes, touches, .. } = Command::page(page);
            let sealed = self.seal.seal(&bytes).map(Cow::into_owned);
            self.append(sealed, 1, None, touches)?;
        }
        Ok(())
    }
}

/// Settles the cache and answers the caller, who may be gone.
fn answer(cache: &Option<Arc<Cache>>, request: Request, result: Result<Vec<Reply>>) {
    let replies = result.as_ref().ok().map(Vec::as_slice);
    settle(cache.as_deref(), &request.command.touches, replies);
    let _ = request.back.send(result);
}
