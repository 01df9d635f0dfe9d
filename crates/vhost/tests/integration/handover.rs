//! A disk's state survives encoding and decoding, and has one form only. Anything else is refused
//! with its reason.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

use vhost::config::{Config, feature};
use vhost::handover::{
    ConnectionState, DiskState, HandoverError, InFlight, KeptState, MirrorState, Role, SessionState,
};
use vhost::message::{InflightInfo, LogInfo, RegionInfo, RingAddresses};
use vhost::ring_state::{Kick, Ring, RingProgress, RingState};
use vhost::session::{Action, Offer, Session};

const LINUX: u64 = 0x1_7000_7e44;

fn config() -> Config {
    Config {
        capacity_sectors: 2048,
        segments_max: 126,
        segment_bytes_max: 4 << 20,
        block_size: 512,
        physical_block_size: 512,
        min_io_bytes: 0,
        opt_io_bytes: 0,
        write_cache: true,
        read_only: false,
        queues: 3,
        discard: None,
        discard_alignment_sectors: 0,
        write_zeroes: None,
        write_zeroes_may_unmap: false,
    }
}

fn offer() -> Offer {
    let features = LINUX | feature::LOG_ALL | feature::RING_PACKED;
    Offer { features, ..Offer::new(config()) }
}

/// A disk in the middle of everything: the first ring runs, the second is paused and broken, the
/// third was never used.
fn disk() -> DiskState {
    let ring = Ring {
        size: 128,
        base: 7,
        addresses: Some(RingAddresses { desc: 0x7f00_1000, used: 0x7f00_3000, avail: 0x7f00_2000 }),
        log: Some(0x3000),
        enabled: true,
        kick: Kick::Descriptor,
        call: true,
        err: true,
        state: RingState::Running,
    };
    let paused = Ring {
        enabled: false,
        kick: Kick::Polling,
        log: None,
        err: false,
        state: RingState::Paused,
        ..ring
    };
    let unused = Ring { call: true, ..Ring::default() };
    let progress = RingProgress {
        next_avail: 0x1234,
        next_used: 0x1230,
        signalled_used: 0x122f,
        ..RingProgress::default()
    };
    let broken = RingProgress { broken: true, ..progress };
    let region = |i: u64| RegionInfo {
        guest_addr: i << 30,
        size: 1 << 30,
        user_addr: 0x7f00_0000 + (i << 30),
        mmap_offset: i << 30,
    };
    let session = SessionState {
        features: Some(LINUX | feature::LOG_ALL),
        protocol_features: 0xb22b,
        owned: true,
        write_cache: true,
        regions: vec![region(0), region(4)],
        inflight: Some(InflightInfo {
            mmap_size: 6336,
            mmap_offset: 0,
            queues: 3,
            queue_size: 128,
        }),
        log: Some(LogInfo { mmap_size: 0x8000, mmap_offset: 0x1000 }),
        log_signal: true,
        backend_channel: true,
        rings: vec![(ring, Some(progress)), (paused, Some(broken)), (unused, None)],
    };
    DiskState {
        name: "vm1".into(),
        capacity_sectors: 2048,
        resize_epoch: 3,
        statistics: vec![("reads".into(), 12), ("writes".into(), u64::MAX)],
        limits: vec![("iops".into(), 100)],
        mirror: Some(MirrorState { granule_bytes: 65536, bits: 16 }),
        listening: true,
        flush_failed: false,
        withheld: false,
        in_flight: None,
        connection: Some(ConnectionState {
            session,
            partial: vec![12, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0, 1],
            partial_descriptors: 1,
            unsent: Vec::new(),
            unsent_descriptor: false,
            kept: None,
        }),
    }
}

fn descriptors(count: usize) -> Vec<OwnedFd> {
    let (socket, _) = UnixStream::pair().unwrap();
    (0..count).map(|_| socket.try_clone().unwrap().into()).collect()
}

/// The document with other bytes in it, and the checksum that goes with them.
fn edited(edit: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut bytes = disk().encode();
    bytes.truncate(bytes.len() - 4);
    edit(&mut bytes);
    sealed(bytes)
}

fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    let length = (bytes.len() - 16) as u32;
    bytes[12..16].copy_from_slice(&length.to_le_bytes());
    bytes.extend(crc32c(&bytes).to_le_bytes());
    bytes
}

/// Computed bit by bit, as the format page defines it, without the library that the code uses.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |mut crc, byte| {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = crc >> 1 ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 };
        }
        crc
    })
}

/// The offset of a field with this tag.
fn field(bytes: &[u8], tag: u16) -> usize {
    let mut at = 16;
    while bytes[at..at + 2] != tag.to_le_bytes() {
        let length = u32::from_le_bytes(bytes[at + 2..at + 6].try_into().unwrap());
        at += 6 + length as usize;
    }
    at
}

#[test]
fn a_disk_in_the_middle_of_everything_survives() {
    let state = disk();
    assert_eq!(DiskState::decode(&state.encode()), Ok(state));
    let bare = DiskState { name: "x".into(), ..DiskState::default() };
    assert_eq!(DiskState::decode(&bare.encode()), Ok(bare));
}

#[test]
fn the_bytes_are_those_of_the_format_page() {
    // docs/formats/handover.md has these bytes as its example.
    let state = DiskState {
        name: "vm1".into(),
        capacity_sectors: 2048,
        resize_epoch: 3,
        listening: true,
        ..DiskState::default()
    };
    let bytes = [
        &b"MRvhost\n"[..],
        &[1, 0, 0, 0],
        &[37, 0, 0, 0],
        &[1, 0, 21, 0, 0, 0],
        &[3, b'v', b'm', b'1', 0, 8, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 1],
        &[11, 0, 4, 0, 0, 0],
        &[1, 0, 0, 0],
    ]
    .concat();
    assert_eq!(state.encode(), sealed(bytes));
}

#[test]
fn descriptors_are_listed_and_assigned_in_their_order() {
    let state = disk();
    let roles = [
        Role::Listener,
        Role::Connection,
        Role::Mirror,
        Role::Memory(0),
        Role::Memory(1),
        Role::Inflight,
        Role::Log,
        Role::LogSignal,
        Role::BackendChannel,
        Role::Kick(0),
        Role::Call(0),
        Role::Err(0),
        Role::Call(1),
        Role::Call(2),
        Role::Partial(0),
    ];
    assert_eq!(state.roles(), roles);
    let assigned = state.assign(descriptors(15)).unwrap();
    assert!(assigned.listener.is_some() && assigned.connection.is_some());
    assert!(assigned.mirror.is_some());
    assert_eq!((assigned.session.len(), assigned.partial.len()), (11, 1));
    assert_eq!(
        state.assign(descriptors(14)).unwrap_err(),
        HandoverError::Descriptors { expected: 15, found: 14 }
    );
}

#[test]
fn unsent_replies_are_handed_over() {
    let with = |unsent: Vec<u8>, unsent_descriptor: bool| {
        let mut state = disk();
        let connection = state.connection.as_mut().unwrap();
        (connection.unsent, connection.unsent_descriptor) = (unsent, unsent_descriptor);
        state
    };
    for there in [false, true] {
        let state = with(vec![1, 2, 3], there);
        assert_eq!(DiskState::decode(&state.encode()), Ok(state.clone()));
        assert_eq!(state.roles().last() == Some(&Role::Unsent), there);
        let assigned = state.assign(descriptors(15 + usize::from(there))).unwrap();
        assert_eq!((assigned.unsent.is_some(), assigned.partial.len()), (there, 1));
    }
    // No front end is owed this much, and no descriptor goes without a byte.
    let long = with(vec![0; 1 << 16], false);
    let reason = "more than a reply";
    let error = HandoverError::Field { field: 13, reason };
    assert_eq!(DiskState::decode(&long.encode()), Err(error));
    assert!(DiskState::decode(&edited(|b| b.extend([13, 0, 1, 0, 0, 0, 0]))).is_err());
    let bytes = with(vec![1, 2, 3], true).encode();
    let fewer = edited(|b| {
        *b = bytes[..bytes.len() - 4].to_vec();
        let at = b.len() - 4;
        b[at] = 0;
    });
    let reason = "not the descriptors that belong to the state";
    let error = HandoverError::Field { field: 11, reason };
    assert_eq!(DiskState::decode(&fewer), Err(error));
}

#[test]
fn operations_in_flight_are_handed_over_with_an_in_flight_region() {
    for flushes in [false, true] {
        let in_flight = Some(InFlight { flushes });
        let state = DiskState { in_flight, ..disk() };
        assert_eq!(DiskState::decode(&state.encode()), Ok(state));
    }
    let reason = "no in-flight region records it";
    let error = HandoverError::Field { field: 14, reason };
    let mut state = DiskState { in_flight: Some(InFlight::default()), ..disk() };
    state.connection.as_mut().unwrap().session.inflight = None;
    assert_eq!(DiskState::decode(&state.encode()), Err(error));
    state.connection = None;
    assert_eq!(DiskState::decode(&state.encode()), Err(error));
    let no_bool = edited(|b| b.extend([14, 0, 1, 0, 0, 0, 2]));
    assert!(DiskState::decode(&no_bool).is_err());
}

#[test]
fn an_imported_session_continues() {
    let state = disk().connection.unwrap().session;
    let fds = descriptors(state.roles().len());
    let (session, actions) = Session::import(offer(), &state, fds).unwrap();
    let told: Vec<String> = actions
        .iter()
        .map(|action| match action {
            Action::FeaturesChanged => "features".into(),
            Action::WriteCache(on) => format!("write cache {on}"),
            Action::ReplaceMemory(regions) => format!("{} regions", regions.len()),
            Action::Inflight(area, _) => format!("inflight {}", area.mmap_size),
            Action::Log(area, _) => format!("log {}", area.mmap_size),
            Action::LogSignal(_) => "log signal".into(),
            Action::BackendChannel(_) => "backend channel".into(),
            Action::Kick(ring, _) => format!("kick {ring}"),
            Action::Call(ring, _) => format!("call {ring}"),
            Action::Err(ring, _) => format!("err {ring}"),
            Action::StartRing(ring) => format!("start {ring}"),
            Action::EnableRing(ring, on) => format!("enable {ring} {on}"),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(
        told,
        [
            "features",
            "write cache true",
            "2 regions",
            "inflight 6336",
            "log 32768",
            "log signal",
            "backend channel",
            "kick 0",
            "call 0",
            "err 0",
            "call 1",
            "call 2",
            "start 0",
            "start 1",
            "enable 1 false"
        ]
    );
    assert!(session.logging() && session.write_cache());
    let progress = |ring: u16| state.rings[usize::from(ring)].1.unwrap();
    assert_eq!(session.export(progress), Some(state.clone()));
    assert_eq!(progress(0).base(false), 0x1234);
}

#[test]
fn a_disk_that_differs_here_is_refused() {
    let state = disk().connection.unwrap().session;
    let import = |offer: Offer, state: &SessionState, missing: usize| {
        Session::import(offer, state, descriptors(state.roles().len() - missing)).unwrap_err()
    };
    let fewer = Offer { features: LINUX, ..offer() };
    let bits = feature::LOG_ALL;
    assert_eq!(import(fewer, &state, 0), HandoverError::NotOffered { bits });
    let fewer = Offer { protocol_features: 0xb22a, ..offer() };
    assert_eq!(import(fewer, &state, 0), HandoverError::NotOffered { bits: 1 });
    let other = Offer { config: Config { queues: 4, ..config() }, ..offer() };
    assert_eq!(import(other, &state, 0), HandoverError::Rings { expected: 4, found: 3 });
    let small = Offer { memory_regions_max: 1, ..offer() };
    assert_eq!(import(small, &state, 0), HandoverError::Regions);
    assert_eq!(import(offer(), &state, 1), HandoverError::Descriptors { expected: 11, found: 10 });
}

#[test]
fn invalid_documents_are_refused_with_their_reason() {
    let good = disk().encode();
    assert_eq!(DiskState::decode(b"MRvhost"), Err(HandoverError::Magic));
    assert_eq!(DiskState::decode(b"RIFF    WAVE"), Err(HandoverError::Magic));
    for cut in 8..good.len() {
        let error = DiskState::decode(&good[..cut]).unwrap_err();
        assert_eq!(error, HandoverError::Length { found: cut });
    }
    let longer = [&good[..], &[0]].concat();
    let found = longer.len();
    assert_eq!(DiskState::decode(&longer), Err(HandoverError::Length { found }));
    for bit in 16 * 8..good.len() * 8 {
        let mut flipped = good.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(DiskState::decode(&flipped), Err(HandoverError::Checksum));
    }
    // A later version is named, whatever follows it.
    assert_eq!(DiskState::decode(&edited(|b| b[8] = 2)), Err(HandoverError::Version(2)));
    let huge = edited(|b| b.resize(1 << 20, 0));
    assert_eq!(DiskState::decode(&huge), Err(HandoverError::Length { found: huge.len() }));
}

#[test]
fn unknown_repeated_and_missing_fields_are_refused() {
    let unknown = edited(|b| b.extend([17, 0, 1, 0, 0, 0, 9]));
    assert_eq!(DiskState::decode(&unknown), Err(HandoverError::UnknownField(17)));
    let failed = edited(|b| b.extend([12, 0, 0, 0, 0, 0]));
    assert_eq!(DiskState::decode(&failed), Ok(DiskState { flush_failed: true, ..disk() }));
    let withheld = edited(|b| b.extend([16, 0, 0, 0, 0, 0]));
    assert_eq!(DiskState::decode(&withheld), Ok(DiskState { withheld: true, ..disk() }));
    let longer = edited(|b| b.extend([12, 0, 1, 0, 0, 0, 9]));
    let error = HandoverError::Field { field: 12, reason: "malformed" };
    assert_eq!(DiskState::decode(&longer), Err(error));
    let unknown = edited(|b| b.extend([0; 6]));
    assert_eq!(DiskState::decode(&unknown), Err(HandoverError::UnknownField(0)));
    for tag in 1..=11 {
        let repeated = edited(|b| {
            let at = field(b, tag);
            let length = u32::from_le_bytes(b[at + 2..at + 6].try_into().unwrap()) as usize;
            let again = b[at..at + 6 + length].to_vec();
            b.extend(again);
        });
        let error = HandoverError::Field { field: tag, reason: "repeated" };
        assert_eq!(DiskState::decode(&repeated), Err(error));
        let missing = edited(|b| {
            let at = field(b, tag);
            let length = u32::from_le_bytes(b[at + 2..at + 6].try_into().unwrap()) as usize;
            b.drain(at..at + 6 + length);
        });
        // Some fields are optional, but without them there are too many descriptors, or fields that
        // need them are incomplete.
        match tag {
            2 | 3 => assert!(DiskState::decode(&missing).is_ok()),
            _ => assert!(DiskState::decode(&missing).is_err(), "without field {tag}"),
        }
    }
    let cut = edited(|b| b.extend([2, 0, 200, 0, 0, 0]));
    let error = HandoverError::Field { field: 0, reason: "cut short" };
    assert_eq!(DiskState::decode(&cut), Err(error));
}

#[test]
fn fields_in_another_order_are_refused() {
    let swapped = edited(|b| {
        let (from, to) = (field(b, 2), field(b, 3));
        let statistics: Vec<u8> = b.drain(from..to).collect();
        let at = field(b, 4);
        b.splice(at..at, statistics);
    });
    assert_eq!(DiskState::decode(&swapped), Err(HandoverError::NotCanonical));
}

#[test]
fn impossible_states_are_refused() {
    type Edit = fn(&mut SessionState);
    let edits: [(u16, Edit); 15] = [
        (6, |s| s.regions[1].guest_addr = 0),
        (6, |s| s.regions[0].size = 0),
        (6, |s| s.regions[0].user_addr = u64::MAX),
        (7, |s| s.inflight.as_mut().unwrap().queue_size = 0),
        (7, |s| s.inflight.as_mut().unwrap().queues = 257),
        (8, |s| s.log.as_mut().unwrap().mmap_offset = u64::MAX),
        (9, |s| s.rings.clear()),
        (9, |s| s.rings[0].0.size = 0),
        (9, |s| s.rings[0].0.size = 32769),
        (9, |s| s.rings[0].0.addresses = None),
        (9, |s| s.rings[0].0.enabled = false),
        (9, |s| s.rings[1].0.enabled = true),
        (9, |s| s.features = None),
        (9, |s| s.rings[0].1.as_mut().unwrap().used_wrap = true),
        (9, |s| {
            s.features = s.features.map(|bits| bits | feature::RING_PACKED);
            s.rings[0].1.as_mut().unwrap().next_used = 32768;
        }),
    ];
    for (i, (expected, edit)) in edits.into_iter().enumerate() {
        let mut state = disk();
        edit(&mut state.connection.as_mut().unwrap().session);
        let result = DiskState::decode(&state.encode());
        let Err(HandoverError::Field { field, .. }) = result else {
            panic!("edit {i}: {result:?}");
        };
        assert_eq!(field, expected, "edit {i}: {result:?}");
    }
    let mirror = Some(MirrorState { granule_bytes: 3, bits: 1 });
    let state = DiskState { mirror, ..disk() };
    assert!(matches!(
        DiskState::decode(&state.encode()),
        Err(HandoverError::Field { field: 4, .. })
    ));
}

#[test]
fn a_session_with_a_reply_due_is_not_exported() {
    let mut session = Session::new(offer());
    let asked = vhost::message::Message::request(
        31,
        false,
        [&[0; 16][..], &[3, 0, 128, 0, 0, 0, 0, 0]].concat(),
    );
    session.handle(&asked, Vec::new()).unwrap();
    assert_eq!(session.export(|_| RingProgress::default()), None);
}

fn ring() -> impl Strategy<Value = (Ring, Option<RingProgress>)> {
    let addresses =
        any::<[u64; 3]>().prop_map(|[desc, used, avail]| RingAddresses { desc, used, avail });
    let kick = prop_oneof![Just(Kick::Unset), Just(Kick::Polling), Just(Kick::Descriptor)];
    let known = (0u16..=32768, any::<u32>(), option::of(addresses), option::of(any::<u64>()), kick);
    let flags = any::<[bool; 4]>();
    let progress = (0u16..32768, 0u16..32768, any::<u16>(), any::<[bool; 3]>());
    (known, flags, progress).prop_map(
        |((size, base, addresses, log, kick), [enabled, call, err, paused], progress)| {
            let complete = size > 0 && addresses.is_some() && kick != Kick::Unset;
            let state = match (complete, enabled) {
                (true, true) => RingState::Running,
                (true, false) if paused => RingState::Paused,
                _ => RingState::Idle,
            };
            let log = log.filter(|_| addresses.is_some());
            let ring = Ring { size, base, addresses, log, enabled, kick, call, err, state };
            let (next_avail, next_used, signalled_used, [avail_wrap, used_wrap, broken]) = progress;
            let progress = RingProgress {
                next_avail,
                avail_wrap,
                next_used,
                used_wrap,
                signalled_used,
                broken,
            };
            (ring, (state != RingState::Idle).then_some(progress))
        },
    )
}

fn session() -> impl Strategy<Value = SessionState> {
    let regions = (0u64..20, any::<u32>()).prop_map(|(count, offset)| {
        let region = |i: u64| RegionInfo {
            guest_addr: i << 20,
            size: 1 << 20,
            user_addr: (i << 20) + u64::from(offset),
            mmap_offset: offset.into(),
        };
        (0..count).map(region).collect::<Vec<_>>()
    });
    let area = (1u64..1 << 40, 0u64..1 << 40);
    let inflight = (area.clone(), 1u16..=256, 1u16..=32768).prop_map(
        |((mmap_size, mmap_offset), queues, queue_size)| InflightInfo {
            mmap_size,
            mmap_offset,
            queues,
            queue_size,
        },
    );
    let log = area.prop_map(|(mmap_size, mmap_offset)| LogInfo { mmap_size, mmap_offset });
    let parts = (regions, option::of(inflight), option::of(log), vec(ring(), 1..9));
    (any::<[u64; 2]>(), any::<[bool; 4]>(), parts).prop_map(
        |([features, protocol_features], flags, (regions, inflight, log, rings))| SessionState {
            features: Some(features | feature::PROTOCOL_FEATURES | feature::RING_PACKED),
            protocol_features,
            owned: flags[0],
            write_cache: flags[1],
            regions,
            inflight,
            log,
            log_signal: flags[2],
            backend_channel: flags[3],
            rings,
        },
    )
}

fn any_disk() -> impl Strategy<Value = DiskState> {
    let numbers = || vec(("[a-zä]{0,40}", any::<u64>()), 0..9);
    let mirror = (0u32..64, any::<u64>())
        .prop_map(|(shift, bits)| MirrorState { granule_bytes: 1 << shift, bits });
    let unsent = (vec(any::<u8>(), 0..40), any::<bool>());
    let counted = |session: &SessionState| (7..).take(session.roles().len()).collect();
    let kept = option::of(any::<u32>());
    let connection = (session(), vec(any::<u8>(), 0..300), 0u16..=32, unsent, kept).prop_map(
        move |(session, partial, partial_descriptors, (unsent, unsent_descriptor), kept)| {
            let partial_descriptors = if partial.is_empty() { 0 } else { partial_descriptors };
            let unsent_descriptor = unsent_descriptor && !unsent.is_empty();
            let kept = kept.map(|pid| KeptState { pid, numbers: counted(&session) });
            let alone = kept.is_none();
            ConnectionState {
                session,
                partial: if alone { partial } else { Vec::new() },
                partial_descriptors: if alone { partial_descriptors } else { 0 },
                unsent: if alone { unsent } else { Vec::new() },
                unsent_descriptor: alone && unsent_descriptor,
                kept,
            }
        },
    );
    (
        ".{0,60}",
        any::<(u64, u64, bool, bool, bool, Option<bool>)>(),
        numbers(),
        numbers(),
        option::of(mirror),
        option::of(connection),
    )
        .prop_map(
            |(
                name,
                (capacity_sectors, resize_epoch, listening, flush_failed, withheld, flushes),
                statistics,
                limits,
                mirror,
                connection,
            )| {
                let region = |connection: &ConnectionState| connection.session.inflight.is_some();
                let known = connection.as_ref().is_some_and(region);
                DiskState {
                    name,
                    capacity_sectors,
                    resize_epoch,
                    statistics,
                    limits,
                    mirror,
                    listening,
                    flush_failed,
                    withheld,
                    in_flight: flushes.filter(|_| known).map(|flushes| InFlight { flushes }),
                    connection,
                }
            },
        )
}

#[test]
fn the_base_of_a_quiesced_ring_is_its_position() {
    for (base, packed) in [(7, false), (0xffff, false), (0x8003_0007, true), (0x0003_8001, true)] {
        let progress = RingProgress::from_base(base, packed, true);
        assert_eq!(progress.base(packed), base);
        assert!(progress.broken && progress.signalled_used == progress.next_used);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn every_state_is_read_as_it_was_written(state in any_disk()) {
        prop_assert_eq!(DiskState::decode(&state.encode()), Ok(state));
    }

    #[test]
    fn edited_documents_are_refused_or_what_they_say(
        edits in vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut fields = disk().encode();
        fields.truncate(fields.len() - 4);
        fields.drain(..16);
        for (at, value) in edits {
            let at = at.index(fields.len());
            fields[at] = value;
        }
        vhost::fuzz_message::handover(&[&[0][..], &fields].concat());
    }
}
