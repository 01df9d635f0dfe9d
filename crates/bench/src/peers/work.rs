//! What is measured: one program, doing one thing.

use super::Setup;
use super::bases::Base;
use super::ours::{self, Ours};
use super::row::Round;
use super::sample::Sample;
use super::search::Knob;
use super::vdisks::Vdisk;
use super::writes::Write;
use super::{fio, redis, release};

/// Our random gets, whose reads tell fio what to read.
pub const GET: &str = "millrace readrandom";
/// fio with requests of the size that our reads had in this round.
pub const FIO_SAME: &str = "fio same size";
/// fio with plain 4 KiB.
pub const FIO_4K: &str = "fio 4k";

/// One thing to measure.
#[derive(Clone, Debug)]
pub enum Work {
    /// A case of ours.
    Ours(&'static str, Ours),
    /// RocksDB's release reading the database, with the flags of bench/peers, at the best of its
    /// settings.
    Release {
        /// Its name in rows and results.
        name: &'static str,
        /// The case and its flags.
        flags: Vec<String>,
        /// What may be set.
        knobs: &'static [Knob],
        /// What is read.
        base: Base,
    },
    /// fio with requests of the size our reads had in this round.
    FioSame,
    /// fio with plain 4 KiB.
    Fio4k,
    /// A server under redis-benchmark.
    Redis(redis::Load),
    /// What writes.
    Write(Write),
    /// A virtual machine's disk.
    Vdisk(Vdisk),
}

impl Work {
    /// Whether it reads the database.
    pub fn needs_data(&self) -> bool {
        !matches!(self, Work::Vdisk(_))
    }

    /// Its name in rows and results.
    pub fn name(&self) -> &str {
        match self {
            Work::Ours(name, _) | Work::Release { name, .. } => name,
            Work::FioSame => FIO_SAME,
            Work::Fio4k => FIO_4K,
            Work::Redis(load) => load.name,
            Work::Write(write) => write.name(),
            Work::Vdisk(vdisk) => vdisk.name(),
        }
    }

    /// Measures. What was measured before in this round is at hand.
    pub fn run(&self, setup: &Setup, round: &Round) -> Result<Sample, String> {
        match self {
            Work::Ours(_, ours) => ours::run(setup, ours),
            Work::Release { name, flags, knobs, base } => {
                let dir = base.dir(setup)?;
                let run = |chosen: &[&str]| release::run(setup, &dir, flags, chosen);
                run(&setup.found.best(name, knobs, run)?)
            }
            Work::Write(write) => write.run(setup, round),
            Work::Vdisk(vdisk) => vdisk.run(setup),
            Work::FioSame => {
                let own = round.sample(GET).ok_or("our own reads were not measured")?;
                let bytes = own.bytes_per_io.ok_or("we read nothing")?;
                let align = own.report["io_alignment"].as_u64().unwrap_or(512).max(512);
                // A request is a multiple of the alignment; ours are of two such sizes, mostly.
                let block = ((bytes / align as f64).round() as u64).max(1) * align;
                fio::run(setup, FIO_SAME, block, align)
            }
            Work::Fio4k => fio::run(setup, FIO_4K, 4096, 4096),
            Work::Redis(load) => redis::run(setup, load),
        }
    }
}
