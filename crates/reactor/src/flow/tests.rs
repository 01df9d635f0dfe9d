//! The law and the board against a device with a knee: up to so many operations in flight it takes
//! them at once, beyond that they queue.

use std::sync::Arc;

use super::law::{Kind, Law};
use super::{Board, CORE_DEPTH, DEVICES, Flow, Lane, NODE_DEPTH};
use crate::driver::IoOp;

const MS: u64 = 1_000_000;
/// What the device takes for a read without a queue, in nanoseconds.
const BASE_NS: f64 = 500_000.0;

/// A device, and cores with a closed loop of requests and as much background work as is allowed.
struct World {
    knee: f64,
    now_ns: u64,
    seed: u64,
    cores: Vec<SimCore>,
}

struct SimCore {
    flow: Flow,
    requests: usize,
    background: Vec<Lane>,
    /// The last latency, in nanoseconds.
    latency_ns: f64,
}

impl World {
    fn new(cores: usize, knee: usize) -> World {
        let board = Arc::new(Board::new(cores));
        let core = |id| SimCore {
            flow: Flow::new(board.clone(), id),
            requests: 0,
            background: Vec::new(),
            latency_ns: BASE_NS,
        };
        let cores = (0..cores).map(core).collect();
        World { knee: knee as f64, now_ns: 1000 * MS, seed: 7, cores }
    }

    fn requests(&mut self, requests: &[usize]) {
        for (core, &requests) in self.cores.iter_mut().zip(requests) {
            core.requests = requests;
        }
    }

    fn in_flight(&self) -> usize {
        self.cores.iter().map(|core| core.requests + core.background.len()).sum()
    }

    fn background(&self) -> usize {
        self.cores.iter().map(|core| core.background.len()).sum()
    }

    /// Lets each core begin what it may, measure a request, and end one background operation.
    fn step(&mut self) {
        let read = read();
        for at in 0..self.cores.len() {
            let (latency_ns, now_ns) = (self.latency_ns(), self.now_ns);
            let core = &mut self.cores[at];
            if !core.background.is_empty() {
                core.background.pop();
                core.flow.end(0);
            }
            for _ in 0..2 {
                if core.flow.may_begin(0, now_ns) {
                    core.background.push(core.flow.begin(0));
                }
            }
            if core.requests > 0 {
                core.latency_ns = latency_ns;
                if core.flow.stage(0, &read, true, now_ns) == Lane::Probe(0) {
                    core.flow.submit(|| now_ns);
                    let ended_ns = now_ns + latency_ns as u64;
                    core.flow.reaped_probe(0, true, ended_ns, ended_ns);
                }
            }
        }
        self.now_ns += MS;
    }

    /// A latency at the present depth, within a third.
    fn latency_ns(&mut self) -> f64 {
        self.seed = self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let noise = 0.67 + 0.66 * (self.seed >> 40) as f64 / f64::from(1 << 24);
        BASE_NS * (self.in_flight() as f64 / self.knee).max(1.0) * noise
    }

    /// Runs `steps` and returns the mean of what is in flight, of background work alone, and of the
    /// latency in units of that without a queue.
    fn run(&mut self, steps: usize) -> (f64, f64, f64) {
        let (mut all, mut background, mut latency) = (0, 0, 0.0);
        for _ in 0..steps {
            self.step();
            all += self.in_flight();
            background += self.background();
            let asking = self.cores.iter().filter(|core| core.requests > 0);
            latency += asking.clone().map(|core| core.latency_ns).sum::<f64>()
                / (asking.count().max(1) as f64 * BASE_NS);
        }
        let steps = steps as f64;
        (all as f64 / steps, background as f64 / steps, latency / steps)
    }
}

fn read() -> IoOp {
    IoOp::Read { fd: 0, ptr: std::ptr::null_mut(), len: 4096, offset: 0 }
}

#[test]
fn background_work_fills_what_requests_leave() {
    let mut world = World::new(1, 24);
    world.requests(&[8]);
    world.run(5000);
    let (all, background, latency) = world.run(5000);
    assert!((20.0..32.0).contains(&all), "{all} in flight at a knee of 24");
    assert!(background > 12.0, "{background}");
    assert!(latency < 1.25, "{latency} times the floor");
}

#[test]
fn a_core_without_requests_gives_way_to_those_of_others() {
    let mut world = World::new(2, 24);
    world.requests(&[16, 0]);
    world.run(5000);
    let (all, background, latency) = world.run(5000);
    assert!((20.0..32.0).contains(&all), "{all} in flight at a knee of 24");
    assert!(background >= 4.0 && latency < 1.25, "{background}, {latency}");
}

#[test]
fn without_requests_background_work_has_its_whole_share() {
    let mut world = World::new(2, 8);
    world.run(100);
    assert_eq!(world.background(), 2 * CORE_DEPTH);
    world.requests(&[8, 8]);
    world.run(3000);
    assert!(world.background() <= 8, "{}", world.background());
    world.requests(&[0, 0]);
    world.run(300);
    assert_eq!(world.background(), 2 * CORE_DEPTH, "after the last request");
}

#[test]
fn requests_that_fill_the_device_do_not_starve_background_work() {
    let mut world = World::new(1, 8);
    world.requests(&[64]);
    let (_, background, _) = world.run(2000);
    assert!(background >= 1.0, "{background}");
    world.run(3000);
    let (all, background, _) = world.run(5000);
    assert!(background >= 2.0, "the floor is what requests take alone: {background}");
    assert!(all <= 64.0 * 1.35, "{all}");
}

#[test]
fn debt_gives_background_work_a_part_of_its_share() {
    let mut world = World::new(1, 8);
    world.requests(&[64]);
    world.run(2000);
    for (urgency, least) in [(0.5, 16), (1.0, 32)] {
        for _ in 0..100 {
            world.cores[0].flow.urge(urgency, world.now_ns);
            world.step();
        }
        assert!(world.background() >= least, "{urgency}: {}", world.background());
    }
    world.run(1000);
    assert!(world.background() < 32, "the debt is gone");
}

#[test]
fn a_step_of_the_load_is_answered_within_a_bounded_number_of_latencies() {
    let mut world = World::new(1, 32);
    world.requests(&[2]);
    world.run(5000);
    assert!(world.background() >= 24, "{}", world.background());
    world.requests(&[26]);
    // At most six windows of 64 latencies: each at least lowers the depth by a sixth.
    world.run(6 * 64);
    let (all, _, latency) = world.run(1000);
    assert!(all < 32.0 * 1.3 && latency < 1.3, "{all}, {latency}");
}

#[test]
fn cores_and_devices_share_the_depth_of_the_node() {
    for cores in [1, 2, 4, 16, 128] {
        let mut world = World::new(cores, 64);
        let mut all = 0;
        for core in &world.cores {
            for at in [0, 1, 0, 1] {
                core.flow.may_begin(at, 0);
            }
            for at in [0, 1] {
                while core.flow.may_begin(at, 0) {
                    core.flow.begin(at);
                    all += 1;
                }
            }
        }
        assert!(all <= NODE_DEPTH.max(2 * cores), "{cores} cores: {all}");
        assert!(all >= 2 * cores, "each core has one on each device");
        let per_core = (NODE_DEPTH / cores).min(CORE_DEPTH);
        world = World::new(cores, 64);
        world.run(100);
        assert_eq!(world.background(), cores * per_core);
    }
    let mut world = World::new(4, 48);
    world.requests(&[4, 4, 4, 4]);
    world.run(6000);
    let (all, _, latency) = world.run(4000);
    assert!((36.0..66.0).contains(&all) && latency < 1.35, "{all}, {latency}");
    let least = world.cores.iter().map(|core| core.background.len()).min();
    assert!(least >= Some(4), "{least:?}");
}

#[test]
fn devices_have_places_and_further_ones_share_the_last() {
    let board = Board::new(1);
    let places: Vec<_> = (0..DEVICES as u64 + 2).map(|device| board.place(device)).collect();
    assert_eq!(places[..DEVICES], (0..DEVICES).collect::<Vec<_>>());
    assert_eq!(places[DEVICES..], [DEVICES - 1; 2]);
    assert_eq!(board.place(2), 2, "again");
}

#[test]
fn only_small_direct_operations_are_probes_and_one_at_a_time() {
    let flow = Flow::new(Arc::new(Board::new(1)), 0);
    let large = IoOp::Read { fd: 0, ptr: std::ptr::null_mut(), len: 1 << 20, offset: 0 };
    assert_eq!(flow.stage(0, &read(), false, MS), Lane::None, "of the page cache");
    assert_eq!(flow.stage(0, &large, true, MS), Lane::None);
    assert_eq!(flow.stage(0, &IoOp::SyncData { fd: 0 }, true, MS), Lane::None);
    assert_eq!(flow.stage(0, &read(), true, MS), Lane::Probe(0));
    assert_eq!(flow.stage(0, &read(), true, MS), Lane::None, "one at a time");
    assert_eq!(flow.stage(1, &read(), true, MS), Lane::Probe(1), "on each device");
    flow.submit(|| 2 * MS);
    flow.reaped_probe(0, true, 3 * MS, 3 * MS);
    assert_eq!(flow.stage(0, &read(), true, 3 * MS), Lane::None, "not at once");
    assert_eq!(flow.stage(0, &read(), true, 4 * MS), Lane::Probe(0));
}

#[test]
fn a_busy_core_takes_the_middle_of_the_times_at_which_a_read_may_have_ended() {
    let flow = Flow::new(Arc::new(Board::new(1)), 0);
    for at in 0..64 {
        let from_ns = (10 + 10 * at) * MS;
        assert_eq!(flow.stage(0, &read(), true, from_ns), Lane::Probe(0));
        flow.submit(|| from_ns);
        flow.reaped_probe(0, true, from_ns + MS, from_ns + 3 * MS);
    }
    assert_eq!(flow.report(0)[0].read_ns, 2 * MS as u32);
    flow.stage(0, &read(), true, 1000 * MS);
    flow.submit(|| 1000 * MS);
    flow.reaped_probe(0, false, 5000 * MS, 5000 * MS);
    assert_eq!(flow.report(0)[0].read_ns, 2 * MS as u32, "an error has no latency");
}

#[test]
fn a_latency_within_a_turn_of_the_floor_lowers_nothing() {
    let mut law = Law::new(32);
    for at in 0..2000u64 {
        let latency_ns = if at % 5 == 0 { 90_000 } else { 20_000 + at % 60_000 };
        law.sample(Kind::Read, latency_ns, at * MS / 4, at * MS / 4);
    }
    assert_eq!(law.last_depth(), 32);
}

#[test]
fn the_depth_is_always_within_the_share() {
    let mut world = World::new(1, 1);
    let mut random = |below: u64| {
        world.latency_ns();
        (world.seed >> 20) % below
    };
    for most in 1..64 {
        let mut law = Law::new(most);
        let mut now_ns = MS;
        for _ in 0..3000 {
            now_ns += random(4 * MS);
            let kind = if random(3) > 0 { Kind::Read } else { Kind::Write };
            let bits = random(34);
            let latency_ns = random(1 << bits);
            let held_ns = if random(2) > 0 { now_ns } else { 0 };
            law.sample(kind, latency_ns, now_ns, held_ns);
            assert!((1..=most).contains(&law.last_depth()));
            assert!(law.depth(now_ns).is_some_and(|depth| (1..=most).contains(&depth)));
            assert_eq!(law.depth(now_ns + 100 * MS), None, "requests have ended");
        }
    }
}
