//! Ways to make an upgrade wrong, to show that the simulation finds out. Without the feature
//! `mutants` each is a constant that folds away.

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
    /// The old node goes on serving when it has said what the disk's state is.
    GoesOnUntilGo,
    /// The old node takes a disk back that it has handed over, when the successor has gone.
    TakesBack,
    /// The successor does again what the old node has under way before that has ended.
    ReleasesEarly,
}

loomable::mutants!(Mutant);
