//! The space of disks on image files: what each image occupies, and what its file system has left.
//!
//! A thin image takes space when its guest writes, so a file system that looks empty may be
//! promised many times over. Operators see both numbers, hear when little is left, and find them in
//! the text of a failure for lack of space.
//!
//! One task asks ([`Disks::watch_space`]): one image after the other, because a file system that
//! does not answer must not collect questions. It goes round all disks every [`ROUND_NS`], and asks
//! at once about a disk that somebody wants to know of. All others read what is known; if they want
//! it fresh, they wait for at most [`FRESH_NS`].

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;

use reactor::{Class, Core, Event, Space, timeout};

use super::Disks;
use crate::disks::events::What;
use crate::disks::resources::Resources;
use crate::size::Size;

/// Between two rounds over all disks, in nanoseconds.
const ROUND_NS: u64 = 10_000_000_000;
/// What was known longer ago is not known any more.
const STALE_NS: u64 = 3 * ROUND_NS;
/// What is as old as this counts as fresh, and how long anyone waits for something fresh.
const CURRENT_NS: u64 = 500_000_000;
const FRESH_NS: u64 = 200_000_000;
/// Little is left if it is less than this share of the file system, one in so many, and less than
/// what its images may still take. It is enough again at a share that is half as large again.
const LITTLE_SHARE: u64 = 20;
/// The most reports that wait for the space of their disk.
const UNTOLD_MAX: usize = 64;
/// The most disks that a warning names.
const NAMED_MAX: usize = 16;

/// What is known of one disk.
#[derive(Clone, Copy)]
struct Known {
    /// `None`: it has no image file, or the file system does not say.
    space: Option<Space>,
    at_ns: u64,
}

/// What is known of all disks.
#[derive(Default)]
pub(super) struct Spaces {
    known: RefCell<BTreeMap<String, Known>>,
    /// The disks to ask about.
    wanted: RefCell<VecDeque<String>>,
    /// The task that asks has begun.
    watched: Cell<bool>,
    /// The file systems with little left.
    low: RefCell<BTreeSet<u64>>,
    /// Reports that wait, in their order.
    untold: RefCell<VecDeque<What>>,
    telling: Cell<bool>,
    /// Notified after each change of what is known or wanted.
    changed: Event,
}

impl Spaces {
    /// What is known of a disk.
    fn of(&self, now_ns: u64, disk: &str) -> Option<Space> {
        let known = self.known.borrow().get(disk).copied();
        known.filter(|known| now_ns < known.at_ns + STALE_NS)?.space
    }

    /// Asks about disks that were not asked about since a moment, and waits for the answers, but
    /// not for long.
    async fn refresh(&self, core: &Core, disks: Vec<String>, since_ns: u64) {
        let knows = |disk: &String| {
            self.known.borrow().get(disk).is_some_and(|known| known.at_ns >= since_ns)
        };
        let old: Vec<_> = disks.into_iter().filter(|disk| !knows(disk)).collect();
        if old.is_empty() || !self.watched.get() {
            return;
        }
        {
            // Before a round that is under way.
            let mut wanted = self.wanted.borrow_mut();
            wanted.retain(|one| !old.contains(one));
            old.iter().rev().for_each(|disk| wanted.push_front(disk.clone()));
        }
        self.changed.notify_all();
        let all = || old.iter().all(knows);
        let _ = timeout(core, FRESH_NS, self.changed.wait_until(all)).await;
    }

    /// Reports what has happened, in order. If it is lack of space, the report and the log say how
    /// much there is.
    pub fn tell(self: &Rc<Self>, core: &Core, resources: &Rc<Resources>, what: What) {
        let mut untold = self.untold.borrow_mut();
        let waits = what.lacks_space().is_some() && self.watched.get();
        if !(waits || self.telling.get()) || untold.len() >= UNTOLD_MAX {
            return resources.report(core, what);
        }
        untold.push_back(what);
        if !self.telling.replace(true) {
            let (spaces, core, resources) = (self.clone(), core.clone(), resources.clone());
            core.clone().spawn(Class::Control, async move {
                loop {
                    let next = spaces.untold.borrow_mut().pop_front();
                    let Some(what) = next else { break };
                    resources.report(&core, spaces.with_space(&core, what).await);
                }
                spaces.telling.set(false);
            });
        }
    }

    /// The same, with the space of its disk if it lacks some.
    async fn with_space(&self, core: &Core, what: What) -> What {
        let Some(disk) = what.lacks_space() else { return what };
        self.refresh(core, vec![disk.to_owned()], core.now_ns()).await;
        let Some(space) = self.of(core.now_ns(), disk) else { return what };
        let (occupied_bytes, available_bytes) = (space.occupied, space.available);
        tracing::error!(disk, occupied_bytes, available_bytes, "its image has no space left");
        what.with_space(&format!(
            "its image occupies {}, its file system has {} left",
            Size(space.occupied),
            Size(space.available)
        ))
    }
}

/// What the images on one file system have left, and may still take.
#[derive(Debug, Default)]
struct Together {
    available: u64,
    total: u64,
    may_take: u64,
    disks: Vec<String>,
}

impl Together {
    fn is_low(&self) -> bool {
        self.available < self.total / LITTLE_SHARE && self.available < self.may_take
    }

    fn is_enough(&self) -> bool {
        self.available >= self.total / LITTLE_SHARE / 2 * 3 || self.available >= self.may_take
    }
}

impl Disks {
    /// What is known of the space of a disk.
    pub fn space(&self, core: &Core, disk: &str) -> Option<Space> {
        self.spaces.of(core.now_ns(), disk)
    }

    /// Asks for the space of one disk or of all; waits for the answers, but not for long.
    pub async fn refresh_space(&self, core: &Core, name: Option<&str>) {
        let mut names = self.names();
        names.retain(|one| name.is_none_or(|name| name == one));
        self.spaces.refresh(core, names, core.now_ns().saturating_sub(CURRENT_NS)).await;
    }

    fn names(&self) -> Vec<String> {
        let mut names = Vec::new();
        self.each(|disk| names.extend(disk.serving.is_ok().then(|| disk.spec.name.clone())));
        names
    }

    /// Asks for the space of the disks, again and again; never ends.
    pub async fn watch_space(self: Rc<Self>, core: Core) {
        let spaces = &self.spaces;
        spaces.watched.set(true);
        let (mut round_ns, mut in_round) = (core.now_ns(), false);
        loop {
            let next = || spaces.wanted.borrow_mut().pop_front();
            if let Some(disk) = next() {
                self.ask_space(&core, disk).await;
                continue;
            }
            if std::mem::take(&mut in_round) {
                self.warn_of_little_space(&core);
            }
            let pause_ns = round_ns.saturating_sub(core.now_ns());
            let wanted = spaces.changed.wait_until(|| !spaces.wanted.borrow().is_empty());
            if timeout(&core, pause_ns, wanted).await.is_err() {
                (round_ns, in_round) = (core.now_ns() + ROUND_NS, true);
                let names = self.names();
                spaces.known.borrow_mut().retain(|known, _| names.contains(known));
                spaces.wanted.borrow_mut().extend(names);
            }
        }
    }

    async fn ask_space(&self, core: &Core, disk: String) {
        let Ok(target) = self.target(&disk) else { return };
        let space = target.device().space(core).await;
        let known = Known { space, at_ns: core.now_ns() };
        self.spaces.known.borrow_mut().insert(disk, known);
        self.spaces.changed.notify_all();
    }

    /// Warns of file systems that have little left for their images, once until it is enough again.
    fn warn_of_little_space(&self, core: &Core) {
        let mut all = BTreeMap::<u64, Together>::new();
        self.each(|disk| {
            let Ok(serving) = &disk.serving else { return };
            let Some(space) = self.space(core, &disk.spec.name) else { return };
            let geometry = serving.target.device().geometry();
            let together = all.entry(space.file_system).or_default();
            (together.available, together.total) = (space.available, space.total);
            let rest = geometry.size_bytes.saturating_sub(space.occupied);
            if !geometry.read_only && rest > 0 {
                together.may_take = together.may_take.saturating_add(rest);
                together.disks.push(disk.spec.name.clone());
            }
        });
        let mut low = self.spaces.low.borrow_mut();
        low.retain(|file_system| all.get(file_system).is_some_and(|all| !all.is_enough()));
        for (file_system, mut together) in all {
            if !together.is_low() || !low.insert(file_system) {
                continue;
            }
            together.disks.truncate(NAMED_MAX);
            let Together { available, may_take, disks, .. } = together;
            tracing::warn!(
                disks = disks.join(", "),
                available_bytes = available,
                may_take_bytes = may_take,
                "the file system of images has little space left"
            );
            let (available_bytes, may_take_bytes) = (available, may_take);
            self.report(core, What::SpaceLow { disks, available_bytes, may_take_bytes });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn little_is_what_is_less_than_a_share_and_than_what_may_be_taken() {
        let of = |available, may_take| Together {
            available,
            may_take,
            total: 1000,
            ..Together::default()
        };
        let state = |together: Together| (together.is_low(), together.is_enough());
        assert_eq!(state(of(49, 100)), (true, false));
        assert_eq!(state(of(49, 49)), (false, true));
        // Neither: it stays as it was.
        assert_eq!(state(of(50, 100)), (false, false));
        assert_eq!(state(of(75, 100)), (false, true));
        assert_eq!(state(of(0, 0)), (false, true));
    }
}
