//! Optimistic transactions.
//!
//! 1. [`Db::transaction`](crate::Db::transaction) takes a snapshot, with its sequence number.
//! 2. Reads are answered from the transaction's own writes, else at the snapshot; their keys are
//!    noted. Writes stay with the transaction.
//! 3. [`Transaction::commit`] sends the writes as one batch, with the noted keys. The engine
//!    decides in the order of the commits whether one of these was written after the snapshot
//!    (`lsm::Writer::submit_if`); if not, it writes the batch.
//!
//! **Why this is serializable**: nobody wrote what a transaction read between its snapshot and its
//! commit, so all that it read is still true when its writes become visible. The order of the
//! commits is therefore a serial order of the transactions. One without writes is in that order
//! where its snapshot was taken.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use lsm::{BatchWriter, CfId, Unwritten};

use crate::error::{Error, Result};
use crate::family::ColumnFamily;
use crate::snapshot::Snapshot;
use crate::value::Value;

type Key = (CfId, Box<[u8]>);

/// What each noted key costs beyond its bytes, roughly.
const KEY_BYTES: usize = 64;

/// Reads and writes that take effect together, as if nobody else had done anything meanwhile, or
/// not at all; see [`Db::transaction`](crate::Db::transaction).
///
/// It reads the state of its beginning and its own writes. It locks nothing: if somebody else
/// writes a key that it has read, [`Transaction::commit`] fails with
/// [`ErrorKind::Conflict`](crate::ErrorKind::Conflict), and the program begins again. Keys that it
/// only writes never conflict. Dropping it abandons it.
///
/// What the last memtables do not tell any more counts as a conflict, too. So a transaction should
/// be short; one that is older than the last flush of the memtables always conflicts, if it has
/// read something.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let dir = tempfile::tempdir()?;
/// # let db = millrace::Db::open(dir.path()).await?;
/// use millrace::{Db, ErrorKind};
///
/// /// Moves money, whoever else does so at the same time.
/// async fn transfer(db: &Db, from: &str, to: &str, amount: u64) -> millrace::Result<()> {
///     loop {
///         let mut transaction = db.transaction().await?;
///         for (account, change) in [(from, amount.wrapping_neg()), (to, amount)] {
///             let held = transaction.get(account).await?;
///             let held = held.map_or(0, |held| u64::from_le_bytes(held[..].try_into().unwrap()));
///             transaction.put(account, held.wrapping_add(change).to_le_bytes());
///         }
///         match transaction.commit().await {
///             Err(error) if error.kind() == ErrorKind::Conflict => continue,
///             done => return done,
///         }
///     }
/// }
///
/// db.put("ada", 100_u64.to_le_bytes()).await?;
/// let (first, second) =
///     tokio::join!(transfer(&db, "ada", "brian", 7), transfer(&db, "ada", "carla", 5));
/// first?;
/// second?;
/// assert_eq!(db.get("ada").await?.unwrap(), 88_u64.to_le_bytes());
/// # Ok(())
/// # }
/// ```
pub struct Transaction {
    snapshot: Snapshot,
    /// The sequence number of the snapshot.
    sequence: u64,
    read: BTreeSet<Key>,
    /// `None`: deleted.
    written: BTreeMap<Key, Option<Value>>,
    /// Why it cannot be committed.
    refused: Option<Error>,
}

impl Transaction {
    pub(crate) fn new(snapshot: Snapshot, sequence: u64) -> Transaction {
        let (read, written) = (BTreeSet::new(), BTreeMap::new());
        Transaction { snapshot, sequence, read, written, refused: None }
    }

    /// Looks up a key, which nobody else may write until the commit.
    ///
    /// # Errors
    /// As for [`Snapshot::get`].
    pub async fn get(&mut self, key: impl AsRef<[u8]>) -> Result<Option<Value>> {
        self.get_at(0, key.as_ref()).await
    }

    /// Looks up a key of a column family, which nobody else may write until the commit.
    ///
    /// # Errors
    /// As for [`Snapshot::get`].
    pub async fn get_in(
        &mut self,
        family: &impl AsRef<ColumnFamily>,
        key: impl AsRef<[u8]>,
    ) -> Result<Option<Value>> {
        let family = family.as_ref().id_in(self.snapshot.engine())?;
        self.get_at(family, key.as_ref()).await
    }

    /// Looks up many keys, which nobody else may write until the commit; see
    /// [`Snapshot::multi_get`].
    ///
    /// # Errors
    /// As for [`Snapshot::get`].
    pub async fn multi_get<K: AsRef<[u8]>>(
        &mut self,
        keys: impl IntoIterator<Item = K>,
    ) -> Result<Vec<Option<Value>>> {
        self.multi_get_at(0, keys.into_iter().map(|key| key.as_ref().into()).collect()).await
    }

    /// Looks up many keys of a column family, which nobody else may write until the commit.
    ///
    /// # Errors
    /// As for [`Snapshot::get`].
    pub async fn multi_get_in<K: AsRef<[u8]>>(
        &mut self,
        family: &impl AsRef<ColumnFamily>,
        keys: impl IntoIterator<Item = K>,
    ) -> Result<Vec<Option<Value>>> {
        let keys = keys.into_iter().map(|key| key.as_ref().into()).collect();
        let family = family.as_ref().id_in(self.snapshot.engine())?;
        self.multi_get_at(family, keys).await
    }

    /// Sets a key.
    pub fn put(&mut self, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> &mut Transaction {
        self.write_at(0, key.as_ref(), Some(value.as_ref()))
    }

    /// Deletes a key.
    pub fn delete(&mut self, key: impl AsRef<[u8]>) -> &mut Transaction {
        self.write_at(0, key.as_ref(), None)
    }

    /// Sets a key of a column family.
    pub fn put_in(
        &mut self,
        family: &impl AsRef<ColumnFamily>,
        key: impl AsRef<[u8]>,
        value: impl AsRef<[u8]>,
    ) -> &mut Transaction {
        self.write_in(family.as_ref(), key.as_ref(), Some(value.as_ref()))
    }

    /// Deletes a key of a column family.
    pub fn delete_in(
        &mut self,
        family: &impl AsRef<ColumnFamily>,
        key: impl AsRef<[u8]>,
    ) -> &mut Transaction {
        self.write_in(family.as_ref(), key.as_ref(), None)
    }

    /// The state that the transaction reads, without its writes. What is read here may be written
    /// by others: of use for ranges, and for reads that the writes do not depend on.
    pub fn snapshot(&self) -> &Snapshot {
        &self.snapshot
    }

    /// Makes the writes visible and durable, all together. If this future is dropped, they may have
    /// been done or not.
    ///
    /// # Errors
    /// [`ErrorKind::Conflict`](crate::ErrorKind::Conflict) if a key that was read was written
    /// meanwhile: nothing was written, begin again. Else as for [`Db::put`](crate::Db::put).
    pub async fn commit(self) -> Result<()> {
        let Transaction { snapshot, sequence, read, written, refused } = self;
        if let Some(error) = refused {
            return Err(error);
        }
        if written.is_empty() {
            return Ok(());
        }
        let mut batch = BatchWriter::new();
        for ((family, key), value) in written {
            match value {
                Some(value) => batch.put(family, &key, &value),
                None => batch.delete(family, &key),
            }
        }
        let mut bytes = batch.len();
        let mut condition = Unwritten::since(sequence);
        for (family, key) in &read {
            bytes += key.len() + KEY_BYTES;
            condition.key(*family, key);
        }
        let condition = (!read.is_empty()).then(|| Box::new(condition));
        drop(read);
        snapshot.engine().submit(batch, bytes, condition).await
    }

    async fn get_at(&mut self, family: CfId, key: &[u8]) -> Result<Option<Value>> {
        let pair = (family, key.into());
        if let Some(value) = self.written.get(&pair) {
            return Ok(value.clone());
        }
        self.read.insert(pair);
        self.snapshot.get_at(family, key).await
    }

    async fn multi_get_at(
        &mut self,
        family: CfId,
        keys: Vec<Box<[u8]>>,
    ) -> Result<Vec<Option<Value>>> {
        let mut found = vec![None; keys.len()];
        let (mut places, mut asked) = (Vec::new(), Vec::new());
        for (at, key) in keys.into_iter().enumerate() {
            let pair = (family, key);
            match self.written.get(&pair) {
                Some(value) => found[at] = value.clone(),
                None => {
                    places.push(at);
                    asked.push(pair.1.clone());
                    self.read.insert(pair);
                }
            }
        }
        let answers = self.snapshot.multi_get_at(family, asked).await?;
        for (at, value) in places.into_iter().zip(answers) {
            found[at] = value;
        }
        Ok(found)
    }

    /// A write to a family of another database makes the commit fail.
    fn write_in(
        &mut self,
        family: &ColumnFamily,
        key: &[u8],
        value: Option<&[u8]>,
    ) -> &mut Transaction {
        match family.id_in(self.snapshot.engine()) {
            Ok(id) => self.write_at(id, key, value),
            Err(error) => {
                self.refused.get_or_insert(error);
                self
            }
        }
    }

    fn write_at(&mut self, family: CfId, key: &[u8], value: Option<&[u8]>) -> &mut Transaction {
        self.written.insert((family, key.into()), value.map(Value::copy));
        self
    }
}

impl fmt::Debug for Transaction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transaction")
            .field("read", &self.read.len())
            .field("written", &self.written.len())
            .finish_non_exhaustive()
    }
}
