//! Bodies of the fuzz targets for messages, session and handover, which tests also call. Each
//! panics if the crate breaks one of its guarantees.

use std::collections::BTreeMap;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use crate::bytes::Reader;
use crate::protocol::config::{Config, RangeLimits};
use crate::protocol::handover::{DiskState, HandoverError, Role, SessionState};
use crate::protocol::kept::{FromLauncher, FromNode, Keeper, LIVE_MAX, Snapshot, Taken};
use crate::protocol::message::{
    DESCRIPTORS_MAX, Framer, HEADER_BYTES, InflightInfo, Message, PAYLOAD_BYTES_MAX, id,
};
use crate::protocol::ring_state::{RingProgress, RingState};
use crate::protocol::session::{Action, Offer, Session, protocol_feature};

/// A fuzz target: its name, its function, and its seeds.
pub type FuzzTarget = (&'static str, fn(&[u8]), fn() -> Vec<Vec<u8>>);

/// Every target of this module.
pub const TARGETS: &[FuzzTarget] = &[
    ("vhost_message", session, message_seeds),
    ("vhost_handover", handover, handover_seeds),
    ("vhost_kept", keeper, keeper_seeds),
];

/// Few rings and regions, so that inputs reach the limits.
fn offer(queues: u16) -> Offer {
    let limits = RangeLimits { sectors_max: 1024, segments_max: 1 };
    let config = Config {
        capacity_sectors: 4096,
        segments_max: 126,
        segment_bytes_max: 4 << 20,
        block_size: 512,
        physical_block_size: 4096,
        min_io_bytes: 4096,
        opt_io_bytes: 0,
        write_cache: true,
        read_only: false,
        queues,
        discard: Some(limits),
        discard_alignment_sectors: 8,
        write_zeroes: Some(limits),
        write_zeroes_may_unmap: true,
    };
    let features = config.features();
    Offer { features, memory_regions_max: 10, ..Offer::new(config) }
}

/// Duplicates of one descriptor, and the other end, which reads the end of the stream when all are
/// closed.
struct Descriptors {
    sent: UnixStream,
    watch: UnixStream,
}

impl Descriptors {
    fn new() -> Self {
        let (sent, watch) = UnixStream::pair().expect("a pair of sockets");
        watch.set_nonblocking(true).expect("a socket can be non-blocking");
        Self { sent, watch }
    }

    fn take(&self, count: usize) -> Vec<OwnedFd> {
        (0..count).map(|_| self.sent.try_clone().expect("a descriptor").into()).collect()
    }

    fn assert_all_closed(self) {
        drop(self.sent);
        let mut watch = self.watch;
        assert!(matches!(watch.read(&mut [0]), Ok(0)), "a descriptor is still open");
    }
}

/// A target for which every action succeeds. It checks that each action is consistent with the
/// earlier ones.
#[derive(Default)]
struct Target {
    held: BTreeMap<[u16; 2], OwnedFd>,
    rings: BTreeMap<u16, RingState>,
    features: Option<u64>,
    write_cache: bool,
    /// Rings to stop, and whether to create a region.
    due: (Vec<u16>, Option<(u16, u16)>),
    replies: usize,
}

impl Target {
    fn hold(&mut self, role: Role, fd: Option<OwnedFd>) {
        match fd {
            Some(fd) => self.held.insert(role.numbers(), fd),
            None => self.held.remove(&role.numbers()),
        };
    }

    fn regions(&self) -> u16 {
        (0..).take_while(|i| self.held.contains_key(&Role::Memory(*i).numbers())).count() as u16
    }

    fn move_ring(&mut self, ring: u16, from: &[RingState], to: RingState) {
        let state = self.rings.entry(ring).or_default();
        assert!(from.contains(state), "ring {ring} from {state:?} to {to:?}");
        *state = to;
    }

    fn perform(&mut self, session: &Session, actions: Vec<Action>) {
        use RingState::*;
        for action in actions {
            assert_eq!(self.replies, 0, "nothing is done after the reply");
            match action {
                Action::Reply(_) => self.replies += 1,
                Action::FeaturesChanged => self.features = Some(session.features()),
                Action::WriteCache(on) => {
                    assert_ne!(self.write_cache, on);
                    self.write_cache = on;
                }
                Action::ReplaceMemory(regions) => {
                    for i in 0..self.regions() {
                        self.hold(Role::Memory(i), None);
                    }
                    for (i, (_, fd)) in (0..).zip(regions) {
                        self.hold(Role::Memory(i), Some(fd));
                    }
                }
                Action::AddRegion(_, fd) => self.hold(Role::Memory(self.regions()), Some(fd)),
                Action::RemoveRegion(_) => self.hold(Role::Memory(self.regions() - 1), None),
                Action::Inflight(_, fd) => self.hold(Role::Inflight, Some(fd)),
                Action::DropInflight => {
                    assert!(self.held.contains_key(&Role::Inflight.numbers()));
                    self.hold(Role::Inflight, None);
                }
                Action::CreateInflight { queues, queue_size } => {
                    self.due.1 = Some((queues, queue_size));
                }
                Action::Log(_, fd) => self.hold(Role::Log, Some(fd)),
                Action::LogSignal(fd) => self.hold(Role::LogSignal, Some(fd)),
                Action::BackendChannel(fd) => self.hold(Role::BackendChannel, Some(fd)),
                Action::Kick(ring, fd) => self.hold(Role::Kick(ring), fd),
                Action::Call(ring, fd) => self.hold(Role::Call(ring), fd),
                Action::Err(ring, fd) => self.hold(Role::Err(ring), fd),
                Action::StartRing(ring) => {
                    let known = session.ring(ring);
                    assert!(known.size > 0 && known.addresses.is_some());
                    self.move_ring(ring, &[Idle], Running);
                }
                Action::EnableRing(ring, true) => self.move_ring(ring, &[Paused], Running),
                Action::EnableRing(ring, false) => self.move_ring(ring, &[Running], Paused),
                Action::RingLog(ring) => {
                    assert_ne!(self.rings.get(&ring).copied().unwrap_or_default(), Idle);
                }
                Action::StopRing(ring) => {
                    self.move_ring(ring, &[Running, Paused], Stopping);
                    self.due.0.push(ring);
                }
            }
        }
        self.replies = 0;
    }

    /// Sends the replies that are due.
    fn answer(&mut self, session: &mut Session, fds: &Descriptors, base: u32) {
        while let Some(ring) = self.due.0.pop() {
            assert!(session.is_waiting());
            assert!(session.export(|_| RingProgress::default()).is_none());
            self.move_ring(ring, &[RingState::Stopping], RingState::Idle);
            let actions = session.ring_stopped(ring, base);
            self.perform(session, actions);
        }
        if let Some((queues, queue_size)) = self.due.1.take() {
            assert!(session.is_waiting());
            let area = InflightInfo { mmap_size: 64, mmap_offset: 0, queues, queue_size };
            let fd = fds.take(1).remove(0);
            let actions = session.inflight_created(&area, fd);
            self.perform(session, actions);
        }
        assert!(!session.is_waiting());
    }

    /// Compares its own state with the session's.
    fn check(&self, session: &Session, state: &SessionState) {
        let known: Vec<[u16; 2]> = state.roles().into_iter().map(Role::numbers).collect();
        let held: Vec<[u16; 2]> = self.held.keys().copied().collect();
        let mut sorted = known.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, held, "the descriptors that are there");
        for ring in 0..session.rings() {
            let believed = self.rings.get(&ring).copied().unwrap_or_default();
            assert_eq!(session.ring(ring).state, believed);
        }
        assert_eq!(self.features.unwrap_or(0), session.features());
        assert_eq!(self.write_cache, session.write_cache());
    }
}

/// Whatever a front end sends, in whatever pieces, with whatever descriptors: the session continues
/// or is closed, every descriptor is in one place or closed, an obedient target never gets an
/// inconsistent action, and the state can be exported whenever no reply is due.
///
/// The first byte chooses the pieces in which the rest arrives. After that each message is preceded
/// by a byte, its number of descriptors.
pub fn session(data: &[u8]) {
    run(data, |_, _| {});
}

/// Also passes the exportable state and the names of the actions to `observe` after each message.
fn run(data: &[u8], mut observe: impl FnMut(&DiskState, &[String])) {
    let Some((&step, mut stream)) = data.split_first() else {
        return;
    };
    let fds = Descriptors::new();
    let offer = offer(3);
    let (mut session, mut target) = (Session::new(offer), Target::default());
    while let Some((&count, rest)) = stream.split_first() {
        stream = rest;
        let mut descriptors = fds.take(usize::from(count) % (DESCRIPTORS_MAX + 2));
        let mut framer = Framer::new();
        let received = loop {
            let wanted = framer.wanted();
            assert!((1..=HEADER_BYTES + PAYLOAD_BYTES_MAX).contains(&wanted));
            let piece = &stream[..wanted.min(1 + usize::from(step)).min(stream.len())];
            stream = &stream[piece.len()..];
            match framer.push(piece, std::mem::take(&mut descriptors)) {
                Ok(None) if piece.is_empty() => return,
                Ok(None) => {}
                Ok(Some((message, descriptors))) => break session.handle(&message, descriptors),
                Err(violation) => break Err(violation),
            }
        };
        match received {
            Ok(actions) => {
                assert!(actions.len() <= 16);
                let names: Vec<String> = actions.iter().map(name).collect();
                target.perform(&session, actions);
                target.answer(&mut session, &fds, count.into());
                let disk = check_export(&session, &offer, &fds);
                if let Some(connection) = &disk.connection {
                    target.check(&session, &connection.session);
                }
                observe(&disk, &names);
            }
            // The front end reconnects.
            Err(violation) => {
                assert!(!violation.to_string().is_empty());
                (session, target) = (Session::new(offer), Target::default());
            }
        }
    }
    drop((session, target));
    fds.assert_all_closed();
}

/// The action's name without its contents.
fn name(action: &Action) -> String {
    let text = format!("{action:?}");
    text.chars().take_while(|c| c.is_alphanumeric()).collect()
}

/// Checks that an exported session is the same after its import, and its target too.
fn check_export(session: &Session, offer: &Offer, fds: &Descriptors) -> DiskState {
    let progress = |ring| RingProgress { next_avail: ring, ..RingProgress::default() };
    let state = session.export(progress).expect("nothing is due");
    let connection =
        crate::protocol::handover::ConnectionState { session: state.clone(), ..Default::default() };
    let disk = DiskState { connection: Some(connection), ..DiskState::default() };
    assert_eq!(DiskState::decode(&disk.encode()).as_ref(), Ok(&disk));

    let descriptors = fds.take(state.roles().len());
    let (there, actions) = Session::import(*offer, &state, descriptors).expect("the same offer");
    let mut target = Target::default();
    target.perform(&there, actions);
    target.check(&there, &state);
    assert_eq!(there.export(progress), Some(state));
    disk
}

/// A document is refused, or it is exactly what would have been written, and its session can
/// continue.
///
/// The first byte chooses whether the rest is the document or only its fields.
pub fn handover(data: &[u8]) {
    let Some((&whole, data)) = data.split_first() else {
        return;
    };
    let document =
        if whole & 1 == 1 { data.to_vec() } else { crate::protocol::handover::document(data) };
    let state = match DiskState::decode(&document) {
        Ok(state) => state,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return;
        }
    };
    assert_eq!(state.encode(), document);
    let fds = Descriptors::new();
    let roles = state.roles().len();
    let too_many = state.assign(fds.take(roles + 1)).expect_err("one descriptor too many");
    assert_eq!(too_many, HandoverError::Descriptors { expected: roles, found: roles + 1 });
    let assigned = state.assign(fds.take(roles)).expect("as many as there are roles");
    if let Some(connection) = &state.connection {
        let queues = connection.session.rings.len() as u16;
        let imported = Session::import(offer(queues), &connection.session, assigned.session);
        if let Ok((session, actions)) = imported {
            let mut target = Target::default();
            target.perform(&session, actions);
            target.check(&session, &connection.session);
        }
        let _ = Framer::from_parts(connection.partial.clone(), assigned.partial);
    }
    drop((assigned.listener, assigned.connection, assigned.mirror, assigned.unsent));
    fds.assert_all_closed();
}

/// A message as [`session`] reads it.
fn wire(request: u32, need_reply: bool, payload: &[u8], fds: u8) -> Vec<u8> {
    let message = Message::request(request, need_reply, payload.to_vec());
    [vec![fds], message.encode()].concat()
}

/// Negotiates acknowledgements, so that refusals do not close the connection.
fn acknowledge() -> Vec<u8> {
    wire(id::SET_PROTOCOL_FEATURES, false, &protocol_feature::IMPLEMENTED.to_le_bytes(), 0)
}

/// The messages that start a ring.
fn start_ring(ring: u32) -> Vec<u8> {
    let with = |word: u32| [ring, word].map(u32::to_le_bytes).concat();
    let address = [1u64 << 20, 1 << 20, 1 << 20, 9].map(u64::to_le_bytes).concat();
    [
        wire(id::SET_FEATURES, true, &0x1_7000_7e44u64.to_le_bytes(), 0),
        wire(id::SET_VRING_NUM, true, &with(128), 0),
        wire(id::SET_VRING_ADDR, true, &[with(0), address].concat(), 0),
        wire(id::SET_VRING_KICK, true, &u64::from(ring).to_le_bytes(), 1),
        wire(id::SET_VRING_ENABLE, true, &with(1), 0),
    ]
    .concat()
}

/// Two rings start; one stops again; then a reset.
fn message_seeds() -> Vec<Vec<u8>> {
    let region = [0u64, 0, 1 << 20, 1 << 20, 0].map(u64::to_le_bytes).concat();
    let inflight = [&[0; 16][..], &[3u16, 128, 0, 0].map(u16::to_le_bytes).concat()].concat();
    let table = [&[1u32, 0].map(u32::to_le_bytes).concat(), &region[8..]].concat();
    let whole = [
        acknowledge(),
        wire(id::GET_INFLIGHT_FD, false, &inflight, 0),
        wire(id::ADD_MEM_REG, true, &region, 1),
        wire(id::SET_BACKEND_REQ_FD, true, &[], 1),
        start_ring(0),
        start_ring(1),
        wire(id::SET_LOG_BASE, false, &[4096u64, 0].map(u64::to_le_bytes).concat(), 1),
        wire(id::SET_MEM_TABLE, true, &table, 1),
        wire(id::GET_VRING_BASE, false, &[0; 8], 0),
        wire(id::RESET_DEVICE, true, &[], 0),
    ];
    vec![[vec![255], whole.concat()].concat(), [vec![3], whole.concat()].concat()]
}

/// The sessions after each message of the other seeds, as fields and as whole documents.
fn handover_seeds() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    run(&message_seeds()[0], |state, _| {
        let document = state.encode();
        let fields = &document[16..document.len() - 4];
        seeds.push([&[0], fields].concat());
        seeds.push([&[1], &document[..]].concat());
    });
    seeds.dedup();
    seeds
}

/// A launcher's side of a connection: pieces of a front end's bytes, and packets of a node, in any
/// order.
///
/// # Panics
/// If the front end gets a reply that no commit gave, or the node gets anything but whole messages,
/// one at a time, and descriptors of its own session.
pub fn keeper(data: &[u8]) {
    let descriptors = Descriptors::new();
    let mut keeper = Keeper::new(1);
    let mut data = Reader::new(data);
    let mut due = Vec::new();
    while let (Some(choice), Some(count)) = (data.u8(), data.u8().map(usize::from)) {
        let bytes = data.take(count.min(data.len())).unwrap_or_default();
        match choice % 8 {
            0..3 => {
                let Some(wanted) = keeper.wanted() else {
                    assert!(keeper.is_open() || keeper.reply().is_some());
                    continue;
                };
                let piece = &bytes[..bytes.len().min(wanted)];
                if keeper.push(piece, descriptors.take(usize::from(choice / 64))).is_err() {
                    return;
                }
            }
            // Any packet.
            3 => match FromNode::decode(bytes) {
                Some(packet) => {
                    assert_eq!(FromNode::decode(&packet.encode()).as_ref(), Some(&packet));
                    let (was_open, before) = (keeper.is_open(), keeper.export().0);
                    let taken = keeper.take(bytes, Vec::new());
                    match (packet, taken) {
                        (_, Err(_)) => assert_eq!(keeper.export().0, before),
                        (FromNode::Commit { reply, .. }, Ok(Taken::Released(_))) if was_open => {
                            assert!(!keeper.is_open() && due.is_empty());
                            due = reply;
                        }
                        (FromNode::State(_), Ok(Taken::Released(_))) => {
                            assert_eq!(keeper.is_open(), was_open);
                        }
                        (FromNode::Close, Ok(Taken::Close)) => return,
                        other => panic!("{other:?}"),
                    }
                }
                None => assert!(keeper.take(bytes, Vec::new()).is_err()),
            },
            // A commit of the open message that keeps some of the descriptors.
            4 | 5 => {
                let state = keeper.export().0;
                let kept =
                    state.kept.iter().zip(0..).filter(|(_, nth)| choice >> (nth % 8) & 1 == 1);
                let numbers: Vec<u32> = kept.map(|(number, _)| *number).take(LIVE_MAX).collect();
                let count = numbers.len();
                let snapshot = Snapshot { document: bytes.to_vec(), numbers };
                let packet = FromNode::Commit { snapshot, reply: bytes.to_vec() }.encode();
                let taken = keeper.take(&packet, Vec::new());
                assert_eq!(taken.is_ok(), state.open.is_some());
                if taken.is_ok() {
                    due = bytes.to_vec();
                    assert_eq!(keeper.export().0.kept.len(), count);
                }
            }
            6 => {
                if let Some((reply, _)) = keeper.reply() {
                    assert_eq!(reply, due);
                    let count = count.min(due.len());
                    drop(keeper.sent(count));
                    due.drain(..count);
                }
                assert_eq!(keeper.reply().is_some(), !due.is_empty());
            }
            // Another program.
            _ => {
                let (state, own) = keeper.export();
                let own = own.iter().map(|fd| fd.try_clone_to_owned().expect("a descriptor"));
                let again = Keeper::import(state.clone(), own.collect()).expect("the same");
                assert_eq!(again.export().0, state);
                keeper = again;
            }
        }
        if let Some((packet, fds)) = keeper.message() {
            let Some(FromLauncher::Message { bytes, .. }) = FromLauncher::decode(&packet) else {
                panic!("no message");
            };
            assert!(fds.len() <= DESCRIPTORS_MAX);
            let size = u32::from_le_bytes(bytes[8..12].try_into().expect("four bytes"));
            assert_eq!(bytes.len(), HEADER_BYTES + size as usize);
        }
        let mut there = Vec::new();
        for (packet, fds) in keeper.opening() {
            match FromLauncher::decode(&packet) {
                Some(FromLauncher::Descriptors(numbers)) => {
                    assert_eq!(numbers.len(), fds.len());
                    there.extend(numbers);
                }
                Some(FromLauncher::Session { snapshot, .. }) => assert_eq!(snapshot.numbers, there),
                other => panic!("{other:?}"),
            }
        }
    }
}

/// Seeds for [`keeper`]: messages, commits and replies in turn.
pub fn keeper_seeds() -> Vec<Vec<u8>> {
    let message = |descriptors: u8, payload: u8| {
        let mut bytes = vec![descriptors << 6, 12, 1, 0, 0, 0, 1, 0, 0, 0, payload, 0, 0, 0];
        bytes.extend([0, payload]);
        bytes.extend(std::iter::repeat_n(7, payload.into()));
        bytes
    };
    let (commit, reply, state) = ([252, 3, 1, 2, 3], [6, 2], [7, 0]);
    let done = |message: Vec<u8>| [&message[..], &state, &commit, &state, &reply, &[6, 1]].concat();
    let turns = [done(message(0, 0)), done(message(2, 8)), done(message(3, 40))];
    vec![turns.concat(), turns[1].clone(), [&turns[2][..], &turns[1], &[3, 4, 6, 0, 0, 0]].concat()]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    /// Numbers with a meaning in some message.
    fn number() -> impl Strategy<Value = u64> {
        prop_oneof![
            0u64..4,
            Just(128),
            Just(0x1000),
            (0u64..12).prop_map(|i| i << 20),
            (0u32..64).prop_map(|bit| 1 << bit),
            Just(0x1_7400_7e44),
            Just(0x1_7000_7e44),
            Just(0x5_7000_7e44),
            Just(0xb22b),
            any::<u64>(),
        ]
    }

    fn words(count: usize) -> impl Strategy<Value = Vec<u8>> {
        vec(number(), count)
            .prop_map(|words| words.iter().flat_map(|word| (*word as u32).to_le_bytes()).collect())
    }

    fn longs(count: usize) -> impl Strategy<Value = Vec<u8>> {
        vec(number(), count)
            .prop_map(|longs| longs.iter().flat_map(|long| long.to_le_bytes()).collect())
    }

    fn ring() -> impl Strategy<Value = u32> {
        prop_oneof![20 => 0u32..3, 1 => any::<u32>()]
    }

    fn ring_and(rest: impl Strategy<Value = u32>) -> impl Strategy<Value = Vec<u8>> {
        (ring(), rest).prop_map(|(ring, rest)| [ring, rest].map(u32::to_le_bytes).concat())
    }

    fn vring() -> impl Strategy<Value = (Vec<u8>, u8)> {
        (ring(), any::<bool>()).prop_map(|(ring, none)| {
            ((u64::from(ring) | u64::from(none) << 8).to_le_bytes().to_vec(), u8::from(!none))
        })
    }

    fn region() -> impl Strategy<Value = [u64; 4]> {
        (0u64..12).prop_map(|i| [i << 20, 1 << 20, i << 20, 0])
    }

    fn table() -> impl Strategy<Value = (Vec<u8>, u8)> {
        vec(region(), 0..9).prop_map(|regions| {
            let mut bytes = [regions.len() as u32, 0].map(u32::to_le_bytes).concat();
            bytes.extend(regions.concat().into_iter().flat_map(u64::to_le_bytes));
            (bytes, regions.len() as u8)
        })
    }

    fn with(fds: u8) -> impl Fn(Vec<u8>) -> (Vec<u8>, u8) {
        move |payload| (payload, fds)
    }

    /// The messages that start a ring.
    fn start() -> impl Strategy<Value = Vec<u8>> {
        (0u32..3).prop_map(start_ring)
    }

    /// A message as [`session`] reads it, mostly a valid one; or the five that start a ring.
    fn message() -> impl Strategy<Value = Vec<u8>> {
        prop_oneof![1 => start(), 9 => single()]
    }

    fn single() -> impl Strategy<Value = Vec<u8>> {
        let inflight = (1u16..5, 1u16..300).prop_map(|(queues, size)| {
            let mut bytes = [4096u64, 0].map(u64::to_le_bytes).concat();
            bytes.extend([queues, size, 0, 0].map(u16::to_le_bytes).concat());
            bytes
        });
        let one_region = || {
            region().prop_map(|region| {
                [0].iter().chain(&region).flat_map(|long| long.to_le_bytes()).collect::<Vec<u8>>()
            })
        };
        let acknowledged =
            prop_oneof![Just(0x1_7000_7e44u64), Just(0x5_7400_7e44), Just(0x1_4000_0044), Just(0)];
        let features = acknowledged.prop_map(|bits| bits.to_le_bytes().to_vec());
        let protocol = Just(0xb22bu64.to_le_bytes().to_vec());
        let address = (ring(), 0u32..2, longs(4)).prop_map(|(ring, flags, rest)| {
            [[ring, flags].map(u32::to_le_bytes).concat(), rest].concat()
        });
        let fixed_address = (ring(), 0u32..2).prop_map(|(ring, flags)| {
            let mut bytes = [ring, flags].map(u32::to_le_bytes).concat();
            bytes.extend([1u64 << 20, 1 << 20, 1 << 20, 9].map(u64::to_le_bytes).concat());
            bytes
        });
        let config = (words(3), 0u8..2).prop_map(|(words, value)| [words, vec![value]].concat());
        let cache = (0u8..2)
            .prop_map(|on| [[32u32, 1, 0].map(u32::to_le_bytes).concat(), vec![on]].concat());
        let id = |id: u32| move |(payload, fds): (Vec<u8>, u8)| (id, payload, fds);
        let none = || Just((Vec::new(), 0u8));
        let sensible = prop_oneof![
            4 => features.prop_map(with(0)).prop_map(id(2)),
            2 => protocol.prop_map(with(0)).prop_map(id(16)),
            1 => table().prop_map(id(5)),
            1 => longs(2).prop_map(with(1)).prop_map(id(6)),
            1 => none().prop_map(|_| (7, Vec::new(), 1)),
            6 => ring_and(1u32..300).prop_map(with(0)).prop_map(id(8)),
            2 => address.prop_map(with(0)).prop_map(id(9)),
            8 => fixed_address.prop_map(with(0)).prop_map(id(9)),
            2 => ring_and(0u32..66000).prop_map(with(0)).prop_map(id(10)),
            3 => ring_and(Just(0)).prop_map(with(0)).prop_map(id(11)),
            8 => vring().prop_map(id(12)),
            2 => vring().prop_map(id(13)),
            2 => vring().prop_map(id(14)),
            8 => ring_and(0u32..2).prop_map(with(0)).prop_map(id(18)),
            1 => none().prop_map(|_| (21, Vec::new(), 1)),
            1 => words(3).prop_map(with(0)).prop_map(id(24)),
            1 => config.prop_map(with(0)).prop_map(id(25)),
            1 => cache.prop_map(with(0)).prop_map(id(25)),
            1 => inflight.clone().prop_map(with(0)).prop_map(id(31)),
            1 => inflight.prop_map(with(1)).prop_map(id(32)),
            1 => none().prop_map(id(34)),
            3 => one_region().prop_map(with(1)).prop_map(id(37)),
            2 => one_region().prop_map(with(0)).prop_map(id(38)),
            1 => (30u32..50, vec(any::<u8>(), 0..40), 0u8..40),
        ];
        (sensible, prop_oneof![60 => Just(9u32), 8 => Just(1), 1 => any::<u32>()]).prop_map(
            |((request, payload, fds), flags)| {
                [vec![fds], Message { request, flags, payload }.encode()].concat()
            },
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn sessions_survive_messages_in_any_order(
            step: u8,
            messages in vec(message(), 0..60),
        ) {
            session(&[vec![step], acknowledge(), messages.concat()].concat());
        }

        #[test]
        fn sessions_survive_noise(noise in vec(any::<u8>(), 0..300)) {
            session(&noise);
            handover(&noise);
        }
    }

    #[test]
    fn the_strategy_reaches_every_action() {
        use proptest::strategy::ValueTree;
        use proptest::test_runner::TestRunner;
        let mut runner = TestRunner::deterministic();
        let mut reached = std::collections::BTreeSet::new();
        for _ in 0..200 {
            let messages = vec(message(), 40).new_tree(&mut runner).expect("a value").current();
            run(&[vec![255], acknowledge(), messages.concat()].concat(), |_, names| {
                reached.extend(names.iter().cloned());
            });
        }
        let expected = [
            "AddRegion",
            "BackendChannel",
            "Call",
            "CreateInflight",
            "DropInflight",
            "EnableRing",
            "Err",
            "FeaturesChanged",
            "Inflight",
            "Kick",
            "Log",
            "LogSignal",
            "RemoveRegion",
            "ReplaceMemory",
            "Reply",
            "RingLog",
            "StartRing",
            "StopRing",
            "WriteCache",
        ];
        assert_eq!(reached.into_iter().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn mutated_seeds_break_no_promise() {
        for (name, run, seeds) in TARGETS {
            let seeds = seeds();
            assert!(!seeds.is_empty(), "{name}");
            for seed in &seeds {
                run(seed);
                for at in 0..seed.len() {
                    run(&seed[..at]);
                    let mut mutated = seed.clone();
                    mutated[at] ^= 1 << (at % 8);
                    run(&mutated);
                }
            }
        }
    }
}
