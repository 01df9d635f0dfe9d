//! The values of options in an OPTIONS file, parsed as RocksDB parses them.
//!
//! RocksDB reads the digits at the beginning of a number and a unit after them (`64M`), and ignores
//! what follows. A value without digits makes it refuse the whole file; `gate.rs` then refuses to
//! write, because a default in its place would not be what the user has asked for.

/// How RocksDB parses an option.
#[derive(Clone, Copy, Debug)]
enum Form {
    /// As [`int`].
    Int,
    /// Numbers separated by `:`.
    Ints,
    /// As [`unsigned`].
    Unsigned,
    /// As [`double`].
    Double,
    /// As [`flag`].
    Flag,
    /// One of these names.
    Name(&'static [&'static str]),
}

/// The options of a family that are obeyed here, except those of its tables, which
/// `TableOptions::read` checks.
const OF_FAMILY: [(&str, Form); 25] = [
    ("num_levels", Form::Int),
    ("level0_file_num_compaction_trigger", Form::Int),
    ("level0_slowdown_writes_trigger", Form::Int),
    ("level0_stop_writes_trigger", Form::Int),
    ("target_file_size_multiplier", Form::Int),
    ("blob_file_starting_level", Form::Int),
    ("max_bytes_for_level_multiplier_additional", Form::Ints),
    ("max_bytes_for_level_base", Form::Unsigned),
    ("target_file_size_base", Form::Unsigned),
    ("max_compaction_bytes", Form::Unsigned),
    ("soft_pending_compaction_bytes_limit", Form::Unsigned),
    ("hard_pending_compaction_bytes_limit", Form::Unsigned),
    ("ttl", Form::Unsigned),
    ("periodic_compaction_seconds", Form::Unsigned),
    ("min_blob_size", Form::Unsigned),
    ("blob_file_size", Form::Unsigned),
    ("max_bytes_for_level_multiplier", Form::Double),
    ("blob_garbage_collection_age_cutoff", Form::Double),
    ("blob_garbage_collection_force_threshold", Form::Double),
    ("level_compaction_dynamic_level_bytes", Form::Flag),
    ("disable_auto_compactions", Form::Flag),
    ("enable_blob_files", Form::Flag),
    ("enable_blob_garbage_collection", Form::Flag),
    ("compaction_style", Form::Name(&STYLES)),
    ("blob_compression_type", Form::Name(&COMPRESSIONS)),
];

/// The options of the database that are obeyed here.
const OF_DATABASE: [(&str, Form); 5] = [
    ("allow_2pc", Form::Flag),
    ("allow_ingest_behind", Form::Flag),
    ("avoid_flush_during_recovery", Form::Flag),
    ("max_manifest_file_size", Form::Unsigned),
    ("wal_recovery_mode", Form::Name(&RECOVERY_MODES)),
];

const STYLES: [&str; 4] = [
    "kCompactionStyleLevel",
    "kCompactionStyleUniversal",
    "kCompactionStyleFIFO",
    "kCompactionStyleNone",
];

const COMPRESSIONS: [&str; 11] = [
    "kNoCompression",
    "kSnappyCompression",
    "kZlibCompression",
    "kBZip2Compression",
    "kLZ4Compression",
    "kLZ4HCCompression",
    "kXpressCompression",
    "kZSTD",
    "kZSTDNotFinalCompression",
    "kCustomCompression",
    "kDisableCompressionOption",
];

const RECOVERY_MODES: [&str; 4] = [
    "kTolerateCorruptedTailRecords",
    "kAbsoluteConsistency",
    "kPointInTimeRecovery",
    "kSkipAnyCorruptedRecords",
];

/// An option of a family that RocksDB cannot parse: `NAME=VALUE`.
pub(crate) fn unparsable_of_family<'a>(get: impl Fn(&str) -> Option<&'a str>) -> Option<String> {
    unparsable(&OF_FAMILY, get)
}

/// An option of the database that RocksDB cannot parse: `NAME=VALUE`.
pub(crate) fn unparsable_of_database<'a>(get: impl Fn(&str) -> Option<&'a str>) -> Option<String> {
    unparsable(&OF_DATABASE, get)
}

fn unparsable<'a>(
    options: &[(&str, Form)],
    get: impl Fn(&str) -> Option<&'a str>,
) -> Option<String> {
    let is_wrong = |form, text: &str| match form {
        Form::Int => int(text).is_none(),
        Form::Ints => !text.is_empty() && text.split(':').any(|part| int(part).is_none()),
        Form::Unsigned => unsigned(text).is_none(),
        Form::Double => double(text).is_none(),
        Form::Flag => flag(text).is_none(),
        Form::Name(names) => !names.contains(&text),
    };
    let mut said = options.iter().filter_map(|&(name, form)| Some((name, form, get(name)?)));
    let (name, _, text) = said.find(|&(_, form, text)| is_wrong(form, text))?;
    Some(format!("{name}={text}"))
}

/// A signed number of 32 bits with an optional unit.
pub(crate) fn int(text: &str) -> Option<i32> {
    let (is_negative, digits, unit) = split(text);
    let magnitude: i64 = digits.parse().ok()?;
    let number = i32::try_from(if is_negative { -magnitude } else { magnitude }).ok()?;
    match shift(unit) {
        // RocksDB knows no larger unit here.
        40 => Some(number),
        bits => Some(number.wrapping_shl(bits)),
    }
}

/// An unsigned number of 64 bits with an optional unit. As in C, a negative one wraps around.
pub(crate) fn unsigned(text: &str) -> Option<u64> {
    let (is_negative, digits, unit) = split(text);
    let magnitude: u64 = digits.parse().ok()?;
    let number = if is_negative { magnitude.wrapping_neg() } else { magnitude };
    Some(number.wrapping_shl(shift(unit)))
}

/// A floating-point number; what follows it is ignored.
pub(crate) fn double(text: &str) -> Option<f64> {
    let text = text.trim_start();
    let end = text.find(|c: char| !c.is_ascii_digit() && !"+-.eE".contains(c));
    let head = &text[..end.unwrap_or(text.len())];
    text.parse().or_else(|_| head.parse()).ok()
}

/// A truth value.
pub(crate) fn flag(text: &str) -> Option<bool> {
    match text {
        "true" | "1" => Some(true),
        "false" | "0" => Some(false),
        _ => None,
    }
}

/// The sign, the digits and what follows them.
fn split(text: &str) -> (bool, &str, &str) {
    let text = text.trim_start();
    let (is_negative, text) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    (is_negative, &text[..end], &text[end..])
}

/// The power of two of a unit.
fn shift(unit: &str) -> u32 {
    match unit.bytes().next() {
        Some(b'k' | b'K') => 10,
        Some(b'm' | b'M') => 20,
        Some(b'g' | b'G') => 30,
        Some(b't' | b'T') => 40,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_parsed_as_rocksdb_does() {
        let ints = ["7", "7x", " +7", "-1", "2k", "1M", "1T", "2147483647"];
        let parsed = [7, 7, 7, -1, 2048, 1 << 20, 1, i32::MAX].map(Some);
        assert_eq!(ints.map(int), parsed);
        assert_eq!(
            ["", "abc", "x7", "-", "2147483648", "99999999999999999999"].map(int),
            [None; 6]
        );
        let numbers = ["64M", "1t", "-1", "18446744073709551615", "5 # five"];
        assert_eq!(numbers.map(unsigned), [64 << 20, 1 << 40, u64::MAX, u64::MAX, 5].map(Some));
        assert_eq!(["", "M", "18446744073709551616"].map(unsigned), [None; 3]);
        assert_eq!(["8.5", "10", "1e3x", "0.25;"].map(double), [8.5, 10.0, 1000.0, 0.25].map(Some));
        assert_eq!(["", "x", "-"].map(double), [None; 3]);
        assert_eq!(["true", "1", "false", "0"].map(flag), [true, true, false, false].map(Some));
        assert_eq!(["", "TRUE", "yes"].map(flag), [None; 3]);
    }

    #[test]
    fn what_cannot_be_parsed_is_named() {
        let wrong = |name: &'static str, text: &'static str| {
            let get = |key: &str| (key == name).then_some(text);
            unparsable_of_family(get).or_else(|| unparsable_of_database(get))
        };
        for (name, _) in OF_FAMILY.iter().chain(&OF_DATABASE) {
            assert_eq!(wrong(name, "a:"), Some(format!("{name}=a:")));
        }
        for (name, text) in [
            ("num_levels", "7x"),
            ("ttl", "18446744073709551614"),
            ("max_bytes_for_level_multiplier_additional", "1:1:1"),
            ("max_bytes_for_level_multiplier_additional", ""),
            ("compaction_style", "kCompactionStyleFIFO"),
            ("other", "abc"),
        ] {
            assert_eq!(wrong(name, text), None, "{name}={text}");
        }
    }
}
