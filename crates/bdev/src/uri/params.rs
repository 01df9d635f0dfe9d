//! Keys, values and their types, in the parameters of a device or a layer.

use super::SECTOR;
use crate::error::Error;

/// Keys and values that have not been taken yet.
#[derive(Default)]
pub(super) struct Params(Vec<(String, String)>);

impl Params {
    pub fn parse(text: &str) -> Result<Params, Error> {
        let mut params: Vec<(String, String)> = Vec::new();
        for pair in text.split('&').filter(|_| !text.is_empty()) {
            let (key, value) = pair
                .split_once('=')
                .ok_or_else(|| Error::uri(format!("'{pair}' is not KEY=VALUE")))?;
            if params.iter().any(|(known, _)| known == key) {
                return Err(Error::uri(format!("'{key}' is repeated")));
            }
            params.push((key.to_owned(), decoded(value)?));
        }
        Ok(Params(params))
    }

    pub fn take<T>(
        &mut self,
        key: &str,
        read: impl FnOnce(&str) -> Result<T, String>,
    ) -> Result<Option<T>, Error> {
        let Some(at) = self.0.iter().position(|(known, _)| known == key) else { return Ok(None) };
        let (_, value) = self.0.swap_remove(at);
        read(&value).map(Some).map_err(|why| named(&format!("{key}={value}"), &why))
    }

    pub fn end(&self, scheme: &str, known: &str) -> Result<(), Error> {
        match self.0.first() {
            None => Ok(()),
            Some((key, _)) => {
                Err(Error::uri(format!("{scheme}: unknown key '{key}': the keys are {known}")))
            }
        }
    }
}

pub(super) fn named(what: &str, why: &str) -> Error {
    Error::uri(format!("{what}: {why}"))
}

pub(super) fn switch(text: &str) -> Result<bool, String> {
    match text {
        "on" | "true" => Ok(true),
        "off" | "false" => Ok(false),
        _ => Err("must be on or off".to_owned()),
    }
}

pub(super) fn count(text: &str) -> Result<u64, String> {
    match text.parse() {
        Ok(0) | Err(_) => Err("must be a number, at least 1".to_owned()),
        Ok(n) => Ok(n),
    }
}

pub(super) fn block(text: &str) -> Result<u32, String> {
    match size(text) {
        Ok(n) if n.is_power_of_two() && (SECTOR..=65536).contains(&n) => Ok(n as u32),
        _ => Err("must be a power of two from 512 to 64K".to_owned()),
    }
}

/// `8G`, `512M`, `4K`, `100`: powers of 1024, in bytes.
pub(super) fn size(text: &str) -> Result<u64, String> {
    let wrong = || format!("'{text}' is not a size: write 8G, 512M, 4K or a number of bytes");
    let (digits, shift) = match text.as_bytes().last() {
        Some(b'k' | b'K') => (&text[..text.len() - 1], 10),
        Some(b'm' | b'M') => (&text[..text.len() - 1], 20),
        Some(b'g' | b'G') => (&text[..text.len() - 1], 30),
        Some(b't' | b'T') => (&text[..text.len() - 1], 40),
        _ => (text, 0),
    };
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(wrong());
    }
    let n: u64 = digits.parse().map_err(|_| wrong())?;
    let bytes = n.checked_mul(1 << shift).filter(|&bytes| bytes <= i64::MAX as u64);
    bytes.ok_or_else(|| format!("'{text}' is above the limit of {} bytes", i64::MAX))
}

/// `5ms`, `100us`, `1s`, `250ns`: in nanoseconds.
pub(super) fn duration(text: &str) -> Result<u64, String> {
    let wrong = || format!("'{text}' is not a time: write 5ms, 100us or 1s");
    let digits = text.find(|c: char| !c.is_ascii_digit()).ok_or_else(wrong)?;
    let unit: u64 = match &text[digits..] {
        "ns" => 1,
        "us" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        _ => return Err(wrong()),
    };
    let n: u64 = text[..digits].parse().map_err(|_| wrong())?;
    n.checked_mul(unit).ok_or_else(wrong)
}

pub(super) fn decoded(text: &str) -> Result<String, Error> {
    String::from_utf8(decoded_bytes(text)?)
        .map_err(|_| Error::uri(format!("'{text}' is not UTF-8 once its % are decoded")))
}

pub(super) fn decoded_bytes(text: &str) -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let digit = |byte: Option<u8>| char::from(byte?).to_digit(16);
        let pair = (digit(rest.next()), digit(rest.next()));
        let (Some(high), Some(low)) = pair else {
            let why = "write two hexadecimal digits after %, and %25 for the character itself";
            return Err(Error::uri(format!("'{text}': {why}")));
        };
        bytes.push((high * 16 + low) as u8);
    }
    if bytes.contains(&0) {
        return Err(Error::uri(format!("'{text}': contains a zero byte")));
    }
    Ok(bytes)
}

/// The quoted form of a character.
pub(super) fn escaped(c: char) -> String {
    let mut bytes = [0; 4];
    c.encode_utf8(&mut bytes).bytes().map(|byte| format!("%{byte:02X}")).collect()
}
