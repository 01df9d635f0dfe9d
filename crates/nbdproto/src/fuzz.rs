//! The body of the fuzz target, which tests also call: it panics if the crate breaks one of its
//! guarantees.

use crate::wire::{OPTION_MAGIC, OPTION_REPLY_MAGIC, REQUEST_MAGIC, Reader, Violation, command};
use crate::{
    Action, ExportInfo, Exports, Handshake, OPTION_BYTES_MAX, PAYLOAD_BYTES_MAX, Progress,
    REQUEST_BYTES, Request, Rules,
};

/// A fuzz target: its name, its function, and its seeds.
pub type FuzzTarget = (&'static str, fn(&[u8]), fn() -> Vec<Vec<u8>>);

/// The target of this crate.
pub const TARGETS: &[FuzzTarget] = &[("nbd_stream", stream, seeds)];

/// Two exports: `a` of 1 MiB, which has all features, and `b` of 4 KiB, which is read-only.
pub struct Few;

impl Exports for Few {
    fn names(&self) -> Vec<String> {
        vec!["a".to_owned(), "b".to_owned()]
    }

    fn find(&self, name: &str) -> Option<ExportInfo> {
        let a = ExportInfo {
            size_bytes: 1 << 20,
            read_only: false,
            trim: true,
            write_zeroes: true,
            allocation: true,
            block_bytes: 512,
            preferred_bytes: 4096,
            payload_bytes_max: 1 << 16,
            description: "the first".to_owned(),
        };
        let b = ExportInfo { size_bytes: 4096, read_only: true, preferred_bytes: 512, ..a.clone() };
        match name {
            "a" => Some(a),
            "b" => Some(ExportInfo { trim: false, write_zeroes: false, allocation: false, ..b }),
            _ => None,
        }
    }
}

/// What a client of one of the exports may do that has negotiated everything.
pub fn few_rules(name: &str) -> Rules {
    let info = Few.find(name).unwrap_or_default();
    Rules {
        size_bytes: info.size_bytes,
        block_bytes: info.block_bytes,
        payload_bytes_max: info.payload_bytes_max,
        read_only: info.read_only,
        trim: info.trim,
        write_zeroes: info.write_zeroes,
        structured: true,
        allocation: info.allocation,
    }
}

/// What a stream of a client led to.
#[derive(Debug, Default, PartialEq, Eq)]
struct Outcome {
    sent: Vec<u8>,
    chosen: Option<crate::Chosen>,
    ended: bool,
    requests: Vec<(Request, Result<Action, crate::Errno>)>,
    violation: Option<Violation>,
}

/// A stream leads to the same outcome however it is cut into pieces, each reply has the shape of
/// one, and no request is accepted that reaches outside its export.
pub fn stream(data: &[u8]) {
    let Some((&seed, stream)) = data.split_first() else { return };
    let whole = outcome(stream, stream.len().max(1));
    assert_eq!(whole, outcome(stream, 1 + usize::from(seed)));
    assert_eq!(whole, outcome(stream, 1));
    // The reply to the option that has no reply header is the last: 10 or 134 bytes.
    let mut replies = Reader(&whole.sent);
    while let Some(magic) = { replies }.u64() {
        if magic != OPTION_REPLY_MAGIC {
            assert!(whole.chosen.is_some() && matches!(replies.0.len(), 10 | 134));
            break;
        }
        let header = replies.take(20).expect("a reply has a whole header");
        let len = u32::from_be_bytes(header[16..].try_into().expect("four bytes"));
        replies.take(len as usize).expect("a reply is as long as it says");
    }
    let rules = whole.chosen.as_ref().map(|chosen| few_rules(&chosen.name));
    for (request, checked) in &whole.requests {
        let rules = rules.as_ref().expect("requests come after an export was chosen");
        let Ok(action) = checked else { continue };
        if matches!(action, Action::Disconnect | Action::Flush) {
            continue;
        }
        assert!(request.offset + u64::from(request.len) <= rules.size_bytes);
        assert!((request.offset | u64::from(request.len)).is_multiple_of(512));
        assert!(request.payload_len() <= rules.payload_bytes_max);
        assert!(!rules.read_only || matches!(action, Action::Read));
    }
}

fn outcome(stream: &[u8], step: usize) -> Outcome {
    let (mut outcome, mut handshake) = (Outcome::default(), Handshake::default());
    let (mut buffer, mut skip) = (Vec::new(), 0);
    for piece in stream.chunks(step) {
        buffer.extend_from_slice(piece);
        loop {
            // The payload of a write.
            let skipped = skip.min(buffer.len());
            buffer.drain(..skipped);
            skip -= skipped;
            match feed(&mut outcome, &mut handshake, &buffer, &mut skip) {
                Ok(0) => break,
                Ok(used) => drop(buffer.drain(..used)),
                Err(violation) => {
                    outcome.violation = Some(violation);
                    return outcome;
                }
            }
            if outcome.ended {
                return outcome;
            }
        }
        assert!(buffer.len() <= step + OPTION_BYTES_MAX + REQUEST_BYTES);
    }
    outcome
}

fn feed(
    outcome: &mut Outcome,
    handshake: &mut Handshake,
    buffer: &[u8],
    skip: &mut usize,
) -> Result<usize, Violation> {
    let Some(chosen) = &outcome.chosen else {
        let before = outcome.sent.len();
        let (used, progress) = handshake.take(buffer, &Few, &mut outcome.sent)?;
        assert!(used > 0 || (outcome.sent.len() == before && progress == Progress::More));
        match progress {
            Progress::More => {}
            Progress::Ended => outcome.ended = true,
            Progress::Serve(chosen) => outcome.chosen = Some(chosen),
        }
        return Ok(used);
    };
    let Some(request) = Request::parse(buffer)? else { return Ok(0) };
    assert!(request.payload_len() <= PAYLOAD_BYTES_MAX);
    let rules = few_rules(&chosen.name);
    let (structured, allocation) = (chosen.structured, chosen.allocation);
    let checked = request.check(&Rules { structured, allocation, ..rules });
    outcome.ended = checked == Ok(Action::Disconnect);
    outcome.requests.push((request, checked));
    *skip = request.payload_len() as usize;
    Ok(REQUEST_BYTES)
}

/// The client's flags.
pub fn client_flags(flags: u32) -> Vec<u8> {
    flags.to_be_bytes().to_vec()
}

/// An option.
pub fn option_bytes(id: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = OPTION_MAGIC.to_be_bytes().to_vec();
    bytes.extend_from_slice(&id.to_be_bytes());
    bytes.extend_from_slice(&(data.len() as u32).to_be_bytes());
    bytes.extend_from_slice(data);
    bytes
}

/// `NBD_OPT_INFO` or `NBD_OPT_GO`.
pub fn go(id: u32, name: &str, wanted: &[u16]) -> Vec<u8> {
    let mut data = (name.len() as u32).to_be_bytes().to_vec();
    data.extend_from_slice(name.as_bytes());
    data.extend_from_slice(&(wanted.len() as u16).to_be_bytes());
    wanted.iter().for_each(|info| data.extend_from_slice(&info.to_be_bytes()));
    option_bytes(id, &data)
}

/// A request without its payload.
pub fn request_bytes(command: u16, flags: u16, cookie: u64, offset: u64, len: u32) -> Vec<u8> {
    let mut bytes = REQUEST_MAGIC.to_be_bytes().to_vec();
    bytes.extend_from_slice(&flags.to_be_bytes());
    bytes.extend_from_slice(&command.to_be_bytes());
    bytes.extend_from_slice(&cookie.to_be_bytes());
    bytes.extend_from_slice(&offset.to_be_bytes());
    bytes.extend_from_slice(&len.to_be_bytes());
    bytes
}

/// Conversations that a fuzzer may start from.
pub fn seeds() -> Vec<Vec<u8>> {
    let context = b"\0\0\0\x01a\0\0\0\x01\0\0\0\x0fbase:allocation";
    let write = [request_bytes(command::WRITE, 1, 2, 512, 512), vec![7; 512]].concat();
    let conversation = [
        vec![3],
        client_flags(3),
        option_bytes(3, &[]),
        option_bytes(8, &[]),
        option_bytes(9, context),
        option_bytes(10, context),
        go(6, "b", &[0, 1, 2, 3]),
        go(7, "a", &[3]),
        request_bytes(command::READ, 4, 1, 0, 4096),
        write,
        request_bytes(command::FLUSH, 0, 3, 0, 0),
        request_bytes(command::TRIM, 0, 4, 0, 1 << 20),
        request_bytes(command::WRITE_ZEROES, 2, 5, 4096, 4096),
        request_bytes(command::BLOCK_STATUS, 8, 6, 0, 4096),
        request_bytes(command::DISC, 0, 7, 0, 0),
    ];
    let old = [
        vec![0],
        client_flags(1),
        option_bytes(1, b"b"),
        request_bytes(command::READ, 0, 1, 0, 512),
        request_bytes(command::WRITE, 0, 1, 0, 512),
    ];
    vec![
        conversation.concat(),
        old.concat(),
        [vec![9], client_flags(3), option_bytes(2, &[])].concat(),
    ]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_seeds_are_whole_conversations() {
        let all: Vec<_> = seeds().iter().map(|seed| outcome(&seed[1..], seed.len())).collect();
        assert_eq!(all[0].requests.len(), 7);
        assert!(all[0].requests.iter().all(|(_, checked)| checked.is_ok()) && all[0].ended);
        let checked: Vec<_> = all[1].requests.iter().map(|(_, checked)| *checked).collect();
        assert_eq!(checked, [Ok(Action::Read), Err(crate::Errno::NotPermitted)]);
        assert!(all[2].ended && all[2].chosen.is_none());
        seeds().iter().for_each(|seed| stream(seed));
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
            stream(&bytes);
        }

        #[test]
        fn changed_conversations_are_survived(
            nth in 0..3_usize,
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
            cut in any::<prop::sample::Index>(),
            repeat in any::<bool>(),
        ) {
            let mut bytes = seeds().swap_remove(nth);
            for (at, byte) in changes {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            let end = 1 + cut.index(bytes.len());
            if repeat {
                let tail = bytes[end / 2..].to_vec();
                bytes.truncate(end);
                bytes.extend(tail);
            }
            stream(&bytes);
        }
    }
}
