//! Threads that are not cores: they wake a core, get its answers, and notice its end.
#![expect(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "these tests are about such threads"
)]

use std::cell::Cell;
use std::pin::pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;

use reactor::inbox::{Inbox, Sender, inbox};
use reactor::reply::{ReplySender, Unanswered, reply};
use reactor::testing::in_forked_child;
use reactor::{Bell, Core, DriverKind, Event, Poller, RuntimeConfig, fork_generation, run};

use crate::every_driver::{available, config};

/// A request: a number to be answered with the next one. 0 makes the core panic.
type Request = (u32, ReplySender<u32>);

struct Answers {
    inbox: Inbox<Request>,
    left: Rc<Cell<u32>>,
    done: Rc<Event>,
}

impl Poller for Answers {
    fn poll(&mut self) -> bool {
        let Some((number, back)) = self.inbox.pop() else { return false };
        assert_ne!(number, 0, "on purpose");
        back.send(number + 1);
        self.left.set(self.left.get() - 1);
        self.done.notify_all();
        true
    }

    fn pure_check(&mut self) -> bool {
        self.inbox.pure_check()
    }

    fn arm(&mut self) -> bool {
        !self.inbox.pure_check()
    }

    fn disarm(&mut self) {}
}

/// A main task that answers `count` requests, and tells how to reach it.
async fn answer(core: Core, count: u32, tell: mpsc::Sender<(Sender<Request>, Bell)>) {
    let (sender, inbox) = inbox(64);
    let (left, done) = (Rc::new(Cell::new(count)), Rc::new(Event::new()));
    let answers = Answers { inbox, left: left.clone(), done: done.clone() };
    let _poller = core.add_poller(answers);
    tell.send((sender, core.bell())).unwrap();
    done.wait_until(|| left.get() == 0).await;
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(value) => return value,
            Poll::Pending => std::thread::park(),
        }
    }
}

on_every_driver! {
    /// Between the requests the core falls asleep or spins, and no request is slept through.
    fn a_bell_wakes_a_core(kind: DriverKind) {
        let (tell, told) = mpsc::channel();
        let asking = std::thread::spawn(move || {
            let (sender, bell): (Sender<Request>, Bell) = told.recv().unwrap();
            for n in 1..=2000 {
                let (back, answer) = reply();
                sender.send((n, back)).unwrap();
                bell.ring();
                assert_eq!(block_on(answer), Ok(n + 1));
                if n % 100 == 0 {
                    std::thread::sleep(std::time::Duration::from_millis(1));
                }
            }
        });
        run(&config(kind), move |core| answer(core, 2000, tell.clone())).unwrap();
        asking.join().unwrap();
    }

    /// A core that panics drops its tasks and pollers, so nobody waits for their answers.
    fn a_panic_ends_the_waits_for_the_core(kind: DriverKind) {
        let (tell, told) = mpsc::channel();
        let running = std::thread::spawn(move || {
            run(&config(kind), move |core| {
                let tell = tell.clone();
                async move {
                    // A task that holds another request for ever.
                    let (back, answer) = reply::<u32>();
                    core.spawn(reactor::Class::Foreground, async move {
                        let _held = back;
                        std::future::pending::<()>().await;
                    });
                    tell.send(answer).unwrap();
                    core.yield_now().await;
                    panic!("on purpose");
                }
            })
        });
        let answer = told.recv().unwrap();
        assert_eq!(block_on(answer), Err(Unanswered));
        assert!(running.join().is_err());
    }
}

/// Whoever catches the panic may use again what the cores had.
#[test]
fn a_panic_goes_on_when_all_cores_have_ended() {
    let ended = Arc::new(AtomicBool::new(false));
    let tell = ended.clone();
    let config = RuntimeConfig { processors: vec![0, 0], pin: false, ..RuntimeConfig::default() };
    let running = std::thread::spawn(move || {
        run(&config, move |core| {
            let tell = tell.clone();
            async move {
                assert!(core.id() == 1, "on purpose");
                core.sleep_ns(200_000_000).await;
                tell.store(true, Ordering::SeqCst);
            }
        })
    });
    assert!(running.join().is_err());
    assert!(ended.load(Ordering::SeqCst));
}

#[test]
fn a_forked_child_has_another_generation() {
    let mine = fork_generation();
    assert!(in_forked_child(|| fork_generation() != mine));
    assert!(in_forked_child(|| in_forked_child(|| fork_generation() == mine + 2)));
    assert_eq!(fork_generation(), mine);
}
