//! The operation table: what the kernel, or a simulated device, may still be using.
//!
//! A slot owns an operation's buffer and a hold on its descriptor from its start until its
//! completion has been reaped. The waiting future keeps only the slot's number and generation.
//! Dropping the future makes the slot an orphan: nothing is freed, the completion is still awaited,
//! and a resource that it returns (an accepted connection) is closed then.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::rc::Rc;
use std::task::Waker;

use crate::driver::{Fd, IoOp, MetaOut, SimFd, Token};
use crate::flow::Lane;
use crate::inbox::Sender;
use crate::io::file::FileInner;
use crate::io::file_queue::QueueInner;
use crate::io::net::SocketInner;
use crate::memory::buf::{Buf, SharedBuf, Slice};

/// The memory that an operation owns while it runs.
#[derive(Default)]
pub(crate) enum Payload {
    #[default]
    None,
    /// A file read's or a receive's destination, or a write's source.
    Buf(Buf),
    /// A receive's destination, or a send's source.
    Bytes(Vec<u8>),
    /// A send of several pieces, with the header that points to them.
    Parts(Box<Message>),
    /// A name operation's answer.
    Meta(io::Result<MetaOut>),
}

/// One piece of a vectored send.
pub enum Part {
    /// Bytes of its own.
    Bytes(Vec<u8>),
    /// A part of a shared buffer, sent without a copy.
    Slice(Slice),
}

impl Part {
    /// Length in bytes.
    pub fn len(&self) -> usize {
        match self {
            Part::Bytes(bytes) => bytes.len(),
            Part::Slice(slice) => slice.len(),
        }
    }

    /// Whether it holds no byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its bytes.
    pub fn as_slice(&self) -> &[u8] {
        match self {
            Part::Bytes(bytes) => bytes,
            Part::Slice(slice) => slice,
        }
    }
}

/// A vectored send: the pieces, the vector of their addresses, and the header that points to the
/// vector. Boxed, so that the header keeps the address that the driver has.
pub(crate) struct Message {
    pub parts: Vec<Part>,
    pub iov: Vec<libc::iovec>,
    pub header: libc::msghdr,
}

/// The resources that must stay open while an operation runs.
#[derive(Default)]
pub(crate) enum Hold {
    #[default]
    None,
    File {
        file: Rc<FileInner>,
    },
    Socket {
        _socket: Rc<SocketInner>,
    },
    /// The slot of a queue, which holds the file and more.
    Queue {
        queue: Rc<QueueInner>,
        slot: u32,
    },
}

impl Hold {
    /// The file of a disk operation.
    pub fn file(&self) -> Option<&FileInner> {
        match self {
            Hold::File { file } => Some(file),
            Hold::Queue { queue, .. } => Some(queue.file()),
            Hold::None | Hold::Socket { .. } => None,
        }
    }
}

/// The receiver of a completion. Call [`Ended::tell`] when nothing is borrowed.
#[must_use]
pub(crate) enum Ended {
    /// No receiver.
    Unseen,
    /// A task.
    Task(Waker),
    /// A queue's slot, and the result.
    Queue(Rc<QueueInner>, u32, i32),
}

impl Ended {
    pub fn tell(self) {
        match self {
            Ended::Unseen => {}
            Ended::Task(waker) => waker.wake(),
            Ended::Queue(queue, slot, result) => queue.reaped(slot, result),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Free,
    Running,
    Orphan,
    Done,
}

/// The kind of an operation, as far as the table depends on it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Nature {
    /// No special treatment.
    Plain,
    /// It only asks, and holds no memory: the end of a core does not wait for the answer.
    Question,
    /// Returns a descriptor.
    Accept,
    /// It goes to a disk.
    Read,
    /// A disk operation that is never cancelled.
    Write,
    /// The same; its failure poisons the file.
    Sync,
}

impl Nature {
    pub fn of(op: &IoOp) -> Nature {
        match op {
            IoOp::Read { .. } | IoOp::ReadV { .. } => Nature::Read,
            IoOp::SyncData { .. } | IoOp::Write { durable: true, .. } => Nature::Sync,
            IoOp::Write { .. } | IoOp::WriteV { .. } | IoOp::Fallocate { .. } => Nature::Write,
            IoOp::Accept { .. } => Nature::Accept,
            IoOp::Recv { .. } | IoOp::Send { .. } | IoOp::SendMsg { .. } | IoOp::PollIn { .. } => {
                Nature::Plain
            }
        }
    }

    /// Whether it goes to a disk.
    pub fn is_disk(self) -> bool {
        matches!(self, Nature::Read | Nature::Write | Nature::Sync)
    }
}

struct Slot {
    generation: u32,
    state: State,
    nature: Nature,
    lane: Lane,
    urgent: bool,
    result: i32,
    waker: Option<Waker>,
    payload: Payload,
    hold: Hold,
}

impl Slot {
    /// Poisons the file of a failed sync or durable write, whether or not its future still exists.
    /// A sync that was cancelled before its start, or interrupted, flushed nothing and lost
    /// nothing.
    #[cold]
    fn failed(&self, result: i32) {
        if self.nature == Nature::Sync
            && let Hold::File { file } = &self.hold
            && ![-libc::ECANCELED, -libc::EINTR].contains(&result)
        {
            file.shared().set_flush_failed();
        }
    }
}

/// An operation's slot and generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OpId {
    pub token: Token,
    generation: u32,
}

/// Slots reserved at the start.
const SLOTS: usize = 1024;

#[derive(Default)]
pub(crate) struct Ops {
    slots: Vec<Slot>,
    free: Vec<Token>,
    /// Slots whose completion has not been reaped.
    pub running: usize,
    /// The disk operations among them.
    pub disk_running: usize,
    /// The questions among them.
    questions: usize,
    /// Those for which a core does not wait together with others.
    pub urgent_running: usize,
    /// In a simulated world: the channel on which dropped descriptors announce that they are
    /// closed.
    simulated: Option<Sender<i32>>,
}

impl Ops {
    /// An empty table; `simulated` is the channel on which dropped descriptors of a simulated world
    /// announce that they are closed.
    pub fn new(simulated: Option<Sender<i32>>) -> Ops {
        let (slots, free) = (Vec::with_capacity(SLOTS), Vec::with_capacity(SLOTS));
        Ops { slots, free, simulated, ..Ops::default() }
    }

    pub fn insert(&mut self, payload: Payload, hold: Hold, nature: Nature) -> OpId {
        let token = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot {
                generation: 0,
                state: State::Free,
                nature: Nature::Plain,
                lane: Lane::None,
                urgent: false,
                result: 0,
                waker: None,
                payload: Payload::None,
                hold: Hold::None,
            });
            (self.slots.len() - 1) as Token
        });
        let slot = &mut self.slots[token as usize];
        slot.state = State::Running;
        slot.nature = nature;
        slot.payload = payload;
        slot.hold = hold;
        self.running += 1;
        self.disk_running += usize::from(nature.is_disk());
        self.questions += usize::from(nature == Nature::Question);
        OpId { token, generation: slot.generation }
    }

    /// Notes that a core does not wait for others together with this operation.
    pub fn set_urgent(&mut self, token: Token) {
        self.slots[token as usize].urgent = true;
        self.urgent_running += 1;
    }

    /// Notes what an operation in flight means to flow control.
    pub fn set_lane(&mut self, token: Token, lane: Lane) {
        self.slots[token as usize].lane = lane;
    }

    /// The same of an operation that has been reaped, once.
    pub fn take_lane(&mut self, token: Token) -> Lane {
        self.slots.get_mut(token as usize).map_or(Lane::None, |slot| std::mem::take(&mut slot.lane))
    }

    /// Notes a completion. An unknown token is ignored.
    pub fn complete(&mut self, token: Token, result: i32) -> Ended {
        let Some(slot) = self.slots.get_mut(token as usize) else { return Ended::Unseen };
        if result < 0 {
            slot.failed(result);
        }
        match slot.state {
            State::Running => {
                self.running -= 1;
                self.disk_running -= usize::from(slot.nature.is_disk());
                self.questions -= usize::from(slot.nature == Nature::Question);
                self.urgent_running -= usize::from(std::mem::take(&mut slot.urgent));
                if let Hold::Queue { queue, slot } = std::mem::take(&mut slot.hold) {
                    self.release(token);
                    return Ended::Queue(queue, slot, result);
                }
                slot.state = State::Done;
                slot.result = result;
                slot.waker.take().map_or(Ended::Unseen, Ended::Task)
            }
            State::Orphan => {
                let nature = slot.nature;
                self.urgent_running -= usize::from(std::mem::take(&mut slot.urgent));
                if nature == Nature::Accept && result >= 0 {
                    drop(self.adopt(result));
                }
                self.running -= 1;
                self.disk_running -= usize::from(nature.is_disk());
                self.questions -= usize::from(nature == Nature::Question);
                self.release(token);
                Ended::Unseen
            }
            State::Free | State::Done => Ended::Unseen,
        }
    }

    pub fn complete_meta(&mut self, token: Token, answer: io::Result<MetaOut>) -> Ended {
        if let Some(slot) = self.slots.get_mut(token as usize)
            && slot.state == State::Running
        {
            slot.payload = Payload::Meta(answer);
        }
        self.complete(token, 0)
    }

    /// The result and the payload once the operation is done.
    pub fn take_done(&mut self, id: OpId, waker: &Waker) -> Option<(i32, Payload)> {
        let slot = &mut self.slots[id.token as usize];
        debug_assert_eq!(slot.generation, id.generation);
        if slot.state != State::Done {
            match &slot.waker {
                Some(known) if known.will_wake(waker) => {}
                _ => slot.waker = Some(waker.clone()),
            }
            return None;
        }
        let result = slot.result;
        let payload = std::mem::take(&mut slot.payload);
        self.release(id.token);
        Some((result, payload))
    }

    /// Notes that the future was dropped. True when the operation still runs and may be cancelled.
    pub fn orphan(&mut self, id: OpId) -> bool {
        let slot = &mut self.slots[id.token as usize];
        if slot.generation != id.generation {
            return false;
        }
        match slot.state {
            State::Running => {
                slot.state = State::Orphan;
                slot.waker = None;
                true
            }
            State::Done => {
                if slot.nature == Nature::Accept && slot.result >= 0 {
                    let accepted = slot.result;
                    drop(self.adopt(accepted));
                }
                self.release(id.token);
                false
            }
            State::Free | State::Orphan => false,
        }
    }

    /// Takes ownership of the descriptor that a successful accept returned.
    pub fn adopt(&self, accepted: i32) -> Fd {
        match &self.simulated {
            Some(closing) => Fd::Sim(SimFd::new(accepted, closing.clone())),
            // SAFETY: a successful accept of the host returned a new descriptor. Callers pass the
            // result of an operation once: the future that took it from its slot, or, if that was
            // dropped, the slot when it is released. So this is its only owner.
            None => Fd::Host(unsafe { OwnedFd::from_raw_fd(accepted) }),
        }
    }

    /// Whether nothing runs that the end of the core waits for.
    pub fn is_drained(&self) -> bool {
        self.running == self.questions
    }

    /// Tokens of everything that still runs.
    pub fn unfinished(&self) -> Vec<Token> {
        (0..self.slots.len() as Token)
            .filter(|&t| matches!(self.slots[t as usize].state, State::Running | State::Orphan))
            .collect()
    }

    /// Whether an unfinished operation may be cancelled.
    pub fn may_cancel(&self, token: Token) -> bool {
        !matches!(self.slots[token as usize].nature, Nature::Write | Nature::Sync)
    }

    fn release(&mut self, token: Token) {
        let slot = &mut self.slots[token as usize];
        slot.generation = slot.generation.wrapping_add(1);
        slot.state = State::Free;
        slot.waker = None;
        slot.payload = Payload::None;
        slot.hold = Hold::None;
        self.free.push(token);
    }
}

impl From<SharedBuf> for Part {
    fn from(buf: SharedBuf) -> Part {
        let len = buf.len();
        Part::Slice(Slice::new(buf, 0..len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_core_waits_for_no_question() {
        let mut ops = Ops::default();
        let plain = ops.insert(Payload::None, Hold::None, Nature::Plain);
        let question = ops.insert(Payload::None, Hold::None, Nature::Question);
        assert!(!ops.is_drained());
        drop(ops.complete(plain.token, 0));
        assert!(ops.is_drained() && ops.running == 1);
        assert!(ops.orphan(question));
        drop(ops.complete(question.token, 0));
        assert!(ops.is_drained() && ops.running == 0);
    }
}
