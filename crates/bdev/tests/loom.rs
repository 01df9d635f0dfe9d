//! The loom proofs of the shared bitmaps, like those of the reactor (its `tests/loom.rs`). Run by
//! `scripts/loom.sh`; empty in a normal build.
#![cfg(loom)]
#![allow(dead_code, reason = "the modules are included whole")]

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64 as Data, Ordering::Relaxed};
use loom::thread;
use loomable::proof::{find_every_mutant, list_is_complete, prove};

#[path = "../src/layers/marks.rs"]
mod marks;

#[path = "../src/devices/pages.rs"]
mod pages;

use marks::Marks;
use pages::Pages;

/// Each mutation site, and the scenario that detects it.
const MUTANTS: &[(&str, &str)] = &[
    ("marks.no_begin", "a_writer_may_die_at_any_instant"),
    ("marks.no_end", "no_completed_write_is_missed"),
    ("marks.end_unfenced", "no_completed_write_is_missed"),
    ("marks.take_unfenced", "no_completed_write_is_missed"),
    ("marks.clear_first", "a_copier_may_die_at_any_instant"),
    ("marks.claim_unfenced", "a_copy_and_a_mirrored_write_leave_the_same"),
    ("marks.take_claimed", "a_copy_and_a_mirrored_write_leave_the_same"),
    ("marks.claims_are_shared", "two_mirrored_writes_leave_the_same"),
    ("pages.mark_unfenced", "discarded_data_does_not_come_back"),
    ("pages.clear_unfenced", "discarded_data_does_not_come_back"),
];

struct Disk {
    dirty: [loomable::AtomicU64; 1],
    taken: [loomable::AtomicU64; 1],
    claimed: [loomable::AtomicU64; 1],
    data: Data,
    /// The target of a copy with mirrored writes.
    target: Data,
    light: bool,
}

impl Disk {
    fn new(dirty: u64, light: bool) -> Arc<Disk> {
        let word = loomable::AtomicU64::new;
        let (dirty, taken, claimed) = ([word(dirty)], [word(0)], [word(0)]);
        let (data, target) = (Data::new(0), Data::new(9));
        Arc::new(Disk { dirty, taken, claimed, data, target, light })
    }

    fn marks(&self) -> Marks<'_> {
        // Loom's fences are the same.
        let Disk { dirty, taken, claimed, light, .. } = self;
        Marks { dirty, taken, claimed, light: *light }
    }

    /// A write that is mirrored if it can be.
    fn mirror(&self, value: u64) {
        if self.marks().claim(0, 0) {
            self.data.store(value, Relaxed);
            self.target.store(value, Relaxed);
            self.marks().release(0, 0);
        } else {
            self.write(value);
        }
    }

    /// Copies the granule to the target, if it is marked.
    fn copy_to_target(&self) {
        let bits = self.marks().take(0, || {});
        if bits & 1 != 0 {
            self.target.store(self.data.load(Relaxed), Relaxed);
        }
        self.marks().finish(0, bits);
    }

    /// Writes the data of the granule.
    fn write(&self, value: u64) {
        self.marks().begin(0, 0);
        self.data.store(value, Relaxed);
        self.marks().end(&[(0, 0)]);
    }

    /// Takes the mark of the granule and copies its data, if it is marked.
    fn copy(&self, copied: &mut u64) {
        let bits = self.marks().take(0, || {});
        if bits & 1 != 0 {
            *copied = self.data.load(Relaxed);
        }
        self.marks().finish(0, bits);
    }
}

/// Runs something on a thread of its own.
fn beside(disk: &Arc<Disk>, run: impl FnOnce(&Disk) + 'static) -> thread::JoinHandle<()> {
    let disk = disk.clone();
    thread::spawn(move || run(&disk))
}

/// Proves a scenario that begins without marks, for both kinds of rows.
fn prove_both(name: &str, scenario: fn(Arc<Disk>)) {
    for light in [false, true] {
        prove(name, None, move || scenario(Disk::new(0, light)));
    }
}

#[test]
fn no_completed_write_is_missed() {
    prove_both("no_completed_write_is_missed", |disk| {
        let writer = beside(&disk, |disk| disk.write(1));
        let mut copied = 0;
        disk.copy(&mut copied);
        // A neighbour in the same word.
        match disk.light {
            true => disk.marks().end(&[(1, 1)]),
            false => disk.marks().begin(1, 1),
        }
        disk.copy(&mut copied);
        writer.join().unwrap();
        disk.copy(&mut copied);
        assert_eq!(copied, 1);
    });
}

/// Of two writers to a granule, one may see the bit that the other has set.
#[test]
fn no_write_of_two_is_missed() {
    prove_both("no_write_of_two_is_missed", |disk| {
        let other = beside(&disk, |disk| {
            disk.marks().begin(0, 0);
            disk.marks().end(&[(0, 0)]);
        });
        let writer = beside(&disk, |disk| disk.write(1));
        let mut copied = 0;
        disk.copy(&mut copied);
        other.join().unwrap();
        writer.join().unwrap();
        disk.copy(&mut copied);
        assert_eq!(copied, 1);
    });
}

#[test]
fn a_copy_and_a_mirrored_write_leave_the_same() {
    prove_both("a_copy_and_a_mirrored_write_leave_the_same", |disk| {
        let writer = beside(&disk, |disk| disk.mirror(1));
        // A write to another block of the granule.
        disk.marks().begin(0, 0);
        disk.marks().end(&[(0, 0)]);
        disk.copy_to_target();
        writer.join().unwrap();
        disk.copy_to_target();
        assert_eq!(disk.data.load(Relaxed), 1);
        assert_eq!(disk.target.load(Relaxed), 1);
    });
}

#[test]
fn two_mirrored_writes_leave_the_same() {
    prove_both("two_mirrored_writes_leave_the_same", |disk| {
        let other = beside(&disk, |disk| disk.mirror(1));
        disk.mirror(2);
        other.join().unwrap();
        disk.copy_to_target();
        assert_eq!(disk.target.load(Relaxed), disk.data.load(Relaxed));
    });
}

#[test]
fn discarded_data_does_not_come_back() {
    prove("discarded_data_does_not_come_back", None, || {
        let bits = Arc::new([loomable::AtomicU64::new(1)]);
        let page = Arc::new(Data::new(1));
        let writer = {
            let (bits, page) = (bits.clone(), page.clone());
            thread::spawn(move || {
                page.store(2, Relaxed);
                Pages(&*bits).mark(0, 0);
            })
        };
        Pages(&*bits).clear(0, 0);
        page.store(0, Relaxed);
        writer.join().unwrap();
        // The data read now, and after a write to another block of the page.
        let read = || if Pages(&*bits).run(0, 0).0 { page.load(Relaxed) } else { 0 };
        let before = read();
        Pages(&*bits).mark(0, 0);
        assert_eq!(before, read());
    });
}

#[test]
fn a_writer_may_die_at_any_instant() {
    for steps in 0..=3 {
        prove("a_writer_may_die_at_any_instant", None, move || {
            let disk = Disk::new(0, false);
            let writer = beside(&disk, move |disk| {
                let write: [&dyn Fn(); 3] =
                    [&|| disk.marks().begin(0, 0), &|| disk.data.store(1, Relaxed), &|| {
                        disk.marks().end(&[(0, 0)])
                    }];
                write[..steps].iter().for_each(|step| step());
            });
            writer.join().unwrap();
            let mut copied = 0;
            disk.copy(&mut copied);
            assert_eq!(copied, disk.data.load(Relaxed));
        });
    }
}

#[test]
fn a_copier_may_die_at_any_instant() {
    prove("a_copier_may_die_at_any_instant", None, || {
        let disk = Disk::new(1, false);
        let taker = beside(&disk, |disk| _ = disk.marks().take(0, || {}));
        // A process that reads the rows after the taker has died finds the bit in one of them. (It
        // reads with an OR of zero, because loom does not try a plain load in every position.)
        let looker = beside(&disk, |disk| {
            let dirty = disk.dirty[0].fetch_or(0, loomable::Ordering::AcqRel);
            let unfinished = disk.taken[0].fetch_or(0, loomable::Ordering::AcqRel);
            assert!(dirty == 1 || unfinished == 1);
        });
        looker.join().unwrap();
        taker.join().unwrap();
        assert_eq!(disk.marks().unfinished(0), 1);
    });
}

#[test]
fn every_mutant_is_found() {
    find_every_mutant(MUTANTS);
}

#[test]
fn the_list_of_mutants_is_complete() {
    list_is_complete(
        MUTANTS,
        &[include_str!("../src/layers/marks.rs"), include_str!("../src/devices/pages.rs")],
    );
}
