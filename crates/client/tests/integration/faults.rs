//! Servers that fail, stall, lie, and cut connections.

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use client::{ErrorKind, Options, Ttl, WriteBatch};

use crate::fake::Fake;
use crate::subject::{Kind, Subject, kind, quick};

/// Runs a call that must end within `quick`'s timeout and a little more.
fn soon<T>(call: impl FnOnce() -> T) -> T {
    let began = Instant::now();
    let result = call();
    assert!(began.elapsed() < Duration::from_millis(1500), "it took {:?}", began.elapsed());
    result
}

fn connect(how: Kind, fake: &Fake) -> Subject {
    how.connect(quick(), &fake.address).unwrap()
}

#[test]
fn a_port_without_a_server_is_unreachable() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    for how in Kind::ALL {
        let refused = soon(|| how.connect(quick(), &port.to_string()));
        assert_eq!(kind(refused), ErrorKind::Unreachable);
    }
}

#[cfg(not(feature = "tls"))]
#[test]
fn tls_that_is_not_built_in_is_refused() {
    for how in Kind::ALL {
        assert_eq!(kind(how.connect(quick(), "rediss://127.0.0.1:1")), ErrorKind::Unsupported);
    }
}

#[test]
fn a_server_that_never_greets_is_given_up() {
    let fake = Fake::start(|_, mut line| line.until_closed());
    for how in Kind::ALL {
        for cache in [0, 1 << 20] {
            let silent = soon(|| how.connect(quick().cache(cache), &fake.address));
            assert_eq!(kind(silent), ErrorKind::Timeout);
        }
    }
}

#[test]
fn a_server_that_refuses_the_connection_is_told_apart() {
    let fake = Fake::start(|_, mut line| {
        line.say("-ERR max number of clients reached\r\n");
        line.cut();
    });
    for how in Kind::ALL {
        let refused = soon(|| how.connect(quick(), &fake.address));
        // The end may overtake the text.
        let kind = kind(refused);
        assert!(matches!(kind, ErrorKind::Busy | ErrorKind::Unreachable), "{kind:?}");
    }
    let fake = Fake::start(|_, mut line| line.say("HTTP/1.1 400 Bad Request\r\n\r\n"));
    for how in Kind::ALL {
        assert_eq!(kind(soon(|| how.connect(quick(), &fake.address))), ErrorKind::Protocol);
    }
}

#[test]
fn a_call_without_an_answer_ends_in_time() {
    let fake = Fake::start(|_, mut line| {
        line.greet();
        line.until_closed();
    });
    for how in Kind::ALL {
        let client = connect(how, &fake);
        assert_eq!(kind(soon(|| client.get("k"))), ErrorKind::Timeout);
        assert_eq!(kind(soon(|| client.set("k", "v"))), ErrorKind::OutcomeUnknown);
        assert_eq!(kind(soon(|| client.delete("k"))), ErrorKind::OutcomeUnknown);
        assert_eq!(kind(soon(|| client.multi_get(&["k"]))), ErrorKind::Timeout);
        let second = Duration::from_secs(1);
        assert_eq!(kind(soon(|| client.ttl("k"))), ErrorKind::Timeout);
        assert_eq!(kind(soon(|| client.expire("k", second))), ErrorKind::OutcomeUnknown);
        assert_eq!(kind(soon(|| client.persist("k"))), ErrorKind::OutcomeUnknown);
        let mut batch = WriteBatch::new();
        batch.set("a", "b").delete("c").set_with_ttl("d", "e", second);
        assert_eq!(kind(soon(|| client.write(batch))), ErrorKind::OutcomeUnknown);
        let transaction = soon(|| client.read_and_write("k", "v", || ()));
        assert_eq!(kind(transaction), ErrorKind::Timeout);
    }
}

#[test]
fn a_reply_that_trickles_ends_in_time() {
    let fake = Fake::start(|_, mut line| {
        line.greet();
        while line.command().is_some() {
            line.say("$1000\r\n");
            for _ in 0..100 {
                line.say("x");
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    });
    for how in Kind::ALL {
        let client = connect(how, &fake);
        assert_eq!(kind(soon(|| client.get("k"))), ErrorKind::Timeout);
        assert_eq!(kind(soon(|| client.set("k", "v"))), ErrorKind::OutcomeUnknown);
    }
}

/// What the server has done with a request is not known when its answer is cut off.
#[test]
fn reads_are_made_again_and_writes_are_not() {
    for cut in ["", "$", "$5\r\nhel", "$5\r\nhello", "+O", "*3\r\n$1\r\na\r\n"] {
        let writes = Arc::new(AtomicUsize::new(0));
        let (count, reply) = (writes.clone(), cut.to_owned());
        // Every connection answers one command, and cuts the next one.
        let fake = Fake::start(move |number, mut line| {
            if !line.greet() {
                return;
            }
            while let Some(words) = line.command() {
                if words[0] == "SET" || words[0] == "MSET" {
                    count.fetch_add(1, Ordering::SeqCst);
                }
                if number % 2 == 1 && words[0] == "GET" {
                    line.say("$5\r\nhello\r\n");
                } else {
                    line.say(&reply);
                    return line.cut();
                }
            }
        });
        for how in Kind::ALL {
            fake.connections.store(0, Ordering::SeqCst);
            writes.store(0, Ordering::SeqCst);
            let client = connect(how, &fake);
            assert_eq!(soon(|| client.get("k")).unwrap().unwrap(), b"hello", "{how:?} {cut:?}");
            let lost = soon(|| client.set("k", "v"));
            assert_eq!(kind(lost), ErrorKind::OutcomeUnknown, "{how:?} {cut:?}");
            assert_eq!(writes.load(Ordering::SeqCst), 1, "{how:?} {cut:?}");
        }
    }
}

/// A time to live that is sent again begins anew: the key might end later than it was told to.
#[test]
fn what_sets_a_deadline_is_not_made_again_and_what_reads_it_is() {
    let writes = Arc::new(AtomicUsize::new(0));
    let count = writes.clone();
    // Every second connection answers; the others end at the first command.
    let fake = Fake::answering(move |number, words| {
        if words[0] != "PTTL" {
            count.fetch_add(1, Ordering::SeqCst);
        }
        (number % 2 == 1 && words[0] == "PTTL").then(|| ":1500\r\n".to_owned())
    });
    let second = Duration::from_secs(1);
    for how in Kind::ALL {
        type Call = fn(&Subject, Duration) -> client::Result<()>;
        let calls: [Call; 3] = [
            |client, ttl| client.set_with_ttl("k", "v", ttl),
            |client, ttl| client.expire("k", ttl).map(drop),
            |client, _| client.persist("k").map(drop),
        ];
        for (call, expected) in calls.into_iter().zip(1..) {
            fake.connections.store(0, Ordering::SeqCst);
            if expected == 1 {
                writes.store(0, Ordering::SeqCst);
            }
            let client = connect(how, &fake);
            let lost = soon(|| call(&client, second));
            assert_eq!(kind(lost), ErrorKind::OutcomeUnknown, "{how:?}");
            assert_eq!(writes.load(Ordering::SeqCst), expected, "{how:?}");
        }
        fake.connections.store(0, Ordering::SeqCst);
        let client = connect(how, &fake);
        assert_eq!(
            soon(|| client.ttl("k")).unwrap(),
            Ttl::Left(Duration::from_millis(1500)),
            "{how:?}"
        );
    }
}

/// A server knows the deadline, and may not have noticed that it has passed: it invalidates later.
#[test]
fn a_key_that_has_ended_by_its_ttl_is_not_returned_from_the_cache() {
    let ended = Arc::new(AtomicBool::new(false));
    let is_over = ended.clone();
    let fake = Fake::answering(move |_, words| {
        let is_over = is_over.load(Ordering::SeqCst);
        Some(match (words[0].as_str(), is_over) {
            ("PTTL", true) => ":-2\r\n".to_owned(),
            ("PTTL", false) => ":1\r\n".to_owned(),
            ("GET", true) => "_\r\n".to_owned(),
            ("GET", false) => "$1\r\nv\r\n".to_owned(),
            _ => "+OK\r\n".to_owned(),
        })
    });
    for how in Kind::ALL {
        ended.store(false, Ordering::SeqCst);
        let client = how.connect(quick().cache(1 << 20), &fake.address).unwrap();
        for _ in 0..2 {
            assert_eq!(client.get("k").unwrap().unwrap(), b"v");
            assert_eq!(client.ttl("k").unwrap(), Ttl::Left(Duration::from_millis(1)));
        }
        assert_eq!((client.stats().hits, client.stats().misses), (1, 1), "{how:?}");
        ended.store(true, Ordering::SeqCst);
        assert_eq!(client.ttl("k").unwrap(), Ttl::NoKey);
        assert_eq!(client.get("k").unwrap(), None, "{how:?}");
    }
}

#[test]
fn without_retry_a_read_fails_at_once() {
    let fake = Fake::answering(|number, _| (number > 0).then(|| "$1\r\nv\r\n".to_owned()));
    for how in Kind::ALL {
        fake.connections.store(0, Ordering::SeqCst);
        let client = how.connect(quick().retry(false), &fake.address).unwrap();
        assert_eq!(kind(soon(|| client.get("k"))), ErrorKind::Unreachable, "{how:?}");
        assert_eq!(client.get("k").unwrap().unwrap(), b"v");
    }
}

/// Nothing of the write was sent, so it may be made on the next connection.
#[test]
fn a_write_finds_the_server_that_has_come_back() {
    for how in Kind::ALL {
        let fake = Fake::answering(|_, words| (words[0] == "SET").then(|| "+OK\r\n".to_owned()));
        let client = how.connect(quick().timeout(Duration::from_secs(5)), &fake.address).unwrap();
        let address = fake.address.clone();
        // The server closes its connection, and listens no more.
        drop(fake);
        assert!(client.get("k").is_err() || matches!(how, Kind::Asynchronous));
        let later = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(300));
            Fake::on(TcpListener::bind(address).unwrap(), |_, mut line| {
                line.greet();
                while line.command().is_some() {
                    line.say("+OK\r\n");
                }
            })
        });
        client.set("k", "v").unwrap();
        drop(later.join().unwrap());
    }
}

/// The server has closed the connection while nobody used it.
#[test]
fn a_connection_that_ended_at_rest_costs_no_write() {
    let fake = Fake::start(|_, mut line| {
        line.greet();
        if line.command().is_some() {
            line.say("+OK\r\n");
        }
        line.cut();
    });
    for how in Kind::ALL {
        let client = connect(how, &fake);
        for _ in 0..3 {
            client.set("k", "v").unwrap();
            std::thread::sleep(Duration::from_millis(150));
        }
    }
}

#[test]
fn a_server_that_lies_is_found_out() {
    for (lie, expected) in [
        ("?what\r\n", ErrorKind::Protocol),
        (":1\r\n", ErrorKind::Protocol),
        ("*1\r\n$1\r\nv\r\n", ErrorKind::Protocol),
        ("$99999999999\r\n", ErrorKind::Protocol),
        ("$-7\r\n", ErrorKind::Protocol),
        ("-ERR unknown command\r\n", ErrorKind::Unsupported),
        ("-OOM no\r\n", ErrorKind::Full),
        ("-\r\n", ErrorKind::Server),
    ] {
        let fake = Fake::answering(move |_, _| Some(lie.to_owned()));
        for how in Kind::ALL {
            let client = connect(how, &fake);
            assert_eq!(kind(soon(|| client.get("k"))), expected, "{how:?} {lie:?}");
        }
    }
}

/// A second reply would be taken for the next command's.
#[test]
fn a_reply_too_many_ends_the_connection() {
    let fake = Fake::answering(|_, words| {
        Some(match words[1].as_str() {
            "one" => "$1\r\n1\r\n$4\r\nlies\r\n".to_owned(),
            _ => "$1\r\n2\r\n".to_owned(),
        })
    });
    for how in Kind::ALL {
        let client = connect(how, &fake);
        assert_eq!(client.get("one").unwrap().unwrap(), b"1");
        assert_eq!(client.get("two").unwrap().unwrap(), b"2", "{how:?}");
    }
}

#[test]
fn a_reply_beyond_the_limit_is_refused_before_it_arrives() {
    let fake = Fake::answering(|_, _| Some("$100000\r\n".to_owned()));
    for how in Kind::ALL {
        let client = how.connect(quick().reply_bytes_max(10_000), &fake.address).unwrap();
        assert_eq!(kind(soon(|| client.get("k"))), ErrorKind::Protocol);
        assert_eq!(kind(soon(|| client.set("k", "v"))), ErrorKind::OutcomeUnknown);
    }
}

/// The server reads nothing: the request fills the socket's buffers and stands.
#[test]
fn a_request_that_is_not_taken_ends_in_time() {
    let fake = Fake::start(|_, mut line| {
        line.greet();
        std::thread::sleep(Duration::from_secs(3));
    });
    let large = "x".repeat(32 << 20);
    for how in Kind::ALL {
        let client = connect(how, &fake);
        assert_eq!(kind(soon(|| client.set("k", &large))), ErrorKind::OutcomeUnknown);
    }
}

#[test]
fn a_hundred_threads_and_a_dead_server_all_end_in_time() {
    let fake = Fake::start(|_, mut line| {
        line.greet();
        line.until_closed();
    });
    for cache in [0, 1 << 20] {
        let client = quick().cache(cache).connect_blocking(&fake.address).unwrap();
        soon(|| {
            std::thread::scope(|scope| {
                for n in 0..100_u32 {
                    let client = &client;
                    scope.spawn(move || assert!(client.get(n.to_be_bytes()).is_err()));
                }
            });
        });
    }
}

// ---- the cache

fn value(text: &str) -> String {
    format!("${}\r\n{text}\r\n", text.len())
}

fn invalidate(key: &str) -> String {
    format!(">2\r\n$10\r\ninvalidate\r\n*1\r\n${}\r\n{key}\r\n", key.len())
}

fn cached() -> Options {
    quick().cache(1 << 20)
}

/// A server that counts `GET`s, and answers the number of the `GET`.
fn counting(
    around: impl Fn(usize, usize) -> (String, String) + Send + Sync + 'static,
) -> (Fake, Arc<AtomicUsize>) {
    let gets = Arc::new(AtomicUsize::new(0));
    let count = gets.clone();
    let fake = Fake::answering(move |number, words| match words[0].as_str() {
        "GET" => {
            let nth = count.fetch_add(1, Ordering::SeqCst) + 1;
            let (before, after) = around(number, nth);
            Some(format!("{before}{}{after}", value(&nth.to_string())))
        }
        "PING" => Some("+PONG\r\n".to_owned()),
        _ => Some("+OK\r\n".to_owned()),
    });
    (fake, gets)
}

#[test]
fn a_cached_value_needs_no_request() {
    let (fake, gets) = counting(|_, _| (String::new(), String::new()));
    for how in Kind::ALL {
        gets.store(0, Ordering::SeqCst);
        let client = how.connect(cached(), &fake.address).unwrap();
        for _ in 0..5 {
            assert_eq!(client.get("k").unwrap().unwrap(), b"1");
        }
        assert_eq!(gets.load(Ordering::SeqCst), 1);
        client.set("k", "v").unwrap();
        assert_eq!(client.get("k").unwrap().unwrap(), b"2", "an own write drops the value");
        assert_eq!(client.multi_get(&["k"]).unwrap()[0].as_deref(), Some(&b"2"[..]));
        assert_eq!((client.stats().hits, client.stats().entries), (5, 1));
    }
}

/// The race: the invalidation arrives right after the reply, or before it.
#[test]
fn a_value_is_never_older_than_an_invalidation_that_was_received() {
    for before in [false, true] {
        let (fake, gets) = counting(move |_, nth| match (nth, before) {
            (1, true) => (invalidate("k"), String::new()),
            (1, false) => (String::new(), invalidate("k")),
            _ => (String::new(), String::new()),
        });
        for how in Kind::ALL {
            gets.store(0, Ordering::SeqCst);
            let client = how.connect(cached(), &fake.address).unwrap();
            assert_eq!(client.get("k").unwrap().unwrap(), b"1");
            // The invalidation was in the same packet; it is handled by another thread.
            client.wait_coherent();
            assert_eq!(client.get("k").unwrap().unwrap(), b"2", "{how:?}, {before}");
            assert_eq!(client.get("k").unwrap().unwrap(), b"2");
        }
    }
}

#[test]
fn everything_is_dropped_when_the_connection_ends() {
    // The link is cut by a request for it; the blocking client has another connection before.
    let fake = Fake::start(|number, mut line| {
        if !line.greet() {
            return;
        }
        while let Some(words) = line.command() {
            match (words[0].as_str(), words.get(1).map(String::as_str)) {
                ("GET", Some("cut")) if number < 2 => return line.cut(),
                ("GET", _) => line.say(&value(&number.to_string())),
                _ => line.say("+PONG\r\n"),
            }
        }
    });
    for how in Kind::ALL {
        fake.connections.store(0, Ordering::SeqCst);
        let client = how.connect(cached(), &fake.address).unwrap();
        let first = client.get("k").unwrap().unwrap();
        assert_eq!(client.get("k").unwrap().unwrap(), first);
        client.get("cut").unwrap();
        assert_ne!(client.get("k").unwrap().unwrap(), first, "{how:?}");
        assert!(client.stats().clears >= 1);
    }
}

#[test]
fn a_silent_server_ends_the_lease() {
    // It answers nothing after the first read, pings included, and keeps the connection.
    let (gets, pings) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (got, pinged) = (gets.clone(), pings.clone());
    let fake = Fake::start(move |_, mut line| {
        line.greet();
        while let Some(words) = line.command() {
            if words[0] == "PING" {
                pinged.fetch_add(1, Ordering::SeqCst);
            } else if got.fetch_add(1, Ordering::SeqCst) == 0 {
                line.say(&value("v"));
            }
        }
    });
    for how in Kind::ALL {
        gets.store(0, Ordering::SeqCst);
        pings.store(0, Ordering::SeqCst);
        let options = cached().staleness_max(Duration::from_millis(300));
        let client = how.connect(options.timeout(Duration::from_secs(1)), &fake.address).unwrap();
        let began = Instant::now();
        assert!(client.get("k").is_ok());
        assert!(client.get("k").is_ok(), "it is cached");
        assert_eq!(gets.load(Ordering::SeqCst), 1);
        std::thread::sleep(Duration::from_millis(400).saturating_sub(began.elapsed()));
        assert_eq!(kind(client.get("k")), ErrorKind::Timeout, "{how:?}");
        assert!(pings.load(Ordering::SeqCst) >= 1);
    }
}

#[test]
fn pings_keep_the_lease_while_nothing_is_read() {
    let (fake, gets) = counting(|_, _| (String::new(), String::new()));
    for how in Kind::ALL {
        gets.store(0, Ordering::SeqCst);
        let options = cached().staleness_max(Duration::from_millis(300));
        let client = how.connect(options, &fake.address).unwrap();
        client.get("k").unwrap();
        std::thread::sleep(Duration::from_millis(1000));
        assert_eq!(client.get("k").unwrap().unwrap(), b"1", "{how:?}");
    }
}

/// An invalidation is on its way; the server sends it before it answers the ping.
#[test]
fn wait_coherent_waits_for_what_was_sent_before() {
    let gets = Arc::new(AtomicUsize::new(0));
    let count = gets.clone();
    let fake = Fake::answering(move |_, words| match words[0].as_str() {
        "GET" => Some(value(&(count.fetch_add(1, Ordering::SeqCst) + 1).to_string())),
        _ => Some(format!("{}+PONG\r\n", invalidate("k"))),
    });
    for how in Kind::ALL {
        gets.store(0, Ordering::SeqCst);
        let client = how.connect(cached(), &fake.address).unwrap();
        assert_eq!(client.get("k").unwrap().unwrap(), b"1");
        client.wait_coherent();
        assert_eq!(client.get("k").unwrap().unwrap(), b"2", "{how:?}");
    }
}

#[test]
fn wait_coherent_drops_everything_if_the_server_does_not_answer() {
    let (fake, _) = counting(|_, _| (String::new(), String::new()));
    let silent = Fake::start(|_, mut line| {
        line.greet();
        while let Some(words) = line.command() {
            if words[0] == "GET" {
                line.say(&value("v"));
            }
        }
    });
    for how in Kind::ALL {
        let client = how.connect(cached(), &silent.address).unwrap();
        client.get("k").unwrap();
        soon(|| client.wait_coherent());
        assert_eq!(client.stats().entries, 0, "{how:?}");
        // Without a cache it does nothing.
        soon(|| how.connect(quick(), &fake.address).unwrap().wait_coherent());
    }
}

#[test]
fn a_server_that_cannot_track_is_refused() {
    let fake = Fake::start(|_, mut line| {
        while line.command().is_some() {
            line.say("-ERR unknown command 'HELLO'\r\n");
        }
    });
    let old = Fake::start(|number, mut line| {
        // The blocking client's first connection needs no tracking.
        while let Some(words) = line.command() {
            line.say(match words[0].as_str() {
                "PING" if number == 0 => "+PONG\r\n",
                "HELLO" => "*2\r\n$5\r\nproto\r\n:2\r\n",
                _ => "+OK\r\n",
            });
        }
    });
    for how in Kind::ALL {
        let refused = kind(how.connect(cached(), &fake.address));
        assert_eq!(refused, ErrorKind::Unsupported, "{how:?}");
        old.connections.store(0, Ordering::SeqCst);
        assert_eq!(kind(how.connect(cached(), &old.address)), ErrorKind::Protocol, "{how:?}");
    }
}
