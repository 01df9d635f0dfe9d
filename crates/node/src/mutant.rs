//! Ways to make an upgrade wrong, to show that the simulation finds out. Without the feature `mutants`
//! each is a constant that folds away.

/// What may be wrong.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutant {
    /// The old node goes on serving after it has said Go.
    OldGoesOn,
    /// The old node leaves its disks at rest when the successor has failed.
    OldStaysAtRest,
    /// The successor serves as soon as it has the disks.
    StartsEarly,
    /// The successor serves when the old node ends without having said Go.
    ServesWithoutGo,
}

#[cfg(feature = "mutants")]
static CHOSEN: std::sync::atomic::AtomicU8 = std::sync::atomic::AtomicU8::new(u8::MAX);

/// From now on all upgrades in this process are wrong in this way.
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
