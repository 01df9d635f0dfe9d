//! The protocol's limits: those of Redis 7.0 where it has one, our own where it trusts the peer.

/// Longest line that is not a bulk string: an inline command, or a `*` or `$` header (Redis:
/// `PROTO_INLINE_MAX_SIZE`).
pub const INLINE_BYTES_MAX: usize = 64 * 1024;

/// Largest bulk string in a request (Redis: the default of `proto-max-bulk-len`).
pub const BULK_BYTES_MAX: usize = 512 * 1024 * 1024;

/// Maximum number of arguments of a request (Redis up to 6.2; 7.0 allows as many as an `int`
/// counts).
pub const ARGS_MAX: usize = 1024 * 1024;

/// Largest request as a whole, headers included (Redis: the default of
/// `client-query-buffer-limit`).
pub const REQUEST_BYTES_MAX: usize = 1024 * 1024 * 1024;

/// Deepest nesting of arrays, maps and sets in a reply that the decoder follows.
pub const REPLY_DEPTH_MAX: usize = 16;

/// Longest line in a reply that is not a bulk string: simple strings, errors, numbers, headers.
pub(crate) const REPLY_LINE_BYTES_MAX: usize = 64 * 1024;

// Spans are pairs of `u32`, so a `u32` must be able to address a whole request.
const _: () = assert!(REQUEST_BYTES_MAX < u32::MAX as usize);
const _: () = assert!(BULK_BYTES_MAX < REQUEST_BYTES_MAX);
const _: () = assert!(INLINE_BYTES_MAX < BULK_BYTES_MAX);
