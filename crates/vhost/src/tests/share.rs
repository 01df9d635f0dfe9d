//! Rings of two disks on one core of a simulated world: one submits as much as it can, the other
//! one sector at a time. The test counts rounds of the core's pollers, so it does not depend on the
//! machine's speed.

use std::sync::Arc;

use bdev::Bdev;
use reactor::sim::{SimConfig, World};
use reactor::{Class, Core, JoinHandle};

use super::guest::*;
use crate::target::queue::{self, Command, RingEnd, RingHandle, Start};
use crate::target::share::{DiskActivity, QUANTUM};
use crate::target::trouble::Trouble;
use crate::*;

const REQUESTS: u64 = 16;
/// Data descriptors of each request, of 512 KiB.
const PARTS: u64 = 24;
const PART: u64 = 512 << 10;

fn start(
    core: &Core,
    name: &str,
    guest: &Guest,
    device: &Bdev,
) -> (RingHandle, JoinHandle<RingEnd>) {
    start_with(core, name, guest, device, &Arc::default(), None)
}

/// Starts a ring of a guest that is polled on this core.
pub(super) fn start_with(
    core: &Core,
    name: &str,
    guest: &Guest,
    device: &Bdev,
    trouble: &Arc<Trouble>,
    inflight: Option<InflightArea>,
) -> (RingHandle, JoinHandle<RingEnd>) {
    start_waiting(core, name, guest, device, trouble, inflight, false)
}

/// The same; the ring may have to wait for the image's lock.
pub(super) fn start_waiting(
    core: &Core,
    name: &str,
    guest: &Guest,
    device: &Bdev,
    trouble: &Arc<Trouble>,
    inflight: Option<InflightArea>,
    waits_for_lock: bool,
) -> (RingHandle, JoinHandle<RingEnd>) {
    let (handle, commands) = queue::command_queue();
    let start = Start {
        work: 0,
        disk_name: name.into(),
        home: core.id(),
        index: 0,
        setup: guest.setup(),
        memory: Arc::new(guest.memory.clone()),
        disk: Disk { capacity_sectors: 64 << 11, ..disk() },
        inflight,
        log: None,
        kick: None,
        call: None,
        err: None,
        polled: true,
        fua: false,
        enabled: true,
        broken: false,
        hold: None,
        waits_for_lock,
        device: device.clone(),
        activity: DiskActivity::register(&core.local()),
        stats: Arc::default(),
        limits: Arc::default(),
        log_limits: Arc::default(),
        trouble: trouble.clone(),
    };
    (handle, core.spawn(Class::Control, queue::run(core.clone(), start, commands)))
}

/// Adds a write of 12 MiB, all of it from the same memory.
fn attack(guest: &mut Guest, seq: u64) {
    let head = guest.next_head(true, 1).unwrap();
    guest.header(head, 1, 0);
    let [header, _, status] = Guest::parts(head, 1);
    let mut parts = vec![header];
    parts.extend((0..PARTS).map(|_| (GPA, PART as u32, 0)));
    parts.push(status);
    assert!(guest.offer(seq, &parts, true));
}

/// Without shares all of it would be copied in the first round, before the neighbour's request.
#[test]
fn a_guest_that_asks_for_192_mib_gets_one_quantum_in_a_round_and_its_neighbour_is_served_in_each() {
    for form in [Form::Split, Form::Packed] {
        World::new(1, 1, SimConfig::default())
            .run(move |core| async move {
                let device = Bdev::open(&core, "mem:64M").await.unwrap();
                let guest = || {
                    Guest::new(
                        form,
                        128,
                        if form == Form::Packed { 0x8000 } else { 0 },
                        F_INDIRECT_DESC,
                    )
                };
                let (mut attacker, mut neighbour) = (guest(), guest());
                let mut rings = vec![
                    start(&core, "a", &attacker, &device),
                    start(&core, "b", &neighbour, &device),
                ];
                core.yield_now().await;
                (0..REQUESTS).for_each(|seq| attack(&mut attacker, seq));
                let begin = core.rounds();
                let (mut done, mut served, mut longest) = (0, 0, 0);
                let mut asked = None;
                while done < REQUESTS {
                    for (_, head, len) in attacker.collect() {
                        assert_eq!((attacker.status(head), len), (0, 1));
                        done += 1;
                    }
                    if !neighbour.collect().is_empty() {
                        served += 1;
                        longest = longest.max(core.rounds() - asked.take().unwrap());
                    }
                    if asked.is_none() {
                        assert!(neighbour.add(2 * served, false));
                        asked = Some(core.rounds());
                    }
                    core.yield_now().await;
                }
                let (rounds, quanta) = (core.rounds() - begin, REQUESTS * PARTS * PART / QUANTUM);
                assert!(rounds >= quanta - 1, "{quanta} quanta in {rounds} rounds");
                assert!(rounds <= 3 * quanta, "{quanta} quanta in {rounds} rounds");
                // This task runs once per turn, which has four rounds.
                assert!(
                    served >= quanta / 16 && longest <= 12,
                    "{served} served, {longest} rounds"
                );
                for (handle, _) in &mut rings {
                    handle.send(Command::Stop);
                }
                for (_, ended) in rings {
                    assert!(!ended.await.broken);
                }
            })
            .unwrap();
    }
}
