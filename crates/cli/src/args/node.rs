//! The flags of the commands on a running node: `millrace disk`, `top` and `upgrade`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueHint};
use node::{DiskSpec, Size};

use super::values::seconds;
use crate::disk_image::ImageFormat;

/// A running node, and how to print its answer.
#[derive(Clone, Debug, Args)]
pub struct NodeArgs {
    /// The node's state directory [default: MILLRACE_STATE in the environment, else that of serve]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub state: Option<PathBuf>,
    /// The node's admin socket, if not in the state directory
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub admin: Option<PathBuf>,
    /// Print JSON; its shape is described in docs/CLI.md
    #[arg(long)]
    pub json: bool,
}

/// `millrace disk`.
#[derive(Debug, Subcommand)]
pub enum DiskCommand {
    /// Create an image file
    #[command(after_help = "Examples:\n  \
        millrace disk create vm1.img --size 10G\n  \
        millrace disk create vm1.img --size 10G --preallocate\n  \
        millrace disk create vm2.img --from vm1.img\n\n\
        The image is sparse: space on the disk is allocated as it is written. With --preallocate \
        all space is allocated immediately, and no write fails later because the disk is full. With \
        --from it is a copy of an image, a block device or the export of an NBD server \
        (nbd://HOST/EXPORT) that nobody writes to meanwhile; it shares its blocks where the file \
        system can.")]
    Create {
        /// The file; it must not exist.
        #[arg(value_hint = ValueHint::FilePath)]
        path: PathBuf,
        /// Its size [default with --from: that of the other]
        #[arg(long, value_name = "SIZE", required_unless_present = "from")]
        size: Option<Size>,
        /// Allocate all of its space on the disk now
        #[arg(long, conflicts_with = "from")]
        preallocate: bool,
        /// Copy this image: a path, or a URI such as file:/dev/vdb
        #[arg(long, value_name = "PATH|URI", value_hint = ValueHint::FilePath)]
        from: Option<String>,
    },
    /// Convert an image between raw and qcow2, with qemu-img
    #[command(after_help = "Examples:\n  \
        millrace disk convert cloud.qcow2 vm1.img\n  \
        millrace disk convert vm1.img vm1.qcow2\n\n\
        A name that ends with .qcow2 is that of a qcow2 image, any other that of a raw image, unless a \
        format is given. What an image contains is not asked, because a guest may have written it. Needs \
        qemu-img (package qemu-utils).")]
    Convert {
        /// The image.
        #[arg(value_hint = ValueHint::FilePath)]
        from: PathBuf,
        /// The new image; it must not exist.
        #[arg(value_hint = ValueHint::FilePath)]
        to: PathBuf,
        /// The format of the image
        #[arg(long, value_name = "FORMAT")]
        from_format: Option<ImageFormat>,
        /// The format of the new image
        #[arg(long, value_name = "FORMAT")]
        format: Option<ImageFormat>,
        /// Also convert an image that takes data from another file, which it names
        #[arg(long)]
        with_backing: bool,
    },
    /// List the disks of a running node
    #[command(after_help = "Examples:\n  \
        millrace disk list\n  \
        millrace disk list --json --state /srv/millrace")]
    List {
        /// Which node to ask.
        #[command(flatten)]
        node: NodeArgs,
    },
    /// Add a disk to a running node: name=NAME uri=URI socket=PATH [queues=N] [serial=TEXT]
    /// [on_error=WHAT]
    #[command(after_help = "Examples:\n  \
        millrace disk attach 'name=vm1 uri=file:vm1.img socket=vm1.sock queues=2'\n  \
        millrace disk attach 'name=scratch uri=mem:8G socket=/run/scratch.sock'\n\n\
        SPEC is the same as in serve --disk; relative paths start in the current directory. The \
        node attaches the disk again after a restart, until it is detached. With on_error=pause a \
        disk whose device fails a request stands still until `millrace disk resume`, instead of \
        failing (report, the default).\n\n\
        With --incoming the disk waits for its data, which another node sends: millrace disk move \
        NAME --to HOST:PORT/NAME there. The machine may be started already, as the destination of \
        its live migration; its guest's requests wait.")]
    Attach {
        /// The disk.
        spec: DiskSpec,
        /// The data comes from another node, and the guest waits for it
        #[arg(long)]
        incoming: bool,
        /// Which node to ask.
        #[command(flatten)]
        node: NodeArgs,
    },
    /// Remove a disk from a running node and forget it
    #[command(after_help = "Examples:\n  \
        millrace disk detach vm1\n\n\
        The image and its data stay as they are. Detaching a disk that a virtual machine uses \
        needs --force: the guest's requests then wait until a disk is attached at the same socket. \
        So does one that an NBD client uses, whose requests then fail; one that has not come yet from \
        the node before; and one that was given to another node, which nobody tells then that the \
        disk is its own.")]
    Detach {
        /// The name of the disk.
        name: String,
        /// Detach even while a virtual machine or an NBD client is connected
        #[arg(long)]
        force: bool,
        /// Which node to ask.
        #[command(flatten)]
        node: NodeArgs,
    },
    /// Change the size of a disk while its guest runs
    #[command(after_help = "Examples:\n  \
        millrace disk resize vm1 --size 20G\n  \
        millrace disk resize vm1 --size 5G --shrink\n\n\
        The guest is told the new size immediately; its partitions and file systems are the guest's \
        to change. --shrink cuts off the end of the disk, and the data there is lost: make the \
        file system smaller first.")]
    Resize {
        /// The name of the disk.
        name: String,
        /// The new size
        #[arg(long, value_name = "SIZE")]
        size: Size,
        /// Allow a smaller size, which discards the data at the end
        #[arg(long)]
        shrink: bool,
        /// Which node to ask.
        #[command(flatten)]
        node: NodeArgs,
    },
    /// Limit requests and bytes per second of a disk, or of a group of disks, while guests run
    #[command(after_help = "Examples:\n  \
        millrace disk limit vm1 iops=5000 bytes=200M\n  \
        millrace disk limit vm1 iops=off burst=1s\n  \
        millrace disk limit vm1 group=tenant1\n  \
        millrace disk limit --group tenant1 iops=20000\n  \
        millrace disk limit\n\n\
        iops counts requests per second, bytes the bytes of reads and writes per second; burst is how \
        much an idle disk saves, as the time that earns it (100ms). `off` ends a limit or takes a \
        disk out of its group; what is not named stays. A disk keeps its limits over restarts and \
        upgrades, and takes them along to another node. Without settings the limits are shown.")]
    Limit {
        /// The name of the disk, then settings: iops=N, bytes=SIZE, burst=TIME, group=NAME.
        #[arg(value_name = "NAME|KEY=VALUE")]
        words: Vec<String>,
        /// Limit what all disks of a group do together
        #[arg(long, value_name = "NAME")]
        group: Option<String>,
        /// Which node to ask.
        #[command(flatten)]
        node: NodeArgs,
    },
    /// Move a disk's data to another device while its guest runs
    Move(DiskMoveArgs),
    /// Let a disk go on that has paused or stands still
    #[command(after_help = "Examples:\n  \
        millrace disk resume vm1\n\n\
        A disk with on_error=pause stands still when its device fails a request, for lack of space for \
        example. This command makes it try again; make space first. It also opens a disk of which \
        nodes have died, and lets a machine go on whose image with lock=ring another machine has used \
        since: on the data as that has left it.")]
    Resume {
        /// The name of the disk.
        name: String,
        /// Which node to ask.
        #[command(flatten)]
        node: NodeArgs,
    },
    /// Show what the disks of a running node have done
    #[command(after_help = "Examples:\n  \
        millrace disk stat\n  \
        millrace disk stat vm1 --json\n\n\
        Counts start with the node. p50 and p99 come from a histogram with a bucket for each power \
        of two.")]
    Stat {
        /// The name of the disk; all disks if left out.
        name: Option<String>,
        /// Which node to ask.
        #[command(flatten)]
        node: NodeArgs,
    },
}

/// `millrace disk move`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    millrace disk move vm1 --to file:/new/vm1.img --finish-when-ready\n  \
    millrace disk move vm1 --to file:/dev/vdb --background\n  \
    millrace disk move vm1 --to nbd://10.0.0.2/vm1 --finish-when-ready\n  \
    millrace disk move vm1 --to b.example:7070/vm1\n  \
    millrace disk move --status\n  \
    millrace disk move vm1 --finish-when-ready\n  \
    millrace disk move vm1 --abort\n  \
    millrace disk move --limit 200M\n\n\
    An image file that does not exist is created, as large as the disk. The data is copied, and what \
    the guest writes meanwhile is copied again; when little is left, the move is ready. With \
    --finish-when-ready the guest then waits some milliseconds, and the disk continues at the new \
    device. The old one is left as it was then. Holes stay holes.\n\n\
    To another node: attach a disk with --incoming there, move this one to HOST:PORT/NAME, where that \
    node takes disks (serve --moves), and when the move is ready let the machine migrate: when its \
    guest stops here, the disk follows. A disk that no machine uses goes with --finish-when-ready.")]
pub struct DiskMoveArgs {
    /// The name of the disk.
    pub name: Option<String>,
    /// The new device, such as file:/new/vm1.img, or a disk of another node: HOST:PORT/NAME
    #[arg(long, value_name = "URI|NODE/NAME", conflicts_with_all = ["status", "abort", "limit"])]
    pub to: Option<String>,
    /// Continue with the new device as soon as it has everything
    #[arg(long, conflicts_with_all = ["status", "abort", "limit"])]
    pub finish_when_ready: bool,
    /// Do not wait for the move
    #[arg(long, conflicts_with_all = ["status", "abort", "limit"])]
    pub background: bool,
    /// Show the moves
    #[arg(long)]
    pub status: bool,
    /// End the move; the disk stays where it is, or is taken back from another node
    #[arg(long, conflicts_with = "status")]
    pub abort: bool,
    /// Take the disk back without asking the other node, which may be serving it
    #[arg(long, requires = "abort")]
    pub force: bool,
    /// Limit the bytes per second of all moves together; 0 is no limit
    #[arg(long, value_name = "SIZE", conflicts_with_all = ["status", "abort", "name"])]
    pub limit: Option<Size>,
    /// Which node to ask.
    #[command(flatten)]
    pub node: NodeArgs,
}

/// `millrace events`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    millrace events\n  \
    millrace events --follow --disk vm1\n  \
    millrace events --follow --json | jq -c 'select(.event == \"device-error\")'\n\n\
    A node keeps its latest 1024 events, over upgrades and deaths of the node. With --follow the \
    command waits for more, also while the node is restarted. docs/CLI.md lists the events.")]
pub struct EventsArgs {
    /// Wait for more events
    #[arg(long, short)]
    pub follow: bool,
    /// Only events of this disk; may be repeated
    #[arg(long, value_name = "NAME")]
    pub disk: Vec<String>,
    /// Which node to ask.
    #[command(flatten)]
    pub node: NodeArgs,
}

/// `millrace top`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    millrace top\n  \
    millrace top --once\n  \
    millrace top --json | jq .disks\n\n\
    CPU is the share of the time in which the core's thread ran, including spinning for work. Into \
    a pipe or a file the frames follow each other.")]
pub struct TopArgs {
    /// Show one frame and exit
    #[arg(long)]
    pub once: bool,
    /// Seconds between two frames
    #[arg(long, value_name = "S", default_value = "1", value_parser = seconds)]
    pub interval: f64,
    /// Which node to ask.
    #[command(flatten)]
    pub node: NodeArgs,
}

/// `millrace upgrade`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    millrace upgrade\n  \
    millrace upgrade --to /opt/millrace-2/millrace --state /srv/millrace\n\n\
    The new program is started with the same settings and takes over: guests wait for some \
    milliseconds and notice nothing else, clients of the database reconnect. If anything fails, the \
    old program continues, and this command exits with 2 and says why. Disks on mem: keep their \
    contents. SIGUSR2 does the same as this command without --to.")]
pub struct UpgradeArgs {
    /// The new program [default: the file that now has the path of the node's program]
    #[arg(long, value_name = "PROGRAM", value_hint = ValueHint::FilePath)]
    pub to: Option<PathBuf>,
    /// Which node to ask.
    #[command(flatten)]
    pub node: NodeArgs,
}
