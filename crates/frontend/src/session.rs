//! The messages of vhost-user, one method each.
//!
//! A session sends messages in any order and only checks that replies are replies. Once REPLY_ACK
//! is negotiated, every message without a reply of its own requests an acknowledgement, so that a
//! refusal is seen where it happens. [`Session::set_acknowledged`] changes this.

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use crate::message::{NO_DESCRIPTOR, flags, protocol, request};
use crate::{Connection, DirtyLog, Error, Event, Inflight, Kind, Memory, Message, Region, Result};

/// Timeout for a target's reply.
const PATIENCE: Duration = Duration::from_secs(30);

/// A connection and its negotiated options.
#[derive(Debug)]
pub struct Session {
    connection: Connection,
    acknowledged: bool,
}

fn numbers<const N: usize>(all: [u64; N]) -> Vec<u8> {
    all.iter().flat_map(|number| number.to_le_bytes()).collect()
}

fn vring(index: u16, number: u32) -> Vec<u8> {
    [u32::from(index), number].iter().flat_map(|half| half.to_le_bytes()).collect()
}

impl Session {
    /// Connects to a target, without sending a message.
    ///
    /// # Errors
    /// If no target listens there.
    pub fn connect(path: &Path) -> Result<Session> {
        Ok(Session::new(Connection::connect(path)?))
    }

    /// Uses a connection.
    pub fn new(connection: Connection) -> Session {
        connection.set_timeout(Some(PATIENCE));
        Session { connection, acknowledged: false }
    }

    /// The connection, for other messages.
    pub fn connection(&self) -> &Connection {
        &self.connection
    }

    /// Sets whether messages without a reply of their own request an acknowledgement.
    pub fn set_acknowledged(&mut self, yes: bool) {
        self.acknowledged = yes;
    }

    /// Sends a message and waits for its reply.
    ///
    /// # Errors
    /// If there is no reply, or it answers another message.
    pub fn ask(&self, request: u32, body: &[u8], fds: &[BorrowedFd<'_>]) -> Result<Message> {
        self.connection.send(request, 0, body, fds)?;
        self.answer(request)
    }

    fn answer(&self, request: u32) -> Result<Message> {
        let answer = self.connection.receive()?;
        if answer.request != request || answer.flags & flags::REPLY == 0 {
            let (other, other_flags) = (answer.request, answer.flags);
            let text = format!(
                "message {request} was answered by message {other}, flags {other_flags:#x}"
            );
            return Err(Error::new(Kind::Protocol, text));
        }
        Ok(answer)
    }

    /// Sends a message that has no reply of its own.
    ///
    /// # Errors
    /// If the target refuses it, provided that an acknowledgement is requested.
    pub fn tell(&self, request: u32, body: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        if !self.acknowledged {
            return self.connection.send(request, 0, body, fds);
        }
        self.connection.send(request, flags::NEED_REPLY, body, fds)?;
        match self.answer(request)?.u64_at(0)? {
            0 => Ok(()),
            code => {
                let text = format!("the target refused message {request} with code {code}");
                Err(Error::new(Kind::Refused, text))
            }
        }
    }

    fn ask_u64(&self, request: u32) -> Result<u64> {
        self.ask(request, &[], &[])?.u64_at(0)
    }

    /// GET_FEATURES: the features that the target offers.
    ///
    /// # Errors
    /// As for [`Session::ask`] or [`Session::tell`]; the same holds for all methods below.
    pub fn get_features(&self) -> Result<u64> {
        self.ask_u64(request::GET_FEATURES)
    }

    /// SET_FEATURES: acknowledges features.
    ///
    /// # Errors
    /// See [`Session::get_features`].
    pub fn set_features(&self, features: u64) -> Result<()> {
        self.tell(request::SET_FEATURES, &numbers([features]), &[])
    }

    /// GET_PROTOCOL_FEATURES: the protocol features that the target offers.
    ///
    /// # Errors
    /// See [`Session::get_features`].
    pub fn get_protocol_features(&self) -> Result<u64> {
        self.ask_u64(request::GET_PROTOCOL_FEATURES)
    }

    /// SET_PROTOCOL_FEATURES. If REPLY_ACK is among them, acknowledgements are requested from now
    /// on.
    ///
    /// # Errors
    /// See [`Session::get_features`].
    pub fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        self.tell(request::SET_PROTOCOL_FEATURES, &numbers([features]), &[])?;
        self.acknowledged = features & protocol::REPLY_ACK != 0;
        Ok(())
    }

    /// SET_OWNER: begins the session.
    ///
    /// # Errors
    /// See [`Session::get_features`].
    pub fn set_owner(&self) -> Result<()> {
        self.tell(request::SET_OWNER, &[], &[])
    }

    /// GET_QUEUE_NUM: the most queues that the target supports.
    ///
    /// # Errors
    /// See [`Session::get_features`].
    pub fn get_queue_num(&self) -> Result<u64> {
        self.ask_u64(request::GET_QUEUE_NUM)
    }

    /// GET_MAX_MEM_SLOTS: the most memory regions that the target supports.
    ///
    /// # Errors
    /// See [`Session::get_features`].
    pub fn get_max_mem_slots(&self) -> Result<u64> {
        self.ask_u64(request::GET_MAX_MEM_SLOTS)
    }

    /// SET_BACKEND_REQ_FD: creates a channel on which the target reports changes of its
    /// configuration.
    ///
    /// # Errors
    /// See [`Session::get_features`].
    pub fn set_backend_channel(&self) -> Result<Connection> {
        let (ours, theirs) =
            UnixStream::pair().map_err(|e| Error::system("creating a pair of sockets", e))?;
        self.tell(request::SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()])?;
        Ok(Connection::new(ours))
    }

    /// GET_CONFIG: reads bytes of the configuration space.
    ///
    /// # Errors
    /// As for [`Session::get_features`]; also if the reply has another size.
    pub fn get_config(&self, offset: u32, size: u32) -> Result<Vec<u8>> {
        let mut body = config_header(offset, size, 0);
        body.resize(12 + size as usize, 0);
        let mut answer = self.ask(request::GET_CONFIG, &body, &[])?.body;
        if answer.len() != body.len() {
            let text = format!(
                "requested {size} bytes of configuration, got a reply of {} bytes",
                answer.len()
            );
            return Err(Error::new(Kind::Protocol, text));
        }
        Ok(answer.split_off(12))
    }

    /// SET_CONFIG: changes bytes of the configuration space.
    ///
    /// # Errors
    /// See [`Session::get_features`].
    pub fn set_config(&self, offset: u32, bytes: &[u8]) -> Result<()> {
        let mut body = config_header(offset, bytes.len() as u32, 0);
        body.extend(bytes);
        self.tell(request::SET_CONFIG, &body, &[])
    }

    /// SET_MEM_TABLE: sends all regions, at most eight.
    ///
    /// # Errors
    /// See [`Session::get_features`].
    pub fn set_mem_table(&self, memory: &Memory) -> Result<()> {
        let mut body = vring(memory.regions().len() as u16, 0);
        body.extend(memory.regions().iter().flat_map(Region::encode));
        let fds: Vec<_> = memory.regions().iter().map(AsFd::as_fd).collect();
        self.tell(request::SET_MEM_TABLE, &body, &fds)
    }

    /// ADD_MEM_REG: adds a region.
    ///
    /// # Errors
    /// See [`Session::get_features`].
    pub fn add_mem_reg(&self, region: &Region) -> Result<()> {
        let body = [&[0; 8], &region.encode()[..]].concat();
        self.tell(request::ADD_MEM_REG, &body, &[region.as_fd()])
    }

    /// REM_MEM_REG: removes a region.
    ///
    /// # Errors
    /// See [`Session::get_features`].
    pub fn rem_mem_reg(&self, region: &Region) -> Result<()> {
        let body = [&[0; 8], &region.encode()[..]].concat();
        self.tell(request::REM_MEM_REG, &body, &[])
    }

    /// GET_INFLIGHT_FD: requests a new in-flight region.
    ///
    /// # Errors
    /// As for [`Session::get_features`]; also if the reply has no valid region.
    pub fn get_inflight_fd(&self, queues: u16, queue_size: u16) -> Result<Inflight> {
        let mut body = numbers([0, 0]);
        body.extend(queues.to_le_bytes());
        body.extend(queue_size.to_le_bytes());
        let mut answer = self.ask(request::GET_INFLIGHT_FD, &body, &[])?;
        let (bytes, offset) = (answer.u64_at(0)?, answer.u64_at(8)?);
        match answer.fds.pop() {
            Some(fd) if answer.fds.is_empty() => {
                Inflight::map(fd, bytes, offset, (queues, queue_size))
            }
            _ => {
                let text = "the in-flight region did not come with exactly one descriptor";
                Err(Error::new(Kind::Protocol, text))
            }
        }
    }

    /// SET_INFLIGHT_FD: returns the in-flight region to the target.
    ///
    /// # Errors
    /// See [`Session::get_features`].
    pub fn set_inflight_fd(&self, inflight: &Inflight) -> Result<()> {
        self.tell(request::SET_INFLIGHT_FD, &inflight.encode(), &[inflight.as_fd()])
    }

    /// SET_VRING_NUM: sets the number of a ring's descriptors.
    ///
    /// # Errors
    /// See [`Session::get_features`].
    pub fn set_vring_num(&self, index: u16, size: u16) -> Result<()> {
        self.tell(request::SET_VRING_NUM, &vring(index, size.into()), &[])
    }

    /// SET_VRING_BASE: sets a ring's first position.
    ///
    /// # Errors
    /// See [`Session::get_features`].
    pub fn set_vring_base(&self, index: u16, base: u32) -> Result<()> {
        self.tell(request::SET_VRING_BASE, &vring(index, base), &[])
    }

    /// GET_VRING_BASE: stops a ring and returns its position.
    ///
    /// # Errors
    /// See [`Session::get_features`].
    pub fn get_vring_base(&self, index: u16) -> Result<u32> {
        self.ask(request::GET_VRING_BASE, &vring(index, 0), &[])?.u32_at(4)
    }

    /// SET_VRING_ADDR: sets the guest addresses of descriptors, avail and used ring (for packed
    /// rings: descriptors and event structures). `log`: writes to the used ring are logged.
    ///
    /// # Errors
    /// See [`Session::get_features`].
    pub fn set_vring_addr(
        &self,
        index: u16,
        memory: &Memory,
        addresses: [u64; 3],
        log: bool,
    ) -> Result<()> {
        let [desc, avail, used] = addresses.map(|addr| memory.user_addr(addr));
        let vring_flags = if log { crate::message::VRING_LOG } else { 0 };
        let mut body = vring(index, vring_flags);
        body.extend(numbers([desc, used, avail, addresses[2]]));
        self.tell(request::SET_VRING_ADDR, &body, &[])
    }

    fn set_event(&self, request: u32, index: u16, event: Option<&Event>) -> Result<()> {
        match event {
            Some(event) => self.tell(request, &numbers([index.into()]), &[event.as_fd()]),
            None => self.tell(request, &numbers([u64::from(index) | NO_DESCRIPTOR]), &[]),
        }
    }

    /// SET_VRING_KICK: sets a ring's kick event; `None`: the target polls.
    ///
    /// # Errors
    /// See [`Session::get_features`].
    pub fn set_vring_kick(&self, index: u16, event: Option<&Event>) -> Result<()> {
        self.set_event(request::SET_VRING_KICK, index, event)
    }

    /// SET_VRING_CALL: sets a ring's call event; `None`: the driver polls.
    ///
    /// # Errors
    /// See [`Session::get_features`].
    pub fn set_vring_call(&self, index: u16, event: Option<&Event>) -> Result<()> {
        self.set_event(request::SET_VRING_CALL, index, event)
    }

    /// SET_VRING_ERR: sets the event that reports a broken ring.
    ///
    /// # Errors
    /// See [`Session::get_features`].
    pub fn set_vring_err(&self, index: u16, event: Option<&Event>) -> Result<()> {
        self.set_event(request::SET_VRING_ERR, index, event)
    }

    /// SET_VRING_ENABLE: enables or disables a ring.
    ///
    /// # Errors
    /// See [`Session::get_features`].
    pub fn set_vring_enable(&self, index: u16, enable: bool) -> Result<()> {
        self.tell(request::SET_VRING_ENABLE, &vring(index, enable.into()), &[])
    }

    /// SET_LOG_BASE: sets the dirty log. This message always has a reply.
    ///
    /// # Errors
    /// See [`Session::get_features`].
    pub fn set_log_base(&self, log: &DirtyLog) -> Result<()> {
        let body = numbers([log.bytes(), 0]);
        self.ask(request::SET_LOG_BASE, &body, &[log.as_fd()]).map(drop)
    }

    /// RESET_DEVICE.
    ///
    /// # Errors
    /// See [`Session::get_features`].
    pub fn reset_device(&self) -> Result<()> {
        self.tell(request::RESET_DEVICE, &[], &[])
    }
}

fn config_header(offset: u32, size: u32, config_flags: u32) -> Vec<u8> {
    [offset, size, config_flags].iter().flat_map(|word| word.to_le_bytes()).collect()
}
