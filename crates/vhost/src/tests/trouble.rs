//! A device fails requests: they are reported, waited with, or taken as done.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use bdev::Bdev;
use reactor::Core;
use reactor::sim::{SimConfig, World};

use super::guest::*;
use super::share::{start_waiting, start_with};
use crate::target::queue::{Command, RingEnd};
use crate::target::trouble::Trouble;
use crate::*;

/// Long enough for everything that does not wait for an operator.
const WHILE_NS: u64 = 200_000_000;

fn guest(form: Form) -> Guest {
    Guest::new(form, 16, if form == Form::Packed { 0x8000 } else { 0 }, 0)
}

/// A device that fails its first writes for lack of space.
async fn full(core: &Core, count: u32) -> Bdev {
    let uri = format!("error:kind=write&status=nospace&count={count}|mem:1M");
    Bdev::open(core, &uri).await.unwrap()
}

/// Runs `test` for both forms of a ring; each gets a list of what an observer is told.
fn in_both_forms<F: Future<Output = ()> + 'static>(
    test: impl Fn(Core, Form, Rc<RefCell<Vec<DiskEvent>>>) -> F + Clone + Send + Sync + 'static,
) {
    for form in [Form::Split, Form::Packed] {
        let test = test.clone();
        let run = World::new(1, 1, SimConfig::default()).run(move |core| {
            let test = test.clone();
            async move {
                let told = Rc::<RefCell<Vec<DiskEvent>>>::default();
                let list = told.clone();
                observe(&core, move |_, disk, event| {
                    assert_eq!(disk, "a");
                    list.borrow_mut().push(event);
                });
                test(core, form, told).await;
            }
        });
        run.unwrap();
    }
}

/// The statuses of the requests that are completed after a while.
async fn completed(core: &Core, guest: &mut Guest) -> Vec<(u64, u8)> {
    core.sleep_ns(WHILE_NS).await;
    let done = guest.collect().into_iter();
    let mut done: Vec<_> = done.map(|(seq, head, _)| (seq, guest.status(head))).collect();
    done.sort_unstable();
    done
}

#[test]
fn a_disk_that_reports_tells_the_guest_and_goes_on() {
    in_both_forms(async |core, form, told| {
        let (mut guest, device) = (guest(form), full(&core, 1).await);
        let trouble = Arc::new(Trouble::new(OnError::Report));
        let (mut handle, ended) = start_with(&core, "a", &guest, &device, &trouble, None);
        assert!(guest.add(1, false) && guest.add(3, false));
        assert_eq!(completed(&core, &mut guest).await, [(1, 1), (3, 0)]);
        let error = told.borrow_mut().pop().unwrap();
        assert!(matches!(error, DiskEvent::DeviceError { no_space: true, offset: 512, .. }));
        handle.send(Command::Stop);
        ended.await;
    });
}

#[test]
fn a_disk_that_ignores_errors_says_that_all_is_well() {
    in_both_forms(async |core, form, told| {
        let (mut guest, device) = (guest(form), full(&core, 1).await);
        let trouble = Arc::new(Trouble::new(OnError::Ignore));
        let (mut handle, ended) = start_with(&core, "a", &guest, &device, &trouble, None);
        assert!(guest.add(1, false) && guest.add(3, false));
        assert_eq!(completed(&core, &mut guest).await, [(1, 0), (3, 0)]);
        assert!(matches!(told.borrow()[..], [DiskEvent::DeviceError { .. }]));
        handle.send(Command::Stop);
        ended.await;
    });
}

#[test]
fn a_disk_that_pauses_goes_on_with_what_has_failed_and_loses_nothing() {
    in_both_forms(async |core, form, told| {
        let (mut guest, device) = (guest(form), full(&core, 2).await);
        let trouble = Arc::new(Trouble::new(OnError::Pause));
        let (mut handle, ended) = start_with(&core, "a", &guest, &device, &trouble, None);
        assert!(guest.add(1, false));
        assert_eq!(completed(&core, &mut guest).await, []);
        assert!(trouble.is_paused());
        let paused = [DiskEvent::Paused { no_space: true }];
        assert_eq!(told.borrow()[1..], paused);
        // Nothing is taken meanwhile, not even a read.
        assert!(guest.add(2, false));
        assert_eq!(completed(&core, &mut guest).await, []);
        // It fails again; the read may come in between.
        assert!(trouble.resume());
        let mut done = completed(&core, &mut guest).await;
        assert!(done.iter().all(|done| *done == (2, 0)), "{done:?}");
        assert!(trouble.is_paused());
        assert!(trouble.resume() && !trouble.resume());
        done.extend(completed(&core, &mut guest).await);
        done.sort_unstable();
        assert_eq!(done, [(1, 0), (2, 0)]);
        assert_eq!(told.borrow().iter().filter(|event| **event == paused[0]).count(), 2);
        handle.send(Command::Stop);
        assert!(!ended.await.broken);
    });
}

#[test]
fn a_withheld_disk_takes_nothing_and_its_rings_stop_where_they_started() {
    in_both_forms(async |core, form, _| {
        for recorded in [true, false] {
            let mut guest = guest(form);
            let device = Bdev::open(&core, "mem:1M").await.unwrap();
            let region = InflightRegion::create(1, 16, form).unwrap().0;
            let area = || recorded.then(|| region.queue(0)).flatten();
            let trouble = Arc::new(Trouble::default());
            trouble.withhold();
            let began = guest.base;
            let (mut handle, ended) = start_with(&core, "a", &guest, &device, &trouble, area());
            assert!(guest.add(1, false) && guest.add(2, false));
            assert!(!trouble.resume(), "it has not paused");
            assert_eq!(completed(&core, &mut guest).await, []);
            handle.send(Command::Stop);
            let RingEnd { base, broken, .. } = ended.await;
            assert_eq!((base, broken), (began, false));
            assert_eq!(completed(&core, &mut guest).await, []);

            let (mut handle, ended) = start_with(&core, "a", &guest, &device, &trouble, area());
            assert_eq!(completed(&core, &mut guest).await, []);
            trouble.admit();
            handle.wake();
            core.sleep_ns(1_000_000).await;
            assert_eq!(guest.collect().len(), 2, "it looks at once");
            handle.send(Command::Stop);
            assert!(!ended.await.broken);
        }
    });
}

/// A long request goes to the device in pieces, of which one fails.
#[test]
fn a_long_request_begins_again_as_a_whole() {
    in_both_forms(async |core, form, _| {
        let mut guest = guest(form);
        let uri = "error:kind=write&range=1M..2M&count=1|mem:16M";
        let device = Bdev::open(&core, uri).await.unwrap();
        let trouble = Arc::new(Trouble::new(OnError::Pause));
        let (mut handle, ended) = start_with(&core, "a", &guest, &device, &trouble, None);
        // All of it comes from the same memory.
        let parts = 8;
        let head = guest.next_head(false, 2 + parts).unwrap();
        guest.header(head, 1, 0);
        let [header, _, status] = Guest::parts(head, 1);
        let mut all = vec![header];
        all.extend((0..parts).map(|_| (GPA, 512 << 10, 0)));
        all.push(status);
        assert!(guest.offer(1, &all, false));
        assert_eq!(completed(&core, &mut guest).await, []);
        assert!(trouble.resume());
        assert_eq!(completed(&core, &mut guest).await, [(1, 0)]);
        handle.send(Command::Stop);
        assert!(!ended.await.broken);
    });
}

#[test]
fn a_paused_ring_that_stops_leaves_requests_in_the_region_or_answers_them() {
    in_both_forms(async |core, form, _| {
        for recorded in [true, false] {
            let (mut guest, device) = (guest(form), full(&core, 1).await);
            let region = InflightRegion::create(1, 16, form).unwrap().0;
            let area = || recorded.then(|| region.queue(0)).flatten();
            let trouble = Arc::new(Trouble::new(OnError::Pause));
            let (mut handle, ended) = start_with(&core, "a", &guest, &device, &trouble, area());
            assert!(guest.add(1, false));
            assert_eq!(completed(&core, &mut guest).await, []);
            handle.send(Command::Stop);
            let RingEnd { base, broken, .. } = ended.await;
            assert!(!broken);
            if !recorded {
                assert_eq!(completed(&core, &mut guest).await, [(1, 1)]);
                continue;
            }
            assert_eq!(completed(&core, &mut guest).await, []);
            // The next process begins with it.
            guest.base = base;
            let trouble = Arc::new(Trouble::new(OnError::Pause));
            // It may end before it has the image, or because it must not touch it.
            let (mut handle, ended) =
                start_waiting(&core, "a", &guest, &device, &trouble, area(), true);
            assert_eq!(completed(&core, &mut guest).await, []);
            handle.send(Command::Stop);
            assert_eq!(ended.await.base, base);
            assert!(trouble.lose() && !trouble.lose());
            let (mut handle, ended) = start_with(&core, "a", &guest, &device, &trouble, area());
            assert_eq!(completed(&core, &mut guest).await, []);
            handle.send(Command::Stop);
            assert_eq!(ended.await.base, base);
            assert_eq!(completed(&core, &mut guest).await, []);
            assert!(trouble.resume() && !trouble.is_lost());
            let (mut handle, ended) = start_with(&core, "a", &guest, &device, &trouble, area());
            // Each ring's device fails once.
            assert_eq!(completed(&core, &mut guest).await, []);
            assert!(trouble.resume());
            assert_eq!(completed(&core, &mut guest).await, [(1, 0)]);
            handle.send(Command::Stop);
            ended.await;
        }
    });
}

/// Its requests are dropped; what fails at the device later is neither kept nor submitted again.
#[test]
fn a_broken_ring_keeps_nothing() {
    in_both_forms(async |core, form, _| {
        if form == Form::Packed {
            // The same code; a split ring is broken more easily.
            return;
        }
        let mut guest = guest(form);
        let uri = "delay:write=100ms|error:kind=write&count=2|mem:1M";
        let device = Bdev::open(&core, uri).await.unwrap();
        let trouble = Arc::new(Trouble::new(OnError::Pause));
        let (mut handle, ended) = start_with(&core, "a", &guest, &device, &trouble, None);
        assert!(guest.add(1, false) && guest.add(3, false));
        core.sleep_ns(10_000_000).await;
        guest.break_ring();
        assert_eq!(completed(&core, &mut guest).await, []);
        assert!(!trouble.is_paused());
        handle.send(Command::Stop);
        assert!(ended.await.broken);
    });
}
