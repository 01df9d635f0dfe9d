//! Which blob files are collected: a pure function of their sizes and the rules.

/// When garbage is collected, and how much at a time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Rules {
    /// The share of the files, the oldest ones, that may be collected.
    pub age_cutoff: f64,
    /// Share of garbage in these at which it is collected; `None` for no such rule.
    pub threshold: Option<f64>,
    /// Bytes of all files at which garbage is collected.
    pub start: u64,
    /// Bytes of all files from which on writes are slowed most.
    pub most: u64,
    /// Garbage of fewer bytes is not worth it.
    pub garbage_min: u64,
    /// Most live bytes, and most values, that are moved at a time; but one file at least.
    pub bytes_max: u64,
    pub values_max: u64,
}

/// A complete blob file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlobSize {
    pub number: u64,
    /// Bytes of its values with their keys and headers.
    pub bytes: u64,
    pub garbage_bytes: u64,
    /// Live values.
    pub values: u64,
    /// It can be read, and no log refers to it.
    pub is_eligible: bool,
}

impl BlobSize {
    /// The share of garbage.
    fn garbage(&self) -> f64 {
        self.garbage_bytes as f64 / self.bytes.max(1) as f64
    }

    /// Bytes of its live values.
    pub fn live_bytes(&self) -> u64 {
        self.bytes.saturating_sub(self.garbage_bytes)
    }
}

/// The files to collect, by number; none if nothing is due. Those with the largest share of garbage
/// are chosen. `files` are all complete blob files of a column family, the oldest first.
pub(crate) fn pick(files: &[BlobSize], rules: &Rules) -> Vec<u64> {
    let old = (files.len() as f64 * rules.age_cutoff.clamp(0.0, 1.0)).floor() as usize;
    let sum = |files: &[BlobSize]| {
        let bytes: u64 = files.iter().map(|file| file.bytes).sum();
        let garbage: u64 = files.iter().map(|file| file.garbage_bytes).sum();
        (bytes, garbage)
    };
    let (bytes, garbage) = sum(files);
    let is_large = garbage >= rules.garbage_min && bytes >= rules.start;
    let (old_bytes, old_garbage) = sum(&files[..old]);
    let is_forced = rules
        .threshold
        .is_some_and(|share| old_garbage > 0 && old_garbage as f64 >= old_bytes as f64 * share);
    if !is_large && !is_forced {
        return Vec::new();
    }
    let mut candidates: Vec<&BlobSize> =
        files[..old].iter().filter(|file| file.is_eligible && file.garbage_bytes > 0).collect();
    candidates.sort_by(|a, b| b.garbage().total_cmp(&a.garbage()).then(a.number.cmp(&b.number)));
    // Files below the average make the average worse.
    let least = candidates.first().map_or(0.0, |best| best.garbage() / 2.0);
    let least = least.max(garbage as f64 / bytes.max(1) as f64).min(least * 2.0);
    let (mut live, mut values) = (0, 0);
    let mut picked = Vec::new();
    for file in candidates.into_iter().take_while(|file| file.garbage() >= least) {
        live += file.live_bytes();
        values += file.values;
        if !picked.is_empty() && (live > rules.bytes_max || values > rules.values_max) {
            break;
        }
        picked.push(file.number);
    }
    picked.sort_unstable();
    picked
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULES: Rules = Rules {
        age_cutoff: 1.0,
        threshold: None,
        start: 1500,
        most: 2000,
        garbage_min: 100,
        bytes_max: 1000,
        values_max: 1000,
    };

    /// A file of 1000 bytes, of which this many are garbage.
    fn file(number: u64, garbage_bytes: u64) -> BlobSize {
        let values = (1000 - garbage_bytes) / 10;
        BlobSize { number, bytes: 1000, garbage_bytes, values, is_eligible: true }
    }

    #[test]
    fn nothing_is_due_while_files_take_little_more_than_their_live_values() {
        assert_eq!(pick(&[], &RULES), []);
        assert_eq!(pick(&[file(1, 300), file(2, 400)], &Rules { start: 2001, ..RULES }), []);
        assert_eq!(pick(&[file(1, 300), file(2, 400)], &RULES), [2]);
        // Little garbage is not worth it.
        let large = Rules { garbage_min: 701, ..RULES };
        assert_eq!(pick(&[file(1, 300), file(2, 400)], &large), []);
    }

    #[test]
    fn files_with_the_largest_share_of_garbage_come_first_up_to_a_limit() {
        let files = [file(1, 400), file(2, 900), file(3, 700), file(4, 0), file(5, 800)];
        assert_eq!(pick(&files, &RULES), [2, 3, 5]);
        assert_eq!(pick(&files, &Rules { bytes_max: 300, ..RULES }), [2, 5]);
        assert_eq!(pick(&files, &Rules { values_max: 10, ..RULES }), [2]);
        assert_eq!(pick(&files, &Rules { bytes_max: 0, ..RULES }), [2], "one file at least");
    }

    #[test]
    fn files_that_logs_refer_to_are_not_collected() {
        let held = |file: BlobSize| BlobSize { is_eligible: false, ..file };
        assert_eq!(pick(&[held(file(1, 900)), file(2, 500)], &RULES), [2]);
        assert_eq!(pick(&[held(file(1, 900)), held(file(2, 800))], &RULES), []);
    }

    #[test]
    fn the_options_say_how_old_files_are_and_when_they_are_collected_at_any_rate() {
        let files = [file(1, 0), file(2, 100), file(3, 900), file(4, 900)];
        let half = Rules { age_cutoff: 0.5, ..RULES };
        assert_eq!(pick(&files, &half), [2]);
        assert_eq!(pick(&files, &Rules { age_cutoff: 0.0, ..RULES }), []);
        let calm = Rules { start: 10_000, ..half };
        assert_eq!(pick(&files, &calm), []);
        assert_eq!(pick(&files, &Rules { threshold: Some(0.05), ..calm }), [2]);
        assert_eq!(pick(&files, &Rules { threshold: Some(0.06), ..calm }), []);
        assert_eq!(pick(&[file(1, 0)], &Rules { threshold: Some(0.0), ..RULES }), []);
    }
}
