//! Starts, commands and stops the rings of a connection.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use reactor::{Class, Core, EventFd, race};

use super::{Connection, Refused, RingParts};
use crate::memory::dirty::DirtyLog;
use crate::protocol::handover::InFlight;
use crate::protocol::ring_state::{Kick, RingProgress, RingState};
use crate::ring::Setup;
use crate::ring::inflight::{Form, InflightRegion};
use crate::ring::request::Disk;
use crate::target::disk::{config, disk};
use crate::target::queue::{self, Command, RingEnd, RingHandle, Start, WaitGroup};
use crate::target::{FrontEnd, Order};

impl Connection<'_> {
    /// Suspends until every ring has executed the commands sent so far. Returns earlier if a ring
    /// ends, because it executes nothing more, or if the disk is told to stop.
    pub(super) async fn wait_commands(&mut self) {
        if !std::mem::take(&mut self.commands_pending) {
            return;
        }
        let wait_group = WaitGroup::default();
        self.each_ring(|_| Command::Barrier(wait_group.token()));
        self.commands_pending = false;
        let target = self.target;
        let interrupted = target.events.changed.wait_until(|| {
            !target.events.ended.borrow().is_empty() || target.order.get() == Order::Stop
        });
        race(interrupted, wait_group.wait()).await;
    }

    pub(super) fn part(&mut self, ring: u16) -> &mut RingParts {
        &mut self.rings[usize::from(ring)]
    }

    pub(super) fn send(&mut self, ring: u16, command: Command) {
        if let Some(handle) = &mut self.part(ring).handle {
            handle.send(command);
            self.commands_pending = true;
        }
    }

    pub(super) fn each_ring(&mut self, command: impl Fn(&Connection<'_>) -> Command) {
        for ring in 0..self.session.rings() {
            if self.part(ring).handle.is_some() {
                let command = command(self);
                self.send(ring, command);
            }
        }
    }

    /// The dirty log, if writes are logged.
    pub(super) fn log(&self) -> Option<Arc<DirtyLog>> {
        let log = self.log.as_ref().filter(|_| self.session.logging());
        log.map(|(log, _)| log.clone())
    }

    /// The disk for checking requests.
    pub(super) fn disk(&self) -> Disk {
        let config = config(&self.target.device().geometry(), self.session.rings());
        disk(&config, self.session.features(), &self.target.options.serial)
    }

    pub(super) fn form(&self) -> Form {
        if self.session.packed() { Form::Packed } else { Form::Split }
    }

    /// Maps the in-flight region, if there is one.
    fn inflight_region(&mut self) -> Result<Option<InflightRegion>, Refused> {
        let Some((info, fd)) = &self.inflight else { return Ok(None) };
        let account = self.memory.account();
        let region = InflightRegion::map_for(account, fd.as_fd(), *info, self.form());
        let region = region.map_err(|e| Refused::new("the in-flight region", e))?;
        if self.target.write_cache.get().is_none() && self.session.announced_write_cache() {
            self.session.disable_write_cache();
            tracing::info!(
                disk = &*self.target.name,
                "writes are made durable immediately: it is not known whether the guest was told \
                 of a write cache"
            );
        }
        Ok(Some(region))
    }

    pub(super) fn start_ring(&mut self, index: u16) -> Result<(), Refused> {
        let target = self.target;
        let region = self.inflight_region()?;
        let inflight = region.as_ref().and_then(|region| region.queue(index));
        if target.device().locks_for_use() && self.has_no_ring() {
            target.lock.set_region(region.clone());
        }
        let ring = *self.session.ring(index);
        let progress = self.part(index).progress.take();
        let addresses = ring.addresses.unwrap_or_default();
        let parts = &self.rings[usize::from(index)];
        let start = Start {
            disk_name: target.name.clone(),
            work: target.work,
            home: target.core.id(),
            index,
            setup: Setup {
                num: ring.size,
                desc: addresses.desc,
                avail: addresses.avail,
                used: addresses.used,
                log: ring.log,
                base: progress.map_or(ring.base, |progress| progress.base(self.session.packed())),
                features: self.session.features(),
            },
            memory: self.memory.clone(),
            disk: self.disk(),
            inflight,
            log: self.log(),
            kick: event(parts.kick.as_ref())?,
            call: event(parts.call.as_ref())?,
            err: event(parts.err.as_ref())?,
            polled: ring.kick == Kick::Polling,
            fua: !self.session.write_cache(),
            enabled: ring.state != RingState::Paused,
            broken: progress.is_some_and(|progress| progress.broken),
            hold: target.hold.get(),
            waits_for_lock: target.want_lock(),
            device: target.device(),
            activity: target.activity.clone(),
            limits: target.limits.clone(),
            stats: target.stats[usize::from(index)].clone(),
            log_limits: target.log_limits.clone(),
            trouble: target.trouble.clone(),
        };
        self.holds |= start.hold.is_some();
        target.set_front_end(FrontEnd::Running { moves: self.session.logging() });
        self.waits_for_lock |= start.waits_for_lock;
        let (handle, commands) = queue::command_queue();
        self.part(index).handle = Some(handle);
        let there = (target.options.first_core + usize::from(index)) % target.core.cores();
        let (core, events) = (target.core.clone(), target.events.clone());
        target.core.spawn(Class::Control, async move {
            let run = move |core: &Core| {
                let core = core.clone();
                async move { core.working(start.work, queue::run(core.clone(), start, commands)).await }
            };
            let ended = core.spawn_on(there, Class::Control, run).await;
            events.ended.borrow_mut().push_back(ended);
            events.changed.notify_all();
        });
        Ok(())
    }

    pub(super) fn stop_ring(&mut self, ring: u16) {
        if self.part(ring).handle.is_some() {
            self.send(ring, Command::Stop);
        } else {
            let base = self.session.ring(ring).base;
            let ended = RingEnd::at(ring, base, false);
            self.target.events.ended.borrow_mut().push_back(ended);
        }
    }

    /// Starts the rings that were quiesced.
    pub(super) fn wake_rings(&mut self) -> Result<(), Refused> {
        for ring in 0..self.session.rings() {
            if self.part(ring).progress.is_some() {
                self.start_ring(ring)?;
            }
        }
        Ok(())
    }

    /// Lets the rings continue with the requests that they hold, if they may.
    pub(super) fn release(&mut self) {
        if self.holds && self.target.hold.get().is_none() {
            self.holds = false;
            self.rings
                .iter()
                .filter_map(|parts| parts.handle.as_ref())
                .for_each(RingHandle::release);
        }
    }

    /// Lets the rings take requests: the image is locked.
    pub(super) fn locked(&mut self) {
        self.waits_for_lock = false;
        let running = self.rings.iter().filter_map(|parts| parts.handle.as_ref());
        running.for_each(RingHandle::locked);
    }

    /// Whether no ring runs.
    pub(super) fn has_no_ring(&self) -> bool {
        self.rings.iter().all(|parts| parts.handle.is_none())
    }

    /// Quiesces all rings: stops them and waits for their requests at the device. If the disk is
    /// forced, abandons the rings instead, provided that the disk continues elsewhere with the
    /// in-flight region (`continues`) or is being stopped.
    pub(in crate::target) async fn stop_rings(&mut self, continues: bool) {
        for parts in &mut self.rings {
            if let Some(handle) = &mut parts.handle {
                handle.send(Command::Leave);
            }
        }
        let target = self.target;
        let events = &target.events;
        let packed = self.session.packed();
        let mut abandoned = None;
        let mut what = InFlight::default();
        // A front end may have a region for some of its rings only.
        let recorded = self.inflight.as_ref().map_or(0, |(info, _)| usize::from(info.queues));
        let is_recorded = self.rings.iter().skip(recorded).all(|parts| parts.handle.is_none());
        let stopped = || {
            self.release();
            let rings = &mut self.rings;
            for RingEnd { index, base, broken, flushes } in events.ended.borrow_mut().drain(..) {
                let parts = &mut rings[usize::from(index)];
                parts.handle = None;
                parts.progress = Some(RingProgress::from_base(base, packed, broken));
                what.flushes |= flushes;
            }
            if rings.iter().all(|parts| parts.handle.is_none()) {
                return true;
            }
            // Stopping is like a crash, whether or not the front end has an in-flight region.
            let known = continues && is_recorded || target.order.get() == Order::Stop;
            if known && target.forced.get() && abandoned.is_none() {
                let operations = WaitGroup::default();
                for handle in rings.iter_mut().filter_map(|parts| parts.handle.as_mut()) {
                    handle.send(Command::Abandon(operations.token()));
                }
                abandoned = Some(operations);
            }
            false
        };
        events.changed.wait_until(stopped).await;
        if let Some(operations) = abandoned {
            target.in_flight.replace(Some((operations, what)));
        }
    }
}

/// Duplicates the descriptor of an eventfd for a ring. The original stays for a successor.
pub(super) fn event(fd: Option<&OwnedFd>) -> Result<Option<EventFd>, Refused> {
    let event = fd.map(|fd| fd.try_clone().and_then(EventFd::from_fd)).transpose();
    event.map_err(|error| Refused::new("a ring's descriptor", error))
}
