//! Start times of operations that do not wait for each other.

use crate::random::Random;

/// The arrivals of an open loop, as nanoseconds after its start, in order: on average `rate` a
/// second, independent of each other (a Poisson process), for `seconds`. Programs with the same
/// seed get the same times.
pub fn arrivals(rate: f64, seconds: f64, seed: u64) -> Vec<u64> {
    let mut random = Random::new(seed);
    let mut all = Vec::with_capacity((rate * seconds * 1.1) as usize);
    let mut at = 0.0;
    loop {
        at -= (1.0 - random.unit()).ln() / rate;
        if at >= seconds {
            return all;
        }
        all.push((at * 1e9) as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::arrivals;

    #[test]
    fn arrivals_are_independent_and_have_the_given_rate() {
        let times = arrivals(10_000.0, 5.0, 1);
        assert!(times.is_sorted());
        assert!(*times.last().unwrap() < 5_000_000_000);
        let ratio = times.len() as f64 / 50_000.0;
        assert!((0.98..1.02).contains(&ratio), "{ratio}");
        // Of independent gaps, 1/e are longer than the mean.
        let long = times.windows(2).filter(|pair| pair[1] - pair[0] > 100_000).count();
        let share = long as f64 / times.len() as f64;
        assert!((0.35..0.39).contains(&share), "{share}");
        assert_eq!(times, arrivals(10_000.0, 5.0, 1));
        assert_ne!(times, arrivals(10_000.0, 5.0, 2));
    }
}
