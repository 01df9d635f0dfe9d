//! Tests of the node through its public interface, in one program, which is linked once. A mutant
//! applies to a whole process, so mutants are a separate program.

mod confined;
#[path = "../handover/mod.rs"]
mod handover;
mod simulated;
