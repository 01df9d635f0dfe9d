//! Several processes in one simulated world: their resources, handing these over, and the state
//! after a kill.

use std::cell::{Cell, RefCell};
use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::rc::Rc;

use reactor::sim::{SimConfig, World};
use reactor::{Core, EventFd, Image, ImageOpening, Mode, UnixSocket};

const IMAGE: &str = "/disks/a.img";
const HOW: ImageOpening = ImageOpening { read_only: false, mode: Mode::Buffered, lock: true };

fn world(seed: u64) -> World {
    let world = World::new(seed, 1, SimConfig::default());
    world.add_file(IMAGE, vec![7; 4096]);
    world
}

fn pair(core: &Core) -> (UnixSocket, OwnedFd) {
    let (here, there) = UnixStream::pair().unwrap();
    (UnixSocket::from_fd(core, here.into()).unwrap(), there.into())
}

async fn opens(core: &Core) -> Result<Image, ErrorKind> {
    core.open_image(Path::new(IMAGE), HOW).await.map_err(|error| error.kind())
}

#[test]
fn a_descriptor_hands_over_an_image_and_its_lock() {
    for seed in 0..20 {
        let world = world(seed);
        let run = world.run(|core| {
            let world = world.clone();
            async move {
                let (here, there) = pair(&core);
                let old = world.start_process(move |core| async move {
                    let image = opens(&core).await.unwrap();
                    let socket = UnixSocket::from_fd(&core, there).unwrap();
                    let descriptor = image.file.descriptor().unwrap();
                    socket.send(b"image", &[descriptor]).await.unwrap();
                    std::future::pending::<()>().await;
                });
                let (mut bytes, mut fds) = (Vec::new(), Vec::new());
                while bytes.len() < 5 {
                    fds.extend(here.recv(&mut bytes, 5).await.unwrap().1);
                }
                assert_eq!(opens(&core).await.unwrap_err(), ErrorKind::WouldBlock);
                old.kill_after(0);
                while !old.has_ended() {
                    core.sleep_ns(1000).await;
                }
                assert!(old.was_killed());
                // The message still holds it.
                assert_eq!((world.open_files(), world.locks_held(IMAGE)), (0, 1));
                assert_eq!(opens(&core).await.unwrap_err(), ErrorKind::WouldBlock);
                let image = core.take_image(Path::new(IMAGE), HOW, fds.pop().unwrap(), None);
                let image = image.await.unwrap();
                let file = core.attach(&image.file);
                let (n, buf) = file.read_at(0, core.alloc(4096).unwrap()).await;
                assert_eq!((n.unwrap(), &buf[..]), (4096, &[7; 4096][..]));
                drop((file, image));
                opens(&core).await.unwrap();
                // Another descriptor is refused.
                let other = UnixStream::pair().unwrap().0;
                let other = core.take_image(Path::new(IMAGE), HOW, other.into(), None).await;
                assert_eq!(other.unwrap_err().kind(), ErrorKind::InvalidInput);
            }
        });
        run.unwrap();
    }
}

#[test]
fn messages_between_processes_come_in_pieces_in_order_and_end_with_the_sender() {
    let (mut cut, mut whole) = (0, 0);
    for seed in 0..50 {
        let world = world(seed);
        let run = world.run(|core| {
            let world = world.clone();
            async move {
                let (here, there) = pair(&core);
                let other = world.start_process(move |core| async move {
                    let socket = UnixSocket::from_fd(&core, there).unwrap();
                    let event = EventFd::new().unwrap();
                    let bytes: Vec<u8> = (0..=255).collect();
                    socket.send(&bytes, &[event.as_fd()]).await.unwrap();
                    socket.send(&bytes[..64], &[]).await.unwrap();
                });
                let turns = world.rng().below(12);
                other.kill_after(turns);
                let (mut bytes, mut fds, mut pieces) = (Vec::new(), Vec::new(), 0);
                while let Ok((1.., more)) = here.recv(&mut bytes, 1000).await {
                    assert!(fds.is_empty() || more.is_empty());
                    assert!(pieces > 0 || more.len() == 1, "they come with the first byte");
                    fds.extend(more);
                    pieces += 1;
                }
                assert!(bytes.iter().enumerate().all(|(at, &byte)| usize::from(byte) == at % 256));
                assert!(bytes.len() <= 256 || bytes.len() == 320, "64 bytes are never cut");
                while !other.has_ended() {
                    core.sleep_ns(1000).await;
                }
                bytes.len()
            }
        });
        match run.unwrap()[0] {
            320 => whole += 1,
            1.. => cut += 1,
            _ => {}
        }
    }
    assert!(cut > 3 && whole > 3, "{cut} cut, {whole} whole");
}

#[test]
fn a_stopped_process_does_nothing_and_an_event_wakes_one_that_waits() {
    let world = world(3);
    let seen = Rc::new(Cell::new(0));
    let run = world.run(|core| {
        let (world, seen) = (world.clone(), seen.clone());
        async move {
            let event = EventFd::new().unwrap();
            let its = EventFd::from_fd(event.as_fd().try_clone_to_owned().unwrap()).unwrap();
            let count = seen.clone();
            let other = world.start_process(move |core| async move {
                let watch = its.watch(&core).unwrap();
                loop {
                    watch.raised().await.unwrap();
                    watch.clear();
                    count.set(count.get() + 1);
                }
            });
            let awhile = || core.sleep_ns(1_000_000);
            awhile().await;
            assert_eq!(seen.get(), 0);
            event.signal();
            awhile().await;
            assert_eq!(seen.get(), 1);
            other.stop();
            event.signal();
            awhile().await;
            assert_eq!(seen.get(), 1);
            other.resume();
            awhile().await;
            assert_eq!(seen.get(), 2);
        }
    });
    run.unwrap();
}

#[test]
fn the_run_ends_with_its_first_process_and_takes_the_others_along() {
    struct Says(Rc<RefCell<Vec<&'static str>>>);
    impl Drop for Says {
        fn drop(&mut self) {
            self.0.borrow_mut().push("dropped");
        }
    }
    let world = world(5);
    let said = Rc::new(RefCell::new(Vec::new()));
    let run = world.run(|core| {
        let (world, says) = (world.clone(), Says(said.clone()));
        async move {
            world.start_process(move |core| async move {
                let _says = says;
                let _image = opens(&core).await;
                std::future::pending::<()>().await;
            });
            core.sleep_ns(10_000_000).await;
            assert_eq!(world.locks_held(IMAGE), 1);
        }
    });
    run.unwrap();
    assert_eq!((&said.borrow()[..], world.locks_held(IMAGE)), (&["dropped"][..], 0));
}
