//! Faults of the simulated processor and process, for tests: delayed stores and crashes.

/// Simulates a processor that delays its stores until a fence, as any processor may: stores into
/// areas wait here. Waiting stores are not forwarded to loads.
pub(crate) mod store_buffer {
    use std::cell::RefCell;

    type Store = Box<dyn FnOnce()>;

    thread_local! {
        static WAITING: RefCell<Option<Vec<Store>>> = const { RefCell::new(None) };
    }

    pub(in crate::memory) fn is_on() -> bool {
        WAITING.with_borrow(Option::is_some)
    }

    pub(in crate::memory) fn hold(store: Store) {
        WAITING.with_borrow_mut(|waiting| waiting.as_mut().expect("it is on").push(store));
    }

    pub(in crate::memory) fn drain() {
        if let Some(waiting) = WAITING.take() {
            waiting.into_iter().for_each(|store| store());
            WAITING.set(Some(Vec::new()));
        }
    }

    /// Runs `f` on such a processor, then `meanwhile` on another one, while the stores of the first
    /// are delayed.
    pub(crate) fn with<A, B>(f: impl FnOnce() -> A, meanwhile: impl FnOnce() -> B) -> (A, B) {
        WAITING.set(Some(Vec::new()));
        let a = f();
        let waiting = WAITING.take().expect("it was on");
        let b = meanwhile();
        waiting.into_iter().for_each(|store| store());
        (a, b)
    }
}

/// Simulates the end of the process between two stores into shared memory: all stores after the
/// n-th are dropped.
pub(crate) mod crash {
    use std::cell::Cell;

    thread_local! {
        static LEFT: Cell<Option<u64>> = const { Cell::new(None) };
    }

    /// Counts a store. Returns whether it is made.
    pub(in crate::memory) fn store() -> bool {
        let left = LEFT.get();
        LEFT.set(left.map(|left| left.saturating_sub(1)));
        left != Some(0)
    }

    /// Drops every store of this thread after the next `n`.
    pub(crate) fn after(n: u64) {
        LEFT.set(Some(n));
    }

    /// Makes all stores again.
    pub(crate) fn over() {
        LEFT.set(None);
    }

    /// Runs `f` on behalf of another process: its stores are made and not counted.
    pub(crate) fn not_during<T>(f: impl FnOnce() -> T) -> T {
        let left = LEFT.take();
        let result = f();
        LEFT.set(left);
        result
    }

    /// Whether stores are dropped now.
    pub(crate) fn happened() -> bool {
        LEFT.get() == Some(0)
    }
}
