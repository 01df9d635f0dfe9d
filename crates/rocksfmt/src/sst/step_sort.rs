//! A merge sort in steps, for jobs that share their core with others.

use std::cmp::Ordering;

/// Items that one step sorts or merges.
const STEP: usize = 1024;

/// The indexes of items, which steps put into order. Equal items stay in their order.
#[derive(Clone, Debug)]
pub(crate) struct StepSort {
    indexes: Vec<u32>,
    /// The runs of this pass that are merged.
    merged: Vec<u32>,
    /// Runs of this many are sorted; 0 in the first pass.
    width: usize,
    /// The next items of the two runs that are merged.
    left: usize,
    right: usize,
}

impl StepSort {
    /// Of this many items.
    pub fn new(len: u32) -> StepSort {
        let indexes = (0..len).collect();
        StepSort { indexes, merged: Vec::new(), width: 0, left: 0, right: 0 }
    }

    /// Does the next step; false if none was left.
    pub fn step(&mut self, order: impl Fn(u32, u32) -> Ordering) -> bool {
        let len = self.indexes.len();
        if self.width == 0 {
            let end = len.min(self.left + STEP);
            self.indexes[self.left..end].sort_by(|&a, &b| order(a, b));
            self.left = end;
            if end == len {
                self.width = STEP;
                self.begin(0);
            }
            return true;
        }
        if self.width >= len {
            return false;
        }
        self.merge(order);
        if self.merged.len() == len {
            std::mem::swap(&mut self.indexes, &mut self.merged);
            self.merged.clear();
            self.width *= 2;
            self.begin(0);
        }
        true
    }

    /// Begins with the two runs at an index.
    fn begin(&mut self, start: usize) {
        self.left = start;
        self.right = self.indexes.len().min(start + self.width);
    }

    /// Merges some items of two runs.
    fn merge(&mut self, order: impl Fn(u32, u32) -> Ordering) {
        let start = self.merged.len() / (2 * self.width) * (2 * self.width);
        let middle = self.indexes.len().min(start + self.width);
        let end = self.indexes.len().min(middle + self.width);
        for _ in 0..STEP {
            let is_left = match (self.left < middle, self.right < end) {
                (true, true) => order(self.indexes[self.right], self.indexes[self.left]).is_ge(),
                (left, right) if left || right => left,
                _ => {
                    self.begin(end);
                    return;
                }
            };
            let next = if is_left { &mut self.left } else { &mut self.right };
            self.merged.push(self.indexes[*next]);
            *next += 1;
        }
        if self.left == middle && self.right == end {
            self.begin(end);
        }
    }

    /// The indexes in order, after the last step.
    pub fn into_indexes(self) -> Vec<u32> {
        self.indexes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn steps_sort_as_one(len in 0usize..9000, kinds in 1u32..500, seed: u32) {
            let item = |at: u32| ((at ^ seed).wrapping_mul(2_654_435_761) >> 7) % kinds;
            let mut sort = StepSort::new(len as u32);
            let mut steps = 0;
            while sort.step(|a, b| item(a).cmp(&item(b))) {
                steps += 1;
            }
            let mut expected: Vec<u32> = (0..len as u32).collect();
            expected.sort_by_key(|&at| item(at));
            prop_assert_eq!(sort.into_indexes(), expected);
            prop_assert!(steps <= 6 * (len / STEP + 4), "{} steps", steps);
        }
    }
}
