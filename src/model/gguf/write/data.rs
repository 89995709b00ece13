//! Writing a file: the header, then the data of all tensors in pieces of rows, each of which a thread reads, converts
//! and writes at its place.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::super::config::{ROPE_FACTORS, RopeFactors};
use super::super::container::{Array, DEFAULT_ALIGNMENT, Header, TensorType, Value};
use super::super::split::{GgufFile, GgufFiles};
use super::super::tensors::{ColumnOrder, StoredAs};
use super::super::{Gguf, GgufError};
use super::{PlannedTensor, Run, WriteError};
use crate::quant::blocks::BlockType;

/// The number of elements of a piece, unless a row has more. A thread holds about 8 bytes for each.
const PIECE: u64 = 1 << 18;
/// The format's version.
const VERSION: u32 = 3;

/// A range of rows of a tensor of the checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceRows<'a> {
    /// The name of the tensor.
    pub tensor: &'a str,
    /// The first row. All dimensions of the tensor but the last count as one; a vector has rows of one element.
    pub row: u64,
    /// The number of rows.
    pub rows: u64,
    /// The number of elements of a row.
    pub cols: u64,
}

/// A description of the written file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufWritten {
    /// The length of the file in bytes.
    pub bytes: u64,
    /// The number of tensors.
    pub tensors: usize,
    /// The reason why the file has no tokenizer, if the checkpoint has one.
    pub no_text: Option<super::NoText>,
}

/// Writes a file of these metadata and of these tensors, each with its type, on `threads` threads. `read` reads rows of
/// the checkpoint's tensors as single precision numbers. A thread takes a few MB of memory, more if rows are very long.
/// The file is written under another name and renamed when it is complete.
///
/// # Errors The first problem found. There is then no file.
pub fn write(
    path: &Path,
    metadata: &[(String, Value)],
    tensors: &[(PlannedTensor, TensorType)],
    read: impl Fn(SourceRows<'_>, &mut [f32]) -> Result<(), WriteError> + Sync,
    threads: usize,
) -> Result<GgufWritten, WriteError> {
    let layout = Layout::new(metadata, tensors)?;
    layout.check(path, tensors)?;
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".part");
    let part = path.with_file_name(name);
    let result = layout.write(&part, tensors, &read, threads.max(1));
    let result = result.and_then(|()| std::fs::rename(&part, path).map_err(WriteError::io("write", path)));
    if let Err(error) = result {
        // The error that is reported is the first.
        drop(std::fs::remove_file(&part));
        return Err(error);
    }
    Ok(GgufWritten { bytes: layout.bytes, tensors: tensors.len(), no_text: None })
}

/// The header of a file, and the place of each tensor's data.
struct Layout {
    header: Vec<u8>,
    /// The offset of each tensor from the beginning of the file.
    offsets: Vec<u64>,
    bytes: u64,
}

/// SourceRows `row` to `row + rows` of a tensor of the file.
struct Piece {
    tensor: usize,
    row: u64,
    rows: u64,
}

/// Returns the number of bytes of a row, and for vectors of an element.
fn row_bytes(tensor: &PlannedTensor, kind: TensorType) -> u64 {
    tensor.cols / kind.block_elements() * kind.block_bytes()
}

impl Layout {
    fn new(metadata: &[(String, Value)], tensors: &[(PlannedTensor, TensorType)]) -> Result<Layout, WriteError> {
        let mut header = b"GGUF".to_vec();
        header.extend(VERSION.to_le_bytes());
        header.extend((tensors.len() as u64).to_le_bytes());
        header.extend((metadata.len() as u64).to_le_bytes());
        for (key, value) in metadata {
            put_text(&mut header, key);
            put_value(&mut header, value);
        }
        let mut offsets = Vec::new();
        let mut end = 0u64;
        for (tensor, kind) in tensors {
            let (cols, block) = (tensor.cols, kind.block_elements());
            let name = || tensor.name.clone();
            if *kind == TensorType::Blocks(BlockType::NVFP4) {
                return Err(WriteError::Type { tensor: name(), kind: kind.name() });
            }
            if !cols.is_multiple_of(block) {
                return Err(WriteError::Block { tensor: name(), cols, kind: kind.name(), block });
            }
            let offset = end.next_multiple_of(DEFAULT_ALIGNMENT);
            put_text(&mut header, &tensor.name);
            header.extend((tensor.dims.len() as u32).to_le_bytes());
            tensor.dims.iter().for_each(|dim| header.extend(dim.to_le_bytes()));
            header.extend(kind.id().to_le_bytes());
            header.extend(offset.to_le_bytes());
            offsets.push(offset);
            end = offset + tensor.rows() * row_bytes(tensor, *kind);
        }
        let start = (header.len() as u64).next_multiple_of(DEFAULT_ALIGNMENT);
        offsets.iter_mut().for_each(|offset| *offset += start);
        // The data of the last tensor is padded like the others'.
        Ok(Layout { header, offsets, bytes: (start + end).next_multiple_of(DEFAULT_ALIGNMENT) })
    }

    /// Reads the header as a reader of the file will.
    fn check(&self, path: &Path, tensors: &[(PlannedTensor, TensorType)]) -> Result<(), WriteError> {
        let unreadable = |error: GgufError| WriteError::Unreadable(Box::new(error));
        let header = Header::parse(&self.header, self.bytes).map_err(|source| {
            unreadable(super::super::split::SplitError::Container { path: path.into(), source }.into())
        })?;
        let parts = GgufFiles::new(vec![GgufFile { path: path.to_owned(), bytes: self.bytes, header }])
            .map_err(|error| unreadable(error.into()))?;
        let factors = tensors.iter().find(|(tensor, _)| tensor.name == ROPE_FACTORS);
        let factors = factors.and_then(|(tensor, _)| tensor.values.as_deref());
        let factors = RopeFactors { llama3: factors.map(<[f32]>::to_vec), long: None };
        Gguf::new(parts, &factors).map(drop).map_err(unreadable)
    }

    fn write(
        &self,
        path: &Path,
        tensors: &[(PlannedTensor, TensorType)],
        read: &(impl Fn(SourceRows<'_>, &mut [f32]) -> Result<(), WriteError> + Sync),
        threads: usize,
    ) -> Result<(), WriteError> {
        let file = OpenOptions::new().write(true).create(true).truncate(true).open(path);
        let file = file.map_err(WriteError::io("create", path))?;
        file.set_len(self.bytes).map_err(WriteError::io("write", path))?;
        file.write_all_at(&self.header, 0).map_err(WriteError::io("write", path))?;
        let mut pieces = Vec::new();
        for (index, (tensor, _)) in tensors.iter().enumerate() {
            let step = (PIECE / tensor.cols).max(1);
            let piece = |row: u64| Piece { tensor: index, row, rows: step.min(tensor.rows() - row) };
            pieces.extend((0..tensor.rows()).step_by(step as usize).map(piece));
        }
        let (next, stop, error) = (AtomicUsize::new(0), AtomicBool::new(false), Mutex::new(None));
        let work = || {
            let mut worker = Worker::default();
            while !stop.load(Ordering::Relaxed) {
                let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) else { return };
                let (tensor, kind) = &tensors[piece.tensor];
                let at = self.offsets[piece.tensor] + piece.row * row_bytes(tensor, *kind);
                let written =
                    worker.compute(tensor, *kind, piece, read).and_then(|()| put_at(&file, path, &worker.bytes, at));
                if let Err(problem) = written {
                    stop.store(true, Ordering::Relaxed);
                    let mut first = error.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                    first.get_or_insert(problem);
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..threads.min(pieces.len()) {
                scope.spawn(work);
            }
            work();
        });
        match error.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()) {
            Some(error) => Err(error),
            None => file.sync_all().map_err(WriteError::io("write", path)),
        }
    }
}

fn put_at(file: &File, path: &Path, bytes: &[u8], at: u64) -> Result<(), WriteError> {
    file.write_all_at(bytes, at).map_err(WriteError::io("write", path))
}

/// The buffers of a thread.
#[derive(Default)]
struct Worker {
    /// The numbers of the piece in the order of the file.
    numbers: Vec<f32>,
    /// Numbers on their way there.
    scratch: Vec<f32>,
    /// The encoded piece.
    bytes: Vec<u8>,
}

impl Worker {
    /// Computes the bytes of a piece.
    fn compute(
        &mut self,
        tensor: &PlannedTensor,
        kind: TensorType,
        piece: &Piece,
        read: &impl Fn(SourceRows<'_>, &mut [f32]) -> Result<(), WriteError>,
    ) -> Result<(), WriteError> {
        let cols = tensor.cols as usize;
        self.numbers.resize(piece.rows as usize * cols, 0.0);
        match &tensor.values {
            Some(values) => {
                let (begin, length) = (piece.row as usize * cols, self.numbers.len());
                self.numbers.copy_from_slice(&values[begin..begin + length]);
            }
            None => {
                for run in &tensor.sources {
                    self.gather(tensor, run, piece, read)?;
                }
                self.order(tensor);
                if tensor.change != StoredAs::None {
                    self.numbers.iter_mut().for_each(|x| *x = tensor.value(*x));
                }
            }
        }
        self.check(tensor, kind, piece)?;
        encode(kind, &self.numbers, &mut self.bytes);
        Ok(())
    }

    /// Reads the rows of a run that are in the piece.
    fn gather(
        &mut self,
        tensor: &PlannedTensor,
        run: &Run,
        piece: &Piece,
        read: &impl Fn(SourceRows<'_>, &mut [f32]) -> Result<(), WriteError>,
    ) -> Result<(), WriteError> {
        // The rows of the run that are stored at or behind a row of the file.
        let behind = |row: u64| row.saturating_sub(run.stored).div_ceil(run.stored_step).min(run.rows);
        let (begin, end) = (behind(piece.row), behind(piece.row + piece.rows));
        if begin >= end {
            return Ok(());
        }
        let rows = SourceRows { tensor: &run.tensor, row: run.row + begin, rows: end - begin, cols: tensor.cols };
        let cols = tensor.cols as usize;
        let first = (run.stored + begin * run.stored_step - piece.row) as usize * cols;
        let count = rows.rows as usize * cols;
        if run.stored_step == 1 {
            return read(rows, &mut self.numbers[first..first + count]);
        }
        self.scratch.resize(count, 0.0);
        read(rows, &mut self.scratch)?;
        let step = run.stored_step as usize * cols;
        for (from, to) in self.scratch.chunks(cols).zip(self.numbers[first..].chunks_mut(step)) {
            to[..cols].copy_from_slice(from);
        }
        Ok(())
    }

    /// Brings the columns into the order of the file.
    fn order(&mut self, tensor: &PlannedTensor) {
        let ColumnOrder::TiledHeads { head_cols, .. } = tensor.columns else { return };
        let (cols, head_cols) = (tensor.cols as usize, head_cols as usize);
        self.scratch.resize(cols, 0.0);
        for row in self.numbers.chunks_mut(cols) {
            for (head, from) in row.chunks(head_cols).enumerate() {
                let to = tensor.columns.stored_column((head * head_cols) as u64) as usize;
                self.scratch[to..to + head_cols].copy_from_slice(from);
            }
            row.copy_from_slice(&self.scratch);
        }
    }

    /// Refuses numbers that the type cannot hold. Plain types of a wide range hold everything.
    fn check(&self, tensor: &PlannedTensor, kind: TensorType, piece: &Piece) -> Result<(), WriteError> {
        let limit = match kind {
            TensorType::F32 | TensorType::BF16 => return Ok(()),
            TensorType::F16 => 65_504.0,
            TensorType::Blocks(_) => f32::MAX,
        };
        let cols = tensor.cols as usize;
        if self.numbers.chunks(1 << 12).all(|part| part.iter().fold(true, |all, x| all & (x.abs() <= limit))) {
            return Ok(());
        }
        let found = self.numbers.iter().position(|x| x.is_nan() || x.abs() > limit).unwrap_or_default();
        Err(WriteError::Number {
            tensor: tensor.name.clone(),
            row: piece.row + (found / cols) as u64,
            column: (found % cols) as u64,
            number: self.numbers[found],
            kind: kind.name(),
            limit,
        })
    }
}

/// Writes numbers, whole blocks, as elements of a type.
fn encode(kind: TensorType, numbers: &[f32], bytes: &mut Vec<u8>) {
    let length = numbers.len() as u64 / kind.block_elements() * kind.block_bytes();
    bytes.resize(length as usize, 0);
    match kind {
        TensorType::F32 => {
            bytes.as_chunks_mut::<4>().0.iter_mut().zip(numbers).for_each(|(out, x)| *out = x.to_le_bytes());
        }
        TensorType::F16 => {
            let mut part = [f16::ZERO; 256];
            for (numbers, bytes) in numbers.chunks(256).zip(bytes.chunks_mut(512)) {
                let part = &mut part[..numbers.len()];
                part.convert_from_f32_slice(numbers);
                bytes.as_chunks_mut::<2>().0.iter_mut().zip(part).for_each(|(out, x)| *out = x.to_le_bytes());
            }
        }
        TensorType::BF16 => {
            let halves = bytes.as_chunks_mut::<2>().0.iter_mut().zip(numbers);
            halves.for_each(|(out, x)| *out = bf16::from_f32(*x).to_le_bytes());
        }
        TensorType::Blocks(blocks) => blocks.quantize(numbers, bytes),
    }
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// Writes the id of a value's type and its little-endian bytes.
macro_rules! put_number {
    ($out:expr, $id:expr, $n:expr) => {{
        $out.extend(u32::to_le_bytes($id));
        $out.extend($n.to_le_bytes());
    }};
}

/// Writes the id of the elements' type, their number, and their little-endian bytes.
macro_rules! put_numbers {
    ($out:expr, $id:expr, $list:expr) => {{
        $out.extend(u32::to_le_bytes($id));
        $out.extend(($list.len() as u64).to_le_bytes());
        $list.iter().for_each(|n| $out.extend(n.to_le_bytes()));
    }};
}

fn put_value(out: &mut Vec<u8>, value: &Value) {
    match value {
        Value::U8(n) => put_number!(out, 0, n),
        Value::I8(n) => put_number!(out, 1, n),
        Value::U16(n) => put_number!(out, 2, n),
        Value::I16(n) => put_number!(out, 3, n),
        Value::U32(n) => put_number!(out, 4, n),
        Value::I32(n) => put_number!(out, 5, n),
        Value::F32(n) => put_number!(out, 6, n),
        Value::Bool(flag) => put_number!(out, 7, u8::from(*flag)),
        Value::String(text) => {
            out.extend(8u32.to_le_bytes());
            put_text(out, text);
        }
        Value::Array(array) => {
            out.extend(9u32.to_le_bytes());
            put_array(out, array);
        }
        Value::U64(n) => put_number!(out, 10, n),
        Value::I64(n) => put_number!(out, 11, n),
        Value::F64(n) => put_number!(out, 12, n),
    }
}

fn put_array(out: &mut Vec<u8>, array: &Array) {
    match array {
        Array::U8(list) => put_numbers!(out, 0, list),
        Array::I8(list) => put_numbers!(out, 1, list),
        Array::U16(list) => put_numbers!(out, 2, list),
        Array::I16(list) => put_numbers!(out, 3, list),
        Array::U32(list) => put_numbers!(out, 4, list),
        Array::I32(list) => put_numbers!(out, 5, list),
        Array::F32(list) => put_numbers!(out, 6, list),
        Array::Bool(list) => put_numbers!(out, 7, list.iter().map(|flag| u8::from(*flag)).collect::<Vec<u8>>()),
        Array::String(list) => {
            out.extend(8u32.to_le_bytes());
            out.extend((list.len() as u64).to_le_bytes());
            list.iter().for_each(|text| put_text(out, text));
        }
        Array::U64(list) => put_numbers!(out, 10, list),
        Array::I64(list) => put_numbers!(out, 11, list),
        Array::F64(list) => put_numbers!(out, 12, list),
    }
}
