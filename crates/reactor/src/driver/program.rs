//! A program to start.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

/// A program to start. It inherits the working directory, standard output, standard error and the
/// environment of this process.
#[derive(Clone, Debug)]
pub struct Program {
    /// The file to run.
    pub path: PathBuf,
    /// Arguments after the program's name.
    pub arguments: Vec<OsString>,
    /// Variables to set in its environment.
    pub variables: Vec<(OsString, OsString)>,
    /// Its standard input.
    pub input: Arc<OwnedFd>,
}

impl Program {
    /// Blocks until it runs.
    pub(crate) fn start(self) -> io::Result<Child> {
        let mut command = Command::new(&self.path);
        command.args(&self.arguments).envs(self.variables);
        command.stdin(Stdio::from(self.input.try_clone()?)).spawn()
    }
}
