//! A disk whose device takes minutes for a request is handed over nevertheless, with the request in
//! its in-flight region.
#![allow(clippy::disallowed_methods, reason = "tests are not part of a node")]

use std::os::fd::{AsFd, FromRawFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::common::{PATIENCE, Scratch, pattern, until};
use bdev::{Bdev, Parts};
use frontend::message::request;
use frontend::{Disk, DiskOptions, Request, Status};
use reactor::{Class, Core, RuntimeConfig, UnixListener, processors};
use vhost::{OnError, Target, TargetOptions};

/// State shared by the test and the core.
#[derive(Default)]
struct TestState {
    serves: AtomicBool,
    /// Requests that the first target has received.
    asked: AtomicU32,
    hand_over: AtomicBool,
    handed_over: AtomicBool,
    /// The disk was not quiesced when it was forced, nor for a while after that.
    waited: AtomicBool,
    ends: AtomicBool,
}

fn options() -> TargetOptions {
    TargetOptions {
        name: "a".into(),
        serial: "a".into(),
        queues: 1,
        first_core: 0,
        on_error: OnError::Report,
    }
}

async fn when(core: &Core, flag: &AtomicBool) {
    while !flag.load(Ordering::Acquire) {
        core.sleep_ns(1_000_000).await;
    }
}

/// Serves a memory disk that takes ten minutes for a read, then hands it over to a target without
/// that delay.
async fn serve(core: Core, socket: PathBuf, shared: Arc<TestState>) {
    let slow = Bdev::open(&core, "delay:read=600s|mem:64M").await.unwrap();
    let first = Target::new(&core, slow.clone(), options());
    let listener = UnixListener::bind(&core, &socket).unwrap();
    let serving = first.clone();
    let serving = core.spawn(Class::Control, async move { serving.serve(listener).await });
    shared.serves.store(true, Ordering::Release);
    while !shared.hand_over.load(Ordering::Acquire) {
        let reads = first.stats()[0].reads.requests.get();
        shared.asked.store(reads as u32, Ordering::Release);
        core.sleep_ns(1_000_000).await;
    }
    let (rests, export) = (first.clone(), std::rc::Rc::new(std::cell::RefCell::new(None)));
    let exported = export.clone();
    let resting = core.spawn(Class::Control, async move {
        exported.replace(Some(rests.quiesce().await));
    });
    core.sleep_ns(50_000_000).await;
    let waited = export.borrow().is_none();
    first.force();
    core.sleep_ns(50_000_000).await;
    shared.waited.store(waited && export.borrow().is_none(), Ordering::Release);
    let forced = export.take();
    if let Some(forced) = forced {
        resting.await;
        let (state, descriptors) = forced.unwrap();
        // The delayed requests are done: nothing is in flight.
        assert_eq!(state.in_flight, None);
        let memory = slow.descriptors().unwrap();
        let descriptors_of_device = memory.iter().map(|fd| fd.try_clone_to_owned().unwrap());
        let parts = Parts { descriptors: descriptors_of_device.collect(), holes: None };
        let fast = Bdev::take(&core, "mem:64M", parts).await.unwrap();
        let second = Target::new(&core, fast, options());
        let (takes, state) = (second.clone(), state.clone());
        let serving_on =
            core.spawn(Class::Control, async move { takes.take_over(&state, descriptors).await });
        second.quiesce().await.unwrap();
        first.stop();
        serving.await;
        second.resume();
        shared.handed_over.store(true, Ordering::Release);
        when(&core, &shared.ends).await;
        assert!(second.stats()[0].resubmitted.get() > 0);
        second.stop();
        serving_on.await;
    } else {
        shared.handed_over.store(true, Ordering::Release);
        when(&core, &shared.ends).await;
        drop(resting);
        first.stop_now();
        serving.await;
    }
}

fn with_targets(name: &str, options: DiskOptions, play: impl FnOnce(Disk, &TestState)) {
    let dir = Scratch::new(name);
    let socket = dir.path("a.sock");
    let shared = Arc::<TestState>::default();
    let config = RuntimeConfig {
        processors: processors().into_iter().take(1).collect(),
        memory: 64 << 20,
        ..RuntimeConfig::default()
    };
    let (there, told) = (socket.clone(), shared.clone());
    let core = std::thread::spawn(move || {
        reactor::run(&config, move |core: Core| serve(core, there.clone(), told.clone())).unwrap();
    });
    until("it serves", || shared.serves.load(Ordering::Acquire));
    play(Disk::connect(&socket, options).unwrap(), &shared);
    shared.ends.store(true, Ordering::Release);
    core.join().expect("the core has panicked");
}

#[test]
fn a_read_that_takes_ten_minutes_is_finished_by_the_successor() {
    for packed in [false, true] {
        let options = DiskOptions { packed, ..DiskOptions::default() };
        with_targets("forced", options, |mut disk, shared| {
            let mut queue = disk.take_queue(0);
            let bytes = pattern(1, 4096);
            assert_eq!(queue.write(8192, &bytes).unwrap(), Status::Ok);
            let slots: Vec<_> = (0..3).map(|_| queue.take().unwrap()).collect();
            for slot in slots {
                queue.submit(slot, Request::Read { offset: 8192, len: 4096 });
            }
            queue.publish();
            until("the reads have begun", || shared.asked.load(Ordering::Acquire) == 3);
            shared.hand_over.store(true, Ordering::Release);
            let mut done = Vec::new();
            while done.len() < 3 {
                assert!(queue.wait(PATIENCE), "nothing comes back");
                queue.poll(&mut done).unwrap();
            }
            for completion in done {
                let mut read = vec![0; 4096];
                queue.read_data(completion.slot, 0, &mut read);
                assert!(completion.status == Status::Ok && read == bytes);
                queue.give_back(completion.slot);
            }
            assert_eq!(queue.write(8192, &pattern(2, 4096)).unwrap(), Status::Ok);
            let mut read = vec![0; 4096];
            assert_eq!(queue.read(8192, &mut read).unwrap(), Status::Ok);
            assert_eq!(read, pattern(2, 4096));
        });
    }
}

#[test]
fn a_front_end_without_an_in_flight_region_waits_for_its_device() {
    let options = DiskOptions { inflight: false, ..DiskOptions::default() };
    with_targets("waits", options, |mut disk, shared| {
        let mut queue = disk.take_queue(0);
        let slot = queue.take().unwrap();
        queue.submit(slot, Request::Read { offset: 0, len: 4096 });
        queue.publish();
        until("the read has begun", || shared.asked.load(Ordering::Acquire) == 1);
        shared.hand_over.store(true, Ordering::Release);
        until("it was tried", || shared.handed_over.load(Ordering::Acquire));
        assert!(shared.waited.load(Ordering::Acquire));
        assert_eq!(queue.in_flight(), 1);
    });
}

/// A table that was refused, because it is too long, is not passed to a successor.
#[test]
fn refused_messages_are_not_handed_over() {
    let dir = Scratch::new("refused");
    let socket = dir.path("a.sock");
    let shared = Arc::<TestState>::default();
    let config = RuntimeConfig {
        processors: processors().into_iter().take(1).collect(),
        memory: 64 << 20,
        ..RuntimeConfig::default()
    };
    let (there, told) = (socket.clone(), shared.clone());
    let main = move |core: Core| {
        let (socket, shared) = (there.clone(), told.clone());
        async move {
            let device = Bdev::open(&core, "null:1G").await.unwrap();
            let target = Target::new(&core, device, options());
            let listener = UnixListener::bind(&core, &socket).unwrap();
            let serving = target.clone();
            let serving = core.spawn(Class::Control, async move { serving.serve(listener).await });
            shared.serves.store(true, Ordering::Release);
            when(&core, &shared.handed_over).await;
            target.resize(1 << 29).await.unwrap();
            shared.waited.store(true, Ordering::Release);
            when(&core, &shared.hand_over).await;
            let (state, _) = target.quiesce().await.unwrap();
            let session = state.connection.unwrap().session;
            assert!(session.regions.len() == 1 && session.regions[0].size < 1 << 40);
            target.stop();
            serving.await;
        }
    };
    let core = std::thread::spawn(move || _ = reactor::run(&config, main).unwrap());
    until("it serves", || shared.serves.load(Ordering::Acquire));
    let disk = Disk::connect(&socket, DiskOptions::default()).unwrap();
    let len = 60_u64 << 40;
    // SAFETY: the name is a C string; the descriptor is new and nothing else owns it.
    let file = unsafe {
        let file = libc::memfd_create(c"own".as_ptr(), libc::MFD_CLOEXEC);
        std::fs::File::from(std::os::fd::OwnedFd::from_raw_fd(file))
    };
    file.set_len(len).unwrap();
    let bytes = |numbers: &[u64]| numbers.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<_>>();
    let table = bytes(&[1, 0, len, 0, 0]);
    assert!(disk.session().tell(request::SET_MEM_TABLE, &table, &[file.as_fd()]).is_err());
    // Nor is a channel that the front end has closed, once this was noticed.
    drop(disk.session().set_backend_channel().unwrap());
    shared.handed_over.store(true, Ordering::Release);
    until("the size has changed", || shared.waited.load(Ordering::Acquire));
    disk.session().get_features().unwrap();
    shared.hand_over.store(true, Ordering::Release);
    core.join().expect("the core has panicked");
}
