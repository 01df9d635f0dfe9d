//! The `kv` commands on a running node, over its Redis protocol.

use resp::Reply;
use serde_json::{Map, Value, json};

use super::print::{Lines, Style, value};
use super::{Range, Verdict};
use crate::args::{Entries, Source};
use crate::failure::Failure;
use crate::output::{Out, thousands};
use crate::remote::Remote;

/// Entries asked for at once by a scan.
const PAGE: u64 = 1000;

fn connect(address: &str, entries: &Entries) -> Result<Remote, Failure> {
    if entries.column_family != "default" {
        return Err(Failure::new("a node serves the column family 'default' only")
            .hint("other column families are read from the directory, with --data DIR"));
    }
    Remote::connect(address)
}

/// `kv get --connect`.
pub fn get(
    address: &str,
    key: &[u8],
    source: &Source,
    entries: &Entries,
) -> Result<Verdict, Failure> {
    let mut remote = connect(address, entries)?;
    let reply = remote.call(&[b"GET", key])?;
    let found = match &reply {
        Reply::Null => None,
        Reply::Bulk(bytes) => Some(bytes.as_slice()),
        other => return Err(remote.unexpected("GET", other)),
    };
    let mut out = Out::new();
    value(&mut out, Style::new(source.json, entries.hex), key, found)?;
    out.flush()?;
    Ok(if found.is_some() { Verdict::Good } else { Verdict::Bad })
}

/// `kv scan --connect`: pages, each beginning behind the last key of the one before.
pub fn scan(
    address: &str,
    range: Range,
    source: &Source,
    entries: &Entries,
) -> Result<Verdict, Failure> {
    let mut remote = connect(address, entries)?;
    let mut out = Out::new();
    let mut lines = Lines::new(Style::new(source.json, entries.hex));
    let bound = |mark: u8, key: &[u8]| [&[mark], key].concat();
    let mut start = range.from.map_or_else(|| b"-".to_vec(), |key| bound(b'[', &key));
    let mut end = range.to.map_or_else(|| b"+".to_vec(), |key| bound(b'(', &key));
    let mut left = range.limit.unwrap_or(u64::MAX);
    while left > 0 {
        let page = left.min(PAGE);
        let limit = page.to_string();
        let mut command: Vec<&[u8]> = vec![b"MR.RANGE", &start, &end];
        if range.reverse {
            command.push(b"REVERSE");
        }
        command.extend([&b"LIMIT"[..], limit.as_bytes()]);
        let reply = remote.call(&command)?;
        let Reply::Array(items) = &reply else {
            return Err(remote.unexpected("MR.RANGE", &reply));
        };
        let (pairs, rest) = items.as_chunks::<2>();
        if !rest.is_empty() {
            return Err(remote.unexpected("MR.RANGE", &reply));
        }
        for [key, value] in pairs {
            let (Reply::Bulk(key), Reply::Bulk(value)) = (key, value) else {
                return Err(remote.unexpected("MR.RANGE", &reply));
            };
            lines.entry(&mut out, key, value)?;
        }
        left -= (pairs.len() as u64).min(left);
        let Some([Reply::Bulk(last), _]) = pairs.last() else { break };
        if (pairs.len() as u64) < page {
            break;
        }
        let edge = if range.reverse { &mut end } else { &mut start };
        *edge = bound(b'(', last);
        out.flush()?;
    }
    out.flush()?;
    Ok(Verdict::Good)
}

/// `kv stat --connect`: what the node says about itself.
pub fn stat(address: &str, source: &Source) -> Result<Verdict, Failure> {
    let mut remote = Remote::connect(address)?;
    let reply = remote.call(&[b"INFO"])?;
    let Some(info) = reply.as_bytes() else { return Err(remote.unexpected("INFO", &reply)) };
    let info = String::from_utf8_lossy(info);
    let reply = remote.call(&[b"DBSIZE"])?;
    let Reply::Integer(keys) = reply else { return Err(remote.unexpected("DBSIZE", &reply)) };
    let mut out = Out::new();
    if source.json {
        out.json(&json!({ "estimated_keys": keys, "info": sections(&info) }))?;
    } else {
        out.line(&format!("about {} keys", thousands(keys.unsigned_abs())))?;
        for line in info.lines() {
            out.line(line.trim_end())?;
        }
    }
    out.flush()?;
    Ok(Verdict::Good)
}

/// INFO's text as sections of fields. Numbers become numbers.
fn sections(info: &str) -> Value {
    let mut all = Map::new();
    let mut name = String::new();
    for line in info.lines().map(str::trim) {
        if let Some(title) = line.strip_prefix('#') {
            name = title.trim().to_lowercase();
        } else if let Some((key, text)) = line.split_once(':') {
            let section = all.entry(name.clone()).or_insert_with(|| json!({})).as_object_mut();
            let value = text.parse::<u64>().map_or_else(|_| json!(text), |number| json!(number));
            section.expect("sections are objects").insert(key.to_owned(), value);
        }
    }
    Value::Object(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn infos_lines_become_fields_of_their_sections() {
        let info = "# Server\r\nredis_version:7.0.0\r\ntcp_port:6379\r\n\r\n# Keyspace\r\n\
                    db0:keys=5,expires=0\r\n";
        assert_eq!(
            sections(info),
            json!({
                "server": { "redis_version": "7.0.0", "tcp_port": 6379 },
                "keyspace": { "db0": "keys=5,expires=0" },
            })
        );
    }
}
