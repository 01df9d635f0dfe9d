//! fio: the rate of the device, and the processor time of a request.

use std::path::Path;

use serde_json::Value;

use super::Setup;
use super::sample::Sample;
use super::search::Knob;
use super::tool::{Tool, files_ending};

/// One system call for each request, or for several.
const BATCHES: Knob = &[
    &[],
    &["--iodepth_batch_submit=4", "--iodepth_batch_complete_min=4", ALL_DONE],
    &["--iodepth_batch_submit=8", "--iodepth_batch_complete_min=8", ALL_DONE],
    &["--iodepth_batch_submit=16", "--iodepth_batch_complete_min=16", ALL_DONE],
];
/// Reaps every completion that is there.
const ALL_DONE: &str = "--iodepth_batch_complete_max=256";
/// Memory and files that the kernel knows beforehand.
const REGISTERED: Knob = &[&[], &["--registerfiles", "--fixedbufs"]];

/// The settings to search; with one request in flight there is nothing to batch.
fn knobs(depth: u16) -> &'static [Knob] {
    if depth == 1 { &[REGISTERED] } else { &[BATCHES, REGISTERED] }
}

/// Random reads of the database's files.
#[derive(Clone, Copy, Debug)]
pub struct Requests {
    /// Bytes of each.
    pub block: u64,
    /// Their offsets are multiples of this.
    pub align: u64,
    /// Requests in flight.
    pub depth: u16,
}

/// Random direct reads of the database's own files by one job, at its best settings.
pub fn run(setup: &Setup, name: &str, requests: Requests) -> Result<Sample, String> {
    let run = |flags: &[&str]| run_once(setup, requests, flags);
    run(&setup.searches.best(name, knobs(requests.depth), run)?)
}

fn run_once(setup: &Setup, requests: Requests, flags: &[&str]) -> Result<Sample, String> {
    let files = files_ending(&setup.data, ".sst")?;
    if files.is_empty() {
        return Err("the database has no SST file".to_owned());
    }
    // A colon separates names for fio.
    let names: Vec<String> =
        files.iter().map(|file| file.to_string_lossy().replace(':', "\\:")).collect();
    let tool = Tool::new("fio")
        .args(["--name=peer", "--readonly", "--rw=randread", "--direct=1", "--ioengine=io_uring"])
        .arg(format!("--iodepth={}", requests.depth))
        .args(["--numjobs=1", "--norandommap", "--randrepeat=0", "--file_service_type=random"])
        .args(["--time_based", "--output-format=json"])
        .args(flags.iter().copied())
        .arg(format!("--bs={}", requests.block))
        .arg(format!("--blockalign={}", requests.align))
        .arg(format!("--runtime={}", setup.seconds.ceil()))
        .arg(format!("--cpus_allowed={}", setup.processor));
    let command = format!("{} --filename=(the SST files)", tool.line());
    let text = tool.arg(format!("--filename={}", names.join(":"))).output()?;
    parse(&text, command, "read")
}

/// Direct requests of 4 KiB to one file, at the best settings; `rw` is fio's word.
pub fn run_file(
    setup: &Setup,
    name: &str,
    path: &Path,
    rw: &str,
    depth: u16,
) -> Result<Sample, String> {
    let run = |flags: &[&str]| run_file_once(setup, path, rw, depth, flags);
    run(&setup.searches.best(name, knobs(depth), run)?)
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
        .args(["--name=peer", "--bs=4k", "--direct=1", "--ioengine=io_uring", "--numjobs=1"])
        .args(["--norandommap", "--randrepeat=0", "--time_based", "--output-format=json"])
        .args(flags.iter().copied())
        .args([format!("--rw={rw}"), format!("--iodepth={depth}")])
        .arg(format!("--runtime={}", setup.seconds.ceil()))
        .arg(format!("--cpus_allowed={}", setup.processor))
        .arg(format!("--filename={}", path.to_string_lossy().replace(':', "\\:")));
    let command = tool.line();
    parse(&tool.output()?, command, side)
}

/// Reads fio's report; `side` is `read` or `write`.
fn parse(text: &str, command: String, side: &str) -> Result<Sample, String> {
    // Warnings may come before the report.
    let json = text.find('{').map_or(text, |at| &text[at..]);
    let report: Value =
        serde_json::from_str(json).map_err(|error| format!("fio's report is not JSON: {error}"))?;
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
    fn rate_processor_time_and_latency_are_read_from_fios_report() {
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
