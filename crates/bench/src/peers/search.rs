//! The settings with which a peer is at its best.
//!
//! Nobody is measured with settings that its own experts would not choose. So before a peer is
//! measured for the first time, its knobs are turned one after the other, from the one that matters
//! most to the least: each alternative is tried once, and stays if it is faster by more than
//! [`MARGIN`]. The measurements that count are made afterwards, so the winner is not the one that
//! was lucky once. The conditions of the table say what was tried and chosen.

use std::cell::RefCell;
use std::collections::BTreeMap;

use super::sample::Sample;

/// By how much an alternative must be faster to be taken.
const MARGIN: f64 = 1.02;

/// The alternatives of one setting, as flags; the first is the peer's default.
pub type Knob = &'static [&'static [&'static str]];

/// What the searches of a run found, by the name of the measurement.
#[derive(Default)]
pub struct Found(RefCell<BTreeMap<String, Finding>>);

/// The outcome of a search.
#[derive(Clone, Debug, Default)]
pub struct Finding {
    /// The flags chosen.
    pub flags: Vec<&'static str>,
    /// What was tried, and how many operations per second came of it.
    pub tried: Vec<(Vec<&'static str>, f64)>,
}

impl Found {
    /// The best flags of a peer; searches for them when `name` is new. `run` measures with flags.
    ///
    /// # Errors
    /// When the peer cannot be measured with any of its settings. Those that fail are not taken.
    pub fn best(
        &self,
        name: &str,
        knobs: &[Knob],
        run: impl Fn(&[&'static str]) -> Result<Sample, String>,
    ) -> Result<Vec<&'static str>, String> {
        if let Some(known) = self.0.borrow().get(name) {
            return Ok(known.flags.clone());
        }
        let mut chosen: Vec<&[&'static str]> = knobs.iter().map(|knob| knob[0]).collect();
        let mut finding = Finding { flags: chosen.concat(), tried: Vec::new() };
        // With its defaults it may do less than it was asked for, and is no sample then.
        let (mut best, mut failure) = match run(&finding.flags) {
            Ok(sample) => (sample.ops_per_second, None),
            Err(error) => (0.0, Some(error)),
        };
        finding.tried.push((finding.flags.clone(), best));
        for (nth, knob) in knobs.iter().enumerate() {
            for &alternative in &knob[1..] {
                let before = std::mem::replace(&mut chosen[nth], alternative);
                let flags = chosen.concat();
                let rate = run(&flags).map_or(0.0, |sample| sample.ops_per_second);
                finding.tried.push((flags.clone(), rate));
                if rate > best * MARGIN {
                    (best, finding.flags, failure) = (rate, flags, None);
                } else {
                    chosen[nth] = before;
                }
            }
        }
        if let Some(failure) = failure {
            return Err(failure);
        }
        let flags = finding.flags.clone();
        self.0.borrow_mut().insert(name.to_owned(), finding);
        Ok(flags)
    }

    /// A line for each search: what was chosen, and among what.
    pub fn lines(&self) -> Vec<(String, String)> {
        let said = |flags: &[&str]| match flags {
            [] => "its defaults".to_owned(),
            flags => format!("`{}`", flags.join(" ")),
        };
        let line = |(name, finding): (&String, &Finding)| {
            let tried: Vec<String> = finding
                .tried
                .iter()
                .map(|(flags, rate)| format!("{} {:.1} k/s", said(flags), rate / 1000.0))
                .collect();
            let text = format!("{}; tried: {}", said(&finding.flags), tried.join(", "));
            (format!("settings of {name}"), text)
        };
        self.0.borrow().iter().map(line).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    const KNOBS: [Knob; 2] =
        [&[&["--threads", "1"], &["--threads", "8"], &["--threads", "64"]], &[&[], &["--odd"]]];

    fn measured(flags: &[&str]) -> Result<Sample, String> {
        let ops_per_second = match flags {
            ["--threads", "1"] => 10.0,
            ["--threads", "8"] => 50.0,
            ["--threads", "64"] => 50.5,
            ["--threads", "8", "--odd"] => return Err("it fails".to_owned()),
            _ => panic!("not to be tried: {flags:?}"),
        };
        Ok(Sample { ops_per_second, ..Sample::default() })
    }

    #[test]
    fn each_knob_is_turned_and_stays_where_it_is_clearly_better() {
        let found = Found::default();
        assert_eq!(found.best("peer", &KNOBS, measured), Ok(vec!["--threads", "8"]));
        let lines = found.lines();
        assert_eq!(lines[0].0, "settings of peer");
        assert!(lines[0].1.starts_with("`--threads 8`; tried: `--threads 1` 0.0 k/s"), "{lines:?}");
        assert_eq!(lines[0].1.matches(" k/s").count(), 4);
    }

    #[test]
    fn a_peer_that_fails_with_its_defaults_may_do_with_other_settings() {
        let picky = |flags: &[&'static str]| match flags {
            ["--threads", "8", ..] => Ok(Sample { ops_per_second: 5.0, ..Sample::default() }),
            _ => Err("it did only 9 of 10".to_owned()),
        };
        let found = Found::default();
        assert_eq!(found.best("peer", &KNOBS, picky), Ok(vec!["--threads", "8"]));
    }

    #[test]
    fn a_search_is_made_once_and_a_peer_that_fails_is_not_known() {
        let (found, calls) = (Found::default(), Cell::new(0));
        let counted = |flags: &[&'static str]| {
            calls.set(calls.get() + 1);
            measured(flags)
        };
        found.best("peer", &KNOBS, counted).unwrap();
        found.best("peer", &KNOBS, counted).unwrap();
        assert_eq!(calls.get(), 4);
        assert!(found.best("other", &KNOBS, |_| Err("it is not there".to_owned())).is_err());
        assert_eq!(found.lines().len(), 1);
    }
}
