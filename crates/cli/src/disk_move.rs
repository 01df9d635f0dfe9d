//! `millrace disk move`: moves a disk's data to another device while its guest runs.

use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::time::Duration;

use bdev::{Bdev, file_uri};
use node::{Peer, Request, Size};
use reactor::DriverKind;
use serde_json::Value;

use crate::admin::Admin;
use crate::answer::{array, duration, number, text};
use crate::args::{DiskMoveArgs, NodeArgs};
use crate::disk_image::create_image_of;
use crate::failure::Failure;
use crate::output::{Out, plain, progress_bar, table};
use crate::tool_core::on_core;

/// How often a move is looked at.
const LOOK: Duration = Duration::from_millis(100);
/// How long an address of a host that has several may take to accept a connection.
const OPENS: Duration = Duration::from_secs(2);
/// How often a node may not know of a move before that has ended: one to another node is continued
/// by the next process.
const MISSING_MAX: u32 = 100;

/// Begins a move and waits for it, or does what another flag asks for.
pub fn run(args: DiskMoveArgs) -> Result<(), Failure> {
    let DiskMoveArgs { name, to, finish_when_ready, background, status, abort, force, limit, node } =
        args;
    let mut admin = Admin::connect(&node)?;
    if let Some(limit) = limit {
        let request = Request::DiskMoveLimit { bytes_per_second: limit.0 };
        return show(&admin.call(&request)?, &node);
    }
    if status {
        return show(&admin.call(&Request::DiskMoves { name })?, &node);
    }
    let name = name.ok_or_else(|| Failure::new("name the disk"))?;
    if abort {
        return end(&admin.call(&Request::DiskMoveAbort { name, force })?, &node);
    }
    let answer = match to {
        Some(to) if is_of_node(&to) => {
            let to = peer(&to)?;
            let request = Request::DiskSend { name: name.clone(), to, finish: finish_when_ready };
            admin.call(&request)?
        }
        Some(uri) => {
            let uri = from_here(&uri)?;
            let scheme = uri.split_once(':').map(|(scheme, _)| scheme);
            if scheme.is_none_or(|scheme| scheme.contains(['.', '/'])) {
                let what = format!("'{uri}' is no device and no disk of a node");
                return Err(Failure::new(what)
                    .hint("write file:PATH, or HOST:PORT/NAME as in b.example:7070/vm1"));
            }
            let made = make_image(&mut admin, &name, &uri)?;
            let request = Request::DiskMove { name: name.clone(), uri, finish: finish_when_ready };
            admin.call(&request).inspect_err(|_| {
                made.iter().for_each(|path| unmake(path));
            })?
        }
        None if finish_when_ready => admin.call(&Request::DiskMoveFinish { name: name.clone() })?,
        None => {
            return Err(Failure::new("say where the disk moves: --to URI")
                .hint("or --status, --abort, --finish-when-ready of a move that has begun"));
        }
    };
    if background {
        return show(&answer, &node);
    }
    wait(&mut admin, name, &node)
}

/// Whether it is a disk of another node rather than a device: `HOST:PORT/NAME`.
fn is_of_node(to: &str) -> bool {
    let Some((host, port)) = to.split_once('/').and_then(|(at, _)| at.rsplit_once(':')) else {
        return false;
    };
    let is_device = ["file", "mem", "null", "nbd"].contains(&host) || to.contains('|');
    // A relative path of digits is a device's all the same.
    !host.is_empty() && port.parse::<u16>().is_ok() && !is_device
}

/// A disk of another node. The name of its machine is looked up here.
fn peer(to: &str) -> Result<Peer, Failure> {
    let wrong = || {
        Failure::new(format!("'{to}' is no disk of a node"))
            .hint("write HOST:PORT/NAME, as in b.example:7070/vm1")
    };
    let (at, disk) = to.split_once('/').filter(|(_, disk)| !disk.is_empty()).ok_or_else(wrong)?;
    let (host, port) = at.rsplit_once(':').ok_or_else(wrong)?;
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let port: u16 = port.parse().map_err(|_| wrong())?;
    let found = (host, port).to_socket_addrs();
    let found: Vec<_> =
        found.map_err(|error| Failure::new(format!("cannot find {host}: {error}")))?.collect();
    let addr = match found[..] {
        [] => return Err(Failure::new(format!("{host} has no address"))),
        [one] => one,
        [first, ..] => found.iter().copied().find(is_open).unwrap_or(first),
    };
    Ok(Peer { addr, host: host.to_owned(), disk: disk.to_owned() })
}

/// Whether somebody accepts connections at an address of a host that has several.
fn is_open(addr: &SocketAddr) -> bool {
    TcpStream::connect_timeout(addr, OPENS).is_ok()
}

/// A device whose relative path begins in the current directory.
fn from_here(uri: &str) -> Result<String, Failure> {
    let here = std::env::current_dir()
        .map_err(|error| Failure::new(format!("cannot find the current directory: {error}")))?;
    Ok(node::uri_under(uri, &here))
}

/// Creates the image if there is none, as large as the disk. Returns its path then.
fn make_image(admin: &mut Admin, name: &str, uri: &str) -> Result<Option<PathBuf>, Failure> {
    let Some(path) = node::image_of(uri).filter(|path| !exists(path)) else { return Ok(None) };
    let all = admin.call(&Request::DiskList)?;
    let disk = array(&all, "disks").iter().find(|disk| disk["name"] == name);
    // The node says what is wrong with the name.
    let Some(size) = disk.and_then(|disk| disk["size_bytes"].as_u64()) else { return Ok(None) };
    // If somebody else has made it meanwhile, the node says what it is.
    Ok(create_image_of(&path, size)?.then_some(path))
}

fn exists(path: &Path) -> bool {
    path.exists()
}

/// Removes a new image, unless a node has it: its answer may have been lost.
fn unmake(path: &Path) {
    let path = path.to_owned();
    // It cannot be done if the node has it open, and need not be done then.
    let _ = on_core(DriverKind::Auto, async move |core| {
        let failed = |error: &dyn std::fmt::Display| Failure::new(error.to_string());
        let locked = Bdev::open(&core, &file_uri(&path)).await.map_err(|error| failed(&error))?;
        let removed = core.remove(&path).await.map_err(|error| failed(&error));
        drop(locked);
        removed
    });
}

/// Waits until a move has ended, or is ready and not to finish. A failure if somebody else has
/// ended it.
#[expect(clippy::disallowed_methods, reason = "a tool that waits for a node")]
fn wait(admin: &mut Admin, name: String, node: &NodeArgs) -> Result<(), Failure> {
    let bar = progress_bar("moving");
    let (mut missing, mut lost) = (0, None);
    loop {
        let answer = admin.call(&Request::DiskMoves { name: Some(name.clone()) })?;
        let moving = array(&answer, "moves").first().cloned().unwrap_or_default();
        let (left, copied) = (number(&moving, "left_bytes"), number(&moving, "copied_bytes"));
        let now = moving["lost_connection"].as_str().map(plain);
        if lost != now {
            bar.suspend(|| match &now {
                Some(why) => {
                    eprintln!("millrace: disk {name}: no connection, it is tried again: {why}");
                }
                None => eprintln!("millrace: disk {name}: there is a connection again"),
            });
            lost = now;
        }
        bar.set_length(copied + left);
        bar.set_position(copied);
        let stage = moving["stage"].as_str();
        missing = if stage.is_none() { missing + 1 } else { 0 };
        let is_under_way = match stage {
            None => missing <= MISSING_MAX,
            Some("ready") => moving["finishes"] != false,
            Some(stage) => ["copying", "switching"].contains(&stage),
        };
        if is_under_way {
            std::thread::sleep(LOOK);
            continue;
        }
        bar.finish_and_clear();
        if moving.is_null() {
            return ended_with_its_node(admin, &name, &answer, node);
        }
        if moving["stage"] == "aborted" {
            return Err(aborted(admin, &name));
        }
        return end(&answer, node);
    }
}

/// Where the data of a disk is, if it is not here.
fn elsewhere(admin: &mut Admin, name: &str) -> Option<String> {
    let all = admin.call(&Request::DiskList).unwrap_or_default();
    let disk = array(&all, "disks").iter().find(|disk| disk["name"] == name);
    disk.and_then(|disk| disk["elsewhere"].as_str()).map(str::to_owned)
}

/// What a move means for its disk of which the node's next process knows nothing: the disk tells.
fn ended_with_its_node(
    admin: &mut Admin,
    name: &str,
    answer: &Value,
    node: &NodeArgs,
) -> Result<(), Failure> {
    match elsewhere(admin, name) {
        Some(moved) if moved.starts_with("has moved") => {
            let mut out = Out::new();
            match node.json {
                true => out.json(answer)?,
                false => out.line(&format!("disk {name} {moved}"))?,
            }
            Ok(out.flush()?)
        }
        Some(undecided) => Err(is_undecided(name, &undecided)),
        None => Err(Failure::new(format!("the move of disk {name} has ended with its node"))
            .hint("millrace disk list shows the disk's device; begin the move again")),
    }
}

fn is_undecided(name: &str, elsewhere: &str) -> Failure {
    Failure::new(format!("disk {name} {elsewhere}"))
        .hint("millrace disk move NAME --abort takes it back")
}

/// What a move that has been ended means for its disk.
fn aborted(admin: &mut Admin, name: &str) -> Failure {
    match elsewhere(admin, name) {
        Some(elsewhere) => is_undecided(name, &elsewhere),
        None => Failure::new(format!("disk {name} stays where it is: the move was aborted")),
    }
}

/// Reports how a move has ended; a failure if it has not moved the disk.
fn end(answer: &Value, node: &NodeArgs) -> Result<(), Failure> {
    let moving = array(answer, "moves").first().cloned().unwrap_or_default();
    let (name, uri) = (text(&moving, "name"), text(&moving, "uri"));
    if moving["stage"] == "failed" {
        let why = text(&moving, "why");
        return Err(Failure::new(format!("disk {name} stays where it is: {why}")));
    }
    let mut out = Out::new();
    if node.json {
        out.json(answer)?;
        return Ok(out.flush()?);
    }
    let seconds = moving["seconds"].as_f64().unwrap_or(0.0);
    let pause = duration(Some(number(&moving, "pause_us") as f64 * 1e3));
    out.line(&match moving["stage"].as_str() {
        Some("done") => {
            format!("disk {name} has moved to {uri} in {seconds:.1} s; its guest waited {pause} at most")
        }
        Some("aborted") => format!("disk {name} stays where it is: the move was aborted"),
        Some("taken-back") => format!("disk {name} was taken back, and is served here"),
        Some("waits") => format!("disk {name} waits for another move"),
        _ if moving["to_node"] == true => format!(
            "disk {name} is ready: migrate its machine now, and it follows to {uri}; or, if no \
             machine uses it: millrace disk move {name} --finish-when-ready"
        ),
        _ => format!(
            "disk {name} is ready to continue at {uri}: millrace disk move {name} --finish-when-ready"
        ),
    })?;
    Ok(out.flush()?)
}

/// Shows all moves.
fn show(answer: &Value, node: &NodeArgs) -> Result<(), Failure> {
    let mut out = Out::new();
    if node.json {
        out.json(answer)?;
        return Ok(out.flush()?);
    }
    let mut rows = vec![["NAME", "STATE", "COPIED", "LEFT", "TIME", "TO"].map(str::to_owned)];
    for moving in array(answer, "moves") {
        rows.push([
            text(moving, "name"),
            text(moving, "stage"),
            Size(number(moving, "copied_bytes")).to_string(),
            Size(number(moving, "left_bytes")).to_string(),
            format!("{:.1} s", moving["seconds"].as_f64().unwrap_or(0.0)),
            text(moving, "uri"),
        ]);
    }
    out.bytes(table(&rows, &[2, 3, 4]).as_bytes())?;
    for moving in array(answer, "moves") {
        if let Some(why) = moving["why"].as_str() {
            // Some of it comes from the other node.
            out.line(&format!("disk {}: {}", text(moving, "name"), plain(why)))?;
        }
        if let Some(why) = moving["lost_connection"].as_str() {
            let name = text(moving, "name");
            out.line(&format!("disk {name}: no connection, it is tried again: {}", plain(why)))?;
        }
        if let Some(limit) = moving["writes_bytes_per_second"].as_u64() {
            let name = text(moving, "name");
            out.line(&format!(
                "disk {name}: its guest's writes are limited to {} a second",
                Size(limit)
            ))?;
        }
    }
    if let Some(rate) = answer["bytes_per_second"].as_u64() {
        out.line(&format!("all moves together: at most {} a second", Size(rate)))?;
    }
    Ok(out.flush()?)
}
