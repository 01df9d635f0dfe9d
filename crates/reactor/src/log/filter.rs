//! Which events are logged: a level, and other levels for some targets.

use std::str::FromStr;

use tracing::Metadata;
use tracing::level_filters::LevelFilter;

/// `info`, or `warn,lsm=debug,kv::connection=off`: a level for all, and levels for targets (modules
/// and their contents). The longest target that fits counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filter {
    level: LevelFilter,
    targets: Vec<(String, LevelFilter)>,
}

impl Filter {
    /// One level for all targets.
    pub fn level(level: LevelFilter) -> Filter {
        Filter { level, targets: Vec::new() }
    }

    /// The level for a target.
    pub fn level_of(&self, target: &str) -> LevelFilter {
        let fits = |name: &str| {
            target.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
        };
        let named = self.targets.iter().filter(|(name, _)| fits(name));
        named.max_by_key(|(name, _)| name.len()).map_or(self.level, |(_, level)| *level)
    }

    /// The most verbose level of any target.
    pub fn max_level(&self) -> LevelFilter {
        self.targets.iter().map(|(_, level)| *level).fold(self.level, LevelFilter::max)
    }

    pub(super) fn allows(&self, about: &Metadata<'_>) -> bool {
        about.is_event() && *about.level() <= self.level_of(about.target())
    }
}

impl FromStr for Filter {
    type Err = String;

    fn from_str(text: &str) -> Result<Filter, String> {
        let level = |word: &str| match word {
            "off" => Ok(LevelFilter::OFF),
            "error" => Ok(LevelFilter::ERROR),
            "warn" => Ok(LevelFilter::WARN),
            "info" => Ok(LevelFilter::INFO),
            "debug" => Ok(LevelFilter::DEBUG),
            "trace" => Ok(LevelFilter::TRACE),
            _ => Err(format!("must be off, error, warn, info, debug or trace, not '{word}'")),
        };
        let mut filter = Filter::level(LevelFilter::INFO);
        for part in text.split(',').map(str::trim) {
            match part.split_once('=') {
                None => filter.level = level(part)?,
                Some((target, word)) if is_target(target) => {
                    filter.targets.push((target.to_owned(), level(word)?));
                }
                Some((target, _)) => {
                    return Err(format!(
                        "must be a target such as lsm or kv::connection, not '{target}'"
                    ));
                }
            }
        }
        Ok(filter)
    }
}

fn is_target(text: &str) -> bool {
    !text.is_empty()
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_:".contains(&byte))
}

impl std::fmt::Display for Filter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.level)?;
        self.targets.iter().try_for_each(|(target, level)| write!(f, ",{target}={level}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_target_that_fits_decides() {
        let filter: Filter = "warn, lsm=debug,lsm::wal=off".parse().unwrap();
        for (target, level) in [
            ("kv::table", LevelFilter::WARN),
            ("lsm", LevelFilter::DEBUG),
            ("lsm::flush", LevelFilter::DEBUG),
            ("lsm::wal", LevelFilter::OFF),
            ("lsm::wal_writer", LevelFilter::DEBUG),
            ("lsmith", LevelFilter::WARN),
        ] {
            assert_eq!(filter.level_of(target), level, "{target}");
        }
        assert_eq!(filter.max_level(), LevelFilter::DEBUG);
        assert_eq!(filter.to_string(), "warn,lsm=debug,lsm::wal=off");
    }

    #[test]
    fn only_targets_leaves_the_rest_at_information() {
        let filter: Filter = "lsm=trace".parse().unwrap();
        assert_eq!(filter.level_of("kv"), LevelFilter::INFO);
    }

    #[test]
    fn an_unknown_level_is_refused_by_name() {
        for text in ["", "loud", "info,", "lsm=loud", "=info", "info;lsm=debug"] {
            assert!(text.parse::<Filter>().is_err(), "{text}");
        }
        assert!("x=loud".parse::<Filter>().unwrap_err().ends_with("not 'loud'"));
    }
}
