//! Tests of block devices through their public interface, in one program, which is linked once. A
//! test that needs its own process (its allocator, a mutant, loom) is a separate program.
#![cfg(not(loom))]

mod buf_channel;
#[path = "../common/mod.rs"]
mod common;
mod conformance;
mod copy;
mod dirty;
mod faults;
mod layers;
mod nbd;
mod takeover;
