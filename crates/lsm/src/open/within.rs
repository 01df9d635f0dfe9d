//! A database of our own within the directory of another one.

use crate::db::Db;
use crate::error::{Error, Kind, Result};
use crate::options::{OpenOptions, WriteOptions};
use crate::write::writer::Writer;

/// The name of the directory of a database within that of another one: of the deadlines of its
/// keys.
pub const WITHIN: &str = "millrace-expiry";

impl Writer {
    /// Opens a database in the directory [`WITHIN`] of this one, for what belongs to it, with the
    /// same durability and a part of its memory: a quarter of its memtables, which are smaller from
    /// then on, and a sixteenth of its cache and its memory for tables. Of memtables and each
    /// core's cache that is at least 1 MiB, and at most 16 and 4 MiB. `None` if it does not exist,
    /// unless it is to be created. It is a part of copies of this database if a forerunner lists
    /// its files ([`Forerunner::live_files`](crate::Forerunner::live_files)).
    ///
    /// # Errors
    /// As [`Db::open_for_writing`].
    pub async fn open_within(&self, create: bool) -> Result<Option<(Db, Writer)>> {
        let (state, all) = (&*self.0, self.0.db.options());
        let lent_bytes = (state.options.memtable_bytes / 4).min(16 << 20);
        let reading = OpenOptions {
            cache_bytes: (all.cache_bytes / 16).clamp(1 << 20, 4 << 20),
            memory_bytes: all.memory_bytes / 16,
            recovered_bytes: (all.recovered_bytes / 16).max(2 << 20),
            verify_checksums: all.verify_checksums,
            ..OpenOptions::default()
        };
        let writing = WriteOptions {
            durability: state.options.durability,
            create,
            memtable_bytes: lent_bytes.max(1 << 20),
            ..WriteOptions::default()
        };
        let path = state.db.path().join(WITHIN);
        if create {
            // Its name must be as durable as what is written there.
            match state.core.create_dir(&path).await {
                Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                    return Err(Error::io(
                        format_args!("cannot create {}", path.display()),
                        &error,
                    ));
                }
                _ => {}
            }
            let io = |error| {
                Error::io(format_args!("cannot sync {}", state.dir.path().display()), &error)
            };
            state.dir.sync().await.map_err(io)?;
        }
        match Db::open_for_writing(&state.core, &path, reading, writing).await {
            Ok(opened) => {
                state.lent_memtable_bytes.set(lent_bytes);
                Ok(Some(opened))
            }
            Err(error) if error.kind() == Kind::NoDatabase => Ok(None),
            Err(error) => Err(error),
        }
    }
}
