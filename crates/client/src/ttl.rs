//! Times to live: how long keys have until the server removes them.

use std::time::Duration;

use crate::error::{Error, ErrorKind, Result};

/// The longest time to live, in milliseconds: servers add the present time to it, in 63 bits.
const MS_MAX: u64 = 1 << 62;

/// How long a key lives from now on; see [`Client::ttl`](crate::Client::ttl).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ttl {
    /// There is no such key.
    NoKey,
    /// The key has no deadline.
    Forever,
    /// The time until its deadline, in whole milliseconds.
    Left(Duration),
}

impl Ttl {
    /// By the reply to `PTTL`, which is -2 or less only for a key that is not there.
    pub(crate) fn of_reply(ms: i64) -> Ttl {
        match u64::try_from(ms) {
            Ok(ms) => Ttl::Left(Duration::from_millis(ms)),
            Err(_) if ms == -1 => Ttl::Forever,
            Err(_) => Ttl::NoKey,
        }
    }
}

/// A time to live as commands write it: in milliseconds, rounded up.
pub(crate) fn milliseconds(ttl: Duration) -> Result<String> {
    let ms = ttl.as_nanos().div_ceil(1_000_000);
    if ms == 0 || ms > u128::from(MS_MAX) {
        let text = format!("a time to live must be more than 0 and at most 2^62 ms, not {ttl:?}");
        return Err(Error::new(ErrorKind::InvalidOption, text));
    }
    Ok(ms.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_to_live_is_rounded_up_and_bounded() {
        let ms = |ttl| milliseconds(ttl).map_err(|error| error.kind());
        assert_eq!(ms(Duration::from_nanos(1)), Ok("1".to_owned()));
        assert_eq!(ms(Duration::from_millis(7)), Ok("7".to_owned()));
        assert_eq!(ms(Duration::from_micros(7001)), Ok("8".to_owned()));
        assert_eq!(ms(Duration::from_millis(MS_MAX)), Ok(MS_MAX.to_string()));
        for impossible in
            [Duration::ZERO, Duration::from_millis(MS_MAX) + Duration::from_nanos(1), Duration::MAX]
        {
            assert_eq!(ms(impossible), Err(ErrorKind::InvalidOption), "{impossible:?}");
        }
    }

    #[test]
    fn what_is_left_is_what_the_server_says() {
        assert_eq!(Ttl::of_reply(-2), Ttl::NoKey);
        assert_eq!(Ttl::of_reply(-1), Ttl::Forever);
        assert_eq!(Ttl::of_reply(0), Ttl::Left(Duration::ZERO));
        assert_eq!(Ttl::of_reply(1500), Ttl::Left(Duration::from_millis(1500)));
    }
}
