//! `kv column-families`, on a directory.

use std::fmt::Write as _;

use lsm::{ColumnFamilyOptions, Comparator, Db, FamilyStat, OpenOptions, WriteOptions, Writer};
use node::Size;
use reactor::Core;
use serde_json::{Value, json};

use crate::args::{FamiliesCommand, FamiliesPlace};
use crate::failure::{Failure, Verdict};
use crate::output::{Out, escape_into, thousands};
use crate::tool_core::{POOL_BYTES, on_core};

/// Runs a command.
pub fn run(command: FamiliesCommand) -> Result<Verdict, Failure> {
    match command {
        FamiliesCommand::List { place, secondary } => list(place, secondary),
        FamiliesCommand::Create { name, descending, place } => create(name, descending, place),
        FamiliesCommand::Drop { name, place } => drop_family(name, place),
    }
}

fn list(place: FamiliesPlace, secondary: bool) -> Result<Verdict, Failure> {
    let io = place.io;
    on_core(io, async move |core| {
        let options = OpenOptions { secondary, cache_bytes: POOL_BYTES / 4, ..Default::default() };
        let db = node::open(&core, &place.data, options).await?;
        let families = db.stat().column_families;
        let mut out = Out::new();
        if place.json {
            out.json(&families.iter().map(family_json).collect())?;
        } else {
            out.bytes(text(&families).as_bytes())?;
        }
        out.flush()?;
        Ok(Verdict::Good)
    })
}

fn bytes(family: &FamilyStat) -> u64 {
    family.levels.iter().map(|level| level.bytes).sum::<u64>() + family.blob_bytes
}

fn family_json(family: &FamilyStat) -> Value {
    json!({
        "id": family.id,
        "name": family.name,
        "comparator": family.comparator,
        "refused": family.refused,
        "estimated_keys": family.estimated_keys,
        "bytes": bytes(family),
    })
}

fn text(families: &[FamilyStat]) -> String {
    let mut out = format!("{:>6} {:>15} {:>10}  name\n", "id", "about keys", "size");
    for family in families {
        let (keys, size) = (thousands(family.estimated_keys), Size(bytes(family)).to_string());
        let _ = write!(out, "{:>6} {keys:>15} {size:>10}  ", family.id);
        escape_into(&mut out, family.name.as_bytes());
        out.push('\n');
    }
    out
}

fn create(name: String, descending: bool, place: FamiliesPlace) -> Result<Verdict, Failure> {
    let io = place.io;
    on_core(io, async move |core| {
        let comparator = match descending {
            true => Comparator::ReverseBytewise,
            false => Comparator::Bytewise,
        };
        let options = ColumnFamilyOptions { comparator };
        let may = async |db: &Db| db.may_create_column_family(&core, &name, options.clone()).await;
        let (writer, ()) = open(&core, &place, may).await?;
        let created = writer.create_column_family(&name, options).await;
        let id = close(&writer, created, &place).await?;
        say(&place, &json!({ "created": name, "id": id }))
    })
}

fn drop_family(name: String, place: FamiliesPlace) -> Result<Verdict, Failure> {
    let io = place.io;
    on_core(io, async move |core| {
        let may = async |db: &Db| db.may_drop_column_family(&name);
        let (writer, id) = open(&core, &place, may).await?;
        let dropped = writer.drop_column_family(id).await;
        close(&writer, dropped, &place).await?;
        say(&place, &json!({ "dropped": name, "id": id }))
    })
}

async fn open<T>(
    core: &Core,
    place: &FamiliesPlace,
    may: impl AsyncFn(&Db) -> lsm::Result<T>,
) -> Result<(Writer, T), Failure> {
    let options = OpenOptions { cache_bytes: POOL_BYTES / 4, ..OpenOptions::default() };
    let write = WriteOptions { create: false, ..WriteOptions::default() };
    let (_, writer, answer) =
        node::open_for_writing(core, &place.data, options, write, may).await?;
    Ok((writer, answer))
}

/// Closes the database. If both the command and the closing fail, returns the command's failure.
async fn close<T>(
    writer: &Writer,
    done: lsm::Result<T>,
    place: &FamiliesPlace,
) -> Result<T, Failure> {
    let closed = writer.close().await;
    let explain = |error| node::explain(&place.data, &error);
    let done = done.map_err(explain)?;
    closed.map_err(explain)?;
    Ok(done)
}

/// Prints what was done as JSON. Without `--json` a success is silent, as of `kv put`.
fn say(place: &FamiliesPlace, done: &Value) -> Result<Verdict, Failure> {
    if place.json {
        let mut out = Out::new();
        out.json(done)?;
        out.flush()?;
    }
    Ok(Verdict::Good)
}
