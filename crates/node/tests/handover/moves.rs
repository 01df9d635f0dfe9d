//! A guest whose disk moves from image to image, while its node is killed or the power is cut at
//! any step, and between two upgrades.

use std::cell::RefCell;
use std::rc::Rc;

use reactor::sim::{Crash, Fault, FaultKind, SimConfig, World};
use sim::guest::{END_NS, Guest, QUEUES, SECTOR, SECTORS, with_disk_at};

use super::{Machine, Outside, Running};

/// The images between which the disk moves.
const IMAGES: [&str; 2] = ["/disks/a.img", "/disks/b.img"];

/// What has happened in a world.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Moves that were begun, that moved the disk, and that were aborted.
    pub begun: u64,
    pub moved: u64,
    pub aborted: u64,
    /// Nodes that were killed while a disk was being moved, and those of them after which the disk
    /// was at its new place.
    pub killed: u64,
    pub killed_after: u64,
    pub power_cuts: u64,
    pub upgrades: u64,
    pub checked_sectors: u64,
}

impl Outside {
    /// The image that the state directory names.
    fn image(&self) -> &'static str {
        let uri = self.machines[0].spec.borrow().uri.clone();
        IMAGES.into_iter().find(|image| uri.contains(image)).expect("one of the images")
    }

    /// Moves the disk to the other image, and disturbs that.
    async fn move_disk(&mut self, report: &RefCell<Report>) {
        let here = self.image();
        let there = IMAGES[usize::from(here == IMAGES[0])];
        let uri = self.machines[0].spec.borrow().uri.replace(here, there);
        let node = self.nodes.iter().find(|node| node.serves()).expect("somebody serves");
        let (process, told) = (node.process.clone(), node.told.clone());
        let finish = self.rng.coin();
        if self.rng.below(3) == 0 {
            let slow = FaultKind::Stall(1_000_000..50_000_000);
            self.world.add_fault(Fault::new(slow).on(there).chance(100_000));
        }
        told.moving.set(true);
        told.begin_move.replace(Some(("a", uri, finish)));
        report.borrow_mut().begun += 1;
        let kills = self.rng.below(3) == 0;
        if kills {
            let most = self.rng.below(12);
            process.kill_after(self.rng.below(1 << most));
        }
        for _ in 0..self.rng.below(80) {
            self.step().await;
        }
        let aborts = self.rng.below(4) == 0;
        if !finish || aborts {
            told.end_move.set(Some(!aborts));
        }
        let ended = process.clone();
        self.until("the move ends", |_| !told.moving.get() || ended.has_ended()).await;
        self.world.heal();
        process.spare();
        let mut report = report.borrow_mut();
        if process.has_ended() {
            assert!(kills, "the node has ended");
            report.killed += 1;
            report.killed_after += u64::from(self.image() == there);
        } else if self.image() == there {
            report.moved += 1;
        } else {
            report.aborted += u64::from(aborts);
        }
    }

    async fn live_and_move(&mut self, report: &RefCell<Report>) {
        for _ in 0..2 + self.rng.below(4) {
            self.since_ns = self.core.now_ns();
            if !self.nodes.iter().any(Running::serves) {
                self.until("all have ended", |outside| outside.nodes.is_empty()).await;
                self.start().await;
                self.until("it serves", |outside| outside.nodes[0].serves()).await;
            }
            for _ in 0..self.rng.below(60) {
                self.step().await;
            }
            self.since_ns = self.core.now_ns();
            if !self.nodes.iter().any(Running::serves) {
                // It was killed by an earlier order.
                continue;
            }
            if self.rng.below(5) == 0 {
                self.upgrade().await;
                report.borrow_mut().upgrades += 1;
            } else {
                self.move_disk(report).await;
            }
        }
        self.since_ns = self.core.now_ns();
        self.machines[0].guest.borrow_mut().ends = true;
        let end_ns = self.core.now_ns() + END_NS + 2 * super::STALL_MAX_NS;
        while self.in_flight() > 0 {
            if self.nodes.is_empty() {
                self.start().await;
            }
            assert!(self.core.now_ns() < end_ns, "requests are lost");
            self.step().await;
        }
        self.nodes.iter().for_each(|node| node.told.stop.set(true));
        self.until("all have ended", |outside| outside.nodes.is_empty()).await;
    }
}

/// Plays the history of a seed.
///
/// # Panics
/// When something was lost, done twice, or read wrongly.
pub fn moves(seed: u64) -> Report {
    let world = World::new(seed, 1, SimConfig::default());
    let mut rng = world.rng();
    let (guest, uri): (Rc<RefCell<Guest>>, String) = with_disk_at(&world, &mut rng, IMAGES[0]);
    // Something else is there before.
    world.add_file(IMAGES[1], vec![0xEE; (SECTORS * SECTOR) as usize]);
    let spec = format!("name=a uri={uri} socket=/a.sock queues={QUEUES}");
    let spec = Rc::new(RefCell::new(spec.parse().expect("a disk")));
    let report = Rc::<RefCell<Report>>::default();
    let boots = 1 + rng.below(3);
    for boot in 1..=boots {
        if boot < boots {
            world.crash_at(Crash::PowerCut, 1..1500);
        }
        let run = world.run(|core| {
            let machine = Machine::new(&guest, spec.clone());
            let told_cache = Some(true);
            let mut outside = Outside { told_cache, ..Outside::new(core, &world, vec![machine]) };
            let report = report.clone();
            async move { outside.live_and_move(&report).await }
        });
        world.heal();
        let mut guest = guest.borrow_mut();
        guest.report.processes += 1;
        guest.ends = false;
        match run.as_ref().map_err(|failure| &failure.kind) {
            Ok(_) => {}
            Err(reactor::sim::FailureKind::Crash(Crash::PowerCut)) => {
                report.borrow_mut().power_cuts += 1;
                let uri = spec.borrow().uri.clone();
                let image = IMAGES.into_iter().find(|image| uri.contains(image));
                let bytes = world.bytes(image.expect("one of the images")).expect("the image");
                guest.wakes_up(&bytes);
            }
            Err(other) => panic!("{other:?}\n{}", world.newest_events()),
        }
    }
    let mut report = report.borrow().clone();
    report.checked_sectors = guest.borrow().report.checked_sectors;
    report
}
