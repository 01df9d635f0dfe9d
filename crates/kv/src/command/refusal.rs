//! Error replies of commands that are not executed, in Redis 7.0's words.

use resp::Writer;

use crate::command::args::Args;

/// Maximum number of bytes of a client's words that an error repeats.
const QUOTED_BYTES_MAX: usize = 128;

/// An error reply to be written; it borrows the words it quotes.
#[derive(Clone, Copy, Debug)]
pub enum Refusal<'a> {
    /// A fixed text, beginning with its code.
    Text(&'static str),
    /// An unknown command.
    UnknownCommand(Args<'a>),
    /// An unknown subcommand.
    UnknownSubcommand {
        /// The container's name.
        container: &'static str,
        /// The unknown subcommand.
        word: &'a [u8],
    },
    /// A subcommand with a wrong number of arguments.
    WrongSubcommand {
        /// The container's name, in capitals.
        container: &'static str,
        /// The subcommand.
        word: &'a [u8],
    },
    /// A wrong number of arguments for the command of this full name.
    WrongCount(&'static str),
    /// A write on a read-only node.
    ReadOnly,
    /// A command of a connection that has subscribed.
    OnlyListens(&'static str),
    /// A text around a word of the client.
    Quoting {
        /// The text before the word, including the error's code.
        before: &'static str,
        /// The word.
        word: &'a [u8],
        /// The text after the word.
        after: &'static str,
    },
}

const NO_PASSWORD: &str = "NOAUTH Authentication required.";
const ABORTED_BY_COUNT: &str =
    "EXECABORT Transaction discarded because of: wrong number of arguments for 'exec' command";
const ABORTED_BY_PASSWORD: &str =
    "EXECABORT Transaction discarded because of: NOAUTH Authentication required.";

impl Refusal<'_> {
    /// Invalid options.
    pub const SYNTAX: Self = Refusal::Text("ERR syntax error");
    /// The password is required first.
    pub const NO_PASSWORD: Self = Refusal::Text(NO_PASSWORD);
    /// `CLIENT CACHING` without tracking.
    pub const NOT_TRACKED: Self = Refusal::Text(
        "ERR CLIENT CACHING can be called only when the client is in tracking mode with OPTIN or OPTOUT mode enabled",
    );
    /// The index of a database that does not exist.
    pub const NO_DATABASE: Self = Refusal::Text("ERR DB index is out of range");
    /// A copy of a key onto itself.
    pub const SAME_OBJECT: Self = Refusal::Text("ERR source and destination objects are the same");
    /// A number was expected.
    pub const NOT_AN_INTEGER: Self = Refusal::Text("ERR value is not an integer or out of range");

    /// The same refusal of an `EXEC`, which ends the transaction.
    pub(crate) fn of_exec(self) -> Self {
        match self {
            Self::WrongCount(_) => Self::Text(ABORTED_BY_COUNT),
            Self::Text(NO_PASSWORD) => Self::Text(ABORTED_BY_PASSWORD),
            other => other,
        }
    }

    /// Whether it ends a transaction.
    pub(crate) fn ends_transaction(&self) -> bool {
        matches!(self, Self::Text(ABORTED_BY_COUNT | ABORTED_BY_PASSWORD))
    }

    /// Writes the error reply.
    pub fn write(&self, writer: &mut Writer<'_>) {
        match self {
            Self::Text(text) => writer.error(text),
            Self::UnknownCommand(args) => {
                let mut text = b"ERR unknown command '".to_vec();
                text.extend_from_slice(quotable(args.get(0), QUOTED_BYTES_MAX));
                text.extend_from_slice(b"', with args beginning with: ");
                let before = text.len();
                for arg in args.from(1).iter() {
                    let room = QUOTED_BYTES_MAX.saturating_sub(text.len() - before);
                    if room == 0 {
                        break;
                    }
                    text.push(b'\'');
                    text.extend_from_slice(quotable(arg, room));
                    text.extend_from_slice(b"' ");
                }
                writer.error_bytes(&text);
            }
            Self::UnknownSubcommand { container, word } => {
                let mut text = b"ERR unknown subcommand '".to_vec();
                text.extend_from_slice(quotable(word, QUOTED_BYTES_MAX));
                text.extend_from_slice(
                    format!("'. Try {} HELP.", container.to_uppercase()).as_bytes(),
                );
                writer.error_bytes(&text);
            }
            Self::WrongSubcommand { container, word } => {
                let mut text =
                    b"ERR unknown subcommand or wrong number of arguments for '".to_vec();
                text.extend_from_slice(quotable(word, QUOTED_BYTES_MAX));
                text.extend_from_slice(format!("'. Try {container} HELP.").as_bytes());
                writer.error_bytes(&text);
            }
            Self::WrongCount(name) => {
                writer.error(&format!("ERR wrong number of arguments for '{name}' command"));
            }
            Self::OnlyListens(name) => writer.error(&format!(
                "ERR Can't execute '{name}': only (P|S)SUBSCRIBE / (P|S)UNSUBSCRIBE / PING / QUIT / RESET are \
                 allowed in this context"
            )),
            Self::ReadOnly => writer.error("READONLY You can't write against a read only replica."),
            Self::Quoting { before, word, after } => {
                let mut text = before.as_bytes().to_vec();
                text.extend_from_slice(quotable(word, QUOTED_BYTES_MAX));
                text.extend_from_slice(after.as_bytes());
                writer.error_bytes(&text);
            }
        }
    }
}

/// The part of a word that an error repeats: like Redis, up to a zero byte.
fn quotable(word: &[u8], bytes_max: usize) -> &[u8] {
    let word = &word[..word.len().min(bytes_max)];
    let end = word.iter().position(|&byte| byte == 0).unwrap_or(word.len());
    &word[..end]
}

/// The text of an engine error for a client.
pub(crate) fn engine_error_text(error: &lsm::Error) -> String {
    let code = match error.kind() {
        lsm::Kind::Memory => "OOM",
        _ => "ERR",
    };
    format!("{code} {error}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::args::tests::with;
    use resp::Protocol;

    fn text(refusal: Refusal<'_>) -> String {
        let mut out = Vec::new();
        refusal.write(&mut Writer::new(&mut out, Protocol::V2));
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn unknown_commands_are_quoted_with_their_arguments() {
        with(r#"foo bar "b a\r\nz""#, |args| {
            assert_eq!(
                text(Refusal::UnknownCommand(args)),
                "-ERR unknown command 'foo', with args beginning with: 'bar' 'b a  z' \r\n"
            );
        });
        with(&format!("{} {} c", "a".repeat(500), "b".repeat(500)), |args| {
            assert_eq!(
                text(Refusal::UnknownCommand(args)),
                format!(
                    "-ERR unknown command '{}', with args beginning with: '{}' \r\n",
                    "a".repeat(128),
                    "b".repeat(128)
                )
            );
        });
    }

    #[test]
    fn a_zero_byte_ends_the_quotation() {
        let refusal =
            Refusal::Quoting { before: "ERR Unknown client type '", word: b"a\0b", after: "'" };
        assert_eq!(text(refusal), "-ERR Unknown client type 'a'\r\n");
    }
}
