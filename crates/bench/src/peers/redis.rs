//! Gets and sets over the Redis protocol: our node and redis-server, each under redis-benchmark.
//!
//! For gets both servers hold the keys that redis-benchmark asks for in memory; ours reads them
//! from the disk once, in the warm-up. For sets both start empty, in a directory of their own on
//! the database's disk, and an acknowledged set survives the process: ours with `process`,
//! redis-server in its append-only file, flushed every second. Each server runs on one processor,
//! redis-benchmark on another.

use std::fmt::Write as _;
use std::path::PathBuf;

use serde_json::json;

use super::Setup;
use super::sample::Sample;
use super::tool::{Background, Tool, free_port};
use super::work::Work;
use super::writes::WriteDir;

/// Keys that `redis-benchmark -r` draws from.
const KEYS: u64 = 100_000;
const VALUE_LEN: usize = 1000;
/// Requests of the warm-up; its rate gives the length of the measured run.
const WARM_UP: u64 = 400_000;

/// The server under load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Server {
    /// Our node.
    Millrace,
    /// redis-server.
    Redis,
}

/// A server under redis-benchmark. Keys are always drawn from many: with a single key
/// redis-benchmark sends prepared bytes and is itself the program that is measured.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// The measurement's name.
    pub name: &'static str,
    server: Server,
    command: &'static str,
    clients: &'static [&'static str],
}

/// Pipelined, by few clients.
const PIPELINED: &[&str] = &["-P", "16", "-c", "50"];
/// One command at a time, by many clients.
const MANY_CLIENTS: &[&str] = &["-P", "1", "-c", "1000"];

/// Gets in pipelines: ours, and redis-server's.
pub const GET: [&str; 2] = ["millrace resp get", "redis resp get"];
/// Gets by a thousand clients, each one at a time.
pub const GET_ONE_BY_ONE: [&str; 2] =
    ["millrace resp get 1000 clients", "redis resp get 1000 clients"];
/// Sets in pipelines.
pub const SET: [&str; 2] = ["millrace resp set", "redis resp set"];

/// How one of these measurements is made.
pub fn measurement(name: &'static str) -> Option<Work> {
    let loads =
        [(GET, "get", PIPELINED), (GET_ONE_BY_ONE, "get", MANY_CLIENTS), (SET, "set", PIPELINED)];
    let (both, command, clients) = loads.into_iter().find(|(both, ..)| both.contains(&name))?;
    let server = if name == both[0] { Server::Millrace } else { Server::Redis };
    Some(Work::Redis(Load { name, server, command, clients }))
}

/// Measures.
pub fn run(setup: &Setup, load: &Load) -> Result<Sample, String> {
    let port = free_port()?;
    // Removed after the measurement.
    let dir = if load.command == "set" { Some(WriteDir::new(setup, None)?) } else { None };
    let server = match (load.server, &dir) {
        (Server::Millrace, None) => {
            let data = database(setup)?;
            node(setup, port).arg("--read-only").arg("--data").arg(data).start()?
        }
        (Server::Millrace, Some(dir)) => {
            node(setup, port).args(["--durability", "process", "--data"]).arg(&dir.0).start()?
        }
        (Server::Redis, None) => {
            let tool = redis(setup, port).args(["--appendonly", "no", "--dir"]);
            let mut server = tool.arg(&setup.scratch).start()?;
            server.wait_for_port(port)?;
            load_keys(port)?;
            server
        }
        (Server::Redis, Some(dir)) => {
            let flags = ["--appendonly", "yes", "--appendfsync", "everysec", "--dir"];
            redis(setup, port).args(flags).arg(&dir.0).start()?
        }
    };
    measure(setup, server, port, load)
}

/// Our node, on one processor.
fn node(setup: &Setup, port: u16) -> Tool {
    Tool::new(&setup.millrace)
        .args(["serve".to_owned(), "--listen".to_owned(), format!("127.0.0.1:{port}")])
        .args(["--memory", "1G", "--cores"])
        .arg(format!("{0}-{0}", setup.processor))
}

/// redis-server, on the same processor.
fn redis(setup: &Setup, port: u16) -> Tool {
    Tool::pinned(setup.processor, "redis-server")
        .args(["--port".to_owned(), port.to_string()])
        .args(["--bind", "127.0.0.1", "--save", "", "--daemonize", "no"])
}

/// Sets the keys that redis-benchmark asks for.
fn load_keys(port: u16) -> Result<(), String> {
    let mut load = Vec::new();
    for key in keys() {
        let value = "x".repeat(VALUE_LEN);
        load.extend_from_slice(
            format!("*3\r\n$3\r\nSET\r\n${}\r\n{key}\r\n${VALUE_LEN}\r\n{value}\r\n", key.len())
                .as_bytes(),
        );
    }
    let tool =
        Tool::new("redis-cli").args(["-p".to_owned(), port.to_string(), "--pipe".to_owned()]);
    tool.input(load).output().map(|_| ())
}

/// The keys that `redis-benchmark -r` asks for: numbers of twelve digits.
fn keys() -> impl Iterator<Item = String> {
    (0..KEYS).map(|number| format!("key:{number:012}"))
}

/// A RocksDB database with those keys, all of them in tables; made once.
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

/// Measures a server that starts or has started.
fn measure(
    setup: &Setup,
    mut server: Background,
    port: u16,
    load: &Load,
) -> Result<Sample, String> {
    server.wait_for_port(port)?;
    let warm_up = run_benchmark(setup, port, WARM_UP, load)?;
    let requests = (warm_up.rate * setup.seconds).max(WARM_UP as f64) as u64;
    let before = server.cpu_us();
    let result = run_benchmark(setup, port, requests, load)?;
    let cpu = server.cpu_us().zip(before).map(|(after, before)| after - before);
    Ok(Sample {
        ops_per_second: result.rate,
        cpu_us_per_op: cpu.map(|cpu| cpu / requests as f64),
        p50_us: result.p50_us,
        p99_us: result.p99_us,
        processors: 1,
        generator_busy: result.busy,
        command: format!("{}; {}", server.line(), result.line),
        report: json!({ "requests": requests, "server_cpu_us": cpu }),
        ..Sample::default()
    })
}

/// The report of one run of redis-benchmark.
struct Report {
    rate: f64,
    p50_us: Option<f64>,
    p99_us: Option<f64>,
    /// The share of its processor that it used.
    busy: Option<f64>,
    line: String,
}

fn run_benchmark(setup: &Setup, port: u16, requests: u64, load: &Load) -> Result<Report, String> {
    let processor = setup.other.unwrap_or(setup.processor);
    let tool = Tool::pinned(processor, "redis-benchmark")
        .args(["-p".to_owned(), port.to_string()])
        .args(["-t", load.command, "-d", "1000", "--csv"])
        .args(load.clients.iter().copied())
        .args(["-n".to_owned(), requests.to_string(), "-r".to_owned(), KEYS.to_string()]);
    let line = tool.line();
    let (text, busy) = tool.output_and_share()?;
    let strange = || format!("cannot read redis-benchmark's report: {text}");
    let figures = parse(&text, load.command).ok_or_else(strange)?;
    let us = |nth: usize| figures.get(nth).map(|ms| ms * 1000.0);
    Ok(Report { rate: figures[0], p50_us: us(3), p99_us: us(5), busy, line })
}

/// The figures in `"GET","142857.14",...`: requests per second; then the mean, shortest, median,
/// p95, p99 and longest latency in milliseconds.
fn parse(text: &str, command: &str) -> Option<Vec<f64>> {
    let name = format!("\"{}\"", command.to_uppercase());
    let line = text.lines().find(|line| line.starts_with(&name))?;
    line.split(',').skip(1).map(|field| field.trim_matches('"').parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_figures_are_read_from_redis_benchmarks_table() {
        let text = "\"test\",\"rps\",\"avg_latency_ms\"\n\"GET\",\"142857.14\",\"0.3\"\n";
        assert_eq!(parse(text, "get"), Some(vec![142_857.14, 0.3]));
        assert_eq!(parse("WARNING", "get"), None);
    }

    #[test]
    fn the_keys_are_those_that_redis_benchmark_asks_for() {
        let all: Vec<String> = keys().collect();
        assert_eq!(all.len() as u64, KEYS);
        assert_eq!(all[7], "key:000000000007");
    }
}
