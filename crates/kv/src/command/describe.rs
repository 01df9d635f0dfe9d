//! The replies of `COMMAND`: the command table in the shapes that Redis 7.0 gives it.

use resp::Writer;

use crate::command::args::Args;
use crate::command::commands::{Describe, NameFilter};
use crate::command::glob;
use crate::command::help;
use crate::command::lookup::{self, Lookup};
use crate::command::refusal::Refusal;
use crate::command::spec::{Argument, CommandId, KeyPositions, Spec};
use crate::command::table::TABLE;

/// Answers `COMMAND` and its subcommands.
pub fn describe(question: Describe<'_>, writer: &mut Writer<'_>) {
    match question {
        Describe::Count => writer.integer(TABLE.len() as i64),
        Describe::Docs(names) => docs(names, writer),
        Describe::GetKeys { command, flags } => keys(command, flags, writer),
        Describe::Help => help::write(help::COMMAND, writer),
        Describe::Info(names) if names.is_empty() => {
            writer.array(TABLE.len());
            TABLE.iter().for_each(|spec| info(spec, writer));
        }
        Describe::Info(names) => {
            writer.array(names.len());
            for name in names.iter() {
                match lookup::find_full(name) {
                    Some(spec) => info(spec, writer),
                    None => writer.null(),
                }
            }
        }
        Describe::List(filter) => list(filter, writer),
    }
}

fn flags(words: &[&str], writer: &mut Writer<'_>) {
    writer.set(words.len());
    words.iter().for_each(|word| writer.simple(word));
}

fn info(spec: &Spec, writer: &mut Writer<'_>) {
    writer.array(10);
    writer.bulk(spec.name.as_bytes());
    writer.integer(spec.arity);
    flags(spec.flags, writer);
    writer.integer(spec.keys.first);
    writer.integer(spec.keys.last);
    writer.integer(spec.keys.step);
    flags(spec.categories, writer);
    writer.set(spec.tips.len());
    spec.tips.iter().for_each(|tip| writer.bulk(tip.as_bytes()));
    if spec.keys.first == 0 {
        writer.set(0);
    } else {
        writer.set(1 + usize::from(spec.keys.rest.is_some()));
        key_specifications(spec.keys, writer);
    }
    writer.set(spec.subcommands.len());
    spec.subcommands.iter().for_each(|sub| info(sub, writer));
}

fn key_specifications(keys: KeyPositions, writer: &mut Writer<'_>) {
    let Some(rest) = keys.rest else {
        return key_specification(keys.first, keys.last, keys.step, keys.flags, writer);
    };
    key_specification(keys.first, keys.first, keys.step, keys.flags, writer);
    key_specification(keys.first + 1, keys.last, keys.step, rest, writer);
}

fn key_specification(first: i64, last: i64, step: i64, words: &[&str], writer: &mut Writer<'_>) {
    // Relative to the first key instead of the command's name.
    let last = if last < 0 { last } else { last - first };
    writer.map(3);
    writer.bulk(b"flags");
    flags(words, writer);
    writer.bulk(b"begin_search");
    search(writer, "index", &[("index", first)]);
    writer.bulk(b"find_keys");
    search(writer, "range", &[("lastkey", last), ("keystep", step), ("limit", 0)]);
}

fn search(writer: &mut Writer<'_>, kind: &str, numbers: &[(&str, i64)]) {
    writer.map(2);
    writer.bulk(b"type");
    writer.bulk(kind.as_bytes());
    writer.bulk(b"spec");
    writer.map(numbers.len());
    for (name, number) in numbers {
        writer.bulk(name.as_bytes());
        writer.integer(*number);
    }
}

fn docs(names: Args<'_>, writer: &mut Writer<'_>) {
    if names.is_empty() {
        writer.map(TABLE.len());
        TABLE.iter().for_each(|spec| document(spec, writer));
        return;
    }
    // Unknown names are left out.
    writer.map(names.iter().filter_map(lookup::find_full).count());
    names.iter().filter_map(lookup::find_full).for_each(|spec| document(spec, writer));
}

fn document(spec: &Spec, writer: &mut Writer<'_>) {
    let field = |writer: &mut Writer<'_>, name: &str, value: &str| {
        writer.bulk(name.as_bytes());
        writer.bulk(value.as_bytes());
    };
    let optional = |present: bool| usize::from(present);
    writer.bulk(spec.name.as_bytes());
    writer.map(
        4 + 3 * optional(spec.deprecated.is_some())
            + optional(!spec.arguments.is_empty())
            + optional(!spec.subcommands.is_empty()),
    );
    field(writer, "summary", spec.summary);
    field(writer, "since", spec.since);
    field(writer, "group", spec.group);
    field(writer, "complexity", spec.complexity);
    if let Some((since, by)) = spec.deprecated {
        writer.bulk(b"doc_flags");
        flags(&["deprecated"], writer);
        field(writer, "deprecated_since", since);
        field(writer, "replaced_by", by);
    }
    if !spec.arguments.is_empty() {
        writer.bulk(b"arguments");
        arguments(spec.arguments, writer);
    }
    if !spec.subcommands.is_empty() {
        writer.bulk(b"subcommands");
        writer.map(spec.subcommands.len());
        spec.subcommands.iter().for_each(|sub| document(sub, writer));
    }
}

fn arguments(list: &[Argument], writer: &mut Writer<'_>) {
    writer.array(list.len());
    for argument in list {
        let is_key = argument.kind == "key";
        let entries = 2
            + usize::from(is_key)
            + usize::from(argument.token.is_some())
            + usize::from(!argument.flags.is_empty())
            + usize::from(!argument.parts.is_empty());
        writer.map(entries);
        writer.bulk(b"name");
        writer.bulk(argument.name.as_bytes());
        writer.bulk(b"type");
        writer.bulk(argument.kind.as_bytes());
        if is_key {
            writer.bulk(b"key_spec_index");
            writer.integer(argument.key_spec);
        }
        if let Some(token) = argument.token {
            writer.bulk(b"token");
            writer.bulk(token.as_bytes());
        }
        if !argument.flags.is_empty() {
            writer.bulk(b"flags");
            flags(argument.flags, writer);
        }
        if !argument.parts.is_empty() {
            writer.bulk(b"arguments");
            arguments(argument.parts, writer);
        }
    }
}

fn keys(command: Args<'_>, with_flags: bool, writer: &mut Writer<'_>) {
    let second = (command.len() > 1).then(|| command.get(1));
    let Some(Lookup::Ours(spec)) = lookup::find(command.get(0), second) else {
        return Refusal::Text("ERR Invalid command specified").write(writer);
    };
    if spec.keys.first == 0 {
        return Refusal::Text("ERR The command has no key arguments").write(writer);
    }
    if !spec.takes_count(command.len()) {
        return Refusal::Text("ERR Invalid number of arguments specified for command")
            .write(writer);
    }
    let (positions, first) = (spec.keys, spec.keys.first as usize);
    let indexes = spec.key_indexes(command.len());
    writer.array(indexes.clone().count());
    for position in indexes {
        if with_flags {
            writer.array(2);
        }
        writer.bulk(command.get(position));
        if with_flags {
            let rest = positions.rest.filter(|_| position != first);
            flags(rest.unwrap_or_else(|| key_flags(spec, command)), writer);
        }
    }
}

/// What a command does to its keys. For some commands it depends on the arguments.
fn key_flags(spec: &Spec, command: Args<'_>) -> &'static [&'static str] {
    let reads = || (3..command.len()).any(|at| command.is(at, "get"));
    match spec.id {
        CommandId::Set if reads() => &["RW", "access", "update"],
        CommandId::Set => &["OW", "update"],
        CommandId::Bitfield if only_reads(command) => &["RO", "access"],
        CommandId::Bitfield => &["RW", "access", "update"],
        _ => spec.keys.flags,
    }
}

/// Whether the operations of a `BITFIELD` only read, as far as they are valid.
fn only_reads(command: Args<'_>) -> bool {
    let mut at = 2;
    while at < command.len() {
        let more = command.len() - at - 1;
        if command.is(at, "get") && more >= 2 {
            at += 3;
        } else if command.is(at, "overflow") && more >= 1 {
            at += 2;
        } else {
            return false;
        }
    }
    true
}

fn list(filter: NameFilter<'_>, writer: &mut Writer<'_>) {
    let wanted = |spec: &&Spec| match filter {
        NameFilter::All => true,
        NameFilter::Module => false,
        NameFilter::Category(category) => {
            spec.categories.iter().any(|of| of.as_bytes()[1..].eq_ignore_ascii_case(category))
        }
        NameFilter::Pattern(pattern) => {
            glob::matches(&pattern.to_ascii_lowercase(), spec.name.as_bytes())
        }
    };
    let all = || {
        TABLE.iter().flat_map(|spec| std::iter::once(spec).chain(spec.subcommands)).filter(wanted)
    };
    writer.array(all().count());
    all().for_each(|spec| writer.bulk(spec.name.as_bytes()));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::args::tests::with;
    use crate::command::commands::Command;
    use crate::command::parse::{Permissions, parse};
    use resp::{Decoder, DecoderLimits, Protocol, Reply};

    fn answer(line: &str, protocol: Protocol) -> Reply {
        let mut out = Vec::new();
        with(line, |args| {
            match parse(args, Permissions { write: true, enter: true, debug: true }).command {
                Ok(Command::Describe(question)) => {
                    describe(question, &mut Writer::new(&mut out, protocol))
                }
                other => panic!("{other:?}"),
            }
        });
        let mut decoder = Decoder::new(DecoderLimits::default());
        decoder.feed(&out);
        let reply = decoder.next_reply().unwrap().expect("the reply is whole");
        assert_eq!(decoder.next_reply(), Ok(None), "and it is one");
        reply
    }

    fn raw(line: &str, protocol: Protocol) -> String {
        let mut out = Vec::new();
        with(line, |args| {
            match parse(args, Permissions { write: true, enter: true, debug: true }).command {
                Ok(Command::Describe(question)) => {
                    describe(question, &mut Writer::new(&mut out, protocol))
                }
                other => panic!("{other:?}"),
            }
        });
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn every_question_gets_one_whole_reply_in_both_protocols() {
        for line in [
            "command",
            "command info",
            "command docs",
            "command list",
            "command count",
            "command help",
        ] {
            answer(line, Protocol::V2);
            answer(line, Protocol::V3);
        }
    }

    /// The reply of redis-server 7.0.15.
    #[test]
    fn the_shape_of_info_is_that_of_redis() {
        assert_eq!(
            raw("command info get nosuch", Protocol::V3),
            "*2\r\n*10\r\n$3\r\nget\r\n:2\r\n~2\r\n+readonly\r\n+fast\r\n:1\r\n:1\r\n:1\r\n~3\r\n+@read\r\n+@string\r\n+@fast\r\n~0\r\n\
             ~1\r\n%3\r\n$5\r\nflags\r\n~2\r\n+RO\r\n+access\r\n$12\r\nbegin_search\r\n%2\r\n$4\r\ntype\r\n$5\r\nindex\r\n\
             $4\r\nspec\r\n%1\r\n$5\r\nindex\r\n:1\r\n$9\r\nfind_keys\r\n%2\r\n$4\r\ntype\r\n$5\r\nrange\r\n$4\r\nspec\r\n%3\r\n\
             $7\r\nlastkey\r\n:0\r\n$7\r\nkeystep\r\n:1\r\n$5\r\nlimit\r\n:0\r\n~0\r\n_\r\n"
        );
        assert!(raw("command info nosuch", Protocol::V2).ends_with("*1\r\n$-1\r\n"));
        let Reply::Array(all) = answer("command", Protocol::V2) else { panic!() };
        assert_eq!(all.len(), TABLE.len());
    }

    #[test]
    fn the_shape_of_docs_is_that_of_redis() {
        let docs = raw("command docs get", Protocol::V3);
        assert!(docs.starts_with("%1\r\n$3\r\nget\r\n%5\r\n$7\r\nsummary\r\n"), "{docs}");
        assert!(
            docs.ends_with(
                "$9\r\narguments\r\n*1\r\n%3\r\n$4\r\nname\r\n$3\r\nkey\r\n$4\r\ntype\r\n$3\r\nkey\r\n$14\r\nkey_spec_index\r\n:0\r\n"
            ),
            "{docs}"
        );
        assert_eq!(raw("command docs nosuch", Protocol::V3), "%0\r\n");
        assert_eq!(raw("command docs nosuch", Protocol::V2), "*0\r\n");
    }

    #[test]
    fn keys_are_found_in_commands() {
        assert_eq!(
            raw("command getkeys mget a b c", Protocol::V2),
            "*3\r\n$1\r\na\r\n$1\r\nb\r\n$1\r\nc\r\n"
        );
        assert_eq!(
            raw("command getkeysandflags get a", Protocol::V3),
            "*1\r\n*2\r\n$1\r\na\r\n~2\r\n+RO\r\n+access\r\n"
        );
        assert_eq!(
            raw("command getkeysandflags set a b nx", Protocol::V2),
            "*1\r\n*2\r\n$1\r\na\r\n*2\r\n+OW\r\n+update\r\n"
        );
        assert_eq!(
            raw("command getkeysandflags set a get GeT", Protocol::V2),
            "*1\r\n*2\r\n$1\r\na\r\n*3\r\n+RW\r\n+access\r\n+update\r\n"
        );
        assert_eq!(
            raw("command getkeys foo bar", Protocol::V2),
            "-ERR Invalid command specified\r\n"
        );
        assert_eq!(
            raw("command getkeys get a b", Protocol::V2),
            "-ERR Invalid number of arguments specified for command\r\n"
        );
        assert_eq!(
            raw("command getkeys echo a", Protocol::V2),
            "-ERR The command has no key arguments\r\n"
        );
    }

    #[test]
    fn names_are_filtered() {
        let names = |line: &str| match answer(line, Protocol::V2) {
            Reply::Array(names) => names
                .iter()
                .map(|name| String::from_utf8(name.as_bytes().unwrap().to_vec()).unwrap())
                .collect::<Vec<_>>(),
            other => panic!("{other:?}"),
        };
        assert_eq!(names("command list filterby pattern MG*"), ["mget"]);
        assert_eq!(
            names("command list filterby pattern config|*"),
            ["config|get", "config|help", "config|resetstat", "config|rewrite", "config|set"]
        );
        assert!(names("command list filterby aclcat STRING").contains(&"get".to_owned()));
        assert!(names("command list filterby module x").is_empty());
        assert!(names("command list").len() > TABLE.len());
    }
}
