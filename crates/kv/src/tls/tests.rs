//! Two sides in memory, with certificates that openssl makes once.

use std::io::{IoSlice, Read, Write};
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, OnceLock};

use proptest::prelude::*;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore};

use crate::tls::config::{Tls, TlsAuthClients, TlsFault, TlsFiles};
use crate::tls::session::{Fault, HELD_BYTES_MAX, Session};

/// Certificates of an authority, a server and another server, in PEM.
struct Made {
    authority: Vec<u8>,
    certificate: Vec<u8>,
    key: Vec<u8>,
    other_key: Vec<u8>,
    rsa_key: Vec<u8>,
}

#[expect(clippy::disallowed_methods, reason = "a test")]
fn made() -> &'static Made {
    static MADE: OnceLock<Made> = OnceLock::new();
    MADE.get_or_init(|| {
        let dir: PathBuf =
            std::env::temp_dir().join(format!("millrace-kv-tls-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let openssl = |arguments: &str| {
            let mut openssl = Command::new("openssl");
            let done = openssl.args(arguments.split(' ')).current_dir(&dir).output();
            let done = done.expect("openssl is installed");
            assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        };
        let new = "req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";
        openssl(&format!("{new} -x509 -days 2 -subj /CN=authority -keyout ca.key -out ca.pem"));
        std::fs::write(dir.join("names"), "subjectAltName=DNS:localhost").unwrap();
        openssl(&format!("{new} -subj /CN=server -keyout server.key -out server.csr"));
        openssl(
            "x509 -req -days 2 -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -extfile \
             names -out server.pem",
        );
        openssl(&format!("{new} -subj /CN=other -keyout other.key -out other.csr"));
        openssl("genrsa -out rsa.key 2048");
        let read = |name: &str| std::fs::read(dir.join(name)).unwrap();
        let made = Made {
            authority: read("ca.pem"),
            certificate: read("server.pem"),
            key: read("server.key"),
            other_key: read("other.key"),
            rsa_key: read("rsa.key"),
        };
        std::fs::remove_dir_all(&dir).unwrap();
        made
    })
}

fn files() -> TlsFiles<'static> {
    TlsFiles {
        certificate: &made().certificate,
        key: &made().key,
        authority: None,
        revoked: None,
        auth_clients: TlsAuthClients::No,
    }
}

fn tls() -> &'static Tls {
    static TLS: OnceLock<Tls> = OnceLock::new();
    TLS.get_or_init(|| Tls::new(&files()).unwrap())
}

fn client(version: &'static rustls::SupportedProtocolVersion) -> ClientConnection {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(&made().authority).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[version])
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let mut client =
        ClientConnection::new(Arc::new(config), ServerName::try_from("localhost").unwrap())
            .unwrap();
    client.set_buffer_limit(None);
    client
}

const VERSIONS: [&rustls::SupportedProtocolVersion; 2] =
    [&rustls::version::TLS12, &rustls::version::TLS13];

fn to_send(client: &mut ClientConnection) -> Vec<u8> {
    let mut bytes = Vec::new();
    while client.wants_write() {
        client.write_tls(&mut bytes).unwrap();
    }
    bytes
}

fn hear(client: &mut ClientConnection, mut bytes: &[u8]) -> Vec<u8> {
    let mut plain = Vec::new();
    while !bytes.is_empty() {
        client.read_tls(&mut bytes).unwrap();
        let data = client.process_new_packets().unwrap().plaintext_bytes_to_read();
        let from = plain.len();
        plain.resize(from + data, 0);
        client.reader().read_exact(&mut plain[from..]).unwrap();
    }
    plain
}

/// Both sides after the handshake, in which the client's bytes came one by one.
fn connected(version: &'static rustls::SupportedProtocolVersion) -> (ClientConnection, Session) {
    let (mut client, mut session) = (client(version), Session::new(tls()).unwrap());
    let mut plain = Vec::new();
    for _ in 0..3 {
        for byte in to_send(&mut client) {
            session.open(&[byte], &mut plain).unwrap();
        }
        let mut answer = Vec::new();
        session.take_own(&mut answer);
        hear(&mut client, &answer);
    }
    assert!(plain.is_empty() && !client.is_handshaking() && !session.is_handshaking());
    (client, session)
}

/// Whether a byte belongs to the header of a record.
fn is_in_header(records: &[u8], at: usize) -> bool {
    let mut from = 0;
    while from + 5 <= at {
        from += 5 + usize::from(u16::from_be_bytes([records[from + 3], records[from + 4]]));
    }
    from <= at
}

#[test]
fn a_file_that_is_wrong_is_named() {
    let fault = |files: TlsFiles<'_>| Tls::new(&files).unwrap_err();
    let wrong = fault(TlsFiles { certificate: b"", ..files() });
    assert_eq!(wrong, TlsFault::Certificate("there is no certificate in it".to_owned()));
    assert!(matches!(fault(TlsFiles { key: &made().certificate, ..files() }), TlsFault::Key(_)));
    for key in [&made().other_key, &made().rsa_key] {
        let wrong = fault(TlsFiles { key, ..files() });
        assert_eq!(wrong, TlsFault::Key("it is not the key of the certificate".to_owned()));
    }
    let optional = TlsAuthClients::Optional;
    let wrong = fault(TlsFiles { authority: Some(b"x"), auth_clients: optional, ..files() });
    assert!(matches!(wrong, TlsFault::Authority(_)));
    let authority = Some(&made().authority[..]);
    let asking = TlsFiles { authority, auth_clients: optional, ..files() };
    let wrong = fault(TlsFiles { revoked: Some(&made().certificate), ..asking });
    assert_eq!(wrong, TlsFault::Revoked("there is no revocation list in it".to_owned()));
    let broken = b"-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----\n";
    assert!(matches!(fault(TlsFiles { revoked: Some(broken), ..asking }), TlsFault::Revoked(_)));
    let broken = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    assert!(matches!(fault(TlsFiles { certificate: broken, ..files() }), TlsFault::Certificate(_)));
}

#[test]
fn the_end_of_a_certificate_is_known() {
    let now_s = std::time::UNIX_EPOCH.elapsed().unwrap().as_secs() as i64;
    let left_s = tls().not_after_unix_s().unwrap() - now_s;
    assert!((86_400..=2 * 86_400).contains(&left_s), "{left_s}");
}

#[test]
fn text_without_tls_is_recognized() {
    let mut session = Session::new(tls()).unwrap();
    let fault = session.open(b"PING\r\n", &mut Vec::new());
    assert_eq!(fault, Err(Fault::Plain));
    let mut alert = Vec::new();
    session.take_own(&mut alert);
    assert_eq!(alert.first(), Some(&21), "an alert");
}

#[test]
fn both_sides_hear_that_the_other_ends() {
    for version in VERSIONS {
        let (mut client, mut session) = connected(version);
        client.writer().write_all(b"last").unwrap();
        client.send_close_notify();
        let mut plain = Vec::new();
        session.open(&to_send(&mut client), &mut plain).unwrap();
        assert!(plain == b"last" && session.has_ended());
        session.open(b"what comes afterwards is not read", &mut plain).unwrap();
        assert_eq!(plain, b"last");
        let mut sealed = Vec::new();
        session.seal(&[IoSlice::new(b"answer")], &mut sealed).unwrap();
        session.close();
        session.take_own(&mut sealed);
        assert_eq!(hear(&mut client, &sealed[..]), b"answer");
    }
}

#[test]
fn keys_may_change_and_a_flood_of_changes_is_refused() {
    let (mut client, mut session) = connected(&rustls::version::TLS13);
    let mut plain = Vec::new();
    for _ in 0..100 {
        for _ in 0..10 {
            client.refresh_traffic_keys().unwrap();
        }
        client.writer().write_all(b"x").unwrap();
        session.open(&to_send(&mut client), &mut plain).unwrap();
        let mut sealed = Vec::new();
        session.seal(&[IoSlice::new(b"y")], &mut sealed).unwrap();
        assert!(sealed.len() < 200, "changes are answered once");
        assert_eq!(hear(&mut client, &sealed), b"y");
    }
    assert_eq!(plain.len(), 100);
    let refused = (0..10_000).any(|_| {
        client.refresh_traffic_keys().unwrap();
        session.open(&to_send(&mut client), &mut plain).is_err()
    });
    assert!(refused);
}

#[test]
fn a_handshake_that_does_not_end_is_refused() {
    // The beginning of a ClientHello of 60,000 bytes, in records of 1,000.
    let mut session = Session::new(tls()).unwrap();
    let message = [&[1, 0, 0xea, 0x60][..], &[0; 60_000]].concat();
    let mut sent = 0;
    let refused = message.chunks(1000).any(|piece| {
        let length = (piece.len() as u16).to_be_bytes();
        let record = [&[22, 3, 1][..], &length, piece].concat();
        sent += record.len();
        session.open(&record, &mut Vec::new()).is_err()
    });
    assert!(refused && sent <= HELD_BYTES_MAX + 2000, "{sent}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// However the network cuts the bytes, the data are the same, and what is held is bounded.
    #[test]
    fn cuts_do_not_matter(
        sizes in prop::collection::vec(0usize..40_000, 1..6),
        cuts in prop::collection::vec(1usize..9_000, 1..50),
        is_newer: bool,
    ) {
        let (mut client, mut session) = connected(VERSIONS[usize::from(is_newer)]);
        let mut data = Vec::new();
        for (nth, size) in sizes.iter().enumerate() {
            let message: Vec<u8> = (0..*size).map(|at| (at * 7 + nth) as u8).collect();
            client.writer().write_all(&message).unwrap();
            data.extend_from_slice(&message);
        }
        let bytes = to_send(&mut client);
        let (mut plain, mut at) = (Vec::new(), 0);
        for cut in cuts.iter().cycle() {
            let end = bytes.len().min(at + cut);
            session.open(&bytes[at..end], &mut plain).unwrap();
            prop_assert!(session.held_bytes() <= HELD_BYTES_MAX);
            at = end;
            if at == bytes.len() {
                break;
            }
        }
        prop_assert!(plain == data);
        // And back, as pieces.
        let mut pieces = Vec::new();
        let mut rest = &data[..];
        for cut in cuts.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            let (piece, others) = rest.split_at(rest.len().min(*cut));
            pieces.push(IoSlice::new(piece));
            rest = others;
        }
        let mut sealed = Vec::new();
        session.seal(&pieces, &mut sealed).unwrap();
        prop_assert!(hear(&mut client, &sealed) == data);
    }

    /// Changed bytes are an error; they never become data, and never a panic.
    #[test]
    fn damage_is_an_error(
        at in any::<prop::sample::Index>(),
        change in 1u8..,
        in_handshake: bool,
        is_newer: bool,
    ) {
        let version = VERSIONS[usize::from(is_newer)];
        let data = vec![7; 20_000];
        let (mut client, mut session) = match in_handshake {
            true => (client(version), Session::new(tls()).unwrap()),
            false => connected(version),
        };
        client.writer().write_all(&data).unwrap();
        let mut bytes = to_send(&mut client);
        let (at, whole) = (at.index(bytes.len()), bytes.clone());
        bytes[at] ^= change;
        let mut plain = Vec::new();
        let opened = session.open(&bytes, &mut plain);
        prop_assert!(data.starts_with(&plain));
        // The version in a record's header has no meaning.
        if !in_handshake && !is_in_header(&whole, at) {
            prop_assert!(opened.is_err() && plain.len() < data.len());
        }
        session.take_own(&mut Vec::new());
    }

    /// No bytes make it panic.
    #[test]
    fn garbage_is_an_error_or_incomplete(bytes in prop::collection::vec(any::<u8>(), 0..3000), is_record: bool) {
        let mut session = Session::new(tls()).unwrap();
        let bytes = match is_record {
            true => [&[22, 3, 1][..], &(bytes.len() as u16).to_be_bytes(), &bytes].concat(),
            false => bytes,
        };
        let mut plain = Vec::new();
        let _ = session.open(&bytes, &mut plain);
        prop_assert!(plain.is_empty());
    }
}
