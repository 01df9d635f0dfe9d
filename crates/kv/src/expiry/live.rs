//! Reads that see no key after its deadline.
//!
//! [`LiveReader`] is used like the engine's reader. As long as a database has no deadlines it adds
//! one load to a read. Else a read asks for the key's record first: were it the other way round,
//! the value might be one that had expired, and the record one of a later value.

use std::cell::OnceCell;
use std::ops::Deref;
use std::rc::Rc;
use std::sync::{Arc, OnceLock};

use lsm::{CfId, Iter, IterOptions, Place, Reader, Snapshot, Value};

use crate::expiry::record::{after_due, decode, due_key, hash, record_key};
use crate::expiry::{Deadline, Due, Expiry, RECORDS, due_from};

/// A reader of one core. Clones are the same.
#[derive(Clone)]
pub(crate) struct LiveReader(Rc<State>);

struct State {
    reader: Reader,
    expiry: Arc<OnceLock<Arc<Expiry>>>,
    records: OnceCell<Reader>,
}

/// The engine's reader, which sees what has expired.
impl Deref for LiveReader {
    type Target = Reader;

    fn deref(&self) -> &Reader {
        &self.0.reader
    }
}

/// What the record of a key says.
enum Judgement {
    /// It has no deadline that has passed.
    Lives,
    /// It may have expired: that depends on its value.
    Asks,
}

impl LiveReader {
    /// `expiry` is filled when the deadlines are known.
    pub fn new(reader: Reader, expiry: Arc<OnceLock<Arc<Expiry>>>) -> Self {
        Self(Rc::new(State { reader, expiry, records: OnceCell::new() }))
    }

    /// The deadlines, if there may be any.
    #[inline]
    fn expiry(&self) -> Option<&Expiry> {
        self.0.expiry.get().map(|expiry| &**expiry).filter(|expiry| expiry.any())
    }

    /// Whether keys may have deadlines.
    pub fn has_deadlines(&self) -> bool {
        self.expiry().is_some()
    }

    /// What the cores share of the deadlines.
    pub fn shared(&self) -> Option<&Arc<Expiry>> {
        self.0.expiry.get()
    }

    /// The present state, of values and of deadlines.
    ///
    /// # Errors
    /// Those of [`Reader::snapshot`].
    pub fn moment(&self) -> lsm::Result<Moment> {
        // First the records: those of all values that the second one sees are there, or are newer.
        let records = self.records().map(Reader::snapshot).transpose()?;
        Ok(Moment { records: records.map(Rc::new), values: self.0.reader.snapshot()? })
    }

    /// The reader of records, if there may be any.
    fn records(&self) -> Option<&Reader> {
        let db = self.expiry()?.db.get()?;
        Some(self.0.records.get_or_init(|| db.attach(self.core())))
    }

    fn now_ms(&self) -> u64 {
        self.core().unix_time_ms()
    }

    fn judge(&self, record: Option<&[u8]>) -> Judgement {
        let now = self.now_ms();
        let passed =
            record.is_some_and(|record| decode(record).any(|entry| entry.deadline.has_passed(now)));
        if passed { Judgement::Asks } else { Judgement::Lives }
    }

    /// Keys whose deadlines have passed, oldest first, at most `count`: from a time in Unix
    /// milliseconds on, or after one of them. Suspends for blocks.
    ///
    /// # Errors
    /// Those of the engine.
    pub async fn ended(
        &self,
        family: CfId,
        from_ms: u64,
        after: Option<&Due>,
        count: usize,
        now_ms: u64,
    ) -> lsm::Result<Vec<Due>> {
        let Some(records) = self.records() else { return Ok(Vec::new()) };
        let first = || due_key(family, Deadline::at(from_ms), b"");
        let from = after.map_or_else(first, |last| after_due(family, last));
        due_from(records, family, &from, count, now_ms).await
    }

    /// The value of a key and its deadline, whether it has passed or not. Suspends for blocks.
    ///
    /// # Errors
    /// Those of [`Reader::get`].
    pub async fn look_up(
        &self,
        family: CfId,
        key: &[u8],
        at: Option<&Moment>,
    ) -> lsm::Result<Option<(Value, Deadline)>> {
        let reader = &self.0.reader;
        let snapshot = at.map(|at| &at.values);
        let Some(records) = self.records() else {
            let found = reader.get(family, key, snapshot).await?;
            return Ok(found.map(|value| (value, Deadline::NEVER)));
        };
        let name = record_key(family, key);
        let mut found = reader.get_numbered(family, key, snapshot).await?;
        loop {
            let Some((value, sequence)) = found else { return Ok(None) };
            let record = records.get(RECORDS, &name, None).await?;
            let mut deadline = record.map(|record| self.deadline_of(&record, &value, sequence));
            if deadline.is_none_or(|deadline| deadline == Deadline::NEVER)
                && let Some(before) = at.and_then(|at| at.records.as_deref())
            {
                // The value was removed since, and its record.
                let record = records.get(RECORDS, &name, Some(before)).await?;
                deadline = record.map(|record| self.deadline_of(&record, &value, sequence));
            }
            // While the value is there, its record is.
            found = reader.get_numbered(family, key, snapshot).await?;
            if found.as_ref().is_some_and(|(_, newest)| *newest == sequence) {
                return Ok(Some((value, deadline.unwrap_or_default())));
            }
        }
    }

    /// The deadline that a record has for a value.
    fn deadline_of(&self, record: &[u8], value: &[u8], sequence: u64) -> Deadline {
        let Some(expiry) = self.expiry() else { return Deadline::NEVER };
        let is_named =
            |sequence_of: u64| sequence_of == sequence || lsm::mutant("sequences_are_not_compared");
        let mut entries = decode(record)
            .rev()
            .filter(|entry| is_named(entry.sequence) && expiry.is_valid(entry.run, entry.sequence));
        let compares = !lsm::mutant("sequences_are_not_compared");
        entries
            .find(|entry| sequence > 0 && (!compares || entry.hash == hash(value)))
            .map_or(Deadline::NEVER, |entry| entry.deadline)
    }

    /// As [`Reader::get`].
    pub async fn get(&self, family: CfId, key: &[u8]) -> lsm::Result<Option<Value>> {
        if let Some(records) = self.records() {
            let record = records.get(RECORDS, &record_key(family, key), None).await?;
            if let Judgement::Asks = self.judge(record.as_deref()) {
                return self.get_asking(family, key, None).await;
            }
        }
        self.0.reader.get(family, key, None).await
    }

    async fn get_asking(
        &self,
        family: CfId,
        key: &[u8],
        at: Option<&Moment>,
    ) -> lsm::Result<Option<Value>> {
        let found = self.look_up(family, key, at).await?;
        let now = self.now_ms();
        Ok(found.and_then(|(value, deadline)| (!deadline.has_passed(now)).then_some(value)))
    }

    /// As [`Reader::get_cached`].
    #[inline]
    pub fn get_cached(&self, family: CfId, key: &[u8]) -> Option<lsm::Result<Option<Value>>> {
        if let Some(records) = self.records() {
            match records.get_cached(RECORDS, &record_key(family, key))? {
                Ok(record) => match self.judge(record.as_deref()) {
                    Judgement::Lives => {}
                    Judgement::Asks => return None,
                },
                Err(error) => return Some(Err(error)),
            }
        }
        self.0.reader.get_cached(family, key)
    }

    /// Whether a key is known to have no deadline, from memory only. `None`: it must be looked up.
    pub fn has_none_cached(&self, family: CfId, key: &[u8]) -> Option<lsm::Result<()>> {
        let Some(records) = self.records() else { return Some(Ok(())) };
        match records.get_cached(RECORDS, &record_key(family, key))? {
            Ok(None) => Some(Ok(())),
            Ok(Some(_)) => None,
            Err(error) => Some(Err(error)),
        }
    }

    /// Which keys may have expired.
    async fn asking(
        &self,
        family: CfId,
        keys: &[&[u8]],
        at: Option<&Snapshot>,
    ) -> Vec<lsm::Result<bool>> {
        let Some(records) = self.records() else { return vec![Ok(false); keys.len()] };
        let names: Vec<Vec<u8>> = keys.iter().map(|key| record_key(family, key)).collect();
        let names: Vec<&[u8]> = names.iter().map(Vec::as_slice).collect();
        let found = records.multi_get(RECORDS, &names, at).await;
        let asks = |record: Option<Value>| matches!(self.judge(record.as_deref()), Judgement::Asks);
        found.into_iter().map(|record| record.map(asks)).collect()
    }

    /// As [`Reader::multi_get`].
    pub async fn multi_get(
        &self,
        family: CfId,
        keys: &[&[u8]],
        at: Option<&Moment>,
    ) -> Vec<lsm::Result<Option<Value>>> {
        let snapshot = at.map(|at| &at.values);
        if !self.has_deadlines() {
            return self.0.reader.multi_get(family, keys, snapshot).await;
        }
        let mut asking = self.asking(family, keys, None).await;
        if let Some(before) = at.and_then(|at| at.records.as_deref()) {
            // Records may have been removed since, with their values.
            let before = self.asking(family, keys, Some(before)).await;
            for (asks, before) in asking.iter_mut().zip(before) {
                if let Ok(false) = asks {
                    *asks = before;
                }
            }
        }
        let mut found = self.0.reader.multi_get(family, keys, snapshot).await;
        for ((key, asks), found) in keys.iter().zip(asking).zip(&mut found) {
            match asks {
                Ok(false) => {}
                Ok(true) => *found = self.get_asking(family, key, at).await,
                Err(error) => *found = Err(error),
            }
        }
        found
    }

    /// As [`Reader::places`]; also `None` for keys that may have deadlines.
    pub async fn places(&self, family: CfId, keys: &[&[u8]]) -> Vec<lsm::Result<Option<Place>>> {
        let Some(records) = self.records() else {
            return self.0.reader.places(family, keys, None).await;
        };
        // First the records: a deadline is written before its value.
        let names: Vec<Vec<u8>> = keys.iter().map(|key| record_key(family, key)).collect();
        let names: Vec<&[u8]> = names.iter().map(Vec::as_slice).collect();
        let deadlines = records.multi_get(RECORDS, &names, None).await;
        let mut places = self.0.reader.places(family, keys, None).await;
        for (place, deadline) in places.iter_mut().zip(deadlines) {
            match deadline {
                Ok(None) => {}
                Ok(Some(_)) => *place = Ok(None),
                Err(error) => *place = Err(error),
            }
        }
        places
    }

    /// As [`Reader::contains`].
    pub async fn contains(&self, family: CfId, keys: &[&[u8]]) -> Vec<lsm::Result<bool>> {
        if !self.has_deadlines() {
            return self.0.reader.contains(family, keys).await;
        }
        let asking = self.asking(family, keys, None).await;
        let mut found = self.0.reader.contains(family, keys).await;
        for ((key, asks), found) in keys.iter().zip(asking).zip(&mut found) {
            match asks {
                Ok(true) if matches!(found, Ok(true)) => {
                    *found = self.get_asking(family, key, None).await.map(|value| value.is_some());
                }
                Ok(_) => {}
                Err(error) => *found = Err(error),
            }
        }
        found
    }

    /// As [`Reader::iter`], for the keys that had not expired at a time, in the present state or in
    /// that of a moment.
    ///
    /// # Errors
    /// Those of [`Reader::iter`].
    pub fn iter_at(
        &self,
        family: CfId,
        options: IterOptions<'_>,
        now_ms: u64,
        at: Option<&Moment>,
    ) -> lsm::Result<LiveIter> {
        let records = match at {
            Some(at) => at.records.clone(),
            None => self.records().map(Reader::snapshot).transpose()?.map(Rc::new),
        };
        let snapshot = at.map(|at| &at.values);
        let iter = self.0.reader.iter(family, IterOptions { snapshot, ..options })?;
        let (patience, is_expired) = (usize::MAX, false);
        Ok(LiveIter { iter, reader: self.clone(), family, now_ms, records, patience, is_expired })
    }
}

/// The state at one moment.
pub(crate) struct Moment {
    /// The deadlines, if there may have been any.
    records: Option<Rc<Snapshot>>,
    values: Snapshot,
}

/// An iterator over the keys that have not expired.
pub(crate) struct LiveIter {
    iter: Iter,
    reader: LiveReader,
    family: CfId,
    now_ms: u64,
    /// The deadlines when the iterator was made.
    records: Option<Rc<Snapshot>>,
    /// Keys that have expired which one move passes at most.
    patience: usize,
    is_expired: bool,
}

impl LiveIter {
    /// Lets each move pass at most so many keys that have expired, and stop at the next one.
    pub fn set_patience(&mut self, keys: usize) {
        self.patience = keys;
    }

    /// Whether it is at a key that has expired: it has lost patience.
    pub fn is_expired(&self) -> bool {
        self.is_expired
    }

    /// As [`Iter::valid`].
    pub fn valid(&self) -> bool {
        self.iter.valid()
    }

    /// As [`Iter::key`].
    pub fn key(&self) -> &[u8] {
        self.iter.key()
    }

    /// As [`Iter::value`].
    pub fn value(&self) -> &[u8] {
        self.iter.value()
    }

    /// As [`Iter::seek_to_first`].
    pub async fn seek_to_first(&mut self) -> lsm::Result<()> {
        self.iter.seek_to_first().await?;
        self.skip(false).await
    }

    /// As [`Iter::seek_to_last`].
    pub async fn seek_to_last(&mut self) -> lsm::Result<()> {
        self.iter.seek_to_last().await?;
        self.skip(true).await
    }

    /// As [`Iter::seek`].
    pub async fn seek(&mut self, key: &[u8]) -> lsm::Result<()> {
        self.iter.seek(key).await?;
        self.skip(false).await
    }

    /// As [`Iter::seek_for_prev`].
    pub async fn seek_for_prev(&mut self, key: &[u8]) -> lsm::Result<()> {
        self.iter.seek_for_prev(key).await?;
        self.skip(true).await
    }

    /// As [`Iter::next`].
    pub async fn next(&mut self) -> lsm::Result<()> {
        self.iter.next().await?;
        self.skip(false).await
    }

    /// As [`Iter::prev`].
    pub async fn prev(&mut self) -> lsm::Result<()> {
        self.iter.prev().await?;
        self.skip(true).await
    }

    /// Moves over what has expired.
    async fn skip(&mut self, backward: bool) -> lsm::Result<()> {
        self.is_expired = false;
        if !self.reader.has_deadlines() {
            return Ok(());
        }
        let mut passed = 0;
        while self.iter.valid() && self.has_expired().await? {
            if passed == self.patience {
                self.is_expired = true;
                return Ok(());
            }
            passed += 1;
            match backward {
                true => self.iter.prev().await?,
                false => self.iter.next().await?,
            }
            self.reader.core().checkpoint().await;
        }
        Ok(())
    }

    async fn has_expired(&self) -> lsm::Result<bool> {
        let Some(records) = self.reader.records() else { return Ok(false) };
        let name = record_key(self.family, self.iter.key());
        let record = match records.get_cached(RECORDS, &name) {
            Some(record) => record?,
            None => records.get(RECORDS, &name, None).await?,
        };
        let of =
            |record: Value| self.reader.deadline_of(&record, self.iter.value(), self.iter.number());
        let mut deadline = record.map(of);
        if deadline.is_none_or(|deadline| deadline == Deadline::NEVER)
            && let Some(before) = &self.records
        {
            // The value may have been removed since, and its record.
            deadline = records.get(RECORDS, &name, Some(before)).await?.map(of);
        }
        Ok(deadline.is_some_and(|deadline| deadline.has_passed(self.now_ms)))
    }
}
