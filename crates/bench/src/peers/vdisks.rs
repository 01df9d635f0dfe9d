//! Disks for virtual machines: Millrace, qemu-storage-daemon and, without a virtual machine's
//! interface between, fio.
//!
//! The target runs on one processor, and the same front end (`millrace bench vdisk`) drives all
//! targets from the other. The file is fully written beforehand and opened for direct I/O by
//! everybody.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

use super::Setup;
use super::fio;
use super::row::{Goal, Row, Unit};
use super::sample::Sample;
use super::search::Knob;
use super::tool::{Background, Tool};
use super::work::Work;
use crate::vdisk::quoted;

/// Bytes of the file.
const FILE_BYTES: u64 = 2 << 30;
/// Gibibytes of devices that hold nothing.
const NULL_GIB: u64 = 64;

/// Disks that nobody uses.
const IDLE_DISKS: u16 = 32;
/// How often a target is replaced.
const REPLACEMENTS: &str = "20";

/// qemu-storage-daemon's main loop, or a thread of its own that looks for so many nanoseconds
/// before it sleeps.
const IOTHREAD: Knob = &[
    &[],
    &["--object", "iothread,id=thread"],
    &["--object", "iothread,id=thread,poll-max-ns=100000"],
    &["--object", "iothread,id=thread,poll-max-ns=1000000"],
];

/// How often and how far apart the daemon is started until it gets the lock of its file.
const LOCK_TRIES: u32 = 50;
const LOCK_WAIT: Duration = Duration::from_millis(100);

/// What serves a disk, and which.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    /// Ours, by the scheme of its URI, or the parameters of a file's.
    Ours(&'static str),
    /// Many of ours that hold nothing, and are not used.
    OursIdle,
    /// Ours on the file, replaced so by a flag of the front end.
    OursReplaced(&'static str),
    /// qemu-storage-daemon's null device.
    DaemonNull,
    /// Its file, by this kind of I/O.
    DaemonFile(&'static str),
    /// fio on the file.
    Fio,
}

/// One measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vdisk {
    name: &'static str,
    target: Target,
    rw: &'static str,
    depth: u16,
    /// More of the front end's flags.
    flags: &'static [&'static str],
}

impl Vdisk {
    /// Its name in rows and results.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Measures.
    pub fn run(&self, setup: &Setup) -> Result<Sample, String> {
        match self.target {
            Target::Fio => fio::run_file(setup, self.name, &file(setup)?, self.rw, self.depth),
            Target::Ours(disk) => {
                let uri = match disk {
                    "null" => format!("null:{NULL_GIB}G"),
                    // So small that warming up touches every page.
                    "mem" => "mem:128M".to_owned(),
                    parameters => format!("file:{}?{parameters}", quoted(&file(setup)?)),
                };
                self.drive(setup, ["--disk".to_owned(), uri])
            }
            Target::OursIdle => idle(setup),
            Target::OursReplaced(how) => replaced(setup, how, self.depth),
            Target::DaemonNull => {
                self.drive_daemon(setup, &format!("driver=null-co,size={}", NULL_GIB << 30))
            }
            Target::DaemonFile(aio) => {
                // A comma ends a name for QEMU; two are one.
                let path = file(setup)?.to_string_lossy().replace(',', ",,");
                let node = format!("driver=file,filename={path},cache.direct=on,aio={aio}");
                self.drive_daemon(setup, &node)
            }
        }
    }

    /// Drives qemu-storage-daemon at the best of its settings.
    fn drive_daemon(&self, setup: &Setup, node: &str) -> Result<Sample, String> {
        let run = |flags: &[&str]| self.drive_daemon_once(setup, node, flags);
        run(&setup.found.best(self.name, &[IOTHREAD], run)?)
    }

    fn drive_daemon_once(
        &self,
        setup: &Setup,
        node: &str,
        flags: &[&str],
    ) -> Result<Sample, String> {
        let socket = setup.scratch.join("vdisk.sock");
        let mut daemon = start_daemon_patiently(setup, node, &socket, flags)?;
        let socket = socket.to_string_lossy().into_owned();
        let sample = self.drive(setup, ["--socket".to_owned(), socket])?;
        daemon.check()?;
        Ok(Sample { command: daemon.line().to_owned(), ..sample })
    }

    fn drive(&self, setup: &Setup, target: [String; 2]) -> Result<Sample, String> {
        let other = setup.other.ok_or("there is only one processor here")?;
        let tool = Tool::new(&setup.millrace)
            .args(["bench", "vdisk", "--json", "--rw", self.rw])
            .args(target)
            .args(["--depth".to_owned(), self.depth.to_string()])
            .args(self.flags.iter().copied())
            .args(["--seconds".to_owned(), setup.seconds.to_string()])
            .args(["--cores".to_owned(), format!("{},{other}", setup.processor)]);
        let command = tool.line();
        let report: Value = serde_json::from_str(tool.output()?.trim())
            .map_err(|error| format!("the report of {command} is no JSON: {error}"))?;
        if report["errors"].as_u64() != Some(0) {
            return Err(format!("requests failed: {}", report["errors"]));
        }
        super::ours::sample(command, report)
    }
}

/// A target of ours that was killed just now may hold its lock of the file a moment longer than its
/// launcher lives: the daemon is started again until it gets the lock.
#[expect(clippy::disallowed_methods, reason = "waits for another program, on no core")]
fn start_daemon_patiently(
    setup: &Setup,
    node: &str,
    socket: &Path,
    flags: &[&str],
) -> Result<Background, String> {
    let mut tries = 0;
    loop {
        match start_daemon(setup, node, socket, flags) {
            Err(error) if error.contains("lock") && tries < LOCK_TRIES => {
                tries += 1;
                std::thread::sleep(LOCK_WAIT);
            }
            result => return result,
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "waits for another program, on no core")]
fn start_daemon(
    setup: &Setup,
    node: &str,
    socket: &Path,
    flags: &[&str],
) -> Result<Background, String> {
    let _ = std::fs::remove_file(socket);
    let thread = if flags.is_empty() { "" } else { ",iothread=thread" };
    let export = format!(
        "type=vhost-user-blk,id=export,node-name=disk,writable=on,addr.type=unix,addr.path={}{thread}",
        socket.display()
    );
    let mut daemon = Tool::pinned(setup.processor, "qemu-storage-daemon")
        .args(flags.iter().copied())
        .args(["--blockdev".to_owned(), format!("{node},node-name=disk")])
        .args(["--export".to_owned(), export])
        .start()?;
    for _ in 0..1000 {
        if socket.exists() {
            return Ok(daemon);
        }
        daemon.check()?;
        std::thread::sleep(Duration::from_millis(10));
    }
    Err("qemu-storage-daemon does not listen".to_owned())
}

/// Disks that nobody uses; what they take is in the report.
fn idle(setup: &Setup) -> Result<Sample, String> {
    let tool = Tool::new(&setup.millrace)
        .args(["bench", "vdisk", "--json", "--idle", &IDLE_DISKS.to_string()])
        .args(["--disk", &format!("null:{NULL_GIB}G")])
        .args(["--seconds", &setup.seconds.to_string()])
        .args(["--cores", &format!("{0}-{0}", setup.processor)]);
    let command = tool.line();
    let report: Value = serde_json::from_str(tool.output()?.trim())
        .map_err(|error| format!("the report of {command} is no JSON: {error}"))?;
    Ok(Sample { command, report, ..Sample::default() })
}

/// How long requests wait when the target is replaced; all of it is in the report.
fn replaced(setup: &Setup, how: &str, depth: u16) -> Result<Sample, String> {
    let other = setup.other.ok_or("there is only one processor here")?;
    let tool = Tool::new(&setup.millrace)
        .args(["bench", "vdisk", "--json", "--rw", "randrw", how, REPLACEMENTS])
        .args(["--disk".to_owned(), format!("file:{}", quoted(&file(setup)?))])
        .args(["--depth".to_owned(), depth.to_string()])
        .args(["--cores".to_owned(), format!("{},{other}", setup.processor)]);
    let command = tool.line();
    let report: Value = serde_json::from_str(tool.output()?.trim())
        .map_err(|error| format!("the report of {command} is no JSON: {error}"))?;
    Ok(Sample { command, report, ..Sample::default() })
}

/// The file, written in full once.
#[expect(clippy::disallowed_methods, reason = "looks for the file to measure, on no core")]
fn file(setup: &Setup) -> Result<PathBuf, String> {
    let path = setup.scratch.join("vdisk.img");
    if std::fs::metadata(&path).is_ok_and(|meta| meta.len() == FILE_BYTES) {
        return Ok(path);
    }
    let new = setup.scratch.join("vdisk.img.new");
    let _ = std::fs::remove_file(&new);
    Tool::new("fio")
        .args(["--name=fill", "--rw=write", "--bs=1M", "--direct=1", "--end_fsync=1"])
        .args(["--ioengine=io_uring", "--iodepth=8", "--refill_buffers"])
        .arg(format!("--size={FILE_BYTES}"))
        .arg(format!("--filename={}", new.to_string_lossy().replace(':', "\\:")))
        .output()?;
    std::fs::rename(&new, &path).map_err(|error| format!("renaming {}: {error}", new.display()))?;
    Ok(path)
}

macro_rules! vdisks {
    ($($constant:ident = $name:literal, $target:expr, $rw:ident, $depth:literal $(, $flag:literal)*;)*) => {
        $(const $constant: Vdisk = Vdisk {
            name: $name, target: $target, rw: stringify!($rw), depth: $depth, flags: &[$($flag),*],
        };)*
    };
}

const URING: Target = Target::Ours("engine=uring");
const AIO: Target = Target::Ours("engine=aio");
const THROUGH: Target = Target::Ours("engine=uring&write=through");

vdisks! {
    NULL_1 = "millrace vdisk null randread 1", Target::Ours("null"), randread, 1;
    NULL_1_THINK = "millrace vdisk null randread 1 think 20 us",
        Target::Ours("null"), randread, 1, "--think-us", "20";
    NULL_READ = "millrace vdisk null randread 128", Target::Ours("null"), randread, 128;
    NULL_WRITE = "millrace vdisk null randwrite 128", Target::Ours("null"), randwrite, 128;
    NULL_PACKED = "millrace vdisk null randread 128 packed",
        Target::Ours("null"), randread, 128, "--packed";
    NULL_QUEUES = "millrace vdisk null randread 128 four queues",
        Target::Ours("null"), randread, 32, "--queues", "4";
    IDLE = "millrace vdisk idle", Target::OursIdle, randread, 1;
    MEM = "millrace vdisk mem randread 32", Target::Ours("mem"), randread, 32;
    READ_32 = "millrace vdisk file randread 32", URING, randread, 32;
    WRITE_32 = "millrace vdisk file randwrite 32", URING, randwrite, 32;
    READ_128 = "millrace vdisk file randread 128", URING, randread, 128;
    WRITE_128 = "millrace vdisk file randwrite 128", URING, randwrite, 128;
    AIO_READ = "millrace vdisk file aio randread 32", AIO, randread, 32;
    AIO_WRITE = "millrace vdisk file aio randwrite 32", AIO, randwrite, 32;
    THROUGH_1 = "millrace vdisk file through randwrite 1", THROUGH, randwrite, 1;
    THROUGH_32 = "millrace vdisk file through randwrite 32", THROUGH, randwrite, 32;
    FLUSHED_1 = "millrace vdisk file flushed randwrite 1", URING, randwrite, 1, "--sync";
    FLUSHED_32 = "millrace vdisk file flushed randwrite 32", URING, randwrite, 32, "--sync";
    UPGRADE_1 = "millrace vdisk upgrades 1", Target::OursReplaced("--upgrades"), randrw, 1;
    UPGRADE_32 = "millrace vdisk upgrades 32", Target::OursReplaced("--upgrades"), randrw, 32;
    RESTART_1 = "millrace vdisk restarts 1", Target::OursReplaced("--restarts"), randrw, 1;
    RESTART_32 = "millrace vdisk restarts 32", Target::OursReplaced("--restarts"), randrw, 32;
    QSD_1 = "qemu null-co randread 1", Target::DaemonNull, randread, 1;
    QSD_1_THINK = "qemu null-co randread 1 think 20 us",
        Target::DaemonNull, randread, 1, "--think-us", "20";
    QSD_32 = "qemu null-co randread 32", Target::DaemonNull, randread, 32;
    QSD_READ = "qemu null-co randread 128", Target::DaemonNull, randread, 128;
    QSD_WRITE = "qemu null-co randwrite 128", Target::DaemonNull, randwrite, 128;
    QSD_URING_READ = "qemu io_uring randread 32", Target::DaemonFile("io_uring"), randread, 32;
    QSD_URING_WRITE = "qemu io_uring randwrite 32", Target::DaemonFile("io_uring"), randwrite, 32;
    QSD_AIO_READ = "qemu native randread 32", Target::DaemonFile("native"), randread, 32;
    QSD_AIO_WRITE = "qemu native randwrite 32", Target::DaemonFile("native"), randwrite, 32;
    QSD_THREADS_READ = "qemu threads randread 32", Target::DaemonFile("threads"), randread, 32;
    QSD_THREADS_WRITE = "qemu threads randwrite 32", Target::DaemonFile("threads"), randwrite, 32;
    FIO_READ_32 = "fio file randread 32", Target::Fio, randread, 32;
    FIO_WRITE_32 = "fio file randwrite 32", Target::Fio, randwrite, 32;
    FIO_READ_128 = "fio file randread 128", Target::Fio, randread, 128;
    FIO_WRITE_128 = "fio file randwrite 128", Target::Fio, randwrite, 128;
}

/// A row of requests per second.
macro_rules! row {
    ($name:literal, $against:literal, $ours:ident, $theirs:ident, $goal:expr) => {
        Row::rate(
            $name,
            $against,
            |round| round.sample($ours.name),
            |round| round.sample($theirs.name),
            |_| vec![Work::Vdisk($ours), Work::Vdisk($theirs)],
        )
        .reaching($goal)
    };
}

/// A row of how long requests wait when the target is replaced, in microseconds.
macro_rules! pause {
    ($name:literal, $vdisk:ident, $of:literal, $which:literal, $goal:expr) => {
        Row::alone(
            $name,
            |round| round.sample($vdisk.name),
            Unit::Us,
            |sample| Some(sample.report[$of][$which].as_f64()? * 1000.0),
            |_| vec![Work::Vdisk($vdisk)],
        )
        .reaching($goal)
    };
}

/// These rows.
pub fn rows() -> Vec<Row> {
    use Goal::{AtLeast, AtMost, Told};
    vec![
        Row::rate(
            "vdisk null, randread 4 KiB, depth 1, mean latency",
            "qemu-storage-daemon, null-co",
            |round| round.sample(NULL_1.name),
            |round| round.sample(QSD_1.name),
            |_| vec![Work::Vdisk(NULL_1), Work::Vdisk(QSD_1)],
        )
        .of(Unit::Us, mean_us)
        .reaching(AtMost(1.0 / 30.0)),
        Row::rate(
            "vdisk null, the same from a guest that thinks for 20 us between requests",
            "qemu-storage-daemon, null-co",
            |round| round.sample(NULL_1_THINK.name),
            |round| round.sample(QSD_1_THINK.name),
            thinking,
        )
        .of(Unit::Us, mean_us)
        .reaching(AtMost(1.0 / 30.0)),
        Row::cpu(
            "vdisk null, such a guest, processor time per request",
            "qemu-storage-daemon, null-co",
            |round| round.sample(NULL_1_THINK.name),
            |round| round.sample(QSD_1_THINK.name),
            thinking,
        ),
        Row::alone(
            "vdisk null, randread 4 KiB, four queues of depth 32, processor time per request",
            // One queue leaves the target time to wait for the front end.
            |round| round.sample(NULL_QUEUES.name),
            Unit::Us,
            |sample| sample.cpu_us_per_op,
            |_| vec![Work::Vdisk(NULL_QUEUES)],
        )
        .reaching(AtMost(0.1)),
        Row::alone(
            "vdisk, 32 disks that nobody uses, share of a processor",
            |round| round.sample(IDLE.name),
            Unit::Percent,
            |sample| sample.report["cpu_percent"].as_f64(),
            |_| vec![Work::Vdisk(IDLE)],
        )
        .reaching(AtMost(1.0)),
        row!(
            "vdisk null, randread 4 KiB, depth 128",
            "qemu-storage-daemon, null-co",
            NULL_READ,
            QSD_READ,
            AtLeast(3.3)
        ),
        row!(
            "vdisk null, randwrite 4 KiB, depth 128",
            "qemu-storage-daemon, null-co",
            NULL_WRITE,
            QSD_WRITE,
            AtLeast(2.5)
        ),
        row!(
            "vdisk null, randread 4 KiB, depth 128, packed ring",
            "our own split ring",
            NULL_PACKED,
            NULL_READ,
            Told
        ),
        row!(
            "vdisk null, randread 4 KiB, four queues of depth 32 on one core",
            "our own single queue of depth 128",
            NULL_QUEUES,
            NULL_READ,
            Told
        ),
        row!(
            "vdisk mem, randread 4 KiB, depth 32",
            "qemu-storage-daemon, null-co",
            MEM,
            QSD_32,
            AtLeast(0.94)
        ),
        row!(
            "vdisk file, randread 4 KiB, depth 32",
            "fio io_uring on the file, no virtual machine",
            READ_32,
            FIO_READ_32,
            AtLeast(0.95)
        ),
        row!(
            "vdisk file, randwrite 4 KiB, depth 32",
            "fio io_uring on the file, no virtual machine",
            WRITE_32,
            FIO_WRITE_32,
            AtLeast(0.95)
        ),
        row!(
            "vdisk file, randread 4 KiB, depth 128",
            "fio io_uring on the file, no virtual machine",
            READ_128,
            FIO_READ_128,
            AtLeast(0.95)
        ),
        row!(
            "vdisk file, randwrite 4 KiB, depth 128",
            "fio io_uring on the file, no virtual machine",
            WRITE_128,
            FIO_WRITE_128,
            AtLeast(0.95)
        ),
        row!(
            "vdisk file, randread 4 KiB, depth 32",
            "qemu-storage-daemon, aio=io_uring",
            READ_32,
            QSD_URING_READ,
            AtLeast(1.5)
        ),
        row!(
            "vdisk file, randwrite 4 KiB, depth 32",
            "qemu-storage-daemon, aio=io_uring",
            WRITE_32,
            QSD_URING_WRITE,
            AtLeast(1.5)
        ),
        row!(
            "vdisk file, randread 4 KiB, depth 32",
            "qemu-storage-daemon, aio=native",
            READ_32,
            QSD_AIO_READ,
            AtLeast(1.5)
        ),
        row!(
            "vdisk file, randwrite 4 KiB, depth 32",
            "qemu-storage-daemon, aio=native",
            WRITE_32,
            QSD_AIO_WRITE,
            AtLeast(1.5)
        ),
        row!(
            "vdisk file, randread 4 KiB, depth 32",
            "qemu-storage-daemon, aio=threads",
            READ_32,
            QSD_THREADS_READ,
            Told
        ),
        row!(
            "vdisk file, randwrite 4 KiB, depth 32",
            "qemu-storage-daemon, aio=threads",
            WRITE_32,
            QSD_THREADS_WRITE,
            Told
        ),
        row!(
            "vdisk file, randread 4 KiB, depth 32, engine uring",
            "our own engine aio",
            READ_32,
            AIO_READ,
            AtLeast(1.0)
        ),
        row!(
            "vdisk file, randwrite 4 KiB, depth 32, engine uring",
            "our own engine aio",
            WRITE_32,
            AIO_WRITE,
            AtLeast(1.0)
        ),
        row!(
            "vdisk file, durable randwrite 4 KiB, depth 1: write=through",
            "a write and then a flush (fdatasync)",
            THROUGH_1,
            FLUSHED_1,
            Told
        ),
        row!(
            "vdisk file, durable randwrite 4 KiB, depth 32: write=through",
            "a write and then a flush (fdatasync)",
            THROUGH_32,
            FLUSHED_32,
            Told
        ),
        pause!(
            "vdisk upgrade, depth 1, longest wait of 20",
            UPGRADE_1,
            "pause_ms",
            "worst",
            AtMost(10e3)
        ),
        pause!(
            "vdisk upgrade, depth 1, median wait",
            UPGRADE_1,
            "pause_ms",
            "median",
            AtMost(10e3)
        ),
        pause!(
            "vdisk upgrade, depth 32, longest wait of 20",
            UPGRADE_32,
            "pause_ms",
            "worst",
            AtMost(10e3)
        ),
        pause!(
            "vdisk, depth 1, longest wait with nothing replaced",
            UPGRADE_1,
            "alone_ms",
            "worst",
            Told
        ),
        pause!("vdisk, depth 1, median of such waits", UPGRADE_1, "alone_ms", "median", Told),
        pause!(
            "vdisk kill -9 and start, depth 1, longest wait of 20",
            RESTART_1,
            "pause_ms",
            "worst",
            AtMost(100e3)
        ),
        pause!(
            "vdisk kill -9 and start, depth 1, median wait",
            RESTART_1,
            "pause_ms",
            "median",
            AtMost(100e3)
        ),
        pause!(
            "vdisk kill -9 and start, depth 32, longest wait of 20",
            RESTART_32,
            "pause_ms",
            "worst",
            AtMost(100e3)
        ),
    ]
}

fn thinking(_: &Setup) -> Vec<Work> {
    vec![Work::Vdisk(NULL_1_THINK), Work::Vdisk(QSD_1_THINK)]
}

fn mean_us(sample: &Sample) -> Option<f64> {
    sample.report["mean_us"].as_f64()
}
