//! Batches, and everything else that the core does that owns the database.

use std::rc::Rc;

use lsm::{ColumnFamilyOptions, Written};
use reactor::{Either, race};

use super::hall::{Hall, Runs};
use super::spawn;
use crate::bounds::Limits;
use crate::door::Weight;
use crate::error::{Error, ErrorKind, Result};
use crate::request::{Back, Write};

/// A batch that the engine has accepted.
pub(super) struct Submitted {
    written: Written,
    back: Back<()>,
    _weight: Weight,
    _runs: Runs,
}

/// Submits a batch, or starts the task of another request.
pub(super) fn begin(hall: &Rc<Hall>, write: Write, batches: &mut Vec<Submitted>) {
    let (runs, writer) = (hall.write_runs(), hall.writer());
    match write {
        Write::Batch { batch, condition, weight, back } => {
            let submitted = match condition {
                None => writer.submit(batch, None),
                Some(condition) => writer.submit_if(batch, None, *condition),
            };
            match submitted {
                Ok(written) => {
                    batches.push(Submitted { written, back, _weight: weight, _runs: runs });
                }
                Err(error) => back.send(Err(error.into())),
            }
        }
        Write::Sync { back } => answer(hall, runs, back, async move {
            writer.sync()?.await?;
            Ok(())
        }),
        Write::Flush { back } => answer(hall, runs, back, async move {
            writer.flush().await?;
            Ok(())
        }),
        Write::Compact { family, limits, back } => {
            let stopped = hall.clone();
            answer(hall, runs, back, async move {
                check_order(&stopped, family, &limits)?;
                let work = writer.compact(family, limits.lower.as_deref(), limits.upper.as_deref());
                let stop = stopped.changed.wait_until(|| stopped.stopping.get());
                match race(Box::pin(work), Box::pin(stop)).await {
                    Either::First(done) => Ok(done.map(drop)?),
                    Either::Second(()) => {
                        let text = "the compaction was cancelled: the database is being closed";
                        Err(Error::new(ErrorKind::Closed, text))
                    }
                }
            });
        }
        Write::Checkpoint { path, back } => answer(hall, runs, back, async move {
            writer.checkpoint(&path).await?;
            Ok(())
        }),
        Write::ListFamilies { back } => {
            let families = hall.reader().db().column_families();
            back.send(Ok(families.into_iter().map(|family| family.name).collect()));
        }
        Write::FindFamily { name, back } => {
            back.send(hall.reader().db().column_family(&name).map_err(Error::from));
        }
        Write::CreateFamily { name, back } => answer(hall, runs, back, async move {
            let options = ColumnFamilyOptions::default();
            Ok(writer.create_column_family(&name, options).await?)
        }),
        Write::DropFamily { name, back } => {
            let db = hall.reader().db().clone();
            answer(hall, runs, back, async move {
                let family = db.may_drop_column_family(&name)?;
                Ok(writer.drop_column_family(family).await?)
            });
        }
    }
}

/// Answers the batches of a turn when they are committed, which they are in their order.
pub(super) fn await_batches(hall: &Rc<Hall>, batches: Vec<Submitted>) {
    if batches.is_empty() {
        return;
    }
    spawn(hall, async move {
        for Submitted { written, back, .. } in batches {
            back.send(written.await.map(drop).map_err(Error::from));
        }
    });
}

/// Runs `work` in a task and sends its result back.
fn answer<T: 'static>(
    hall: &Rc<Hall>,
    runs: Runs,
    back: Back<T>,
    work: impl Future<Output = Result<T>> + 'static,
) {
    spawn(hall, async move {
        let result = work.await;
        drop(runs);
        back.send(result);
    });
}

/// Refuses limits that are wrong in the order of a column family.
pub(super) fn check_order(hall: &Hall, family: lsm::CfId, limits: &Limits) -> Result<()> {
    if !limits.bytewise {
        return Ok(());
    }
    let families = hall.reader().db().column_families();
    match families.into_iter().find(|found| found.id == family) {
        Some(found) if found.comparator != lsm::Comparator::Bytewise.name() => {
            let text = format!(
                "column family {} is in another order than bytewise: its ranges include their \
                 start and exclude their end, and there are no prefixes",
                found.name
            );
            Err(Error::new(ErrorKind::Unsupported, text))
        }
        _ => Ok(()),
    }
}
