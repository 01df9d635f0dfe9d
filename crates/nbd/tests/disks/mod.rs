//! Disks for a server.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use bdev::Bdev;
use nbd::{Disk, Disks};

pub struct TestDisk {
    pub device: Bdev,
    pub taken: Cell<bool>,
    pub hidden: Cell<bool>,
}

impl TestDisk {
    pub fn new(device: Bdev) -> TestDisk {
        TestDisk { device, taken: Cell::new(false), hidden: Cell::new(false) }
    }
}

impl Disk for TestDisk {
    fn device(&self) -> Bdev {
        self.device.clone()
    }

    fn is_taken(&self) -> bool {
        self.taken.get()
    }
}

#[derive(Clone, Default)]
pub struct TestDisks(pub Rc<RefCell<BTreeMap<String, Rc<TestDisk>>>>);

impl Disks for TestDisks {
    fn names(&self) -> Vec<String> {
        self.0.borrow().keys().cloned().collect()
    }

    fn disk(&self, name: &str) -> Option<Rc<dyn Disk>> {
        let disk = self.0.borrow().get(name).filter(|disk| !disk.hidden.get())?.clone();
        Some(disk)
    }

    fn is_hidden(&self, name: &str) -> bool {
        self.0.borrow().get(name).is_some_and(|disk| disk.hidden.get())
    }
}
