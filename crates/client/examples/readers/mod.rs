//! What the examples that let caching readers run beside writers share.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Waits for `time`, and after each `every` of it cuts all other connections, if that is wanted.
pub fn let_run(address: &str, time: Duration, every: Duration, cuts: bool) {
    let mut admin = TcpStream::connect(address).expect("it connects");
    let began = Instant::now();
    while began.elapsed() < time {
        std::thread::sleep(every);
        if cuts {
            admin.write_all(b"CLIENT KILL TYPE normal SKIPME yes\r\n").expect("it is open");
            let _ = admin.read(&mut [0; 64]).expect("it is open");
        }
    }
}

/// Runs the example with its arguments, `ADDRESS [cut]`.
pub fn start(name: &str, run: fn(&str, bool)) -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match words.first() {
        Some(address) => {
            run(address, words.get(1).is_some());
            ExitCode::SUCCESS
        }
        None => {
            eprintln!("usage: {name} ADDRESS [cut]");
            ExitCode::FAILURE
        }
    }
}
