//! The commands of transactions: their names, and their refusals before they are executed.

use crate::command::refusal::Refusal;

/// The commands of transactions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transaction {
    Discard,
    Exec,
    Multi,
    Unwatch,
    Watch,
}

impl Transaction {
    /// All commands with their names and arities.
    pub(crate) const ALL: [(Self, &'static str, i64); 5] = [
        (Self::Discard, "discard", 1),
        (Self::Exec, "exec", 1),
        (Self::Multi, "multi", 1),
        (Self::Unwatch, "unwatch", 1),
        (Self::Watch, "watch", -2),
    ];

    /// The name in lower case.
    pub fn name(self) -> &'static str {
        Self::ALL[self as usize].1
    }

    /// The refusal of a wrong number of arguments.
    pub(crate) fn wrong_count(self) -> Refusal<'static> {
        match self {
            Self::Exec => ABORTED_BY_COUNT,
            _ => Refusal::WrongCount(self.name()),
        }
    }

    /// The refusal before the password has been given.
    pub(crate) fn no_password(self) -> Refusal<'static> {
        match self {
            Self::Exec => ABORTED_BY_PASSWORD,
            _ => Refusal::NO_PASSWORD,
        }
    }
}

const ABORTED_BY_COUNT: Refusal<'static> = Refusal::Text(
    "EXECABORT Transaction discarded because of: wrong number of arguments for 'exec' command",
);
const ABORTED_BY_PASSWORD: Refusal<'static> =
    Refusal::Text("EXECABORT Transaction discarded because of: NOAUTH Authentication required.");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_their_commands() {
        for (command, name, _) in Transaction::ALL {
            assert_eq!(command.name(), name);
        }
    }
}
