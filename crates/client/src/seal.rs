//! Between the protocol's bytes and the network's: TLS, if it is wanted and built in.
//!
//! A connection's [`Seal`] may be shared by a thread that sends and one that receives. What sealing
//! returns must be sent in the order in which it was returned. No I/O.

use std::borrow::Cow;

use resp::Decoder;

use crate::error::Result;
use crate::options::Target;

#[cfg(feature = "tls")]
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Turns requests into what is sent, and what is received into replies.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seal {
    /// `None`: bytes are sent as they are.
    #[cfg(feature = "tls")]
    connection: Option<Arc<Mutex<rustls::ClientConnection>>>,
}

#[cfg(not(feature = "tls"))]
impl Seal {
    pub fn new(_: &Target) -> Result<Seal> {
        Ok(Seal::default())
    }

    /// What to send for these bytes.
    pub fn seal<'a>(&self, plain: &'a [u8]) -> Result<Cow<'a, [u8]>> {
        Ok(Cow::Borrowed(plain))
    }

    /// Takes bytes that were received.
    pub fn open(&self, bytes: &[u8], into: &mut Decoder) -> Result<()> {
        into.feed(bytes);
        Ok(())
    }
}

#[cfg(feature = "tls")]
impl Seal {
    /// A connection that has not sent anything.
    pub fn new(target: &Target) -> Result<Seal> {
        let Some((config, name)) = &target.tls else { return Ok(Seal::default()) };
        let mut connection = rustls::ClientConnection::new(config.clone(), name.clone())
            .map_err(|error| broken(&error))?;
        // A request is sealed as a whole.
        connection.set_buffer_limit(None);
        Ok(Seal { connection: Some(Arc::new(Mutex::new(connection))) })
    }

    /// What to send for these bytes, which may be none: then what TLS has to say by itself. During
    /// the handshake, they wait for its end.
    pub fn seal<'a>(&self, plain: &'a [u8]) -> Result<Cow<'a, [u8]>> {
        use std::io::Write;

        let Some(mut connection) = self.connection() else { return Ok(Cow::Borrowed(plain)) };
        let mut sealed = Vec::with_capacity(plain.len() + plain.len() / 256 + 64);
        let written = connection.writer().write_all(plain);
        written.map_err(|error| crate::Error::broken(&error))?;
        while connection.wants_write() {
            connection.write_tls(&mut sealed).map_err(|error| crate::Error::broken(&error))?;
        }
        Ok(Cow::Owned(sealed))
    }

    /// Takes bytes that were received.
    pub fn open(&self, mut bytes: &[u8], into: &mut Decoder) -> Result<()> {
        use std::io::{ErrorKind, Read};

        let Some(mut connection) = self.connection() else {
            into.feed(bytes);
            return Ok(());
        };
        let mut plain = [0; 16 << 10];
        let mut has_fed = false;
        loop {
            let ended = bytes.is_empty();
            if !ended {
                connection.read_tls(&mut bytes).map_err(|error| crate::Error::broken(&error))?;
            }
            let state = connection.process_new_packets().map_err(|error| broken(&error))?;
            let has_closed = state.peer_has_closed();
            loop {
                match connection.reader().read(&mut plain) {
                    // The server has said that it ends.
                    Ok(0) => break,
                    Ok(count) => {
                        into.feed(&plain[..count]);
                        has_fed = true;
                    }
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    Err(error) => return Err(crate::Error::broken(&error)),
                }
            }
            // What comes after that is not the server's, and would not be taken. Replies that came
            // before are answers.
            match has_closed {
                true if !has_fed => return Err(crate::Error::ended()),
                true => return Ok(()),
                false if ended => return Ok(()),
                false => {}
            }
        }
    }

    fn connection(&self) -> Option<MutexGuard<'_, rustls::ClientConnection>> {
        let connection = self.connection.as_ref()?;
        Some(connection.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(feature = "tls")]
#[cold]
fn broken(error: &rustls::Error) -> crate::Error {
    use rustls::Error;

    let kind = match error {
        // Trying again would not help.
        Error::InvalidCertificate(_) | Error::AlertReceived(_) => crate::ErrorKind::Denied,
        _ => crate::ErrorKind::Protocol,
    };
    crate::Error::new(kind, format!("TLS: {error}"))
}
