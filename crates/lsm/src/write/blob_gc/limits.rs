//! The space that blob files may take: pure functions of the bytes that are alive.

/// Garbage may have so many bytes in any case, so that a small database can store values at all.
const GARBAGE_MAX_MIN: u64 = 32 << 20;
/// Garbage is collected from this part of the way to the limit on: the later, the less of what is
/// moved is still alive.
const START: f64 = 0.9;
/// But so far before writes are slowed most that there is a way between.
const START_OF_MOST: f64 = 0.97;
/// A collection moves this part of what garbage may have: it needs as much space for a while, in
/// which there is less for garbage.
const MOVED_PART: u64 = 20;
/// It reads most tables and writes them again, so it moves this multiple of their bytes, up to this
/// part.
const MOVED_FOR_TABLES: u64 = 5;
const MOVED_PART_MAX: u64 = 5;
/// A blob file has at most this part of what garbage may have; or twice as much, up to so many
/// bytes, because a stretch of values in write order ends with its file; but at least so many.
const FILE_PART: u64 = 64;
const FILE_BYTES_GOOD: u64 = 16 << 20;
const FILE_BYTES_MIN: u64 = 4 << 20;

/// The limits of the space of a family's blob files, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Bytes of all values, dead or alive, from which on garbage is collected.
    pub start: u64,
    /// The same, from which on writes are slowed most.
    pub most: u64,
    /// Bytes of all files, those of a collection under way included.
    pub cap: u64,
    /// Live bytes that a collection moves at most, unless one file has more.
    pub moved: u64,
}

/// Most bytes of garbage in blob files of a database with `live` bytes, of which tables and blob
/// files may have `ratio` times as many.
pub(crate) fn garbage_max(ratio: f64, live: u64) -> u64 {
    ((live as f64 * (ratio - 1.0).max(0.0)) as u64).max(GARBAGE_MAX_MIN)
}

/// Bytes of a new blob file: a few files that become full of garbage together are not to be a large
/// part of all.
pub(crate) fn file_bytes(garbage_max: u64) -> u64 {
    let good = FILE_BYTES_GOOD.min(2 * garbage_max / FILE_PART);
    (garbage_max / FILE_PART).max(good).max(FILE_BYTES_MIN)
}

impl Limits {
    /// For files of about `file_bytes` each, of which `live` bytes are alive, and tables with
    /// `in_tables` live bytes. Both together may have `ratio` times as many; with `is_hard` at any
    /// moment.
    pub fn new(ratio: f64, live: u64, in_tables: u64, file_bytes: u64, is_hard: bool) -> Limits {
        let garbage = garbage_max(ratio, live + in_tables);
        let least = (MOVED_FOR_TABLES * in_tables).min(garbage / MOVED_PART_MAX);
        let moved = (garbage / MOVED_PART).max(file_bytes).max(least);
        // The next file, and what a collection writes.
        let held = if is_hard { moved + file_bytes } else { 0 };
        let most = garbage.saturating_sub(held);
        let start = ((live + in_tables) as f64 * (ratio - 1.0).max(0.0) * START) as u64;
        let start = start.min((most as f64 * START_OF_MOST) as u64);
        Limits { start: live + start, most: live + most, cap: live + garbage, moved }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_large_database_may_have_its_multiple_and_a_small_one_some_garbage() {
        assert_eq!(garbage_max(2.0, 1000 * MIB), 1000 * MIB);
        assert_eq!(garbage_max(1.5, 1000 * MIB), 500 * MIB);
        assert_eq!([garbage_max(1.5, 10), garbage_max(0.5, 10)], [32 * MIB; 2]);
        let files = [32, 256, 512, 1024, 6400].map(|garbage| file_bytes(garbage * MIB) / MIB);
        assert_eq!(files, [4, 8, 16, 16, 100]);
    }

    #[test]
    fn there_is_room_for_the_next_file_and_a_collection_before_the_cap() {
        for live in [0, 1, 10, 100, 1_000, 100_000].map(|live| live * MIB) {
            for ratio in [1.0, 1.1, 2.0, 5.0] {
                let file = file_bytes(garbage_max(ratio, live));
                let hard = Limits::new(ratio, live, 0, file, true);
                assert!(live <= hard.start && hard.start < hard.most, "{ratio} {hard:?}");
                assert!(hard.most + hard.moved + file <= hard.cap, "{ratio} {hard:?}");
                assert!(hard.cap - live <= 4 * (hard.most - live), "{ratio} {hard:?}");
                let soft = Limits::new(ratio, live, 0, 256 * MIB, false);
                assert!(soft.start < soft.most && soft.most == soft.cap, "{ratio} {soft:?}");
            }
        }
        let hard = Limits::new(2.0, 2048 * MIB, 0, 32 * MIB, true);
        assert_eq!((hard.start / MIB, hard.cap / MIB, hard.moved / MIB), (3891, 4096, 102));
        // Values in tables count, too; and if tables have many bytes, more is moved at once.
        let mixed = Limits::new(2.0, 48 * MIB, 2000 * MIB, 32 * MIB, true);
        assert_eq!((mixed.cap / MIB, mixed.moved / MIB), (2096, 409));
    }
}
