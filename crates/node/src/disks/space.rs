//! The space of disks on image files: what each image occupies, and what its file system has left.
//!
//! A thin image takes space when its guest writes, so a file system that looks empty may be
//! promised many times over. Operators see both numbers, hear when little is left, and find them in
//! the text of a failure for lack of space.
//!
//! [`Disks::watch_space`] goes round all disks every [`ROUND_NS`], and asks at once about a disk
//! that somebody wants to know of. Each file system has a task of its own that asks about one image
//! after the other: one that does not answer collects no questions, and holds up no other one. All
//! others read what is known; if they want it fresh, they wait for at most [`FRESH_NS`].

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;

use reactor::{Class, Core, Event, OwnedTask, Space, timeout};

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

/// A file system whose task asks for the space of images.
#[derive(Default)]
struct Asked {
    /// The disks to ask about.
    wanted: VecDeque<String>,
    /// They include all of a round.
    in_round: bool,
}

/// The disks whose space is watched.
trait Watched: 'static {
    /// The names of all disks, and the file system of each.
    fn all(&self) -> BTreeMap<String, u64>;

    /// Asks for the space of a disk; may never end.
    async fn ask(&self, core: &Core, disk: &str) -> Option<Space>;

    /// A round is done: all disks of that file system were asked about.
    fn went_round(&self, core: &Core, file_system: u64);
}

/// What is known of all disks.
#[derive(Default)]
pub(super) struct Spaces {
    known: RefCell<BTreeMap<String, Known>>,
    /// The disks to ask about first.
    wanted: RefCell<Vec<String>>,
    /// The file systems that are being asked.
    asked: RefCell<BTreeMap<u64, Asked>>,
    /// [`Spaces::watch`] has begun.
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
        self.wanted.borrow_mut().extend(old.iter().cloned());
        self.changed.notify_all();
        let all = || old.iter().all(knows);
        let _ = timeout(core, FRESH_NS, self.changed.wait_until(all)).await;
    }

    /// Asks for the space of all disks, again and again; never ends. Dropping it ends its tasks.
    async fn watch(self: Rc<Self>, core: Core, disks: Rc<impl Watched>) {
        self.watched.set(true);
        let mut tasks = BTreeMap::<u64, OwnedTask<()>>::new();
        let mut round_ns = core.now_ns();
        loop {
            let pause_ns = round_ns.saturating_sub(core.now_ns());
            let is_wanted = self.changed.wait_until(|| !self.wanted.borrow().is_empty());
            let _ = timeout(&core, pause_ns, is_wanted).await;
            let all = disks.all();
            self.want_first(&all);
            if core.now_ns() >= round_ns {
                round_ns = core.now_ns() + ROUND_NS;
                self.known.borrow_mut().retain(|disk, _| all.contains_key(disk));
                let used: BTreeSet<_> = all.values().collect();
                self.low.borrow_mut().retain(|file_system| used.contains(file_system));
                self.begin_round(&all);
            }
            for &file_system in self.asked.borrow().keys() {
                if tasks.get(&file_system).is_none_or(OwnedTask::has_ended) {
                    let asking = self.clone().ask(core.clone(), disks.clone(), file_system);
                    tasks.insert(file_system, core.spawn(Class::Background, asking).owned());
                }
            }
            tasks.retain(|_, task| !task.has_ended());
        }
    }

    /// Passes on what is wanted, before the rounds that are under way.
    fn want_first(&self, all: &BTreeMap<String, u64>) {
        let wanted: BTreeSet<_> = self.wanted.take().into_iter().collect();
        let mut asked = self.asked.borrow_mut();
        for one in asked.values_mut() {
            one.wanted.retain(|disk| !wanted.contains(disk));
        }
        for disk in wanted.into_iter().rev() {
            if let Some(&file_system) = all.get(&disk) {
                asked.entry(file_system).or_default().wanted.push_front(disk);
            }
        }
    }

    /// Asks about all disks, except those on file systems that have not answered since the last
    /// round.
    fn begin_round(&self, all: &BTreeMap<String, u64>) {
        let mut asked = self.asked.borrow_mut();
        let late: BTreeSet<_> =
            asked.iter().filter(|(_, one)| one.in_round).map(|(&at, _)| at).collect();
        for (disk, file_system) in all.iter().filter(|(_, at)| !late.contains(at)) {
            let one = asked.entry(*file_system).or_default();
            one.in_round = true;
            one.wanted.push_back(disk.clone());
        }
    }

    /// Asks one file system until nothing more is wanted of it.
    async fn ask(self: Rc<Self>, core: Core, disks: Rc<impl Watched>, file_system: u64) {
        let next = || self.asked.borrow_mut().get_mut(&file_system)?.wanted.pop_front();
        while let Some(disk) = next() {
            let space = disks.ask(&core, &disk).await;
            let known = Known { space, at_ns: core.now_ns() };
            self.known.borrow_mut().insert(disk, known);
            self.changed.notify_all();
        }
        let done = self.asked.borrow_mut().remove(&file_system);
        if done.is_some_and(|done| done.in_round) {
            disks.went_round(&core, file_system);
        }
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
        self.spaces.clone().watch(core, self).await;
    }

    /// What is known of the images on a file system.
    fn together(&self, core: &Core, file_system: u64) -> Together {
        let mut together = Together::default();
        self.each(|disk| {
            let Ok(serving) = &disk.serving else { return };
            let space = self.space(core, &disk.spec.name);
            let Some(space) = space.filter(|space| space.file_system == file_system) else {
                return;
            };
            let geometry = serving.target.device().geometry();
            (together.available, together.total) = (space.available, space.total);
            let rest = geometry.size_bytes.saturating_sub(space.occupied);
            if !geometry.read_only && rest > 0 {
                together.may_take = together.may_take.saturating_add(rest);
                together.disks.push(disk.spec.name.clone());
            }
        });
        together
    }
}

impl Watched for Disks {
    fn all(&self) -> BTreeMap<String, u64> {
        let mut all = BTreeMap::new();
        self.each(|disk| {
            if let Ok(serving) = &disk.serving {
                // Those without an image are answered at once.
                let file_system = serving.target.device().file_system().unwrap_or(0);
                all.insert(disk.spec.name.clone(), file_system);
            }
        });
        all
    }

    async fn ask(&self, core: &Core, disk: &str) -> Option<Space> {
        let target = self.target(disk).ok()?;
        target.device().space(core).await
    }

    /// Warns of a file system that has little left for its images, once until it is enough again.
    fn went_round(&self, core: &Core, file_system: u64) {
        let mut together = self.together(core, file_system);
        {
            let mut low = self.spaces.low.borrow_mut();
            if together.is_enough() {
                low.remove(&file_system);
            }
            if !together.is_low() || !low.insert(file_system) {
                return;
            }
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

#[cfg(test)]
mod tests {
    use reactor::sim::{SimConfig, World};

    use super::*;

    /// Disk `dN` is on file system N. File system 1 does not answer.
    #[derive(Default)]
    struct Silent {
        asked: RefCell<Vec<String>>,
        rounds: RefCell<Vec<u64>>,
    }

    impl Watched for Silent {
        fn all(&self) -> BTreeMap<String, u64> {
            [("d1".to_owned(), 1), ("d1b".to_owned(), 1), ("d2".to_owned(), 2)].into()
        }

        async fn ask(&self, _: &Core, disk: &str) -> Option<Space> {
            self.asked.borrow_mut().push(disk.to_owned());
            if disk != "d2" {
                std::future::pending::<()>().await;
            }
            Some(Space { occupied: 1, available: 2, total: 3, file_system: 2 })
        }

        fn went_round(&self, _: &Core, file_system: u64) {
            self.rounds.borrow_mut().push(file_system);
        }
    }

    #[test]
    fn a_file_system_that_does_not_answer_holds_up_no_other_one() {
        let world = World::new(1, 1, SimConfig::default());
        let run = world.run(|core| async move {
            let (spaces, disks) = (Rc::<Spaces>::default(), Rc::<Silent>::default());
            let watching = spaces.clone().watch(core.clone(), disks.clone());
            let watching = core.spawn(Class::Background, watching).owned();
            core.sleep_ns(2 * ROUND_NS + ROUND_NS / 2).await;
            assert_eq!(*disks.rounds.borrow(), [2, 2, 2]);

            // Whoever wants to know of all hears of the other one, and asks no second time.
            let names = ["d1", "d1b", "d2"].map(str::to_owned);
            spaces.refresh(&core, names.to_vec(), core.now_ns()).await;
            let now_ns = core.now_ns();
            assert!(spaces.of(now_ns, "d1").is_none() && spaces.of(now_ns, "d2").is_some());
            let asked = disks.asked.borrow();
            assert_eq!(asked.iter().filter(|disk| *disk != "d2").collect::<Vec<_>>(), ["d1"]);
            assert_eq!(asked.len(), 1 + 4);
            drop(watching);
        });
        run.unwrap();
    }

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
