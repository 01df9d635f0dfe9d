//! Debian's db_bench: it makes the database, and it is one of the peers. It is built with
//! assertions on, so it is no fair peer where the processor decides; the table says so.

use std::path::Path;

use serde_json::json;

use super::Setup;
use super::sample::Sample;
use super::tool::Tool;

/// Makes the database of the table.
pub fn make_database(dir: &Path, keys: u64) -> Result<(), String> {
    database_tool(dir, keys).output().map(|_| ())
}

fn database_tool(dir: &Path, keys: u64) -> Tool {
    Tool::new("db_bench").arg(format!("--db={}", dir.display())).arg(format!("--num={keys}")).args(
        [
            "--benchmarks=fillseq,compact",
            "--key_size=16",
            "--value_size=1000",
            "--block_size=4096",
            "--bloom_bits=10",
            "--compression_type=none",
        ],
    )
}

/// How the database of the table is made.
pub fn recipe() -> String {
    database_tool(Path::new("DIR"), super::KEYS).line()
}

/// Reads everything in order, once.
pub fn read_seq(setup: &Setup) -> Result<Sample, String> {
    let tool = Tool::new("db_bench")
        .arg(format!("--db={}", setup.data.display()))
        .arg(format!("--num={}", setup.keys))
        .args([
            "--use_existing_db",
            "--readonly",
            "--benchmarks=readseq",
            "--use_direct_reads",
            "--cache_size=0",
            "--bloom_bits=10",
            "--open_files=-1",
        ]);
    let command = tool.line();
    let text = tool.output()?;
    let ops_per_second = parse(&text, "readseq").ok_or("db_bench's report has no such line")?;
    Ok(Sample { ops_per_second, command, report: json!(text), ..Sample::default() })
}

/// Sets random keys of a new database in `dir`, `num` of them with so many threads.
pub fn fill_random(dir: &Path, keys: u64, num: u64, threads: u32) -> Result<Sample, String> {
    let tool = Tool::new("db_bench")
        .arg(format!("--db={}", dir.display()))
        .arg(format!("--num={keys}"))
        .arg(format!("--writes={}", num / u64::from(threads)))
        .arg(format!("--threads={threads}"))
        .args([
            "--benchmarks=fillrandom",
            "--key_size=16",
            "--value_size=1000",
            "--block_size=4096",
            "--bloom_bits=10",
            "--compression_type=none",
            "--write_buffer_size=67108864",
        ]);
    let command = tool.line();
    let text = tool.output()?;
    let ops_per_second = parse(&text, "fillrandom").ok_or("db_bench's report has no such line")?;
    Ok(Sample { ops_per_second, command, report: json!(text), ..Sample::default() })
}

/// The operations per second in a line such as
/// `readseq      :       1.408 micros/op 710227 ops/sec 5.6 seconds ...`.
fn parse(text: &str, name: &str) -> Option<f64> {
    let line = text.lines().find(|line| line.starts_with(name))?;
    let words: Vec<&str> = line.split_whitespace().collect();
    let at = words.iter().position(|word| word.starts_with("ops/sec"))?;
    words.get(at.checked_sub(1)?)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_is_found_in_db_benchs_line() {
        let text = "Keys: 16 bytes\nreadseq      :       1.408 micros/op 710227 ops/sec 5.632 \
                    seconds 4000000 operations;  688.2 MB/s\n";
        assert_eq!(parse(text, "readseq"), Some(710_227.0));
        assert_eq!(parse(text, "readreverse"), None);
    }
}
