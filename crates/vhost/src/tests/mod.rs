//! The rings, judged by a guest that is played in plain memory.

mod crash;
mod guest;
mod ring;
