//! Calls everything that the clients can do, and checks the answers: `everything ADDRESS
//! millrace|redis [tracks] [ca=FILE]`. The server must have no keys that begin with `client:`. With
//! the feature `tls`, the address may be `rediss://...`, and the authority a file.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use client::{Client, ErrorKind, Options, Result, Tls, Ttl, WriteBatch, blocking};

type Outcome = std::result::Result<(), Box<dyn std::error::Error>>;

/// A server that has not noticed the end of a key by then never will.
const LIMIT: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let (address, is_node) = match words.as_slice() {
        [address, server, ..] if server == "millrace" => (address, true),
        [address, server, ..] if server == "redis" => (address, false),
        _ => {
            eprintln!("usage: everything ADDRESS millrace|redis [tracks] [ca=FILE]");
            return ExitCode::FAILURE;
        }
    };
    let tracks = words.iter().any(|word| word == "tracks");
    let authority = words.iter().find_map(|word| word.strip_prefix("ca="));
    let options = match authority {
        Some(file) => Options::new().tls(Tls::new().authority(file)),
        None => Options::new(),
    };
    match run(address, &options, is_node, tracks) {
        Ok(()) => {
            println!("everything is as it should be");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs with both clients, and with a cache where the server can track keys.
pub fn run(address: &str, options: &Options, is_node: bool, tracks: bool) -> Outcome {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    for cache in [0, 1 << 20] {
        if cache > 0 && !tracks {
            let refused = options.clone().cache(cache).connect_blocking(address);
            check(refused.err().map(|e| e.kind()), Some(ErrorKind::Unsupported), "a cache")?;
            continue;
        }
        let client = options.clone().cache(cache).connect_blocking(address)?;
        with_threads(&client, is_node)?;
        let options = options.clone().cache(cache);
        runtime.block_on(async { with_tasks(&options.connect(address).await?, is_node).await })?;
    }
    Ok(())
}

fn check<T: PartialEq + std::fmt::Debug>(is: T, should: T, what: &str) -> Outcome {
    if is == should { Ok(()) } else { Err(format!("{what}: {is:?} instead of {should:?}").into()) }
}

fn text(value: &str) -> Option<Vec<u8>> {
    Some(value.as_bytes().to_vec())
}

fn kind<T>(result: Result<T>) -> Option<ErrorKind> {
    result.err().map(|error| error.kind())
}

/// Whether a time to live is what it was a moment ago.
fn is_left(ttl: Ttl, of: Duration) -> Outcome {
    match ttl {
        Ttl::Left(left) if left <= of && left > of / 2 => Ok(()),
        other => Err(format!("{other:?} of {of:?}").into()),
    }
}

fn with_threads(client: &blocking::Client, is_node: bool) -> Outcome {
    let keys = ["client:a", "client:b", "client:c", "client:d"];
    for key in keys {
        client.delete(key)?;
    }
    for _ in 0..2 {
        check(client.get(keys[0])?, None, "an absent key")?;
    }
    client.set(keys[0], "1")?;
    for _ in 0..2 {
        check(client.get(keys[0])?, text("1"), "a key that was set")?;
    }
    client.set(keys[0], b"\0\r\n\xff")?;
    check(client.get(keys[0])?, Some(b"\0\r\n\xff".to_vec()), "bytes")?;
    client.set(keys[1], "")?;
    let large = "x".repeat(3 << 20);
    client.set(keys[2], &large)?;
    let found = client.multi_get(keys)?;
    check(found, vec![Some(b"\0\r\n\xff".to_vec()), text(""), text(&large), None], "many keys")?;
    check(client.multi_get::<&str>([])?, vec![], "no keys")?;
    check(client.delete(keys[2])?, true, "deletion")?;
    check(client.delete(keys[2])?, false, "deletion of nothing")?;

    let mut batch = WriteBatch::new();
    batch.set(keys[0], "2").delete(keys[1]).set(keys[2], "3").set(keys[3], "4");
    client.write(batch)?;
    client.write(WriteBatch::new())?;
    check(client.multi_get(keys)?, vec![text("2"), None, text("3"), text("4")], "a batch")?;
    let mut batch = WriteBatch::new();
    batch.set(keys[1], "5");
    client.write(batch)?;
    check(client.get(keys[1])?, text("5"), "a batch of one")?;

    let mut transaction = client.transaction();
    check(transaction.get(keys[0])?, text("2"), "a transaction's read")?;
    transaction.set(keys[0], "6");
    transaction.delete(keys[1]);
    check(transaction.get(keys[0])?, text("6"), "a transaction's own write")?;
    check(client.get(keys[0])?, text("2"), "a key before the commit")?;
    transaction.commit()?;
    check(client.multi_get(&keys[..2])?, vec![text("6"), None], "a transaction")?;
    let mut transaction = client.transaction();
    transaction.get(keys[0])?;
    client.set(keys[0], "7")?;
    transaction.set(keys[1], "never");
    check(kind(transaction.commit()), Some(ErrorKind::Conflict), "a conflict")?;
    check(client.multi_get(&keys[..2])?, vec![text("7"), None], "after a conflict")?;
    let mut transaction = client.transaction();
    check(transaction.get(keys[1])?, None, "an absent key in a transaction")?;
    transaction.commit()?;
    let mut transaction = client.transaction();
    transaction.set(keys[1], "8");
    transaction.commit()?;
    check(client.get(keys[1])?, text("8"), "a transaction that only writes")?;
    deadlines_with_threads(client)?;

    if !is_node {
        check(kind(client.delete_range("a".."b")), Some(ErrorKind::Unsupported), "ranges")?;
        let first = client.range(..).next().and_then(kind);
        check(first, Some(ErrorKind::Unsupported), "a range")?;
        let mut batch = WriteBatch::new();
        batch.set(keys[3], "never").delete_range("client:x".."client:y");
        check(kind(client.write(batch)), Some(ErrorKind::Unsupported), "a batch with a range")?;
        check(client.get(keys[3])?, text("4"), "after a batch that was refused")?;
        return Ok(());
    }
    for n in 0..1000 {
        client.set(format!("client:n{n:04}"), "x".repeat(n % 300))?;
    }
    let forward: Vec<_> = client.prefix("client:n").collect::<Result<_>>()?;
    check(forward.len(), 1000, "entries with a prefix")?;
    check(forward[7].1.len(), 7, "the value of an entry")?;
    let mut backward: Vec<_> = client.prefix("client:n").rev().collect::<Result<_>>()?;
    backward.reverse();
    check(backward == forward, true, "a range backward")?;
    check(client.range("client:n0010".."client:n0020").count(), 10, "a range")?;
    check(client.range("client:n0010"..="client:n0020").count(), 11, "an inclusive range")?;
    check(client.range("client:n2".."client:n1").count(), 0, "a range that ends before it begins")?;
    check(client.delete_range("client:n0010".."client:n0020")?, 10, "deletion of a range")?;
    check(client.delete_range("b".."a")?, 0, "deletion of an empty range")?;
    let mut batch = WriteBatch::new();
    batch.set("client:n0000", "never").delete_range("client:n".."client:o").set(keys[3], "9");
    client.write(batch)?;
    check(client.prefix("client:n").count(), 0, "a batch with a range")?;
    check(client.get(keys[3])?, text("9"), "a batch behind a range")
}

fn deadlines_with_threads(client: &blocking::Client) -> Outcome {
    let key = "client:ends";
    let (minute, moment) = (Duration::from_secs(60), Duration::from_millis(20));
    client.delete(key)?;
    check(client.ttl(key)?, Ttl::NoKey, "the time to live of nothing")?;
    check(client.expire(key, minute)?, false, "a time to live for nothing")?;
    check(client.persist(key)?, false, "no end of nothing")?;
    client.set(key, "1")?;
    check(client.ttl(key)?, Ttl::Forever, "the time to live of a key that was set")?;
    check(client.persist(key)?, false, "no end of a key without one")?;
    check(client.expire(key, minute)?, true, "a time to live")?;
    is_left(client.ttl(key)?, minute)?;
    check(client.get(key)?, text("1"), "a key with a time to live")?;
    check(client.persist(key)?, true, "no end of a key with one")?;
    check(client.ttl(key)?, Ttl::Forever, "the time to live of a key without end")?;
    client.set_with_ttl(key, "2", minute)?;
    is_left(client.ttl(key)?, minute)?;
    check(client.get(key)?, text("2"), "a key that was set with a time to live")?;
    client.set(key, "3")?;
    check(client.ttl(key)?, Ttl::Forever, "the time to live of a key that was set again")?;
    let longest = Duration::from_millis(1 << 62);
    client.set_with_ttl(key, "4", longest)?;
    is_left(client.ttl(key)?, longest)?;
    for none in [Duration::ZERO, Duration::MAX] {
        let refused = Some(ErrorKind::InvalidOption);
        check(kind(client.set_with_ttl(key, "5", none)), refused, "an impossible time")?;
        check(kind(client.expire(key, none)), refused, "an impossible time")?;
        let mut batch = WriteBatch::new();
        batch.set("client:stays", "1").set_with_ttl(key, "5", none);
        check(kind(client.write(batch)), refused, "an impossible time in a batch")?;
    }
    check(client.multi_get([key, "client:stays"])?, vec![text("4"), None], "what was refused")?;

    let mut batch = WriteBatch::new();
    batch.set_with_ttl(key, "6", minute);
    client.write(batch)?;
    is_left(client.ttl(key)?, minute)?;
    let mut batch = WriteBatch::new();
    batch.set_with_ttl("client:stays", "7", minute).set("client:stays", "8");
    batch.set(key, "7").set_with_ttl(key, "8", minute);
    client.write(batch)?;
    is_left(client.ttl(key)?, minute)?;
    check(client.ttl("client:stays")?, Ttl::Forever, "the last write of a batch")?;
    check(client.multi_get([key, "client:stays"])?, vec![text("8"); 2], "a batch with deadlines")?;
    let mut transaction = client.transaction();
    check(transaction.get(key)?, text("8"), "a transaction's read")?;
    transaction.set(key, "9");
    transaction.set_with_ttl("client:stays", "9", minute);
    check(transaction.get("client:stays")?, text("9"), "a transaction's own write")?;
    transaction.commit()?;
    check(client.ttl(key)?, Ttl::Forever, "a key that a transaction has set")?;
    is_left(client.ttl("client:stays")?, minute)?;
    let mut batch = WriteBatch::new();
    (0..3000).for_each(|n| {
        batch.set_with_ttl(format!("client:e{n}"), "v", minute);
    });
    client.write(batch)?;
    is_left(client.ttl("client:e2999")?, minute)?;
    let mut batch = WriteBatch::new();
    batch.delete("client:stays");
    (0..3000).for_each(|n| {
        batch.delete(format!("client:e{n}"));
    });
    client.write(batch)?;

    // Also when it is cached meanwhile, and when the server is only asked for other keys.
    let began = Instant::now();
    let mut batch = WriteBatch::new();
    batch.set("client:a", "1").set_with_ttl(key, "10", moment);
    client.write(batch)?;
    while client.get(key)?.is_some() {
        check(began.elapsed() < LIMIT, true, "a key ends")?;
    }
    check(client.ttl(key)?, Ttl::NoKey, "the time to live of a key that has ended")?;
    check(client.expire(key, minute)?, false, "a time to live after the end")?;
    // What the server has said once stays said.
    client.set(key, "11")?;
    check(client.get(key)?, text("11"), "a key that was set again")?;
    check(client.expire(key, moment)?, true, "a short time to live")?;
    client.get(key)?;
    while client.ttl(key)? != Ttl::NoKey {
        check(began.elapsed() < LIMIT, true, "a key ends")?;
    }
    check(client.get(key)?, None, "a key that has ended")
}

async fn deadlines_with_tasks(client: &Client) -> Outcome {
    let key = "client:ends";
    let (minute, moment) = (Duration::from_secs(60), Duration::from_millis(20));
    client.delete(key).await?;
    check(client.ttl(key).await?, Ttl::NoKey, "the time to live of nothing")?;
    check(client.expire(key, minute).await?, false, "a time to live for nothing")?;
    check(client.persist(key).await?, false, "no end of nothing")?;
    client.set(key, "1").await?;
    check(client.ttl(key).await?, Ttl::Forever, "the time to live of a key that was set")?;
    check(client.persist(key).await?, false, "no end of a key without one")?;
    check(client.expire(key, minute).await?, true, "a time to live")?;
    is_left(client.ttl(key).await?, minute)?;
    check(client.get(key).await?, text("1"), "a key with a time to live")?;
    check(client.persist(key).await?, true, "no end of a key with one")?;
    check(client.ttl(key).await?, Ttl::Forever, "the time to live of a key without end")?;
    client.set_with_ttl(key, "2", minute).await?;
    is_left(client.ttl(key).await?, minute)?;
    check(client.get(key).await?, text("2"), "a key that was set with a time to live")?;
    client.set(key, "3").await?;
    check(client.ttl(key).await?, Ttl::Forever, "the time to live of a key that was set again")?;
    let longest = Duration::from_millis(1 << 62);
    client.set_with_ttl(key, "4", longest).await?;
    is_left(client.ttl(key).await?, longest)?;
    for none in [Duration::ZERO, Duration::MAX] {
        let refused = Some(ErrorKind::InvalidOption);
        check(kind(client.set_with_ttl(key, "5", none).await), refused, "an impossible time")?;
        check(kind(client.expire(key, none).await), refused, "an impossible time")?;
        let mut batch = WriteBatch::new();
        batch.set("client:stays", "1").set_with_ttl(key, "5", none);
        check(kind(client.write(batch).await), refused, "an impossible time in a batch")?;
    }
    check(
        client.multi_get([key, "client:stays"]).await?,
        vec![text("4"), None],
        "what was refused",
    )?;

    let mut batch = WriteBatch::new();
    batch.set_with_ttl(key, "6", minute);
    client.write(batch).await?;
    is_left(client.ttl(key).await?, minute)?;
    let mut batch = WriteBatch::new();
    batch.set_with_ttl("client:stays", "7", minute).set("client:stays", "8");
    batch.set(key, "7").set_with_ttl(key, "8", minute);
    client.write(batch).await?;
    is_left(client.ttl(key).await?, minute)?;
    check(client.ttl("client:stays").await?, Ttl::Forever, "the last write of a batch")?;
    check(
        client.multi_get([key, "client:stays"]).await?,
        vec![text("8"); 2],
        "a batch with deadlines",
    )?;
    let mut transaction = client.transaction();
    check(transaction.get(key).await?, text("8"), "a transaction's read")?;
    transaction.set(key, "9");
    transaction.set_with_ttl("client:stays", "9", minute);
    check(transaction.get("client:stays").await?, text("9"), "a transaction's own write")?;
    transaction.commit().await?;
    check(client.ttl(key).await?, Ttl::Forever, "a key that a transaction has set")?;
    is_left(client.ttl("client:stays").await?, minute)?;
    let mut batch = WriteBatch::new();
    (0..3000).for_each(|n| {
        batch.set_with_ttl(format!("client:e{n}"), "v", minute);
    });
    client.write(batch).await?;
    is_left(client.ttl("client:e2999").await?, minute)?;
    let mut batch = WriteBatch::new();
    batch.delete("client:stays");
    (0..3000).for_each(|n| {
        batch.delete(format!("client:e{n}"));
    });
    client.write(batch).await?;

    // Also when it is cached meanwhile, and when the server is only asked for other keys.
    let began = Instant::now();
    let mut batch = WriteBatch::new();
    batch.set("client:a", "1").set_with_ttl(key, "10", moment);
    client.write(batch).await?;
    while client.get(key).await?.is_some() {
        check(began.elapsed() < LIMIT, true, "a key ends")?;
    }
    check(client.ttl(key).await?, Ttl::NoKey, "the time to live of a key that has ended")?;
    check(client.expire(key, minute).await?, false, "a time to live after the end")?;
    // What the server has said once stays said.
    client.set(key, "11").await?;
    check(client.get(key).await?, text("11"), "a key that was set again")?;
    check(client.expire(key, moment).await?, true, "a short time to live")?;
    client.get(key).await?;
    while client.ttl(key).await? != Ttl::NoKey {
        check(began.elapsed() < LIMIT, true, "a key ends")?;
    }
    check(client.get(key).await?, None, "a key that has ended")
}

async fn with_tasks(client: &Client, is_node: bool) -> Outcome {
    let keys = ["client:a", "client:b", "client:c", "client:d"];
    for key in keys {
        client.delete(key).await?;
    }
    for _ in 0..2 {
        check(client.get(keys[0]).await?, None, "an absent key")?;
    }
    client.set(keys[0], "1").await?;
    for _ in 0..2 {
        check(client.get(keys[0]).await?, text("1"), "a key that was set")?;
    }
    client.set(keys[1], "").await?;
    let large = "x".repeat(3 << 20);
    client.set(keys[2], &large).await?;
    let found = client.multi_get(keys).await?;
    check(found, vec![text("1"), text(""), text(&large), None], "many keys")?;
    check(client.delete(keys[2]).await?, true, "deletion")?;
    check(client.delete(keys[2]).await?, false, "deletion of nothing")?;

    let mut batch = WriteBatch::new();
    batch.set(keys[0], "2").delete(keys[1]).set(keys[2], "3").set(keys[3], "4");
    client.write(batch).await?;
    check(client.multi_get(keys).await?, vec![text("2"), None, text("3"), text("4")], "a batch")?;

    let mut transaction = client.transaction();
    check(transaction.get(keys[0]).await?, text("2"), "a transaction's read")?;
    transaction.set(keys[0], "6");
    transaction.delete(keys[1]);
    check(transaction.get(keys[1]).await?, None, "a transaction's own write")?;
    transaction.commit().await?;
    check(client.multi_get(&keys[..2]).await?, vec![text("6"), None], "a transaction")?;
    let mut transaction = client.transaction();
    transaction.get(keys[0]).await?;
    client.set(keys[0], "7").await?;
    transaction.set(keys[1], "never");
    check(kind(transaction.commit().await), Some(ErrorKind::Conflict), "a conflict")?;
    check(client.multi_get(&keys[..2]).await?, vec![text("7"), None], "after a conflict")?;

    deadlines_with_tasks(client).await?;

    // Many at once.
    let tasks: Vec<_> = (0..2000)
        .map(|n| {
            let client = client.clone();
            tokio::spawn(async move {
                let key = format!("client:n{n:04}");
                client.set(&key, n.to_string()).await?;
                client.get(&key).await
            })
        })
        .collect();
    for (n, task) in tasks.into_iter().enumerate() {
        check(task.await??, text(&n.to_string()), "a key of a task")?;
    }
    client.wait_coherent().await;

    if is_node {
        let mut range = client.range("client:n".."client:o");
        let mut count = 0;
        while let Some(entry) = range.next().await {
            let (key, value) = entry?;
            check(key, format!("client:n{count:04}").into_bytes(), "a key of a range")?;
            check(Some(value), text(&count.to_string()), "a value of a range")?;
            count += 1;
        }
        check(count, 2000, "a range")?;
        let last = client.prefix("client:n").rev().next().await.transpose()?.map(|(key, _)| key);
        check(last, text("client:n1999"), "the last key of a range")?;
        check(client.delete_range("client:n".."client:o").await?, 2000, "deletion of a range")?;
    } else {
        let first = client.range(..).next().await.and_then(kind);
        check(first, Some(ErrorKind::Unsupported), "a range")?;
        let mut batch = WriteBatch::new();
        (0..2000).for_each(|n| {
            batch.delete(format!("client:n{n:04}"));
        });
        client.write(batch).await?;
    }
    check(client.get("client:n0000").await?, None, "a key after its end")
}
