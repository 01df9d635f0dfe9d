//! The bodies of the fuzz targets, which tests also call: they panic if the crate breaks one of its
//! guarantees.

use crate::client::request::{encode_named, encode_option, encode_request};
use crate::server::options::OptionReplies;
use crate::wire::{OPTION_REPLY_MAGIC, Reader, Violation, command, option, option_reply};
use crate::{
    Action, Answered, ClientHandshake, ClientReplies, Expect, Export, ExportInfo, Exports, Extent,
    Fault, Handshake, OPTION_BYTES_MAX, PAYLOAD_BYTES_MAX, Progress, REPLY_BYTES_MAX,
    REQUEST_BYTES, Replies, Request, Rules,
};

/// A fuzz target: its name, its function, and its seeds.
pub type FuzzTarget = (&'static str, fn(&[u8]), fn() -> Vec<Vec<u8>>);

/// The targets of this crate.
pub const TARGETS: &[FuzzTarget] =
    &[("nbd_stream", stream, seeds), ("nbd_client", client, client_seeds)];

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
    let mut bytes = Vec::new();
    encode_option(&mut bytes, id, &[data]);
    bytes
}

/// `NBD_OPT_INFO` or `NBD_OPT_GO`.
pub fn go(id: u32, name: &str, wanted: &[u16]) -> Vec<u8> {
    let mut rest = (wanted.len() as u16).to_be_bytes().to_vec();
    wanted.iter().for_each(|info| rest.extend_from_slice(&info.to_be_bytes()));
    let mut bytes = Vec::new();
    encode_named(&mut bytes, id, name, &[&rest]);
    bytes
}

/// A request without its payload.
pub fn request_bytes(command: u16, flags: u16, cookie: u64, offset: u64, len: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode_request(&mut bytes, (command, flags), cookie, offset, len);
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

/// What a stream of a server led to.
#[derive(Debug, Default, PartialEq, Eq)]
struct ClientOutcome {
    sent: Vec<u8>,
    export: Option<Export>,
    answered: Vec<Answered>,
    fault: Option<Fault>,
}

/// The requests that are open when the replies come: cookie, what it expects, offset and length.
const OPEN: [(u64, Expect, u64, u32); 8] = [
    (1, Expect::Data, 0, 4096),
    (2, Expect::Data, 512, 0),
    (3, Expect::Nothing, 0, 4096),
    (4, Expect::Extents, 0, 1 << 20),
    (5, Expect::Data, u64::MAX - 511, 511),
    (6, Expect::Nothing, 0, 0),
    (7, Expect::Extents, 4096, 512),
    (8, Expect::Data, 8192, 8192),
];

/// A server's stream leads to the same outcome however it is cut into pieces; an export is
/// possible, and each request is answered at most once, with what was asked for.
pub fn client(data: &[u8]) {
    let Some((&seed, stream)) = data.split_first() else { return };
    let whole = client_outcome(stream, stream.len().max(1));
    assert_eq!(whole, client_outcome(stream, 1 + usize::from(seed)));
    assert_eq!(whole, client_outcome(stream, 1));
    if let Some(export) = &whole.export {
        assert!(export.size_bytes <= i64::MAX as u64 && export.block_bytes.is_power_of_two());
        assert!(export.payload_bytes_max <= PAYLOAD_BYTES_MAX);
        assert!(export.payload_bytes_max >= export.block_bytes);
        assert!(export.replaces(export, export.payload_bytes_max));
    }
    let mut open = OPEN.to_vec();
    for Answered { cookie, errno, data, extents } in &whole.answered {
        let at = open.iter().position(|(open, ..)| open == cookie).expect("an open request");
        let (_, expect, _, len) = open.swap_remove(at);
        let total: u64 = extents.iter().map(|extent| u64::from(extent.len)).sum();
        assert!(extents.iter().all(|extent| extent.len > 0) && total <= u64::from(len));
        if *errno == 0 {
            assert_eq!(data.len(), if expect == Expect::Data { len as usize } else { 0 });
            assert_eq!(!extents.is_empty(), expect == Expect::Extents);
        }
    }
}

fn client_outcome(stream: &[u8], step: usize) -> ClientOutcome {
    let (mut outcome, mut handshake) = (ClientOutcome::default(), ClientHandshake::new("a"));
    let (mut pending, mut replies) = (Vec::new(), None);
    for piece in stream.chunks(step) {
        pending.extend_from_slice(piece);
        loop {
            match client_feed(&mut outcome, &mut handshake, &mut replies, &pending) {
                Ok(0) => break,
                Ok(used) => drop(pending.drain(..used)),
                Err(fault) => {
                    outcome.fault = Some(fault);
                    return outcome;
                }
            }
        }
        assert!(pending.len() <= step + OPTION_BYTES_MAX.max(REPLY_BYTES_MAX) + 20);
    }
    outcome
}

fn client_feed(
    outcome: &mut ClientOutcome,
    handshake: &mut ClientHandshake,
    replies: &mut Option<ClientReplies>,
    pending: &[u8],
) -> Result<usize, Fault> {
    if let Some(replies) = replies {
        let (used, answered) = replies.take(pending)?;
        assert!(used > 0 || answered.is_none());
        outcome.answered.extend(answered);
        return Ok(used);
    }
    let before = outcome.sent.len();
    let (used, export) = handshake.take(pending, &mut outcome.sent)?;
    assert!(used > 0 || (outcome.sent.len() == before && export.is_none()));
    if let Some(export) = export {
        let mut open = ClientReplies::new(&export);
        OPEN.iter().for_each(|&(cookie, expect, at, len)| open.expect(cookie, expect, at, len));
        (outcome.export, *replies) = (Some(export), Some(open));
    }
    Ok(used)
}

/// The server's side of conversations.
pub fn client_seeds() -> Vec<Vec<u8>> {
    let export = |flags: u16| {
        let size = (1_u64 << 20).to_be_bytes();
        [&[0, 0][..], &size, &flags.to_be_bytes()].concat()
    };
    let sizes = [&[0, 3][..], &512_u32.to_be_bytes(), &4096_u32.to_be_bytes(), &[0, 1, 0, 0]];
    let mut all = Vec::new();
    for structured in [true, false] {
        let mut out = vec![7];
        out.extend_from_slice(&Handshake::greeting());
        let mut reply =
            |id, kind, data: &[u8]| OptionReplies { id, out: &mut out }.with(kind, &[data]);
        match structured {
            true => {
                reply(option::STRUCTURED_REPLY, option_reply::ACK, &[]);
                let context = b"\0\0\0\x01base:allocation";
                reply(option::SET_META_CONTEXT, option_reply::META_CONTEXT, context);
                reply(option::SET_META_CONTEXT, option_reply::ACK, &[]);
            }
            false => reply(option::STRUCTURED_REPLY, option_reply::ERR_UNSUP, b"no"),
        }
        reply(option::GO, option_reply::INFO, &export(0x1ff));
        reply(option::GO, option_reply::INFO, &sizes.concat());
        reply(option::GO, option_reply::ACK, &[]);
        let server = Replies { structured };
        server.done(&mut out, 3);
        server.read(&mut out, 1, 0, 4096);
        out.extend_from_slice(&[7; 4096]);
        server.error(&mut out, 8, crate::Errno::Io);
        server.read(&mut out, 2, 512, 0);
        if structured {
            let extents = [Extent { len: 4096, hole: true }, Extent { len: 1 << 20, hole: false }];
            server.block_status(&mut out, 4, &extents);
        }
        server.done(&mut out, 6);
        all.push(out);
    }
    all
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

    #[test]
    fn the_servers_seeds_are_whole_conversations() {
        for (seed, count) in client_seeds().iter().zip([6, 5]) {
            let outcome = client_outcome(&seed[1..], seed.len());
            assert_eq!((outcome.answered.len(), outcome.fault), (count, None));
            client(seed);
        }
    }

    /// The bytes with some changed, and cut or in part repeated.
    fn changed(
        mut bytes: Vec<u8>,
        changes: Vec<(prop::sample::Index, u8)>,
        cut: prop::sample::Index,
        repeat: bool,
    ) -> Vec<u8> {
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
        bytes
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
            stream(&bytes);
            client(&bytes);
        }

        #[test]
        fn changed_conversations_of_servers_are_survived(
            nth in 0..2_usize,
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
            cut in any::<prop::sample::Index>(),
            repeat in any::<bool>(),
        ) {
            client(&changed(client_seeds().swap_remove(nth), changes, cut, repeat));
        }

        #[test]
        fn changed_conversations_are_survived(
            nth in 0..3_usize,
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
            cut in any::<prop::sample::Index>(),
            repeat in any::<bool>(),
        ) {
            stream(&changed(seeds().swap_remove(nth), changes, cut, repeat));
        }
    }
}
