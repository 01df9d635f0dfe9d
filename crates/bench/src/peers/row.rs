//! A row of the table: whose figures it compares, and how.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::Setup;
use super::sample::Sample;
use super::work::Work;

/// By how much the bytes that two programs return for an operation may differ: they read other
/// random keys.
const SAME_WORK: f64 = 0.01;

/// The measurements of one round, by name.
#[derive(Clone, Debug, Default)]
pub struct Round {
    samples: BTreeMap<String, Sample>,
    /// Those that could not be made, and why.
    failures: BTreeMap<String, String>,
}

impl Round {
    /// Keeps a measurement.
    pub fn put(&mut self, name: &str, sample: Sample) {
        self.samples.insert(name.to_owned(), sample);
    }

    /// Keeps why a measurement could not be made.
    pub fn fail(&mut self, name: &str, why: String) {
        self.failures.insert(name.to_owned(), why);
    }

    /// The measurements that could not be made, and why.
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

    /// Everything as JSON.
    pub fn json(&self) -> Value {
        json!(self.samples)
    }
}

/// How ours and theirs become the figure that counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compare {
    /// Ours divided by theirs.
    Ratio,
    /// Ours minus theirs.
    Difference,
    /// Ours alone.
    Alone,
}

/// What is to be reached.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Goal {
    /// At least this.
    AtLeast(f64),
    /// At most this.
    AtMost(f64),
    /// Reported beside another row, nothing to reach.
    Told,
}

impl Goal {
    /// Whether a figure reaches it.
    pub fn reached(self, figure: f64) -> Option<bool> {
        match self {
            Goal::AtLeast(least) => Some(figure >= least),
            Goal::AtMost(most) => Some(figure <= most),
            Goal::Told => None,
        }
    }
}

/// What the numbers of a row are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Operations per second.
    PerSecond,
    /// Microseconds.
    Us,
    /// Seconds.
    Seconds,
    /// Hundredths.
    Percent,
    /// Times as much.
    Times,
}

/// Which measurement of a round.
pub type Pick = fn(&Round) -> Option<&Sample>;
/// A figure of a measurement.
pub type Figure = fn(&Sample) -> Option<f64>;
/// What has to be measured, in this order.
pub type Works = fn(&Setup) -> Vec<Work>;

/// See the module text.
pub struct Row {
    /// What was done.
    pub name: &'static str,
    /// What it is compared with.
    pub against: &'static str,
    /// Our measurement.
    pub ours: Pick,
    /// Theirs.
    pub theirs: Pick,
    /// Our figure.
    pub figure: Figure,
    /// Theirs, where it has another name.
    pub peer_figure: Figure,
    /// How they are compared.
    pub compare: Compare,
    /// What the figures are.
    pub unit: Unit,
    /// What is to be reached.
    pub goal: Goal,
    /// What has to be measured for it.
    pub works: Works,
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
    /// Operations per second of both, and their ratio.
    pub fn rate(
        name: &'static str,
        against: &'static str,
        ours: Pick,
        theirs: Pick,
        works: Works,
    ) -> Row {
        Row {
            name,
            against,
            ours,
            theirs,
            figure: rate,
            peer_figure: rate,
            compare: Compare::Ratio,
            unit: Unit::PerSecond,
            goal: Goal::Told,
            works,
        }
    }

    /// Processor time per operation of both, and their ratio.
    pub fn cpu(
        name: &'static str,
        against: &'static str,
        ours: Pick,
        theirs: Pick,
        works: Works,
    ) -> Row {
        Row::rate(name, against, ours, theirs, works).of(Unit::Us, cpu)
    }

    /// A figure of ours that is compared with nothing.
    pub fn alone(name: &'static str, ours: Pick, unit: Unit, figure: Figure, works: Works) -> Row {
        let row = Row::rate(name, "-", ours, |_| None, works).of(unit, figure);
        Row { compare: Compare::Alone, ..row }
    }

    /// Compares another figure of both.
    #[must_use]
    pub fn of(self, unit: Unit, figure: Figure) -> Row {
        Row { unit, figure, peer_figure: figure, ..self }
    }

    /// Says what is to be reached.
    #[must_use]
    pub fn reaching(self, goal: Goal) -> Row {
        Row { goal, ..self }
    }

    /// The figure that counts, in one round; `None` when something was not measured.
    ///
    /// # Errors
    /// When both did not do the same work, and so cannot be compared.
    pub fn figure_of(&self, round: &Round) -> Result<Option<f64>, String> {
        let Some(sample) = (self.ours)(round) else { return Ok(None) };
        let Some(ours) = (self.figure)(sample) else { return Ok(None) };
        if self.compare == Compare::Alone {
            return Ok(Some(ours));
        }
        let Some(peer) = (self.theirs)(round) else { return Ok(None) };
        let Some(theirs) = (self.peer_figure)(peer) else { return Ok(None) };
        same_work(sample, peer)?;
        Ok(match self.compare {
            Compare::Ratio => Some(ours / theirs).filter(|_| theirs > 0.0),
            _ => Some(ours - theirs),
        })
    }
}

/// Whether both returned as many bytes for an operation, where both tell.
fn same_work(ours: &Sample, theirs: &Sample) -> Result<(), String> {
    match ours.bytes_per_op().zip(theirs.bytes_per_op()) {
        Some((our, their)) if (our - their).abs() > SAME_WORK * their => {
            Err(format!("not the same work: {our:.0} and {their:.0} bytes an operation"))
        }
        _ => Ok(()),
    }
}

/// Everything to measure for these rows, each once, in the order of the rows.
pub fn works(rows: &[Row], setup: &Setup) -> Vec<Work> {
    let mut all: Vec<Work> = Vec::new();
    for work in rows.iter().flat_map(|row| (row.works)(setup)) {
        if !all.iter().any(|known| known.name() == work.name()) {
            all.push(work);
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(returned_bytes: u64) -> Sample {
        let report = json!({"operations": 10, "returned_bytes": returned_bytes});
        Sample { ops_per_second: 10.0, report, ..Sample::default() }
    }

    #[test]
    fn programs_that_did_other_work_are_not_compared() {
        let row = Row::rate("a", "b", |r| r.sample("a"), |r| r.sample("b"), |_| vec![]);
        let mut round = Round::default();
        assert_eq!(row.figure_of(&round), Ok(None));
        round.put("a", sample(10_000));
        round.put("b", sample(10_050));
        assert_eq!(row.figure_of(&round), Ok(Some(1.0)));
        round.put("b", sample(5_000));
        let why = row.figure_of(&round).unwrap_err();
        assert_eq!(why, "not the same work: 1000 and 500 bytes an operation");
        // A program that does not tell is believed.
        round.put("b", Sample { ops_per_second: 5.0, ..Sample::default() });
        assert_eq!(row.figure_of(&round), Ok(Some(2.0)));
    }
}
