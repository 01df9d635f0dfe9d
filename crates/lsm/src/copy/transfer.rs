//! Copying and reading whole files.

use fs::{Dir, FileWriter, Mode};
use reactor::Core;
use rocksfmt::crc32c_append;

use crate::error::{Error, Kind, Result};

/// Bytes read at a time.
const PIECE: u64 = 512 << 10;

/// Longest time between two calls of `progress` while the rate makes a copy wait, in nanoseconds.
const CALL_NS: u64 = 1_000_000_000;

/// The bytes of a copy: how many there are, how fast they may move, and who is told.
pub struct Transfer<'a> {
    core: Core,
    progress: &'a mut dyn FnMut(u64, u64),
    /// Bytes per second.
    rate: Option<u64>,
    since_ns: u64,
    moved: u64,
    done: u64,
    total: u64,
}

/// Length and checksum of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sum {
    pub bytes: u64,
    pub crc32c: u32,
}

impl Sum {
    /// With other bytes after these.
    fn and(self, bytes: &[u8]) -> Sum {
        Sum { bytes: self.bytes + bytes.len() as u64, crc32c: crc32c_append(self.crc32c, bytes) }
    }
}

impl<'a> Transfer<'a> {
    /// A transfer on a core, of at most `rate` bytes per second if there is a rate. It calls
    /// `progress` after every piece with the bytes done and the total bytes.
    pub fn new(
        core: &Core,
        rate: Option<u64>,
        progress: &'a mut dyn FnMut(u64, u64),
    ) -> Transfer<'a> {
        let core = core.clone();
        let since_ns = core.now_ns();
        Transfer { core, progress, rate, since_ns, moved: 0, done: 0, total: 0 }
    }

    pub(crate) fn core(&self) -> Core {
        self.core.clone()
    }

    /// Adds bytes that are to be done.
    pub(crate) fn expect(&mut self, bytes: u64) {
        self.total += bytes;
        (self.progress)(self.done, self.total);
    }

    /// Notes bytes that need not be moved.
    pub(crate) fn skip(&mut self, bytes: u64) {
        self.done += bytes;
        (self.progress)(self.done, self.total);
    }

    /// Notes bytes that were read, of which a file that is being copied has `copied` so far, and
    /// waits as long as the rate demands.
    async fn note(&mut self, bytes: u64, copied: u64) {
        self.moved += bytes;
        (self.progress)(self.done + copied, self.total);
        if let Some(rate) = self.rate {
            let due_ns = u128::from(self.moved) * 1_000_000_000 / u128::from(rate.max(1));
            let due_ns = self.since_ns.saturating_add(u64::try_from(due_ns).unwrap_or(u64::MAX));
            while let Some(ns) = due_ns.checked_sub(self.core.now_ns()).filter(|&ns| ns > 0) {
                self.core.sleep_ns(ns.min(CALL_NS)).await;
                (self.progress)(self.done + copied, self.total);
            }
        }
        self.core.checkpoint().await;
    }

    /// Copies a file, or its first `bytes`. The copy is durable when this returns; its name is not.
    /// An existing file of that name is replaced. Suspends for the disk.
    pub(crate) async fn copy(
        &mut self,
        (from, name): (&Dir, &str),
        bytes: Option<u64>,
        to: (&Dir, &str),
    ) -> Result<Sum> {
        self.copy_part((from, name), (bytes, &[]), to).await
    }

    /// The same, with other bytes after those of the file.
    pub(crate) async fn copy_part(
        &mut self,
        (from, name): (&Dir, &str),
        (bytes, footer): (Option<u64>, &[u8]),
        (to, as_name): (&Dir, &str),
    ) -> Result<Sum> {
        let io = |e: std::io::Error| Error::io(to.path().join(as_name).display(), &e);
        // What is there may be a link to a file of a database.
        match to.remove(as_name).await {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(io(error)),
            _ => {}
        }
        let file = to.create(as_name, Mode::Direct).await.map_err(io)?;
        let mut writer = FileWriter::new(&self.core.attach(&file)).await.map_err(io)?;
        let mut copied = 0;
        let write = async |piece: &[u8]| {
            copied += piece.len() as u64;
            writer.append(piece).await.map(|()| copied).map_err(io)
        };
        let sum = self.read((from, name), bytes, write).await?.and(footer);
        writer.append(footer).await.map_err(io)?;
        writer.finish().await.map_err(io)?;
        self.skip(sum.bytes);
        Ok(sum)
    }

    /// Reads a file for its checksum. Suspends for the disk.
    pub(crate) async fn sum(&mut self, dir: &Dir, name: &str) -> Result<Sum> {
        self.read((dir, name), None, async |_| Ok(0)).await
    }

    /// The checksum of what [`Transfer::copy_part`] writes.
    pub(crate) async fn sum_part(
        &mut self,
        dir: &Dir,
        name: &str,
        (bytes, footer): (Option<u64>, &[u8]),
    ) -> Result<Sum> {
        Ok(self.read((dir, name), bytes, async |_| Ok(0)).await?.and(footer))
    }

    /// Reads a file, or its first `bytes`. `each` returns how many bytes it has copied so far.
    async fn read(
        &mut self,
        (dir, name): (&Dir, &str),
        bytes: Option<u64>,
        mut each: impl AsyncFnMut(&[u8]) -> Result<u64>,
    ) -> Result<Sum> {
        let io = |e: std::io::Error| Error::io(dir.path().join(name).display(), &e);
        let shared = dir.open(name).await.map_err(io)?;
        let file = self.core.attach(&shared);
        let bytes = bytes.unwrap_or(shared.size());
        if shared.size() < bytes {
            let place = dir.path().join(name);
            let what = format!("{} bytes long, expected {bytes}", shared.size());
            return Err(Error::new(Kind::Corruption, format!("{}: {what}", place.display())));
        }
        let mut crc32c = crc32c_append(0, &[]);
        let mut offset = 0;
        let mut ahead: Option<fs::Reading> = None;
        while offset < bytes {
            let len = (bytes - offset).min(PIECE) as usize;
            let piece = match ahead.take() {
                Some(reading) => reading.await,
                None => fs::read(&file, offset, len).await,
            };
            let piece = piece.map_err(io)?;
            offset += len as u64;
            if offset < bytes {
                let len = (bytes - offset).min(PIECE) as usize;
                ahead = fs::start_read(&file, offset, len).map_err(io)?;
            }
            crc32c = crc32c_append(crc32c, &piece);
            let copied = each(&piece).await?;
            self.note(len as u64, copied).await;
        }
        Ok(Sum { bytes, crc32c })
    }
}
