//! The server of one core: accepts a listener's connections, and stops in good order.

use std::rc::Rc;
use std::sync::Arc;

use lsm::Reader;
use reactor::{Class, Core, JoinHandle, Listener, Socket, timeout};

use crate::connection::serve;
use crate::core::ends::tell_ends;
use crate::core::node::{CountedClient, NodeState};
use crate::core::state::CoreState;
use crate::info::metrics::Reporter;
use crate::shard::Shard;
use crate::tls::config::Tls;

/// The pause before accepting again after the system could not provide a connection.
const RETRY_NS: u64 = 100_000_000;

/// Where a core accepts connections.
pub struct Door {
    /// The socket.
    pub listener: Listener,
    /// TLS of its connections, if any.
    pub tls: Option<Tls>,
}

/// One core's server. Every core of the node starts its own, with the same [`NodeState`].
pub struct Server {
    state: Rc<CoreState>,
    accepting: Vec<JoinHandle<()>>,
    errands: JoinHandle<()>,
    /// On a node that only reads.
    ends: Option<JoinHandle<()>>,
}

impl Server {
    /// Serves the connections of `listener` from `reader`, both of this core. The core that owns
    /// the shard passes it too, already attached to `node`; a node without a shard is read-only.
    pub fn start(
        core: &Core,
        reader: Reader,
        node: &Arc<NodeState>,
        listener: Listener,
        shard: Option<Shard>,
    ) -> Self {
        Self::start_at(core, reader, node, vec![Door { listener, tls: None }], shard)
    }

    /// The same for several listeners, of which some may be for TLS. Connections wait in their
    /// backlogs until every core of the node has started its server.
    pub fn start_at(
        core: &Core,
        reader: Reader,
        node: &Arc<NodeState>,
        doors: Vec<Door>,
        shard: Option<Shard>,
    ) -> Self {
        let state = CoreState::new(core, reader, node.clone(), shard);
        let errands = core.spawn(Class::Control, state.clone().run_errands());
        let reads_only = !node.is_writable();
        let ends = reads_only.then(|| core.spawn(Class::Background, tell_ends(state.clone())));
        let accept = |door| core.spawn(Class::Foreground, accept(state.clone(), door));
        let accepting = doors.into_iter().map(accept).collect();
        Self { state, accepting, errands, ends }
    }

    /// Reports the metrics of the whole node; works as long as the server does.
    pub fn reporter(&self) -> Reporter {
        Reporter(self.state.clone())
    }

    /// The number of open connections.
    pub fn clients(&self) -> usize {
        self.state.clients.len()
    }

    /// Stops accepting, lets connections send the replies in progress for at most `grace_ns`, then
    /// closes them.
    pub async fn stop(self, grace_ns: u64) {
        let core = &self.state.core;
        self.accepting.into_iter().for_each(JoinHandle::cancel);
        self.state.stopping.set(true);
        self.state.clients.wake_all();
        if timeout(core, grace_ns, self.state.clients.all_gone()).await.is_err() {
            self.state.clients.kill_all();
            self.state.clients.all_gone().await;
        }
        self.errands.cancel();
        if let Some(ends) = self.ends {
            ends.cancel();
        }
        // Announcements that have come too late.
        self.state.report_heard(u64::MAX);
    }
}

async fn accept(state: Rc<CoreState>, Door { listener, tls }: Door) {
    state.node_opened().await;
    loop {
        match listener.accept().await {
            Ok(socket) => match admit(&state, tls.is_some()) {
                Some(counted) => {
                    let serving = serve(state.clone(), socket, tls.clone(), counted);
                    state.core.spawn(Class::Foreground, serving);
                }
                None => {
                    state.count(|stats| stats.rejected += 1);
                    match tls.is_some() {
                        // It could not read a text.
                        true => socket.shutdown(),
                        false => {
                            state.core.spawn(Class::Foreground, turn_away(socket));
                        }
                    }
                }
            },
            // Most likely out of descriptors: connections wait in the backlog until others are
            // closed.
            Err(_) => state.core.sleep_ns(RETRY_NS).await,
        }
    }
}

/// Counts a connection, unless there are too many.
fn admit(state: &CoreState, has_tls: bool) -> Option<CountedClient> {
    if has_tls && !state.secured.has_room(state.node.settings().tls_bytes_max) {
        return None;
    }
    state.node.count_client()
}

async fn turn_away(socket: Socket) {
    // A new connection's send buffer has room for a line. If it does not, closing has the same
    // meaning.
    let _ = socket.send(b"-ERR max number of clients reached\r\n".to_vec()).await;
    socket.shutdown();
}
