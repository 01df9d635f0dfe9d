// A redis-server for tests, and for the examples of the documentation, which include this file.

/// A server on a free port of 127.0.0.1, without persistence; killed on drop.
pub struct Redis {
    child: std::process::Child,
    pub port: u16,
}

impl Redis {
    pub fn start(flags: &[&str]) -> Redis {
        use std::net::{TcpListener, TcpStream};
        use std::process::{Command, Stdio};
        use std::time::{Duration, Instant};

        for _ in 0..5 {
            let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            let mut child = Command::new("redis-server")
                .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", ""])
                .args(["--dir", "/tmp", "--enable-debug-command", "yes"])
                .args(flags)
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .expect("redis-server is installed");
            let deadline = Instant::now() + Duration::from_secs(10);
            // Another process may have taken the port: then it ends at once.
            while Instant::now() < deadline && child.try_wait().unwrap().is_none() {
                if TcpStream::connect(("127.0.0.1", port)).is_ok() {
                    return Redis { child, port };
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            let _ = child.kill();
            let _ = child.wait();
        }
        panic!("redis-server does not start");
    }

    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
