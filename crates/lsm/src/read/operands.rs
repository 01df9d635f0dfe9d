//! The merge operands of a key that a read has found, until it finds the value below them.

use std::rc::Rc;

use rocksfmt::ValueType;

use crate::error::{Error, Kind, Result};
use crate::merge_operator::{MergeOperator, Operands, merge_bytes_max};
use crate::read::state::{ReadContext, ReaderState};
use crate::read::value::Value;
use crate::version::Family;

/// Operands from which on they are merged among themselves.
const SQUEEZE: usize = 1024;
/// Memory for an operand besides its bytes.
const OVERHEAD: usize = size_of::<usize>();
/// All reads of a core together may hold this many times the operands of one.
const READS: usize = 4;

/// The order in which operands are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    NewestFirst,
    OldestFirst,
}

/// Operands of one key.
pub(crate) struct FoundOperands {
    state: Rc<ReaderState>,
    operator: MergeOperator,
    order: Order,
    operands: Operands,
    /// The operands that were found.
    count: usize,
    /// Bytes added to [`ReaderState::operand_bytes`].
    charged: usize,
}

impl FoundOperands {
    /// # Errors
    /// The merge operator of the family is not known.
    pub fn new(context: &ReadContext, family: &Family, order: Order) -> Result<FoundOperands> {
        Ok(FoundOperands {
            state: context.state.clone(),
            operator: family.merge.operator(&family.name)?.clone(),
            order,
            operands: Operands::default(),
            count: 0,
            charged: 0,
        })
    }

    /// The number of operands found so far.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Takes the next operand.
    ///
    /// # Errors
    /// [`Kind::Memory`] if they are too large.
    pub fn push(&mut self, operand: &[u8]) -> Result<()> {
        if self.operands.len() >= SQUEEZE && self.operator.is_associative() {
            let mut merged = Vec::with_capacity(self.operands.bytes());
            self.merge(None, &mut merged);
            self.operands.clear();
            self.operands.push(&merged);
            self.charge(merged.len() + OVERHEAD)?;
        }
        self.count += 1;
        self.charge(self.charged + operand.len() + OVERHEAD)?;
        self.operands.push(operand);
        Ok(())
    }

    /// Sets the memory that is held.
    fn charge(&mut self, bytes: usize) -> Result<()> {
        let limit = merge_bytes_max(&self.state.core);
        let others = self.state.operand_bytes.get() - self.charged;
        if bytes > limit || others.saturating_add(bytes) > READS * limit {
            let text = format!(
                "the merge operands of a key, {} so far, take more than {limit} bytes: compact the \
                 database, or raise --memory",
                self.count
            );
            return Err(Error::new(Kind::Memory, text));
        }
        self.state.operand_bytes.set(others + bytes);
        self.charged = bytes;
        Ok(())
    }

    fn merge(&self, base: Option<&[u8]>, out: &mut Vec<u8>) {
        match self.order {
            Order::NewestFirst => self.operator.full(base, self.operands.iter().rev(), out),
            Order::OldestFirst => self.operator.full(base, self.operands.iter(), out),
        }
    }

    /// The merged bytes, which are not in the core's buffers.
    fn merged(&self, base: Option<&[u8]>) -> Result<Vec<u8>> {
        let bytes = self.operands.bytes() + base.map_or(0, <[u8]>::len);
        if !self.state.core.pool().could_hold(bytes) {
            let text = format!("merging a value of {bytes} bytes");
            return Err(Error::new(Kind::Memory, text));
        }
        let mut out = Vec::with_capacity(bytes);
        self.merge(base, &mut out);
        Ok(out)
    }

    /// What the operands make of the value below them. Suspends when memory is short.
    pub async fn value(self, base: Option<Value>) -> Result<Value> {
        let merged = self.merged(base.as_deref())?;
        // Nothing that occupies buffers may wait for one.
        drop(base);
        let mut buf = self.state.alloc(merged.len()).await?;
        buf[..merged.len()].copy_from_slice(&merged);
        Ok(Value::block(fs::Slice::new(buf.share(), 0..merged.len())))
    }

    /// The same, or `None` if there is no memory now.
    pub fn value_now(self, base: Option<Value>) -> Option<Result<Value>> {
        let merged = match self.merged(base.as_deref()) {
            Ok(merged) => merged,
            Err(error) => return Some(Err(error)),
        };
        let mut buf = self.state.core.pool().alloc_reclaiming(merged.len())?;
        buf[..merged.len()].copy_from_slice(&merged);
        Some(Ok(Value::block(fs::Slice::new(buf.share(), 0..merged.len()))))
    }
}

impl Drop for FoundOperands {
    fn drop(&mut self) {
        self.state.operand_bytes.set(self.state.operand_bytes.get() - self.charged);
    }
}

/// Whether an entry is a merge operand, by its packed sequence and type.
#[inline]
pub(crate) fn is_operand(packed: u64) -> bool {
    packed as u8 == ValueType::Merge as u8
}
