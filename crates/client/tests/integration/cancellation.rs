//! Every future of the asynchronous client is dropped at every await.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use client::{Client, ErrorKind, Options, WriteBatch};

use crate::redis::Redis;

/// Polls a future up to `polls` times, each time after it was woken, and drops it. Its output, if
/// it got there.
async fn at_most<F: Future>(polls: usize, future: F) -> Option<F::Output> {
    let mut future = pin!(future);
    let mut done = 0;
    poll_fn(|cx| {
        if done == polls {
            return Poll::Ready(None);
        }
        done += 1;
        let polled = future.as_mut().poll(cx);
        match polled {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending if done == polls => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

/// Runs `call` with more and more polls until it ends by itself, and `check` after each.
async fn at_every_await<F: Future<Output = T>, T, C: Future<Output = ()>>(
    mut call: impl FnMut() -> F,
    mut check: impl FnMut(bool) -> C,
) {
    for polls in 0.. {
        let ended = at_most(polls, call()).await.is_some();
        check(ended).await;
        if ended {
            assert!(polls > 0);
            return;
        }
        assert!(polls < 200, "it does not end");
    }
}

async fn all(options: Options, address: &str) {
    let client = options.clone().connect(address).await.unwrap();
    let client = &client;
    client.delete("a").await.unwrap();
    client.delete("b").await.unwrap();
    let intact = |_| async move {
        client.set("intact", "yes").await.unwrap();
        client.wait_coherent().await;
        assert_eq!(client.get("intact").await.unwrap().unwrap(), b"yes");
        let keys = ["intact", "absent"];
        assert_eq!(client.multi_get(keys).await.unwrap(), [Some(b"yes".to_vec()), None]);
    };
    at_every_await(|| options.clone().connect(address), intact).await;
    at_every_await(|| client.get("absent"), intact).await;
    at_every_await(|| client.multi_get(["intact", "absent"]), intact).await;
    at_every_await(|| client.delete("absent"), intact).await;
    at_every_await(|| client.wait_coherent(), intact).await;
    at_every_await(|| client.delete_range("a".."b"), intact).await;

    // A write is made whole or not at all, and the cache does not hide it.
    let mut n = 0;
    at_every_await(
        || {
            n += 1;
            client.set("k", n.to_string())
        },
        |_| agrees(client, address, "k"),
    )
    .await;
    at_every_await(
        || {
            let mut batch = WriteBatch::new();
            batch.set("a", n.to_string()).delete("absent").set("b", n.to_string());
            n += 1;
            client.write(batch)
        },
        |_| async {
            agrees(client, address, "a").await;
            agrees(client, address, "b").await;
            let found = client.multi_get(["a", "b"]).await.unwrap();
            assert_eq!(found[0], found[1], "a half batch");
        },
    )
    .await;
    at_every_await(
        || async {
            let mut transaction = client.transaction();
            transaction.get("a").await?;
            transaction.get("absent").await?;
            transaction.set("a", "t");
            transaction.set("b", "t");
            transaction.commit().await
        },
        |_| async {
            agrees(client, address, "a").await;
            let found = client.multi_get(["a", "b"]).await.unwrap();
            assert_eq!(found[0], found[1], "a half transaction");
        },
    )
    .await;

    // A read of a transaction that was interrupted: it must not commit.
    for polls in 1.. {
        let mut transaction = client.transaction();
        transaction.get("a").await.unwrap();
        let ended = at_most(polls, transaction.get("b")).await.is_some();
        transaction.set("a", "interrupted");
        let committed = transaction.commit().await;
        if ended {
            committed.unwrap();
            break;
        }
        assert_eq!(committed.unwrap_err().kind(), ErrorKind::Unreachable);
    }

    // A range loses no entry. This server has none, but its error must arrive once.
    let mut range = client.range(..);
    let mut polls = 0;
    let error = loop {
        polls += 1;
        if let Some(next) = at_most(1, range.next()).await {
            break next.unwrap().unwrap_err();
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
        assert!(polls < 5000);
    };
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(range.next().await.is_none());
}

/// What a client with a cache reads is what is there, once what was dropped has ended.
async fn agrees(client: &Client, address: &str, key: &str) {
    let other = Client::connect(address).await.unwrap();
    // On the same connection as what was dropped, and so after it.
    client.wait_coherent().await;
    client.get("barrier").await.unwrap();
    client.delete("barrier").await.unwrap();
    let there = other.get(key).await.unwrap();
    assert_eq!(client.get(key).await.unwrap(), there);
}

#[test]
fn every_future_may_be_dropped_at_every_await() {
    let redis = Redis::start(&[]);
    for cache in [0, 1 << 20] {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(all(Options::new().cache(cache), &redis.address()));
    }
}

#[test]
fn calls_fail_when_the_runtime_of_the_client_has_ended() {
    let redis = Redis::start(&[]);
    let first = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let client = first.block_on(Client::connect(&redis.address())).unwrap();
    drop(first);
    let second = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let error = second.block_on(client.get("k")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed);
}

#[test]
fn a_thousand_tasks_are_answered_while_some_give_up() {
    let redis = Redis::start(&[]);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let client = Client::connect(&redis.address()).await.unwrap();
        let tasks: Vec<_> = (0..3000_u32)
            .map(|n| {
                let client = client.clone();
                tokio::spawn(async move {
                    let (key, value) = (format!("k{n}"), n.to_string());
                    if n % 3 == 0 {
                        let _ = at_most(n as usize % 4, client.set(&key, &value)).await;
                        return;
                    }
                    client.set(&key, &value).await.unwrap();
                    assert_eq!(client.get(&key).await.unwrap().unwrap(), value.as_bytes());
                })
            })
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
    });
}
