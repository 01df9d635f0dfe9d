//! A measurement: one program doing one thing.

use super::Setup;
use super::bases::Base;
use super::ours::{self, Ours};
use super::row::Round;
use super::sample::Sample;
use super::search::Knob;
use super::vdisk::Vdisk;
use super::writes::Write;
use super::{fio, redis, release};

/// Our random gets; their reads give the size of fio's requests.
pub const GET: &str = "millrace readrandom";
/// fio with 64 requests in flight, of the size that our reads had in this round.
pub const FIO_SAME: &str = "fio same size";
/// The same with one request in flight.
pub const FIO_SAME_1: &str = "fio same size depth 1";
/// fio with plain 4 KiB, 64 in flight.
pub const FIO_4K: &str = "fio 4k";

/// What fio does at depth 64 and at depth 1: their ratio is all that a deep queue gains on this
/// disk over one request at a time.
pub const DISK_64_OVER_1: [&str; 2] = [FIO_SAME, FIO_SAME_1];

/// One measurement.
#[derive(Clone, Debug)]
pub enum Work {
    /// A case of ours.
    Ours(&'static str, Ours),
    /// RocksDB's release reading the database, with the flags of bench/peers, at its best settings.
    Release {
        /// The measurement's name.
        name: &'static str,
        /// The case and its flags.
        flags: Vec<String>,
        /// The settings to search.
        knobs: &'static [Knob],
        /// The database.
        base: Base,
    },
    /// fio with requests of the size that our reads had in this round, at this depth.
    FioSame(&'static str, u16),
    /// fio with plain 4 KiB.
    Fio4k,
    /// A server under redis-benchmark.
    Redis(redis::Load),
    /// A program that writes.
    Write(Write),
    /// A virtual machine's disk.
    Vdisk(Vdisk),
}

/// fio's measurements of the database's files.
pub fn measurement(name: &'static str) -> Option<Work> {
    match name {
        FIO_SAME => Some(Work::FioSame(name, 64)),
        FIO_SAME_1 => Some(Work::FioSame(name, 1)),
        FIO_4K => Some(Work::Fio4k),
        _ => None,
    }
}

impl Work {
    /// Whether it reads the database.
    pub fn needs_data(&self) -> bool {
        !matches!(self, Work::Vdisk(_))
    }

    /// The measurement of the same round that this one is derived from.
    pub fn needs(&self) -> Option<&'static str> {
        match self {
            Work::FioSame(..) => Some(GET),
            Work::Write(write) => write.needs(),
            _ => None,
        }
    }

    /// The measurement's name.
    pub fn name(&self) -> &'static str {
        match self {
            Work::Ours(name, _) | Work::Release { name, .. } | Work::FioSame(name, _) => name,
            Work::Fio4k => FIO_4K,
            Work::Redis(load) => load.name,
            Work::Write(write) => write.name(),
            Work::Vdisk(vdisk) => vdisk.name,
        }
    }

    /// Measures. `round` has this round's earlier measurements.
    pub fn run(&self, setup: &Setup, round: &Round) -> Result<Sample, String> {
        match self {
            Work::Ours(_, ours) => ours::run(setup, ours),
            Work::Release { name, flags, knobs, base } => {
                let dir = base.dir(setup)?;
                let run = |chosen: &[&str]| release::run(setup, &dir, flags, chosen);
                run(&setup.searches.best(name, knobs, run)?)
            }
            Work::Write(write) => write.run(setup, round),
            Work::Vdisk(vdisk) => vdisk.run(setup),
            Work::FioSame(name, depth) => {
                let own = round.sample(GET).ok_or("our own reads were not measured")?;
                let bytes = own.bytes_per_io.ok_or("our gets read nothing from the disk")?;
                let align = own.report["io_alignment"].as_u64().unwrap_or(512).max(512);
                // Requests are multiples of the alignment; most of ours have one of two such sizes.
                let block = ((bytes / align as f64).round() as u64).max(1) * align;
                fio::run(setup, name, fio::Requests { block, align, depth: *depth })
            }
            Work::Fio4k => {
                fio::run(setup, FIO_4K, fio::Requests { block: 4096, align: 4096, depth: 64 })
            }
            Work::Redis(load) => redis::run(setup, load),
        }
    }
}
