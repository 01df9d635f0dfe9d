//! `CONFIG GET` and `CONFIG SET`: the settings that clients and tools ask for, under Redis's names.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

use resp::{Writer, parse_i64};

use crate::command::args::Args;
use crate::command::glob;
use crate::core::slow_log::ENTRIES_MAX;
use crate::node_info::NodeInfo;
use crate::password::Password;
use crate::settings::Settings;

/// Writes every setting whose name matches one of the patterns, each once.
pub(crate) fn write(
    patterns: Args<'_>,
    settings: &Settings,
    now: &LiveSettings,
    node: &dyn NodeInfo,
    writer: &mut Writer<'_>,
) {
    let patterns: Vec<Vec<u8>> = patterns.iter().map(<[u8]>::to_ascii_lowercase).collect();
    let mut all = known(settings, now, node);
    all.retain(|name, _| patterns.iter().any(|pattern| glob::matches(pattern, name.as_bytes())));
    writer.map(all.len());
    for (name, value) in &all {
        writer.bulk(name.as_bytes());
        writer.bulk(value);
    }
}

/// The settings that may change while the node runs.
pub(crate) struct LiveSettings {
    pub password: Option<Password>,
    pub writable: bool,
    /// `slowlog-log-slower-than` and `slowlog-max-len`.
    pub slower_than_us: i64,
    pub slow_log_len_max: usize,
    /// `tracking-table-max-keys`.
    pub tracked_keys_max: usize,
}

pub(crate) fn known(
    settings: &Settings,
    now: &LiveSettings,
    node: &dyn NodeInfo,
) -> BTreeMap<String, Vec<u8>> {
    // The settings that a Redis configured like this node would report: one database, a log of all
    // writes, no expiry.
    let fixed = [
        ("appendonly", if now.writable { "yes" } else { "no" }),
        ("daemonize", "no"),
        ("databases", "1"),
        ("enable-debug-command", if settings.debug_commands { "yes" } else { "no" }),
        ("latency-monitor-threshold", "0"),
        ("latency-tracking", "no"),
        ("maxmemory-policy", "noeviction"),
        ("replica-read-only", "yes"),
        ("save", ""),
        ("timeout", "0"),
    ]
    .map(|(name, value)| (name.to_owned(), value.to_owned()));
    let limits = settings.limits();
    let ours = [
        ("client-query-buffer-limit", limits.request_bytes_max.to_string()),
        ("dir", node.data_directory()),
        ("maxclients", settings.clients_max.to_string()),
        ("maxmemory", node.memory_budget_bytes().to_string()),
        ("proto-max-bulk-len", settings.value_bytes_max().to_string()),
        (SLOWER_THAN, now.slower_than_us.to_string()),
        (SLOW_LOG_LEN, now.slow_log_len_max.to_string()),
        (TRACKED_KEYS, now.tracked_keys_max.to_string()),
    ]
    .map(|(name, value)| (name.to_owned(), value));
    let password = now.password.as_ref().map_or(&b""[..], Password::reveal).to_vec();
    let all = fixed.into_iter().chain(ours).chain(node.settings());
    all.map(|(name, value)| (name, value.into_bytes()))
        .chain([(PASSWORD.to_owned(), password)])
        .collect()
}

/// The settings that can be changed while the node runs.
pub(crate) const PASSWORD: &str = "requirepass";
const SLOWER_THAN: &str = "slowlog-log-slower-than";
const SLOW_LOG_LEN: &str = "slowlog-max-len";
const TRACKED_KEYS: &str = "tracking-table-max-keys";

/// What a `CONFIG SET` changes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Changed {
    /// The new password; may be empty.
    pub password: Option<Vec<u8>>,
    pub slower_than_us: Option<i64>,
    pub slow_log_len_max: Option<usize>,
    pub tracked_keys_max: Option<usize>,
}

/// Checks the arguments of `CONFIG SET`, alternating names and values. Returns what they change, or
/// the error. A setting may be set to its present value.
pub(crate) fn check(
    pairs: Args<'_>,
    known: &BTreeMap<String, Vec<u8>>,
) -> Result<Changed, Vec<u8>> {
    let mut seen = BTreeSet::new();
    let mut changed = Changed::default();
    for at in (0..pairs.len()).step_by(2) {
        let (given, value) = (pairs.get(at), pairs.get(at + 1));
        let name = String::from_utf8_lossy(given).to_ascii_lowercase();
        let failed = |why: &str| {
            format!("ERR CONFIG SET failed (possibly related to argument '{name}') - {why}")
                .into_bytes()
        };
        let Some(now) = known.get(&name) else {
            let before = b"ERR Unknown option or number of arguments for CONFIG SET - '";
            return Err([&before[..], given, b"'"].concat());
        };
        if !seen.insert(name.clone()) {
            return Err(failed("duplicate parameter"));
        }
        let number = |range: RangeInclusive<i64>| {
            let number = parse_i64(value)
                .ok_or_else(|| failed("argument couldn't be parsed into an integer"))?;
            match range.contains(&number) {
                true => Ok(number),
                false => Err(failed(&format!(
                    "argument must be between {} and {} inclusive",
                    range.start(),
                    range.end()
                ))),
            }
        };
        match name.as_str() {
            PASSWORD => changed.password = Some(value.to_vec()),
            SLOWER_THAN => changed.slower_than_us = Some(number(-1..=i64::MAX)?),
            SLOW_LOG_LEN => {
                changed.slow_log_len_max = Some(number(0..=ENTRIES_MAX as i64)? as usize);
            }
            TRACKED_KEYS => {
                let keys = number(0..=i64::MAX)?;
                changed.tracked_keys_max = Some(usize::try_from(keys).unwrap_or(usize::MAX));
            }
            _ if now != value => return Err(failed("can't set immutable config")),
            _ => {}
        }
    }
    Ok(changed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::args::tests::with;
    use crate::info::tests::TestNode;
    use resp::Protocol;

    fn now() -> LiveSettings {
        LiveSettings {
            password: Password::new("secret"),
            writable: true,
            slower_than_us: 10_000,
            slow_log_len_max: 128,
            tracked_keys_max: 1_000_000,
        }
    }

    #[test]
    fn only_some_settings_can_be_changed() {
        let known = known(&Settings::default(), &now(), &TestNode);
        let set = |line| {
            with(line, |args| {
                check(args, &known).map_err(|error| String::from_utf8(error).unwrap())
            })
        };
        let password = Changed { password: Some(b"new".to_vec()), ..Changed::default() };
        assert_eq!(set("requirepass new databases 1"), Ok(password));
        assert_eq!(set("appendonly yes"), Ok(Changed::default()), "it has this value");
        let slow =
            Changed { slower_than_us: Some(-1), slow_log_len_max: Some(0), ..Changed::default() };
        assert_eq!(set("slowlog-log-slower-than -1 SlowLog-Max-Len 0"), Ok(slow));
        for (line, why) in [
            ("slowlog-max-len x", "argument couldn't be parsed into an integer"),
            ("slowlog-max-len 1025", "argument must be between 0 and 1024 inclusive"),
            (
                "slowlog-log-slower-than -2",
                "argument must be between -1 and 9223372036854775807 inclusive",
            ),
        ] {
            let name = line.split(' ').next().unwrap();
            let before = "ERR CONFIG SET failed (possibly related to argument";
            assert_eq!(set(line).unwrap_err(), format!("{before} '{name}') - {why}"));
        }
        assert_eq!(
            set("RequirePass x Databases 2").unwrap_err(),
            "ERR CONFIG SET failed (possibly related to argument 'databases') - can't set immutable config"
        );
        assert_eq!(
            set("save '' save ''").unwrap_err(),
            "ERR CONFIG SET failed (possibly related to argument 'save') - duplicate parameter"
        );
        assert_eq!(
            set("foo bar").unwrap_err(),
            "ERR Unknown option or number of arguments for CONFIG SET - 'foo'"
        );
    }

    fn get(line: &str) -> String {
        let mut out = Vec::new();
        with(line, |args| {
            let writer = &mut Writer::new(&mut out, Protocol::V3);
            write(args, &Settings::default(), &now(), &TestNode, writer);
        });
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn settings_are_found_by_pattern_each_once() {
        assert_eq!(get("save S*ve"), "%1\r\n$4\r\nsave\r\n$0\r\n\r\n");
        assert_eq!(get("maxclients"), "%1\r\n$10\r\nmaxclients\r\n$5\r\n10000\r\n");
        assert_eq!(get("nosuch"), "%0\r\n");
        assert_eq!(
            get("cores"),
            "%1\r\n$5\r\ncores\r\n$3\r\n0,1\r\n",
            "the node's own settings too"
        );
    }
}
