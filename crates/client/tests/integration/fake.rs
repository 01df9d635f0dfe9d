//! A server that does what a test says, connection by connection.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use resp::{Limits, Parser, Progress};

/// One connection of the server.
pub struct Line {
    stream: TcpStream,
    input: Vec<u8>,
    parser: Parser,
}

impl Line {
    /// The next command, its name in capitals; `None` at the end of the connection.
    pub fn command(&mut self) -> Option<Vec<String>> {
        loop {
            if let Ok(Progress::Complete(count)) = self.parser.parse(&mut self.input) {
                let word = |range| String::from_utf8_lossy(&self.input[range]).into_owned();
                let words: Vec<String> =
                    self.parser.args().iter().map(|span| word(span.range())).collect();
                self.input.drain(..count);
                return Some(words);
            }
            let mut buffer = [0; 4096];
            match self.stream.read(&mut buffer) {
                Ok(0) | Err(_) => return None,
                Ok(count) => self.input.extend_from_slice(&buffer[..count]),
            }
        }
    }

    pub fn say(&mut self, text: &str) {
        let _ = self.stream.write_all(text.as_bytes());
    }

    /// Answers the commands of a greeting, up to the last one.
    pub fn greet(&mut self) -> bool {
        while let Some(words) = self.command() {
            match words[0].as_str() {
                "HELLO" => self.say("%1\r\n$5\r\nproto\r\n:3\r\n"),
                "CLIENT" => {
                    self.say("+OK\r\n");
                    return true;
                }
                "PING" => {
                    self.say("+PONG\r\n");
                    return true;
                }
                _ => self.say("+OK\r\n"),
            }
        }
        false
    }

    /// Waits until the client has closed the connection.
    pub fn until_closed(&mut self) {
        while self.command().is_some() {}
    }

    pub fn cut(self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

/// The server; it ends on drop.
pub struct Fake {
    pub address: String,
    over: Arc<AtomicBool>,
    pub connections: Arc<AtomicUsize>,
}

impl Fake {
    /// Calls `script` for each connection, with its number, in a thread of its own.
    pub fn start(script: impl Fn(usize, Line) + Send + Sync + 'static) -> Fake {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        Fake::on(listener, script)
    }

    pub fn on(listener: TcpListener, script: impl Fn(usize, Line) + Send + Sync + 'static) -> Fake {
        let address = listener.local_addr().unwrap().to_string();
        let (over, connections) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let (ended, counted, script) = (over.clone(), connections.clone(), Arc::new(script));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if ended.load(Ordering::SeqCst) {
                    return;
                }
                let Ok(stream) = stream else { continue };
                stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
                let number = counted.fetch_add(1, Ordering::SeqCst);
                let line =
                    Line { stream, input: Vec::new(), parser: Parser::new(Limits::default()) };
                let script = script.clone();
                std::thread::spawn(move || script(number, line));
            }
        });
        Fake { address, over, connections }
    }

    /// Calls `answer` for every command after the greeting, and sends what it returns; `None` cuts
    /// the connection.
    pub fn answering(
        answer: impl Fn(usize, &[String]) -> Option<String> + Send + Sync + 'static,
    ) -> Fake {
        Fake::start(move |number, mut line| {
            if !line.greet() {
                return;
            }
            while let Some(words) = line.command() {
                match answer(number, &words) {
                    Some(text) => line.say(&text),
                    None => return line.cut(),
                }
            }
        })
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.over.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(&self.address);
    }
}
