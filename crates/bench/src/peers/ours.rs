//! Millrace as one of the measured programs.

use std::ffi::OsString;

use serde_json::Value;

use super::Setup;
use super::bases::Base;
use super::sample::Sample;
use super::tool::Tool;

/// The share of the requested writes that a program must do.
const RATE_KEPT: f64 = 0.98;

/// The share of the offered operations that a program must do in the same time; one that does less
/// falls further and further behind.
const OFFERED_KEPT: f64 = 0.9;

/// How to run a case of ours.
#[derive(Clone, Debug, Default)]
pub struct Ours {
    /// The case and its own flags.
    pub flags: &'static [&'static str],
    /// Draw from this number of keys, with memory enough to cache all of them.
    pub cached_keys: Option<u64>,
    /// On two cores instead of one.
    pub two_cores: bool,
    /// The database.
    pub base: Base,
}

/// Runs a case.
pub fn run(setup: &Setup, ours: &Ours) -> Result<Sample, String> {
    let mut tool = Tool::new(&setup.millrace).arg("bench").args(ours.flags.iter().copied());
    tool = tool.arg("--data").arg(ours.base.dir(setup)?).arg("--json");
    tool = tool.arg("--seconds").arg(setup.seconds.to_string());
    let cores = match (ours.two_cores, setup.other) {
        (false, _) => format!("{0}-{0}", setup.processor),
        (true, Some(other)) => format!("{},{other}", setup.processor),
        (true, None) => return Err("there is only one processor here".to_owned()),
    };
    tool = tool.arg("--cores").arg(cores);
    if let Some(keys) = ours.cached_keys {
        let keys = keys.min(setup.keys);
        // A key takes about 1 KiB, without its block's header and trailer. Each core caches all
        // keys.
        let memory = (keys * 3072 + (1 << 30)) * if ours.two_cores { 2 } else { 1 };
        tool =
            tool.args(["--cached".into(), "--memory".into(), OsString::from(memory.to_string())]);
        tool = tool.arg("--keys").arg(keys.to_string());
    }
    let command = tool.line();
    let report: Value = serde_json::from_str(tool.output()?.trim())
        .map_err(|error| format!("millrace's report is not JSON: {error}"))?;
    if ours.cached_keys.is_some() && report["ios_per_op"].as_f64().is_none_or(|ios| ios > 0.001) {
        return Err("not everything was cached".to_owned());
    }
    sample(command, report)
}

/// Keys in the database.
pub fn count_keys(setup: &Setup) -> Result<u64, String> {
    let report = Tool::new(&setup.millrace)
        .args(["bench", "readrandom", "--seconds", "0.1", "--json", "--data"])
        .arg(&setup.data)
        .output()?;
    let report: Value = serde_json::from_str(report.trim()).unwrap_or_default();
    report["keys"].as_u64().ok_or_else(|| "millrace does not report the number of keys".to_owned())
}

/// Runs a program that prints one JSON object with our names.
pub fn report(tool: Tool) -> Result<Sample, String> {
    let command = tool.line();
    let report: Value = serde_json::from_str(tool.output()?.trim())
        .map_err(|error| format!("the report of {command} is not JSON: {error}"))?;
    sample(command, report)
}

/// Reads a report with our names, which bench/peers uses, too.
pub fn sample(command: String, report: Value) -> Result<Sample, String> {
    let ops_per_second = report["ops_per_second"]
        .as_f64()
        .ok_or_else(|| format!("the report has no rate: {report}"))?;
    let number = |name: &str| report[name].as_f64();
    if let Some((wanted, done)) = number("rate").zip(number("writes_per_second"))
        && done < wanted * RATE_KEPT
    {
        return Err(format!("it did only {done:.0} of {wanted:.0} writes a second"));
    }
    if let Some(offered) = number("offered_per_second")
        && ops_per_second < offered * OFFERED_KEPT
    {
        return Err(format!("it did only {ops_per_second:.0} of {offered:.0} operations a second"));
    }
    let (operations, found) = (report["operations"].as_u64(), report["found"].as_u64());
    let absent = report["absent"].as_bool().unwrap_or(false);
    if absent && found != Some(0) {
        return Err(format!("found {found:?} of the absent keys"));
    }
    if found.is_some() && operations != found && !absent {
        return Err(format!("found {found:?} of {operations:?}: is this db_bench's database?"));
    }
    Ok(Sample {
        ops_per_second,
        cpu_us_per_op: report["cpu_us_per_op"].as_f64(),
        p50_us: report["p50_us"].as_f64(),
        p99_us: report["p99_us"].as_f64(),
        p999_us: report["p999_us"].as_f64(),
        bytes_per_io: report["bytes_per_io"].as_f64(),
        open_seconds: report["open_seconds"].as_f64(),
        processors: report["cores"].as_u64().unwrap_or(1) as usize,
        generator_busy: None,
        command,
        report,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_program_that_did_less_than_requested_is_an_error() {
        let measured = |report: Value| sample(String::new(), report);
        let done = |writes: f64| json!({"ops_per_second": 5.0, "rate": 10_000.0, "writes_per_second": writes});
        assert!(measured(done(9_900.0)).is_ok());
        let error = measured(done(1_870.0)).unwrap_err();
        assert_eq!(error, "it did only 1870 of 10000 writes a second");
        let found = json!({"ops_per_second": 5.0, "operations": 10, "found": 9});
        assert!(measured(found).unwrap_err().contains("found"));
        let offered = |done: f64| json!({"ops_per_second": done, "offered_per_second": 1000.0});
        assert!(measured(offered(960.0)).is_ok());
        let error = measured(offered(500.0)).unwrap_err();
        assert_eq!(error, "it did only 500 of 1000 operations a second");
        let absent = |found: u64| json!({"ops_per_second": 5.0, "operations": 10, "found": found, "absent": true});
        assert!(measured(absent(0)).is_ok());
        assert!(measured(absent(1)).is_err());
    }
}
