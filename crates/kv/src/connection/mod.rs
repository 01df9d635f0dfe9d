//! Connections: the task of each, from its socket to its replies.
//!
//! The task ([`serve`]) waits for the next event: received bytes, a finished send, a finished read,
//! an order to end. In each turn it
//!
//! 1. takes commands from the [`input`] through its [`session`], which executes them,
//! 2. sends all [`replies`] that are ready ([`output`]),
//! 3. receives more.
//!
//! One send and one receive are in flight at a time. While no command may be taken nothing is
//! received, so a client that does not read is not read either: TCP slows it down. Only while a
//! long reply is being made a little is received, to notice that the client has gone.
//!
//! No more of a large command is received than there is room for (`client::large`); a client that
//! holds room for which others wait must keep up its [`pace`].
//!
//! A connection that is closed after an error receives for a moment what its client is still
//! sending. Otherwise unread bytes would make TCP discard what was sent, and the error with it.
//!
//! Between the task and the socket there may be TLS ([`link`]); then the task begins with the
//! handshake.
//!
//! An idle connection keeps its buffers while those of all idle connections of the core fit a
//! budget. Beyond that it waits without buffers, and receives only when something has arrived.
//!
//! This is the top room: it uses all others.

pub(crate) mod administration;
mod input;
mod link;
pub(crate) mod outgoing;
pub(crate) mod output;
mod pace;
pub(crate) mod replies;
pub(crate) mod session;
mod tracking;
mod transaction;

use std::future::{Future, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll};

use reactor::{Sleep, Socket};

use crate::client::gauge::Share;
use crate::client::large::Large;
use crate::client::registry::Client;
use crate::client::reply_room::SWEEP_NS;
use crate::connection::input::{Input, RECEIVE_BYTES, Receive, Received};
use crate::connection::link::{Link, shake_hands};
use crate::connection::output::Sent;
use crate::connection::pace::{LARGE_BYTES_PER_S, Pace};
use crate::connection::replies::Closing;
use crate::connection::session::Session;
use crate::core::node::CountedClient;
use crate::core::state::CoreState;
use crate::settings::Settings;
use crate::tls::config::Tls;

/// The interval at which a paused connection checks whether the pause has ended early.
const PAUSE_CHECK_NS: u64 = 20_000_000;

/// How long a client that has closed its side waits for a long reply to begin. It may be gone
/// altogether: only sending to it would tell.
const HALF_CLOSED_NS: u64 = 1_000_000_000;

/// While the node stops, a client that has read nothing for this long is not waited for.
const STOP_STALL_NS: u64 = 1_000_000_000;

/// After an error a connection is closed when nothing has arrived for this long, or after
/// [`LINGER_NS`] at the latest.
const LINGER_QUIET_NS: u64 = 250_000_000;
const LINGER_NS: u64 = 5_000_000_000;

/// Serves one connection until either side ends it. It is `counted` until then.
pub(crate) async fn serve(
    state: Rc<CoreState>,
    socket: Socket,
    tls: Option<Tls>,
    counted: CountedClient,
) {
    let mut connection = Connection::new(&state, &socket);
    let link = match &tls {
        None => Some(Link::Plain(socket.clone())),
        Some(tls) => Box::pin(shake_hands(&state, &connection.client, &socket, tls)).await,
    };
    let Some(link) = link else {
        state.clients.remove(connection.client.id);
        socket.shutdown();
        return;
    };
    let mut sending = pin!(None);
    let mut receiving = pin!(None);
    let alive = loop {
        connection.take_commands(receiving.is_some());
        if connection.refuse_slow_request() {
            receiving.set(None);
        }
        if sending.is_none()
            && let Some(batch) = connection.session.replies.take()
        {
            let accepted = connection.client.accepted.clone();
            sending.set(Some(link.clone().send(state.core.clone(), batch, accepted)));
        }
        connection.session.replies.account();
        if connection.is_done(sending.is_some()) {
            break true;
        }
        if receiving.is_none()
            && let Some(next) = connection.receive()
        {
            receiving.set(Some(link.clone().receive(next)));
        }
        connection.set_timers(sending.is_some());
        if !connection.wait(&mut sending, &mut receiving).await {
            break false;
        }
    };
    let client = connection.client.clone();
    let unread = connection.session.unread && !connection.input.ended;
    receiving.set(None);
    let is_sending = sending.is_some();
    drop(connection);
    if !is_sending {
        link.say_farewell(&client, alive).await;
    }
    if alive && unread {
        linger(&state, &client, &socket).await;
    }
    state.clients.remove(client.id);
    socket.shutdown();
    drop(counted);
}

/// The state of a connection's task. The operations of its socket are in the task itself, which
/// starts and polls them in place.
struct Connection {
    session: Session,
    input: Input,
    /// Memory of the input, and of the buffers of an idle connection.
    input_share: Share,
    idle_share: Share,
    large: Large,
    state: Rc<CoreState>,
    client: Rc<Client>,
    pace: Pace,
    /// Until when all commands are held back; 0 if they are not.
    paused_until_ns: u64,
    pause: Option<Sleep>,
    half_closed: Option<Sleep>,
    stalled: Option<Sleep>,
    sweep: Option<Sleep>,
    /// The receive in flight has a buffer of its own, whose content is appended to the input when
    /// it has come.
    apart: bool,
    /// The minimum size of a receive.
    least: usize,
    /// Bytes that the socket had accepted when it was last looked at, when the client closed its
    /// side, and when `stalled` was started.
    accepted: u64,
    accepted_at_half_close: u64,
    accepted_at_stall: u64,
    told_to_stop: bool,
}

impl Connection {
    fn new(state: &Rc<CoreState>, socket: &Socket) -> Self {
        let now_ns = state.core.now_ns();
        let (address, local) = (socket.peer_addr().ok(), socket.local_addr().ok());
        let client = state.clients.add(address, local, socket.number(), now_ns);
        state.count(|stats| stats.connections += 1);
        Self {
            session: Session::new(state, &client),
            input: Input::new(state.node.settings().limits()),
            input_share: state.large.held.share(),
            idle_share: state.idle_buffer_bytes.share(),
            large: Large::new(&state.large, &client),
            state: state.clone(),
            client,
            pace: Pace::default(),
            paused_until_ns: 0,
            pause: None,
            half_closed: None,
            stalled: None,
            sweep: None,
            apart: false,
            least: RECEIVE_BYTES,
            accepted: 0,
            accepted_at_half_close: 0,
            accepted_at_stall: 0,
            told_to_stop: false,
        }
    }

    fn is_paused(&self) -> bool {
        self.paused_until_ns > 0
    }

    /// Looks whether all commands are held back now.
    fn heed_pause(&mut self) {
        let until_ns = self.state.node.paused_until_ns();
        let paused = until_ns > self.state.core.now_ns();
        self.paused_until_ns = if paused { until_ns } else { 0 };
    }

    /// Executes the commands that have arrived, as far as they may be taken now.
    fn take_commands(&mut self, is_receiving: bool) {
        self.heed_pause();
        self.session.send_pushes(false);
        if !self.is_paused() && !self.input.buffer.is_empty() {
            self.client.input_bytes.set(self.input.buffer.len());
            let Input { buffer, consumed, parser, missing, .. } = &mut self.input;
            *missing = self.session.work(parser, buffer, consumed);
            self.input.compact();
            self.client.input_bytes.set(self.input.buffer.len());
            // One of the commands may have been `CLIENT PAUSE`.
            self.heed_pause();
        }
        self.session.send_pushes(self.is_caught_up());
        let blocked =
            self.session.waits_for_pause || self.is_paused() && self.input.missing.is_none();
        self.client.blocked.set(blocked);
        if is_receiving && !self.apart {
            return;
        }
        self.input_share.set(self.input.room_bytes());
        let settings = self.state.node.settings();
        self.least = match self.state.large.is_short(settings) {
            true => Settings::REQUEST_BYTES_LEAST,
            false => RECEIVE_BYTES,
        };
        if !self.large.waits()
            && self.input.is_small(self.least, self.state.large.small_bytes(settings))
        {
            self.large.done();
        }
    }

    /// Whether all commands that have arrived are answered.
    fn is_caught_up(&self) -> bool {
        self.input.missing.is_some() && !self.session.replies.is_busy()
    }

    /// Refuses the large command that arrives too slowly, if one does.
    fn refuse_slow_request(&mut self) -> bool {
        if !self.pace.take_too_slow() || self.session.replies.closing != Closing::No {
            return false;
        }
        self.input.discard();
        self.input_share.set(0);
        self.large.done();
        self.session.refuse(&format!(
            "ERR Protocol error: less than {LARGE_BYTES_PER_S} bytes a second of a large request that others wait \
             for"
        ));
        true
    }

    /// Whether the connection is to be closed now.
    fn is_done(&self, is_sending: bool) -> bool {
        let replies = &self.session.replies;
        let quiet = !is_sending && !replies.is_busy();
        let last =
            replies.closing != Closing::No || self.input.ended && self.input.missing.is_some();
        replies.closing == Closing::Now || quiet && (last || self.state.stopping.get())
    }

    /// The next receive, if something may be received.
    fn receive(&mut self) -> Option<Receive> {
        if self.input.ended || self.is_paused() {
            return None;
        }
        let streaming = self.session.replies.is_streaming();
        if streaming && !self.input.buffer.is_empty() {
            let has_space = self.input.buffer.len() < RECEIVE_BYTES;
            self.apart |= has_space;
            return has_space.then_some(Receive {
                buffer: Vec::new(),
                most: RECEIVE_BYTES,
                idle: true,
            });
        }
        let may_receive = self.input.missing.is_some()
            && (streaming || self.session.may_take())
            && self.large.admit(self.input.room_wanted(self.least), self.state.node.settings());
        may_receive.then(|| self.receive_input())
    }

    /// A receive into the input's buffer.
    fn receive_input(&mut self) -> Receive {
        let input = &mut self.input;
        self.apart = false;
        let empty = input.buffer.is_empty();
        let room = input.buffer.capacity().max(RECEIVE_BYTES) + self.session.replies.room_bytes();
        self.idle_share.set(0);
        let idle_bytes = self.state.idle_buffer_bytes.get() + room;
        let crowded = empty && idle_bytes > self.state.node.settings().idle_buffer_bytes_max;
        if crowded {
            input.buffer = Vec::new();
            input.parser.release();
            self.session.replies.release();
        } else {
            self.idle_share.set(room);
        }
        // Many waiting connections may all begin a command at once.
        let most = if crowded { Settings::REQUEST_BYTES_LEAST } else { input.wanted(self.least) };
        let buffer = std::mem::take(&mut input.buffer);
        self.client.input_room_bytes.set(if crowded { 0 } else { buffer.len() + most });
        if !empty {
            self.input_share.set(buffer.len() + most + input.parser.heap_bytes());
        }
        Receive { buffer, most, idle: crowded }
    }

    /// Starts and stops the timers.
    fn set_timers(&mut self, is_sending: bool) {
        let (core, accepted) = (&self.state.core, self.client.accepted.get());
        if (self.is_paused() || self.session.waits_for_pause) && self.pause.is_none() {
            let until_ns = match self.is_paused() {
                true => self.paused_until_ns,
                false => self.state.node.writes_paused_until_ns(),
            };
            let wait_ns = until_ns.saturating_sub(core.now_ns()).min(PAUSE_CHECK_NS);
            self.pause = Some(core.sleep_ns(wait_ns));
        }
        let streaming = self.session.replies.is_streaming();
        if !(self.input.ended && streaming && accepted == self.accepted_at_half_close) {
            self.half_closed = None;
        } else if self.half_closed.is_none() {
            self.half_closed = Some(core.sleep_ns(HALF_CLOSED_NS));
        }
        if self.state.stopping.get() && is_sending && self.stalled.is_none() {
            self.accepted_at_stall = accepted;
            self.stalled = Some(core.sleep_ns(STOP_STALL_NS));
        }
        if !self.client.waits_for_room.get() {
            self.sweep = None;
        } else if self.sweep.is_none() {
            self.sweep = Some(core.sleep_ns(SWEEP_NS));
        }
        self.pace.set_timer(core, &self.large, accepted);
    }

    /// Waits for the next event; false when the connection has ended.
    async fn wait<S, R>(
        &mut self,
        sending: &mut Pin<&mut Option<S>>,
        receiving: &mut Pin<&mut Option<R>>,
    ) -> bool
    where
        S: Future<Output = Sent>,
        R: Future<Output = Received>,
    {
        poll_fn(|cx| {
            self.client.listen(cx.waker());
            if self.client.is_killed() {
                return Poll::Ready(false);
            }
            let waits_for_client = sending.is_some() || receiving.is_some();
            let mut moved = self.poll_replies(cx);
            if let Some(sent) = finish(sending, cx) {
                if self.sent(sent).is_err() {
                    return Poll::Ready(false);
                }
                moved = true;
            }
            self.note_progress();
            if let Some(received) = finish(receiving, cx) {
                if self.received(received).is_err() {
                    return Poll::Ready(false);
                }
                moved = true;
            }
            // After what has arrived is counted: a busy core may find both at the same time.
            let accepted = self.client.accepted.get();
            moved |= self.pace.poll(cx, &self.state.core, &self.large, accepted, waits_for_client);
            moved |= fired(&mut self.pause, cx);
            if fired(&mut self.half_closed, cx) {
                return Poll::Ready(false);
            }
            if fired(&mut self.stalled, cx) {
                if sending.is_some() && self.client.accepted.get() == self.accepted_at_stall {
                    return Poll::Ready(false);
                }
                moved = true;
            }
            moved |= self.state.stopping.get() && !std::mem::replace(&mut self.told_to_stop, true);
            if moved { Poll::Ready(true) } else { Poll::Pending }
        })
        .await
    }

    /// Collects replies, and asks again for the room that the connection waits for; true when
    /// something has changed.
    fn poll_replies(&mut self, cx: &mut Context<'_>) -> bool {
        let mut moved = self.session.replies.collect(cx);
        moved |= self.session.has_got_room();
        moved |= self.session.has_pushes(self.is_caught_up());
        // It has just begun to wait: the turn starts the sweep for clients that read too little.
        moved |= self.client.waits_for_room.get() && self.sweep.is_none();
        moved |= self.large.waits()
            && self.large.admit(self.input.room_wanted(self.least), self.state.node.settings());
        if fired(&mut self.sweep, cx) {
            let closed = self.state.room.sweep(&self.state.clients, self.state.core.now_ns());
            self.state.count(|stats| stats.slow_closed += closed);
            moved = true;
        }
        moved
    }

    /// Notes when the socket accepts something.
    fn note_progress(&mut self) {
        let accepted = self.client.accepted.get();
        if accepted != std::mem::replace(&mut self.accepted, accepted) {
            self.client.moved_ns.set(self.state.core.now_ns());
        }
    }

    /// A send has finished.
    fn sent(&mut self, (result, batch): Sent) -> io::Result<()> {
        let bytes = self.session.replies.sent(batch) as u64;
        result?;
        self.state.count(|stats| {
            stats.sends += 1;
            stats.sent_bytes += bytes;
        });
        Ok(())
    }

    /// A receive has finished.
    fn received(&mut self, (result, buffer): Received) -> io::Result<()> {
        if self.apart {
            self.input.buffer.extend_from_slice(&buffer);
        } else {
            self.input.buffer = buffer;
        }
        let bytes = result?;
        if bytes == 0 {
            self.input.ended = true;
            self.accepted_at_half_close = self.client.accepted.get();
            return Ok(());
        }
        self.input.missing = None;
        if self.accepted > 0 && !self.session.replies.is_busy() {
            // It has got all replies.
            let has_all = self.session.replies.unsent_bytes() == 0;
            self.client.reads.set(has_all || self.client.reads.get());
        }
        self.pace.add_received(bytes);
        self.client.active_ns.set(self.state.core.now_ns());
        self.state.count(|stats| {
            stats.receives += 1;
            stats.received_bytes += bytes as u64;
        });
        Ok(())
    }
}

/// Polls an operation that may be in flight, and removes it when it has finished.
fn finish<F: Future>(slot: &mut Pin<&mut Option<F>>, cx: &mut Context<'_>) -> Option<F::Output> {
    match slot.as_mut().as_pin_mut()?.poll(cx) {
        Poll::Ready(output) => {
            slot.set(None);
            Some(output)
        }
        Poll::Pending => None,
    }
}

/// Polls a timer that may be set, and removes it when it has fired.
fn fired(timer: &mut Option<Sleep>, cx: &mut Context<'_>) -> bool {
    let fired = timer.as_mut().is_some_and(|sleep| Pin::new(sleep).poll(cx).is_ready());
    if fired {
        *timer = None;
    }
    fired
}

/// Receives and discards what the client is still sending.
async fn linger(state: &CoreState, client: &Client, socket: &Socket) {
    let core = &state.core;
    let deadline_ns = core.now_ns().saturating_add(LINGER_NS);
    let mut buffer = Vec::new();
    while core.now_ns() < deadline_ns && !state.stopping.get() {
        buffer.clear();
        let mut receiving = pin!(socket.recv(std::mem::take(&mut buffer), RECEIVE_BYTES));
        let mut quiet = pin!(core.sleep_ns(LINGER_QUIET_NS));
        let received = std::future::poll_fn(|cx| {
            client.listen(cx.waker());
            if client.is_killed() || state.stopping.get() {
                return Poll::Ready(None);
            }
            match receiving.as_mut().poll(cx) {
                Poll::Ready((Ok(1..), buffer)) => Poll::Ready(Some(buffer)),
                Poll::Ready(_) => Poll::Ready(None),
                Poll::Pending => quiet.as_mut().poll(cx).map(|_| None),
            }
        })
        .await;
        match received {
            Some(received) => buffer = received,
            None => return,
        }
    }
}
