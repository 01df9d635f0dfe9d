//! Both clients behind one face, so that a test is written once.

use std::time::Duration;

use client::{CacheStats, ErrorKind, Options, Result, Ttl, WriteBatch};
use tokio::runtime::Runtime;

#[derive(Clone, Copy, Debug)]
pub enum Kind {
    Blocking,
    Asynchronous,
}

pub enum Subject {
    Blocking(client::blocking::Client),
    Asynchronous(Runtime, client::Client),
}

impl std::fmt::Debug for Subject {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Subject")
    }
}

impl Kind {
    pub const ALL: [Kind; 2] = [Kind::Blocking, Kind::Asynchronous];

    pub fn connect(self, options: Options, address: &str) -> Result<Subject> {
        match self {
            Kind::Blocking => options.connect_blocking(address).map(Subject::Blocking),
            Kind::Asynchronous => {
                // The driver goes on while the test does other things.
                let runtime = tokio::runtime::Builder::new_multi_thread()
                    .worker_threads(1)
                    .enable_all()
                    .build()
                    .unwrap();
                let client = runtime.block_on(options.connect(address))?;
                Ok(Subject::Asynchronous(runtime, client))
            }
        }
    }
}

macro_rules! both {
    ($self:ident, $client:ident => $call:expr) => {
        match $self {
            Subject::Blocking($client) => $call,
            Subject::Asynchronous(runtime, $client) => runtime.block_on($call),
        }
    };
}

impl Subject {
    pub fn get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        both!(self, client => client.get(key))
    }

    pub fn multi_get(&self, keys: &[&str]) -> Result<Vec<Option<Vec<u8>>>> {
        both!(self, client => client.multi_get(keys))
    }

    pub fn set(&self, key: &str, value: &str) -> Result<()> {
        both!(self, client => client.set(key, value))
    }

    pub fn set_with_ttl(&self, key: &str, value: &str, ttl: Duration) -> Result<()> {
        both!(self, client => client.set_with_ttl(key, value, ttl))
    }

    pub fn expire(&self, key: &str, ttl: Duration) -> Result<bool> {
        both!(self, client => client.expire(key, ttl))
    }

    pub fn persist(&self, key: &str) -> Result<bool> {
        both!(self, client => client.persist(key))
    }

    pub fn ttl(&self, key: &str) -> Result<Ttl> {
        both!(self, client => client.ttl(key))
    }

    pub fn delete(&self, key: &str) -> Result<bool> {
        both!(self, client => client.delete(key))
    }

    pub fn write(&self, batch: WriteBatch) -> Result<()> {
        both!(self, client => client.write(batch))
    }

    pub fn wait_coherent(&self) {
        both!(self, client => client.wait_coherent())
    }

    pub fn stats(&self) -> CacheStats {
        match self {
            Subject::Blocking(client) => client.cache_stats(),
            Subject::Asynchronous(_, client) => client.cache_stats(),
        }
    }

    /// Reads a key, lets `meanwhile` run, and writes it.
    pub fn read_and_write(&self, key: &str, value: &str, meanwhile: impl FnOnce()) -> Result<()> {
        match self {
            Subject::Blocking(client) => {
                let mut transaction = client.transaction();
                transaction.get(key)?;
                meanwhile();
                transaction.set(key, value);
                transaction.commit()
            }
            Subject::Asynchronous(runtime, client) => runtime.block_on(async {
                let mut transaction = client.transaction();
                transaction.get(key).await?;
                meanwhile();
                transaction.set(key, value);
                transaction.commit().await
            }),
        }
    }
}

/// Options with short times.
pub fn quick() -> Options {
    Options::new()
        .timeout(Duration::from_millis(400))
        .connect_timeout(Duration::from_millis(400))
        .staleness_max(Duration::from_secs(60))
}

pub fn kind<T: std::fmt::Debug>(result: Result<T>) -> ErrorKind {
    result.unwrap_err().kind()
}
