//! Scenarios over the simulated world, in one program, which is linked once.
//! A mutant holds for a whole process, so mutants are a program beside this one.

mod copies;
mod damage;
mod engine;
mod failing_copies;
mod guest;
mod history;
mod journal;
mod judge;
mod manifest;
mod reads;
mod repair;
mod space;
