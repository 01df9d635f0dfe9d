//! A column family that comes and goes while others are written to, and what must be in it.
//!
//! It has one key, [`KEY`], which some batches set to their number, together with keys of other
//! families. So after any crash the key has the value of the last such batch that is there. The
//! family itself is there if its creation was acknowledged, and gone if its removal was; while one
//! of them is under way, it may be there.

use lsm::CfId;

/// Its name.
pub(crate) const NAME: &str = "extra";
/// Its only key.
pub(crate) const KEY: &[u8] = b"the extra key";

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Gone,
    MayBeThere,
    There(CfId),
}

/// The family.
#[derive(Debug, Default)]
pub(crate) struct Extra {
    state: State,
    /// Batches that wrote to it since it was made, in order, each with the number in its value.
    writes: Vec<(u64, u64)>,
}

impl Extra {
    /// Its id, if it is there.
    pub fn id(&self) -> Option<CfId> {
        match self.state {
            State::There(id) => Some(id),
            State::Gone | State::MayBeThere => None,
        }
    }

    /// Whether it may be made.
    pub fn is_gone(&self) -> bool {
        self.state == State::Gone
    }

    /// The value that batch `number` gives to the key: some are large.
    pub fn value(number: u64) -> Vec<u8> {
        number.to_le_bytes().repeat([2, 60, 400][number as usize % 3])
    }

    pub fn begin_making(&mut self) {
        self.state = State::MayBeThere;
        self.writes.clear();
    }

    pub fn begin_dropping(&mut self) {
        self.state = State::MayBeThere;
    }

    pub fn note_there(&mut self, id: CfId) {
        self.state = State::There(id);
    }

    pub fn note_gone(&mut self) {
        self.state = State::Gone;
    }

    /// Notes that a batch writes to it.
    pub fn write(&mut self, number: u64) {
        let at = self.writes.partition_point(|&(batch, _)| batch < number);
        self.writes.insert(at, (number, number));
    }

    /// Removes the batches after `number`.
    pub fn truncate(&mut self, number: u64) {
        self.writes.retain(|&(batch, _)| batch <= number);
    }

    /// Removes a batch. Returns whether it wrote to the family.
    pub fn remove(&mut self, number: u64) -> bool {
        let before = self.writes.len();
        self.writes.retain(|&(batch, _)| batch != number);
        self.writes.len() < before
    }

    /// Takes over what an opening has found: the id, and the value of the key. After batch
    /// `number`, if that is known, the value must fit.
    ///
    /// # Panics
    /// When the family is missing, or back, or has another value.
    pub fn settle(&mut self, found: Option<(CfId, Option<Vec<u8>>)>, number: Option<u64>) {
        let Some((id, value)) = found else {
            assert!(self.id().is_none(), "the extra column family is missing: {self:?}");
            self.note_gone();
            return;
        };
        assert!(!self.is_gone(), "the extra column family is there and was dropped");
        assert!(self.id().is_none_or(|known| known == id), "the extra column family has id {id}");
        self.state = State::There(id);
        let has = value.as_ref().and_then(|value| value.first_chunk());
        let has = has.map(|number| u64::from_le_bytes(*number));
        assert!(value == has.map(Extra::value), "the extra key has half a value");
        if let Some(number) = number {
            let last = self.writes.iter().rev().find(|&&(batch, _)| batch <= number);
            let should = last.map(|&(_, value)| value);
            assert!(has == should, "the extra key is of batch {has:?} and should be of {should:?}");
        } else {
            assert!(
                has.is_none() || self.writes.iter().any(|&(_, value)| has == Some(value)),
                "the extra key has a value that it never had"
            );
            self.writes = has.map(|has| (0, has)).into_iter().collect();
        }
    }
}
