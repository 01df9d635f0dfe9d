//! The information that the key-value door gets from its node for its reports.

/// Provided by the code that starts the node. Called for `INFO`, `CONFIG GET`, `HELLO` and
/// `SHUTDOWN`, never for a read or a write.
pub trait NodeInfo: Send + Sync {
    /// The node's version.
    fn version(&self) -> String;
    /// Forty hexadecimal digits, different for every start.
    fn run_id(&self) -> String;
    /// The port it listens on, with TLS if there is no other.
    fn tcp_port(&self) -> u16;
    /// The process number.
    fn process_id(&self) -> u32;
    /// The operating system, in the form of `uname`.
    fn operating_system(&self) -> String;
    /// The program's path.
    fn executable(&self) -> String;
    /// The configuration file's path; empty when there is none.
    fn config_file(&self) -> String;
    /// The directory it serves.
    fn data_directory(&self) -> String;
    /// The memory use of the process.
    fn memory(&self) -> MemoryUse;
    /// The memory budget of the node.
    fn memory_budget_bytes(&self) -> u64;
    /// The memory of the machine.
    fn memory_machine_bytes(&self) -> u64;
    /// The processor time of the process, in seconds.
    fn cpu_seconds(&self) -> CpuSeconds;
    /// Stops the node in good order: clients get the replies in progress.
    fn shut_down(&self);
    /// Settings of the node besides those of the protocol, as names and values for `CONFIG GET`.
    fn settings(&self) -> Vec<(String, String)>;
}

/// The memory of a process, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Occupied now, as the kernel counts it.
    pub resident_bytes: u64,
    /// The maximum so far.
    pub resident_peak_bytes: u64,
    /// Allocated and in use; the resident bytes where the allocator does not report it.
    pub allocated_bytes: u64,
}

/// Processor time, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CpuSeconds {
    /// Spent in the kernel for the process.
    pub system: f64,
    /// Spent in the process itself.
    pub user: f64,
}
