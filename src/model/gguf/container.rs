//! The GGUF container, versions 2 and 3: reads a file's header into metadata and tensor descriptions. Everything that
//! the file claims about itself is checked before it is used, and memory is reserved only for bytes that were read.
//!
//! Not here: the tensors' data, files that are split (`split`), and the meaning of metadata and names.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::io::{ErrorKind, Read};

use crate::quant::blocks::BlockType;

/// The maximum length of a header in bytes: metadata and tensor descriptions together. The largest vocabularies take
/// about 30 MB.
pub const MAX_HEADER_BYTES: u64 = 128 << 20;
/// The maximum number of texts in a header: keys, names, and all elements of lists. A short text takes more memory than
/// it has bytes in the file.
pub const MAX_TEXTS: u64 = 1 << 23;
/// The maximum number of metadata pairs.
pub const MAX_PAIRS: u64 = 1 << 16;
/// The maximum number of tensors in a file.
pub const MAX_TENSORS: u64 = 1 << 20;
/// The maximum length of a metadata key in bytes, as the format defines it.
pub const MAX_KEY_BYTES: u64 = (1 << 16) - 1;
/// The maximum length of a tensor's name in bytes, as the format's own library defines it.
pub const MAX_NAME_BYTES: u64 = 63;
/// The maximum number of dimensions of a tensor, as the format defines it.
pub const MAX_DIMENSIONS: u32 = 4;
/// The alignment of the tensor data if the file does not state one.
pub const DEFAULT_ALIGNMENT: u64 = 32;
/// The maximum alignment of the tensor data.
pub const MAX_ALIGNMENT: u64 = 1 << 20;

/// The first four bytes of a file.
const MAGIC: [u8; 4] = *b"GGUF";
/// The metadata key of the alignment.
const ALIGNMENT_KEY: &str = "general.alignment";
/// The number of bytes that are read at once into a growing buffer.
const CHUNK: usize = 1 << 16;

/// The element types that tensors may have here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorType {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16, the upper half of an F32.
    BF16,
    /// Quantised blocks.
    Blocks(BlockType),
}

/// Types that exist but are not supported: id and name.
const UNSUPPORTED: [(u32, &str); 21] = [
    (4, "Q4_2"),
    (5, "Q4_3"),
    (9, "Q8_1"),
    (15, "Q8_K"),
    (19, "IQ1_S"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (31, "Q4_0_4_4"),
    (32, "Q4_0_4_8"),
    (33, "Q4_0_8_8"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (36, "IQ4_NL_4_4"),
    (37, "IQ4_NL_4_8"),
    (38, "IQ4_NL_8_8"),
    (41, "Q1_0"),
    (42, "Q2_0"),
];

impl TensorType {
    /// All supported types, in the order of their ids.
    pub fn all() -> impl Iterator<Item = TensorType> {
        let numbers = [TensorType::F32, TensorType::F16, TensorType::BF16];
        let mut all: Vec<TensorType> = numbers.into_iter().chain(BlockType::ALL.map(TensorType::Blocks)).collect();
        all.sort_by_key(|kind| kind.id());
        all.into_iter()
    }

    /// Returns the type with this id, or the name of an unsupported type: its own, or `type N` if it is not known.
    pub fn of(id: u32) -> Result<TensorType, String> {
        match id {
            0 => Ok(TensorType::F32),
            1 => Ok(TensorType::F16),
            30 => Ok(TensorType::BF16),
            _ => BlockType::from_id(id).map(TensorType::Blocks).ok_or_else(|| {
                let known = UNSUPPORTED.iter().find(|(other, _)| *other == id);
                known.map_or_else(|| format!("type {id}"), |(_, name)| (*name).to_owned())
            }),
        }
    }

    /// Returns the type's id in the file.
    pub fn id(self) -> u32 {
        match self {
            TensorType::F32 => 0,
            TensorType::F16 => 1,
            TensorType::BF16 => 30,
            TensorType::Blocks(blocks) => blocks.id(),
        }
    }

    /// Returns the type's name, for example `Q4_K`.
    pub fn name(self) -> &'static str {
        match self {
            TensorType::F32 => "F32",
            TensorType::F16 => "F16",
            TensorType::BF16 => "BF16",
            TensorType::Blocks(blocks) => blocks.name(),
        }
    }

    /// Returns the number of elements of a block; 1 if the type is not quantised.
    pub fn block_elements(self) -> u64 {
        match self {
            TensorType::F32 | TensorType::F16 | TensorType::BF16 => 1,
            TensorType::Blocks(blocks) => blocks.elements() as u64,
        }
    }

    /// Returns the number of bytes of a block.
    pub fn block_bytes(self) -> u64 {
        match self {
            TensorType::F32 => 4,
            TensorType::F16 | TensorType::BF16 => 2,
            TensorType::Blocks(blocks) => blocks.bytes() as u64,
        }
    }

    /// Whether the type stores blocks of several elements.
    pub fn is_quantised(self) -> bool {
        matches!(self, TensorType::Blocks(_))
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The elements of a metadata array.
#[derive(Clone, Debug, PartialEq)]
pub enum Array {
    /// 8-bit unsigned integers.
    U8(Vec<u8>),
    /// 8-bit signed integers.
    I8(Vec<i8>),
    /// 16-bit unsigned integers.
    U16(Vec<u16>),
    /// 16-bit signed integers.
    I16(Vec<i16>),
    /// 32-bit unsigned integers.
    U32(Vec<u32>),
    /// 32-bit signed integers.
    I32(Vec<i32>),
    /// 64-bit unsigned integers.
    U64(Vec<u64>),
    /// 64-bit signed integers.
    I64(Vec<i64>),
    /// Single precision numbers.
    F32(Vec<f32>),
    /// Double precision numbers.
    F64(Vec<f64>),
    /// Truth values.
    Bool(Vec<bool>),
    /// Texts.
    String(Vec<String>),
}

impl Array {
    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        match self {
            Array::U8(v) => v.len(),
            Array::I8(v) => v.len(),
            Array::U16(v) => v.len(),
            Array::I16(v) => v.len(),
            Array::U32(v) => v.len(),
            Array::I32(v) => v.len(),
            Array::U64(v) => v.len(),
            Array::I64(v) => v.len(),
            Array::F32(v) => v.len(),
            Array::F64(v) => v.len(),
            Array::Bool(v) => v.len(),
            Array::String(v) => v.len(),
        }
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns an element that is an integer of any width, unless it is absent or negative.
    pub fn unsigned(&self, index: usize) -> Option<u64> {
        match self {
            Array::U8(v) => v.get(index).map(|n| u64::from(*n)),
            Array::I8(v) => v.get(index).and_then(|n| u64::try_from(*n).ok()),
            Array::U16(v) => v.get(index).map(|n| u64::from(*n)),
            Array::I16(v) => v.get(index).and_then(|n| u64::try_from(*n).ok()),
            Array::U32(v) => v.get(index).map(|n| u64::from(*n)),
            Array::I32(v) => v.get(index).and_then(|n| u64::try_from(*n).ok()),
            Array::U64(v) => v.get(index).copied(),
            Array::I64(v) => v.get(index).and_then(|n| u64::try_from(*n).ok()),
            Array::F32(_) | Array::F64(_) | Array::Bool(_) | Array::String(_) => None,
        }
    }
}

/// A metadata value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// An 8-bit unsigned integer.
    U8(u8),
    /// An 8-bit signed integer.
    I8(i8),
    /// A 16-bit unsigned integer.
    U16(u16),
    /// A 16-bit signed integer.
    I16(i16),
    /// A 32-bit unsigned integer.
    U32(u32),
    /// A 32-bit signed integer.
    I32(i32),
    /// A 64-bit unsigned integer.
    U64(u64),
    /// A 64-bit signed integer.
    I64(i64),
    /// A single precision number.
    F32(f32),
    /// A double precision number.
    F64(f64),
    /// A truth value.
    Bool(bool),
    /// A text.
    String(String),
    /// A list of values of one type.
    Array(Array),
}

impl Value {
    /// Returns an integer of any width, unless it is negative.
    pub fn unsigned(&self) -> Option<u64> {
        match self {
            Value::U8(n) => Some(u64::from(*n)),
            Value::I8(n) => u64::try_from(*n).ok(),
            Value::U16(n) => Some(u64::from(*n)),
            Value::I16(n) => u64::try_from(*n).ok(),
            Value::U32(n) => Some(u64::from(*n)),
            Value::I32(n) => u64::try_from(*n).ok(),
            Value::U64(n) => Some(*n),
            Value::I64(n) => u64::try_from(*n).ok(),
            _ => None,
        }
    }

    /// Returns a number. A single precision number becomes the shortest decimal number that rounds to it, as it was
    /// written before it was stored: `1e-6`, not `9.999999974752427e-7`.
    pub fn number(&self) -> Option<f64> {
        match self {
            Value::F32(n) => n.to_string().parse().ok(),
            Value::F64(n) => Some(*n),
            other => other.unsigned().map(|n| n as f64),
        }
    }

    /// Returns a truth value.
    pub fn flag(&self) -> Option<bool> {
        match self {
            Value::Bool(flag) => Some(*flag),
            _ => None,
        }
    }

    /// Returns a text.
    pub fn text(&self) -> Option<&str> {
        match self {
            Value::String(text) => Some(text),
            _ => None,
        }
    }

    /// Returns a list of texts.
    pub fn texts(&self) -> Option<&[String]> {
        match self {
            Value::Array(Array::String(texts)) => Some(texts),
            _ => None,
        }
    }

    /// Returns the list.
    pub fn array(&self) -> Option<&Array> {
        match self {
            Value::Array(array) => Some(array),
            _ => None,
        }
    }
}

/// Describes a value for error messages: a short value itself, a long one by its size.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::F32(n) => write!(f, "{n}"),
            Value::F64(n) => write!(f, "{n}"),
            Value::I8(n) => write!(f, "{n}"),
            Value::I16(n) => write!(f, "{n}"),
            Value::I32(n) => write!(f, "{n}"),
            Value::I64(n) => write!(f, "{n}"),
            Value::Bool(flag) => write!(f, "{flag}"),
            Value::String(text) if text.len() <= 80 => write!(f, "{text:?}"),
            Value::String(text) => write!(f, "a text of {} bytes", text.len()),
            Value::Array(array) => write!(f, "a list of {}", array.len()),
            other => write!(f, "{}", other.unsigned().unwrap_or_default()),
        }
    }
}

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct GgufTensor {
    /// The name.
    pub name: String,
    /// The size of each dimension, the contiguous one first: the reverse of the order in safetensors.
    pub dims: Vec<u64>,
    /// The element type.
    pub kind: TensorType,
    /// Byte offset of the data from the beginning of the file.
    pub offset: u64,
    /// The length of the data in bytes.
    pub bytes: u64,
}

impl GgufTensor {
    /// Returns the number of elements of a row: the size of the contiguous dimension.
    pub fn cols(&self) -> u64 {
        self.dims[0]
    }

    /// Returns the number of rows: the product of all other dimensions.
    pub fn rows(&self) -> u64 {
        // The parser has checked that the product of all dimensions does not overflow.
        self.dims[1..].iter().product()
    }

    /// Returns the number of bytes of a row, which is a whole number of blocks.
    pub fn row_bytes(&self) -> u64 {
        self.cols() / self.kind.block_elements() * self.kind.block_bytes()
    }
}

/// The header of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Header {
    /// The format's version: 2 or 3, which do not differ for files of this byte order.
    pub version: u32,
    /// The alignment of the tensor data in bytes, a power of two.
    pub alignment: u64,
    /// The metadata by key.
    pub metadata: BTreeMap<String, Value>,
    /// The tensors in the order of the file.
    pub tensors: Vec<GgufTensor>,
    /// Byte offset at which the tensor data begins.
    pub data_start: u64,
}

impl Header {
    /// Reads the header of a file of `len` bytes from its beginning. The reader should be buffered; nothing behind the
    /// header is read.
    ///
    /// # Errors The first problem found.
    pub fn read(reader: &mut impl Read, len: u64) -> Result<Header, ContainerError> {
        Parser { reader, len, position: 0, texts: 0 }.header()
    }

    /// Reads the header from the first bytes of a file of `len` bytes.
    ///
    /// # Errors The first problem found. [`ContainerError::Truncated`] if `bytes` does not hold the whole header.
    pub fn parse(bytes: &[u8], len: u64) -> Result<Header, ContainerError> {
        Header::read(&mut &bytes[..], len)
    }

    /// Returns the metadata value of this key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.metadata.get(key)
    }

    /// Returns the tensor with this name.
    pub fn tensor(&self, name: &str) -> Option<&GgufTensor> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }
}

/// The reason why a file is not a usable GGUF file.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ContainerError {
    /// The operating system could not read the file.
    #[error("cannot read it: {0}")]
    Unreadable(String),
    /// The file ends inside its header.
    #[error("it is truncated: {what} ends at byte {needs}, the file has {has} bytes")]
    Truncated {
        /// The part of the header that is cut off.
        what: String,
        /// The end of that part, as a byte offset.
        needs: u64,
        /// The length of the file in bytes.
        has: u64,
    },
    /// The header is longer than [`MAX_HEADER_BYTES`].
    #[error("{what} ends at byte {needs}, a header may have {most} bytes")]
    TooLong {
        /// The part of the header that lies behind the limit.
        what: String,
        /// The end of that part, as a byte offset.
        needs: u64,
        /// The limit in bytes.
        most: u64,
    },
    /// The file does not begin as a GGUF file does.
    #[error("it begins with the bytes {0:02x?}, a GGUF file with 47 47 55 46")]
    Magic([u8; 4]),
    /// The file was written for machines of the other byte order.
    #[error("it is big-endian (version {0:#010x}), only little-endian files are supported")]
    BigEndian(u32),
    /// The version is not supported.
    #[error("it is GGUF version {0}, supported are 2 and 3")]
    Version(u32),
    /// A number of things exceeds its limit.
    #[error("{what} is {has}, at most {most} are supported")]
    TooMany {
        /// The name of the counted things.
        what: String,
        /// The number in the file.
        has: u64,
        /// The limit.
        most: u64,
    },
    /// A text is not UTF-8.
    #[error("{0} is not UTF-8")]
    NotText(String),
    /// Two metadata pairs have the same key, or a key is empty.
    #[error("the metadata key {0:?} occurs twice or is empty")]
    Key(String),
    /// A metadata value has a type that does not exist or is not supported.
    #[error("the metadata key {key} has a value of type {id}{note}")]
    ValueType {
        /// The key.
        key: String,
        /// The type's id.
        id: u32,
        /// A remark: that it is the type of an array's elements.
        note: &'static str,
    },
    /// A truth value is neither 0 nor 1.
    #[error("{what} is a truth value of {has}, must be 0 or 1")]
    Flag {
        /// The value's place.
        what: String,
        /// The byte in the file.
        has: u8,
    },
    /// The alignment is not a supported power of two.
    #[error("general.alignment is {0}, must be a power of two up to {MAX_ALIGNMENT} and a 32-bit unsigned integer")]
    Alignment(String),
    /// Two tensors have the same name, or a name is empty.
    #[error("the tensor name {0:?} occurs twice or is empty")]
    Name(String),
    /// A tensor has no dimensions, too many, or one of size 0.
    #[error("tensor {tensor} has the dimensions {dims:?}, must have 1 to {MAX_DIMENSIONS} of at least 1 each")]
    Dimensions {
        /// The tensor.
        tensor: String,
        /// The sizes; for too many dimensions, only their number.
        dims: Vec<u64>,
    },
    /// A tensor's size in elements or bytes does not fit in 63 bits.
    #[error("tensor {tensor} of type {kind} has the dimensions {dims:?}, whose product is too large")]
    Size {
        /// The tensor.
        tensor: String,
        /// The name of its type.
        kind: &'static str,
        /// The sizes of its dimensions.
        dims: Vec<u64>,
    },
    /// A tensor has an element type that is not supported.
    #[error("tensor {tensor} has the type {kind}, which is not supported")]
    UnsupportedType {
        /// The tensor.
        tensor: String,
        /// The name of the type.
        kind: String,
    },
    /// The rows of a quantised tensor are not a whole number of blocks.
    #[error("tensor {tensor} has rows of {cols} elements, {kind} stores blocks of {block}")]
    Blocks {
        /// The tensor.
        tensor: String,
        /// The number of elements of a row.
        cols: u64,
        /// The name of its type.
        kind: &'static str,
        /// The number of elements of a block.
        block: u64,
    },
    /// A tensor's data does not begin at a multiple of the alignment.
    #[error("tensor {tensor} begins at offset {offset}, must be a multiple of {alignment}")]
    Unaligned {
        /// The tensor.
        tensor: String,
        /// Its offset from the beginning of the tensor data.
        offset: u64,
        /// The file's alignment.
        alignment: u64,
    },
    /// A tensor's data reaches behind the end of the file.
    #[error("tensor {tensor} ends at byte {needs}, the file has {has} bytes")]
    OutsideFile {
        /// The tensor.
        tensor: String,
        /// The end of its data, as a byte offset.
        needs: u64,
        /// The length of the file in bytes.
        has: u64,
    },
    /// The data of two tensors overlaps.
    #[error("tensor {first} ends at byte {end}, tensor {second} begins at byte {begin}")]
    Overlap {
        /// The tensor that begins first.
        first: String,
        /// The end of its data, as a byte offset.
        end: u64,
        /// The tensor that begins second.
        second: String,
        /// The beginning of its data, as a byte offset.
        begin: u64,
    },
}

/// Reads a header from front to back.
struct Parser<'a, R> {
    reader: &'a mut R,
    /// The length of the file in bytes.
    len: u64,
    /// The number of bytes read.
    position: u64,
    /// The number of texts read.
    texts: u64,
}

impl<R: Read> Parser<'_, R> {
    fn header(mut self) -> Result<Header, ContainerError> {
        let magic = self.array::<4>("the magic number")?;
        if magic != MAGIC {
            return Err(ContainerError::Magic(magic));
        }
        let version = self.u32("the version")?;
        match version {
            2 | 3 => {}
            _ if version & 0xffff == 0 => return Err(ContainerError::BigEndian(version)),
            _ => return Err(ContainerError::Version(version)),
        }
        let tensors = self.count("the number of tensors", MAX_TENSORS)?;
        let pairs = self.count("the number of metadata pairs", MAX_PAIRS)?;
        let metadata = self.metadata(pairs)?;
        let alignment = alignment(&metadata)?;
        let mut tensors = self.tensors(tensors)?;
        // The position is at most MAX_HEADER_BYTES, and the alignment at most MAX_ALIGNMENT.
        let data_start = self.position.next_multiple_of(alignment);
        place(&mut tensors, data_start, alignment, self.len)?;
        Ok(Header { version, alignment, metadata, tensors, data_start })
    }

    fn metadata(&mut self, pairs: u64) -> Result<BTreeMap<String, Value>, ContainerError> {
        let mut metadata = BTreeMap::new();
        for index in 0..pairs {
            let key = self.string(|| format!("the metadata key {index}"), MAX_KEY_BYTES)?;
            if key.is_empty() || metadata.contains_key(&key) {
                return Err(ContainerError::Key(key));
            }
            let id = self.u32(&key)?;
            let value = self.value(&key, id)?;
            metadata.insert(key, value);
        }
        Ok(metadata)
    }

    fn value(&mut self, key: &str, id: u32) -> Result<Value, ContainerError> {
        Ok(match id {
            0 => Value::U8(self.array::<1>(key)?[0]),
            1 => Value::I8(i8::from_le_bytes(self.array(key)?)),
            2 => Value::U16(u16::from_le_bytes(self.array(key)?)),
            3 => Value::I16(i16::from_le_bytes(self.array(key)?)),
            4 => Value::U32(self.u32(key)?),
            5 => Value::I32(i32::from_le_bytes(self.array(key)?)),
            6 => Value::F32(f32::from_le_bytes(self.array(key)?)),
            7 => {
                let byte = self.array::<1>(key)?[0];
                Value::Bool(truth(key, byte)?)
            }
            8 => Value::String(self.string(|| key.to_owned(), u64::MAX)?),
            9 => Value::Array(self.elements(key)?),
            10 => Value::U64(self.u64(key)?),
            11 => Value::I64(i64::from_le_bytes(self.array(key)?)),
            12 => Value::F64(f64::from_le_bytes(self.array(key)?)),
            _ => return Err(ContainerError::ValueType { key: key.to_owned(), id, note: "" }),
        })
    }

    /// Reads an array: the type of its elements, their number and the elements.
    fn elements(&mut self, key: &str) -> Result<Array, ContainerError> {
        let id = self.u32(key)?;
        let count = self.u64(key)?;
        Ok(match id {
            0 => Array::U8(self.numbers(key, count, |[byte]: [u8; 1]| byte)?),
            1 => Array::I8(self.numbers(key, count, i8::from_le_bytes)?),
            2 => Array::U16(self.numbers(key, count, u16::from_le_bytes)?),
            3 => Array::I16(self.numbers(key, count, i16::from_le_bytes)?),
            4 => Array::U32(self.numbers(key, count, u32::from_le_bytes)?),
            5 => Array::I32(self.numbers(key, count, i32::from_le_bytes)?),
            6 => Array::F32(self.numbers(key, count, f32::from_le_bytes)?),
            7 => {
                let bytes = self.numbers(key, count, |[byte]: [u8; 1]| byte)?;
                Array::Bool(bytes.into_iter().map(|byte| truth(key, byte)).collect::<Result<_, _>>()?)
            }
            8 => {
                // Each text has at least its length of 8 bytes.
                self.reserve(|| key.to_owned(), count.checked_mul(8))?;
                let mut texts = Vec::new();
                for index in 0..count {
                    texts.push(self.string(|| format!("{key}[{index}]"), u64::MAX)?);
                }
                Array::String(texts)
            }
            10 => Array::U64(self.numbers(key, count, u64::from_le_bytes)?),
            11 => Array::I64(self.numbers(key, count, i64::from_le_bytes)?),
            12 => Array::F64(self.numbers(key, count, f64::from_le_bytes)?),
            // Lists of lists (type 9) exist in the format, but no reader of models accepts them.
            _ => return Err(ContainerError::ValueType { key: key.to_owned(), id, note: " as an element of a list" }),
        })
    }

    fn tensors(&mut self, count: u64) -> Result<Vec<GgufTensor>, ContainerError> {
        let mut tensors = Vec::new();
        let mut names = HashSet::new();
        for index in 0..count {
            let name = self.string(|| format!("the name of tensor {index}"), MAX_NAME_BYTES)?;
            if name.is_empty() || !names.insert(name.clone()) {
                return Err(ContainerError::Name(name));
            }
            let dimensions = self.u32(&name)?;
            if dimensions == 0 || dimensions > MAX_DIMENSIONS {
                let dims = vec![u64::from(dimensions)];
                return Err(ContainerError::Dimensions { tensor: name, dims });
            }
            let mut dims = Vec::with_capacity(dimensions as usize);
            for _ in 0..dimensions {
                dims.push(self.u64(&name)?);
            }
            let id = self.u32(&name)?;
            let offset = self.u64(&name)?;
            let kind = match TensorType::of(id) {
                Ok(kind) => kind,
                Err(kind) => return Err(ContainerError::UnsupportedType { tensor: name, kind }),
            };
            let bytes = bytes_of(&name, &dims, kind)?;
            // The offset is still relative to the beginning of the tensor data.
            tensors.push(GgufTensor { name, dims, kind, offset, bytes });
        }
        Ok(tensors)
    }

    fn count(&mut self, what: &str, most: u64) -> Result<u64, ContainerError> {
        match self.u64(what)? {
            has if has > most => Err(ContainerError::TooMany { what: what.to_owned(), has, most }),
            has => Ok(has),
        }
    }

    /// Reads `count` numbers of `N` bytes each.
    fn numbers<T, const N: usize>(
        &mut self,
        key: &str,
        count: u64,
        from: impl Fn([u8; N]) -> T,
    ) -> Result<Vec<T>, ContainerError> {
        let bytes = self.bytes(|| key.to_owned(), count.checked_mul(N as u64))?;
        Ok(bytes.as_chunks::<N>().0.iter().map(|chunk| from(*chunk)).collect())
    }

    /// Reads a text of at most `most` bytes, which is preceded by its length.
    fn string(&mut self, what: impl Fn() -> String, most: u64) -> Result<String, ContainerError> {
        let mut length = [0; 8];
        self.fill(&mut length, &what)?;
        let length = u64::from_le_bytes(length);
        self.texts += 1;
        if self.texts > MAX_TEXTS {
            let what = "the number of texts".to_owned();
            return Err(ContainerError::TooMany { what, has: self.texts, most: MAX_TEXTS });
        }
        if length > most {
            return Err(ContainerError::TooMany { what: format!("the length of {}", what()), has: length, most });
        }
        let bytes = self.bytes(&what, Some(length))?;
        String::from_utf8(bytes).map_err(|_| ContainerError::NotText(what()))
    }

    /// Reads `length` bytes; `None` stands for a length that overflows.
    fn bytes(&mut self, what: impl Fn() -> String, length: Option<u64>) -> Result<Vec<u8>, ContainerError> {
        let length = self.reserve(&what, length)?;
        let mut bytes = Vec::new();
        while (bytes.len() as u64) < length {
            // The buffer grows with what has been read, not with what the file claims.
            let begin = bytes.len();
            let step = (length - begin as u64).min(CHUNK.max(begin) as u64) as usize;
            bytes.resize(begin + step, 0);
            self.fill(&mut bytes[begin..], &what)?;
        }
        Ok(bytes)
    }

    /// Checks that the header and the file have room for `length` more bytes.
    fn reserve(&self, what: impl Fn() -> String, length: Option<u64>) -> Result<u64, ContainerError> {
        let needs = length.and_then(|length| self.position.checked_add(length)).unwrap_or(u64::MAX);
        if needs > self.len {
            return Err(ContainerError::Truncated { what: what(), needs, has: self.len });
        }
        if needs > MAX_HEADER_BYTES {
            return Err(ContainerError::TooLong { what: what(), needs, most: MAX_HEADER_BYTES });
        }
        Ok(needs - self.position)
    }

    fn fill(&mut self, bytes: &mut [u8], what: impl Fn() -> String) -> Result<(), ContainerError> {
        self.reserve(&what, Some(bytes.len() as u64))?;
        self.reader.read_exact(bytes).map_err(|error| match error.kind() {
            ErrorKind::UnexpectedEof => ContainerError::Truncated {
                what: what(),
                needs: self.position + bytes.len() as u64,
                // The reader ended before the length that the caller stated; how much it had is not known.
                has: self.position,
            },
            _ => ContainerError::Unreadable(error.to_string()),
        })?;
        self.position += bytes.len() as u64;
        Ok(())
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], ContainerError> {
        let mut bytes = [0; N];
        self.fill(&mut bytes, || what.to_owned())?;
        Ok(bytes)
    }

    fn u32(&mut self, what: &str) -> Result<u32, ContainerError> {
        self.array(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &str) -> Result<u64, ContainerError> {
        self.array(what).map(u64::from_le_bytes)
    }
}

fn truth(what: &str, byte: u8) -> Result<bool, ContainerError> {
    match byte {
        0 => Ok(false),
        1 => Ok(true),
        has => Err(ContainerError::Flag { what: what.to_owned(), has }),
    }
}

fn alignment(metadata: &BTreeMap<String, Value>) -> Result<u64, ContainerError> {
    match metadata.get(ALIGNMENT_KEY) {
        None => Ok(DEFAULT_ALIGNMENT),
        Some(Value::U32(n)) if n.is_power_of_two() && u64::from(*n) <= MAX_ALIGNMENT => Ok(u64::from(*n)),
        Some(other) => Err(ContainerError::Alignment(other.to_string())),
    }
}

/// Returns the size of a tensor in bytes. It fits in 63 bits.
fn bytes_of(name: &str, dims: &[u64], kind: TensorType) -> Result<u64, ContainerError> {
    if dims.contains(&0) {
        return Err(ContainerError::Dimensions { tensor: name.to_owned(), dims: dims.to_owned() });
    }
    let (block, cols) = (kind.block_elements(), dims[0]);
    if !cols.is_multiple_of(block) {
        return Err(ContainerError::Blocks { tensor: name.to_owned(), cols, kind: kind.name(), block });
    }
    let too_large = || ContainerError::Size { tensor: name.to_owned(), kind: kind.name(), dims: dims.to_owned() };
    let elements = dims.iter().try_fold(1u64, |product, n| product.checked_mul(*n)).ok_or_else(too_large)?;
    let bytes = (elements / block).checked_mul(kind.block_bytes()).ok_or_else(too_large)?;
    if elements.max(bytes) > i64::MAX as u64 {
        return Err(too_large());
    }
    Ok(bytes)
}

/// Turns the tensors' offsets into offsets from the beginning of the file, and checks that each is aligned and inside
/// the file, and that no two overlap.
fn place(tensors: &mut [GgufTensor], data_start: u64, alignment: u64, len: u64) -> Result<(), ContainerError> {
    for tensor in tensors.iter_mut() {
        if !tensor.offset.is_multiple_of(alignment) {
            let (tensor, offset) = (tensor.name.clone(), tensor.offset);
            return Err(ContainerError::Unaligned { tensor, offset, alignment });
        }
        let offset = data_start.checked_add(tensor.offset);
        let needs = offset.and_then(|offset| offset.checked_add(tensor.bytes)).unwrap_or(u64::MAX);
        if needs > len {
            return Err(ContainerError::OutsideFile { tensor: tensor.name.clone(), needs, has: len });
        }
        tensor.offset = needs - tensor.bytes;
    }
    let mut order: Vec<&GgufTensor> = tensors.iter().collect();
    order.sort_by_key(|tensor| tensor.offset);
    for pair in order.windows(2) {
        let end = pair[0].offset + pair[0].bytes;
        if end > pair[1].offset {
            let (first, second) = (pair[0].name.clone(), pair[1].name.clone());
            return Err(ContainerError::Overlap { first, end, second, begin: pair[1].offset });
        }
    }
    Ok(())
}
