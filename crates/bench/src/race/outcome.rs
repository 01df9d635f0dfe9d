//! The result of the race, as text and as JSON.

use std::fmt::Write as _;

use serde::Serialize;

/// The result. Its fields are the keys of the JSON.
#[derive(Clone, Debug, Serialize)]
pub struct RaceOutcome {
    /// The case.
    pub name: &'static str,
    /// Seconds of the write phase.
    pub write_s: f64,
    /// Seconds of the pass in write order.
    pub sequential_s: f64,
    /// Seconds of the hot pass.
    pub hot_s: f64,
    /// Their sum.
    pub total_s: f64,
    /// Values written.
    pub writes: u64,
    /// Values that the pass in write order has verified.
    pub sequential_verified: u64,
    /// Values that the hot pass has verified.
    pub hot_verified: u64,
    /// Threads of the client.
    pub threads: u32,
    /// Sets of each thread.
    pub sets: u64,
    /// Bytes of a value.
    pub value_size: usize,
    /// The server; null if a node was started.
    pub connect: Option<String>,
    /// What that node's writes survive; null for another server.
    pub durability: Option<String>,
    /// Bytes of the client's cache.
    pub cache_bytes: usize,
    /// Gets that it has answered.
    pub cache_hits: u64,
    /// Bytes that it reads ahead at once.
    pub read_ahead: usize,
    /// Stretches that it has read ahead.
    pub stretches: u64,
    /// Gets of the pass in write order for each round trip.
    pub sequential_gets_per_round_trip: f64,
    /// Gets of the hot pass for each round trip.
    pub hot_gets_per_round_trip: f64,
    /// Seconds of the pass at random; 0 if it was not asked for.
    pub random_s: f64,
    /// Values that it has verified.
    pub random_verified: u64,
    /// Its gets for each round trip.
    pub random_gets_per_round_trip: f64,
    /// Seconds of the gets of keys that do not exist, without an index; 0 without `index_bytes`.
    pub missing_plain_s: f64,
    /// These gets.
    pub missing_plain: u64,
    /// Bytes of the index; 0 if it was not asked for.
    pub index_bytes: u64,
    /// Its keys.
    pub index_keys: u64,
    /// Seconds in which it was loaded.
    pub index_load_s: f64,
    /// Gets that it has answered.
    pub index_answers: u64,
    /// Seconds of the gets of keys that do not exist, with the index.
    pub missing_s: f64,
    /// These gets.
    pub missing: u64,
    /// Entries of the client's cache after the hot pass.
    pub cache_entries: u64,
    /// Bytes that it uses for them besides their keys and values.
    pub cache_overhead_bytes: u64,
    /// This program's version.
    pub millrace: &'static str,
}

impl RaceOutcome {
    /// The result as a table of text.
    pub fn text(&self) -> String {
        let mut out = String::new();
        let server = match &self.connect {
            Some(address) => address.clone(),
            None => format!("a node of its own, {}", self.durability.as_deref().unwrap_or("")),
        };
        let _ = writeln!(
            out,
            "race: {} threads of {} sets, values of {} bytes, {server}",
            self.threads, self.sets, self.value_size
        );
        for (name, seconds, calls, what) in [
            ("write", self.write_s, self.writes, "set"),
            ("sequential", self.sequential_s, self.sequential_verified, "verified"),
            ("hot", self.hot_s, self.hot_verified, "verified"),
            ("random", self.random_s, self.random_verified, "verified"),
        ] {
            if calls == 0 {
                continue;
            }
            let rate = calls as f64 / seconds;
            let _ = writeln!(
                out,
                "{name:<11} {seconds:>9.3} s {rate:>10.0}/s {:>8.0} MB/s  {calls} {what}",
                rate * self.value_size as f64 / 1e6
            );
        }
        let _ = write!(out, "{:<11} {:>9.3} s", "total", self.total_s);
        if self.cache_bytes > 0 {
            let _ = write!(out, "  {} gets were cached", self.cache_hits);
        }
        if self.read_ahead > 0 {
            let _ = write!(
                out,
                "; gets for each round trip: {:.0} sequential, {:.0} hot",
                self.sequential_gets_per_round_trip, self.hot_gets_per_round_trip
            );
        }
        if self.index_keys > 0 {
            let rate = |calls: u64, seconds: f64| calls as f64 / seconds.max(1e-9);
            let _ = write!(
                out,
                "\n{:<11} {:>9.3} s  {} keys, {:.1} bytes each; misses: {:.0}/s, {:.0}/s without it",
                "index",
                self.index_load_s,
                self.index_keys,
                self.index_bytes as f64 / self.index_keys as f64,
                rate(self.missing, self.missing_s),
                rate(self.missing_plain, self.missing_plain_s),
            );
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_has_a_line_for_each_phase() {
        let outcome = RaceOutcome {
            name: "race",
            write_s: 2.0,
            sequential_s: 1.0,
            hot_s: 0.5,
            total_s: 3.5,
            writes: 1000,
            sequential_verified: 1000,
            hot_verified: 1100,
            threads: 2,
            sets: 500,
            value_size: 4096,
            connect: None,
            durability: Some("process".to_owned()),
            cache_bytes: 1,
            cache_hits: 7,
            read_ahead: 1,
            stretches: 2,
            sequential_gets_per_round_trip: 1000.0,
            hot_gets_per_round_trip: 500.0,
            random_s: 0.0,
            random_verified: 0,
            random_gets_per_round_trip: 0.0,
            missing_plain_s: 1.0,
            missing_plain: 20,
            index_bytes: 600,
            index_keys: 100,
            index_load_s: 0.1,
            index_answers: 2000,
            missing_s: 0.5,
            missing: 2000,
            cache_entries: 1,
            cache_overhead_bytes: 20,
            millrace: "1",
        };
        let text = outcome.text();
        assert_eq!(text.lines().count(), 6);
        assert!(text.contains("500/s") && text.contains("1100 verified"), "{text}");
        assert!(text.contains("3.500 s  7 gets were cached; gets for each"), "{text}");
        assert!(text.contains("1000 sequential, 500 hot\n"), "{text}");
        assert!(
            text.ends_with("100 keys, 6.0 bytes each; misses: 4000/s, 20/s without it"),
            "{text}"
        );
    }
}
