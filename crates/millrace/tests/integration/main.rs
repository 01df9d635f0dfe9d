//! Tests of the crate as its users see it, in one program, which is linked once.

#![expect(clippy::disallowed_methods, reason = "programs have threads of their own")]

mod basics;
mod ends;
mod futures;
mod model;
mod near;
mod transactions;
