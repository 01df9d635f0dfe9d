//! TLS of the door for clients: its settings and files.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use kv::{Tls, TlsAuthClients, TlsFault, TlsFiles};
use transfer::{Identity, IdentityFault, IdentityFiles};

use crate::error::{Error, Kind};

/// What the flags and the file say of TLS.
#[derive(Clone, Debug, Default)]
pub(crate) struct TlsSettings {
    pub certificate: Option<PathBuf>,
    pub key: Option<PathBuf>,
    pub authority: Option<PathBuf>,
    pub revoked: Option<PathBuf>,
    pub auth_clients: Option<TlsAuthClients>,
    pub listen: Option<SocketAddr>,
}

/// TLS for clients, complete and checked.
#[derive(Clone, Debug)]
pub struct TlsConfig {
    /// Certificate and key.
    pub tls: Tls,
    /// The file of the certificate.
    pub certificate: PathBuf,
    /// The file of its key.
    pub key: PathBuf,
    /// The file of the authorities of clients.
    pub authority: Option<PathBuf>,
    /// The file of what these authorities have revoked.
    pub revoked: Option<PathBuf>,
    /// Whether clients must show a certificate.
    pub auth_clients: TlsAuthClients,
    /// Where to listen for TLS, if not where the node listens anyway.
    pub listen: Option<SocketAddr>,
}

impl TlsSettings {
    /// Reads the files; `None` if TLS is not wanted.
    ///
    /// # Errors
    /// [`Kind::Usage`], with a text that names the flag or the file that is wrong.
    pub fn read(self) -> Result<Option<TlsConfig>, Error> {
        let usage = |what: String| Error::new(Kind::Usage, what);
        let (certificate, key) = match (self.certificate, self.key) {
            (Some(certificate), Some(key)) => (certificate, key),
            (Some(_), None) => {
                let what = "--tls-cert names a certificate, but no key is named";
                return Err(usage(what.to_owned()).hint("add --tls-key FILE"));
            }
            (None, key) => {
                let given = [
                    ("--tls-key", key.is_some()),
                    ("--tls-ca", self.authority.is_some()),
                    ("--tls-crl", self.revoked.is_some()),
                    ("--tls-listen", self.listen.is_some()),
                    ("--tls-auth-clients", self.auth_clients.is_some()),
                ];
                let Some((flag, _)) = given.into_iter().find(|(_, given)| *given) else {
                    return Ok(None);
                };
                return Err(usage(format!("{flag} needs a certificate"))
                    .hint("add --tls-cert FILE and --tls-key FILE"));
            }
        };
        let auth_clients = self.auth_clients.unwrap_or(match self.authority {
            Some(_) => TlsAuthClients::Yes,
            None => TlsAuthClients::No,
        });
        if auth_clients != TlsAuthClients::No && self.authority.is_none() {
            let what = "clients cannot be asked for certificates: no authority is named";
            return Err(
                usage(what.to_owned()).hint("add --tls-ca FILE, or say --tls-auth-clients no")
            );
        }
        if self.revoked.is_some() && auth_clients == TlsAuthClients::No {
            let what = "--tls-crl names revoked certificates, but clients are asked for none";
            return Err(usage(what.to_owned()).hint("add --tls-ca FILE, or omit --tls-crl"));
        }
        let authority = self.authority.as_deref().map(|file| read(file, "TLS authority"));
        let authority = authority.transpose()?;
        let revoked = self.revoked.as_deref().map(|file| read(file, "TLS revocation list"));
        let revoked = revoked.transpose()?;
        let files = TlsFiles {
            certificate: &read(&certificate, "TLS certificate")?,
            key: &read(&key, "TLS key")?,
            authority: authority.as_deref(),
            revoked: revoked.as_deref(),
            auth_clients,
        };
        let tls = Tls::new(&files).map_err(|fault| {
            let of = |what: &str, file: &Path, why: String| {
                usage(format!("cannot use the TLS {what} {}: {why}", file.display()))
            };
            match fault {
                TlsFault::Certificate(why) => of("certificate", &certificate, why),
                TlsFault::Key(why) => of("key", &key, why),
                TlsFault::Authority(why) => {
                    of("authority", self.authority.as_deref().unwrap_or(Path::new("")), why)
                }
                TlsFault::Revoked(why) => {
                    of("revocation list", self.revoked.as_deref().unwrap_or(Path::new("")), why)
                }
            }
        })?;
        Ok(Some(TlsConfig {
            tls,
            certificate,
            key,
            authority: self.authority,
            revoked: self.revoked,
            auth_clients,
            listen: self.listen,
        }))
    }
}

impl TlsConfig {
    /// A warning, if the certificate is no longer valid.
    pub(crate) fn warning(&self, now_unix_s: i64) -> Option<String> {
        let ended_s = now_unix_s - self.tls.not_after_unix_s()?;
        (ended_s > 0).then(|| {
            format!(
                "the TLS certificate {} expired {} h ago: clients that check it refuse to \
                 connect",
                self.certificate.display(),
                ended_s / 3600
            )
        })
    }
}

/// Reads how this node and others know each other; `None` if they do not.
///
/// # Errors
/// [`Kind::Usage`], with a text that names the flag or the file that is wrong.
pub(crate) fn identity(
    certificate: Option<PathBuf>,
    key: Option<PathBuf>,
    trusted: Option<PathBuf>,
) -> Result<Option<Identity>, Error> {
    let (certificate, key, trusted) = match (certificate, key, trusted) {
        (None, None, None) => return Ok(None),
        (Some(certificate), Some(key), Some(trusted)) => (certificate, key, trusted),
        _ => {
            let what = "--moves-cert, --moves-key and --moves-ca belong together";
            return Err(Error::new(Kind::Usage, what).hint("give all of them, or none"));
        }
    };
    let files = IdentityFiles {
        certificate: &read(&certificate, "certificate for moves")?,
        key: &read(&key, "key for moves")?,
        trusted: &read(&trusted, "authority for moves")?,
    };
    Identity::new(&files).map(Some).map_err(|fault| {
        let (what, file, why) = match fault {
            IdentityFault::Certificate(why) => ("certificate", &certificate, why),
            IdentityFault::Key(why) => ("key", &key, why),
            IdentityFault::Trusted(why) => ("authority", &trusted, why),
        };
        Error::new(Kind::Usage, format!("cannot use the {what} {}: {why}", file.display()))
    })
}

#[expect(clippy::disallowed_methods, reason = "start-up code, before any core runs")]
fn read(file: &Path, what: &str) -> Result<Vec<u8>, Error> {
    std::fs::read(file).map_err(|error| {
        Error::new(Kind::Usage, format!("cannot read the {what} {}: {error}", file.display()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(settings: TlsSettings) -> String {
        let error = settings.read().unwrap_err();
        assert_eq!(error.kind(), Kind::Usage);
        error.to_string()
    }

    #[test]
    fn a_flag_without_those_it_needs_is_refused() {
        assert!(TlsSettings::default().read().unwrap().is_none());
        let file = || Some(PathBuf::from("/does/not/exist"));
        let only_key = TlsSettings { key: file(), ..TlsSettings::default() };
        assert!(refused(only_key).contains("--tls-key needs a certificate"));
        let address = "127.0.0.1:1".parse().ok();
        let only_address = TlsSettings { listen: address, ..TlsSettings::default() };
        assert!(refused(only_address).contains("--tls-listen needs a certificate"));
        let only_certificate = TlsSettings { certificate: file(), ..TlsSettings::default() };
        assert!(refused(only_certificate.clone()).contains("no key is named"));
        let missing = TlsSettings { key: file(), ..only_certificate };
        assert!(
            refused(missing.clone()).contains("cannot read the TLS certificate /does/not/exist")
        );
        let revoking = TlsSettings { revoked: file(), ..missing.clone() };
        assert!(refused(revoking).contains("clients are asked for none"));
        let asking = TlsSettings { auth_clients: Some(TlsAuthClients::Yes), ..missing };
        assert!(refused(asking).contains("no authority is named"));
    }
}
