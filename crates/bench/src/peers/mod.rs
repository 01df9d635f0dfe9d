//! Millrace beside its peers, on the same data in the same run: the table of the README.
//!
//! 1. [`tool`] runs outside programs; [`ours`], [`fio`], [`release`] and [`redis`] each know one of
//!    them, and [`work`] all. Millrace runs as an outside program too, so that all start alike.
//!    [`search`] finds the settings with which a peer is at its best, before it is measured.
//! 2. A [`row`] says what is compared with what. [`read_rows`], [`write_rows`], [`value_rows`],
//!    [`load_rows`], [`ycsb_rows`] and [`vdisks`] have them; [`bases`] are what is read. All
//!    measurements are made once per round, ours and the peers' in turn, because the machine
//!    drifts: a ratio is taken within a round, and the median of the rounds counts. What writes
//!    ([`writes`]) does so in turn in an empty directory, or in a copy of the database, on the disk
//!    that has it.
//! 3. [`table`] prints it, rows we lose included; [`conditions`] says on what it was measured; and
//!    [`plot`] draws the latency at the offered loads.
//!
//! A peer that is not installed leaves its rows unmeasured, and the table says so. This module
//! starts processes and reads the clock: it is a program around programs, no part of a node.

mod bases;
mod conditions;
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
mod tool;
mod value_rows;
mod vdisks;
mod work;
mod write_rows;
mod writes;
mod ycsb_rows;

use std::path::{Path, PathBuf};

use serde_json::json;

use row::{Round, Row};
use search::Found;
use work::Work;

/// What to do.
#[derive(Clone, Debug)]
pub struct PeersPlan {
    /// The database, or `None` to make one in the directory for temporary files if a row needs
    /// one.
    pub data: Option<PathBuf>,
    /// Processors: the first is that of everything that runs on one, the second is added where
    /// two are measured; any other if only one is named.
    pub processors: Vec<usize>,
    /// Seconds of each measurement.
    pub seconds: f64,
    /// Rounds.
    pub rounds: u32,
    /// The program of bench/peers, where it was named.
    pub release: Option<PathBuf>,
    /// Where to put the raw samples.
    pub out: Option<PathBuf>,
    /// Only rows whose name contains one of these; all of them if it is empty.
    pub only: Vec<String>,
    /// Where to draw p99 against throughput.
    pub plot: Option<PathBuf>,
}

/// What everything is measured on and with.
pub(crate) struct Setup {
    pub millrace: PathBuf,
    pub release: Option<PathBuf>,
    pub data: PathBuf,
    pub scratch: PathBuf,
    pub keys: u64,
    pub seconds: f64,
    /// The processor of everything that runs on one.
    pub processor: usize,
    /// Another one, if there is another.
    pub other: Option<usize>,
    /// The settings that searches have found.
    pub found: Found,
}

/// The rows, or those whose name contains one of `only`.
fn rows(only: &[String]) -> Vec<Row> {
    let mut rows = read_rows::rows();
    rows.extend(write_rows::rows());
    rows.extend(value_rows::rows());
    rows.extend(load_rows::rows());
    rows.extend(ycsb_rows::rows());
    rows.extend(vdisks::rows());
    if !only.is_empty() {
        let named = |text: &str| only.iter().any(|only| text.contains(only));
        rows.retain(|row| named(row.name) || named(row.against));
    }
    rows
}

/// Keys of the database that the peers' table is about.
pub const KEYS: u64 = 4_000_000;

/// Measures everything and gives the table as markdown. `say` hears what is being done.
///
/// # Errors
/// When the database cannot be made or read, or nothing at all could be measured.
pub fn run_peers(plan: &PeersPlan, say: &mut dyn FnMut(&str)) -> Result<String, String> {
    let millrace = std::env::current_exe().map_err(|e| format!("finding this program: {e}"))?;
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
        found: Found::default(),
    };
    if chosen.is_empty() {
        return Err("no row has such a name".to_owned());
    }
    if plan.plot.is_some() && !chosen.iter().any(load_rows::is_load) {
        return Err(format!("--plot draws the rows \"{}\": choose them, too", load_rows::NAME));
    }
    if row::works(&chosen, &setup).iter().any(Work::needs_data) {
        setup.data = database(plan, &setup.scratch, say)?;
        setup.keys = ours::count_keys(&setup)?;
    }
    let works = row::works(&chosen, &setup);
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

/// The database to measure, made if there is none.
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

/// Makes one measurement, and says in a line what came of it.
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
