//! What the connections of a door share: certificate, key, and whom to trust.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{NoServerSessionStorage, VerifierBuilderError, WebPkiClientVerifier};
use rustls::{RootCertStore, ServerConfig};

use crate::tls::validity::not_after_unix_s;

/// Whether clients must show a certificate (`tls-auth-clients`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TlsAuthClients {
    /// Yes, one of the authority.
    #[default]
    Yes,
    /// They are not asked for one.
    No,
    /// If they show one, it must be one of the authority.
    Optional,
}

impl FromStr for TlsAuthClients {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "yes" => Ok(Self::Yes),
            "no" => Ok(Self::No),
            "optional" => Ok(Self::Optional),
            _ => Err(format!("tls-auth-clients must be yes, no or optional, not '{text}'")),
        }
    }
}

impl fmt::Display for TlsAuthClients {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Yes => "yes",
            Self::No => "no",
            Self::Optional => "optional",
        })
    }
}

/// The contents of the files, in PEM.
#[derive(Clone, Copy)]
pub struct TlsFiles<'a> {
    /// The certificate, followed by those between it and its authority.
    pub certificate: &'a [u8],
    /// The certificate's key.
    pub key: &'a [u8],
    /// The authorities of clients' certificates.
    pub authority: Option<&'a [u8]>,
    /// The lists of certificates that these authorities have revoked.
    pub revoked: Option<&'a [u8]>,
    /// Whether clients must show a certificate; asks for none where there is no authority.
    pub auth_clients: TlsAuthClients,
}

/// A fault in one of the [`TlsFiles`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TlsFault {
    /// In the certificate's file.
    Certificate(String),
    /// In the key's file.
    Key(String),
    /// In the authority's file.
    Authority(String),
    /// In the file of revocation lists.
    Revoked(String),
}

/// What the connections of a door share. Clones are the same.
#[derive(Clone)]
pub struct Tls {
    pub(super) config: Arc<ServerConfig>,
    not_after_unix_s: Option<i64>,
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls").field("not_after_unix_s", &self.not_after_unix_s).finish()
    }
}

impl Tls {
    /// Reads certificates and keys.
    ///
    /// # Errors
    /// When one of them is missing or unusable, or when key and certificate do not belong together.
    pub fn new(files: &TlsFiles<'_>) -> Result<Tls, TlsFault> {
        let chain = certificates(files.certificate).map_err(TlsFault::Certificate)?;
        let not_after_unix_s = chain.first().and_then(|first| not_after_unix_s(first));
        let key = PrivateKeyDer::from_pem_slice(files.key).map_err(|error| {
            TlsFault::Key(match error {
                rustls::pki_types::pem::Error::NoItemsFound => {
                    "there is no private key in it, or only an encrypted one".to_owned()
                }
                error => error.to_string(),
            })
        })?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let key = provider
            .key_provider
            .load_private_key(key)
            .map_err(|error| TlsFault::Key(error.to_string()))?;
        let certified = rustls::sign::CertifiedKey::new(chain, key);
        match certified.keys_match() {
            // Keys that cannot be compared are found out in the first handshake.
            Ok(()) | Err(rustls::Error::InconsistentKeys(rustls::InconsistentKeys::Unknown)) => {}
            Err(rustls::Error::InconsistentKeys(_)) => {
                return Err(TlsFault::Key("it is not the key of the certificate".to_owned()));
            }
            Err(error) => return Err(TlsFault::Certificate(error.to_string())),
        }
        let verifier = match files.authority {
            Some(authority) if files.auth_clients != TlsAuthClients::No => {
                let optional = files.auth_clients == TlsAuthClients::Optional;
                let revoked = files.revoked.map_or(Ok(Vec::new()), revocation_lists);
                let revoked = revoked.map_err(TlsFault::Revoked)?;
                verifier(authority, revoked, &provider, optional)?
            }
            _ => WebPkiClientVerifier::no_client_auth(),
        };
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| TlsFault::Certificate(error.to_string()))?
            .with_client_cert_verifier(verifier)
            .with_cert_resolver(Arc::new(rustls::sign::SingleCertAndKey::from(certified)));
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(Tls { config: Arc::new(config), not_after_unix_s })
    }

    /// The second (Unix time) after which the certificate is no longer valid, if it is known.
    pub fn not_after_unix_s(&self) -> Option<i64> {
        self.not_after_unix_s
    }
}

/// What a PEM file has of one kind, which `what` names; at least one.
fn items<T: PemObject>(pem: &[u8], what: &str) -> Result<Vec<T>, String> {
    let found = T::pem_slice_iter(pem).collect::<Result<Vec<_>, _>>();
    match found {
        Ok(found) if found.is_empty() => Err(format!("there is no {what} in it")),
        Ok(found) => Ok(found),
        Err(error) => Err(error.to_string()),
    }
}

fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    items(pem, "certificate")
}

fn revocation_lists(pem: &[u8]) -> Result<Vec<CertificateRevocationListDer<'static>>, String> {
    items(pem, "revocation list")
}

/// With revocation lists, a certificate is valid only if the list of each authority in its chain
/// is among them, and does not name it.
fn verifier(
    authority: &[u8],
    revoked: Vec<CertificateRevocationListDer<'static>>,
    provider: &Arc<rustls::crypto::CryptoProvider>,
    optional: bool,
) -> Result<Arc<dyn ClientCertVerifier>, TlsFault> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(authority).map_err(TlsFault::Authority)? {
        roots.add(certificate).map_err(|error| TlsFault::Authority(error.to_string()))?;
    }
    let builder = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone());
    let builder = builder.with_crls(revoked);
    let builder = if optional { builder.allow_unauthenticated() } else { builder };
    builder.build().map_err(|error| match error {
        error @ VerifierBuilderError::InvalidCrl(_) => TlsFault::Revoked(error.to_string()),
        error => TlsFault::Authority(error.to_string()),
    })
}
