//! The same database for plain threads: each call waits until it is done.
//!
//! The types have the methods of those at the top of the crate, and share their documentation. A
//! thread that waits spins a moment and then sleeps. Do not call them from a task of an executor:
//! they would hold up its thread. [`blocking::Db`](Db) and [`Db`](crate::Db) can be made of each
//! other, for programs that have both tasks and threads.
//!
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let dir = tempfile::tempdir()?;
//! # let path = dir.path().join("db");
//! use millrace::blocking::Db;
//! use millrace::{Options, WriteBatch};
//!
//! let db = Db::open(&path)?;
//! db.put("a", "1")?;
//! db.merge("a", "2").unwrap_err(); // no merge operator
//! assert_eq!(db.get("a")?.unwrap(), "1");
//! assert_eq!(db.multi_get(["a", "b"])?.len(), 2);
//! let mut batch = WriteBatch::new();
//! batch.put("b", "2").put("c", "3");
//! db.write(batch)?;
//!
//! let before = db.snapshot()?;
//! db.delete("a")?;
//! db.delete_range("b".."c")?;
//! assert_eq!(db.range(..).count(), 1);
//! assert_eq!(before.get("a")?.unwrap(), "1");
//! assert_eq!(before.multi_get(["a"])?.len(), 1);
//! let backward: Vec<_> = before.range("b"..).rev().collect::<Result<_, _>>()?;
//! assert_eq!(backward[0].0, "c");
//! assert_eq!(before.prefix("a").count() + db.prefix("c").count(), 2);
//!
//! let mut transaction = db.transaction()?;
//! let seen = transaction.get("c")?.unwrap();
//! transaction.put("d", &seen).delete("c");
//! transaction.commit()?; // fails if somebody has written "c"
//! assert_eq!(db.get("d")?.unwrap(), "3");
//! db.delete("d")?;
//! db.put("c", "3")?;
//!
//! let users = db.create_column_family("users")?;
//! users.put("1", "Ada")?;
//! assert_eq!(users.get("1")?.unwrap(), "Ada");
//! assert_eq!(users.multi_get(["1"])?.len(), 1);
//! assert_eq!(users.range(..).count() + users.prefix("1").count(), 2);
//! assert!(before.get_in(&users, "1")?.is_none());
//! users.delete("1")?;
//! users.delete_range("1".."2")?;
//! users.compact_range(..)?;
//! assert_eq!(db.column_families()?, ["default", "users"]);
//! assert_eq!(db.column_family("users")?.name(), "users");
//! db.drop_column_family("users")?;
//!
//! db.sync()?;
//! db.flush()?;
//! db.compact_range(..)?;
//! db.checkpoint(dir.path().join("copy"))?;
//! let asynchronous: millrace::Db = db.clone().into();
//! assert_eq!(asynchronous.path(), db.path());
//! db.close()?;
//!
//! // Dropping the last handle of this kind waits for the end, too.
//! drop(Db::open_with(&Options::new().create(false), &path)?);
//! # Ok(())
//! # }
//! ```

mod wait;

use std::path::Path;

use crate::batch::WriteBatch;
use crate::bounds::KeyRange;
use crate::error::Result;
use crate::options::Options;
use crate::range::Entry;
use crate::value::Value;

pub(crate) use self::wait::block_on;
#[doc(inline)]
pub use ::client::blocking::Client;

/// An open database, for plain threads. See [`millrace::Db`](crate::Db) for what the methods do.
#[derive(Clone, Debug)]
pub struct Db(Option<crate::Db>);

/// A column family, for plain threads. See [`millrace::ColumnFamily`](crate::ColumnFamily).
#[derive(Clone, Debug)]
pub struct ColumnFamily(crate::ColumnFamily);

/// A snapshot, for plain threads. See [`millrace::Snapshot`](crate::Snapshot).
#[derive(Clone, Debug)]
pub struct Snapshot(crate::Snapshot);

/// An optimistic transaction, for plain threads. See [`millrace::Transaction`](crate::Transaction).
#[derive(Debug)]
pub struct Transaction(crate::Transaction);

/// The entries of a range, as an [`Iterator`]. See [`millrace::Range`](crate::Range).
#[must_use = "iterators do nothing unless used"]
#[derive(Debug)]
pub struct Range(crate::Range);

impl Db {
    /// See [`Db::open`](crate::Db::open).
    ///
    /// # Errors
    /// The same, as for all methods.
    pub fn open(path: impl AsRef<Path>) -> Result<Db> {
        Db::open_with(&Options::new(), path)
    }

    /// See [`Options::open`].
    ///
    /// # Errors
    /// The same.
    pub fn open_with(options: &Options, path: impl AsRef<Path>) -> Result<Db> {
        block_on(options.open(path)).map(Db::from)
    }

    fn db(&self) -> &crate::Db {
        self.0.as_ref().expect("it is taken by the drop only")
    }

    /// See [`Db::default_column_family`](crate::Db::default_column_family).
    pub fn default_column_family(&self) -> ColumnFamily {
        ColumnFamily(self.db().default_column_family().clone())
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        self.db().path()
    }

    /// See [`Db::stats`](crate::Db::stats).
    pub fn stats(&self) -> crate::Stats {
        self.db().stats()
    }

    /// See [`Db::get`](crate::Db::get).
    ///
    /// # Errors
    /// The same.
    pub fn get(&self, key: impl AsRef<[u8]>) -> Result<Option<Value>> {
        block_on(self.db().get(key))
    }

    /// See [`Db::multi_get`](crate::Db::multi_get).
    ///
    /// # Errors
    /// The same.
    pub fn multi_get<K: AsRef<[u8]>>(
        &self,
        keys: impl IntoIterator<Item = K>,
    ) -> Result<Vec<Option<Value>>> {
        block_on(self.db().multi_get(keys))
    }

    /// See [`Db::put`](crate::Db::put).
    ///
    /// # Errors
    /// The same.
    pub fn put(&self, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Result<()> {
        block_on(self.db().put(key, value))
    }

    /// See [`Db::delete`](crate::Db::delete).
    ///
    /// # Errors
    /// The same.
    pub fn delete(&self, key: impl AsRef<[u8]>) -> Result<()> {
        block_on(self.db().delete(key))
    }

    /// See [`Db::delete_range`](crate::Db::delete_range).
    ///
    /// # Errors
    /// The same.
    pub fn delete_range<K: AsRef<[u8]>>(&self, keys: std::ops::Range<K>) -> Result<()> {
        block_on(self.db().delete_range(keys))
    }

    /// See [`Db::merge`](crate::Db::merge).
    ///
    /// # Errors
    /// The same.
    pub fn merge(&self, key: impl AsRef<[u8]>, operand: impl AsRef<[u8]>) -> Result<()> {
        block_on(self.db().merge(key, operand))
    }

    /// See [`Db::write`](crate::Db::write).
    ///
    /// # Errors
    /// The same.
    pub fn write(&self, batch: WriteBatch) -> Result<()> {
        block_on(self.db().write(batch))
    }

    /// See [`Db::snapshot`](crate::Db::snapshot).
    ///
    /// # Errors
    /// The same.
    pub fn snapshot(&self) -> Result<Snapshot> {
        block_on(self.db().snapshot()).map(Snapshot)
    }

    /// See [`Db::transaction`](crate::Db::transaction).
    ///
    /// # Errors
    /// The same.
    pub fn transaction(&self) -> Result<Transaction> {
        block_on(self.db().transaction()).map(Transaction)
    }

    /// See [`Db::range`](crate::Db::range).
    pub fn range(&self, keys: impl KeyRange) -> Range {
        Range(self.db().range(keys))
    }

    /// See [`Db::prefix`](crate::Db::prefix).
    pub fn prefix(&self, prefix: impl AsRef<[u8]>) -> Range {
        Range(self.db().prefix(prefix))
    }

    /// See [`Db::column_families`](crate::Db::column_families).
    ///
    /// # Errors
    /// The same.
    pub fn column_families(&self) -> Result<Vec<String>> {
        block_on(self.db().column_families())
    }

    /// See [`Db::column_family`](crate::Db::column_family).
    ///
    /// # Errors
    /// The same.
    pub fn column_family(&self, name: &str) -> Result<ColumnFamily> {
        block_on(self.db().column_family(name)).map(ColumnFamily)
    }

    /// See [`Db::create_column_family`](crate::Db::create_column_family).
    ///
    /// # Errors
    /// The same.
    pub fn create_column_family(&self, name: &str) -> Result<ColumnFamily> {
        block_on(self.db().create_column_family(name)).map(ColumnFamily)
    }

    /// See [`Db::drop_column_family`](crate::Db::drop_column_family).
    ///
    /// # Errors
    /// The same.
    pub fn drop_column_family(&self, name: &str) -> Result<()> {
        block_on(self.db().drop_column_family(name))
    }

    /// See [`Db::checkpoint`](crate::Db::checkpoint).
    ///
    /// # Errors
    /// The same.
    pub fn checkpoint(&self, path: impl AsRef<Path>) -> Result<()> {
        block_on(self.db().checkpoint(path))
    }

    /// See [`Db::sync`](crate::Db::sync).
    ///
    /// # Errors
    /// The same.
    pub fn sync(&self) -> Result<()> {
        block_on(self.db().sync())
    }

    /// See [`Db::flush`](crate::Db::flush).
    ///
    /// # Errors
    /// The same.
    pub fn flush(&self) -> Result<()> {
        block_on(self.db().flush())
    }

    /// See [`Db::compact_range`](crate::Db::compact_range).
    ///
    /// # Errors
    /// The same.
    pub fn compact_range(&self, keys: impl KeyRange) -> Result<()> {
        block_on(self.db().compact_range(keys))
    }

    /// See [`Db::close`](crate::Db::close).
    ///
    /// # Errors
    /// The same.
    pub fn close(&self) -> Result<()> {
        block_on(self.db().close())
    }
}

/// Waits for the end if this was the last handle.
impl Drop for Db {
    fn drop(&mut self) {
        if let Some(db) = self.0.take() {
            let shared = db.engine().shared.clone();
            drop(db);
            if shared.is_stopping() && shared.is_here() {
                let _how = block_on(shared.end());
            }
        }
    }
}

impl From<crate::Db> for Db {
    fn from(db: crate::Db) -> Db {
        Db(Some(db))
    }
}

impl From<Db> for crate::Db {
    fn from(db: Db) -> crate::Db {
        db.db().clone()
    }
}

impl ColumnFamily {
    /// Its name.
    pub fn name(&self) -> &str {
        self.0.name()
    }

    /// See [`Db::get`](crate::Db::get).
    ///
    /// # Errors
    /// The same.
    pub fn get(&self, key: impl AsRef<[u8]>) -> Result<Option<Value>> {
        block_on(self.0.get(key))
    }

    /// See [`Db::multi_get`](crate::Db::multi_get).
    ///
    /// # Errors
    /// The same.
    pub fn multi_get<K: AsRef<[u8]>>(
        &self,
        keys: impl IntoIterator<Item = K>,
    ) -> Result<Vec<Option<Value>>> {
        block_on(self.0.multi_get(keys))
    }

    /// See [`Db::put`](crate::Db::put).
    ///
    /// # Errors
    /// The same.
    pub fn put(&self, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Result<()> {
        block_on(self.0.put(key, value))
    }

    /// See [`Db::delete`](crate::Db::delete).
    ///
    /// # Errors
    /// The same.
    pub fn delete(&self, key: impl AsRef<[u8]>) -> Result<()> {
        block_on(self.0.delete(key))
    }

    /// See [`Db::delete_range`](crate::Db::delete_range).
    ///
    /// # Errors
    /// The same.
    pub fn delete_range<K: AsRef<[u8]>>(&self, keys: std::ops::Range<K>) -> Result<()> {
        block_on(self.0.delete_range(keys))
    }

    /// See [`Db::merge`](crate::Db::merge).
    ///
    /// # Errors
    /// The same.
    pub fn merge(&self, key: impl AsRef<[u8]>, operand: impl AsRef<[u8]>) -> Result<()> {
        block_on(self.0.merge(key, operand))
    }

    /// See [`Db::range`](crate::Db::range).
    pub fn range(&self, keys: impl KeyRange) -> Range {
        Range(self.0.range(keys))
    }

    /// See [`Db::prefix`](crate::Db::prefix).
    pub fn prefix(&self, prefix: impl AsRef<[u8]>) -> Range {
        Range(self.0.prefix(prefix))
    }

    /// See [`Db::compact_range`](crate::Db::compact_range).
    ///
    /// # Errors
    /// The same.
    pub fn compact_range(&self, keys: impl KeyRange) -> Result<()> {
        block_on(self.0.compact_range(keys))
    }
}

/// For the methods of [`WriteBatch`] and [`Snapshot`](crate::Snapshot) that take a column family.
impl AsRef<crate::ColumnFamily> for ColumnFamily {
    fn as_ref(&self) -> &crate::ColumnFamily {
        &self.0
    }
}

impl Snapshot {
    /// See [`Snapshot::get`](crate::Snapshot::get).
    ///
    /// # Errors
    /// The same.
    pub fn get(&self, key: impl AsRef<[u8]>) -> Result<Option<Value>> {
        block_on(self.0.get(key))
    }

    /// See [`Snapshot::get_in`](crate::Snapshot::get_in).
    ///
    /// # Errors
    /// The same.
    pub fn get_in(&self, family: &ColumnFamily, key: impl AsRef<[u8]>) -> Result<Option<Value>> {
        block_on(self.0.get_in(family, key))
    }

    /// See [`Snapshot::multi_get`](crate::Snapshot::multi_get).
    ///
    /// # Errors
    /// The same.
    pub fn multi_get<K: AsRef<[u8]>>(
        &self,
        keys: impl IntoIterator<Item = K>,
    ) -> Result<Vec<Option<Value>>> {
        block_on(self.0.multi_get(keys))
    }

    /// See [`Snapshot::multi_get_in`](crate::Snapshot::multi_get_in).
    ///
    /// # Errors
    /// The same.
    pub fn multi_get_in<K: AsRef<[u8]>>(
        &self,
        family: &ColumnFamily,
        keys: impl IntoIterator<Item = K>,
    ) -> Result<Vec<Option<Value>>> {
        block_on(self.0.multi_get_in(family, keys))
    }

    /// See [`Db::range`](crate::Db::range).
    pub fn range(&self, keys: impl KeyRange) -> Range {
        Range(self.0.range(keys))
    }

    /// See [`Db::range`](crate::Db::range).
    pub fn range_in(&self, family: &ColumnFamily, keys: impl KeyRange) -> Range {
        Range(self.0.range_in(family, keys))
    }

    /// See [`Db::prefix`](crate::Db::prefix).
    pub fn prefix(&self, prefix: impl AsRef<[u8]>) -> Range {
        Range(self.0.prefix(prefix))
    }

    /// See [`Db::prefix`](crate::Db::prefix).
    pub fn prefix_in(&self, family: &ColumnFamily, prefix: impl AsRef<[u8]>) -> Range {
        Range(self.0.prefix_in(family, prefix))
    }
}

impl Transaction {
    /// See [`Transaction::get`](crate::Transaction::get).
    ///
    /// # Errors
    /// The same.
    pub fn get(&mut self, key: impl AsRef<[u8]>) -> Result<Option<Value>> {
        block_on(self.0.get(key))
    }

    /// See [`Transaction::get_in`](crate::Transaction::get_in).
    ///
    /// # Errors
    /// The same.
    pub fn get_in(
        &mut self,
        family: &ColumnFamily,
        key: impl AsRef<[u8]>,
    ) -> Result<Option<Value>> {
        block_on(self.0.get_in(family, key))
    }

    /// See [`Transaction::multi_get`](crate::Transaction::multi_get).
    ///
    /// # Errors
    /// The same.
    pub fn multi_get<K: AsRef<[u8]>>(
        &mut self,
        keys: impl IntoIterator<Item = K>,
    ) -> Result<Vec<Option<Value>>> {
        block_on(self.0.multi_get(keys))
    }

    /// See [`Transaction::multi_get_in`](crate::Transaction::multi_get_in).
    ///
    /// # Errors
    /// The same.
    pub fn multi_get_in<K: AsRef<[u8]>>(
        &mut self,
        family: &ColumnFamily,
        keys: impl IntoIterator<Item = K>,
    ) -> Result<Vec<Option<Value>>> {
        block_on(self.0.multi_get_in(family, keys))
    }

    /// Sets a key.
    pub fn put(&mut self, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> &mut Transaction {
        self.0.put(key, value);
        self
    }

    /// Deletes a key.
    pub fn delete(&mut self, key: impl AsRef<[u8]>) -> &mut Transaction {
        self.0.delete(key);
        self
    }

    /// Sets a key of a column family.
    pub fn put_in(
        &mut self,
        family: &ColumnFamily,
        key: impl AsRef<[u8]>,
        value: impl AsRef<[u8]>,
    ) -> &mut Transaction {
        self.0.put_in(family, key, value);
        self
    }

    /// Deletes a key of a column family.
    pub fn delete_in(&mut self, family: &ColumnFamily, key: impl AsRef<[u8]>) -> &mut Transaction {
        self.0.delete_in(family, key);
        self
    }

    /// See [`Transaction::snapshot`](crate::Transaction::snapshot).
    pub fn snapshot(&self) -> Snapshot {
        Snapshot(self.0.snapshot().clone())
    }

    /// See [`Transaction::commit`](crate::Transaction::commit).
    ///
    /// # Errors
    /// The same.
    pub fn commit(self) -> Result<()> {
        block_on(self.0.commit())
    }
}

impl Range {
    /// The same range from its last key to its first.
    ///
    /// # Panics
    /// If an entry was taken before.
    pub fn rev(self) -> Range {
        Range(self.0.rev())
    }
}

impl Iterator for Range {
    type Item = Result<Entry>;

    fn next(&mut self) -> Option<Result<Entry>> {
        block_on(self.0.next())
    }
}
