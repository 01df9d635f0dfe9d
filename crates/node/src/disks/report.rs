//! Reports of the disks: JSON for the command line, and metrics.
//!
//! A disk's numbers are sums over its rings. The rings' cores continue to count meanwhile, so the
//! numbers belong only roughly to one moment.

use std::collections::BTreeMap;

use bdev::{Rates, Space};
use kv::Exposition;
use reactor::Core;
use serde_json::{Value, json};
use vhost::{Counter, KindStats, LATENCY_BUCKETS, Latency, QueueStats};

use crate::disks::limits::{AllLimits, LimitChange, Limits};
use crate::disks::moves::{Move, Stage};
use crate::disks::{Absent, Disk, Disks};

/// Sums over all rings for requests of one kind.
#[derive(Clone, Copy, Default)]
struct KindTotal {
    requests: u64,
    bytes: u64,
    errors: u64,
    no_space: u64,
    sum_ns: u64,
    buckets: [u64; LATENCY_BUCKETS],
}

/// The counters of a kind in those of a ring.
type Of = fn(&QueueStats) -> &KindStats;

/// The kinds and their names.
const KINDS: [(&str, Of); 5] = [
    ("read", |ring| &ring.reads),
    ("write", |ring| &ring.writes),
    ("flush", |ring| &ring.flushes),
    ("discard", |ring| &ring.discards),
    ("zeroes", |ring| &ring.zeroes),
];

impl KindTotal {
    fn of(disk: &Disk, kind: Of) -> KindTotal {
        let mut total = KindTotal::default();
        for ring in rings(disk) {
            let kind = kind(ring);
            total.requests += kind.requests.get();
            total.bytes += kind.bytes.get();
            total.errors += kind.errors.get();
            total.no_space += kind.no_space.get();
            total.sum_ns = total.sum_ns.wrapping_add(kind.latency.sum_ns.get());
            for (total, count) in total.buckets.iter_mut().zip(kind.latency.counts()) {
                *total += count;
            }
        }
        total
    }

    fn done(&self) -> u64 {
        self.buckets.iter().sum()
    }
}

/// Name, help and value of a counter of a ring.
type Count = (&'static str, &'static str, fn(&QueueStats) -> &Counter);

const COUNTS: [Count; 8] = [
    ("completions", "Requests given back to guests", |ring| &ring.completions),
    ("batches", "Turns in which requests were given back", |ring| &ring.batches),
    ("interrupts", "Interrupts of guests", |ring| &ring.signals),
    ("kicks", "Times that a guest woke a core", |ring| &ring.kicks),
    ("resubmitted", "Requests that an earlier process had left unfinished", |ring| {
        &ring.resubmitted
    }),
    ("broken_rings", "Times that a guest made a ring meaningless", |ring| &ring.broken),
    ("polls", "Turns in which a ring was looked at", |ring| &ring.turns),
    ("polls_with_work", "Turns in which a ring had something to do", |ring| &ring.worked),
];

fn rings(disk: &Disk) -> impl Iterator<Item = &QueueStats> {
    let rings = disk.serving.as_ref().map_or(&[][..], |serving| serving.target.stats());
    rings.iter().map(|ring| &**ring)
}

fn sum(disk: &Disk, of: fn(&QueueStats) -> &Counter) -> u64 {
    rings(disk).map(|ring| of(ring).get()).sum()
}

/// The field that says why a disk is not served.
fn kind(why: &Absent) -> &'static str {
    match why {
        Absent::Failed(_) => "failed",
        Absent::Follows | Absent::Lost => "follows",
        Absent::Leaves(_) => "leaves",
        Absent::StandsStill(_) => "stands_still",
    }
}

/// A summary of a disk.
pub(crate) fn short(disks: &Disks, disk: &Disk, space: Option<Space>) -> Value {
    let spec = &disk.spec;
    let mut value = json!({
        "name": spec.name,
        "uri": spec.uri,
        "socket": spec.socket,
        "queues": spec.queues,
        "attached": disk.attached,
    });
    if let Some(elsewhere) = disks.elsewhere(&spec.name) {
        value["elsewhere"] = elsewhere.into();
    }
    match &disk.serving {
        Ok(serving) => {
            let geometry = serving.target.device().geometry();
            value["size_bytes"] = geometry.size_bytes.into();
            value["read_only"] = geometry.read_only.into();
            value["connected"] = serving.target.is_connected().into();
            value["paused"] = serving.target.is_paused().into();
            value["waits_for_lock"] = serving.target.waits_for_lock().into();
            value["occupied_bytes"] = space.map(|space| space.occupied).into();
            value["available_bytes"] = space.map(|space| space.available).into();
        }
        Err(why) => value[kind(why)] = why.to_string().into(),
    }
    value
}

/// All limits.
pub(crate) fn limits(all: &AllLimits) -> Value {
    let of = |all: &BTreeMap<String, Limits>| -> Vec<Value> {
        all.iter().map(|(name, limits)| rates(name, limits)).collect()
    };
    json!({"disks": of(&all.disks), "groups": of(&all.groups)})
}

/// The limits after a change.
pub(crate) fn limited(change: &LimitChange, all: &AllLimits) -> Value {
    match (&change.name, &change.group) {
        (Some(name), _) => json!({"disk": rates(name, &all.of_disk(name))}),
        (None, group) => {
            let group = group.clone().unwrap_or_default();
            json!({"group": rates(&group, &all.of_group(&group))})
        }
    }
}

/// The limits of one disk or group; what is not limited is null.
fn rates(name: &str, limits: &Limits) -> Value {
    let Rates { iops, bytes, burst_ns } = limits.rates();
    let limited = |rate: u64| (rate > 0).then_some(rate);
    json!({
        "name": name,
        "iops": limited(iops),
        "bytes_per_second": limited(bytes),
        "burst_ns": burst_ns,
        "group": limits.group,
    })
}

/// All counters of a disk.
pub(crate) fn long(disks: &Disks, disk: &Disk, space: Option<Space>) -> Value {
    let mut value = short(disks, disk, space);
    if let Ok(serving) = &disk.serving {
        let geometry = serving.target.device().geometry();
        value["block_bytes"] = geometry.block_size.into();
        value["write_cache"] = serving.target.write_cache().into();
        value["depth"] = sum(disk, |ring| &ring.depth).into();
        let (limits, group) = serving.target.limits();
        value["limits"] = rates(&disk.spec.name, &Limits::of(limits, group));
    }
    for (name, _, of) in COUNTS {
        value[name] = sum(disk, of).into();
    }
    let (mut errors, mut no_space) = (0, 0);
    for (name, kind) in KINDS {
        let total = KindTotal::of(disk, kind);
        errors += total.errors;
        no_space += total.no_space;
        value[name] = json!({
            "requests": total.requests,
            "bytes": total.bytes,
            "errors": total.errors,
            "no_space": total.no_space,
            "latency": {"sum_ns": total.sum_ns, "log2_ns": total.buckets},
        });
    }
    value["errors"] = errors.into();
    value["no_space"] = no_space.into();
    value
}

/// Appends the metrics of the service for NBD clients.
fn nbd(text: &mut Exposition, server: &nbd::Server) {
    let counters = server.counters();
    text.gauge("nbd_connections", "Connections of NBD clients").value(server.connections());
    text.counter("nbd_accepted_connections_total", "Connections of NBD clients since the start")
        .value(counters.accepted);
    text.counter("nbd_refused_connections_total", "Those closed because there were too many")
        .value(counters.refused);
    text.counter("nbd_requests_total", "Requests of NBD clients that have succeeded")
        .labelled(&[("kind", &"read")], counters.reads)
        .labelled(&[("kind", &"write")], counters.writes)
        .labelled(&[("kind", &"other")], counters.others);
    text.counter("nbd_failed_requests_total", "Requests of NBD clients that have failed")
        .value(counters.failed);
    text.counter("nbd_bytes_total", "Bytes that NBD clients have read and written")
        .labelled(&[("kind", &"read")], counters.read_bytes)
        .labelled(&[("kind", &"write")], counters.written_bytes);
}

/// Appends the metrics of the moves.
fn moves(text: &mut Exposition, disks: &Disks) {
    let ended = &disks.moves_ended;
    text.counter("moves_total", "Moves of disks that have ended since the process began")
        .labelled(&[("stage", &"done")], ended.done.get())
        .labelled(&[("stage", &"aborted")], ended.aborted.get())
        .labelled(&[("stage", &"failed")], ended.failed.get());
    let moves = disks.moves.borrow();
    let active: Vec<_> = moves.iter().filter(|(_, moving)| moving.is_active()).collect();
    if active.is_empty() {
        return;
    }
    let help = "1 for the stage of a disk's move, 0 for the others; only while it moves";
    let mut metric = text.gauge("disk_move_stage", help);
    for (name, moving) in &active {
        let now = moving.stage();
        for stage in Stage::ACTIVE {
            let labels: [(&str, &dyn std::fmt::Display); 2] =
                [("disk", name), ("stage", &stage.name())];
            metric = metric.labelled(&labels, u8::from(stage == now));
        }
    }
    let mut gauge = |name: &str, help: &str, of: fn(&Move) -> u64| {
        let mut metric = text.gauge(name, help);
        for (name, moving) in &active {
            metric = metric.labelled(&[("disk", name)], of(moving));
        }
    };
    gauge(
        "disk_move_copied_bytes",
        "Bytes that a disk's move has copied, including those that it has copied again",
        Move::copied_bytes,
    );
    gauge("disk_move_left_bytes", "Bytes that a disk's move has yet to copy", Move::left_bytes);
    gauge(
        "disk_move_writes_limit_bytes_per_second",
        "Limit of the guest's writes for the sake of a disk's move; 0 if there is none",
        Move::writes_limit,
    );
}

/// Appends the metrics of all disks.
pub(crate) fn metrics(text: &mut Exposition, core: &Core, disks: &Disks) {
    if let Some(server) = disks.nbd() {
        nbd(text, &server);
    }
    moves(text, disks);
    let mut names = Vec::new();
    let (mut counts, mut kinds) = (Vec::new(), Vec::new());
    disks.each(|disk| {
        let gauges = disk.serving.as_ref().ok().map(|serving| {
            let target = &serving.target;
            let states = [target.is_connected(), target.is_paused()];
            (target.device().size_bytes(), states, target.limits().0)
        });
        names.push((disk.spec.name.clone(), gauges, sum(disk, |ring| &ring.depth)));
        counts.push(COUNTS.map(|(_, _, of)| sum(disk, of)));
        kinds.push(KINDS.map(|(_, kind)| KindTotal::of(disk, kind)));
    });
    if names.is_empty() {
        return;
    }
    let mut metric = text.gauge("disk_up", "1 for a disk that is at work, 0 for one that is not");
    for (name, gauges, _) in &names {
        metric = metric.labelled(&[("disk", name)], u8::from(gauges.is_some()));
    }
    metric = text.gauge("disk_size_bytes", "Size of a disk");
    for (name, gauges, _) in &names {
        metric = metric.labelled(&[("disk", name)], gauges.map_or(0, |(size, ..)| size));
    }
    let spaces: Vec<_> =
        names.iter().filter_map(|(name, ..)| Some((name, disks.space(core, name)?))).collect();
    let mut space = |name: &str, help: &str, of: fn(Space) -> u64| {
        let mut metric = text.gauge(name, help);
        for (name, space) in &spaces {
            metric = metric.labelled(&[("disk", name)], of(*space));
        }
    };
    if !spaces.is_empty() {
        space("disk_occupied_bytes", "Bytes that a disk's image file occupies", |of| of.occupied);
        space(
            "disk_available_bytes",
            "Bytes that the file system of a disk's image file has left",
            |of| of.available,
        );
    }
    for (at, name, help) in [
        (0, "disk_connected", "1 while a virtual machine is connected to a disk"),
        (1, "disk_paused", "1 while a disk has paused because its device has failed a request"),
    ] {
        metric = text.gauge(name, help);
        for (name, gauges, _) in &names {
            let is = gauges.is_some_and(|(_, states, _)| states[at]);
            metric = metric.labelled(&[("disk", name)], u8::from(is));
        }
    }
    let mut limits = |name: &str, help: &str, of: fn(Rates) -> u64| {
        let mut metric = text.gauge(name, help);
        for (name, gauges, _) in &names {
            let rate = gauges.map_or(0, |(.., rates)| of(rates));
            metric = metric.labelled(&[("disk", name)], rate);
        }
    };
    limits("disk_limit_iops", "Limit of a disk's requests per second; 0 if there is none", |of| {
        of.iops
    });
    limits(
        "disk_limit_bytes_per_second",
        "Limit of the bytes that a disk reads and writes per second; 0 if there is none",
        |of| of.bytes,
    );
    metric = text.gauge("disk_depth", "Requests that a disk has at the moment");
    for (name, _, depth) in &names {
        metric = metric.labelled(&[("disk", name)], depth);
    }
    for (at, (count, help, _)) in COUNTS.iter().enumerate() {
        metric = text.counter(&format!("disk_{count}_total"), help);
        for ((name, ..), counts) in names.iter().zip(&counts) {
            metric = metric.labelled(&[("disk", name)], counts[at]);
        }
    }
    let of_kind = |text: &mut Exposition, name: &str, help: &str, of: fn(&KindTotal) -> u64| {
        let mut metric = text.counter(name, help);
        for ((disk, ..), totals) in names.iter().zip(&kinds) {
            for ((kind, _), total) in KINDS.iter().zip(totals) {
                metric = metric.labelled(&[("disk", disk), ("kind", kind)], of(total));
            }
        }
    };
    of_kind(text, "disk_requests_total", "Requests given to a disk", |total| total.requests);
    of_kind(text, "disk_bytes_total", "Bytes of requests given to a disk", |total| total.bytes);
    of_kind(text, "disk_errors_total", "Requests that failed at the device", |total| total.errors);
    let help = "Requests that failed at the device for lack of space";
    of_kind(text, "disk_no_space_total", help, |total| total.no_space);
    let help = "Time from taking a request to giving it back";
    let mut metric = text.histogram("disk_latency_seconds", help);
    for ((disk, ..), totals) in names.iter().zip(&kinds) {
        for ((kind, _), total) in KINDS.iter().zip(totals) {
            let buckets = total
                .buckets
                .iter()
                .enumerate()
                .filter_map(|(at, count)| Some((Latency::end_ns(at)? as f64 / 1e9, *count)));
            let labels: &[(&str, &dyn std::fmt::Display)] = &[("disk", disk), ("kind", kind)];
            metric = metric.distribution(labels, buckets, total.done(), total.sum_ns as f64 / 1e9);
        }
    }
}
