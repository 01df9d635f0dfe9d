//! Questions from core to core.
//!
//! A question to another core is a function that runs there: it is posted to that core's mailbox,
//! whose owner task runs it between requests; its answer comes back the same way, under a ticket.
//! `CLIENT LIST`, `INFO` and a `SCAN` that has changed cores ask; a read never does. Errands of one
//! core run in their order; errands of different cores in any order, unless one was sent after the
//! answer to the other had arrived.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::{Arc, OnceLock};
use std::task::{Poll, Waker};

use reactor::mailbox::{Mailbox, Owner, Poster, Scheduled, mailbox};
use reactor::{Class, OneshotReceiver, OneshotSender, oneshot};

use crate::client::write_room::PARCELS_MAX;
use crate::core::node::{CoreMailbox, Errand, NodeState};
use crate::core::state::CoreState;
use crate::shard::announce::Written;
use crate::shard::parcel::{Answered, Delivery, Parcel};

/// Maximum number of unanswered questions of one core.
const QUESTIONS_MAX: usize = 256;

/// Maximum number of pending errands of one poster. Another core posts its questions and its
/// answers to this core's questions; the shard posts answers to parcels, each for at least one, and
/// one announcement.
const ERRANDS_MAX: usize = PARCELS_MAX + 1;

const _: () = assert!(2 * QUESTIONS_MAX <= ERRANDS_MAX);

/// One core's posters to the mailboxes of all cores and to the shard, each created when it is first
/// used.
pub(crate) struct Posters {
    node: Arc<NodeState>,
    cores: Vec<RefCell<Option<Poster<Errand>>>>,
    shard: RefCell<Option<Poster<Delivery>>>,
}

impl Posters {
    pub(crate) fn new(node: &Arc<NodeState>) -> Self {
        Self {
            cores: node.mailboxes.iter().map(|_| RefCell::default()).collect(),
            shard: RefCell::default(),
            node: node.clone(),
        }
    }

    /// Sends a parcel to the shard; false when the shard has ended.
    pub(crate) fn post_parcel(&self, parcel: Parcel) -> bool {
        self.deliver(Delivery::Parcel(parcel))
    }

    /// Tells the shard that a core has heard the announcements up to a number.
    pub(super) fn report_heard(&self, core: usize, number: u64) {
        // Without a shard nothing is announced.
        self.deliver(Delivery::Heard { core, number });
    }

    fn deliver(&self, delivery: Delivery) -> bool {
        let Some(shard) = self.node.shard.get() else { return false };
        // The mailbox has room for all that this core's limits admit.
        post(&self.shard, &shard.mailbox, &shard.waker, delivery).is_ok()
    }

    /// Sends answers of the shard to a core.
    pub(crate) fn post_answers(&self, core: usize, answers: Answered) {
        // Room for it is reserved, see ERRANDS_MAX. It fails only when the core has ended.
        let _ = self.post(core, Box::new(move |there| there.writes.deliver(answers)));
    }

    /// The node.
    pub(crate) fn node(&self) -> &Arc<NodeState> {
        &self.node
    }

    /// Tells a core what was written; false when it has ended. It reports the number.
    pub(crate) fn post_written(&self, core: usize, written: Vec<Written>, number: u64) -> bool {
        let hear: Errand = Box::new(move |there| {
            there.core.spawn(Class::Foreground, there.clone().hear(written, number));
        });
        // Room for it is reserved, see ERRANDS_MAX.
        self.post(core, hear).is_ok()
    }

    /// Returns the errand when the core has no mailbox, or it is full.
    fn post(&self, core: usize, errand: Errand) -> Result<(), Errand> {
        match (self.cores.get(core), self.node.mailboxes.get(core).and_then(OnceLock::get)) {
            (Some(poster), Some(there)) => post(poster, &there.mailbox, &there.waker, errand),
            _ => Err(errand),
        }
    }
}

fn post<T>(
    poster: &RefCell<Option<Poster<T>>>,
    mailbox: &Mailbox<T>,
    waker: &Waker,
    item: T,
) -> Result<(), T> {
    match poster.borrow_mut().get_or_insert_with(|| mailbox.poster()).post(item) {
        Ok(Scheduled::Yes) => waker.wake_by_ref(),
        Ok(Scheduled::No) => {}
        Err(refused) => return Err(refused.into_inner()),
    }
    Ok(())
}

/// The unanswered questions of one core.
#[derive(Default)]
pub(crate) struct Questions {
    waiting: RefCell<BTreeMap<u64, OneshotSender<Answer>>>,
    next: Cell<u64>,
}

/// The answer to a question, whose type the asker knows.
type Answer = Box<dyn Any + Send>;

/// Removes its question when dropped, answered or not.
struct Ticket<'a> {
    questions: &'a Questions,
    number: u64,
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        self.questions.waiting.borrow_mut().remove(&self.number);
    }
}

impl Questions {
    fn take_ticket(&self) -> Option<(Ticket<'_>, OneshotReceiver<Answer>)> {
        let mut waiting = self.waiting.borrow_mut();
        if waiting.len() >= QUESTIONS_MAX {
            return None;
        }
        let number = self.next.get();
        self.next.set(number + 1);
        let (sender, receiver) = oneshot();
        waiting.insert(number, sender);
        Some((Ticket { questions: self, number }, receiver))
    }

    fn fulfil(&self, number: u64, answer: Answer) {
        // The asker may have gone.
        let sender = self.waiting.borrow_mut().remove(&number);
        if let Some(sender) = sender {
            let _ = sender.send(answer);
        }
    }
}

impl CoreState {
    /// Runs `question` on core `core` and returns its answer; `None` when that core does not serve
    /// or its mailbox is full.
    pub(crate) async fn ask<R: Send + 'static>(
        self: &Rc<Self>,
        core: usize,
        question: impl FnOnce(&Rc<CoreState>) -> R + Send + 'static,
    ) -> Option<R> {
        if core == self.core.id() {
            return Some(question(self));
        }
        let (ticket, receiver) = self.questions.take_ticket()?;
        let (number, from) = (ticket.number, self.core.id());
        let errand: Errand = Box::new(move |there| {
            let answer: Answer = Box::new(question(there));
            let deliver: Errand = Box::new(move |back| back.questions.fulfil(number, answer));
            // Room for it is reserved, see ERRANDS_MAX. It fails only when the core that asked has
            // ended.
            let _ = there.posters.post(from, deliver);
        });
        self.posters.post(core, errand).ok()?;
        let answer = receiver.await.ok()?;
        drop(ticket);
        answer.downcast().ok().map(|answer| *answer)
    }

    /// Asks every core, including this one, and returns the answers of those that answer, in the
    /// order of their numbers.
    pub(crate) async fn ask_all<R: Send + 'static>(
        self: &Rc<Self>,
        question: impl Fn(&Rc<CoreState>) -> R + Clone + Send + 'static,
    ) -> Vec<R> {
        let mut answers = Vec::with_capacity(self.node.cores());
        for core in 0..self.node.cores() {
            answers.extend(self.ask(core, question.clone()).await);
        }
        answers
    }

    /// Waits until every core of the node can be asked. Before, what a client sets for the whole
    /// node would not reach the cores that are still starting.
    pub(crate) async fn node_opened(&self) {
        self.opened.wait_until(|| self.node.is_open()).await;
    }

    /// Opens this core's mailbox and runs the errands that arrive there; runs until cancelled.
    pub(crate) async fn run_errands(self: Rc<Self>) {
        let (mailbox, mut owner): (_, Owner<Errand>) = mailbox(ERRANDS_MAX);
        let mut mailbox = Some(mailbox);
        poll_fn(|cx| {
            // A task has the same waker every time, so the first one stays valid.
            if let Some(mailbox) = mailbox.take()
                && self.node.open_mailbox(
                    self.core.id(),
                    CoreMailbox { mailbox, waker: cx.waker().clone() },
                )
            {
                for core in 0..self.node.cores() {
                    // A core that has ended meanwhile accepts nobody.
                    let _ = self.posters.post(core, Box::new(|there| there.opened.notify_all()));
                }
            }
            if owner.take(64, &mut |errand| errand(&self)) == Scheduled::Yes {
                cx.waker().wake_by_ref();
            }
            Poll::<()>::Pending
        })
        .await;
    }
}
