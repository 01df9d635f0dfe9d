//! Messages between the cores of one runtime: one single-producer single-consumer ring for each
//! ordered pair, published once per turn, with at most one wake-up per destination and turn.
//!
//! A full ring refuses, and the sending task retries in its next turn (backpressure). Answers to
//! calls must not be refused, so they queue when the ring is full; their number is bounded by the
//! other side's open calls.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::core::Core;
use crate::driver::remote::CoreAddress;
use crate::spsc::{Consumer, Producer, ring};

/// A message: a function to run on the other core.
pub(crate) type Envelope = Box<dyn FnOnce(&Core) + Send>;

/// Capacity of one ring.
const RING: usize = 256;

/// On cache lines of its own, with [`loomable::CachePadded`]'s size: one thread makes all meshes,
/// side by side, and each core writes to its own in every turn (its positions in the rings).
#[repr(align(128))]
struct Peer {
    out: Producer<Envelope>,
    into: Consumer<Envelope>,
    queued: VecDeque<Envelope>,
    shared: Arc<CoreAddress>,
}

impl Peer {
    fn new(out: Producer<Envelope>, into: Consumer<Envelope>, shared: &Arc<CoreAddress>) -> Peer {
        Peer { out, into, queued: VecDeque::new(), shared: shared.clone() }
    }
}

/// One core's ends of all its rings.
#[derive(Default)]
pub(crate) struct Mesh {
    peers: Vec<Option<Peer>>,
    /// Messages received at the last call of `recent`.
    seen: u64,
    quiet: u32,
}

impl Mesh {
    /// The meshes of all cores.
    pub fn connect(cores: &[Arc<CoreAddress>]) -> Vec<Mesh> {
        let mut meshes: Vec<Mesh> = cores
            .iter()
            .map(|_| Mesh { peers: cores.iter().map(|_| None).collect(), ..Mesh::default() })
            .collect();
        for a in 0..cores.len() {
            for b in 0..a {
                let (a_out, b_in) = ring(RING);
                let (b_out, a_in) = ring(RING);
                meshes[a].peers[b] = Some(Peer::new(a_out, a_in, &cores[b]));
                meshes[b].peers[a] = Some(Peer::new(b_out, b_in, &cores[a]));
            }
        }
        meshes
    }

    /// Stages a message; a full ring returns it.
    pub fn send(&mut self, to: usize, message: Envelope) -> Result<(), Envelope> {
        match self.peers.get_mut(to) {
            Some(Some(peer)) if peer.queued.is_empty() => peer.out.push(message),
            _ => Err(message),
        }
    }

    /// Stages an answer; queues it if the ring is full.
    pub fn send_or_queue(&mut self, to: usize, message: Envelope) {
        if let Err(message) = self.send(to, message)
            && let Some(Some(peer)) = self.peers.get_mut(to)
        {
            peer.queued.push_back(message);
        }
    }

    pub fn receive(&mut self, from: usize) -> Option<Envelope> {
        self.peers.get_mut(from)?.as_mut()?.into.pop()
    }

    /// Makes this turn's messages visible and wakes the destinations that sleep.
    pub fn publish(&mut self) {
        for peer in self.peers.iter_mut().flatten() {
            while let Some(message) = peer.queued.pop_front() {
                if let Err(message) = peer.out.push(message) {
                    peer.queued.push_front(message);
                    break;
                }
            }
            if peer.out.publish() {
                peer.shared.wake_if_asleep();
            }
        }
    }

    /// Whether there is a message to receive or an answer to send.
    pub fn pending(&self) -> bool {
        self.peers.iter().flatten().any(|peer| !peer.queued.is_empty() || peer.into.pure_check())
    }

    /// Whether messages came since the last call, so that the core may expect more. `received`
    /// counts all so far.
    pub fn recent(&mut self, received: u64) -> bool {
        if received != self.seen {
            self.seen = received;
            self.quiet = 0;
        } else {
            self.quiet = self.quiet.saturating_add(1);
        }
        received > 0 && self.quiet < 4
    }
}
