//! The messages between two nodes on their socket: docs/formats/handover.md, "The conversation".

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;

use reactor::Core;
use vhost::RegionInfo;
use vhost::bytes::Reader;

use crate::disks::spec::{DiskSpec, OnError};
use crate::ipc::frames::{Frame, Frames, Limits};

const MAGIC: [u8; 8] = *b"MRnode\n\0";
/// The version of the conversation; a disk's state has a version of its own.
const VERSION: u32 = 2;
/// Longest body: a disk's state is the longest.
const BODY_BYTES_MAX: usize = vhost::handover::DOCUMENT_BYTES_MAX + 4096;
/// Maximum number of descriptors with one message.
const DESCRIPTORS_MAX: usize = 4096;

/// A message. `Disk`, `Doors`, `NbdDoor` and `State` come with descriptors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// The successor runs, on `cores` cores.
    Hello { cores: u16 },
    /// A disk, with `images` descriptors for its device, and its guest's memory so far, with one
    /// descriptor for each region.
    Disk { spec: DiskSpec, images: u16, regions: Vec<RegionInfo> },
    /// The listening sockets for clients, one for each core, and the one for metrics, if any.
    Doors { clients: u16, metrics: bool },
    /// The listening socket for NBD clients comes along. Not sent if there is none.
    NbdDoor,
    /// Everything has been described.
    Prepare,
    /// The successor has opened everything.
    Prepared,
    /// The state of the disk of this name, which is quiesced.
    State(String, Vec<u8>),
    /// The successor has taken the disk of this name, which is quiesced.
    Taken(String),
    /// The disk of this name is the successor's from now on.
    Go(String),
    /// The successor is the node from now on; disks that have not come yet follow.
    Lead,
    /// The successor cannot take over, for this reason.
    Refused(String),
    /// The successor cannot take the disk of this name as it is, for this reason.
    Declined(String, String),
    /// The old process has no operation in flight any more at the disk of this name; whether one of
    /// its flushes has failed.
    Settled(String, bool),
}

impl Message {
    fn kind(&self) -> u32 {
        match self {
            Message::Hello { .. } => 1,
            Message::Disk { .. } => 2,
            Message::Doors { .. } => 3,
            Message::Prepare => 4,
            Message::Prepared => 5,
            Message::State(..) => 6,
            Message::Taken(_) => 7,
            Message::Go(_) => 8,
            Message::Lead => 9,
            Message::Refused(_) => 10,
            Message::Declined(..) => 11,
            Message::Settled(..) => 12,
            Message::NbdDoor => 13,
        }
    }

    fn body(&self) -> Vec<u8> {
        let mut body = Vec::new();
        match self {
            Message::Hello { cores } => {
                body.extend_from_slice(&MAGIC);
                body.extend_from_slice(&VERSION.to_le_bytes());
                body.extend_from_slice(&cores.to_le_bytes());
            }
            Message::Disk { spec, images, regions } => {
                let serial = spec.serial.as_deref().unwrap_or_default().as_bytes();
                let socket = spec.socket.as_os_str().as_bytes();
                for text in [spec.name.as_bytes(), spec.uri.as_bytes(), socket, serial] {
                    write_text(&mut body, text);
                }
                body.push(u8::from(spec.serial.is_some()) | on_error_bits(spec.on_error));
                body.extend_from_slice(&spec.queues.to_le_bytes());
                body.extend_from_slice(&images.to_le_bytes());
                for region in regions {
                    let RegionInfo { guest_addr, size, user_addr, mmap_offset } = *region;
                    for number in [guest_addr, size, user_addr, mmap_offset] {
                        body.extend_from_slice(&number.to_le_bytes());
                    }
                }
            }
            Message::Doors { clients, metrics } => {
                body.extend_from_slice(&clients.to_le_bytes());
                body.push(u8::from(*metrics));
            }
            Message::State(name, document) => {
                write_text(&mut body, name.as_bytes());
                body.extend_from_slice(document);
            }
            Message::Refused(why) => body.extend_from_slice(why.as_bytes()),
            Message::Taken(name) | Message::Go(name) => write_text(&mut body, name.as_bytes()),
            Message::Declined(name, why) => {
                write_text(&mut body, name.as_bytes());
                body.extend_from_slice(why.as_bytes());
            }
            Message::Settled(name, flush_failed) => {
                write_text(&mut body, name.as_bytes());
                body.push(u8::from(*flush_failed));
            }
            Message::NbdDoor | Message::Prepare | Message::Prepared | Message::Lead => {}
        }
        body
    }

    fn decode(kind: u32, body: &[u8]) -> Result<Message, String> {
        let mut reader = Reader::new(body);
        let message = match kind {
            1 => {
                if reader.take(MAGIC.len()) != Some(&MAGIC) {
                    return Err("it is not a node's message: wrong magic number".to_owned());
                }
                match reader.u32() {
                    Some(VERSION) => {}
                    Some(other) => {
                        return Err(format!(
                            "it uses version {other} of the handover, not {VERSION}"
                        ));
                    }
                    None => return Err(cut(kind)),
                }
                reader.u16().map(|cores| Message::Hello { cores })
            }
            2 => disk(&mut reader),
            3 => reader
                .u16()
                .zip(reader.bool())
                .map(|(clients, metrics)| Message::Doors { clients, metrics }),
            4 => Some(Message::Prepare),
            5 => Some(Message::Prepared),
            6 => {
                let name = text(&mut reader);
                name.map(|name| Message::State(name, reader.rest().to_vec()))
            }
            7 => text(&mut reader).map(Message::Taken),
            8 => text(&mut reader).map(Message::Go),
            9 => Some(Message::Lead),
            10 => Some(Message::Refused(rest(&mut reader))),
            11 => text(&mut reader).map(|name| Message::Declined(name, rest(&mut reader))),
            12 => text(&mut reader)
                .zip(reader.bool())
                .map(|(name, flush_failed)| Message::Settled(name, flush_failed)),
            13 => Some(Message::NbdDoor),
            _ => return Err(format!("a message of unknown kind {kind}")),
        };
        message.filter(|_| reader.is_empty()).ok_or_else(|| cut(kind))
    }
}

fn write_text(body: &mut Vec<u8>, text: &[u8]) {
    // Text from a command line or a file is never that long.
    let len = text.len().min(usize::from(u16::MAX)) as u16;
    body.extend_from_slice(&len.to_le_bytes());
    body.extend_from_slice(&text[..usize::from(len)]);
}

fn cut(kind: u32) -> String {
    format!("a message of kind {kind} has the wrong shape")
}

/// Bytes after their length.
fn bytes<'a>(reader: &mut Reader<'a>) -> Option<&'a [u8]> {
    let len = reader.u16()?;
    reader.take(len.into())
}

fn text(reader: &mut Reader<'_>) -> Option<String> {
    String::from_utf8(bytes(reader)?.to_vec()).ok()
}

fn rest(reader: &mut Reader<'_>) -> String {
    String::from_utf8_lossy(reader.rest()).into_owned()
}

/// In a disk's flags: it has a serial number of its own.
const HAS_SERIAL: u8 = 1;

/// In a disk's flags: what it does with requests that fail. 0 is what it did before there was a
/// choice.
fn on_error_bits(on_error: OnError) -> u8 {
    match on_error {
        OnError::Report => 0,
        OnError::Pause => 2,
        OnError::Ignore => 4,
    }
}

fn disk(reader: &mut Reader<'_>) -> Option<Message> {
    let (name, uri) = (text(reader)?, text(reader)?);
    let socket = OsStr::from_bytes(bytes(reader)?).into();
    let serial = text(reader)?;
    let flags = reader.u8()?;
    let serial = if flags & HAS_SERIAL != 0 { Some(serial) } else { None };
    let of = |on_error: &OnError| on_error_bits(*on_error) == flags & !HAS_SERIAL;
    let on_error = [OnError::Report, OnError::Pause, OnError::Ignore].into_iter().find(of)?;
    let spec = DiskSpec { name, uri, socket, queues: reader.u16()?, serial, on_error };
    let images = reader.u16()?;
    let mut regions = Vec::new();
    while !reader.is_empty() {
        regions.push(RegionInfo {
            guest_addr: reader.u64()?,
            size: reader.u64()?,
            user_addr: reader.u64()?,
            mmap_offset: reader.u64()?,
        });
    }
    spec.check().ok()?;
    Some(Message::Disk { spec, images, regions })
}

/// One end of the conversation.
pub(super) struct Line(Frames);

impl Line {
    /// Creates an end on a connected socket.
    pub fn from_fd(core: &Core, fd: OwnedFd) -> std::io::Result<Line> {
        let limits = Limits { body_bytes: BODY_BYTES_MAX, descriptors: DESCRIPTORS_MAX };
        Frames::from_fd(core, fd, limits).map(Line)
    }

    /// Sends a message. After an error a part of it may have been sent; a message without a body is
    /// sent whole or not at all.
    pub async fn send(&self, message: &Message, descriptors: &[OwnedFd]) -> Result<(), String> {
        self.0.send(message.kind(), &message.body(), descriptors).await
    }

    /// Receives the next message.
    ///
    /// # Errors
    /// Also when the other side has gone.
    pub async fn receive(&self) -> Result<(Message, Vec<OwnedFd>), String> {
        let Frame { kind, body, descriptors } = self.0.receive().await?;
        Ok((Message::decode(kind, &body)?, descriptors))
    }

    /// Receives the next message and checks that it is the expected one.
    pub async fn expect(&self, expected: &Message) -> Result<(), String> {
        match self.receive().await?.0 {
            message if message == *expected => Ok(()),
            Message::Refused(why) => Err(why),
            other => Err(format!("it sends {other:?} instead of {expected:?}")),
        }
    }
}

/// One message of each kind.
#[cfg(any(test, feature = "testing"))]
fn messages() -> Vec<Message> {
    let region =
        RegionInfo { guest_addr: 1 << 32, size: 4096, user_addr: 77, mmap_offset: 1 << 20 };
    let spec = |serial: Option<&str>, on_error| DiskSpec {
        name: "vm1".into(),
        uri: "file:a%20b".into(),
        socket: OsStr::from_bytes(b"/run/\xff").into(),
        queues: 4,
        serial: serial.map(str::to_owned),
        on_error,
    };
    let both = spec(Some(""), OnError::Pause);
    vec![
        Message::Hello { cores: 2 },
        Message::Disk {
            spec: spec(None, OnError::Report),
            images: 1,
            regions: vec![region, region],
        },
        Message::Disk { spec: both, images: 0, regions: Vec::new() },
        Message::Disk { spec: spec(None, OnError::Ignore), images: 0, regions: Vec::new() },
        Message::Doors { clients: 2, metrics: true },
        Message::NbdDoor,
        Message::Prepare,
        Message::Prepared,
        Message::State("vm1".into(), vec![1, 2, 3]),
        Message::Taken("vm1".into()),
        Message::Go("vm1".into()),
        Message::Lead,
        Message::Refused("because".into()),
        Message::Declined("vm1".into(), "because".into()),
        Message::Settled("vm1".into(), true),
    ]
}

/// Kinds and bodies of messages; for fuzzers.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn fuzz_seeds() -> Vec<(u32, Vec<u8>)> {
    messages().iter().map(|message| (message.kind(), message.body())).collect()
}

/// A decoded message is encoded to the same meaning; for fuzzers.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn fuzz(kind: u32, body: &[u8]) {
    match Message::decode(kind, body) {
        Ok(message) => {
            assert_eq!(Message::decode(message.kind(), &message.body()).as_ref(), Ok(&message));
        }
        Err(why) => assert!(!why.is_empty()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_decoded_as_they_were_encoded() {
        for message in messages() {
            assert_eq!(Message::decode(message.kind(), &message.body()).unwrap(), message);
        }
    }

    #[test]
    fn a_message_with_missing_or_additional_bytes_is_refused() {
        let fixed = |message: &Message| {
            !matches!(message, Message::State(..) | Message::Refused(_) | Message::Declined(..))
        };
        for message in messages().into_iter().filter(fixed) {
            let mut body = message.body();
            body.push(0);
            assert!(Message::decode(message.kind(), &body).is_err(), "{message:?}");
            for len in 0..body.len() - 1 {
                let short = Message::decode(message.kind(), &body[..len]);
                assert!(short.is_err() || short.unwrap() != message, "{message:?}");
            }
        }
        assert!(Message::decode(14, &[]).unwrap_err().contains("kind 14"));
    }

    #[test]
    fn another_version_is_named() {
        let mut body = Message::Hello { cores: 1 }.body();
        body[MAGIC.len()] = 9;
        assert!(
            Message::decode(1, &body).unwrap_err().contains("version 9 of the handover, not 2")
        );
        body[0] = b'X';
        assert!(Message::decode(1, &body).unwrap_err().contains("wrong magic number"));
    }
}
