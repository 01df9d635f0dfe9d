//! A [`Bdev`]: an open device that cores share, and its geometry.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use reactor::{Core, ImageLock, UnixPackets};

use crate::channel::Channel;
use crate::devices::file::FileDevice;
use crate::devices::mem::MemDevice;
use crate::devices::nbd::NbdDevice;
use crate::devices::null::NullDevice;
use crate::error::{Error, ErrorKind};
use crate::geometry::Geometry;
use crate::layers::dirty::DirtyMap;
use crate::layers::limit::Limit;
use crate::uri::{Base, Failures, LAYERS_MAX, Layer, Spec};

/// An open block device. Clones are the same device.
#[derive(Clone)]
pub struct Bdev(Arc<OpenDevice>);

struct OpenDevice {
    geometry: Geometry,
    /// The size can change, the rest of the geometry cannot.
    size_bytes: AtomicU64,
    device: Device,
}

/// Maximum number of [`Bdev::descriptors`]: the device's own and one for each layer.
pub const DESCRIPTORS_MAX: usize = 1 + LAYERS_MAX;

/// What a process that cannot open files needs to use a device.
#[derive(Debug, Default)]
pub struct Parts {
    /// The device's [`Bdev::descriptors`].
    pub descriptors: Vec<OwnedFd>,
    /// Whether the image supports punching holes, if known.
    pub holes: Option<bool>,
}

impl Parts {
    /// Opens the device that a URI names, for another process to [`Bdev::take`]. The export of an
    /// NBD server has a line, too: as long as the device is in use, its end that stays here has to
    /// be served ([`serve_line`](crate::serve_line)). Suspends.
    ///
    /// # Errors
    /// As for [`Bdev::open`].
    pub async fn open(core: &Core, uri: &str) -> Result<(Parts, Option<OwnedFd>), Error> {
        let own = |error| Error::io("the descriptor of a device".to_owned(), error);
        let Spec { base, layers } = uri.parse()?;
        let mut parts = Parts::default();
        let mut line = None;
        if let Base::Nbd(_) = base {
            let (here, there) = UnixPackets::pair().map_err(own)?;
            parts.descriptors.push(there);
            line = Some(here);
        }
        // Nothing else of a server is opened here, unless a bitmap needs to know the size.
        if line.is_none() || layers.iter().any(|layer| matches!(layer, Layer::Dirty { .. })) {
            let device = Bdev::open(core, uri).await?;
            let all = device.descriptors()?.into_iter().map(|fd| fd.try_clone_to_owned());
            parts.descriptors.extend(all.collect::<Result<Vec<_>, _>>().map_err(own)?);
            parts.holes = Some(device.geometry().discard);
        }
        Ok((parts, line))
    }
}

/// The kinds of devices.
pub(crate) enum Device {
    Null(NullDevice),
    Mem(Arc<MemDevice>),
    File(FileDevice),
    Nbd(NbdDevice),
    Failing {
        over: Bdev,
        failures: Failures,
    },
    Delay {
        over: Bdev,
        ns: [(u64, u64); 5],
    },
    Limit {
        over: Bdev,
        limit: Limit,
    },
    /// Named in the URI, or made by [`Bdev::tracked`].
    Dirty {
        over: Bdev,
        map: Arc<DirtyMap>,
        named: bool,
    },
}

impl Device {
    /// The device below a layer.
    fn over(&self) -> Option<&Bdev> {
        match self {
            Device::Failing { over, .. }
            | Device::Delay { over, .. }
            | Device::Limit { over, .. }
            | Device::Dirty { over, .. } => Some(over),
            Device::Null(_) | Device::Mem(_) | Device::File(_) | Device::Nbd(_) => None,
        }
    }
}

impl Bdev {
    /// Opens the device that a URI names: see docs/DISKS.md. Suspends.
    ///
    /// # Errors
    /// When the URI is wrong, the device is in use, or the system refuses; the text says which.
    pub async fn open(core: &Core, uri: &str) -> Result<Bdev, Error> {
        Bdev::open_with(core, uri, None).await
    }

    /// Like [`Bdev::open`], for a device that another process has open: it uses the
    /// [`Bdev::descriptors`] that the process handed over, or opened for this one ([`Parts`]), with
    /// their lock, and looks up no name. Suspends.
    ///
    /// # Errors
    /// As for [`Bdev::open`], and when these are not the descriptors of this device.
    pub async fn take(core: &Core, uri: &str, open: Parts) -> Result<Bdev, Error> {
        Bdev::open_with(core, uri, Some(open)).await
    }

    async fn open_with(core: &Core, uri: &str, taken: Option<Parts>) -> Result<Bdev, Error> {
        let Spec { base, layers } = uri.parse()?;
        let bitmaps = layers.iter().filter(|layer| matches!(layer, Layer::Dirty { .. })).count();
        let own = match (&base, &taken) {
            (Base::Null { .. }, _) => 0,
            // A process that connects itself needs none.
            (Base::Nbd(_), Some(taken)) if taken.descriptors.len() == bitmaps => 0,
            _ => 1,
        };
        if let Some(Parts { descriptors, .. }) = &taken
            && descriptors.len() != own + bitmaps
        {
            let (found, expected) = (descriptors.len(), own + bitmaps);
            let text = format!("{found} descriptors of a device that has {expected}");
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        let holes = taken.as_ref().and_then(|taken| taken.holes);
        let mut taken = taken.map(|taken| taken.descriptors.into_iter());
        let mut next = || taken.as_mut().and_then(Iterator::next);
        let open = if own == 1 { next() } else { None };
        let base = match base {
            Base::Null { size, block } => {
                Bdev::new(NullDevice::geometry(size, block), Device::Null(NullDevice))
            }
            Base::Mem { size, block } => {
                let (mem, size) = match open {
                    None => (MemDevice::new(size)?, size),
                    Some(open) => MemDevice::take(open)?,
                };
                if !size.is_multiple_of(block.into()) {
                    let text =
                        format!("mem: {size} bytes are not a multiple of the block, {block}");
                    return Err(Error::new(ErrorKind::Unsupported, text));
                }
                Bdev::new(mem.geometry(size, block), Device::Mem(Arc::new(mem)))
            }
            Base::File { .. } => {
                let open = open.map(|open| (open, holes));
                let (file, geometry) = FileDevice::open(core, &base, open).await?;
                Bdev::new(geometry, Device::File(file))
            }
            Base::Nbd(export) => {
                let (nbd, geometry) = NbdDevice::open(core, &export, open).await?;
                Bdev::new(geometry, Device::Nbd(nbd))
            }
        };
        let mut over = base;
        for layer in layers {
            let geometry = over.geometry();
            let device = match layer {
                Layer::Error(failures) => Device::Failing { over, failures },
                Layer::Delay { ns } => Device::Delay { over, ns },
                Layer::Limit(rates) => Device::Limit { over, limit: Limit::new(rates) },
                Layer::Dirty { path, granule } => {
                    let size_bytes = geometry.size_bytes;
                    let map = match next() {
                        Some(open) => {
                            DirtyMap::take_over(open, granule, size_bytes, path.is_some())?
                        }
                        None => DirtyMap::open(core, path.as_deref(), granule, size_bytes).await?,
                    };
                    Device::Dirty { over, map: Arc::new(map), named: true }
                }
            };
            over = Bdev::new(geometry, device);
        }
        Ok(over)
    }

    /// Whether the data is in this process's memory, or nowhere. Such a device has no operations
    /// left in flight by a process that has ended.
    pub fn is_memory(&self) -> bool {
        matches!(self.lowest().device(), Device::Mem(_) | Device::Null(_))
    }

    fn new(geometry: Geometry, device: Device) -> Bdev {
        let size_bytes = geometry.size_bytes.into();
        Bdev(Arc::new(OpenDevice { geometry, size_bytes, device }))
    }

    /// The current geometry.
    pub fn geometry(&self) -> Geometry {
        Geometry { size_bytes: self.size_bytes(), ..self.0.geometry }
    }

    /// The current size in bytes.
    #[inline]
    pub fn size_bytes(&self) -> u64 {
        self.0.size_bytes.load(Ordering::Relaxed)
    }

    /// A channel to the device for this core. It must be dropped on this core.
    ///
    /// # Errors
    /// When the system has no room for the resources of the device's engine.
    pub fn channel(&self, core: &Core) -> Result<Channel, Error> {
        Channel::new(self, core)
    }

    /// Changes the size of the device, in bytes, for all channels; suspends. Data beyond a smaller
    /// size is lost. Added space reads as zeroes, unless a write beyond the new end of a smaller
    /// device was still in flight. The size of a block device is fixed: there this only checks that
    /// the device is large enough.
    ///
    /// # Errors
    /// When the size is not a multiple of the block, the device cannot have it, or the system
    /// refuses.
    pub async fn resize(&self, core: &Core, size_bytes: u64) -> Result<(), Error> {
        let block = u64::from(self.0.geometry.block_size);
        if size_bytes == 0 || !size_bytes.is_multiple_of(block) {
            let text =
                format!("a size of {size_bytes} bytes is not a multiple of the block, {block}");
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        if !self.maps_cover(size_bytes) {
            let text = format!("dirty: the bitmap has no room for {size_bytes} bytes");
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        // Refuse requests beyond the new end before it moves; admit them only afterwards.
        let old = self.size_bytes();
        self.set_size(old.min(size_bytes));
        let changed = match self.lowest().device() {
            Device::Mem(mem) => mem.resize(old, size_bytes),
            Device::File(file) => file.resize(core, size_bytes).await,
            Device::Nbd(nbd) => nbd.resize(size_bytes),
            Device::Null(_)
            | Device::Failing { .. }
            | Device::Delay { .. }
            | Device::Limit { .. }
            | Device::Dirty { .. } => Ok(()),
        };
        // The content between the two ends has changed.
        let (from, to) = (old.min(size_bytes), old.max(size_bytes));
        self.maps().filter(|_| from < to).for_each(|map| map.mark_range(from, to - from));
        self.set_size(if changed.is_ok() { size_bytes } else { old });
        changed
    }

    /// Sets the size in bytes that the device had in the process that it was taken from, if the
    /// device can have it. A `null:` device cannot know its size otherwise. The length of a file
    /// may have been changed from outside meanwhile: its guest still assumes this size, and
    /// requests beyond the file's end fail. A `mem:` device knows its size.
    pub fn set_taken_size(&self, size_bytes: u64) {
        let block = u64::from(self.0.geometry.block_size);
        let possible = size_bytes != 0 && size_bytes.is_multiple_of(block);
        let knows = matches!(self.lowest().device(), Device::Mem(_));
        if !knows && possible && self.maps_cover(size_bytes) {
            self.set_size(size_bytes);
        }
    }

    /// This device with a bitmap of the writes through the result, from now on, in granules of so
    /// many bytes (a power of two, at least 4 KiB): for a [`Copy`](crate::Copy). Suspends.
    ///
    /// # Errors
    /// When there is no memory for the bitmap.
    pub async fn tracked(&self, core: &Core, granule: u64) -> Result<Bdev, Error> {
        let map = DirtyMap::open(core, None, granule, self.size_bytes()).await?;
        Ok(self.with_map(map))
    }

    /// The same for a copy to `target`, as large, in this process: it can mirror writes
    /// ([`Copy::mirror`](crate::Copy::mirror)). Suspends.
    ///
    /// # Errors
    /// When there is no memory for the bitmap.
    pub async fn mirrored(&self, core: &Core, granule: u64, target: &Bdev) -> Result<Bdev, Error> {
        let mut map = DirtyMap::open(core, None, granule, self.size_bytes()).await?;
        map.set_mirror(target.clone());
        Ok(self.with_map(map))
    }

    fn with_map(&self, map: DirtyMap) -> Bdev {
        let (over, map) = (self.clone(), Arc::new(map));
        Bdev::new(self.geometry(), Device::Dirty { over, map, named: false })
    }

    /// The device without the bitmaps of [`Bdev::tracked`]: the one that its URI names.
    pub fn untracked(&self) -> Bdev {
        match self.device() {
            Device::Dirty { over, named: false, .. } => over.untracked(),
            _ => self.clone(),
        }
    }

    /// The device below the outermost layer, if there is one.
    pub fn below(&self) -> Option<&Bdev> {
        self.device().over()
    }

    /// This device and those below it, from the outermost on.
    fn layers(&self) -> impl Iterator<Item = &Bdev> {
        std::iter::successors(Some(self), |device| device.device().over())
    }

    /// The bitmaps of the `dirty:` layers, from the outermost on.
    fn maps(&self) -> impl Iterator<Item = &Arc<DirtyMap>> {
        self.layers().filter_map(|layer| match layer.device() {
            Device::Dirty { map, .. } => Some(map),
            _ => None,
        })
    }

    fn maps_cover(&self, size_bytes: u64) -> bool {
        self.maps().all(|map| map.covers(size_bytes))
    }

    fn set_size(&self, size_bytes: u64) {
        self.layers().for_each(|layer| layer.0.size_bytes.store(size_bytes, Ordering::Relaxed));
    }

    /// The descriptors that another process needs to [`Bdev::take`] the device while this one has
    /// it open.
    ///
    /// # Errors
    /// When the file has no descriptor.
    pub fn descriptors(&self) -> Result<Vec<BorrowedFd<'_>>, Error> {
        // The device's own first, then those of the layers from the innermost on.
        let mut descriptors = match self.0.device.over() {
            Some(over) => over.descriptors()?,
            None => Vec::new(),
        };
        match self.device() {
            Device::Mem(mem) => descriptors.push(mem.descriptor()),
            Device::File(file) => {
                let none = || Error::new(ErrorKind::Unsupported, "a file without a descriptor");
                descriptors.push(file.descriptor().ok_or_else(none)?);
            }
            Device::Nbd(nbd) => descriptors.extend(nbd.line()),
            Device::Dirty { map, .. } => descriptors.push(map.descriptor()),
            Device::Null(_)
            | Device::Failing { .. }
            | Device::Delay { .. }
            | Device::Limit { .. } => {}
        }
        Ok(descriptors)
    }

    /// The write bitmap of the outermost `dirty:` layer.
    pub fn dirty_map(&self) -> Option<&Arc<DirtyMap>> {
        self.maps().next()
    }

    /// Whether a flush has failed, so that the device takes no more writes: see docs/DISKS.md.
    pub fn flush_failed(&self) -> bool {
        match self.lowest().device() {
            Device::File(file) => file.flush_failed(),
            Device::Nbd(nbd) => nbd.flush_failed(),
            _ => false,
        }
    }

    /// Records that a flush has failed in the process that the device was taken from.
    pub fn set_flush_failed(&self) {
        match self.lowest().device() {
            Device::File(file) => file.set_flush_failed(),
            Device::Nbd(nbd) => nbd.set_flush_failed(),
            _ => {}
        }
    }

    /// Whether the image is to be locked only while a virtual machine uses it (`lock=ring`).
    pub fn locks_for_use(&self) -> bool {
        matches!(self.lowest().device(), Device::File(file) if file.lock().is_some())
    }

    /// Locks the image for its use, if [`Bdev::locks_for_use`]. Doing it again does no harm.
    /// Suspends.
    ///
    /// # Errors
    /// `Busy` when another process has locked it; others as the system gives them.
    pub async fn lock(&self, core: &Core) -> Result<(), Error> {
        match self.lowest().device() {
            Device::File(file) => match file.lock() {
                Some(lock) => file.set_lock(core, lock).await,
                None => Ok(()),
            },
            _ => Ok(()),
        }
    }

    /// Reads the size of a file or block device anew: while it was not locked, somebody else may
    /// have changed it. Returns whether it has changed. Suspends.
    ///
    /// # Errors
    /// As the system gives them, or when a layer has no room for the size; the size then stays as
    /// it was.
    pub async fn measure(&self, core: &Core) -> Result<bool, Error> {
        let Device::File(file) = self.lowest().device() else { return Ok(false) };
        let (block, old) = (u64::from(self.0.geometry.block_size), self.size_bytes());
        let size_bytes = file.measure(core).await? / block * block;
        if size_bytes == old {
            return Ok(false);
        }
        if size_bytes == 0 || !self.maps_cover(size_bytes) {
            let text = format!("the device cannot have its image's new size, {size_bytes} bytes");
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        let (from, to) = (old.min(size_bytes), old.max(size_bytes));
        self.maps().for_each(|map| map.mark_range(from, to - from));
        self.set_size(size_bytes);
        Ok(true)
    }

    /// Who has claimed the locked image last ([`Bdev::claim`]); empty if nobody has, or if others
    /// may use it, too. Suspends.
    ///
    /// # Errors
    /// When its file system has no extended attributes; others as the system gives them.
    pub async fn owner(&self, core: &Core) -> Result<Vec<u8>, Error> {
        match self.lowest().device() {
            Device::File(file) => file.owner(core).await,
            _ => Ok(Vec::new()),
        }
    }

    /// Stores with the locked image that somebody has it now. Suspends.
    ///
    /// # Errors
    /// As for [`Bdev::owner`].
    pub async fn claim(&self, core: &Core, owner: String) -> Result<(), Error> {
        match self.lowest().device() {
            Device::File(file) => file.claim(core, owner).await,
            _ => Ok(()),
        }
    }

    /// Unlocks the image after its use, when none of this device's operations is in flight.
    /// Suspends.
    pub async fn unlock(&self, core: &Core) {
        if let Device::File(file) = self.lowest().device()
            && file.lock().is_some()
        {
            // On an error the lock ends with the open file.
            let _ = file.set_lock(core, ImageLock::None).await;
        }
    }

    /// Whether reads leave their memory as it is.
    pub(crate) fn reads_nothing(&self) -> bool {
        matches!(self.lowest().device(), Device::Null(_))
    }

    /// The device below all layers.
    pub(crate) fn lowest(&self) -> &Bdev {
        self.layers().last().unwrap_or(self)
    }

    pub(crate) fn device(&self) -> &Device {
        &self.0.device
    }
}

impl std::fmt::Debug for Bdev {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bdev").field("geometry", &self.geometry()).finish_non_exhaustive()
    }
}
