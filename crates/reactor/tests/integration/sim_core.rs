//! The loop, the operation table and the executor under simulated chance: futures dropped at any
//! time, cores stopped with reads in flight, calls through full rings, memory used up.

use std::cell::{Cell, RefCell};
use std::path::Path;
use std::rc::Rc;

use reactor::sim::{Fault, FaultKind, SimConfig, World};
use reactor::{Class, Core, Elapsed, File, JoinHandle, Pool, timeout};

const FILE: &str = "/data";
const BLOCKS: u64 = 4096;

/// Every 512-byte block of the file has its position, so that a buffer shared by two reads is
/// detected.
fn file() -> Vec<u8> {
    (0..BLOCKS).flat_map(|block| [block; 64]).flat_map(u64::to_le_bytes).collect()
}

fn assert_blocks(bytes: &[u8], first: u64) {
    for (n, word) in bytes.chunks_exact(8).enumerate() {
        let block = u64::from_le_bytes(word.try_into().unwrap());
        assert_eq!(block, first + n as u64 / 64, "word {n} of a read of block {first}");
    }
}

fn world(seed: u64, cores: usize, config: SimConfig) -> World {
    let world = World::new(seed, cores, config);
    world.add_file(FILE, file());
    world
}

async fn open(core: &Core) -> File {
    core.attach(&core.open(Path::new(FILE), false).await.unwrap())
}

async fn until_idle(core: &Core) {
    while core.operations_in_flight() > 0 {
        core.sleep_ns(1_000_000).await;
    }
}

/// One reader that drops most of its reads at a random time: before they start, staged, in the
/// backlog, in the device, or completed and not yet polled.
async fn careless_reader(core: Core, file: File, done: Rc<Cell<u64>>, dropped: Rc<Cell<u64>>) {
    for _ in 0..30 {
        let len = 512 << (core.random_u64() % 6);
        let first = core.random_u64() % (BLOCKS - 32);
        let buf = core.alloc_wait(len).await.unwrap();
        let mut read = file.read_at(first * 512, buf);
        match core.random_u64() % 8 {
            0 => drop(read),
            1 => {
                read.start();
                drop(read);
            }
            2 => {
                read.start();
                core.sleep_ns(core.random_u64() % 300_000).await;
                drop(read);
            }
            _ => match timeout(&core, core.random_u64() % 300_000, read).await {
                Err(Elapsed) => dropped.set(dropped.get() + 1),
                Ok((Ok(n), buf)) => {
                    assert_blocks(&buf[..n], first);
                    done.set(done.get() + 1);
                }
                Ok((Err(error), _)) => assert_eq!(error.raw_os_error(), Some(libc_eio())),
            },
        }
    }
}

/// `EIO`.
fn libc_eio() -> i32 {
    5
}

#[test]
fn dropped_reads_keep_their_buffer_until_they_complete_and_give_it_back_once() {
    let (done, dropped) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
    for seed in 0..40 {
        // A small device, so that the backlog is used, and little memory, so that what is freed is
        // reused immediately.
        let config = SimConfig {
            capacity: 12,
            disk_depth: 1 + seed as usize % 10,
            memory: 256 << 10,
            ..SimConfig::default()
        };
        let world = world(seed, 2, config);
        world.add_fault(Fault::new(FaultKind::Error(libc_eio())).chance(50_000));
        world.add_fault(Fault::new(FaultKind::Short).chance(50_000));
        let (done, dropped) = (done.clone(), dropped.clone());
        let pools = world
            .run(move |core| {
                let (done, dropped) = (done.clone(), dropped.clone());
                async move {
                    let file = open(&core).await;
                    let tasks: Vec<JoinHandle<()>> = (0..20)
                        .map(|n| {
                            let class = [Class::Foreground, Class::Background][n % 2];
                            let (file, done, dropped) =
                                (file.clone(), done.clone(), dropped.clone());
                            core.spawn(class, careless_reader(core.clone(), file, done, dropped))
                        })
                        .collect();
                    for (n, task) in tasks.into_iter().enumerate() {
                        if n % 7 == 0 {
                            core.sleep_ns(core.random_u64() % 2_000_000).await;
                            task.cancel();
                        } else {
                            task.await;
                        }
                    }
                    until_idle(&core).await;
                    assert_eq!(core.pool().used(), 0, "every buffer came back");
                    drop(file);
                    core.pool().clone()
                }
            })
            .unwrap();
        assert!(pools.iter().all(|pool| pool.used() == 0));
        assert_eq!((world.abandoned(), world.open_files()), (0, 0));
    }
    assert!(done.get() > 5_000 && dropped.get() > 2_000, "{} {}", done.get(), dropped.get());
}

#[test]
fn a_buffer_is_in_use_as_long_as_its_dropped_read_runs() {
    for seed in 0..20 {
        let world = world(seed, 1, SimConfig { disk_depth: 16, ..SimConfig::default() });
        let reaped_late = world
            .run(|core| async move {
                let file = open(&core).await;
                for n in 0..64 {
                    file.read_at(n * 4096, core.alloc(4096).unwrap()).start();
                }
                // 16 were at the device when they were dropped; those in the backlog were removed.
                let mut steps = 0;
                loop {
                    let running = core.operations_in_flight();
                    assert_eq!(core.pool().used(), running * 4096);
                    if running == 0 {
                        return steps;
                    }
                    assert!(running <= 17, "{running}");
                    steps += 1;
                    core.sleep_ns(5_000).await;
                }
            })
            .unwrap();
        assert!(reaped_late[0] > 3, "they completed one by one: {reaped_late:?}");
    }
}

#[test]
fn a_core_stops_with_any_operations_in_flight_and_frees_all() {
    for seed in 0..60 {
        let config = SimConfig { capacity: 20, disk_depth: 12, ..SimConfig::default() };
        let world = world(seed, 2, config);
        world.add_fault(Fault::new(FaultKind::Stall(0..50_000_000)).chance(100_000));
        let before: Rc<RefCell<Vec<usize>>> = Rc::default();
        let seen = before.clone();
        let pools: Vec<Pool> = world
            .run(move |core| {
                let seen = seen.clone();
                async move {
                    let file = open(&core).await;
                    for n in 0..core.random_u64() % 40 {
                        let (c, f) = (core.clone(), file.clone());
                        core.spawn(Class::Foreground, async move {
                            let buf = c.alloc_wait(8192).await.unwrap();
                            let (_, buf) = f.read_at(n * 8192, buf).await;
                            c.sleep_ns(1_000_000_000).await;
                            drop(buf);
                        });
                        let c = core.clone();
                        core.spawn(Class::Background, async move {
                            // Operations on names, calls and timers are pending as well.
                            let _ = c.list(Path::new("/")).await;
                            let other = (c.id() + 1) % c.cores();
                            c.call(other, |core| core.random_u64()).await;
                            std::future::pending::<()>().await;
                        });
                    }
                    core.sleep_ns(core.random_u64() % 300_000).await;
                    seen.borrow_mut().push(core.operations_in_flight());
                    core.pool().clone()
                }
            })
            .unwrap();
        assert!(pools.iter().all(|pool| pool.used() == 0), "seed {seed}");
        assert_eq!((world.abandoned(), world.open_files()), (0, 0), "seed {seed}");
    }
}

/// Sets a flag when dropped.
struct Bell(Rc<Cell<bool>>);

impl Drop for Bell {
    fn drop(&mut self) {
        self.0.set(true);
    }
}

#[test]
fn cancelled_tasks_end_at_their_await_and_others_continue() {
    for seed in 0..20 {
        world(seed, 1, SimConfig::default())
            .run(|core| async move {
                let rung = Rc::new(Cell::new(false));
                let bell = Bell(rung.clone());
                let c = core.clone();
                let task = core.spawn(Class::Foreground, async move {
                    let _bell = bell;
                    c.sleep_ns(u64::MAX / 2).await;
                });
                let c = core.clone();
                let neighbour = core.spawn(Class::Foreground, async move {
                    c.sleep_ns(500_000).await;
                    7
                });
                core.sleep_ns(core.random_u64() % 100_000).await;
                assert!(!rung.get());
                task.cancel();
                assert!(rung.get(), "dropped at once");
                assert_eq!(neighbour.await, 7);

                // Cancelling an ended task does nothing; its slot may belong to another.
                let short = core.spawn(Class::Foreground, async {});
                core.sleep_ns(1_000).await;
                core.yield_now().await;
                let c = core.clone();
                let other = core.spawn(Class::Foreground, async move {
                    c.sleep_ns(1_000).await;
                    8
                });
                short.cancel();
                assert_eq!(other.await, 8);

                // Detached is not cancelled.
                let ran = Rc::new(Cell::new(false));
                let (c, flag) = (core.clone(), ran.clone());
                drop(core.spawn(Class::Foreground, async move {
                    c.sleep_ns(1_000).await;
                    flag.set(true);
                }));
                core.sleep_ns(10_000_000).await;
                assert!(ran.get());

                // A task that cancels itself runs to its next await.
                let handle: Rc<RefCell<Option<JoinHandle<()>>>> = Rc::default();
                let (own, reached) = (handle.clone(), Rc::new(Cell::new(0)));
                let (c, step) = (core.clone(), reached.clone());
                *handle.borrow_mut() = Some(core.spawn(Class::Foreground, async move {
                    let myself = own.borrow_mut().take();
                    if let Some(myself) = myself {
                        myself.cancel();
                    }
                    step.set(1);
                    c.sleep_ns(1_000).await;
                    step.set(2);
                }));
                core.sleep_ns(10_000_000).await;
                assert_eq!(reached.get(), 1);
                assert_eq!(core.live_tasks(), 1, "only this one");
            })
            .unwrap();
    }
}

#[test]
fn timers_fire_in_order_and_never_early() {
    for seed in 0..20 {
        world(seed, 1, SimConfig::default())
            .run(|core| async move {
                let fired: Rc<RefCell<Vec<(u64, u64)>>> = Rc::default();
                let tasks: Vec<_> = (0..300)
                    .map(|_| {
                        let (c, fired) = (core.clone(), fired.clone());
                        core.spawn(Class::Foreground, async move {
                            let deadline = c.now_ns() + c.random_u64() % 3_000_000;
                            // A first sleep that is dropped must not disturb the others.
                            let given_up = timeout(&c, 10, c.sleep_ns(1 << 40)).await;
                            assert_eq!(given_up, Err(Elapsed));
                            c.sleep_ns(deadline.saturating_sub(c.now_ns())).await;
                            let now = c.now_ns();
                            assert!(now >= deadline, "{now} is before {deadline}");
                            assert!(now < deadline + 200_000, "{now} is long after {deadline}");
                            fired.borrow_mut().push((deadline, now));
                        })
                    })
                    .collect();
                for task in tasks {
                    task.await;
                }
                let fired = fired.borrow();
                // Deadlines that fall into one turn may be served in any order within it.
                for pair in fired.windows(2) {
                    assert!(pair[0].0 <= pair[1].0 || pair[0].1 == pair[1].1, "{pair:?}");
                }
            })
            .unwrap();
    }
}

/// The longest that a request waits beside tasks of these classes.
fn slowest_request_beside(classes: &'static [Class]) -> u64 {
    let world = world(1, 1, SimConfig::default());
    let inside = world.clone();
    let slowest = world
        .run(move |core| {
            let world = inside.clone();
            async move {
                let rounds = Rc::new(Cell::new(0u64));
                for &class in classes {
                    let (c, world, rounds) = (core.clone(), world.clone(), rounds.clone());
                    core.spawn(class, async move {
                        loop {
                            // Compute for 3 µs, then check.
                            world.spend_ns(3_000);
                            rounds.set(rounds.get() + 1);
                            c.checkpoint().await;
                        }
                    });
                }
                let mut slowest = 0;
                for _ in 0..500 {
                    let due = core.now_ns() + 50_000;
                    core.sleep_ns(50_000).await;
                    slowest = slowest.max(core.now_ns() - due);
                }
                assert!(rounds.get() > 5_000, "the other work continues: {}", rounds.get());
                slowest
            }
        })
        .unwrap();
    slowest[0]
}

#[test]
fn background_work_costs_a_request_no_more_than_its_share_of_a_turn() {
    let slowest = slowest_request_beside(&[Class::Background, Class::Background, Class::Bulk]);
    assert!(slowest < 130_000, "a request waited {slowest} ns for background work");
}

#[test]
fn bulk_work_costs_a_request_no_more_than_its_share_of_a_turn() {
    let slowest = slowest_request_beside(&[Class::Bulk; 3]);
    assert!(slowest < 40_000, "a request waited {slowest} ns for bulk work");
}

#[test]
fn foreground_work_does_not_starve_background_work() {
    let world = world(2, 1, SimConfig::default());
    let inside = world.clone();
    world
        .run(move |core| {
            let world = inside.clone();
            async move {
                for _ in 0..8 {
                    let (c, world) = (core.clone(), world.clone());
                    core.spawn(Class::Foreground, async move {
                        loop {
                            world.spend_ns(30_000);
                            c.yield_now().await;
                        }
                    });
                }
                let c = core.clone();
                let background = core.spawn(Class::Background, async move {
                    for _ in 0..50 {
                        c.yield_now().await;
                    }
                    c.now_ns()
                });
                let end = background.await;
                // Fifty polls, each after at most one turn of foreground work.
                assert!(end < 50 * 600_000, "{end}");
            }
        })
        .unwrap();
}

#[test]
fn tasks_wait_for_exhausted_memory_and_all_of_them_get_it() {
    for seed in 0..20 {
        let limit = 64 << 10;
        let config = SimConfig { memory: limit, ..SimConfig::default() };
        let waits = world(seed, 1, config)
            .run(|core| async move {
                assert!(core.alloc_wait((64 << 10) + 1).await.is_err(), "could never be had");
                let file = open(&core).await;
                let tasks: Vec<_> = (0..50)
                    .map(|n: u64| {
                        let (c, f) = (core.clone(), file.clone());
                        core.spawn(Class::Foreground, async move {
                            let len = 512 * (1 + c.random_u64() as usize % 40);
                            // Some time out while they wait for memory.
                            let buf = if n.is_multiple_of(5) {
                                let wait = c.alloc_wait(len);
                                match timeout(&c, c.random_u64() % 200_000, wait).await {
                                    Err(Elapsed) => return,
                                    Ok(buf) => buf.unwrap(),
                                }
                            } else {
                                c.alloc_wait(len).await.unwrap()
                            };
                            assert!(c.pool().used() <= 64 << 10);
                            let (count, buf) = f.read_at(n * 512, buf).await;
                            assert_blocks(&buf[..count.unwrap()], n);
                            c.sleep_ns(c.random_u64() % 100_000).await;
                        })
                    })
                    .collect();
                for task in tasks {
                    task.await;
                }
                assert_eq!(core.pool().used(), 0);
                core.stats().memory_waits.get()
            })
            .unwrap();
        assert!(waits[0] > 10, "memory was short: {waits:?}");
    }
}

#[test]
fn calls_through_full_rings_are_all_answered_with_their_own_answer() {
    for seed in 0..10 {
        // A ring between two cores holds 256 messages; 700 concurrent calls, both ways.
        let world = world(seed, 3, SimConfig::default());
        let answered = world
            .run(|core| async move {
                let done = Rc::new(Cell::new(0u32));
                let tasks: Vec<_> = (0..700u64)
                    .map(|n| {
                        let (c, done) = (core.clone(), done.clone());
                        core.spawn(Class::Foreground, async move {
                            let (from, to) = (c.id() as u64, (n as usize) % c.cores());
                            for round in 0..4u64 {
                                let call = c.call(to, move |core| (core.id(), from, n, round));
                                if n.is_multiple_of(5) {
                                    // The answer to a dropped call is discarded, also when the next
                                    // call has its slot.
                                    let some_ns = c.random_u64() % 100_000;
                                    if let Ok(answer) = timeout(&c, some_ns, call).await {
                                        assert_eq!(answer, (to, from, n, round));
                                    }
                                } else {
                                    assert_eq!(call.await, (to, from, n, round));
                                }
                            }
                            done.set(done.get() + 1);
                        })
                    })
                    .collect();
                for task in tasks {
                    task.await;
                }
                done.get()
            })
            .unwrap();
        assert_eq!(answered, [700; 3]);
    }
}

#[test]
fn a_core_that_has_ended_still_answers_the_others() {
    world(3, 2, SimConfig::default())
        .run(|core| async move {
            if core.id() == 1 {
                core.sleep_ns(1_000_000).await;
                assert_eq!(core.call(0, |core| core.id()).await, 0);
                let task = |there: &Core| {
                    let there = there.clone();
                    async move {
                        there.sleep_ns(1_000_000).await;
                        there.id()
                    }
                };
                for core_id in [0, 1] {
                    let id = core.spawn_on(core_id, Class::Background, task).await;
                    assert_eq!(id, core_id);
                }
            }
        })
        .unwrap();
}

#[test]
fn background_reads_leave_room_for_foreground_reads() {
    let config = SimConfig { disk_depth: 40, ..SimConfig::default() };
    let world = world(4, 1, config);
    let inside = world.clone();
    world
        .run(move |core| {
            let world = inside.clone();
            async move {
                let file = open(&core).await;
                for n in 0..200u64 {
                    let (c, f) = (core.clone(), file.clone());
                    core.spawn(Class::Background, async move {
                        loop {
                            let buf = c.alloc(512).unwrap();
                            let (count, buf) = f.read_at(n * 512, buf).await;
                            assert_blocks(&buf[..count.unwrap()], n);
                        }
                    });
                }
                core.sleep_ns(1_000_000).await;
                let running = core.operations_in_flight();
                assert!(running > 100, "{running}");
                for n in 0..100u64 {
                    let begin = core.now_ns();
                    let (count, buf) = file.read_at(n * 512, core.alloc(512).unwrap()).await;
                    assert_blocks(&buf[..count.unwrap()], n);
                    assert!(world.at_the_device(0) <= 32, "background reads keep to their depth");
                    let took = core.now_ns() - begin;
                    // After 200 queued background reads at depth 32 it would take far longer than
                    // one read of the device and a turn.
                    assert!(took < 1_500_000, "{took}");
                }
            }
        })
        .unwrap();
}
