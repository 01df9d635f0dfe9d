//! Mutations of devices, which the power-cut test must detect. Without the feature `mutants` each
//! is a constant that folds away.

/// The mutations.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutant {
    /// Reports durable requests as done before they are durable.
    AcknowledgesEarly,
    /// Lets a flush cover requests that completed after it was submitted.
    FlushCoversLater,
    /// A copy takes the marks of granules after it has copied them.
    TakesMarksAfterCopy,
    /// A mirrored write that the target has refused counts as written there.
    TrustsTheMirror,
}

loomable::mutants!(Mutant);
