//! The `disk` commands: image files, and the disks of a node that runs.

use std::path::{Path, PathBuf};

use node::{DiskSpec, Request, Size};
use reactor::{Core, DriverKind, Mode, Opening};
use serde_json::{Value, json};

use crate::admin::Admin;
use crate::args::{DiskCommand, Node};
use crate::failure::Failure;
use crate::kv::on_core;
use crate::output::{Out, table, thousands};

/// What an image's size is a multiple of.
const IMAGE_BLOCK: u64 = 4096;

/// Runs a command.
pub fn run(command: DiskCommand) -> Result<(), Failure> {
    match command {
        DiskCommand::Create { path, size, preallocate } => create(path, size.0, preallocate),
        DiskCommand::List { node } => list(&node),
        DiskCommand::Attach { spec, node } => attach(spec, &node),
        DiskCommand::Detach { name, force, node } => {
            let request = Request::DiskDetach { name: name.clone(), force };
            tell(&node, &request, |result| {
                let rest = match result["comes_back"].as_bool() {
                    Some(true) => {
                        "; it was named when the node was started, and is there again after the \
                         next start in the same way"
                    }
                    _ => "",
                };
                let under_way = match result["under_way"].as_bool() {
                    Some(true) => {
                        "\nits device has not done what it is at: until then its image, its name and \
                         its socket are in use, and `millrace disk list` shows it"
                    }
                    _ => "",
                };
                format!("disk {name} is detached{rest}{under_way}")
            })
        }
        DiskCommand::Resize { name, size, shrink, node } => {
            let request = Request::DiskResize { name: name.clone(), size_bytes: size.0, shrink };
            tell(&node, &request, |result| {
                let old = Size(result["old_size_bytes"].as_u64().unwrap_or(0));
                format!("disk {name} has {size} now, instead of {old}")
            })
        }
        DiskCommand::Stat { name, node } => stat(name, &node),
    }
}

/// Sends a request, and prints what came of it.
fn tell(node: &Node, request: &Request, say: impl Fn(&Value) -> String) -> Result<(), Failure> {
    let result = Admin::connect(node)?.call(request)?;
    let mut out = Out::new();
    match node.json {
        true => out.json(&result)?,
        false => out.line(&say(&result))?,
    }
    Ok(out.flush()?)
}

fn create(path: PathBuf, size: u64, preallocate: bool) -> Result<(), Failure> {
    if size == 0 || !size.is_multiple_of(IMAGE_BLOCK) {
        return Err(Failure::new(format!(
            "a size of {size} bytes is no multiple of {IMAGE_BLOCK}"
        )));
    }
    on_core(DriverKind::Auto, async move |core| {
        make(&core, &path, size, preallocate).await.map_err(|error| {
            let failure = Failure::new(format!("{}: {error}", path.display()));
            match error.kind() {
                std::io::ErrorKind::AlreadyExists => {
                    failure.hint("nothing was changed; `millrace disk resize` makes a disk larger")
                }
                _ => failure,
            }
        })
    })
}

async fn make(core: &Core, path: &Path, size: u64, preallocate: bool) -> std::io::Result<()> {
    let file = core.attach(&core.open_for_writing(path, Opening::New, Mode::Buffered).await?);
    let filled = async {
        match preallocate {
            true => file.allocate(size).await?,
            false => file.set_len(size).await?,
        }
        file.sync_data().await
    };
    if let Err(error) = filled.await {
        core.remove(path).await?;
        return Err(error);
    }
    let directory = match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    core.sync_dir(directory).await
}

fn attach(spec: DiskSpec, node: &Node) -> Result<(), Failure> {
    let here = std::env::current_dir()
        .map_err(|error| Failure::new(format!("the current directory: {error}")))?;
    let request = Request::DiskAttach { disk: spec.under(&here) };
    tell(node, &request, |result| {
        let name = result["name"].as_str().unwrap_or_default();
        let socket = result["socket"].as_str().unwrap_or_default();
        let rest = match result["remembered"].as_bool() {
            Some(true) => "",
            _ => "\nthe node has no state directory: after its end the disk is forgotten",
        };
        format!("disk {name}: {socket}{rest}")
    })
}

fn list(node: &Node) -> Result<(), Failure> {
    let result = Admin::connect(node)?.call(&Request::DiskList)?;
    let mut out = Out::new();
    if node.json {
        out.json(&result)?;
        return Ok(out.flush()?);
    }
    let mut rows = vec![["NAME", "SIZE", "GUEST", "QUEUES", "SOCKET", "URI"].map(str::to_owned)];
    for disk in array(&result, "disks") {
        let guest = match (absent(disk), disk["connected"].as_bool()) {
            (Some((kind, _)), _) => kind,
            (_, Some(true)) => "connected",
            _ => "-",
        };
        let size = disk["size_bytes"].as_u64().map_or("-".into(), |size| Size(size).to_string());
        rows.push([
            text(disk, "name"),
            size,
            guest.to_owned(),
            number(disk, "queues").to_string(),
            text(disk, "socket"),
            text(disk, "uri"),
        ]);
    }
    out.bytes(table(&rows, &[]).as_bytes())?;
    for disk in array(&result, "disks") {
        match absent(disk) {
            Some(("failed", why)) => out.line(why)?,
            Some((_, why)) => out.line(&format!("disk {}: {why}", text(disk, "name")))?,
            None => {}
        }
    }
    Ok(out.flush()?)
}

/// In which way a disk is not at work, and why.
fn absent(disk: &Value) -> Option<(&'static str, &str)> {
    let told = |kind: &'static str| Some((kind, disk[kind].as_str()?));
    ["failed", "follows", "leaves"].into_iter().find_map(told)
}

fn stat(name: Option<String>, node: &Node) -> Result<(), Failure> {
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

/// The kinds of requests, by the names that the node gives them.
pub const KINDS: [&str; 4] = ["read", "write", "flush", "discard"];

/// A disk with mean and quantiles in the place of the histogram's sum.
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
        return format!("disk {name} is not there\n  {why}\n");
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
    let read_only = if disk["read_only"] == true { ", read-only" } else { "" };
    let size = Size(number(disk, "size_bytes"));
    let mut said = format!("disk {name}: {size}{read_only}, {connected}{cache}\n");
    said.push_str(&format!("  {} at {}\n", text(disk, "uri"), text(disk, "socket")));
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

/// Times of requests, as a node counts them: a bucket for each power of two of nanoseconds.
#[derive(Clone, Debug, Default)]
pub struct Latency {
    sum_ns: u64,
    buckets: Vec<u64>,
}

/// Exponent of the first bucket's end.
const FIRST: i32 = 8;

impl Latency {
    /// Reads what a node says.
    pub fn of(value: &Value) -> Latency {
        let buckets = array(value, "log2_ns").iter().map(|count| count.as_u64().unwrap_or(0));
        Latency { sum_ns: number(value, "sum_ns"), buckets: buckets.collect() }
    }

    /// Both together.
    pub fn and(&self, other: &Latency) -> Latency {
        self.each(other, u64::wrapping_add)
    }

    /// What came since an earlier look.
    pub fn since(&self, earlier: &Latency) -> Latency {
        self.each(earlier, |now, then| now.saturating_sub(then))
    }

    fn each(&self, other: &Latency, of: impl Fn(u64, u64) -> u64) -> Latency {
        let at = |latency: &Latency, at: usize| latency.buckets.get(at).copied().unwrap_or(0);
        let buckets = self.buckets.len().max(other.buckets.len());
        Latency {
            sum_ns: of(self.sum_ns, other.sum_ns),
            buckets: (0..buckets).map(|i| of(at(self, i), at(other, i))).collect(),
        }
    }

    /// How many.
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// Their mean, if there are any.
    pub fn mean_ns(&self) -> Option<f64> {
        let count = self.count();
        (count > 0).then(|| self.sum_ns as f64 / count as f64)
    }

    /// Below which a share of them lies, as far as the buckets tell: within one they count as
    /// spread evenly.
    pub fn quantile_ns(&self, share: f64) -> Option<f64> {
        let count = self.count();
        let mut left = share * count as f64;
        for (at, &n) in self.buckets.iter().enumerate() {
            if n > 0 && left <= n as f64 {
                let end = 2_f64.powi(FIRST + at as i32);
                let start = if at == 0 { 0.0 } else { end / 2.0 };
                return Some(start + (end - start) * left / n as f64);
            }
            left -= n as f64;
        }
        None
    }
}

/// A time in the unit in which it is short: `870 ns`, `12.5 µs`.
pub fn duration(ns: Option<f64>) -> String {
    let Some(ns) = ns else { return "-".to_owned() };
    match ns {
        ns if ns < 1e3 => format!("{ns:.0} ns"),
        ns if ns < 1e6 => format!("{:.1} µs", ns / 1e3),
        ns if ns < 1e9 => format!("{:.1} ms", ns / 1e6),
        ns => format!("{:.1} s", ns / 1e9),
    }
}

/// The array of that name, empty where there is none.
pub fn array<'a>(value: &'a Value, name: &str) -> &'a [Value] {
    value[name].as_array().map_or(&[], Vec::as_slice)
}

/// The number of that name, 0 where there is none.
pub fn number(value: &Value, name: &str) -> u64 {
    value[name].as_u64().unwrap_or(0)
}

/// The text of that name, empty where there is none.
pub fn text(value: &Value, name: &str) -> String {
    value[name].as_str().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_lie_in_their_buckets() {
        let latency = Latency::of(&json!({"sum_ns": 80_000, "log2_ns": [0, 98, 0, 0, 2]}));
        assert_eq!(latency.mean_ns(), Some(800.0));
        let median = latency.quantile_ns(0.5).unwrap();
        assert!((256.0..512.0).contains(&median), "{median}");
        let late = latency.quantile_ns(0.99).unwrap();
        assert!((2048.0..=4096.0).contains(&late), "{late}");
        let since = latency.since(&latency);
        assert_eq!((since.count(), since.mean_ns(), since.quantile_ns(0.99)), (0, None, None));
        assert_eq!(latency.and(&since).count(), 100);
    }

    #[test]
    fn times_are_written_short() {
        let written = [Some(870.4), Some(12_500.0), Some(3.2e6), Some(2e9), None].map(duration);
        assert_eq!(written, ["870 ns", "12.5 µs", "3.2 ms", "2.0 s", "-"]);
    }

    #[test]
    fn a_disk_is_described_in_words_and_numbers() {
        let kind = json!({"requests": 1234, "bytes": 4096, "errors": 3, "latency": {"sum_ns": 0, "log2_ns": []}});
        let disk = json!({
            "name": "a", "size_bytes": 1 << 30, "connected": true, "write_cache": false,
            "uri": "null:1G", "socket": "/a.sock", "polls": 200, "polls_with_work": 50,
            "read": kind, "write": kind, "flush": kind, "discard": kind, "kicks": 7,
            "errors": 12, "no_space": 5,
        });
        let said = describe(&disk);
        assert!(
            said.starts_with("disk a: 1 GiB, a guest is connected, write cache off\n"),
            "{said}"
        );
        assert!(said.contains("  read        1,234  4 KiB     -    -    -       3\n"), "{said}");
        assert!(said.contains("failed 12 (no space 5), "), "{said}");
        assert!(said.contains("kicks 7, polls with work 25.0 %"), "{said}");
    }
}
