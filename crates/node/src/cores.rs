//! Which processors to run on.
//!
//! Millrace runs one thread per core, pinned. By default it takes all processors of its affinity
//! mask, but not more than the control group's quota pays for: a thread that the quota stops in the
//! middle of a turn stops every request of its core.
//!
//! On a machine with several memory nodes, a count is filled node by node. A core's memory lies on
//! its own node because its own pinned thread is the first to touch its pool.

use std::str::FromStr;

use serde::{Deserialize, Deserializer};

/// The requested cores: a number of them, or certain processors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CoreChoice {
    /// Any processors, this many.
    Count(usize),
    /// Exactly these processors.
    List(Vec<usize>),
}

impl FromStr for CoreChoice {
    type Err = String;

    /// One number is a count; anything with a comma or a dash lists processors (`1-1` or `1,` is
    /// processor 1 alone).
    fn from_str(text: &str) -> Result<CoreChoice, String> {
        let wrong = || format!("'{text}' is neither a number of cores nor a list such as 0,2-3");
        if let Ok(count) = text.parse::<usize>() {
            return match count {
                0 => Err("0 cores cannot serve: one number is how many cores to use; \
                          write 0-0 for processor 0 alone"
                    .to_owned()),
                count => Ok(CoreChoice::Count(count)),
            };
        }
        let list = parse_list(text.strip_suffix(',').unwrap_or(text)).ok_or_else(wrong)?;
        Ok(CoreChoice::List(list))
    }
}

impl<'de> Deserialize<'de> for CoreChoice {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<CoreChoice, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Count(u64),
            List(Vec<usize>),
            Text(String),
        }
        match Written::deserialize(from).map_err(|_| {
            serde::de::Error::custom("cores are a number, or a list such as \"0,2-3\"")
        })? {
            Written::Count(count) => count.to_string().parse(),
            Written::List(list) => Ok(CoreChoice::List(list)),
            Written::Text(text) => text.parse(),
        }
        .map_err(serde::de::Error::custom)
    }
}

/// The highest processor number in the kernel's masks.
const PROCESSOR_MAX: usize = 1023;

/// Reads a list such as `0,2-3`, the kernel's format. Keeps the order.
pub(crate) fn parse_list(text: &str) -> Option<Vec<usize>> {
    let mut list = Vec::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        if first > last || last > PROCESSOR_MAX {
            return None;
        }
        for processor in first..=last {
            if list.contains(&processor) {
                return None;
            }
            list.push(processor);
        }
    }
    Some(list)
}

/// The processors that this process may use.
#[derive(Clone, Debug, Default)]
pub struct Allowed {
    /// The affinity mask.
    pub processors: Vec<usize>,
    /// The control group's limit of processor time, in processors, if there is one.
    pub quota: Option<f64>,
    /// Processors of each memory node, if there are several.
    pub nodes: Vec<Vec<usize>>,
}

impl Allowed {
    /// The processors in the order in which a count is filled.
    fn in_order(&self) -> Vec<usize> {
        let mut order: Vec<usize> = Vec::new();
        for node in &self.nodes {
            order.extend(node.iter().filter(|cpu| self.processors.contains(cpu)));
        }
        let rest: Vec<_> =
            self.processors.iter().copied().filter(|cpu| !order.contains(cpu)).collect();
        order.extend(rest);
        order
    }
}

/// The processors to run on.
///
/// # Errors
/// When the choice includes more, or other, processors than this process may use.
pub fn place(choice: Option<&CoreChoice>, allowed: &Allowed) -> Result<Vec<usize>, String> {
    let order = allowed.in_order();
    let count = match choice {
        Some(CoreChoice::List(list)) => {
            if let Some(missing) = list.iter().find(|cpu| !order.contains(cpu)) {
                return Err(format!(
                    "processor {missing} is not among those this process may use ({})",
                    write_list(&allowed.processors)
                ));
            }
            return Ok(list.clone());
        }
        Some(CoreChoice::Count(count)) if *count > order.len() => {
            return Err(format!(
                "{count} cores are asked for, but this process may use {} ({})",
                order.len(),
                write_list(&allowed.processors)
            ));
        }
        Some(CoreChoice::Count(count)) => *count,
        None => {
            let paid = allowed.quota.map_or(usize::MAX, |quota| quota as usize);
            order.len().min(paid).max(1)
        }
    };
    Ok(order.into_iter().take(count).collect())
}

/// Writes processors in the format that `parse_list` reads: `0,2-3`.
pub fn write_list(processors: &[usize]) -> String {
    let mut parts: Vec<(usize, usize)> = Vec::new();
    for &cpu in processors {
        match parts.last_mut() {
            Some((_, last)) if *last + 1 == cpu => *last = cpu,
            _ => parts.push((cpu, cpu)),
        }
    }
    let parts: Vec<String> = parts
        .into_iter()
        .map(|(first, last)| match last - first {
            0 => first.to_string(),
            _ => format!("{first}-{last}"),
        })
        .collect();
    parts.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allowed(processors: &[usize], quota: Option<f64>) -> Allowed {
        Allowed { processors: processors.to_vec(), quota, nodes: Vec::new() }
    }

    #[test]
    fn one_number_is_a_count_and_anything_else_a_list() {
        assert_eq!("2".parse(), Ok(CoreChoice::Count(2)));
        assert_eq!("0,2-3".parse(), Ok(CoreChoice::List(vec![0, 2, 3])));
        assert_eq!("1-1".parse(), Ok(CoreChoice::List(vec![1])));
        assert_eq!("1,".parse(), Ok(CoreChoice::List(vec![1])));
        for text in ["", "0", "a", "3-2", "0,0", "0-99999999999", "1-", ",", "-1", "1,,2"] {
            assert!(text.parse::<CoreChoice>().is_err(), "{text}");
        }
    }

    #[test]
    fn the_quota_limits_the_default() {
        let four = allowed(&[0, 1, 2, 3], Some(2.5));
        assert_eq!(place(None, &four), Ok(vec![0, 1]));
        assert_eq!(place(Some(&CoreChoice::Count(3)), &four), Ok(vec![0, 1, 2]));
        assert_eq!(place(None, &allowed(&[4, 5], Some(0.2))), Ok(vec![4]));
        assert_eq!(place(None, &allowed(&[4, 5], None)), Ok(vec![4, 5]));
    }

    #[test]
    fn processors_outside_the_mask_are_refused_by_name() {
        let error = place(Some(&CoreChoice::List(vec![0, 7])), &allowed(&[0, 1], None));
        assert_eq!(
            error,
            Err("processor 7 is not among those this process may use (0-1)".to_owned())
        );
        assert!(place(Some(&CoreChoice::Count(3)), &allowed(&[0, 1], None)).is_err());
    }

    #[test]
    fn a_count_is_filled_node_by_node() {
        let mut machine = allowed(&[0, 1, 2, 3], None);
        machine.nodes = vec![vec![0, 2], vec![1, 3]];
        assert_eq!(place(Some(&CoreChoice::Count(3)), &machine), Ok(vec![0, 2, 1]));
    }

    #[test]
    fn lists_are_written_the_way_they_are_read() {
        for text in ["0", "0-3", "0,2-3,8"] {
            assert_eq!(write_list(&parse_list(text).unwrap()), text);
        }
    }
}
