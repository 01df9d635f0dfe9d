//! One connection: its socket, its input, and the task that keeps both busy.
//!
//! The task waits for whatever comes first: bytes to arrive, bytes to be taken, a read to finish, an order to end. One
//! send and one receive are under way at a time; the replies of one turn go out in one send. While commands may not be
//! taken nothing is received, so a client that does not read is not read either, and TCP tells it.
//!
//! An idle connection keeps its buffers as long as those of all idle connections of the core fit a budget; beyond that
//! it waits without any, and receives only when something has arrived.

use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll};

use reactor::Socket;
use resp::Parser;

use crate::output::send;
use crate::replies::Closing;
use crate::session::Session;
use crate::settings::Settings;
use crate::state::CoreState;

/// Bytes received at once.
const RECEIVE_BYTES: usize = 16 * 1024;

/// Bytes received at once of a long argument.
const RECEIVE_LONG_BYTES: usize = 1024 * 1024;

/// How often a paused connection looks whether the pause has ended early.
const PAUSE_CHECK_NS: u64 = 20_000_000;

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
        }
        self.consumed = 0;
        if self.buffer.is_empty() {
            self.missing = Some(1);
        }
    }

    /// How much to receive next: of a long argument as much as has arrived already, so that announcing one takes no
    /// memory.
    fn wanted(&self) -> usize {
        let most = self.buffer.len().clamp(RECEIVE_BYTES, RECEIVE_LONG_BYTES);
        self.missing.unwrap_or(1).clamp(RECEIVE_BYTES, most)
    }
}

/// Receives behind what `buffer` holds. An idle connection waits first, without room to receive into.
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
    let mut input_share = state.input_bytes.share();
    let mut idle_share = state.idle_buffer_bytes.share();
    let mut told_to_stop = false;
    let mut sending = pin!(None);
    let mut receiving = pin!(None);
    let mut pause = pin!(None);
    loop {
        let paused_until_ns = state.shared.paused_until_ns();
        let paused = paused_until_ns > state.core.now_ns();
        if !paused && receiving.is_none() && !input.buffer.is_empty() {
            let Input { buffer, consumed, parser, missing, .. } = &mut input;
            *missing = session.work(parser, buffer, consumed);
            input.compact();
            client.input_bytes.set(input.buffer.len());
        }
        if receiving.is_none() {
            input_share.set(input.buffer.len());
        }
        if input.buffer.len() > Settings::REQUEST_BYTES_SMALL
            && state.input_bytes.get() > state.shared.settings().requests_bytes_max
            && session.replies.closing == Closing::No
        {
            session
                .refuse("ERR Protocol error: too many bytes of unfinished requests on this node");
        }
        if sending.is_none()
            && let Some(batch) = session.replies.take()
        {
            sending.set(Some(send(socket.clone(), batch)));
        }
        session.replies.account();
        client.unsent_bytes.set(session.replies.unsent_bytes());
        let quiet = sending.is_none() && !session.replies.is_busy();
        let last = session.replies.closing != Closing::No || input.ended && input.missing.is_some();
        if session.replies.closing == Closing::Now || quiet && (last || state.stopping.get()) {
            break;
        }
        if receiving.is_none()
            && !input.ended
            && input.missing.is_some()
            && !paused
            && session.may_take()
        {
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
            let most = input.wanted();
            let buffer = std::mem::take(&mut input.buffer);
            client.input_room_bytes.set(if crowded { 0 } else { buffer.len() + most });
            receiving.set(Some(receive(socket.clone(), buffer, most, crowded)));
        }
        if paused && pause.is_none() {
            let wait_ns = (paused_until_ns - state.core.now_ns()).min(PAUSE_CHECK_NS);
            pause.set(Some(state.core.sleep_ns(wait_ns)));
        }
        let alive = std::future::poll_fn(|cx| {
            client.listen(cx.waker());
            if client.is_killed() {
                return Poll::Ready(false);
            }
            let mut moved = session.replies.collect(cx);
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
                input.buffer = buffer;
                match result {
                    Ok(0) => input.ended = true,
                    Ok(bytes) => {
                        input.missing = None;
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
    state.clients.remove(client.id);
    socket.shutdown();
}
