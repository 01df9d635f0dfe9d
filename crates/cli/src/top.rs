//! `millrace top`: the activity of a node, second by second.
//!
//! A frame is the difference of two samples of the same process. After an upgrade or a restart
//! another process answers, with a new clock and new counters: the frame that would mix both is
//! left out, and the next one compares two samples of the new process. While no process answers,
//! `top` retries the connection.

use std::time::{Duration, Instant};

use node::{Request, Size};
use serde_json::{Value, json};

use crate::admin::Admin;
use crate::answer::{KINDS, Latency, array, duration, number, size, text};
use crate::args::TopArgs;
use crate::failure::Failure;
use crate::output::{Out, table, thousands};

/// The stages of a move that has not ended, under the node's names for them.
const UNDER_WAY: [&str; 3] = ["copying", "ready", "switching"];
/// Moves the cursor to the top left and clears the screen.
const CLEAR: &str = "\x1b[H\x1b[2J";

/// How long a node may not answer: after a restart it opens its database before it listens.
const AWAY: Duration = Duration::from_secs(60);
/// The pause between two attempts to connect.
const RETRY: Duration = Duration::from_millis(200);

/// Shows one frame, or frames until the reader closes the output.
#[expect(clippy::disallowed_methods, reason = "a tool that samples a node now and then")]
pub fn run(args: &TopArgs) -> Result<(), Failure> {
    let mut admin = Admin::connect(&args.node)?;
    let mut before = admin.call(&Request::Top)?;
    loop {
        std::thread::sleep(Duration::from_secs_f64(args.interval));
        let now = match admin.call(&Request::Top) {
            Ok(now) => now,
            Err(failure) if failure.is_gone() => {
                (admin, before) = connect_again(args, failure)?;
                continue;
            }
            Err(failure) => return Err(failure),
        };
        if !is_same_process(&before, &now) {
            before = now;
            continue;
        }
        let mut out = Out::new();
        let rates = rates(&before, &now);
        if args.node.json {
            out.json(&rates)?;
        } else {
            if out.is_terminal() && !args.once {
                out.bytes(CLEAR.as_bytes())?;
            }
            out.bytes(frame(&rates).as_bytes())?;
        }
        out.flush()?;
        if args.once {
            return Ok(());
        }
        before = now;
    }
}

/// Reconnects and takes a sample. Fails with the last reason after a minute.
#[expect(clippy::disallowed_methods, reason = "waits for another process, on no core")]
fn connect_again(args: &TopArgs, mut why: Failure) -> Result<(Admin, Value), Failure> {
    let since = Instant::now();
    while since.elapsed() < AWAY {
        let looked = Admin::connect(&args.node).and_then(|mut admin| {
            let look = admin.call(&Request::Top)?;
            Ok((admin, look))
        });
        match looked {
            Err(failure) if failure.is_gone() => why = failure,
            looked => return looked,
        }
        std::thread::sleep(RETRY);
    }
    Err(why)
}

/// Whether two samples can be compared: their clocks and counters belong to one process.
fn is_same_process(before: &Value, now: &Value) -> bool {
    before["process"] == now["process"] && number(before, "now_ns") < number(now, "now_ns")
}

/// Two samples of one process, and the time between them.
struct Interval<'a> {
    before: &'a Value,
    now: &'a Value,
    ns: u64,
}

impl Interval<'_> {
    fn new<'a>(before: &'a Value, now: &'a Value) -> Interval<'a> {
        let ns = number(now, "now_ns").saturating_sub(number(before, "now_ns")).max(1);
        Interval { before, now, ns }
    }

    fn seconds(&self) -> f64 {
        self.ns as f64 / 1e9
    }

    /// The elements of a list, each with the element of the first sample that has the same `key`.
    fn pairs(&self, list: &str, key: &str) -> impl Iterator<Item = (&Value, Value)> {
        let before = array(self.before, list);
        array(self.now, list).iter().map(move |one| {
            let then = before.iter().find(|then| then[key] == one[key]);
            (one, then.cloned().unwrap_or_default())
        })
    }

    fn core(&self, core: &Value, then: &Value) -> Value {
        let busy = (growth(core, then, "cpu_ns") / self.ns as f64).min(1.0);
        let turns = growth(core, then, "turns") / self.seconds();
        json!({"core": core["core"], "cpu": busy, "turns": turns})
    }

    fn disk(&self, disk: &Value, then: &Value) -> Value {
        let mut all = Latency::default();
        let mut shown = json!({
            "name": disk["name"],
            "connected": disk["connected"] == true,
            "depth": number(disk, "depth"),
            "occupied_bytes": disk["occupied_bytes"],
            "available_bytes": disk["available_bytes"],
            "move": self.moving(&disk["name"]),
        });
        for kind in KINDS {
            let rate = |name| growth(&disk[kind], &then[kind], name) / self.seconds();
            let latency =
                Latency::of(&disk[kind]["latency"]).since(&Latency::of(&then[kind]["latency"]));
            shown[kind] = json!({"iops": rate("requests"), "bytes_per_s": rate("bytes")});
            all = all.and(&latency);
        }
        shown["failed"] = (growth(disk, then, "errors") / self.seconds()).into();
        shown["mean_ns"] = all.mean_ns().into();
        shown["p99_ns"] = all.quantile_ns(0.99).into();
        shown
    }

    /// The move of a disk that is under way; null if there is none.
    fn moving(&self, name: &Value) -> Value {
        let mut all = self.pairs("moves", "name");
        let under_way = |moving: &Value| {
            moving["name"] == *name && UNDER_WAY.iter().any(|stage| moving["stage"] == *stage)
        };
        let Some((moving, then)) = all.find(|(moving, _)| under_way(moving)) else {
            return Value::Null;
        };
        let (left, total) = (number(moving, "left_bytes"), number(moving, "total_bytes"));
        // Pieces under way are neither left nor copied; what was written meanwhile is copied again.
        let there = total.saturating_sub(left).min(number(moving, "copied_bytes"));
        let copied = (total > 0).then(|| there as f64 / total as f64);
        json!({
            "stage": moving["stage"],
            "uri": moving["uri"],
            "copied": copied,
            "copied_bytes": moving["copied_bytes"],
            "left_bytes": left,
            "total_bytes": total,
            "bytes_per_s": growth(moving, &then, "copied_bytes") / self.seconds(),
            "writes_bytes_per_second": moving["writes_bytes_per_second"],
            "lost_connection": moving["lost_connection"],
        })
    }

    fn shard(&self, shard: &Value, then: &Value) -> Value {
        let grown = |name| growth(shard, then, name);
        let rate = |name| grown(name) / self.seconds();
        let blocks = grown("cache_hits") + grown("cache_misses");
        json!({
            "shard": shard["shard"],
            "core": shard["core"],
            "keys": shard["keys"],
            "connections": shard["connections"],
            "commands": rate("commands"),
            "gets": rate("gets"),
            "cached": (blocks > 0.0).then(|| grown("cache_hits") / blocks),
            "writes": rate("writes"),
            "wal_bytes_per_s": rate("wal_bytes"),
            "memtable_bytes": shard["memtable_bytes"],
            "level0_files": shard["level0_files"],
            "held_back": (grown("held_back_ns") / self.ns as f64).min(1.0),
        })
    }
}

/// By how much a counter has grown; a missing one counts as 0.
fn growth(now: &Value, then: &Value, name: &str) -> f64 {
    number(now, name).saturating_sub(number(then, name)) as f64
}

/// The rates between two samples, per second.
fn rates(before: &Value, now: &Value) -> Value {
    let interval = Interval::new(before, now);
    let cores = interval.pairs("cores", "core").map(|(core, then)| interval.core(core, &then));
    let disks = interval.pairs("disks", "name").map(|(disk, then)| interval.disk(disk, &then));
    let shards = interval.pairs("shards", "shard").map(|(one, then)| interval.shard(one, &then));
    json!({
        "seconds": interval.seconds(),
        "resident_bytes": now["resident_bytes"],
        "cores": cores.collect::<Vec<_>>(),
        "disks": disks.collect::<Vec<_>>(),
        "shards": shards.collect::<Vec<_>>(),
    })
}

/// The figures of a frame as tables.
fn frame(rates: &Value) -> String {
    let mut frame = format!("memory {}\n\n", Size(number(rates, "resident_bytes")));
    frame.push_str(&core_table(array(rates, "cores")));
    let disks = array(rates, "disks");
    let tables = [disk_table(disks), move_table(disks), shard_table(array(rates, "shards"))];
    for table in tables.into_iter().flatten() {
        frame.push('\n');
        frame.push_str(&table);
    }
    frame
}

fn float(value: &Value) -> f64 {
    value.as_f64().unwrap_or(0.0)
}

fn core_table(cores: &[Value]) -> String {
    let mut rows = vec![["CORE", "CPU", "TURNS/S"].map(str::to_owned)];
    for core in cores {
        rows.push([
            number(core, "core").to_string(),
            format!("{:.0} %", float(&core["cpu"]) * 100.0),
            thousands(float(&core["turns"]) as u64),
        ]);
    }
    table(&rows, &[0, 1, 2])
}

fn disk_table(disks: &[Value]) -> Option<String> {
    let head = [
        "DISK", "GUEST", "DEPTH", "READ/S", "READ", "WRITE/S", "WRITE", "MEAN", "P99", "FAILED/S",
        "OCCUPIED", "LEFT",
    ];
    let mut rows = vec![head.map(str::to_owned)];
    for disk in disks {
        let iops = |kind: &str| thousands(float(&disk[kind]["iops"]).round() as u64);
        let bytes = |kind: &str| format!("{:.1} MB/s", float(&disk[kind]["bytes_per_s"]) / 1e6);
        rows.push([
            text(disk, "name"),
            if disk["connected"] == true { "connected" } else { "-" }.to_owned(),
            number(disk, "depth").to_string(),
            iops("read"),
            bytes("read"),
            iops("write"),
            bytes("write"),
            duration(disk["mean_ns"].as_f64()),
            duration(disk["p99_ns"].as_f64()),
            thousands(float(&disk["failed"]).ceil() as u64),
            size(&disk["occupied_bytes"]),
            size(&disk["available_bytes"]),
        ]);
    }
    (rows.len() > 1).then(|| table(&rows, &[2, 3, 4, 5, 6, 7, 8, 9, 10, 11]))
}

/// The disks that are being moved.
fn move_table(disks: &[Value]) -> Option<String> {
    let head = ["DISK", "MOVE", "COPIED", "LEFT", "SPEED", "WRITES AT MOST", "TO"];
    let mut rows = vec![head.map(str::to_owned)];
    for disk in disks.iter().filter(|disk| disk["move"].is_object()) {
        let moving = &disk["move"];
        rows.push([
            text(disk, "name"),
            match moving["lost_connection"].is_string() {
                true => "no connection".to_owned(),
                false => text(moving, "stage"),
            },
            match moving["copied"].as_f64() {
                // All of it only if nothing is left.
                Some(share) => format!("{:.0} %", (share * 100.0).floor()),
                None => "-".to_owned(),
            },
            size(&moving["left_bytes"]),
            format!("{:.1} MB/s", float(&moving["bytes_per_s"]) / 1e6),
            match moving["writes_bytes_per_second"].as_f64() {
                Some(limit) => format!("{:.1} MB/s", limit / 1e6),
                None => "-".to_owned(),
            },
            text(moving, "uri"),
        ]);
    }
    (rows.len() > 1).then(|| table(&rows, &[2, 3, 4, 5]))
}

fn shard_table(shards: &[Value]) -> Option<String> {
    let head = [
        "SHARD",
        "CORE",
        "KEYS",
        "CLIENTS",
        "COMMANDS/S",
        "GETS/S",
        "CACHED",
        "WRITES/S",
        "LOG",
        "MEMTABLES",
        "LEVEL 0",
        "HELD BACK",
    ];
    let mut rows = vec![head.map(str::to_owned)];
    for shard in shards {
        let rate = |name: &str| thousands(float(&shard[name]).round() as u64);
        let share = |name: &str| match shard[name].as_f64() {
            Some(share) => format!("{:.0} %", share * 100.0),
            None => "-".to_owned(),
        };
        rows.push([
            number(shard, "shard").to_string(),
            shard["core"].as_u64().map_or("-".to_owned(), |core| core.to_string()),
            thousands(number(shard, "keys")),
            number(shard, "connections").to_string(),
            rate("commands"),
            rate("gets"),
            share("cached"),
            rate("writes"),
            format!("{:.1} MB/s", float(&shard["wal_bytes_per_s"]) / 1e6),
            Size(number(shard, "memtable_bytes")).to_string(),
            number(shard, "level0_files").to_string(),
            share("held_back"),
        ]);
    }
    (rows.len() > 1).then(|| table(&rows, &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_differences_per_second() {
        let look = |at: u64, cpu: u64, reads: u64| {
            let latency = json!({"sum_ns": reads * 1000, "log2_ns": [0, 0, reads]});
            let read = json!({"requests": reads, "bytes": reads * 4096, "latency": latency});
            json!({
                "now_ns": at, "resident_bytes": 1 << 20,
                "cores": [{"core": 0, "cpu_ns": cpu, "turns": reads}],
                "disks": [{
                    "name": "a", "connected": true, "depth": 3, "read": read, "errors": reads / 100,
                }],
            })
        };
        let (before, now) =
            (look(1_000_000_000, 500, 100), look(3_000_000_000, 1_000_000_500, 300));
        let rates = rates(&before, &now);
        assert_eq!(rates["cores"][0]["cpu"], 0.5);
        assert_eq!(rates["disks"][0]["read"]["iops"], 100.0);
        assert_eq!(rates["disks"][0]["mean_ns"], 1000.0);
        assert_eq!(rates["disks"][0]["failed"], 1.0);
        let said = frame(&rates);
        assert!(said.contains("   0  50 %      100\n"), "{said}");
        assert!(said.contains("0.4 MB/s"), "{said}");
        assert!(!said.contains("SHARD"), "{said}");
        // A disk that is missing in the first sample has its full counts.
        let fresh = super::rates(&json!({"now_ns": 2_000_000_000}), &now);
        assert_eq!(fresh["disks"][0]["read"]["iops"], 300.0);
    }

    #[test]
    fn moves_are_shown_while_they_are_under_way() {
        let look = |at: u64, stage: &str, copied: u64, left: u64, limit: Option<u64>| {
            json!({
                "now_ns": at, "disks": [{"name": "a"}, {"name": "b"}],
                "moves": [{
                    "name": "a", "uri": "file:/new/a.img", "stage": stage, "copied_bytes": copied,
                    "left_bytes": left, "total_bytes": 400 << 20,
                    "writes_bytes_per_second": limit,
                }],
            })
        };
        let before = look(1_000_000_000, "copying", 100_000_000, 300 << 20, None);
        // Some was copied again.
        let now = look(3_000_000_000, "copying", 500_000_000, 1 << 20, Some(2_500_000));
        let shown = rates(&before, &now);
        let (moving, still) = (&shown["disks"][0]["move"], &shown["disks"][1]["move"]);
        assert_eq!((&moving["copied"], &moving["bytes_per_s"]), (&json!(0.9975), &json!(2e8)));
        assert_eq!((&moving["left_bytes"], still), (&json!(1 << 20), &Value::Null));
        let said = frame(&shown);
        let expected =
            "a     copying    99 %  1 MiB  200.0 MB/s        2.5 MB/s  file:/new/a.img\n";
        assert!(said.contains(expected), "{said}");
        let ready = look(3_000_000_000, "ready", 500_000_000, 0, None);
        let said = frame(&rates(&before, &ready));
        assert!(said.contains("ready   100 %   0 B  200.0 MB/s               -  file:"), "{said}");
        for end in ["done", "aborted", "failed"] {
            let ended = rates(&before, &look(3_000_000_000, end, 500_000_000, 0, None));
            assert_eq!(ended["disks"][0]["move"], Value::Null);
            assert!(!frame(&ended).contains("MOVE"), "{end}");
        }
        // A node of an earlier version does not tell.
        let silent = json!({"now_ns": 3_000_000_000u64, "disks": [{"name": "a"}]});
        assert_eq!(rates(&silent, &silent)["disks"][0]["move"], Value::Null);
    }

    #[test]
    fn samples_of_two_processes_are_not_compared() {
        let look = |process: u32, at: u64| json!({"process": process, "now_ns": at});
        assert!(is_same_process(&look(7, 1), &look(7, 2)));
        assert!(!is_same_process(&look(7, 1), &look(8, 2)), "a successor");
        assert!(!is_same_process(&look(7, 2), &look(7, 1)), "a restart that has the same number");
    }

    #[test]
    fn shards_are_shown_if_there_is_a_database() {
        let look = |at: u64, commands: u64, held_back: u64| {
            json!({
                "now_ns": at, "resident_bytes": 1 << 20, "cores": [], "disks": [],
                "shards": [{
                    "shard": 0, "core": 1, "keys": 12_345, "connections": 7, "commands": commands,
                    "gets": commands, "cache_hits": commands * 3, "cache_misses": commands,
                    "writes": 0, "wal_bytes": 0, "memtable_bytes": 1 << 20, "level0_files": 2,
                    "held_back_ns": held_back,
                }],
            })
        };
        let rates = rates(&look(1_000_000_000, 0, 0), &look(3_000_000_000, 500, 500_000_000));
        let shard = &rates["shards"][0];
        assert_eq!((&shard["commands"], &shard["cached"]), (&json!(250.0), &json!(0.75)));
        assert_eq!(shard["held_back"], 0.25);
        let said = frame(&rates);
        assert!(said.contains("12,345        7         250     250    75 %"), "{said}");
    }
}
