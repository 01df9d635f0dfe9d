//! Faults of the disk.

use reactor::sim::{Access, Fault, FaultKind, Rng, World};

use super::DIR;

/// Faults of one process.
pub(super) fn add_faults(world: &World, rng: &mut Rng) {
    let error = |errno| Fault::new(FaultKind::Error(errno));
    // Once, or for a while; everywhere, or on one kind of file.
    let times = [1, 1, 2, 3, 12, 1_000_000][rng.index(6)];
    let place = ["", ".log", ".log", ".sst", "MANIFEST", "CURRENT.dbtmp", DIR][rng.index(7)];
    let on = |fault: Fault, after| {
        let fault = fault.after(after).times(times);
        match place {
            "" => fault,
            "MANIFEST" => fault.within("MANIFEST-"),
            place => fault.on(place),
        }
    };
    let after = rng.below(if place.is_empty() { 60 } else { 20 });
    match rng.below(8) {
        // A log fails, and so do tables for a while.
        6 | 7 => {
            let log = if rng.coin() { Access::Sync } else { Access::Write };
            world.add_fault(error(5).of(log).on(".log").after(after).times(1));
            let table = match rng.below(3) {
                0 => error(5).of(Access::Write).on(".sst"),
                1 => error(5).of(Access::Sync).on(".sst"),
                _ => Fault::new(FaultKind::NameError(24)).on(".sst"),
            };
            world.add_fault(table.times(1 + rng.below(12)));
        }
        // The device is gone for a while.
        5 => {
            for access in [Access::Write, Access::Sync] {
                world.add_fault(error(5).of(access).after(after).times(1_000_000));
            }
            world.add_fault(Fault::new(FaultKind::NameError(5)).after(after).times(1_000_000));
        }
        // Some system calls find the disk full although there is space.
        0 => world.add_fault(on(error(28).of(Access::Write), after)),
        1 => world.add_fault(on(error(5).of(Access::Sync), after)),
        2 => world.add_fault(on(error(5).of(Access::Write), after)),
        3 => world.add_fault(on(error(12).of(Access::Write), after)),
        _ => world.add_fault(on(Fault::new(FaultKind::NameError(5)), after)),
    }
    if rng.coin() {
        world.add_fault(on(error(5).of(Access::Sync), 0).chance(200_000));
        world.add_fault(on(Fault::new(FaultKind::NameError(5)), 0).chance(100_000));
    }
    world.add_fault(Fault::new(FaultKind::Short).of(Access::Write).chance(20_000));
    world.add_fault(Fault::new(FaultKind::Stall(0..5_000_000)).of(Access::Sync).chance(20_000));
}

/// Blob files that fail, once or for a while.
pub(super) fn add_blob_faults(world: &World, rng: &mut Rng) {
    let access = if rng.below(3) == 0 { Access::Write } else { Access::Sync };
    let fault = Fault::new(FaultKind::Error([5, 28][rng.index(2)])).of(access).on(".blob");
    let times = [1, 1, 3, 1_000_000][rng.index(4)];
    world.add_fault(fault.after(rng.below(12)).times(times));
}

/// A device that now and then stalls for a second, transfers less than requested, and fails one
/// read: nobody may notice more than the time.
pub(super) fn add_roughness(world: &World, rng: &mut Rng) {
    for access in [Access::Read, Access::Write, Access::Sync] {
        let stall = Fault::new(FaultKind::Stall(500_000_000..1_500_000_000)).of(access);
        world.add_fault(stall.after(rng.below(200)).times(1 + rng.below(3)));
    }
    world.add_fault(Fault::new(FaultKind::Short).chance(20_000));
    // A read that fails is repeated once, so no more than one may fail.
    world.add_fault(Fault::new(FaultKind::Error(5)).after(rng.below(150)).times(1));
}
