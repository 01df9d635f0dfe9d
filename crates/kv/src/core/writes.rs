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
//! The room for parcels in flight is bounded, see `client::write_room`.

use std::cell::RefCell;
use std::rc::Rc;

use crate::client::write_room::WriteRoom;
use crate::core::ask::Posters;
use crate::shard::Shard;
use crate::shard::change::{Answer, Change};
use crate::shard::parcel::{AnswerRun, AnswerSlot, Answered, Parcel};
use crate::shard::turns::Connection;

/// The way of one core's writes to the shard.
#[derive(Default)]
pub(crate) struct Writes {
    /// The shard, where this core owns it.
    shard: Option<Shard>,
    /// Slots of parcels sent to another core, by number.
    slots: RefCell<Vec<Option<Rc<AnswerSlot>>>>,
    free: RefCell<Vec<u32>>,
    pub room: Rc<WriteRoom>,
}

impl Writes {
    pub fn new(shard: Option<Shard>) -> Self {
        Self { shard, ..Self::default() }
    }

    /// The shard, where this core owns it.
    pub fn shard(&self) -> Option<&Shard> {
        self.shard.as_ref()
    }

    /// Sends a parcel, after those of the same connection.
    pub fn send(
        &self,
        posters: &Posters,
        core: usize,
        connection: Connection,
        changes: Vec<Change>,
        weight: usize,
    ) -> Rc<AnswerSlot> {
        let slot = Rc::new(AnswerSlot::with_room(self.room.reserve(weight)));
        match &self.shard {
            Some(shard) => shard.accept(connection, changes, &slot),
            None => {
                let number = self.number(&slot);
                let commands = changes.iter().map(Change::commands).sum();
                if !posters.post_parcel(Parcel { core, number, connection, changes }) {
                    let answer = Answer::Failed("ERR the node is shutting down".into());
                    self.deliver(vec![(
                        number,
                        vec![AnswerRun {
                            at: 0,
                            commands,
                            command: None,
                            answer,
                            wrote: Vec::new(),
                        }],
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

    fn number(&self, slot: &Rc<AnswerSlot>) -> u32 {
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
    use std::task::{Context, Poll, Waker};

    use super::*;
    use crate::settings::Settings;

    #[test]
    fn a_slot_holds_its_part_of_the_limits_until_it_is_answered() {
        let writes = Writes::new(None);
        let settings = Settings { writes_bytes_max: 100, ..Settings::default() };
        let slot = Rc::new(AnswerSlot::with_room(writes.room.reserve(150)));
        assert!(!writes.room.has_room(&settings));
        let number = writes.number(&slot);
        let (answer, wrote) = (Answer::Ok, Vec::new());
        let run = AnswerRun { at: 0, commands: 1, command: None, answer, wrote };
        writes.deliver(vec![(number, vec![run.clone()])]);
        assert!(writes.room.has_room(&settings) && writes.room.bytes() == 0);
        let mut cx = Context::from_waker(Waker::noop());
        assert_eq!(slot.poll(&mut cx), Poll::Ready(vec![run]));
        assert_eq!(writes.number(&slot), number, "numbers are reused");
    }
}
