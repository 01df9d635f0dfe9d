//! Pollers: work that a core must find in memory because no descriptor announces it, such as a
//! guest's rings. Every poller can be armed for sleep.

use std::cell::RefCell;
use std::rc::Rc;

/// A source of work that is polled in every turn.
pub trait Poller {
    /// Does work up to its budget; true when it did some.
    fn poll(&mut self) -> bool;
    /// Whether `poll` would find work. Memory reads only.
    fn pure_check(&mut self) -> bool;
    /// Asks for a wake-up through a descriptor when work comes. False when there is work already,
    /// so that the core must not sleep.
    fn arm(&mut self) -> bool;
    /// The core is awake: no wake-ups are needed.
    fn disarm(&mut self);
}

struct Entry {
    id: u64,
    poller: Option<Box<dyn Poller>>,
    /// Turns to skip before the next poll; grows to 7 while there is no work.
    skip: u8,
    backoff: u8,
}

/// A core's pollers.
#[derive(Default)]
pub(crate) struct Pollers {
    entries: Vec<Entry>,
    removed: Rc<RefCell<Vec<u64>>>,
    next: u64,
}

/// Keeps a poller running; dropping it removes the poller before the next turn.
pub struct PollerSlot {
    id: u64,
    removed: Rc<RefCell<Vec<u64>>>,
}

impl Drop for PollerSlot {
    fn drop(&mut self) {
        self.removed.borrow_mut().push(self.id);
    }
}

impl Pollers {
    pub fn add(cell: &RefCell<Pollers>, poller: Box<dyn Poller>) -> PollerSlot {
        let mut pollers = cell.borrow_mut();
        pollers.next += 1;
        let id = pollers.next;
        pollers.entries.push(Entry { id, poller: Some(poller), skip: 0, backoff: 0 });
        PollerSlot { id, removed: pollers.removed.clone() }
    }

    fn sweep(&mut self) {
        if !self.removed.borrow().is_empty() {
            let removed = self.removed.take();
            self.entries.retain(|entry| !removed.contains(&entry.id));
        }
    }

    pub fn any(&self) -> bool {
        !self.entries.is_empty()
    }

    /// Runs each poller once, starting with another one each turn. Pollers without recent work skip
    /// some turns, but not with `all`.
    pub fn run(cell: &RefCell<Pollers>, all: bool) -> bool {
        if cell.borrow().entries.is_empty() {
            return false;
        }
        cell.borrow_mut().sweep();
        let mut worked = false;
        let len = cell.borrow().entries.len();
        if len > 1 {
            cell.borrow_mut().entries.rotate_left(1);
        }
        for at in 0..len {
            // A poller may add pollers, so it runs outside the cell.
            let taken = {
                let mut pollers = cell.borrow_mut();
                let entry = &mut pollers.entries[at];
                if entry.skip > 0 && !all {
                    entry.skip -= 1;
                    None
                } else {
                    entry.poller.take()
                }
            };
            let Some(mut poller) = taken else { continue };
            let busy = poller.poll();
            worked |= busy;
            let mut pollers = cell.borrow_mut();
            let entry = &mut pollers.entries[at];
            entry.poller = Some(poller);
            entry.backoff = if busy { 0 } else { (entry.backoff + 1).min(7) };
            entry.skip = entry.backoff;
        }
        worked
    }

    fn each(cell: &RefCell<Pollers>, mut f: impl FnMut(&mut dyn Poller) -> bool) -> bool {
        let mut pollers = cell.borrow_mut();
        pollers.sweep();
        for entry in &mut pollers.entries {
            if let Some(poller) = entry.poller.as_deref_mut()
                && f(poller)
            {
                entry.skip = 0;
                return true;
            }
        }
        false
    }

    pub fn pure_check(cell: &RefCell<Pollers>) -> bool {
        Self::each(cell, |poller| poller.pure_check())
    }

    /// True when every poller is armed and found nothing.
    pub fn arm(cell: &RefCell<Pollers>) -> bool {
        !Self::each(cell, |poller| !poller.arm())
    }

    pub fn disarm(cell: &RefCell<Pollers>) {
        Self::each(cell, |poller| {
            poller.disarm();
            false
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    struct Counter {
        work: Rc<Cell<u32>>,
        armed: Rc<Cell<bool>>,
    }

    impl Poller for Counter {
        fn poll(&mut self) -> bool {
            let had = self.work.get() > 0;
            self.work.set(self.work.get().saturating_sub(1));
            had
        }
        fn pure_check(&mut self) -> bool {
            self.work.get() > 0
        }
        fn arm(&mut self) -> bool {
            self.armed.set(true);
            self.work.get() == 0
        }
        fn disarm(&mut self) {
            self.armed.set(false);
        }
    }

    #[test]
    fn a_poller_with_work_vetoes_sleep_and_is_removed_with_its_slot() {
        let cell = RefCell::new(Pollers::default());
        let work = Rc::new(Cell::new(2));
        let armed = Rc::new(Cell::new(false));
        let slot =
            Pollers::add(&cell, Box::new(Counter { work: work.clone(), armed: armed.clone() }));
        assert!(!Pollers::arm(&cell));
        assert!(Pollers::run(&cell, false) && Pollers::run(&cell, false));
        assert!(Pollers::arm(&cell) && armed.get());
        Pollers::disarm(&cell);
        assert!(!armed.get());
        work.set(1);
        drop(slot);
        Pollers::run(&cell, false);
        assert!(!Pollers::pure_check(&cell) && !cell.borrow().any());
    }
}
