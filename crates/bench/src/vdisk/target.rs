//! Our own target for a measurement: this program again, serving as a node does, in a process of
//! its own on the target's processor. What it costs can be told from what the front end costs.

use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;
use node::{Error, Kind};

/// Memory of the node; disks need little of it.
const MEMORY: &str = "256M";
/// Where its last words go.
const LOG: &str = "log";
/// How long it may take to serve, in looks and the time between two of them.
const LOOKS: u32 = 3000;
const LOOK: Duration = Duration::from_millis(10);

/// A node that serves disks at sockets until this is dropped.
#[derive(Debug)]
pub struct Target {
    command: Command,
    /// The launcher, which stays over upgrades; the node ends with it.
    launcher: Child,
    /// For the sockets; removed with this.
    dir: PathBuf,
    sockets: Vec<PathBuf>,
}

impl Target {
    /// Serves disks with so many queues each on one processor, and comes back when all sockets
    /// take connections.
    ///
    /// # Errors
    /// When a disk cannot be opened or served; with the node's last words.
    pub fn start(disks: &[String], queues: u16, processor: usize) -> Result<Target, Error> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let system = |what: &str, error: std::io::Error| {
            Error::new(Kind::System, format!("{what}: {error}"))
        };
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("millrace-vdisk-{}-{number}", std::process::id());
        let dir = std::env::temp_dir().join(name);
        std::fs::create_dir(&dir).map_err(|error| system("making a directory", error))?;
        let mut sockets = Vec::new();
        let program = std::env::current_exe().map_err(|e| system("finding this program", e))?;
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
        let log = File::create(dir.join(LOG)).map_err(|error| system("making a file", error))?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let launcher = command.spawn().map_err(|error| system("starting a node", error))?;
        let mut target = Target { command, launcher, dir, sockets };
        target.wait_until_it_listens()?;
        Ok(target)
    }

    /// Kills the process and starts another one at once; says when that was.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn restart(&mut self) -> Result<Instant, Error> {
        self.kill();
        let started = Instant::now();
        self.launcher = self
            .command
            .spawn()
            .map_err(|error| Error::new(Kind::System, format!("starting a node: {error}")))?;
        Ok(started)
    }

    /// Has the process hand over to a successor, and comes back when it says that it has.
    ///
    /// # Errors
    /// When it has not in time, with the reason if it says one.
    pub fn upgrade(&mut self, patience: Duration) -> Result<(), Error> {
        let earlier = self.said().len();
        let pid = Pid::from_raw(self.launcher.id().cast_signed());
        signal::kill(pid, Signal::SIGUSR2)
            .map_err(|error| Error::new(Kind::System, format!("signalling the node: {error}")))?;
        let since = Instant::now();
        let what = loop {
            let said = self.said();
            let new = said.get(earlier..).unwrap_or_default();
            if new.contains("successor=") {
                return Ok(());
            }
            if let Some(line) = new.lines().find(|line| line.contains("no upgrade")) {
                break line.to_owned();
            }
            if since.elapsed() > patience {
                break "the node hands nothing over".to_owned();
            }
            std::thread::sleep(LOOK);
        };
        Err(Error::new(Kind::System, what))
    }

    /// How long the disks were nobody's at each handing over, as the nodes themselves told.
    pub fn told_pauses_ms(&self) -> Vec<f64> {
        numbers(&self.said(), "pause_us=").map(|us| us as f64 / 1000.0).collect()
    }

    fn said(&self) -> String {
        std::fs::read_to_string(self.dir.join(LOG)).unwrap_or_default()
    }

    fn kill(&mut self) {
        let _ = self.launcher.kill();
        let _ = self.launcher.wait();
    }

    fn wait_until_it_listens(&mut self) -> Result<(), Error> {
        for _ in 0..LOOKS {
            if self.sockets.iter().all(|socket| socket.exists()) {
                return Ok(());
            }
            if let Ok(Some(status)) = self.launcher.try_wait() {
                let said = self.said();
                let complaint = |line: &str| {
                    let said = line.strip_prefix("millrace: ").or(line.strip_prefix("error: "));
                    said.map(str::to_owned)
                };
                let said = said.lines().find_map(complaint);
                let said = said.unwrap_or_else(|| "it does not say why".to_owned());
                let what = format!("the node that was to serve the disk ended ({status}): {said}");
                return Err(Error::new(Kind::Usage, what));
            }
            std::thread::sleep(LOOK);
        }
        Err(Error::new(Kind::System, "the node that was to serve the disk does not listen"))
    }

    /// Where to connect, disk by disk.
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

/// A path as a disk's description and a URI take it.
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
    fn numbers_are_found_by_their_key() {
        let text = "INFO a pause_us=12 disks=1\nINFO pause_us=3\nINFO pause_us=many pause_us=9";
        assert_eq!(numbers(text, "pause_us=").collect::<Vec<_>>(), [12, 3, 9]);
    }

    #[test]
    fn a_path_is_quoted_for_a_uri() {
        assert_eq!(quoted(Path::new("/tmp/a b?c%.img")), "/tmp/a%20b%3Fc%25.img");
    }
}
