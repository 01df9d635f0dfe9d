//! Shared by the suites: places to run in, a guest's memory, and a device driven by a poller, as in
//! production.
#![allow(dead_code, reason = "each suite uses its part")]

pub mod copied;
pub mod power;

use std::any::Any;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::task::{Poll, Waker};

use bdev::{Bdev, Channel, Done, Io, Kind, Status};
use reactor::sim::{SimConfig, World};
use reactor::{Core, DriverKind, Poller, PollerSlot, RuntimeConfig, processors, run};

/// Where a scenario runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Uring,
    Epoll,
    Sim,
}

pub const PLACES: [Place; 3] = [Place::Uring, Place::Epoll, Place::Sim];

pub fn config(driver: DriverKind) -> RuntimeConfig {
    RuntimeConfig {
        processors: processors()[..1].to_vec(),
        memory: 64 << 20,
        driver,
        ..RuntimeConfig::default()
    }
}

impl Place {
    /// Whether this system supports it.
    pub fn available(self) -> bool {
        if self != Place::Uring {
            return true;
        }
        let there = run(&config(DriverKind::Uring), |_| async {});
        if let Err(error) = &there {
            eprintln!("not tested: {error}");
        }
        there.is_ok()
    }

    /// Runs a scenario on one core, with the path of a file of `len` bytes of 0xEE.
    pub fn run<T, Fut>(
        self,
        name: &str,
        len: u64,
        main: impl Fn(Core, PathBuf) -> Fut + Clone + Send + 'static,
    ) -> T
    where
        T: Send + 'static,
        Fut: Future<Output = T> + 'static,
    {
        let bytes = vec![0xEE; len as usize];
        let kind = match self {
            Place::Uring => DriverKind::Uring,
            Place::Epoll => DriverKind::Epoll,
            Place::Sim => {
                let world = World::new(1, 1, SimConfig::default());
                world.add_file("/disks/a.img", bytes);
                let main = move |core| main(core, PathBuf::from("/disks/a.img"));
                return world.run(main).unwrap().pop().unwrap();
            }
        };
        let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
        let path = dir.join(format!("{name}-{self:?}-{}.img", std::process::id()));
        write(&path, &bytes);
        let there = path.clone();
        let result = run(&config(kind), move |core| main(core, there.clone()));
        remove(&path);
        remove(&path.with_extension("img.dirty"));
        result.unwrap().pop().unwrap()
    }
}

#[expect(clippy::disallowed_methods, reason = "a file of the host, for a test")]
pub fn write(path: &Path, bytes: &[u8]) {
    std::fs::write(path, bytes).unwrap();
}

#[expect(clippy::disallowed_methods, reason = "a file of the host, for a test")]
pub fn remove(path: &Path) {
    let _ = std::fs::remove_file(path);
}

/// A guest's memory: pages of the process that no Rust reference ever points to.
pub struct Guest {
    base: *mut u8,
    len: usize,
    /// Set when the memory is unmapped.
    gone: Option<Rc<RefCell<bool>>>,
}

impl Guest {
    pub fn new(len: usize) -> Guest {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), len, access, flags, -1, 0) };
        assert_ne!(base, libc::MAP_FAILED);
        Guest { base: base.cast(), len, gone: None }
    }

    pub fn telling(len: usize, gone: &Rc<RefCell<bool>>) -> Guest {
        let mut guest = Guest::new(len);
        guest.gone = Some(gone.clone());
        guest
    }

    pub fn at(&self, offset: usize, len: usize) -> libc::iovec {
        assert!(offset + len <= self.len);
        libc::iovec { iov_base: self.base.wrapping_add(offset).cast(), iov_len: len }
    }

    pub fn put(&self, offset: usize, bytes: &[u8]) {
        let to = self.at(offset, bytes.len()).iov_base.cast();
        // SAFETY: the range lies in the mapping, and no reference to it exists.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }

    pub fn get(&self, offset: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let from = self.at(offset, len).iov_base.cast();
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), len) };
        bytes
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        if let Some(gone) = &self.gone {
            *gone.borrow_mut() = true;
        }
        // SAFETY: the mapping made in `new`.
        unsafe { libc::munmap(self.base.cast(), self.len) };
    }
}

/// A channel driven by a poller, and tasks that wait for tags.
pub struct Disk {
    pub bdev: Bdev,
    pub guest: Rc<Guest>,
    channel: Rc<RefCell<Channel>>,
    done: Rc<RefCell<Answers>>,
    next: RefCell<u64>,
    _slot: PollerSlot,
}

#[derive(Default)]
struct Answers {
    by_tag: BTreeMap<u64, Status>,
    order: Vec<u64>,
    wakers: Vec<Waker>,
}

struct Pump {
    channel: Rc<RefCell<Channel>>,
    done: Rc<RefCell<Answers>>,
    batch: Vec<Done>,
}

impl Poller for Pump {
    fn poll(&mut self) -> bool {
        let n = self.channel.borrow_mut().poll(&mut self.batch);
        let mut answers = self.done.borrow_mut();
        for done in self.batch.drain(..) {
            assert!(answers.by_tag.insert(done.tag, done.status).is_none(), "a tag came twice");
            answers.order.push(done.tag);
        }
        if n > 0 {
            answers.wakers.drain(..).for_each(Waker::wake);
        }
        n > 0
    }
    fn pure_check(&mut self) -> bool {
        self.channel.borrow().ready()
    }
    fn arm(&mut self) -> bool {
        !self.channel.borrow().ready()
    }
    fn disarm(&mut self) {}
}

impl Disk {
    pub async fn open(core: &Core, uri: &str) -> Disk {
        let bdev = Bdev::open(core, uri).await.unwrap_or_else(|error| panic!("{uri}: {error}"));
        Disk::over(core, &bdev)
    }

    pub fn over(core: &Core, bdev: &Bdev) -> Disk {
        Disk::with(core, bdev, Guest::new(8 << 20))
    }

    pub fn with(core: &Core, bdev: &Bdev, guest: Guest) -> Disk {
        let guest = Rc::new(guest);
        let mut channel = bdev.channel(core).unwrap();
        let keep: Rc<dyn Any> = guest.clone();
        channel.hold(keep);
        let channel = Rc::new(RefCell::new(channel));
        let done: Rc<RefCell<Answers>> = Rc::default();
        let pump = Pump { channel: channel.clone(), done: done.clone(), batch: Vec::new() };
        let slot = core.add_poller(pump);
        Disk { bdev: bdev.clone(), guest, channel, done, next: RefCell::new(0), _slot: slot }
    }

    /// Submits a request and returns the tag, or nothing if the channel is full.
    pub fn submit(
        &self,
        kind: Kind,
        offset: u64,
        segments: &[libc::iovec],
        len: u64,
        fua: bool,
    ) -> Option<u64> {
        let tag = *self.next.borrow();
        let io = Io { kind, offset, len, segments, tag, fua };
        // SAFETY: the segments lie in the guest's memory, which the channel was told to hold.
        unsafe { self.channel.borrow_mut().submit(&io) }.ok()?;
        *self.next.borrow_mut() += 1;
        Some(tag)
    }

    pub async fn wait(&self, tag: u64) -> Status {
        std::future::poll_fn(|cx| {
            let mut answers = self.done.borrow_mut();
            match answers.by_tag.remove(&tag) {
                Some(status) => Poll::Ready(status),
                None => {
                    answers.wakers.push(cx.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }

    /// Tags in the order in which they came back.
    pub fn order(&self) -> Vec<u64> {
        self.done.borrow().order.clone()
    }

    pub fn channel(&self) -> std::cell::RefMut<'_, Channel> {
        self.channel.borrow_mut()
    }

    pub async fn vectored(
        &self,
        kind: Kind,
        offset: u64,
        segments: &[libc::iovec],
        len: u64,
    ) -> Status {
        let tag = self.submit(kind, offset, segments, len, false).expect("room in the channel");
        self.wait(tag).await
    }

    /// A request without memory.
    pub async fn plain(&self, kind: Kind, offset: u64, len: u64) -> Status {
        self.vectored(kind, offset, &[], len).await
    }

    pub async fn write(&self, offset: u64, bytes: &[u8]) -> Status {
        self.guest.put(0, bytes);
        let len = bytes.len();
        self.vectored(Kind::Write, offset, &[self.guest.at(0, len)], len as u64).await
    }

    pub async fn read(&self, offset: u64, len: usize) -> Result<Vec<u8>, Status> {
        self.guest.put(0, &vec![0x55; len]);
        let segments = [self.guest.at(0, len)];
        match self.vectored(Kind::Read, offset, &segments, len as u64).await {
            Status::Ok => Ok(self.guest.get(0, len)),
            status => Err(status),
        }
    }
}

/// Quotes a path for a URI.
pub fn quoted(path: &Path) -> String {
    path.to_str().unwrap().replace('%', "%25").replace(' ', "%20")
}
