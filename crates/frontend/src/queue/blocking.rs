//! The methods that execute one request and wait for it.

use std::time::Duration;

use super::{Completion, Queue, Request, Slot, Status};
use crate::{Error, Kind, Result};

/// Timeout of [`Queue::run`] and the methods that use it.
const PATIENCE: Duration = Duration::from_secs(60);

impl Queue {
    /// Executes one request and waits for it, using the target's call. Nothing else may be in
    /// flight.
    ///
    /// # Errors
    /// If the request does not complete within a minute; also as for [`Queue::poll`].
    pub fn run(&mut self, slot: Slot, request: Request) -> Result<Completion> {
        assert_eq!(self.in_flight, 0, "other requests are in flight");
        self.submit(slot, request);
        self.publish();
        let mut done = std::mem::take(&mut self.done);
        done.clear();
        let result = if self.wait(PATIENCE) {
            self.poll(&mut done).map(|_| done[0])
        } else {
            Err(Error::new(Kind::Timeout, format!("{request:?} did not complete in time")))
        };
        self.done = done;
        result
    }

    fn run_alone(
        &mut self,
        request: Request,
        before: impl FnOnce(&mut Queue, Slot),
        after: impl FnOnce(&mut Queue, Slot),
    ) -> Result<Status> {
        let slot = self.take().expect("nothing is in flight");
        before(self, slot);
        let completion = self.run(slot, request)?;
        after(self, slot);
        self.give_back(slot);
        Ok(completion.status)
    }

    /// Reads in pieces of a slot's size. Stops at the first failure.
    ///
    /// # Errors
    /// As for [`Queue::run`].
    pub fn read(&mut self, mut offset: u64, bytes: &mut [u8]) -> Result<Status> {
        for piece in bytes.chunks_mut(self.shape.slot_bytes as usize) {
            let len = piece.len() as u32;
            let read = |queue: &mut Queue, slot| queue.read_data(slot, 0, piece);
            let status = self.run_alone(Request::Read { offset, len }, |_, _| (), read)?;
            if status != Status::Ok {
                return Ok(status);
            }
            offset += u64::from(len);
        }
        Ok(Status::Ok)
    }

    /// Writes in pieces of a slot's size. Stops at the first failure.
    ///
    /// # Errors
    /// As for [`Queue::run`].
    pub fn write(&mut self, mut offset: u64, bytes: &[u8]) -> Result<Status> {
        for piece in bytes.chunks(self.shape.slot_bytes as usize) {
            let len = piece.len() as u32;
            let write = |queue: &mut Queue, slot| queue.write_data(slot, 0, piece);
            let status = self.run_alone(Request::Write { offset, len }, write, |_, _| ())?;
            if status != Status::Ok {
                return Ok(status);
            }
            offset += u64::from(len);
        }
        Ok(Status::Ok)
    }

    /// Flushes.
    ///
    /// # Errors
    /// As for [`Queue::run`].
    pub fn flush(&mut self) -> Result<Status> {
        self.run_alone(Request::Flush, |_, _| (), |_, _| ())
    }

    /// Discards a range.
    ///
    /// # Errors
    /// As for [`Queue::run`].
    pub fn discard(&mut self, offset: u64, len: u32) -> Result<Status> {
        self.run_alone(Request::Discard { offset, len }, |_, _| (), |_, _| ())
    }

    /// Makes a range read as zeroes.
    ///
    /// # Errors
    /// As for [`Queue::run`].
    pub fn write_zeroes(&mut self, offset: u64, len: u32, unmap: bool) -> Result<Status> {
        self.run_alone(Request::WriteZeroes { offset, len, unmap }, |_, _| (), |_, _| ())
    }

    /// Reads the serial number.
    ///
    /// # Errors
    /// As for [`Queue::run`].
    pub fn get_id(&mut self) -> Result<(Status, [u8; 20])> {
        let mut id = [0; 20];
        let clear = |queue: &mut Queue, slot| queue.write_data(slot, 0, &[0; 20]);
        let read = |queue: &mut Queue, slot| queue.read_data(slot, 0, &mut id);
        let status = self.run_alone(Request::GetId, clear, read)?;
        Ok((status, id))
    }
}
