//! The bound of blocking clients: threads that send a request over TCP on the loopback interface
//! and wait for a short reply, against a server that does nothing else.
//!
//! Each thread has one connection and one request in flight, as a blocking client that sets a
//! value. The server reads a whole request, whose length it knows, and replies `+OK`. It runs in
//! the same process: one blocking thread for each connection, or one thread with epoll for all.
//!
//! The server ends when the clients have closed their connections. A server that fails closes them,
//! so that the clients fail too.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::Duration;

use clap::{Args, ValueEnum};
use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use serde_json::{Value, json};

use crate::measure::{self, thread_cpu_time};

const REPLY: &[u8] = b"+OK\r\n";

/// The flags.
#[derive(Args, Clone)]
pub struct Flags {
    /// Threads of the client, each with a connection.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: u32,
    /// How long to measure.
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
    /// Bytes of a request.
    #[arg(long, default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=1 << 30))]
    bytes: u32,
    /// The server.
    #[arg(long, value_enum, default_value_t = Server::Poll)]
    server: Server,
}

/// The threads of the server.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Server {
    /// A blocking thread for each connection.
    Thread,
    /// One thread with epoll.
    Poll,
}

/// Measures.
pub fn run(flags: &Flags) -> Result<Value, String> {
    let length = Duration::try_from_secs_f64(flags.seconds)
        .ok()
        .filter(|length| !length.is_zero())
        .ok_or("--seconds must be above 0")?;
    let bytes = flags.bytes as usize;
    let (clients, connections) = connect(flags.threads as usize)?;
    let (outcome, server_cpu) = std::thread::scope(|scope| {
        let server: Vec<_> = match flags.server {
            Server::Thread => connections
                .into_iter()
                .map(|connection| scope.spawn(move || serve(connection, bytes)))
                .collect(),
            Server::Poll => vec![scope.spawn(move || serve_all(connections, bytes))],
        };
        let outcome = measure::window(clients.len(), length, |thread, meter| {
            let (mut client, request) = (&clients[thread], vec![b'x'; bytes]);
            let mut reply = [0; REPLY.len()];
            loop {
                client.write_all(&request).map_err(|error| format!("request: {error}"))?;
                client.read_exact(&mut reply).map_err(|error| format!("reply: {error}"))?;
                if reply != REPLY {
                    return Err(format!("the reply is {}", reply.escape_ascii()));
                }
                if !meter.count(1, 1) {
                    return Ok(());
                }
            }
        });
        drop(clients);
        let mut cpu = Duration::ZERO;
        for thread in server {
            cpu += thread.join().map_err(|_| "the server panicked".to_owned())??;
        }
        Ok::<_, String>((outcome?, cpu))
    })?;
    let us = |quantile| outcome.latency.value_at_quantile(quantile) as f64 / 1000.0;
    let each_us = |cpu: Duration| cpu.as_secs_f64() * 1e6 / outcome.operations.max(1) as f64;
    Ok(json!({
        "case": "pingpong",
        "ops_per_second": outcome.operations as f64 / outcome.elapsed.as_secs_f64(),
        "operations": outcome.operations,
        "mean_us": outcome.latency.mean() / 1000.0,
        "p50_us": us(0.5),
        "p99_us": us(0.99),
        "p999_us": us(0.999),
        "cpu_us_per_op": each_us(outcome.cpu),
        "server_cpu_us_per_op": each_us(server_cpu),
        "seconds": outcome.elapsed.as_secs_f64(),
        "flags": {
            "threads": flags.threads, "bytes": flags.bytes,
            "server": match flags.server { Server::Thread => "thread", Server::Poll => "poll" },
        },
    }))
}

/// Connections over the loopback interface: the clients' ends, and the server's.
fn connect(number: usize) -> Result<(Vec<TcpStream>, Vec<TcpStream>), String> {
    let connect = || {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let (mut clients, mut connections) = (Vec::new(), Vec::new());
        for _ in 0..number {
            let client = TcpStream::connect(listener.local_addr()?)?;
            let (connection, from) = listener.accept()?;
            if from != client.local_addr()? {
                return Err(std::io::Error::other("another program has connected"));
            }
            client.set_nodelay(true)?;
            connection.set_nodelay(true)?;
            clients.push(client);
            connections.push(connection);
        }
        Ok((clients, connections))
    };
    connect().map_err(|error| format!("cannot connect: {error}"))
}

/// Serves one connection until the client closes it; returns this thread's processor time.
fn serve(connection: TcpStream, bytes: usize) -> Result<Duration, String> {
    let mut connection = Connection { stream: connection, request: vec![0; bytes], read: 0 };
    while connection.turn()? {}
    thread_cpu_time()
}

/// Serves all connections until the clients have closed them; returns this thread's processor time.
fn serve_all(connections: Vec<TcpStream>, bytes: usize) -> Result<Duration, String> {
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(|error| error.to_string())?;
    let mut open = Vec::new();
    for (number, stream) in connections.into_iter().enumerate() {
        epoll
            .add(&stream, EpollEvent::new(EpollFlags::EPOLLIN, number as u64))
            .map_err(|error| error.to_string())?;
        open.push(Some(Connection { stream, request: vec![0; bytes], read: 0 }));
    }
    let mut left = open.len();
    let mut events = vec![EpollEvent::empty(); left];
    while left > 0 {
        let ready = match epoll.wait(&mut events, EpollTimeout::NONE) {
            Ok(ready) => ready,
            Err(Errno::EINTR) => continue,
            Err(error) => return Err(error.to_string()),
        };
        for event in &events[..ready] {
            let slot = &mut open[event.data() as usize];
            let Some(connection) = slot else { continue };
            // It is readable, so this does not block; the client waits, so its reply has room.
            if !connection.turn()? {
                *slot = None;
                left -= 1;
            }
        }
    }
    thread_cpu_time()
}

/// The server's end of a connection.
struct Connection {
    stream: TcpStream,
    request: Vec<u8>,
    /// Bytes of the request that were read.
    read: usize,
}

impl Connection {
    /// Reads once, and replies if the request is whole; false when the client has closed.
    fn turn(&mut self) -> Result<bool, String> {
        match self.stream.read(&mut self.request[self.read..]) {
            Ok(0) => return Ok(false),
            Ok(read) => self.read += read,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(format!("server: {error}")),
        }
        if self.read == self.request.len() {
            self.read = 0;
            self.stream.write_all(REPLY).map_err(|error| format!("server: {error}"))?;
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_request_has_one_reply() {
        for server in [Server::Thread, Server::Poll] {
            for bytes in [1, 4096, 1 << 20] {
                let flags = Flags { threads: 3, seconds: 0.05, bytes, server };
                let result = run(&flags).unwrap();
                assert!(result["operations"].as_u64() >= Some(3), "{server:?} {bytes}");
            }
        }
    }

    #[test]
    fn a_request_may_come_in_pieces() {
        for server in [Server::Thread, Server::Poll] {
            let (clients, mut connections) = connect(1).unwrap();
            std::thread::scope(|scope| {
                let serving = scope.spawn(move || match server {
                    Server::Thread => serve(connections.remove(0), 10),
                    Server::Poll => serve_all(connections, 10),
                });
                let mut client = &clients[0];
                for piece in [&b"123"[..], b"4567890", b"1234567890"] {
                    client.write_all(piece).unwrap();
                }
                let mut replies = [0; 2 * REPLY.len()];
                client.read_exact(&mut replies).unwrap();
                client.shutdown(std::net::Shutdown::Write).unwrap();
                assert_eq!(client.read(&mut replies).unwrap(), 0);
                assert!(serving.join().unwrap().is_ok());
            });
        }
    }
}
