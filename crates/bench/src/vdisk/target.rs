//! Our own target for a measurement: this program again, serving as a node does. It is a process of
//! its own on the target's processor, so its cost is separate from that of the front end.

use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;
use node::{Error, Kind};

/// Memory of the node; disks need little.
const MEMORY: &str = "512M";
/// The file for the node's log.
const LOG: &str = "log";
/// How long the node may take to start: the number of polls, and the pause between two of them.
const POLLS: u32 = 3000;
const POLL: Duration = Duration::from_millis(10);

/// A node that serves disks at sockets; killed on drop.
#[derive(Debug)]
pub struct Target {
    /// The launcher, which outlives the node; the node ends with it.
    launcher: Child,
    /// The directory of the sockets; removed on drop.
    dir: PathBuf,
    sockets: Vec<PathBuf>,
}

impl Target {
    /// Serves disks with this number of queues each on one processor. Returns when all sockets
    /// accept connections.
    ///
    /// # Errors
    /// A disk cannot be opened or served; with the node's error.
    pub fn start(disks: &[String], queues: u16, processor: usize) -> Result<Target, Error> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let system = |what: &str, error: std::io::Error| {
            Error::new(Kind::System, format!("{what}: {error}"))
        };
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("millrace-vdisk-{}-{number}", std::process::id());
        let dir = std::env::temp_dir().join(name);
        std::fs::create_dir(&dir).map_err(|error| system("cannot create a directory", error))?;
        let mut sockets = Vec::new();
        let program = std::env::current_exe().map_err(|e| system("cannot find this program", e))?;
        let mut command = Command::new(program);
        command.args(["serve", "--memory", MEMORY, "--cores"]);
        command.arg(format!("{processor}-{processor}"));
        for (nth, uri) in disks.iter().enumerate() {
            let socket = dir.join(format!("{nth}.sock"));
            let path = quoted(&socket);
            let spec = format!("name=disk{nth} queues={queues} uri={uri} socket={path}");
            command.arg("--disk").arg(spec);
            sockets.push(socket);
        }
        let log =
            File::create(dir.join(LOG)).map_err(|error| system("cannot create a file", error))?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let launcher = command.spawn().map_err(|error| system("cannot start a node", error))?;
        let mut target = Target { launcher, dir, sockets };
        target.wait_until_it_listens()?;
        Ok(target)
    }

    /// Waits until so many spare nodes were started: one stands ready. Before that a killed node
    /// takes a whole start, and after ten such deaths in a row the launcher gives up.
    ///
    /// # Errors
    /// It does not come in time.
    pub fn until_spare(&self, count: usize, patience: Duration) -> Result<(), Error> {
        self.until_logged("a spare node was started", count, patience)
    }

    /// Kills the node, and returns when the launcher's next one has said that it continues the
    /// connections.
    ///
    /// # Errors
    /// There is no node, or none continues in time.
    pub fn kill_node(&self, patience: Duration) -> Result<(), Error> {
        let continues = "connection continues here";
        let earlier = self.log().matches(continues).count();
        let node = self.node().ok_or_else(|| Error::new(Kind::System, "there is no node"))?;
        signal::kill(node, Signal::SIGKILL)
            .map_err(|error| Error::new(Kind::System, format!("cannot kill the node: {error}")))?;
        self.until_logged(continues, earlier + 1, patience)
    }

    /// Waits until the log has a text so many times.
    fn until_logged(&self, text: &str, count: usize, patience: Duration) -> Result<(), Error> {
        let since = Instant::now();
        while self.log().matches(text).count() < count {
            if since.elapsed() > patience {
                let what = format!("the node has not said in time: {text}");
                return Err(Error::new(Kind::System, what));
            }
            std::thread::sleep(POLL);
        }
        Ok(())
    }

    /// The launcher's node: of what its threads have started, the one that does not stand ready.
    fn node(&self) -> Option<Pid> {
        let log = self.log();
        let called = |pid: u32| numbers(&log, " node=").any(|node| node == u64::from(pid));
        let is_spare = |pid: u32| {
            let variables = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            variables.split(|byte| *byte == 0).any(|variable| variable.ends_with(b":spare"))
        };
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.launcher.id())).ok()?;
        let started = tasks.flatten().flat_map(|task| {
            let children = std::fs::read_to_string(task.path().join("children"));
            let children = children.unwrap_or_default();
            children.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<u32>>()
        });
        let node = started.filter(|pid| !is_spare(*pid) || called(*pid)).max();
        node.map(|pid| Pid::from_raw(pid.cast_signed()))
    }

    /// Makes the process hand over to a successor. Returns when it has reported that.
    ///
    /// # Errors
    /// It does not hand over in time; with the reason, if it reports one.
    pub fn upgrade(&mut self, patience: Duration) -> Result<(), Error> {
        let earlier = self.log().len();
        let pid = Pid::from_raw(self.launcher.id().cast_signed());
        signal::kill(pid, Signal::SIGUSR2).map_err(|error| {
            Error::new(Kind::System, format!("cannot signal the node: {error}"))
        })?;
        let since = Instant::now();
        let what = loop {
            let log = self.log();
            let new = log.get(earlier..).unwrap_or_default();
            if new.contains("successor=") {
                return Ok(());
            }
            if let Some(line) = new.lines().find(|line| line.contains("no upgrade")) {
                break line.to_owned();
            }
            if since.elapsed() > patience {
                break "the node did not hand over in time".to_owned();
            }
            std::thread::sleep(POLL);
        };
        Err(Error::new(Kind::System, what))
    }

    /// How long the disks had no owner at each upgrade, as the nodes reported.
    pub fn reported_pauses_ms(&self) -> Vec<f64> {
        numbers(&self.log(), "pause_us=").map(|us| us as f64 / 1000.0).collect()
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.dir.join(LOG)).unwrap_or_default()
    }

    fn kill(&mut self) {
        let _ = self.launcher.kill();
        let _ = self.launcher.wait();
    }

    fn wait_until_it_listens(&mut self) -> Result<(), Error> {
        for _ in 0..POLLS {
            if self.sockets.iter().all(|socket| socket.exists()) {
                return Ok(());
            }
            if let Ok(Some(status)) = self.launcher.try_wait() {
                let log = self.log();
                let error = log.lines().find_map(|line| {
                    line.strip_prefix("millrace: ").or(line.strip_prefix("error: "))
                });
                let error = error.unwrap_or("it logged no error");
                let what = format!("the disk's node ended ({status}): {error}");
                return Err(Error::new(Kind::Usage, what));
            }
            std::thread::sleep(POLL);
        }
        Err(Error::new(Kind::System, "the disk's node does not listen"))
    }

    /// The sockets, one for each disk.
    pub fn sockets(&self) -> &[PathBuf] {
        &self.sockets
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        self.kill();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// The numbers that follow a key.
fn numbers<'a>(text: &'a str, key: &'a str) -> impl Iterator<Item = u64> + 'a {
    text.split(key).skip(1).filter_map(|rest| {
        let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        rest[..end].parse().ok()
    })
}

/// A path, escaped for a disk's description and a URI.
pub(crate) fn quoted(path: &Path) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/-._~".contains(&byte);
    path.as_os_str()
        .as_bytes()
        .iter()
        .map(|byte| if plain(*byte) { char::from(*byte).into() } else { format!("%{byte:02X}") })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_found_by_key() {
        let text = "INFO a pause_us=12 disks=1\nINFO pause_us=3\nINFO pause_us=many pause_us=9";
        assert_eq!(numbers(text, "pause_us=").collect::<Vec<_>>(), [12, 3, 9]);
    }

    #[test]
    fn a_path_is_quoted_for_a_uri() {
        assert_eq!(quoted(Path::new("/tmp/a b?c%.img")), "/tmp/a%20b%3Fc%25.img");
    }
}
