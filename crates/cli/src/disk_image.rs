//! Image files: `disk create`, also as a copy of another image, and `disk convert`.

use std::hash::{BuildHasher, RandomState};
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

/// A new image until it is whole. Until then it has a name of its own beside its place, so that one
/// that was left by a command that was killed is not taken for an image.
struct Unfinished {
    path: PathBuf,
    place: PathBuf,
}

#[expect(clippy::disallowed_methods, reason = "a tool, on a core that does nothing else, or none")]
impl Unfinished {
    fn new(place: &Path) -> Result<Unfinished, Failure> {
        if std::fs::symlink_metadata(place).is_ok() {
            return Err(cannot_create(place, &std::io::ErrorKind::AlreadyExists.into()));
        }
        let directory = std::fs::canonicalize(directory_of(place));
        if directory.is_ok_and(|at| at.starts_with("/dev") && !at.starts_with("/dev/shm")) {
            let what = format!("there is no device {}", place.display());
            return Err(Failure::new(what).hint("a new image does not belong into /dev"));
        }
        let mut name = std::ffi::OsString::from(".");
        name.push(place.file_name().unwrap_or_default());
        // Another process may have the same number, in another container.
        let random = RandomState::new().hash_one(std::process::id());
        name.push(format!(".{random:016x}.partial"));
        Ok(Unfinished { path: directory_of(place).join(name), place: place.to_owned() })
    }

    /// Puts the whole image in its place, durably.
    fn finish(self) -> Result<(), Failure> {
        self.put().map_err(|error| cannot_create(&self.place, &error))
    }

    fn put(&self) -> std::io::Result<()> {
        std::fs::File::open(&self.path)?.sync_all()?;
        // A second name, because a rename would replace an image that somebody has made meanwhile.
        match std::fs::hard_link(&self.path, &self.place) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                // A file system without them.
                use rustix::fs::{CWD, RenameFlags, renameat_with};
                renameat_with(CWD, &self.path, CWD, &self.place, RenameFlags::NOREPLACE)?;
            }
            linked => linked?,
        }
        std::fs::File::open(directory_of(&self.place))?.sync_all()
    }
}

#[expect(clippy::disallowed_methods, reason = "as above")]
impl Drop for Unfinished {
    fn drop(&mut self) {
        // It may not have been made, or it was renamed.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Creates an image file of so many bytes.
pub fn create_image(path: &Path, size: u64, preallocate: bool) -> Result<(), Failure> {
    check_size(size)?;
    make_image(Unfinished::new(path)?, size, preallocate)
}

/// Creates an image file for the data of a disk of so many bytes, which need not be a multiple of
/// anything. False if there is one meanwhile.
pub fn create_image_of(path: &Path, size: u64) -> Result<bool, Failure> {
    let new = Unfinished::new(path);
    let made = new.and_then(|new| make_image(new, size, false));
    match made {
        Err(_) if path.exists() => Ok(false),
        made => made.map(|()| true),
    }
}

fn make_image(new: Unfinished, size: u64, preallocate: bool) -> Result<(), Failure> {
    let (partial, place) = (new.path.clone(), new.place.clone());
    on_core(DriverKind::Auto, async move |core| {
        let made = make(&core, &partial, size, preallocate).await;
        made.map_err(|error| cannot_create(&place, &error))
    })?;
    new.finish()
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
    match preallocate {
        true => file.allocate(size).await,
        false => file.set_len(size).await,
    }
}

fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}

/// Creates an image file as a copy of an image, a block device or the export of an NBD server, that
/// nobody writes to. It is larger if `size` says so.
pub fn create_from(path: &Path, from: &str, size: Option<Size>) -> Result<(), Failure> {
    if !is_uri(from) && ImageFormat::of(Path::new(from)) != ImageFormat::Raw {
        let what = format!("{from} is an image in the format qcow2, by its name");
        return Err(Failure::new(what).hint("use `millrace disk convert`"));
    }
    let uri = read_only(from);
    let new = Unfinished::new(path)?;
    let (partial, place) = (new.path.clone(), path.to_owned());
    on_core(DriverKind::Auto, async move |core| {
        let failed = |error: bdev::Error| Failure::new(error.to_string());
        let source = Bdev::open(&core, &uri).await.map_err(failed)?;
        let image = node::image_of(&uri);
        let has = image.as_deref().and_then(length).unwrap_or(0).max(source.size_bytes());
        let size = size.map_or(has.next_multiple_of(IMAGE_BLOCK), |size| size.0);
        check_size(size)?;
        if size < has {
            let what = format!("{} has {}, which is more than {}", uri, Size(has), Size(size));
            return Err(Failure::new(what));
        }
        let cannot = |error| cannot_create(&place, &error);
        make(&core, &partial, size, false).await.map_err(cannot)?;
        if let Some(image) = &image
            && is_clone(image, &partial, size).map_err(cannot)?
        {
            return Ok(());
        }
        copy(&core, &source, &partial).await.map_err(failed)?;
        match image {
            Some(image) => copy_rest(&image, &partial, source.size_bytes()).map_err(cannot),
            None => Ok(()),
        }
    })?;
    new.finish()
}

/// Whether what a copy is made of is a URI, not the path of an image.
fn is_uri(from: &str) -> bool {
    from.starts_with("file:") || is_remote(from)
}

/// The length of an image file; none of what is no file.
#[expect(clippy::disallowed_methods, reason = "a tool, on a core that does nothing else")]
fn length(image: &Path) -> Option<u64> {
    let metadata = std::fs::metadata(image).ok()?;
    metadata.is_file().then_some(metadata.len())
}

/// Copies the last bytes of an image, which are no whole block: a device leaves them out.
#[expect(clippy::disallowed_methods, reason = "a tool, on a core that does nothing else")]
fn copy_rest(image: &Path, path: &Path, from: u64) -> std::io::Result<()> {
    use std::os::unix::fs::FileExt;
    let Some(length) = length(image).filter(|length| *length > from) else { return Ok(()) };
    let mut rest = vec![0; (length - from) as usize];
    std::fs::File::open(image)?.read_exact_at(&mut rest, from)?;
    std::fs::OpenOptions::new().write(true).open(path)?.write_all_at(&rest, from)
}

/// The URI of a device, for reading. An image may be written as its path only.
fn read_only(from: &str) -> String {
    let uri = match is_uri(from) {
        true => from.to_owned(),
        false => file_uri(Path::new(from)),
    };
    if uri.contains("?readonly=on") || uri.contains("&readonly=on") {
        return uri;
    }
    let separator = if uri.contains('?') { '&' } else { '?' };
    format!("{uri}{separator}readonly=on")
}

/// Lets the new file share the blocks of the other one, where the file system can (XFS, Btrfs).
#[expect(clippy::disallowed_methods, reason = "a tool, on a core that does nothing else")]
fn is_clone(image: &Path, path: &Path, size: u64) -> std::io::Result<bool> {
    let from = std::fs::File::open(image)?;
    let to = std::fs::OpenOptions::new().write(true).open(path)?;
    if rustix::fs::ioctl_ficlone(&to, &from).is_err() {
        return Ok(false);
    }
    to.set_len(size)?;
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

/// Converts an image with qemu-img. `with_backing`: also one that needs other files.
pub fn convert(
    from: &Path,
    to: &Path,
    from_format: Option<ImageFormat>,
    format: Option<ImageFormat>,
    with_backing: bool,
) -> Result<(), Failure> {
    let from_format = from_format.unwrap_or_else(|| ImageFormat::of(from));
    let format = format.unwrap_or_else(|| ImageFormat::of(to));
    let new = Unfinished::new(to)?;
    if !with_backing && let Some(other) = other_file(from, from_format)? {
        let what = format!("{} takes data from another file: {other}", from.display());
        return Err(Failure::new(what)
            .hint("the copy would contain it; use --with-backing if that is what you want"));
    }
    let mut command = Command::new(QEMU_IMG);
    command.args(["convert", "-p", "-f", from_format.name(), "-O", format.name(), "--"]);
    command.arg(no_protocol(from)).arg(no_protocol(&new.path)).stdin(Stdio::null());
    // Its progress belongs with the messages.
    command.stdout(std::io::stderr());
    if !std::io::IsTerminal::is_terminal(&std::io::stderr()) {
        command.stdout(Stdio::null());
    }
    let status = command.status().map_err(|error| cannot_run(&error))?;
    if !status.success() {
        return Err(Failure::new(format!("{QEMU_IMG} has failed ({status})")));
    }
    new.finish()
}

fn cannot_run(error: &std::io::Error) -> Failure {
    Failure::new(format!("cannot run {QEMU_IMG}: {error}"))
        .hint("it is in the package qemu-utils (apt-get install qemu-utils)")
}

/// What qemu-img takes for a path, also if that has a colon: it looks for a protocol before one.
fn no_protocol(path: &Path) -> PathBuf {
    match path.is_absolute() || path.to_str().is_some_and(is_uri) {
        true => path.to_owned(),
        false => Path::new(".").join(path),
    }
}

/// The file that an image names as its backing file, or as that of its data. Whoever has made the
/// image has chosen it, and it may be any file of this machine.
fn other_file(image: &Path, format: ImageFormat) -> Result<Option<String>, Failure> {
    if format == ImageFormat::Raw {
        return Ok(None);
    }
    let mut command = Command::new(QEMU_IMG);
    command.args(["info", "--output=json", "-f", format.name(), "--"]).arg(no_protocol(image));
    let done = command.stdin(Stdio::null()).output().map_err(|error| cannot_run(&error))?;
    let info: serde_json::Value = match done.status.success() {
        true => serde_json::from_slice(&done.stdout).unwrap_or_default(),
        false => serde_json::Value::Null,
    };
    if !info.is_object() {
        let said = String::from_utf8_lossy(&done.stderr);
        return Err(Failure::new(format!("{QEMU_IMG} cannot read it: {}", said.trim())));
    }
    let named = [&info["backing-filename"], &info["format-specific"]["data"]["data-file"]];
    Ok(named.into_iter().find_map(|name| name.as_str().map(str::to_owned)))
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
        assert_eq!(read_only("file:a.img?readonly=on"), "file:a.img?readonly=on");
    }

    #[test]
    fn only_a_name_says_what_format_an_image_has() {
        let of = |name: &str| ImageFormat::of(Path::new(name)).name();
        let names = ["a.img", "a", "a.qcow2", "A.QCOW2", "qcow2"];
        assert_eq!(names.map(of), ["raw", "raw", "qcow2", "qcow2", "raw"]);
    }
}
