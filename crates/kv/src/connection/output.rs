//! Bytes to be sent to a client, in order: most of them copied into one buffer, long values and
//! long replies as they are.

use std::cell::Cell;
use std::io;
use std::rc::Rc;

use reactor::{Part, Slice, Socket};

/// A larger buffer is not kept for the next replies.
const KEPT_BYTES_MAX: usize = 64 * 1024;

/// Replies that are ready, in order: first `parts`, then `tail`.
#[derive(Default)]
pub(crate) struct Output {
    parts: Vec<Part>,
    parts_bytes: usize,
    pinned_bytes: usize,
    tail: Vec<u8>,
}

/// The content of an [`Output`] in the form the socket takes.
pub(crate) enum Sending {
    /// Only copied bytes.
    Bytes(Vec<u8>),
    /// Copied bytes and long values, alternating.
    Parts(Vec<Part>),
}

/// The content of an [`Output`], taken out to be sent.
pub(crate) struct Batch {
    pub sending: Sending,
    pub bytes: usize,
    pub pinned_bytes: usize,
}

impl From<Vec<u8>> for Output {
    fn from(tail: Vec<u8>) -> Output {
        Output { tail, ..Output::default() }
    }
}

impl Output {
    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.parts_bytes + self.tail.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of the engine's buffers that it pins.
    pub fn pinned_bytes(&self) -> usize {
        self.pinned_bytes
    }

    /// Memory kept for further replies, in bytes.
    pub fn room_bytes(&self) -> usize {
        self.tail.capacity()
    }

    /// The buffer to append to.
    #[inline]
    pub fn tail(&mut self) -> &mut Vec<u8> {
        &mut self.tail
    }

    /// Makes the tail a part, so that something may follow it.
    fn end_tail(&mut self) {
        if !self.tail.is_empty() {
            self.parts_bytes += self.tail.len();
            self.parts.push(Part::Bytes(std::mem::take(&mut self.tail)));
        }
    }

    /// Appends bytes by reference.
    pub fn push_slice(&mut self, slice: Slice) {
        self.end_tail();
        self.parts_bytes += slice.len();
        self.pinned_bytes += slice.footprint();
        self.parts.push(Part::Slice(slice));
    }

    /// Appends all of `other`.
    pub fn append(&mut self, mut other: Output) {
        if self.is_empty() && self.tail.capacity() < other.tail.capacity() {
            *self = other;
            return;
        }
        let is_long = other.tail.len() > KEPT_BYTES_MAX;
        if is_long || !other.parts.is_empty() {
            self.end_tail();
            self.parts_bytes += other.parts_bytes;
            self.pinned_bytes += other.pinned_bytes;
            self.parts.append(&mut other.parts);
        }
        match is_long {
            true => self.tail = other.tail,
            false => self.tail.extend_from_slice(&other.tail),
        }
    }

    /// Takes everything out to be sent; `None` when it is empty.
    pub fn take(&mut self) -> Option<Batch> {
        if self.is_empty() {
            return None;
        }
        let (bytes, pinned_bytes) = (self.len(), self.pinned_bytes);
        let tail = std::mem::take(&mut self.tail);
        let sending = if self.parts.is_empty() {
            Sending::Bytes(tail)
        } else {
            let mut parts = std::mem::take(&mut self.parts);
            parts.push(Part::Bytes(tail));
            Sending::Parts(parts)
        };
        (self.parts_bytes, self.pinned_bytes) = (0, 0);
        Some(Batch { sending, bytes, pinned_bytes })
    }

    /// Reuses a sent buffer for the next replies, unless another is in use or it has grown large.
    pub fn reuse(&mut self, sent: Sending) {
        if let Sending::Bytes(mut buffer) = sent
            && self.tail.capacity() == 0
            && buffer.capacity() <= KEPT_BYTES_MAX
        {
            buffer.clear();
            self.tail = buffer;
        }
    }

    /// Releases unused memory.
    pub fn release(&mut self) {
        if self.tail.is_empty() {
            self.tail = Vec::new();
        }
    }
}

/// The result of a send, and its buffers.
pub(crate) type Sent = (io::Result<()>, Sending);

/// Sends all bytes. `accepted` counts the bytes that the socket has accepted.
pub(crate) async fn send(socket: Socket, what: Sending, accepted: Rc<Cell<u64>>) -> Sent {
    match what {
        Sending::Bytes(mut bytes) => {
            let mut sent = 0;
            while sent < bytes.len() {
                let (result, back) = socket.send_some(bytes, sent).await;
                bytes = back;
                match result {
                    Ok(0) => {
                        return (Err(io::ErrorKind::WriteZero.into()), Sending::Bytes(bytes));
                    }
                    Ok(taken) => {
                        sent += taken;
                        accepted.set(accepted.get() + taken as u64);
                    }
                    Err(error) => return (Err(error), Sending::Bytes(bytes)),
                }
            }
            (Ok(()), Sending::Bytes(bytes))
        }
        Sending::Parts(parts) => {
            let (result, parts) = socket.send_parts(parts, &accepted).await;
            (result, Sending::Parts(parts))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use reactor::Pool;

    fn slice(bytes: &[u8]) -> Slice {
        let mut buffer = Pool::new(1 << 20).alloc(bytes.len()).unwrap();
        buffer.copy_from_slice(bytes);
        Slice::new(buffer.share(), 0..bytes.len())
    }

    fn text(output: &mut Output) -> String {
        let expected = output.len();
        let bytes = match output.take().map(|batch| batch.sending) {
            None => Vec::new(),
            Some(Sending::Bytes(bytes)) => bytes,
            Some(Sending::Parts(parts)) => parts
                .iter()
                .flat_map(|part| match part {
                    Part::Bytes(bytes) => bytes.clone(),
                    Part::Slice(slice) => slice.to_vec(),
                })
                .collect(),
        };
        assert_eq!(bytes.len(), expected);
        assert!(output.is_empty() && output.pinned_bytes() == 0);
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn copied_and_referenced_bytes_keep_their_order() {
        let mut output = Output::default();
        output.tail().extend_from_slice(b"a");
        output.push_slice(slice(b"b"));
        output.push_slice(slice(b"c"));
        output.tail().extend_from_slice(b"d");
        assert!(output.pinned_bytes() >= 2);
        assert_eq!(text(&mut output), "abcd");
        assert_eq!(text(&mut output), "");
    }

    #[test]
    fn an_output_appended_to_another_follows_it() {
        for first in 0..4 {
            for second in 0..4 {
                let make = |kind: i32, name: &str| {
                    let mut output = Output::default();
                    if kind & 1 != 0 {
                        output.tail().extend_from_slice(name.as_bytes());
                    }
                    if kind & 2 != 0 {
                        output.push_slice(slice(name.to_uppercase().as_bytes()));
                        output.tail().extend_from_slice(b".");
                    }
                    output
                };
                let mut output = make(first, "a");
                let expected = text(&mut make(first, "a")) + &text(&mut make(second, "b"));
                output.append(make(second, "b"));
                assert_eq!(text(&mut output), expected);
            }
        }
    }

    #[test]
    fn a_sent_buffer_is_reused_unless_it_has_grown() {
        let mut output = Output::default();
        output.reuse(Sending::Bytes(Vec::with_capacity(1000)));
        assert!(output.room_bytes() >= 1000);
        output.release();
        assert_eq!(output.room_bytes(), 0);
        output.reuse(Sending::Bytes(Vec::with_capacity(KEPT_BYTES_MAX + 1)));
        assert_eq!(output.room_bytes(), 0);
    }
}
