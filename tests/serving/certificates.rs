//! Certificate authorities and certificates signed by them, written as files.

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, KeyUsagePurpose};
use std::path::{Path, PathBuf};

/// A self-signed certificate authority.
pub struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    pub fn new(name: &str) -> Authority {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.distinguished_name.push(DnType::CommonName, name);
        Authority(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    pub fn pem(&self) -> String {
        self.0.pem()
    }

    /// Writes the authority's own certificate and returns the file's path.
    pub fn write(&self, folder: &Path, name: &str) -> PathBuf {
        let path = folder.join(name);
        std::fs::write(&path, self.pem()).unwrap();
        path
    }

    /// Returns a certificate for 127.0.0.1 and localhost and its private key, both in PEM.
    pub fn issue(&self) -> (String, String) {
        let names = ["127.0.0.1", "localhost"].map(str::to_owned);
        let params = CertificateParams::new(names).unwrap();
        let key = KeyPair::generate().unwrap();
        (params.signed_by(&key, &self.0).unwrap().pem(), key.serialize_pem())
    }

    /// Issues a certificate and writes it as `NAME.pem` and its key as `NAME.key`; returns both paths.
    pub fn issue_to(&self, folder: &Path, name: &str) -> (PathBuf, PathBuf) {
        let (certificate, key) = self.issue();
        let paths = (folder.join(format!("{name}.pem")), folder.join(format!("{name}.key")));
        std::fs::write(&paths.0, certificate).unwrap();
        std::fs::write(&paths.1, key).unwrap();
        paths
    }
}
