//! The disk's state on its way from and to another process.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use bdev::{Limit, Rates};
use reactor::{UnixPackets, UnixSocket};

use crate::protocol::config::SECTOR_BYTES;
use crate::protocol::handover::{DiskState, InFlight, Role};
use crate::target::connection::{Connection, Refused};
use crate::target::door::Door;
use crate::target::link::{KeptLink, Link};
use crate::target::queue::Hold;
use crate::target::{Export, Target, set_group_limits};

/// Names of a limit's numbers in the state of a disk: docs/formats/handover.md.
const LIMIT_NAMES: [&str; 5] = ["iops", "bytes", "burst-ns", "requests-ahead-ns", "bytes-ahead-ns"];
/// Before each name of the group's limit.
const GROUP_PREFIX: &str = "group-";
/// Before the group's name.
const GROUP_NAME: &str = "group=";

impl Target {
    /// Everything that a successor needs of a quiesced disk.
    pub(super) fn export(
        &self,
        door: &Door,
        connection: Option<&Connection<'_>>,
    ) -> Result<Export, String> {
        let state = DiskState {
            name: self.options.name.clone(),
            capacity_sectors: self.device().geometry().size_bytes / SECTOR_BYTES,
            statistics: self.statistics(),
            limits: self.export_limits(),
            listening: true,
            flush_failed: self.device().flush_failed(),
            withheld: self.is_withheld(),
            in_flight: self.in_flight(),
            connection: match connection {
                None => None,
                Some(connection) => Some(connection.state().ok_or("a reply is due")?),
            },
            ..DiskState::default()
        };
        let mut descriptors = Vec::new();
        let regions = self.regions.borrow();
        for role in state.roles() {
            let fd = match role {
                Role::Listener => Some(door.as_fd()),
                Role::Memory(nth) => connection
                    .and_then(|connection| connection.session.regions().get(usize::from(nth)))
                    .and_then(|wanted| regions.iter().find(|(region, _)| region == wanted))
                    .map(|(_, fd)| fd.as_fd()),
                role => connection.and_then(|connection| connection.descriptor(role)),
            };
            let fd = fd.ok_or_else(|| format!("no descriptor for {role:?}"))?;
            descriptors
                .push(fd.try_clone_to_owned().map_err(|error| format!("{role:?}: {error}"))?);
        }
        Ok((state, descriptors))
    }

    /// Operations that are in flight although the disk is quiesced.
    pub(super) fn in_flight(&self) -> Option<InFlight> {
        let in_flight = self.in_flight.borrow();
        let (operations, what) = in_flight.as_ref()?;
        (!operations.is_done()).then_some(*what)
    }

    /// Imports a disk that is quiesced in another process.
    pub(super) fn adopt(
        &self,
        state: &DiskState,
        descriptors: Vec<OwnedFd>,
    ) -> Result<(Door, Option<Connection<'_>>), String> {
        let parts = state.assign(descriptors).map_err(|error| error.to_string())?;
        let listener = parts.listener.ok_or("the listening socket is missing")?;
        let door = Door::from_fd(&self.core, listener)
            .map_err(|error| format!("the listening socket: {error}"))?;
        self.take_statistics(&state.statistics);
        self.take_limits(&state.limits);
        self.take_size(state.capacity_sectors.saturating_mul(SECTOR_BYTES));
        if state.flush_failed {
            self.device().set_flush_failed();
        }
        if state.withheld {
            self.trouble.withhold();
        }
        self.hold.set(state.in_flight.map(|InFlight { flushes }| Hold { flushes }));
        let connection = match (&state.connection, parts.connection) {
            (Some(state), Some(socket)) => {
                let link = match &state.kept {
                    None => UnixSocket::from_fd(&self.core, socket).map(Link::direct),
                    Some(kept) => {
                        let raw = parts.session.iter().map(AsRawFd::as_raw_fd);
                        let numbers = raw.zip(kept.numbers.iter().copied()).collect();
                        UnixPackets::from_fd(&self.core, socket)
                            .map(|packets| Link::Kept(KeptLink::new(packets, kept.pid, numbers)))
                    }
                };
                let mut link = link.map_err(|error| format!("the connection: {error}"))?;
                if let Link::Direct(direct) = &mut link {
                    direct.unsent.push(state.unsent.clone(), parts.unsent);
                }
                let mut connection = Connection::new(self, link);
                let adopted = connection.adopt(state, parts.session, parts.partial);
                adopted.map_err(|Refused(why)| why)?;
                Some(connection)
            }
            _ => None,
        };
        Ok((door, connection))
    }

    /// Keeps the size that the guest knows, even if the image's length has changed.
    pub(super) fn take_size(&self, size_bytes: u64) {
        let found = self.device().size_bytes();
        if found != size_bytes && !self.device().is_memory() {
            tracing::warn!(
                disk = &*self.name,
                found,
                size_bytes,
                "the length of its image was changed from outside: the disk keeps the size that its \
                 guest knows (`millrace disk resize` changes it), and what is not there fails"
            );
        }
        self.device().set_taken_size(size_bytes);
    }

    /// The limits of the disk and of its group, and what is spent ahead, as named numbers; nothing
    /// if there are none.
    fn export_limits(&self) -> Vec<(String, u64)> {
        let mut all = Vec::new();
        let now_ns = self.core.now_ns();
        let mut add = |prefix: &str, limit: &Limit| {
            let (Rates { iops, bytes, burst_ns }, ahead) = (limit.rates(), limit.ahead_ns(now_ns));
            let values = [iops, bytes, burst_ns, ahead[0], ahead[1]];
            let named = LIMIT_NAMES.iter().zip(values).filter(|(_, value)| *value > 0);
            all.extend(named.map(|(name, value)| (format!("{prefix}{name}"), value)));
        };
        let own = self.limits.own();
        if !own.rates().are_off() || own.rates().burst_ns != Rates::BURST_NS {
            add("", own);
        }
        if let Some((name, limit)) = self.limits.group() {
            add(GROUP_PREFIX, &limit);
            all.push((format!("{GROUP_NAME}{name}"), 0));
        }
        all
    }

    /// Continues with another process's limits. Unknown names are ignored.
    fn take_limits(&self, limits: &[(String, u64)]) {
        let now_ns = self.core.now_ns();
        let taken = |prefix: &str| {
            let [iops, bytes, burst_ns, requests_ahead, bytes_ahead] = LIMIT_NAMES.map(|name| {
                let found =
                    limits.iter().find(|(known, _)| known.strip_prefix(prefix) == Some(name));
                found.map_or(0, |(_, value)| *value)
            });
            (Rates { iops, bytes, burst_ns }, [requests_ahead, bytes_ahead])
        };
        let (rates, ahead) = taken("");
        self.limits.set(rates, now_ns);
        self.limits.own().set_ahead_ns(ahead, now_ns);
        let name = limits.iter().find_map(|(name, _)| name.strip_prefix(GROUP_NAME));
        if let Some(name) = name {
            self.join_group(Some(name));
            let (rates, ahead) = taken(GROUP_PREFIX);
            set_group_limits(&self.core, name, rates);
            if let Some((_, limit)) = self.limits.group() {
                limit.set_ahead_ns(ahead, now_ns);
            }
        }
    }

    /// The sums over all rings of the counters that are not 0.
    pub fn statistics(&self) -> Vec<(String, u64)> {
        let mut all: Vec<(String, u64)> = Vec::new();
        for stats in &self.stats {
            let counters =
                stats.counters().into_iter().map(|(name, counter)| (name, counter.get()));
            match all.is_empty() {
                true => all.extend(counters),
                false => all.iter_mut().zip(counters).for_each(|(all, (_, count))| all.1 += count),
            }
        }
        all.retain(|(_, count)| *count > 0);
        all
    }

    /// Adds another process's counters to those of the first ring. Unknown counters are ignored.
    pub fn take_statistics(&self, statistics: &[(String, u64)]) {
        let Some(first) = self.stats.first() else { return };
        for (name, counter) in first.counters() {
            if let Some((_, count)) = statistics.iter().find(|(known, _)| *known == name) {
                counter.add(*count);
            }
        }
    }
}
