//! The fixed newstyle handshake, on the client's side.
//!
//! 1. The server greets. The client sends its flags, and asks for structured replies.
//! 2. If it gets them, it selects `base:allocation`. A server may refuse both.
//! 3. It asks for the export and its block sizes (`NBD_OPT_GO`). The handshake ends with an
//!    [`Export`], and requests may follow.

use super::fault::Fault;
use super::request::{encode_named, encode_option};
use crate::server::options::OPTION_BYTES_MAX;
use crate::server::request::PAYLOAD_BYTES_MAX;
use crate::wire::{
    ALLOCATION, GREETING_MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC, Reader, handshake_flag, info,
    option, option_reply, transmission_flag,
};

/// Length of the reply to an option without its data, in bytes.
const HEADER_BYTES: usize = 20;
/// Most replies to one option.
const REPLIES_MAX: u32 = 64;
/// Most bytes of a server's text that are kept.
const TEXT_BYTES_MAX: usize = 200;
/// Largest minimum block, in bytes.
const BLOCK_BYTES_MAX: u32 = 64 << 10;

/// An export, and what was agreed on. Sizes are in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Export {
    /// The size of the export, at most `i64::MAX`.
    pub size_bytes: u64,
    /// Transmission flags: [`transmission_flag`].
    flags: u16,
    /// Offsets and lengths are multiples of this: a power of two, at most 65,536.
    pub block_bytes: u32,
    /// The best unit of requests: a power of two, at least `block_bytes`.
    pub preferred_bytes: u32,
    /// The longest read or write: a multiple of `block_bytes`, at least one, at most
    /// [`PAYLOAD_BYTES_MAX`].
    pub payload_bytes_max: u32,
    /// Replies may be structured.
    pub structured: bool,
    /// The number of `base:allocation`, if it was selected.
    pub allocation: Option<u32>,
}

impl Export {
    /// It takes no writes.
    pub fn is_read_only(&self) -> bool {
        self.has(transmission_flag::READ_ONLY)
    }

    /// It takes flushes.
    pub fn flushes(&self) -> bool {
        self.has(transmission_flag::SEND_FLUSH)
    }

    /// It takes the flag that makes a write durable.
    pub fn takes_fua(&self) -> bool {
        self.has(transmission_flag::SEND_FUA)
    }

    /// It takes trims.
    pub fn trims(&self) -> bool {
        self.has(transmission_flag::SEND_TRIM)
    }

    /// It takes writes of zeroes.
    pub fn writes_zeroes(&self) -> bool {
        self.has(transmission_flag::SEND_WRITE_ZEROES)
    }

    /// Whether a user of the other export, whose requests have at most `payload_bytes` of data, can
    /// go on with this one. It may be larger and take more.
    pub fn replaces(&self, other: &Export, payload_bytes: u32) -> bool {
        let used = other.flags
            & (transmission_flag::SEND_FLUSH
                | transmission_flag::SEND_FUA
                | transmission_flag::SEND_TRIM
                | transmission_flag::SEND_WRITE_ZEROES);
        self.size_bytes >= other.size_bytes
            && (other.is_read_only() || !self.is_read_only())
            && self.flags & used == used
            && self.block_bytes <= other.block_bytes
            && self.payload_bytes_max >= payload_bytes
    }

    fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }
}

/// The step that the server's next message answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Greeting,
    Structured,
    Context,
    Go,
}

/// A handshake with a server; see the module text.
#[derive(Debug)]
pub struct ClientHandshake {
    name: String,
    step: Step,
    /// Replies to the option of this step.
    replies: u32,
    structured: bool,
    allocation: Option<u32>,
    /// Size and flags.
    export: Option<(u64, u16)>,
    /// Minimum, preferred and maximum block.
    sizes: Option<[u32; 3]>,
}

impl ClientHandshake {
    /// Begins a handshake for the export of this name, of at most 4,096 bytes.
    pub fn new(name: &str) -> ClientHandshake {
        ClientHandshake {
            name: name.to_owned(),
            step: Step::Greeting,
            replies: 0,
            structured: false,
            allocation: None,
            export: None,
            sizes: None,
        }
    }

    /// Takes a message of the server from the front of `input`, and appends what is to be sent to
    /// `out`. Returns the number of bytes taken, 0 if there are too few, and the export when the
    /// handshake has ended.
    ///
    /// # Errors
    /// When the server cannot be used.
    pub fn take(
        &mut self,
        input: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<(usize, Option<Export>), Fault> {
        if self.step == Step::Greeting {
            return Ok((self.greeting(input, out)?, None));
        }
        let mut reader = Reader(input);
        let (Some(magic), Some(id), Some(kind), Some(len)) =
            (reader.u64(), reader.u32(), reader.u32(), reader.u32())
        else {
            return Ok((0, None));
        };
        if magic != OPTION_REPLY_MAGIC || id != self.option() {
            return Err(Fault::OptionReply);
        }
        self.replies += 1;
        if len as usize > OPTION_BYTES_MAX || self.replies > REPLIES_MAX {
            return Err(Fault::OptionLength(len));
        }
        let Some(data) = reader.take(len as usize) else {
            self.replies -= 1;
            return Ok((0, None));
        };
        let export = self.reply(kind, data, out)?;
        Ok((HEADER_BYTES + data.len(), export))
    }

    /// The option whose replies are awaited.
    fn option(&self) -> u32 {
        match self.step {
            Step::Greeting | Step::Structured => option::STRUCTURED_REPLY,
            Step::Context => option::SET_META_CONTEXT,
            Step::Go => option::GO,
        }
    }

    fn greeting(&mut self, input: &[u8], out: &mut Vec<u8>) -> Result<usize, Fault> {
        let mut reader = Reader(input);
        let (Some(first), Some(second)) = (reader.u64(), reader.u64()) else { return Ok(0) };
        if first != GREETING_MAGIC {
            return Err(Fault::Greeting);
        }
        if second != OPTION_MAGIC {
            return Err(Fault::OldStyle);
        }
        let Some(flags) = reader.u16() else { return Ok(0) };
        if flags & handshake_flag::FIXED_NEWSTYLE == 0 {
            return Err(Fault::OldStyle);
        }
        let ours = flags & (handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES);
        out.extend_from_slice(&u32::from(ours).to_be_bytes());
        self.ask(Step::Structured, out);
        Ok(input.len() - reader.0.len())
    }

    /// Sends the option of a step.
    fn ask(&mut self, step: Step, out: &mut Vec<u8>) {
        (self.step, self.replies) = (step, 0);
        let one = 1_u32.to_be_bytes();
        match step {
            Step::Greeting => {}
            Step::Structured => encode_option(out, self.option(), &[]),
            Step::Context => {
                let len = (ALLOCATION.len() as u32).to_be_bytes();
                let query = [&one[..], &len, ALLOCATION.as_bytes()];
                encode_named(out, self.option(), &self.name, &query);
            }
            Step::Go => {
                let wanted = [1_u16.to_be_bytes(), info::BLOCK_SIZE.to_be_bytes()];
                encode_named(out, self.option(), &self.name, &[&wanted[0], &wanted[1]]);
            }
        }
    }

    fn reply(
        &mut self,
        kind: u32,
        data: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<Option<Export>, Fault> {
        let refused = kind & option_reply::ERR != 0;
        let mut reader = Reader(data);
        match (self.step, kind) {
            (Step::Structured, option_reply::ACK) => {
                self.structured = true;
                self.ask(Step::Context, out);
            }
            (Step::Structured, _) if refused => self.ask(Step::Go, out),
            (Step::Context, option_reply::META_CONTEXT) => {
                let id = reader.u32().ok_or(Fault::OptionReply)?;
                if reader.0 != ALLOCATION.as_bytes() || self.allocation.is_some() {
                    return Err(Fault::OptionReply);
                }
                self.allocation = Some(id);
            }
            (Step::Context, option_reply::ACK) => self.ask(Step::Go, out),
            (Step::Context, _) if refused => {
                self.allocation = None;
                self.ask(Step::Go, out);
            }
            (Step::Go, option_reply::INFO) => self.inform(reader)?,
            (Step::Go, option_reply::ACK) => return self.export().map(Some),
            (Step::Go, _) if refused => {
                let text = String::from_utf8_lossy(&data[..data.len().min(TEXT_BYTES_MAX)]);
                let text = text.chars().filter(|c| !c.is_control()).collect();
                return Err(Fault::Refused(kind, text));
            }
            _ => return Err(Fault::OptionReply),
        }
        Ok(None)
    }

    fn inform(&mut self, mut reader: Reader<'_>) -> Result<(), Fault> {
        match reader.u16().ok_or(Fault::OptionReply)? {
            info::EXPORT => {
                let (size, flags) = (reader.u64(), reader.u16());
                self.export = Some(size.zip(flags).ok_or(Fault::OptionReply)?);
            }
            info::BLOCK_SIZE => {
                let mut next = || reader.u32().ok_or(Fault::OptionReply);
                self.sizes = Some([next()?, next()?, next()?]);
            }
            // A server may tell more than it was asked.
            _ => return Ok(()),
        }
        if reader.is_empty() { Ok(()) } else { Err(Fault::OptionReply) }
    }

    /// What the server has told, if it is possible.
    fn export(&self) -> Result<Export, Fault> {
        let (size_bytes, flags) = self.export.ok_or(Fault::Export("no size"))?;
        if i64::try_from(size_bytes).is_err() {
            return Err(Fault::Export("its size has more than 63 bits"));
        }
        if flags & transmission_flag::HAS_FLAGS == 0 {
            return Err(Fault::Export("its flags are invalid"));
        }
        // What the protocol says of a server that does not tell.
        let [block_bytes, preferred, most] = self.sizes.unwrap_or([1, 4096, PAYLOAD_BYTES_MAX]);
        if !block_bytes.is_power_of_two() || block_bytes > BLOCK_BYTES_MAX {
            return Err(Fault::Export("its smallest block is no power of two up to 65536"));
        }
        if !preferred.is_power_of_two() || preferred < block_bytes {
            return Err(Fault::Export("its preferred block is no power of two"));
        }
        let payload_bytes_max = most.min(PAYLOAD_BYTES_MAX) / block_bytes * block_bytes;
        if payload_bytes_max == 0 {
            return Err(Fault::Export("its largest block is smaller than its smallest"));
        }
        Ok(Export {
            size_bytes,
            flags,
            block_bytes,
            preferred_bytes: preferred,
            payload_bytes_max,
            structured: self.structured,
            allocation: self.allocation.filter(|_| self.structured),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fuzz::Few;
    use crate::server::handshake::{Handshake, Progress};
    use crate::server::options::OptionReplies;

    /// Lets the client shake hands with a server.
    fn shake(name: &str, mut server: impl FnMut(&[u8], &mut Vec<u8>)) -> Result<Export, Fault> {
        let (mut client, mut input) = (ClientHandshake::new(name), Handshake::greeting().to_vec());
        loop {
            let mut out = Vec::new();
            let (used, export) = client.take(&input, &mut out)?;
            if let Some(export) = export {
                return Ok(export);
            }
            input.drain(..used);
            let before = input.len();
            server(&out, &mut input);
            assert!(used > 0 || input.len() > before, "the two wait for each other");
        }
    }

    /// With this crate's server.
    fn shake_with_ours(name: &str) -> Result<Export, Fault> {
        let (mut server, mut pending) = (Handshake::default(), Vec::new());
        shake(name, move |sent, input| {
            pending.extend_from_slice(sent);
            loop {
                let (used, progress) = server.take(&pending, &Few, input).unwrap();
                pending.drain(..used);
                if used == 0 || matches!(progress, Progress::Serve(_)) {
                    return;
                }
            }
        })
    }

    #[test]
    fn our_server_and_our_client_agree() {
        let a = shake_with_ours("a").unwrap();
        assert_eq!((a.size_bytes, a.is_read_only(), a.trims()), (1 << 20, false, true));
        assert!(a.flushes() && a.takes_fua() && a.writes_zeroes() && a.structured);
        assert_eq!((a.block_bytes, a.preferred_bytes, a.payload_bytes_max), (512, 4096, 1 << 16));
        assert_eq!(a.allocation, Some(crate::wire::ALLOCATION_ID));
        let b = shake_with_ours("b").unwrap();
        assert_eq!((b.size_bytes, b.is_read_only(), b.trims()), (4096, true, false));
        assert_eq!((b.structured, b.allocation), (true, None));
        assert!(a.replaces(&a, 1 << 16) && a.replaces(&b, 1 << 16) && !b.replaces(&a, 1 << 16));
        let unknown = shake_with_ours("c").unwrap_err();
        assert!(unknown.to_string().contains("serves no disk \"c\""), "{unknown}");
    }

    /// A server that answers each option with these replies.
    fn answering(replies: impl Fn(u32) -> Vec<(u32, Vec<u8>)>) -> impl FnMut(&[u8], &mut Vec<u8>) {
        move |sent, input| {
            let sent = if sent.starts_with(&[0, 0, 0]) { &sent[4..] } else { sent };
            let mut reader = Reader(sent);
            while reader.u64().is_some() {
                let (id, len) = (reader.u32().unwrap(), reader.u32().unwrap());
                reader.take(len as usize).unwrap();
                for (kind, data) in replies(id) {
                    OptionReplies { id, out: input }.with(kind, &[&data]);
                }
            }
        }
    }

    fn export_info(size: u64, flags: u16) -> (u32, Vec<u8>) {
        let data = [&[0, 0][..], &size.to_be_bytes(), &flags.to_be_bytes()].concat();
        (option_reply::INFO, data)
    }

    #[test]
    fn a_plain_server_is_enough_and_an_impossible_export_is_not() {
        let with = |infos: Vec<(u32, Vec<u8>)>| {
            shake(
                "x",
                answering(move |id| match id {
                    option::GO => {
                        infos.iter().cloned().chain([(option_reply::ACK, Vec::new())]).collect()
                    }
                    _ => vec![(option_reply::ERR_UNSUP, b"no".to_vec())],
                }),
            )
        };
        let plain = with(vec![export_info(5000, 1)]).unwrap();
        assert_eq!((plain.size_bytes, plain.structured, plain.allocation), (5000, false, None));
        assert!(!plain.flushes() && !plain.takes_fua() && !plain.writes_zeroes());
        assert_eq!((plain.block_bytes, plain.payload_bytes_max), (1, PAYLOAD_BYTES_MAX));
        let sizes = |sizes: [u32; 3]| {
            let data: Vec<u8> = sizes.iter().flat_map(|size| size.to_be_bytes()).collect();
            (option_reply::INFO, [&[0, 3][..], &data].concat())
        };
        let big = with(vec![export_info(1 << 20, 1), sizes([4096, 4096, u32::MAX])]).unwrap();
        assert_eq!((big.block_bytes, big.payload_bytes_max), (4096, PAYLOAD_BYTES_MAX));
        for wrong in [
            vec![],
            vec![export_info(1 << 63, 1)],
            vec![export_info(4096, 0)],
            vec![export_info(4096, 1), sizes([3, 4096, 1 << 20])],
            vec![export_info(4096, 1), sizes([1 << 17, 1 << 17, 1 << 20])],
            vec![export_info(4096, 1), sizes([4096, 512, 1 << 20])],
            vec![export_info(4096, 1), sizes([512, 4096, 0])],
        ] {
            assert!(matches!(with(wrong.clone()), Err(Fault::Export(_))), "{wrong:?}");
        }
        let short = (option_reply::INFO, vec![0, 0, 1]);
        assert_eq!(with(vec![short]), Err(Fault::OptionReply));
        let many = vec![export_info(4096, 1); 80];
        assert_eq!(with(many), Err(Fault::OptionLength(12)));
    }

    #[test]
    fn an_export_that_does_what_the_other_did_replaces_it() {
        let export = |size_bytes, flags, block_bytes, payload_bytes_max| Export {
            size_bytes,
            flags,
            block_bytes,
            preferred_bytes: 4096,
            payload_bytes_max,
            structured: false,
            allocation: None,
        };
        // Its flags are SEND_FLUSH, SEND_FUA, SEND_TRIM and SEND_WRITE_ZEROES.
        let old = export(1 << 20, 0x6d, 512, 32 << 20);
        for (size_bytes, flags, block_bytes, payload_bytes_max, replaces) in [
            (1 << 20, 0x6d, 512, 1 << 20, true),
            (2 << 20, 0x6d, 512, 1 << 20, true),
            ((1 << 20) - 512, 0x6d, 512, 1 << 20, false),
            (1 << 20, 0x6d, 512, 1 << 19, false),
            (1 << 20, 0x6d, 4096, 1 << 20, false),
            (1 << 20, 0x6d, 1, 1 << 20, true),
            (1 << 20, 0xffd, 512, 1 << 20, true),
            (1 << 20, 0x6f, 512, 1 << 20, false),
            (1 << 20, 0x69, 512, 1 << 20, false),
            (1 << 20, 0x65, 512, 1 << 20, false),
            (1 << 20, 0x4d, 512, 1 << 20, false),
            (1 << 20, 0x2d, 512, 1 << 20, false),
        ] {
            let new = export(size_bytes, flags, block_bytes, payload_bytes_max);
            assert_eq!(new.replaces(&old, 1 << 20), replaces, "{new:?}");
        }
        // Other flags are not used.
        let other = export(1 << 20, 0xffd, 512, 32 << 20);
        assert!(old.replaces(&other, 1 << 20));
        let read_only = export(1 << 20, 0x3, 512, 32 << 20);
        assert!(read_only.replaces(&read_only, 1 << 20) && old.replaces(&read_only, 1 << 20));
    }

    #[test]
    fn what_is_no_server_is_refused() {
        let take = |bytes: &[u8]| ClientHandshake::new("x").take(bytes, &mut Vec::new());
        assert_eq!(take(b"HTTP/1.1 400 Bad Request"), Err(Fault::Greeting));
        let old = [&GREETING_MAGIC.to_be_bytes()[..], &0x0000_4202_8186_1253_u64.to_be_bytes()];
        assert_eq!(take(&old.concat()), Err(Fault::OldStyle));
        let mut greeting = Handshake::greeting();
        greeting[17] = 0;
        assert_eq!(take(&greeting), Err(Fault::OldStyle));
        assert_eq!(take(&greeting[..17]), Ok((0, None)));
        let tls = shake("x", answering(|_| vec![(option_reply::ERR_TLS_REQD, Vec::new())]));
        assert!(tls.unwrap_err().to_string().contains("TLS"));
    }
}
