//! The end of a simulated process that does not end by itself: what becomes of its operations,
//! and of the disk.

use super::state::{Descriptor, Port, State};
use super::trace::What;
use crate::driver::IoOp;

/// How a simulated process ends when it does not end by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Crash {
    /// The process is killed; the machine goes on, with its page cache.
    Kill,
    /// The machine has no power, and what was not durable may be gone.
    PowerCut,
}

impl State {
    /// Lets a crash come instead of a later completion: the first is 1.
    pub fn arm(&mut self, crash: Crash, completions: std::ops::Range<u64>) {
        let nth = self.crashes.within(completions).max(1);
        self.armed = Some((nth, crash));
    }

    /// Whether the next completion comes, or a crash instead.
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

    /// The process ends now. What its cores still do until the world notices reaches nobody.
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
        // A kill before it does not hide a power cut, nor the other way round.
        if self.crashed != Some(Crash::PowerCut) {
            self.crashed = Some(crash);
        }
        let disk = self.disk.hash();
        self.note(0, u32::MAX, What::Crash { kind: crash as u8, disk });
    }

    /// Ends what a core has under way. Any part of a write may have been done, from its start on;
    /// any operation on names may have been done or not.
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
                // What it answers reaches nobody.
                drop(self.perform(name));
            }
        }
    }

    /// The next process may use the disk. It has so many cores.
    pub fn restart(&mut self, cores: usize) {
        self.crashed = None;
        self.ports.truncate(cores);
    }

    pub fn crashed(&self) -> Option<Crash> {
        self.crashed
    }

    /// A process that is gone holds no file open and no lock. Numbers are not used again, so
    /// whoever still has one meets `EBADF`.
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
