//! Finds a command by its name: one of the table, or one of Redis's others that write, which a
//! read-only node refuses by name.

use crate::command::spec::Spec;
use crate::command::table::TABLE;

/// Redis's commands that write and that the node does not have, with their arity, sorted by name.
static WRITES: &[(&str, i64)] = &[
    ("blmove", 6),
    ("blmpop", -5),
    ("blpop", -3),
    ("brpop", -3),
    ("brpoplpush", 4),
    ("bzmpop", -5),
    ("bzpopmax", -3),
    ("bzpopmin", -3),
    ("geoadd", -5),
    ("georadius", -6),
    ("georadiusbymember", -5),
    ("geosearchstore", -8),
    ("hdel", -3),
    ("hincrby", 4),
    ("hincrbyfloat", 4),
    ("hmset", -4),
    ("hset", -4),
    ("hsetnx", 4),
    ("linsert", 5),
    ("lmove", 5),
    ("lmpop", -4),
    ("lpop", -2),
    ("lpush", -3),
    ("lpushx", -3),
    ("lrem", 4),
    ("lset", 4),
    ("ltrim", 4),
    ("migrate", -6),
    ("pfadd", -2),
    ("pfdebug", 3),
    ("pfmerge", -2),
    ("restore-asking", -4),
    ("rpop", -2),
    ("rpoplpush", 3),
    ("rpush", -3),
    ("rpushx", -3),
    ("sadd", -3),
    ("sdiffstore", -3),
    ("sinterstore", -3),
    ("smove", 4),
    ("sort", -2),
    ("spop", -2),
    ("srem", -3),
    ("sunionstore", -3),
    ("xack", -4),
    ("xadd", -5),
    ("xautoclaim", -6),
    ("xclaim", -6),
    ("xdel", -3),
    ("xgroup", -2),
    ("xgroup|create", -5),
    ("xgroup|createconsumer", 5),
    ("xgroup|delconsumer", 5),
    ("xgroup|destroy", 4),
    ("xgroup|setid", -5),
    ("xreadgroup", -7),
    ("xsetid", -3),
    ("xtrim", -4),
    ("zadd", -4),
    ("zdiffstore", -4),
    ("zincrby", 4),
    ("zinterstore", -4),
    ("zmpop", -4),
    ("zpopmax", -2),
    ("zpopmin", -2),
    ("zrangestore", -5),
    ("zrem", -3),
    ("zremrangebylex", 4),
    ("zremrangebyrank", 4),
    ("zremrangebyscore", 4),
    ("zunionstore", -4),
];

/// Longest name in either table.
const NAME_BYTES_MAX: usize = 32;

/// The result of looking up a command's name.
#[derive(Clone, Copy, Debug)]
pub enum Lookup {
    /// A command of the table.
    Ours(&'static Spec),
    /// A container of the table, with an unknown subcommand.
    NoSubcommand(&'static Spec),
    /// A command of Redis that writes and that the node does not have, with its name and arity.
    Write(&'static str, i64),
    /// A container of such commands, by name, with an unknown subcommand.
    NoWrite(&'static str),
}

/// Finds a command by its name, and by its second word when the first is a container.
pub fn find(name: &[u8], second: Option<&[u8]>) -> Option<Lookup> {
    let mut small = [0; NAME_BYTES_MAX];
    let small = small.get_mut(..name.len())?;
    small.copy_from_slice(name);
    small.make_ascii_lowercase();
    let small: &[u8] = small;
    if let Ok(at) = TABLE.binary_search_by(|spec| spec.name.as_bytes().cmp(small)) {
        let spec = &TABLE[at];
        return Some(match second {
            Some(second) if !spec.subcommands.is_empty() => match subcommand(spec, second) {
                Some(found) => Lookup::Ours(found),
                None => Lookup::NoSubcommand(spec),
            },
            _ => Lookup::Ours(spec),
        });
    }
    let at = WRITES.binary_search_by(|(name, _)| name.as_bytes().cmp(small)).ok()?;
    let (name, arity) = WRITES[at];
    match (name.contains('|'), second) {
        // A full name is not a word of the protocol.
        (true, _) => None,
        (false, Some(second)) if name == WRITES_CONTAINER => Some(write_subcommand(second)),
        (false, _) => Some(Lookup::Write(name, arity)),
    }
}

/// The only container among the commands that write.
const WRITES_CONTAINER: &str = "xgroup";

fn write_subcommand(word: &[u8]) -> Lookup {
    let found = WRITES.iter().find(|(name, _)| {
        let (container, short) = name.split_once('|').unwrap_or_default();
        container == WRITES_CONTAINER && short.as_bytes().eq_ignore_ascii_case(word)
    });
    match found {
        Some(&(name, arity)) => Lookup::Write(name, arity),
        None => Lookup::NoWrite(WRITES_CONTAINER),
    }
}

/// Finds a command or (as `container|name`) a subcommand by its full name.
pub fn find_full(name: &[u8]) -> Option<&'static Spec> {
    let mut words = name.splitn(2, |&byte| byte == b'|');
    let first = words.next()?;
    let second = words.next();
    match find(first, second)? {
        // A second word after a command without subcommands names nothing.
        Lookup::Ours(spec) if second.is_some() && !spec.name.contains('|') => None,
        Lookup::Ours(spec) => Some(spec),
        Lookup::NoSubcommand(_) | Lookup::Write(..) | Lookup::NoWrite(_) => None,
    }
}

fn subcommand(container: &'static Spec, word: &[u8]) -> Option<&'static Spec> {
    container.subcommands.iter().find(|spec| {
        let short = spec.name.rsplit('|').next().unwrap_or_default();
        short.as_bytes().eq_ignore_ascii_case(word)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_sorted_and_names_fit() {
        assert!(TABLE.windows(2).all(|pair| pair[0].name < pair[1].name));
        assert!(WRITES.windows(2).all(|pair| pair[0].0 < pair[1].0));
        assert!(TABLE.iter().map(|spec| spec.name).chain(WRITES.iter().map(|write| write.0)).all(
            |name| {
                name.len() <= NAME_BYTES_MAX && name.bytes().all(|byte| !byte.is_ascii_uppercase())
            }
        ));
        assert!(TABLE.iter().all(|spec| WRITES.iter().all(|write| write.0 != spec.name)));
        for container in TABLE {
            for spec in container.subcommands {
                let (first, _) = spec.name.split_once('|').unwrap();
                assert_eq!(first, container.name);
            }
            assert!(container.subcommands.windows(2).all(|pair| pair[0].name < pair[1].name));
        }
    }

    #[test]
    fn every_command_is_found_by_its_name_in_any_case() {
        for spec in TABLE {
            let name = spec.name.to_uppercase();
            assert!(
                matches!(find(name.as_bytes(), None), Some(Lookup::Ours(found)) if found.id == spec.id)
            );
            for sub in spec.subcommands {
                let (first, second) = sub.name.split_once('|').unwrap();
                let second = second.to_uppercase();
                let found = find(first.as_bytes(), Some(second.as_bytes()));
                assert!(
                    matches!(found, Some(Lookup::Ours(found)) if found.id == sub.id),
                    "{}",
                    sub.name
                );
                assert_eq!(find_full(sub.name.as_bytes()).map(|found| found.id), Some(sub.id));
            }
        }
    }

    #[test]
    fn unknown_names_are_not_found() {
        assert!(find(b"", None).is_none());
        assert!(find(b"nosuch", None).is_none());
        assert!(find(&[b'x'; 1000], None).is_none());
        assert!(
            matches!(find(b"client", Some(b"nosuch")), Some(Lookup::NoSubcommand(spec)) if spec.name == "client")
        );
        assert!(
            matches!(find(b"get", Some(b"key")), Some(Lookup::Ours(spec)) if spec.name == "get")
        );
        assert!(matches!(find(b"HSET", Some(b"key")), Some(Lookup::Write("hset", -4))));
        assert!(
            find_full(b"get|x").is_none()
                && find_full(b"hset").is_none()
                && find_full(b"client|x").is_none()
        );
    }
}
