//! The `kv` commands on a running node, over its Redis protocol.

use resp::{Reply, write_command};
use serde_json::{Map, Value, json};

use super::import::{Imported, Input};
use super::listing::{Listed, Listing, Printer};
use super::print::value;
use super::steps::Step;
use crate::args::{Entries, Source};
use crate::failure::{Failure, Verdict};
use crate::output::{Out, thousands};
use crate::remote::Remote;
use crate::style::Style;

/// Commands of an import that are sent before their replies are read: the replies are short and fit
/// into the connection's buffer.
const PIPELINE: usize = 1000;
/// Bytes of these commands.
const PIPELINE_BYTES: usize = 1 << 20;
/// Entries per request of a scan.
const PAGE: u64 = 1000;

/// Connects to a node, which must serve the column family that was asked for.
fn connect(address: &str, column_family: Option<&str>) -> Result<Remote, Failure> {
    let mut remote = Remote::connect(address)?;
    let Some(asked) = column_family else { return Ok(remote) };
    let reply = remote.call(&[b"CONFIG", b"GET", b"column-family"])?;
    let served = match &reply {
        Reply::Array(items) => match &items[..] {
            [_, Reply::Bulk(served)] => String::from_utf8_lossy(served).into_owned(),
            _ => return Err(remote.unexpected("CONFIG GET column-family", &reply)),
        },
        other => return Err(remote.unexpected("CONFIG GET column-family", other)),
    };
    if served != asked {
        let text = format!("the node serves the column family '{served}', not '{asked}'");
        return Err(Failure::new(text).hint(
            "a node serves one column family (millrace serve --column-family NAME); others are \
             reached with --data DIR while no node has the directory open",
        ));
    }
    Ok(remote)
}

/// `kv get --connect`.
pub fn get(
    address: &str,
    key: &[u8],
    source: &Source,
    entries: &Entries,
) -> Result<Verdict, Failure> {
    let mut remote = connect(address, entries.column_family.as_deref())?;
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

/// `kv scan --connect` and `kv export --connect`: pages, each starting after the last key of the
/// previous one.
pub fn list(address: &str, listing: &Listing) -> Result<Listed, Failure> {
    let mut remote = connect(address, listing.column_family.as_deref())?;
    let keys = match remote.call(&[b"DBSIZE"])? {
        Reply::Integer(keys) => keys.unsigned_abs(),
        other => return Err(remote.unexpected("DBSIZE", &other)),
    };
    let mut printer = Printer::new(listing, keys)?;
    let range = listing.range.clone();
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
            printer.entry(key, value).map_err(|stop| listing.stopped(stop))?;
        }
        left -= (pairs.len() as u64).min(left);
        let Some([Reply::Bulk(last), _]) = pairs.last() else { break };
        if (pairs.len() as u64) < page {
            break;
        }
        let edge = if range.reverse { &mut end } else { &mut start };
        *edge = bound(b'(', last);
        printer.flush()?;
    }
    printer.flush()?;
    Ok(printer.finish())
}

/// `kv put --connect`.
pub fn put(
    address: &str,
    column_family: Option<&str>,
    key: &[u8],
    value: &[u8],
) -> Result<(), Failure> {
    let mut remote = connect(address, column_family)?;
    match remote.call(&[b"SET", key, value])? {
        Reply::Simple(_) => Ok(()),
        other => Err(remote.unexpected("SET", &other)),
    }
}

/// `kv del --connect`: how many of the keys existed.
pub fn delete(
    address: &str,
    column_family: Option<&str>,
    keys: &[Vec<u8>],
) -> Result<u64, Failure> {
    let mut remote = connect(address, column_family)?;
    let command: Vec<&[u8]> =
        std::iter::once(&b"DEL"[..]).chain(keys.iter().map(Vec::as_slice)).collect();
    match remote.call(&command)? {
        Reply::Integer(deleted) => Ok(deleted.unsigned_abs()),
        other => Err(remote.unexpected("DEL", &other)),
    }
}

/// `kv import --connect`: sends many commands, then reads their replies.
pub fn import(
    address: &str,
    column_family: Option<&str>,
    input: &Input,
) -> Result<Imported, Failure> {
    let mut input = input.open()?;
    let mut remote = connect(address, column_family)?;
    let mut imported = Imported::default();
    let mut commands = Vec::new();
    let mut waiting = 0;
    loop {
        let step = input.next();
        if let Ok(Some(step)) = &step {
            imported.count(step);
            match step {
                Step::Put(key, value) => write_command(&mut commands, &[b"SET", key, value]),
                Step::Delete(key) => write_command(&mut commands, &[b"DEL", key]),
            }
            waiting += 1;
        }
        let ended = !matches!(step, Ok(Some(_)));
        if ended || commands.len() >= PIPELINE_BYTES || waiting >= PIPELINE {
            // Entries before a mistake in the input are imported.
            remote.send(&commands)?;
            for _ in 0..waiting {
                remote.reply()?;
            }
            commands.clear();
            waiting = 0;
        }
        if step?.is_none() {
            input.finish();
            return Ok(imported);
        }
    }
}

/// `kv stat --connect`: prints the node's own report.
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

/// Parses the text of INFO into sections of fields. Numbers become JSON numbers.
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
    fn lines_of_info_become_fields_of_their_sections() {
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
