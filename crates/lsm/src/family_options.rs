//! The options of a column family that shape its levels, from the directory's OPTIONS file.
//!
//! Names, defaults and meanings are RocksDB's, so that RocksDB goes on with the same shape. An
//! option that is absent has RocksDB's default; so has one that cannot be parsed, but then nothing
//! is written (`gate.rs`). `docs/DIRECTORIES.md` lists
//! what each option means here.

use rocksfmt::LEVELS_MAX;

use crate::option_value;
use crate::stored_options::StoredOptions;

/// `max_compaction_bytes` if it is 0, as a multiple of `target_file_size_base`.
const COMPACTION_FILES: u64 = 25;
/// Upper limit of the triggers by the number of files in level 0.
const COUNT_MAX: usize = 1 << 20;

/// `ttl` unless the options say otherwise, and `periodic_compaction_seconds` of a family with a
/// compaction filter: 30 days.
const AGE_USUAL: u64 = 30 * 24 * 60 * 60;
/// The value by which options say that they do not say otherwise.
const AGE_UNSET: u64 = u64::MAX - 1;

/// How the levels of a family are shaped.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct FamilyOptions {
    /// `num_levels`, level 0 included.
    pub levels: usize,
    /// `level_compaction_dynamic_level_bytes`: targets follow from the size of the last level.
    pub dynamic: bool,
    /// `max_bytes_for_level_base`.
    pub level_base_bytes: u64,
    /// `max_bytes_for_level_multiplier`.
    pub level_multiplier: f64,
    /// `max_bytes_for_level_multiplier_additional`, by level. Only static levels use it.
    pub level_multiplier_additional: Vec<u64>,
    /// `target_file_size_base`.
    pub file_bytes: u64,
    /// `target_file_size_multiplier`.
    pub file_multiplier: u64,
    /// `max_compaction_bytes`.
    pub compaction_bytes: u64,
    /// `level0_file_num_compaction_trigger`.
    pub level0_trigger: usize,
    /// `level0_slowdown_writes_trigger`.
    pub level0_slowdown: usize,
    /// `level0_stop_writes_trigger`.
    pub level0_stop: usize,
    /// `soft_pending_compaction_bytes_limit`; `u64::MAX` for none.
    pub pending_soft: u64,
    /// `hard_pending_compaction_bytes_limit`; `u64::MAX` for none.
    pub pending_hard: u64,
    /// `disable_auto_compactions`, or `compaction_style` none.
    pub manual_only: bool,
    /// `ttl`: files with data older than this move towards the deepest level, in seconds;
    /// `u64::MAX` for never.
    pub ttl: u64,
    /// `periodic_compaction_seconds`: files older than this are rewritten; `u64::MAX` for never.
    pub period: u64,
    /// The options do not say how often files are rewritten: see [`FamilyOptions::with_filter`].
    pub period_is_unset: bool,
}

impl Default for FamilyOptions {
    fn default() -> FamilyOptions {
        FamilyOptions::read(|_| None)
    }
}

impl FamilyOptions {
    /// The options of a family. A family without a section has RocksDB's defaults.
    pub fn of(stored: &StoredOptions, family: &str) -> FamilyOptions {
        FamilyOptions::read(|key| stored.family(family, key))
    }

    fn read<'a>(get: impl Fn(&str) -> Option<&'a str>) -> FamilyOptions {
        let number = |key: &str, default: u64| -> u64 {
            get(key).and_then(option_value::unsigned).unwrap_or(default)
        };
        let int = |key: &str, default: i32| get(key).and_then(option_value::int).unwrap_or(default);
        let flag =
            |key: &str, default: bool| get(key).and_then(option_value::flag).unwrap_or(default);
        let limit = |key: &str, default: u64| match number(key, default) {
            0 => u64::MAX,
            some => some,
        };
        // Negative for none.
        let count = |key: &str, default| match int(key, default) {
            number @ 0.. => (number as usize).clamp(1, COUNT_MAX),
            _ => COUNT_MAX,
        };
        let multiplier = get("max_bytes_for_level_multiplier").and_then(option_value::double);
        let multiplier = multiplier.filter(|value: &f64| value.is_finite()).unwrap_or(10.0);
        let additional = get("max_bytes_for_level_multiplier_additional").unwrap_or_default();
        let file_bytes = number("target_file_size_base", 64 << 20).max(1);
        let level0_trigger = count("level0_file_num_compaction_trigger", 4);
        let level0_slowdown = count("level0_slowdown_writes_trigger", 20).max(level0_trigger);
        // Universal compaction has no targets of levels: the first level with files is the base.
        let universal = get("compaction_style") == Some("kCompactionStyleUniversal");
        let set = |key: &str| match number(key, AGE_UNSET) {
            AGE_UNSET => None,
            0 => Some(u64::MAX),
            seconds => Some(seconds),
        };
        let (ttl, period) = (set("ttl").unwrap_or(AGE_USUAL), set("periodic_compaction_seconds"));
        let is_named = |key: &str| get(key).is_some_and(|name| name != "nullptr");
        let filters = is_named("compaction_filter") || is_named("compaction_filter_factory");
        let usual = if filters || universal { AGE_USUAL } else { u64::MAX };
        let every = period.unwrap_or(usual);
        FamilyOptions {
            levels: int("num_levels", 7).clamp(2, LEVELS_MAX as i32) as usize,
            // Versions before 8.4 have it off by default, and write it into the file.
            dynamic: universal || flag("level_compaction_dynamic_level_bytes", true),
            level_base_bytes: number("max_bytes_for_level_base", 256 << 20).max(1),
            level_multiplier: multiplier.max(1.001),
            level_multiplier_additional: additional
                .split(':')
                .map(|text| option_value::int(text).map_or(1, |number| number.max(1) as u64))
                .collect(),
            file_bytes,
            file_multiplier: int("target_file_size_multiplier", 1).max(1) as u64,
            compaction_bytes: match number("max_compaction_bytes", 0) {
                0 => file_bytes.saturating_mul(COMPACTION_FILES),
                bytes => bytes,
            },
            level0_trigger,
            level0_slowdown,
            level0_stop: count("level0_stop_writes_trigger", 36).max(level0_slowdown + 1),
            pending_soft: limit("soft_pending_compaction_bytes_limit", 64 << 30),
            pending_hard: limit("hard_pending_compaction_bytes_limit", 256 << 30),
            manual_only: flag("disable_auto_compactions", false)
                || get("compaction_style") == Some("kCompactionStyleNone"),
            // Universal compaction has no level to move old data to: it is rewritten.
            ttl: if universal { u64::MAX } else { ttl },
            period: if universal { every.min(ttl) } else { every },
            period_is_unset: period.is_none(),
        }
    }

    /// The options of a family that has a compaction filter: its files are rewritten now and then,
    /// so that the filter sees old data, too.
    pub fn with_filter(self) -> FamilyOptions {
        let period = if self.period_is_unset { self.period.min(AGE_USUAL) } else { self.period };
        FamilyOptions { period, ..self }
    }

    /// The multiplier from a static level to the next.
    pub fn multiplier_below(&self, level: usize) -> f64 {
        let additional = self.level_multiplier_additional.get(level).copied().unwrap_or(1);
        self.level_multiplier * additional as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> FamilyOptions {
        let file = format!("[CFOptions \"default\"]\n{text}\n");
        let stored = StoredOptions {
            name: Some("OPTIONS-000007".into()),
            file: Some(rocksfmt::OptionsFile::parse(file.as_bytes())),
            ..StoredOptions::default()
        };
        FamilyOptions::of(&stored, "default")
    }

    #[test]
    fn absent_options_have_the_defaults_of_rocksdb() {
        let options = read("");
        assert_eq!(options, FamilyOptions::default());
        assert_eq!((options.levels, options.dynamic), (7, true));
        assert_eq!((options.level_base_bytes, options.file_bytes), (256 << 20, 64 << 20));
        assert_eq!(options.compaction_bytes, 25 * (64 << 20));
        let level0 = (options.level0_trigger, options.level0_slowdown, options.level0_stop);
        assert_eq!(level0, (4, 20, 36));
        assert_eq!((options.ttl, options.period), (30 * 86_400, u64::MAX));
    }

    #[test]
    fn ages_have_the_meaning_that_rocksdb_gives_them() {
        let ages = |text: &str| {
            let options = read(text);
            (options.ttl, options.period, options.with_filter().period)
        };
        let month = 30 * 86_400;
        let unset = "ttl=18446744073709551614\nperiodic_compaction_seconds=18446744073709551614";
        assert_eq!(ages(""), (month, u64::MAX, month));
        assert_eq!(ages(unset), (month, u64::MAX, month));
        assert_eq!(ages("ttl=0\nperiodic_compaction_seconds=0"), (u64::MAX, u64::MAX, u64::MAX));
        assert_eq!(ages("ttl=7\nperiodic_compaction_seconds=9"), (7, 9, 9));
        assert_eq!(ages("compaction_filter=RemoveEmptyValueCompactionFilter").1, month);
        assert_eq!(ages("compaction_filter=nullptr").1, u64::MAX);
        let universal = "compaction_style=kCompactionStyleUniversal\nttl=";
        assert_eq!(ages(&format!("{universal}0")), (u64::MAX, month, month));
        assert_eq!(ages(&format!("{universal}50")), (u64::MAX, 50, 50));
    }

    #[test]
    fn values_are_taken_as_rocksdb_takes_them() {
        let options = read(
            "num_levels=4\nlevel_compaction_dynamic_level_bytes=false\n\
             max_bytes_for_level_base=1000\nmax_bytes_for_level_multiplier=8.500000\n\
             max_bytes_for_level_multiplier_additional=1:2:1\ntarget_file_size_base=200\n\
             target_file_size_multiplier=2\nmax_compaction_bytes=0\n\
             level0_file_num_compaction_trigger=30\nlevel0_slowdown_writes_trigger=20\n\
             level0_stop_writes_trigger=10\nsoft_pending_compaction_bytes_limit=0\n\
             disable_auto_compactions=true",
        );
        assert_eq!((options.levels, options.dynamic, options.manual_only), (4, false, true));
        assert!(read("compaction_style=kCompactionStyleNone").manual_only);
        assert!(!read("compaction_style=kCompactionStyleLevel").manual_only);
        assert!((options.multiplier_below(1) - 17.0).abs() < 1e-9);
        assert!((options.multiplier_below(9) - 8.5).abs() < 1e-9);
        assert_eq!((options.compaction_bytes, options.pending_soft), (5000, u64::MAX));
        let level0 = (options.level0_trigger, options.level0_slowdown, options.level0_stop);
        assert_eq!(level0, (30, 30, 31), "in ascending order");
    }

    #[test]
    fn values_without_meaning_are_harmless() {
        let options = read(
            "num_levels=0\nmax_bytes_for_level_base=0\nmax_bytes_for_level_multiplier=nan\n\
             target_file_size_base=x\nlevel0_file_num_compaction_trigger=-1",
        );
        assert_eq!((options.levels, options.level_base_bytes), (2, 1));
        assert!((options.level_multiplier - 10.0).abs() < 1e-9);
        assert_eq!((options.file_bytes, options.level0_trigger), (64 << 20, 1 << 20));
        assert_eq!(read("target_file_size_base=64M").file_bytes, 64 << 20);
    }
}
