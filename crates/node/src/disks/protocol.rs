//! What a confined node and its launcher tell each other about disks. `launcher/to_node.rs` has the
//! requests of the launcher.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::disks::events::What;
use crate::disks::limits::LimitChange;
use crate::disks::spec::DiskSpec;
use crate::disks::transfers::Transfer;

/// The version of the protocol between a node and its launcher.
pub(crate) const VERSION: u32 = 3;

/// A request of a confined node to its launcher.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) enum ToLauncher {
    /// Start: the answer is [`Hello`], with the line to the predecessor, if there is one to take
    /// over from. A spare node waits for it until it is needed.
    Begin { version: u32 },
    /// This process has a survivor ([`reactor::Survivor`]). Only before `Begin`, and so before it
    /// could have been taken over.
    Survivor { pid: u32 },
    /// The named disks: a list of [`Named`].
    Disks,
    /// A disk's image, and the packet socket on which its connections come: [`Opened`].
    Open { name: String },
    /// The device to which a disk is to be moved: [`Opened`], without a socket.
    OpenTarget { name: String },
    /// Forget that device.
    DropTarget { name: String },
    /// It is about to be stored that the disk has moved there.
    PrepareMoved { name: String },
    /// Store that the disk has moved there.
    Moved { name: String },
    /// Store how far a disk is on its way to another node, or from one.
    KeepTransfer {
        name: String,
        transfer: Option<Transfer>,
        /// Limits that come along from another node.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        limits: Vec<LimitChange>,
    },
    /// That is about to be stored, without limits.
    PrepareTransfer { name: String, transfer: Transfer },
    /// Begin a connection to the node to which a disk goes: its descriptor.
    Dial { name: String },
    /// The socket at which disks of other nodes come: its descriptor.
    TakeDisks,
    /// Remove the name of a disk's socket.
    Close { name: String },
    /// Store a disk that is being attached, for the next start.
    Keep { name: String },
    /// Forget a disk that is being detached.
    Forget { name: String },
    /// Store what a disk's guest was told of its write cache.
    WriteCache { name: String, told: Option<bool> },
    /// Memory in which the cores note what they are working on: `()` and its descriptor.
    WorkPage,
    /// The limits of disks and groups: [`AllLimits`](super::limits::AllLimits).
    Limits,
    /// Store a change of limits.
    ChangeLimits { change: LimitChange },
    /// The node serves.
    Serving,
    /// Something that operators may want to know has happened.
    Event { what: What },
}

/// What a node learns at the start.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Hello {
    /// The admin socket on which the launcher listens.
    pub admin: Option<PathBuf>,
    /// Attached disks come back after a restart.
    pub remembers: bool,
    /// Whether each served disk supports punching holes, if known.
    pub holes: BTreeMap<String, Option<bool>>,
    /// The socket for metrics comes along.
    pub metrics: bool,
    /// The socket for NBD clients comes along, after it.
    #[serde(default)]
    pub nbd: bool,
    /// A node has served before: the front ends of its disks may wait.
    pub restarted: bool,
}

/// A disk that an operator has named.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Named {
    pub spec: DiskSpec,
    /// It was attached while a node ran.
    pub attached: bool,
    /// What the front ends at its socket were told of a write cache, if known.
    pub write_cache: Option<bool>,
    /// How far it is on its way to another node, or from one.
    #[serde(default)]
    pub transfer: Option<Transfer>,
    /// Why it is not to be opened, until an operator lets it go on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stands_still: Option<String>,
}

/// Sent with the descriptors of a disk: those of its device, and of its socket.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Opened {
    pub holes: Option<bool>,
    pub write_cache: Option<bool>,
}
