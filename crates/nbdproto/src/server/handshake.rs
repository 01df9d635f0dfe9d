//! The fixed newstyle handshake, on the server's side.
//!
//! 1. The server sends [`Handshake::greeting`].
//! 2. The client sends its flags, and then options one after the other. [`Handshake::take`] takes
//!    one of them, and appends the replies.
//! 3. The handshake ends with [`Progress::Serve`], after which requests follow, or with
//!    [`Progress::Ended`].

use super::options::{ContextRequest, InfoRequest, OptionReplies, RawOption};
use crate::wire::{
    ALLOCATION, ALLOCATION_ID, GREETING_MAGIC, OPTION_MAGIC, Reader, STRING_BYTES_MAX, Violation,
    handshake_flag, info, option, option_reply, transmission_flag,
};

/// Bytes of zeroes after the reply to an export's name, unless the client does not want them.
const PADDING_BYTES: usize = 124;

/// What a server exports.
pub trait Exports {
    /// The names of all exports.
    fn names(&self) -> Vec<String>;

    /// The export of that name, if there is one.
    fn find(&self, name: &str) -> Option<ExportInfo>;
}

/// What a client learns of an export. Sizes are in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExportInfo {
    /// The size of the export.
    pub size_bytes: u64,
    /// Writes are refused.
    pub read_only: bool,
    /// Trims are supported.
    pub trim: bool,
    /// Writes of zeroes are supported.
    pub write_zeroes: bool,
    /// Whether `base:allocation` can be selected.
    pub allocation: bool,
    /// Offsets and lengths are multiples of this: a power of two, at most 65,536.
    pub block_bytes: u32,
    /// The best unit of requests: a power of two, at least 512 and at least `block_bytes`.
    pub preferred_bytes: u32,
    /// The longest read or write.
    pub payload_bytes_max: u32,
    /// A text for people.
    pub description: String,
}

impl ExportInfo {
    /// The transmission flags.
    fn flags(&self, structured: bool) -> u16 {
        use transmission_flag as flag;
        let optional = [
            (self.read_only, flag::READ_ONLY),
            (self.trim, flag::SEND_TRIM),
            (self.write_zeroes, flag::SEND_WRITE_ZEROES),
            (structured, flag::SEND_DF),
        ];
        let always = flag::HAS_FLAGS | flag::SEND_FLUSH | flag::SEND_FUA | flag::CAN_MULTI_CONN;
        optional.iter().filter(|(on, _)| *on).fold(always, |flags, (_, flag)| flags | flag)
    }
}

/// How far a handshake is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// It goes on.
    More,
    /// The client has ended it: close the connection after the replies.
    Ended,
    /// Requests follow.
    Serve(Chosen),
}

/// What was agreed on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chosen {
    /// The export's name.
    pub name: String,
    /// Reads are answered with structured replies.
    pub structured: bool,
    /// The client has selected `base:allocation`.
    pub allocation: bool,
}

/// A handshake with a client; see the module text.
#[derive(Clone, Debug, Default)]
pub struct Handshake {
    has_flags: bool,
    no_zeroes: bool,
    structured: bool,
    /// The export for which the client has selected `base:allocation`.
    allocation_of: Option<String>,
}

impl Handshake {
    /// The first bytes that the server sends.
    pub fn greeting() -> [u8; 18] {
        let mut bytes = [0; 18];
        bytes[..8].copy_from_slice(&GREETING_MAGIC.to_be_bytes());
        bytes[8..16].copy_from_slice(&OPTION_MAGIC.to_be_bytes());
        let flags = handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES;
        bytes[16..].copy_from_slice(&flags.to_be_bytes());
        bytes
    }

    /// Takes the client's flags or one option from the front of `input`, and appends the replies to
    /// `out`. Returns the number of bytes taken; 0 if there are too few.
    ///
    /// # Errors
    /// When the client must be disconnected.
    pub fn take(
        &mut self,
        input: &[u8],
        exports: &dyn Exports,
        out: &mut Vec<u8>,
    ) -> Result<(usize, Progress), Violation> {
        if !self.has_flags {
            let Some(flags) = Reader(input).u32() else { return Ok((0, Progress::More)) };
            let known = handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES;
            if flags & !u32::from(known) != 0 {
                return Err(Violation::ClientFlags(flags));
            }
            self.no_zeroes = flags & u32::from(handshake_flag::NO_ZEROES) != 0;
            self.has_flags = true;
            return Ok((4, Progress::More));
        }
        let Some(option) = RawOption::parse(input)? else { return Ok((0, Progress::More)) };
        let progress = self.execute(option, exports, out)?;
        Ok((option.wire_len(), progress))
    }

    fn execute(
        &mut self,
        option: RawOption<'_>,
        exports: &dyn Exports,
        out: &mut Vec<u8>,
    ) -> Result<Progress, Violation> {
        let RawOption { id, data } = option;
        if id == option::EXPORT_NAME {
            return self.export_name(data, exports, out);
        }
        let mut replies = OptionReplies { id, out };
        match id {
            option::ABORT => {
                replies.ack();
                return Ok(Progress::Ended);
            }
            option::LIST | option::STRUCTURED_REPLY if !data.is_empty() => {
                replies.error(option_reply::ERR_INVALID, "this option takes no data");
            }
            option::LIST => {
                for name in exports.names() {
                    let len = (name.len() as u32).to_be_bytes();
                    replies.with(option_reply::SERVER, &[&len, name.as_bytes()]);
                }
                replies.ack();
            }
            option::STRUCTURED_REPLY => {
                self.structured = true;
                replies.ack();
            }
            option::INFO | option::GO => {
                if let Some(name) = self.inform(data, exports, &mut replies)
                    && id == option::GO
                {
                    return Ok(Progress::Serve(self.chosen(name)));
                }
            }
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => {
                self.contexts(data, exports, &mut replies);
            }
            _ => replies.error(option_reply::ERR_UNSUP, "this server does not have the option"),
        }
        Ok(Progress::More)
    }

    fn chosen(&self, name: &str) -> Chosen {
        Chosen {
            name: name.to_owned(),
            structured: self.structured,
            allocation: self.allocation_of.as_deref() == Some(name),
        }
    }

    /// Executes the option that has no error reply.
    fn export_name(
        &self,
        name: &[u8],
        exports: &dyn Exports,
        out: &mut Vec<u8>,
    ) -> Result<Progress, Violation> {
        let name = std::str::from_utf8(name).map_err(|_| Violation::NoExport)?;
        let export = exports.find(name).ok_or(Violation::NoExport)?;
        out.extend_from_slice(&export.size_bytes.to_be_bytes());
        out.extend_from_slice(&export.flags(self.structured).to_be_bytes());
        if !self.no_zeroes {
            out.extend_from_slice(&[0; PADDING_BYTES]);
        }
        Ok(Progress::Serve(self.chosen(name)))
    }

    /// Answers with information about an export; returns its name if there is one.
    fn inform<'a>(
        &self,
        data: &'a [u8],
        exports: &dyn Exports,
        replies: &mut OptionReplies<'_>,
    ) -> Option<&'a str> {
        let Some(request) = InfoRequest::parse(data) else {
            replies.error(option_reply::ERR_INVALID, "the data has the wrong shape");
            return None;
        };
        let Some(export) = exports.find(request.name) else {
            unknown(request.name, replies);
            return None;
        };
        let (size, flags) = (export.size_bytes.to_be_bytes(), export.flags(self.structured));
        replies.info(info::EXPORT, &[&size, &flags.to_be_bytes()]);
        if request.wants(info::NAME) {
            replies.info(info::NAME, &[request.name.as_bytes()]);
        }
        if request.wants(info::DESCRIPTION) {
            let description = cut(&export.description, STRING_BYTES_MAX);
            replies.info(info::DESCRIPTION, &[description.as_bytes()]);
        }
        // Also to a client that has not asked: it may still respect them.
        let sizes = [export.block_bytes, export.preferred_bytes, export.payload_bytes_max];
        let sizes = sizes.map(u32::to_be_bytes);
        replies.info(info::BLOCK_SIZE, &[&sizes[0], &sizes[1], &sizes[2]]);
        replies.ack();
        Some(request.name)
    }

    /// Lists or selects metadata contexts, of which there is one.
    fn contexts(&mut self, data: &[u8], exports: &dyn Exports, replies: &mut OptionReplies<'_>) {
        let selects = replies.id == option::SET_META_CONTEXT;
        if selects {
            self.allocation_of = None;
        }
        let request = ContextRequest::parse(data).filter(|_| self.structured);
        let Some(request) = request else {
            let why = if self.structured {
                "the data has the wrong shape"
            } else {
                "structured replies must be negotiated first"
            };
            return replies.error(option_reply::ERR_INVALID, why);
        };
        let Some(export) = exports.find(request.name) else {
            return unknown(request.name, replies);
        };
        let matches = |query: &&str| *query == ALLOCATION || (!selects && *query == "base:");
        let all = !selects && request.queries.is_empty();
        if export.allocation && (all || request.queries.iter().any(matches)) {
            let id = if selects { ALLOCATION_ID } else { 0 };
            let context = [&id.to_be_bytes()[..], ALLOCATION.as_bytes()];
            replies.with(option_reply::META_CONTEXT, &context);
            if selects {
                self.allocation_of = Some(request.name.to_owned());
            }
        }
        replies.ack();
    }
}

fn unknown(name: &str, replies: &mut OptionReplies<'_>) {
    let text = match name {
        "" => "name a disk of this node: there is no default export".to_owned(),
        name => format!("this node serves no disk {:?}", cut(name, 100)),
    };
    replies.error(option_reply::ERR_UNKNOWN, &text);
}

/// At most the first `bytes` of a text.
fn cut(text: &str, bytes: usize) -> &str {
    &text[..text.floor_char_boundary(bytes)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fuzz::{Few, client_flags, go, option_bytes};
    use crate::wire::OPTION_REPLY_MAGIC;

    /// The replies to options sent after each other, and how the last one ended.
    fn converse(options: &[Vec<u8>]) -> (Vec<(u32, u32, Vec<u8>)>, Progress) {
        let (mut handshake, mut out) = (Handshake::default(), Vec::new());
        let (_, mut progress) = handshake.take(&client_flags(3), &Few, &mut out).unwrap();
        for option in options {
            for end in 0..option.len() {
                let early = handshake.take(&option[..end], &Few, &mut out);
                assert_eq!(early, Ok((0, Progress::More)));
            }
            let (used, next) = handshake.take(option, &Few, &mut out).unwrap();
            assert_eq!(used, option.len());
            progress = next;
        }
        let (mut reader, mut replies) = (Reader(&out), Vec::new());
        while !reader.is_empty() {
            assert_eq!(reader.u64(), Some(OPTION_REPLY_MAGIC));
            let (id, kind) = (reader.u32().unwrap(), reader.u32().unwrap());
            let len = reader.u32().unwrap() as usize;
            replies.push((id, kind, reader.take(len).unwrap().to_vec()));
        }
        (replies, progress)
    }

    fn contexts(name: &str, queries: &[&str]) -> Vec<u8> {
        let mut data = (name.len() as u32).to_be_bytes().to_vec();
        data.extend_from_slice(name.as_bytes());
        data.extend_from_slice(&(queries.len() as u32).to_be_bytes());
        for query in queries {
            data.extend_from_slice(&(query.len() as u32).to_be_bytes());
            data.extend_from_slice(query.as_bytes());
        }
        data
    }

    #[test]
    fn go_informs_and_ends_the_handshake() {
        let (replies, progress) = converse(&[go(option::GO, "a", &[info::NAME])]);
        let kinds: Vec<_> = replies.iter().map(|(_, kind, _)| *kind).collect();
        assert_eq!(kinds, [option_reply::INFO; 3].into_iter().chain([1]).collect::<Vec<_>>());
        let mut export = Reader(&replies[0].2);
        assert_eq!((export.u16(), export.u64()), (Some(info::EXPORT), Some(1 << 20)));
        let flags = export.u16().unwrap();
        assert!(flags & transmission_flag::SEND_TRIM != 0);
        assert!(flags & (transmission_flag::READ_ONLY | transmission_flag::SEND_DF) == 0);
        assert_eq!(replies[1].2, b"\0\x01a");
        let mut sizes = Reader(&replies[2].2);
        assert_eq!((sizes.u16(), sizes.u32()), (Some(info::BLOCK_SIZE), Some(512)));
        assert_eq!((sizes.u32(), sizes.u32()), (Some(4096), Some(1 << 16)));
        let chosen = Chosen { name: "a".into(), structured: false, allocation: false };
        assert_eq!(progress, Progress::Serve(chosen));
    }

    #[test]
    fn an_unknown_export_is_refused_and_the_handshake_goes_on() {
        let list = option_bytes(option::LIST, &[]);
        let (replies, progress) =
            converse(&[go(option::GO, "x", &[]), go(option::INFO, "", &[]), list]);
        assert_eq!(replies[0].1, option_reply::ERR_UNKNOWN);
        assert_eq!(replies[0].2, br#"this node serves no disk "x""#);
        assert_eq!(replies[1].1, option_reply::ERR_UNKNOWN);
        let named: Vec<_> = replies[2..4].iter().map(|(_, _, data)| &data[4..]).collect();
        assert_eq!(named, [b"a", b"b"]);
        assert_eq!((replies[4].1, progress), (option_reply::ACK, Progress::More));
    }

    #[test]
    fn the_export_name_alone_ends_the_handshake_or_the_connection() {
        for (flags, len) in [(1, 134), (3, 10)] {
            let (mut handshake, mut out) = (Handshake::default(), Vec::new());
            handshake.take(&client_flags(flags), &Few, &mut out).unwrap();
            let missing = option_bytes(option::EXPORT_NAME, b"c");
            assert_eq!(handshake.take(&missing, &Few, &mut out), Err(Violation::NoExport));
            let there = option_bytes(option::EXPORT_NAME, b"b");
            let (_, progress) = handshake.take(&there, &Few, &mut out).unwrap();
            assert!(matches!(progress, Progress::Serve(chosen) if chosen.name == "b"));
            assert_eq!(out.len(), len);
            assert_eq!(out[9] & 2, 2, "b is read-only");
        }
    }

    #[test]
    fn allocation_is_selected_for_one_export_after_structured_replies() {
        let structured = option_bytes(option::STRUCTURED_REPLY, &[]);
        let set = |name, queries: &[&str]| {
            option_bytes(option::SET_META_CONTEXT, &contexts(name, queries))
        };
        let both = ["qemu:x", ALLOCATION];
        let (replies, _) = converse(&[set("a", &both)]);
        assert_eq!(replies[0].1, option_reply::ERR_INVALID);
        let chosen = |options: &[Vec<u8>]| match converse(options).1 {
            Progress::Serve(chosen) => (chosen.structured, chosen.allocation),
            other => panic!("{other:?}"),
        };
        let go = || go(option::GO, "a", &[]);
        assert_eq!(chosen(&[structured.clone(), set("a", &both), go()]), (true, true));
        // Another export, one without extents, only a wildcard, and a later selection of nothing.
        for other in [set("b", &both), set("a", &["base:"]), set("a", &[]), set("c", &both)] {
            let options = [structured.clone(), set("a", &both), other, go()];
            assert_eq!(chosen(&options), (true, false));
        }
        for (queries, count) in [(&[][..], 2), (&["base:"], 2), (&["x:y"], 1)] {
            let list = option_bytes(option::LIST_META_CONTEXT, &contexts("a", queries));
            let (replies, _) = converse(&[structured.clone(), list]);
            assert_eq!(replies.len() - 1, count, "{queries:?}");
            assert_eq!(replies.last().unwrap().1, option_reply::ACK);
        }
    }

    #[test]
    fn data_of_the_wrong_shape_is_refused_and_unknown_options_too() {
        let invalid = [
            option_bytes(option::LIST, b"x"),
            option_bytes(option::STRUCTURED_REPLY, b"x"),
            option_bytes(option::GO, b"\0\0\0\x01a\0\x01"),
            option_bytes(option::GO, b"\0\0\0\x01a\0\0x"),
            option_bytes(option::INFO, b"\xff\xff\xff\xffa\0\0"),
        ];
        for option in invalid {
            let (replies, progress) = converse(&[option]);
            assert_eq!((replies[0].1, progress), (option_reply::ERR_INVALID, Progress::More));
        }
        let (replies, progress) = converse(&[option_bytes(5, &[]), option_bytes(2, b"bye")]);
        let kinds: Vec<_> = replies.iter().map(|(id, kind, _)| (*id, *kind)).collect();
        assert_eq!(kinds, [(5, option_reply::ERR_UNSUP), (2, option_reply::ACK)]);
        assert_eq!(progress, Progress::Ended);
    }

    #[test]
    fn violations_end_the_connection() {
        let take = |bytes: &[u8]| {
            let (mut handshake, mut out) = (Handshake::default(), Vec::new());
            handshake.take(&client_flags(1), &Few, &mut out)?;
            handshake.take(bytes, &Few, &mut out)
        };
        let mut handshake = Handshake::default();
        let flags = handshake.take(&client_flags(5), &Few, &mut Vec::new());
        assert_eq!(flags, Err(Violation::ClientFlags(5)));
        assert!(matches!(take(b"GET / HTTP/1.1\r\n"), Err(Violation::OptionMagic(_))));
        let mut long = option_bytes(option::GO, &[]);
        long[12..].copy_from_slice(&(1 << 20 | 1_u32).to_be_bytes());
        assert_eq!(take(&long), Err(Violation::OptionLength(1 << 20 | 1)));
    }
}
