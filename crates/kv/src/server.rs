//! The server of one core: accepts a listener's connections, and stops in good order.

use std::rc::Rc;
use std::sync::Arc;

use lsm::Reader;
use reactor::{Class, Core, JoinHandle, Listener, Socket, timeout};

use crate::connection::serve;
use crate::core::node::NodeState;
use crate::core::state::CoreState;
use crate::info::metrics::Reporter;
use crate::shard::Shard;

/// The pause before accepting again after the system could not provide a connection.
const RETRY_NS: u64 = 100_000_000;

/// One core's server. Every core of the node starts its own, with the same [`NodeState`].
pub struct Server {
    state: Rc<CoreState>,
    accepting: JoinHandle<()>,
    errands: JoinHandle<()>,
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
        let state = CoreState::new(core, reader, node.clone(), shard);
        let errands = core.spawn(Class::Control, state.clone().run_errands());
        let accepting = core.spawn(Class::Foreground, accept(state.clone(), listener));
        Self { state, accepting, errands }
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
        self.accepting.cancel();
        self.state.stopping.set(true);
        self.state.clients.wake_all();
        if timeout(core, grace_ns, self.state.clients.all_gone()).await.is_err() {
            self.state.clients.kill_all();
            self.state.clients.all_gone().await;
        }
        self.errands.cancel();
        // Announcements that have come too late.
        self.state.report_heard(u64::MAX);
    }
}

async fn accept(state: Rc<CoreState>, listener: Listener) {
    loop {
        match listener.accept().await {
            Ok(socket) => match state.node.count_client() {
                Some(counted) => {
                    let serving = serve(state.clone(), socket);
                    state.core.spawn(Class::Foreground, async move {
                        serving.await;
                        drop(counted);
                    });
                }
                None => {
                    state.count(|stats| stats.rejected += 1);
                    state.core.spawn(Class::Foreground, turn_away(socket));
                }
            },
            // Most likely out of descriptors: connections wait in the backlog until others are
            // closed.
            Err(_) => state.core.sleep_ns(RETRY_NS).await,
        }
    }
}

async fn turn_away(socket: Socket) {
    // A new connection's send buffer has room for a line. If it does not, closing has the same
    // meaning.
    let _ = socket.send(b"-ERR max number of clients reached\r\n".to_vec()).await;
    socket.shutdown();
}
