//! Mutations of upgrades, moves and kept connections, which the simulation must detect. Without the
//! feature `mutants` each is a constant that folds away.

/// The mutations.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutant {
    /// The old node continues to serve after it has sent Go.
    OldGoesOn,
    /// The old node leaves its disks quiesced when the successor has failed.
    OldStaysAtRest,
    /// The successor serves as soon as it has the disks.
    StartsEarly,
    /// The successor serves when the old node ends without having sent Go.
    ServesWithoutGo,
    /// The old node continues to serve after it has sent the disk's state.
    GoesOnUntilGo,
    /// The old node takes back a disk that it has handed over, when the successor has ended.
    TakesBack,
    /// The successor repeats the old node's operations in flight before they have ended.
    ReleasesEarly,
    /// A moved disk continues with its new device although not everything was copied.
    SwitchesBeforeTheLastBlock,
    /// The source serves its guest again without asking the destination.
    ServesWithoutAsking,
    /// The destination serves its guest before all of the disk has come.
    BeginsEarly,
    /// The destination serves its guest without storing that.
    BeginsWithoutStoring,
    /// The launcher does not pass on again a message that a node has not committed.
    PassesOnOnce,
    /// The launcher passes a connection on as a new one.
    ForgetsTheSession,
}

loomable::mutants!(Mutant);
