//! The answers to the commands of a parcel, gathered until each command has one.

use std::cell::{Cell, RefCell};
use std::mem;
use std::rc::Rc;

use crate::command::refusal::engine_error_text;
use crate::command::spec::CommandId;
use crate::shard::ShardState;
use crate::shard::change::{Answer, Change};
use crate::shard::flight::Flight;
use crate::shard::parcel::{AnswerRun, AnswerSlot};
use crate::shard::turns::Connection;

/// Where an answer belongs: the commands of a parcel that get it.
pub(super) struct AnswerTarget {
    pub answers: Rc<ParcelAnswers>,
    pub at: u32,
    pub commands: u32,
    pub command: Option<CommandId>,
    /// The connection wants to know which keys are written; these are.
    pub tells: bool,
    pub wrote: Vec<Vec<u8>>,
}

/// The answers to the commands of one parcel.
pub(super) struct ParcelAnswers {
    to: Origin,
    pub connection: Connection,
    /// Number of commands without an answer.
    left: Cell<u32>,
    /// In the order in which they are made; nearly always in the order of the commands.
    runs: RefCell<Vec<AnswerRun>>,
}

/// Where a parcel came from.
pub(crate) enum Origin {
    Here(Rc<AnswerSlot>),
    Core { core: usize, number: u32 },
}

impl ShardState {
    /// Makes the changes of a parcel, or queues them.
    pub(super) fn accept(
        self: &Rc<Self>,
        connection: Connection,
        changes: Vec<Change>,
        to: Origin,
    ) {
        let answers = Rc::new(ParcelAnswers {
            to,
            connection,
            left: Cell::new(changes.iter().map(Change::commands).sum()),
            runs: RefCell::new(Vec::with_capacity(changes.len())),
        });
        let mut at = 0;
        for change in changes {
            let (commands, command) = (change.commands(), change.command);
            let (tells, wrote) = (change.tells, Vec::new());
            let answers = answers.clone();
            self.begin(change, AnswerTarget { answers, at, commands, command, tells, wrote });
            at += commands;
        }
    }

    /// Gives an answer that needs no write: after all writes before it.
    pub(super) fn answer_in_turn(&self, target: AnswerTarget, answer: Answer) {
        let mut gathered = self.gathered.borrow_mut();
        if gathered.batch.is_empty() {
            drop(gathered);
            self.fly(Flight {
                written: None,
                authors: Vec::new(),
                built_bytes: 0,
                answers: vec![(target, answer)],
            });
        } else {
            gathered.answers.push((target, answer));
        }
    }

    pub(super) fn answer(&self, target: AnswerTarget, answer: Answer) {
        self.count(|stats| stats.changes += 1);
        let AnswerTarget { answers, at, commands, command, mut wrote, .. } = target;
        if matches!(answer, Answer::Failed(_)) {
            wrote.clear();
        }
        answers.runs.borrow_mut().push(AnswerRun { at, commands, command, answer, wrote });
        answers.left.set(answers.left.get() - commands);
        if answers.left.get() > 0 {
            return;
        }
        let mut all = answers.runs.take();
        all.sort_unstable_by_key(|run| run.at);
        match &answers.to {
            Origin::Here(slot) => slot.fulfil(all),
            Origin::Core { core, number } => self.outbox.borrow_mut()[*core].push((*number, all)),
        }
    }

    /// Ends a turn: hands the gathered changes to the engine, and sends the gathered answers for
    /// other cores, one message for each.
    pub(super) fn end_turn(&self) {
        self.submit();
        self.send_announcements();
        let Some(posters) = self.posters.get() else { return };
        for (core, answers) in self.outbox.borrow_mut().iter_mut().enumerate() {
            if !answers.is_empty() {
                posters.post_answers(core, mem::take(answers));
            }
        }
    }
}

/// Splits a change into those of its commands, each with its target.
pub(super) fn split(
    change: Change,
    target: AnswerTarget,
) -> impl Iterator<Item = (Change, AnswerTarget)> {
    let AnswerTarget { answers, at, command, tells, .. } = target;
    change.split().into_iter().zip(at..).map(move |(change, at)| {
        let (answers, wrote) = (answers.clone(), Vec::new());
        (change, AnswerTarget { answers, at, commands: 1, command, tells, wrote })
    })
}

/// The answer for an error of the engine.
pub(super) fn engine_answer(error: &lsm::Error) -> Answer {
    Answer::Failed(engine_error_text(error).into())
}
