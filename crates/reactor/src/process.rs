//! Other programs, started without stopping a core: a helper thread waits until the program runs.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use crate::core::Core;
use crate::driver::{MetaOp, MetaOut};

/// A program, and what it is started with. Working directory, standard output and standard error
/// are this process's, and so is the environment but for what is added here.
#[derive(Clone, Debug)]
pub struct Program {
    /// The file to run.
    pub path: PathBuf,
    /// Behind the program's name.
    pub arguments: Vec<OsString>,
    /// Variables to add, or to set anew.
    pub variables: Vec<(OsString, OsString)>,
    /// What it reads as its standard input.
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

impl Core {
    /// Starts a program; suspends until it runs. Whoever started it asks the [`Child`] for its end,
    /// sooner or later.
    ///
    /// # Errors
    /// When it cannot be started, as the system gives them.
    pub async fn start_process(&self, program: Program) -> io::Result<Child> {
        match self.meta(MetaOp::StartProcess(program)).await? {
            MetaOut::Process(child) => Ok(child),
            other => unreachable!("the start of a process answered {other:?}"),
        }
    }
}
