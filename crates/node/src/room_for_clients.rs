//! How many connections the descriptor limit allows.

use crate::error::{Error, Kind};

/// Connections that a core serves.
const CLIENTS_PER_CORE: usize = 10_000;
/// A node needs at least this many: clients of metrics and the admin socket use some.
const CLIENTS_MIN: u64 = 16;
/// Descriptors reserved for future files and disks: an eighth of the limit, at least a quarter of a
/// low one, from the first to the second of these.
const KEPT_MIN: u64 = 32;
const KEPT_USUAL: u64 = 128;

/// The number of connections to accept: as many as the cores can serve, or fewer if the descriptors
/// do not suffice. `first_free` is the lowest free descriptor; the kernel hands out the lowest
/// first.
///
/// # Errors
/// When that allows hardly any.
pub(crate) fn clients_max(cores: usize, limit: u64, first_free: u64) -> Result<usize, Error> {
    let usual = CLIENTS_PER_CORE.saturating_mul(cores);
    let kept = (limit / 4).clamp(KEPT_MIN, KEPT_USUAL).max(limit / 8);
    let room = limit.saturating_sub(first_free.saturating_add(kept));
    if room < CLIENTS_MIN {
        let enough = (2 * (first_free + KEPT_USUAL)).next_power_of_two().max(1024);
        let what = format!(
            "{limit} descriptors (`ulimit -n`) are too few: {first_free} are in use, {kept} are reserved for files, \
             and that leaves {room} for connections"
        );
        let hint = format!(
            "raise the limit: `ulimit -n {enough}`, or LimitNOFILE={enough} of a systemd unit"
        );
        return Err(Error::new(Kind::System, what).hint(hint));
    }
    let clients = usize::try_from(room).unwrap_or(usize::MAX).min(usual);
    if clients < usual {
        tracing::warn!(
            "{limit} descriptors (`ulimit -n`) allow only {clients} of {usual} connections: {first_free} are in use, \
             {kept} are reserved for files"
        );
    }
    Ok(clients)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_descriptors_are_used_and_hardly_any_are_refused() {
        let clients = |limit, first_free| clients_max(2, limit, first_free).ok();
        assert_eq!(clients(1 << 20, 60), Some(20_000));
        assert_eq!(clients(4096, 60), Some(4096 - 60 - 512));
        assert_eq!(clients(1024, 60), Some(1024 - 60 - 128));
        assert_eq!(clients(256, 60), Some(256 - 60 - 64));
        assert_eq!(clients(128, 40), Some(128 - 40 - 32), "there was room for one");
        assert_eq!(clients(128, 80), Some(16));
        assert_eq!(clients(128, 81), None);
        assert_eq!(clients(16, 20), None);
        let error = format!("{:?}", clients_max(2, 128, 90).unwrap_err());
        assert!(error.contains("128 descriptors") && error.contains("ulimit -n 1024"), "{error}");
    }
}
