//! `millrace upgrade`: replaces the program of a running node.

use std::path::PathBuf;

use node::Request;

use crate::admin::Admin;
use crate::answer::{duration, number};
use crate::args::UpgradeArgs;
use crate::failure::Failure;
use crate::output::Out;

/// Asks the node to upgrade, waits, and prints the result.
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
        let state = match result["serves"] == true {
            true => "serves now",
            false => "has taken over, and serves clients when the old process has ended",
        };
        out.line(&format!("process {successor} {state}; guests waited {pause}"))?;
    }
    Ok(out.flush()?)
}

/// Makes a relative path absolute: it is relative to this command's directory, not the node's.
fn from_root(path: PathBuf) -> Result<PathBuf, Failure> {
    std::path::absolute(&path)
        .map_err(|error| Failure::new(format!("cannot resolve --to {}: {error}", path.display())))
}
