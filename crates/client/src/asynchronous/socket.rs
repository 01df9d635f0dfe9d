//! A connection of the asynchronous client, before it is shared, and for transactions.

use std::io;
use std::net::IpAddr;

use resp::Reply;
use tokio::io::Interest;
use tokio::net::{TcpStream, lookup_host};
use tokio::time::{Instant, timeout_at};

use crate::error::{Error, ErrorKind, Result};
use crate::options::Target;
use crate::wire::{Facts, Greeting, Wire};

const BUFFER_BYTES: usize = 32 << 10;

/// A command that has no replies.
#[derive(Debug)]
pub(super) struct Lost {
    /// Whether any byte of it may have reached the server.
    pub sent: bool,
    pub error: Error,
}

#[derive(Debug)]
pub(super) struct Socket {
    pub stream: TcpStream,
    pub wire: Wire,
    pub facts: Facts,
    /// A request was begun, and its replies have not arrived: the connection cannot be used.
    is_between: bool,
}

impl Socket {
    /// Connects and greets, before the deadline and within the options' time for it.
    pub async fn connect(target: &Target, tracks: bool, deadline: Instant) -> Result<Socket> {
        let deadline = deadline.min(Instant::now() + target.options.connect_timeout);
        let connected = match timeout_at(deadline, Socket::begin(target, tracks, deadline)).await {
            Ok(connected) => connected,
            Err(_) => Err(Error::timeout()),
        };
        connected.map_err(|error| target.cannot_connect(&error))
    }

    async fn begin(target: &Target, tracks: bool, deadline: Instant) -> Result<Socket> {
        let stream = open(target, deadline).await?;
        stream.set_nodelay(true).map_err(|error| Error::broken(&error))?;
        let mut socket =
            Socket { stream, wire: Wire::new(target)?, facts: Facts::default(), is_between: false };
        let greeting = Greeting::new(&target.options, tracks);
        let replies = socket.run(&greeting.bytes, greeting.replies).await;
        socket.facts = greeting.check(&replies.map_err(|lost| lost.error)?)?;
        if greeting.is_first {
            let second = Greeting::tracking(socket.facts);
            let replies = socket.run(&second.bytes, second.replies).await;
            second.check(&replies.map_err(|lost| lost.error)?)?;
        }
        Ok(socket)
    }

    /// Whether it can be used: no exchange was left in the middle, and the server has neither
    /// closed it nor sent anything.
    pub fn is_usable(&mut self) -> bool {
        let quiet = matches!(
            self.stream.try_read(&mut [0]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock
        );
        !self.is_between && quiet && matches!(self.wire.next(), Ok(None))
    }

    /// Sends a request and waits for its replies. After an error, or when the future is dropped,
    /// the connection cannot be used.
    pub async fn exchange(
        &mut self,
        request: &[u8],
        replies: usize,
        deadline: Instant,
    ) -> std::result::Result<Vec<Reply>, Lost> {
        match timeout_at(deadline, self.run(request, replies)).await {
            Ok(result) => result,
            Err(_) => Err(Lost { sent: true, error: Error::timeout() }),
        }
    }

    async fn run(
        &mut self,
        request: &[u8],
        replies: usize,
    ) -> std::result::Result<Vec<Reply>, Lost> {
        if self.is_between {
            let error = Error::new(ErrorKind::Unreachable, "an earlier call was interrupted");
            return Err(Lost { sent: false, error });
        }
        self.is_between = true;
        let unsent = |error| Lost { sent: false, error };
        let mut request = self.wire.seal.seal(request).map_err(unsent)?;
        let (mut at, mut found) = (0, Vec::with_capacity(replies.min(1024)));
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            while found.len() < replies {
                let lost = |error| Lost { sent: true, error };
                match self.wire.next().map_err(lost)? {
                    Some(Reply::Push(_)) => {}
                    Some(reply) => found.push(reply),
                    None => break,
                }
            }
            if found.len() == replies && at == request.len() {
                self.is_between = false;
                return Ok(found);
            }
            let lost = |error: io::Error| Lost { sent: at > 0, error: Error::broken(&error) };
            let interest = match at < request.len() {
                true => Interest::READABLE | Interest::WRITABLE,
                false => Interest::READABLE,
            };
            let ready = self.stream.ready(interest).await.map_err(lost)?;
            if ready.is_writable() && at < request.len() {
                match self.stream.try_write(&request[at..]) {
                    Ok(count) => at += count,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) => return Err(lost(error)),
                }
            }
            if ready.is_readable() {
                match self.stream.try_read(&mut buffer) {
                    Ok(0) => return Err(Lost { sent: at > 0, error: refusal(&found) }),
                    Ok(count) => {
                        let lost = |error| Lost { sent: true, error };
                        self.wire.feed(&buffer[..count]).map_err(lost)?;
                        // What TLS answers by itself, and the request, if it waited for the
                        // handshake.
                        let more = self.wire.seal.seal(&[]).map_err(lost)?;
                        if !more.is_empty() {
                            request.to_mut().extend_from_slice(&more);
                        }
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) => {
                        return Err(Lost { sent: at > 0, error: Error::broken(&error) });
                    }
                }
            }
        }
    }
}

/// Why a server may have closed the connection: it has said so in place of a reply.
fn refusal(found: &[Reply]) -> Error {
    match found.first() {
        Some(Reply::Error(text)) => {
            let error = Error::from_reply(text);
            match error.kind() {
                ErrorKind::Busy | ErrorKind::Denied => error,
                _ => Error::ended(),
            }
        }
        _ => Error::ended(),
    }
}

/// Connects to the first address of the host that answers.
async fn open(target: &Target, deadline: Instant) -> Result<TcpStream> {
    let (host, port) = (target.address.host.as_str(), target.address.port);
    let unreachable = |error: io::Error| Error::new(ErrorKind::Unreachable, error.to_string());
    if let Ok(ip) = host.parse::<IpAddr>() {
        return TcpStream::connect((ip, port)).await.map_err(unreachable);
    }
    let mut last = Error::new(ErrorKind::Unreachable, "the name has no address");
    let addresses: Vec<_> = lookup_host((host, port)).await.map_err(unreachable)?.collect();
    for (nth, address) in addresses.iter().enumerate() {
        // One that does not answer leaves time for the others.
        let left = deadline.saturating_duration_since(Instant::now());
        let share = left / (addresses.len() - nth) as u32;
        match timeout_at(Instant::now() + share, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(error)) => last = unreachable(error),
            Err(_) => last = Error::timeout(),
        }
    }
    Err(last)
}
