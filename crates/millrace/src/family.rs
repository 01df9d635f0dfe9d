//! Column families.

use std::fmt;
use std::sync::Arc;

use lsm::CfId;

use crate::batch::WriteBatch;
use crate::bounds::{self, KeyRange};
use crate::engine::Engine;
use crate::error::{Error, ErrorKind, Result};
use crate::range::Range;
use crate::request::Write;
use crate::value::Value;

/// The error of a call that is given a column family of another database, or of an earlier opening.
#[cold]
pub(crate) fn foreign() -> Error {
    Error::new(ErrorKind::Unsupported, "the column family is of another open database")
}

/// A column family of an open database: a key space of its own. Cheap to clone.
///
/// It has the operations of [`Db`](crate::Db), which are those of the default family. Batches may
/// have writes to several families: [`WriteBatch::put_in`].
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let dir = tempfile::tempdir()?;
/// # let db = millrace::Db::open(dir.path()).await?;
/// let users = db.create_column_family("users").await?;
/// users.put("1", "Ada").await?;
/// users.put("2", "Brian").await?;
/// assert_eq!(users.get("1").await?.unwrap(), "Ada");
/// assert_eq!(users.multi_get(["2", "3"]).await?.iter().flatten().count(), 1);
/// assert!(db.get("1").await?.is_none());
///
/// let mut range = users.range("2"..);
/// assert_eq!(range.next().await.unwrap()?, ("2".into(), "Brian".into()));
///
/// users.delete("1").await?;
/// users.delete_range("2".."3").await?;
/// users.compact_range(..).await?;
/// assert!(users.prefix("").next().await.is_none());
/// assert_eq!(users.name(), "users");
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct ColumnFamily {
    pub(crate) engine: Arc<Engine>,
    pub(crate) id: CfId,
    pub(crate) name: Arc<str>,
}

impl ColumnFamily {
    pub(crate) fn new(engine: &Arc<Engine>, id: CfId, name: &str) -> ColumnFamily {
        ColumnFamily { engine: engine.clone(), id, name: name.into() }
    }

    /// Its id in a database.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if it is of another one.
    pub(crate) fn id_in(&self, engine: &Engine) -> Result<CfId> {
        match std::ptr::eq(&*self.engine, engine) {
            true => Ok(self.id),
            false => Err(foreign()),
        }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// See [`Db::get`](crate::Db::get).
    ///
    /// # Errors
    /// The same.
    pub async fn get(&self, key: impl AsRef<[u8]>) -> Result<Option<Value>> {
        self.engine.get(self.id, key.as_ref(), None).await
    }

    /// See [`Db::multi_get`](crate::Db::multi_get).
    ///
    /// # Errors
    /// The same.
    pub async fn multi_get<K: AsRef<[u8]>>(
        &self,
        keys: impl IntoIterator<Item = K>,
    ) -> Result<Vec<Option<Value>>> {
        let keys = keys.into_iter().map(|key| key.as_ref().into()).collect();
        self.engine.multi_get(self.id, keys, None).await
    }

    /// See [`Db::put`](crate::Db::put).
    ///
    /// # Errors
    /// The same.
    pub async fn put(&self, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Result<()> {
        self.write(|batch| batch.put_at(self.id, key.as_ref(), value.as_ref())).await
    }

    /// See [`Db::delete`](crate::Db::delete).
    ///
    /// # Errors
    /// The same.
    pub async fn delete(&self, key: impl AsRef<[u8]>) -> Result<()> {
        self.write(|batch| batch.delete_at(self.id, key.as_ref())).await
    }

    /// See [`Db::delete_range`](crate::Db::delete_range).
    ///
    /// # Errors
    /// The same.
    pub async fn delete_range<K: AsRef<[u8]>>(&self, keys: std::ops::Range<K>) -> Result<()> {
        let (start, end) = (keys.start.as_ref(), keys.end.as_ref());
        self.write(|batch| batch.delete_range_at(self.id, start, end)).await
    }

    /// See [`Db::merge`](crate::Db::merge).
    ///
    /// # Errors
    /// The same.
    pub async fn merge(&self, key: impl AsRef<[u8]>, operand: impl AsRef<[u8]>) -> Result<()> {
        self.write(|batch| batch.merge_at(self.id, key.as_ref(), operand.as_ref())).await
    }

    /// See [`Db::range`](crate::Db::range).
    pub fn range(&self, keys: impl KeyRange) -> Range {
        Range::new(&self.engine, self.id, bounds::limits(keys), None)
    }

    /// See [`Db::prefix`](crate::Db::prefix).
    pub fn prefix(&self, prefix: impl AsRef<[u8]>) -> Range {
        Range::new(&self.engine, self.id, bounds::prefix(prefix.as_ref()), None)
    }

    /// See [`Db::compact_range`](crate::Db::compact_range).
    ///
    /// # Errors
    /// The same.
    pub async fn compact_range(&self, keys: impl KeyRange) -> Result<()> {
        let (family, limits) = (self.id, bounds::limits(keys));
        self.engine.administer(|back| Write::Compact { family, limits, back }).await
    }

    async fn write(&self, fill: impl FnOnce(&mut WriteBatch) -> &mut WriteBatch) -> Result<()> {
        let mut batch = WriteBatch::new();
        fill(&mut batch);
        self.engine.write(batch).await
    }
}

/// So that batches and snapshots take this type and the one of [`blocking`](crate::blocking).
impl AsRef<ColumnFamily> for ColumnFamily {
    fn as_ref(&self) -> &ColumnFamily {
        self
    }
}

impl fmt::Debug for ColumnFamily {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ColumnFamily").field("name", &self.name).finish_non_exhaustive()
    }
}
