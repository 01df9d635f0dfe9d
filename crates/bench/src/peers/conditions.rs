//! The conditions of the measurements: machine, disk, versions, flags. A figure means nothing
//! without them.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use node::{Machine, Size, write_list};

use super::bases::Base;
use super::row::Round;
use super::sample::median;
use super::tool::{Tool, read_file};
use super::vdisk_rows::QSD_URING_READ;
use super::work::{DISK_64_OVER_1, FIO_SAME};
use super::{KEYS, Setup, debian};

/// A name and its text.
type Condition = (String, String);

fn condition(name: &str, text: String) -> Condition {
    (name.to_owned(), text)
}

/// Names and texts, in reading order.
pub fn describe(setup: &Setup, rounds: &[Round], number: u32) -> Vec<Condition> {
    let mut all = vec![condition("measured", date())];
    all.extend(machine(setup));
    all.push(condition("method", method(setup, number)));
    all.extend(programs(rounds));
    all.extend(setup.searches.lines());
    all.extend(disk_reads(rounds));
    all.extend(failures(rounds, number));
    all
}

/// The machine, its disk, and the databases on it.
fn machine(setup: &Setup) -> Vec<Condition> {
    let machine = Machine::look();
    let text = format!(
        "{}, processors {}, {} of memory, Linux {}",
        machine.model,
        write_list(&machine.allowed.processors),
        Size(machine.memory_bytes),
        machine.kernel
    );
    let mut all = vec![condition("machine", text), condition("disk", disk(&setup.data))];
    if setup.keys == 0 {
        return all;
    }
    let text = format!(
        "{} keys of 16 B, made by `{}`{}",
        setup.keys,
        debian::recipe(KEYS, 1000, "none"),
        if setup.keys == KEYS { "" } else { " (other numbers of keys were counted)" }
    );
    all.push(condition("database", text));
    let others = Base::recipes(setup);
    if !others.is_empty() {
        all.push(condition("other databases", others.join(", ")));
    }
    all
}

fn method(setup: &Setup, number: u32) -> String {
    format!(
        "{number} rounds of {} s each, ours and the peers' in turn; `measured` is the median of \
         the rounds' ratios, with the lowest and the highest, and may differ from the quotient \
         of the medians beside it; direct I/O, checksums verified, no block cache but where it \
         says cached; on one core: processor {}",
        setup.seconds, setup.processor
    )
}

/// The versions and flags of all programs.
fn programs(rounds: &[Round]) -> Vec<Condition> {
    let samples = || rounds.iter().flat_map(Round::samples);
    let driver = samples().find_map(|sample| sample.report["driver"].as_str().map(str::to_owned));
    let ours = format!(
        "{}, {}",
        env!("CARGO_PKG_VERSION"),
        driver.unwrap_or_else(|| "driver unknown".into())
    );
    let release = samples().find_map(|sample| {
        Some(format!("{}, `{}`", sample.report["rocksdb"].as_str()?, sample.command))
    });
    let release = release.unwrap_or_else(|| "not measured".to_owned());
    let version =
        |program: &str| condition(program, first_line(Tool::new(program).arg("--version")));
    let mut all = vec![condition("Millrace", ours), condition("RocksDB release", release)];
    all.extend(["db_bench", "fio", "qemu-storage-daemon"].map(version));
    all.extend(command(rounds, QSD_URING_READ).map(|line| condition("its flags", line)));
    all.push(version("redis-server"));
    all
}

/// The command line of a measurement.
fn command(rounds: &[Round], name: &str) -> Option<String> {
    rounds.iter().find_map(|round| Some(format!("`{}`", round.sample(name)?.command)))
}

/// fio's flags, and the disk's own ratio.
fn disk_reads(rounds: &[Round]) -> Vec<Condition> {
    let flags = command(rounds, FIO_SAME).map(|line| condition("fio's flags", line));
    let ratio = disk_ratio(rounds).map(|ratio| condition("the disk's own ratio", ratio));
    flags.into_iter().chain(ratio).collect()
}

/// The measurements that failed, with the last reason of each.
fn failures(rounds: &[Round], number: u32) -> Vec<Condition> {
    let failures: BTreeMap<_, _> = rounds.iter().flat_map(Round::failures).collect();
    let line = |(name, why): (&String, &String)| {
        let times = rounds.iter().filter(|round| round.failures().any(|(of, _)| of == name));
        let text = format!("{name}, in {} of {number} rounds: {why}", times.count());
        condition("not measured", text)
    };
    failures.into_iter().map(line).collect()
}

/// The ratio of fio's reads at depth 64 to those at depth 1, if both were measured.
fn disk_ratio(rounds: &[Round]) -> Option<String> {
    let [above, below] = DISK_64_OVER_1;
    let ratios = rounds.iter().filter_map(|round| Some(round.ops(above)? / round.ops(below)?));
    let ratio = median(ratios)?;
    Some(format!(
        "{ratio:.2} ×, fio's random reads at depth 64 over depth 1 (median of the rounds' ratios)"
    ))
}

fn first_line(tool: Tool) -> String {
    match tool.output() {
        Ok(text) => text.lines().next().unwrap_or_default().trim().to_owned(),
        Err(error) => error,
    }
}

/// The disk that a directory lies on, as the kernel describes it.
#[expect(clippy::disallowed_methods, reason = "asks where the database lies, on no core")]
fn disk(dir: &Path) -> String {
    let Ok(meta) = std::fs::metadata(dir) else { return "unknown".to_owned() };
    let (major, minor) = (major_of(meta.dev()), minor_of(meta.dev()));
    let sys = format!("/sys/dev/block/{major}:{minor}");
    let name = read_file(Path::new(&format!("{sys}/uevent")))
        .ok()
        .and_then(|text| {
            text.lines().find_map(|line| line.strip_prefix("DEVNAME=").map(str::to_owned))
        })
        .unwrap_or_else(|| "not a block device (tmpfs?)".to_owned());
    // A partition's queue belongs to its disk.
    let queue = |file: &str| {
        [format!("{sys}/queue/{file}"), format!("{sys}/../queue/{file}")]
            .iter()
            .find_map(|path| read_file(Path::new(path)).ok())
            .map(|text| text.trim().to_owned())
    };
    let mut text = name;
    if let Some(block) = queue("logical_block_size") {
        text.push_str(&format!(", blocks of {block} B"));
    }
    if let Some(scheduler) = queue("scheduler") {
        text.push_str(&format!(", scheduler {scheduler}"));
    }
    let mounts = read_file(Path::new("/proc/self/mounts")).unwrap_or_default();
    if let Some(kind) = file_system(&mounts, dir) {
        text.push_str(&format!(", {kind}"));
    }
    text
}

/// The kind of file system that a directory lies on: that of the longest mount point above it.
fn file_system(mounts: &str, dir: &Path) -> Option<String> {
    let dir = std::path::absolute(dir).ok()?;
    mounts
        .lines()
        .filter_map(|line| {
            let mut words = line.split(' ').skip(1);
            Some((words.next()?, words.next()?))
        })
        .filter(|(point, _)| dir.starts_with(point))
        .max_by_key(|(point, _)| point.len())
        .map(|(_, kind)| kind.to_owned())
}

// The kernel's packing of device numbers for 64-bit `dev_t`, as in sysmacros.h.
fn major_of(dev: u64) -> u64 {
    ((dev >> 8) & 0xfff) | ((dev >> 32) & !0xfff)
}

fn minor_of(dev: u64) -> u64 {
    (dev & 0xff) | ((dev >> 12) & !0xff)
}

/// Now, as `2026-11-21T01:54:00Z`.
#[expect(clippy::disallowed_methods, reason = "dates a result, on no core")]
pub fn date() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    civil(since.as_secs())
}

/// Seconds since 1970 as date and time; years begin in March here, which puts the leap day last.
fn civil(seconds: u64) -> String {
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let from_march_0 = days + 719_468;
    let era = from_march_0 / 146_097;
    let day_of_era = from_march_0 % 146_097;
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(civil(0), "1970-01-01T00:00:00Z");
        assert_eq!(civil(951_782_399), "2000-02-28T23:59:59Z");
        assert_eq!(civil(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(civil(1_795_226_040), "2026-11-21T01:54:00Z");
    }

    #[test]
    fn the_file_system_is_that_of_the_longest_mount_point() {
        let mounts = "/dev/a / ext4 rw 0 0\ntmpfs /tmp tmpfs rw 0 0\nb /tmpx xfs rw 0 0\n";
        assert_eq!(file_system(mounts, Path::new("/tmp/db")).as_deref(), Some("tmpfs"));
        assert_eq!(file_system(mounts, Path::new("/var/db")).as_deref(), Some("ext4"));
    }

    #[test]
    fn device_numbers_are_unpacked() {
        assert_eq!((major_of(0xfe01), minor_of(0xfe01)), (254, 1));
    }
}
