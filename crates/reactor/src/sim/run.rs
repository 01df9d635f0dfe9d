//! Running the cores of a simulated world: which core takes the next turn, and when time passes.

use std::cell::RefCell;
use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Waker};

use super::state::State;
use super::trace::What;
use super::world::{Beginning, Failure, FailureKind, Main, Process, ProcessState, World};
use crate::channels::mesh::Mesh;
use crate::core::{Core, CoreConfig, DRAIN_NS, JoinHandle};
use crate::driver::remote::{CoreAddress, EndNotice, Remote};
use crate::driver::{GATHER_NS, Wait, sim::SimDriver};
use crate::flow::Board;
use crate::inbox::Inbox;
use crate::runtime::PATIENCE_NS;
use crate::task::Class;

/// The state of a core.
enum Status {
    /// It takes a turn when chance picks it.
    Ready,
    /// It is between the halves of a turn.
    Asleep {
        wait: Wait,
        until: Option<u64>,
        at_least: usize,
        /// The time from which one completion is enough.
        gather_until: u64,
        woken: Option<u64>,
    },
    /// It waits for its operations, at its end.
    Draining {
        give_up: u64,
        until: u64,
    },
    Ended,
}

/// A core of the run, with what the world knows of it.
struct Seat {
    core: Core,
    shared: Arc<CoreAddress>,
    /// The main task; `None` after its end.
    main: Option<JoinHandle<()>>,
    notice: Option<EndNotice>,
    status: Status,
    /// Its relative chance of being picked.
    weight: u64,
    /// Its process, if it was started in the run.
    process: Option<Rc<ProcessState>>,
}

/// Turns after which the weights of the cores are drawn again.
const WEIGHTS_LAST: u64 = 2048;

/// Prints the seed when a task panics.
struct SayOnPanic(u64);

impl Drop for SayOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the panic came in the simulation with seed {}", self.0);
        }
    }
}

impl World {
    /// Runs `main` on every core until all have ended and shut down; returns their results, by
    /// core. A world can run several times in sequence: one process after the other on the same
    /// disk.
    ///
    /// # Errors
    /// See [`FailureKind`]; a requested crash is one.
    ///
    /// # Panics
    /// When a task panics, or when called from a task of this world.
    pub fn run<F, Fut, T>(&self, main: F) -> Result<Vec<T>, Failure>
    where
        F: Fn(Core) -> Fut,
        Fut: Future<Output = T> + 'static,
        T: 'static,
    {
        assert!(!self.0.running.replace(true), "a world has one run at a time");
        let _say = SayOnPanic(self.0.seed);
        self.0.state.borrow_mut().restart(self.0.cores);
        self.0.beginning.take();
        let results: Rc<RefCell<Vec<Option<T>>>> = Rc::default();
        results.borrow_mut().resize_with(self.0.cores, || None);
        let main = |core: Core| {
            let (results, id, main) = (results.clone(), core.id(), main(core));
            async move {
                let result = main.await;
                results.borrow_mut()[id] = Some(result);
            }
        };
        let mut seats = match self.seats(main) {
            Ok(seats) => seats,
            Err(error) => {
                self.0.running.set(false);
                return Err(self.failure(FailureKind::Host, error.to_string()));
            }
        };
        let end = self.rounds(&mut seats);
        for (id, seat) in seats.iter().enumerate() {
            self.clean_up(id, &seat.core);
        }
        drop(seats);
        self.0.state.borrow_mut().armed = None;
        self.0.running.set(false);
        end?;
        Ok(results.take().into_iter().flatten().collect())
    }

    fn failure(&self, kind: FailureKind, detail: String) -> Failure {
        let trace = self.newest_events();
        let detail = format!("{detail}the newest events:\n{trace}");
        Failure { kind, seed: self.0.seed, detail }
    }

    /// Starts another process in this run, with one core of its own. It shares the disk and the
    /// clock with the others, and descriptors that it is given. The run, with all its processes,
    /// ends when its first process has ended.
    pub fn start_process<Fut>(&self, main: impl FnOnce(Core) -> Fut + 'static) -> Process
    where
        Fut: Future<Output = ()> + 'static,
    {
        let process = Rc::<ProcessState>::default();
        let main: Main = Box::new(move |core| Box::pin(main(core)));
        self.0.beginning.borrow_mut().push(Beginning { process: process.clone(), main });
        Process(process)
    }

    /// Gives each started process a seat.
    fn begin(&self, seats: &mut Vec<Seat>) -> io::Result<()> {
        for Beginning { process, main } in self.0.beginning.take() {
            let (shared, inbox) = CoreAddress::new()?;
            let everybody = vec![shared.clone()];
            let mesh = Mesh::connect(&everybody).pop().unwrap_or_default();
            let port = self.0.state.borrow_mut().add_core();
            assert_eq!(port, seats.len(), "each core has a seat");
            let core = self.core((0, 1), port, &shared, inbox, mesh, &Arc::new(Board::new(1)));
            let main = core.spawn(Class::Foreground, main(core.clone()));
            seats.push(Seat::new(core, shared, main, &everybody, Some(process)));
        }
        Ok(())
    }

    /// Makes the core `id` of `cores`, at a port of the devices.
    fn core(
        &self,
        (id, cores): (usize, usize),
        port: usize,
        shared: &Arc<CoreAddress>,
        inbox: Inbox<Remote>,
        mesh: Mesh,
        board: &Arc<Board>,
    ) -> Core {
        let driver = SimDriver::new(&self.0.state, port, shared);
        let config = {
            let mut state = self.0.state.borrow_mut();
            CoreConfig {
                id,
                cores,
                memory: state.config.memory,
                disk_depth: state.config.disk_depth,
                poll: state.config.poll,
                seed: state.schedule.next_u64(),
                board: board.clone(),
            }
        };
        Core::new(config, shared.clone(), inbox, Box::new(driver), mesh)
    }

    fn seats<F, Fut>(&self, main: F) -> io::Result<Vec<Seat>>
    where
        F: Fn(Core) -> Fut,
        Fut: Future<Output = ()> + 'static,
    {
        let parts =
            (0..self.0.cores).map(|_| CoreAddress::new()).collect::<io::Result<Vec<_>>>()?;
        let everybody: Vec<_> = parts.iter().map(|(shared, _)| shared.clone()).collect();
        let meshes = Mesh::connect(&everybody);
        let board = Arc::new(Board::new(self.0.cores));
        let mut seats = Vec::new();
        for (id, ((shared, inbox), mesh)) in parts.into_iter().zip(meshes).enumerate() {
            let core = self.core((id, self.0.cores), id, &shared, inbox, mesh, &board);
            let main = core.spawn(Class::Foreground, main(core.clone()));
            seats.push(Seat::new(core, shared, main, &everybody, None));
        }
        Ok(seats)
    }

    fn rounds(&self, seats: &mut Vec<Seat>) -> Result<(), Failure> {
        let (mut turns, mut looked) = (0u64, u64::MAX);
        let (turns_max, time_max) = {
            let state = self.0.state.borrow();
            (state.config.turns_max, state.now.saturating_add(state.config.time_max_ns))
        };
        let mut ready: Vec<(usize, u64)> = Vec::with_capacity(seats.len());
        loop {
            ready.clear();
            self.begin(seats)
                .map_err(|error| self.failure(FailureKind::Host, error.to_string()))?;
            for (id, seat) in seats.iter_mut().enumerate() {
                let killed =
                    seat.process.as_ref().is_some_and(|process| process.left.get() == Some(0));
                if killed && !matches!(seat.status, Status::Ended) {
                    self.kill(id, seat);
                }
            }
            let mut next: Option<u64> = None;
            {
                let mut state = self.0.state.borrow_mut();
                state.close_dropped();
                if looked != turns {
                    // Only turns change descriptors of the host.
                    state.look_at_host();
                    looked = turns;
                }
                state.arrive();
                state.answer_names();
                if turns.is_multiple_of(WEIGHTS_LAST) {
                    for seat in seats.iter_mut() {
                        seat.weight = 1 << state.schedule.below(5);
                    }
                }
                for (id, seat) in seats.iter_mut().enumerate() {
                    match seat.wakes(id, &mut state) {
                        Some(at) if at <= state.now => ready.push((id, seat.weight)),
                        Some(at) => next = Some(next.map_or(at, |next| next.min(at))),
                        None => {}
                    }
                }
                let first = &seats[..self.0.cores];
                if first.iter().all(|seat| matches!(seat.status, Status::Ended))
                    && state.crashed().is_none()
                {
                    return Ok(());
                }
                if ready.is_empty() && state.crashed().is_none() {
                    let others = [state.next_name(), state.next_arrival()];
                    let next = next.into_iter().chain(others.into_iter().flatten()).min();
                    if let Some(next) = next {
                        state.now = state.now.max(next);
                        if next <= time_max {
                            continue;
                        }
                    }
                }
            }
            let (now, crashed) = (self.now_ns(), self.0.state.borrow().crashed());
            let failed = match crashed {
                Some(crash) => FailureKind::Crash(crash),
                None if now > time_max => FailureKind::Time,
                None if turns >= turns_max => FailureKind::Turns,
                None if ready.is_empty() => FailureKind::Deadlock,
                None => {
                    let id = self.pick(&ready);
                    turns += 1;
                    self.step(id, &mut seats[id]);
                    continue;
                }
            };
            return Err(self.failure(failed, self.describe(seats)));
        }
    }

    fn pick(&self, ready: &[(usize, u64)]) -> usize {
        let mut state = self.0.state.borrow_mut();
        let total = ready.iter().map(|(_, weight)| weight).sum();
        let mut drawn = state.schedule.below(total);
        for &(id, weight) in ready {
            if drawn < weight {
                return id;
            }
            drawn -= weight;
        }
        ready[0].0
    }

    /// Runs a core's turn, or the rest of one.
    fn step(&self, id: usize, seat: &mut Seat) {
        let state = &self.0.state;
        if let Some(left) = seat.process.as_ref().map(|process| &process.left) {
            left.set(left.get().map(|left| left.saturating_sub(1)));
        }
        state.borrow_mut().note(id, u32::MAX, What::Turn);
        match seat.status {
            Status::Ready => {
                let wait = seat.core.work(true);
                if wait == Wait::No {
                    seat.core.finish(Wait::No);
                } else {
                    // As in the kernel: submitting and waiting are one call, and a completion that
                    // has arrived ends the wait.
                    let mut state = state.borrow_mut();
                    state.submit(id);
                    let until = match wait {
                        Wait::Ns(ns) => Some(state.now.saturating_add(ns)),
                        _ => None,
                    };
                    let due = state.due_now(id, 1);
                    let at_least = if due { 1 } else { seat.core.inner().gather(wait) };
                    let gather_until = state.now.saturating_add(GATHER_NS);
                    seat.status =
                        Status::Asleep { wait, until, at_least, gather_until, woken: None };
                    return;
                }
            }
            Status::Asleep { wait, .. } => {
                seat.core.finish(wait);
                seat.status = Status::Ready;
            }
            Status::Draining { give_up, .. } => {
                seat.core.drain(Wait::Ns(DRAIN_NS));
                self.drain(id, seat, give_up);
                return;
            }
            Status::Ended => return,
        }
        let mut context = Context::from_waker(Waker::noop());
        if let Some(main) = &mut seat.main
            && Pin::new(main).poll(&mut context).is_ready()
        {
            seat.main = None;
            state.borrow_mut().note(id, u32::MAX, What::MainEnded);
            drop(seat.notice.take());
        }
        if seat.core.all_ended() {
            let give_up = seat.core.stop(PATIENCE_NS);
            self.drain(id, seat, give_up);
        }
    }

    /// Kills a process.
    fn kill(&self, id: usize, seat: &mut Seat) {
        self.0.state.borrow_mut().note(id, u32::MAX, What::Ended);
        seat.status = Status::Ended;
        seat.core.stop(0);
        self.0.state.borrow_mut().forget(id);
        // Answers in the inbox hold descriptors.
        seat.core.drain(Wait::No);
        seat.core.abandon();
        seat.main = None;
        seat.notice = None;
        if let Some(process) = &seat.process {
            process.killed.set(true);
        }
        seat.ended();
    }

    fn drain(&self, id: usize, seat: &mut Seat, give_up: u64) {
        let now = self.now_ns();
        let left = seat.core.operations_in_flight();
        let mut state = self.0.state.borrow_mut();
        state.submit(id);
        if seat.core.drained() {
            state.note(id, u32::MAX, What::Ended);
            seat.status = Status::Ended;
            seat.ended();
        } else if now >= give_up {
            state.note(id, u32::MAX, What::GaveUp { left: left as u64 });
            self.0.abandoned.set(self.0.abandoned.get() + left);
            seat.status = Status::Ended;
            seat.ended();
        } else {
            seat.status = Status::Draining { give_up, until: now.saturating_add(DRAIN_NS) };
        }
    }

    /// Drops a core. On the host the memory of unfinished operations is leaked, because the kernel
    /// may still write to it; the simulated devices forget it, so it can be freed.
    fn clean_up(&self, port: usize, core: &Core) {
        core.stop(0);
        self.0.state.borrow_mut().forget(port);
        core.abandon();
    }

    fn describe(&self, seats: &[Seat]) -> String {
        use fmt::Write;
        let mut text = String::new();
        for (id, seat) in seats.iter().enumerate() {
            let status = match seat.status {
                Status::Ready => "is ready".to_owned(),
                Status::Asleep { .. } if seat.main.is_none() => {
                    "has ended its main task and serves the others".to_owned()
                }
                Status::Asleep { wait, .. } => format!("waits ({wait:?})"),
                Status::Draining { .. } => "waits for its operations to end".to_owned(),
                Status::Ended => "has ended".to_owned(),
            };
            let stuck = self.0.state.borrow().stuck(id);
            let _ = writeln!(
                text,
                "core {id} {status}; {} tasks, {} operations in flight, {stuck} of them stuck",
                seat.core.live_tasks(),
                seat.core.operations_in_flight(),
            );
        }
        text
    }
}

impl Seat {
    fn new(
        core: Core,
        shared: Arc<CoreAddress>,
        main: JoinHandle<()>,
        everybody: &[Arc<CoreAddress>],
        process: Option<Rc<ProcessState>>,
    ) -> Seat {
        let (main, notice) = (Some(main), Some(EndNotice(everybody.to_vec())));
        Seat { core, shared, main, notice, status: Status::Ready, weight: 1, process }
    }

    fn ended(&self) {
        if let Some(process) = &self.process {
            process.ended.set(true);
        }
    }

    /// The time when the core can continue: a past time means now, `None` that no event will wake
    /// it.
    fn wakes(&mut self, id: usize, state: &mut State) -> Option<u64> {
        if self.process.as_ref().is_some_and(|process| process.stopped.get()) {
            return None;
        }
        match &mut self.status {
            Status::Ready => Some(0),
            Status::Asleep { until, at_least, gather_until, woken, .. } => {
                if woken.is_none() && !self.shared.sleep().is_asleep() {
                    // Another core took the flag and signals; the signal takes some time.
                    *woken = Some(state.now + state.schedule.within(state.config.wake_ns.clone()));
                }
                let all = state.ports[id].due(*at_least);
                let one = state.ports[id].due(1).map(|at| at.max(*gather_until));
                [*until, *woken, all, one].into_iter().flatten().min()
            }
            Status::Draining { until, .. } => {
                Some(state.ports[id].due(1).map_or(*until, |at| at.min(*until)))
            }
            Status::Ended => None,
        }
    }
}
