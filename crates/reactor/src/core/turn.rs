//! One turn of the loop, in two halves, and how a core waits after it.

use std::task::Context;

use super::operations::{STAGED_FIRST, STAGED_MAX};
use super::{Core, CoreState};
use crate::driver::Wait;
use crate::driver::remote::{Remote, TaskId};
use crate::flow::Lane;
use crate::poller::Pollers;
use crate::task::{self, BoxFuture, Class};

/// Most tasks of one class that run in one turn, whatever time they take.
const TASKS_PER_TURN: usize = 512;
/// Share of one turn of foreground work, and of background and bulk work together.
const BUDGET_NS: u64 = 100_000;
/// Share of bulk work in that, with what it submits: a request that comes meanwhile waits for it.
const BULK_BUDGET_NS: u64 = 20_000;
/// Messages taken from one other core, or from foreign threads, in one turn.
const MESSAGES_PER_TURN: usize = 32;
/// Most rounds of the pollers in one turn in which nothing else is ready.
const POLLS_PER_TURN: usize = 4;
/// Time after a message of another core or thread in which the core expects the next one.
const LISTEN_NS: u64 = 1_000_000;
/// Checks of the pollers between two checks of everything else, while the core spins.
const POLLER_CHECKS: u32 = 16;

impl Core {
    /// Runs one turn.
    pub(crate) fn turn(&self, may_wait: bool) {
        let wait = self.work(may_wait);
        self.finish(wait);
    }

    /// The first half of a turn, up to the submission; returns how the core then waits. The
    /// simulator lets other cores run before the second half of a core that waits.
    pub(crate) fn work(&self, may_wait: bool) -> Wait {
        let _entered = task::enter(&self.0);
        let mut worked = self.take_messages();
        let inner = &*self.0;
        inner.now.set(inner.driver.borrow_mut().now_ns());
        if worked {
            inner.heard_at.set(inner.now.get());
        }
        if inner.turn_at.get() <= inner.now.get() {
            inner.turn_at.set(u64::MAX);
            inner.pollers_due.set(true);
        }
        worked |= inner.poll();
        worked |= self.run_ready();
        inner.mesh.borrow_mut().publish();
        inner.drain_backlog();
        inner.stats.turns.add(1);
        if !may_wait {
            Wait::No
        } else if inner.polls_seldom() {
            inner.wait_for_poll()
        } else if worked || inner.work_pending() {
            Wait::No
        } else {
            inner.idle_wait()
        }
    }

    /// The second half of a turn: submits, waits, reaps, and fires timers.
    pub(crate) fn finish(&self, wait: Wait) {
        let _entered = task::enter(&self.0);
        let inner = &*self.0;
        let must_enter = {
            let mut driver = inner.driver.borrow_mut();
            wait != Wait::No || driver.staged() > 0 || driver.ready()
        };
        if must_enter {
            inner.enter(wait);
        }
        if wait != Wait::No {
            inner.shared.sleep().awake();
            inner.submit_batch.set(STAGED_FIRST);
            Pollers::disarm(&inner.pollers);
        }
        inner.now.set(inner.driver.borrow_mut().now_ns());
        inner.fire_timers();
    }

    pub(super) fn take_messages(&self) -> bool {
        let inner = &*self.0;
        let mut worked = false;
        for from in 0..inner.cores {
            for _ in 0..MESSAGES_PER_TURN {
                let Some(message) = inner.mesh.borrow_mut().receive(from) else {
                    break;
                };
                message(self);
                inner.stats.messages.add(1);
                worked = true;
            }
        }
        for _ in 0..MESSAGES_PER_TURN {
            let Some(message) = inner.inbox.borrow_mut().pop() else {
                break;
            };
            worked = true;
            match message {
                Remote::Wake(id) => inner.tasks.borrow_mut().wake(id),
                Remote::Ended => inner.ended.set(inner.ended.get() + 1),
                Remote::Meta(token, answer) => {
                    let ended = inner.ops.borrow_mut().complete_meta(token, answer);
                    ended.tell();
                }
            }
        }
        worked
    }

    fn run_ready(&self) -> bool {
        let inner = &*self.0;
        let mut worked = false;
        let started = inner.now.get();
        let mut background_started = None;
        for class in [Class::Control, Class::Foreground, Class::Background, Class::Bulk] {
            // Control and foreground share one budget, background and bulk another: the most they
            // can add to a request's turn. Background tasks are few and long, so the clock is read
            // after each. One task of each class runs in any case.
            let is_bulk = class == Class::Bulk;
            let ready = inner.tasks.borrow().ready(class as usize).min(TASKS_PER_TURN);
            if ready == 0 {
                continue;
            }
            // What requests have started need not wait until a bulk task has run. Before background
            // work the same was measured: writes beside reads take longer (docs/BENCHMARKS.md).
            if is_bulk {
                inner.submit();
            }
            let now_ns = || inner.driver.borrow_mut().now_ns();
            let (deadline, clock_every) = if class <= Class::Foreground {
                (started + BUDGET_NS, 16)
            } else {
                let share_ends = *background_started.get_or_insert_with(now_ns) + BUDGET_NS;
                let bulk_ends = if is_bulk { now_ns() + BULK_BUDGET_NS } else { u64::MAX };
                (share_ends.min(bulk_ends), 1)
            };
            inner.deadline.set(deadline);
            inner.class.set(class);
            for n in 0..ready {
                if n > 0 && is_bulk {
                    inner.submit();
                }
                if n > 0 && n % clock_every == 0 && now_ns() >= deadline {
                    break;
                }
                // Take first, poll afterwards: the borrow ends before the task runs.
                let Some((id, future)) = inner.tasks.borrow_mut().take_ready(class as usize) else {
                    break;
                };
                inner.poll_task(id, future);
                worked = true;
                if inner.driver.borrow().staged() >= STAGED_MAX {
                    inner.enter(Wait::No);
                }
            }
        }
        inner.class.set(Class::Control);
        inner.deadline.set(u64::MAX);
        worked
    }
}

impl CoreState {
    fn poll_task(&self, id: TaskId, mut future: BoxFuture) {
        self.stats.polls.add(1);
        let waker = task::waker(self.uid, id);
        let done = future.as_mut().poll(&mut Context::from_waker(&waker)).is_ready();
        let leftover = if done {
            self.tasks.borrow_mut().remove(id);
            Some(future)
        } else {
            self.tasks.borrow_mut().put_back(id, future)
        };
        drop(leftover);
    }

    /// Submits what is staged, if anything is.
    fn submit(&self) {
        if self.driver.borrow().staged() > 0 {
            self.enter(Wait::No);
        }
    }

    /// Submits, reaps, and marks the tasks of completed operations ready.
    pub(super) fn enter(&self, wait: Wait) {
        let mut done = self.done.take();
        let at_least = self.gather(wait);
        self.flow.submit(|| self.driver.borrow_mut().now_ns());
        let result = self.driver.borrow_mut().enter(wait, at_least, &mut done);
        if let Err(error) = result {
            panic!("the {} driver failed: {error}", self.driver.borrow().name());
        }
        self.stats.enters.add(1);
        if wait != Wait::No {
            self.stats.sleeps.add(1);
        }
        self.stats.completions.add(done.len() as u64);
        for completion in done.drain(..) {
            let lane = self.ops.borrow_mut().take_lane(completion.token);
            match lane {
                Lane::None => {}
                Lane::Background(place) => self.flow.end(place),
                Lane::Probe(place) => self.reaped_probe(place, completion.result, wait),
            }
            let ended = self.ops.borrow_mut().complete(completion.token, completion.result);
            ended.tell();
        }
        self.done.replace(done);
        if self.backlog.borrow().len() > 0 {
            self.drain_backlog();
        }
    }

    /// Hands the latency of a probe to flow control. A core that waited has reaped it at once; else
    /// it may have ended at any time since the start of the turn.
    #[cold]
    fn reaped_probe(&self, place: u8, result: i32, wait: Wait) {
        let now_ns = self.driver.borrow_mut().now_ns();
        let seen_ns = if wait == Wait::No { self.now.get() } else { now_ns };
        self.flow.reaped_probe(place, result >= 0, seen_ns, now_ns);
    }

    /// Number of completions that ends a wait: several when many disk operations and no write of a
    /// request's file or anything else are in flight, because each return to user space costs more
    /// than the reads' extra wait. One while other cores or threads send messages: each rings with
    /// a single completion, and would wait with the reads.
    pub(crate) fn gather(&self, wait: Wait) -> usize {
        let ops = self.ops.borrow();
        let only_disk = ops.disk_running > 2 * STAGED_MAX
            && ops.disk_running == ops.running
            && ops.urgent_running == 0;
        let alone = self.now.get().saturating_sub(self.heard_at.get()) >= LISTEN_NS;
        if wait != Wait::No && only_disk && alone { STAGED_MAX } else { 1 }
    }

    /// Runs the pollers, several times while nothing else has work: this spreads the cost of the
    /// rest of the turn over more of their requests. True when they did something.
    fn poll(&self) -> bool {
        let seldom = self.polls_seldom();
        if seldom {
            if self.now.get() < self.next_poll() {
                return false;
            }
            self.polled_at.set(self.now.get());
        }
        let mut worked = false;
        for _ in 0..if seldom { 1 } else { POLLS_PER_TURN } {
            self.rounds.set(self.rounds.get() + 1);
            if !Pollers::run(&self.pollers, self.pollers_due.take()) {
                break;
            }
            worked = true;
            if self.tasks.borrow().any_ready() || self.driver.borrow().staged() > 0 {
                break;
            }
        }
        worked
    }

    /// Whether there is work that needs no completion.
    fn work_pending(&self) -> bool {
        self.anything_but_polls_pending()
            || self.pollers_due.get()
            || self.next_timer().is_some_and(|at| at <= self.now.get())
    }

    /// Whether tasks are ready, or messages there.
    fn anything_but_polls_pending(&self) -> bool {
        self.tasks.borrow().any_ready()
            || self.inbox.borrow().pure_check()
            || self.mesh.borrow().pending()
    }

    /// Whether [`Core::poll_seldom`] holds.
    fn polls_seldom(&self) -> bool {
        self.now.get() < self.seldom_until_ns.get()
    }

    /// When the next round of pollers that run seldom begins.
    fn next_poll(&self) -> u64 {
        self.polled_at.get() + self.poll_every_ns.get()
    }

    /// Decides how to wait: spins first where that pays, and sets the sleep flag before a wait.
    fn idle_wait(&self) -> Wait {
        let spin_until = self.idle.borrow_mut().spin_until(
            self.now.get(),
            self.pollers.borrow().any(),
            self.mesh.borrow_mut().recent(self.stats.messages.get()),
        );
        let mut checks = 0_u32;
        while let Some(until) = spin_until {
            // The spin is for the pollers; reading the clock costs more than checking them.
            if Pollers::pure_check(&self.pollers) {
                self.idle.borrow_mut().found_work();
                self.poll();
                return Wait::No;
            }
            checks = checks.wrapping_add(1);
            if checks.is_multiple_of(POLLER_CHECKS) {
                if self.driver.borrow_mut().ready() || self.work_pending() {
                    self.idle.borrow_mut().found_work();
                    return Wait::No;
                }
                let now = self.driver.borrow_mut().now_ns();
                self.now.set(now);
                if now >= until {
                    break;
                }
            }
            std::hint::spin_loop();
        }
        if self.idle.borrow().never_sleeps() {
            return Wait::No;
        }
        let work = || !Pollers::arm(&self.pollers) || self.work_pending();
        if !self.shared.sleep().prepare(work) {
            Pollers::disarm(&self.pollers);
            return Wait::No;
        }
        let until_timer = self.next_timer().map(|at| at.saturating_sub(self.now.get()).max(1));
        until_timer.map_or(Wait::Forever, Wait::Ns)
    }

    /// How to wait for the next round of pollers that run seldom. Those that are due wait for it,
    /// too.
    fn wait_for_poll(&self) -> Wait {
        let timer = self.timers.borrow_mut().next();
        let until_ns = timer.map_or(self.next_poll(), |at| at.min(self.next_poll()));
        let pending = || self.anything_but_polls_pending();
        if until_ns <= self.now.get() || pending() || !self.shared.sleep().prepare(pending) {
            return Wait::No;
        }
        Wait::Ns(until_ns - self.now.get())
    }

    /// Time of the next timer or requested turn.
    fn next_timer(&self) -> Option<u64> {
        let turn_at = Some(self.turn_at.get()).filter(|&at| at != u64::MAX);
        self.timers.borrow_mut().next().into_iter().chain(turn_at).min()
    }

    fn fire_timers(&self) {
        let now = self.now.get();
        let mut fired = Vec::new();
        if self.timers.borrow_mut().next().is_some_and(|at| at <= now) {
            self.timers.borrow_mut().fire(now, |waker| fired.push(waker));
        }
        for waker in fired {
            waker.wake();
        }
    }
}
