//! The common part of all crates' loom proofs.
//!
//! A scenario is one test; it prints how many executions loom explored. A list names for each
//! mutation site the scenario that must find it. Each mutant runs in a new process, because a
//! failed loom execution cannot always be unwound.
//!
//! A preemption bound limits how often a thread is interrupted without need. A scenario with a
//! bound states it; without one the search is complete.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Explores `scenario` and prints the number of executions.
pub fn prove(
    name: &str,
    preemption_bound: Option<usize>,
    scenario: impl Fn() + Sync + Send + 'static,
) {
    let executions = Arc::new(AtomicUsize::new(0));
    let mut loom = loom::model::Builder::new();
    // A long run explores one more preemption.
    let deeper = usize::from(std::env::var_os("MILLRACE_LONG").is_some());
    let preemption_bound = preemption_bound.map(|bound| bound + deeper);
    loom.preemption_bound = preemption_bound;
    loom.max_branches = 10_000;
    let count = executions.clone();
    loom.check(move || {
        count.fetch_add(1, Relaxed);
        scenario();
    });
    let bound = preemption_bound.map_or("complete".to_owned(), |n| format!("preemption bound {n}"));
    println!("proved {name}: {} executions, {bound}", executions.load(Relaxed));
}

/// Checks that each proof can fail: with one site made wrong, the scenario named for it must fail.
pub fn find_every_mutant(mutants: &[(&str, &str)]) {
    let program = std::env::current_exe().unwrap();
    let mut missed = Vec::new();
    for &(mutant, scenario) in mutants {
        let output = std::process::Command::new(&program)
            .args(["--exact", scenario, "--nocapture"])
            .env("MILLRACE_MUTANT", mutant)
            .output()
            .unwrap();
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8_lossy(&text);
        // The scenario must exist, and must fail by a finding.
        let found = !output.status.success()
            && text.contains("running 1 test")
            && text.contains("panicked at");
        println!(
            "mutant {mutant}: {} by {scenario}: {}",
            if found { "found" } else { "MISSED" },
            finding(&text)
        );
        if !found {
            missed.push(mutant);
        }
    }
    println!("mutants: {} of {} found", mutants.len() - missed.len(), mutants.len());
    assert!(missed.is_empty(), "mutants survive: {missed:?}");
}

/// The first line of the first panic's message.
fn finding(text: &str) -> &str {
    let mut lines = text.lines().skip_while(|line| !line.contains("panicked at"));
    lines.next();
    lines.map(str::trim).find(|line| !line.is_empty()).unwrap_or("")
}

/// Checks that every mutation site in the sources is in the list, and that the list names no other
/// site.
pub fn list_is_complete(mutants: &[(&str, &str)], sources: &[&str]) {
    let mut sites = BTreeSet::new();
    for source in sources {
        for call in ["mutant(\"", "fence_seq_cst(\"", "weaken("] {
            for (at, _) in source.match_indices(call) {
                let line = source[at..].lines().next().unwrap();
                sites.extend(line.split('"').nth(1));
            }
        }
    }
    let listed: BTreeSet<&str> = mutants.iter().map(|(mutant, _)| *mutant).collect();
    assert_eq!(sites, listed);
}
