//! The buffers of a recording in host memory, on which the interpreter computes. Not here: anything of a GPU.

use super::recording::{Range, Recording};
use crate::memory::pack::{Layout, Packing, codes, fragment_index};
use half::{bf16, f16};

/// The contents of a recording's buffers, as 32-bit words.
#[derive(Clone, Debug, PartialEq)]
pub struct HostMemory {
    /// The words of each buffer, by buffer index.
    pub buffers: Vec<Vec<u32>>,
}

/// A weight matrix as a reference reads it.
#[derive(Clone, Copy, Debug)]
pub struct PackedMatrix {
    /// The matrix.
    pub range: Range,
    /// The format of its numbers.
    pub format: super::Format,
    /// Whether the matrix is in fragment order; otherwise it is row-major.
    pub fragments: bool,
    /// The number of columns without padding.
    pub cols: u32,
}

impl PackedMatrix {
    fn layout(&self) -> Layout {
        if self.fragments { Layout::Fragments } else { Layout::RowMajor { columns_multiple: 8 } }
    }

    fn padded_cols(&self) -> u32 {
        Packing { rows: 1, cols: self.cols, layout: self.layout(), format: self.format }.padded_cols()
    }
}

impl HostMemory {
    /// Returns zeroed memory for a recording's buffers.
    pub fn new(recording: &Recording) -> HostMemory {
        HostMemory { buffers: recording.buffers.iter().map(|b| vec![0; b.bytes.div_ceil(4) as usize]).collect() }
    }

    fn index(range: Range, i: u32) -> usize {
        debug_assert!(
            range.offset.is_multiple_of(4) && u64::from(i) * 4 < range.bytes,
            "word {i} lies outside {range:?}"
        );
        (range.offset / 4) as usize + i as usize
    }

    /// Returns word `i` of a range.
    pub fn u32(&self, range: Range, i: u32) -> u32 {
        self.buffers[range.buffer.0 as usize][Self::index(range, i)]
    }

    /// Sets word `i` of a range.
    pub fn set_u32(&mut self, range: Range, i: u32, value: u32) {
        self.buffers[range.buffer.0 as usize][Self::index(range, i)] = value;
    }

    /// Returns float `i` of a range.
    pub fn f32(&self, range: Range, i: u32) -> f32 {
        f32::from_bits(self.u32(range, i))
    }

    /// Sets float `i` of a range.
    pub fn set_f32(&mut self, range: Range, i: u32, value: f32) {
        self.set_u32(range, i, value.to_bits());
    }

    /// Returns 16-bit value `i` of a range.
    pub fn u16(&self, range: Range, i: u32) -> u16 {
        (self.u32(range, i / 2) >> (16 * (i % 2))) as u16
    }

    /// Sets 16-bit value `i` of a range.
    pub fn set_u16(&mut self, range: Range, i: u32, value: u16) {
        let word = self.u32(range, i / 2);
        let shift = 16 * (i % 2);
        self.set_u32(range, i / 2, word & !(0xffff << shift) | u32::from(value) << shift);
    }

    /// Returns byte `i` of a range.
    pub fn u8(&self, range: Range, i: u32) -> u8 {
        (self.u32(range, i / 4) >> (8 * (i % 4))) as u8
    }

    /// Sets byte `i` of a range.
    pub fn set_u8(&mut self, range: Range, i: u32, value: u8) {
        let word = self.u32(range, i / 4);
        let shift = 8 * (i % 4);
        self.set_u32(range, i / 4, word & !(0xff << shift) | u32::from(value) << shift);
    }

    /// Returns half-precision value `i` of a range.
    pub fn f16(&self, range: Range, i: u32) -> f32 {
        f16::from_bits(self.u16(range, i)).to_f32()
    }

    /// Sets half-precision value `i` of a range, rounded to nearest even.
    pub fn set_f16(&mut self, range: Range, i: u32, value: f32) {
        self.set_u16(range, i, f16::from_f32(value).to_bits());
    }

    /// Returns number `i` of a range in the given format.
    ///
    /// # Panics
    /// If the format is of codes.
    pub fn weight(&self, format: super::Format, range: Range, i: u32) -> f32 {
        match format {
            super::Format::Bf16 => bf16::from_bits(self.u16(range, i)).to_f32(),
            super::Format::F16 => self.f16(range, i),
            super::Format::F32 => self.f32(range, i),
            super::Format::Codes(_) => panic!("codes are read as elements of a matrix"),
        }
    }

    /// Returns the weight in row `row` and column `col` of a matrix.
    pub fn element(&self, matrix: &PackedMatrix, row: u32, col: u32) -> f32 {
        let padded = matrix.padded_cols();
        match (matrix.format, matrix.layout()) {
            (super::Format::Codes(codes), layout) => {
                codes::element(codes, layout, padded, (row, col), |word| self.u32(matrix.range, word as u32))
            }
            (format, Layout::RowMajor { .. }) => self.weight(format, matrix.range, row * padded + col),
            (format, Layout::Fragments) => self.weight(format, matrix.range, fragment_index(row, col, padded) as u32),
        }
    }

    /// Sets 16-bit number `i` of a range in the given format, rounded to nearest even.
    ///
    /// # Panics
    /// If the format is not a 16-bit format.
    pub fn set_number(&mut self, format: super::Format, range: Range, i: u32, value: f32) {
        match format {
            super::Format::Bf16 => self.set_u16(range, i, bf16::from_f32(value).to_bits()),
            super::Format::F16 => self.set_f16(range, i, value),
            super::Format::F32 | super::Format::Codes(_) => panic!("{format:?} is no 16-bit format"),
        }
    }

    /// Returns all floats of a range.
    pub fn floats(&self, range: Range) -> Vec<f32> {
        (0..(range.bytes / 4) as u32).map(|i| self.f32(range, i)).collect()
    }
}
