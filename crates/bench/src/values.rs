//! `db_bench`'s values: half of every hundred bytes compresses away.

/// Bytes of the stock that values are cut from.
const STOCK_BYTES: usize = 1 << 20;
/// Bytes of a piece: random ones, then their repetition.
const PIECE: usize = 100;
/// The random bytes of a piece.
const RANDOM: usize = PIECE / 2;

/// Consecutive values from a stock of bytes.
pub struct Values {
    stock: Vec<u8>,
    len: usize,
    at: usize,
}

impl Values {
    /// Values of `len` bytes from a stock of random bytes.
    pub fn new(len: usize, mut random: impl FnMut() -> u64) -> Values {
        let mut stock = Vec::with_capacity(STOCK_BYTES.max(len) + PIECE);
        while stock.len() < STOCK_BYTES.max(len) {
            let start = stock.len();
            // Printable characters, as in db_bench.
            stock.extend((0..RANDOM).map(|_| b' ' + (random() % 95) as u8));
            stock.extend_from_within(start..);
        }
        Values { stock, len, at: 0 }
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
    use super::*;

    #[test]
    fn half_of_each_piece_of_a_value_repeats_the_other() {
        let mut number = 0u64;
        let mut values = Values::new(1000, || {
            number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            number >> 33
        });
        let first = values.next().to_vec();
        assert_eq!(first.len(), 1000);
        assert_eq!(first[..50], first[50..100]);
        assert_ne!(first[..50], first[100..150]);
        assert_ne!(first, values.next());
        for _ in 0..3000 {
            assert_eq!(values.next().len(), 1000);
        }
    }

    #[test]
    fn a_value_may_be_longer_than_the_stock() {
        let mut values = Values::new(3 << 20, || 7);
        assert_eq!(values.next().len(), 3 << 20);
        assert_eq!(values.next().len(), 3 << 20);
    }
}
