//! Ways to make devices wrong, to show that the test of power cuts finds out. Without the feature
//! `mutants` each is a constant that folds away.

/// What may be wrong.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutant {
    /// What must be durable is said to be done before it is.
    AcknowledgesEarly,
    /// A flush is taken to cover what was done after it had been submitted.
    FlushCoversLater,
}

#[cfg(feature = "mutants")]
static CHOSEN: std::sync::atomic::AtomicU8 = std::sync::atomic::AtomicU8::new(u8::MAX);

/// From now on all devices of the process are wrong in this way.
#[cfg(feature = "mutants")]
#[doc(hidden)]
pub fn set_mutant(mutant: Mutant) {
    CHOSEN.store(mutant as u8, std::sync::atomic::Ordering::Relaxed);
}

pub(crate) fn is(mutant: Mutant) -> bool {
    #[cfg(feature = "mutants")]
    return CHOSEN.load(std::sync::atomic::Ordering::Relaxed) == mutant as u8;
    #[cfg(not(feature = "mutants"))]
    {
        let _ = mutant;
        false
    }
}
