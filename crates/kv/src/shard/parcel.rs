//! Parcels: the changes of a connection on their way to the shard, and the answers on their way
//! back.

use std::cell::RefCell;
use std::task::{Context, Poll};

use reactor::Oneshot;

use crate::client::write_room::WriteReservation;
use crate::command::spec::CommandId;
use crate::shard::change::{Answer, Change};
use crate::shard::turns::Connection;

/// Changes of one connection, sent to the shard.
pub(crate) struct Parcel {
    /// Where the answers go: the core, and the number of the slot there.
    pub core: usize,
    pub number: u32,
    pub connection: Connection,
    pub changes: Vec<Change>,
}

/// What arrives in the shard's mailbox.
pub(crate) enum Delivery {
    Parcel(Parcel),
    /// A core has heard the announcements up to a number: see `announce`.
    Heard {
        core: usize,
        number: u64,
    },
}

/// The answer that consecutive commands of a parcel share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AnswerRun {
    /// The number of commands of the parcel before them.
    pub at: u32,
    pub commands: u32,
    /// The command they all are, where that is known.
    pub command: Option<CommandId>,
    pub answer: Answer,
    /// The keys that it has written, where its connection wants to know them.
    pub wrote: Vec<Vec<u8>>,
}

/// Answers to parcels of one core, by the numbers of their slots there.
pub(crate) type Answered = Vec<(u32, Vec<AnswerRun>)>;

/// Receives the answers to a parcel. One task polls it.
#[derive(Default)]
pub(crate) struct AnswerSlot {
    answers: Oneshot<Vec<AnswerRun>>,
    /// The parcel's part of its core's limits, until it is answered.
    reservation: RefCell<Option<WriteReservation>>,
}

impl AnswerSlot {
    /// A slot that holds room until its parcel is answered.
    pub fn with_room(reservation: WriteReservation) -> Self {
        Self { reservation: RefCell::new(Some(reservation)), ..Self::default() }
    }

    /// Stores one answer for each command, in the order of the commands.
    pub fn fulfil(&self, answers: Vec<AnswerRun>) {
        drop(self.reservation.take());
        // A parcel is answered once, so the place is empty.
        let _ = self.answers.send(answers);
    }

    pub fn poll(&self, cx: &mut Context<'_>) -> Poll<Vec<AnswerRun>> {
        self.answers.poll_recv(cx).map(Result::unwrap_or_default)
    }
}
