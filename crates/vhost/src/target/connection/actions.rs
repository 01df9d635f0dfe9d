//! Performs the session's actions.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use reactor::{UnixSocket, drop_in_background};

use super::rings::event;
use super::{Connection, Refused};
use crate::memory::dirty::DirtyLog;
use crate::memory::{GuestMemory, MemoryError, RegionInfo};
use crate::protocol::message::{InflightInfo, LogInfo};
use crate::protocol::session::{Action, Reply};
use crate::ring::inflight::InflightRegion;
use crate::target::log_limit::LogPermit;
use crate::target::queue::Command;

/// Interval of checks whether old memory is unmapped, and their number: one minute in all. Other
/// cores and the thread of [`drop_in_background`] release it, so there is no event to wait for.
const OLD_MEMORY_NS: u64 = 5_000_000;
const OLD_MEMORY_CHECKS: u32 = 12_000;

impl Connection<'_> {
    /// Suspends while old memory, kept by requests at the device, leaves no room for the new
    /// memory, but at most for a minute, and not after the disk is told to stop.
    async fn until_old_memory_is_gone(&self, action: &Action) {
        let new: Vec<_> = match action {
            Action::ReplaceMemory(regions) => regions.iter().map(|(region, _)| region).collect(),
            Action::AddRegion(region, _) => vec![region],
            Action::RemoveRegion(_) => Vec::new(),
            _ => return,
        };
        let lacks = |region: &&&RegionInfo| !self.memory.regions().any(|known| known == **region);
        let new = new.iter().filter(lacks).map(|region| region.size);
        let (bytes, count) =
            new.fold((0_u64, 0), |(bytes, count), size| (bytes.saturating_add(size), count + 1));
        let (account, core) = (self.memory.account(), &self.target.core);
        let waiting = async {
            for _ in 0..OLD_MEMORY_CHECKS {
                let room = account.table_room().and_then(|()| account.room(bytes, count));
                if room.is_ok() || !account.keeps_tables() {
                    return;
                }
                core.sleep_ns(OLD_MEMORY_NS).await;
            }
        };
        self.target.unless_stopped(waiting).await;
    }

    /// Performs the session's actions in order.
    pub(super) async fn perform(&mut self, actions: Vec<Action>) -> Result<(), Refused> {
        let mut actions = VecDeque::from(actions);
        while let Some(action) = actions.pop_front() {
            match action {
                Action::Reply(reply) => {
                    // The reply tells the front end that its request is in force, on every ring's
                    // core.
                    self.wait_commands().await;
                    self.reply(reply)?;
                }
                Action::CreateInflight { queues, queue_size } => {
                    // A new front end: it knows what it was told on this connection.
                    let volatile = self.target.device().geometry().volatile_cache;
                    let told = volatile.then_some(self.session.announced_write_cache());
                    if told != self.target.write_cache.get()
                        && let Err(Refused(why)) = self.target.store_write_cache(told).await
                    {
                        tracing::warn!(disk = &*self.target.name, "{why}");
                    }
                    let (area, fd) = self.create_inflight(queues, queue_size)?;
                    actions.extend(self.session.inflight_created(&area, fd));
                }
                Action::StopRing(ring) => self.stop_ring(ring),
                action => {
                    self.until_old_memory_is_gone(&action).await;
                    if let Err(Refused(why)) = self.apply(action) {
                        let Some(Action::Reply(mut reply)) = actions.pop_back() else {
                            return Err(Refused(why));
                        };
                        if !reply.refuse() {
                            return Err(Refused(why));
                        }
                        let target = self.target;
                        if let Some(LogPermit { left_out }) =
                            target.permit(&target.log_limits.refused)
                        {
                            tracing::warn!(disk = &*target.name, left_out, "refused: {why}");
                        }
                        return self.reply(reply);
                    }
                }
            }
        }
        Ok(())
    }

    /// Sends a reply, as far as the front end's socket has room.
    fn reply(&mut self, reply: Reply) -> Result<(), Refused> {
        let sent = self.link.reply(reply);
        sent.map_err(|error| Refused::new("sending a reply", error))
    }

    pub(super) fn apply(&mut self, action: Action) -> Result<(), Refused> {
        match action {
            Action::FeaturesChanged => {
                self.each_ring(|connection| Command::Disk(connection.disk()));
                self.each_ring(|connection| Command::Log(connection.log()));
            }
            Action::WriteCache(_) => {
                self.each_ring(|connection| Command::Fua(!connection.session.write_cache()));
            }
            Action::ReplaceMemory(regions) => self.replace_memory(regions)?,
            Action::AddRegion(region, fd) => self.add_region(region, fd)?,
            Action::RemoveRegion(region) => self.remove_region(region)?,
            Action::Inflight(area, fd) => {
                // Whether it is valid shows when a ring starts: then its format is known.
                drop_in_background(self.inflight.replace((area, fd)));
            }
            Action::DropInflight => drop_in_background(self.inflight.take()),
            Action::Log(area, fd) => self.set_log(area, fd)?,
            // The front end reads the log without a signal.
            Action::LogSignal(fd) => self.log_signal = Some(fd),
            Action::BackendChannel(fd) => self.set_channel(fd)?,
            Action::Kick(ring, fd) => {
                let event = event(fd.as_ref())?;
                self.part(ring).kick = fd;
                self.send(ring, Command::Kick(event));
            }
            Action::Call(ring, fd) => {
                let event = event(fd.as_ref())?;
                self.part(ring).call = fd;
                self.send(ring, Command::Call(event));
            }
            Action::Err(ring, fd) => {
                let event = event(fd.as_ref())?;
                self.part(ring).err = fd;
                self.send(ring, Command::Err(event));
            }
            Action::StartRing(ring) => self.start_ring(ring)?,
            Action::EnableRing(ring, enabled) => self.send(ring, Command::Enable(enabled)),
            Action::RingLog(ring) => {
                let log = self.session.ring(ring).log;
                self.send(ring, Command::RingLog(log));
            }
            Action::Reply(_) | Action::CreateInflight { .. } | Action::StopRing(_) => {
                unreachable!("done by `perform`")
            }
        }
        Ok(())
    }

    fn replace_memory(&mut self, regions: Vec<(RegionInfo, OwnedFd)>) -> Result<(), Refused> {
        let table: Vec<_> = regions.iter().map(|(region, fd)| (*region, fd.as_fd())).collect();
        let room = self.memory.account().table_room().map_err(MemoryError::NoRoom);
        let memory = room.and_then(|()| self.memory.replace(&table)).map_err(|e| {
            let known = self.target.regions.borrow();
            self.session.keep_regions(known.iter().map(|(region, _)| *region));
            Refused::new("the memory table", e)
        })?;
        self.set_memory(memory);
        drop_in_background(self.target.regions.replace(regions));
        Ok(())
    }

    fn add_region(&mut self, region: RegionInfo, fd: OwnedFd) -> Result<(), Refused> {
        let room = self.memory.account().table_room().map_err(MemoryError::NoRoom);
        let added = room.and_then(|()| self.memory.with_region(region, fd.as_fd()));
        let memory = added.map_err(|e| {
            self.session.forget_region(&region);
            Refused::new("a memory region", e)
        })?;
        self.set_memory(memory);
        self.target.regions.borrow_mut().push((region, fd));
        Ok(())
    }

    fn remove_region(&mut self, region: RegionInfo) -> Result<(), Refused> {
        let memory = self.memory.without_region(region);
        self.set_memory(memory.map_err(|e| Refused::new("a memory region", e))?);
        let known = self.session.regions();
        let mut regions = self.target.regions.borrow_mut();
        let gone = regions.extract_if(.., |(region, _)| !known.contains(region));
        drop_in_background(gone.collect::<Vec<_>>());
        Ok(())
    }

    fn set_log(&mut self, area: LogInfo, fd: OwnedFd) -> Result<(), Refused> {
        let account = self.memory.account();
        let log = DirtyLog::map_for(account, fd.as_fd(), area.mmap_size, area.mmap_offset);
        let log = log.map_err(|e| Refused::new("the dirty log", e))?;
        drop_in_background(self.log.replace((Arc::new(log), fd)));
        self.each_ring(|connection| Command::Log(connection.log()));
        Ok(())
    }

    fn set_channel(&mut self, fd: OwnedFd) -> Result<(), Refused> {
        // The front end no longer uses the old one, whether or not the new one works.
        self.channel = None;
        let channel = UnixSocket::from_fd(&self.target.core, fd).map_err(|e| {
            self.session.forget_backend_channel();
            Refused::new("the channel for messages", e)
        })?;
        self.channel = Some(channel);
        Ok(())
    }

    fn set_memory(&mut self, memory: GuestMemory) {
        self.memory = Arc::new(memory);
        self.each_ring(|connection| Command::Memory(connection.memory.clone()));
    }

    fn create_inflight(
        &self,
        queues: u16,
        queue_size: u16,
    ) -> Result<(InflightInfo, OwnedFd), Refused> {
        let made = InflightRegion::create(queues, queue_size, self.form());
        let (region, fd) = made.map_err(|e| Refused::new("making an in-flight region", e))?;
        Ok((region.info(), fd))
    }
}
