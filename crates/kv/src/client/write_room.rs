//! Admission of writes: how many parcels and bytes of a core's connections may be in flight to the
//! shard.
//!
//! Parcels and bytes are counted from the sending to the answer. Beyond a limit the connections of
//! the core take no command that writes until answers have arrived. So the shard's mailbox is never
//! full, and the engine's queue holds no more than the cores' limits allow. One write is admitted
//! however large it is.

use std::cell::RefCell;
use std::rc::Rc;

use crate::client::gauge::{Gauge, Share};
use crate::client::registry::Client;
use crate::settings::Settings;

/// Parcels that one core may have in flight.
pub(crate) const PARCELS_MAX: usize = 1 << 14;

/// The room for the parcels of a core, and the connections that wait for it.
#[derive(Default)]
pub(crate) struct WriteRoom {
    bytes: Gauge,
    parcels: Gauge,
    waiting: RefCell<Vec<Rc<Client>>>,
}

impl WriteRoom {
    /// Bytes of changes in flight.
    pub fn bytes(&self) -> usize {
        self.bytes.get()
    }

    /// Whether one more parcel may be sent.
    pub fn has_room(&self, settings: &Settings) -> bool {
        self.bytes.get() < settings.writes_bytes_max && self.parcels.get() < PARCELS_MAX
    }

    /// Registers a connection to be woken when there may be room.
    pub fn wait(&self, client: &Rc<Client>) {
        let mut waiting = self.waiting.borrow_mut();
        if !waiting.iter().any(|other| Rc::ptr_eq(other, client)) {
            waiting.push(client.clone());
        }
    }

    /// Takes room for a parcel of this weight.
    pub fn reserve(self: &Rc<Self>, weight: usize) -> WriteReservation {
        let (mut bytes, mut parcel) = (self.bytes.share(), self.parcels.share());
        bytes.set(weight);
        parcel.set(1);
        WriteReservation { room: self.clone(), _bytes: bytes, _parcel: parcel }
    }
}

/// A parcel's part of its core's limits. Dropping it releases the room and wakes the waiters.
pub(crate) struct WriteReservation {
    room: Rc<WriteRoom>,
    _bytes: Share,
    _parcel: Share,
}

impl Drop for WriteReservation {
    fn drop(&mut self) {
        for client in self.room.waiting.take() {
            client.wake();
        }
    }
}
