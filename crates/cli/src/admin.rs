//! A small blocking client for a node's admin socket: one request at a time.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use node::{ADMIN_SOCKET, ADMIN_VERSION, Request, STATE_VARIABLE, default_state};
use serde_json::Value;

use crate::args::NodeArgs;
use crate::failure::Failure;

/// How long to wait for an answer, or for a sign that the node works on it.
const PATIENCE: Duration = Duration::from_secs(120);
/// The largest answer, in bytes.
const ANSWER_BYTES_MAX: u64 = 64 << 20;

/// A connection to a running node.
pub struct Admin {
    stream: BufReader<UnixStream>,
    path: PathBuf,
}

/// Connects to the socket at a path.
fn open(path: &Path) -> std::io::Result<BufReader<UnixStream>> {
    let socket = UnixStream::connect(path)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.set_write_timeout(Some(PATIENCE))?;
    Ok(BufReader::new(socket))
}

impl Admin {
    /// Connects to the node named in the arguments, or to the default one.
    pub fn connect(node: &NodeArgs) -> Result<Admin, Failure> {
        // Not by the parser: its usage lines would show the flag as required.
        let named = || std::env::var_os(STATE_VARIABLE).filter(|name| !name.is_empty());
        let state =
            || node.state.clone().or_else(|| named().map(PathBuf::from)).or_else(default_state);
        let path = node.admin.clone().or_else(|| Some(state()?.join(ADMIN_SOCKET)));
        let path = path
            .ok_or_else(|| Failure::new("no node is named").hint("name one with --admin PATH"))?;
        let stream = open(&path).map_err(|error| {
            Failure::new(format!("cannot connect to a node at {}: {error}", path.display()))
                .hint(
                    "is a node running? it needs the same --state or --admin; start one with: \
                 millrace serve --state DIR",
                )
                .gone()
        })?;
        Ok(Admin { stream, path })
    }

    fn failed(&self, what: &dyn std::fmt::Display) -> Failure {
        Failure::new(format!("{}: {what}", self.path.display()))
    }

    /// The failure when no answer was received.
    fn silent(&self, error: &std::io::Error) -> Failure {
        if !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) {
            return self.failed(error).gone();
        }
        let seconds = PATIENCE.as_secs();
        self.failed(&format_args!(
            "no answer for {seconds} s: it is unknown whether the node has done this, or will do it"
        ))
        .hint("look before you repeat the command: it is done when the node goes on, unless the node ends first")
    }

    /// Sends a request and waits for its result; an error from the node is a failure. A request
    /// that only looks goes to a successor if the node hands over meanwhile.
    pub fn call(&mut self, request: &Request) -> Result<Value, Failure> {
        let called = self.call_once(request);
        if !request.only_looks() || !called.as_ref().is_err_and(Failure::is_gone) {
            return called;
        }
        let Ok(stream) = open(&self.path) else { return called };
        self.stream = stream;
        self.call_once(request)
    }

    fn call_once(&mut self, request: &Request) -> Result<Value, Failure> {
        let sent = self.stream.get_mut().write_all(request.line().as_bytes());
        let mut sent = Some(sent);
        let mut answer = loop {
            let mut line = Vec::new();
            // A node without a free connection says so before it reads anything.
            let received = (&mut self.stream).take(ANSWER_BYTES_MAX).read_until(b'\n', &mut line);
            if !line.ends_with(b"\n")
                && let Some(sent) = sent.take()
            {
                sent.map_err(|error| self.failed(&error).gone())?;
            }
            received.map_err(|error| self.silent(&error))?;
            if !line.ends_with(b"\n") {
                return Err(self.failed(&"the node closed the connection").gone());
            }
            let answer: Value =
                serde_json::from_slice(&line).map_err(|error| self.failed(&error))?;
            // The node says at times that it works on a long request.
            if answer["waiting"] != true {
                break answer;
            }
        };
        if answer["version"] != ADMIN_VERSION {
            return Err(self.failed(&"the node and this program have different versions"));
        }
        if let Some(error) = answer["error"].as_str() {
            let failure = Failure::new(error);
            return Err(match answer["hint"].as_str() {
                Some(hint) => failure.hint(hint),
                None => failure,
            });
        }
        Ok(answer["result"].take())
    }
}
