//! What the key-value door does not know about the node it belongs to, and asks when it reports.

/// Provided by whoever starts the node. Called for `INFO`, `CONFIG GET`, `HELLO` and `SHUTDOWN`,
/// never on the way of a read.
pub trait NodeInfo: Send + Sync {
    /// The node's own version.
    fn version(&self) -> String;
    /// Forty hexadecimal digits that are different for every start.
    fn run_id(&self) -> String;
    /// The port it listens on.
    fn tcp_port(&self) -> u16;
    /// Its process's number.
    fn process_id(&self) -> u32;
    /// Its operating system, as `uname` tells it.
    fn operating_system(&self) -> String;
    /// The program's path.
    fn executable(&self) -> String;
    /// The configuration file's path; empty when there is none.
    fn config_file(&self) -> String;
    /// The directory it serves.
    fn data_directory(&self) -> String;
    /// What memory the process uses.
    fn memory(&self) -> MemoryUse;
    /// The memory budget of the node.
    fn memory_budget_bytes(&self) -> u64;
    /// Memory of the machine.
    fn memory_machine_bytes(&self) -> u64;
    /// Processor time the process has used, in seconds: in the system and of its own.
    fn cpu_seconds(&self) -> CpuSeconds;
    /// Ends the node in good order: clients get the replies that are under way.
    fn shut_down(&self);
    /// Settings of the node beyond those of the protocol, as names and values for `CONFIG GET`.
    fn settings(&self) -> Vec<(String, String)>;
}

/// The memory of a process, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Occupied now, as the kernel counts it.
    pub resident_bytes: u64,
    /// The most that was ever occupied.
    pub resident_peak_bytes: u64,
    /// In allocations that are in use; the resident bytes where the allocator does not tell.
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
