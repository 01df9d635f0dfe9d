//! Waiting for several futures at once.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;

/// Waits for all futures; their results in the same order. Every wake-up polls all that have not
/// ended, so it is for a few.
pub async fn join_all<T>(mut futures: Vec<Pin<Box<dyn Future<Output = T> + '_>>>) -> Vec<T> {
    let mut results: Vec<Option<T>> = futures.iter().map(|_| None).collect();
    poll_fn(|cx| {
        let mut ended = true;
        for (future, result) in futures.iter_mut().zip(&mut results) {
            if result.is_none() {
                match future.as_mut().poll(cx) {
                    Poll::Ready(value) => *result = Some(value),
                    Poll::Pending => ended = false,
                }
            }
        }
        if ended { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    results.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};
    use std::task::{Context, Waker};

    use super::*;

    #[test]
    fn it_ends_when_all_have_ended() {
        let now = |futures| {
            let mut all = Box::pin(join_all::<i32>(futures));
            all.as_mut().poll(&mut Context::from_waker(Waker::noop()))
        };
        assert_eq!(now(vec![]), Poll::Ready(vec![]));
        assert_eq!(now(vec![Box::pin(ready(1)), Box::pin(ready(2))]), Poll::Ready(vec![1, 2]));
        assert!(now(vec![Box::pin(ready(1)), Box::pin(pending())]).is_pending());
    }
}
