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

/// What is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Server {
    /// Our node.
    Millrace,
    /// redis-server.
    Redis,
}

/// A server under redis-benchmark. Keys are always drawn from many: with one key redis-benchmark
/// sends what it has prepared, and is itself what is measured.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Its name in rows and results.
    pub name: &'static str,
    server: Server,
    command: &'static str,
    clients: &'static [&'static str],
}

/// Pipelined, by few clients.
const PIPELINED: &[&str] = &["-P", "16", "-c", "50"];
/// One command at a time, by many clients.
const MANY_CLIENTS: &[&str] = &["-P", "1", "-c", "1000"];

/// Gets in pipelines.
pub const fn get(server: Server) -> Load {
    let name = match server {
        Server::Millrace => "millrace resp get",
        Server::Redis => "redis resp get",
    };
    Load { name, server, command: "get", clients: PIPELINED }
}

/// Gets by a thousand clients, each one at a time.
pub const fn get_one_by_one(server: Server) -> Load {
    let name = match server {
        Server::Millrace => "millrace resp get 1000 clients",
        Server::Redis => "redis resp get 1000 clients",
    };
    Load { name, server, command: "get", clients: MANY_CLIENTS }
}

/// Sets in pipelines.
pub const fn set(server: Server) -> Load {
    let name = match server {
        Server::Millrace => "millrace resp set",
        Server::Redis => "redis resp set",
    };
    Load { name, server, command: "set", clients: PIPELINED }
}

/// Measures.
pub fn run(setup: &Setup, load: &Load) -> Result<Sample, String> {
    let port = free_port()?;
    // Removed when it was measured.
    let place = if load.command == "set" { Some(Place::new(setup, None)?) } else { None };
    let server = match (load.server, &place) {
        (Server::Millrace, None) => {
            let data = database(setup)?;
            node(setup, port).arg("--read-only").arg("--data").arg(data).start()?
        }
        (Server::Millrace, Some(place)) => {
            node(setup, port).args(["--durability", "process", "--data"]).arg(&place.0).start()?
        }
        (Server::Redis, None) => {
            let tool = redis(setup, port).args(["--appendonly", "no", "--dir"]);
            let mut server = tool.arg(&setup.scratch).start()?;
            server.wait_for_port(port)?;
            load_keys(port)?;
            server
        }
        (Server::Redis, Some(place)) => {
            let flags = ["--appendonly", "yes", "--appendfsync", "everysec", "--dir"];
            redis(setup, port).args(flags).arg(&place.0).start()?
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

/// redis-server, on the same.
fn redis(setup: &Setup, port: u16) -> Tool {
    Tool::pinned(setup.processor, "redis-server")
        .args(["--port".to_owned(), port.to_string()])
        .args(["--bind", "127.0.0.1", "--save", "", "--daemonize", "no"])
}

/// Sets the keys that are asked for.
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

/// What `redis-benchmark -r` asks for: numbers in twelve digits.
fn keys() -> impl Iterator<Item = String> {
    (0..KEYS).map(|number| format!("key:{number:012}"))
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
    load: &Load,
) -> Result<Sample, String> {
    server.wait_for_port(port)?;
    let warm = ask(setup, port, WARM_UP, load)?;
    let requests = (warm.rate * setup.seconds).max(WARM_UP as f64) as u64;
    let before = server.cpu_us();
    let asked = ask(setup, port, requests, load)?;
    let cpu = server.cpu_us().zip(before).map(|(after, before)| after - before);
    Ok(Sample {
        ops_per_second: asked.rate,
        cpu_us_per_op: cpu.map(|cpu| cpu / requests as f64),
        p50_us: asked.p50_us,
        p99_us: asked.p99_us,
        processors: 1,
        generator_busy: asked.busy,
        command: format!("{}; {}", server.line(), asked.line),
        report: json!({ "requests": requests, "server_cpu_us": cpu }),
        ..Sample::default()
    })
}

/// What one run of redis-benchmark said.
struct Asked {
    rate: f64,
    p50_us: Option<f64>,
    p99_us: Option<f64>,
    /// The share of its processor that it needed.
    busy: Option<f64>,
    line: String,
}

fn ask(setup: &Setup, port: u16, requests: u64, load: &Load) -> Result<Asked, String> {
    let place = setup.other.unwrap_or(setup.processor);
    let tool = Tool::pinned(place, "redis-benchmark")
        .args(["-p".to_owned(), port.to_string()])
        .args(["-t", load.command, "-d", "1000", "--csv"])
        .args(load.clients.iter().copied())
        .args(["-n".to_owned(), requests.to_string(), "-r".to_owned(), KEYS.to_string()]);
    let line = tool.line();
    let (text, busy) = tool.output_and_share()?;
    let strange = || format!("redis-benchmark's report is strange: {text}");
    let figures = parse(&text, load.command).ok_or_else(strange)?;
    let us = |nth: usize| figures.get(nth).map(|ms| ms * 1000.0);
    Ok(Asked { rate: figures[0], p50_us: us(3), p99_us: us(5), busy, line })
}

/// The figures in `"GET","142857.14",...`: requests per second; mean, least, median, p95, p99 and
/// longest latency in milliseconds.
fn parse(text: &str, command: &str) -> Option<Vec<f64>> {
    let name = format!("\"{}\"", command.to_uppercase());
    let line = text.lines().find(|line| line.starts_with(&name))?;
    line.split(',').skip(1).map(|field| field.trim_matches('"').parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_figures_are_found_in_redis_benchmarks_table() {
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
