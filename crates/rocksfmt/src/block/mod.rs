//! The block: sorted entries with shared key prefixes, and an array of restart points.
//!
//! ```text
//! entry*  restart_offset: fixed32 × R  [hash index]  [values_offset: fixed32]  footer: fixed32
//! entry = varint32 shared, varint32 non_shared, varint32 value_len, key suffix, value
//! ```
//!
//! A key is the first `shared` bytes of its predecessor plus the suffix; at a restart point
//! `shared` is 0. The footer word holds R in bits 0 to 27 and flags above: a hash index, which is
//! skipped; keys and values in separate sections (since 11.0); a hint about key spacing, which is
//! ignored.
//!
//! A block is read and decompressed once, [`BlockLayout::parse`] parses its end once, and both are
//! kept in a cache. Lookups ([`point_lookup`]) and cursors ([`BlockCursor`]) take data and layout
//! as arguments and borrow neither, so a cursor can live next to a reference-counted buffer.
//!
//! Every offset is checked where it is used, so a layout used with the wrong bytes gives wrong
//! answers or errors, never a panic. Every step of a walk advances by at least two bytes, so all
//! loops end.
//!
//! In this room `layout` is the foundation; `search` and `cursor` use it, and `data` uses all
//! three. `head` looks up keys in a part of a block. `builder`, `checksum`, `decompress` and
//! `compress` stand alone, except that `compress` names its codecs with `decompress`. The room uses
//! only the files at the crate's root.

pub(crate) mod builder;
pub(crate) mod checksum;
pub(crate) mod compress;
pub(crate) mod cursor;
pub(crate) mod data;
pub(crate) mod decompress;
pub(crate) mod head;
pub(crate) mod layout;
pub(crate) mod search;
