//! Tests of the rings with a guest in plain memory.

mod arbitrary;
mod crash;
mod guest;
mod hostile;
mod memory;
mod ring;
mod share;
mod trouble;
