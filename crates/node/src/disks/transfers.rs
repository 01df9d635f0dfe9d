//! Where the data of a disk is while it goes from one node to another, and afterwards.
//!
//! ```text
//!   source       Sending --> Given --> Sent          the data is whole: Given, durable;
//!                   ^----------'---------'           the destination has said so: Sent
//!                    the destination gives it back
//!
//!   destination  Incoming --> Whole --> Begun        the guest's first request waits for Begun
//!                   ^-----------'
//!                    the source takes it back
//! ```
//!
//! Each stage is durable in the state directory before the step that follows from it. The source
//! serves the disk while it sends; the destination serves it when it has begun. So at most one of
//! the two serves it, whoever dies in between, and one of the two can: a source in `Given` asks the
//! destination which of them it is.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

/// A disk of another node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Peer {
    /// Where the node takes disks.
    pub addr: SocketAddr,
    /// The name of its machine, as its certificate has it.
    pub host: String,
    /// The disk's name there.
    pub disk: String,
}

impl std::fmt::Display for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Peer { addr, host, disk } = self;
        match host.contains(':') {
            true => write!(f, "[{host}]:{}/{disk}", addr.port()),
            false => write!(f, "{host}:{}/{disk}", addr.port()),
        }
    }
}

/// How far a disk is on its way; see the module text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "stage", rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) enum Transfer {
    /// It is being copied to another node, and served here. It goes if no machine uses it:
    /// `anyway`, or because its machine has begun to migrate when it `leaves`.
    Sending {
        id: u64,
        to: Peer,
        #[serde(default)]
        anyway: bool,
        #[serde(default)]
        leaves: bool,
    },
    /// The other node has all of it, and may have begun.
    Given { id: u64, to: Peer },
    /// It is the other node's.
    Sent { id: u64, to: Peer },
    /// It waits for its data; from this move, if there is one. An earlier attempt has brought its
    /// limits if it is `limited`.
    Incoming {
        id: Option<u64>,
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        limited: bool,
    },
    /// All of it is here, with its limits if it is `limited`. The guest has not begun; it has
    /// switched its write cache off if it `writes_through`.
    Whole {
        id: u64,
        #[serde(default)]
        writes_through: bool,
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        limited: bool,
    },
    /// The guest has begun to use it here.
    Begun {
        id: u64,
        #[serde(default)]
        writes_through: bool,
    },
}

impl Transfer {
    /// Whether the guest may not use the disk here.
    pub fn withholds(&self) -> bool {
        !matches!(self, Transfer::Sending { .. } | Transfer::Begun { .. })
    }

    /// An operator has set the disk's limits: an attempt does not replace them.
    pub fn has_own_limits(&mut self) {
        if let Transfer::Incoming { limited, .. } | Transfer::Whole { limited, .. } = self {
            *limited = false;
        }
    }

    /// The other node, at the source.
    pub fn to(&self) -> Option<&Peer> {
        match self {
            Transfer::Sending { to, .. }
            | Transfer::Given { to, .. }
            | Transfer::Sent { to, .. } => Some(to),
            _ => None,
        }
    }

    /// Whether a source has given the disk of this move, or may have, and has not got it back.
    pub fn is_given(&self, move_id: u64) -> bool {
        matches!(self, Transfer::Given { id, .. } | Transfer::Sent { id, .. } if *id == move_id)
    }

    /// What operators are told.
    pub fn text(&self) -> Option<String> {
        match self {
            Transfer::Sending { .. } | Transfer::Begun { .. } => None,
            Transfer::Given { to, .. } => {
                Some(format!("was given to {to}, which has not confirmed"))
            }
            Transfer::Sent { to, .. } => Some(format!("has moved to {to}")),
            Transfer::Incoming { id: None, .. } => Some("waits for a move".to_owned()),
            Transfer::Incoming { id: Some(_), .. } => {
                Some("is coming from another node".to_owned())
            }
            Transfer::Whole { .. } => Some("has come; its guest has not begun".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transfer_is_stored_as_it_was() {
        let to = |host: &str| Peer {
            addr: "[::1]:7070".parse().unwrap(),
            host: host.to_owned(),
            disk: "vm1".to_owned(),
        };
        assert_eq!(to("b").to_string(), "b:7070/vm1");
        assert_eq!(to("::1").to_string(), "[::1]:7070/vm1");
        let id = u64::MAX;
        let all = [
            Transfer::Sending { id, to: to("b"), anyway: true, leaves: false },
            Transfer::Given { id, to: to("b") },
            Transfer::Sent { id, to: to("b") },
            Transfer::Incoming { id: None, limited: false },
            Transfer::Incoming { id: Some(id), limited: true },
            Transfer::Whole { id, writes_through: true, limited: false },
            Transfer::Begun { id, writes_through: false },
        ];
        for transfer in all {
            let text = serde_json::to_string(&transfer).unwrap();
            assert_eq!(serde_json::from_str::<Transfer>(&text).unwrap(), transfer, "{text}");
            let served = matches!(transfer, Transfer::Sending { .. } | Transfer::Begun { .. });
            assert_eq!(transfer.withholds(), !served);
            assert_eq!(transfer.text().is_some(), !served);
        }
    }
}
