//! Steady-state gets allocate nothing on the heap, with and without a cache. A counting allocator
//! proves it.

use std::process::Command;

use lsm::{Db, OpenOptions};
use reactor::RuntimeConfig;
use reactor::testing::{CountingAllocator, allocations};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

#[test]
fn steady_state_gets_allocate_nothing() {
    let dir = std::env::temp_dir().join(format!("millrace-alloc-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&dir);
    let made = Command::new("db_bench")
        .args(["--benchmarks=fillseq,compact", "--num=20000", "--value_size=1000"])
        .args(["--compression_type=none", "--bloom_bits=10"])
        .arg(format!("--db={}", dir.display()))
        .output()
        .expect("db_bench runs: install Debian's rocksdb-tools (./test does)");
    assert!(made.status.success(), "{made:?}");
    let path = dir.clone();
    let config = RuntimeConfig {
        processors: reactor::processors()[..1].to_vec(),
        memory: 64 << 20,
        ..RuntimeConfig::default()
    };
    reactor::run(&config, move |core| {
        let path = path.clone();
        async move {
            for cache_bytes in [0, 8 << 20] {
                let options = OpenOptions { cache_bytes, ..OpenOptions::default() };
                let db = Db::open(&core, &path, options).await.expect("the database opens");
                let reader = db.attach(&core);
                let mut before = 0;
                // The same keys every time, so that it is not random which tables have grown to
                // their size.
                let mut random = 1u64;
                // The first rounds fill the pool, the cache and the tables of the core.
                for round in 0..30_000u64 {
                    if round == 20_000 {
                        before = allocations();
                    }
                    let mut key = [b'0'; 16];
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    key[..8].copy_from_slice(&((random >> 33) % 20_000).to_be_bytes());
                    reader.warm(0, &[&key, &key[..8]]);
                    let value = match reader.get_cached(0, &key) {
                        Some(found) => found,
                        None => reader.get(0, &key, None).await,
                    };
                    assert_eq!(value.unwrap().expect("every key is there").len(), 1000);
                }
                let allocated = allocations() - before;
                let misses = reader.stats().cache_misses;
                assert!(misses > 10_000, "the device was read: {misses}");
                assert_eq!(allocated, 0, "in 10,000 gets with {cache_bytes} bytes of cache");
            }
        }
    })
    .expect("the runtime starts");
    let _ = std::fs::remove_dir_all(&dir);
}
