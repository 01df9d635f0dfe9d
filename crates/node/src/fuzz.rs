//! Bodies of the fuzz targets, which tests can call as well. Each panics if an invariant of this
//! crate is broken.

use std::os::unix::net::UnixStream;
use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::disks::protocol::{Hello, Named, Opened, ToLauncher};
use crate::disks::spec::{DiskSpec, check_all};
use crate::ipc::channel;
use crate::ipc::frames::{Arriving, Limits, encode};
use crate::launcher::to_node::ToNode;
use crate::upgrade;

/// A fuzz target: name, function, and seeds.
pub type FuzzTarget = (&'static str, fn(&[u8]), fn() -> Vec<Vec<u8>>);

/// Every target of this module.
pub const TARGETS: &[FuzzTarget] =
    &[("node_frames", frames, frame_seeds), ("disk_spec", disk_spec, disk_spec_seeds)];

/// Low, so that inputs reach them.
const LIMITS: Limits = Limits { body_bytes: 4096, descriptors: 3 };

/// Messages between processes: the channel between launcher and node, and the handover between two
/// nodes. The first byte gives the size of the pieces in which the rest arrives; the second, which
/// of the first pieces bring a descriptor.
pub fn frames(data: &[u8]) {
    let Some((&[piece, mut descriptors], mut rest)) = data.split_first_chunk() else { return };
    loop {
        let mut arriving = Arriving::new(LIMITS);
        let before = rest;
        loop {
            let Ok(wanted) = arriving.wanted() else { return };
            if wanted == 0 {
                break;
            }
            let (bytes, behind) = rest.split_at(wanted.min(usize::from(piece) + 1).min(rest.len()));
            if bytes.is_empty() {
                return;
            }
            arriving.part().extend_from_slice(bytes);
            rest = behind;
            if descriptors & 1 == 1 {
                let (one, _) = UnixStream::pair().expect("a pair of sockets");
                arriving.descriptors.push(one.into());
            }
            descriptors >>= 1;
        }
        let Ok(frame) = arriving.finish() else { return };
        assert!(frame.body.len() <= LIMITS.body_bytes);
        assert!(frame.descriptors.len() <= LIMITS.descriptors);
        let bytes = encode(frame.kind, &frame.body, frame.descriptors.len());
        assert_eq!(bytes, before[..before.len() - rest.len()], "this message and none of the next");
        upgrade::fuzz(frame.kind, &frame.body);
        let question = |body: &[u8]| {
            decodes_again::<ToLauncher>(body);
            decodes_again::<ToNode>(body);
        };
        let answer = |body: &[u8]| {
            decodes_again::<Hello>(body);
            decodes_again::<Vec<Named>>(body);
            decodes_again::<Opened>(body);
            decodes_again::<u64>(body);
        };
        channel::fuzz(frame, question, answer);
    }
}

/// A decoded value is encoded to the same meaning.
fn decodes_again<T: Serialize + DeserializeOwned>(text: &[u8]) {
    let Ok(meant) = serde_json::from_slice::<T>(text) else { return };
    let written = serde_json::to_vec(&meant).expect("it is JSON");
    let again = serde_json::from_slice::<T>(&written).expect("of its own");
    assert_eq!(serde_json::to_vec(&again).expect("it is JSON"), written);
}

fn frame_seeds() -> Vec<Vec<u8>> {
    let questions = [
        r#"{"ask":"begin","version":1}"#,
        r#"{"ask":"disks"}"#,
        r#"{"ask":"open","name":"a"}"#,
        r#"{"ask":"write-cache","name":"a","told":true}"#,
        r#"{"ask":"run","request":{"version":1,"command":"disk-list"}}"#,
        r#"{"ask":"hand-over"}"#,
    ];
    let answers = [
        r#"{"admin":"/run/a.sock","remembers":true,"holes":{"a":true}}"#,
        r#"[{"spec":{"name":"a","uri":"null:1G","socket":"/a.sock","queues":2},"attached":true,"write_cache":null}]"#,
        r#"{"holes":true,"write_cache":false}"#,
        "12345",
    ];
    let refusals = [r#"{"error":"there is no disk b","hint":"there are: a"}"#];
    let said = [(1, &questions[..]), (2, &answers), (3, &refusals)];
    let body = |text: &str| [&7_u64.to_le_bytes(), text.as_bytes()].concat();
    let all = said.iter().flat_map(|(kind, texts)| texts.iter().map(|text| (*kind, body(text))));
    let all: Vec<_> = all.chain(upgrade::fuzz_seeds()).collect();
    let one = |(kind, bytes): &(u32, Vec<u8>)| [&[255, 1][..], &encode(*kind, bytes, 1)].concat();
    let mut seeds: Vec<_> = all.iter().map(one).collect();
    // All together, in small pieces.
    seeds.push(vec![6, 0]);
    let together = seeds.len() - 1;
    for (kind, bytes) in &all {
        seeds[together].extend_from_slice(&encode(*kind, bytes, 0));
    }
    seeds
}

/// A disk, as on the command line or in a table of the configuration file.
pub fn disk_spec(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    match text.parse::<DiskSpec>() {
        Ok(spec) => {
            assert!(spec.check().is_ok());
            assert_eq!(written(&spec).parse(), Ok(spec.clone()));
            check_disk_spec(&spec);
        }
        Err(why) => assert!(!why.is_empty()),
    }
    if let Ok(spec) = toml::from_str::<DiskSpec>(text) {
        check_disk_spec(&spec);
    }
}

/// A disk is the same after it has been stored, and absolute paths stay as they are.
fn check_disk_spec(spec: &DiskSpec) {
    let kept = serde_json::to_string(spec).expect("a disk is JSON");
    assert_eq!(serde_json::from_str::<DiskSpec>(&kept).expect("of its own"), *spec);
    let table = toml::to_string(spec).expect("a disk is a table");
    assert_eq!(toml::from_str::<DiskSpec>(&table).expect("of its own"), *spec);
    let put = spec.clone().under(Path::new("/a b"));
    assert!(put.socket.is_absolute());
    assert_eq!(put.clone().under(Path::new("/c")), put);
    assert!(check_all(std::slice::from_ref(spec)).is_ok() == spec.check().is_ok());
    assert!(check_all(&[spec.clone(), put]).is_err(), "two of one name");
}

/// A disk as written on the command line.
fn written(spec: &DiskSpec) -> String {
    let quoted = |text: &str| text.bytes().map(|byte| format!("%{byte:02x}")).collect::<String>();
    let DiskSpec { name, uri, socket, queues, serial, on_error } = spec;
    let socket = socket.to_str().expect("it was text");
    let serial = serial.as_deref().map(|serial| format!("serial={}", quoted(serial)));
    let (name, socket, serial) = (quoted(name), quoted(socket), serial.unwrap_or_default());
    let on_error = serde_json::to_value(on_error).expect("a word");
    let on_error = on_error.as_str().expect("a word").to_owned();
    format!("name={name} uri={uri} socket={socket} queues={queues} {serial} on_error={on_error}")
}

fn disk_spec_seeds() -> Vec<Vec<u8>> {
    let seeds = [
        "name=vm1 uri=file:vm%201.img?engine=uring&write=cached socket=/run/a%20b.sock queues=2",
        "name=a uri=null:1G socket=s serial=x%25y on_error=pause",
        "name=a uri=dirty:granule=4K|delay:all=1ms|file:vm.img?engine=aio socket=a.sock",
        "name = 'a'\nuri = 'mem:1G'\nsocket = '/a.sock'\nqueues = 4\nserial = 'x y'\n",
    ];
    seeds.iter().map(|seed| seed.as_bytes().to_vec()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tries each seed, each with one byte changed, and each cut short.
    #[test]
    fn seeds_and_their_neighbours_break_no_invariant() {
        for (_, run, seeds) in TARGETS {
            for seed in seeds() {
                run(&seed);
                for at in 0..seed.len() {
                    run(&seed[..at]);
                    let mut changed = seed.clone();
                    for byte in [0, b'%', b'"', seed[at] ^ 1, 0xff] {
                        changed[at] = byte;
                        run(&changed);
                    }
                }
            }
        }
    }

    #[test]
    fn seeds_are_understood() {
        let frames = frame_seeds();
        assert!(frames.len() > 15);
        for text in disk_spec_seeds() {
            let text = String::from_utf8(text).unwrap();
            assert!(text.parse::<DiskSpec>().is_ok() || toml::from_str::<DiskSpec>(&text).is_ok());
        }
    }
}
