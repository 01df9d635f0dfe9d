//! Merge operands that wait for the version below them.

use crate::merge_operator::Operands;

/// The operands of one key in one stripe, the newest first.
#[derive(Default)]
pub(super) struct Held {
    pub operands: Operands,
    /// Sequence and type of each.
    pub packed: Vec<u64>,
}

impl Held {
    pub fn push(&mut self, packed: u64, operand: &[u8]) {
        self.operands.push(operand);
        self.packed.push(packed);
    }

    pub fn clear(&mut self) {
        self.operands.clear();
        self.packed.clear();
    }

    pub fn is_empty(&self) -> bool {
        self.packed.is_empty()
    }

    pub fn bytes(&self) -> usize {
        self.operands.bytes()
    }

    pub fn newest(&self) -> u64 {
        self.packed.first().copied().unwrap_or(0)
    }

    /// Oldest first.
    pub fn oldest_first(&self) -> impl Iterator<Item = &[u8]> {
        self.operands.iter().rev()
    }
}
