//! A way to make devices wrong, to show that the test of power cuts finds out. Without the feature
//! `mutants` it is a constant that folds away.

#[cfg(feature = "mutants")]
static EARLY: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);

/// From now on, what must be durable is said to be done before it is, in the whole process.
#[cfg(feature = "mutants")]
#[doc(hidden)]
pub fn acknowledge_early() {
    EARLY.store(true, std::sync::atomic::Ordering::Relaxed);
}

pub(crate) fn acknowledges_early() -> bool {
    #[cfg(feature = "mutants")]
    return EARLY.load(std::sync::atomic::Ordering::Relaxed);
    #[cfg(not(feature = "mutants"))]
    false
}
