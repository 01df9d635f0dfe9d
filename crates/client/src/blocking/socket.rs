//! A socket of one thread: it sends a command and waits for its replies.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use resp::Reply;

use crate::error::{Error, ErrorKind, Result};
use crate::options::Target;
use crate::wire::{Facts, Greeting, Wire};

const BUFFER_BYTES: usize = 32 << 10;
/// A socket that rested longer is looked at before it is used again.
const REST: Duration = Duration::from_millis(100);

/// A command that has no replies.
#[derive(Debug)]
pub(super) struct Lost {
    /// Whether any byte of it may have reached the server.
    pub sent: bool,
    pub error: Error,
}

impl Lost {
    fn sent(error: Error) -> Lost {
        Lost { sent: true, error }
    }
}

#[derive(Debug)]
pub(super) struct Socket {
    pub stream: TcpStream,
    pub wire: Wire,
    pub facts: Facts,
    buffer: Box<[u8]>,
    timeout: Duration,
    /// Whether the kernel's timeouts are shorter than `timeout`, for the end of an earlier call.
    is_short: bool,
    used: Instant,
}

impl Socket {
    /// Connects and greets, before the deadline and within the options' time for it.
    pub fn connect(target: &Target, tracks: bool, deadline: Instant) -> Result<Socket> {
        let options = &target.options;
        let deadline = deadline.min(Instant::now() + options.connect_timeout);
        let connected = open(target, deadline).and_then(|stream| {
            let wire = Wire::new(target)?;
            let mut socket = Socket {
                stream,
                wire,
                facts: Facts::default(),
                buffer: vec![0; BUFFER_BYTES].into(),
                timeout: options.timeout,
                is_short: true,
                used: Instant::now(),
            };
            let broken = |error: io::Error| Error::broken(&error);
            socket.stream.set_nodelay(true).map_err(broken)?;
            let greeting = Greeting::new(options, tracks);
            let replies = socket
                .exchange(&greeting.bytes, greeting.replies, deadline)
                .map_err(|lost| lost.error)?;
            socket.facts = greeting.check(&replies)?;
            if greeting.is_first {
                let second = Greeting::tracking(socket.facts);
                let replies = socket
                    .exchange(&second.bytes, second.replies, deadline)
                    .map_err(|lost| lost.error)?;
                second.check(&replies)?;
            }
            Ok(socket)
        });
        connected.map_err(|error| target.cannot_connect(&error))
    }

    /// Whether the server has neither closed it nor sent anything since it was used.
    pub fn is_usable(&mut self) -> bool {
        if !matches!(self.wire.next(), Ok(None)) {
            return false;
        }
        if self.used.elapsed() < REST {
            return true;
        }
        self.stream.set_nonblocking(true).is_ok()
            && matches!(self.stream.peek(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
            && self.stream.set_nonblocking(false).is_ok()
    }

    /// Sends a request and waits for its replies. After an error the socket cannot be used.
    pub fn exchange(
        &mut self,
        request: &[u8],
        replies: usize,
        deadline: Instant,
    ) -> std::result::Result<Vec<Reply>, Lost> {
        let unsent = |error| Lost { sent: false, error };
        let sealed = self.wire.seal.seal(request).map_err(unsent)?;
        self.write(&sealed, deadline)?;
        let mut found = Vec::with_capacity(replies.min(1024));
        loop {
            while found.len() < replies {
                match self.wire.next().map_err(Lost::sent)? {
                    // Nothing was subscribed to.
                    Some(Reply::Push(_)) => {}
                    Some(reply) => found.push(reply),
                    None => break,
                }
            }
            if found.len() == replies {
                self.used = Instant::now();
                return Ok(found);
            }
            self.arm(deadline).map_err(Lost::sent)?;
            match self.stream.read(&mut self.buffer) {
                Ok(0) => return Err(Lost::sent(refusal(found))),
                Ok(count) => {
                    self.wire.feed(&self.buffer[..count]).map_err(Lost::sent)?;
                    // What TLS answers by itself, and the request, if it waited for the handshake.
                    let more = self.wire.seal.seal(&[]).map_err(Lost::sent)?.into_owned();
                    self.write(&more, deadline).map_err(|lost| Lost::sent(lost.error))?;
                }
                Err(error) if is_passing(&error) => {}
                Err(error) => return Err(Lost::sent(Error::broken(&error))),
            }
        }
    }

    fn write(&mut self, request: &[u8], deadline: Instant) -> std::result::Result<(), Lost> {
        let mut at = 0;
        while at < request.len() {
            let lost = |error| Lost { sent: at > 0, error };
            self.arm(deadline).map_err(lost)?;
            match self.stream.write(&request[at..]) {
                Ok(0) => return Err(lost(Error::ended())),
                Ok(count) => at += count,
                Err(error) if is_passing(&error) => {}
                Err(error) => return Err(lost(Error::broken(&error))),
            }
        }
        Ok(())
    }

    /// Makes the next wait end at the deadline, unless that is about the full timeout away: then
    /// the kernel's timeouts are right, and there is no call.
    fn arm(&mut self, deadline: Instant) -> Result<()> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Error::timeout());
        }
        let is_short = left < self.timeout - self.timeout / 8;
        if is_short || self.is_short {
            let wait = if is_short { left.max(Duration::from_millis(1)) } else { self.timeout };
            let set = self
                .stream
                .set_read_timeout(Some(wait))
                .and_then(|()| self.stream.set_write_timeout(Some(wait)));
            set.map_err(|error| Error::broken(&error))?;
            self.is_short = is_short;
        }
        Ok(())
    }
}

/// Why a server may have closed the connection: it has said so in place of a reply.
fn refusal(found: Vec<Reply>) -> Error {
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

pub(super) fn is_passing(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
    )
}

fn left(deadline: Instant) -> Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(Error::timeout()) } else { Ok(left) }
}

/// Connects to the first address of the host that answers.
fn open(target: &Target, deadline: Instant) -> Result<TcpStream> {
    let mut last = Error::new(ErrorKind::Unreachable, "the name has no address");
    let addresses = look_up(target, deadline)?;
    for (nth, address) in addresses.iter().enumerate() {
        // One that does not answer leaves time for the others.
        let share = left(deadline)? / (addresses.len() - nth) as u32;
        match TcpStream::connect_timeout(address, share.max(Duration::from_millis(1))) {
            Ok(stream) => return Ok(stream),
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                last = Error::new(ErrorKind::Timeout, "no answer within the timeout");
            }
            Err(error) => last = Error::new(ErrorKind::Unreachable, error.to_string()),
        }
    }
    Err(last)
}

/// The addresses of the host. A name is looked up in a thread, because the system's look-up has no
/// timeout that this crate could set; it ends by itself.
fn look_up(target: &Target, deadline: Instant) -> Result<Vec<SocketAddr>> {
    let (host, port) = (target.address.host.clone(), target.address.port);
    if let Ok(ip) = host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(ip, port)]);
    }
    let (answer, answered) = mpsc::sync_channel(1);
    let work = move || {
        let found = (host.as_str(), port).to_socket_addrs().map(Iterator::collect);
        // Nobody waits any more.
        let _ = answer.send(found);
    };
    let spawned = std::thread::Builder::new().name("millrace-lookup".to_owned()).spawn(work);
    let unreachable = |what: String| Error::new(ErrorKind::Unreachable, what);
    spawned.map_err(|error| unreachable(format!("cannot start a thread: {error}")))?;
    match answered.recv_timeout(left(deadline)?) {
        Ok(found) => found.map_err(|error| unreachable(error.to_string())),
        Err(_) => Err(Error::new(ErrorKind::Timeout, "the name was not found within the timeout")),
    }
}
