//! Iterators: all visible keys of a column family in order, in both directions.
//!
//! The sources (memtables and recovered writes, each table of level 0, each deeper level) are
//! merged by user key and age. Going forward, the sources are at or after the entry last returned.
//! Going backward, all of them are before its user key; its newest visible version was picked up on
//! the way. Turning around steps the sources over the entries in between; blocks in memory stay.
//!
//! Range tombstones hide older entries in their range. A source without newer entries skips the
//! range in one seek, without reading the tables in between.

use std::cmp::Ordering;
use std::rc::Rc;

use rocksfmt::{Comparator, SEQUENCE_MAX, ValueType, pack, unpack};

use crate::db::CfId;
use crate::error::{Error, Kind, Result};
use crate::mem::{Mem, MemCursor};
use crate::read::covering::Covering;
use crate::read::level_iter::{Bounds, LevelIter};
use crate::read::operands::{FoundOperands, Order, is_operand};
use crate::read::point::entry_value;
use crate::read::run::Run;
use crate::read::seek::SeekKey;
use crate::read::snapshot::Snapshot;
use crate::read::state::ReadContext;
use crate::read::stats::count;
use crate::read::value::Value;
use crate::read::walk::{Direction, Position};
use crate::version::{Family, user_key};

/// The keys an iterator sees, and hints.
#[derive(Default)]
pub struct IterOptions<'a> {
    /// Hide keys before this.
    pub lower: Option<Vec<u8>>,
    /// Hide this key and all after it.
    pub upper: Option<Vec<u8>>,
    /// Only keys with this prefix (bytewise order only).
    pub prefix: Option<Vec<u8>>,
    /// The state to read; by default the newest.
    pub snapshot: Option<&'a Snapshot>,
    /// Whether blocks that are read one by one go into the cache.
    pub fill_cache: bool,
    /// Approximate number of entries that will be read after each seek, if known; they are read at
    /// once.
    pub expected: Option<usize>,
    /// Whether these entries come before the sought key rather than after it.
    pub expected_backward: bool,
    /// Only keys are wanted: values in blob files are not read, and are empty.
    pub keys_only: bool,
}

enum Source {
    /// A memtable, by its index in the family.
    Memory(usize, MemCursor),
    Level(Box<LevelIter>),
}

impl Source {
    #[inline]
    fn valid(&self) -> bool {
        match self {
            Source::Memory(_, cursor) => cursor.valid(),
            Source::Level(level) => level.valid(),
        }
    }
}

/// Steps over entries before a turn seeks instead.
const TURN_STEPS: usize = 64;
/// Entries skipped between two checkpoints of the task: nothing else suspends a walk in memory.
const PASSED_AT_ONCE: u32 = 64;

/// Iterates over a column family. After an error it is on no entry until the next seek.
pub struct Iter {
    context: ReadContext,
    family_at: usize,
    comparator: Comparator,
    sequence: u64,
    bounds: Rc<Bounds>,
    sources: Vec<Source>,
    covering: Covering,
    /// The source of the next entry in the current direction.
    current: Option<usize>,
    direction: Direction,
    key: Vec<u8>,
    value: Value,
    /// The sequence of the entry, unless it was merged.
    number: u64,
    valid: bool,
    /// Going forward, the sources are after all versions of the key: its value was merged.
    beyond: bool,
    /// Approximate memory of one seek, in bytes.
    seek_bytes: usize,
    /// Entries skipped.
    passed: u32,
    keys_only: bool,
}

impl Iter {
    /// An iterator on no entry, over the entries up to `sequence`.
    pub(crate) fn new(
        context: ReadContext,
        sequence: u64,
        family: CfId,
        options: IterOptions<'_>,
    ) -> Result<Iter> {
        let view = context.view.clone();
        let version = &view.version;
        let found = version.family(family)?;
        let family_at = version.families.place(family).unwrap_or_default();
        let mut bounds = Bounds { lower: options.lower, upper: options.upper };
        if let Some(prefix) = options.prefix {
            if found.comparator != Comparator::Bytewise {
                return Err(Error::new(
                    Kind::Unsupported,
                    "cannot iterate over a prefix: the column family is not in bytewise order",
                ));
            }
            bounds.narrow_to(&prefix);
        }
        let bounds = Rc::new(bounds);
        let expected = expected_bytes(&context, family_at, options.expected);
        let mut sources = Vec::new();
        for (at, mem) in found.mems.iter().enumerate() {
            sources.push(Source::Memory(at, MemCursor::new(mem)));
        }
        let level_source = |slots: Run| {
            Source::Level(Box::new(LevelIter::new(
                &context,
                found.comparator,
                slots,
                &bounds,
                options.fill_cache,
                expected,
                options.expected_backward,
            )))
        };
        for (depth, level) in found.levels.iter().enumerate() {
            if depth == 0 {
                sources.extend(level.slots.iter().map(|&slot| level_source(Run::Table([slot]))));
            } else if !level.slots.is_empty() {
                sources.push(level_source(Run::Level { view: view.clone(), family_at, depth }));
            }
        }
        Ok(Iter {
            context: context.clone(),
            family_at,
            comparator: found.comparator,
            sequence,
            bounds,
            sources,
            covering: Covering::new(found, sequence),
            current: None,
            direction: Direction::Forward,
            key: Vec::new(),
            value: Value::empty(),
            number: 0,
            valid: false,
            beyond: false,
            seek_bytes: found.seek_bytes(version),
            passed: 0,
            keys_only: options.keys_only,
        })
    }

    /// Whether it is on an entry.
    #[inline]
    pub fn valid(&self) -> bool {
        self.valid
    }

    /// The current key; empty when nowhere.
    #[inline]
    pub fn key(&self) -> &[u8] {
        if self.valid { &self.key } else { &[] }
    }

    /// The current value; empty when nowhere.
    #[inline]
    pub fn value(&self) -> &[u8] {
        if self.valid { &self.value } else { &[] }
    }

    /// The sequence number of the current entry, as [`Reader::get_numbered`](crate::Reader) gives
    /// it; not defined for values that are merged of operands.
    #[inline]
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Moves to the first key. This and the other moves suspend for blocks that are not in memory,
    /// and yield to other tasks while they skip many invisible entries.
    ///
    /// # Errors
    /// Damage, a failing device, or an entry that cannot be served. The same holds for all moves.
    pub async fn seek_to_first(&mut self) -> Result<()> {
        match self.bounds.lower.clone() {
            Some(lower) => self.seek_forward(Some(&lower)).await,
            None => self.seek_forward(None).await,
        }
    }

    /// Moves to the last key.
    ///
    /// # Errors
    /// As for [`Iter::seek_to_first`].
    pub async fn seek_to_last(&mut self) -> Result<()> {
        self.seek_backward(None).await
    }

    /// Moves to the first key at or after `key`.
    ///
    /// # Errors
    /// As for [`Iter::seek_to_first`].
    pub async fn seek(&mut self, key: &[u8]) -> Result<()> {
        let bounds = self.bounds.clone();
        match &bounds.lower {
            Some(lower) if self.comparator.cmp_user(key, lower).is_lt() => {
                self.seek_forward(Some(lower)).await
            }
            _ => self.seek_forward(Some(key)).await,
        }
    }

    /// Moves to the last key at or before `key`.
    ///
    /// # Errors
    /// As for [`Iter::seek_to_first`].
    pub async fn seek_for_prev(&mut self, key: &[u8]) -> Result<()> {
        let bounds = self.bounds.clone();
        match &bounds.upper {
            Some(upper) if self.comparator.cmp_user(key, upper).is_ge() => {
                self.seek_backward(None).await
            }
            _ => self.seek_backward(Some(key)).await,
        }
    }

    /// Moves to the next key. Does nothing when nowhere.
    ///
    /// # Errors
    /// As for [`Iter::seek_to_first`].
    #[inline]
    pub async fn next(&mut self) -> Result<()> {
        if !self.valid {
            return Ok(());
        }
        count(&self.context.state.counters.steps, 1);
        self.valid = false;
        if self.direction == Direction::Backward {
            self.turn(Direction::Forward).await?;
            return self.find_forward(false).await;
        }
        if !std::mem::take(&mut self.beyond) {
            self.step_current().await?;
        }
        self.find_forward(true).await
    }

    /// Moves to the previous key. Does nothing when nowhere.
    ///
    /// # Errors
    /// As for [`Iter::seek_to_first`].
    #[inline]
    pub async fn prev(&mut self) -> Result<()> {
        if !self.valid {
            return Ok(());
        }
        count(&self.context.state.counters.steps, 1);
        self.valid = false;
        if self.direction == Direction::Forward {
            self.turn(Direction::Backward).await?;
        }
        self.find_backward().await
    }

    async fn seek_forward(&mut self, key: Option<&[u8]>) -> Result<()> {
        self.valid = false;
        count(&self.context.state.counters.seeks, 1);
        let target = key.map(|key| SeekKey::new(key, self.sequence));
        let position = match &target {
            Some(target) => Position::AtOrAfter(target.as_slice()),
            None => Position::First,
        };
        self.seek_all(position, Direction::Forward).await?;
        self.find_forward(false).await
    }

    async fn seek_backward(&mut self, key: Option<&[u8]>) -> Result<()> {
        self.valid = false;
        count(&self.context.state.counters.seeks, 1);
        let bounds = self.bounds.clone();
        // After all versions of the key, or before all versions of the upper bound.
        let target = match (key, &bounds.upper) {
            (Some(key), _) => Some(SeekKey::with_packed(key, 0)),
            (None, Some(upper)) => Some(SeekKey::with_packed(upper, u64::MAX)),
            (None, None) => None,
        };
        let position = match &target {
            Some(target) => Position::AtOrBefore(target.as_slice()),
            None => Position::Last,
        };
        self.seek_all(position, Direction::Backward).await?;
        self.find_backward().await
    }

    async fn seek_all(&mut self, position: Position<'_>, direction: Direction) -> Result<()> {
        self.direction = direction;
        self.beyond = false;
        self.value = Value::empty();
        for source in &mut self.sources {
            if let Source::Level(level) = source {
                level.leave();
            }
        }
        let _room = self.context.state.promise(self.seek_bytes).await?;
        for at in 0..self.sources.len() {
            self.seek_source(at, position, direction).await?;
        }
        self.pick();
        Ok(())
    }

    async fn seek_source(
        &mut self,
        at: usize,
        position: Position<'_>,
        direction: Direction,
    ) -> Result<()> {
        match &mut self.sources[at] {
            Source::Level(level) => level.seek(position, direction).await,
            Source::Memory(mem, cursor) => {
                let mem = &self.context.view.version.families[self.family_at].mems[*mem];
                match position {
                    Position::First => cursor.seek_to_first(mem),
                    Position::Last => cursor.seek_to_last(mem),
                    Position::AtOrAfter(key) => cursor.seek(mem, key),
                    Position::AtOrBefore(key) => cursor.seek_for_prev(mem, key),
                };
                Ok(())
            }
        }
    }

    #[inline]
    fn user_key(&self, at: usize) -> &[u8] {
        source_key(&self.sources[at], &self.context.view.version.families[self.family_at])
    }

    /// The sequence of the newest visible range tombstone over the key of a source; 0 for none.
    #[inline]
    fn tombstone_over(&mut self, at: usize) -> u64 {
        let version = &self.context.view.version;
        let key = source_key(&self.sources[at], &version.families[self.family_at]);
        self.covering.newest(version, key)
    }

    #[inline]
    fn packed(&self, at: usize) -> u64 {
        match &self.sources[at] {
            Source::Level(level) => level.packed(),
            Source::Memory(mem, cursor) => {
                let key = cursor.key(self.mem(*mem));
                key.last_chunk::<8>().map_or(0, |trailer| u64::from_le_bytes(*trailer))
            }
        }
    }

    fn mem(&self, at: usize) -> &Mem {
        &self.context.view.version.families[self.family_at].mems[at]
    }

    fn source_value(&self, at: usize) -> Value {
        match &self.sources[at] {
            Source::Level(level) => level.value(),
            Source::Memory(mem, cursor) => match cursor.value(self.mem(*mem)) {
                Some(value) => Value::memory(&self.context.view, self.family_at, *mem, value),
                None => Value::empty(),
            },
        }
    }

    /// Chooses the source with the next entry in the current direction.
    #[inline]
    fn pick(&mut self) {
        if let [only] = &self.sources[..] {
            self.current = only.valid().then_some(0);
            return;
        }
        let mut best: Option<usize> = None;
        for at in 0..self.sources.len() {
            if !self.sources[at].valid() {
                continue;
            }
            let Some(other) = best else {
                best = Some(at);
                continue;
            };
            let order = self
                .comparator
                .cmp_user(self.user_key(at), self.user_key(other))
                .then_with(|| self.packed(other).cmp(&self.packed(at)));
            let comes_first = match self.direction {
                Direction::Forward => order.is_lt(),
                Direction::Backward => order.is_gt(),
            };
            if comes_first {
                best = Some(at);
            }
        }
        self.current = best;
    }

    #[inline]
    async fn step_current(&mut self) -> Result<()> {
        if let Some(at) = self.current {
            self.step_source(at, self.direction).await?;
            self.pick();
        }
        Ok(())
    }

    #[inline]
    async fn step_source(&mut self, at: usize, direction: Direction) -> Result<()> {
        match &mut self.sources[at] {
            Source::Level(level) => level.step(direction).await.map(|_| ()),
            Source::Memory(mem, cursor) => {
                let mem = &self.context.view.version.families[self.family_at].mems[*mem];
                match direction {
                    Direction::Forward => cursor.next(mem),
                    Direction::Backward => cursor.prev(mem),
                };
                Ok(())
            }
        }
    }

    /// Moves forward to the first visible entry. `skip`: ignore further versions of `self.key`.
    async fn find_forward(&mut self, mut skip: bool) -> Result<()> {
        let bounds = self.bounds.clone();
        while let Some(at) = self.current {
            let packed = self.packed(at);
            let user_key = self.user_key(at);
            if let Some(upper) = &bounds.upper
                && self.comparator.cmp_user(user_key, upper).is_ge()
            {
                return Ok(());
            }
            let (sequence, kind) = unpack(packed);
            if sequence > self.sequence || (skip && user_key == &self.key[..]) {
                self.pass().await;
                self.step_current().await?;
                continue;
            }
            if !self.covering.is_empty() && self.tombstone_over(at) > sequence {
                self.pass().await;
                self.take_key(at);
                skip = true;
                if !self.skip_covered(Direction::Forward).await? {
                    self.step_current().await?;
                }
                continue;
            }
            self.take_key(at);
            if is_deletion(kind) {
                self.pass().await;
                skip = true;
                self.step_current().await?;
                continue;
            }
            let value = self.source_value(at);
            self.number = sequence;
            if is_operand(packed) {
                self.value = self.merge_forward(packed, value).await?;
                self.valid = true;
                return Ok(());
            }
            match self.visible_value(pack(sequence, kind), value).await? {
                Some(value) => {
                    self.value = value;
                    self.valid = true;
                    return Ok(());
                }
                None => {
                    self.pass().await;
                    skip = true;
                    self.step_current().await?;
                }
            }
        }
        Ok(())
    }

    /// Moves to the last visible key at or before the sources' positions, and leaves the sources
    /// before all of its versions.
    async fn find_backward(&mut self) -> Result<()> {
        let bounds = self.bounds.clone();
        while let Some(at) = self.current {
            if let Some(lower) = &bounds.lower
                && self.comparator.cmp_user(self.user_key(at), lower).is_lt()
            {
                return Ok(());
            }
            self.take_key(at);
            // Versions come oldest first; the newest visible one counts, or the operands above it.
            let mut newest: Option<(u64, Value)> = None;
            let mut operands = None;
            while let Some(at) = self.current
                && self.user_key(at) == &self.key[..]
            {
                let packed = self.packed(at);
                if unpack(packed).0 <= self.sequence {
                    if newest.is_some() {
                        self.give_way().await;
                    }
                    let value = self.source_value(at);
                    if is_operand(packed) {
                        self.take_operand(&mut operands, packed, &value)?;
                    } else {
                        operands = None;
                        newest = Some((packed, value));
                    }
                } else {
                    self.pass().await;
                }
                self.step_current().await?;
            }
            if let Some(operands) = operands {
                if let Some(value) = self.merge_backward(operands, newest).await? {
                    self.value = value;
                    self.valid = true;
                    return Ok(());
                }
                continue;
            }
            let Some((packed, value)) = newest else { continue };
            if !self.covering.is_empty()
                && self.covering.newest(&self.context.view.version, &self.key) > unpack(packed).0
            {
                self.pass().await;
                self.skip_covered(Direction::Backward).await?;
                continue;
            }
            self.number = unpack(packed).0;
            match self.visible_value(packed, value).await? {
                Some(value) => {
                    self.value = value;
                    self.valid = true;
                    return Ok(());
                }
                None => self.pass().await,
            }
        }
        Ok(())
    }

    /// The value of the visible entry of `self.key`; `None` for a tombstone.
    #[inline]
    async fn visible_value(&self, packed: u64, value: Value) -> Result<Option<Value>> {
        if self.keys_only && unpack(packed).1 == ValueType::BlobIndex as u8 {
            return Ok(Some(Value::empty()));
        }
        entry_value(&self.context, self.family_at, &self.key, packed, value).await
    }

    /// Merges the operand that the sources are on, and those below it, with the value below them.
    /// Afterwards the sources are on a version of the key, or beyond all of them.
    #[cold]
    async fn merge_forward(&mut self, mut packed: u64, operand: Value) -> Result<Value> {
        let context = self.context.clone();
        let family = &context.view.version.families[self.family_at];
        let mut found = FoundOperands::new(&context, family, Order::NewestFirst)?;
        found.push(&operand)?;
        drop(operand);
        let cover = self.cover_sequence();
        loop {
            self.give_way().await;
            self.step_current().await?;
            let Some(at) = self.current.filter(|&at| self.user_key(at) == &self.key[..]) else {
                self.beyond = true;
                return found.value(None).await;
            };
            // A log that was replayed twice gives an entry twice.
            if std::mem::replace(&mut packed, self.packed(at)) == packed {
                continue;
            }
            if unpack(packed).0 < cover {
                return found.value(None).await;
            }
            let value = self.source_value(at);
            if !is_operand(packed) {
                let key = &self.key;
                let base = entry_value(&context, self.family_at, key, packed, value).await?;
                return found.value(base).await;
            }
            found.push(&value)?;
        }
    }

    /// Takes an operand that is newer than all before, unless a range tombstone covers it.
    #[cold]
    fn take_operand(
        &mut self,
        operands: &mut Option<Operands>,
        packed: u64,
        operand: &[u8],
    ) -> Result<()> {
        if operands.is_none() {
            let family = &self.context.view.version.families[self.family_at];
            let found = FoundOperands::new(&self.context, family, Order::OldestFirst)?;
            let cover = self.cover_sequence();
            *operands = Some(Operands { found, cover, last: 0 });
        }
        if let Some(operands) = operands
            && unpack(packed).0 >= operands.cover
            && std::mem::replace(&mut operands.last, packed) != packed
        {
            operands.found.push(operand)?;
        }
        Ok(())
    }

    /// Merges operands with the version below them. `None`: a range tombstone covers all of them.
    async fn merge_backward(
        &self,
        operands: Operands,
        below: Option<(u64, Value)>,
    ) -> Result<Option<Value>> {
        let Operands { found, cover, .. } = operands;
        if found.count() == 0 {
            return Ok(None);
        }
        let base = match below {
            Some((packed, value)) if unpack(packed).0 >= cover => {
                entry_value(&self.context, self.family_at, &self.key, packed, value).await?
            }
            _ => None,
        };
        found.value(base).await.map(Some)
    }

    /// The sequence of the newest visible range tombstone over the key; 0 without one.
    fn cover_sequence(&mut self) -> u64 {
        match self.covering.is_empty() {
            true => 0,
            false => self.covering.newest(&self.context.view.version, &self.key),
        }
    }

    /// Counts a skipped entry, and yields to other tasks now and then.
    #[inline]
    async fn pass(&mut self) {
        count(&self.context.state.counters.skipped, 1);
        self.give_way().await;
    }

    #[inline]
    async fn give_way(&mut self) {
        self.passed = self.passed.wrapping_add(1);
        if self.passed.is_multiple_of(PASSED_AT_ONCE) {
            self.context.state.core.checkpoint().await;
        }
    }

    /// Copies the key of a source.
    #[inline]
    fn take_key(&mut self, at: usize) {
        let family = &self.context.view.version.families[self.family_at];
        self.key.clear();
        self.key.extend_from_slice(source_key(&self.sources[at], family));
    }

    /// Lets sources skip what range tombstones around the current key delete, where it is known
    /// without reading that they have nothing newer there. Returns whether the current source did.
    async fn skip_covered(&mut self, direction: Direction) -> Result<bool> {
        let version = self.context.view.version.clone();
        let newest = self.covering.newest(&version, &self.key);
        let mut moved = false;
        for at in 0..self.sources.len() {
            let Source::Level(level) = &mut self.sources[at] else { continue };
            // The whole run is older, or at least its current table.
            let mut hidden = level.largest_sequence();
            if hidden >= newest {
                hidden = level.table_sequence();
            }
            if hidden >= newest || !level.valid() {
                continue;
            }
            let Some(cover) = self.covering.cover(&version, &self.key, hidden, direction) else {
                continue;
            };
            let order = |bound: &[u8]| self.comparator.cmp_user(level.user_key(), bound);
            let target = match direction {
                Direction::Forward if order(cover.end).is_lt() => {
                    SeekKey::new(cover.end, SEQUENCE_MAX)
                }
                Direction::Backward if order(cover.start).is_ge() => {
                    SeekKey::with_packed(cover.start, u64::MAX)
                }
                _ => continue,
            };
            level.skip(target.as_slice(), hidden, direction).await?;
            moved |= self.current == Some(at);
        }
        if moved || direction == Direction::Backward {
            self.pick();
        }
        Ok(moved)
    }

    /// Reverses the direction: moves every source to its first entry in the new direction that is
    /// not a version of the key.
    async fn turn(&mut self, direction: Direction) -> Result<()> {
        self.direction = direction;
        self.beyond = false;
        let (target, passed): (_, fn(Ordering) -> bool) = match direction {
            Direction::Forward => (SeekKey::with_packed(&self.key, 0), Ordering::is_gt),
            Direction::Backward => (SeekKey::with_packed(&self.key, u64::MAX), Ordering::is_lt),
        };
        let position = match direction {
            Direction::Forward => Position::AtOrAfter(target.as_slice()),
            Direction::Backward => Position::AtOrBefore(target.as_slice()),
        };
        for at in 0..self.sources.len() {
            let mut steps = if self.sources[at].valid() { 0 } else { TURN_STEPS };
            while steps < TURN_STEPS
                && self.sources[at].valid()
                && !passed(self.comparator.cmp_user(self.user_key(at), &self.key))
            {
                steps += 1;
                self.step_source(at, direction).await?;
            }
            if steps == TURN_STEPS {
                self.seek_source(at, position, direction).await?;
                while self.sources[at].valid() && self.user_key(at) == &self.key[..] {
                    self.give_way().await;
                    self.step_source(at, direction).await?;
                }
            }
        }
        self.pick();
        Ok(())
    }
}

/// The operands of a key, found going backward.
struct Operands {
    found: FoundOperands,
    /// The sequence of the newest visible range tombstone over the key.
    cover: u64,
    /// The last operand's sequence and type.
    last: u64,
}

/// Whether entries of a type delete their key, whatever the column family.
#[inline]
fn is_deletion(kind: u8) -> bool {
    kind == ValueType::Deletion as u8 || kind == ValueType::SingleDeletion as u8
}

#[inline]
fn source_key<'a>(source: &'a Source, family: &'a Family) -> &'a [u8] {
    match source {
        Source::Level(level) => level.user_key(),
        Source::Memory(mem, cursor) => user_key(cursor.key(&family.mems[*mem])),
    }
}

impl Bounds {
    /// Narrows the bounds to the keys that begin with `prefix`.
    fn narrow_to(&mut self, prefix: &[u8]) {
        if prefix.is_empty() {
            return;
        }
        if self.lower.as_deref().is_none_or(|lower| lower < prefix) {
            self.lower = Some(prefix.to_vec());
        }
        // The first key after all keys with the prefix: drop trailing 0xFF bytes, then increment
        // the last byte. Nothing comes after a prefix of 0xFF bytes only.
        let mut end = prefix.to_vec();
        while end.last() == Some(&0xFF) {
            end.pop();
        }
        if let Some(last) = end.last_mut() {
            *last += 1;
            if self.upper.as_deref().is_none_or(|upper| upper > &end[..]) {
                self.upper = Some(end);
            }
        }
    }
}

/// Tables of each level whose counts are taken for those of the level.
const SAMPLED: usize = 16;

/// Bytes of data blocks that this number of entries takes, by the counts of some tables.
fn expected_bytes(context: &ReadContext, family_at: usize, entries: Option<usize>) -> usize {
    let Some(entries) = entries else { return 0 };
    let version = &context.view.version;
    let levels = version.families[family_at].levels.iter();
    let slots = levels.flat_map(|level| level.slots.iter().take(SAMPLED));
    let (mut bytes, mut count) = (0u64, 0u64);
    for &slot in slots {
        let Ok(table) = version.table(slot) else { continue };
        let properties = &table.properties;
        bytes = bytes.saturating_add(properties.data_size);
        count = count.saturating_add(properties.num_entries);
    }
    let each = bytes.checked_div(count).unwrap_or(0).min(1 << 20) as usize;
    entries.saturating_mul(each).min(1 << 20)
}
