use lsm::*;
use reactor::*;
use std::cell::Cell;
use std::rc::Rc;
fn main() {
    let path = std::path::PathBuf::from(std::env::args().nth(1).unwrap());
    let depth: usize = std::env::args().nth(2).map_or(64, |a| a.parse().unwrap());
    let config = RuntimeConfig { processors: vec![1], ..RuntimeConfig::default() };
    run(&config, move |core| {
        let path = path.clone();
        async move {
            let t = core.now_exact_ns();
            let db = Db::open(&core, &path, OpenOptions::default()).await.unwrap();
            println!(
                "open {} ms, memory {} MB, {:?}",
                (core.now_exact_ns() - t) / 1000000,
                db.memory() >> 20,
                db.warnings()
            );
            let reader = db.attach(&core);
            let keys = reader.approximate_keys(0).unwrap();
            let (found, done) = (Rc::new(Cell::new(0u64)), Rc::new(Cell::new(0u64)));
            let end = core.now_exact_ns() + 3_000_000_000;
            let t = core.now_exact_ns();
            let tasks: Vec<_> = (0..depth)
                .map(|_| {
                    let (core, reader, found, done) =
                        (core.clone(), reader.clone(), found.clone(), done.clone());
                    core.clone().spawn(Class::Foreground, async move {
                        while core.now_ns() < end {
                            let n = core.random_u64() % keys;
                            let mut key = [b'0'; 16];
                            key[..8].copy_from_slice(&n.to_be_bytes());
                            if let Some(v) = reader.get(0, &key, None).await.unwrap() {
                                assert_eq!(v.len(), 1000);
                                found.set(found.get() + 1);
                            }
                            done.set(done.get() + 1);
                        }
                    })
                })
                .collect();
            for t in tasks {
                t.await;
            }
            let secs = (core.now_exact_ns() - t) as f64 / 1e9;
            println!(
                "{} keys: {:.0}/s, {} of {} found",
                keys,
                done.get() as f64 / secs,
                found.get(),
                done.get()
            );
            let mut it = reader.iter(0, IterOptions::default()).unwrap();
            for back in [false, true] {
                let t = core.now_exact_ns();
                let mut n = 0u64;
                if back {
                    it.seek_to_last().await.unwrap();
                } else {
                    it.seek_to_first().await.unwrap();
                }
                while it.valid() && n < 2_000_000 {
                    n += 1;
                    if back { it.prev().await.unwrap() } else { it.next().await.unwrap() }
                }
                println!(
                    "back {back}: {:.0}/s",
                    n as f64 / ((core.now_exact_ns() - t) as f64 / 1e9)
                );
            }
            for back in [false, true] {
                let t = core.now_exact_ns();
                let n = 2000;
                for _ in 0..n {
                    let k = core.random_u64() % keys;
                    let mut key = [b'0'; 16];
                    key[..8].copy_from_slice(&k.to_be_bytes());
                    if back {
                        it.seek_for_prev(&key).await.unwrap()
                    } else {
                        it.seek(&key).await.unwrap()
                    }
                    for _ in 0..50 {
                        if back { it.prev().await.unwrap() } else { it.next().await.unwrap() }
                    }
                }
                println!(
                    "seek50 back {back}: {:.0}/s",
                    n as f64 / ((core.now_exact_ns() - t) as f64 / 1e9)
                );
            }
            let t = core.now_exact_ns();
            let n = 500;
            for _ in 0..n {
                let ks: Vec<[u8; 16]> = (0..64)
                    .map(|_| {
                        let k = core.random_u64() % keys;
                        let mut key = [b'0'; 16];
                        key[..8].copy_from_slice(&k.to_be_bytes());
                        key
                    })
                    .collect();
                let refs: Vec<&[u8]> = ks.iter().map(|k| &k[..]).collect();
                for r in reader.multi_get(0, &refs, None).await {
                    assert!(r.unwrap().is_some());
                }
            }
            println!("multiget64: {:.0} us", (core.now_exact_ns() - t) as f64 / 1e3 / n as f64);
            println!("{:?}", core.stats());
            println!("{:?}", reader.stats());
        }
    })
    .unwrap();
}
