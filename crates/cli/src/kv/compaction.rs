//! `kv compaction`: the merges of a running node.

use std::fmt::Write as _;

use node::{Request, Size};
use serde_json::Value;

use super::copies::print;
use crate::admin::Admin;
use crate::answer::{array, number, text};
use crate::args::{CompactionCommand, NodeArgs};
use crate::failure::{Failure, Verdict};
use crate::output::{escape_into, table, thousands};

/// Runs the command.
pub fn run(command: CompactionCommand) -> Result<Verdict, Failure> {
    match command {
        CompactionCommand::Status { node } => {
            ask(&node, &Request::CompactionStatus, |status| status_text(status).trim_end().into())
        }
        CompactionCommand::Pause { node } => ask(&node, &Request::CompactionPause, |answer| {
            let again = if answer["was_paused"] == true { " already" } else { "" };
            format!("merges are paused{again}: millrace kv compaction resume lets them go on")
        }),
        CompactionCommand::Resume { node } => ask(&node, &Request::CompactionResume, |answer| {
            let what =
                if answer["was_paused"] == true { "merges go on" } else { "nothing was paused" };
            what.to_owned()
        }),
        CompactionCommand::Limit { cores: cores_percent, rate: bytes_per_second, node } => {
            let request = Request::CompactionLimit { cores_percent, bytes_per_second };
            ask(&node, &request, |limits| format!("limits of merges: {}", limits_text(limits)))
        }
    }
}

fn ask(
    node: &NodeArgs,
    request: &Request,
    for_people: impl Fn(&Value) -> String,
) -> Result<Verdict, Failure> {
    let answer = Admin::connect(node)?.call(request)?;
    print(node.json, &answer, &for_people(&answer))?;
    Ok(Verdict::Good)
}

fn limits_text(limits: &Value) -> String {
    let cores = limits["cores"].as_f64().map(|cores| format!("{cores} cores"));
    let rate = limits["bytes_per_second"].as_u64().map(|bytes| format!("{}/s", Size(bytes)));
    match (cores, rate) {
        (Some(cores), Some(rate)) => format!("{cores}, {rate}"),
        (Some(one), None) | (None, Some(one)) => one,
        (None, None) => "none".to_owned(),
    }
}

fn status_text(status: &Value) -> String {
    let mut out = String::new();
    let state = if status["paused"] == true { "paused" } else { "running" };
    let writes = match status["write_bytes_per_second"].as_u64() {
        _ if status["writes_stopped"] == true && status["paused"] == true => {
            "stopped until the end of the pause: level 0 is full".to_owned()
        }
        _ if status["writes_stopped"] == true => {
            "stopped until merges have made room: level 0 is full".to_owned()
        }
        Some(rate) => format!("limited to {}/s", Size(rate)),
        None => "not limited".to_owned(),
    };
    let _ = writeln!(
        out,
        "merges are {state}, limits: {}\ndebt {}, pressure {:.2}, writes are {writes}",
        limits_text(&status["limits"]),
        Size(number(status, "debt_bytes")),
        float(status, "pressure"),
    );
    if let Some(rate) = status["merge_bytes_per_second"].as_u64() {
        let _ = writeln!(out, "each merge goes through {}/s", Size(rate));
    }
    for family in array(status, "column_families") {
        if !array(family, "levels").is_empty() {
            family_text(&mut out, family);
        }
    }
    jobs_text(&mut out, array(status, "jobs"));
    out
}

fn family_text(out: &mut String, family: &Value) {
    out.push_str("\ncolumn family ");
    escape_into(out, text(family, "name").as_bytes());
    let _ = writeln!(
        out,
        ": {}, debt {}, space amplification {:.2}, write amplification {:.2}",
        Size(number(family, "bytes")),
        Size(number(family, "debt_bytes")),
        float(family, "space_amplification"),
        float(family, "write_amplification"),
    );
    let head = [
        "LEVEL",
        "FILES",
        "SIZE",
        "SCORE",
        "MERGING",
        "ADDED",
        "FROM ABOVE",
        "READ",
        "WRITTEN",
        "MOVED",
        "W-AMP",
        "S-AMP",
        "MERGES",
        "SECONDS",
        "CPU",
    ];
    let row = |level: &Value| {
        let size = |name: &str| Size(number(level, name)).to_string();
        let ratio = |name: &str| format!("{:.2}", float(level, name));
        [
            number(level, "level").to_string(),
            thousands(number(level, "files")),
            size("bytes"),
            ratio("score"),
            thousands(number(level, "merging_files")),
            size("added_bytes"),
            size("read_above_bytes"),
            size("read_bytes"),
            size("written_bytes"),
            size("moved_bytes"),
            ratio("write_amplification"),
            ratio("space_amplification"),
            thousands(number(level, "merges")),
            format!("{:.1}", float(level, "seconds")),
            format!("{:.1}", float(level, "cpu_seconds")),
        ]
    };
    let rows: Vec<_> = std::iter::once(head.map(str::to_owned))
        .chain(array(family, "levels").iter().map(row))
        .collect();
    out.push_str(&table(&rows, &std::array::from_fn::<usize, 15, _>(|at| at)));
}

fn jobs_text(out: &mut String, jobs: &[Value]) {
    if jobs.is_empty() {
        out.push_str("\nno merge is under way\n");
        return;
    }
    let head = ["LEVELS", "FILES", "SIZE", "DONE", "WRITTEN", "SECONDS", "CORES", "FAMILY", ""];
    let row = |job: &Value| {
        let bytes = number(job, "bytes").max(1);
        let mut family = String::new();
        escape_into(&mut family, text(job, "column_family").as_bytes());
        [
            format!("{} to {}", number(job, "from_level"), number(job, "to_level")),
            thousands(number(job, "files")),
            Size(number(job, "bytes")).to_string(),
            format!("{} %", number(job, "read_bytes").saturating_mul(100) / bytes),
            Size(number(job, "written_bytes")).to_string(),
            format!("{:.1}", float(job, "seconds")),
            number(job, "cores").to_string(),
            family,
            if job["requested"] == true { "on request" } else { "" }.to_owned(),
        ]
    };
    let rows: Vec<_> =
        std::iter::once(head.map(str::to_owned)).chain(jobs.iter().map(row)).collect();
    out.push_str("\nmerges under way\n");
    out.push_str(&table(&rows, &[1, 2, 3, 4, 5, 6]));
}

fn float(value: &Value, name: &str) -> f64 {
    value[name].as_f64().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_status_shows_levels_and_jobs() {
        let level = json!({"level": 6, "files": 1200, "bytes": 4096, "score": 0.5,
            "write_amplification": 3.25, "merges": 7, "seconds": 1.0, "cpu_seconds": 0.4});
        let job = json!({"from_level": 0, "to_level": 6, "files": 5, "bytes": 1000,
            "read_bytes": 250, "column_family": "default", "requested": true, "cores": 2});
        let status = json!({
            "paused": true,
            "limits": {"cores": 0.5, "bytes_per_second": null},
            "debt_bytes": 0, "pressure": 0.125, "write_bytes_per_second": null,
            "column_families": [{"name": "a\nb", "bytes": 4096, "levels": [level]},
                {"name": "empty", "levels": []}],
            "jobs": [job],
        });
        let text = status_text(&status);
        assert!(text.starts_with("merges are paused, limits: 0.5 cores\n"), "{text}");
        assert!(
            text.contains("\ncolumn family a\\nb: 4 KiB,") && !text.contains("empty"),
            "{text}"
        );
        let words: Vec<&str> = text
            .lines()
            .find(|line| line.trim_start().starts_with("6 "))
            .map(|line| line.split_whitespace().collect())
            .unwrap_or_default();
        assert_eq!(words[..5], ["6", "1,200", "4", "KiB", "0.50"], "{text}");
        assert!(text.contains(" 25 % ") && text.contains("on request"), "{text}");
    }

    #[test]
    fn a_status_says_what_stops_writes() {
        let of = |paused: bool, stopped: bool| {
            status_text(&json!({"paused": paused, "writes_stopped": stopped,
                "write_bytes_per_second": 1024}))
        };
        assert!(of(true, false).contains("limited to 1 KiB/s"));
        assert!(of(true, true).contains("stopped until the end of the pause"));
        assert!(of(false, true).contains("stopped until merges"));
    }

    #[test]
    fn limits_are_named() {
        assert_eq!(limits_text(&json!({"cores": null, "bytes_per_second": null})), "none");
        assert_eq!(
            limits_text(&json!({"cores": 1.5, "bytes_per_second": 1024})),
            "1.5 cores, 1 KiB/s"
        );
    }
}
