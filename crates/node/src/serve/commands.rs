//! The commands of the admin socket, run in the node.

use std::rc::Rc;

use kv::Reporter;
use reactor::Core;
use serde_json::{Value, json};

use super::compactions::Compactions;
use super::holds::Holds;
use super::ingestions::Ingestions;
use crate::admin::{Commands, Request};
use crate::disks::report;
use crate::disks::{Detached, Disk, Disks};
use crate::error::{Error, Kind};
use crate::process::{CpuTime, resident_bytes};
use crate::upgrade::{Upgrader, upgraded};

/// The objects that commands work on.
pub(crate) struct Admin {
    pub core: Core,
    pub disks: Rc<Disks>,
    /// Reports on the cores that serve a database.
    pub reporter: Option<Reporter>,
    /// The lists of files that are held for copies.
    pub holds: Rc<Holds>,
    /// Control over merges.
    pub compactions: Rc<Compactions>,
    /// The files that are about to be ingested.
    pub ingestions: Ingestions,
    /// Present if this process may start others.
    pub upgrader: Option<Rc<Upgrader>>,
}

impl Commands for Admin {
    fn core(&self) -> &Core {
        &self.core
    }

    async fn run(&self, request: Request) -> Result<String, Error> {
        self.done(request).await.map(|result| result.to_string())
    }
}

impl Admin {
    async fn done(&self, request: Request) -> Result<Value, Error> {
        let (core, disks) = (&self.core, &self.disks);
        match request {
            Request::DiskList => {
                disks.refresh_space(core, None).await;
                Ok(json!({"disks": self.all(None, report::short)?}))
            }
            Request::DiskStat { name } => {
                disks.refresh_space(core, name.as_deref()).await;
                Ok(json!({"disks": self.all(name.as_deref(), report::long)?}))
            }
            Request::DiskAttach { disk, incoming } => {
                let (name, socket) = (disk.name.clone(), disk.socket.clone());
                let remembered = disks.attach(core, disk, incoming).await?;
                Ok(json!({"name": name, "socket": socket, "remembered": remembered}))
            }
            Request::DiskDetach { name, force } => {
                let Detached { comes_back, under_way } = disks.detach(core, &name, force).await?;
                Ok(json!({"name": name, "comes_back": comes_back, "under_way": under_way}))
            }
            Request::DiskResize { name, size_bytes, shrink } => {
                let old = disks.resize(core, &name, size_bytes, shrink).await?;
                Ok(json!({"name": name, "old_size_bytes": old, "size_bytes": size_bytes}))
            }
            Request::DiskMove { name, uri, finish } => {
                disks.refuse_ring_lock(&name, &uri)?;
                disks.begin_move(core, &name, &uri, finish).await
            }
            Request::DiskMoves { name } => {
                if let Some(name) = &name {
                    disks.unless_unknown(name)?;
                }
                Ok(disks.moves_report(core, name.as_deref()))
            }
            Request::DiskMoveFinish { name } => disks.finish_move(core, &name).await,
            Request::DiskMoveAbort { name, force } => disks.abort_move(core, &name, force).await,
            Request::DiskSend { name, to, finish } => {
                disks.refuse_ring_lock(&name, "")?;
                disks.begin_send(core, &name, to, finish).await
            }
            Request::DiskMoveLimit { bytes_per_second } => {
                disks.limit_moves(core, bytes_per_second).await
            }
            Request::DiskResume { name } => {
                let was_paused = disks.go_on(core, &name).await?;
                Ok(json!({"name": name, "was_paused": was_paused}))
            }
            Request::Events { log, after, wait } => match disks.events() {
                Some(events) => Ok(events.after(log.as_deref(), after, wait).await),
                None => Err(Error::new(Kind::System, "the launcher has the events")),
            },
            Request::DiskLimits => Ok(report::limits(&disks.limits())),
            Request::DiskLimit { change } => {
                let all = disks.change_limits(core, &change).await?;
                Ok(report::limited(&change, &all))
            }
            Request::FilesHold { log_bytes_max } => self.holds.begin(log_bytes_max).await,
            Request::FilesRenew { hold } => self.holds.renew(hold),
            Request::FilesRelease { hold } => self.holds.release(hold),
            Request::IngestBegin { files } => self.ingestions.begin(files),
            Request::IngestRenew { numbers } => self.ingestions.renew(&numbers),
            Request::IngestRelease { numbers } => self.ingestions.release(&numbers).await,
            Request::IngestFinish { column_family, numbers } => {
                self.ingestions.finish(&column_family, numbers).await
            }
            Request::CompactBegin { column_family, from, to } => {
                self.compactions.begin(&column_family, from.as_deref(), to.as_deref())
            }
            Request::CompactState { id } => self.compactions.state(id),
            Request::CompactCancel { id } => self.compactions.cancel(id),
            Request::CompactionStatus => self.compactions.status(),
            Request::CompactionPause => self.compactions.pause(true),
            Request::CompactionResume => self.compactions.pause(false),
            Request::CompactionLimit { cores_percent, bytes_per_second } => {
                self.compactions.limit(cores_percent, bytes_per_second)
            }
            Request::Top => {
                let mut cores = Vec::new();
                for id in 0..core.cores() {
                    let there = |there: &Core| {
                        let turns = there.stats().turns.get();
                        (CpuTime::of_this_thread().total().as_nanos() as u64, turns)
                    };
                    let (cpu_ns, turns) = core.call(id, there).await;
                    cores.push(json!({"core": id, "cpu_ns": cpu_ns, "turns": turns}));
                }
                let moves = disks.moves_report(core, None);
                Ok(json!({
                    "process": std::process::id(),
                    "now_ns": core.now_exact_ns(),
                    "resident_bytes": resident_bytes(),
                    "cores": cores,
                    "disks": self.all(None, report::long)?,
                    "moves": moves["moves"],
                    "shards": self.shards().await,
                }))
            }
            Request::Upgrade { program } => {
                let Some(upgrader) = &self.upgrader else {
                    return Err(Error::new(
                        Kind::System,
                        "a confined process cannot start another",
                    ));
                };
                let done = upgraded(program, async |program| upgrader.to(program).await).await?;
                Ok(done.as_json())
            }
        }
    }

    /// The database's shards: one, if there is a database.
    async fn shards(&self) -> Vec<Value> {
        let Some(reporter) = &self.reporter else { return Vec::new() };
        let glance = reporter.glance().await;
        let writer = &glance.writer;
        vec![json!({
            "shard": 0,
            "core": glance.writing_core,
            "keys": glance.keys,
            "connections": glance.connections,
            "commands": glance.commands,
            "gets": glance.gets,
            "cache_hits": glance.cache_hits,
            "cache_misses": glance.cache_misses,
            "writes": glance.writes,
            "wal_bytes": writer.log_bytes,
            "memtable_bytes": writer.memtable_bytes,
            "level0_files": writer.level0_files,
            "held_back_ns": writer.slowed_ns + writer.stopped_ns,
        })]
    }

    fn all(
        &self,
        name: Option<&str>,
        of: impl Fn(&Disks, &Disk, Option<bdev::Space>) -> Value,
    ) -> Result<Vec<Value>, Error> {
        let mut all = Vec::new();
        self.disks.each(|disk| {
            if name.is_none_or(|name| name == disk.spec.name) {
                all.push(of(&self.disks, disk, self.disks.space(&self.core, &disk.spec.name)));
            }
        });
        match name {
            Some(name) if all.is_empty() => Err(self
                .disks
                .target(name)
                .err()
                .unwrap_or_else(|| Error::new(Kind::Usage, format!("there is no disk {name}")))),
            _ => Ok(all),
        }
    }
}
