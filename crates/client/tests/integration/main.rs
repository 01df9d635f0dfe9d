//! The clients against a scripted server and against redis-server.

mod cancellation;
mod coherence;
#[path = "../../examples/everything.rs"]
#[allow(dead_code, reason = "its main function is for the black-box tests")]
mod everything;
mod fake;
mod faults;
mod redis;
mod subject;
#[cfg(feature = "tls")]
mod tls;
