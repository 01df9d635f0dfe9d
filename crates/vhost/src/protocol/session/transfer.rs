//! Export and import: a session on its way to another process.

use std::os::fd::OwnedFd;

use super::{Action, Offer, Session};
use crate::protocol::handover::{HandoverError, Role, SessionState};
use crate::protocol::ring_state::{RingProgress, RingState};

impl Session {
    /// Exports the state in numbers, to be carried to another process. The target has the
    /// descriptors. `progress` returns the position of each active ring. Returns `None` while a
    /// reply is due.
    pub fn export(&self, mut progress: impl FnMut(u16) -> RingProgress) -> Option<SessionState> {
        if self.is_waiting() {
            return None;
        }
        let rings = (0u16..)
            .zip(&self.rings)
            .map(|(i, ring)| (*ring, (ring.state != RingState::Idle).then(|| progress(i))));
        Some(SessionState {
            features: self.features,
            protocol_features: self.protocol_features,
            owned: self.owned,
            write_cache: self.write_cache,
            regions: self.regions.clone(),
            inflight: self.inflight,
            log: self.log,
            log_signal: self.log_signal,
            backend_channel: self.backend_channel,
            rings: rings.collect(),
        })
    }

    /// Continues an exported session. Returns it with the actions that bring the target into the
    /// same state: the same as if the front end had sent everything again. `fds` are in the order
    /// of [`SessionState::roles`]. Active rings start from their [`RingProgress`], which the target
    /// finds in `state`.
    ///
    /// # Errors
    /// If the disk's offer no longer fits what the front end acknowledged, or if descriptors are
    /// missing. All descriptors are closed.
    pub fn import(
        offer: Offer,
        state: &SessionState,
        fds: Vec<OwnedFd>,
    ) -> Result<(Self, Vec<Action>), HandoverError> {
        let mut session = Self::new(offer);
        session.check_state(state)?;
        let roles = state.roles();
        if roles.len() != fds.len() {
            return Err(HandoverError::Descriptors { expected: roles.len(), found: fds.len() });
        }

        let mut actions = Vec::new();
        session.write_cache = state.write_cache;
        session.set_features(state.features, &mut actions);
        session.protocol_features = state.protocol_features;
        session.owned = state.owned;
        session.regions.clone_from(&state.regions);
        session.inflight = state.inflight;
        session.log = state.log;
        session.log_signal = state.log_signal;
        session.backend_channel = state.backend_channel;
        session.rings = state.rings.iter().map(|(ring, _)| *ring).collect();

        let mut regions = Vec::new();
        let mut descriptors = Vec::new();
        for (role, fd) in roles.into_iter().zip(fds) {
            match (role, state.inflight, state.log) {
                (Role::Memory(i), ..) => regions.push((state.regions[usize::from(i)], fd)),
                (Role::Inflight, Some(area), _) => descriptors.push(Action::Inflight(area, fd)),
                (Role::Log, _, Some(area)) => descriptors.push(Action::Log(area, fd)),
                (Role::LogSignal, ..) => descriptors.push(Action::LogSignal(fd)),
                (Role::BackendChannel, ..) => descriptors.push(Action::BackendChannel(fd)),
                (Role::Kick(i), ..) => descriptors.push(Action::Kick(i, Some(fd))),
                (Role::Call(i), ..) => descriptors.push(Action::Call(i, Some(fd))),
                (Role::Err(i), ..) => descriptors.push(Action::Err(i, Some(fd))),
                (role, ..) => unreachable!("a session has no {role:?}"),
            }
        }
        if !regions.is_empty() {
            actions.push(Action::ReplaceMemory(regions));
        }
        actions.append(&mut descriptors);
        for (i, ring) in (0u16..).zip(&session.rings) {
            if ring.state != RingState::Idle {
                actions.push(Action::StartRing(i));
            }
            if ring.state == RingState::Paused {
                actions.push(Action::EnableRing(i, false));
            }
        }
        Ok((session, actions))
    }

    /// Whether this disk's offer fits what the front end acknowledged elsewhere.
    fn check_state(&self, state: &SessionState) -> Result<(), HandoverError> {
        for (acknowledged, offered) in [
            (state.features.unwrap_or(0), self.offer.features),
            (state.protocol_features, self.offer.protocol_features),
        ] {
            if acknowledged & !offered != 0 {
                return Err(HandoverError::NotOffered { bits: acknowledged & !offered });
            }
        }
        let (expected, found) = (self.rings.len(), state.rings.len());
        if expected != found {
            return Err(HandoverError::Rings { expected, found });
        }
        if state.regions.len() > usize::from(self.offer.memory_regions_max) {
            return Err(HandoverError::Regions);
        }
        Ok(())
    }
}
