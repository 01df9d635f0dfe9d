//! How a command ends badly: a line that says what happened, and perhaps one that helps.

use std::fmt;

use crate::output::Stop;

/// A failure, with advice where there is any.
#[derive(Debug)]
pub struct Failure {
    what: String,
    hint: Option<String>,
    quiet: bool,
}

impl Failure {
    /// A failure; `what` is one lower-case line.
    pub fn new(what: impl Into<String>) -> Failure {
        Failure { what: what.into(), hint: None, quiet: false }
    }

    /// Adds what the user can do about it.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Failure {
        self.hint = Some(hint.into());
        self
    }

    /// Whether there is nothing to say: the reader of our output has gone.
    pub fn is_quiet(&self) -> bool {
        self.quiet
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)?;
        match &self.hint {
            Some(hint) => write!(f, "\n  {hint}"),
            None => Ok(()),
        }
    }
}

impl From<node::Error> for Failure {
    fn from(error: node::Error) -> Failure {
        Failure { what: error.to_string(), hint: error.advice().map(str::to_owned), quiet: false }
    }
}

impl From<Stop> for Failure {
    fn from(stop: Stop) -> Failure {
        match stop {
            Stop::Closed => Failure { what: String::new(), hint: None, quiet: true },
            Stop::Failed(error) => Failure::new(format!("writing to standard output: {error}")),
        }
    }
}
