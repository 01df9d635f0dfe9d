//! Tests of the guest's side against real targets, in one program, which is linked once.

mod common;
mod daemon;
mod pauses;
