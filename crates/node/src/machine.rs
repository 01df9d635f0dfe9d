//! The machine: processors, memory, limits of the control group.
//!
//! Read once at start, from the kernel's pseudo files; a missing or malformed file counts as "not
//! known". This code runs before any core does.

use std::path::{Path, PathBuf};

use crate::cores::{Allowed, parse_list};

/// A machine as this process sees it.
#[derive(Clone, Debug)]
pub struct Machine {
    /// Processors, and what limits them.
    pub allowed: Allowed,
    /// Memory in bytes: the machine's, or the control group's limit if that is lower.
    pub memory_bytes: u64,
    /// The processor's model.
    pub model: String,
    /// The kernel's release.
    pub kernel: String,
}

impl Machine {
    /// Reads the machine's properties.
    pub fn look() -> Machine {
        let groups = control_groups();
        let quota = groups
            .iter()
            .filter_map(|dir| parse_quota(&pseudo_file(&dir.join("cpu.max"))?))
            .min_by(f64::total_cmp);
        let total = pseudo_file(Path::new("/proc/meminfo"))
            .and_then(|text| parse_total_memory(&text))
            .unwrap_or(1 << 30);
        let limit = groups
            .iter()
            .filter_map(|dir| pseudo_file(&dir.join("memory.max"))?.trim().parse().ok())
            .min()
            .unwrap_or(u64::MAX);
        let model = pseudo_file(Path::new("/proc/cpuinfo"))
            .and_then(|text| parse_model(&text))
            .unwrap_or_else(|| std::env::consts::ARCH.to_owned());
        let kernel = pseudo_file(Path::new("/proc/sys/kernel/osrelease"))
            .map_or_else(|| "unknown".to_owned(), |text| text.trim().to_owned());
        Machine {
            allowed: Allowed { processors: reactor::processors(), quota, nodes: nodes() },
            memory_bytes: total.min(limit),
            model,
            kernel,
        }
    }
}

/// The directories of this process's control group and its ancestors.
fn control_groups() -> Vec<PathBuf> {
    let root = Path::new("/sys/fs/cgroup");
    let own = pseudo_file(Path::new("/proc/self/cgroup")).and_then(|text| {
        text.lines().find_map(|line| line.strip_prefix("0::/").map(str::to_owned))
    });
    let path = root.join(own.unwrap_or_default());
    // A container may see its own group as the root, so only existing directories count.
    path.ancestors().take_while(|dir| dir.starts_with(root)).map(Path::to_owned).collect()
}

fn nodes() -> Vec<Vec<usize>> {
    let mut nodes = Vec::new();
    while let Some(text) =
        pseudo_file(Path::new(&format!("/sys/devices/system/node/node{}/cpulist", nodes.len())))
    {
        nodes.push(parse_list(&text).unwrap_or_default());
    }
    if nodes.len() > 1 { nodes } else { Vec::new() }
}

/// `150000 100000` is one and a half processors; `max 100000` means no limit.
fn parse_quota(text: &str) -> Option<f64> {
    let (quota, period) = text.trim().split_once(' ')?;
    let (quota, period): (f64, f64) = (quota.parse().ok()?, period.parse().ok()?);
    (quota > 0.0 && period > 0.0).then_some(quota / period)
}

fn parse_total_memory(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

fn parse_model(cpuinfo: &str) -> Option<String> {
    let line = cpuinfo.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// The text of a kernel file, if it exists.
#[expect(clippy::disallowed_methods, reason = "start-up code; pseudo files are not on a disk")]
pub(crate) fn pseudo_file(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotas_are_processors_worth_of_time() {
        assert_eq!(parse_quota("150000 100000\n"), Some(1.5));
        for text in ["max 100000", "", "0 100000", "100000 0", "1"] {
            assert_eq!(parse_quota(text), None, "{text}");
        }
    }

    #[test]
    fn memory_and_model_are_found_in_the_kernels_texts() {
        let meminfo = "MemTotal:       24123456 kB\nMemFree:  1 kB\n";
        assert_eq!(parse_total_memory(meminfo), Some(24_123_456 * 1024));
        assert_eq!(parse_total_memory("MemTotal: x kB"), None);
        let cpuinfo = "processor\t: 0\nmodel name\t: Some CPU @ 2.5GHz\n";
        assert_eq!(parse_model(cpuinfo).as_deref(), Some("Some CPU @ 2.5GHz"));
    }

    #[test]
    fn this_machine_has_a_processor_and_memory() {
        let machine = Machine::look();
        assert!(!machine.allowed.processors.is_empty());
        assert!(machine.memory_bytes > 1 << 20);
    }
}
