//! A row of the table: which two measurements it compares, and how.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::sample::Sample;

/// The relative difference allowed between the bytes that two programs return for each operation:
/// they read other random keys.
const SAME_WORK: f64 = 0.01;

/// The measurements of one round, by name.
#[derive(Clone, Debug, Default)]
pub struct Round {
    samples: BTreeMap<String, Sample>,
    /// The measurements that failed, and why.
    failures: BTreeMap<String, String>,
}

impl Round {
    /// Keeps a measurement.
    pub fn put(&mut self, name: &str, sample: Sample) {
        self.samples.insert(name.to_owned(), sample);
    }

    /// Keeps the reason why a measurement failed.
    pub fn fail(&mut self, name: &str, why: String) {
        self.failures.insert(name.to_owned(), why);
    }

    /// The measurements that failed, and why.
    pub fn failures(&self) -> impl Iterator<Item = (&String, &String)> {
        self.failures.iter()
    }

    /// A measurement of this round.
    pub fn sample(&self, name: &str) -> Option<&Sample> {
        self.samples.get(name)
    }

    /// Operations per second of a measurement.
    pub fn ops(&self, name: &str) -> Option<f64> {
        self.sample(name).map(|sample| sample.ops_per_second)
    }

    /// All measurements.
    pub fn samples(&self) -> impl Iterator<Item = &Sample> {
        self.samples.values()
    }

    /// The measurements as JSON.
    pub fn json(&self) -> Value {
        json!(self.samples)
    }

    /// The round whose measurements [`Round::json`] wrote.
    pub fn from_json(value: Value) -> serde_json::Result<Round> {
        Ok(Round { samples: serde_json::from_value(value)?, failures: BTreeMap::new() })
    }
}

/// How our figure and the peer's become the figure that counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compare {
    /// Ours divided by the peer's.
    Ratio,
    /// Ours minus the peer's.
    Difference,
    /// Ours alone.
    Alone,
}

/// The goal of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Goal {
    /// At least this.
    AtLeast(f64),
    /// At most this.
    AtMost(f64),
    /// No goal: the row is reported only.
    None,
}

impl Goal {
    /// Whether a figure reaches the goal.
    pub fn reached(self, figure: f64) -> Option<bool> {
        match self {
            Goal::AtLeast(least) => Some(figure >= least),
            Goal::AtMost(most) => Some(figure <= most),
            Goal::None => None,
        }
    }
}

/// The unit of a row's figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Operations per second.
    PerSecond,
    /// Microseconds.
    Us,
    /// Seconds.
    Seconds,
    /// Per cent.
    Percent,
    /// Times as much.
    Times,
}

/// A figure of a measurement.
pub type Figure = fn(&Sample) -> Option<f64>;

/// One comparison. Measurements are named; `super::measurement` knows how each is made.
pub struct Row {
    /// What was done.
    pub name: String,
    /// What it is compared with.
    pub against: &'static str,
    /// Our measurement.
    pub ours: &'static str,
    /// The peer's measurement; ours again if nothing is compared.
    pub theirs: &'static str,
    /// Our figure.
    pub figure: Figure,
    /// The peer's figure, if it has another name.
    pub peer_figure: Figure,
    /// How both are compared.
    pub compare: Compare,
    /// The figures' unit.
    pub unit: Unit,
    /// The goal.
    pub goal: Goal,
    /// The measurements of the disk alone whose ratio bounds this row's.
    pub disk: Option<[&'static str; 2]>,
    /// A measurement that is made beforehand, for other uses than this row.
    pub before: Option<&'static str>,
}

/// Operations per second.
fn rate(sample: &Sample) -> Option<f64> {
    Some(sample.ops_per_second)
}

/// Processor time per operation in microseconds.
fn cpu(sample: &Sample) -> Option<f64> {
    sample.cpu_us_per_op
}

impl Row {
    /// Compares the operations per second of two measurements, ours and the peer's.
    pub fn rate(
        name: impl Into<String>,
        against: &'static str,
        [ours, theirs]: [&'static str; 2],
    ) -> Row {
        Row {
            name: name.into(),
            against,
            ours,
            theirs,
            figure: rate,
            peer_figure: rate,
            compare: Compare::Ratio,
            unit: Unit::PerSecond,
            goal: Goal::None,
            disk: None,
            before: None,
        }
    }

    /// Compares the processor time per operation.
    pub fn cpu(name: impl Into<String>, against: &'static str, both: [&'static str; 2]) -> Row {
        Row::rate(name, against, both).of(Unit::Us, cpu)
    }

    /// A figure of ours that is compared with nothing.
    pub fn alone(name: impl Into<String>, ours: &'static str, unit: Unit, figure: Figure) -> Row {
        let row = Row::rate(name, "-", [ours; 2]).of(unit, figure);
        Row { compare: Compare::Alone, ..row }
    }

    /// Compares another figure of both.
    #[must_use]
    pub fn of(self, unit: Unit, figure: Figure) -> Row {
        Row { unit, figure, peer_figure: figure, ..self }
    }

    /// Compares with another figure of the peer.
    #[must_use]
    pub fn with(self, peer_figure: Figure) -> Row {
        Row { peer_figure, ..self }
    }

    /// Subtracts instead of dividing.
    #[must_use]
    pub fn difference(self) -> Row {
        Row { compare: Compare::Difference, ..self }
    }

    /// Sets the goal.
    #[must_use]
    pub fn at_least(self, least: f64) -> Row {
        Row { goal: Goal::AtLeast(least), ..self }
    }

    /// Sets the goal.
    #[must_use]
    pub fn at_most(self, most: f64) -> Row {
        Row { goal: Goal::AtMost(most), ..self }
    }

    /// Names the two measurements of the disk whose ratio bounds this row's.
    #[must_use]
    pub fn bounded_by(self, disk: [&'static str; 2]) -> Row {
        Row { disk: Some(disk), ..self }
    }

    /// Has another measurement made beforehand.
    #[must_use]
    pub fn after(self, before: &'static str) -> Row {
        Row { before: Some(before), ..self }
    }

    /// The measurements that the row needs, in order; some more than once.
    pub fn measurements(&self) -> impl Iterator<Item = &'static str> {
        let disk = self.disk.into_iter().flatten();
        self.before.into_iter().chain([self.ours, self.theirs]).chain(disk)
    }

    /// The figure that counts, in one round; `None` if a measurement is missing.
    ///
    /// # Errors
    /// The two programs did different work and cannot be compared.
    pub fn figure_of(&self, round: &Round) -> Result<Option<f64>, String> {
        let Some(sample) = round.sample(self.ours) else { return Ok(None) };
        let Some(ours) = (self.figure)(sample) else { return Ok(None) };
        if self.compare == Compare::Alone {
            return Ok(Some(ours));
        }
        let Some(peer) = round.sample(self.theirs) else { return Ok(None) };
        let Some(theirs) = (self.peer_figure)(peer) else { return Ok(None) };
        same_work(sample, peer)?;
        Ok(match self.compare {
            Compare::Ratio => Some(ours / theirs).filter(|_| theirs > 0.0),
            _ => Some(ours - theirs),
        })
    }

    /// The disk's own ratio in one round, for rows that it bounds.
    pub fn disk_ratio(&self, round: &Round) -> Option<f64> {
        let [above, below] = self.disk?;
        Some(round.ops(above)? / round.ops(below).filter(|ops| *ops > 0.0)?)
    }
}

/// Checks that both returned the same number of bytes for each operation, if both report it.
fn same_work(ours: &Sample, theirs: &Sample) -> Result<(), String> {
    match ours.bytes_per_op().zip(theirs.bytes_per_op()) {
        Some((our, their)) if (our - their).abs() > SAME_WORK * their => {
            Err(format!("not the same work: {our:.0} and {their:.0} bytes an operation"))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(returned_bytes: u64) -> Sample {
        let report = json!({"operations": 10, "returned_bytes": returned_bytes});
        Sample { ops_per_second: 10.0, report, ..Sample::default() }
    }

    #[test]
    fn programs_that_did_different_work_are_not_compared() {
        let row = Row::rate("a", "b", ["a", "b"]);
        let mut round = Round::default();
        assert_eq!(row.figure_of(&round), Ok(None));
        round.put("a", sample(10_000));
        round.put("b", sample(10_050));
        assert_eq!(row.figure_of(&round), Ok(Some(1.0)));
        round.put("b", sample(5_000));
        let why = row.figure_of(&round).unwrap_err();
        assert_eq!(why, "not the same work: 1000 and 500 bytes an operation");
        // A program that does not report its bytes is believed.
        round.put("b", Sample { ops_per_second: 5.0, ..Sample::default() });
        assert_eq!(row.figure_of(&round), Ok(Some(2.0)));
    }

    #[test]
    fn a_round_is_read_back_from_its_json() {
        let mut round = Round::default();
        round.put("a", Sample { p99_us: Some(7.0), ..sample(10_000) });
        let read = Round::from_json(round.json()).unwrap();
        let sample = read.sample("a").unwrap();
        assert_eq!((sample.ops_per_second, sample.p99_us), (10.0, Some(7.0)));
        assert_eq!((sample.p50_us, sample.bytes_per_op()), (None, Some(1000.0)));
    }
}
