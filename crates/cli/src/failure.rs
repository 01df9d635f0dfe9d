//! How a command ends: with a verdict, or with a failure, which is a line that says what failed and
//! perhaps one that says what to do.

use std::fmt;

use crate::output::Stop;

/// The result of a command that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Success.
    Good,
    /// The key does not exist, or damage was found.
    Bad,
}

/// A failure, with an optional hint.
#[derive(Debug)]
pub struct Failure {
    what: String,
    hint: Option<String>,
    quiet: bool,
    gone: bool,
}

impl Failure {
    /// A failure; `what` is one line in lower case.
    pub fn new(what: impl Into<String>) -> Failure {
        Failure { what: what.into(), hint: None, quiet: false, gone: false }
    }

    /// Marks that no node answered: it has ended, or its successor is taking over.
    #[must_use]
    pub fn gone(mut self) -> Failure {
        self.gone = true;
        self
    }

    /// Whether no node answered, so that a retry may help.
    pub fn is_gone(&self) -> bool {
        self.gone
    }

    /// Says that the node ended during a piece of work, if that is why this failed.
    #[must_use]
    pub fn during(self, work: &str) -> Failure {
        match self.gone {
            true => Failure::new(format!("the node ended during {work}: {}", self.what))
                .hint("when a node serves the database again, repeat the command")
                .gone(),
            false => self,
        }
    }

    /// Adds the failure that showed this one.
    #[must_use]
    pub fn and(mut self, shown: &Failure) -> Failure {
        self.what = format!("{}; {}", self.what, shown.what);
        self
    }

    /// Replaces a name that only the program knows.
    #[must_use]
    pub fn rename(mut self, from: &str, to: &str) -> Failure {
        self.what = self.what.replace(from, to);
        self
    }

    /// Adds what the user can do.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Failure {
        self.hint = Some(hint.into());
        self
    }

    /// Whether the failure is not reported: the reader of the output has closed it.
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
            Stop::Failed(error) => {
                Failure::new(format!("cannot write to standard output: {error}"))
            }
        }
    }
}
