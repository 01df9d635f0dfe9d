//! Running outside programs, and the host's files and ports for them.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Whether a program is installed.
pub fn have(program: &str) -> bool {
    std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join(program).is_file()))
}

/// A command line to run.
pub struct Tool {
    program: PathBuf,
    args: Vec<OsString>,
    input: Option<Vec<u8>>,
}

impl Tool {
    /// A program without arguments.
    pub fn new(program: impl Into<PathBuf>) -> Tool {
        Tool { program: program.into(), args: Vec::new(), input: None }
    }

    /// A program that runs on one processor only.
    pub fn pinned(processor: usize, program: impl Into<PathBuf>) -> Tool {
        let program: PathBuf = program.into();
        if !have("taskset") {
            return Tool::new(program);
        }
        Tool::new("taskset").arg("-c").arg(processor.to_string()).arg(program)
    }

    /// Adds an argument.
    pub fn arg(mut self, arg: impl Into<OsString>) -> Tool {
        self.args.push(arg.into());
        self
    }

    /// Adds arguments.
    pub fn args<A: Into<OsString>>(mut self, args: impl IntoIterator<Item = A>) -> Tool {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// Sets the program's standard input.
    pub fn input(mut self, input: Vec<u8>) -> Tool {
        self.input = Some(input);
        self
    }

    /// The command line, without a shell's quotes.
    pub fn line(&self) -> String {
        let mut line = self.program.display().to_string();
        for arg in &self.args {
            line.push(' ');
            line.push_str(&arg.to_string_lossy());
        }
        line
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.args);
        command
    }

    fn missing(&self, error: &io::Error) -> String {
        match error.kind() {
            io::ErrorKind::NotFound => format!("{} is not installed", self.program.display()),
            _ => format!("cannot start {}: {error}", self.program.display()),
        }
    }

    /// Runs it to its end and returns its output.
    ///
    /// # Errors
    /// The program cannot be started or fails; with its last line of output.
    pub fn output(self) -> Result<String, String> {
        let mut child = self
            .command()
            .stdin(if self.input.is_some() { Stdio::piped() } else { Stdio::null() })
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|e| self.missing(&e))?;
        if let (Some(input), Some(mut stdin)) = (&self.input, child.stdin.take()) {
            // A program that ends without reading everything reports that by its exit code.
            let _ = stdin.write_all(input);
        }
        let output = child.wait_with_output().map_err(|e| self.missing(&e))?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        if output.status.success() {
            return Ok(text);
        }
        let complaint = String::from_utf8_lossy(&output.stderr).into_owned();
        let last = [complaint.trim(), text.trim()]
            .into_iter()
            .find_map(|text| text.lines().last())
            .unwrap_or("no output")
            .to_owned();
        Err(format!("{} failed ({}): {last}", self.program.display(), output.status))
    }

    /// Runs it as [`Tool::output`] does; also returns the share of one processor that it used.
    ///
    /// # Errors
    /// As [`Tool::output`].
    #[expect(clippy::disallowed_methods, reason = "times another program, on no core")]
    pub fn output_and_share(self) -> Result<(String, Option<f64>), String> {
        let (before, began) = (children_us(), Instant::now());
        let text = self.output()?;
        let elapsed_us = began.elapsed().as_secs_f64() * 1e6;
        let used = children_us().zip(before).map(|(after, before)| after - before);
        Ok((text, used.map(|used| used / elapsed_us)))
    }

    /// Starts it in the background, without output.
    ///
    /// # Errors
    /// The program cannot be started.
    pub fn start(self) -> Result<Background, String> {
        let child = self
            .command()
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|e| self.missing(&e))?;
        Ok(Background { child, line: self.line() })
    }
}

/// A program in the background; killed on drop.
pub struct Background {
    child: Child,
    line: String,
}

impl Background {
    /// Its command line.
    pub fn line(&self) -> &str {
        &self.line
    }

    /// Checks that it is still running.
    ///
    /// # Errors
    /// The program has ended; with its last line of output.
    pub fn check(&mut self) -> Result<(), String> {
        match self.child.try_wait() {
            Ok(Some(status)) => {
                let mut said = String::new();
                if let Some(mut stderr) = self.child.stderr.take() {
                    // A failed read leaves the line empty.
                    let _ = stderr.read_to_string(&mut said);
                }
                let last = said.trim().lines().last().unwrap_or("no output");
                Err(format!("{} ended ({status}): {last}", self.line))
            }
            _ => Ok(()),
        }
    }

    /// User and system time it has used so far, in microseconds.
    pub fn cpu_us(&self) -> Option<f64> {
        stat_us(&self.child.id().to_string(), 11)
    }

    /// Waits until it listens on a local port.
    ///
    /// # Errors
    /// The program ends, or does not listen within 30 s.
    #[expect(clippy::disallowed_methods, reason = "waits for another program, on no core")]
    pub fn wait_for_port(&mut self, port: u16) -> Result<(), String> {
        let addr = SocketAddr::from(([127, 0, 0, 1], port));
        for _ in 0..300 {
            if TcpStream::connect(addr).is_ok() {
                return Ok(());
            }
            self.check()?;
            std::thread::sleep(Duration::from_millis(100));
        }
        Err(format!("{} does not listen on port {port}", self.line))
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// User and system time of this process's ended children, in microseconds.
fn children_us() -> Option<f64> {
    stat_us("self", 13)
}

/// The sum of two adjacent times in a process's `stat`, in microseconds.
fn stat_us(process: &str, first: usize) -> Option<f64> {
    let text = read_file(Path::new(&format!("/proc/{process}/stat"))).ok()?;
    // The program's name comes second, in parentheses, and may contain anything.
    let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = |nth: usize| fields.get(nth)?.parse::<u64>().ok();
    // User space sees ticks of 10 ms on every supported architecture.
    Some((ticks(first)? + ticks(first + 1)?) as f64 * 10_000.0)
}

/// A free local port.
#[expect(clippy::disallowed_methods, reason = "asks the system for a free port, on no core")]
pub fn free_port() -> Result<u16, String> {
    std::net::TcpListener::bind(("127.0.0.1", 0))
        .and_then(|listener| listener.local_addr())
        .map(|addr| addr.port())
        .map_err(|error| format!("cannot find a free port: {error}"))
}

/// Makes a directory and those above it.
pub fn make_dir(dir: &Path) -> Result<(), String> {
    std::fs::create_dir_all(dir)
        .map_err(|error| format!("cannot create {}: {error}", dir.display()))
}

/// Writes a file.
#[expect(clippy::disallowed_methods, reason = "results of a benchmark, written on no core")]
pub fn write_file(path: &Path, bytes: &[u8]) -> Result<(), String> {
    std::fs::write(path, bytes).map_err(|error| format!("cannot write {}: {error}", path.display()))
}

/// Reads a small file.
#[expect(clippy::disallowed_methods, reason = "the kernel's texts, read on no core")]
pub fn read_file(path: &Path) -> Result<String, String> {
    std::fs::read_to_string(path)
        .map_err(|error| format!("cannot read {}: {error}", path.display()))
}

/// Files of a directory with this ending, sorted.
#[expect(clippy::disallowed_methods, reason = "names files for fio, on no core")]
pub fn files_ending(dir: &Path, end: &str) -> Result<Vec<PathBuf>, String> {
    let list = || -> io::Result<Vec<PathBuf>> {
        let mut files = Vec::new();
        for entry in std::fs::read_dir(dir)? {
            let path = entry?.path();
            if path.to_string_lossy().ends_with(end) {
                files.push(path);
            }
        }
        files.sort();
        Ok(files)
    };
    list().map_err(|error| format!("cannot list {}: {error}", dir.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_returns_its_output_or_its_last_error_line() {
        assert_eq!(Tool::new("cat").input(b"abc".to_vec()).output(), Ok("abc".to_owned()));
        let error = Tool::new("sh").args(["-c", "echo one; echo two >&2; exit 3"]).output();
        assert!(error.unwrap_err().ends_with("(exit status: 3): two"));
        let error = Tool::new("no-such-program").output();
        assert_eq!(error, Err("no-such-program is not installed".to_owned()));
    }

    #[test]
    fn a_computing_program_uses_its_processor_and_a_sleeping_one_does_not() {
        let share = |script: &str| {
            Tool::new("sh").args(["-c", script]).output_and_share().unwrap().1.unwrap()
        };
        assert!(share("sleep 0.5") < 0.2);
        assert!(share("i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done") > 0.05);
    }

    #[test]
    fn a_background_program_that_ends_reports_its_last_line() {
        let mut failing = Tool::new("sh").args(["-c", "echo no lock >&2; exit 3"]).start().unwrap();
        let error = loop {
            if let Err(error) = failing.check() {
                break error;
            }
        };
        assert!(error.ends_with("ended (exit status: 3): no lock"), "{error}");
    }

    #[test]
    fn a_background_program_uses_time_and_ends_with_its_handle() {
        let busy = Tool::new("sh").args(["-c", "while :; do :; done"]).start().unwrap();
        while busy.cpu_us().unwrap() == 0.0 {
            std::hint::spin_loop();
        }
        let id = busy.child.id();
        drop(busy);
        assert!(read_file(Path::new(&format!("/proc/{id}/stat"))).is_err());
    }
}
