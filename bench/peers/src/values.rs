//! `db_bench`'s values, which Millrace's benchmark makes, too: half of every hundred bytes can be
//! compressed away.

use workload::Random;

const STOCK_BYTES: usize = 1 << 20;
const PIECE: usize = 100;
const RANDOM: usize = PIECE / 2;

/// Consecutive values from a stock of bytes.
#[derive(Clone)]
pub struct Values {
    stock: Vec<u8>,
    len: usize,
    at: usize,
}

impl Values {
    /// Values of `len` bytes.
    pub fn new(len: usize, random: &mut Random) -> Self {
        let mut stock = Vec::with_capacity(STOCK_BYTES.max(len) + PIECE);
        while stock.len() < STOCK_BYTES.max(len) {
            let start = stock.len();
            stock.extend((0..RANDOM).map(|_| b' ' + random.below(95) as u8));
            stock.extend_from_within(start..);
        }
        Self { stock, len, at: 0 }
    }

    /// The next value.
    pub fn next(&mut self) -> &[u8] {
        if self.at + self.len > self.stock.len() {
            self.at = 0;
        }
        let from = self.at;
        self.at += self.len;
        &self.stock[from..self.at]
    }
}

#[cfg(test)]
mod tests {
    use super::{Random, Values};

    #[test]
    fn half_of_each_piece_of_a_value_repeats_the_other() {
        let mut values = Values::new(1000, &mut Random::new(7));
        let first = values.next().to_vec();
        assert_eq!(first.len(), 1000);
        assert_eq!(first[..50], first[50..100]);
        assert_ne!(first, values.next());
        assert!((0..3000).all(|_| values.next().len() == 1000));
    }
}
