//! The commands of transactions, which this version refuses together with the commands that were to
//! be executed as one.
//!
//! A client that pipelines `MULTI`, commands and `EXEC` has sent the commands before it hears of
//! the refusal. They are not executed: after `MULTI` the connection refuses everything until `EXEC`
//! or `DISCARD`, or until `RESET` or `QUIT`, which Redis does not queue either. Redis's errors for
//! commands that are invalid in themselves take precedence.

use crate::command::commands::Command;
use crate::command::refusal::Refusal;
use crate::command::transaction::Transaction;
use crate::connection::session::Session;

const NO_TRANSACTIONS: Refusal<'static> = Refusal::Text(
    "ERR transactions are not there yet in this version of millrace: commands are refused until EXEC or DISCARD",
);
const NOT_EXECUTED: Refusal<'static> = Refusal::Text(
    "ERR not executed, because it follows MULTI and transactions are not there yet in this version of millrace: EXEC \
     or DISCARD first",
);
const NOTHING_WATCHED: Refusal<'static> = Refusal::Text(
    "ERR transactions are not there yet in this version of millrace: nothing is watched",
);
const NESTED: Refusal<'static> = Refusal::Text("ERR MULTI calls can not be nested");
const WATCH_INSIDE: Refusal<'static> = Refusal::Text("ERR WATCH inside MULTI is not allowed");
const DISCARD_ALONE: Refusal<'static> = Refusal::Text("ERR DISCARD without MULTI");
const EXEC_ALONE: Refusal<'static> = Refusal::Text("ERR EXEC without MULTI");
const ABORTED: Refusal<'static> =
    Refusal::Text("EXECABORT Transaction discarded because of previous errors.");

impl Session {
    /// The result of parsing, for a command after a `MULTI`.
    pub(crate) fn after_multi<'a>(
        &mut self,
        command: Result<Command<'a>, Refusal<'a>>,
    ) -> Result<Command<'a>, Refusal<'a>> {
        match command {
            Ok(Command::Quit | Command::Transaction(_)) => command,
            Ok(Command::Reset) => {
                self.after_multi = false;
                command
            }
            Ok(_) => Err(NOT_EXECUTED),
            Err(refusal) => {
                // A refused `EXEC` ends the transaction, too.
                let ends = matches!(refusal, Refusal::Text(text) if text.starts_with("EXECABORT "));
                self.after_multi &= !ends;
                Err(refusal)
            }
        }
    }

    pub(crate) fn transaction(&mut self, command: Transaction) {
        let after_multi = self.after_multi;
        self.after_multi = match command {
            Transaction::Multi => true,
            Transaction::Discard | Transaction::Exec => false,
            Transaction::Unwatch | Transaction::Watch => after_multi,
        };
        let refusal = match (command, after_multi) {
            (Transaction::Discard, true) | (Transaction::Unwatch, false) => {
                return self.reply(|writer| writer.ok());
            }
            (Transaction::Discard, false) => DISCARD_ALONE,
            (Transaction::Exec, false) => EXEC_ALONE,
            (Transaction::Exec, true) => ABORTED,
            (Transaction::Multi, false) => NO_TRANSACTIONS,
            (Transaction::Multi, true) => NESTED,
            (Transaction::Unwatch, true) => NOT_EXECUTED,
            (Transaction::Watch, false) => NOTHING_WATCHED,
            (Transaction::Watch, true) => WATCH_INSIDE,
        };
        self.reply(|writer| refusal.write(writer));
    }
}
