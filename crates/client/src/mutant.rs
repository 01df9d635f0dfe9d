//! Ways in which the index of the client can be made wrong, which the simulation must detect.
//! Without the feature `mutants` each is a constant that folds away.

/// The mutations.
#[doc(hidden)]
#[cfg_attr(not(feature = "mutants"), allow(dead_code, reason = "some are only in simulations"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutant {
    /// Nothing is wrong.
    None,
    /// Tracking is turned on after the first page of the index.
    TracksAfterTheFirstPage,
    /// The index is kept over a reconnection.
    TheIndexOutlivesTheLink,
    /// Keys that are written while the index is loaded are not added.
    WritesDuringALoadAreNotAdded,
    /// A page that was asked for before the index was dropped is taken for one of the next load.
    PagesOfEarlierLoadsCount,
    /// The index answers as soon as its load has begun.
    AnswersBeforeItIsWhole,
    /// The index answers although the server has been silent for too long.
    TheIndexHasNoLease,
}

loomable::mutants!(Mutant);
