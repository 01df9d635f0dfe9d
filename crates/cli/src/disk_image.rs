//! Image files: `disk create`, also as a copy of another image, and `disk convert`.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use bdev::{Bdev, Copy, DeviceTarget, file_uri, is_remote};
use clap::ValueEnum;
use node::Size;
use reactor::{Core, DriverKind, Mode, Opening};

use crate::failure::Failure;
use crate::output::progress_bar;
use crate::tool_core::on_core;

/// An image's size is a multiple of this.
const IMAGE_BLOCK: u64 = 4096;
/// Granule of a copy, in bytes.
const GRANULE: u64 = 64 << 10;
/// How often the progress of a copy is shown, in nanoseconds.
const SHOW_NS: u64 = 200_000_000;
/// Converts images.
const QEMU_IMG: &str = "qemu-img";

/// The formats of image files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ImageFormat {
    /// The disk's bytes and nothing else: what a node serves
    Raw,
    /// QEMU's copy-on-write format
    Qcow2,
}

impl ImageFormat {
    /// The format that a name stands for. The contents are not asked: a guest has written them.
    fn of(path: &Path) -> ImageFormat {
        match path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("qcow2")) {
            true => ImageFormat::Qcow2,
            false => ImageFormat::Raw,
        }
    }

    fn name(self) -> &'static str {
        match self {
            ImageFormat::Raw => "raw",
            ImageFormat::Qcow2 => "qcow2",
        }
    }
}

/// Creates an image file of so many bytes.
pub fn create_image(path: PathBuf, size: u64, preallocate: bool) -> Result<(), Failure> {
    check_size(size)?;
    on_core(DriverKind::Auto, async move |core| {
        make(&core, &path, size, preallocate).await.map_err(|error| cannot_create(&path, &error))
    })
}

fn check_size(size: u64) -> Result<(), Failure> {
    match size > 0 && size.is_multiple_of(IMAGE_BLOCK) {
        true => Ok(()),
        false => {
            let what = format!("size must be a multiple of {IMAGE_BLOCK} bytes, not {size}");
            Err(Failure::new(what))
        }
    }
}

fn cannot_create(path: &Path, error: &std::io::Error) -> Failure {
    let failure = Failure::new(format!("cannot create {}: {error}", path.display()));
    match error.kind() {
        std::io::ErrorKind::AlreadyExists => {
            failure.hint("nothing was changed; use `millrace disk resize` to enlarge a disk")
        }
        _ => failure,
    }
}

async fn make(core: &Core, path: &Path, size: u64, preallocate: bool) -> std::io::Result<()> {
    let file = core.attach(&core.open_for_writing(path, Opening::New, Mode::Buffered).await?);
    let filled = async {
        match preallocate {
            true => file.allocate(size).await?,
            false => file.set_len(size).await?,
        }
        file.sync_data().await
    };
    if let Err(error) = filled.await {
        core.remove(path).await?;
        return Err(error);
    }
    core.sync_dir(directory_of(path)).await
}

fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}

/// Creates an image file as a copy of an image, a block device or the export of an NBD server, that
/// nobody writes to. It is larger if `size` says so.
pub fn create_from(path: PathBuf, from: &str, size: Option<Size>) -> Result<(), Failure> {
    let uri = read_only(from);
    on_core(DriverKind::Auto, async move |core| {
        let failed = |error: bdev::Error| Failure::new(error.to_string());
        let source = Bdev::open(&core, &uri).await.map_err(failed)?;
        let has = source.size_bytes();
        let size = size.map_or(has.next_multiple_of(IMAGE_BLOCK), |size| size.0);
        check_size(size)?;
        if size < has {
            let what = format!("{} has {}, which is more than {}", uri, Size(has), Size(size));
            return Err(Failure::new(what));
        }
        make(&core, &path, size, false).await.map_err(|error| cannot_create(&path, &error))?;
        let copied = async {
            if is_clone(&uri, &path, size).map_err(|error| cannot_create(&path, &error))? {
                return Ok(());
            }
            copy(&core, &source, &path).await.map_err(failed)
        };
        let copied = copied.await;
        if copied.is_err() {
            // It is of no use.
            let _ = core.remove(&path).await;
        }
        copied
    })
}

/// The URI of a device, for reading. An image may be written as its path only.
fn read_only(from: &str) -> String {
    let uri = match from.starts_with("file:") || is_remote(from) {
        true => from.to_owned(),
        false => file_uri(Path::new(from)),
    };
    let separator = if uri.contains('?') { '&' } else { '?' };
    format!("{uri}{separator}readonly=on")
}

/// Lets the new file share the blocks of the other one, where the file system can (XFS, Btrfs).
#[expect(clippy::disallowed_methods, reason = "a tool, on a core that does nothing else")]
fn is_clone(uri: &str, path: &Path, size: u64) -> std::io::Result<bool> {
    let Some(from) = node::image_of(uri) else { return Ok(false) };
    let from = std::fs::File::open(from)?;
    let to = std::fs::OpenOptions::new().write(true).open(path)?;
    if rustix::fs::ioctl_ficlone(&to, &from).is_err() {
        return Ok(false);
    }
    to.set_len(size)?;
    to.sync_data()?;
    Ok(true)
}

/// Copies data and holes.
async fn copy(core: &Core, source: &Bdev, path: &Path) -> Result<(), bdev::Error> {
    let target = Bdev::open(core, &file_uri(path)).await?;
    let tracked = source.tracked(core, GRANULE).await?;
    let copy = Copy::new(core, &tracked, Box::new(DeviceTarget::new(core, &target)?))?;
    copy.begin().await?;
    let total = copy.left_bytes();
    let bar = progress_bar("copying");
    bar.set_length(total);
    let mut pass = std::pin::pin!(copy.pass());
    loop {
        match reactor::timeout(core, SHOW_NS, pass.as_mut()).await {
            Ok(done) => {
                done?;
                break;
            }
            Err(_) => bar.set_position(copy.copied_bytes()),
        }
    }
    bar.finish_and_clear();
    copy.flush().await
}

/// Converts an image with qemu-img.
pub fn convert(
    from: &Path,
    to: &Path,
    from_format: Option<ImageFormat>,
    format: Option<ImageFormat>,
) -> Result<(), Failure> {
    if to.exists() {
        return Err(Failure::new(format!("{} exists", to.display())).hint("nothing was changed"));
    }
    let from_format = from_format.unwrap_or_else(|| ImageFormat::of(from));
    let format = format.unwrap_or_else(|| ImageFormat::of(to));
    let mut command = Command::new(QEMU_IMG);
    command.args(["convert", "-p", "-f", from_format.name(), "-O", format.name(), "--"]);
    command.arg(from).arg(to).stdin(Stdio::null());
    // Its progress belongs with the messages.
    command.stdout(std::io::stderr());
    if !std::io::IsTerminal::is_terminal(&std::io::stderr()) {
        command.stdout(Stdio::null());
    }
    let status = command.status().map_err(|error| {
        Failure::new(format!("cannot run {QEMU_IMG}: {error}"))
            .hint("it is in the package qemu-utils (apt-get install qemu-utils)")
    })?;
    if !status.success() {
        unmake(to);
        return Err(Failure::new(format!("{QEMU_IMG} has failed ({status})")));
    }
    sync(to).map_err(|error| Failure::new(format!("{}: {error}", to.display())))
}

#[expect(clippy::disallowed_methods, reason = "a tool, on no core")]
fn unmake(path: &Path) {
    // It may not have been made.
    let _ = std::fs::remove_file(path);
}

#[expect(clippy::disallowed_methods, reason = "a tool, on no core")]
fn sync(path: &Path) -> std::io::Result<()> {
    std::fs::File::open(path)?.sync_all()?;
    std::fs::File::open(directory_of(path))?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_a_uri_for_reading() {
        assert_eq!(read_only("/srv/a b%?.img"), "file:/srv/a%20b%25%3F.img?readonly=on");
        assert_eq!(read_only("file:a.img"), "file:a.img?readonly=on");
        assert_eq!(read_only("file:a.img?direct=off"), "file:a.img?direct=off&readonly=on");
        assert_eq!(read_only("nbd://h/x"), "nbd://h/x?readonly=on");
    }

    #[test]
    fn only_a_name_says_what_format_an_image_has() {
        let of = |name: &str| ImageFormat::of(Path::new(name)).name();
        let names = ["a.img", "a", "a.qcow2", "A.QCOW2", "qcow2"];
        assert_eq!(names.map(of), ["raw", "raw", "qcow2", "qcow2", "raw"]);
    }
}
