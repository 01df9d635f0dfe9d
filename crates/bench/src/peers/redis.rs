//! Gets and sets over the Redis protocol: our node beside redis-server, both asked by
//! redis-benchmark.
//!
//! For gets both servers hold the same keys, those that redis-benchmark asks for, in memory; ours
//! reads them once from the disk while it warms up. For sets both begin with nothing, in a
//! directory of their own on the disk of the database, and keep what they are sent from the end of
//! the process: ours with `process`, redis-server in its append-only file, flushed every second.
//! Each server runs on one processor, redis-benchmark on another.

use std::fmt::Write as _;
use std::path::PathBuf;

use serde_json::json;

use super::Setup;
use super::sample::Sample;
use super::tool::{Background, Tool, free_port};
use super::writes::Place;

/// Keys that `redis-benchmark -r` draws from here.
const KEYS: u64 = 100_000;
const VALUE_LEN: usize = 1000;
/// Requests of the warm-up, from whose rate the measured run's length follows.
const WARM_UP: u64 = 400_000;

/// Our node.
pub fn ours(setup: &Setup, many_keys: bool) -> Result<Sample, String> {
    let data = database(setup)?;
    let port = free_port()?;
    let server = Tool::new(&setup.millrace)
        .args(["serve", "--read-only", "--data"])
        .arg(&data)
        .args(["--listen".to_owned(), format!("127.0.0.1:{port}")])
        .args(["--memory", "1G", "--cores"])
        .arg(format!("{0}-{0}", setup.processor))
        .start()?;
    measure(setup, server, port, "get", many_keys)
}

/// Our node, taking sets.
pub fn ours_set(setup: &Setup, many_keys: bool) -> Result<Sample, String> {
    let place = Place::new(setup, false)?;
    let port = free_port()?;
    let server = Tool::new(&setup.millrace)
        .args(["serve", "--durability", "process", "--data"])
        .arg(&place.0)
        .args(["--listen".to_owned(), format!("127.0.0.1:{port}")])
        .args(["--memory", "1G", "--cores"])
        .arg(format!("{0}-{0}", setup.processor))
        .start()?;
    measure(setup, server, port, "set", many_keys)
}

/// redis-server, taking sets.
pub fn theirs_set(setup: &Setup, many_keys: bool) -> Result<Sample, String> {
    let place = Place::new(setup, false)?;
    let port = free_port()?;
    let server = Tool::pinned(setup.processor, "redis-server")
        .args(["--port".to_owned(), port.to_string()])
        .args(["--bind", "127.0.0.1", "--save", "", "--daemonize", "no"])
        .args(["--appendonly", "yes", "--appendfsync", "everysec", "--dir"])
        .arg(&place.0)
        .start()?;
    measure(setup, server, port, "set", many_keys)
}

/// redis-server.
pub fn theirs(setup: &Setup, many_keys: bool) -> Result<Sample, String> {
    let port = free_port()?;
    let mut server = Tool::pinned(setup.processor, "redis-server")
        .args(["--port".to_owned(), port.to_string()])
        .args(["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--daemonize", "no"])
        .arg("--dir")
        .arg(&setup.scratch)
        .start()?;
    server.wait_for_port(port)?;
    let mut load = Vec::new();
    for key in keys() {
        let value = "x".repeat(VALUE_LEN);
        load.extend_from_slice(
            format!("*3\r\n$3\r\nSET\r\n${}\r\n{key}\r\n${VALUE_LEN}\r\n{value}\r\n", key.len())
                .as_bytes(),
        );
    }
    Tool::new("redis-cli")
        .args(["-p".to_owned(), port.to_string(), "--pipe".to_owned()])
        .input(load)
        .output()?;
    measure(setup, server, port, "get", many_keys)
}

/// What redis-benchmark asks for: without `-r` one key, literally so called; with it, numbers in
/// twelve digits.
fn keys() -> impl Iterator<Item = String> {
    let numbered = (0..KEYS).map(|number| format!("key:{number:012}"));
    numbered.chain(["key:__rand_int__".to_owned()])
}

/// A RocksDB database with those keys, all of them in tables, made once.
fn database(setup: &Setup) -> Result<PathBuf, String> {
    let dir = setup.scratch.join("redis-keys");
    if dir.join("CURRENT").exists() {
        return Ok(dir);
    }
    let mut load = String::new();
    let value = "x".repeat(VALUE_LEN);
    for key in keys() {
        let _ = writeln!(load, "{key} ==> {value}");
    }
    Tool::new("ldb")
        .arg(format!("--db={}", dir.display()))
        .args(["--create_if_missing", "--block_size=4096", "--bloom_bits=10"])
        .args(["--compression_type=no", "load", "--compact"])
        .input(load.into_bytes())
        .output()?;
    Ok(dir)
}

/// Asks a server that starts up or is up.
fn measure(
    setup: &Setup,
    mut server: Background,
    port: u16,
    command: &str,
    many_keys: bool,
) -> Result<Sample, String> {
    server.wait_for_port(port)?;
    let (warm, _) = ask(setup, port, WARM_UP, command, many_keys)?;
    let requests = (warm * setup.seconds).max(WARM_UP as f64) as u64;
    let before = server.cpu_us();
    let (ops_per_second, line) = ask(setup, port, requests, command, many_keys)?;
    let cpu = server.cpu_us().zip(before).map(|(after, before)| after - before);
    Ok(Sample {
        ops_per_second,
        cpu_us_per_op: cpu.map(|cpu| cpu / requests as f64),
        command: format!("{}; {line}", server.line()),
        report: json!({ "requests": requests, "server_cpu_us": cpu }),
        ..Sample::default()
    })
}

/// One run of redis-benchmark: its rate and its command line.
fn ask(
    setup: &Setup,
    port: u16,
    requests: u64,
    command: &str,
    many_keys: bool,
) -> Result<(f64, String), String> {
    let place = setup.other.unwrap_or(setup.processor);
    let mut tool = Tool::pinned(place, "redis-benchmark")
        .args(["-p".to_owned(), port.to_string()])
        .args(["-t", command, "-P", "16", "-c", "50", "-d", "1000", "--csv"])
        .args(["-n".to_owned(), requests.to_string()]);
    if many_keys {
        tool = tool.args(["-r".to_owned(), KEYS.to_string()]);
    }
    let line = tool.line();
    let text = tool.output()?;
    let rate = parse(&text, command)
        .ok_or_else(|| format!("redis-benchmark's report is strange: {text}"))?;
    Ok((rate, line))
}

/// The rate in `"GET","142857.14",...`.
fn parse(text: &str, command: &str) -> Option<f64> {
    let name = format!("\"{}\"", command.to_uppercase());
    let line = text.lines().find(|line| line.starts_with(&name))?;
    line.split(',').nth(1)?.trim_matches('"').parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_is_found_in_redis_benchmarks_table() {
        let text = "\"test\",\"rps\",\"avg_latency_ms\"\n\"GET\",\"142857.14\",\"0.3\"\n";
        assert_eq!(parse(text, "get"), Some(142_857.14));
        assert_eq!(parse("WARNING", "get"), None);
    }

    #[test]
    fn the_keys_are_those_that_redis_benchmark_asks_for() {
        let all: Vec<String> = keys().collect();
        assert_eq!(all.len() as u64, KEYS + 1);
        assert_eq!(all[7], "key:000000000007");
        assert_eq!(all.last().unwrap(), "key:__rand_int__");
    }
}
