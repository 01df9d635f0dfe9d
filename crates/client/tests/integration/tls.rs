//! TLS with redis-server and certificates that openssl makes.

use std::path::{Path, PathBuf};
use std::process::Command;

use client::{ErrorKind, Options, Tls};

use crate::redis::Redis;
use crate::subject::{Kind, kind, quick};

/// A directory with an authority, a certificate for 127.0.0.1, and one of a client.
struct Certificates(PathBuf);

impl Drop for Certificates {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

impl Certificates {
    fn make(name: &str) -> Certificates {
        let dir = std::env::temp_dir().join(format!("millrace-tls-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let openssl = |arguments: &str| {
            let done =
                Command::new("openssl").args(arguments.split(' ')).current_dir(&dir).output();
            let done = done.expect("openssl is installed");
            assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        };
        let new = "req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";
        openssl(&format!("{new} -x509 -days 2 -subj /CN=authority -keyout ca.key -out ca.pem"));
        std::fs::write(dir.join("names"), "subjectAltName=IP:127.0.0.1,DNS:localhost").unwrap();
        for name in ["server", "client"] {
            openssl(&format!("{new} -subj /CN={name} -keyout {name}.key -out {name}.csr"));
            openssl(&format!(
                "x509 -req -days 2 -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial \
                 -extfile names -out {name}.pem"
            ));
        }
        Certificates(dir)
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }

    fn server(&self, clients: &str) -> (Redis, String) {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let redis = Redis::start(&[
            "--tls-port",
            &port.to_string(),
            "--tls-cert-file",
            &self.path("server.pem"),
            "--tls-key-file",
            &self.path("server.key"),
            "--tls-ca-cert-file",
            &self.path("ca.pem"),
            "--tls-auth-clients",
            clients,
        ]);
        (redis, format!("rediss://127.0.0.1:{port}"))
    }

    fn trust(&self) -> Tls {
        Tls::new().authority(self.0.join("ca.pem"))
    }
}

#[test]
fn everything_is_the_same_with_tls() {
    let certificates = Certificates::make("same");
    let (_redis, address) = certificates.server("no");
    let large = "x".repeat(3 << 20);
    for how in Kind::ALL {
        for cache in [0, 8 << 20] {
            let options = Options::new().tls(certificates.trust()).cache(cache);
            let client = how.connect(options, &address).unwrap();
            client.set("k", "v").unwrap();
            client.set("large", &large).unwrap();
            for _ in 0..2 {
                let found = client.multi_get(&["k", "large", "absent"]).unwrap();
                assert_eq!(found, [Some(b"v".to_vec()), Some(large.clone().into_bytes()), None]);
            }
            client.read_and_write("k", "w", || ()).unwrap();
            client.wait_coherent();
            assert_eq!(client.get("k").unwrap().unwrap(), b"w");
        }
    }
}

#[test]
fn a_certificate_that_is_not_trusted_is_refused() {
    use ErrorKind::{Protocol, Timeout, Unreachable};

    let certificates = Certificates::make("refused");
    let others = Certificates::make("others");
    let (redis, address) = certificates.server("no");
    let port = address.rsplit_once(':').unwrap().1;
    for how in Kind::ALL {
        let refused = |tls: Tls, address: &str| kind(how.connect(quick().tls(tls), address));
        assert_eq!(refused(Tls::new(), &address), ErrorKind::Denied);
        assert_eq!(refused(others.trust(), &address), ErrorKind::Denied);
        let other_name = certificates.trust().server_name("example.org");
        assert_eq!(refused(other_name, &address), ErrorKind::Denied);
        let named = certificates.trust().server_name("localhost");
        how.connect(quick().tls(named), &address).unwrap();
        how.connect(quick().tls(certificates.trust()), &format!("rediss://localhost:{port}"))
            .unwrap();
        // The two do not understand each other, and each may wait for more.
        let plain = kind(how.connect(quick(), &format!("127.0.0.1:{port}")));
        assert!(matches!(plain, Unreachable | Protocol | Timeout), "{plain:?}");
        let tls = refused(certificates.trust(), &redis.address());
        assert!(matches!(tls, Unreachable | Protocol | Timeout), "{tls:?}");
    }
}

#[test]
fn a_client_shows_its_certificate() {
    let certificates = Certificates::make("shows");
    let (_redis, address) = certificates.server("yes");
    let own = (certificates.path("client.pem"), certificates.path("client.key"));
    for how in Kind::ALL {
        let shown = certificates.trust().certificate(&own.0, &own.1);
        how.connect(quick().tls(shown), &address).unwrap().set("k", "v").unwrap();
        assert!(how.connect(quick().tls(certificates.trust()), &address).is_err());
    }
}

#[test]
fn files_that_cannot_be_used_are_named() {
    let certificates = Certificates::make("named");
    let missing = certificates.0.join("missing.pem");
    let empty = Path::new("/dev/null");
    let (pem, key) = (certificates.path("client.pem"), certificates.path("client.key"));
    for tls in [
        Tls::new().authority(&missing),
        Tls::new().authority(empty),
        certificates.trust().certificate(&missing, &key),
        certificates.trust().certificate(&pem, &missing),
        certificates.trust().certificate(&pem, &pem),
        certificates.trust().server_name("not a name"),
    ] {
        let error = Options::new().tls(tls).connect_blocking("127.0.0.1:1").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidOption, "{error}");
    }
}
