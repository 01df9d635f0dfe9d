//! What the clients' test programs talk to: a node, and a line to it that breaks.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// The password of every node.
pub const PASSWORD: &str = "secret";

/// A node in a process of its own: this program, which runs [`serves`] there. Killed on drop.
pub struct Node {
    process: Child,
    pub address: String,
    /// Where it speaks TLS, if it was given certificates.
    pub tls_address: String,
}

impl Node {
    /// Serves a new database below a directory. `certificates` has `server.pem` and `server.key`.
    pub fn start(dir: &Path, certificates: Option<&Certificates>) -> Node {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "node", "--ignored", "--nocapture"])
            .env("MILLRACE_NODE_DIR", dir)
            .env("XDG_STATE_HOME", dir)
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        if let Some(certificates) = certificates {
            command.env("MILLRACE_NODE_CERTIFICATES", &certificates.0);
        }
        let mut process = command.spawn().unwrap();
        let mut told = BufReader::new(process.stdout.take().unwrap()).lines();
        let ready =
            told.find_map(|line| line.unwrap().split_once("ready ").map(|it| it.1.to_owned()));
        let ready = ready.unwrap_or_else(|| panic!("the node ended: {:?}", process.wait()));
        let (address, tls_address) = ready.split_once(' ').unwrap();
        Node { process, address: address.to_owned(), tls_address: tls_address.to_owned() }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ended = self.process.kill();
        let _ended = self.process.wait();
    }
}

/// Serves until it is killed, and prints `ready ADDRESS TLS-ADDRESS`.
pub fn serve() {
    let dir = PathBuf::from(std::env::var_os("MILLRACE_NODE_DIR").expect("started by a test"));
    let certificates = std::env::var_os("MILLRACE_NODE_CERTIFICATES").map(PathBuf::from);
    let file = |name: &str| certificates.as_ref().map(|dir| dir.join(name));
    let settings = node::Settings {
        data: Some(dir.join("node")),
        listen: Some("127.0.0.1:0".to_owned()),
        tls_cert: file("server.pem"),
        tls_key: file("server.key"),
        tls_auth_clients: certificates.as_ref().map(|_| "no".parse().unwrap()),
        tls_listen: certificates.as_ref().map(|_| "127.0.0.1:0".to_owned()),
        requirepass: Some(PASSWORD.to_owned()),
        durability: Some("process".parse().unwrap()),
        log_file: Some(dir.join("log")),
        ..node::Settings::default()
    };
    let machine = node::Machine::look();
    let config = node::Config::new(settings, &machine).unwrap();
    node::serve(config, machine, |ready| {
        let database = ready.database.as_ref().unwrap();
        let tls = database.tls_listen.unwrap_or(database.listen);
        println!("\nready {} {tls}", database.listen);
    })
    .unwrap();
}

/// A directory with an authority (`ca.pem`) and a certificate of it for 127.0.0.1 (`server.pem`).
pub struct Certificates(PathBuf);

impl Certificates {
    pub fn make(dir: &Path) -> Certificates {
        let openssl = |arguments: &str| {
            let done = Command::new("openssl").args(arguments.split(' ')).current_dir(dir).output();
            let done = done.expect("openssl is installed");
            assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        };
        let new = "req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";
        openssl(&format!("{new} -x509 -days 2 -subj /CN=authority -keyout ca.key -out ca.pem"));
        std::fs::write(dir.join("names"), "subjectAltName=IP:127.0.0.1").unwrap();
        openssl(&format!("{new} -subj /CN=server -keyout server.key -out server.csr"));
        openssl(
            "x509 -req -days 2 -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial \
             -extfile names -out server.pem",
        );
        Certificates(dir.to_owned())
    }
}

/// A line to a server. What a client sends goes on unless it contains `cut`, which ends the
/// connection, or `stall`, from which on everything is swallowed.
pub fn bad_line(to: &str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, to) = (listener.local_addr().unwrap().to_string(), to.to_owned());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (near, far) = (stream.unwrap(), TcpStream::connect(&to).unwrap());
            for end in [&near, &far] {
                end.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            }
            let (back, forth) = (far.try_clone().unwrap(), near.try_clone().unwrap());
            std::thread::spawn(move || carry(&near, &far));
            std::thread::spawn(move || carry(&back, &forth));
        }
    });
    address
}

fn carry(mut from: &TcpStream, mut to: &TcpStream) {
    let has = |bytes: &[u8], word: &[u8]| bytes.windows(word.len()).any(|part| part == word);
    let (mut buffer, mut stalls) = ([0; 65536], false);
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        let bytes = &buffer[..count];
        if has(bytes, b"cut") {
            break;
        }
        stalls |= has(bytes, b"stall");
        if !stalls && to.write_all(bytes).is_err() {
            break;
        }
    }
    for end in [from, to] {
        let _ended = end.shutdown(Shutdown::Both);
    }
}

/// A server that does not speak the protocol.
pub fn stranger() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let _gone = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
            let _gone = stream.read(&mut [0; 100]);
        }
    });
    address
}

/// An address at which nobody listens.
pub fn nobody() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}
