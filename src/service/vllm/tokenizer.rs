//! A tokenizer's files as a zip archive in chunks, for routers that tokenize and render chats themselves. The archive
//! is reproducible. Not here: reading the files; the archive contains the bytes that were loaded with the model.

use super::common::GetTokenizerChunk;
use crate::model::text::File;
use crate::service::refusal::Refusal;
use sha2::{Digest, Sha256};
use std::io::{Cursor, Write};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tonic::Status;
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

/// The size of a chunk in bytes.
pub const CHUNK: usize = 64 << 10;
/// The maximum size in bytes of an archive that routers accept. (They accept 50 files; a tokenizer has at most six.)
const MAX_BYTES: usize = 200 << 20;

/// A zip archive and its hash.
#[derive(Debug)]
pub struct Archive {
    bytes: Vec<u8>,
    /// SHA-256 of the bytes, lower-case hex.
    sha256: String,
}

impl Archive {
    /// Packs files, at about 100 MB per second.
    pub fn of(files: &[File]) -> Result<Archive, Refusal> {
        let failed = |error: &dyn std::fmt::Display| Refusal::Failed(format!("cannot pack the tokenizer: {error}"));
        let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
        let options = SimpleFileOptions::default().compression_method(CompressionMethod::Deflated);
        for (name, bytes) in files {
            zip.start_file(*name, options).map_err(|error| failed(&error))?;
            zip.write_all(bytes).map_err(|error| failed(&error))?;
        }
        let bytes = zip.finish().map_err(|error| failed(&error))?.into_inner();
        if bytes.len() > MAX_BYTES {
            return Err(failed(&format_args!("{} bytes are more than the {MAX_BYTES} that are taken", bytes.len())));
        }
        let sha256 = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Archive { bytes, sha256 })
    }
}

/// A stream of the chunks of an archive.
#[derive(Debug)]
pub struct Chunks {
    archive: Arc<Archive>,
    at: usize,
}

impl Chunks {
    /// Creates a stream of all chunks.
    pub fn of(archive: Arc<Archive>) -> Chunks {
        Chunks { archive, at: 0 }
    }
}

impl tokio_stream::Stream for Chunks {
    type Item = Result<GetTokenizerChunk, Status>;

    fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let (at, all) = (self.at, self.archive.bytes.len());
        if at == all {
            return Poll::Ready(None);
        }
        let end = all.min(at + CHUNK);
        let data = self.archive.bytes[at..end].to_vec();
        let sha256 = if end == all { self.archive.sha256.clone() } else { String::new() };
        self.at = end;
        Poll::Ready(Some(Ok(GetTokenizerChunk { data, sha256 })))
    }
}
