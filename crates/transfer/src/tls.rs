//! Certificates: each node shows its own, and checks that of the other.

use std::fmt;
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{
    ClientConfig, ClientConnection, DigitallySignedStruct, DistinguishedName, RootCertStore,
    ServerConfig, ServerConnection, SignatureScheme,
};

/// The contents of the files, in PEM.
#[derive(Clone, Copy)]
pub struct IdentityFiles<'a> {
    /// The node's certificate, followed by those between it and its authority.
    pub certificate: &'a [u8],
    /// The certificate's key.
    pub key: &'a [u8],
    /// Whom to trust: authorities, or the certificates of the other nodes themselves.
    pub trusted: &'a [u8],
}

/// A fault in one of the [`IdentityFiles`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IdentityFault {
    /// In the certificate's file.
    Certificate(String),
    /// In the key's file.
    Key(String),
    /// In the file of those to trust.
    Trusted(String),
}

/// Who a node is for others, and whom it trusts. Clones are the same.
#[derive(Clone)]
pub struct Identity {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Identity")
    }
}

impl Identity {
    /// Reads certificates and keys.
    ///
    /// # Errors
    /// When one of them is missing or unusable, or when key and certificate do not belong together.
    pub fn new(files: &IdentityFiles<'_>) -> Result<Identity, IdentityFault> {
        let chain = certificates(files.certificate).map_err(IdentityFault::Certificate)?;
        let key = PrivateKeyDer::from_pem_slice(files.key);
        let key = key.map_err(|error| IdentityFault::Key(error.to_string()))?;
        let known = certificates(files.trusted).map_err(IdentityFault::Trusted)?;
        let mut roots = RootCertStore::empty();
        for trusted in &known {
            let added = roots.add(trusted.clone());
            added.map_err(|error| IdentityFault::Trusted(error.to_string()))?;
        }
        let roots = Arc::new(roots);
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let unusable = |error: rustls::Error| IdentityFault::Certificate(error.to_string());
        let untrusted =
            |error: rustls::server::VerifierBuilderError| IdentityFault::Trusted(error.to_string());
        let of_servers =
            WebPkiServerVerifier::builder_with_provider(roots.clone(), provider.clone()).build();
        let of_servers = of_servers.map_err(untrusted)?;
        let of_servers = Arc::new(KnownOr { known: known.clone(), others: of_servers });
        let client = ClientConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(unusable)?
            .dangerous()
            .with_custom_certificate_verifier(of_servers)
            .with_client_auth_cert(chain.clone(), key.clone_key())
            .map_err(unusable)?;
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider.clone()).build();
        let others = verifier.map_err(untrusted)?;
        let verifier = Arc::new(KnownOr { known, others });
        let mut server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(unusable)?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain, key)
            .map_err(unusable)?;
        server.session_storage = Arc::new(NoServerSessionStorage {});
        server.send_tls13_tickets = 0;
        Ok(Identity { client: Arc::new(client), server: Arc::new(server) })
    }

    /// The source's end of a connection; `host` is the name in the other node's certificate.
    ///
    /// # Errors
    /// When `host` is neither a name nor an address.
    pub(crate) fn client(&self, host: &str) -> Result<rustls::Connection, String> {
        let name = ServerName::try_from(host.to_owned());
        let name = name.map_err(|_| format!("'{host}' is not a name of a machine"))?;
        let connection = ClientConnection::new(self.client.clone(), name);
        connection.map(rustls::Connection::Client).map_err(|error| error.to_string())
    }

    /// The destination's end.
    ///
    /// # Errors
    /// As rustls gives them.
    pub(crate) fn server(&self) -> Result<rustls::Connection, String> {
        let connection = ServerConnection::new(self.server.clone());
        connection.map(rustls::Connection::Server).map_err(|error| error.to_string())
    }
}

/// Accepts the certificates in the file of those to trust themselves, whatever is in them, and
/// those that an authority in the file has signed.
#[derive(Debug)]
struct KnownOr<T: ?Sized> {
    known: Vec<CertificateDer<'static>>,
    others: Arc<T>,
}

impl<T: ?Sized> KnownOr<T> {
    fn knows(&self, certificate: &CertificateDer<'_>) -> bool {
        self.known.iter().any(|known| known.as_ref() == certificate.as_ref())
    }
}

impl ServerCertVerifier for KnownOr<WebPkiServerVerifier> {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        match self.knows(certificate) {
            true => Ok(ServerCertVerified::assertion()),
            false => self.others.verify_server_cert(certificate, between, name, ocsp, now),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.others.verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.others.verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.others.supported_verify_schemes()
    }
}

impl ClientCertVerifier for KnownOr<dyn ClientCertVerifier> {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.others.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        match self.knows(certificate) {
            true => Ok(ClientCertVerified::assertion()),
            false => self.others.verify_client_cert(certificate, between, now),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.others.verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.others.verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.others.supported_verify_schemes()
    }
}

fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let found = CertificateDer::pem_slice_iter(pem).collect::<Result<Vec<_>, _>>();
    match found {
        Ok(found) if found.is_empty() => Err("there is no certificate in it".to_owned()),
        Ok(found) => Ok(found),
        Err(error) => Err(error.to_string()),
    }
}
