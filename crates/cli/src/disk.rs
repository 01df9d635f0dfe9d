//! The `disk` commands: image files, and the disks of a running node.

use node::{DiskSpec, LimitChange, Request, Size};
use serde_json::{Value, json};

use crate::admin::Admin;
use crate::answer::{KINDS, Latency, array, duration, number, size, text};
use crate::args::{DiskCommand, NodeArgs};
use crate::disk_image::{convert, create_from, create_image};
use crate::disk_move;
use crate::failure::Failure;
use crate::output::{Out, table, thousands};

/// Runs a command.
pub fn run(command: DiskCommand) -> Result<(), Failure> {
    match command {
        DiskCommand::Create { path, size, preallocate, from } => match (from, size) {
            (Some(from), size) => create_from(&path, &from, size),
            (None, Some(size)) => create_image(&path, size.0, preallocate),
            // The parser wants one of the two.
            (None, None) => Err(Failure::new("how large? --size SIZE, or --from an image")),
        },
        DiskCommand::Convert { from, to, from_format, format, with_backing } => {
            convert(&from, &to, from_format, format, with_backing)
        }
        DiskCommand::List { node } => list(&node),
        DiskCommand::Attach { spec, incoming, node } => attach(spec, incoming, &node),
        DiskCommand::Detach { name, force, node } => {
            let request = Request::DiskDetach { name: name.clone(), force };
            call(&node, &request, |result| {
                let rest = match result["comes_back"].as_bool() {
                    Some(true) => {
                        "; it is part of the node's configuration, and comes back at the next start \
                         with the same configuration"
                    }
                    _ => "",
                };
                let under_way = match result["under_way"].as_bool() {
                    Some(true) => {
                        "\nits device still has requests in flight: until they complete its image, its \
                         name and its socket are in use, and `millrace disk list` shows it"
                    }
                    _ => "",
                };
                format!("disk {name} is detached{rest}{under_way}")
            })
        }
        DiskCommand::Resize { name, size, shrink, node } => {
            let request = Request::DiskResize { name: name.clone(), size_bytes: size.0, shrink };
            call(&node, &request, |result| {
                let old = Size(result["old_size_bytes"].as_u64().unwrap_or(0));
                format!("disk {name} now has {size} instead of {old}")
            })
        }
        DiskCommand::Limit { words, group, node } => limit(&words, group, &node),
        DiskCommand::Move(args) => disk_move::run(args),
        DiskCommand::Resume { name, node } => {
            call(&node, &Request::DiskResume { name: name.clone() }, |result| {
                match result["was_paused"].as_bool() {
                    Some(true) => format!("disk {name} goes on"),
                    _ => format!("disk {name} has not paused"),
                }
            })
        }
        DiskCommand::Stat { name, node } => stat(name, &node),
    }
}

/// Sends a request and prints its result.
fn call(node: &NodeArgs, request: &Request, say: impl Fn(&Value) -> String) -> Result<(), Failure> {
    let result = Admin::connect(node)?.call(request)?;
    let mut out = Out::new();
    match node.json {
        true => out.json(&result)?,
        false => out.line(&say(&result))?,
    }
    Ok(out.flush()?)
}

fn attach(spec: DiskSpec, incoming: bool, node: &NodeArgs) -> Result<(), Failure> {
    let here = std::env::current_dir()
        .map_err(|error| Failure::new(format!("cannot find the current directory: {error}")))?;
    let request = Request::DiskAttach { disk: spec.under(&here), incoming };
    call(node, &request, |result| {
        let name = result["name"].as_str().unwrap_or_default();
        let socket = result["socket"].as_str().unwrap_or_default();
        let rest = match result["remembered"].as_bool() {
            Some(true) => "",
            _ => "\nthe node has no state directory: it forgets the disk when it ends",
        };
        let waits = if incoming { "\nit waits for its data from another node" } else { "" };
        format!("disk {name}: {socket}{rest}{waits}")
    })
}

fn list(node: &NodeArgs) -> Result<(), Failure> {
    let result = Admin::connect(node)?.call(&Request::DiskList)?;
    let mut out = Out::new();
    if node.json {
        out.json(&result)?;
        return Ok(out.flush()?);
    }
    let head = ["NAME", "SIZE", "OCCUPIED", "LEFT", "GUEST", "QUEUES", "SOCKET", "URI"];
    let mut rows = vec![head.map(str::to_owned)];
    for disk in array(&result, "disks") {
        let guest = match (absent(disk), disk["connected"].as_bool()) {
            (Some(("stands_still", _)), _) => "stands still",
            (Some((kind, _)), _) => kind,
            _ if disk["elsewhere"].is_string() => "elsewhere",
            _ if disk["waits_for_lock"] == true => "waits",
            _ if disk["paused"] == true => "paused",
            (_, Some(true)) => "connected",
            _ => "-",
        };
        rows.push([
            text(disk, "name"),
            size(&disk["size_bytes"]),
            size(&disk["occupied_bytes"]),
            size(&disk["available_bytes"]),
            guest.to_owned(),
            number(disk, "queues").to_string(),
            text(disk, "socket"),
            text(disk, "uri"),
        ]);
    }
    out.bytes(table(&rows, &[]).as_bytes())?;
    for disk in array(&result, "disks") {
        match absent(disk) {
            Some(("failed" | "stands_still", why)) => out.line(why)?,
            Some((_, why)) => out.line(&format!("disk {}: {why}", text(disk, "name")))?,
            None => {}
        }
        if let Some(where_it_is) = disk["elsewhere"].as_str() {
            out.line(&format!("disk {} {where_it_is}", text(disk, "name")))?;
        }
    }
    Ok(out.flush()?)
}

/// Changes limits, or shows them.
fn limit(words: &[String], group: Option<String>, node: &NodeArgs) -> Result<(), Failure> {
    let change = limit_change(words, group).map_err(|what| {
        Failure::new(what).hint("see `millrace disk limit --help` for the settings")
    })?;
    let named = LimitChange {
        name: change.name.clone(),
        group: change.group.clone().filter(|_| change.name.is_none()),
        ..LimitChange::default()
    };
    if change != named {
        return call(node, &Request::DiskLimit { change }, |result| {
            let of = |kind: &str| {
                result[kind].is_object().then(|| format!("{kind} {}", limits(&result[kind])))
            };
            of("disk").or_else(|| of("group")).unwrap_or_default()
        });
    }
    let mut admin = Admin::connect(node)?;
    if named.name.is_some() {
        // The node refuses one that is not there.
        admin.call(&Request::DiskStat { name: named.name.clone() })?;
    }
    let mut result = admin.call(&Request::DiskLimits)?;
    for (kind, name) in [("disks", &named.name), ("groups", &named.group)] {
        let all = result[kind].as_array_mut().into_iter().flatten();
        let wanted = |one: &&mut Value| match (&named.name, &named.group) {
            (None, None) => true,
            _ => name.as_ref().is_some_and(|name| one["name"] == name.as_str()),
        };
        let all: Vec<Value> = all.filter(wanted).map(|one| one.take()).collect();
        result[kind] = all.into();
    }
    let mut out = Out::new();
    if node.json {
        out.json(&result)?;
        return Ok(out.flush()?);
    }
    let mut lines = 0;
    for (kind, kinds) in [("disk", "disks"), ("group", "groups")] {
        for one in array(&result, kinds) {
            out.line(&format!("{kind} {}", limits(one)))?;
            lines += 1;
        }
    }
    if lines == 0 {
        out.line("no limits")?;
    }
    Ok(out.flush()?)
}

/// What `disk limit` sets.
const SETTINGS: [&str; 4] = ["iops", "bytes", "burst", "group"];

/// The change that words ask for: the name of a disk first, unless a group's limits change, then
/// settings.
fn limit_change(words: &[String], group: Option<String>) -> Result<LimitChange, String> {
    let mut change = LimitChange { group, ..LimitChange::default() };
    let mut words = words.iter().peekable();
    // A name may have the sign, too.
    let is_setting =
        |word: &String| word.split_once('=').is_some_and(|(key, _)| SETTINGS.contains(&key));
    if let Some(name) =
        words.next_if(|word| change.group.is_none() && !is_setting(word) || !word.contains('='))
    {
        if change.group.is_some() {
            return Err(format!(
                "name the disk {name} or a group, not both; group=NAME puts a disk into a group"
            ));
        }
        change.name = Some(name.clone());
    }
    if change.name.is_none() && change.group.is_none() && words.peek().is_some() {
        return Err("name a disk before its settings, or a group with --group".to_owned());
    }
    let mut seen = Vec::new();
    for word in words {
        let (key, value) =
            word.split_once('=').ok_or_else(|| format!("'{word}' is not KEY=VALUE"))?;
        if seen.contains(&key) {
            return Err(format!("{key} is given twice"));
        }
        seen.push(key);
        let rate = || match value {
            "off" => Ok(Some(0)),
            _ => node::parse_rate(key, value)
                .map(Some)
                .map_err(|what| format!("{key}={value}: {what}")),
        };
        match key {
            "iops" => change.iops = rate()?,
            "bytes" => change.bytes_per_second = rate()?,
            "burst" => change.burst_ns = rate()?,
            "group" if value.is_empty() => {
                return Err(
                    "group= names no group; group=off takes a disk out of its group".to_owned()
                );
            }
            "group" if change.name.is_some() => {
                change.group = Some(if value == "off" { String::new() } else { value.to_owned() });
            }
            "group" => return Err("a group is in no other group".to_owned()),
            _ => return Err(format!("'{key}' is not one of {}", SETTINGS.join(", "))),
        }
    }
    Ok(change)
}

/// The limits of a disk or group in words.
fn limits(one: &Value) -> String {
    let mut said = Vec::new();
    if let Some(iops) = one["iops"].as_u64() {
        said.push(format!("{} requests a second", thousands(iops)));
    }
    if let Some(bytes) = one["bytes_per_second"].as_u64() {
        said.push(format!("{} a second", Size(bytes)));
    }
    if said.is_empty() {
        said.push("no limit of its own".to_owned());
    } else {
        said.push(format!("saving {} ms", number(one, "burst_ns") as f64 / 1e6));
    }
    if let Some(group) = one["group"].as_str() {
        said.push(format!("in group {group}"));
    }
    format!("{}: {}", text(one, "name"), said.join(", "))
}

/// Why a disk is not in service: the kind of reason, and its text.
fn absent(disk: &Value) -> Option<(&'static str, &str)> {
    let told = |kind: &'static str| Some((kind, disk[kind].as_str()?));
    ["failed", "follows", "leaves", "stands_still"].into_iter().find_map(told)
}

fn stat(name: Option<String>, node: &NodeArgs) -> Result<(), Failure> {
    let mut result = Admin::connect(node)?.call(&Request::DiskStat { name })?;
    let mut out = Out::new();
    let disks = result["disks"].as_array_mut().map(std::mem::take).unwrap_or_default();
    if node.json {
        out.json(&json!({"disks": disks.iter().map(with_quantiles).collect::<Vec<_>>()}))?;
        return Ok(out.flush()?);
    }
    for (nth, disk) in disks.iter().enumerate() {
        if nth > 0 {
            out.line("")?;
        }
        out.bytes(describe(disk).as_bytes())?;
    }
    Ok(out.flush()?)
}

/// A disk with its mean and quantiles added to the histogram.
fn with_quantiles(disk: &Value) -> Value {
    let mut disk = disk.clone();
    for kind in KINDS {
        let latency = Latency::of(&disk[kind]["latency"]);
        for (name, ns) in [
            ("mean_ns", latency.mean_ns()),
            ("p50_ns", latency.quantile_ns(0.5)),
            ("p99_ns", latency.quantile_ns(0.99)),
        ] {
            disk[kind]["latency"][name] = ns.map(|ns| ns.round() as u64).into();
        }
    }
    disk
}

fn describe(disk: &Value) -> String {
    let name = text(disk, "name");
    if let Some((_, why)) = absent(disk) {
        return format!("disk {name} is not in service\n  {why}\n");
    }
    let connected = match disk["connected"].as_bool() {
        Some(true) => "a guest is connected",
        _ => "no guest is connected",
    };
    let cache = match disk["write_cache"].as_bool() {
        Some(true) => ", write cache on",
        Some(false) => ", write cache off",
        None => "",
    };
    let space = match (disk["occupied_bytes"].as_u64(), disk["available_bytes"].as_u64()) {
        (Some(occupied), Some(left)) => format!(
            "  its image occupies {}, its file system has {} left\n",
            Size(occupied),
            Size(left)
        ),
        _ => String::new(),
    };
    let elsewhere =
        disk["elsewhere"].as_str().map_or_else(String::new, |why| format!("  it {why}\n"));
    let read_only = if disk["read_only"] == true { ", read-only" } else { "" };
    let size = Size(number(disk, "size_bytes"));
    let mut said = format!("disk {name}: {size}{read_only}, {connected}{cache}\n");
    said.push_str(&format!("  {} at {}\n", text(disk, "uri"), text(disk, "socket")));
    said.push_str(&elsewhere);
    said.push_str(&space);
    let of = &disk["limits"];
    if of["iops"].is_u64() || of["bytes_per_second"].is_u64() || of["group"].is_string() {
        let all = limits(of);
        let limits = all.split_once(": ").map_or(&*all, |(_, limits)| limits);
        said.push_str(&format!("  limits: {limits}\n"));
    }
    let mut rows =
        vec![["", "requests", "bytes", "mean", "p50", "p99", "failed"].map(str::to_owned)];
    for kind in KINDS {
        let latency = Latency::of(&disk[kind]["latency"]);
        rows.push([
            format!("  {kind}"),
            thousands(number(&disk[kind], "requests")),
            Size(number(&disk[kind], "bytes")).to_string(),
            duration(latency.mean_ns()),
            duration(latency.quantile_ns(0.5)),
            duration(latency.quantile_ns(0.99)),
            thousands(number(&disk[kind], "errors")),
        ]);
    }
    said.push_str(&table(&rows, &[1, 2, 3, 4, 5, 6]));
    let count = |name| thousands(number(disk, name));
    let polls = number(disk, "polls");
    let efficiency = match polls {
        0 => "-".to_owned(),
        polls => format!("{:.1} %", number(disk, "polls_with_work") as f64 * 100.0 / polls as f64),
    };
    let no_space = match number(disk, "no_space") {
        0 => String::new(),
        n => format!(" (no space {})", thousands(n)),
    };
    said.push_str(&format!(
        "  in flight {}, failed {}{no_space}, resubmitted {}, broken rings {}\n  interrupts {}, kicks {}, \
         polls with work {efficiency}\n",
        count("depth"),
        count("errors"),
        count("resubmitted"),
        count("broken_rings"),
        count("interrupts"),
        count("kicks"),
    ));
    said
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_given_in_words() {
        let of = |words: &str, group: Option<&str>| {
            let words: Vec<_> = words.split_whitespace().map(str::to_owned).collect();
            limit_change(&words, group.map(str::to_owned))
        };
        let change = of("vm1 iops=5000 bytes=200M burst=1s group=g", None).unwrap();
        let expected = LimitChange {
            name: Some("vm1".into()),
            group: Some("g".into()),
            iops: Some(5000),
            bytes_per_second: Some(200 << 20),
            burst_ns: Some(1_000_000_000),
            ..LimitChange::default()
        };
        assert_eq!(change, expected);
        let off = of("vm1 iops=off group=off", None).unwrap();
        assert_eq!((off.iops, off.group.as_deref()), (Some(0), Some("")));
        assert_eq!(of("iops=1", Some("g")).unwrap().group.as_deref(), Some("g"));
        assert_eq!(of("a=b iops=1", None).unwrap().name.as_deref(), Some("a=b"));
        for (words, group, expected) in [
            ("iops=1", None, "name a disk"),
            ("vm1 group=", None, "names no group"),
            ("vm1", Some("g"), "not both"),
            ("group=h", Some("g"), "in no other group"),
            ("vm1 iops=1 iops=2", None, "twice"),
            ("vm1 iops", None, "not KEY=VALUE"),
            ("vm1 speed=1", None, "'speed' is not one of"),
            ("vm1 bytes=fast", None, "bytes=fast: "),
            ("vm1 burst=2000000s", None, "an hour"),
        ] {
            let error = of(words, group).unwrap_err();
            assert!(error.contains(expected), "{words}: {error}");
        }
        let one = json!({"name": "a", "iops": 1000, "bytes_per_second": null, "burst_ns": 100_000_000, "group": "g"});
        assert_eq!(limits(&one), "a: 1,000 requests a second, saving 100 ms, in group g");
        let none = json!({"name": "a", "iops": null, "bytes_per_second": null, "group": null});
        assert_eq!(limits(&none), "a: no limit of its own");
    }

    #[test]
    fn a_disk_is_described_in_words_and_numbers() {
        let kind = json!({"requests": 1234, "bytes": 4096, "errors": 3, "latency": {"sum_ns": 0, "log2_ns": []}});
        let disk = json!({
            "name": "a", "size_bytes": 1 << 30, "connected": true, "write_cache": false,
            "uri": "null:1G", "socket": "/a.sock", "polls": 200, "polls_with_work": 50,
            "read": kind, "write": kind, "flush": kind, "discard": kind, "zeroes": kind, "kicks": 7,
            "errors": 12, "no_space": 5, "occupied_bytes": 3 << 20,
            "available_bytes": 5_u64 << 30, "elsewhere": "waits for a move",
        });
        let said = describe(&disk);
        assert!(
            said.starts_with("disk a: 1 GiB, a guest is connected, write cache off\n"),
            "{said}"
        );
        assert!(said.contains("  it waits for a move\n"), "{said}");
        assert!(said.contains("image occupies 3 MiB, its file system has 5 GiB left\n"), "{said}");
        assert!(said.contains("  read        1,234  4 KiB     -    -    -       3\n"), "{said}");
        assert!(said.contains("failed 12 (no space 5), "), "{said}");
        assert!(said.contains("kicks 7, polls with work 25.0 %"), "{said}");
    }
}
