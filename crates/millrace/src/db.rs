//! The database, for asynchronous callers.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use reactor::reply::{Unanswered, reply};

use crate::batch::WriteBatch;
use crate::bounds::KeyRange;
use crate::engine::Engine;
use crate::error::{Error, ErrorKind, Result};
use crate::family::ColumnFamily;
use crate::options::Options;
use crate::range::Range;
use crate::request::Write;
use crate::shared;
use crate::snapshot::Snapshot;
use crate::stats::Stats;
use crate::transaction::Transaction;
use crate::value::Value;

/// An open database.
///
/// Clones are the same database, cheap, and may be used from any thread. When the last one is
/// dropped (with all [`ColumnFamily`], [`Snapshot`] and [`Range`] values) the database is closed in
/// the background; [`Db::close`] also waits for the end.
///
/// **Dropping a future** of any method is safe at any time. The operation was either not begun, or
/// goes on to its end without its caller.
///
/// **Order**: a call sees everything that was acknowledged before it began. Writes that are under
/// way at the same time have any order.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let dir = tempfile::tempdir()?;
/// # let path = dir.path();
/// use millrace::Db;
///
/// let db = Db::open(path).await?;
/// db.put("hello", "world").await?;
/// assert_eq!(db.get("hello").await?.unwrap(), "world");
/// assert!(db.get("goodbye").await?.is_none());
/// db.close().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Db {
    /// The default column family.
    family: ColumnFamily,
}

impl Db {
    /// Opens the database in a directory with the default [`Options`]. Database and directory are
    /// created if they do not exist. Acknowledged writes survive a power cut.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// # let path = dir.path().join("a/b");
    /// use millrace::{Db, ErrorKind};
    ///
    /// let db = Db::open(&path).await?;
    /// assert_eq!(Db::open(&path).await.unwrap_err().kind(), ErrorKind::Locked);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As for [`Options::open`].
    pub async fn open(path: impl AsRef<Path>) -> Result<Db> {
        Options::new().open(path).await
    }

    pub(crate) async fn start(options: &Options, path: &Path) -> Result<Db> {
        let (opener, outcome) = reply();
        shared::start(options, path, opener)?;
        let engine = outcome.await.unwrap_or_else(|Unanswered| {
            let text = "a thread of the database panicked while it was opened";
            Err(Error::new(ErrorKind::Panicked, text))
        })?;
        Ok(Db { family: ColumnFamily::new(&Arc::new(engine), 0, "default") })
    }

    /// The default column family, as a value like the others.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// # let db = millrace::Db::open(dir.path()).await?;
    /// db.default_column_family().put("k", "v").await?;
    /// assert_eq!(db.get("k").await?.unwrap(), "v");
    /// # Ok(())
    /// # }
    /// ```
    pub fn default_column_family(&self) -> &ColumnFamily {
        &self.family
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.family.engine.shared.path
    }

    /// Looks up a key. `None`: there is no such key. If the blocks are in memory, the answer needs
    /// no system call.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// # let db = millrace::Db::open(dir.path()).await?;
    /// db.put([0, 1], [2, 3]).await?;
    /// let value = db.get([0, 1]).await?.unwrap();
    /// assert_eq!(value.len(), 2);
    /// assert_eq!(value, [2, 3]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Corruption`] and [`ErrorKind::Io`], which name file and offset;
    /// [`ErrorKind::Memory`] for a value that does not fit into the memory; after the end of the
    /// database [`ErrorKind::Closed`] or [`ErrorKind::Panicked`], as from all calls.
    pub async fn get(&self, key: impl AsRef<[u8]>) -> Result<Option<Value>> {
        self.family.get(key).await
    }

    /// Looks up many keys, and reads all blocks that are not in memory at the same time. The
    /// answers are in the order of the keys, and each may be of another moment; see
    /// [`Snapshot::multi_get`].
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// # let db = millrace::Db::open(dir.path()).await?;
    /// db.put("b", "2").await?;
    /// let values = db.multi_get(["a", "b"]).await?;
    /// assert_eq!(values, [None, Some("2".into())]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As for [`Db::get`], if any of the keys cannot be read.
    pub async fn multi_get<K: AsRef<[u8]>>(
        &self,
        keys: impl IntoIterator<Item = K>,
    ) -> Result<Vec<Option<Value>>> {
        self.family.multi_get(keys).await
    }

    /// Sets a key. As all writes, it is acknowledged when it is visible to everybody and as durable
    /// as [`Options::durability`] says. Writes of concurrent callers share the log's flushes.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// # let db = millrace::Db::open(dir.path()).await?;
    /// db.put("key", "old").await?;
    /// db.put("key", "new").await?;
    /// assert_eq!(db.get("key").await?.unwrap(), "new");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// - [`ErrorKind::Full`] if the disk is full: nothing was written.
    /// - [`ErrorKind::Io`] if the log failed. The write is not visible, and may be there after the
    ///   next opening unless a later one succeeded.
    /// - [`ErrorKind::Memory`] for more than 256 MiB.
    pub async fn put(&self, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Result<()> {
        self.family.put(key, value).await
    }

    /// Deletes a key, whether it exists or not.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// # let db = millrace::Db::open(dir.path()).await?;
    /// db.put("key", "value").await?;
    /// db.delete("key").await?;
    /// assert!(db.get("key").await?.is_none());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As for [`Db::put`].
    pub async fn delete(&self, key: impl AsRef<[u8]>) -> Result<()> {
        self.family.delete(key).await
    }

    /// Deletes all keys from the start of a range to before its end, with one write.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// # let db = millrace::Db::open(dir.path()).await?;
    /// db.put("user:1", "Ada").await?;
    /// db.delete_range("user:".."user;").await?;
    /// assert!(db.get("user:1").await?.is_none());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As for [`Db::put`]; [`ErrorKind::Unsupported`] if the end comes before the start.
    pub async fn delete_range<K: AsRef<[u8]>>(&self, keys: std::ops::Range<K>) -> Result<()> {
        self.family.delete_range(keys).await
    }

    /// Adds an operand to a key, which the database's merge operator combines with its value when
    /// it is read.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// # let path = dir.path();
    /// use millrace::{MergeOperator, Options};
    ///
    /// let db = Options::new().merge_operator(MergeOperator::UInt64Add).open(path).await?;
    /// db.merge("visits", 1_u64.to_le_bytes()).await?;
    /// db.merge("visits", 1_u64.to_le_bytes()).await?;
    /// assert_eq!(db.get("visits").await?.unwrap(), 2_u64.to_le_bytes());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As for [`Db::put`]; [`ErrorKind::Unsupported`] without a merge operator.
    pub async fn merge(&self, key: impl AsRef<[u8]>, operand: impl AsRef<[u8]>) -> Result<()> {
        self.family.merge(key, operand).await
    }

    /// Writes a batch, all of it or nothing; see [`WriteBatch`] for an example.
    ///
    /// # Errors
    /// As for [`Db::put`].
    pub async fn write(&self, batch: WriteBatch) -> Result<()> {
        self.family.engine.write(batch).await
    }

    /// Takes a snapshot of the present state; see [`Snapshot`] for an example.
    ///
    /// # Errors
    /// [`ErrorKind::Expired`] if too many are held.
    pub async fn snapshot(&self) -> Result<Snapshot> {
        let engine = &self.family.engine;
        Ok(Snapshot::new(engine, engine.snapshot().await?.0))
    }

    /// Begins an optimistic transaction, which reads the present state; see [`Transaction`] for an
    /// example.
    ///
    /// # Errors
    /// As for [`Db::snapshot`], of which it holds one.
    pub async fn transaction(&self) -> Result<Transaction> {
        let engine = &self.family.engine;
        let (handle, sequence) = engine.snapshot().await?;
        Ok(Transaction::new(Snapshot::new(engine, handle), sequence))
    }

    /// The entries of a range of keys, in their order, as a stream: `a..b`, `a..=b`, `a..`, `..b`,
    /// `..`. With [`Range::rev`] from the last to the first.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// # let db = millrace::Db::open(dir.path()).await?;
    /// use futures_lite::StreamExt;
    ///
    /// for key in ["a", "b", "c"] {
    ///     db.put(key, "v").await?;
    /// }
    /// let entries: Vec<millrace::Entry> = db.range("a"..="b").try_collect().await?;
    /// assert_eq!(entries.len(), 2);
    /// # Ok(())
    /// # }
    /// ```
    pub fn range(&self, keys: impl KeyRange) -> Range {
        self.family.range(keys)
    }

    /// The entries whose keys begin with a prefix, in their order.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// # let db = millrace::Db::open(dir.path()).await?;
    /// db.put("user:1", "Ada").await?;
    /// db.put("visits", "7").await?;
    /// let mut users = db.prefix("user:");
    /// assert_eq!(users.next().await.unwrap()?.1, "Ada");
    /// assert!(users.next().await.is_none());
    /// # Ok(())
    /// # }
    /// ```
    pub fn prefix(&self, prefix: impl AsRef<[u8]>) -> Range {
        self.family.prefix(prefix)
    }

    /// The names of all column families, the default one first.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// # let db = millrace::Db::open(dir.path()).await?;
    /// db.create_column_family("users").await?;
    /// assert_eq!(db.column_families().await?, ["default", "users"]);
    /// db.column_family("users").await?.put("1", "Ada").await?;
    /// db.drop_column_family("users").await?;
    /// assert!(db.column_family("users").await.is_err());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Only after the end of the database.
    pub async fn column_families(&self) -> Result<Vec<String>> {
        self.family.engine.administer(|back| Write::ListFamilies { back }).await
    }

    /// The column family with a name.
    ///
    /// # Errors
    /// [`ErrorKind::UnknownColumnFamily`]; [`ErrorKind::Unsupported`] if it cannot be served.
    pub async fn column_family(&self, name: &str) -> Result<ColumnFamily> {
        let owned = name.to_owned();
        let engine = &self.family.engine;
        let id = engine.administer(|back| Write::FindFamily { name: owned, back }).await?;
        Ok(ColumnFamily::new(engine, id, name))
    }

    /// Creates a column family. It is durable when this returns.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if there is one of that name; as for [`Db::put`].
    pub async fn create_column_family(&self, name: &str) -> Result<ColumnFamily> {
        let owned = name.to_owned();
        let engine = &self.family.engine;
        let id = engine.administer(|back| Write::CreateFamily { name: owned, back }).await?;
        Ok(ColumnFamily::new(engine, id, name))
    }

    /// Drops a column family with everything in it. Ranges that are being read may end with
    /// [`ErrorKind::UnknownColumnFamily`]; all other
    /// calls of it fail from now on.
    ///
    /// # Errors
    /// [`ErrorKind::UnknownColumnFamily`]; [`ErrorKind::Unsupported`] for the default family; as
    /// for [`Db::put`].
    pub async fn drop_column_family(&self, name: &str) -> Result<()> {
        let name = name.to_owned();
        self.family.engine.administer(|back| Write::DropFamily { name, back }).await
    }

    /// Makes a checkpoint in a new directory: the database as it is now, as hard links where the
    /// file system allows. It can be opened as a database.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// # let db = millrace::Db::open(dir.path().join("db")).await?;
    /// # let copy = dir.path().join("copy");
    /// use millrace::Db;
    ///
    /// db.put("key", "value").await?;
    /// db.checkpoint(&copy).await?;
    /// assert_eq!(Db::open(&copy).await?.get("key").await?.unwrap(), "value");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the directory exists and is not empty; the disk's errors.
    pub async fn checkpoint(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref().to_owned();
        self.family.engine.administer(|back| Write::Checkpoint { path, back }).await
    }

    /// Makes everything that was acknowledged before survive a power cut: of use with
    /// [`Durability::Process`](crate::Durability::Process).
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// # let path = dir.path();
    /// use millrace::{Durability, Options};
    ///
    /// let db = Options::new().durability(Durability::Process).open(path).await?;
    /// for n in 0..100_u32 {
    ///     db.put(n.to_be_bytes(), "fast").await?;
    /// }
    /// db.sync().await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As for [`Db::put`].
    pub async fn sync(&self) -> Result<()> {
        self.family.engine.administer(|back| Write::Sync { back }).await
    }

    /// Writes all memtables to tables. Not needed for durability: it makes the next opening faster,
    /// and a checkpoint smaller.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// # let db = millrace::Db::open(dir.path()).await?;
    /// db.put("key", "value").await?;
    /// db.flush().await?;
    /// db.compact_range(..).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As for [`Db::put`].
    pub async fn flush(&self) -> Result<()> {
        self.family.engine.administer(|back| Write::Flush { back }).await
    }

    /// Compacts a range of the default column family into its deepest level. What is still in
    /// memtables is not part of it; see [`Db::flush`].
    ///
    /// # Errors
    /// [`ErrorKind::Full`] or [`ErrorKind::Memory`] if there is no space or memory for it;
    /// [`ErrorKind::Closed`] if the database is closed meanwhile.
    pub async fn compact_range(&self, keys: impl KeyRange) -> Result<()> {
        self.family.compact_range(keys).await
    }

    /// Closes the database for all handles: what was sent before is done, later calls fail with
    /// [`ErrorKind::Closed`]. Returns when its threads have ended and its lock is released. A
    /// second call waits for the same end.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// # let db = millrace::Db::open(dir.path()).await?;
    /// use millrace::ErrorKind;
    ///
    /// let other = db.clone();
    /// db.close().await?;
    /// assert_eq!(other.get("key").await.unwrap_err().kind(), ErrorKind::Closed);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The error that ended all writing earlier, if one did. The database is closed all the same.
    pub async fn close(&self) -> Result<()> {
        let shared = self.family.engine.shared.clone();
        if !shared.is_here() {
            return Err(shared.no_answer());
        }
        shared.stop();
        shared.end().await
    }

    /// Counters since the opening.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// # let db = millrace::Db::open(dir.path()).await?;
    /// db.put("key", "value").await?;
    /// db.get("key").await?;
    /// assert_eq!(db.stats().gets_by_caller, 1);
    /// # Ok(())
    /// # }
    /// ```
    pub fn stats(&self) -> Stats {
        self.family.engine.stats()
    }

    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.family.engine
    }
}

impl fmt::Debug for Db {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Db").field("path", &self.path()).finish_non_exhaustive()
    }
}
