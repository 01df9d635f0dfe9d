//! What the guest of a disk can tell of its device.

use bdev::Geometry;
use serde::{Deserialize, Serialize};

/// What a guest has been told of its disk, and what another device must therefore have, too.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shape {
    /// Size in bytes.
    pub size_bytes: u64,
    /// The logical block in bytes.
    pub block_size: u32,
    /// The disk takes no writes.
    pub read_only: bool,
    /// A completed write is durable only after a flush.
    pub volatile_cache: bool,
    /// The longest discard in bytes, if the disk takes any.
    pub discard_max: Option<u64>,
    /// The longest range of zeroes in bytes, if the disk writes zeroes.
    pub write_zeroes_max: Option<u64>,
}

impl Shape {
    /// That of a device.
    pub fn of(geometry: &Geometry) -> Shape {
        Shape {
            size_bytes: geometry.size_bytes,
            block_size: geometry.block_size,
            read_only: geometry.read_only,
            volatile_cache: geometry.volatile_cache,
            discard_max: geometry.discard.then_some(geometry.discard_max),
            write_zeroes_max: geometry.write_zeroes.then_some(geometry.write_zeroes_max),
        }
    }

    /// Refuses a device that the guest could tell from this one. A guest has been told what the
    /// disk can do, and so has a front end that connects again.
    ///
    /// # Errors
    /// The difference.
    pub fn fits(&self, new: &Shape) -> Result<(), String> {
        if new.read_only != self.read_only {
            let is = if new.read_only { "read-only" } else { "not read-only, as the disk is" };
            return Err(format!("it is {is}"));
        }
        for (what, old, new) in [
            ("discard", self.discard_max, new.discard_max),
            ("write zeroes over", self.write_zeroes_max, new.write_zeroes_max),
        ] {
            if new < old {
                let (new, old) = (new.unwrap_or(0), old.unwrap_or(0));
                return Err(format!("a request can {what} {new} bytes, and {old} of the disk"));
            }
        }
        if new.size_bytes != self.size_bytes {
            let (new, old) = (new.size_bytes, self.size_bytes);
            return Err(format!("it has {new} bytes, and the disk has {old}"));
        }
        if new.block_size > self.block_size {
            let (new, old) = (new.block_size, self.block_size);
            return Err(format!("its block has {new} bytes, and that of the disk {old}"));
        }
        if new.volatile_cache && !self.volatile_cache {
            return Err(
                "its writes are durable only after a flush, those of the disk always: add \
                        write=through"
                    .to_owned(),
            );
        }
        Ok(())
    }
}
