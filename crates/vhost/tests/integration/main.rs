//! Tests of targets with real front ends, in one program, which is linked once.
//! A test that counts what its process holds (descriptors, memory) is a program beside this one.

#[path = "../common/mod.rs"]
mod common;
mod forced;
mod handover;
mod hostile;
mod image_lock;
mod in_force;
mod kept;
mod lost_memory;
mod neighbours;
mod removed_memory;
mod session;
mod sessions;
mod target;
mod virtio_driver;
