//! How a command ends badly: a line that says what happened, and perhaps one that helps.

use std::fmt;

use crate::output::Stop;

/// A failure, with advice where there is any.
#[derive(Debug)]
pub struct Failure {
    what: String,
    hint: Option<String>,
    quiet: bool,
    gone: bool,
}

impl Failure {
    /// A failure; `what` is one lower-case line.
    pub fn new(what: impl Into<String>) -> Failure {
        Failure { what: what.into(), hint: None, quiet: false, gone: false }
    }

    /// Says that no node answered: it has ended, or another one takes its place just now.
    #[must_use]
    pub fn gone(mut self) -> Failure {
        self.gone = true;
        self
    }

    /// Whether no node answered, so that trying again may help.
    pub fn is_gone(&self) -> bool {
        self.gone
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
        let failure = Failure::new(error.to_string());
        match error.advice() {
            Some(hint) => failure.hint(hint),
            None => failure,
        }
    }
}

impl From<Stop> for Failure {
    fn from(stop: Stop) -> Failure {
        match stop {
            Stop::Closed => Failure { quiet: true, ..Failure::new("") },
            Stop::Failed(error) => Failure::new(format!("writing to standard output: {error}")),
        }
    }
}
