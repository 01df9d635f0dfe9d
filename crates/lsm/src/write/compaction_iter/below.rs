//! Whether deeper levels may hold a key.

use rocksfmt::Comparator;

use crate::version::{Family, Level, Version, user_key};

/// A cursor through the files of the levels below a merge. It only moves forward, so that all
/// questions of a merge together look at each file once.
pub(crate) struct KeysBelow<'a> {
    version: &'a Version,
    comparator: Comparator,
    /// Each level, and its first file that does not end before the last key.
    levels: Vec<(&'a Level, usize)>,
}

impl<'a> KeysBelow<'a> {
    /// The levels of `family` below `level`.
    pub fn new(version: &'a Version, family: &'a Family, level: usize) -> KeysBelow<'a> {
        let deeper = family.levels.iter().skip(level + 1);
        let levels = deeper.filter(|level| !level.slots.is_empty()).map(|level| (level, 0));
        KeysBelow { version, comparator: family.comparator, levels: levels.collect() }
    }

    /// Whether a file has the key within its bounds. Keys are asked in ascending order.
    pub fn may_have(&mut self, key: &[u8]) -> bool {
        self.levels.iter_mut().any(|(level, at)| {
            while let Some(&slot) = level.slots.get(*at) {
                let meta = self.version.meta(slot);
                if self.comparator.cmp_user(user_key(&meta.largest), key).is_ge() {
                    return self.comparator.cmp_user(user_key(&meta.smallest), key).is_le();
                }
                *at += 1;
            }
            false
        })
    }
}
