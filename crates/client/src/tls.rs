//! What TLS needs to know.

use std::path::PathBuf;
#[cfg(feature = "tls")]
use std::sync::Arc;

use crate::error::{Error, ErrorKind, Result};
use crate::options::Address;

/// How to speak TLS with the server; a builder for [`Options::tls`](crate::Options::tls).
///
/// By default the server's certificate must be signed by an authority that the system trusts, for
/// the host of the address.
///
/// ```
/// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/integration/example.rs"));
/// # fn main() {
/// use millrace::client::Tls;
///
/// let tls = Tls::new().authority("ca.pem").certificate("client.pem", "client.key");
/// # }
/// ```
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct Tls {
    authority: Option<PathBuf>,
    certificate: Option<(PathBuf, PathBuf)>,
    server_name: Option<String>,
}

impl Tls {
    /// The defaults.
    pub fn new() -> Tls {
        Tls::default()
    }

    /// Trusts only the certificates of this PEM file.
    pub fn authority(mut self, file: impl Into<PathBuf>) -> Tls {
        self.authority = Some(file.into());
        self
    }

    /// Shows the server the certificates of this PEM file, with the key of the other one.
    pub fn certificate(mut self, file: impl Into<PathBuf>, key: impl Into<PathBuf>) -> Tls {
        self.certificate = Some((file.into(), key.into()));
        self
    }

    /// The name that the server's certificate must have, if it is not the host of the address.
    pub fn server_name(mut self, name: impl Into<String>) -> Tls {
        self.server_name = Some(name.into());
        self
    }
}

/// What a connection needs: everything is read and checked.
#[cfg(feature = "tls")]
pub(crate) type Ready = (Arc<rustls::ClientConfig>, rustls::pki_types::ServerName<'static>);
#[cfg(not(feature = "tls"))]
pub(crate) type Ready = std::convert::Infallible;

impl Tls {
    #[cfg(not(feature = "tls"))]
    pub(crate) fn ready(&self, _: &Address) -> Result<Ready> {
        let text = "TLS is not built in: it needs the feature \"tls\" of the crate";
        Err(Error::new(ErrorKind::Unsupported, text))
    }

    /// Reads the files.
    #[cfg(feature = "tls")]
    pub(crate) fn ready(&self, address: &Address) -> Result<Ready> {
        use rustls::pki_types::ServerName;

        let wrong = |what: String| Error::new(ErrorKind::InvalidOption, format!("TLS: {what}"));
        let mut roots = rustls::RootCertStore::empty();
        match &self.authority {
            Some(file) => {
                for certificate in certificates(file)? {
                    roots
                        .add(certificate)
                        .map_err(|error| wrong(format!("{}: {error}", file.display())))?;
                }
            }
            None => {
                let found = rustls_native_certs::load_native_certs();
                roots.add_parsable_certificates(found.certs);
            }
        }
        if roots.is_empty() {
            return Err(wrong("there is no authority to trust".to_owned()));
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| wrong(error.to_string()))?
            .with_root_certificates(roots);
        let config = match &self.certificate {
            None => builder.with_no_client_auth(),
            Some((file, key)) => builder
                .with_client_auth_cert(certificates(file)?, private_key(key)?)
                .map_err(|error| wrong(format!("{}: {error}", file.display())))?,
        };
        let name = self.server_name.as_ref().unwrap_or(&address.host).clone();
        let name = ServerName::try_from(name).map_err(|error| wrong(error.to_string()))?;
        Ok((Arc::new(config), name))
    }
}

#[cfg(feature = "tls")]
fn certificates(file: &std::path::Path) -> Result<Vec<rustls::pki_types::CertificateDer<'static>>> {
    use rustls::pki_types::CertificateDer;
    use rustls::pki_types::pem::PemObject;

    let read = CertificateDer::pem_file_iter(file).and_then(|found| found.collect());
    let found: Vec<_> = read.map_err(|error| unreadable(file, &error.to_string()))?;
    match found.is_empty() {
        true => Err(unreadable(file, "it has no certificate")),
        false => Ok(found),
    }
}

#[cfg(feature = "tls")]
fn private_key(file: &std::path::Path) -> Result<rustls::pki_types::PrivateKeyDer<'static>> {
    use rustls::pki_types::PrivateKeyDer;
    use rustls::pki_types::pem::PemObject;

    PrivateKeyDer::from_pem_file(file).map_err(|error| unreadable(file, &error.to_string()))
}

#[cfg(feature = "tls")]
#[cold]
fn unreadable(file: &std::path::Path, what: &str) -> Error {
    let text = format!("TLS: cannot read {}: {what}", file.display());
    Error::new(ErrorKind::InvalidOption, text)
}
