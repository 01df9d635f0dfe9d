//! The disks that a node gives to virtual machines: opened at the start, ended with the node.

use std::path::PathBuf;
use std::rc::Rc;

use bdev::Bdev;
use reactor::{Class, Core, JoinHandle, UnixListener};
use vhost::{Target, TargetOptions};

use crate::disk_spec::DiskSpec;
use crate::error::{Error, Kind};

/// One of them.
struct Disk {
    target: Rc<Target>,
    socket: PathBuf,
    serving: JoinHandle<()>,
}

/// All of them; belongs to core 0.
#[derive(Default)]
pub(crate) struct Disks(Vec<Disk>);

impl Disks {
    /// Opens the devices and then listens: who connects finds a disk that is ready.
    ///
    /// # Errors
    /// When a device cannot be opened, or somebody listens on a socket already.
    pub async fn start(core: &Core, specs: &[DiskSpec]) -> Result<Disks, Error> {
        let mut disks = Vec::with_capacity(specs.len());
        for (at, spec) in specs.iter().enumerate() {
            let name = &spec.name;
            let device = Bdev::open(core, &spec.uri)
                .await
                .map_err(|error| Error::new(Kind::System, format!("disk {name}: {error}")))?;
            let listener = UnixListener::bind(core, &spec.socket).map_err(|error| {
                let socket = spec.socket.display();
                Error::new(Kind::System, format!("disk {name}: listening on {socket}: {error}"))
            })?;
            let options = TargetOptions {
                name: name.clone(),
                serial: spec.serial().to_owned(),
                queues: spec.queues,
                first_core: at,
            };
            tracing::info!(disk = %name, uri = %spec.uri, socket = %spec.socket.display(), "a disk is there");
            let target = Target::new(core, device, options);
            let serving = {
                let target = target.clone();
                core.spawn(Class::Control, async move { target.serve(listener).await })
            };
            disks.push(Disk { target, socket: spec.socket.clone(), serving });
        }
        Ok(Disks(disks))
    }

    /// Ends all: what is at the devices comes to its end, what is not stays with the guests, which
    /// connect again to whoever listens next.
    pub async fn stop(self) {
        for disk in &self.0 {
            disk.target.stop();
        }
        for disk in self.0 {
            disk.serving.await;
            remove(&disk.socket);
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "the end of a node")]
fn remove(socket: &std::path::Path) {
    // Who listens next replaces one that is left.
    let _ = std::fs::remove_file(socket);
}
