//! Writing to open files: [`WriteAt`] and [`SyncData`], the futures behind
//! [`File::write_at`](crate::File::write_at) and [`File::sync_data`](crate::File::sync_data).
//!
//! 1. A write takes its buffer. A misaligned direct write, which the disk would refuse, and a write
//!    to a poisoned file fail before they are started.
//! 2. The operation owns the buffer until its completion has been reaped, like a read's. Above the
//!    device's queue depth it waits in the core, by class, like a read; so background writes leave
//!    room for foreground reads, and background reads for foreground writes.
//! 3. If the device took a part, it is given the rest.
//!
//! A started write or sync is never cancelled: neither by dropping its future nor by a stopping
//! core, which waits for it. An operation that still waits in the core is dropped with its future.
//!
//! A sync covers the writes that had completed when it was started; a durable write covers itself.
//! When one of the two fails, it poisons the [`SharedFile`](crate::SharedFile), so no later one
//! reports success (law 4).

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use crate::driver::IoOp;
use crate::io::file::{File, io_result};
use crate::memory::buf::Buf;
use crate::op::{OpId, Payload};

enum State<T> {
    New(T),
    Running(OpId),
    /// Refused before it was started.
    Refused(T, io::Error),
    Done,
}

/// The future of [`File::write_at`] and [`File::write_durably_at`]. Resolves to success or the
/// error, and the buffer.
pub struct WriteAt {
    file: File,
    offset: u64,
    len: usize,
    durable: bool,
    /// Bytes the device has taken.
    done: usize,
    state: State<Buf>,
}

impl WriteAt {
    pub(crate) fn new(file: File, offset: u64, buf: Buf, len: usize, durable: bool) -> WriteAt {
        assert!(len <= buf.len(), "the buffer is shorter than the write");
        WriteAt { file, offset, len, durable, done: 0, state: State::New(buf) }
    }

    /// Starts the write now, so that several can run before the first is awaited.
    pub fn start(&mut self) {
        match std::mem::replace(&mut self.state, State::Done) {
            State::New(buf) => {
                self.state = match self.refusal() {
                    Some(error) => State::Refused(buf, error),
                    None => self.proceed(buf),
                };
            }
            state => self.state = state,
        }
    }

    /// The error of a write that cannot be started.
    fn refusal(&self) -> Option<io::Error> {
        let mask = self.file.alignment() as u64 - 1;
        let end = self.offset.checked_add(self.len as u64).filter(|&end| end <= i64::MAX as u64);
        if (self.offset | self.len as u64) & mask != 0 || end.is_none() {
            return Some(io::Error::from_raw_os_error(libc::EINVAL));
        }
        self.file.shared().flush_failed().then(poisoned)
    }

    /// Hands the rest to the device.
    fn proceed(&self, buf: Buf) -> State<Buf> {
        let left = &buf[self.done..self.len];
        let op = IoOp::Write {
            fd: self.file.shared().fd().number(),
            ptr: left.as_ptr(),
            len: left.len() as u32,
            offset: self.offset + self.done as u64,
            durable: self.durable,
        };
        State::Running(self.file.start(op, Payload::Buf(buf)))
    }

    /// Notes how much the device took. `None` when there is more to write.
    fn taken(&mut self, result: io::Result<usize>) -> Option<io::Result<()>> {
        match result {
            Ok(0) if self.len > 0 => return Some(Err(io::ErrorKind::WriteZero.into())),
            Ok(n) => self.done += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => return None,
            Err(e) => return Some(Err(e)),
        }
        self.file.shared().grow_size(self.offset + self.done as u64);
        if self.done < self.len {
            // The rest of a direct write that ended inside a block cannot be requested.
            let aligned = self.done.is_multiple_of(self.file.alignment());
            return (!aligned).then(|| Err(io::ErrorKind::WriteZero.into()));
        }
        Some(Ok(()))
    }
}

impl Future for WriteAt {
    type Output = (io::Result<()>, Buf);

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.start();
        loop {
            let id = match std::mem::replace(&mut self.state, State::Done) {
                State::Running(id) => id,
                State::Refused(buf, error) => return Poll::Ready((Err(error), buf)),
                State::New(_) | State::Done => panic!("a finished write polled again"),
            };
            let Poll::Ready((result, payload)) = self.file.core().inner().poll_op(id, cx) else {
                self.state = State::Running(id);
                return Poll::Pending;
            };
            let Payload::Buf(buf) = payload else { unreachable!("a write owns a buffer") };
            match self.taken(io_result(result)) {
                Some(result) => return Poll::Ready((result, buf)),
                None => self.state = self.proceed(buf),
            }
        }
    }
}

impl Drop for WriteAt {
    fn drop(&mut self) {
        if let State::Running(id) = self.state {
            self.file.core().inner().drop_op(id, false);
        }
    }
}

/// The future of [`File::sync_data`].
pub struct SyncData {
    file: File,
    state: State<()>,
}

impl SyncData {
    pub(crate) fn new(file: File) -> SyncData {
        SyncData { file, state: State::New(()) }
    }

    /// Starts the sync now.
    pub fn start(&mut self) {
        if let State::New(()) = self.state {
            self.state = if self.file.shared().flush_failed() {
                State::Refused((), poisoned())
            } else {
                let op = IoOp::SyncData { fd: self.file.shared().fd().number() };
                State::Running(self.file.start(op, Payload::None))
            };
        }
    }
}

impl Future for SyncData {
    type Output = io::Result<()>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.start();
        loop {
            let id = match std::mem::replace(&mut self.state, State::Done) {
                State::Running(id) => id,
                State::Refused((), error) => return Poll::Ready(Err(error)),
                State::New(()) | State::Done => panic!("a finished sync polled again"),
            };
            let Poll::Ready((result, _)) = self.file.core().inner().poll_op(id, cx) else {
                self.state = State::Running(id);
                return Poll::Pending;
            };
            return Poll::Ready(match io_result(result) {
                // A signal, before anything was flushed.
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {
                    self.state = State::New(());
                    self.start();
                    continue;
                }
                // The operation table has poisoned the file (see `op`).
                Err(e) => Err(e),
                // A concurrent sync failed: it is unknown which writes' bytes were dropped.
                Ok(_) if self.file.shared().flush_failed() => Err(poisoned()),
                Ok(_) => Ok(()),
            });
        }
    }
}

impl Drop for SyncData {
    fn drop(&mut self) {
        if let State::Running(id) = self.state {
            self.file.core().inner().drop_op(id, false);
        }
    }
}

/// The error of every use of a poisoned file.
fn poisoned() -> io::Error {
    io::Error::other("an earlier flush of this file failed")
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::os::fd::OwnedFd;
    use std::sync::Arc;

    use super::*;
    use crate::driver::{Fd, SharedFile};
    use crate::{Core, DriverKind, RuntimeConfig, processors, run};

    /// Runs `test` on one core with every driver that this system has.
    fn on_every_driver<Fut: Future<Output = ()> + 'static>(test: fn(Core) -> Fut) {
        for driver in [DriverKind::Uring, DriverKind::Epoll] {
            let processors = processors()[..1].to_vec();
            let config = RuntimeConfig { processors, driver, ..RuntimeConfig::default() };
            match run(&config, test) {
                Ok(_) => {}
                Err(error) if driver == DriverKind::Uring => eprintln!("not tested: {error}"),
                Err(error) => panic!("{error}"),
            }
        }
    }

    fn file(core: &Core, fd: OwnedFd) -> File {
        core.attach(&Arc::new(SharedFile::new(Fd::Host(fd), "test".into(), 0, 1)))
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "a device of the host that takes nothing")]
    fn a_full_disk_is_an_error_and_gives_the_buffer_back() {
        on_every_driver(|core| async move {
            let device = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
            let file = file(&core, device.into());
            let (result, buf) = file.write_at(0, core.alloc(512).unwrap(), 512).await;
            assert_eq!(result.unwrap_err().kind(), io::ErrorKind::StorageFull);
            assert_eq!((buf.len(), file.size()), (512, 0));
        });
    }

    /// The state after a failed flush is unknown, and a second flush would not report it.
    #[test]
    fn a_failed_flush_poisons_the_file_also_when_nobody_waits_for_it() {
        on_every_driver(|core| async move {
            for waits in [true, false] {
                // A pipe cannot be flushed.
                let (_reader, writer) = io::pipe().unwrap();
                let file = file(&core, writer.into());
                if waits {
                    let error = file.sync_data().await.unwrap_err();
                    assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
                } else {
                    file.sync_data().start();
                    while core.operations_in_flight() > 0 {
                        core.sleep_ns(100_000).await;
                    }
                }
                let (written, _) = file.write_at(0, core.alloc(512).unwrap(), 512).await;
                for error in [file.sync_data().await.unwrap_err(), written.unwrap_err()] {
                    assert!(error.to_string().contains("earlier flush"), "{error}");
                }
            }
        });
    }

    /// A regular file takes all or nothing, so the test makes the partial results itself.
    #[test]
    fn a_short_write_continues_unless_a_direct_one_ends_inside_a_block() {
        on_every_driver(|core| async move {
            let (_reader, writer) = io::pipe().unwrap();
            let fd = writer.try_clone().unwrap();
            let whole = file(&core, writer.into());
            let mut write = WriteAt::new(whole, 1000, core.alloc(4096).unwrap(), 4096, false);
            assert!(write.taken(Ok(100)).is_none());
            assert!(write.taken(Err(io::ErrorKind::Interrupted.into())).is_none());
            assert_eq!((write.done, write.file.size()), (100, 1100));
            assert!(write.taken(Ok(0)).unwrap().is_err(), "no progress");
            assert!(write.taken(Ok(3996)).unwrap().is_ok());
            assert_eq!(write.file.size(), 1000 + 4096);

            let shared = SharedFile::new(Fd::Host(fd.into()), "test".into(), 0, 512);
            let direct = core.attach(&Arc::new(shared));
            let mut write = WriteAt::new(direct, 512, core.alloc(4096).unwrap(), 4096, false);
            assert!(write.taken(Ok(1024)).is_none());
            assert!(write.taken(Ok(100)).unwrap().is_err());
        });
    }
}
