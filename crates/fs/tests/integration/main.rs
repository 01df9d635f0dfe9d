//! Tests of named files, in one program, which is linked once.

mod crash;
mod writes;
