//! The layers of a device's URI.

use std::path::PathBuf;

use super::params::{Params, count, duration, size};
use super::{DELAY_MAX_NS, Failures, Layer, Outcome, scheme};
use crate::error::Error;
use crate::io::KINDS;
use crate::io::Status;
use crate::layers::limit::Rates;

/// Makes a layer of its parameters.
type Parse = fn(&mut Params) -> Result<Layer, Error>;

/// The schemes of all layers.
const LAYERS: [(&str, Parse); 4] = [
    ("error", error_layer),
    ("delay", delay_layer),
    ("limit", limit_layer),
    ("dirty", dirty_layer),
];

fn find(scheme: &str) -> Option<Parse> {
    LAYERS.iter().find(|(name, _)| *name == scheme).map(|(_, parse)| *parse)
}

pub(super) fn is_layer(scheme: &str) -> bool {
    find(scheme).is_some()
}

/// `error:, delay:, limit: and dirty:`, the last two joined by `word`.
pub(super) fn list(word: &str) -> String {
    let names: Vec<_> = LAYERS.iter().map(|(name, _)| format!("{name}:")).collect();
    let (last, others) = names.split_last().expect("there are layers");
    format!("{} {word} {last}", others.join(", "))
}

/// Parses a layer.
pub(super) fn layer(text: &str) -> Result<Layer, Error> {
    let (scheme, rest) = scheme(text)?;
    let rest = rest.strip_prefix('?').unwrap_or(rest);
    let parse = find(scheme).ok_or_else(|| {
        let all = list("and");
        Error::uri(format!("'{text}': only {all} lie over a device; a bar in a path is %7C"))
    })?;
    parse(&mut Params::parse(rest)?)
}

fn error_layer(params: &mut Params) -> Result<Layer, Error> {
    let kinds = params.take("kind", |text| {
        let mut kinds = [false; 5];
        for name in text.split(',') {
            match KINDS.iter().position(|&known| known == name) {
                Some(at) => kinds[at] = true,
                None if name == "all" => kinds = [true; 5],
                None => {
                    return Err("must be a list of read, write, flush, discard, zeroes, all".into());
                }
            }
        }
        Ok(kinds)
    })?;
    let range = params.take("range", |text| {
        let (from, to) = text.split_once("..").ok_or("must be FROM..TO in bytes")?;
        let from = if from.is_empty() { 0 } else { size(from)? };
        let to = if to.is_empty() { u64::MAX } else { size(to)? };
        if from < to { Ok(from..to) } else { Err("must not be an empty range".to_owned()) }
    })?;
    let every = params.take("every", count)?;
    let per_million = params.take("chance", |text| {
        let chance: f64 = text.parse().map_err(|_| "must be a number from 0 to 1".to_owned())?;
        if (0.0..=1.0).contains(&chance) {
            Ok((chance * 1e6).round() as u32)
        } else {
            Err("must be a number from 0 to 1".to_owned())
        }
    })?;
    let times = params.take("count", count)?;
    let outcome = params.take("status", |text| match text {
        "io" => Ok(Outcome::Fails(Status::IoError)),
        "unsupported" => Ok(Outcome::Fails(Status::Unsupported)),
        "nospace" => Ok(Outcome::Fails(Status::NoSpace)),
        "panic" => Ok(Outcome::Panics),
        _ => Err("must be io, unsupported, nospace or panic".to_owned()),
    })?;
    params.end("error", "kind, range, every, chance, count, status")?;
    Ok(Layer::Error(Failures {
        kinds: kinds.unwrap_or([true; 5]),
        range: range.unwrap_or(0..u64::MAX),
        every: every.unwrap_or(1),
        per_million: per_million.unwrap_or(1_000_000),
        count: times.unwrap_or(u64::MAX),
        outcome: outcome.unwrap_or(Outcome::Fails(Status::IoError)),
    }))
}

fn delay_layer(params: &mut Params) -> Result<Layer, Error> {
    let interval = |text: &str| -> Result<(u64, u64), String> {
        let (from, to) = match text.split_once("..") {
            Some((from, to)) => (duration(from)?, duration(to)?),
            None => (duration(text)?, duration(text)?),
        };
        if from > to {
            return Err("must not end before it begins".to_owned());
        }
        if to > DELAY_MAX_NS {
            return Err("must be at most an hour".to_owned());
        }
        Ok((from, to))
    };
    let all = params.take("all", interval)?;
    let mut ns = [all.unwrap_or((0, 0)); 5];
    for (ns, kind) in ns.iter_mut().zip(KINDS) {
        if let Some(own) = params.take(kind, interval)? {
            *ns = own;
        }
    }
    params.end("delay", "all, read, write, flush, discard, zeroes")?;
    Ok(Layer::Delay { ns })
}

/// The value of a key of `limit:`: `iops`, `bytes` per second, or `burst` in nanoseconds.
///
/// # Errors
/// When there is no such key, or the value is not one of its.
pub fn parse_rate(key: &str, text: &str) -> Result<u64, String> {
    match key {
        "iops" => count(text),
        "bytes" => match size(text)? {
            0 => Err("must not be 0".to_owned()),
            bytes => Ok(bytes),
        },
        "burst" => match duration(text)? {
            ns if ns <= DELAY_MAX_NS => Ok(ns),
            _ => Err("must be at most an hour".to_owned()),
        },
        _ => Err("is not one of iops, bytes, burst".to_owned()),
    }
}

fn limit_layer(params: &mut Params) -> Result<Layer, Error> {
    let mut rate = |key| params.take(key, |text| parse_rate(key, text));
    let (iops, bytes, burst_ns) = (rate("iops")?, rate("bytes")?, rate("burst")?);
    params.end("limit", "iops, bytes, burst")?;
    if iops.is_none() && bytes.is_none() {
        return Err(Error::uri("limit: needs iops=N, bytes=SIZE (each per second) or both"));
    }
    let (iops, bytes) = (iops.unwrap_or(0), bytes.unwrap_or(0));
    Ok(Layer::Limit(Rates { iops, bytes, burst_ns: burst_ns.unwrap_or(Rates::BURST_NS) }))
}

fn dirty_layer(params: &mut Params) -> Result<Layer, Error> {
    let path = params.take("file", |text| match text.starts_with('/') {
        true => Ok(PathBuf::from(text)),
        false => Err("must be an absolute path".to_owned()),
    })?;
    let granule = params.take("granule", |text| match size(text)? {
        granule if granule.is_power_of_two() && (4096..=1 << 30).contains(&granule) => Ok(granule),
        _ => Err("must be a power of two from 4K to 1G".to_owned()),
    })?;
    params.end("dirty", "file, granule")?;
    Ok(Layer::Dirty { path, granule: granule.unwrap_or(64 << 10) })
}
