//! Tests of block devices through their public interface, in one program, which is linked once.
//! A test that needs a process of its own (its allocator, a mutant, loom) is a program beside this one.
#![cfg(not(loom))]

#[path = "../common/mod.rs"]
mod common;
mod conformance;
mod dirty;
mod faults;
mod layers;
mod takeover;
