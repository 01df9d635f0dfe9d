//! What the cores of a node have in common: settings that never change, a way to ask each other,
//! and the end of a pause. Everything else belongs to one core.
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
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Poll, Waker};

use reactor::mailbox::{Mailbox, Owner, Poster, Scheduled, mailbox};

use crate::core::state::CoreState;
use crate::core::writes::{Answered, PARCELS_MAX, Parcel};
use crate::info::node_info::NodeInfo;
use crate::settings::Settings;

/// A function to run on another core.
type Errand = Box<dyn FnOnce(&Rc<CoreState>) + Send>;

/// Maximum number of unanswered questions of one core.
const QUESTIONS_MAX: usize = 256;

/// Maximum number of pending errands of one poster. Another core posts its questions and its
/// answers to this core's questions; the shard posts answers to parcels, each for at least one.
const ERRANDS_MAX: usize = PARCELS_MAX;

const _: () = assert!(2 * QUESTIONS_MAX <= ERRANDS_MAX);

struct Desk {
    mailbox: Mailbox<Errand>,
    /// Wakes the task that runs the errands.
    waker: Waker,
}

/// The mailbox of the shard.
struct ShardDesk {
    core: usize,
    mailbox: Mailbox<Parcel>,
    waker: Waker,
}

/// The part of the key-value door that is the same on every core.
pub struct Shared {
    settings: Settings,
    node: Box<dyn NodeInfo>,
    desks: Vec<OnceLock<Desk>>,
    /// Empty on a read-only node.
    shard: OnceLock<ShardDesk>,
    /// The time until which commands are held back, in the cores' monotonic time. Hardly ever
    /// written.
    paused_until_ns: AtomicU64,
    /// The same for commands that write.
    writes_paused_until_ns: AtomicU64,
    /// Number of connections of all cores.
    clients: AtomicUsize,
}

/// Counts one connection until dropped.
pub(crate) struct Counted(Arc<Shared>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.clients.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Shared {
    /// For a node of `cores` cores.
    pub fn new(cores: usize, settings: Settings, node: impl NodeInfo + 'static) -> Arc<Self> {
        Arc::new(Self {
            settings,
            node: Box::new(node),
            desks: (0..cores).map(|_| OnceLock::new()).collect(),
            shard: OnceLock::new(),
            paused_until_ns: AtomicU64::new(0),
            writes_paused_until_ns: AtomicU64::new(0),
            clients: AtomicUsize::new(0),
        })
    }

    /// The limits in force.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    pub(crate) fn node(&self) -> &dyn NodeInfo {
        &*self.node
    }

    pub(crate) fn cores(&self) -> usize {
        self.desks.len()
    }

    /// Counts one more connection, unless the maximum is reached.
    pub(crate) fn count_client(self: &Arc<Self>) -> Option<Counted> {
        if self.clients.fetch_add(1, Ordering::Relaxed) >= self.settings.clients_max {
            self.clients.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        Some(Counted(self.clone()))
    }

    pub(crate) fn paused_until_ns(&self) -> u64 {
        self.paused_until_ns.load(Ordering::Relaxed)
    }

    pub(crate) fn writes_paused_until_ns(&self) -> u64 {
        self.writes_paused_until_ns.load(Ordering::Relaxed)
    }

    /// Holds back all commands, or only those that write.
    pub(crate) fn pause_until_ns(&self, until_ns: u64, all: bool) {
        if all {
            self.paused_until_ns.store(until_ns, Ordering::Relaxed);
        }
        self.writes_paused_until_ns.store(until_ns, Ordering::Relaxed);
    }

    /// Whether clients may write.
    pub fn is_writable(&self) -> bool {
        self.shard.get().is_some()
    }

    /// The core that owns the shard.
    pub(crate) fn shard_core(&self) -> Option<usize> {
        self.shard.get().map(|desk| desk.core)
    }

    /// Opens the shard: from now on parcels go into this mailbox, whose owner's task has this
    /// waker.
    pub(crate) fn open_shard(&self, core: usize, mailbox: &Mailbox<Parcel>, waker: &Waker) {
        self.shard.get_or_init(|| ShardDesk {
            core,
            mailbox: mailbox.clone(),
            waker: waker.clone(),
        });
    }
}

/// One core's posters to the desks of all cores and to the shard, each created when it is first
/// used.
pub(crate) struct Posters {
    shared: Arc<Shared>,
    desks: Vec<RefCell<Option<Poster<Errand>>>>,
    shard: RefCell<Option<Poster<Parcel>>>,
}

impl Posters {
    pub(crate) fn new(shared: &Arc<Shared>) -> Self {
        Self {
            desks: shared.desks.iter().map(|_| RefCell::default()).collect(),
            shard: RefCell::default(),
            shared: shared.clone(),
        }
    }

    /// Sends a parcel to the shard; false when the shard has ended.
    pub(crate) fn post_parcel(&self, parcel: Parcel) -> bool {
        let Some(desk) = self.shared.shard.get() else { return false };
        // The mailbox has room for all parcels that this core's limits admit.
        post(&self.shard, &desk.mailbox, &desk.waker, parcel).is_ok()
    }

    /// Sends answers of the shard to a core.
    pub(crate) fn post_answers(&self, core: usize, answers: Answered) {
        // Room for it is reserved, see ERRANDS_MAX. It fails only when the core has ended.
        let _ = self.post(core, Box::new(move |there| there.writes.deliver(answers)));
    }

    /// Returns the errand when the core has no desk, or its mailbox is full.
    fn post(&self, core: usize, errand: Errand) -> Result<(), Errand> {
        match (self.desks.get(core), self.shared.desks.get(core).and_then(OnceLock::get)) {
            (Some(poster), Some(desk)) => post(poster, &desk.mailbox, &desk.waker, errand),
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
    waiting: RefCell<BTreeMap<u64, Waiting>>,
    next: Cell<u64>,
}

#[derive(Default)]
struct Waiting {
    answer: Option<Box<dyn Any + Send>>,
    waker: Option<Waker>,
}

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
    fn take_ticket(&self) -> Option<Ticket<'_>> {
        let mut waiting = self.waiting.borrow_mut();
        if waiting.len() >= QUESTIONS_MAX {
            return None;
        }
        let number = self.next.get();
        self.next.set(number + 1);
        waiting.insert(number, Waiting::default());
        Some(Ticket { questions: self, number })
    }

    fn fulfil(&self, number: u64, answer: Box<dyn Any + Send>) {
        // The asker may have gone.
        if let Some(waiting) = self.waiting.borrow_mut().get_mut(&number) {
            waiting.answer = Some(answer);
            if let Some(waker) = waiting.waker.take() {
                waker.wake();
            }
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
        let ticket = self.questions.take_ticket()?;
        let (number, from) = (ticket.number, self.core.id());
        let errand: Errand = Box::new(move |there| {
            let answer: Box<dyn Any + Send> = Box::new(question(there));
            let deliver: Errand = Box::new(move |back| back.questions.fulfil(number, answer));
            // Room for it is reserved, see ERRANDS_MAX. It fails only when the core that asked has
            // ended.
            let _ = there.posters.post(from, deliver);
        });
        self.posters.post(core, errand).ok()?;
        let answer = poll_fn(|cx| {
            let mut waiting = self.questions.waiting.borrow_mut();
            let Some(entry) = waiting.get_mut(&number) else {
                return Poll::Ready(None);
            };
            match entry.answer.take() {
                Some(answer) => Poll::Ready(Some(answer)),
                None => {
                    entry.waker = Some(cx.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await?;
        drop(ticket);
        answer.downcast().ok().map(|answer| *answer)
    }

    /// Asks every core, including this one, and returns the answers of those that answer, in the
    /// order of their numbers.
    pub(crate) async fn ask_all<R: Send + 'static>(
        self: &Rc<Self>,
        question: impl Fn(&Rc<CoreState>) -> R + Clone + Send + 'static,
    ) -> Vec<R> {
        let mut answers = Vec::with_capacity(self.shared.cores());
        for core in 0..self.shared.cores() {
            answers.extend(self.ask(core, question.clone()).await);
        }
        answers
    }

    /// Opens this core's desk and runs the errands that arrive there; runs until cancelled.
    pub(crate) async fn run_errands(self: Rc<Self>) {
        let (mailbox, mut owner): (_, Owner<Errand>) = mailbox(ERRANDS_MAX);
        poll_fn(|cx| {
            // A task has the same waker every time, so the first one stays valid.
            self.shared.desks[self.core.id()]
                .get_or_init(|| Desk { mailbox: mailbox.clone(), waker: cx.waker().clone() });
            if owner.take(64, &mut |errand| errand(&self)) == Scheduled::Yes {
                cx.waker().wake_by_ref();
            }
            Poll::<()>::Pending
        })
        .await;
    }
}
