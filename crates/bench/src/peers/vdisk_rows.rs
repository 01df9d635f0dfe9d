//! The rows of the table about disks of virtual machines.

use super::row::{Figure, Row, Unit};
use super::sample::Sample;
use super::vdisk::{Target, Vdisk};
use super::work::Work;

const NULL_1: &str = "millrace vdisk null randread 1";
const NULL_1_THINK: &str = "millrace vdisk null randread 1 think 20 us";
const NULL_READ: &str = "millrace vdisk null randread 128";
const NULL_WRITE: &str = "millrace vdisk null randwrite 128";
const NULL_PACKED: &str = "millrace vdisk null randread 128 packed";
const NULL_QUEUES: &str = "millrace vdisk null randread 128 four queues";
const IDLE: &str = "millrace vdisk idle";
const MEM: &str = "millrace vdisk mem randread 32";
const READ_32: &str = "millrace vdisk file randread 32";
const WRITE_32: &str = "millrace vdisk file randwrite 32";
const READ_128: &str = "millrace vdisk file randread 128";
const WRITE_128: &str = "millrace vdisk file randwrite 128";
const AIO_READ: &str = "millrace vdisk file aio randread 32";
const AIO_WRITE: &str = "millrace vdisk file aio randwrite 32";
const THROUGH_1: &str = "millrace vdisk file through randwrite 1";
const THROUGH_32: &str = "millrace vdisk file through randwrite 32";
const FLUSHED_1: &str = "millrace vdisk file flushed randwrite 1";
const FLUSHED_32: &str = "millrace vdisk file flushed randwrite 32";
const UPGRADE_1: &str = "millrace vdisk upgrades 1";
const UPGRADE_32: &str = "millrace vdisk upgrades 32";
const RESTART_1: &str = "millrace vdisk restarts 1";
const RESTART_32: &str = "millrace vdisk restarts 32";
const QSD_1: &str = "qemu null-co randread 1";
const QSD_1_THINK: &str = "qemu null-co randread 1 think 20 us";
const QSD_32: &str = "qemu null-co randread 32";
const QSD_READ: &str = "qemu null-co randread 128";
const QSD_WRITE: &str = "qemu null-co randwrite 128";
/// This one's command line is in the table's conditions.
pub const QSD_URING_READ: &str = "qemu io_uring randread 32";
const QSD_URING_WRITE: &str = "qemu io_uring randwrite 32";
const QSD_AIO_READ: &str = "qemu native randread 32";
const QSD_AIO_WRITE: &str = "qemu native randwrite 32";
const QSD_THREADS_READ: &str = "qemu threads randread 32";
const QSD_THREADS_WRITE: &str = "qemu threads randwrite 32";
const FIO_READ_32: &str = "fio file randread 32";
const FIO_WRITE_32: &str = "fio file randwrite 32";
const FIO_READ_128: &str = "fio file randread 128";
const FIO_WRITE_128: &str = "fio file randwrite 128";

/// How one of these rows' measurements is made.
#[rustfmt::skip]
pub fn measurement(name: &'static str) -> Option<Work> {
    use Target::{DaemonFile, DaemonNull, Fio, Ours, OursIdle, OursReplaced};
    const URING: Target = Ours("engine=uring");
    const AIO: Target = Ours("engine=aio");
    const THROUGH: Target = Ours("engine=uring&write=through");
    let (target, rw, depth, flags): (_, _, _, &[&str]) = match name {
        NULL_1 => (Ours("null"), "randread", 1, &[]),
        NULL_1_THINK => (Ours("null"), "randread", 1, &["--think-us", "20"]),
        NULL_READ => (Ours("null"), "randread", 128, &[]),
        NULL_WRITE => (Ours("null"), "randwrite", 128, &[]),
        NULL_PACKED => (Ours("null"), "randread", 128, &["--packed"]),
        NULL_QUEUES => (Ours("null"), "randread", 32, &["--queues", "4"]),
        IDLE => (OursIdle, "randread", 1, &[]),
        MEM => (Ours("mem"), "randread", 32, &[]),
        READ_32 => (URING, "randread", 32, &[]),
        WRITE_32 => (URING, "randwrite", 32, &[]),
        READ_128 => (URING, "randread", 128, &[]),
        WRITE_128 => (URING, "randwrite", 128, &[]),
        AIO_READ => (AIO, "randread", 32, &[]),
        AIO_WRITE => (AIO, "randwrite", 32, &[]),
        THROUGH_1 => (THROUGH, "randwrite", 1, &[]),
        THROUGH_32 => (THROUGH, "randwrite", 32, &[]),
        FLUSHED_1 => (URING, "randwrite", 1, &["--sync"]),
        FLUSHED_32 => (URING, "randwrite", 32, &["--sync"]),
        UPGRADE_1 => (OursReplaced("--upgrades"), "randrw", 1, &[]),
        UPGRADE_32 => (OursReplaced("--upgrades"), "randrw", 32, &[]),
        RESTART_1 => (OursReplaced("--restarts"), "randrw", 1, &[]),
        RESTART_32 => (OursReplaced("--restarts"), "randrw", 32, &[]),
        QSD_1 => (DaemonNull, "randread", 1, &[]),
        QSD_1_THINK => (DaemonNull, "randread", 1, &["--think-us", "20"]),
        QSD_32 => (DaemonNull, "randread", 32, &[]),
        QSD_READ => (DaemonNull, "randread", 128, &[]),
        QSD_WRITE => (DaemonNull, "randwrite", 128, &[]),
        QSD_URING_READ => (DaemonFile("io_uring"), "randread", 32, &[]),
        QSD_URING_WRITE => (DaemonFile("io_uring"), "randwrite", 32, &[]),
        QSD_AIO_READ => (DaemonFile("native"), "randread", 32, &[]),
        QSD_AIO_WRITE => (DaemonFile("native"), "randwrite", 32, &[]),
        QSD_THREADS_READ => (DaemonFile("threads"), "randread", 32, &[]),
        QSD_THREADS_WRITE => (DaemonFile("threads"), "randwrite", 32, &[]),
        FIO_READ_32 => (Fio, "randread", 32, &[]),
        FIO_WRITE_32 => (Fio, "randwrite", 32, &[]),
        FIO_READ_128 => (Fio, "randread", 128, &[]),
        FIO_WRITE_128 => (Fio, "randwrite", 128, &[]),
        _ => return None,
    };
    Some(Work::Vdisk(Vdisk { name, target, rw, depth, flags }))
}

/// A wait of the guest, in microseconds of the report's milliseconds.
fn wait_us(sample: &Sample, of: &str, which: &str) -> Option<f64> {
    Some(sample.report[of][which].as_f64()? * 1000.0)
}

fn mean_us(sample: &Sample) -> Option<f64> {
    sample.report["mean_us"].as_f64()
}

/// These rows.
pub fn rows() -> Vec<Row> {
    let mut rows = nulls();
    rows.extend(files());
    rows.extend(waits());
    rows
}

/// Disks without a device behind them: the cost of the interface.
#[rustfmt::skip]
fn nulls() -> Vec<Row> {
    const NULL_CO: &str = "qemu-storage-daemon, null-co";
    let row = |name, against, both| Row::rate(format!("vdisk {name}"), against, both);
    let thinking = "null, the same from a guest that thinks for 20 us between requests";
    let queues = "null, randread 4 KiB, four queues of depth 32 on one core";
    vec![
        row("null, randread 4 KiB, depth 1, mean latency", NULL_CO, [NULL_1, QSD_1])
            .of(Unit::Us, mean_us).at_most(1.0 / 30.0),
        row(thinking, NULL_CO, [NULL_1_THINK, QSD_1_THINK])
            .of(Unit::Us, mean_us).at_most(1.0 / 30.0),
        row("null, such a guest, processor time per request", NULL_CO, [NULL_1_THINK, QSD_1_THINK])
            .of(Unit::Us, |sample| sample.cpu_us_per_op),
        // With one queue the target would wait for the front end.
        Row::alone(
            "vdisk null, randread 4 KiB, four queues of depth 32, processor time per request",
            NULL_QUEUES, Unit::Us, |sample| sample.cpu_us_per_op,
        )
        .at_most(0.1),
        Row::alone(
            "vdisk, 32 idle disks, share of a processor",
            IDLE, Unit::Percent, |sample| sample.report["cpu_percent"].as_f64(),
        )
        .at_most(1.0),
        row("null, randread 4 KiB, depth 128", NULL_CO, [NULL_READ, QSD_READ]).at_least(4.0),
        row("null, randwrite 4 KiB, depth 128", NULL_CO, [NULL_WRITE, QSD_WRITE]).at_least(2.5),
        row("null, randread 4 KiB, depth 128, packed ring", "qemu-storage-daemon, null-co, split",
            [NULL_PACKED, QSD_READ])
            .at_least(3.5),
        row(queues, "our own single queue of depth 128", [NULL_QUEUES, NULL_READ]),
        row("mem, randread 4 KiB, depth 32", NULL_CO, [MEM, QSD_32]).at_least(0.94),
    ]
}

/// Disks in a file. No target can be faster than fio on the same file at the same depth, so fio
/// over the peer bounds these ratios.
#[rustfmt::skip]
fn files() -> Vec<Row> {
    const FIO: &str = "fio io_uring on the file, no virtual machine";
    const URING: &str = "qemu-storage-daemon, aio=io_uring";
    const NATIVE: &str = "qemu-storage-daemon, aio=native";
    const THREADS: &str = "qemu-storage-daemon, aio=threads";
    const OWN_AIO: &str = "our own engine aio";
    const FLUSH: &str = "a write and then a flush (fdatasync)";
    let read = |against, theirs| {
        Row::rate("vdisk file, randread 4 KiB, depth 32", against, [READ_32, theirs])
    };
    let write = |against, theirs| {
        Row::rate("vdisk file, randwrite 4 KiB, depth 32", against, [WRITE_32, theirs])
    };
    let row = |name, against, both| Row::rate(format!("vdisk file, {name}"), against, both);
    vec![
        read(FIO, FIO_READ_32).at_least(0.95),
        write(FIO, FIO_WRITE_32).at_least(0.95),
        row("randread 4 KiB, depth 128", FIO, [READ_128, FIO_READ_128]).at_least(0.95),
        row("randwrite 4 KiB, depth 128", FIO, [WRITE_128, FIO_WRITE_128]).at_least(0.95),
        read(URING, QSD_URING_READ).at_least(1.5).bounded_by([FIO_READ_32, QSD_URING_READ]),
        write(URING, QSD_URING_WRITE).at_least(1.5).bounded_by([FIO_WRITE_32, QSD_URING_WRITE]),
        read(NATIVE, QSD_AIO_READ).at_least(1.5).bounded_by([FIO_READ_32, QSD_AIO_READ]),
        write(NATIVE, QSD_AIO_WRITE).at_least(1.5).bounded_by([FIO_WRITE_32, QSD_AIO_WRITE]),
        read(THREADS, QSD_THREADS_READ).bounded_by([FIO_READ_32, QSD_THREADS_READ]),
        write(THREADS, QSD_THREADS_WRITE).bounded_by([FIO_WRITE_32, QSD_THREADS_WRITE]),
        row("randread 4 KiB, depth 32, engine uring", OWN_AIO, [READ_32, AIO_READ]).at_least(1.0),
        row("randwrite 4 KiB, depth 32, engine uring", OWN_AIO, [WRITE_32, AIO_WRITE])
            .at_least(1.0),
        row("durable randwrite 4 KiB, depth 1: write=through", FLUSH, [THROUGH_1, FLUSHED_1]),
        row("durable randwrite 4 KiB, depth 32: write=through", FLUSH, [THROUGH_32, FLUSHED_32]),
    ]
}

/// How long requests wait when the target is replaced.
#[rustfmt::skip]
fn waits() -> Vec<Row> {
    const LONGEST: Figure = |sample| wait_us(sample, "pause_ms", "worst");
    const MEDIAN: Figure = |sample| wait_us(sample, "pause_ms", "median");
    const ALONE: Figure = |sample| wait_us(sample, "alone_ms", "worst");
    const ALONE_MEDIAN: Figure = |sample| wait_us(sample, "alone_ms", "median");
    let row = |name, vdisk, figure| Row::alone(name, vdisk, Unit::Us, figure);
    vec![
        row("vdisk upgrade, depth 1, longest wait of 20", UPGRADE_1, LONGEST).at_most(10e3),
        row("vdisk upgrade, depth 1, median wait", UPGRADE_1, MEDIAN).at_most(10e3),
        row("vdisk upgrade, depth 32, longest wait of 20", UPGRADE_32, LONGEST).at_most(10e3),
        row("vdisk, depth 1, longest wait with nothing replaced", UPGRADE_1, ALONE),
        row("vdisk, depth 1, median of such waits", UPGRADE_1, ALONE_MEDIAN),
        row("vdisk kill -9 and start, depth 1, longest wait of 20", RESTART_1, LONGEST)
            .at_most(30e3),
        row("vdisk kill -9 and start, depth 1, median wait", RESTART_1, MEDIAN).at_most(8e3),
        row("vdisk kill -9 and start, depth 32, longest wait of 20", RESTART_32, LONGEST)
            .at_most(100e3),
    ]
}
