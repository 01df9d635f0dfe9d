//! Disks of which nodes die: a request or a message that kills a node is there again for the next
//! one, and would kill all of them.
//!
//! A node's cores note for which disk they are working ([`reactor::work_page`]), so a death by the
//! node's own doing (a fault, a panic) can be laid at a disk. Its work was not finished then, so
//! the next node begins with it. A disk that has as many deaths as one of the [`LIMITS`] allows
//! *stands still*: nodes do not open it until an operator lets it go on. Its front end's connection
//! stays here, and waits.
//!
//! Whether requests were completed between two deaths does not matter: a guest must not be able to
//! end the node again and again because it sends good requests, too.

use std::cell::RefCell;
use std::collections::BTreeMap;

/// How many deaths within which time make a disk stand still. The second limit is for a guest that
/// takes its time: each death disturbs all other disks.
const LIMITS: [(usize, u64); 2] = [(3, 10_000_000_000), (5, 3_600_000_000_000)];
const LONGEST_NS: u64 = LIMITS[1].1;

/// The disks of which nodes have died, by name.
#[derive(Default)]
pub(super) struct Poison {
    /// When they died of a disk that is served.
    deaths: RefCell<BTreeMap<String, Vec<u64>>>,
    /// Why a disk stands still.
    still: RefCell<BTreeMap<String, String>>,
}

impl Poison {
    /// With the disks that stand still.
    pub fn of(still: BTreeMap<String, String>) -> Poison {
        Poison { still: RefCell::new(still), ..Poison::default() }
    }

    /// The disks that stand still, and why.
    pub fn all(&self) -> BTreeMap<String, String> {
        self.still.borrow().clone()
    }

    /// Notes a death. Returns why the disk stands still from now on, if it does.
    pub fn died_of(&self, disk: &str, signal: i32, now_ns: u64) -> Option<String> {
        let mut all = self.deaths.borrow_mut();
        let deaths = all.entry(disk.to_owned()).or_default();
        deaths.push(now_ns);
        let age_ns = |death_ns: u64| now_ns.saturating_sub(death_ns);
        deaths.retain(|death_ns| age_ns(*death_ns) < LONGEST_NS);
        let reached = |(most, within_ns): &(usize, u64)| {
            let nth = deaths.len().checked_sub(*most);
            nth.is_some_and(|nth| age_ns(deaths[nth]) < *within_ns)
        };
        let (times, within_ns) = LIMITS.into_iter().find(reached)?;
        let within_s = within_ns / 1_000_000_000;
        all.remove(disk);
        let why = format!(
            "disk {disk} stands still: the node died {times} times within {within_s} s while it worked for \
             it, the last time by signal {signal}; `millrace disk resume {disk}` lets it try again"
        );
        self.still.borrow_mut().insert(disk.to_owned(), why.clone());
        Some(why)
    }

    /// Why a disk stands still, if it does.
    pub fn stands_still(&self, disk: &str) -> Option<String> {
        self.still.borrow().get(disk).cloned()
    }

    /// Lets a disk begin anew.
    pub fn forget(&self, disk: &str) {
        self.deaths.borrow_mut().remove(disk);
        self.still.borrow_mut().remove(disk);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_stands_still_after_three_deaths_in_ten_seconds() {
        let poison = Poison::default();
        let died = |disk: &str, s: u64| poison.died_of(disk, 6, s * 1_000_000_000).is_some();
        assert!(!died("a", 100) && !died("a", 109) && !died("b", 109));
        // The first one was too long ago.
        assert!(!died("a", 110));
        assert!(died("a", 118));
        assert!(poison.stands_still("a").unwrap().contains("3 times within 10 s"));
        assert_eq!(poison.stands_still("b"), None);
        let next = Poison::of(poison.all());
        next.forget("a");
        assert_eq!(next.stands_still("a"), None);
        assert!(next.died_of("a", 6, 119).is_none());
    }

    #[test]
    fn a_disk_stands_still_after_five_deaths_in_an_hour() {
        let poison = Poison::default();
        let died = |s: u64| poison.died_of("a", 6, s * 1_000_000_000);
        for s in [0, 5, 1000, 2000] {
            assert_eq!(died(s), None);
        }
        // The first one was too long ago.
        assert_eq!(died(3600), None);
        assert!(died(3604).unwrap().contains("5 times within 3600 s"));
    }
}
