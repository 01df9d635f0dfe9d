//! Sums over the connections of a core, for the limits that they share.

use std::cell::Cell;
use std::rc::Rc;

/// A sum over connections; each keeps its part up to date through a [`Share`].
#[derive(Debug, Default)]
pub(crate) struct Gauge(Rc<Cell<usize>>);

impl Gauge {
    pub fn get(&self) -> usize {
        self.0.get()
    }

    /// A new part of the sum: 0 at first, subtracted when dropped.
    pub fn share(&self) -> Share {
        Share { sum: self.0.clone(), part: 0 }
    }
}

/// One holder's part of a [`Gauge`].
#[derive(Debug)]
pub(crate) struct Share {
    sum: Rc<Cell<usize>>,
    part: usize,
}

impl Share {
    pub fn part(&self) -> usize {
        self.part
    }

    #[inline]
    pub fn set(&mut self, part: usize) {
        if part != self.part {
            self.sum.set(self.sum.get() - self.part + part);
            self.part = part;
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.set(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gauge_is_the_sum_of_its_live_shares() {
        let gauge = Gauge::default();
        let (mut a, mut b) = (gauge.share(), gauge.share());
        a.set(10);
        b.set(5);
        a.set(7);
        assert_eq!(gauge.get(), 12);
        drop(a);
        assert_eq!(gauge.get(), 5);
    }
}
