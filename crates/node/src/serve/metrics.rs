//! Metrics over HTTP, for a monitoring system that polls: `GET /metrics`, and `GET /healthz` to
//! check only whether the node serves.
//!
//! 1. Core 0 accepts, at most [`CONNECTIONS_MAX`] at a time; it closes further connections
//!    immediately.
//! 2. It receives a request up to the empty line after the headers; only the first line counts.
//! 3. The answer closes the connection. All of this may take [`PATIENCE_NS`].
//!
//! It runs as background work, so that a scrape costs clients' requests nothing measurable.
//! Invariant: connections here take at most [`CONNECTIONS_MAX`] times [`REQUEST_BYTES_MAX`] of
//! memory.
//!
//! It is not a web server: one request per connection, no compression, no body in a request, no
//! TLS.

use std::cell::Cell;
use std::fmt::Write;
use std::rc::Rc;

use kv::{CONTENT_TYPE, Exposition, Reporter, write_flow};
use reactor::log::Log;
use reactor::{Class, Core, CoreStats, Listener, Socket, timeout};

use crate::disks::Disks;
use crate::disks::report;
use crate::process::{CpuTime, resident_bytes};

/// Maximum number of connections.
const CONNECTIONS_MAX: usize = 16;
/// Maximum length of a request with its headers, in bytes.
const REQUEST_BYTES_MAX: usize = 8 << 10;
/// Maximum number of pieces in which a request may arrive.
const PIECES_MAX: usize = 64;
/// How long a connection may take for everything.
const PATIENCE_NS: u64 = 2_000_000_000;
/// How long the accepting task waits if the system cannot give it a connection.
const RETRY_NS: u64 = 100_000_000;

/// The sources of the metrics.
pub(crate) struct Sources {
    /// The cores that serve a database.
    pub reporter: Option<Reporter>,
    /// The disks.
    pub disks: Rc<Disks>,
    /// The log.
    pub log: Log,
    /// When the node began to serve, on the core's clock.
    pub started_ns: u64,
    /// The memory that the node may use.
    pub memory_bytes: u64,
}

/// Answers the connections of a listener; never ends.
pub(crate) async fn serve(core: Core, listener: Listener, sources: Sources) {
    let sources = Rc::new(sources);
    let open = Rc::new(Cell::new(0));
    loop {
        match listener.accept().await {
            Ok(socket) if open.get() < CONNECTIONS_MAX => {
                open.set(open.get() + 1);
                let (open, sources, clock) = (open.clone(), sources.clone(), core.clone());
                core.spawn(Class::Background, async move {
                    let _ = timeout(&clock, PATIENCE_NS, answer(&clock, &socket, &sources)).await;
                    socket.shutdown();
                    open.set(open.get() - 1);
                });
            }
            Ok(socket) => socket.shutdown(),
            Err(_) => core.sleep_ns(RETRY_NS).await,
        }
    }
}

async fn answer(core: &Core, socket: &Socket, sources: &Sources) {
    let mut received = Vec::new();
    let mut request = Err(Status::TooLarge);
    for _ in 0..PIECES_MAX {
        let room = REQUEST_BYTES_MAX - received.len();
        if room == 0 {
            break;
        }
        let (result, back) = socket.recv(received, room).await;
        received = back;
        match result {
            Ok(n) if n > 0 => {}
            // The client has gone before it sent a request.
            _ => return,
        }
        if let Some(parsed) = parse(&received) {
            request = parsed;
            break;
        }
    }
    let reply = match request {
        Ok(Request { page: Page::Metrics, head }) => {
            let text = metrics(core, sources).await;
            response(Status::Ok, CONTENT_TYPE, &text, head)
        }
        Ok(Request { page: Page::Health, head }) => response(Status::Ok, TEXT, "serving\n", head),
        Err(status) => response(status, TEXT, &format!("{}\n", status.words()), false),
    };
    // The client may have gone.
    let _ = socket.send(reply).await;
}

const TEXT: &str = "text/plain; charset=utf-8";

/// A parsed request.
#[derive(Debug, PartialEq, Eq)]
struct Request {
    page: Page,
    /// `HEAD`: only the headers are sent.
    head: bool,
}

#[derive(Debug, PartialEq, Eq)]
enum Page {
    Metrics,
    Health,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Status {
    Ok,
    Malformed,
    NotFound,
    NotAllowed,
    TooLarge,
}

impl Status {
    fn words(self) -> &'static str {
        match self {
            Status::Ok => "200 OK",
            Status::Malformed => "400 Bad Request",
            Status::NotFound => "404 Not Found: there are /metrics and /healthz",
            Status::NotAllowed => "405 Method Not Allowed",
            Status::TooLarge => "431 Request Header Fields Too Large",
        }
    }
}

/// Parses a request; `None` if it is incomplete.
fn parse(received: &[u8]) -> Option<Result<Request, Status>> {
    let first_end = received.iter().position(|&byte| byte == b'\n')?;
    let line = received[..first_end].strip_suffix(b"\r").unwrap_or(&received[..first_end]);
    let request = parse_line(line);
    if request == Err(Status::Malformed) {
        // Text that is not HTTP may have no end of headers.
        return Some(request);
    }
    let rest = &received[first_end + 1..];
    let ended = rest.starts_with(b"\r\n")
        || rest.starts_with(b"\n")
        || rest.windows(2).any(|two| two == b"\n\n")
        || rest.windows(4).any(|four| four == b"\r\n\r\n");
    ended.then_some(request)
}

fn parse_line(line: &[u8]) -> Result<Request, Status> {
    let line = std::str::from_utf8(line).map_err(|_| Status::Malformed)?;
    let mut words = line.split(' ');
    let (Some(method), Some(target), Some(version), None) =
        (words.next(), words.next(), words.next(), words.next())
    else {
        return Err(Status::Malformed);
    };
    if !version.starts_with("HTTP/1.") {
        return Err(Status::Malformed);
    }
    let head = match method {
        "GET" => false,
        "HEAD" => true,
        _ => return Err(Status::NotAllowed),
    };
    let path = target.split('?').next().unwrap_or(target);
    let page = match path {
        "/metrics" => Page::Metrics,
        "/healthz" => Page::Health,
        _ => return Err(Status::NotFound),
    };
    Ok(Request { page, head })
}

fn response(status: Status, kind: &str, body: &str, head: bool) -> Vec<u8> {
    let mut text = format!(
        "HTTP/1.1 {}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n",
        status.words().split(':').next().expect("a split has a first part"),
        body.len()
    );
    if status == Status::NotAllowed {
        text.push_str("Allow: GET, HEAD\r\n");
    }
    text.push_str("\r\n");
    if !head {
        // Writing to a string cannot fail.
        let _ = text.write_str(body);
    }
    text.into_bytes()
}

async fn metrics(core: &Core, sources: &Sources) -> String {
    let mut text = Exposition::default();
    text.gauge("build_info", "1, with what runs as labels")
        .labelled(&[("version", &env!("CARGO_PKG_VERSION")), ("driver", &core.driver_name())], 1);
    text.counter("log_dropped_lines_total", "Lines of the log that were dropped or not written")
        .value(sources.log.dropped());
    match &sources.reporter {
        Some(reporter) => reporter.write(&mut text).await,
        None => node(core, sources, &mut text).await,
    }
    report::metrics(&mut text, core, &sources.disks);
    text.finish()
}

/// The metrics of a node without a database, which the database's reporter would write.
async fn node(core: &Core, sources: &Sources, text: &mut Exposition) {
    let uptime_ns = core.now_ns().saturating_sub(sources.started_ns);
    text.gauge("uptime_seconds", "Seconds since the node began to serve")
        .value(uptime_ns as f64 / 1e9);
    let cpu = CpuTime::now();
    text.counter("cpu_seconds_total", "Processor time of the process")
        .labelled(&[("mode", &"user")], cpu.user.as_secs_f64())
        .labelled(&[("mode", &"system")], cpu.system.as_secs_f64());
    text.gauge("memory_resident_bytes", "Memory that the process occupies").value(resident_bytes());
    text.gauge("memory_budget_bytes", "Memory that the node may use").value(sources.memory_bytes);
    let (mut cores, mut flows) = (Vec::new(), Vec::new());
    for id in 0..core.cores() {
        let (counters, flow) = core.call(id, |there| (there.stats().list(), there.flow())).await;
        cores.push(counters);
        flows.push((id, flow));
    }
    write_flow(text, &flows);
    for (at, (name, help)) in CoreStats::HELP.iter().enumerate() {
        let mut metric =
            text.counter(&format!("reactor_{name}_total"), help.trim().trim_end_matches('.'));
        for (id, counters) in cores.iter().enumerate() {
            metric = metric.labelled(&[("core", &id)], counters[at].1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ok(page: Page, head: bool) -> Option<Result<Request, Status>> {
        Some(Ok(Request { page, head }))
    }

    #[test]
    fn a_request_ends_at_its_empty_line_and_not_before() {
        let whole = b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: */*\r\n\r\n";
        for end in 0..whole.len() {
            assert_eq!(parse(&whole[..end]), None, "{end}");
        }
        assert_eq!(parse(whole), ok(Page::Metrics, false));
        assert_eq!(parse(b"HEAD /healthz?x=1 HTTP/1.0\n\n"), ok(Page::Health, true));
        assert_eq!(parse(b"GET /metrics HTTP/1.1\r\n\r\n"), ok(Page::Metrics, false));
    }

    #[test]
    fn an_invalid_request_is_refused_at_its_first_line() {
        for line in ["\n", "GET\r\n", "*1\r\n$4\r\nPING\r\n", "GET /metrics\n", "\x16\x03\x01\n"] {
            assert_eq!(parse(line.as_bytes()), Some(Err(Status::Malformed)), "{line:?}");
        }
        assert_eq!(parse(b"GET  /metrics HTTP/1.1\n"), Some(Err(Status::Malformed)));
        assert_eq!(parse(b"GET /metrics HTTP/2\n"), Some(Err(Status::Malformed)));
        assert_eq!(parse(b"\xff\xfe\n"), Some(Err(Status::Malformed)));
    }

    #[test]
    fn other_pages_and_methods_have_answers_of_their_own() {
        let answer = |line: &str| parse(format!("{line} HTTP/1.1\r\n\r\n").as_bytes());
        assert_eq!(answer("GET /"), Some(Err(Status::NotFound)));
        assert_eq!(answer("GET /metrics/../x"), Some(Err(Status::NotFound)));
        assert_eq!(answer("POST /metrics"), Some(Err(Status::NotAllowed)));
    }

    #[test]
    fn a_response_has_the_length_of_its_body_also_without_it() {
        let text = |head| String::from_utf8(response(Status::Ok, TEXT, "abc", head)).unwrap();
        assert!(
            text(false).contains("\r\nContent-Length: 3\r\n")
                && text(false).ends_with("\r\n\r\nabc")
        );
        assert!(
            text(true).contains("\r\nContent-Length: 3\r\n") && text(true).ends_with("\r\n\r\n")
        );
    }
}
