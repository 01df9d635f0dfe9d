//! `millrace bench`.

use bench::{PeersPlan, Plan};
use node::{Machine, place};

use crate::args::BenchArgs;
use crate::failure::Failure;
use crate::output::Out;

/// Measures and prints.
pub fn run(args: BenchArgs) -> Result<(), Failure> {
    if args.peers {
        return peers(args);
    }
    let case = args.case.expect("the parser asks for a case without --peers");
    let data = args.data.expect("the parser asks for a directory without --peers");
    let processors = place(Some(&args.cores), &Machine::look().allowed).map_err(Failure::new)?;
    let plan = Plan {
        case,
        data,
        processors,
        depth: args.depth.unwrap_or(case.depth_default()),
        seconds: args.seconds,
        memory_bytes: args.memory.map(|size| size.0),
        cached: args.cached,
        batch: args.batch,
        nexts: args.nexts,
        reverse: args.reverse,
        keys: args.keys,
        poll: args.poll,
        driver: args.io,
        secondary: args.secondary,
    };
    let outcome = bench::run(&plan)?;
    let mut out = Out::new();
    if args.json {
        let json = serde_json::to_value(&outcome)
            .map_err(|error| Failure::new(format!("writing the result: {error}")))?;
        out.json(&json)?;
    } else {
        out.line(&outcome.text())?;
    }
    Ok(out.flush()?)
}

fn peers(args: BenchArgs) -> Result<(), Failure> {
    let plan = PeersPlan {
        data: args.data,
        processors: place(Some(&args.cores), &Machine::look().allowed).map_err(Failure::new)?,
        seconds: args.seconds,
        rounds: args.rounds,
        release: args.peers_bin,
        out: args.out,
        only: args.only,
    };
    let table =
        bench::run_peers(&plan, &mut |line| eprintln!("millrace: {line}")).map_err(Failure::new)?;
    let mut out = Out::new();
    out.bytes(table.as_bytes())?;
    Ok(out.flush()?)
}
