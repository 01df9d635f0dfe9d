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

loomable::mutants!(Mutant);
