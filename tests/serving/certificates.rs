//! Authorities, and certificates that they vouch for, in files of a folder.

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, KeyUsagePurpose};
use std::path::{Path, PathBuf};

/// Vouches for others.
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

    /// Writes its own certificate; gives the file's path.
    pub fn write(&self, folder: &Path, name: &str) -> PathBuf {
        let path = folder.join(name);
        std::fs::write(&path, self.pem()).unwrap();
        path
    }

    /// A certificate for 127.0.0.1 and localhost, and its key, both PEM.
    pub fn issue(&self) -> (String, String) {
        let names = ["127.0.0.1", "localhost"].map(str::to_owned);
        let params = CertificateParams::new(names).unwrap();
        let key = KeyPair::generate().unwrap();
        (params.signed_by(&key, &self.0).unwrap().pem(), key.serialize_pem())
    }

    /// Writes such a pair as `NAME.pem` and `NAME.key`; gives their paths.
    pub fn issue_to(&self, folder: &Path, name: &str) -> (PathBuf, PathBuf) {
        let (certificate, key) = self.issue();
        let paths = (folder.join(format!("{name}.pem")), folder.join(format!("{name}.key")));
        std::fs::write(&paths.0, certificate).unwrap();
        std::fs::write(&paths.1, key).unwrap();
        paths
    }
}
