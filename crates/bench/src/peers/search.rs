//! The search for a peer's best settings.
//!
//! A peer is measured with the settings that its own experts would choose. So before its first
//! measurement its knobs are turned one after the other, the most important first: each
//! alternative is tried once, and stays if it is faster by more than [`MARGIN`]. The measurements
//! that count are made afterwards, so a lucky attempt gains nothing. The table's conditions list
//! what was tried and chosen.

use std::cell::RefCell;
use std::collections::BTreeMap;

use super::sample::Sample;

/// How many times as fast an alternative must be to be taken.
const MARGIN: f64 = 1.02;

/// The alternatives of one setting, as flags; the peer's default comes first.
pub type Knob = &'static [&'static [&'static str]];

/// The searches of a run, by the name of the measurement.
#[derive(Default)]
pub struct Searches(RefCell<BTreeMap<String, Search>>);

/// The outcome of a search.
#[derive(Clone, Debug, Default)]
pub struct Search {
    /// The flags chosen.
    pub flags: Vec<&'static str>,
    /// The flags tried, and their operations per second.
    pub tried: Vec<(Vec<&'static str>, f64)>,
}

impl Searches {
    /// The best flags of a peer; searches for them if `name` is new. `run` measures with flags.
    /// Settings that fail are not taken.
    ///
    /// # Errors
    /// The peer cannot be measured with any of its settings.
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
        let mut search = Search { flags: chosen.concat(), tried: Vec::new() };
        // With its defaults the peer may do less than it was asked for, which is an error.
        let (mut best, mut failure) = match run(&search.flags) {
            Ok(sample) => (sample.ops_per_second, None),
            Err(error) => (0.0, Some(error)),
        };
        search.tried.push((search.flags.clone(), best));
        for (nth, knob) in knobs.iter().enumerate() {
            for &alternative in &knob[1..] {
                let before = std::mem::replace(&mut chosen[nth], alternative);
                let flags = chosen.concat();
                let rate = run(&flags).map_or(0.0, |sample| sample.ops_per_second);
                search.tried.push((flags.clone(), rate));
                if rate > best * MARGIN {
                    (best, search.flags, failure) = (rate, flags, None);
                } else {
                    chosen[nth] = before;
                }
            }
        }
        if let Some(failure) = failure {
            return Err(failure);
        }
        let flags = search.flags.clone();
        self.0.borrow_mut().insert(name.to_owned(), search);
        Ok(flags)
    }

    /// A line for each search: the settings chosen, and those tried.
    pub fn lines(&self) -> Vec<(String, String)> {
        let said = |flags: &[&str]| match flags {
            [] => "its defaults".to_owned(),
            flags => format!("`{}`", flags.join(" ")),
        };
        let line = |(name, search): (&String, &Search)| {
            let tried: Vec<String> = search
                .tried
                .iter()
                .map(|(flags, rate)| format!("{} {:.1} k/s", said(flags), rate / 1000.0))
                .collect();
            let text = format!("{}; tried: {}", said(&search.flags), tried.join(", "));
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
            _ => panic!("unexpected flags: {flags:?}"),
        };
        Ok(Sample { ops_per_second, ..Sample::default() })
    }

    #[test]
    fn each_knob_keeps_a_clearly_better_setting() {
        let searches = Searches::default();
        assert_eq!(searches.best("peer", &KNOBS, measured), Ok(vec!["--threads", "8"]));
        let lines = searches.lines();
        assert_eq!(lines[0].0, "settings of peer");
        assert!(lines[0].1.starts_with("`--threads 8`; tried: `--threads 1` 0.0 k/s"), "{lines:?}");
        assert_eq!(lines[0].1.matches(" k/s").count(), 4);
    }

    #[test]
    fn a_peer_that_fails_with_its_defaults_may_work_with_other_settings() {
        let picky = |flags: &[&'static str]| match flags {
            ["--threads", "8", ..] => Ok(Sample { ops_per_second: 5.0, ..Sample::default() }),
            _ => Err("it did only 9 of 10".to_owned()),
        };
        let searches = Searches::default();
        assert_eq!(searches.best("peer", &KNOBS, picky), Ok(vec!["--threads", "8"]));
    }

    #[test]
    fn a_search_is_made_once_and_a_failed_one_is_not_kept() {
        let (searches, calls) = (Searches::default(), Cell::new(0));
        let counted = |flags: &[&'static str]| {
            calls.set(calls.get() + 1);
            measured(flags)
        };
        searches.best("peer", &KNOBS, counted).unwrap();
        searches.best("peer", &KNOBS, counted).unwrap();
        assert_eq!(calls.get(), 4);
        assert!(searches.best("other", &KNOBS, |_| Err("not installed".to_owned())).is_err());
        assert_eq!(searches.lines().len(), 1);
    }
}
