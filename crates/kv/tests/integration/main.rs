//! Tests of the Redis server through its public interface, in one program, which is linked once.

mod expiry;
mod order;
mod simulated;
mod stage;
mod tracking;
mod transactions;
mod writes;
