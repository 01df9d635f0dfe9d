//! What a launcher has for its disks, kept where it outlives the launcher: in the descriptor store
//! of the service manager (systemd's `FileDescriptorStoreMax=`). A launcher that was killed is
//! started again by the manager, gets the descriptors back, and front ends notice nothing.
//!
//! The store has one descriptor for each disk: the end of a packet socket on which the disk's
//! *record* waits: all the descriptors that belong to it, the first of them a piece of memory with
//! the state in JSON. They are in one packet, or in several if there are many. After each change a
//! new record is put behind the old one, and then the old one is taken away. So there is a complete
//! one whenever the launcher dies.
//!
//! Bytes that were taken from a front end's socket, or put into it, would be lost if the launcher
//! died then. So one packet before that says that it is being done, and one immediately afterwards
//! what was done ([`Change`]); the new record follows. If the launcher has died between the two,
//! the next one closes the connection, and the front end connects again.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;

use nix::sys::memfd::{MFdFlags, memfd_create};
use reactor::{Core, UnixPackets, drop_in_background};
use sd_notify::NotifyState;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use vhost::kept::PACKET_BYTES_MAX;

use super::answers::DeviceMemory;
use super::front_door::DoorState;
use crate::disks::spec::DiskSpec;

/// The version of a record.
const VERSION: u32 = 1;
/// A descriptor's name in the store, before its number.
const PREFIX: &str = "millrace.disk.";
/// Packets: the end of a record, a part before that, and the one that says that something is being
/// done to the front end's socket.
const LAST: u8 = b'.';
const PART: u8 = b'+';
const BUSY: u8 = b'!';
/// Changes since the record: bytes that came, or how many were sent.
const RECEIVED: u8 = b'<';
const SENT: u8 = b'>';
/// Most descriptors of a packet.
const TOGETHER_MAX: usize = 250;

/// A record.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    version: u32,
    spec: DiskSpec,
    holes: Option<bool>,
    /// The number of descriptors of its device, which come first; then those of the door.
    memory: usize,
    door: DoorState,
}

/// The way to the service manager's store.
#[derive(Debug, Default)]
pub(super) struct Store {
    /// The number of the next descriptor.
    next: Cell<u64>,
    /// The manager was not reached, which was logged.
    failed: Cell<bool>,
}

/// What has happened at a front end's socket.
pub(super) enum Change {
    /// These bytes came, with these descriptors.
    Received(Vec<u8>, Vec<OwnedFd>),
    /// So many bytes were sent.
    Sent(usize),
}

/// A disk that an earlier launcher has left in the store.
pub(super) struct Left {
    pub(super) spec: DiskSpec,
    pub(super) holes: Option<bool>,
    /// The descriptors of its device.
    pub(super) memory: DeviceMemory,
    pub(super) door: (DoorState, Vec<OwnedFd>),
    /// What has happened since.
    pub(super) changes: Vec<Change>,
    /// Its number in the store.
    pub(super) number: u64,
}

impl Store {
    /// The store of the service manager that has started this process, if one has. Numbers begin
    /// with `next`.
    pub(super) fn of_manager(next: u64) -> Option<Rc<Store>> {
        std::env::var_os("NOTIFY_SOCKET")?;
        Some(Rc::new(Store { next: Cell::new(next), ..Store::default() }))
    }

    /// Reads what an earlier launcher has left in the store, from the descriptors that this process
    /// was started with. What cannot be used is removed.
    pub(super) fn left(&self, core: &Core, passed: Vec<(String, OwnedFd)>) -> Vec<Left> {
        let mut all = BTreeMap::new();
        let numbered = passed.into_iter().filter_map(|(name, descriptor)| {
            Some((name.strip_prefix(PREFIX)?.parse().ok()?, descriptor))
        });
        let mut numbered: Vec<(u64, OwnedFd)> = numbered.collect();
        numbered.sort_by_key(|(number, _)| *number);
        for (number, descriptor) in numbered {
            self.next.set(self.next.get().max(number + 1));
            match read(core, number, descriptor) {
                Ok(left) => {
                    // The launcher has died between storing a disk anew and removing it.
                    let before: Option<Left> = all.insert(left.spec.name.clone(), left);
                    before.iter().for_each(|before| self.remove(before.number));
                }
                Err(why) => {
                    tracing::error!("a disk of the launcher before is not known any more: {why}");
                    self.remove(number);
                }
            }
        }
        all.into_values().collect()
    }

    /// Tells the manager that the node serves.
    pub(super) fn ready(&self) {
        self.told(sd_notify::notify(&[NotifyState::Ready]));
    }

    /// Tells the manager that the node is about to end.
    pub(super) fn stopping(&self) {
        self.told(sd_notify::notify(&[NotifyState::Stopping]));
    }

    fn add(&self, number: u64, descriptor: &impl AsFd) {
        let name = format!("{PREFIX}{number}");
        // Otherwise the manager drops it when the launcher, which has the other end, dies.
        let poll = NotifyState::Custom("FDPOLL=0");
        let state = [NotifyState::FdStore, NotifyState::FdName(&name), poll];
        self.told(sd_notify::notify_with_fds(&state, &[descriptor.as_fd()]));
    }

    /// Removes a disk from the store.
    pub(super) fn remove(&self, number: u64) {
        let name = format!("{PREFIX}{number}");
        self.told(sd_notify::notify(&[NotifyState::FdStoreRemove, NotifyState::FdName(&name)]));
    }

    fn told(&self, told: io::Result<()>) {
        match told {
            Ok(()) => self.failed.set(false),
            Err(error) if !self.failed.replace(true) => {
                tracing::warn!("the service manager is not reached: {error}");
            }
            Err(_) => {}
        }
    }
}

/// The JSON that is the rest of a file. The parser by itself would read it byte by byte.
pub(super) fn parsed<T: DeserializeOwned>(file: &mut File) -> serde_json::Result<T> {
    let mut text = Vec::new();
    file.read_to_end(&mut text).map_err(serde_json::Error::io)?;
    serde_json::from_slice(&text)
}

/// Reads a disk's record.
fn read(core: &Core, number: u64, descriptor: OwnedFd) -> Result<Left, String> {
    let packets = UnixPackets::from_fd(core, descriptor).map_err(|error| error.to_string())?;
    let (mut record, mut parts, mut changes, mut is_busy) =
        (Vec::new(), Vec::new(), Vec::new(), false);
    // They stay until the disk is stored anew: this launcher may be killed, too.
    let waiting = packets.peek_all(PACKET_BYTES_MAX).map_err(|error| error.to_string())?;
    for (bytes, descriptors) in waiting {
        let Some((&kind, rest)) = bytes.split_first() else { break };
        match kind {
            BUSY => is_busy = true,
            PART => parts.extend(descriptors),
            LAST => {
                parts.extend(descriptors);
                (record, is_busy) = (std::mem::take(&mut parts), false);
                changes.clear();
            }
            RECEIVED => {
                changes.push(Change::Received(rest.to_vec(), descriptors));
                is_busy = false;
            }
            SENT => {
                let count = rest.try_into().map(u64::from_le_bytes);
                changes.push(Change::Sent(count.map_err(|_| "a count is too short")? as usize));
                is_busy = false;
            }
            _ => return Err("its record makes no sense".to_owned()),
        }
    }
    if record.is_empty() {
        return Err("its record is missing".to_owned());
    }
    let mut memory = record.split_off(1);
    let mut file = File::from(record.remove(0));
    let rewound = file.rewind().map_err(serde_json::Error::io);
    let record = rewound.and_then(|()| parsed::<Record>(&mut file));
    let record = record.map_err(|error| error.to_string())?;
    let Record { version, spec, holes, memory: count, mut door } = record;
    if version != VERSION {
        return Err(format!("its record has version {version}"));
    }
    let of_door = memory.split_off(count.min(memory.len()));
    if is_busy {
        tracing::warn!(
            disk = spec.name,
            "the launcher before died in a message: the connection is closed"
        );
        door.close();
    }
    let memory = DeviceMemory::new(memory);
    Ok(Left { spec, holes, memory, door: (door, of_door), changes, number })
}

/// A disk in the store.
pub(super) struct Kept {
    store: Rc<Store>,
    number: u64,
    spec: DiskSpec,
    holes: Option<bool>,
    memory: DeviceMemory,
    /// Where packets are put, and the end from which they are taken, which the store has, too.
    to: UnixPackets,
    from: UnixPackets,
    /// The number of packets.
    count: Cell<usize>,
    /// The store has it.
    is_added: Cell<bool>,
}

impl Kept {
    /// Begins to keep a disk. It is in the store after the first [`Kept::record`].
    ///
    /// # Errors
    /// As the system gives them.
    pub(super) fn new(
        core: &Core,
        store: &Rc<Store>,
        spec: &DiskSpec,
        holes: Option<bool>,
        memory: DeviceMemory,
    ) -> io::Result<Kept> {
        let (to, from) = UnixPackets::pair()?;
        Ok(Kept {
            store: store.clone(),
            number: store.next.replace(store.next.get() + 1),
            spec: spec.clone(),
            holes,
            memory,
            to: UnixPackets::from_fd(core, to)?,
            from: UnixPackets::from_fd(core, from)?,
            count: Cell::new(0),
            is_added: Cell::new(false),
        })
    }

    /// Its number in the store.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// Removes it from the store.
    pub(super) fn forget(self) {
        self.store.remove(self.number);
    }

    /// Something is about to be taken from the front end's socket, or put into it.
    pub(super) fn begin(&self) {
        self.note(&[BUSY], &[]);
    }

    /// These bytes and descriptors were taken from it.
    pub(super) fn received(&self, bytes: &[u8], descriptors: &[OwnedFd]) {
        let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        self.note(&[&[RECEIVED], bytes].concat(), &descriptors);
    }

    /// So many bytes were put into it.
    pub(super) fn sent(&self, count: usize) {
        self.note(&[&[SENT], &(count as u64).to_le_bytes()[..]].concat(), &[]);
    }

    fn note(&self, packet: &[u8], descriptors: &[BorrowedFd<'_>]) {
        match self.to.try_send(packet, descriptors) {
            Ok(()) => self.count.set(self.count.get() + 1),
            Err(error) => self.cannot(&error),
        }
    }

    /// Records how the door is.
    pub(super) fn record(&self, door: DoorState, of_door: &[BorrowedFd<'_>]) {
        let record = Record {
            version: VERSION,
            spec: self.spec.clone(),
            holes: self.holes,
            memory: self.memory.len(),
            door,
        };
        let old = self.count.get();
        let put = self.put(&record, of_door);
        match &put {
            Ok(()) => self.take(old),
            // What follows would not fit to the record that is there.
            Err(_) => self.take(self.count.get()),
        }
        match put {
            Ok(()) if !self.is_added.replace(true) => self.store.add(self.number, &self.from),
            Ok(()) => {}
            Err(error) => self.cannot(&error),
        }
    }

    /// Takes so many packets away.
    fn take(&self, count: usize) {
        for _ in 0..count {
            match self.from.try_recv(PACKET_BYTES_MAX) {
                // It may be the last that has the memory of a machine.
                Ok((_, descriptors)) => drop_in_background(descriptors),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return self.count.set(0);
                }
                // The packet has gone.
                Err(_) => {}
            }
            self.count.set(self.count.get() - 1);
        }
    }

    /// Puts a record behind the others.
    fn put(&self, record: &Record, of_door: &[BorrowedFd<'_>]) -> io::Result<()> {
        let text = memfd_create(c"millrace-record", MFdFlags::MFD_CLOEXEC)?;
        let mut text = File::from(text);
        text.write_all(&serde_json::to_vec(record)?)?;
        let text = OwnedFd::from(text);
        let all = [&text].into_iter().chain(self.memory.iter()).map(AsFd::as_fd);
        let all: Vec<_> = all.chain(of_door.iter().copied()).collect();
        let mut parts = all.chunks(TOGETHER_MAX).peekable();
        while let Some(part) = parts.next() {
            let kind = if parts.peek().is_some() { PART } else { LAST };
            self.to.try_send(&[kind], part)?;
            self.count.set(self.count.get() + 1);
        }
        Ok(())
    }

    fn cannot(&self, error: &dyn std::fmt::Display) {
        tracing::error!(disk = self.spec.name, "a killed launcher would lose it: {error}");
    }
}

#[cfg(test)]
mod tests {
    use reactor::{DriverKind, RuntimeConfig};
    use serde_json::{Value, json};

    use super::*;

    fn door(pid: u32) -> DoorState {
        let session = json!({
            "packets": false, "told": false, "pid": pid, "partial": [], "partial_descriptors": 0, "next": 0,
            "kept": [], "document": [], "numbers": [], "open": null, "reply": [], "reply_descriptor": false,
        });
        serde_json::from_value(json!({"door": false, "session": session})).unwrap()
    }

    /// What a launcher does, one step after the other.
    fn step(kept: &Kept, nth: usize, some: &OwnedFd) {
        let many: Vec<_> = (0..600).map(|_| some.try_clone().unwrap()).collect();
        let borrowed: Vec<_> = many.iter().map(AsFd::as_fd).collect();
        match nth {
            0 => kept.record(door(1), &borrowed[..2]),
            1 | 4 => kept.begin(),
            2 => kept.received(b"message", &many[..3]),
            3 => kept.record(door(2), &borrowed),
            5 => kept.sent(7),
            _ => kept.record(door(3), &borrowed[..1]),
        }
    }

    #[test]
    fn what_is_left_is_complete_whenever_the_launcher_dies() {
        let config = RuntimeConfig {
            processors: vec![reactor::processors()[0]],
            driver: DriverKind::Epoll,
            ..RuntimeConfig::default()
        };
        let ran = reactor::run(&config, |core| async move {
            let store = Rc::<Store>::default();
            let spec: DiskSpec = "name=a uri=null:1G socket=/a.sock".parse().unwrap();
            let some = memfd_create(c"some", MFdFlags::empty()).unwrap();
            let after = |steps: usize| {
                let memory = DeviceMemory::new(vec![some.try_clone().unwrap()]);
                let kept = Kept::new(&core, &store, &spec, None, memory).unwrap();
                (0..steps).for_each(|nth| step(&kept, nth, &some));
                assert!(kept.count.get() < 8, "{} packets", kept.count.get());
                let from = kept.from.as_fd().try_clone_to_owned().unwrap();
                let number = kept.number();
                drop(kept);
                read(&core, number, from)
            };
            assert!(after(0).is_err());
            let expected = [
                (Some(1), 2, vec![]),
                (None, 2, vec![]),
                (Some(1), 2, vec!["message, 3 descriptors"]),
                (Some(2), 600, vec![]),
                (None, 600, vec![]),
                (Some(2), 600, vec!["7 sent"]),
                (Some(3), 1, vec![]),
            ];
            for (nth, (pid, descriptors, changes)) in expected.into_iter().enumerate() {
                let left = after(nth + 1).unwrap();
                let state: Value = serde_json::to_value(&left.door.0).unwrap();
                assert_eq!(state["session"]["pid"].as_u64(), pid, "{nth}");
                assert_eq!((left.memory.len(), left.door.1.len()), (1, descriptors), "{nth}");
                let texts = left.changes.iter().map(|change| match change {
                    Change::Received(bytes, descriptors) => {
                        let text = String::from_utf8_lossy(bytes);
                        format!("{text}, {} descriptors", descriptors.len())
                    }
                    Change::Sent(count) => format!("{count} sent"),
                });
                assert_eq!(texts.collect::<Vec<_>>(), changes, "{nth}");
            }
        });
        ran.unwrap();
    }
}
