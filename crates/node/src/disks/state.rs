//! The state directory: what a node keeps over a restart, and where its admin socket is.
//!
//! `disks.json` holds the disks that were attached while the node ran, and for each socket whether
//! the front ends there were told of a write cache. It is replaced as a whole and is durable before
//! the change is acknowledged. For changes that a guest waits for, most of the work is done before
//! ([`State::prepare_disk`], [`State::prepare_transfer`]). `LOCK` keeps a second node out.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fs::Dir;
use reactor::{Core, Event, LockGuard, SharedFile};
use serde::{Deserialize, Serialize};

use crate::disks::limits::{AllLimits, LimitChange};
use crate::disks::spec::{self, DiskSpec};
use crate::disks::transfers::Transfer;
use crate::error::{Error, Kind};

/// The environment variable that names the state directory if no flag does.
pub const STATE_VARIABLE: &str = "MILLRACE_STATE";
/// The admin socket's name in the state directory.
pub const ADMIN_SOCKET: &str = "admin.sock";
/// The name of the file.
const FILE: &str = "disks.json";
/// The version of the file.
const VERSION: u32 = 1;
/// Maximum length of the file in bytes.
const BYTES_MAX: usize = 16 << 20;

/// The default state directory: `$XDG_STATE_HOME/millrace`, else `/var/lib/millrace` for root and
/// `~/.local/state/millrace` for others.
pub fn default_state() -> Option<PathBuf> {
    let from = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    if let Some(home) = from("XDG_STATE_HOME") {
        return Some(home.join("millrace"));
    }
    match nix::unistd::geteuid().is_root() {
        true => Some("/var/lib/millrace".into()),
        false => from("HOME").map(|home| home.join(".local/state/millrace")),
    }
}

/// Whether the default state directory has attached disks.
#[expect(clippy::disallowed_methods, reason = "start-up code, before any core runs")]
pub(crate) fn remembers_disks() -> bool {
    let bytes = default_state().and_then(|path| std::fs::read(path.join(FILE)).ok());
    bytes.is_some_and(|bytes| parse(&bytes).is_ok_and(|kept| !kept.disks.is_empty()))
}

/// The contents of the file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StateFile {
    version: u32,
    disks: Vec<DiskSpec>,
    /// By socket, which is how a front end names a disk.
    write_cache: BTreeMap<String, bool>,
    #[serde(default, skip_serializing_if = "AllLimits::is_empty")]
    limits: AllLimits,
    /// Disks that go to other nodes, or come from them, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    transfers: BTreeMap<String, Transfer>,
}

impl StateFile {
    fn keep_disk(&mut self, spec: &DiskSpec) {
        self.disks.retain(|disk| disk.name != spec.name);
        self.disks.push(spec.clone());
    }

    fn keep_transfer(&mut self, disk: &str, transfer: Option<&Transfer>) {
        match transfer {
            Some(transfer) => self.transfers.insert(disk.to_owned(), transfer.clone()),
            None => self.transfers.remove(disk),
        };
    }
}

struct Draft {
    text: Vec<u8>,
    /// The file that it replaces. Some file systems take long to free its blocks, as ext4 does
    /// with `-o discard` and without a journal, so this is not done before the change is
    /// durable.
    _old: Option<Arc<SharedFile>>,
}

/// An open state directory.
pub(crate) struct State {
    dir: Dir,
    /// `None` after the release.
    lock: RefCell<Option<LockGuard>>,
    kept: RefCell<StateFile>,
    /// The durable draft of the file, if it may be used.
    draft: RefCell<Option<Draft>>,
    writing: Cell<bool>,
    in_doubt: Cell<bool>,
    /// Notified when a change has been written.
    written: Event,
    released: Cell<bool>,
}

impl State {
    /// Opens the directory, which is created if it is missing, and reads the file. Suspends.
    ///
    /// # Errors
    /// [`Kind::Locked`] when another node uses it, [`Kind::Damaged`] and [`Kind::Unsupported`] when
    /// the file cannot be read, [`Kind::System`] when the system refuses.
    pub async fn open(core: &Core, path: &Path) -> Result<State, Error> {
        State::open_with(core, path, None).await
    }

    /// Like [`State::open`], with the lock of the previous program: [`State::lock`]. Suspends.
    ///
    /// # Errors
    /// As for [`State::open`].
    pub async fn open_locked(core: &Core, path: &Path, lock: OwnedFd) -> Result<State, Error> {
        State::open_with(core, path, Some(LockGuard::held(lock))).await
    }

    async fn open_with(core: &Core, path: &Path, lock: Option<LockGuard>) -> Result<State, Error> {
        let at = path.display();
        let failed = |what: &str, error: io::Error| {
            Error::new(Kind::System, format!("the state directory {at}: {what}: {error}"))
                .hint("name another one with --state DIR")
        };
        let mut builder = std::fs::DirBuilder::new();
        builder.recursive(true).mode(0o700);
        builder.create(path).map_err(|error| failed("cannot create it", error))?;
        let dir = Dir::new(core, path);
        let locked = match lock {
            Some(lock) => Ok(lock),
            None => dir.lock_exclusive("LOCK").await,
        };
        let lock = locked.map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => {
                Error::new(Kind::Locked, format!("another node uses the state directory {at}"))
                    .hint("give this one a directory of its own, with --state DIR")
            }
            _ => failed("cannot lock it", error),
        })?;
        let kept = match dir.read_small(FILE, BYTES_MAX).await {
            Ok(bytes) => parse(&bytes).map_err(|(kind, what)| {
                Error::new(kind, format!("{at}/{FILE}: {what}"))
                    .hint("it holds the attached disks; if you remove it, attach them again")
            })?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                StateFile { version: VERSION, ..StateFile::default() }
            }
            Err(error) => return Err(failed(FILE, error)),
        };
        let (kept, lock) = (RefCell::new(kept), RefCell::new(Some(lock)));
        let (writing, written, released) = (Cell::new(false), Event::new(), Cell::new(false));
        let (draft, in_doubt) = (RefCell::default(), Cell::new(false));
        Ok(State { dir, lock, kept, draft, writing, in_doubt, written, released })
    }

    /// The open file that holds the lock.
    ///
    /// # Errors
    /// When the process has no free descriptors.
    pub fn lock(&self) -> io::Result<Option<OwnedFd>> {
        let lock = self.lock.borrow();
        let descriptor = lock.as_ref().and_then(LockGuard::descriptor);
        descriptor.map(|lock| lock.try_clone_to_owned()).transpose()
    }

    /// Releases the directory to another process; nothing is written from now on.
    pub fn release(&self) {
        self.released.set(true);
        if !self.writing.get() {
            self.lock.take();
        }
    }

    /// Whether a change is being written.
    pub fn is_writing(&self) -> bool {
        self.writing.get()
    }

    /// Waits until no change is being written.
    pub async fn until_written(&self) {
        self.written.wait_until(|| !self.writing.get()).await;
    }

    /// The attached disks.
    pub fn disks(&self) -> Vec<DiskSpec> {
        self.kept.borrow().disks.clone()
    }

    /// The attached disk of that name.
    pub fn disk(&self, name: &str) -> Option<DiskSpec> {
        self.kept.borrow().disks.iter().find(|spec| spec.name == name).cloned()
    }

    /// What the front ends at a socket were told of the write cache, if known.
    pub fn write_cache(&self, socket: &Path) -> Option<bool> {
        self.kept.borrow().write_cache.get(&name(socket)).copied()
    }

    /// Stores a disk, in place of one of the same name. Suspends until it is durable.
    ///
    /// # Errors
    /// When it cannot be written; then nothing has changed.
    pub async fn keep_disk(&self, spec: &DiskSpec) -> Result<(), String> {
        self.change(|kept| kept.keep_disk(spec)).await
    }

    /// Writes the draft of what [`State::keep_disk`] is about to store, so that storing it takes
    /// less time if nothing else is stored in between. Suspends.
    pub async fn prepare_disk(&self, spec: &DiskSpec) {
        self.prepare(|kept| kept.keep_disk(spec)).await;
    }

    /// Removes a disk and the state of its socket. Suspends until that is durable.
    ///
    /// # Errors
    /// When it cannot be written; then nothing has changed.
    pub async fn forget_disk(&self, disk: &str, socket: &Path) -> Result<(), String> {
        self.change(|kept| {
            kept.disks.retain(|kept| kept.name != disk);
            kept.write_cache.remove(&name(socket));
            kept.limits.forget(disk);
            kept.transfers.remove(disk);
        })
        .await
    }

    /// How far a disk is on its way to another node, or from one.
    pub fn transfer(&self, disk: &str) -> Option<Transfer> {
        self.kept.borrow().transfers.get(disk).cloned()
    }

    /// Stores how far a disk is, and limits that come along. Suspends until that is durable.
    ///
    /// # Errors
    /// When it cannot be written.
    pub async fn keep_transfer(
        &self,
        disk: &str,
        transfer: Option<&Transfer>,
        limits: &[LimitChange],
    ) -> Result<(), String> {
        self.change(|kept| {
            kept.keep_transfer(disk, transfer);
            // They were checked.
            limits.iter().for_each(|change| drop(kept.limits.change(change)));
        })
        .await
    }

    /// As [`State::prepare_disk`], for [`State::keep_transfer`] without limits. Suspends.
    pub async fn prepare_transfer(&self, disk: &str, transfer: &Transfer) {
        self.prepare(|kept| kept.keep_transfer(disk, Some(transfer))).await;
    }

    /// The limits of disks and groups.
    pub fn limits(&self) -> AllLimits {
        self.kept.borrow().limits.clone()
    }

    /// Stores a change of limits. Suspends until it is durable.
    ///
    /// # Errors
    /// When it means nothing or cannot be written; then nothing has changed.
    pub async fn change_limits(&self, change: &LimitChange) -> Result<(), String> {
        self.limits().change(change)?;
        self.change(|kept| {
            // It was checked.
            drop(kept.limits.change(change));
            let transfer = change.name.as_ref().and_then(|name| kept.transfers.get_mut(name));
            transfer.into_iter().for_each(Transfer::has_own_limits);
        })
        .await
    }

    /// Stores what the front ends at a socket were told. Suspends until it is durable.
    ///
    /// # Errors
    /// When it cannot be written.
    pub async fn keep_write_cache(&self, socket: &Path, told: Option<bool>) -> Result<(), String> {
        self.change(|kept| {
            match told {
                Some(told) => kept.write_cache.insert(name(socket), told),
                None => kept.write_cache.remove(&name(socket)),
            };
        })
        .await
    }

    async fn change(&self, change: impl FnOnce(&mut StateFile)) -> Result<(), String> {
        self.until_written().await;
        if self.released.get() {
            return Err("another process has the state directory".to_owned());
        }
        let mut kept = self.kept.borrow().clone();
        change(&mut kept);
        if kept == *self.kept.borrow() {
            return Ok(());
        }
        self.write(&kept).await?;
        *self.kept.borrow_mut() = kept;
        Ok(())
    }

    /// Writes the file as it was before a change that has failed. Suspends until it is durable.
    ///
    /// # Errors
    /// When it cannot be written.
    pub async fn write_again(&self) -> Result<(), String> {
        self.until_written().await;
        let kept = self.kept.borrow().clone();
        self.write(&kept).await
    }

    /// Whether the file may have the contents of a change that has failed, until
    /// [`State::write_again`] has succeeded.
    pub fn is_in_doubt(&self) -> bool {
        self.in_doubt.get()
    }

    async fn prepare(&self, change: impl FnOnce(&mut StateFile)) {
        self.until_written().await;
        if self.released.get() {
            return;
        }
        let mut kept = self.kept.borrow().clone();
        change(&mut kept);
        let Ok(text) = serde_json::to_vec_pretty(&kept) else { return };
        // Whether it can be written is told when it is stored.
        let _ = self.while_writing(self.write_draft(text)).await;
    }

    async fn write(&self, kept: &StateFile) -> Result<(), String> {
        let text = serde_json::to_vec_pretty(kept).map_err(|error| error.to_string())?;
        let written = async {
            if self.draft.borrow().as_ref().is_none_or(|draft| draft.text != text) {
                self.write_draft(text).await?;
            }
            let _draft = self.draft.take();
            self.dir.use_draft(FILE).await?;
            // It has the new contents, and perhaps the old ones again after a power cut.
            self.in_doubt.set(true);
            self.dir.sync().await.inspect(|()| self.in_doubt.set(false))
        };
        let path = self.dir.path().display();
        let written = self.while_writing(written).await;
        written.map_err(|error| format!("cannot write {path}/{FILE}: {error}"))
    }

    async fn write_draft(&self, text: Vec<u8>) -> io::Result<()> {
        self.draft.take();
        let old = self.dir.open(FILE).await.ok();
        self.dir.draft_small(FILE, &text).await?;
        self.draft.replace(Some(Draft { text, _old: old }));
        Ok(())
    }

    /// Keeps others from writing meanwhile.
    async fn while_writing(&self, write: impl Future<Output = io::Result<()>>) -> io::Result<()> {
        self.writing.set(true);
        let written = write.await;
        self.writing.set(false);
        self.written.notify_all();
        if self.released.get() {
            self.lock.take();
        }
        written
    }
}

/// The key of a socket: its absolute path, so that it does not depend on the working directory.
fn name(socket: &Path) -> String {
    let whole = std::path::absolute(socket);
    whole.as_deref().unwrap_or(socket).to_string_lossy().into_owned()
}

fn parse(bytes: &[u8]) -> Result<StateFile, (Kind, String)> {
    #[derive(Deserialize)]
    struct Versioned {
        version: u32,
    }
    let wrong = |error: serde_json::Error| (Kind::Damaged, error.to_string());
    let Versioned { version } = serde_json::from_slice(bytes).map_err(wrong)?;
    if version != VERSION {
        let what = format!("version {version} is not supported: this program supports {VERSION}");
        return Err((Kind::Unsupported, what));
    }
    let kept: StateFile = serde_json::from_slice(bytes).map_err(wrong)?;
    spec::check_all(&kept.disks).map_err(|what| (Kind::Damaged, what))?;
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(name: &str) -> DiskSpec {
        format!("name={name} uri=null:1G socket=/run/{name}.sock").parse().unwrap()
    }

    #[test]
    fn the_state_survives_a_restart_and_a_second_node_is_kept_out() {
        let path = std::env::temp_dir().join(format!("millrace-state-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        let there = path.join("below");
        let processors = reactor::processors().into_iter().take(1).collect();
        let config = reactor::RuntimeConfig { processors, ..reactor::RuntimeConfig::default() };
        reactor::run(&config, move |core| {
            let there = there.clone();
            async move {
                let state = State::open(&core, &there).await.unwrap();
                assert!(state.disks().is_empty());
                state.keep_disk(&disk("a")).await.unwrap();
                state.keep_disk(&disk("b")).await.unwrap();
                state.keep_disk(&DiskSpec { queues: 3, ..disk("a") }).await.unwrap();
                let socket = Path::new("/run/b.sock");
                assert_eq!(state.write_cache(socket), None);
                state.keep_write_cache(socket, Some(false)).await.unwrap();
                let second = State::open(&core, &there).await.err().unwrap();
                assert_eq!(second.kind(), Kind::Locked);
                drop(state);

                let state = State::open(&core, &there).await.unwrap();
                assert_eq!(state.disks(), [disk("b"), DiskSpec { queues: 3, ..disk("a") }]);
                assert_eq!(state.write_cache(socket), Some(false));
                state.forget_disk("b", socket).await.unwrap();
                assert_eq!((state.disks().len(), state.write_cache(socket)), (1, None));
                let iops = Some(5);
                let of = |name: &str| LimitChange {
                    name: Some(name.into()),
                    iops,
                    ..LimitChange::default()
                };
                state.change_limits(&of("a")).await.unwrap();
                state.change_limits(&of("x")).await.unwrap();
                drop(state);
                let state = State::open(&core, &there).await.unwrap();
                assert_eq!(state.limits().of_disk("x").iops, 5);
                state.forget_disk("x", socket).await.unwrap();
                let left = state.limits();
                assert_eq!((left.of_disk("x").iops, left.of_disk("a").iops), (0, 5));
            }
        })
        .unwrap();
        std::fs::remove_dir_all(&path).unwrap();
    }

    #[test]
    fn what_was_prepared_is_stored_only_if_nothing_else_was_stored_meanwhile() {
        let path = std::env::temp_dir().join(format!("millrace-draft-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        let there = path.clone();
        let processors = reactor::processors().into_iter().take(1).collect();
        let config = reactor::RuntimeConfig { processors, ..reactor::RuntimeConfig::default() };
        reactor::run(&config, move |core| {
            let there = there.clone();
            async move {
                let stored = async || {
                    let dir = Dir::new(&core, &there);
                    parse(&dir.read_small(FILE, BYTES_MAX).await.unwrap()).unwrap().disks
                };
                let drafted = || there.join(format!("{FILE}.dbtmp")).exists();
                let state = State::open(&core, &there).await.unwrap();
                state.keep_disk(&disk("a")).await.unwrap();
                state.prepare_disk(&disk("b")).await;
                assert_eq!((stored().await, drafted()), (vec![disk("a")], true));
                drop(state);

                let state = State::open(&core, &there).await.unwrap();
                assert_eq!(state.disks(), [disk("a")]);
                state.keep_disk(&disk("c")).await.unwrap();
                assert_eq!((stored().await, drafted()), (vec![disk("a"), disk("c")], false));
                state.prepare_disk(&disk("d")).await;
                state.keep_disk(&disk("d")).await.unwrap();
                assert_eq!((stored().await.len(), drafted()), (3, false));
                let incoming = Transfer::Incoming { id: Some(7), limited: false };
                state.prepare_transfer("d", &incoming).await;
                state.forget_disk("c", Path::new("/run/c.sock")).await.unwrap();
                assert_eq!((stored().await, drafted()), (vec![disk("a"), disk("d")], false));
                state.keep_transfer("d", Some(&incoming), &[]).await.unwrap();
                drop(state);
                let state = State::open(&core, &there).await.unwrap();
                assert_eq!(state.transfer("d"), Some(incoming));
                assert_eq!(state.disks(), [disk("a"), disk("d")]);
            }
        })
        .unwrap();
        std::fs::remove_dir_all(&path).unwrap();
    }

    #[test]
    fn an_invalid_file_is_refused() {
        let good = StateFile { version: VERSION, disks: vec![disk("a")], ..StateFile::default() };
        assert_eq!(parse(&serde_json::to_vec(&good).unwrap()), Ok(good.clone()));
        for (text, kind) in [
            ("", Kind::Damaged),
            ("{}", Kind::Damaged),
            (r#"{"version": 2, "volumes": []}"#, Kind::Unsupported),
            (r#"{"version": 1, "disks": [], "write_cache": {}, "more": 1}"#, Kind::Damaged),
        ] {
            assert_eq!(parse(text.as_bytes()).unwrap_err().0, kind, "{text}");
        }
        let twice = StateFile { disks: vec![disk("a"), disk("a")], ..good };
        let error = parse(&serde_json::to_vec(&twice).unwrap()).unwrap_err();
        assert_eq!(error.0, Kind::Damaged);
    }
}
