//! The compaction iterator: which entries of its inputs a flush or a merge of tables keeps, and
//! what becomes of them. Pure: the caller reads the inputs and writes the outputs.
//!
//! 1. The caller passes all entries of the inputs in the order of internal keys, the newest version
//!    of a key first, to [`CompactionIter::push`]. After each it takes the outputs with
//!    [`CompactionIter::next`] and adds them to a table.
//! 2. After the last entry it calls [`CompactionIter::finish`] and takes the remaining outputs.
//!
//! An output may come later than its entry, and may have another sequence, type and value: a merge
//! has the newest operand's sequence, and the newest version of a key at the bottom has sequence 0.
//! So the caller makes nothing of an input but asks the outputs: a table may end before an output
//! that begins a key ([`Output::begins_key`]). References to blob files are counted in from
//! [`CompactionIter::input_key`], out from the outputs.
//!
//! The caller knows the data around the inputs ([`Around`]): the range tombstones of the inputs,
//! clipped to their files' bounds, and whether deeper levels may hold a key. The inputs must
//! contain *all* versions of their keys in their levels that are older than the newest one: a clean
//! cut. With [`Place::Bottommost`] no deeper data exists at all, and the caller also drops the
//! range tombstones that every reader sees.
//!
//! # Rules
//!
//! Snapshots divide the versions of a key into stripes: two versions are in one stripe if every
//! reader sees both or neither. Readers that begin later read at the tip. For each version, the
//! first rule that applies:
//!
//! 1. Below a tombstone that every reader sees and that has nothing below the inputs: dropped.
//! 2. The version that a SingleDelete in the same stripe hides stays, as an empty value. RocksDB
//!    drops the two together. Without that version, the SingleDelete would remove another one, or
//!    meet a Delete, which RocksDB takes for corruption.
//! 3. A newer range tombstone of the same stripe covers it: dropped.
//! 4. A SingleDelete stays, also under a newer version: else the version that it hides, which may
//!    be in a deeper level, becomes visible again when a later SingleDelete has removed the newer
//!    one. A second SingleDelete directly below is dropped.
//! 5. A newer version in the same stripe hides it: dropped. Only a Delete below a pair of rule 2
//!    stays: it is still needed when RocksDB has dropped the pair.
//! 6. A tombstone with nothing below the inputs is dropped, if every reader sees it, or if no older
//!    stripe has a version of the key.
//! 7. Merge operands are held until a version of the same stripe that is no operand, then merged
//!    into a value; at the end of the stripe they are merged into one operand, or into a value if
//!    nothing is below. They stay as they are without an operator, if together they are larger than
//!    a limit, and above a value in a blob file or an entity.
//! 8. Everything else stays.

mod held;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::Arc;

use rocksfmt::{KEY_TRAILER_BYTES, ValueType, pack, timed_put_value, unpack, value_type};

use crate::compaction_filter::{CompactionFilter, FilterDecision};
use crate::error::{Error, Kind, Result};
use crate::merge_operator::MergeOperator;
use crate::mutant::mutant;
use crate::write::compaction_iter::held::Held;

/// Where the outputs go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// A flush. Tables with older versions may exist.
    Flush,
    /// A level; deeper ones are asked for each key ([`Around::exists_below`]).
    Level,
    /// A level with no older data below for any key of the inputs.
    Bottommost,
}

/// What the caller knows of the data around the inputs. Keys are asked in ascending order.
pub(crate) trait Around {
    /// Whether a version of the key that is not in the inputs and is older than them may exist.
    /// Asked at most once for a key, and only for [`Place::Level`].
    fn exists_below(&mut self, user_key: &[u8]) -> bool;

    /// Whether the inputs have range tombstones.
    fn has_tombstones(&self) -> bool;

    /// The largest sequence, at most `at`, of a range tombstone of the inputs that covers the key;
    /// 0 if there is none.
    fn covered(&mut self, user_key: &[u8], at: u64) -> u64;
}

/// How to compact.
#[derive(Clone, Debug)]
pub(crate) struct Rules {
    /// The sequences that readers may read at, ascending and not empty: of all snapshots, and the
    /// visible one ([`crate::db::Db::snapshots`]).
    pub snapshots: Vec<u64>,
    pub place: Place,
    pub merge_operator: Option<MergeOperator>,
    /// Operands and base of one merge may have this many bytes.
    pub merge_bytes: usize,
    /// Not for a flush.
    pub filter: Option<Arc<dyn CompactionFilter>>,
    /// No value gets the sequence 0.
    pub keep_sequences: bool,
}

/// An entry for a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Output<'a> {
    /// The internal key.
    pub key: &'a [u8],
    pub value: &'a [u8],
    /// It is the first output with its user key.
    pub begins_key: bool,
}

/// The newer versions of the key in the same stripe so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Met {
    /// Nothing that hides older versions.
    Nothing,
    /// The last one was a SingleDelete. It hides older versions; the next one is for it.
    SingleDelete,
    /// The last one was a SingleDelete of a newer stripe; the next one is for it.
    NewerSingleDelete,
    /// A SingleDelete and its version. They hide older versions.
    Pair,
    /// A version that hides older ones.
    Newer,
    /// A tombstone with nothing below: all older versions are dropped.
    End,
}

/// An output that is ready: made of held or changed entries.
struct Ready {
    key: Range<usize>,
    value: Range<usize>,
    begins_key: bool,
}

/// Decides for entry after entry; see the module's text.
pub(crate) struct CompactionIter {
    rules: Rules,
    /// The internal key of the last entry; its user key is the current one.
    key: Vec<u8>,
    packed: u64,
    /// The index of the last entry's stripe in [`Rules::snapshots`], or their number.
    stripe: usize,
    met: Met,
    /// The newest range tombstone of the stripe that covers the key, if known.
    covered: Option<u64>,
    /// Whether older versions may exist that are not in the inputs, if known.
    below: Option<bool>,
    /// A Delete with nothing below the inputs, until an older stripe needs it.
    delete: Option<u64>,
    /// The operands of the stripe, until their base.
    held: Held,
    /// The last entry is the newest of the key.
    is_newest: bool,
    /// No output of the key was made yet.
    begins: bool,
    /// The output that is the last entry itself: its trailer, and whether its value stays.
    this: Option<(u64, bool)>,
    ready: Vec<Ready>,
    /// The outputs before this one in `ready` were taken.
    taken: usize,
    /// Keys and values of `ready`.
    arena: Vec<u8>,
    /// The key of `this`.
    out: Vec<u8>,
}

impl CompactionIter {
    /// Compacts by `rules`.
    pub fn new(rules: Rules) -> CompactionIter {
        debug_assert!(rules.snapshots.is_sorted() && !rules.snapshots.is_empty());
        CompactionIter {
            rules,
            key: Vec::new(),
            packed: 0,
            stripe: 0,
            met: Met::Nothing,
            covered: None,
            below: None,
            delete: None,
            held: Held::default(),
            is_newest: true,
            begins: true,
            this: None,
            ready: Vec::new(),
            taken: 0,
            arena: Vec::new(),
            out: Vec::new(),
        }
    }

    /// The internal key of the entry that was pushed last.
    pub fn input_key(&self) -> &[u8] {
        &self.key
    }

    /// Takes the next entry of the inputs. The outputs of earlier ones must have been taken.
    ///
    /// # Errors
    /// [`Kind::Corruption`] if its type is unknown, or versions of a key are not in order.
    pub fn push<A: Around>(
        &mut self,
        around: &mut A,
        user_key: &[u8],
        packed: u64,
        value: &[u8],
    ) -> Result<()> {
        debug_assert!(self.this.is_none() && self.taken == self.ready.len());
        self.ready.clear();
        self.arena.clear();
        self.taken = 0;
        let (sequence, _) = unpack(packed);
        let stripe = self.stripe_of(sequence);
        let at = self.key.len().wrapping_sub(KEY_TRAILER_BYTES);
        if self.key.get(..at) != Some(user_key) {
            self.end_key(around);
            self.begin_key(user_key, packed, stripe);
        } else {
            if packed >= self.packed {
                // A log that was replayed twice gives the same entry twice.
                return if packed == self.packed { Ok(()) } else { Err(self.not_in_order(packed)) };
            }
            self.is_newest = false;
            self.packed = packed;
            self.key[at..].copy_from_slice(&packed.to_le_bytes());
            if stripe != self.stripe {
                self.end_stripe(stripe);
            }
        }
        let kind = value_type(packed).map_err(|e| Error::format("an entry", &e))?;
        match kind {
            ValueType::Value
            | ValueType::BlobIndex
            | ValueType::WideColumnEntity
            | ValueType::ValuePreferredSeqno => self.value(around, sequence, kind, value),
            ValueType::Deletion | ValueType::DeletionWithTimestamp => self.delete(around, sequence),
            ValueType::SingleDeletion => self.single_delete(around, sequence),
            ValueType::Merge => self.merge(around, sequence, value),
            ValueType::RangeDeletion => {
                return Err(Error::new(Kind::Corruption, "a range tombstone among the entries"));
            }
        }
        Ok(())
    }

    /// Takes the end of the inputs.
    pub fn finish<A: Around>(&mut self, around: &mut A) {
        debug_assert!(self.this.is_none() && self.taken == self.ready.len());
        self.ready.clear();
        self.arena.clear();
        self.taken = 0;
        self.end_key(around);
        self.key.clear();
    }

    /// The next output. `value` is the value of the entry that was pushed last.
    #[inline]
    pub fn next<'a>(&'a mut self, value: &'a [u8]) -> Option<Output<'a>> {
        if let Some(ready) = self.ready.get(self.taken) {
            self.taken += 1;
            let (key, value) = (&self.arena[ready.key.clone()], &self.arena[ready.value.clone()]);
            return Some(Output { key, value, begins_key: ready.begins_key });
        }
        let (packed, has_value) = self.this.take()?;
        let begins_key = std::mem::replace(&mut self.begins, false);
        let value = if has_value { value } else { &[] };
        if packed == self.packed {
            return Some(Output { key: &self.key, value, begins_key });
        }
        self.out.clear();
        self.out.extend_from_slice(&self.key[..self.key.len() - KEY_TRAILER_BYTES]);
        self.out.extend_from_slice(&packed.to_le_bytes());
        Some(Output { key: &self.out, value, begins_key })
    }

    fn user_key(&self) -> &[u8] {
        &self.key[..self.key.len().saturating_sub(KEY_TRAILER_BYTES)]
    }

    #[inline]
    fn stripe_of(&self, sequence: u64) -> usize {
        match self.rules.snapshots.first() {
            Some(&oldest) if sequence <= oldest => 0,
            _ => self.rules.snapshots.partition_point(|&snapshot| snapshot < sequence),
        }
    }

    #[inline]
    fn begin_key(&mut self, user_key: &[u8], packed: u64, stripe: usize) {
        self.key.clear();
        self.key.extend_from_slice(user_key);
        self.key.extend_from_slice(&packed.to_le_bytes());
        self.packed = packed;
        self.stripe = stripe;
        self.met = Met::Nothing;
        self.covered = None;
        self.below = None;
        self.delete = None;
        self.is_newest = true;
        self.begins = true;
    }

    /// Ends a stripe. The key has older versions.
    fn end_stripe(&mut self, stripe: usize) {
        if !self.held.is_empty() {
            self.merge_operands();
        }
        self.stripe = stripe;
        self.covered = None;
        self.met = match self.met {
            Met::SingleDelete | Met::NewerSingleDelete => Met::NewerSingleDelete,
            _ => Met::Nothing,
        };
    }

    #[inline]
    fn end_key<A: Around>(&mut self, around: &mut A) {
        if self.held.is_empty() {
            return;
        }
        if self.nothing_below(around) {
            self.merge_onto(around, None);
        } else {
            self.merge_operands();
        }
    }

    /// Whether the inputs have all versions of the key.
    fn nothing_below<A: Around>(&mut self, around: &mut A) -> bool {
        match self.rules.place {
            Place::Flush => false,
            Place::Bottommost => true,
            Place::Level => {
                let at = self.key.len() - KEY_TRAILER_BYTES;
                !*self.below.get_or_insert_with(|| around.exists_below(&self.key[..at]))
            }
        }
    }

    /// Whether a range tombstone of the stripe covers a version of the key.
    #[inline]
    fn is_covered<A: Around>(&mut self, around: &mut A, sequence: u64) -> bool {
        around.has_tombstones() && sequence < self.cover(around)
    }

    fn cover<A: Around>(&mut self, around: &mut A) -> u64 {
        let at = self.rules.snapshots.get(self.stripe).copied().unwrap_or(u64::MAX);
        let user_key = &self.key[..self.key.len() - KEY_TRAILER_BYTES];
        *self.covered.get_or_insert_with(|| around.covered(user_key, at))
    }

    /// A value of any kind. It hides all older versions.
    #[inline]
    fn value<A: Around>(&mut self, around: &mut A, sequence: u64, kind: ValueType, value: &[u8]) {
        match self.met {
            Met::Nothing | Met::NewerSingleDelete => {}
            Met::SingleDelete => return self.pair(sequence),
            Met::Pair | Met::Newer | Met::End => return,
        }
        if self.is_covered(around, sequence) {
            return self.merge_onto_nothing(around);
        }
        if !self.held.is_empty() {
            let base = match kind {
                ValueType::Value => Some(value),
                ValueType::ValuePreferredSeqno => timed_put_value(value).ok(),
                _ => None,
            };
            if base.is_some_and(|base| self.held.bytes() + base.len() <= self.rules.merge_bytes) {
                return self.merge_onto(around, base);
            }
            self.merge_operands();
        }
        if kind == ValueType::Value && self.is_filtered(around, sequence, value) {
            return;
        }
        self.met = if self.met == Met::NewerSingleDelete { Met::Pair } else { Met::Newer };
        let packed = match self.may_zero(around) && kind != ValueType::ValuePreferredSeqno {
            true => pack(0, kind as u8),
            false => self.packed,
        };
        self.emit(packed, true);
    }

    fn delete<A: Around>(&mut self, around: &mut A, sequence: u64) {
        if matches!(self.met, Met::Newer | Met::End) {
            return;
        }
        if self.is_covered(around, sequence) {
            return self.merge_onto_nothing(around);
        }
        if !self.held.is_empty() {
            // The value hides the Delete.
            return self.merge_onto(around, None);
        }
        if !self.nothing_below(around) {
            self.met = Met::Newer;
            self.emit(self.packed, true);
        } else if self.stripe == 0 {
            self.met = Met::End;
        } else {
            // It also does for a newer one without a version in between.
            self.met = Met::Newer;
            self.delete = Some(self.packed);
        }
    }

    fn single_delete<A: Around>(&mut self, around: &mut A, sequence: u64) {
        if matches!(self.met, Met::SingleDelete | Met::End) {
            return;
        }
        let is_covered = self.is_covered(around, sequence);
        self.merge_onto_nothing(around);
        if is_covered || (mutant("single_deletes_are_hidden") && self.met == Met::Newer) {
            return;
        }
        if self.stripe == 0 && self.nothing_below(around) {
            self.met = Met::End;
            return;
        }
        self.met = Met::SingleDelete;
        self.emit(self.packed, true);
    }

    fn merge<A: Around>(&mut self, around: &mut A, sequence: u64, operand: &[u8]) {
        match self.met {
            Met::Nothing | Met::NewerSingleDelete => {}
            Met::SingleDelete => return self.pair(sequence),
            Met::Pair | Met::Newer | Met::End => return,
        }
        if self.is_covered(around, sequence) {
            return self.merge_onto_nothing(around);
        }
        self.met = Met::Nothing;
        let bytes = self.held.bytes() + operand.len();
        if bytes > self.rules.merge_bytes && !self.held.is_empty() {
            self.merge_operands();
        }
        if self.rules.merge_operator.is_none() || operand.len() > self.rules.merge_bytes {
            self.emit(self.packed, true);
        } else {
            self.held.push(self.packed, operand);
        }
    }

    /// The newest version below a SingleDelete of the same stripe.
    fn pair(&mut self, sequence: u64) {
        self.met = Met::Pair;
        self.emit(pack(sequence, ValueType::Value as u8), false);
    }

    /// Whether the filter removed or changed the value.
    fn is_filtered<A: Around>(&mut self, around: &mut A, sequence: u64, value: &[u8]) -> bool {
        if !self.is_newest || self.stripe != 0 {
            return false;
        }
        let Some(filter) = &self.rules.filter else { return false };
        match filter.filter(self.user_key(), value) {
            FilterDecision::Keep => return false,
            FilterDecision::Remove if self.nothing_below(around) => self.met = Met::End,
            FilterDecision::Remove => {
                self.met = Met::Newer;
                self.emit(pack(sequence, ValueType::Deletion as u8), false);
            }
            FilterDecision::Change(value) => {
                self.met = Met::Newer;
                let sequence = if self.may_zero(around) { 0 } else { sequence };
                self.ready(pack(sequence, ValueType::Value as u8), |out| out.extend(value));
            }
        }
        true
    }

    /// Whether a value needs no sequence: nothing older exists, and no reader reads before it.
    #[inline]
    fn may_zero<A: Around>(&mut self, around: &mut A) -> bool {
        self.rules.place == Place::Bottommost
            && !self.rules.keep_sequences
            && self.stripe == 0
            && (!around.has_tombstones() || self.cover(around) == 0)
    }

    /// Makes a value of the held operands, if there are any: below them, the key is deleted.
    fn merge_onto_nothing<A: Around>(&mut self, around: &mut A) {
        if !self.held.is_empty() {
            self.merge_onto(around, None);
        }
    }

    /// Makes a value of the held operands and the one below them.
    fn merge_onto<A: Around>(&mut self, around: &mut A, base: Option<&[u8]>) {
        let sequence = if self.may_zero(around) { 0 } else { unpack(self.held.newest()).0 };
        let held = std::mem::take(&mut self.held);
        let Some(operator) = self.rules.merge_operator.clone() else { return };
        self.ready(pack(sequence, ValueType::Value as u8), |out| {
            operator.full(base, held.oldest_first(), out);
        });
        self.met = Met::Newer;
        self.reuse(held);
    }

    /// Makes one operand of the held ones, if the operator can.
    fn merge_operands(&mut self) {
        let held = std::mem::take(&mut self.held);
        let Some(operator) = self.rules.merge_operator.clone() else { return };
        if held.packed.len() > 1 && operator.is_associative() {
            self.ready(held.newest(), |out| operator.full(None, held.oldest_first(), out));
        } else {
            for (&packed, operand) in held.packed.iter().zip(held.operands.iter()) {
                self.ready(packed, |out| out.extend_from_slice(operand));
            }
        }
        self.reuse(held);
    }

    fn reuse(&mut self, mut held: Held) {
        held.clear();
        self.held = held;
    }

    /// Lets the last entry be an output, with this trailer, and with or without its value.
    #[inline]
    fn emit(&mut self, packed: u64, has_value: bool) {
        self.need_delete();
        self.this = Some((packed, has_value));
    }

    /// Adds an output with the current user key.
    fn ready(&mut self, packed: u64, value: impl FnOnce(&mut Vec<u8>)) {
        self.need_delete();
        self.put(packed, value);
    }

    /// The output that follows is of an older stripe than the Delete that waits for one.
    #[inline]
    fn need_delete(&mut self) {
        if let Some(delete) = self.delete.take() {
            self.put(delete, |_| ());
        }
    }

    fn put(&mut self, packed: u64, value: impl FnOnce(&mut Vec<u8>)) {
        let start = self.arena.len();
        self.arena.extend_from_slice(&self.key[..self.key.len() - KEY_TRAILER_BYTES]);
        self.arena.extend_from_slice(&packed.to_le_bytes());
        let middle = self.arena.len();
        value(&mut self.arena);
        let begins_key = std::mem::replace(&mut self.begins, false);
        let (key, value) = (start..middle, middle..self.arena.len());
        self.ready.push(Ready { key, value, begins_key });
    }

    #[cold]
    fn not_in_order(&self, packed: u64) -> Error {
        let text = format!(
            "versions of a key are not in order: {} after {}",
            packed >> 8,
            self.packed >> 8
        );
        Error::new(Kind::Corruption, text)
    }
}
