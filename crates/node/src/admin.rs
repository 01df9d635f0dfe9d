//! The admin socket: how the command line controls a running node.
//!
//! A client sends a line, a JSON object, and receives a line; then it may send the next one.
//!
//! ```text
//! {"version":1,"command":"disk-resize","name":"vm1","size_bytes":21474836480}
//! {"version":1,"result":{"name":"vm1","old_size_bytes":10737418240,"size_bytes":21474836480}}
//! {"version":1,"command":"disk-detach","name":"vm2"}
//! {"version":1,"error":"there is no disk vm2","hint":"the disks are: vm1"}
//! ```
//!
//! An unknown version, command or key is an error. Only processes of the node's own user may
//! connect. The resources of clients are bounded: connections, the length of a line, and the time
//! to send one. A command that has begun is finished, also when its client has gone.
//!
//! While a command takes long, the client receives a line `{"waiting":true}` every
//! [`WAITING_NS`]: a client that receives nothing for long knows that the node does not answer.
//!
//! What a connection has begun to hold for its program ends with the connection: files that are
//! copied, files that are to be ingested, and compactions.

use std::cell::{Cell, RefCell};
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::rc::Rc;

use reactor::{Class, Core, Either, Event, UnixListener, UnixSocket, race, timeout};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::disks::limits::LimitChange;
use crate::disks::spec::DiskSpec;
use crate::disks::transfers::Peer;
use crate::error::{Error, Kind};

/// The version of the protocol.
pub const VERSION: u64 = 1;
/// Maximum number of connections.
const CONNECTIONS_MAX: usize = 64;
/// Maximum number of commands under way that wait for a device: the other connections are for the
/// other disks.
const OPENING_MAX: usize = 32;
/// Maximum number of commands under way that change one disk.
const CHANGES_MAX: usize = 8;
/// Maximum length of a line in bytes.
const LINE_BYTES_MAX: usize = 64 << 10;
/// How long a connection may be silent.
const PATIENCE_NS: u64 = 60_000_000_000;
/// How often a client is told that its command goes on.
const WAITING_NS: u64 = 10_000_000_000;
/// The line that says so. It has no version, so that programs which do not know it fail.
const WAITING: &[u8] = b"{\"waiting\":true}\n";
/// How long the accepting task waits if the system cannot give it a connection.
const RETRY_NS: u64 = 100_000_000;

/// A request of a client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// A summary of all disks.
    DiskList,
    /// All counters of one disk, or of all.
    DiskStat {
        /// The disk's name.
        #[serde(default)]
        name: Option<String>,
    },
    /// Adds a disk.
    DiskAttach {
        /// The disk; relative paths begin in the node's working directory.
        disk: DiskSpec,
        /// Its data comes from another node; its guest waits for that.
        #[serde(default)]
        incoming: bool,
    },
    /// Removes a disk.
    DiskDetach {
        /// The disk's name.
        name: String,
        /// Also if a virtual machine is connected.
        #[serde(default)]
        force: bool,
    },
    /// Changes the size of a disk.
    DiskResize {
        /// The disk's name.
        name: String,
        /// The new size.
        size_bytes: u64,
        /// The new size may be smaller.
        #[serde(default)]
        shrink: bool,
    },
    /// Begins to move a disk to another device.
    DiskMove {
        /// The disk's name.
        name: String,
        /// The device; relative paths begin in the node's working directory.
        uri: String,
        /// The disk continues there as soon as it can.
        #[serde(default)]
        finish: bool,
    },
    /// Begins to move a disk to another node.
    DiskSend {
        /// The disk's name.
        name: String,
        /// The disk there, which waits for its data.
        to: Peer,
        /// The disk goes there as soon as it can, also if no machine uses it.
        #[serde(default)]
        finish: bool,
    },
    /// The moves under way, and the last one of each disk.
    DiskMoves {
        /// Only of this disk.
        #[serde(default)]
        name: Option<String>,
    },
    /// Lets a moved disk continue with its new device as soon as it can.
    DiskMoveFinish {
        /// The disk's name.
        name: String,
    },
    /// Ends a move; the disk stays where it is.
    DiskMoveAbort {
        /// The disk's name.
        name: String,
        /// Take the disk back from another node without asking that.
        #[serde(default)]
        force: bool,
    },
    /// Limits all moves together.
    DiskMoveLimit {
        /// Bytes per second; 0 is no limit.
        bytes_per_second: u64,
    },
    /// Lets a disk go on that has paused because its device has failed a request.
    DiskResume {
        /// The disk's name.
        name: String,
    },
    /// What has happened to the node and its disks.
    Events {
        /// The log in which the reader has read.
        #[serde(default)]
        log: Option<String>,
        /// The number of the last event that it has read there.
        #[serde(default)]
        after: u64,
        /// Wait for an event for a while, if there is none.
        #[serde(default)]
        wait: bool,
    },
    /// The limits of all disks and groups that have any.
    DiskLimits,
    /// Changes the limits of a disk, or of a group of disks.
    DiskLimit {
        /// The change.
        change: LimitChange,
    },
    /// Lists the files that hold the database now, and keeps them for a while: see
    /// [`HOLD_NS`](crate::HOLD_NS).
    FilesHold {
        /// Logs of more bytes are written to tables first.
        log_bytes_max: u64,
    },
    /// Keeps the files of a list for longer.
    FilesRenew {
        /// The number of the hold.
        hold: u64,
    },
    /// Ends a hold.
    FilesRelease {
        /// The number of the hold.
        hold: u64,
    },
    /// Reserves numbers for files that are to be ingested. They are released, and the files
    /// removed, when the connection ends before they are ingested.
    IngestBegin {
        /// How many files.
        files: usize,
    },
    /// Shows that the program is still putting files into the database's directory: the connection
    /// is not silent.
    IngestRenew {
        /// The numbers.
        numbers: Vec<u64>,
    },
    /// Releases numbers, and removes their files.
    IngestRelease {
        /// The numbers.
        numbers: Vec<u64>,
    },
    /// Ingests files that were put into the database's directory under these numbers.
    IngestFinish {
        /// The column family's name.
        column_family: String,
        /// The numbers.
        numbers: Vec<u64>,
    },
    /// Begins to compact a range of keys. It ends if its state is not asked for in
    /// [`LEASE_NS`](crate::LEASE_NS).
    CompactBegin {
        /// The column family's name.
        column_family: String,
        /// The first key, in hexadecimal.
        #[serde(default)]
        from: Option<String>,
        /// The key to stop before, in hexadecimal.
        #[serde(default)]
        to: Option<String>,
    },
    /// The state of such a compaction.
    CompactState {
        /// Its number.
        id: u64,
    },
    /// Cancels it; its end is reported as always.
    CompactCancel {
        /// Its number.
        id: u64,
    },
    /// The state of merges and levels.
    CompactionStatus,
    /// Pauses merges.
    CompactionPause,
    /// Ends a pause.
    CompactionResume,
    /// Limits merges; 0 is no limit.
    CompactionLimit {
        /// Hundredths of a core.
        #[serde(default)]
        cores_percent: Option<u32>,
        /// Bytes of keys and values.
        #[serde(default)]
        bytes_per_second: Option<u64>,
    },
    /// Counters of cores, disks and shards since the start; the client computes the differences.
    Top,
    /// Hands the node over to a program, started as the node was.
    Upgrade {
        /// The program, as an absolute path; by default, the one under the node's own name.
        #[serde(default)]
        program: Option<PathBuf>,
    },
}

impl Request {
    /// The line that encodes the request.
    pub fn line(&self) -> String {
        let mut value = json!(self);
        value["version"] = VERSION.into();
        format!("{value}\n")
    }

    /// Whether it changes nothing and its answer stands for itself, so that it may be sent again
    /// when none came.
    pub fn only_looks(&self) -> bool {
        use Request::{CompactionStatus, DiskLimits, DiskList, DiskMoves, DiskStat, Events, Top};
        matches!(
            self,
            DiskList
                | DiskStat { .. }
                | DiskLimits
                | DiskMoves { .. }
                | CompactionStatus
                | Events { .. }
                | Top
        )
    }

    /// Whether it changes a disk, or the limits of some.
    pub fn changes_a_disk(&self) -> bool {
        use Request::{DiskLimit, DiskMoveFinish, DiskMoveLimit};
        let others =
            matches!(self, DiskLimit { .. } | DiskMoveFinish { .. } | DiskMoveLimit { .. });
        others || self.disk().is_some()
    }

    /// The disk that it changes.
    fn disk(&self) -> Option<&str> {
        use Request::{DiskAttach, DiskDetach, DiskLimit, DiskMove, DiskMoveAbort, DiskResize};
        use Request::{DiskResume, DiskSend};
        match self {
            DiskAttach { disk, .. } => Some(&disk.name),
            DiskLimit { change } => change.name.as_deref(),
            DiskDetach { name, .. }
            | DiskMove { name, .. }
            | DiskMoveAbort { name, .. }
            | DiskResize { name, .. }
            | DiskResume { name }
            | DiskSend { name, .. } => Some(name),
            _ => None,
        }
    }

    /// Whether it waits for a device or another node.
    fn opens(&self) -> bool {
        use Request::{DiskAttach, DiskMove, DiskResize, DiskResume, DiskSend};
        matches!(
            self,
            DiskAttach { .. }
                | DiskMove { .. }
                | DiskResize { .. }
                | DiskResume { .. }
                | DiskSend { .. }
        )
    }

    fn parse(line: &[u8]) -> Result<Request, Error> {
        let usage = |what: String| Error::new(Kind::Usage, what);
        let mut value: Value = serde_json::from_slice(line)
            .map_err(|error| usage(format!("the line is not JSON: {error}")))?;
        let version = value.as_object_mut().and_then(|object| object.remove("version"));
        if version != Some(VERSION.into()) {
            return Err(usage(format!("this node speaks version {VERSION} of the admin protocol"))
                .hint("use the millrace program that the node was started from"));
        }
        let request: Request =
            serde_json::from_value(value).map_err(|error| usage(error.to_string()))?;
        match &request {
            Request::DiskAttach { disk, .. } => disk.check().map_err(usage)?,
            Request::DiskLimit { change } if change.moves.is_some() => {
                return Err(usage("the moves are limited by a command of their own".to_owned()));
            }
            Request::DiskLimit { change } => change.check().map_err(usage)?,
            Request::Upgrade { program: Some(program) } if !program.is_absolute() => {
                return Err(usage(format!("{} is not an absolute path", program.display())));
            }
            _ => {}
        }
        Ok(request)
    }
}

/// Runs the requests of clients.
pub(crate) trait Commands {
    /// The core that answers.
    fn core(&self) -> &Core;

    /// Runs a request; returns the result as one line of JSON. Suspends.
    async fn run(&self, request: Request) -> Result<String, Error>;
}

/// Listens at a path.
///
/// # Errors
/// When another process listens, or the system refuses.
pub(crate) fn listen(core: &Core, path: &Path) -> Result<UnixListener, Error> {
    UnixListener::bind(core, path).map_err(|error| {
        let what = format!("cannot listen at the admin socket {}: {error}", path.display());
        let in_use = error.kind() == std::io::ErrorKind::AddrInUse;
        let kind = if in_use { Kind::Locked } else { Kind::System };
        Error::new(kind, what).hint("name another one with --admin PATH")
    })
}

/// The connected clients.
#[derive(Default)]
pub(crate) struct Clients {
    count: Cell<usize>,
    /// Their commands that change disks: the disk, and whether it waits for a device.
    changes: RefCell<Vec<(String, bool)>>,
    closed: Cell<bool>,
    /// Notified when a client has left, and when more are admitted.
    changed: Event,
}

impl Clients {
    fn add(&self) {
        self.count.set(self.count.get() + 1);
    }

    fn remove(&self) {
        self.count.set(self.count.get() - 1);
        self.changed.notify_all();
    }

    /// Lets those that connect from now on wait, or admits them again.
    pub fn close(&self, closed: bool) {
        self.closed.set(closed);
        self.changed.notify_all();
    }

    /// Waits until no client is connected.
    pub async fn until_none(&self) {
        self.changed.wait_until(|| self.count.get() == 0).await;
    }
}

/// Answers the connections of a listener; never ends.
pub(crate) async fn serve(
    listener: UnixListener,
    admin: Rc<impl Commands + 'static>,
    clients: Rc<Clients>,
) {
    loop {
        clients.changed.wait_until(|| !clients.closed.get()).await;
        let closed = clients.changed.wait_until(|| clients.closed.get());
        let Either::Second(accepted) = race(closed, listener.accept()).await else { continue };
        match accepted {
            Ok(socket) if clients.count.get() < CONNECTIONS_MAX => {
                clients.add();
                let (clients, admin) = (clients.clone(), admin.clone());
                admin.core().clone().spawn(Class::Control, async move {
                    answer(&*admin, &clients, &socket).await;
                    clients.remove();
                });
            }
            Ok(socket) => {
                // A new connection's buffer has room for a line.
                admin.core().clone().spawn(Class::Control, async move {
                    let _ = socket.send(refused(&crowded()).as_bytes(), &[]).await;
                });
            }
            Err(_) => admin.core().sleep_ns(RETRY_NS).await,
        }
    }
}

fn crowded() -> Error {
    let what = format!("{CONNECTIONS_MAX} programs are connected to the admin socket");
    Error::new(Kind::System, what).hint("end one of them; a silent one is cut off after a minute")
}

/// The line that reports an error.
fn refused(error: &Error) -> String {
    let mut reply = json!({"version": VERSION, "error": error.to_string()});
    if let Some(hint) = error.advice() {
        reply["hint"] = hint.into();
    }
    format!("{reply}\n")
}

/// Something that the node keeps for a program.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Kept {
    Hold(u64),
    Compaction(u64),
    /// Numbers of files that are to be ingested.
    Files(Vec<u64>),
}

impl Kept {
    /// The request that ends it.
    fn end(self) -> Request {
        match self {
            Kept::Hold(hold) => Request::FilesRelease { hold },
            Kept::Compaction(id) => Request::CompactCancel { id },
            Kept::Files(numbers) => Request::IngestRelease { numbers },
        }
    }
}

/// What the node keeps for the program at one connection.
#[derive(Default)]
struct AllKept(Vec<Kept>);

impl AllKept {
    /// Notes what a request that was done has begun or ended.
    fn note(&mut self, request: &Request, result: &str) {
        let field = |name: &str| serde_json::from_str::<Value>(result).ok()?[name].as_u64();
        let numbers = || {
            let result: Value = serde_json::from_str(result).ok()?;
            Some(result["numbers"].as_array()?.iter().filter_map(Value::as_u64).collect())
        };
        match request {
            Request::IngestBegin { .. } => self.0.extend(numbers().map(Kept::Files)),
            Request::IngestFinish { numbers, .. } | Request::IngestRelease { numbers } => {
                for kept in &mut self.0 {
                    if let Kept::Files(files) = kept {
                        files.retain(|number| !numbers.contains(number));
                    }
                }
                self.0.retain(|kept| *kept != Kept::Files(Vec::new()));
            }
            Request::FilesHold { .. } => self.0.extend(field("hold").map(Kept::Hold)),
            Request::CompactBegin { .. } => self.0.extend(field("id").map(Kept::Compaction)),
            Request::FilesRelease { hold } => self.0.retain(|kept| *kept != Kept::Hold(*hold)),
            _ => {}
        }
    }
}

/// Answers one connection, until it ends.
async fn answer(admin: &impl Commands, clients: &Clients, socket: &UnixSocket) {
    let mut kept = AllKept::default();
    answer_all(admin, clients, socket, &mut kept).await;
    for one in kept.0 {
        // It may have ended by itself.
        let _ = admin.run(one.end()).await;
    }
}

/// Runs a request, and tells the client at times that it goes on.
async fn run(
    admin: &impl Commands,
    clients: &Clients,
    socket: &UnixSocket,
    request: Request,
) -> Result<String, Error> {
    let only_looks = request.only_looks();
    let _change = match request.disk() {
        Some(disk) => Some(Change::new(clients, disk, request.opens())?),
        None => None,
    };
    let mut done = pin!(admin.run(request));
    loop {
        match timeout(admin.core(), WAITING_NS, done.as_mut()).await {
            Ok(done) => return done,
            // If the client has gone, its command is finished all the same, unless it changes
            // nothing.
            Err(_) => {
                if socket.send(WAITING, &[]).await.is_err() && only_looks {
                    return Err(Error::new(Kind::System, "the client has gone"));
                }
            }
        }
    }
}

/// A command that changes a disk.
struct Change<'a> {
    clients: &'a Clients,
    what: (String, bool),
}

impl<'a> Change<'a> {
    fn new(clients: &'a Clients, disk: &str, opens: bool) -> Result<Change<'a>, Error> {
        let mut all = clients.changes.borrow_mut();
        let refused = |what: String| {
            Err(Error::new(Kind::System, what).hint("wait until one of them has ended"))
        };
        if all.iter().filter(|(name, _)| name == disk).count() == CHANGES_MAX {
            return refused(format!("{CHANGES_MAX} commands change disk {disk}"));
        }
        if opens && all.iter().filter(|(_, opens)| *opens).count() == OPENING_MAX {
            return refused(format!("{OPENING_MAX} commands wait for devices"));
        }
        let what = (disk.to_owned(), opens);
        all.push(what.clone());
        drop(all);
        Ok(Change { clients, what })
    }
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        let mut all = self.clients.changes.borrow_mut();
        let at = all.iter().position(|one| *one == self.what);
        at.map(|at| all.swap_remove(at));
    }
}

async fn answer_all(
    admin: &impl Commands,
    clients: &Clients,
    socket: &UnixSocket,
    kept: &mut AllKept,
) {
    let mut received = Vec::new();
    loop {
        let line = timeout(admin.core(), PATIENCE_NS, read_line(socket, &mut received)).await;
        let reply = match line {
            Ok(Some(Ok(line))) => match Request::parse(&line) {
                Ok(request) => {
                    let done = run(admin, clients, socket, request.clone()).await;
                    if let Ok(result) = &done {
                        kept.note(&request, result);
                    }
                    done
                }
                Err(error) => Err(error),
            },
            Ok(Some(Err(error))) => Err(error),
            Ok(None) | Err(_) => return,
        };
        let too_long = received.len() > LINE_BYTES_MAX;
        let reply = match reply {
            Ok(result) => format!("{{\"version\":{VERSION},\"result\":{result}}}\n"),
            Err(error) => refused(&error),
        };
        let sent = socket.send(reply.as_bytes(), &[]).await;
        if sent.is_err() || too_long {
            return;
        }
    }
}

/// The next line, without its end; `None` if the client has gone.
async fn read_line(socket: &UnixSocket, received: &mut Vec<u8>) -> Option<Result<Vec<u8>, Error>> {
    loop {
        if let Some(end) = received.iter().position(|&byte| byte == b'\n') {
            let line = received[..end].to_vec();
            received.drain(..=end);
            return Some(Ok(line));
        }
        if received.len() > LINE_BYTES_MAX {
            let what = format!("a line has at most {LINE_BYTES_MAX} bytes");
            return Some(Err(Error::new(Kind::Usage, what)));
        }
        let room = LINE_BYTES_MAX + 1 - received.len();
        match socket.recv(received, room).await {
            Ok((n, _)) if n > 0 => {}
            _ => return None,
        }
    }
}

/// The admin socket in a state directory.
pub(crate) fn socket_in(state: &Path) -> PathBuf {
    state.join(crate::disks::state::ADMIN_SOCKET)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_a_line_and_is_read_as_it_was_written() {
        let disk: DiskSpec = "name=a uri=null:1G socket=/a.sock".parse().unwrap();
        for request in [
            Request::DiskList,
            Request::DiskStat { name: Some("a".into()) },
            Request::DiskAttach { disk, incoming: true },
            Request::DiskDetach { name: "a".into(), force: true },
            Request::DiskResize { name: "a".into(), size_bytes: 1 << 40, shrink: false },
            Request::DiskResume { name: "a".into() },
            Request::DiskMove { name: "a".into(), uri: "mem:1M".into(), finish: true },
            Request::DiskMoves { name: None },
            Request::DiskMoveFinish { name: "a".into() },
            Request::DiskMoveAbort { name: "a".into(), force: true },
            Request::DiskMoveLimit { bytes_per_second: 1 << 20 },
            Request::Events { log: Some("ab".into()), after: 7, wait: true },
            Request::FilesHold { log_bytes_max: 1 << 20 },
            Request::FilesRenew { hold: 7 },
            Request::FilesRelease { hold: 7 },
            Request::IngestBegin { files: 2 },
            Request::IngestRenew { numbers: vec![8, 9] },
            Request::IngestRelease { numbers: vec![8, 9] },
            Request::IngestFinish { column_family: "default".into(), numbers: vec![8, 9] },
            Request::CompactBegin {
                column_family: "default".into(),
                from: Some("6b".into()),
                to: None,
            },
            Request::CompactState { id: 3 },
            Request::CompactCancel { id: 3 },
            Request::CompactionStatus,
            Request::CompactionPause,
            Request::CompactionResume,
            Request::CompactionLimit { cores_percent: Some(50), bytes_per_second: None },
            Request::Top,
            Request::Upgrade { program: Some("/usr/bin/millrace".into()) },
        ] {
            let line = request.line();
            assert_eq!(line.find('\n'), Some(line.len() - 1), "{line}");
            assert_eq!(Request::parse(line.as_bytes()).unwrap(), request);
        }
        let short = br#"{"version":1,"command":"disk-detach","name":"a"}"#;
        let expected = Request::DiskDetach { name: "a".into(), force: false };
        assert_eq!(Request::parse(short).unwrap(), expected);
        let short = br#"{"version":1,"command":"upgrade"}"#;
        assert_eq!(Request::parse(short).unwrap(), Request::Upgrade { program: None });
    }

    #[test]
    fn what_a_connection_keeps_is_noted_until_it_is_released() {
        let mut kept = AllKept::default();
        kept.note(&Request::FilesHold { log_bytes_max: 0 }, r#"{"hold":7,"logs":[]}"#);
        kept.note(&Request::FilesHold { log_bytes_max: 0 }, r#"{"hold":8,"logs":[]}"#);
        let compact =
            Request::CompactBegin { column_family: "default".into(), from: None, to: None };
        kept.note(&compact, r#"{"id":7}"#);
        kept.note(&Request::FilesRelease { hold: 7 }, "{}");
        kept.note(&Request::FilesRenew { hold: 8 }, "{}");
        assert_eq!(kept.0, [Kept::Hold(8), Kept::Compaction(7)]);
        assert_eq!(kept.0[1].clone().end(), Request::CompactCancel { id: 7 });
        let begin = Request::IngestBegin { files: 3 };
        kept.note(&begin, r#"{"directory":"/db","numbers":[20,21,22]}"#);
        kept.note(&begin, r#"{"directory":"/db","numbers":[23]}"#);
        let finish =
            Request::IngestFinish { column_family: "default".into(), numbers: vec![20, 23] };
        kept.note(&finish, "{}");
        assert_eq!(kept.0[2..], [Kept::Files(vec![21, 22])]);
        assert_eq!(kept.0[2].clone().end(), Request::IngestRelease { numbers: vec![21, 22] });
    }

    #[test]
    fn an_invalid_request_is_refused_with_a_reason() {
        for (line, expected) in [
            ("", "not JSON"),
            ("[]", "version 1"),
            (r#"{"command":"disk-list"}"#, "version 1"),
            (r#"{"version":2,"command":"disk-list"}"#, "version 1"),
            (r#"{"version":1,"command":"disk-eat"}"#, "disk-eat"),
            (r#"{"version":1,"command":"disk-detach","name":"a","now":true}"#, "now"),
            (r#"{"version":1,"command":"disk-detach"}"#, "name"),
            (r#"{"version":1,"command":"upgrade","program":"new"}"#, "absolute path"),
            (
                r#"{"version":1,"command":"disk-attach","disk":{"name":"","uri":"null:1G","socket":"s"}}"#,
                "the name of a disk",
            ),
        ] {
            let error = Request::parse(line.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(expected), "{line}: {error}");
        }
    }
}
