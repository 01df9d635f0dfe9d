//! The messages that QEMU 7.2 sends, and what each must cause: every reply byte for byte, every
//! action in order, every descriptor in its place. The front end here builds its bytes itself.

mod peer;

use vhost::config::Config;
use vhost::message::{Framer, InflightInfo, RegionInfo, Violation};
use vhost::ring_state::RingState;
use vhost::session::{Action, Offer};

use self::peer::*;

#[test]
fn a_guest_boots_through_its_bios() {
    let peer = running();
    assert!(peer.session.write_cache());
    assert!(!peer.session.logging());
    assert_eq!(peer.session.regions(), MEMORY);
    assert_eq!(peer.session.inflight().unwrap().queue_size, 128);
    assert_eq!((peer.session.counters().unknown, peer.session.counters().refused), (0, 0));
}

#[test]
fn stop_and_cont_keep_region_and_memory() {
    let mut peer = running();
    peer.stop_both([4711, 65535]);
    // The base is remembered for a front end that does not send it again.
    assert_eq!(peer.session.ring(0).base, 4711);
    peer.begin_start(LINUX, true, &[]);
    peer.start_both([4711, 65535]);
}

#[test]
fn a_reset_starts_from_zero_with_a_new_region() {
    let mut peer = running();
    peer.stop_both([900, 901]);
    peer.begin_start(BIOS, false, &[&format!("features {BIOS:#x}"), "write cache false"]);
    peer.set_up_ring(0, 128, 0);
    assert_eq!(peer.enable(0, 1), ["start 0"]);
}

#[test]
fn a_front_end_that_reconnects_brings_its_region_and_bases() {
    let mut peer = Peer::new();
    peer.realize(false);
    peer.begin_start(LINUX, true, &[&format!("features {LINUX:#x}"), "write cache true"]);
    peer.add_memory();
    peer.start_both([3203, 77]);
}

#[test]
fn a_migration_logs_at_the_source_and_starts_fresh_at_the_destination() {
    let mut source = running();
    let fd = source.next_name();
    assert_eq!(
        source.send(SET_LOG_BASE, &u64s(&[0x2000, 0]), 1),
        [format!("log 0+8192 {fd}"), reply(6, &u64s(&[0]))]
    );
    assert!(!source.session.logging());
    assert_eq!(
        source.ack().send(SET_FEATURES, &u64s(&[LINUX | LOG_ALL]), 0),
        [format!("features {:#x}", LINUX | LOG_ALL), reply(2, &u64s(&[0]))]
    );
    assert!(source.session.logging());
    for ring in 0..2 {
        assert_eq!(
            source.ack().send(SET_VRING_ADDR, &address(ring, 1), 0),
            [format!("ring log {ring} Some({})", 0x10_2000), reply(9, &u64s(&[0]))]
        );
    }
    // The log's address may be sent again, also with a request for an acknowledgement: there is
    // only one reply.
    let fd = source.next_name();
    assert_eq!(
        source.ack().send(SET_LOG_BASE, &u64s(&[0x4000, 4096]), 1),
        [format!("log 4096+16384 {fd}"), reply(6, &u64s(&[0]))]
    );
    source.stop_both([1000, 2000]);
    assert!(source.session.logging());

    let mut destination = Peer::new();
    destination.realize(true);
    destination.begin_start(LINUX, false, &[&format!("features {LINUX:#x}"), "write cache true"]);
    destination.add_memory();
    destination.start_both([1000, 2000]);
}

#[test]
fn a_cancelled_migration_stops_logging_without_touching_rings() {
    let mut peer = running();
    peer.send(SET_LOG_BASE, &u64s(&[0x2000, 0]), 1);
    peer.send(SET_FEATURES, &u64s(&[LINUX | LOG_ALL]), 0);
    peer.send(SET_VRING_ADDR, &address(0, 1), 0);
    assert_eq!(peer.send(SET_FEATURES, &u64s(&[LINUX]), 0), [format!("features {LINUX:#x}")]);
    assert_eq!(peer.send(SET_VRING_ADDR, &address(0, 0), 0), ["ring log 0 None"]);
    assert_eq!(peer.session.ring(0).state, RingState::Running);
    let fd = peer.next_name();
    assert_eq!(peer.send(SET_LOG_FD, &[], 1), [format!("log signal {fd}")]);
}

#[test]
fn memory_is_added_and_removed_under_running_rings() {
    let mut peer = running();
    let extra = RegionInfo {
        guest_addr: 0x1000_0000,
        size: 0x1000,
        user_addr: 0x7e00_0000_0000,
        mmap_offset: 0,
    };
    let words = |r: RegionInfo| u64s(&[0, r.guest_addr, r.size, r.user_addr, r.mmap_offset]);
    let fd = peer.next_name();
    assert_eq!(peer.send(ADD_MEM_REG, &words(extra), 1), [format!("add 0x10000000={fd}")]);
    // Removed with a descriptor, as older QEMUs do, and without the offset.
    let named = RegionInfo { mmap_offset: 17, ..extra };
    assert_eq!(peer.send(REM_MEM_REG, &words(named), 1), ["remove 0x10000000"]);
    assert_eq!(peer.ack().send(REM_MEM_REG, &words(extra), 0), [reply(38, &u64s(&[1]))]);
    // An overlapping region is refused and closed.
    let over = RegionInfo { guest_addr: 0xf_f000, ..extra };
    assert_eq!(peer.ack().send(ADD_MEM_REG, &words(over), 1), [reply(37, &u64s(&[1]))]);
    assert_eq!(peer.session.regions(), MEMORY);

    // A table replaces everything.
    let first = peer.watches.len() + 1;
    assert_eq!(
        peer.send(SET_MEM_TABLE, &table(&MEMORY), 2),
        [format!("memory 0x0=fd{first} 0xc0000=fd{}", first + 1)]
    );
    assert_eq!(peer.session.ring(0).state, RingState::Running);
    // The target could not map a region: it removes it and refuses.
    let message = vhost::message::Message::request(ADD_MEM_REG, true, words(extra));
    let fd = peer.descriptor();
    let mut actions = peer.session.handle(&message, vec![fd]).unwrap();
    peer.session.forget_region(&extra);
    let Some(Action::Reply(reply_now)) = actions.last_mut() else { panic!("{actions:?}") };
    assert!(reply_now.refuse());
    assert_eq!(format!("reply {:?}", reply_now.bytes), reply(37, &u64s(&[1])));
    assert_eq!(peer.session.regions(), MEMORY);
}

#[test]
fn a_table_has_at_most_eight_regions_each_with_a_descriptor() {
    let regions: Vec<RegionInfo> = (0..9)
        .map(|i| RegionInfo {
            guest_addr: i << 20,
            size: 1 << 20,
            user_addr: i << 20,
            mmap_offset: 0,
        })
        .collect();
    let mut peer = Peer::new();
    assert_eq!(peer.send(SET_MEM_TABLE, &table(&regions[..8]), 8).len(), 1);
    assert_eq!(peer.session.regions(), &regions[..8]);
    peer.held.clear();
    for (count, fds) in [(9, 9), (2, 1), (2, 3), (1, 0)] {
        let result = peer.try_send(SET_MEM_TABLE, &table(&regions[..count]), fds);
        assert!(result.is_err(), "{count} regions, {fds} descriptors");
    }
    assert_eq!(peer.open(), 0);
}

#[test]
fn regions_are_accepted_up_to_the_limit() {
    let mut peer = Peer::new();
    peer.send(SET_PROTOCOL_FEATURES, &u64s(&[PROTOCOL_FEATURES]), 0);
    for i in 0..509 {
        let payload = u64s(&[0, i << 20, 1 << 20, i << 20, 0]);
        assert_eq!(peer.send(ADD_MEM_REG, &payload, 1).len(), 1);
        peer.held.clear();
    }
    let payload = u64s(&[0, 509 << 20, 1 << 20, 509 << 20, 0]);
    assert_eq!(peer.ack().send(ADD_MEM_REG, &payload, 1), [reply(37, &u64s(&[1]))]);
    assert_eq!(peer.open(), 0);
}

#[test]
fn config_is_answered_with_exactly_the_size_asked_for() {
    let mut peer = Peer::new();
    let space = config().space(true);
    for (offset, size, sent) in
        [(0, 60, 60), (0, 57, 57), (32, 1, 1), (0, 72, 72), (0, 256, 256), (8, 8, 0), (0, 256, 8)]
    {
        let asked = [u32s(&[offset, size, 3]), vec![0; sent]].concat();
        let mut expected = space.to_vec();
        expected.resize(256, 0);
        let part = &expected[offset as usize..(offset + size) as usize];
        let answer = [&u32s(&[offset, size, 3])[..], part].concat();
        assert_eq!(peer.send(GET_CONFIG, &asked, 0), [reply(24, &answer)]);
    }
    // An invalid request is answered with an empty payload.
    for (offset, size) in [(0, 257), (256, 1), (u32::MAX, u32::MAX)] {
        assert_eq!(peer.send(GET_CONFIG, &u32s(&[offset, size, 0]), 0), [reply(24, &[])]);
    }
}

#[test]
fn only_the_write_cache_can_be_configured() {
    let mut peer = running();
    let set = |offset, flags, bytes: &[u8]| {
        [&u32s(&[offset, bytes.len() as u32, flags])[..], bytes].concat()
    };
    assert_eq!(
        peer.ack().send(SET_CONFIG, &set(32, 0, &[0]), 0),
        ["write cache false".to_string(), reply(25, &u64s(&[0]))]
    );
    assert!(!peer.session.write_cache());
    peer.quiet(SET_CONFIG, &set(32, 0, &[0]), 0);
    let asked = [u32s(&[32, 1, 0]), vec![0]].concat();
    assert_eq!(
        peer.send(GET_CONFIG, &asked, 0),
        [reply(24, &[u32s(&[32, 1, 0]), vec![0]].concat())]
    );
    for bad in [
        set(0, 0, &[0; 8]),
        set(32, 1, &[1]),
        set(32, 0, &[2]),
        set(32, 0, &[1, 1]),
        set(31, 0, &[1]),
    ] {
        assert_eq!(peer.ack().send(SET_CONFIG, &bad, 0), [reply(25, &u64s(&[1]))]);
    }
    assert_eq!(peer.send(SET_CONFIG, &set(32, 0, &[1]), 0), ["write cache true"]);

    let mut read_only = Peer::with(Offer::new(Config { read_only: true, ..config() }));
    let result = read_only.try_send(SET_CONFIG, &set(32, 0, &[1]), 0);
    assert!(matches!(result, Err(Violation::Refused { request: SET_CONFIG, .. })));
}

#[test]
fn a_ring_starts_when_its_last_parameter_is_known() {
    // Whatever comes last starts the ring, and nothing before does.
    type Step = (u32, Vec<u8>, usize);
    let steps: [Step; 5] = [
        (SET_FEATURES, u64s(&[LINUX]), 0),
        (SET_VRING_NUM, u32s(&[1, 256]), 0),
        (SET_VRING_ADDR, address(1, 0), 0),
        (SET_VRING_KICK, u64s(&[1]), 1),
        (SET_VRING_ENABLE, u32s(&[1, 1]), 0),
    ];
    for last in 0..steps.len() {
        let mut peer = Peer::new();
        let order = (1..=steps.len()).map(|i| (last + i) % steps.len());
        for i in order {
            let (request, payload, fds) = &steps[i];
            let started = peer.send(*request, payload, *fds).contains(&"start 1".to_string());
            assert_eq!(started, i == last, "step {i} where {last} comes last");
        }
    }
}

#[test]
fn without_protocol_features_rings_need_no_enabling() {
    let mut peer = Peer::new();
    peer.send(SET_FEATURES, &u64s(&[1 << 32]), 0);
    peer.quiet(SET_VRING_NUM, &u32s(&[0, 64]), 0);
    peer.quiet(SET_VRING_ADDR, &address(0, 0), 0);
    // Polling: no descriptor.
    assert_eq!(peer.send(SET_VRING_KICK, &u64s(&[0x100]), 0), ["kick 0 none", "start 0"]);
    assert_eq!(peer.send(GET_VRING_BASE, &u32s(&[0, 0]), 0), ["stop 0"]);
    let actions = peer.session.ring_stopped(0, 5);
    assert_eq!(peer.show(actions), [reply(11, &u32s(&[0, 5]))]);
    // It continues with the next kick, at its base, without anything else.
    assert_eq!(peer.send(SET_VRING_KICK, &u64s(&[0]), 1)[1], "start 0");
    assert_eq!(peer.session.ring(0).base, 5);
}

#[test]
fn the_base_of_an_idle_ring_is_answered_immediately() {
    let mut peer = Peer::new();
    assert_eq!(peer.send(GET_VRING_BASE, &u32s(&[1, 0]), 0), [reply(11, &u32s(&[1, 0]))]);
    peer.quiet(SET_VRING_BASE, &u32s(&[1, 99]), 0);
    peer.call(1);
    assert_eq!(
        peer.send(GET_VRING_BASE, &u32s(&[1, 0]), 0),
        ["call 1 none".to_string(), reply(11, &u32s(&[1, 99]))]
    );
}

#[test]
fn descriptors_of_a_running_ring_are_replaced() {
    let mut peer = running();
    peer.call(0);
    let fd = peer.next_name();
    assert_eq!(peer.send(SET_VRING_KICK, &u64s(&[0]), 1), [format!("kick 0 {fd}")]);
    assert_eq!(peer.send(SET_VRING_CALL, &u64s(&[0x100]), 0), ["call 0 none"]);
    assert_eq!(peer.send(SET_VRING_ERR, &u64s(&[0x101]), 0), ["err 1 none"]);
    // The bit and the descriptor contradict each other.
    for (value, fds) in [(0x100, 1), (0, 0), (0, 2)] {
        let result = peer.ack().send(SET_VRING_KICK, &u64s(&[value]), fds);
        assert_eq!(result, [reply(12, &u64s(&[1]))]);
    }
    assert_eq!(
        peer.try_send(SET_VRING_KICK, &u64s(&[2]), 1),
        Err(Violation::NoSuchRing { request: SET_VRING_KICK, ring: 2 })
    );
}

#[test]
fn a_running_ring_is_not_moved() {
    let mut peer = running();
    for (request, payload) in [
        (SET_VRING_NUM, u32s(&[0, 64])),
        (SET_VRING_BASE, u32s(&[0, 1])),
        (SET_VRING_ADDR, [u32s(&[0, 0]), u64s(&[0, 0, 0, 0])].concat()),
        (SET_FEATURES, u64s(&[LINUX & !(1 << 29)])),
    ] {
        assert_eq!(peer.ack().send(request, &payload, 0), [reply(request, &u64s(&[1]))]);
    }
    assert_eq!(
        peer.ack().send(SET_INFLIGHT_FD, &inflight(4224, 0, 2, 128), 1),
        [reply(32, &u64s(&[1]))]
    );
    assert_eq!(peer.session.counters().refused, 5);
    // Sending the same size again changes nothing.
    peer.quiet(SET_VRING_NUM, &u32s(&[0, 128]), 0);
}

#[test]
fn invalid_choices_of_the_guest_are_not_violations() {
    let mut peer = Peer::new();
    peer.send(SET_FEATURES, &u64s(&[LINUX]), 0);
    peer.quiet(SET_VRING_NUM, &u32s(&[0, 100]), 0);
    peer.quiet(SET_VRING_ADDR, &[u32s(&[0, 0]), u64s(&[1, 3, 5, 7])].concat(), 0);
    peer.quiet(SET_VRING_ENABLE, &u32s(&[0, 1]), 0);
    assert_eq!(peer.send(SET_VRING_KICK, &u64s(&[0]), 1)[1], "start 0");
}

#[test]
fn a_reset_device_stops_all_rings_before_it_is_acknowledged() {
    let mut peer = running();
    assert_eq!(peer.ack().send(RESET_DEVICE, &[], 0), ["stop 0", "stop 1"]);
    assert!(peer.session.is_waiting());
    let actions = peer.session.ring_stopped(1, 8);
    assert_eq!(peer.show(actions), [""; 0]);
    assert!(peer.session.is_waiting());
    let actions = peer.session.ring_stopped(0, 9);
    assert_eq!(
        peer.show(actions),
        [
            "kick 0 none".to_string(),
            "kick 1 none".to_string(),
            "drop inflight".to_string(),
            "features 0x0".to_string(),
            "write cache false".to_string(),
            reply(34, &u64s(&[0]))
        ]
    );
    assert_eq!(peer.session.regions(), MEMORY);
    assert!(peer.session.ring(0).err && peer.session.ring(0).call);
    // A following stop finds idle rings that begin at 0.
    assert_eq!(
        peer.send(GET_VRING_BASE, &u32s(&[0, 0]), 0),
        ["call 0 none".to_string(), reply(11, &u32s(&[0, 0]))]
    );
    peer.begin_start(LINUX, false, &[&format!("features {LINUX:#x}"), "write cache true"]);
    peer.start_both([0, 0]);

    // The guest's choice of the cache survives a reset: front ends show it the same cache
    // afterwards.
    let mut off = running();
    let choice = [u32s(&[32, 1, 0]), vec![0]].concat();
    assert_eq!(off.send(SET_CONFIG, &choice, 0), ["write cache false"]);
    off.send(RESET_DEVICE, &[], 0);
    for ring in [0, 1] {
        let _ = off.session.ring_stopped(ring, 0);
    }
    assert!(!off.session.is_waiting() && !off.session.announced_write_cache());

    let mut idle = Peer::new();
    idle.realize(true);
    assert_eq!(idle.ack().send(RESET_DEVICE, &[], 0), [reply(34, &u64s(&[0]))]);
    idle.quiet(RESET_DEVICE, &[], 0);
}

#[test]
fn acknowledgements_are_sent_only_when_due() {
    let mut peer = Peer::new();
    // Not negotiated yet.
    assert_eq!(peer.ack().send(SET_OWNER, &[], 0), [""; 0]);
    // Requested by the message that negotiates it.
    assert_eq!(
        peer.ack().send(SET_PROTOCOL_FEATURES, &u64s(&[PROTOCOL_FEATURES]), 0),
        [reply(16, &u64s(&[0]))]
    );
    assert_eq!(peer.ack().send(SET_OWNER, &[], 0), [reply(3, &u64s(&[0]))]);
    assert_eq!(peer.ack().send(RESET_OWNER, &[], 0), [reply(4, &u64s(&[0]))]);
    peer.quiet(RESET_OWNER, &[], 0);
    // A request with its own reply gets no acknowledgement.
    assert_eq!(peer.ack().send(GET_FEATURES, &[], 0), [reply(1, &u64s(&[FEATURES]))]);
    assert_eq!(peer.ack().send(GET_VRING_BASE, &u32s(&[0, 0]), 0).len(), 1);
}

#[test]
fn unknown_requests_are_counted_and_ignored_or_refused() {
    let mut peer = Peer::new();
    peer.quiet(SET_STATUS, &u64s(&[15]), 0);
    peer.quiet(0xffff, &[1; 4096], 3);
    assert_eq!(peer.open(), 0);
    peer.send(SET_PROTOCOL_FEATURES, &u64s(&[PROTOCOL_FEATURES]), 0);
    assert_eq!(peer.ack().send(SET_STATUS, &u64s(&[15]), 0), [reply(39, &u64s(&[1]))]);
    assert_eq!(peer.session.counters().unknown, 3);
    // The sender of a request that needs a reply would wait forever.
    assert_eq!(
        peer.ack().try_send(GET_STATUS, &[], 0),
        Err(Violation::Unanswerable { request: GET_STATUS })
    );
}

#[test]
fn bits_that_were_not_offered_are_refused() {
    let offer = Offer { protocol_features: u64::MAX, ..Offer::new(config()) };
    let mut peer = Peer::with(offer);
    assert_eq!(peer.send(GET_PROTOCOL_FEATURES, &[], 0), [reply(15, &u64s(&[PROTOCOL_FEATURES]))]);
    assert_eq!(
        peer.try_send(SET_PROTOCOL_FEATURES, &u64s(&[1 << 14 | 1]), 0),
        Err(Violation::NotOffered { request: SET_PROTOCOL_FEATURES, bits: 1 << 14 })
    );
    assert_eq!(
        peer.try_send(SET_FEATURES, &u64s(&[LINUX | 1 << 40]), 0),
        Err(Violation::NotOffered { request: SET_FEATURES, bits: 1 << 40 })
    );
}

#[test]
fn a_new_size_is_announced_on_the_backend_channel() {
    let mut peer = Peer::new();
    assert_eq!(peer.session.set_capacity(4096), None);
    peer.realize(false);
    assert_eq!(peer.session.set_capacity(8192), Some(u32s(&[2, 1, 0])));
    let asked = [u32s(&[0, 8, 0]), vec![0; 8]].concat();
    assert_eq!(
        peer.send(GET_CONFIG, &asked, 0),
        [reply(24, &[u32s(&[0, 8, 0]), u64s(&[8192])].concat())]
    );
}

#[test]
fn in_flight_regions_of_impossible_shape_close_the_connection() {
    for (queues, size) in [(0, 128), (3, 128), (2, 0), (2, 32769)] {
        let mut peer = Peer::new();
        let result = peer.try_send(GET_INFLIGHT_FD, &inflight(0, 0, queues, size), 0);
        assert!(matches!(result, Err(Violation::Refused { request: GET_INFLIGHT_FD, .. })));
    }
    for (bytes, offset, queues, size) in
        [(0, 0, 2, 128), (u64::MAX, 1, 2, 128), (4224, 0, 0, 128), (4224, 0, 2, 0)]
    {
        let mut peer = Peer::new();
        let payload = inflight(bytes, offset, queues, size);
        assert!(peer.try_send(SET_INFLIGHT_FD, &payload, 1).is_err());
        assert_eq!(peer.open(), 0);
    }
    // The specification's form, without the padding of a C structure, gets a reply of the same
    // form.
    let mut peer = Peer::new();
    peer.send(GET_INFLIGHT_FD, &inflight(0, 0, 1, 64)[..20], 0);
    let area = InflightInfo { mmap_size: 1088, mmap_offset: 0, queues: 1, queue_size: 64 };
    let fd = peer.descriptor();
    let actions = peer.session.inflight_created(&area, fd);
    assert_eq!(peer.show(actions), [format!("{} fd1", reply(31, &inflight(1088, 0, 1, 64)[..20]))]);
}

#[test]
fn the_next_request_waits_for_a_reply_that_is_due() {
    let mut peer = running();
    peer.send(GET_VRING_BASE, &u32s(&[0, 0]), 0);
    assert!(matches!(
        peer.try_send(GET_FEATURES, &[], 0),
        Err(Violation::Refused { request: GET_FEATURES, .. })
    ));
}

#[test]
fn every_wrong_size_and_every_wrong_number_of_descriptors_is_found() {
    // Request, payload size, number of descriptors.
    let shapes = [
        (GET_FEATURES, 0, 0),
        (SET_FEATURES, 8, 0),
        (SET_OWNER, 0, 0),
        (SET_LOG_BASE, 16, 1),
        (SET_LOG_FD, 0, 1),
        (SET_VRING_NUM, 8, 0),
        (SET_VRING_ADDR, 40, 0),
        (SET_VRING_BASE, 8, 0),
        (GET_VRING_BASE, 8, 0),
        (SET_VRING_KICK, 8, 1),
        (SET_VRING_CALL, 8, 1),
        (SET_VRING_ERR, 8, 1),
        (SET_PROTOCOL_FEATURES, 8, 0),
        (SET_VRING_ENABLE, 8, 0),
        (SET_BACKEND_REQ_FD, 0, 1),
        (SET_CONFIG, 12, 0),
        (GET_INFLIGHT_FD, 24, 0),
        (SET_INFLIGHT_FD, 24, 1),
        (RESET_DEVICE, 0, 0),
        (ADD_MEM_REG, 40, 1),
    ];
    for (request, size, fds) in shapes {
        for (wrong_size, wrong_fds) in [(size + 1, fds), (size, fds + 1), (size, 1 - fds)] {
            let mut peer = Peer::new();
            let result = peer.try_send(request, &vec![0; wrong_size], wrong_fds);
            let expected = if wrong_size != size {
                Violation::PayloadSize { request, found: wrong_size }
            } else {
                Violation::Descriptors { request, found: wrong_fds }
            };
            assert_eq!(result, Err(expected));
            assert_eq!(peer.open(), 0, "request {request}");
        }
    }
}

#[test]
fn invalid_headers_close_the_connection() {
    for (words, violation) in [
        ([1, 0, 0], Violation::Version { flags: 0 }),
        ([1, 2, 0], Violation::Version { flags: 2 }),
        ([1, 5, 0], Violation::UnexpectedReply { request: 1 }),
        ([1, 1, 4097], Violation::PayloadTooLong { request: 1, size: 4097 }),
        ([1, 1, u32::MAX], Violation::PayloadTooLong { request: 1, size: u32::MAX }),
    ] {
        let mut framer = Framer::new();
        assert_eq!(framer.push(&u32s(&words), Vec::new()).unwrap_err(), violation);
    }
    let mut framer = Framer::new();
    assert_eq!(framer.push(&[0; 13], Vec::new()).unwrap_err(), Violation::BeyondMessage);
}

#[test]
fn a_message_may_arrive_byte_by_byte_and_be_carried_elsewhere_halfway() {
    let mut peer = Peer::new();
    let bytes = [u32s(&[SET_VRING_KICK, 1, 8]), u64s(&[1])].concat();
    let mut fds = vec![peer.descriptor()];
    for (i, byte) in bytes.iter().enumerate() {
        let (before, fds_before) = std::mem::take(&mut peer.framer).into_parts();
        assert_eq!((before.len(), fds_before.len()), (i, usize::from(i > 0)));
        peer.framer = Framer::from_parts(before, fds_before).unwrap();
        assert_eq!(peer.framer.is_empty(), i == 0);
        let whole = peer.framer.push(&[*byte], std::mem::take(&mut fds)).unwrap();
        assert_eq!(whole.is_some(), i + 1 == bytes.len());
        if let Some((message, fds)) = whole {
            let actions = peer.session.handle(&message, fds).unwrap();
            assert_eq!(peer.show(actions), ["kick 1 fd1"]);
        }
    }
    assert!(peer.framer.is_empty());
}

#[test]
fn the_number_of_descriptors_held_is_limited() {
    let mut peer = Peer::new();
    for _ in 0..8 {
        let fds = (0..4).map(|_| peer.descriptor()).collect();
        assert!(peer.framer.push(&[1], fds).unwrap().is_none());
    }
    let fd = peer.descriptor();
    assert_eq!(peer.framer.push(&[1], vec![fd]).unwrap_err(), Violation::TooManyDescriptors);
    assert_eq!(peer.open(), 32);
    peer.framer = Framer::new();
    assert_eq!(peer.open(), 0);
}
