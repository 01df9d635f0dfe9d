//! Limits of the rates of disks and of groups of disks, as operators give them.
//!
//! A disk may have limits of its own, and be in a group whose disks share limits. All moves of
//! disks share one. They change while guests run; the state directory keeps them, and an upgrade
//! takes them along.

use std::collections::BTreeMap;

use bdev::Rates;
use serde::{Deserialize, Serialize};

/// Maximum length of a group's name in bytes.
const GROUP_NAME_MAX: usize = 64;
/// Maximum number of groups.
const GROUPS_MAX: usize = 1024;
/// The longest burst: an hour.
const BURST_NS_MAX: u64 = 3_600_000_000_000;

/// The limits of a disk or of a group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// Requests per second; 0 is no limit.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub iops: u64,
    /// Bytes of reads and writes per second; 0 is no limit.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub bytes_per_second: u64,
    /// How much is saved at most, as the time that earns it; 0 is 100 ms.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub burst_ns: u64,
    /// The group of a disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl Limits {
    /// The limits of a disk or a group at work.
    pub fn of(rates: Rates, group: Option<String>) -> Limits {
        let Rates { iops, bytes, burst_ns } = rates;
        let burst_ns = if burst_ns == Rates::BURST_NS { 0 } else { burst_ns };
        Limits { iops, bytes_per_second: bytes, burst_ns, group }
    }

    /// The rates.
    pub fn rates(&self) -> Rates {
        let burst_ns = if self.burst_ns == 0 { Rates::BURST_NS } else { self.burst_ns };
        Rates { iops: self.iops, bytes: self.bytes_per_second, burst_ns }
    }
}

/// A change of limits. What is not given stays as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LimitChange {
    /// The disk; without it the limits of the group change.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The group: of which the limits change, or into which the disk is put; an empty name takes
    /// the disk out of its group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// Requests per second; 0 is no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iops: Option<u64>,
    /// Bytes of reads and writes per second; 0 is no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<u64>,
    /// How much is saved at most, as the time that earns it; 0 is 100 ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub burst_ns: Option<u64>,
    /// Bytes per second of all moves together, instead of a disk's or a group's; 0 is no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moves: Option<u64>,
}

impl LimitChange {
    /// Limits the bytes per second of all moves together; 0 is no limit.
    pub(crate) fn of_moves(bytes_per_second: u64) -> LimitChange {
        LimitChange { moves: Some(bytes_per_second), ..LimitChange::default() }
    }

    /// Refuses a change that means nothing.
    pub(crate) fn check(&self) -> Result<(), String> {
        if self.moves.is_some() {
            return match (LimitChange { moves: self.moves, ..LimitChange::default() }) == *self {
                true => Ok(()),
                false => Err("the limit of moves is changed alone".to_owned()),
            };
        }
        if let Some(group) = &self.group {
            let is_out = group.is_empty() && self.name.is_some();
            if !is_out && (group.is_empty() || group.len() > GROUP_NAME_MAX) {
                return Err(format!(
                    "the name of a group must have from 1 to {GROUP_NAME_MAX} bytes"
                ));
            }
            if group == "off" {
                return Err(
                    "a group cannot have the name off: it takes a disk out of its group".to_owned()
                );
            }
            if group.chars().any(|c| c.is_control() || c.is_whitespace()) {
                return Err(format!("the name of a group must not have white space: '{group}'"));
            }
        } else if self.name.is_none() {
            return Err("name a disk or a group".to_owned());
        }
        if self.burst_ns.is_some_and(|burst_ns| burst_ns > BURST_NS_MAX) {
            return Err("a burst must be at most an hour".to_owned());
        }
        Ok(())
    }
}

/// The limits of all disks and groups that have any.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct AllLimits {
    /// By the name of the disk.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub disks: BTreeMap<String, Limits>,
    /// By the name of the group.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub groups: BTreeMap<String, Limits>,
    /// Bytes per second of all moves together; 0 is no limit.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub moves: u64,
}

impl AllLimits {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        *self == AllLimits::default()
    }

    /// The limits of a disk.
    pub fn of_disk(&self, name: &str) -> Limits {
        self.disks.get(name).cloned().unwrap_or_default()
    }

    /// The limits of a group.
    pub fn of_group(&self, name: &str) -> Limits {
        self.groups.get(name).cloned().unwrap_or_default()
    }

    /// Makes a change.
    pub fn change(&mut self, change: &LimitChange) -> Result<(), String> {
        change.check()?;
        let LimitChange { name, group, iops, bytes_per_second, burst_ns, moves } = change;
        self.moves = moves.unwrap_or(self.moves);
        let (all, key, group) = match (name, group) {
            (Some(name), group) => (&mut self.disks, name, group.as_ref()),
            (None, Some(group)) => (&mut self.groups, group, None),
            (None, None) => return Ok(()),
        };
        let mut limits = all.get(key).cloned().unwrap_or_default();
        limits.iops = iops.unwrap_or(limits.iops);
        limits.bytes_per_second = bytes_per_second.unwrap_or(limits.bytes_per_second);
        limits.burst_ns = burst_ns.unwrap_or(limits.burst_ns);
        if let Some(group) = group {
            limits.group = Some(group.clone()).filter(|group| !group.is_empty());
        }
        if limits == Limits::default() {
            all.remove(key);
        } else {
            all.insert(key.clone(), limits);
        }
        if self.groups.len() > GROUPS_MAX {
            return Err(format!("a node has at most {GROUPS_MAX} groups of disks with limits"));
        }
        Ok(())
    }

    /// Forgets a disk.
    pub fn forget(&mut self, disk: &str) {
        self.disks.remove(disk);
    }

    /// Notes the limits that a disk has.
    pub fn note(&mut self, disk: &str, limits: Limits) {
        match limits == Limits::default() {
            true => self.disks.remove(disk),
            false => self.disks.insert(disk.to_owned(), limits),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(name: Option<&str>, group: Option<&str>) -> LimitChange {
        let (name, group) = (name.map(str::to_owned), group.map(str::to_owned));
        LimitChange { name, group, ..LimitChange::default() }
    }

    #[test]
    fn a_change_leaves_what_it_does_not_name() {
        let mut all = AllLimits::default();
        all.change(&LimitChange { iops: Some(100), ..change(Some("a"), Some("g")) }).unwrap();
        all.change(&LimitChange { bytes_per_second: Some(5), ..change(Some("a"), None) }).unwrap();
        let expected =
            Limits { iops: 100, bytes_per_second: 5, burst_ns: 0, group: Some("g".into()) };
        assert_eq!(all.of_disk("a"), expected);
        assert_eq!(all.of_disk("a").rates().burst_ns, Rates::BURST_NS);
        all.change(&LimitChange { iops: Some(7), ..change(None, Some("g")) }).unwrap();
        assert_eq!(all.of_group("g").rates().iops, 7);
        let text = serde_json::to_string(&all).unwrap();
        assert_eq!(serde_json::from_str::<AllLimits>(&text).unwrap(), all);
        let off =
            LimitChange { iops: Some(0), bytes_per_second: Some(0), ..LimitChange::default() };
        all.change(&LimitChange { name: Some("a".into()), group: Some("".into()), ..off.clone() })
            .unwrap();
        all.change(&LimitChange { group: Some("g".into()), ..off }).unwrap();
        assert!(all.is_empty(), "{all:?}");
        // A burst alone stays for the rates that come.
        let burst = LimitChange { burst_ns: Some(9), ..change(Some("a"), None) };
        all.change(&burst).unwrap();
        all.change(&LimitChange { iops: Some(7), ..change(Some("a"), None) }).unwrap();
        all.change(&LimitChange { iops: Some(0), ..change(Some("a"), None) }).unwrap();
        assert_eq!(all.of_disk("a").burst_ns, 9);
        all.change(&LimitChange { burst_ns: Some(0), ..burst }).unwrap();
        all.change(&LimitChange::of_moves(7)).unwrap();
        assert_eq!((all.moves, all.is_empty()), (7, false));
        let text = serde_json::to_string(&all).unwrap();
        assert_eq!(serde_json::from_str::<AllLimits>(&text).unwrap(), all);
    }

    #[test]
    fn a_change_that_means_nothing_is_refused() {
        for (change, expected) in [
            (change(None, None), "name a disk or a group"),
            (change(None, Some("")), "from 1 to 64 bytes"),
            (change(Some("a"), Some("x y")), "white space"),
            (change(None, Some(&"x".repeat(65))), "from 1 to 64 bytes"),
            (LimitChange { burst_ns: Some(u64::MAX), ..change(Some("a"), None) }, "an hour"),
            (LimitChange { moves: Some(1), ..change(Some("a"), None) }, "alone"),
        ] {
            let refused = AllLimits::default().change(&change).unwrap_err();
            assert!(refused.contains(expected), "{refused}");
        }
    }
}
