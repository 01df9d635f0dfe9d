//! The writes of one core that are in flight to the shard and back.
//!
//! 1. A connection gathers the changes of consecutive commands into a parcel (`outgoing`). The
//!    parcel goes to the shard at the end of a turn: directly where this core owns it, otherwise
//!    through the shard's mailbox, as one message.
//! 2. The shard answers all commands of a parcel together. Answers for another core are sent with
//!    those to other parcels in one message. They go into the slot that the connection polls.
//!
//! Order: a connection's writes are made in the order in which it sends them, so a crash leaves a
//! prefix of them. Across connections only an answer orders parcels: a parcel sent after the answer
//! to another has arrived is made after it. An unanswered write may therefore be made after one
//! that another connection sent later, even if that client knew of it, for example because it
//! killed the first connection. That is always true of an unanswered write.
//!
//! Bounds: parcels and bytes are counted per core from the sending to the answer. Beyond a limit
//! the connections of this core take no command that writes until answers have arrived. So the
//! mailbox is never full, and the engine's queue holds no more than the cores' limits allow. One
//! write is admitted however large it is.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use crate::command::spec::CommandId;
use crate::core::client::Client;
use crate::core::shared::Posters;
use crate::core::state::{Gauge, Share};
use crate::settings::Settings;
use crate::shard::Shard;
use crate::shard::change::{Answer, Change};
use crate::shard::turns::Connection;

/// Parcels that one core may have in flight.
pub(crate) const PARCELS_MAX: usize = 1 << 14;

/// Changes of one connection, sent to the shard.
pub(crate) struct Parcel {
    /// Where the answers go: the core, and the number of the slot there.
    pub core: usize,
    pub number: u32,
    pub connection: Connection,
    pub changes: Vec<Change>,
}

/// The answer that consecutive commands of a parcel share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    /// The number of commands of the parcel before them.
    pub at: u32,
    pub commands: u32,
    /// The command they all are, where that is known.
    pub command: Option<CommandId>,
    pub answer: Answer,
}

/// Answers to parcels of one core, by the numbers of their slots there.
pub(crate) type Answered = Vec<(u32, Vec<Run>)>;

/// Receives the answers to a parcel.
#[derive(Default)]
pub(crate) struct Slot {
    answers: RefCell<Option<Vec<Run>>>,
    waker: Cell<Option<Waker>>,
    /// The parcel's part of its core's limits, until it is answered.
    held: RefCell<Option<Held>>,
}

struct Held {
    writes: Rc<Writes>,
    _bytes: Share,
    _parcel: Share,
}

impl Drop for Held {
    fn drop(&mut self) {
        for client in self.writes.waiting.take() {
            client.wake();
        }
    }
}

impl Slot {
    /// Stores one answer for each command, in the order of the commands.
    pub fn fulfil(&self, answers: Vec<Run>) {
        self.answers.replace(Some(answers));
        drop(self.held.take());
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }

    pub fn poll(&self, cx: &mut Context<'_>) -> Poll<Vec<Run>> {
        match self.answers.take() {
            Some(answers) => Poll::Ready(answers),
            None => {
                self.waker.set(Some(cx.waker().clone()));
                Poll::Pending
            }
        }
    }
}

#[derive(Default)]
pub(crate) struct Writes {
    /// The shard, where this core owns it.
    shard: Option<Shard>,
    /// Slots of parcels sent to another core, by number.
    slots: RefCell<Vec<Option<Rc<Slot>>>>,
    free: RefCell<Vec<u32>>,
    bytes: Gauge,
    parcels: Gauge,
    /// Connections that wait for room.
    waiting: RefCell<Vec<Rc<Client>>>,
}

impl Writes {
    pub fn new(shard: Option<Shard>) -> Rc<Self> {
        Rc::new(Self { shard, ..Self::default() })
    }

    /// The shard, where this core owns it.
    pub fn shard(&self) -> Option<&Shard> {
        self.shard.as_ref()
    }

    /// Bytes of changes in flight.
    pub fn bytes(&self) -> usize {
        self.bytes.get()
    }

    /// Whether one more parcel may be sent.
    pub fn has_room(&self, settings: &Settings) -> bool {
        self.bytes.get() < settings.writes_bytes_max && self.parcels.get() < PARCELS_MAX
    }

    /// Registers a connection to be woken when there may be room.
    pub fn wait_for_room(&self, client: &Rc<Client>) {
        let mut waiting = self.waiting.borrow_mut();
        if !waiting.iter().any(|other| Rc::ptr_eq(other, client)) {
            waiting.push(client.clone());
        }
    }

    /// Sends a parcel, after those of the same connection.
    pub fn send(
        self: &Rc<Self>,
        posters: &Posters,
        core: usize,
        connection: Connection,
        changes: Vec<Change>,
        weight: usize,
    ) -> Rc<Slot> {
        let slot = Rc::new(Slot::default());
        let (mut bytes_share, mut parcel_share) = (self.bytes.share(), self.parcels.share());
        bytes_share.set(weight);
        parcel_share.set(1);
        let held = Held { writes: self.clone(), _bytes: bytes_share, _parcel: parcel_share };
        slot.held.replace(Some(held));
        match &self.shard {
            Some(shard) => shard.accept(connection, changes, &slot),
            None => {
                let number = self.number(&slot);
                let commands = changes.iter().map(Change::commands).sum();
                if !posters.post_parcel(Parcel { core, number, connection, changes }) {
                    let answer = Answer::Failed("ERR the node is shutting down".into());
                    self.deliver(vec![(
                        number,
                        vec![Run { at: 0, commands, command: None, answer }],
                    )]);
                }
            }
        }
        slot
    }

    /// Distributes answers from the shard's core.
    pub fn deliver(&self, answers: Answered) {
        for (number, answers) in answers {
            let slot = self.slots.borrow_mut().get_mut(number as usize).and_then(Option::take);
            if let Some(slot) = slot {
                self.free.borrow_mut().push(number);
                slot.fulfil(answers);
            }
        }
    }

    fn number(&self, slot: &Rc<Slot>) -> u32 {
        let mut slots = self.slots.borrow_mut();
        match self.free.borrow_mut().pop() {
            Some(number) => {
                slots[number as usize] = Some(slot.clone());
                number
            }
            None => {
                slots.push(Some(slot.clone()));
                (slots.len() - 1) as u32
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_slot_holds_its_part_of_the_limits_until_it_is_answered() {
        let writes = Writes::new(None);
        let settings = Settings { writes_bytes_max: 100, ..Settings::default() };
        let slot = Rc::new(Slot::default());
        let (mut bytes, mut parcel) = (writes.bytes.share(), writes.parcels.share());
        bytes.set(150);
        parcel.set(1);
        slot.held.replace(Some(Held { writes: writes.clone(), _bytes: bytes, _parcel: parcel }));
        assert!(!writes.has_room(&settings));
        let number = writes.number(&slot);
        let run = Run { at: 0, commands: 1, command: None, answer: Answer::Ok };
        writes.deliver(vec![(number, vec![run.clone()])]);
        assert!(writes.has_room(&settings) && writes.bytes() == 0);
        let mut cx = Context::from_waker(Waker::noop());
        assert_eq!(slot.poll(&mut cx), Poll::Ready(vec![run]));
        assert_eq!(writes.number(&slot), number, "numbers are reused");
    }
}
