//! NVIDIA's assembler for PTX, of the tests' Python packages, which needs no GPU. Not here: what programs compute (`ptx`).

use crate::python::python;
use std::path::PathBuf;
use std::process::Command;

/// Returns the path of ptxas.
fn ptxas() -> PathBuf {
    let find = "import nvidia.cuda_nvcc as m; print(m.__path__[0])";
    let out = Command::new(python()).args(["-c", find]).output().expect("Python runs");
    assert!(out.status.success(), "nvidia-cuda-nvcc-cu12: {}", String::from_utf8_lossy(&out.stderr));
    PathBuf::from(String::from_utf8(out.stdout).expect("a path").trim()).join("bin/ptxas")
}

/// Assembles programs one after the other.
pub struct Assembler {
    ptxas: PathBuf,
    folder: tempfile::TempDir,
}

impl Assembler {
    pub fn new() -> Assembler {
        Assembler { ptxas: ptxas(), folder: tempfile::tempdir().expect("a folder") }
    }

    /// Assembles a text for compute capability 9.0. Returns whether that succeeds, and what the assembler says.
    pub fn assemble(&self, text: &str) -> (bool, String) {
        let path = self.folder.path().join("program.ptx");
        std::fs::write(&path, text).expect("a file");
        let mut command = Command::new(&self.ptxas);
        command.args(["-arch=sm_90a", "-v", "-o", "/dev/null"]).arg(&path);
        let out = command.output().expect("ptxas runs");
        (out.status.success(), String::from_utf8_lossy(&out.stderr).into_owned())
    }

    /// Requires that a text is assembled, spills no register and leaves its products asynchronous.
    pub fn require(&self, what: &str, text: &str) {
        let (done, said) = self.assemble(text);
        assert!(done, "{what}: {said}");
        let whole = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads";
        assert!(said.contains(whole) && !said.contains("serialized"), "{what}: {said}");
    }
}
