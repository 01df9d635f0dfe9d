//! fio: what the device can do, and what asking it costs.

use std::path::Path;

use serde_json::Value;

use super::Setup;
use super::sample::Sample;
use super::search::Knob;
use super::tool::{Tool, files_ending};

/// How fio asks: each request by itself, or several with one system call; with memory and files
/// that the kernel knows.
const KNOBS: &[Knob] = &[
    &[
        &[],
        &["--iodepth_batch_submit=4", "--iodepth_batch_complete_min=4", MOST],
        &["--iodepth_batch_submit=8", "--iodepth_batch_complete_min=8", MOST],
        &["--iodepth_batch_submit=16", "--iodepth_batch_complete_min=16", MOST],
    ],
    &[&[], &["--registerfiles", "--fixedbufs"]],
];
/// As many as there are.
const MOST: &str = "--iodepth_batch_complete_max=256";

/// Random direct reads of the database's own files, by one job with 64 in flight, at the best of
/// its settings.
pub fn run(setup: &Setup, name: &str, block: u64, align: u64) -> Result<Sample, String> {
    let run = |flags: &[&str]| run_once(setup, block, align, flags);
    run(&setup.found.best(name, KNOBS, run)?)
}

fn run_once(setup: &Setup, block: u64, align: u64, flags: &[&str]) -> Result<Sample, String> {
    let files = files_ending(&setup.data, ".sst")?;
    if files.is_empty() {
        return Err("the database has no SST file".to_owned());
    }
    // A colon separates names for fio.
    let names: Vec<String> =
        files.iter().map(|file| file.to_string_lossy().replace(':', "\\:")).collect();
    let tool = Tool::new("fio")
        .args([
            "--name=peer",
            "--readonly",
            "--rw=randread",
            "--direct=1",
            "--ioengine=io_uring",
            "--iodepth=64",
            "--numjobs=1",
            "--norandommap",
            "--randrepeat=0",
            "--file_service_type=random",
            "--time_based",
            "--output-format=json",
        ])
        .args(flags.iter().copied())
        .arg(format!("--bs={block}"))
        .arg(format!("--blockalign={align}"))
        .arg(format!("--runtime={}", setup.seconds.ceil()))
        .arg(format!("--cpus_allowed={}", setup.processor));
    let command = format!("{} --filename=(the SST files)", tool.line());
    let text = tool.arg(format!("--filename={}", names.join(":"))).output()?;
    parse(&text, command, "read")
}

/// Direct requests of 4 KiB to one file, `rw` in fio's words, at the best of its settings.
pub fn run_file(
    setup: &Setup,
    name: &str,
    path: &Path,
    rw: &str,
    depth: u16,
) -> Result<Sample, String> {
    let run = |flags: &[&str]| run_file_once(setup, path, rw, depth, flags);
    run(&setup.found.best(name, KNOBS, run)?)
}

fn run_file_once(
    setup: &Setup,
    path: &Path,
    rw: &str,
    depth: u16,
    flags: &[&str],
) -> Result<Sample, String> {
    let side = if rw.ends_with("write") { "write" } else { "read" };
    let tool = Tool::new("fio")
        .args([
            "--name=peer",
            "--bs=4k",
            "--direct=1",
            "--ioengine=io_uring",
            "--numjobs=1",
            "--norandommap",
            "--randrepeat=0",
            "--time_based",
            "--output-format=json",
        ])
        .args(flags.iter().copied())
        .args([format!("--rw={rw}"), format!("--iodepth={depth}")])
        .arg(format!("--runtime={}", setup.seconds.ceil()))
        .arg(format!("--cpus_allowed={}", setup.processor))
        .arg(format!("--filename={}", path.to_string_lossy().replace(':', "\\:")));
    let command = tool.line();
    parse(&tool.output()?, command, side)
}

/// `side` is what was done: read or write.
fn parse(text: &str, command: String, side: &str) -> Result<Sample, String> {
    // Warnings may come before the report.
    let json = text.find('{').map_or(text, |at| &text[at..]);
    let report: Value =
        serde_json::from_str(json).map_err(|error| format!("fio's report is no JSON: {error}"))?;
    let job = &report["jobs"][0];
    let done = &job[side];
    let number = |value: &Value| value.as_f64().filter(|number| *number > 0.0);
    let ops_per_second =
        number(&done["iops"]).ok_or_else(|| format!("fio's report has no {side}"))?;
    // Per cent of the job's run time, which is in milliseconds.
    let busy = job["usr_cpu"].as_f64().zip(job["sys_cpu"].as_f64()).map(|(usr, sys)| usr + sys);
    let cpu_us_per_op = busy
        .zip(number(&job["job_runtime"]))
        .zip(number(&done["total_ios"]))
        .map(|((busy, ms), ios)| busy / 100.0 * ms * 1000.0 / ios);
    let percentile =
        |name: &str| done["clat_ns"]["percentile"][name].as_f64().map(|ns| ns / 1000.0);
    Ok(Sample {
        ops_per_second,
        cpu_us_per_op,
        p50_us: percentile("50.000000"),
        p99_us: percentile("99.000000"),
        p999_us: percentile("99.900000"),
        processors: 1,
        command,
        report: done.clone(),
        ..Sample::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_processor_time_and_latency_are_found_in_fios_report() {
        let text = r#"note: both iodepth >= 1
            { "jobs": [ { "usr_cpu": 5.0, "sys_cpu": 15.0, "job_runtime": 2000,
              "read": { "iops": 100000.0, "total_ios": 200000, "runtime": 2000,
                        "clat_ns": { "percentile": { "50.000000": 500000, "99.000000": 900000 } } } } ] }"#;
        let sample = parse(text, String::new(), "read").unwrap();
        assert_eq!(sample.ops_per_second, 100_000.0);
        assert_eq!(sample.cpu_us_per_op, Some(2.0));
        assert_eq!(sample.p99_us, Some(900.0));
        assert!(parse("{}", String::new(), "read").is_err());
    }
}
