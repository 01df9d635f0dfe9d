//! Snapshots.

use std::fmt;
use std::sync::Arc;

use lsm::CfId;

use crate::bounds::{self, KeyRange, Limits};
use crate::engine::Engine;
use crate::error::Result;
use crate::family::ColumnFamily;
use crate::range::Range;
use crate::request::Handle;
use crate::value::Value;

/// The state of a database at one moment, in all column families; see
/// [`Db::snapshot`](crate::Db::snapshot). Cheap to clone; dropping the last clone releases it.
///
/// A snapshot keeps old values on the disk, so it expires after an hour: reads of it then fail
/// with [`ErrorKind::Expired`](crate::ErrorKind::Expired). About a thousand may be held for each
/// core.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let dir = tempfile::tempdir()?;
/// # let db = millrace::Db::open(dir.path()).await?;
/// # let users = db.create_column_family("users").await?;
/// db.put("a", "old").await?;
/// users.put("1", "Ada").await?;
/// let before = db.snapshot().await?;
/// db.put("a", "new").await?;
/// users.delete("1").await?;
///
/// assert_eq!(before.get("a").await?.unwrap(), "old");
/// assert_eq!(before.multi_get(["a", "b"]).await?, [Some("old".into()), None]);
/// assert_eq!(before.range(..).next().await.unwrap()?.1, "old");
/// assert_eq!(before.prefix("a").next().await.unwrap()?.1, "old");
/// assert_eq!(before.get_in(&users, "1").await?.unwrap(), "Ada");
/// assert_eq!(before.multi_get_in(&users, ["1"]).await?.len(), 1);
/// assert!(before.range_in(&users, ..).next().await.is_some());
/// assert!(before.prefix_in(&users, "1").next().await.is_some());
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Snapshot {
    engine: Arc<Engine>,
    handle: Arc<Handle>,
}

impl Snapshot {
    pub(crate) fn new(engine: &Arc<Engine>, handle: Handle) -> Snapshot {
        Snapshot { engine: engine.clone(), handle: Arc::new(handle) }
    }

    /// Looks up a key; see [`Db::get`](crate::Db::get).
    ///
    /// # Errors
    /// The same; [`ErrorKind::Expired`](crate::ErrorKind::Expired) after an hour.
    pub async fn get(&self, key: impl AsRef<[u8]>) -> Result<Option<Value>> {
        self.get_at(0, key.as_ref()).await
    }

    /// Looks up a key of a column family.
    ///
    /// # Errors
    /// As for [`Snapshot::get`].
    pub async fn get_in(
        &self,
        family: &impl AsRef<ColumnFamily>,
        key: impl AsRef<[u8]>,
    ) -> Result<Option<Value>> {
        self.get_at(family.as_ref().id_in(&self.engine)?, key.as_ref()).await
    }

    /// Looks up many keys; see [`Db::multi_get`](crate::Db::multi_get).
    ///
    /// # Errors
    /// As for [`Snapshot::get`].
    pub async fn multi_get<K: AsRef<[u8]>>(
        &self,
        keys: impl IntoIterator<Item = K>,
    ) -> Result<Vec<Option<Value>>> {
        let keys = keys.into_iter().map(|key| key.as_ref().into()).collect();
        self.multi_get_at(0, keys).await
    }

    /// Looks up many keys of a column family.
    ///
    /// # Errors
    /// As for [`Snapshot::get`].
    pub async fn multi_get_in<K: AsRef<[u8]>>(
        &self,
        family: &impl AsRef<ColumnFamily>,
        keys: impl IntoIterator<Item = K>,
    ) -> Result<Vec<Option<Value>>> {
        let keys = keys.into_iter().map(|key| key.as_ref().into()).collect();
        self.multi_get_at(family.as_ref().id_in(&self.engine)?, keys).await
    }

    pub(crate) async fn get_at(&self, family: CfId, key: &[u8]) -> Result<Option<Value>> {
        self.engine.get(family, key, Some(&self.handle)).await
    }

    pub(crate) async fn multi_get_at(
        &self,
        family: CfId,
        keys: Vec<Box<[u8]>>,
    ) -> Result<Vec<Option<Value>>> {
        self.engine.multi_get(family, keys, Some(&self.handle)).await
    }

    pub(crate) fn engine(&self) -> &Engine {
        &self.engine
    }

    /// If the family is of another database, the first entry is the error.
    fn range_of(&self, family: &ColumnFamily, limits: Limits) -> Range {
        let held = Some(self.handle.clone());
        match family.id_in(&self.engine) {
            Ok(id) => Range::new(&self.engine, id, limits, held),
            Err(error) => Range::refused(&self.engine, error),
        }
    }

    /// The entries of a range; see [`Db::range`](crate::Db::range).
    pub fn range(&self, keys: impl KeyRange) -> Range {
        Range::new(&self.engine, 0, bounds::limits(keys), Some(self.handle.clone()))
    }

    /// The entries of a range of a column family.
    pub fn range_in(&self, family: &impl AsRef<ColumnFamily>, keys: impl KeyRange) -> Range {
        self.range_of(family.as_ref(), bounds::limits(keys))
    }

    /// The entries whose keys have a prefix; see [`Db::prefix`](crate::Db::prefix).
    pub fn prefix(&self, prefix: impl AsRef<[u8]>) -> Range {
        let limits = bounds::prefix(prefix.as_ref());
        Range::new(&self.engine, 0, limits, Some(self.handle.clone()))
    }

    /// The entries of a column family whose keys have a prefix.
    pub fn prefix_in(&self, family: &impl AsRef<ColumnFamily>, prefix: impl AsRef<[u8]>) -> Range {
        self.range_of(family.as_ref(), bounds::prefix(prefix.as_ref()))
    }
}

impl fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Snapshot").finish_non_exhaustive()
    }
}
