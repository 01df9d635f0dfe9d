//! The node's description of itself to the key-value door, for `INFO`, `CONFIG GET` and `HELLO`.

use std::path::PathBuf;

use kv::{CpuSeconds, MemoryUse, NodeInfo, TlsAuthClients};

use crate::budget::FIXED_BYTES;
use crate::config::Config;
use crate::cores::write_list;
use crate::machine::Machine;
use crate::process::{CpuTime, executable, memory_use};

/// A node's description of itself.
pub struct Description {
    /// Ends the node in an orderly way.
    pub stop: Box<dyn Fn() + Send + Sync>,
    /// The node's configuration.
    pub config: Config,
    /// The machine.
    pub machine: Machine,
    /// The port on which it listens in the end.
    pub port: u16,
    /// The port for TLS; 0 if there is none.
    pub tls_port: u16,
    /// The driver in use.
    pub driver: &'static str,
    /// A random text, new for every start.
    pub run_id: String,
}

impl NodeInfo for Description {
    fn version(&self) -> String {
        env!("CARGO_PKG_VERSION").to_owned()
    }

    fn run_id(&self) -> String {
        self.run_id.clone()
    }

    fn tcp_port(&self) -> u16 {
        self.port
    }

    fn process_id(&self) -> u32 {
        std::process::id()
    }

    fn operating_system(&self) -> String {
        format!("Linux {} {}", self.machine.kernel, std::env::consts::ARCH)
    }

    fn executable(&self) -> String {
        executable().display().to_string()
    }

    fn config_file(&self) -> String {
        let file = self.config.file.as_deref();
        file.map_or_else(String::new, |path| path.display().to_string())
    }

    fn data_directory(&self) -> String {
        let data = self.config.data.as_deref();
        data.map_or_else(String::new, |data| data.display().to_string())
    }

    fn memory(&self) -> MemoryUse {
        memory_use()
    }

    fn memory_budget_bytes(&self) -> u64 {
        self.config.memory_bytes
    }

    fn memory_machine_bytes(&self) -> u64 {
        self.machine.memory_bytes
    }

    fn cpu_seconds(&self) -> CpuSeconds {
        let used = CpuTime::now();
        CpuSeconds { system: used.system.as_secs_f64(), user: used.user.as_secs_f64() }
    }

    fn shut_down(&self) {
        (self.stop)();
    }

    fn settings(&self) -> Vec<(String, String)> {
        let config = &self.config;
        let budget = config.budget();
        let pair = |name: &str, value: String| (name.to_owned(), value);
        let tls = config.tls.as_ref();
        let file = |file: Option<&PathBuf>| {
            file.map_or_else(String::new, |file| file.display().to_string())
        };
        let tls_listen = tls.and_then(|tls| tls.listen);
        let tls_listen = tls_listen.map_or_else(String::new, |addr| addr.to_string());
        let tls_auth_clients = tls.map_or(TlsAuthClients::No, |tls| tls.auth_clients);
        let only_tls = tls.is_some_and(|tls| tls.listen.is_none());
        vec![
            pair("port", if only_tls { 0 } else { self.port }.to_string()),
            pair("data", self.data_directory()),
            pair("column-family", config.column_family.clone()),
            pair("read-only", if config.read_only { "yes" } else { "no" }.to_owned()),
            pair("durability", config.durability.to_string()),
            pair("blob-min", config.blob_min.map_or_else(String::new, |min| min.to_string())),
            pair(
                "blob-space-max-ratio",
                config.blob_space_max_ratio.map_or_else(String::new, |ratio| ratio.to_string()),
            ),
            pair("secondary", if config.secondary { "yes" } else { "no" }.to_owned()),
            pair("salvage", if config.salvage { "yes" } else { "no" }.to_owned()),
            pair("listen", config.listen.to_string()),
            pair("tls-port", self.tls_port.to_string()),
            pair("tls-listen", tls_listen),
            pair("tls-cert-file", file(tls.map(|tls| &tls.certificate))),
            pair("tls-key-file", file(tls.map(|tls| &tls.key))),
            pair("tls-ca-cert-file", file(tls.and_then(|tls| tls.authority.as_ref()))),
            pair("tls-crl-file", file(tls.and_then(|tls| tls.revoked.as_ref()))),
            pair("tls-auth-clients", tls_auth_clients.to_string()),
            pair("cores", write_list(&config.processors)),
            pair("io", self.driver.to_owned()),
            pair("poll", config.poll.to_string()),
            pair("memory", config.memory_bytes.to_string()),
            pair("memory-fixed", FIXED_BYTES.to_string()),
            pair("memory-tables", budget.tables.to_string()),
            pair("memory-memtable", budget.memtable.to_string()),
            pair("memory-known-keys", budget.known_keys.to_string()),
            pair("memory-connections-per-core", budget.connections.to_string()),
            pair("memory-pool-per-core", budget.pool.to_string()),
            pair("memory-cache-per-core", budget.cache.to_string()),
        ]
    }
}
