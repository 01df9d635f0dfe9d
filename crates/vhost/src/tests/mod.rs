//! The rings, judged by a guest that is played in plain memory.

mod arbitrary;
mod crash;
mod guest;
mod hostile;
mod memory;
mod ring;
mod share;
