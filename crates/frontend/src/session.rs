//! The messages of vhost-user, one method each.
//!
//! A session says what it is told, in any order, and checks only that the answers are answers. Once
//! REPLY_ACK is agreed on, every message that has no answer of its own asks for one, so that a
//! refusal is seen where it happens; [`Session::set_acknowledged`] changes that.

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use crate::message::{NO_DESCRIPTOR, flags, protocol, request};
use crate::{Connection, DirtyLog, Error, Event, Inflight, Kind, Memory, Message, Region, Result};

/// How long a target may take for an answer.
const PATIENCE: Duration = Duration::from_secs(30);

/// A connection and what was agreed on it.
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
    /// Connects to a target. Nothing is said yet.
    ///
    /// # Errors
    /// When nobody listens.
    pub fn connect(path: &Path) -> Result<Session> {
        Ok(Session::new(Connection::connect(path)?))
    }

    /// Takes a connection.
    pub fn new(connection: Connection) -> Session {
        connection.set_timeout(Some(PATIENCE));
        Session { connection, acknowledged: false }
    }

    /// The connection, to say what no method says.
    pub fn connection(&self) -> &Connection {
        &self.connection
    }

    /// Whether messages without an answer of their own ask for one.
    pub fn set_acknowledged(&mut self, yes: bool) {
        self.acknowledged = yes;
    }

    /// Sends a message and waits for its answer.
    ///
    /// # Errors
    /// When none comes, or it answers something else.
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

    /// Sends a message that has no answer of its own.
    ///
    /// # Errors
    /// When the target refuses it, if it is asked to say so.
    pub fn tell(&self, request: u32, body: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        if !self.acknowledged {
            return self.connection.send(request, 0, body, fds);
        }
        self.connection.send(request, flags::NEED_REPLY, body, fds)?;
        match self.answer(request)?.u64_at(0)? {
            0 => Ok(()),
            code => {
                let text = format!("the target refused message {request}: {code}");
                Err(Error::new(Kind::Refused, text))
            }
        }
    }

    fn ask_u64(&self, request: u32) -> Result<u64> {
        self.ask(request, &[], &[])?.u64_at(0)
    }

    /// What the target offers.
    ///
    /// # Errors
    /// As [`Session::ask`]; so all the methods below, or as [`Session::tell`].
    pub fn get_features(&self) -> Result<u64> {
        self.ask_u64(request::GET_FEATURES)
    }

    /// Agrees on features.
    ///
    /// # Errors
    /// See [`Session::get_features`].
    pub fn set_features(&self, features: u64) -> Result<()> {
        self.tell(request::SET_FEATURES, &numbers([features]), &[])
    }

    /// What the target offers of the protocol.
    ///
    /// # Errors
    /// See [`Session::get_features`].
    pub fn get_protocol_features(&self) -> Result<u64> {
        self.ask_u64(request::GET_PROTOCOL_FEATURES)
    }

    /// Agrees on features of the protocol, from now on with acknowledgements if that is one.
    ///
    /// # Errors
    /// See [`Session::get_features`].
    pub fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        self.tell(request::SET_PROTOCOL_FEATURES, &numbers([features]), &[])?;
        self.acknowledged = features & protocol::REPLY_ACK != 0;
        Ok(())
    }

    /// Begins.
    ///
    /// # Errors
    /// See [`Session::get_features`].
    pub fn set_owner(&self) -> Result<()> {
        self.tell(request::SET_OWNER, &[], &[])
    }

    /// How many queues the target has at most.
    ///
    /// # Errors
    /// See [`Session::get_features`].
    pub fn get_queue_num(&self) -> Result<u64> {
        self.ask_u64(request::GET_QUEUE_NUM)
    }

    /// How many regions of memory the target takes.
    ///
    /// # Errors
    /// See [`Session::get_features`].
    pub fn get_max_mem_slots(&self) -> Result<u64> {
        self.ask_u64(request::GET_MAX_MEM_SLOTS)
    }

    /// Gives the target a channel of its own, on which it says that its configuration changed.
    ///
    /// # Errors
    /// See [`Session::get_features`].
    pub fn set_backend_channel(&self) -> Result<Connection> {
        let (ours, theirs) =
            UnixStream::pair().map_err(|e| Error::system("making a pair of sockets", e))?;
        self.tell(request::SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()])?;
        Ok(Connection::new(ours))
    }

    /// Bytes of the configuration space.
    ///
    /// # Errors
    /// See [`Session::get_features`]; also when the answer is of another size than was asked for.
    pub fn get_config(&self, offset: u32, size: u32) -> Result<Vec<u8>> {
        let mut body = config_header(offset, size, 0);
        body.resize(12 + size as usize, 0);
        let mut answer = self.ask(request::GET_CONFIG, &body, &[])?.body;
        if answer.len() != body.len() {
            let text = format!("asked for {size} bytes of configuration, got {}", answer.len());
            return Err(Error::new(Kind::Protocol, text));
        }
        Ok(answer.split_off(12))
    }

    /// Changes bytes of the configuration space.
    ///
    /// # Errors
    /// See [`Session::get_features`].
    pub fn set_config(&self, offset: u32, bytes: &[u8]) -> Result<()> {
        let mut body = config_header(offset, bytes.len() as u32, 0);
        body.extend(bytes);
        self.tell(request::SET_CONFIG, &body, &[])
    }

    /// Gives the target all regions at once, eight at most.
    ///
    /// # Errors
    /// See [`Session::get_features`].
    pub fn set_mem_table(&self, memory: &Memory) -> Result<()> {
        let mut body = vring(memory.regions().len() as u16, 0);
        body.extend(memory.regions().iter().flat_map(Region::encode));
        let fds: Vec<_> = memory.regions().iter().map(AsFd::as_fd).collect();
        self.tell(request::SET_MEM_TABLE, &body, &fds)
    }

    /// Gives the target one more region.
    ///
    /// # Errors
    /// See [`Session::get_features`].
    pub fn add_mem_reg(&self, region: &Region) -> Result<()> {
        let body = [&[0; 8], &region.encode()[..]].concat();
        self.tell(request::ADD_MEM_REG, &body, &[region.as_fd()])
    }

    /// Takes a region from the target.
    ///
    /// # Errors
    /// See [`Session::get_features`].
    pub fn rem_mem_reg(&self, region: &Region) -> Result<()> {
        let body = [&[0; 8], &region.encode()[..]].concat();
        self.tell(request::REM_MEM_REG, &body, &[])
    }

    /// Asks for a new in-flight region.
    ///
    /// # Errors
    /// See [`Session::get_features`]; also when what comes is none.
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
                let text = "the in-flight region came without its one descriptor";
                Err(Error::new(Kind::Protocol, text))
            }
        }
    }

    /// Gives the target its in-flight region back.
    ///
    /// # Errors
    /// See [`Session::get_features`].
    pub fn set_inflight_fd(&self, inflight: &Inflight) -> Result<()> {
        self.tell(request::SET_INFLIGHT_FD, &inflight.encode(), &[inflight.as_fd()])
    }

    /// How many descriptors a ring has.
    ///
    /// # Errors
    /// See [`Session::get_features`].
    pub fn set_vring_num(&self, index: u16, size: u16) -> Result<()> {
        self.tell(request::SET_VRING_NUM, &vring(index, size.into()), &[])
    }

    /// Where a ring begins.
    ///
    /// # Errors
    /// See [`Session::get_features`].
    pub fn set_vring_base(&self, index: u16, base: u32) -> Result<()> {
        self.tell(request::SET_VRING_BASE, &vring(index, base), &[])
    }

    /// Stops a ring and says where it stands.
    ///
    /// # Errors
    /// See [`Session::get_features`].
    pub fn get_vring_base(&self, index: u16) -> Result<u32> {
        self.ask(request::GET_VRING_BASE, &vring(index, 0), &[])?.u32_at(4)
    }

    /// Where a ring's parts lie: guest addresses of descriptors, avail and used ring (of a packed
    /// ring its event structures). `log` says whether writes of the used ring are logged.
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

    /// How a ring is kicked; `None`: the target polls.
    ///
    /// # Errors
    /// See [`Session::get_features`].
    pub fn set_vring_kick(&self, index: u16, event: Option<&Event>) -> Result<()> {
        self.set_event(request::SET_VRING_KICK, index, event)
    }

    /// How a ring calls; `None`: the driver polls.
    ///
    /// # Errors
    /// See [`Session::get_features`].
    pub fn set_vring_call(&self, index: u16, event: Option<&Event>) -> Result<()> {
        self.set_event(request::SET_VRING_CALL, index, event)
    }

    /// How a ring says that it broke.
    ///
    /// # Errors
    /// See [`Session::get_features`].
    pub fn set_vring_err(&self, index: u16, event: Option<&Event>) -> Result<()> {
        self.set_event(request::SET_VRING_ERR, index, event)
    }

    /// Lets a ring run or rest.
    ///
    /// # Errors
    /// See [`Session::get_features`].
    pub fn set_vring_enable(&self, index: u16, enable: bool) -> Result<()> {
        self.tell(request::SET_VRING_ENABLE, &vring(index, enable.into()), &[])
    }

    /// Gives the target a log; it has an answer in any case.
    ///
    /// # Errors
    /// See [`Session::get_features`].
    pub fn set_log_base(&self, log: &DirtyLog) -> Result<()> {
        let body = numbers([log.bytes(), 0]);
        self.ask(request::SET_LOG_BASE, &body, &[log.as_fd()]).map(drop)
    }

    /// Brings the device back to its beginning.
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
