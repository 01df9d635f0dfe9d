//! What a driven disk is asked for.

use std::path::PathBuf;
use std::str::FromStr;

use frontend::DiskOptions;

/// The kind of requests, in fio's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mix {
    /// Reads at random places.
    RandRead,
    /// Writes at random places.
    RandWrite,
    /// Both, half of each.
    RandRw,
    /// Reads in order.
    Read,
    /// Writes in order.
    Write,
}

impl Mix {
    /// All kinds.
    pub const ALL: [Mix; 5] = [Mix::RandRead, Mix::RandWrite, Mix::RandRw, Mix::Read, Mix::Write];

    /// fio's word.
    pub fn name(self) -> &'static str {
        match self {
            Mix::RandRead => "randread",
            Mix::RandWrite => "randwrite",
            Mix::RandRw => "randrw",
            Mix::Read => "read",
            Mix::Write => "write",
        }
    }

    /// Whether it writes.
    pub(super) fn writes(self) -> bool {
        !matches!(self, Mix::RandRead | Mix::Read)
    }
}

impl FromStr for Mix {
    type Err = String;

    fn from_str(text: &str) -> Result<Mix, String> {
        Mix::ALL.into_iter().find(|mix| mix.name() == text).ok_or_else(|| {
            let all = Mix::ALL.map(Mix::name).join(", ");
            format!("rw must be one of {all}, not \"{text}\"")
        })
    }
}

/// What to measure, and how.
#[derive(Clone, Debug)]
pub struct VdiskPlan {
    /// The disk for our own target to serve.
    pub disk: Option<String>,
    /// The socket of another, running target.
    pub socket: Option<PathBuf>,
    /// The kind of requests.
    pub rw: Mix,
    /// Bytes of a request.
    pub block_size: u32,
    /// Requests in flight on each queue.
    pub depth: u16,
    /// Queues.
    pub queues: u16,
    /// Use packed rings.
    pub packed: bool,
    /// Length of the window.
    pub seconds: f64,
    /// Verify the data.
    pub verify: bool,
    /// Follow each write with a flush.
    pub sync: bool,
    /// How long a slot is idle before its next request.
    pub think_us: u32,
    /// Processor of our own target.
    pub target_processor: usize,
    /// Processor of the front end.
    pub front_processor: usize,
}

impl VdiskPlan {
    /// The options of the front end.
    pub(super) fn options(&self) -> DiskOptions {
        DiskOptions {
            queues: self.queues,
            queue_size: self.depth.next_power_of_two().max(256),
            depth: self.depth,
            slot_bytes: self.block_size,
            packed: self.packed,
            ..DiskOptions::default()
        }
    }
}
