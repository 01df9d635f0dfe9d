//! Counts words with many tasks of tokio.
//!
//! ```text
//! cargo run -p millrace --example tokio -- /tmp/words README.md docs/*.md
//! ```

#![expect(clippy::disallowed_methods, reason = "a program reads its files as it likes")]

use std::collections::BTreeMap;
use std::error::Error;

use millrace::{Db, MergeOperator, Options, WriteBatch};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().ok_or("usage: tokio DIRECTORY FILE...")?;
    let db = Options::new().merge_operator(MergeOperator::UInt64Add).open(path).await?;

    let tasks: Vec<_> = arguments.map(|file| tokio::spawn(count_words(db.clone(), file))).collect();
    for task in tasks {
        task.await??;
    }

    let mut words = db.range(..);
    let mut total = 0;
    while let Some(entry) = words.next().await {
        let (_, count) = entry?;
        total += u64::from_le_bytes(count[..].try_into()?);
    }
    println!("{total} words");
    if let Some(count) = db.get("the").await? {
        println!("{} of them are \"the\"", u64::from_le_bytes(count[..].try_into()?));
    }
    db.close().await?;
    Ok(())
}

/// Adds the words of a file to the counters: one batch, so a file is counted whole or not at all.
async fn count_words(db: Db, file: String) -> Result<(), Box<dyn Error + Send + Sync>> {
    let text = tokio::task::spawn_blocking(move || std::fs::read_to_string(file)).await??;
    let mut counts = BTreeMap::<&str, u64>::new();
    for word in text.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty()) {
        *counts.entry(word).or_default() += 1;
    }
    let mut batch = WriteBatch::new();
    for (word, count) in counts {
        batch.merge(word, count.to_le_bytes());
    }
    db.write(batch).await?;
    Ok(())
}
