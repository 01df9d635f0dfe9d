//! The process ends between any two stores into shared memory, and another takes over: no request
//! is lost, none is completed twice, and unfinished requests are executed again in the guest's
//! order before anything new. The guest looks at its ring only when it is interrupted.

use std::collections::BTreeSet;

use super::guest::*;
use crate::memory::faults::crash;
use crate::*;

/// One life of the target: pop, let the device finish some requests in any order, complete; until a
/// crash, or until all requests of the guest are done.
struct Case {
    form: Form,
    num: u16,
    start: u16,
    batch: usize,
    indirect: bool,
    requests: u64,
    /// Whether the guest runs between the crash and the next start.
    busy_guest: bool,
    seed: u64,
}

struct World {
    guest: Guest,
    region: InflightRegion,
    /// Requests that the device executed at least once.
    executed: BTreeSet<u64>,
    /// The number of the next request.
    next: u64,
    done: BTreeSet<u64>,
    lives: u64,
    /// The guest has an interrupt.
    interrupted: bool,
    /// Mutant: a target interrupts nobody when it starts.
    starts_silently: bool,
}

impl World {
    fn new(case: &Case) -> World {
        let guest = Guest::new(case.form, case.num, case.start, F_INDIRECT_DESC);
        let region = InflightRegion::create(1, case.num, case.form).unwrap().0;
        World {
            guest,
            region,
            executed: BTreeSet::new(),
            next: 0,
            done: BTreeSet::new(),
            lives: 0,
            interrupted: false,
            starts_silently: false,
        }
    }

    fn guest_runs(&mut self, case: &Case) {
        let done = match std::mem::take(&mut self.interrupted) {
            true => self.guest.collect(),
            false => Vec::new(),
        };
        for (seq, head, len) in done {
            assert!(self.executed.contains(&seq), "{seq} was completed before it was executed");
            assert!(self.done.insert(seq), "{seq} was completed twice");
            assert_eq!(self.guest.status(head), 0, "status of {seq}");
            assert_eq!(len, if seq & 1 == 0 { 513 } else { 1 });
        }
        while self.next < case.requests && self.guest.add(self.next, case.indirect) {
            self.next += 1;
        }
    }

    /// Runs the target until all is done, or it dies. Returns whether it died.
    fn target_lives(&mut self, case: &Case) -> bool {
        // The device finishes in a different order in each life.
        self.lives += 1;
        let mut dice = Dice(case.seed.wrapping_mul(0x9e37_79b9) + self.lives);
        // The requests that the guest waits for when the target starts, in order. Some may be
        // completed without the guest having seen it.
        let region = self.region.queue(0);
        let started = Ring::start(&self.guest.memory, &self.guest.setup(), region);
        if crash::happened() {
            return true;
        }
        let (mut ring, recovered) = started.unwrap();
        self.interrupted |= ring.should_signal() && !self.starts_silently;
        let mut last = None;
        let mut tags = Vec::new();
        let mut resubmits = recovered.resubmits;
        while self.done.len() < case.requests as usize {
            if crash::happened() {
                return true;
            }
            crash::not_during(|| self.guest_runs(case));
            let before = tags.len();
            ring.pop(&self.guest.memory, &disk(), case.batch, &mut tags).unwrap();
            for &tag in &tags[before..] {
                let seq = ring.request(tag).offset / 512;
                assert!(
                    !self.done.contains(&seq),
                    "{seq} is executed again after it was completed"
                );
                assert!(last < Some(seq), "{seq} comes after {last:?}");
                last = Some(seq);
                resubmits = resubmits.saturating_sub(1);
            }
            if crash::happened() {
                return true;
            }
            assert!(
                self.interrupted || !tags.is_empty() || self.done.len() == case.requests as usize,
                "the guest waits for an interrupt"
            );
            let mut finished = Vec::new();
            let most = tags.len().min(case.batch);
            let count = if dice.roll(2) == 0 { dice.roll(most + 1) } else { most };
            for _ in 0..count {
                let tag = tags.swap_remove(dice.roll(tags.len()));
                self.executed.insert(ring.request(tag).offset / 512);
                finished.push(Finished { tag, status: Status::Ok });
            }
            ring.complete(&self.guest.memory, None, &finished);
            if crash::happened() {
                return true;
            }
            self.interrupted |= ring.should_signal();
        }
        assert_eq!(resubmits, 0);
        false
    }
}

/// Runs a case with a crash after the given number of stores of each life. Returns whether all
/// crashes happened.
fn run(case: &Case, crashes: &[u64]) -> bool {
    run_in(World::new(case), case, crashes)
}

fn run_in(mut world: World, case: &Case, crashes: &[u64]) -> bool {
    world.guest_runs(case);
    for &stores in crashes {
        crash::after(stores);
        let died = world.target_lives(case);
        crash::over();
        if !died {
            return false;
        }
        if case.busy_guest {
            world.guest_runs(case);
        }
    }
    assert!(!world.target_lives(case));
    assert!(world.guest.pending.is_empty());
    true
}

fn cases(batch: usize) -> impl Iterator<Item = Case> {
    let num = (batch as u16 * 3).next_power_of_two().max(8);
    let starts = move |form| match form {
        Form::Split => [0, 65_534_u16.wrapping_sub(batch as u16)],
        Form::Packed => [0x8000, num - 2],
    };
    [Form::Split, Form::Packed].into_iter().flat_map(move |form| {
        starts(form).into_iter().flat_map(move |start| {
            [false, true].into_iter().map(move |busy_guest| Case {
                form,
                num,
                start,
                batch,
                indirect: batch.is_multiple_of(2) && busy_guest,
                requests: 3 * batch as u64 + 5,
                busy_guest,
                seed: batch as u64,
            })
        })
    })
}

/// Crashes after every number of stores; in larger batches after every `step`-th.
fn crash_everywhere(batches: std::ops::RangeInclusive<usize>, step: u64) {
    for batch in batches {
        for case in cases(batch) {
            let mut stores = 1 + batch as u64 % step;
            while run(&case, &[stores]) {
                stores += step;
            }
            assert!(stores > 20, "a life has more stores than {stores}");
        }
    }
}

#[test]
fn any_crash_in_a_small_batch_is_recovered() {
    crash_everywhere(1..=8, 1);
}

#[test]
fn crashes_in_large_batches_are_recovered() {
    for batch in [12, 16, 24, 31, 32, 33, 48, 63, 64] {
        crash_everywhere(batch..=batch, 13);
    }
}

/// The second process dies too, at any store of its recovery or shortly after it; then a third one
/// starts.
#[test]
fn crashes_during_recovery_are_recovered() {
    for batch in 1..=5 {
        for case in cases(batch) {
            let mut first = 1;
            while run(&case, &[first]) {
                for second in (1..40).chain((40..400).step_by(29)) {
                    if !run(&case, &[first, second]) {
                        break;
                    }
                    run(&case, &[first, second, 1 + (first + second) % 23]);
                }
                first += 7;
            }
        }
    }
}

/// Who dies between a completion and its interrupt leaves a guest that waits for it.
#[test]
fn an_interrupt_that_is_lost_at_a_restart_is_noticed() {
    let waits = |case: &Case, stores: u64| {
        let world = World { starts_silently: true, ..World::new(case) };
        let run = std::panic::AssertUnwindSafe(|| run_in(world, case, &[stores]));
        let waits = std::panic::catch_unwind(run).is_err();
        crash::over();
        waits
    };
    for form in [Form::Split, Form::Packed] {
        let mut cases = (1..=4).flat_map(cases).filter(|case| case.form == form);
        assert!(cases.any(|case| (1..200).any(|stores| waits(&case, stores))), "{form:?}");
    }
}
