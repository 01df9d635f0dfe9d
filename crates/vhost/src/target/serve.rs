//! Accepts connections, and serves or quiesces the disk as ordered.

use std::os::fd::OwnedFd;

use reactor::{Either, drop_in_background, race};

use crate::protocol::handover::DiskState;
use crate::target::connection::{Connection, End, Refused};
use crate::target::door::Door;
use crate::target::link::{Earlier, Link};
use crate::target::log_limit::{LogLimit, LogPermit};
use crate::target::observer::{self, DiskEvent};
use crate::target::shared_memory_hint::hint_at_unshared_memory;
use crate::target::{Export, FrontEnd, Order, Target};

/// Pause after a failed accept, in nanoseconds.
const RETRY_NS: u64 = 100_000_000;

/// The result of waiting for a connection.
enum Accepted {
    Link(Link, Option<Earlier>),
    Quiesce,
    Stop,
}

impl Target {
    /// Serves connections until [`Target::stop`].
    pub async fn serve(&self, door: impl Into<Door>) {
        self.core.working(self.work, self.serve_all(door.into(), None)).await;
    }

    /// Takes over a disk that is quiesced in another process. The disk is then quiesced here, which
    /// completes [`Target::quiesce`]. After [`Target::resume`] it is served until [`Target::stop`].
    pub async fn take_over(&self, state: &DiskState, descriptors: Vec<OwnedFd>) {
        self.core.working(self.work, self.taken_over(state, descriptors)).await;
    }

    async fn taken_over(&self, state: &DiskState, descriptors: Vec<OwnedFd>) {
        self.order.set(Order::Quiesce);
        let (door, connection) = match self.adopt(state, descriptors) {
            Ok(adopted) => adopted,
            Err(why) => return self.publish(Err(why)),
        };
        let export = self.export(&door, connection.as_ref());
        let export = export.and_then(|export| {
            // The state to export from here must equal the imported one.
            let same = (export.0.capacity_sectors, &export.0.connection);
            match same == (state.capacity_sectors, &state.connection) {
                true => Ok(export),
                false => Err("the disk's size or session differs here".to_owned()),
            }
        });
        match self.wait_quiesced(export).await {
            Order::Serve => self.serve_all(door, connection).await,
            Order::Quiesce => {
                connection.iter().for_each(|connection| connection.link.close());
                self.serve_all(door, None).await;
            }
            Order::Stop => {}
        }
    }

    async fn serve_all(&self, door: Door, mut taken: Option<Connection<'_>>) {
        loop {
            let connection = match taken.take() {
                Some(connection) => connection,
                None => match self.accept(&door).await {
                    Accepted::Link(link, earlier) => {
                        // Early memory was mapped for a front end that did not come.
                        drop(self.early.take());
                        match self.begin(link, earlier) {
                            Some(connection) => connection,
                            None => continue,
                        }
                    }
                    Accepted::Quiesce => {
                        let export = self.export(&door, None);
                        match self.wait_quiesced(export).await {
                            Order::Serve | Order::Quiesce => continue,
                            Order::Stop => return,
                        }
                    }
                    Accepted::Stop => return,
                },
            };
            if !self.serve_connection(&door, connection).await {
                return;
            }
        }
    }

    /// Begins with a connection; `None` if it cannot continue its session here.
    fn begin(&self, link: Link, earlier: Option<Earlier>) -> Option<Connection<'_>> {
        let (name, pid) = (&*self.name, link.pid());
        let Some(earlier) = earlier else {
            if let Some(LogPermit { left_out }) = self.permit(&self.log_limits.connected) {
                tracing::info!(disk = name, pid, left_out, "a front end has connected");
                self.tell(DiskEvent::Connected { pid });
            }
            let connection = Connection::new(self, link);
            connection.memory.account().bound();
            return Some(connection);
        };
        let mut connection = Connection::new(self, link);
        match connection.recover(earlier) {
            Ok(()) => {
                tracing::info!(disk = name, pid, "a front end's connection continues here");
                Some(connection)
            }
            Err(Refused(why)) => {
                tracing::warn!(disk = name, pid, "a front end's connection cannot continue: {why}");
                self.tell(DiskEvent::Closed { pid, why });
                connection.link.close();
                drop(connection);
                drop_in_background(self.regions.take());
                None
            }
        }
    }

    /// Serves a connection to its end. Returns false if the target is told to stop.
    async fn serve_connection(&self, door: &Door, mut connection: Connection<'_>) -> bool {
        let name = &*self.name;
        let pid = connection.link.pid();
        connection.note_front_end();
        let hint = hint_at_unshared_memory(&self.core, self.name.clone(), &self.stats);
        let end = loop {
            match connection.run().await {
                End::Quiescing => {
                    connection.stop_rings(true).await;
                    let export = self.export(door, Some(&connection));
                    match self.wait_quiesced(export).await {
                        Order::Serve => {}
                        Order::Quiesce => break End::Quiescing,
                        // Another process may have it.
                        Order::Stop => break End::Exported,
                    }
                }
                end => break end,
            }
        };
        // Operations of this front end must not overlap with the next one's connection.
        connection.stop_rings(false).await;
        match end {
            // Abandoned operations keep it locked, until the file is closed.
            End::Gone | End::Failed(_) | End::Quiescing if self.in_flight().is_none() => {
                self.release_lock().await;
            }
            // Another process may have it, or the file is about to be closed.
            _ => self.lock.leave(),
        }
        if !matches!(end, End::Exported) && !self.leaves.get() {
            connection.link.close();
        }
        drop(connection);
        drop_in_background(self.regions.take());
        let left = self.front_end() == FrontEnd::Stopped { moves: true };
        self.set_front_end(FrontEnd::Absent { left });
        drop(hint);
        if matches!(end, End::Gone | End::Failed(_)) {
            // What has failed is gone, or in the front end's region.
            self.trouble.resume();
        }
        match end {
            End::Stopped | End::Exported => return false,
            End::Gone => {
                if let Some(LogPermit { left_out }) = self.permit(&self.log_limits.gone) {
                    tracing::info!(disk = name, pid, left_out, "the front end has gone");
                    self.tell(DiskEvent::Gone { pid });
                }
            }
            // Continue without the connection.
            End::Quiescing => {}
            End::Failed(why) => {
                if let Some(LogPermit { left_out }) = self.permit(&self.log_limits.refused) {
                    tracing::warn!(disk = name, pid, left_out, "the connection was closed: {why}");
                    self.tell(DiskEvent::Closed { pid, why });
                }
            }
        }
        true
    }

    /// Tells the observer of the disks what has happened here.
    fn tell(&self, event: DiskEvent) {
        observer::tell(&self.core, self.core.id(), &self.name, event);
    }

    /// Whether to log an event of this kind now.
    pub(super) fn permit(&self, of: &LogLimit) -> Option<LogPermit> {
        of.permit(self.core.now_ns())
    }

    fn publish(&self, export: Result<Export, String>) {
        self.export.replace(Some(export));
        self.exported.notify_all();
    }

    /// Publishes the export and waits for the next order: to serve, to stop, or to quiesce again
    /// without the connection.
    async fn wait_quiesced(&self, export: Result<Export, String>) -> Order {
        self.publish(export);
        let next = || match self.order.get() {
            Order::Quiesce if !self.disconnect.take() => None,
            order => Some(order),
        };
        let order = self.events.changed.wait_for(next).await;
        self.export.take();
        order
    }

    async fn accept(&self, door: &Door) -> Accepted {
        loop {
            let ordered = self.events.changed.wait_for(|| match self.order.get() {
                Order::Serve => None,
                Order::Quiesce => Some(Accepted::Quiesce),
                Order::Stop => Some(Accepted::Stop),
            });
            match race(ordered, door.accept(&self.core)).await {
                Either::First(order) => return order,
                Either::Second(Ok((link, earlier))) => return Accepted::Link(link, earlier),
                Either::Second(Err(error)) => {
                    tracing::warn!(disk = &*self.name, "accepting a connection: {error}");
                    self.core.sleep_ns(RETRY_NS).await;
                }
            }
        }
    }
}
