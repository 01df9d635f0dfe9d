//! The shard's mailbox, and its way back to the other cores.
//!
//! This file is the shard's part of the circle that `core` names: parcels arrive through the node's
//! state, and answers leave as errands on the cores.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;

use reactor::Class;
use reactor::mailbox::{Scheduled, mailbox};

use crate::client::write_room::PARCELS_MAX;
use crate::core::ask::Posters;
use crate::core::node::NodeState;
use crate::shard::answers::Origin;
use crate::shard::parcel::{Delivery, Parcel};
use crate::shard::{BUILT_BYTES_MAX, Shard};

/// Most deliveries of one core on their way: parcels, a report, and one that the core has ended.
const DELIVERIES_MAX: usize = PARCELS_MAX + 2;

/// Parcels taken from the mailbox in one go.
const PARCELS_PER_TURN: usize = 256;

impl Shard {
    /// Opens the shard to the connections of all cores. Suspends for a turn or two.
    pub async fn attach(&self, node: &Arc<NodeState>) {
        let shard = self.0.clone();
        shard.posters.get_or_init(|| Posters::new(node));
        let _ = node.expiry.set(shard.ledger.shared().clone());
        let settings = node.settings();
        shard.value_bytes_max.set(settings.value_bytes_max());
        shard.built_bytes_max.set(settings.writes_bytes_max.min(BUILT_BYTES_MAX));
        shard.watches.borrow_mut().limit(settings.watches_bytes_max);
        let (posting, mut owner) = mailbox(DELIVERIES_MAX);
        let (opened, owner_core) = (node.clone(), self.0.core.id());
        let task = self.0.core.spawn(Class::Foreground, async move {
            poll_fn(|cx| {
                // A task has the same waker every time, so the first one stays valid.
                opened.open_shard(owner_core, &posting, cx.waker());
                let more = owner.take(PARCELS_PER_TURN, &mut |delivery| match delivery {
                    Delivery::Parcel(Parcel { core, number, connection, changes }) => {
                        shard.accept(connection, changes, Origin::Core { core, number });
                    }
                    Delivery::Heard { core, number } => shard.heard(core, number),
                });
                shard.end_turn();
                if more == Scheduled::Yes {
                    cx.waker().wake_by_ref();
                }
                Poll::<()>::Pending
            })
            .await;
        });
        self.0.tasks.borrow_mut().push(task);
        while !node.is_writable() {
            self.0.core.yield_now().await;
        }
    }
}
