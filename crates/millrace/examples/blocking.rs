//! Reads and writes from plain threads.
//!
//! ```text
//! cargo run -p millrace --example blocking -- /tmp/numbers
//! ```

use std::error::Error;

use millrace::blocking::Db;

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).ok_or("usage: blocking DIRECTORY")?;
    let db = Db::open(path)?;

    // Writes of concurrent threads share the log's flushes.
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4_u32)
            .map(|thread| {
                let db = &db;
                scope.spawn(move || -> millrace::Result<()> {
                    for n in (thread..1000).step_by(4) {
                        db.put(n.to_be_bytes(), format!("number {n}"))?;
                    }
                    Ok(())
                })
            })
            .collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("it does not panic"))
    })?;

    println!("{} entries", db.range(..).count());
    for entry in db.range(990_u32.to_be_bytes()..).rev().take(3) {
        let (key, value) = entry?;
        println!("{:?} {}", &key[..], value.escape_ascii());
    }
    // Dropping the last handle waits until the database is closed.
    Ok(())
}
