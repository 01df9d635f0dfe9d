//! What a correct guest observes.

use bdev::Kind;

use super::guest::*;
use crate::memory::faults::store_buffer;
use crate::*;

const BOTH: [Form; 2] = [Form::Split, Form::Packed];

/// Requests in every mix of direct and indirect chains arrive unchanged, complete in any order, and
/// return to the guest once each, over many laps of the ring and the wrap of its indexes.
#[test]
fn requests_go_round() {
    for form in BOTH {
        for num in [4_u16, 8, 64, 128] {
            let start = match form {
                Form::Split => 65_500,
                Form::Packed => (num - 1) | 0x8000,
            };
            for features in [0, F_INDIRECT_DESC | F_EVENT_IDX] {
                let mut guest = Guest::new(form, num, start, features);
                let mut ring = guest.start(None);
                let mut dice = Dice(u64::from(num) + features);
                let (mut next, mut popped, mut tags, mut done) = (0, 0, Vec::new(), 0);
                while done < 1000 {
                    for _ in 0..dice.roll(5) {
                        if next < 1000 && guest.add(next, features != 0 && dice.roll(2) == 0) {
                            next += 1;
                        }
                    }
                    let before = tags.len();
                    let n = ring.pop(&guest.memory, &disk(), 1 + dice.roll(8), &mut tags).unwrap();
                    assert_eq!(n, tags.len() - before);
                    for &tag in &tags[before..] {
                        let request = ring.request(tag);
                        let kind = if popped & 1 == 0 { Kind::Read } else { Kind::Write };
                        assert_eq!((request.kind, request.offset), (kind, popped * 512));
                        let pieces = if popped % 3 == 2 { 2 } else { 1 };
                        assert_eq!((request.len, request.segments.len()), (512, pieces));
                        assert!(request.segments.iter().all(|s| s.iov_len == 512 / pieces));
                        popped += 1;
                    }
                    let mut finished = Vec::new();
                    for _ in 0..dice.roll(tags.len() + 1) {
                        let tag = tags.swap_remove(dice.roll(tags.len()));
                        finished.push(Finished { tag, status: Status::Ok });
                    }
                    assert_eq!(ring.complete(&guest.memory, None, &finished), finished.len());
                    assert_eq!(ring.in_flight(), tags.len());
                    let back = guest.collect();
                    assert_eq!(back.len(), finished.len());
                    for (seq, head, len) in back {
                        assert_eq!(guest.status(head), 0);
                        assert_eq!(len, if seq & 1 == 0 { 513 } else { 1 });
                        done += 1;
                    }
                }
            }
        }
    }
}

/// The guest is interrupted exactly when it asked for it, for each way to ask, each batch size and
/// each lap.
#[test]
fn signals_come_when_asked_for() {
    for form in BOTH {
        for features in [0, F_EVENT_IDX] {
            let num = 8_u16;
            let start = if form == Form::Split { 65_530 } else { 0x8003 };
            let mut guest = Guest::new(form, num, start, features | F_INDIRECT_DESC);
            let mut ring = guest.start(None);
            assert!(ring.should_signal(), "once after a start");
            assert!(!ring.should_signal(), "nothing was completed");
            for round in 0..200 {
                let count = 1 + round % num;
                for seq in 0..u64::from(count) {
                    assert!(guest.add(seq, true));
                }
                // After none, some, all, or more than the completions; or never.
                let after = (round % 5 != 0).then_some(round / 5 % num);
                guest.want_interrupt(after);
                let mut tags = Vec::new();
                ring.pop(&guest.memory, &disk(), 99, &mut tags).unwrap();
                let finished: Vec<_> =
                    tags.iter().map(|&tag| Finished { tag, status: Status::Ok }).collect();
                ring.complete(&guest.memory, None, &finished);
                let expected = match after {
                    None => false,
                    Some(_) if features == 0 => true,
                    Some(after) => after < count,
                };
                assert_eq!(ring.should_signal(), expected, "{form:?} {features:#x} {round}");
                assert!(!ring.should_signal());
                assert_eq!(guest.collect().len(), usize::from(count));
            }
        }
    }
}

/// An armed ring is kicked for the next request and a disarmed one is not, at each position of the
/// ring. Arming notices a request that came earlier.
#[test]
fn kicks_come_when_armed() {
    for form in BOTH {
        for features in [0, F_EVENT_IDX] {
            let start = if form == Form::Split { 65_530 } else { 0x8003 };
            let mut guest = Guest::new(form, 8, start, features | F_INDIRECT_DESC);
            let mut ring = guest.start(None);
            let turn = |guest: &mut Guest, ring: &mut Ring| {
                let mut tags = Vec::new();
                ring.pop(&guest.memory, &disk(), 99, &mut tags).unwrap();
                let finished: Vec<_> =
                    tags.iter().map(|&tag| Finished { tag, status: Status::Ok }).collect();
                ring.complete(&guest.memory, None, &finished);
                guest.collect().len()
            };
            for _ in 0..30 {
                assert!(ring.arm_kick(None));
                assert!(guest.add(0, true));
                assert!(guest.must_kick(1));
                assert!(!ring.arm_kick(None), "there is work");
                ring.disarm_kick(None);
                assert_eq!(turn(&mut guest, &mut ring), 1);
                assert!(guest.add(1, true));
                assert!(!guest.must_kick(1));
                assert!(guest.add(2, true));
                assert!(!guest.must_kick(1));
                assert_eq!(turn(&mut guest, &mut ring), 2);
            }
        }
    }
}

/// Either the target sees the request before it sleeps, or the guest sees the request for a kick,
/// even if the target's processor delays its stores as long as it may.
#[test]
fn a_sleeping_target_is_kicked() {
    for form in BOTH {
        for features in [0, F_EVENT_IDX] {
            let start = if form == Form::Split { 0 } else { 0x8000 };
            let mut guest = Guest::new(form, 8, start, features | F_INDIRECT_DESC);
            let mut ring = guest.start(None);
            ring.disarm_kick(None);
            let (sleeps, kicks) = store_buffer::with(
                || ring.arm_kick(None),
                || {
                    assert!(guest.add(0, true));
                    guest.must_kick(1)
                },
            );
            assert!(sleeps && kicks, "{form:?} {features:#x}");
        }
    }
}

/// Either the guest sees the completion before it waits for an interrupt, or the target sees the
/// request for an interrupt.
#[test]
fn a_waiting_guest_is_signalled() {
    for form in BOTH {
        for features in [0, F_EVENT_IDX] {
            let start = if form == Form::Split { 0 } else { 0x8000 };
            let mut guest = Guest::new(form, 8, start, features | F_INDIRECT_DESC);
            let mut ring = guest.start(None);
            assert!(ring.should_signal());
            assert!(guest.add(0, true));
            guest.want_interrupt(None);
            let mut tags = Vec::new();
            ring.pop(&guest.memory, &disk(), 9, &mut tags).unwrap();
            let memory = guest.memory.clone();
            let finished = [Finished { tag: tags[0], status: Status::Ok }];
            let (signals, seen) = store_buffer::with(
                || {
                    ring.complete(&memory, None, &finished);
                    ring.should_signal()
                },
                || {
                    guest.want_interrupt(Some(0));
                    guest.collect().len()
                },
            );
            assert!(!signals && seen == 1, "{form:?} {features:#x}");
        }
    }
}
