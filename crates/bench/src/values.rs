//! `db_bench`'s values: half of every hundred bytes can be compressed away.

/// Bytes among which values are cut out.
const STOCK_BYTES: usize = 1 << 20;
/// Bytes after which new random ones begin.
const PIECE: usize = 100;
/// Of these, the random ones; the rest repeats them.
const RANDOM: usize = PIECE / 2;

/// Values one after another out of a stock of bytes.
pub struct Values {
    stock: Vec<u8>,
    len: usize,
    at: usize,
}

impl Values {
    /// Values of `len` bytes, out of a stock that `random` makes.
    pub fn new(len: usize, mut random: impl FnMut() -> u64) -> Values {
        let mut stock = Vec::with_capacity(STOCK_BYTES.max(len) + PIECE);
        while stock.len() < STOCK_BYTES.max(len) {
            let start = stock.len();
            // Characters that can be printed, as db_bench has them.
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
    fn values_have_their_length_and_half_of_each_piece_repeats_the_other() {
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
