//! Random direct reads of a file at a queue depth: the cost of the reactor itself, compared with
//! fio. `randread FILE [depth] [size] [seconds]`

use std::cell::Cell;
use std::path::PathBuf;
use std::rc::Rc;

use reactor::{Class, RuntimeConfig};

fn main() {
    let mut args = std::env::args().skip(1);
    let path = PathBuf::from(args.next().expect("a file to read"));
    let mut number = |default: usize| args.next().map_or(default, |a| a.parse().expect("a number"));
    let (depth, size, seconds) = (number(64), number(4096), number(2));
    let config = RuntimeConfig { processors: vec![1], ..RuntimeConfig::default() };
    let lines = reactor::run(&config, move |core| {
        let path = path.clone();
        async move {
            let file = core.open(&path, false).await.expect("the file opens");
            let blocks = file.size() / size as u64;
            let file = core.attach(&file);
            let done = Rc::new(Cell::new(0u64));
            let end = core.now_exact_ns() + seconds as u64 * 1_000_000_000;
            let cpu = cpu_us();
            let tasks: Vec<_> = (0..depth)
                .map(|_| {
                    let (core, file, done) = (core.clone(), file.clone(), done.clone());
                    core.clone().spawn(Class::Foreground, async move {
                        while core.now_ns() < end {
                            let buf = core.alloc(size).expect("memory for one read");
                            let offset = core.random_u64() % blocks * size as u64;
                            let (result, _buf) = file.read_at(offset, buf).await;
                            assert_eq!(result.expect("the read succeeds"), size);
                            done.set(done.get() + 1);
                        }
                    })
                })
                .collect();
            for task in tasks {
                task.await;
            }
            let (n, cpu) = (done.get(), cpu_us() - cpu);
            format!(
                "{} k/s, {:.2} us CPU per read, {} reads per enter, driver {}",
                n / seconds as u64 / 1000,
                cpu / n as f64,
                n / core.stats().enters.get().max(1),
                core.driver_name(),
            )
        }
    });
    println!("{}", lines.expect("the runtime starts")[0]);
}

#[expect(clippy::disallowed_methods, reason = "reads the process's own times")]
fn cpu_us() -> f64 {
    let text = std::fs::read_to_string("/proc/self/stat").expect("procfs");
    let fields: Vec<&str> = text.rsplit(')').next().expect("a stat line").split(' ').collect();
    let ticks: f64 = fields[12].parse::<f64>().unwrap() + fields[13].parse::<f64>().unwrap();
    ticks * 10_000.0
}
