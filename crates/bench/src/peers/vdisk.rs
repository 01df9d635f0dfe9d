//! One measurement of a virtual machine's disk: served by Millrace or qemu-storage-daemon, or read
//! by fio without a virtual machine's interface.
//!
//! The target runs on one processor, and the same front end (`millrace bench vdisk`) drives all
//! targets from the other. The file is fully written beforehand, and every program opens it for
//! direct I/O.

use std::path::PathBuf;

use serde_json::Value;

use super::Setup;
use super::daemon;
use super::fio;
use super::sample::Sample;
use super::tool::Tool;
use crate::vdisk::quoted;

/// Bytes of the file.
const FILE_BYTES: u64 = 2 << 30;
/// GiB of a null device.
const NULL_GIB: u64 = 64;

/// Number of idle disks.
const IDLE_DISKS: u16 = 32;
/// Number of times that a target is replaced.
const REPLACEMENTS: &str = "20";

/// The program that serves a disk, and the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Ours: the scheme of a URI, or the parameters of a file's URI.
    Ours(&'static str),
    /// Many idle null devices of ours.
    OursIdle,
    /// Ours on the file, replaced as this flag of the front end says.
    OursReplaced(&'static str),
    /// qemu-storage-daemon with its null device.
    DaemonNull,
    /// qemu-storage-daemon with the file and this kind of I/O.
    DaemonFile(&'static str),
    /// fio on the file.
    Fio,
}

/// One measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vdisk {
    /// The measurement's name.
    pub name: &'static str,
    /// The target.
    pub target: Target,
    /// The requests, in fio's words.
    pub rw: &'static str,
    /// Requests in flight on each queue.
    pub depth: u16,
    /// More flags of the front end.
    pub flags: &'static [&'static str],
}

impl Vdisk {
    /// Measures.
    pub fn run(&self, setup: &Setup) -> Result<Sample, String> {
        match self.target {
            Target::Fio => fio::run_file(setup, self.name, &file(setup)?, self.rw, self.depth),
            Target::Ours(disk) => {
                let uri = match disk {
                    "null" => format!("null:{NULL_GIB}G"),
                    // Written as a whole before the measurement.
                    "mem" => "mem:1G".to_owned(),
                    parameters => format!("file:{}?{parameters}", quoted(&file(setup)?)),
                };
                self.drive(setup, ["--disk".to_owned(), uri])
            }
            Target::OursIdle => idle(setup),
            Target::OursReplaced(how) => replaced(setup, how, self.depth),
            Target::DaemonNull => {
                self.drive_daemon(setup, &format!("driver=null-co,size={}", NULL_GIB << 30))
            }
            Target::DaemonFile(aio) => {
                // QEMU escapes a comma by another one.
                let path = file(setup)?.to_string_lossy().replace(',', ",,");
                let node = format!("driver=file,filename={path},cache.direct=on,aio={aio}");
                self.drive_daemon(setup, &node)
            }
        }
    }

    /// Drives qemu-storage-daemon at its best settings.
    fn drive_daemon(&self, setup: &Setup, node: &str) -> Result<Sample, String> {
        let run = |flags: &[&str]| self.drive_daemon_once(setup, node, flags);
        run(&setup.searches.best(self.name, &[daemon::IOTHREAD], run)?)
    }

    fn drive_daemon_once(
        &self,
        setup: &Setup,
        node: &str,
        flags: &[&str],
    ) -> Result<Sample, String> {
        let socket = setup.scratch.join("vdisk.sock");
        let mut daemon = daemon::start(setup, node, &socket, flags)?;
        let socket = socket.to_string_lossy().into_owned();
        let sample = self.drive(setup, ["--socket".to_owned(), socket])?;
        daemon.check()?;
        Ok(Sample { command: daemon.line().to_owned(), ..sample })
    }

    fn drive(&self, setup: &Setup, target: [String; 2]) -> Result<Sample, String> {
        let tool = front_end(setup, self.rw, self.depth)?
            .args(target)
            .args(self.flags.iter().copied())
            .args(["--seconds".to_owned(), setup.seconds.to_string()]);
        let (command, report) = report(tool)?;
        if report["errors"].as_u64() != Some(0) {
            return Err(format!("requests failed: {}", report["errors"]));
        }
        super::ours::sample(command, report)
    }
}

/// `bench vdisk` with the target's processor and its own.
fn front_end(setup: &Setup, rw: &str, depth: u16) -> Result<Tool, String> {
    let other = setup.other.ok_or("there is only one processor here")?;
    Ok(Tool::new(&setup.millrace)
        .args(["bench", "vdisk", "--json", "--rw", rw])
        .args(["--depth".to_owned(), depth.to_string()])
        .args(["--cores".to_owned(), format!("{},{other}", setup.processor)]))
}

/// Runs a program that prints one JSON object; returns its command line and the object.
fn report(tool: Tool) -> Result<(String, Value), String> {
    let command = tool.line();
    let report = serde_json::from_str(tool.output()?.trim())
        .map_err(|error| format!("the report of {command} is not JSON: {error}"))?;
    Ok((command, report))
}

/// Measures idle disks; the figures are in the report.
fn idle(setup: &Setup) -> Result<Sample, String> {
    let tool = Tool::new(&setup.millrace)
        .args(["bench", "vdisk", "--json", "--idle", &IDLE_DISKS.to_string()])
        .args(["--disk", &format!("null:{NULL_GIB}G")])
        .args(["--seconds", &setup.seconds.to_string()])
        .args(["--cores", &format!("{0}-{0}", setup.processor)]);
    let (command, report) = report(tool)?;
    Ok(Sample { command, report, ..Sample::default() })
}

/// Measures how long requests wait when the target is replaced; the figures are in the report.
fn replaced(setup: &Setup, how: &str, depth: u16) -> Result<Sample, String> {
    let tool = front_end(setup, "randrw", depth)?
        .args([how, REPLACEMENTS])
        .args(["--disk".to_owned(), format!("file:{}", quoted(&file(setup)?))]);
    let (command, report) = report(tool)?;
    Ok(Sample { command, report, ..Sample::default() })
}

/// The file; written in full the first time.
#[expect(clippy::disallowed_methods, reason = "looks for the file to measure, on no core")]
fn file(setup: &Setup) -> Result<PathBuf, String> {
    let path = setup.scratch.join("vdisk.img");
    if std::fs::metadata(&path).is_ok_and(|meta| meta.len() == FILE_BYTES) {
        return Ok(path);
    }
    let new = setup.scratch.join("vdisk.img.new");
    let _ = std::fs::remove_file(&new);
    Tool::new("fio")
        .args(["--name=fill", "--rw=write", "--bs=1M", "--direct=1", "--end_fsync=1"])
        .args(["--ioengine=io_uring", "--iodepth=8", "--refill_buffers"])
        .arg(format!("--size={FILE_BYTES}"))
        .arg(format!("--filename={}", new.to_string_lossy().replace(':', "\\:")))
        .output()?;
    std::fs::rename(&new, &path)
        .map_err(|error| format!("cannot rename {}: {error}", new.display()))?;
    Ok(path)
}
