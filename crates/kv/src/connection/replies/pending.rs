//! Replies that are not ready yet: reads, tasks and writes in progress, in the order of their
//! commands.

use std::cell::RefCell;
use std::rc::Rc;

use lsm::Value;
use reactor::JoinHandle;
use resp::{Protocol, Writer};

use crate::client::gauge::Share;
use crate::command::commands::Ask;
use crate::command::spec::CommandId;
use crate::connection::output::Output;
use crate::core::state::{CoreState, KvStats};
use crate::read::small;
use crate::read::stream::{Piece, Stream};
use crate::shard::parcel::AnswerSlot;

/// A reply that is not yet in the output.
pub(super) enum PendingReply {
    /// Ready, after others that are not.
    Ready(Output),
    /// A read of one key. With a share of the core's unsent bytes its answer has been admitted.
    Get { task: JoinHandle<Found>, admitted: Option<Share>, query: Query },
    /// A read whose answer has this many bytes and is read when its turn has come and there is
    /// memory for it.
    Deferred { key: Vec<u8>, bytes: usize, query: Query },
    /// The values of some keys.
    MultiGet {
        task: JoinHandle<FoundMany>,
        admitted: Option<Share>,
        protocol: Protocol,
        keys: usize,
        command: Option<CommandId>,
    },
    /// A reply of bounded size, made by a task.
    Task {
        task: JoinHandle<SmallReply>,
        admitted: Option<Share>,
        weight: usize,
        command: Option<CommandId>,
        silent: bool,
    },
    /// The next piece of a reply of any size.
    Piece(JoinHandle<Piece>),
    /// A reply of any size that waits for its client or for memory.
    Parked(Box<Stream>),
    /// The shard's answers to a parcel of writes.
    Written { written: Written, admitted: Option<Share> },
    /// The answer to a transaction, which is not a reply yet.
    Executing { slot: Rc<AnswerSlot>, admitted: Option<Share> },
}

impl PendingReply {
    /// Whether memory has been taken for it already.
    pub fn is_admitted(&self) -> bool {
        match self {
            Self::Get { admitted, .. }
            | Self::MultiGet { admitted, .. }
            | Self::Written { admitted, .. }
            | Self::Executing { admitted, .. }
            | Self::Task { admitted, .. } => admitted.is_some(),
            Self::Piece(_) => true,
            Self::Parked(stream) => stream.holds_room(),
            Self::Ready(_) | Self::Deferred { .. } => false,
        }
    }

    pub fn is_stream(&self) -> bool {
        matches!(self, Self::Piece(_) | Self::Parked(_))
    }

    /// Ends its task: the reply is not wanted any more.
    pub fn cancel(self) {
        match self {
            Self::Get { task, .. } => task.cancel(),
            Self::MultiGet { task, .. } => task.cancel(),
            Self::Task { task, .. } => task.cancel(),
            Self::Piece(task) => task.cancel(),
            Self::Ready(_) | Self::Deferred { .. } | Self::Parked(_) => {}
            Self::Written { .. } | Self::Executing { .. } => {}
        }
    }
}

/// What is asked about one key, and by which command.
#[derive(Clone, Copy)]
pub(super) struct Query {
    pub ask: Ask,
    pub protocol: Protocol,
    pub command: Option<CommandId>,
}

/// A parcel of writes in flight.
pub(crate) struct Written {
    /// Where its answers arrive.
    pub slot: Rc<AnswerSlot>,
    pub protocol: Protocol,
    /// The client wants no replies.
    pub silent: bool,
    /// The weight of its changes.
    pub weight: usize,
    /// The number of answers that may be as long as values.
    pub values: usize,
    /// Whether a key may have a value afterwards that is not small.
    pub leaves_long: bool,
}

pub(super) type Answer = lsm::Result<Option<Value>>;

/// The result of a read that was started before its turn.
pub(super) enum Found {
    /// The key, its value, and the bytes it takes of the window.
    Answer(Vec<u8>, Answer, usize),
    /// The value, of this many bytes, did not fit beside those of other reads. It is read again
    /// when its turn has come.
    Again(Vec<u8>, usize),
}

/// The result of a read of several keys that was started before its turn.
pub(super) enum FoundMany {
    Answers(Vec<Vec<u8>>, Vec<Answer>, usize),
    Again(Vec<Vec<u8>>),
}

/// The bytes of values that one connection's reads have found and that wait for their turn. The
/// length of a value is not known before it is read, so a value that does not fit is dropped and
/// read again later.
///
/// The windows of a core's connections share a limit, too: these values hold buffers that the reads
/// whose turn has come may need.
#[derive(Clone)]
pub(super) struct Window(Rc<RefCell<Share>>);

impl Window {
    pub fn new(state: &CoreState) -> Self {
        Self(Rc::new(RefCell::new(state.found_bytes.share())))
    }

    /// Takes the bytes of these answers; `None` if they do not fit, or if memory was short for one
    /// of them. A single value whose turn `is_next` is taken however long it is, and so is one that
    /// is the only one of the core.
    pub fn admit(&self, state: &CoreState, answers: &[Answer], is_next: bool) -> Option<usize> {
        let short = answers
            .iter()
            .any(|answer| matches!(answer, Err(error) if error.kind() == lsm::Kind::Memory));
        let size = answers.iter().flatten().flatten().map(|value| value.len()).sum();
        let settings = state.node.settings();
        let mut own = self.0.borrow_mut();
        let (held, all) = (own.part(), state.found_bytes.get());
        let alone = answers.len() == 1 && held == 0 && (is_next || all == 0);
        let fits = held + size <= settings.unsent_bytes_max
            && all + size <= settings.unsent_total_bytes_max;
        if short || !(alone || fits) {
            return None;
        }
        own.set(held + size);
        Some(size)
    }

    /// Releases the bytes of an answer.
    pub fn leave(&self, size: usize) {
        let mut own = self.0.borrow_mut();
        let held = own.part();
        own.set(held - size);
    }
}

/// The reply of a task, as bytes.
pub(crate) struct SmallReply {
    pub bytes: Vec<u8>,
    /// The connection has closed itself.
    pub close: bool,
}

impl From<Vec<u8>> for SmallReply {
    fn from(bytes: Vec<u8>) -> Self {
        Self { bytes, close: false }
    }
}

/// How long a task's reply may be, which decides how many of them may run at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Length {
    /// A few bytes.
    Short,
    /// Up to a few hundred kilobytes.
    Long,
    /// The same, with so much work that the requests of others come first.
    Bulk,
}

/// The approximate length of the reply.
pub(super) fn answer_bytes(answer: &Answer, ask: Ask) -> usize {
    match (answer, ask) {
        (Ok(Some(value)), Ask::Value | Ask::Placed | Ask::Part { .. }) => value.len(),
        _ => 0,
    }
}

pub(super) fn count_hit(answer: &Answer, stats: &mut KvStats) {
    match answer {
        Ok(Some(_)) => stats.hits += 1,
        Ok(None) => stats.misses += 1,
        Err(_) => stats.errors += 1,
    }
}

/// Writes the reply to a read of one key. A long value is sent from where it lies.
#[inline]
pub(super) fn write_one(state: &CoreState, output: &mut Output, answer: &Answer, query: Query) {
    let Query { ask, protocol, .. } = query;
    let value = match answer {
        Ok(value) => value.as_ref(),
        Err(error) => {
            return small::write_error(error, &mut Writer::new(output.tail(), protocol));
        }
    };
    let place = value.filter(|_| ask == Ask::Placed).and_then(Value::place);
    // The value is the last element, and written like the reply to `GET`.
    let ask = match (ask, value) {
        (Ask::Placed, Some(_)) => {
            let mut writer = Writer::new(output.tail(), protocol);
            writer.array(if place.is_some() { 3 } else { 1 });
            if let Some(place) = place {
                writer.integer(place.file as i64);
                writer.integer(place.offset as i64);
            }
            Ask::Value
        }
        (ask, _) => ask,
    };
    if let Some(value) = value
        && ask == Ask::Value
        && value.len() >= state.node.settings().reference_bytes_min
        && let Some(slice) = value.as_slice()
        && state.pinned_bytes.get() + output.pinned_bytes() + slice.footprint()
            <= state.node.settings().pinned_bytes_max
    {
        Writer::new(output.tail(), protocol).bulk_header(value.len());
        output.push_slice(slice.clone());
        output.tail().extend_from_slice(b"\r\n");
        return;
    }
    small::write_answer(
        value.map(|value| &**value),
        ask,
        &mut Writer::new(output.tail(), protocol),
    );
}
