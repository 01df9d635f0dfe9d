//! Events, one-shots and timeouts under simulated chance: waiters that are dropped at any time,
//! notifications from several tasks, deadlines.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

use reactor::sim::{SimConfig, World};
use reactor::{Class, Closed, Core, Either, Elapsed, Event, JoinHandle, oneshot, race, timeout};

/// A bounded queue of one core: producers wait for room, consumers for items.
#[derive(Default)]
struct Queue {
    items: RefCell<VecDeque<u64>>,
    filled: Event,
    emptied: Event,
}

const ROOM: usize = 3;

impl Queue {
    async fn put(&self, item: u64) {
        self.emptied.wait_until(|| self.items.borrow().len() < ROOM).await;
        self.items.borrow_mut().push_back(item);
        self.filled.notify();
    }

    async fn take(&self) -> u64 {
        let item = self.filled.wait_for(|| self.items.borrow_mut().pop_front()).await;
        self.emptied.notify();
        item
    }
}

async fn pause(core: &Core) {
    match core.random_u64() % 4 {
        0 => core.yield_now().await,
        1 => core.sleep_ns(core.random_u64() % 50_000).await,
        _ => {}
    }
}

/// `notify` wakes one waiter for each item. A lost notification leaves an item and a waiter for
/// ever, and the world reports that nothing can happen any more.
#[test]
fn no_notification_is_lost_although_consumers_give_up() {
    const ITEMS: u64 = 200;
    let timeouts = Rc::new(Cell::new(0));
    for seed in 0..200 {
        let timeouts = timeouts.clone();
        let world = World::new(seed, 1, SimConfig::default());
        let run = world.run(move |core| {
            let timeouts = timeouts.clone();
            async move {
                let queue = Rc::new(Queue::default());
                let (taken, all) = (Rc::new(Cell::new(0)), Rc::new(Event::new()));
                for n in 0..2 {
                    let (core, queue) = (core.clone(), queue.clone());
                    core.clone().spawn(Class::Background, async move {
                        for item in 0..ITEMS / 2 {
                            queue.put(item * 2 + n).await;
                            pause(&core).await;
                        }
                    });
                }
                let consumers: Vec<JoinHandle<()>> = (0..4)
                    .map(|_| {
                        let (core, queue, taken) = (core.clone(), queue.clone(), taken.clone());
                        let (all, timeouts) = (all.clone(), timeouts.clone());
                        core.clone().spawn(Class::Foreground, async move {
                            while taken.get() < ITEMS {
                                let patience_ns = core.random_u64() % 30_000;
                                let take = async {
                                    queue.take().await;
                                    taken.set(taken.get() + 1);
                                };
                                match core.random_u64() % 2 {
                                    0 => match timeout(&core, patience_ns, take).await {
                                        Ok(()) => {}
                                        Err(Elapsed) => timeouts.set(timeouts.get() + 1),
                                    },
                                    // Without a deadline: it depends on the notification.
                                    _ => {
                                        let end = all.wait_until(|| taken.get() == ITEMS);
                                        race(take, end).await;
                                    }
                                }
                                if taken.get() == ITEMS {
                                    all.notify_all();
                                }
                                pause(&core).await;
                            }
                        })
                    })
                    .collect();
                for consumer in consumers {
                    consumer.await;
                }
                assert_eq!(taken.get(), ITEMS);
            }
        });
        run.unwrap_or_else(|stuck| panic!("seed {seed}: {stuck}"));
    }
    assert!(timeouts.get() > 100, "{} waits were dropped", timeouts.get());
}

/// A consumer that is cancelled may already be the one that `notify` chose. The item must then go
/// to the other consumer.
#[test]
fn a_notification_of_a_cancelled_task_goes_to_the_next() {
    let (first, second) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
    for seed in 0..200 {
        let (first, second) = (first.clone(), second.clone());
        let world = World::new(seed, 1, SimConfig::default());
        let run = world.run(move |core| {
            let (first, second) = (first.clone(), second.clone());
            async move {
                let queue = Rc::new(Queue::default());
                let take = |count: Rc<Cell<u32>>| {
                    let queue = queue.clone();
                    core.spawn(Class::Foreground, async move {
                        queue.take().await;
                        count.set(count.get() + 1);
                    })
                };
                let (cancelled, other) = (take(first).owned(), take(second));
                pause(&core).await;
                queue.put(seed).await;
                pause(&core).await;
                let taken = cancelled.has_ended();
                drop(cancelled);
                if taken {
                    queue.put(seed).await;
                }
                other.await;
                assert!(queue.items.borrow().is_empty());
            }
        });
        run.unwrap_or_else(|stuck| panic!("seed {seed}: {stuck}"));
    }
    assert!(first.get() > 20 && second.get() == 200, "{first:?} {second:?}");
}

/// The sender sends, is dropped, or is late; the receiver waits, or was dropped.
#[test]
fn a_oneshot_ends_in_every_order_of_its_ends() {
    let counts = Rc::new(RefCell::new([0; 4]));
    for seed in 0..300 {
        let counts = counts.clone();
        let world = World::new(seed, 1, SimConfig::default());
        let run = world.run(move |core| {
            let counts = counts.clone();
            async move {
                let (sender, receiver) = oneshot();
                let answering = core.clone();
                let answered = core.spawn(Class::Background, async move {
                    pause(&answering).await;
                    match answering.random_u64() % 3 {
                        0 => drop(sender),
                        _ => return sender.send(seed).is_ok(),
                    }
                    false
                });
                pause(&core).await;
                let nth = match core.random_u64() % 3 {
                    0 => {
                        drop(receiver);
                        0
                    }
                    _ => match timeout(&core, 20_000, receiver).await {
                        Ok(Ok(value)) => {
                            assert_eq!(value, seed);
                            assert!(answered.await);
                            1
                        }
                        Ok(Err(Closed)) => {
                            assert!(!answered.await);
                            2
                        }
                        Err(Elapsed) => 3,
                    },
                };
                counts.borrow_mut()[nth] += 1;
            }
        });
        run.unwrap();
    }
    assert!(counts.borrow().iter().all(|&count| count > 3), "{counts:?}");
}

#[test]
fn a_timeout_ends_at_its_deadline_and_not_before() {
    let world = World::new(1, 1, SimConfig::default());
    let run = world.run(|core| async move {
        let began_ns = core.now_ns();
        let never = std::future::pending::<()>();
        assert_eq!(timeout(&core, 1_000_000, never).await, Err(Elapsed));
        assert!(core.now_ns() >= began_ns + 1_000_000);
        assert_eq!(timeout(&core, 1_000_000, core.sleep_ns(1000)).await, Ok(()));
        let both = race(core.sleep_ns(2000), core.sleep_ns(1000)).await;
        assert_eq!(both, Either::Second(()));
    });
    run.unwrap();
}
