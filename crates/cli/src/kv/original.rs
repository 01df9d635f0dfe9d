//! The files of the database that a command copies: of a directory, or of a running node, which
//! keeps them while the command renews its hold.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use lsm::{BlobPrefix, ClosedFiles, FileList, FilePrefix};
use node::{HOLD_NS, Request};
use reactor::Core;
use serde_json::Value;

use crate::admin::Admin;
use crate::args::Original;
use crate::failure::Failure;

/// Logs of more bytes are written to tables before the node's files are listed: a checkpoint links
/// tables, and the next backup need not copy them again.
const LOG_BYTES_MAX: u64 = 4 << 20;
/// How often a hold is renewed.
const RENEWAL: Duration = Duration::from_nanos(HOLD_NS / 6);

/// The files of a database, which stay until this is dropped.
pub enum Files {
    /// Of a directory that no process writes to.
    Closed(ClosedFiles),
    /// Of a running node.
    Held(Held),
}

/// A hold on the files of a node.
pub struct Held {
    list: FileList,
    admin: Admin,
    hold: u64,
    renewed: Instant,
    lost: Option<Failure>,
}

impl Files {
    /// Finds the files. A command for one of them needs the other's flag.
    ///
    /// # Errors
    /// When there is no database, another process writes to it, or no node answers.
    pub async fn of(core: &Core, original: &Original) -> Result<Files, Failure> {
        let Some(path) = &original.data else {
            return Held::of(original).map(Files::Held);
        };
        ClosedFiles::of(core, path).await.map(Files::Closed).map_err(|error| {
            let failure: Failure = node::explain(path, &error).into();
            match error.kind() {
                lsm::Kind::Locked => failure
                    .hint("if it is a node, leave out --data, and name it with --state or --admin"),
                _ => failure,
            }
        })
    }

    /// The files.
    pub fn list(&self) -> FileList {
        match self {
            Files::Closed(files) => files.list().clone(),
            Files::Held(held) => held.list.clone(),
        }
    }

    /// Keeps them for longer. Called often.
    pub fn renew(&mut self) {
        if let Files::Held(held) = self {
            held.renew();
        }
    }

    /// The failure for an error of the copy: if the node does not keep the files any more, that is
    /// the reason.
    pub fn explain(mut self, failure: Failure) -> Failure {
        match &mut self {
            Files::Held(held) => match held.lost() {
                Some(lost) => lost.during("the copy").and(&failure),
                None => failure,
            },
            Files::Closed(_) => failure,
        }
    }
}

impl Held {
    #[expect(clippy::disallowed_methods, reason = "a tool has no core's clock in its client")]
    fn of(original: &Original) -> Result<Held, Failure> {
        let mut admin = Admin::connect(&original.node)?;
        let answer = admin.call(&Request::FilesHold { log_bytes_max: LOG_BYTES_MAX });
        let answer = answer.map_err(|failure| failure.during("the copy"))?;
        let (list, hold) = parse(&answer)
            .ok_or_else(|| Failure::new(format!("the node's answer is not a list: {answer}")))?;
        Ok(Held { list, admin, hold, renewed: Instant::now(), lost: None })
    }

    #[expect(clippy::disallowed_methods, reason = "a tool has no core's clock in its client")]
    fn renew(&mut self) {
        if self.lost.is_some() || self.renewed.elapsed() < RENEWAL {
            return;
        }
        self.renewed = Instant::now();
        // The copy may succeed without: a missing file ends it.
        self.lost = self.call().err();
    }

    fn call(&mut self) -> Result<Value, Failure> {
        self.admin.call(&Request::FilesRenew { hold: self.hold })
    }

    /// Why the node does not keep the files any more, if that is so.
    fn lost(&mut self) -> Option<Failure> {
        self.lost.take().or_else(|| self.call().err())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // Without an answer it ends by itself.
        let _ = self.admin.call(&Request::FilesRelease { hold: self.hold });
    }
}

fn parse(answer: &Value) -> Option<(FileList, u64)> {
    let mut list = parse_list(answer)?;
    if !answer["within"].is_null() {
        list.within = Some(Box::new(parse_list(&answer["within"])?));
    }
    Some((list, answer["hold"].as_u64()?))
}

fn parse_list(answer: &Value) -> Option<FileList> {
    let prefix = |file: &Value| {
        Some(FilePrefix { number: file["number"].as_u64()?, bytes: file["bytes"].as_u64() })
    };
    let logs = answer["logs"].as_array()?.iter().map(prefix).collect::<Option<_>>()?;
    let blob = |file: &Value| {
        let (end, count) = (file["end"].as_u64()?, file["count"].as_u64()?);
        Some(BlobPrefix { number: file["number"].as_u64()?, end, count })
    };
    let open_blobs = answer["open_blobs"].as_array()?.iter().map(blob).collect::<Option<_>>()?;
    Some(FileList {
        directory: PathBuf::from(answer["directory"].as_str()?),
        sequence: answer["sequence"].as_u64()?,
        manifest: prefix(&answer["manifest"])?,
        logs,
        open_blobs,
        within: None,
    })
}
