//! Requests and options, as a client sends them.

use crate::server::request::Action;
use crate::wire::{OPTION_MAGIC, REQUEST_MAGIC, command, command_flag};

impl Action {
    /// Appends the request for this, without its payload. `offset` and `len` are 0 if it has no
    /// range.
    pub fn encode(self, out: &mut Vec<u8>, cookie: u64, offset: u64, len: u32) {
        let flag = |on: bool, flag: u16| if on { flag } else { 0 };
        let fua = |on| flag(on, command_flag::FUA);
        let kind = match self {
            Action::Read => (command::READ, 0),
            Action::Write { fua: on } => (command::WRITE, fua(on)),
            Action::Flush => (command::FLUSH, 0),
            Action::Trim { fua: on } => (command::TRIM, fua(on)),
            Action::WriteZeroes { fua: on, unmap } => {
                (command::WRITE_ZEROES, fua(on) | flag(!unmap, command_flag::NO_HOLE))
            }
            Action::BlockStatus { one } => {
                (command::BLOCK_STATUS, flag(one, command_flag::REQ_ONE))
            }
            Action::Disconnect => (command::DISC, 0),
        };
        encode_request(out, kind, cookie, offset, len);
    }
}

/// Appends a request of this type and with these flags.
pub fn encode_request(out: &mut Vec<u8>, kind: (u16, u16), cookie: u64, offset: u64, len: u32) {
    let (command, flags) = kind;
    out.extend_from_slice(&REQUEST_MAGIC.to_be_bytes());
    out.extend_from_slice(&flags.to_be_bytes());
    out.extend_from_slice(&command.to_be_bytes());
    out.extend_from_slice(&cookie.to_be_bytes());
    out.extend_from_slice(&offset.to_be_bytes());
    out.extend_from_slice(&len.to_be_bytes());
}

/// Appends an option with data in several parts.
pub fn encode_option(out: &mut Vec<u8>, id: u32, parts: &[&[u8]]) {
    let len: usize = parts.iter().map(|part| part.len()).sum();
    out.extend_from_slice(&OPTION_MAGIC.to_be_bytes());
    out.extend_from_slice(&id.to_be_bytes());
    out.extend_from_slice(&(len as u32).to_be_bytes());
    parts.iter().for_each(|part| out.extend_from_slice(part));
}

/// Appends an option that names an export, after its length, and then has `rest`.
pub fn encode_named(out: &mut Vec<u8>, id: u32, export: &str, rest: &[&[u8]]) {
    let len = (export.len() as u32).to_be_bytes();
    let parts: Vec<&[u8]> =
        [&len[..], export.as_bytes()].into_iter().chain(rest.iter().copied()).collect();
    encode_option(out, id, &parts);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fuzz::few_rules;
    use crate::server::request::Request;

    #[test]
    fn our_server_understands_each_request() {
        let of_each = |fua| {
            let zeroes = |unmap| Action::WriteZeroes { fua, unmap };
            [Action::Write { fua }, Action::Trim { fua }, zeroes(true), zeroes(false)]
        };
        let others = [
            Action::Read,
            Action::Flush,
            Action::BlockStatus { one: true },
            Action::BlockStatus { one: false },
            Action::Disconnect,
        ];
        for action in of_each(true).into_iter().chain(of_each(false)).chain(others) {
            let mut bytes = Vec::new();
            let len = if action == Action::Flush { 0 } else { 512 };
            action.encode(&mut bytes, 9, u64::from(len), len);
            let request = Request::parse(&bytes).unwrap().unwrap();
            assert_eq!((request.cookie, request.offset, request.len), (9, len.into(), len));
            assert_eq!(request.check(&few_rules("a")), Ok(action));
        }
    }
}
