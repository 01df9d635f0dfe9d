// What the examples of the documentation include: a server, and the names that they have in the
// crate `millrace`.

include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/integration/server.rs"));

#[allow(unused_imports)]
mod millrace {
    pub use ::client;
    pub use ::client::Client;
    pub mod blocking {
        pub use ::client::blocking::*;
    }
}
