//! One connection: its socket, its input, and the task that keeps both busy.
//!
//! The task waits for whatever comes first: bytes to arrive, bytes to be taken, a read to finish,
//! an order to end. One send and one receive are under way at a time; the replies of one turn go
//! out in one send. While commands may not be taken nothing is received, so a client that does not
//! read is not read either, and TCP tells it. Only while a long reply is being made a little is
//! received all the same: that is how it is noticed that nobody waits for the reply any more.
//!
//! Of a command that is large no more is received than there is room for, see `large`.
//!
//! A connection that is closed behind an error takes in for a moment what its client is still
//! sending: bytes that nobody has received when a socket is closed make TCP throw away what was
//! sent, the error with it.
//!
//! An idle connection keeps its buffers as long as those of all idle connections of the core fit a
//! budget; beyond that it waits without any, and receives only when something has arrived.

pub(crate) mod administration;
pub(crate) mod large;
pub(crate) mod outgoing;
pub(crate) mod output;
pub(crate) mod replies;
pub(crate) mod room;
pub(crate) mod session;
pub(crate) mod transaction;

use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll};

use reactor::Socket;
use resp::Parser;

use crate::connection::large::Large;
use crate::connection::output::send;
use crate::connection::replies::Closing;
use crate::connection::room::SWEEP_NS;
use crate::connection::session::Session;
use crate::core::client::Client;
use crate::core::state::CoreState;
use crate::settings::Settings;

/// Bytes received at once.
const RECEIVE_BYTES: usize = 16 * 1024;

/// Bytes received at once of a long argument.
const RECEIVE_LONG_BYTES: usize = 1024 * 1024;

/// How often a paused connection looks whether the pause has ended early.
const PAUSE_CHECK_NS: u64 = 20_000_000;

/// How long a client that has closed its side waits for a long reply to begin. It may be gone
/// altogether: only sending to it would tell.
const HALF_CLOSED_NS: u64 = 1_000_000_000;

/// While the node stops, a client that takes nothing for so long is not waited for.
const STOP_STALL_NS: u64 = 1_000_000_000;

/// What a client must bring of a large command that others wait for, on average while they have
/// patience with it.
const LARGE_BYTES_PER_S: u64 = 64 * 1024;
/// For how long at most what it has brought before counts: the way there and back, as others may be
/// waiting for it.
const LARGE_CREDIT_NS: u64 = 100_000_000;
/// How often this is looked at.
const LARGE_CHECK_NS: u64 = 100_000_000;

/// Behind an error a connection is closed when nothing has arrived for so long, or after so long at
/// the latest.
const LINGER_QUIET_NS: u64 = 250_000_000;
const LINGER_NS: u64 = 5_000_000_000;

/// Commands that have arrived and were not yet taken.
struct Input {
    buffer: Vec<u8>,
    consumed: usize,
    parser: Parser,
    /// Bytes that the command at the end still lacks; `None` when whole ones may be left.
    missing: Option<usize>,
    /// The other side sends no more.
    ended: bool,
}

impl Input {
    /// Forgets what has been taken.
    fn compact(&mut self) {
        if self.consumed == self.buffer.len() {
            self.buffer.clear();
            if self.buffer.capacity() > 4 * RECEIVE_BYTES {
                self.buffer = Vec::new();
            }
        } else if self.consumed > 0 {
            self.buffer.drain(..self.consumed);
            if self.buffer.capacity() > 4 * RECEIVE_BYTES && self.buffer.len() <= RECEIVE_BYTES {
                self.buffer.shrink_to_fit();
            }
        }
        self.consumed = 0;
        if self.buffer.is_empty() {
            self.missing = Some(1);
            if self.parser.heap_bytes() > RECEIVE_BYTES {
                self.parser.release();
            }
        }
    }

    /// Forgets everything: nothing more is taken or received.
    fn give_up(&mut self) {
        self.buffer = Vec::new();
        (self.consumed, self.missing) = (0, None);
    }

    /// How much to receive next, `least` at least: of a long argument as much as has arrived
    /// already, so that announcing one takes no memory.
    fn wanted(&self, least: usize) -> usize {
        let most = self.buffer.len().clamp(least, RECEIVE_LONG_BYTES);
        self.missing.unwrap_or(1).clamp(least, most)
    }

    /// Whether no large command is arriving.
    fn is_small(&self, least: usize, small: usize) -> bool {
        let bytes =
            if self.missing.is_some() { self.room_wanted(least) } else { self.buffer.len() };
        bytes <= small
    }

    /// Bytes that it has when that has come.
    fn room_wanted(&self, least: usize) -> usize {
        self.buffer.len() + self.wanted(least)
    }

    /// Memory of what has arrived and was not taken.
    fn room_bytes(&self) -> usize {
        match self.buffer.is_empty() {
            true => 0,
            false => self.buffer.capacity() + self.parser.heap_bytes(),
        }
    }
}

/// Receives behind what `buffer` holds. An idle connection waits first, without room to receive
/// into.
async fn receive(
    socket: Socket,
    buffer: Vec<u8>,
    most: usize,
    idle: bool,
) -> (io::Result<usize>, Vec<u8>) {
    if idle && let Err(error) = socket.readable().await {
        return (Err(error), buffer);
    }
    socket.recv(buffer, most).await
}

/// Polls an operation that may be under way; its result takes it away.
fn finish<F: Future>(slot: &mut Pin<&mut Option<F>>, cx: &mut Context<'_>) -> Option<F::Output> {
    match slot.as_mut().as_pin_mut()?.poll(cx) {
        Poll::Ready(output) => {
            slot.set(None);
            Some(output)
        }
        Poll::Pending => None,
    }
}

/// Serves one connection until either side ends it.
pub(crate) async fn serve(state: Rc<CoreState>, socket: Socket) {
    let now_ns = state.core.now_ns();
    let (address, local) = (socket.peer_addr().ok(), socket.local_addr().ok());
    let client = state.clients.add(address, local, socket.number(), now_ns);
    state.count(|stats| stats.connections += 1);
    let mut session = Session::new(&state, &client);
    let mut input = Input {
        buffer: Vec::new(),
        consumed: 0,
        parser: Parser::new(state.shared.settings().limits()),
        missing: Some(1),
        ended: false,
    };
    let mut input_share = state.large.held.share();
    let mut idle_share = state.idle_buffer_bytes.share();
    let mut large = Large::new(&state.large, &client);
    let mut told_to_stop = false;
    let mut sending = pin!(None);
    let mut receiving = pin!(None);
    let mut pause = pin!(None);
    let mut half_closed = pin!(None);
    let mut stalled = pin!(None);
    let mut patience = pin!(None);
    let mut sweep = pin!(None);
    // What is being received goes into a buffer of its own, and behind the input when it has come.
    let mut apart = false;
    // Sends that have taken something: all, those when the client closed its side, those when the
    // node's end began.
    let sends = client.sends.clone();
    let (mut sends_at_half_close, mut sends_at_stall) = (0, 0);
    // Bytes received, what it and the sends were when it was last looked whether a large command
    // comes quickly enough, and since when that has brought too little.
    let (mut received, mut at_patience) = (0u64, (0, 0, 0));
    let mut too_slow = false;
    // The least that is received at once.
    let mut least = RECEIVE_BYTES;
    let mut alive = true;
    loop {
        let paused_until_ns = state.shared.paused_until_ns();
        let paused = paused_until_ns > state.core.now_ns();
        if !paused && !input.buffer.is_empty() {
            client.input_bytes.set(input.buffer.len());
            let Input { buffer, consumed, parser, missing, .. } = &mut input;
            *missing = session.work(parser, buffer, consumed);
            input.compact();
            client.input_bytes.set(input.buffer.len());
        }
        client.blocked.set(session.waits_for_pause || paused && input.missing.is_none());
        if receiving.is_none() || apart {
            input_share.set(input.room_bytes());
            least = match state.large.is_short(state.shared.settings()) {
                true => Settings::REQUEST_BYTES_LEAST,
                false => RECEIVE_BYTES,
            };
            if !large.waits()
                && input.is_small(least, state.large.small_bytes(state.shared.settings()))
            {
                large.done();
            }
        }
        if std::mem::take(&mut too_slow) && session.replies.closing == Closing::No {
            receiving.set(None);
            input.give_up();
            input_share.set(0);
            large.done();
            session.refuse(&format!(
                "ERR Protocol error: less than {LARGE_BYTES_PER_S} bytes a second of a large request that others wait \
                 for"
            ));
        }
        if sending.is_none()
            && let Some(batch) = session.replies.take()
        {
            sending.set(Some(send(socket.clone(), batch, sends.clone())));
        }
        session.replies.account();
        let quiet = sending.is_none() && !session.replies.is_busy();
        let last = session.replies.closing != Closing::No || input.ended && input.missing.is_some();
        if session.replies.closing == Closing::Now || quiet && (last || state.stopping.get()) {
            break;
        }
        let streaming = session.replies.is_streaming();
        let may_receive = receiving.is_none() && !input.ended && !paused;
        if may_receive && streaming && !input.buffer.is_empty() {
            if input.buffer.len() < RECEIVE_BYTES {
                apart = true;
                receiving.set(Some(receive(socket.clone(), Vec::new(), RECEIVE_BYTES, true)));
            }
        } else if may_receive
            && input.missing.is_some()
            && (streaming || session.may_take())
            && large.admit(input.room_wanted(least), state.shared.settings())
        {
            apart = false;
            let empty = input.buffer.is_empty();
            let room = input.buffer.capacity().max(RECEIVE_BYTES) + session.replies.room_bytes();
            idle_share.set(0);
            let crowded = empty
                && state.idle_buffer_bytes.get() + room
                    > state.shared.settings().idle_buffer_bytes_max;
            if crowded {
                input.buffer = Vec::new();
                input.parser.release();
                session.replies.release();
            } else {
                idle_share.set(room);
            }
            // Many connections that wait may all begin a command at once.
            let most = if crowded { Settings::REQUEST_BYTES_LEAST } else { input.wanted(least) };
            let buffer = std::mem::take(&mut input.buffer);
            client.input_room_bytes.set(if crowded { 0 } else { buffer.len() + most });
            if !empty {
                input_share.set(buffer.len() + most + input.parser.heap_bytes());
            }
            receiving.set(Some(receive(socket.clone(), buffer, most, crowded)));
        }
        if (paused || session.waits_for_pause) && pause.is_none() {
            let until_ns = match paused {
                true => paused_until_ns,
                false => state.shared.writes_paused_until_ns(),
            };
            let wait_ns = until_ns.saturating_sub(state.core.now_ns()).min(PAUSE_CHECK_NS);
            pause.set(Some(state.core.sleep_ns(wait_ns)));
        }
        if !(input.ended && streaming && sends.get() == sends_at_half_close) {
            half_closed.set(None);
        } else if half_closed.is_none() {
            half_closed.set(Some(state.core.sleep_ns(HALF_CLOSED_NS)));
        }
        if state.stopping.get() && sending.is_some() && stalled.is_none() {
            sends_at_stall = sends.get();
            stalled.set(Some(state.core.sleep_ns(STOP_STALL_NS)));
        }
        if !client.waits_for_room.get() {
            sweep.set(None);
        } else if sweep.is_none() {
            sweep.set(Some(state.core.sleep_ns(SWEEP_NS)));
        }
        if !large.has_room() {
            patience.set(None);
            at_patience.2 = 0;
        } else if patience.is_none() {
            if at_patience.2 == 0 {
                at_patience = (received, sends.get(), state.core.now_ns());
            }
            let check_ns = large.patience_ns().map_or(LARGE_CHECK_NS, |ns| ns.min(LARGE_CHECK_NS));
            patience.set(Some(state.core.sleep_ns(check_ns)));
        }
        alive = std::future::poll_fn(|cx| {
            client.listen(cx.waker());
            if client.is_killed() {
                return Poll::Ready(false);
            }
            let mut moved = session.replies.collect(cx);
            moved |= session.has_got_room();
            // It has just begun to wait, and looks for clients that take nothing.
            moved |= client.waits_for_room.get() && sweep.is_none();
            moved |=
                large.waits() && large.admit(input.room_wanted(least), state.shared.settings());
            if finish(&mut sweep, cx).is_some() {
                state.room.sweep(&state);
                moved = true;
            }
            if finish(&mut patience, cx).is_some() {
                let now_ns = state.core.now_ns();
                let waits_for_client = receiving.is_some() || sending.is_some();
                let (received_before, sends_before, since_ns) = at_patience;
                let brought_ns = (received - received_before) * 1_000_000_000 / LARGE_BYTES_PER_S;
                let since_ns = match large.patience_ns().filter(|_| waits_for_client) {
                    Some(patience_ns) if sends.get() == sends_before => {
                        let since_ns = (since_ns + brought_ns).min(now_ns + LARGE_CREDIT_NS);
                        too_slow = now_ns.saturating_sub(since_ns) >= patience_ns;
                        since_ns
                    }
                    _ => now_ns,
                };
                at_patience = (received, sends.get(), since_ns);
                moved = true;
            }
            if let Some((result, sent)) = finish(&mut sending, cx) {
                let result: io::Result<()> = result;
                let bytes = session.replies.sent(sent) as u64;
                if result.is_err() {
                    return Poll::Ready(false);
                }
                state.count(|stats| {
                    stats.sends += 1;
                    stats.sent_bytes += bytes;
                });
                moved = true;
            }
            if let Some((result, buffer)) = finish(&mut receiving, cx) {
                if apart {
                    input.buffer.extend_from_slice(&buffer);
                } else {
                    input.buffer = buffer;
                }
                match result {
                    Ok(0) => {
                        input.ended = true;
                        sends_at_half_close = sends.get();
                    }
                    Ok(bytes) => {
                        input.missing = None;
                        received += bytes as u64;
                        client.active_ns.set(state.core.now_ns());
                        state.count(|stats| {
                            stats.receives += 1;
                            stats.received_bytes += bytes as u64;
                        });
                    }
                    Err(_) => return Poll::Ready(false),
                }
                moved = true;
            }
            if finish(&mut pause, cx).is_some() {
                moved = true;
            }
            if finish(&mut half_closed, cx).is_some() {
                return Poll::Ready(false);
            }
            if finish(&mut stalled, cx).is_some() {
                if sending.is_some() && sends.get() == sends_at_stall {
                    return Poll::Ready(false);
                }
                moved = true;
            }
            if state.stopping.get() && !told_to_stop {
                told_to_stop = true;
                moved = true;
            }
            if moved { Poll::Ready(true) } else { Poll::Pending }
        })
        .await;
        if !alive {
            break;
        }
    }
    let unread = session.unread && !input.ended;
    receiving.set(None);
    drop((session, input, input_share, idle_share, large));
    if alive && unread {
        linger(&state, &client, &socket).await;
    }
    state.clients.remove(client.id);
    socket.shutdown();
}

/// Takes in what the client is still sending.
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
