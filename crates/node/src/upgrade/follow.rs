//! Disks that follow from the predecessor, after the successor has begun to lead.

use std::rc::Rc;

use reactor::{Class, Core};

use super::successor::{Arrival, Predecessor};
use crate::disks::Disks;
use crate::disks::resources::Ready;
use crate::disks::spec::DiskSpec;
use crate::error::Error;

/// Adds the disks that follow from the predecessor. Those that it does not hand over are opened
/// with `open`, as soon as that is possible.
pub(crate) async fn follow(
    disks: Rc<Disks>,
    core: Core,
    predecessor: Rc<Predecessor>,
    open: impl AsyncFn(&DiskSpec) -> Result<Ready, Error> + Clone + 'static,
) {
    while let Some(arrival) = predecessor.next().await {
        match arrival {
            Arrival::Serves(served, serving, unsettled) => {
                disks.has_followed(&core, *served, serving, unsettled).await;
            }
            Arrival::Settled(spec) => disks.has_settled(&spec),
            Arrival::Lost(lost) => {
                let (disks, again, open) = (disks.clone(), core.clone(), open.clone());
                core.spawn(Class::Control, async move {
                    disks.open_again(&again, lost, open).await;
                });
            }
        }
    }
}
