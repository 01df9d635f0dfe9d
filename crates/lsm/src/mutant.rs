//! Mutants: places at which the engine can be made wrong, to show that its simulation detects it.
//!
//! [`mutant`]`("name")` guards each. It is a constant that folds away unless the feature `mutants`
//! is on. Then [`set_mutant`], or the environment variable `MILLRACE_MUTANT`, chooses at most one
//! for the whole process.

#[cfg(not(feature = "mutants"))]
#[doc(hidden)]
pub const fn mutant(_name: &str) -> bool {
    false
}

#[cfg(feature = "mutants")]
static CHOSEN: arc_swap::ArcSwapOption<&'static str> = arc_swap::ArcSwapOption::const_empty();

/// Makes the engine wrong at the place with this name, or nowhere if no place has it.
#[cfg(feature = "mutants")]
#[doc(hidden)]
pub fn set_mutant(name: &'static str) {
    CHOSEN.store(Some(std::sync::Arc::new(name)));
}

#[cfg(feature = "mutants")]
#[doc(hidden)]
pub fn mutant(name: &str) -> bool {
    static NAMED: std::sync::LazyLock<Option<String>> =
        std::sync::LazyLock::new(|| std::env::var("MILLRACE_MUTANT").ok());
    match CHOSEN.load().as_deref() {
        Some(chosen) => *chosen == name,
        None => NAMED.as_deref() == Some(name),
    }
}
