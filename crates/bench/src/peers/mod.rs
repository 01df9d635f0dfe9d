//! Millrace and its peers on the same data in the same run: the table of docs/BENCHMARKS.md.
//!
//! 1. [`tool`] runs outside programs. [`ours`], [`fio`], [`release`], [`redis`] and [`daemon`] each
//!    know one of them; Millrace is an outside program too, so that all start alike. [`search`]
//!    finds a peer's best settings before the peer is measured.
//! 2. A measurement ([`work`]) is one program doing one thing, and has a name. A [`row`] compares
//!    two of them. `*_rows` list the rows, and make the measurements of their names. Databases to
//!    read are in [`bases`]; programs that write ([`writes`], [`vdisk`]) do so one at a time, on
//!    the database's disk.
//! 3. Each measurement is made once per round, ours and the peer's in turn, because the machine
//!    drifts: a ratio is taken within a round, and the median of the rounds counts.
//! 4. [`table`] prints the rows, lost ones included; [`conditions`] adds machine and versions;
//!    [`plot`] draws latency against throughput.
//!
//! The rows of a peer that is not installed stay unmeasured, and the table says so. This module
//! starts processes and reads the clock: it runs around a node, never in one.

mod bases;
mod conditions;
mod daemon;
mod debian;
mod fio;
mod load_rows;
mod ours;
mod plot;
mod read_rows;
mod redis;
mod release;
mod row;
mod sample;
mod search;
mod table;
pub(crate) mod tool;
mod value_rows;
mod vdisk;
mod vdisk_rows;
mod work;
mod write_rows;
mod writes;
mod ycsb_rows;

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use row::{Round, Row};
use search::Searches;
use work::Work;

/// What to measure, and what to make of it.
#[derive(Clone, Debug)]
pub struct PeersPlan {
    /// The database; without one, it is made in the directory for temporary files if a row needs
    /// it.
    pub data: Option<PathBuf>,
    /// Processors: the first runs everything that runs on one, the second is added where two are
    /// measured. If only one is named, the second is any other.
    pub processors: Vec<usize>,
    /// Seconds of each measurement.
    pub seconds: f64,
    /// Rounds.
    pub rounds: u32,
    /// The program of bench/peers, if it is named.
    pub release: Option<PathBuf>,
    /// The directory for the raw samples.
    pub out: Option<PathBuf>,
    /// Only rows whose name contains one of these; all of them if it is empty.
    pub only: Vec<String>,
    /// The file for the plot of p99 against throughput.
    pub plot: Option<PathBuf>,
}

/// What all measurements share.
pub(crate) struct Setup {
    pub millrace: PathBuf,
    pub release: Option<PathBuf>,
    pub data: PathBuf,
    pub scratch: PathBuf,
    pub keys: u64,
    pub seconds: f64,
    /// The processor of programs that run on one.
    pub processor: usize,
    /// A second processor, if there is one.
    pub other: Option<usize>,
    /// The best settings found so far.
    pub searches: Searches,
}

/// The rows, or those whose name contains one of `only`.
fn rows(only: &[String]) -> Vec<Row> {
    let mut rows = read_rows::rows();
    rows.extend(write_rows::rows());
    rows.extend(value_rows::rows());
    rows.extend(load_rows::rows());
    rows.extend(ycsb_rows::rows());
    rows.extend(vdisk_rows::rows());
    if !only.is_empty() {
        let named = |text: &str| only.iter().any(|only| text.contains(only));
        rows.retain(|row| named(&row.name) || named(row.against));
    }
    rows
}

/// How the measurement of this name is made.
fn measurement(setup: &Setup, name: &'static str) -> Option<Work> {
    read_rows::measurement(setup, name)
        .or_else(|| write_rows::measurement(setup, name))
        .or_else(|| value_rows::measurement(setup, name))
        .or_else(|| load_rows::measurement(setup, name))
        .or_else(|| ycsb_rows::measurement(setup, name))
        .or_else(|| vdisk_rows::measurement(name))
        .or_else(|| redis::measurement(name))
        .or_else(|| work::measurement(name))
}

/// All measurements of these rows, each once, in the order of the rows. One that another is derived
/// from comes before it; the two that a row compares stay next to each other.
fn works(rows: &[Row], setup: &Setup) -> Vec<Work> {
    fn add(all: &mut Vec<Work>, work: Work) {
        if !all.iter().any(|known| known.name() == work.name()) {
            all.push(work);
        }
    }
    let make = |name| measurement(setup, name).expect("every name in a row is a measurement");
    let mut all: Vec<Work> = Vec::new();
    for row in rows {
        let of_row: Vec<Work> = row.measurements().map(make).collect();
        for name in of_row.iter().filter_map(Work::needs) {
            add(&mut all, make(name));
        }
        of_row.into_iter().for_each(|work| add(&mut all, work));
    }
    all
}

/// Keys of the peers' database.
pub const KEYS: u64 = 4_000_000;

/// Measures everything and returns the table as markdown. `say` gets a line for each step.
///
/// # Errors
/// The database cannot be made or read, no row has a name of [`PeersPlan::only`], or a file cannot
/// be written.
pub fn run_peers(plan: &PeersPlan, say: &mut dyn FnMut(&str)) -> Result<String, String> {
    let millrace = std::env::current_exe().map_err(|e| format!("cannot find this program: {e}"))?;
    let scratch = std::env::temp_dir().join("millrace-bench");
    tool::make_dir(&scratch)?;
    let chosen = rows(&plan.only);
    let all = reactor::processors();
    let processor = plan.processors.first().or(all.first()).copied().unwrap_or(0);
    let other = plan.processors.get(1).or(all.iter().find(|cpu| **cpu != processor)).copied();
    let mut setup = Setup {
        release: release::find(plan.release.as_deref())?,
        millrace,
        data: scratch.clone(),
        scratch,
        keys: 0,
        seconds: plan.seconds,
        processor,
        other,
        searches: Searches::default(),
    };
    if chosen.is_empty() {
        return Err("no row has such a name".to_owned());
    }
    if plan.plot.is_some() && !chosen.iter().any(load_rows::is_load) {
        return Err(format!("--plot draws the rows \"{}\": choose them, too", load_rows::NAME));
    }
    if works(&chosen, &setup).iter().any(Work::needs_data) {
        setup.data = database(plan, &setup.scratch, say)?;
        setup.keys = ours::count_keys(&setup)?;
    }
    let works = works(&chosen, &setup);
    let mut rounds: Vec<Round> = Vec::new();
    for number in 1..=plan.rounds {
        let mut round = Round::default();
        for work in &works {
            say(&measure(work, &setup, &mut round, (number, plan.rounds)));
        }
        rounds.push(round);
    }
    let conditions = conditions::describe(&setup, &rounds, plan.rounds);
    let table = table::markdown(&chosen, &rounds, &conditions);
    if let Some(path) = &plan.plot {
        tool::write_file(path, plot::svg(&load_rows::chart(&rounds)).as_bytes())?;
        say(&format!("p99 against throughput is drawn in {}", path.display()));
    }
    if let Some(dir) = &plan.out {
        let path = write_samples(dir, &conditions, &rounds, &table)?;
        say(&format!("raw samples are in {}", path.display()));
    }
    Ok(table)
}

/// The database to measure; made if none is named.
fn database(
    plan: &PeersPlan,
    scratch: &Path,
    say: &mut dyn FnMut(&str),
) -> Result<PathBuf, String> {
    if let Some(data) = &plan.data {
        return Ok(data.clone());
    }
    let data = scratch.join("fillseq-4m");
    if !data.join("CURRENT").exists() {
        say("making the database with db_bench: 4 million keys, 4 GB, about a minute");
        debian::make_database(&data, KEYS, 1000, "none")?;
    }
    Ok(data)
}

/// Makes one measurement; returns a line about its result.
fn measure(work: &Work, setup: &Setup, round: &mut Round, (number, of): (u32, u32)) -> String {
    let name = work.name();
    match work.run(setup, round) {
        Ok(sample) => {
            let line = format!("round {number} of {of}: {name}: {sample}");
            round.put(name, sample);
            line
        }
        Err(error) => {
            let line = format!("round {number} of {of}: {name}: not measured: {error}");
            round.fail(name, error);
            line
        }
    }
}

fn write_samples(
    dir: &Path,
    conditions: &[(String, String)],
    rounds: &[Round],
    table: &str,
) -> Result<PathBuf, String> {
    tool::make_dir(dir)?;
    let path = dir.join(format!("{}.json", conditions::date().replace(':', "")));
    let conditions: serde_json::Map<_, _> =
        conditions.iter().map(|(name, text)| (name.clone(), json!(text))).collect();
    let rounds: Vec<_> = rounds.iter().map(Round::json).collect();
    let all = json!({ "conditions": conditions, "rounds": rounds, "table": table });
    tool::write_file(&path, format!("{all:#}\n").as_bytes())?;
    Ok(path)
}

/// Draws the plot of a run from the samples that it saved ([`PeersPlan::out`]), and returns that
/// run's table.
///
/// # Errors
/// The samples cannot be read or have no rows to draw, or the plot cannot be written.
pub fn plot_samples(samples: &Path, plot: &Path) -> Result<String, String> {
    let failed = |why: &str| format!("cannot plot {}: {why}", samples.display());
    let saved: Value =
        serde_json::from_str(&tool::read_file(samples)?).map_err(|e| failed(&e.to_string()))?;
    let rounds = saved["rounds"].as_array().ok_or_else(|| failed("it has no rounds"))?;
    let rounds: Vec<Round> = rounds
        .iter()
        .map(|round| Round::from_json(round.clone()))
        .collect::<Result<_, _>>()
        .map_err(|e| failed(&e.to_string()))?;
    let chart = load_rows::chart(&rounds);
    if chart.curves.iter().all(|curve| curve.points.is_empty()) {
        return Err(failed(&format!("it has no rows \"{}, offered ...\"", load_rows::NAME)));
    }
    tool::write_file(plot, plot::svg(&chart).as_bytes())?;
    Ok(saved["table"].as_str().unwrap_or_default().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn setup() -> Setup {
        Setup {
            millrace: PathBuf::new(),
            release: None,
            data: PathBuf::new(),
            scratch: PathBuf::new(),
            keys: KEYS,
            seconds: 1.0,
            processor: 0,
            other: None,
            searches: Searches::default(),
        }
    }

    #[test]
    fn every_row_finds_its_measurements_by_name() {
        let (rows, setup) = (rows(&[]), setup());
        let works = works(&rows, &setup);
        for name in rows.iter().flat_map(Row::measurements) {
            assert!(works.iter().any(|work| work.name() == name), "{name}");
        }
    }

    #[test]
    fn a_measurement_comes_after_the_one_it_is_derived_from() {
        let works = works(&rows(&["90 % gets".to_owned()]), &setup());
        let names: Vec<_> = works.iter().map(Work::name).collect();
        assert_eq!(names[..4], [work::GET, work::FIO_SAME, "millrace mixed", "rocksdb mixed"]);
        let place = |name| names.iter().position(|known| *known == name);
        for work in &works {
            assert!(work.needs().is_none_or(|name| place(name) < place(work.name())), "{names:?}");
        }
    }

    #[test]
    fn a_plot_is_drawn_from_saved_samples() {
        let dir = std::env::temp_dir().join(format!("millrace-plot-{}", std::process::id()));
        tool::make_dir(&dir).unwrap();
        let (samples, svg) = (dir.join("a.json"), dir.join("a.svg"));
        let mut round = Round::default();
        let sample =
            sample::Sample { ops_per_second: 9.0, p99_us: Some(1.0), ..sample::Sample::default() };
        let write = |round: &Round| {
            let saved = json!({"rounds": [round.json()], "table": "a table"});
            tool::write_file(&samples, saved.to_string().as_bytes()).unwrap();
        };
        round.put("millrace readrandom", sample.clone());
        write(&round);
        assert!(plot_samples(&samples, &svg).unwrap_err().contains("it has no rows"));
        round.put("millrace mixed at 20 %", sample);
        write(&round);
        assert_eq!(plot_samples(&samples, &svg).as_deref(), Ok("a table"));
        assert!(tool::read_file(&svg).unwrap().contains("<title>Millrace: 9/s, p99 1 us</title>"));
        let _ = std::fs::remove_dir_all(&dir);
    }
}
