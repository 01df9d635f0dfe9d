//! Crashes of a simulated process: the fate of its operations, and of the disk.

use super::state::{Descriptor, Port, State};
use super::trace::What;
use crate::driver::IoOp;

/// A crash of a simulated process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Crash {
    /// The process is killed; the machine and its page cache survive.
    Kill,
    /// The machine loses power; data that was not durable may be lost.
    PowerCut,
}

impl State {
    /// Schedules a crash in place of a later completion: the first is 1.
    pub fn arm(&mut self, crash: Crash, completions: std::ops::Range<u64>) {
        let nth = self.crashes.within(completions).max(1);
        self.armed = Some((nth, crash));
    }

    /// Whether the next completion comes, or a crash in its place.
    pub(super) fn completes(&mut self) -> bool {
        if self.crashed.is_some() {
            return false;
        }
        let Some((left, crash)) = &mut self.armed else {
            return true;
        };
        *left -= 1;
        if *left > 0 {
            return true;
        }
        let crash = *crash;
        self.crash(crash);
        false
    }

    /// Ends the process now. Actions of its cores until the world notices have no effect.
    pub fn crash(&mut self, crash: Crash) {
        self.armed = None;
        for core in 0..self.ports.len() {
            self.cut_short(core);
        }
        if crash == Crash::PowerCut {
            self.disk.lose_power(&mut self.crashes);
        }
        self.close_files();
        self.forget_images();
        // A power cut replaces a kill before it; a kill does not replace a power cut.
        if self.crashed != Some(Crash::PowerCut) {
            self.crashed = Some(crash);
        }
        let disk = self.disk.hash();
        self.note(0, u32::MAX, What::Crash { kind: crash as u8, disk });
    }

    /// Ends a core's operations in flight. Any prefix of a write may have been done; any operation
    /// on names may have been done or not.
    pub(super) fn cut_short(&mut self, core: usize) {
        let port = std::mem::take(&mut self.ports[core]);
        for running in port.running.into_values() {
            if let (
                IoOp::Write { fd, offset, .. }
                | IoOp::WriteV { fd, offset, .. }
                | IoOp::Fallocate { fd, offset, .. },
                None,
            ) = (running.op, running.result)
                && let Some(file) = self.file(fd)
            {
                let mut inode = file.inode.borrow_mut();
                let cut = inode.write_prefix(&mut self.crashes, offset, &running.data);
                self.disk.counts.cut_short += u64::from(cut);
            }
        }
        let own: Vec<_> = self.names_of(core);
        for name in own {
            if name.name_error.is_none() && self.crashes.coin() {
                // Its answer has no receiver.
                drop(self.perform(name));
            }
        }
    }

    /// Prepares the disk for the next process, which has `cores` cores.
    pub fn restart(&mut self, cores: usize) {
        self.crashed = None;
        self.ports.truncate(cores);
    }

    pub fn crashed(&self) -> Option<Crash> {
        self.crashed
    }

    /// Closes all files and releases all locks of an ended process. Numbers are not reused, so a
    /// stale one gives `EBADF`.
    fn close_files(&mut self) {
        self.close_dropped();
        let files: Vec<i32> = self
            .descriptors()
            .filter(|(_, d)| matches!(d, Descriptor::File(_) | Descriptor::Lock { .. }))
            .map(|(number, _)| number)
            .collect();
        for number in files {
            self.remove(number);
        }
        for port in &mut self.ports {
            *port = Port::default();
        }
    }
}
