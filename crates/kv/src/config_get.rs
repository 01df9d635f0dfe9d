//! `CONFIG GET`: the settings that clients and tools ask for, under the names that Redis gives them.

use std::collections::BTreeMap;

use resp::Writer;

use crate::args::Args;
use crate::glob;
use crate::node_info::NodeInfo;
use crate::settings::Settings;

/// Answers with every setting whose name matches one of the patterns, each once.
pub(crate) fn write(
    patterns: Args<'_>,
    settings: &Settings,
    cores: usize,
    node: &dyn NodeInfo,
    writer: &mut Writer<'_>,
) {
    let patterns: Vec<Vec<u8>> = patterns.iter().map(<[u8]>::to_ascii_lowercase).collect();
    let mut all = known(settings, cores, node);
    all.retain(|name, _| patterns.iter().any(|pattern| glob::matches(pattern, name.as_bytes())));
    writer.map(all.len());
    for (name, value) in &all {
        writer.bulk(name.as_bytes());
        writer.bulk(value.as_bytes());
    }
}

fn known(settings: &Settings, cores: usize, node: &dyn NodeInfo) -> BTreeMap<String, String> {
    // What a Redis that is set up like this node would say: one database, read-only, nothing written or expired.
    let fixed = [
        ("appendonly", "no"),
        ("databases", "1"),
        ("maxmemory-policy", "noeviction"),
        ("replica-read-only", "yes"),
        ("requirepass", ""),
        ("save", ""),
        ("timeout", "0"),
    ]
    .map(|(name, value)| (name.to_owned(), value.to_owned()));
    let ours = [
        ("client-query-buffer-limit", settings.request_bytes_max.to_string()),
        ("dir", node.data_directory()),
        ("maxclients", settings.clients_max.saturating_mul(cores).to_string()),
        ("maxmemory", node.memory_budget_bytes().to_string()),
        ("port", node.tcp_port().to_string()),
        ("proto-max-bulk-len", settings.bulk_bytes_max.to_string()),
    ]
    .map(|(name, value)| (name.to_owned(), value));
    fixed.into_iter().chain(ours).chain(node.settings()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::tests::with;
    use crate::info::tests::TestNode;
    use resp::Protocol;

    fn get(line: &str) -> String {
        let mut out = Vec::new();
        with(line, |args| {
            let writer = &mut Writer::new(&mut out, Protocol::V3);
            write(args, &Settings::default(), 2, &TestNode, writer);
        });
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn settings_are_found_by_pattern_each_once() {
        assert_eq!(get("save S*ve"), "%1\r\n$4\r\nsave\r\n$0\r\n\r\n");
        assert_eq!(get("maxclients"), "%1\r\n$10\r\nmaxclients\r\n$5\r\n20000\r\n");
        assert_eq!(get("nosuch"), "%0\r\n");
        assert_eq!(
            get("cores"),
            "%1\r\n$5\r\ncores\r\n$3\r\n0,1\r\n",
            "the node's own settings too"
        );
    }
}
