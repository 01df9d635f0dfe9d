//! The state of merges in `INFO` and in metrics.

use lsm::{CompactionStatus, FamilyCompaction, LevelCompaction};

use crate::info::exposition::{Exposition, Metric};
use crate::info::{Report, line, lines};

/// Most column families that `INFO` lists; metrics list all.
const FAMILIES_MAX: usize = 16;

/// Writes the section `Compaction`.
pub fn section(report: &Report<'_>, text: &mut String) {
    let status = report.shard.as_ref().and_then(|shard| shard.compaction.as_ref());
    let Some(status) = status else { return };
    let limits = &status.limits;
    let cores = limits.cores_percent.map_or(0.0, |percent| f64::from(percent) / 100.0);
    lines!(text,
        "compaction_paused:{}", u8::from(status.paused);
        "compaction_limit_cores:{}", cores;
        "compaction_limit_bytes_per_second:{}", limits.bytes_per_second.unwrap_or(0);
        "compaction_jobs:{}", status.jobs.len();
        "compaction_debt_bytes:{}", status.debt_bytes;
        "compaction_pressure:{:.3}", status.pressure;
        "compaction_bytes_per_second:{}", status.merge_bytes_per_second.unwrap_or(0);
        "writes_bytes_per_second:{}", status.write_bytes_per_second.unwrap_or(0);
    );
    let occupied = status.families.iter().filter(|family| is_used(family));
    for family in occupied.take(FAMILIES_MAX) {
        // Names may have any character.
        let name: String = family.name.chars().map(plain).collect();
        lines!(text,
            "family{}:name={},base_level={},bytes={},live_bytes={},space_amplification={:.2},\
             write_amplification={:.2},debt_bytes={},pressure={:.3}",
            family.id, name, family.base_level, family.bytes(), family.live_bytes,
            family.space_amplification(), family.write_amplification(), family.debt_bytes,
            family.pressure;
        );
        for (at, level) in used(family) {
            let counters = &level.counters;
            lines!(text,
                "family{}_level{}:files={},bytes={},target_bytes={},score={:.2},merging_files={},\
                 merging_bytes={},merges={},read_above_bytes={},read_bytes={},written_bytes={},\
                 moved_bytes={},added_bytes={},write_amplification={:.2},space_amplification={:.2},\
                 seconds={:.1}",
                family.id, at, level.files, level.bytes, level.target_bytes.unwrap_or(0),
                level.score, level.merging_files, level.merging_bytes, counters.merges,
                counters.read_above_bytes, counters.read_bytes, counters.written_bytes,
                counters.moved_bytes, counters.added_bytes, counters.write_amplification(),
                family.space_amplification_of(level),
                counters.ns as f64 / 1e9;
            );
        }
    }
    for (at, job) in status.jobs.iter().enumerate() {
        lines!(text,
            "compaction_job{}:family={},from_level={},to_level={},files={},bytes={},read_bytes={},\
             written_bytes={},seconds={:.1},cores={},requested={}",
            at, job.family, job.from_level, job.to_level, job.files, job.bytes, job.read_bytes,
            job.written_bytes, job.ns as f64 / 1e9, job.cores, u8::from(job.is_requested);
        );
    }
}

fn plain(c: char) -> char {
    if c.is_control() || [',', '=', ':'].contains(&c) { '?' } else { c }
}

/// The levels with files, or into which something was written.
fn used(family: &FamilyCompaction) -> impl Iterator<Item = (usize, &LevelCompaction)> {
    let is_used = |level: &LevelCompaction| {
        level.files > 0 || level.counters != lsm::LevelCounters::default()
    };
    family.levels.iter().enumerate().filter(move |(_, level)| is_used(level))
}

fn is_used(family: &FamilyCompaction) -> bool {
    used(family).next().is_some()
}

/// The value of a metric of a level.
type OfLevel = fn(&FamilyCompaction, &LevelCompaction) -> f64;

/// Name, help and value of each level's metrics; those that end in `_total` are counters.
const LEVELS: &[(&str, &str, OfLevel)] = &[
    ("level_files", "Tables of a level", |_, level| level.files as f64),
    ("level_bytes", "Bytes of the tables of a level", |_, level| level.bytes as f64),
    ("level_score", "How urgent merges of a level are: due from 1 on", |_, level| level.score),
    ("level_merging_bytes", "Bytes of tables of a level that are being merged", |_, level| {
        level.merging_bytes as f64
    }),
    ("level_compactions_total", "Merges into a level", |_, level| level.counters.merges as f64),
    (
        "level_read_above_bytes_total",
        "Bytes of tables of other levels that merges into a level read",
        |_, level| level.counters.read_above_bytes as f64,
    ),
    (
        "level_read_bytes_total",
        "Bytes of its own tables that merges into a level read",
        |_, level| level.counters.read_bytes as f64,
    ),
    ("level_written_bytes_total", "Bytes that merges into a level wrote", |_, level| {
        level.counters.written_bytes as f64
    }),
    ("level_moved_bytes_total", "Bytes of tables moved into a level as they were", |_, level| {
        level.counters.moved_bytes as f64
    }),
    (
        "level_added_bytes_total",
        "Bytes of tables that flushes, loads and ingestions added to a level",
        |_, level| level.counters.added_bytes as f64,
    ),
    ("level_compaction_seconds_total", "Time that merges into a level took", |_, level| {
        level.counters.ns as f64 / 1e9
    }),
    (
        "level_write_amplification",
        "Bytes written to a level for each byte that came into it",
        |_, level| level.counters.write_amplification(),
    ),
    (
        "level_space_amplification",
        "Bytes of the tables of a level for each live byte of all levels, about",
        |family, level| family.space_amplification_of(level),
    ),
];

/// The value of a metric of a family.
type OfFamily = fn(&FamilyCompaction) -> f64;

const FAMILIES: &[(&str, &str, OfFamily)] = &[
    ("compaction_debt_bytes", "Bytes that merges have to read and write, about", |family| {
        family.debt_bytes as f64
    }),
    ("live_bytes", "Bytes of tables without obsolete versions, about", |family| {
        family.live_bytes as f64
    }),
    ("space_amplification", "Bytes of tables for each live byte, about", |family| {
        family.space_amplification()
    }),
    ("write_amplification", "Bytes written to tables for each byte added", |family| {
        family.write_amplification()
    }),
];

/// Writes the metrics.
pub fn write(text: &mut Exposition, status: &CompactionStatus) {
    text.gauge("compaction_paused", "1 while merges are paused").value(u8::from(status.paused));
    text.gauge("compaction_jobs", "Merges under way").value(status.jobs.len());
    text.gauge("compaction_pressure", "How far merges are behind: writes are slowed from 0.25 on")
        .value(status.pressure);
    let jobs = status.jobs.iter();
    text.gauge("compaction_jobs_bytes", "Bytes of tables of the merges under way")
        .value(jobs.clone().map(|job| job.bytes).sum::<u64>());
    text.gauge("compaction_jobs_read_bytes", "The part of these that is merged")
        .value(jobs.map(|job| job.read_bytes).sum::<u64>());
    let families = || status.families.iter().filter(|family| is_used(family));
    for (name, help, value) in FAMILIES {
        let metric = text.gauge(name, help);
        families().fold(metric, |metric: Metric<'_>, family| {
            metric.labelled(&[("column_family", &family.name)], value(family))
        });
    }
    for (name, help, value) in LEVELS {
        let metric = match name.ends_with("_total") {
            true => text.counter(name, help),
            false => text.gauge(name, help),
        };
        families().fold(metric, |metric: Metric<'_>, family| {
            used(family).fold(metric, |metric, (at, level)| {
                let labels: &[(&str, &dyn std::fmt::Display)] =
                    &[("column_family", &family.name), ("level", &at)];
                metric.labelled(labels, value(family, level))
            })
        });
    }
}

#[cfg(test)]
mod tests {
    use lsm::{CompactionJob, LevelCounters};

    use super::*;

    fn status() -> CompactionStatus {
        let counters = LevelCounters {
            merges: 2,
            read_above_bytes: 100,
            written_bytes: 300,
            ..LevelCounters::default()
        };
        let full = LevelCompaction { files: 3, bytes: 3000, counters, ..Default::default() };
        let family = |id: u32, levels| FamilyCompaction {
            id,
            name: format!("a,b{id}"),
            live_bytes: 2000,
            levels,
            ..FamilyCompaction::default()
        };
        CompactionStatus {
            paused: true,
            families: vec![
                family(0, vec![LevelCompaction::default(), full]),
                family(1, vec![LevelCompaction::default()]),
            ],
            jobs: vec![CompactionJob { bytes: 10, read_bytes: 4, ..CompactionJob::default() }],
            ..CompactionStatus::default()
        }
    }

    #[test]
    fn only_levels_in_use_are_listed() {
        let mut text = Exposition::default();
        write(&mut text, &status());
        let text = text.finish();
        let levels: Vec<&str> =
            text.lines().filter(|line| line.starts_with("millrace_level_files{")).collect();
        assert_eq!(levels, ["millrace_level_files{column_family=\"a,b0\",level=\"1\"} 3"]);
        assert!(text.contains("# TYPE millrace_level_compactions_total counter\n"), "{text}");
        assert!(text.contains("\nmillrace_space_amplification{column_family=\"a,b0\"} 1.5\n"));
        let of_level =
            "millrace_level_space_amplification{column_family=\"a,b0\",level=\"1\"} 1.5\n";
        assert!(text.contains(of_level), "{text}");
        assert!(text.contains("\nmillrace_compaction_jobs_read_bytes 4\n"));
    }

    #[test]
    fn a_line_of_info_has_no_character_of_a_name_that_would_split_it() {
        assert_eq!("a,b:c=d\r\n\u{e9}".chars().map(plain).collect::<String>(), "a?b?c?d??\u{e9}");
    }
}
