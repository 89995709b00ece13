//! Tests of the module, and what they share: a writer of GGUF files and a random number generator.

mod container;
mod families;
mod hostile;
mod metadata;
mod split;
mod tensors;
mod vocabulary;

use super::container::{Array, TensorType, Value};
use crate::model::split_mix::split_mix;

/// The content of a GGUF file, to be written.
#[derive(Clone, Debug)]
pub(super) struct File {
    pub(super) version: u32,
    pub(super) alignment: u64,
    pub(super) pairs: Vec<(String, Value)>,
    pub(super) tensors: Vec<Tensor>,
}

/// A tensor to be written. Its data are zeros unless given.
#[derive(Clone, Debug)]
pub(super) struct Tensor {
    pub(super) name: String,
    pub(super) dims: Vec<u64>,
    pub(super) kind: u32,
    pub(super) offset: u64,
    pub(super) bytes: u64,
    pub(super) data: Vec<u8>,
}

impl File {
    pub(super) fn new() -> File {
        File { version: 3, alignment: 32, pairs: Vec::new(), tensors: Vec::new() }
    }

    pub(super) fn pair(mut self, key: &str, value: Value) -> File {
        self.pairs.push((key.to_owned(), value));
        self
    }

    /// Adds a tensor behind the others.
    pub(super) fn tensor(mut self, name: &str, dims: &[u64], kind: TensorType) -> File {
        let end = self.tensors.last().map_or(0, |last| last.offset + last.bytes);
        let bytes = dims.iter().product::<u64>() / kind.block_elements() * kind.block_bytes();
        let offset = end.next_multiple_of(self.alignment);
        let (name, dims, kind) = (name.to_owned(), dims.to_owned(), kind.id());
        self.tensors.push(Tensor { name, dims, kind, offset, bytes, data: Vec::new() });
        self
    }

    pub(super) fn header(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.pairs.len() as u64).to_le_bytes());
        for (key, value) in &self.pairs {
            string(&mut out, key);
            write_value(&mut out, value);
        }
        for tensor in &self.tensors {
            string(&mut out, &tensor.name);
            out.extend((tensor.dims.len() as u32).to_le_bytes());
            for dim in &tensor.dims {
                out.extend(dim.to_le_bytes());
            }
            out.extend(tensor.kind.to_le_bytes());
            out.extend(tensor.offset.to_le_bytes());
        }
        out
    }

    pub(super) fn bytes(&self) -> Vec<u8> {
        let mut out = self.header();
        if self.tensors.is_empty() {
            return out;
        }
        let start = (out.len() as u64).next_multiple_of(self.alignment);
        for tensor in &self.tensors {
            let (begin, end) = ((start + tensor.offset) as usize, (start + tensor.offset + tensor.bytes) as usize);
            out.resize(out.len().max(end), 0);
            out[begin..begin + tensor.data.len()].copy_from_slice(&tensor.data);
        }
        out
    }
}

fn string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn write_value(out: &mut Vec<u8>, value: &Value) {
    let id = |out: &mut Vec<u8>, id: u32| out.extend(id.to_le_bytes());
    macro_rules! number {
        ($n:expr, $id:expr) => {{
            id(out, $id);
            out.extend($n.to_le_bytes());
        }};
    }
    match value {
        Value::U8(n) => number!(n, 0),
        Value::I8(n) => number!(n, 1),
        Value::U16(n) => number!(n, 2),
        Value::I16(n) => number!(n, 3),
        Value::U32(n) => number!(n, 4),
        Value::I32(n) => number!(n, 5),
        Value::F32(n) => number!(n, 6),
        Value::Bool(flag) => number!(u8::from(*flag), 7),
        Value::U64(n) => number!(n, 10),
        Value::I64(n) => number!(n, 11),
        Value::F64(n) => number!(n, 12),
        Value::String(text) => {
            id(out, 8);
            string(out, text);
        }
        Value::Array(array) => {
            id(out, 9);
            macro_rules! numbers {
                ($v:expr, $id:expr) => {{
                    id(out, $id);
                    out.extend(($v.len() as u64).to_le_bytes());
                    $v.iter().for_each(|n| out.extend(n.to_le_bytes()));
                }};
            }
            match array {
                Array::U8(v) => numbers!(v, 0),
                Array::I8(v) => numbers!(v, 1),
                Array::U16(v) => numbers!(v, 2),
                Array::I16(v) => numbers!(v, 3),
                Array::U32(v) => numbers!(v, 4),
                Array::I32(v) => numbers!(v, 5),
                Array::F32(v) => numbers!(v, 6),
                Array::U64(v) => numbers!(v, 10),
                Array::I64(v) => numbers!(v, 11),
                Array::F64(v) => numbers!(v, 12),
                Array::Bool(v) => {
                    let v: Vec<u8> = v.iter().map(|flag| u8::from(*flag)).collect();
                    numbers!(v, 7);
                }
                Array::String(v) => {
                    id(out, 8);
                    out.extend((v.len() as u64).to_le_bytes());
                    v.iter().for_each(|text| string(out, text));
                }
            }
        }
    }
}

/// A small random number generator (SplitMix64).
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        split_mix(&mut self.0)
    }

    pub(super) fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }
}

pub(super) fn text(value: &str) -> Value {
    Value::String(value.to_owned())
}

/// A small model of one layer with its tokenizer: every part of the module has something to do with it.
pub(super) fn small_model() -> File {
    let tokens: Vec<String> = ["a", "b", "ab", "<|im_end|>"].map(str::to_owned).into();
    let f32 = TensorType::F32;
    File::new()
        .pair("general.architecture", text("llama"))
        .pair("llama.block_count", Value::U32(1))
        .pair("llama.context_length", Value::U32(64))
        .pair("llama.embedding_length", Value::U32(8))
        .pair("llama.feed_forward_length", Value::U32(4))
        .pair("llama.attention.head_count", Value::U32(2))
        .pair("llama.attention.head_count_kv", Value::U32(1))
        .pair("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-6))
        .pair("llama.rope.freq_base", Value::F32(500_000.0))
        .pair("tokenizer.ggml.model", text("gpt2"))
        .pair("tokenizer.ggml.pre", text("qwen2"))
        .pair("tokenizer.ggml.tokens", Value::Array(Array::String(tokens)))
        .pair("tokenizer.ggml.token_type", Value::Array(Array::I32(vec![1, 1, 1, 3])))
        .pair("tokenizer.ggml.merges", Value::Array(Array::String(vec!["a b".to_owned()])))
        .pair("tokenizer.ggml.eos_token_id", Value::U32(3))
        .pair("tokenizer.chat_template", text("{{ messages }}"))
        .tensor("token_embd.weight", &[8, 4], f32)
        .tensor("output_norm.weight", &[8], f32)
        .tensor("blk.0.attn_norm.weight", &[8], f32)
        .tensor("blk.0.attn_q.weight", &[8, 8], f32)
        .tensor("blk.0.attn_k.weight", &[8, 4], f32)
        .tensor("blk.0.attn_v.weight", &[8, 4], f32)
        .tensor("blk.0.attn_output.weight", &[8, 8], f32)
        .tensor("blk.0.ffn_norm.weight", &[8], f32)
        .tensor("blk.0.ffn_gate.weight", &[8, 4], f32)
        .tensor("blk.0.ffn_up.weight", &[8, 4], f32)
        .tensor("blk.0.ffn_down.weight", &[4, 8], f32)
}
