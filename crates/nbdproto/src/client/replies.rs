//! Replies to a client's requests.
//!
//! [`ClientReplies`] knows which requests are open. It takes what the server sends in pieces of any
//! length, and keeps nothing of it but what requests have asked for: the data of a read, in a
//! buffer that was made when the read was sent, and a bounded number of extents.

use std::collections::BTreeMap;

use super::fault::Fault;
use super::handshake::Export;
use crate::wire::{
    CHUNK_MAGIC, Extent, Reader, SIMPLE_REPLY_MAGIC, STRING_BYTES_MAX, chunk, extent_flag,
};

/// Most extents of a reply that are kept; others are skipped.
const EXTENTS_MAX: usize = 2048;
/// Most extents that a server may send. The protocol has no limit; `qemu-nbd` has one of 131,072.
const EXTENTS_SENT_MAX: usize = 1 << 20;
/// Length of a chunk of a structured reply without its payload, in bytes.
const CHUNK_BYTES: usize = 20;
/// Longest payload of a chunk without data that is kept, in bytes.
const PAYLOAD_BYTES: usize = 4 + 8 * EXTENTS_MAX;
/// Most bytes that [`ClientReplies::take`] may leave until more have come.
pub const REPLY_BYTES_MAX: usize = CHUNK_BYTES + PAYLOAD_BYTES;
/// The error of a request whose server has given none that can be understood.
const EIO: u32 = 5;

const _: () = assert!(PAYLOAD_BYTES > STRING_BYTES_MAX + 14, "an error with a text fits");

/// What the reply to a request has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    /// No data.
    Nothing,
    /// The data of the range.
    Data,
    /// The extents of the range.
    Extents,
}

/// A request that is answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answered {
    /// Its cookie.
    pub cookie: u64,
    /// The protocol's number of its error, which is that of Linux; 0 is success.
    pub errno: u32,
    /// The data of a read that has succeeded.
    pub data: Vec<u8>,
    /// Extents from the beginning of the range on, which together are not longer than it.
    pub extents: Vec<Extent>,
}

/// A request that is not answered yet.
#[derive(Debug)]
struct Open {
    offset: u64,
    expect: Expect,
    /// A number of 32 bits.
    len: u64,
    data: Vec<u8>,
    extents: Vec<Extent>,
    /// Bytes of the range that have come.
    got: u64,
    /// The first error.
    errno: u32,
}

/// Where the stream of replies is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    Header,
    /// In data that belongs to a request, at this place of its range.
    Data {
        cookie: u64,
        at: usize,
        left: usize,
        done: bool,
    },
    /// In a payload that nobody needs.
    Skipped {
        cookie: u64,
        left: usize,
        done: bool,
    },
}

/// The replies of one connection; see the module text.
#[derive(Debug)]
pub struct ClientReplies {
    structured: bool,
    allocation: Option<u32>,
    open: BTreeMap<u64, Open>,
    at: At,
}

impl ClientReplies {
    /// The replies of a connection to an export.
    pub fn new(export: &Export) -> ClientReplies {
        let (structured, allocation) = (export.structured, export.allocation);
        ClientReplies { structured, allocation, open: BTreeMap::new(), at: At::Header }
    }

    /// A request is about to be sent. Its cookie is that of no other open one.
    pub fn expect(&mut self, cookie: u64, expect: Expect, offset: u64, len: u32) {
        let data = match expect {
            Expect::Data => vec![0; len as usize],
            Expect::Nothing | Expect::Extents => Vec::new(),
        };
        let len = len.into();
        let open = Open { offset, expect, len, data, extents: Vec::new(), got: 0, errno: 0 };
        self.open.insert(cookie, open);
    }

    /// Takes a part of the replies from the front of `input`. Returns the number of bytes taken, 0
    /// if there are too few, and a request that was answered with them.
    ///
    /// # Errors
    /// When the server has violated the protocol; nothing that follows has a meaning then.
    pub fn take(&mut self, input: &[u8]) -> Result<(usize, Option<Answered>), Fault> {
        match self.at {
            At::Header => self.header(input),
            At::Data { cookie, at, left, done } => {
                let n = left.min(input.len());
                let open = self.request(cookie)?;
                let place = open.data.get_mut(at..at + n).ok_or(Fault::Reply("too much data"))?;
                place.copy_from_slice(&input[..n]);
                open.got += n as u64;
                if n < left {
                    self.at = At::Data { cookie, at: at + n, left: left - n, done };
                    return Ok((n, None));
                }
                Ok((n, self.part_ends(cookie, done)?))
            }
            At::Skipped { cookie, left, done } => {
                let n = left.min(input.len());
                if n < left {
                    self.at = At::Skipped { cookie, left: left - n, done };
                    return Ok((n, None));
                }
                Ok((n, self.part_ends(cookie, done)?))
            }
        }
    }

    fn request(&mut self, cookie: u64) -> Result<&mut Open, Fault> {
        self.open.get_mut(&cookie).ok_or(Fault::Cookie(cookie))
    }

    fn header(&mut self, input: &[u8]) -> Result<(usize, Option<Answered>), Fault> {
        let mut reader = Reader(input);
        let Some(magic) = reader.u32() else { return Ok((0, None)) };
        match magic {
            SIMPLE_REPLY_MAGIC => self.simple(input, reader),
            CHUNK_MAGIC if self.structured => self.chunk(input, reader),
            _ => Err(Fault::ReplyMagic(magic)),
        }
    }

    fn simple(
        &mut self,
        input: &[u8],
        mut reader: Reader<'_>,
    ) -> Result<(usize, Option<Answered>), Fault> {
        let (Some(errno), Some(cookie)) = (reader.u32(), reader.u64()) else {
            return Ok((0, None));
        };
        let (used, structured) = (input.len() - reader.0.len(), self.structured);
        let open = self.request(cookie)?;
        open.errno = errno;
        match open.expect {
            Expect::Data if errno == 0 && !structured => {
                let left = open.data.len();
                if left == 0 {
                    return Ok((used, self.part_ends(cookie, true)?));
                }
                self.at = At::Data { cookie, at: 0, left, done: true };
                Ok((used, None))
            }
            Expect::Data | Expect::Extents if errno == 0 => {
                Err(Fault::Reply("one without the data that was asked for"))
            }
            _ => Ok((used, self.part_ends(cookie, true)?)),
        }
    }

    fn chunk(
        &mut self,
        input: &[u8],
        mut reader: Reader<'_>,
    ) -> Result<(usize, Option<Answered>), Fault> {
        let (Some(flags), Some(kind), Some(cookie), Some(len)) =
            (reader.u16(), reader.u16(), reader.u64(), reader.u32())
        else {
            return Ok((0, None));
        };
        let (done, len) = (flags & chunk::DONE != 0, len as usize);
        let allocation = self.allocation;
        let open = self.request(cookie)?;
        if kind == chunk::OFFSET_DATA {
            let Some(offset) = reader.u64() else { return Ok((0, None)) };
            let left = len.checked_sub(8).filter(|len| *len > 0);
            let left = left.ok_or(Fault::Reply("data of no length"))?;
            let at = open.place(offset, left as u64)?;
            self.at = At::Data { cookie, at, left, done };
            return Ok((input.len() - reader.0.len(), None));
        }
        if kind & chunk::ERRORS != 0 && kind != chunk::ERROR {
            // Of the other errors only that they are some is known.
            if len > PAYLOAD_BYTES {
                return Err(Fault::Reply("a long error"));
            }
            open.fail(EIO);
            if len == 0 {
                return Ok((CHUNK_BYTES, self.part_ends(cookie, done)?));
            }
            self.at = At::Skipped { cookie, left: len, done };
            return Ok((CHUNK_BYTES, None));
        }
        let longest = match kind {
            chunk::BLOCK_STATUS => 4 + 8 * EXTENTS_SENT_MAX,
            _ => PAYLOAD_BYTES,
        };
        if len > longest {
            return Err(Fault::Reply("a chunk that is too long"));
        }
        let kept = len.min(PAYLOAD_BYTES);
        let Some(payload) = reader.take(kept) else { return Ok((0, None)) };
        let mut payload = Reader(payload);
        match kind {
            chunk::NONE if done && len == 0 => {}
            chunk::OFFSET_HOLE => {
                let (offset, zeroes) = (payload.u64(), payload.u32());
                let (offset, zeroes) =
                    offset.zip(zeroes).filter(|_| payload.is_empty()).ok_or(WRONG)?;
                let at = open.place(offset, zeroes.into())?;
                let range = open.data.get_mut(at..at + zeroes as usize);
                range.ok_or(Fault::Reply("too much data"))?.fill(0);
                open.got += u64::from(zeroes);
            }
            chunk::BLOCK_STATUS if (len - kept).is_multiple_of(8) => {
                open.find(payload, allocation)?;
            }
            chunk::BLOCK_STATUS => return Err(WRONG),
            chunk::ERROR => {
                let (errno, text) = payload.u32().zip(payload.u16()).ok_or(WRONG)?;
                if usize::from(text) != payload.0.len() || errno == 0 {
                    return Err(WRONG);
                }
                open.fail(errno);
            }
            _ => return Err(Fault::Reply("a chunk of an unknown kind")),
        }
        if kept < len {
            self.at = At::Skipped { cookie, left: len - kept, done };
            return Ok((CHUNK_BYTES + kept, None));
        }
        Ok((CHUNK_BYTES + len, self.part_ends(cookie, done)?))
    }

    /// A part of a reply has come, with the last one the reply.
    fn part_ends(&mut self, cookie: u64, done: bool) -> Result<Option<Answered>, Fault> {
        self.at = At::Header;
        if !done {
            return Ok(None);
        }
        let open = self.open.remove(&cookie).ok_or(Fault::Cookie(cookie))?;
        let Open { expect, len, data, extents, got, errno, .. } = open;
        if errno != 0 {
            let (data, extents) = (Vec::new(), Vec::new());
            return Ok(Some(Answered { cookie, errno, data, extents }));
        }
        match expect {
            Expect::Data if got != len => Err(Fault::Reply("less data than was asked for")),
            Expect::Extents if extents.is_empty() => Err(Fault::Reply("no extents")),
            _ => Ok(Some(Answered { cookie, errno, data, extents })),
        }
    }
}

/// A chunk whose payload has another shape.
const WRONG: Fault = Fault::Reply("a chunk of the wrong shape");

impl Open {
    /// The place of a part of the range, of which there cannot be more than the range has.
    fn place(&self, offset: u64, len: u64) -> Result<usize, Fault> {
        let at = offset.checked_sub(self.offset);
        let fits = |at: &u64| at.checked_add(len).is_some_and(|end| end <= self.len);
        let at = at.filter(fits).filter(|_| self.expect == Expect::Data);
        let at = at.ok_or(Fault::Reply("data that was not asked for"))?;
        if self.got + len > self.len {
            return Err(Fault::Reply("too much data"));
        }
        usize::try_from(at).map_err(|_| WRONG)
    }

    fn fail(&mut self, errno: u32) {
        if self.errno == 0 {
            self.errno = errno;
        }
    }

    /// The extents of a context.
    fn find(&mut self, mut payload: Reader<'_>, allocation: Option<u32>) -> Result<(), Fault> {
        let id = payload.u32();
        let asked = self.expect == Expect::Extents && self.extents.is_empty();
        if !asked || id.is_none() || id != allocation {
            return Err(Fault::Reply("extents that were not asked for"));
        }
        let mut left = self.len as u32;
        while !payload.is_empty() {
            let (len, flags) = payload.u32().zip(payload.u32()).ok_or(WRONG)?;
            if len == 0 {
                return Err(Fault::Reply("an extent of no length"));
            }
            let both = extent_flag::HOLE | extent_flag::ZERO;
            // The last one may go beyond the range.
            let len = left.min(len);
            if len > 0 {
                self.extents.push(Extent { len, hole: flags & both == both });
            }
            left -= len;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::reply::{Errno, Replies};

    fn replies(structured: bool) -> ClientReplies {
        let allocation = structured.then_some(1);
        let mut replies =
            ClientReplies { structured, allocation, open: BTreeMap::new(), at: At::Header };
        replies.expect(1, Expect::Data, 4096, 1024);
        replies.expect(2, Expect::Nothing, 0, 0);
        if structured {
            replies.expect(3, Expect::Extents, 8192, 8192);
        }
        replies
    }

    /// What a stream leads to, whole and in single bytes.
    fn outcome(structured: bool, stream: &[u8]) -> Result<Vec<Answered>, Fault> {
        let run = |step: usize| {
            let (mut replies, mut all, mut pending) = (replies(structured), vec![], vec![]);
            for piece in stream.chunks(step) {
                pending.extend_from_slice(piece);
                loop {
                    let (used, answered) = replies.take(&pending)?;
                    pending.drain(..used);
                    let more = used > 0 || answered.is_some();
                    all.extend(answered);
                    if !more || pending.is_empty() {
                        break;
                    }
                }
            }
            Ok(all)
        };
        let whole = run(stream.len().max(1));
        assert_eq!(whole, run(1));
        whole
    }

    fn chunk(done: bool, kind: u16, cookie: u64, payload: &[u8]) -> Vec<u8> {
        let mut bytes = CHUNK_MAGIC.to_be_bytes().to_vec();
        bytes.extend_from_slice(&u16::from(done).to_be_bytes());
        bytes.extend_from_slice(&kind.to_be_bytes());
        bytes.extend_from_slice(&cookie.to_be_bytes());
        bytes.extend_from_slice(&(payload.len() as u32).to_be_bytes());
        bytes.extend_from_slice(payload);
        bytes
    }

    fn data(done: bool, offset: u64, len: usize, byte: u8) -> Vec<u8> {
        let payload = [&offset.to_be_bytes()[..], &vec![byte; len]].concat();
        chunk(done, chunk::OFFSET_DATA, 1, &payload)
    }

    #[test]
    fn replies_of_our_server_are_understood() {
        for structured in [false, true] {
            let server = Replies { structured };
            let mut bytes = Vec::new();
            server.done(&mut bytes, 2);
            server.read(&mut bytes, 1, 4096, 1024);
            bytes.extend_from_slice(&[7; 1024]);
            if structured {
                let extents = [Extent { len: 4096, hole: true }, Extent { len: 9000, hole: false }];
                server.block_status(&mut bytes, 3, &extents);
            }
            let all = outcome(structured, &bytes).unwrap();
            let cookies: Vec<_> = all.iter().map(|one| (one.cookie, one.errno)).collect();
            assert_eq!(cookies, [(2, 0), (1, 0), (3, 0)][..all.len()]);
            assert_eq!((all.len(), &all[1].data), (2 + usize::from(structured), &vec![7; 1024]));
            if structured {
                let found = [Extent { len: 4096, hole: true }, Extent { len: 4096, hole: false }];
                assert_eq!(all[2].extents, found);
            }
            let mut bytes = Vec::new();
            server.error(&mut bytes, 1, Errno::NoSpace);
            let failed = outcome(structured, &bytes).unwrap();
            assert_eq!((failed[0].errno, failed[0].data.len()), (28, 0));
        }
    }

    #[test]
    fn chunks_of_a_read_come_in_any_order() {
        let hole = [&4608_u64.to_be_bytes()[..], &256_u32.to_be_bytes()].concat();
        let parts = [
            data(false, 4864, 256, 3),
            chunk(false, chunk::OFFSET_HOLE, 1, &hole),
            data(true, 4096, 512, 1),
        ];
        let all = outcome(true, &parts.concat()).unwrap();
        let expected = [vec![1; 512], vec![0; 256], vec![3; 256]].concat();
        assert_eq!(all[0].data, expected);
        // An error in the middle ends it with the last chunk.
        let error = chunk(false, chunk::ERROR, 1, &[0, 0, 0, 5, 0, 1, b'x']);
        let other = chunk(false, chunk::ERRORS | 99, 1, &[9; 30]);
        let last = chunk(true, chunk::ERRORS | 99, 1, &[]);
        let all = outcome(true, &[data(false, 4096, 8, 1), error, other, last].concat()).unwrap();
        assert_eq!((all.len(), all[0].errno), (1, 5));
        let none = chunk(true, chunk::NONE, 2, &[]);
        assert_eq!(outcome(true, &none).unwrap()[0].cookie, 2);
    }

    /// Other servers send as many as fit the range, up to a number of their own.
    #[test]
    fn of_many_extents_the_first_are_kept() {
        let block_status = |count: u32| {
            let extents = (0..count).flat_map(|nth| [1, nth % 2 * 3]);
            let words = std::iter::once(1).chain(extents);
            let payload: Vec<u8> = words.flat_map(u32::to_be_bytes).collect();
            chunk(true, chunk::BLOCK_STATUS, 3, &payload)
        };
        let done = chunk(true, chunk::NONE, 2, &[]);
        for count in [EXTENTS_MAX as u32, EXTENTS_MAX as u32 + 1, 8192, 131_072] {
            let all = outcome(true, &[block_status(count), done.clone()].concat()).unwrap();
            assert_eq!((all[0].cookie, all[0].errno, all[1].cookie), (3, 0, 2));
            let extents = &all[0].extents;
            assert_eq!(extents.len(), EXTENTS_MAX);
            assert_eq!(extents[1], Extent { len: 1, hole: true });
            assert_eq!(extents[2], Extent { len: 1, hole: false });
        }
        let mut cut = block_status(8192);
        cut[19] += 1;
        assert!(outcome(true, &cut).is_err(), "the last is not whole");
    }

    #[test]
    fn what_does_not_fit_the_request_is_a_fault() {
        let simple = |cookie: u64, errno: u32| {
            let bytes = [&SIMPLE_REPLY_MAGIC.to_be_bytes()[..], &errno.to_be_bytes()];
            [&bytes.concat()[..], &cookie.to_be_bytes()].concat()
        };
        let block_status = |id: u32, extents: &[u32]| {
            let words = [&[id][..], extents].concat();
            let payload: Vec<u8> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
            chunk(true, chunk::BLOCK_STATUS, 3, &payload)
        };
        for wrong in [
            b"GET / HTTP/1.1\r\n\r\n".to_vec(),
            simple(9, 0),
            [simple(2, 0), simple(2, 0)].concat(),
            simple(1, 0),
            simple(3, 0),
            data(true, 4095, 1, 0),
            data(true, 0, 512, 0),
            data(true, 4096, 1025, 0),
            data(true, u64::MAX, 8, 0),
            data(true, 4096, 0, 0),
            data(true, 4096, 1023, 0),
            [data(false, 4096, 1024, 0), data(true, 4096, 1, 0)].concat(),
            chunk(true, chunk::NONE, 1, &[]),
            chunk(false, chunk::NONE, 2, &[]),
            chunk(true, chunk::NONE, 2, &[1]),
            chunk(true, chunk::OFFSET_HOLE, 1, &[0; 11]),
            chunk(true, chunk::OFFSET_HOLE, 2, &[0; 12]),
            chunk(true, chunk::ERROR, 1, &[0, 0, 0, 0, 0, 0]),
            chunk(true, chunk::ERROR, 1, &[0, 0, 0, 5, 0, 9]),
            chunk(true, 77, 2, &[]),
            block_status(2, &[512, 0]),
            block_status(1, &[0, 0]),
            block_status(1, &[]),
            block_status(1, &[512]),
            chunk(true, chunk::BLOCK_STATUS, 1, &[0, 0, 0, 1, 0, 0, 2, 0, 0, 0, 0, 0]),
        ] {
            assert!(outcome(true, &wrong).is_err(), "{wrong:?}");
        }
        assert!(matches!(outcome(false, &data(true, 4096, 8, 0)), Err(Fault::ReplyMagic(_))));
        // A length that nobody could keep is refused before it has come.
        for kind in [chunk::OFFSET_DATA, chunk::ERROR, chunk::ERRORS | 9, chunk::BLOCK_STATUS] {
            let mut long = chunk(true, kind, 1, &4096_u64.to_be_bytes());
            long[16..20].copy_from_slice(&u32::MAX.to_be_bytes());
            assert!(matches!(outcome(true, &long), Err(Fault::Reply(_))), "{kind}");
        }
    }
}
