//! `millrace bench`.

use bench::{
    Case, IdlePlan, LocksPlan, MappedPlan, PausesPlan, PeersPlan, Plan, RacePlan, Replacement,
    VdiskPlan, Workload, WritePlan,
};
use node::{Machine, place};

use crate::args::BenchArgs;
use crate::failure::Failure;
use crate::output::Out;

/// The cache of race's client with `--read-ahead`, if the user names none.
const RACE_CACHE_BYTES: usize = 512 << 20;

/// Measures and prints.
pub fn run(args: BenchArgs) -> Result<(), Failure> {
    if args.peers {
        return peers(args);
    }
    let case = args.case.expect("the parser requires a case without --peers");
    match case {
        Case::Locks => return locks(&args),
        Case::Vdisk => return vdisk(args),
        Case::Race => return race(args),
        _ => {}
    }
    let data = args.data.expect("the parser requires a directory without --peers");
    let processors = place(Some(&args.cores), &Machine::look().allowed).map_err(Failure::new)?;
    if case == Case::Mapped {
        let plan = MappedPlan {
            dir: data,
            size_bytes: args.size.0,
            processor: processors[0],
            depth: args.depth.unwrap_or(case.depth_default()),
            seconds: args.seconds,
            poll: args.poll,
            driver: args.io,
        };
        let outcome = bench::run_mapped(&plan)?;
        return print(args.json.then(|| serde_json::to_value(&outcome)), &outcome.text());
    }
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
        absent: args.absent,
        mix: match args.workload {
            Some(workload) => workload,
            None => Workload::reads_and_writes(args.write_percent),
        },
        keys: args.keys,
        write: WritePlan {
            durability: args.durability,
            writers: args.writers,
            value_size: args.value_size,
            num: args.num,
            rate: args.rate,
            memtable_bytes: usize::try_from(args.memtable.0).unwrap_or(usize::MAX),
            compression: args.compression,
            blob_min: args.blob_min.map(|size| size.bytes()),
            blob_space_max_ratio: args.blob_space_max_ratio,
            drain: args.drain,
        },
        poll: args.poll,
        driver: args.io,
        secondary: args.secondary,
    };
    if case == Case::Beside {
        let outcome = bench::run_beside(&plan, args.rounds)?;
        return print(args.json.then(|| serde_json::to_value(&outcome)), &outcome.text());
    }
    let outcome = bench::run(&plan)?;
    print(args.json.then(|| serde_json::to_value(&outcome)), &outcome.text())
}

fn locks(args: &BenchArgs) -> Result<(), Failure> {
    let processors = place(Some(&args.cores), &Machine::look().allowed).map_err(Failure::new)?;
    let (seconds, poll, driver) = (args.seconds, args.poll, args.io);
    let outcome = bench::run_locks(&LocksPlan { processors, seconds, poll, driver })?;
    print(args.json.then(|| serde_json::to_value(&outcome)), &outcome.text())
}

fn race(args: BenchArgs) -> Result<(), Failure> {
    if args.data.is_none() && args.connect.is_none() {
        return Err(Failure::new(
            "race needs --data DIR, for a node of its own, or --connect ADDR",
        ));
    }
    let processors = place(Some(&args.cores), &Machine::look().allowed).map_err(Failure::new)?;
    // A list also if it is one number.
    let list: String = processors.iter().map(|processor| format!("{processor},")).collect();
    let blob_min = args.blob_min.map_or(1024, |size| size.0);
    let mut flags = vec!["--cores".to_owned(), list, "--blob-min".to_owned(), blob_min.to_string()];
    if let Some(memory) = args.memory {
        flags.extend(["--memory".to_owned(), memory.0.to_string()]);
    }
    let plan = RacePlan {
        connect: args.connect,
        data: args.data,
        flags,
        durability: args.durability,
        threads: args.threads,
        sets: args.sets,
        random: args.random,
        cache_bytes: match (args.cache, args.read_ahead) {
            (Some(size), _) => size.bytes(),
            (None, Some(_)) => RACE_CACHE_BYTES,
            (None, None) => 0,
        },
        read_ahead: args.read_ahead.map_or(0, |size| size.bytes()),
        index_bytes: args.index.map_or(0, |size| size.bytes()),
    };
    let outcome =
        bench::run_race(&plan, &mut |line| eprintln!("millrace: {line}")).map_err(Failure::new)?;
    print(args.json.then(|| serde_json::to_value(&outcome)), &outcome.text())
}

/// Uses any two allowed processors if two are not named.
fn vdisk(args: BenchArgs) -> Result<(), Failure> {
    let allowed = Machine::look().allowed;
    let mut processors = place(Some(&args.cores), &allowed).map_err(Failure::new)?;
    let others = allowed.processors.iter().copied();
    processors.extend(others.filter(|cpu| !processors.contains(cpu)).collect::<Vec<_>>());
    if let (Some(disks), Some(disk)) = (args.idle, &args.disk) {
        let outcome = bench::run_idle(&IdlePlan {
            disk: disk.clone(),
            disks,
            queues: args.queues,
            packed: args.packed,
            seconds: args.seconds,
            target_processor: processors[0],
        })?;
        return print(args.json.then(|| serde_json::to_value(&outcome)), &outcome.text());
    }
    let depth = args.depth.unwrap_or(Case::Vdisk.depth_default());
    let plan = VdiskPlan {
        disk: args.disk,
        socket: args.socket,
        rw: args.rw,
        block_size: args.bs,
        depth: u16::try_from(depth)
            .map_err(|_| Failure::new("--depth of vdisk must be at most 16384"))?,
        queues: args.queues,
        packed: args.packed,
        seconds: args.seconds,
        verify: args.verify,
        sync: args.sync,
        think_us: args.think_us,
        target_processor: processors[0],
        front_processor: *processors.get(1).unwrap_or(&processors[0]),
    };
    let upgrades = args.upgrades.map(|times| (Replacement::Upgrade, times));
    let restarts = args.restarts.map(|times| (Replacement::Restart, times));
    if let Some((how, times)) = upgrades.or(restarts) {
        let outcome = bench::run_pauses(&PausesPlan { load: plan, disks: args.disks, how, times })?;
        return print(args.json.then(|| serde_json::to_value(&outcome)), &outcome.text());
    }
    let outcome = bench::run_vdisk(&plan)?;
    print(args.json.then(|| serde_json::to_value(&outcome)), &outcome.text())
}

/// Prints the JSON if there is any, or else the text.
fn print(json: Option<serde_json::Result<serde_json::Value>>, text: &str) -> Result<(), Failure> {
    let mut out = Out::new();
    match json {
        Some(json) => {
            out.json(&json.map_err(|e| Failure::new(format!("cannot write the result: {e}")))?)?;
        }
        None => out.line(text)?,
    }
    Ok(out.flush()?)
}

fn peers(args: BenchArgs) -> Result<(), Failure> {
    if let (Some(samples), Some(plot)) = (&args.from, &args.plot) {
        let table = bench::plot_samples(samples, plot).map_err(Failure::new)?;
        let mut out = Out::new();
        out.bytes(table.as_bytes())?;
        return Ok(out.flush()?);
    }
    let plan = PeersPlan {
        data: args.data,
        processors: place(Some(&args.cores), &Machine::look().allowed).map_err(Failure::new)?,
        seconds: args.seconds,
        rounds: args.rounds,
        release: args.peers_bin,
        out: args.out,
        only: args.only,
        plot: args.plot,
    };
    let table =
        bench::run_peers(&plan, &mut |line| eprintln!("millrace: {line}")).map_err(Failure::new)?;
    let mut out = Out::new();
    out.bytes(table.as_bytes())?;
    Ok(out.flush()?)
}
