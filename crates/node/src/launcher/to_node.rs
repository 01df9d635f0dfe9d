//! The requests of a launcher to its node. `disks/protocol.rs` has those of the node.

use serde::{Deserialize, Serialize};

use crate::admin::Request;

/// A request of a launcher to its node.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) enum ToNode {
    /// Run a request of the admin socket: the answer is the result as JSON.
    Run { request: Request },
    /// Leave the processors to a successor that starts, or end that; the answer is null.
    MakeRoom { room: bool },
    /// Wait until no disk is being changed, but not for ever: the answer is what is being changed,
    /// or null.
    Settle,
    /// Hand over on the line that comes along: the answer is the pause in microseconds.
    HandOver,
    /// Whether the node could hand over, as far as its disks go: the answer is the reason against
    /// it, or null.
    MayHandOver,
    /// End in an orderly way.
    Stop,
    /// Log into the file that comes along.
    Log,
    /// Live on when this launcher ends, and send nothing after the answer: the launcher's program
    /// is about to be replaced.
    Hold,
    /// End with the launcher again, and continue.
    Resume,
    /// Start the disks that the configuration has named since the start: this is a new program,
    /// which has read it.
    StartOthers,
}
