//! Tests of the node through its public interface, in one program, which is linked once.
//! A mutant holds for a whole process, so mutants are a program beside this one.

mod confined;
#[path = "../handover/mod.rs"]
mod handover;
mod simulated;
