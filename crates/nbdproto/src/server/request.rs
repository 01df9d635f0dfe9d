//! Requests: their bytes, and whether they may be executed.

use super::reply::Errno;
use crate::wire::{REQUEST_MAGIC, Reader, Violation, command, command_flag};

/// Length of a request without its payload, in bytes.
pub const REQUEST_BYTES: usize = 28;
/// Longest payload of a request or of its reply, in bytes: 32 MiB, which every client may assume.
pub const PAYLOAD_BYTES_MAX: u32 = 32 << 20;

/// A request as it came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    flags: u16,
    command: u16,
    /// The client's number for it, which comes back with the reply.
    pub cookie: u64,
    /// Offset in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub len: u32,
}

/// What the requests of a connection may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// Size of the export in bytes.
    pub size_bytes: u64,
    /// Offsets and lengths are multiples of this, a power of two.
    pub block_bytes: u32,
    /// Longest read or write, in bytes.
    pub payload_bytes_max: u32,
    /// Writes are refused.
    pub read_only: bool,
    /// Trims are supported.
    pub trim: bool,
    /// Writes of zeroes are supported.
    pub write_zeroes: bool,
    /// Structured replies were negotiated.
    pub structured: bool,
    /// `base:allocation` was selected.
    pub allocation: bool,
}

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Read the range.
    Read,
    /// Write the payload; with `fua` it is durable before the reply.
    Write {
        /// Force unit access.
        fua: bool,
    },
    /// Make durable what was acknowledged.
    Flush,
    /// The range is no longer needed.
    Trim {
        /// Force unit access.
        fua: bool,
    },
    /// Make the range read as zeroes.
    WriteZeroes {
        /// Force unit access.
        fua: bool,
        /// The range may be deallocated.
        unmap: bool,
    },
    /// Tell which parts of the range are allocated.
    BlockStatus {
        /// Only the first part.
        one: bool,
    },
    /// Answer what was asked, and close the connection.
    Disconnect,
}

impl Request {
    /// The request at the front of `input`, or `None` if it is incomplete.
    ///
    /// # Errors
    /// When the client must be disconnected.
    pub fn parse(input: &[u8]) -> Result<Option<Request>, Violation> {
        let mut reader = Reader(input);
        let Some(magic) = reader.u32() else { return Ok(None) };
        if magic != REQUEST_MAGIC {
            return Err(Violation::RequestMagic(magic));
        }
        match Request::parse_fields(reader) {
            Some(request) if request.payload_len() > PAYLOAD_BYTES_MAX => {
                Err(Violation::PayloadLength(request.len))
            }
            request => Ok(request),
        }
    }

    fn parse_fields(mut reader: Reader<'_>) -> Option<Request> {
        let (flags, command) = (reader.u16()?, reader.u16()?);
        let (cookie, offset, len) = (reader.u64()?, reader.u64()?, reader.u32()?);
        Some(Request { flags, command, cookie, offset, len })
    }

    /// Bytes of payload that follow the request.
    pub fn payload_len(&self) -> u32 {
        if self.command == command::WRITE { self.len } else { 0 }
    }

    /// Whether it says that the client leaves, which has no reply whatever the rules are.
    pub fn disconnects(&self) -> bool {
        self.command == command::DISC
    }

    /// What it asks for.
    ///
    /// # Errors
    /// What the client is told if it may not have that.
    pub fn check(&self, rules: &Rules) -> Result<Action, Errno> {
        let has = |flag| self.flags & flag != 0;
        let fua = has(command_flag::FUA);
        let action = match self.command {
            command::READ => Action::Read,
            command::WRITE => Action::Write { fua },
            command::DISC => return Ok(Action::Disconnect),
            command::FLUSH => Action::Flush,
            command::TRIM if rules.trim => Action::Trim { fua },
            command::WRITE_ZEROES if rules.write_zeroes => {
                Action::WriteZeroes { fua, unmap: !has(command_flag::NO_HOLE) }
            }
            command::BLOCK_STATUS if rules.allocation => {
                Action::BlockStatus { one: has(command_flag::REQ_ONE) }
            }
            _ => return Err(Errno::Invalid),
        };
        let of_its_own = match action {
            Action::Read if rules.structured => command_flag::DF,
            Action::WriteZeroes { .. } => command_flag::NO_HOLE,
            Action::BlockStatus { .. } => command_flag::REQ_ONE,
            _ => 0,
        };
        if self.flags & !(command_flag::FUA | of_its_own) != 0 {
            return Err(Errno::Invalid);
        }
        let writes = matches!(
            action,
            Action::Write { .. } | Action::Trim { .. } | Action::WriteZeroes { .. }
        );
        if writes && rules.read_only {
            return Err(Errno::NotPermitted);
        }
        if action == Action::Flush {
            let reserved = self.offset != 0 || self.len != 0;
            return if reserved { Err(Errno::Invalid) } else { Ok(action) };
        }
        let end = self.offset.checked_add(self.len.into());
        if end.is_none_or(|end| end > rules.size_bytes) {
            let grows = matches!(action, Action::Write { .. } | Action::WriteZeroes { .. });
            return Err(if grows { Errno::NoSpace } else { Errno::Invalid });
        }
        if matches!(action, Action::BlockStatus { .. }) && self.len == 0 {
            return Err(Errno::Invalid);
        }
        let transfers = matches!(action, Action::Read | Action::Write { .. });
        let block_mask = u64::from(rules.block_bytes) - 1;
        if (self.offset | u64::from(self.len)) & block_mask != 0
            || (transfers && self.len > rules.payload_bytes_max)
        {
            return Err(Errno::Invalid);
        }
        Ok(action)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fuzz::{few_rules, request_bytes};

    fn check(command: u16, flags: u16, offset: u64, len: u32) -> Result<Action, Errno> {
        let bytes = request_bytes(command, flags, 7, offset, len);
        let request = Request::parse(&bytes).unwrap().unwrap();
        assert_eq!(request.cookie, 7);
        request.check(&few_rules("a"))
    }

    #[test]
    fn a_request_is_parsed_when_it_is_complete() {
        let bytes = request_bytes(command::READ, 0, 1, 512, 512);
        for end in 0..REQUEST_BYTES {
            assert_eq!(Request::parse(&bytes[..end]), Ok(None));
        }
        assert_eq!(check(command::READ, 0, 512, 512), Ok(Action::Read));
        assert_eq!(Request::parse(b"GET "), Err(Violation::RequestMagic(0x4745_5420)));
        let long = request_bytes(command::WRITE, 0, 1, 0, PAYLOAD_BYTES_MAX + 1);
        let long = Request::parse(&long);
        assert_eq!(long, Err(Violation::PayloadLength(PAYLOAD_BYTES_MAX + 1)));
    }

    #[test]
    fn flags_belong_to_their_commands() {
        use command_flag::{DF, FUA, NO_HOLE, REQ_ONE};
        assert_eq!(check(command::WRITE, FUA, 0, 512), Ok(Action::Write { fua: true }));
        assert_eq!(check(command::READ, FUA | DF, 0, 512), Ok(Action::Read));
        let zeroes = |fua, unmap| Ok(Action::WriteZeroes { fua, unmap });
        assert_eq!(check(command::WRITE_ZEROES, 0, 0, 512), zeroes(false, true));
        assert_eq!(check(command::WRITE_ZEROES, FUA | NO_HOLE, 0, 512), zeroes(true, false));
        let status = check(command::BLOCK_STATUS, REQ_ONE, 0, 512);
        assert_eq!(status, Ok(Action::BlockStatus { one: true }));
        for (command, flags) in [
            (command::READ, NO_HOLE),
            (command::READ, REQ_ONE),
            (command::WRITE, DF),
            (command::TRIM, NO_HOLE),
            (command::WRITE_ZEROES, 1 << 4),
            (command::BLOCK_STATUS, DF),
            (5, 0),
            (8, 0),
        ] {
            assert_eq!(check(command, flags, 0, 512), Err(Errno::Invalid), "{command} {flags}");
        }
        assert_eq!(check(command::BLOCK_STATUS, 0, 0, 0), Err(Errno::Invalid));
        assert_eq!(check(command::FLUSH, 0, 0, 0), Ok(Action::Flush));
        assert_eq!(check(command::FLUSH, 0, 512, 0), Err(Errno::Invalid));
        assert_eq!(check(command::DISC, 0, 1, 1), Ok(Action::Disconnect));
    }

    #[test]
    fn ranges_lie_in_the_export_in_whole_blocks() {
        let size = few_rules("a").size_bytes;
        assert_eq!(check(command::READ, 0, size - 512, 512), Ok(Action::Read));
        assert_eq!(check(command::READ, 0, size, 0), Ok(Action::Read));
        for offset in [size, u64::MAX - 1023, u64::MAX << 9] {
            assert_eq!(check(command::READ, 0, offset, 512), Err(Errno::Invalid));
            assert_eq!(check(command::TRIM, 0, offset, 512), Err(Errno::Invalid));
            assert_eq!(check(command::WRITE, 0, offset, 512), Err(Errno::NoSpace));
            assert_eq!(check(command::WRITE_ZEROES, 0, offset, 512), Err(Errno::NoSpace));
        }
        for (offset, len) in [(1, 512), (0, 511), (256, 256), (0, (1 << 16) + 512)] {
            assert_eq!(check(command::READ, 0, offset, len), Err(Errno::Invalid));
        }
        // Zeroes have no payload.
        assert!(check(command::WRITE_ZEROES, 0, 0, 1 << 20).is_ok());
    }

    #[test]
    fn a_read_only_export_takes_no_writes() {
        for command in [command::WRITE, command::TRIM, command::WRITE_ZEROES] {
            let bytes = request_bytes(command, 0, 1, 0, 512);
            let request = Request::parse(&bytes).unwrap().unwrap();
            let rules = Rules { trim: true, write_zeroes: true, ..few_rules("b") };
            assert_eq!(request.check(&rules), Err(Errno::NotPermitted));
        }
        let flush = request_bytes(command::FLUSH, 0, 1, 0, 0);
        let flush = Request::parse(&flush).unwrap().unwrap();
        assert_eq!(flush.check(&few_rules("b")), Ok(Action::Flush));
    }
}
