//! `millrace events`: what has happened to a node and its disks.

use std::time::{Duration, Instant};

use node::{Request, Size};
use serde_json::Value;

use crate::admin::Admin;
use crate::answer::{array, duration, number, text};
use crate::args::EventsArgs;
use crate::failure::Failure;
use crate::output::{Out, Stop, plain};

/// How long a node may not answer: after a restart it opens its database before it listens.
const AWAY: Duration = Duration::from_secs(60);
/// A node that has nothing to tell answers after a longer time than this.
const WAITS: Duration = Duration::from_secs(10);
/// The pause between two attempts to connect.
const RETRY: Duration = Duration::from_millis(200);

/// Prints the events that the node has kept; with `--follow` also those that come, until the reader
/// closes the output or the node is gone for a minute.
#[expect(clippy::disallowed_methods, reason = "a tool that waits for a node")]
pub fn run(args: &EventsArgs) -> Result<(), Failure> {
    let mut admin = Some(Admin::connect(&args.node)?);
    let (mut log, mut after, mut wait) = (None, 0, false);
    let mut heard = Instant::now();
    let mut out = Out::new();
    loop {
        let request = Request::Events { log: log.clone(), after, wait };
        let asked_at = Instant::now();
        let asked = match &mut admin {
            Some(admin) => admin.call(&request),
            None => Admin::connect(&args.node).and_then(|mut new| {
                let answer = new.call(&request)?;
                admin = Some(new);
                Ok(answer)
            }),
        };
        let answer = match asked {
            Ok(answer) => answer,
            // It is restarted, or its admin socket has no free connection.
            Err(_) if args.follow && log.is_some() && heard.elapsed() < AWAY => {
                admin = None;
                std::thread::sleep(RETRY);
                continue;
            }
            Err(failure) => return Err(failure),
        };
        heard = Instant::now();
        let is_same = log.as_ref().is_none_or(|log| answer["log"] == log.as_str());
        let lost = number(&answer, "lost");
        if is_same && after > 0 && lost > 0 {
            lose(&mut out, lost, args.node.json)?;
        }
        let events = array(&answer, "events");
        for event in events.iter().filter(|event| args.wants(event)) {
            show(&mut out, event, args.node.json)?;
        }
        out.flush()?;
        after =
            events.last().map_or(if is_same { after } else { 0 }, |last| number(last, "number"));
        log = Some(text(&answer, "log"));
        if events.is_empty() && !args.follow {
            return Ok(());
        }
        if wait && events.is_empty() && asked_at.elapsed() < WAITS {
            // The node does not let this program wait: its program is about to be replaced.
            admin = None;
            std::thread::sleep(RETRY);
        }
        // What is kept comes first, without waiting.
        wait = args.follow && events.is_empty();
    }
}

impl EventsArgs {
    /// Whether an event is to be shown.
    fn wants(&self, event: &Value) -> bool {
        let several = event["disks"].as_array();
        let names = |disk: &String| {
            event["disk"] == disk.as_str()
                || several.is_some_and(|all| all.iter().any(|one| one == disk.as_str()))
        };
        self.disk.is_empty() || event["event"] == "lost" || self.disk.iter().any(names)
    }
}

/// Says that events were forgotten before they were read.
fn lose(out: &mut Out, lost: u64, as_json: bool) -> Result<(), Stop> {
    match as_json {
        true => out.json(&serde_json::json!({"event": "lost", "count": lost})),
        false => out.line(&format!("{lost} events are gone: the node keeps only the latest")),
    }
}

fn show(out: &mut Out, event: &Value, as_json: bool) -> Result<(), Stop> {
    if as_json {
        return out.json(event);
    }
    let ms = number(event, "time_ms");
    let time = reactor::log::utc(ms / 1000);
    let disk = event["disk"].as_str().unwrap_or("-");
    let name = text(event, "event");
    let details = details(&name, event);
    let line = format!("{time}.{:03}  {disk:<12} {name:<17} {details}", ms % 1000);
    // Some of it comes from the process that serves guests.
    out.line(&plain(line.trim_end()))
}

/// What an event says beside its disk, in words.
fn details(name: &str, event: &Value) -> String {
    let number = |field: &str| number(event, field);
    let text = |field: &str| text(event, field);
    let process = match number("process") {
        0 => "an unknown process".to_owned(),
        process => format!("process {process}"),
    };
    match name {
        "serving" | "connected" | "disconnected" => process,
        "ended" => match (event["signal"].as_i64(), event["code"].as_i64()) {
            (Some(signal), _) => format!("{process}, by signal {signal}"),
            (_, Some(code)) => format!("{process}, with exit code {code}"),
            _ => process,
        },
        "upgraded" => {
            let pause = duration(Some(number("pause_us") as f64 * 1e3));
            format!("{process}, {}; guests waited {pause}", text("program"))
        }
        "upgrade-failed" => format!("{}: {}", text("program"), text("why")),
        "attached" | "move-begun" | "taken-back" => text("uri"),
        "moved" => {
            let pause = duration(Some(number("pause_us") as f64 * 1e3));
            format!("{}; its guest waited {pause} at most", text("uri"))
        }
        "move-failed" | "elsewhere" => format!("{}: {}", text("uri"), text("why")),
        "writes-limited" => format!("to {} a second", Size(number("bytes_per_second"))),
        "not-opened" | "paused" | "stands-still" | "lock-awaited" => text("why"),
        "resized" => {
            format!("{} instead of {}", Size(number("size_bytes")), Size(number("old_size_bytes")))
        }
        "lost" => format!("{} events", number("count")),
        "limited" => match event["group"].as_str() {
            Some(group) => format!("group {group}"),
            None => String::new(),
        },
        "connection-closed" => format!("{process}: {}", text("why")),
        "ring-broken" => format!("ring {}: {}", number("ring"), text("why")),
        "device-error" => {
            let (bytes, offset) = (number("bytes"), number("offset"));
            let (request, why) = (text("request"), text("why"));
            format!("{request} of {bytes} bytes at {offset}: {why}")
        }
        "space-low" => {
            let disks: Vec<_> =
                array(event, "disks").iter().filter_map(|disk| disk.as_str()).collect();
            format!(
                "{} left for the images of {}, which may still take {}",
                Size(number("available_bytes")),
                disks.join(", "),
                Size(number("may_take_bytes"))
            )
        }
        // An event of a newer node.
        _ => String::new(),
    }
}
