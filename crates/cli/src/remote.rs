//! A small blocking client for a running node: one connection, one request at a time.
//!
//! The command line tool is a client here and runs no core, so it uses the system's sockets.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use resp::{Decoder, DecoderLimits, Reply, write_command};

use crate::failure::Failure;

/// The environment variable with the node's password, as for redis-cli.
const PASSWORD_VARIABLE: &str = "REDISCLI_AUTH";

/// How long to wait for a connection, and for the next bytes of an answer.
const PATIENCE: Duration = Duration::from_secs(30);

/// A connection to a node.
pub struct Remote {
    stream: TcpStream,
    decoder: Decoder,
    place: String,
}

impl Remote {
    /// Connects to `HOST`, `HOST:PORT` or `:PORT`.
    pub fn connect(place: &str) -> Result<Remote, Failure> {
        let place = full_place(place);
        let failed = |error: io::Error| {
            Failure::new(format!("cannot connect to {place}: {error}"))
                .hint("is a node running there? start one with: millrace serve --data DIR")
        };
        let mut last = io::Error::from(io::ErrorKind::NotFound);
        for addr in place.to_socket_addrs().map_err(failed)? {
            match TcpStream::connect_timeout(&addr, PATIENCE) {
                Ok(stream) => {
                    stream.set_read_timeout(Some(PATIENCE)).map_err(failed)?;
                    stream.set_write_timeout(Some(PATIENCE)).map_err(failed)?;
                    stream.set_nodelay(true).map_err(failed)?;
                    let decoder = Decoder::new(DecoderLimits::default());
                    let mut remote = Remote { stream, decoder, place };
                    if let Some(password) = std::env::var_os(PASSWORD_VARIABLE) {
                        remote.call(&[b"AUTH", password.as_bytes()])?;
                    }
                    return Ok(remote);
                }
                Err(error) => last = error,
            }
        }
        Err(failed(last))
    }

    /// Sends a command and waits for its reply; an error reply is a failure.
    pub fn call(&mut self, args: &[&[u8]]) -> Result<Reply, Failure> {
        let mut request = Vec::new();
        write_command(&mut request, args);
        self.send(&request)?;
        self.reply()
    }

    /// Sends commands; the caller takes their replies one by one.
    pub fn send(&mut self, commands: &[u8]) -> Result<(), Failure> {
        let sent = self.stream.write_all(commands);
        sent.map_err(|error| Failure::new(format!("{}: {error}", self.place)))
    }

    /// Waits for the next reply; an error reply is a failure.
    pub fn reply(&mut self) -> Result<Reply, Failure> {
        let place = self.place.clone();
        let failed = |error: &dyn std::fmt::Display| Failure::new(format!("{place}: {error}"));
        let mut chunk = vec![0; 64 << 10];
        loop {
            match self.decoder.next_reply().map_err(|e| failed(&e))? {
                Some(Reply::Error(text)) => {
                    let failure = failed(&String::from_utf8_lossy(&text));
                    return Err(match text.starts_with(b"NOAUTH") {
                        true => failure.hint(format!(
                            "set the environment variable {PASSWORD_VARIABLE} to its password"
                        )),
                        false => failure,
                    });
                }
                Some(reply) => return Ok(reply),
                None => {}
            }
            match self.stream.read(&mut chunk) {
                Ok(0) => return Err(failed(&"the node closed the connection")),
                Ok(n) => self.decoder.feed(&chunk[..n]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Err(failed(&format!("no answer within {} s", PATIENCE.as_secs())));
                }
                Err(error) => return Err(failed(&error)),
            }
        }
    }

    /// The failure for a reply of the wrong kind.
    pub fn unexpected(&self, command: &str, reply: &Reply) -> Failure {
        Failure::new(format!("{}: unexpected reply to {command}: {reply:?}", self.place))
    }
}

/// Adds the default host and port where they are left out.
fn full_place(place: &str) -> String {
    const HOST: &str = "127.0.0.1";
    const PORT: &str = "6379";
    match place.rsplit_once(':') {
        Some(("", port)) => format!("{HOST}:{port}"),
        Some((host, _)) if host.starts_with('[') && !place.ends_with(']') => place.to_owned(),
        Some((host, _)) if !host.contains(':') => place.to_owned(),
        Some(_) if place.starts_with('[') => format!("{place}:{PORT}"),
        Some(_) => format!("[{place}]:{PORT}"),
        None => format!("{place}:{PORT}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_and_port_can_be_left_out() {
        for (given, full) in [
            (":7000", "127.0.0.1:7000"),
            ("db.example", "db.example:6379"),
            ("db.example:7000", "db.example:7000"),
            ("::1", "[::1]:6379"),
            ("[::1]", "[::1]:6379"),
            ("[::1]:7000", "[::1]:7000"),
        ] {
            assert_eq!(full_place(given), full);
        }
    }
}
