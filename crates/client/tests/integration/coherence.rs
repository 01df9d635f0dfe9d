//! The cache against redis-server, with writers elsewhere.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use client::{Options, Ttl, blocking};
use proptest::prelude::*;

use crate::redis::Redis;
use crate::subject::{Kind, Subject};

const KEYS: usize = 8;

/// Connects; again if the connection is cut meanwhile.
fn cached(how: Kind, redis: &Redis) -> Subject {
    let connect = || how.connect(Options::new().cache(256 << 10), &redis.address());
    let again = (0..20).find_map(|_| connect().ok());
    again.unwrap_or_else(|| connect().unwrap())
}

fn number(value: Option<Vec<u8>>) -> u64 {
    value.map_or(0, |value| String::from_utf8(value).unwrap().parse().unwrap())
}

/// Cuts connections of clients, from inside the server.
fn cut(admin: &mut std::net::TcpStream) {
    use std::io::{Read, Write};
    admin.write_all(b"CLIENT KILL TYPE normal SKIPME yes\r\n").unwrap();
    let _ = admin.read(&mut [0; 64]).unwrap();
}

fn admin(redis: &Redis) -> std::net::TcpStream {
    std::net::TcpStream::connect(redis.address()).unwrap()
}

/// Every key's value only grows. Readers with caches must never see it shrink, nor see less than
/// was acknowledged before they waited; and writers must see their own writes.
fn readers_never_go_back(how: Kind, cuts: bool) {
    let redis = Redis::start(&[]);
    let acknowledged: [AtomicU64; KEYS] = Default::default();
    let over = AtomicBool::new(false);
    let (redis, acknowledged, over) = (&redis, &acknowledged, &over);
    std::thread::scope(|scope| {
        // Each key has one writer, so that its values are ordered.
        for writer in 0..2_usize {
            scope.spawn(move || {
                let client = cached(how, redis);
                let mut n = 0_u64;
                while !over.load(Ordering::Relaxed) {
                    n += 1;
                    let key = writer + 2 * (n as usize % (KEYS / 2));
                    let name = format!("k{key}");
                    match client.set(&name, &n.to_string()) {
                        Ok(()) => acknowledged[key].fetch_max(n, Ordering::SeqCst),
                        Err(error) => {
                            assert_eq!(error.kind(), client::ErrorKind::OutcomeUnknown);
                            continue;
                        }
                    };
                    assert_eq!(number(client.get(&name).unwrap()), n, "{how:?}: an own write");
                }
            });
        }
        for _ in 0..2 {
            scope.spawn(move || {
                let client = cached(how, redis);
                let mut seen = [0; KEYS];
                let mut turn = 0_usize;
                while !over.load(Ordering::Relaxed) {
                    turn += 1;
                    let key = turn % KEYS;
                    let name = format!("k{key}");
                    let found = if turn.is_multiple_of(50) {
                        let before = acknowledged[key].load(Ordering::SeqCst);
                        client.wait_coherent();
                        let found = number(client.get(&name).unwrap());
                        assert!(found >= before, "{how:?}: {found}, but {before} was there before");
                        found
                    } else if turn.is_multiple_of(7) {
                        number(client.multi_get(&[&name]).unwrap().remove(0))
                    } else {
                        number(client.get(&name).unwrap())
                    };
                    assert!(found >= seen[key], "{how:?}: {found} after {}", seen[key]);
                    seen[key] = found;
                }
                let stats = client.stats();
                assert!(stats.hits > 0 && stats.invalidations > 0, "{stats:?}");
            });
        }
        let (mut admin, began) = (admin(redis), Instant::now());
        while began.elapsed() < Duration::from_millis(1500) {
            std::thread::sleep(Duration::from_millis(30));
            if cuts {
                cut(&mut admin);
            }
        }
        over.store(true, Ordering::Relaxed);
    });
}

#[test]
fn readers_never_go_back_with_threads() {
    readers_never_go_back(Kind::Blocking, false);
}

#[test]
fn readers_never_go_back_with_tasks() {
    readers_never_go_back(Kind::Asynchronous, false);
}

#[test]
fn readers_never_go_back_while_connections_are_cut() {
    for how in Kind::ALL {
        readers_never_go_back(how, true);
    }
}

#[derive(Clone, Debug)]
enum Step {
    /// Another client writes.
    Write(usize, usize, u8),
    Delete(usize, usize),
    /// The cached client writes.
    Own(usize, u8),
    OwnTransaction(usize, u8),
    /// The cached client sets a key with a deadline.
    OwnWithTtl(usize, u8),
    /// A key gets a deadline, or loses it: by another client, or by the cached one.
    Expire(bool, usize),
    Persist(bool, usize),
    Read(usize),
    ReadAll,
    FlushAll,
    Cut,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let key = 0..KEYS;
    prop::collection::vec(
        prop_oneof![
            8 => (0..3_usize, key.clone(), any::<u8>()).prop_map(|(w, k, v)| Step::Write(w, k, v)),
            3 => (0..3_usize, key.clone()).prop_map(|(w, k)| Step::Delete(w, k)),
            4 => (key.clone(), any::<u8>()).prop_map(|(k, v)| Step::Own(k, v)),
            2 => (key.clone(), any::<u8>()).prop_map(|(k, v)| Step::OwnTransaction(k, v)),
            2 => (key.clone(), any::<u8>()).prop_map(|(k, v)| Step::OwnWithTtl(k, v)),
            2 => (any::<bool>(), key.clone()).prop_map(|(own, k)| Step::Expire(own, k)),
            2 => (any::<bool>(), key.clone()).prop_map(|(own, k)| Step::Persist(own, k)),
            16 => key.prop_map(Step::Read),
            3 => Just(Step::ReadAll),
            1 => Just(Step::FlushAll),
            1 => Just(Step::Cut),
        ],
        1..60,
    )
}

/// One step after the other: after `wait_coherent`, the cache must agree with a map.
#[test]
fn a_cached_client_agrees_with_a_map() {
    let redis = Redis::start(&[]);
    let writers: Vec<blocking::Client> =
        (0..3).map(|_| blocking::Client::connect(&redis.address()).unwrap()).collect();
    let subjects = Kind::ALL.map(|how| cached(how, &redis));
    let admin = std::cell::RefCell::new(admin(&redis));
    let config = ProptestConfig { cases: 32, ..ProptestConfig::default() };
    proptest!(config, |(steps in steps(), which in 0..2_usize)| {
        let client = &subjects[which];
        let mut map: BTreeMap<String, Vec<u8>> = BTreeMap::new();
        // The keys with a deadline, which does not pass.
        let mut ends: BTreeSet<String> = BTreeSet::new();
        let hour = Duration::from_secs(3600);
        let name = |key: usize| format!("m{key}");
        (0..KEYS).for_each(|key| { writers[0].delete(name(key)).unwrap(); });
        client.wait_coherent();
        for step in steps {
            let foreign = match step {
                Step::Write(writer, key, value) => {
                    writers[writer].set(name(key), [value]).unwrap();
                    map.insert(name(key), vec![value]);
                    ends.remove(&name(key));
                    true
                }
                Step::Delete(writer, key) => {
                    let there = writers[writer].delete(name(key)).unwrap();
                    prop_assert_eq!(there, map.remove(&name(key)).is_some());
                    ends.remove(&name(key));
                    true
                }
                Step::Own(key, value) => {
                    let value = value.to_string();
                    client.set(&name(key), &value).unwrap();
                    map.insert(name(key), value.into_bytes());
                    ends.remove(&name(key));
                    false
                }
                Step::OwnWithTtl(key, value) => {
                    let value = value.to_string();
                    client.set_with_ttl(&name(key), &value, hour).unwrap();
                    map.insert(name(key), value.into_bytes());
                    ends.insert(name(key));
                    false
                }
                Step::Expire(own, key) => {
                    let name = name(key);
                    let done = match own {
                        true => client.expire(&name, hour).unwrap(),
                        false => writers[0].expire(&name, hour).unwrap(),
                    };
                    prop_assert_eq!(done, map.contains_key(&name));
                    if done {
                        ends.insert(name);
                    }
                    !own
                }
                Step::Persist(own, key) => {
                    let name = name(key);
                    let done = match own {
                        true => client.persist(&name).unwrap(),
                        false => writers[0].persist(&name).unwrap(),
                    };
                    prop_assert_eq!(done, ends.remove(&name));
                    !own
                }
                Step::OwnTransaction(key, value) => {
                    let value = value.to_string();
                    client.read_and_write(&name(key), &value, || ()).unwrap();
                    map.insert(name(key), value.into_bytes());
                    ends.remove(&name(key));
                    false
                }
                Step::Read(key) => {
                    prop_assert_eq!(client.get(&name(key)).unwrap(), map.get(&name(key)).cloned());
                    let ttl = client.ttl(&name(key)).unwrap();
                    prop_assert_eq!(matches!(ttl, Ttl::NoKey), !map.contains_key(&name(key)));
                    prop_assert_eq!(matches!(ttl, Ttl::Left(_)), ends.contains(&name(key)));
                    false
                }
                Step::ReadAll => {
                    let names: Vec<String> = (0..KEYS).map(name).collect();
                    let names: Vec<&str> = names.iter().map(String::as_str).collect();
                    let all = client.multi_get(&names).unwrap();
                    let model: Vec<_> = names.iter().map(|name| map.get(*name).cloned()).collect();
                    prop_assert_eq!(all, model);
                    false
                }
                Step::FlushAll => {
                    use std::io::{Read, Write};
                    let mut admin = admin.borrow_mut();
                    admin.write_all(b"FLUSHALL\r\n").unwrap();
                    let _ = admin.read(&mut [0; 64]).unwrap();
                    map.clear();
                    ends.clear();
                    true
                }
                Step::Cut => {
                    cut(&mut admin.borrow_mut());
                    // A socket that was cut this moment may lose a write.
                    std::thread::sleep(Duration::from_millis(110));
                    false
                }
            };
            if foreign {
                client.wait_coherent();
            }
        }
    });
}

/// The server notices the end of a key when another client asks for it, and says so before it
/// answers anything that is sent later.
#[test]
fn a_key_that_has_ended_for_others_has_ended_for_a_cache_that_waited() {
    let redis = Redis::start(&[]);
    // Otherwise it may notice by itself, a little earlier.
    let other = blocking::Client::connect(&redis.address()).unwrap();
    {
        use std::io::{Read, Write};
        let mut admin = admin(&redis);
        admin.write_all(b"DEBUG SET-ACTIVE-EXPIRE 0\r\n").unwrap();
        assert!(admin.read(&mut [0; 64]).unwrap() > 0);
    }
    for how in Kind::ALL {
        let client = cached(how, &redis);
        for n in 0..20 {
            let name = format!("e{n}");
            if n % 2 == 0 {
                client.set_with_ttl(&name, "1", Duration::from_millis(5)).unwrap();
            } else {
                other.set_with_ttl(&name, "1", Duration::from_millis(5)).unwrap();
            }
            // It may have ended already.
            let _ = client.get(&name).unwrap();
            while other.get(&name).unwrap().is_some() {}
            client.wait_coherent();
            assert_eq!(client.get(&name).unwrap(), None, "{how:?} {name}");
        }
    }
}

#[test]
fn memory_stays_within_the_cache() {
    let redis = Redis::start(&[]);
    for how in Kind::ALL {
        let client = how.connect(Options::new().cache(512 << 10), &redis.address()).unwrap();
        let value = "v".repeat(1000);
        let names: Vec<String> = (0..2000).map(|n| format!("key{n}")).collect();
        for name in &names {
            client.set(name, &value).unwrap();
        }
        for chunk in names.chunks(100) {
            let chunk: Vec<&str> = chunk.iter().map(String::as_str).collect();
            let found = client.multi_get(&chunk).unwrap();
            assert!(found.iter().all(|found| found.as_deref() == Some(value.as_bytes())));
        }
        let stats = client.stats();
        assert!(stats.bytes_used <= 512 << 10 && stats.entries > 300, "{stats:?}");
    }
}

/// A server that gives no index: everything else is as without it.
#[test]
fn an_index_of_a_server_without_one_is_none() {
    let redis = Redis::start(&[]);
    for how in Kind::ALL {
        let options = Options::new().cache(256 << 10).index(1 << 20);
        let client = how.connect(options, &redis.address()).unwrap();
        let none = &format!("none of {how:?}");
        client.set("k", "1").unwrap();
        assert_eq!(number(client.get("k").unwrap()), 1);
        assert_eq!(client.get(none).unwrap(), None);
        let other = how.connect(Options::new(), &redis.address()).unwrap();
        other.set("k", "2").unwrap();
        other.set(none, "3").unwrap();
        client.wait_coherent();
        assert_eq!(number(client.get("k").unwrap()), 2);
        assert_eq!(number(client.get(none).unwrap()), 3);
        let stats = client.stats();
        assert!(!stats.index_is_whole && stats.index_answers == 0 && stats.invalidations == 2);
    }
}
