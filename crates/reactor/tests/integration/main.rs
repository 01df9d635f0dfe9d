//! Tests of the reactor through its public interface, in one program, which is linked once.
//! A test that needs a process of its own (its limits, loom) is a program beside this one.
#![cfg(not(loom))]

#[macro_use]
mod every_driver;
mod drivers;
mod file_queue;
mod foreign;
mod images;
mod locks;
mod mapped;
mod sim;
mod sim_core;
mod sim_net;
mod sim_processes;
mod sim_wait;
mod sim_writes;
mod survivor;
mod unix;
mod writes;
