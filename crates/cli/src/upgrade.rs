//! `millrace upgrade`: a node that runs is replaced by another program.

use std::path::PathBuf;

use node::Request;

use crate::admin::Admin;
use crate::args::UpgradeArgs;
use crate::disk::{duration, number};
use crate::failure::Failure;
use crate::output::Out;

/// Asks for it, waits, and says what came of it.
pub fn run(args: UpgradeArgs) -> Result<(), Failure> {
    let UpgradeArgs { to, node } = args;
    let program = to.map(from_root).transpose()?;
    let result = Admin::connect(&node)?.call(&Request::Upgrade { program })?;
    let mut out = Out::new();
    if node.json {
        out.json(&result)?;
    } else {
        let pause = duration(Some(number(&result, "pause_us") as f64 * 1e3));
        let successor = number(&result, "successor");
        out.line(&format!("process {successor} serves now; guests waited {pause}"))?;
    }
    Ok(out.flush()?)
}

/// A relative path begins where the command is given, not where the node was started.
fn from_root(path: PathBuf) -> Result<PathBuf, Failure> {
    std::path::absolute(&path)
        .map_err(|error| Failure::new(format!("--to {}: {error}", path.display())))
}
