//! A scan of an encoded protobuf message that counts the elements of its repeated fields before the message is decoded.
//! An empty element takes two bytes on the wire and up to several hundred bytes once decoded, so the length of a
//! message says little about the memory that decoding it takes; the counts do.
//! Not here: the decoding itself (prost), and what the values of a message may be (`bounds`, `prepare`).

use super::proto;
use super::refusal::Refusal;
use prost::Message as _;
use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{DescriptorProto, FieldDescriptorProto, FileDescriptorSet};
use std::collections::HashMap;
use std::sync::OnceLock;

/// The most elements of one repeated field of messages, strings or bytes (maps included), counted over the whole
/// message: four times `bounds::MAX_CHAT_MESSAGES`, the largest bound of such a field. A larger decoded element has a
/// few hundred bytes, so one field takes a few MiB at most.
pub const MAX_ELEMENTS: usize = 16_384;
/// The most elements of one repeated field of numbers, counted over the whole message: more token ids than the context
/// of any model holds. Decoded they take 16 MiB.
pub const MAX_NUMBERS: usize = 4 << 20;
/// The deepest nesting that prost decodes.
const DEPTH: usize = 100;

/// The fields of all request messages, by method.
#[derive(Debug)]
pub struct Schema {
    messages: Vec<Vec<Field>>,
    /// `Message.field` of each repeated field, for refusals.
    repeated: Vec<String>,
    /// The index of the request message of each method, by path (`/package.Service/Method`).
    methods: HashMap<String, usize>,
}

#[derive(Debug)]
struct Field {
    number: u64,
    kind: Kind,
    /// The index of a repeated field in [`Schema::repeated`].
    repeated: Option<usize>,
}

/// How a field is encoded, as far as the scan needs it.
#[derive(Clone, Copy, Debug)]
enum Kind {
    /// A message, by its index.
    Message(usize),
    /// A string or bytes.
    Bytes,
    /// A number of variable length.
    Varint,
    /// A number of this many bytes.
    Fixed(usize),
}

/// The schema of both contracts that the server implements.
pub fn schema() -> &'static Schema {
    static SCHEMA: OnceLock<Schema> = OnceLock::new();
    SCHEMA.get_or_init(|| {
        let set = FileDescriptorSet::decode(proto::descriptors()).expect("the build script encodes it");
        Schema::of(&set)
    })
}

/// A message type with its full name, and the types that are declared inside it.
fn declared<'a>(scope: &str, message: &'a DescriptorProto, all: &mut Vec<(String, &'a DescriptorProto)>) {
    let name = format!("{scope}.{}", message.name());
    message.nested_type.iter().for_each(|inner| declared(&name, inner, all));
    all.push((name, message));
}

impl Schema {
    fn of(set: &FileDescriptorSet) -> Schema {
        let mut all = Vec::new();
        for file in &set.file {
            let scope = format!(".{}", file.package());
            file.message_type.iter().for_each(|message| declared(&scope, message, &mut all));
        }
        let index: HashMap<&str, usize> =
            all.iter().enumerate().map(|(index, (name, _))| (name.as_str(), index)).collect();
        let mut repeated = Vec::new();
        let mut field = |message: &DescriptorProto, field: &FieldDescriptorProto| Field {
            number: u64::from(field.number().unsigned_abs()),
            kind: match field.r#type() {
                Type::Message => index.get(field.type_name()).map_or(Kind::Bytes, |index| Kind::Message(*index)),
                Type::String | Type::Bytes | Type::Group => Kind::Bytes,
                Type::Double | Type::Fixed64 | Type::Sfixed64 => Kind::Fixed(8),
                Type::Float | Type::Fixed32 | Type::Sfixed32 => Kind::Fixed(4),
                _ => Kind::Varint,
            },
            repeated: (field.label() == Label::Repeated).then(|| {
                repeated.push(format!("{}.{}", message.name(), field.name()));
                repeated.len() - 1
            }),
        };
        let messages = all.iter().map(|(_, message)| message.field.iter().map(|f| field(message, f)).collect());
        let messages = messages.collect();
        let mut methods = HashMap::new();
        for file in &set.file {
            for service in &file.service {
                for method in &service.method {
                    if let Some(request) = index.get(method.input_type()) {
                        let path = format!("/{}.{}/{}", file.package(), service.name(), method.name());
                        methods.insert(path, *request);
                    }
                }
            }
        }
        Schema { messages, repeated, methods }
    }

    /// Whether a path names a method of the two contracts.
    pub fn has(&self, path: &str) -> bool {
        self.methods.contains_key(path)
    }

    /// Refuses the request message of a method if one of its repeated fields has more elements than [`MAX_ELEMENTS`] or
    /// [`MAX_NUMBERS`]. The message may be cut into parts anywhere. A message that is not valid protobuf is counted up
    /// to its error, which is how far the decoder gets, and is not refused here.
    pub fn check<'a>(&self, path: &str, parts: impl Iterator<Item = &'a [u8]>) -> Result<(), Refusal> {
        let Some(request) = self.methods.get(path) else { return Ok(()) };
        let mut counts = vec![Count::default(); self.repeated.len()];
        // `None`: the message is invalid from here on.
        let _ = self.count(*request, &mut Reader { parts, part: &[], at: 0 }, &mut counts);
        let too_many = |(name, count): (&String, &Count)| {
            let over = |elements: usize, most: usize| (elements > most).then_some((elements, most));
            let (elements, most) = over(count.elements, MAX_ELEMENTS).or(over(count.numbers, MAX_NUMBERS))?;
            Some(Refusal::Elements { field: name.clone(), elements, most })
        };
        self.repeated.iter().zip(&counts).find_map(too_many).map_or(Ok(()), Err)
    }

    fn count<'a, I>(&self, request: usize, reader: &mut Reader<'a, I>, counts: &mut [Count]) -> Option<()>
    where
        I: Iterator<Item = &'a [u8]>,
    {
        // The messages that the reader is in, and where they end. The outermost ends where the bytes do.
        let mut open = vec![(request, usize::MAX)];
        while let Some(&(message, end)) = open.last() {
            if reader.at >= end {
                open.pop();
                continue;
            }
            let key = reader.varint()?;
            let field = self.messages[message].iter().find(|field| field.number == key >> 3);
            let repeated = field.and_then(|field| field.repeated).map(|index| &mut counts[index]);
            match (key & 7, field.map(|field| field.kind)) {
                (2, kind) => {
                    let bytes = usize::try_from(reader.varint()?).ok()?;
                    let inner = reader.at.checked_add(bytes).filter(|inner| *inner <= end)?;
                    match (kind, repeated) {
                        (Some(Kind::Message(kind)), repeated) => {
                            repeated.into_iter().for_each(|count| count.elements += 1);
                            if open.len() > DEPTH {
                                return None;
                            }
                            open.push((kind, inner));
                        }
                        (Some(Kind::Varint), Some(count)) => count.numbers += reader.varints(bytes)?,
                        (Some(Kind::Fixed(width)), Some(count)) => {
                            count.numbers += bytes / width;
                            reader.skip(bytes)?;
                        }
                        (_, repeated) => {
                            repeated.into_iter().for_each(|count| count.elements += 1);
                            reader.skip(bytes)?;
                        }
                    }
                }
                (wire, _) => {
                    repeated.into_iter().for_each(|count| count.numbers += 1);
                    match wire {
                        0 => drop(reader.varint()?),
                        1 => reader.skip(8)?,
                        5 => reader.skip(4)?,
                        // The begin and the end of a group, which has no length: its fields follow.
                        3 | 4 => {}
                        _ => return None,
                    }
                }
            }
        }
        Some(())
    }
}

/// The elements of one repeated field.
#[derive(Clone, Copy, Debug, Default)]
struct Count {
    /// Messages, strings and bytes.
    elements: usize,
    numbers: usize,
}

/// Reads bytes that are cut into parts. All methods return `None` at the end of the bytes.
struct Reader<'a, I> {
    parts: I,
    /// The rest of the current part.
    part: &'a [u8],
    /// Bytes that were read.
    at: usize,
}

impl<'a, I: Iterator<Item = &'a [u8]>> Reader<'a, I> {
    fn byte(&mut self) -> Option<u8> {
        loop {
            if let Some((byte, rest)) = self.part.split_first() {
                (self.part, self.at) = (rest, self.at + 1);
                return Some(*byte);
            }
            self.part = self.parts.next()?;
        }
    }

    fn varint(&mut self) -> Option<u64> {
        let mut number = 0;
        for place in 0..10 {
            let byte = self.byte()?;
            number |= u64::from(byte & 0x7f) << (7 * place);
            if byte < 0x80 {
                return Some(number);
            }
        }
        None
    }

    /// Reads `bytes` bytes and gives them to `take` in slices.
    fn each(&mut self, mut bytes: usize, mut take: impl FnMut(&[u8])) -> Option<()> {
        while bytes > 0 {
            if self.part.is_empty() {
                self.part = self.parts.next()?;
                continue;
            }
            let (taken, rest) = self.part.split_at(bytes.min(self.part.len()));
            take(taken);
            (self.part, self.at, bytes) = (rest, self.at + taken.len(), bytes - taken.len());
        }
        Some(())
    }

    fn skip(&mut self, bytes: usize) -> Option<()> {
        self.each(bytes, |_| {})
    }

    /// The number of varints in the next `bytes` bytes: each ends with a byte below 0x80.
    fn varints(&mut self, bytes: usize) -> Option<usize> {
        let mut count = 0;
        self.each(bytes, |slice| count += slice.iter().filter(|byte| **byte < 0x80).count())?;
        Some(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::generate_request::Prompt;
    use proto::vllm::grpc::engine as contract;

    const GENERATE: &str = "/ostinato.v1.Ostinato/Generate";
    const THEIRS: &str = "/vllm.grpc.engine.VllmEngine/Generate";

    fn check(path: &str, bytes: &[u8]) -> Result<(), String> {
        let whole = schema().check(path, [bytes].into_iter()).map_err(|refusal| {
            assert_eq!(refusal.code(), tonic::Code::InvalidArgument);
            refusal.to_string()
        });
        // However the bytes are cut.
        for part in [1, 7, 65_536] {
            assert_eq!(schema().check(path, bytes.chunks(part)).map_err(|refusal| refusal.to_string()), whole);
        }
        whole
    }

    fn chat(messages: usize) -> Vec<u8> {
        let messages = vec![proto::ChatMessage::default(); messages];
        let request = proto::GenerateRequest {
            prompt: Some(Prompt::Chat(proto::Chat { messages, ..Default::default() })),
            cache_salt: "salt".to_owned(),
            ..Default::default()
        };
        request.encode_to_vec()
    }

    #[test]
    fn elements_are_counted_in_every_repeated_field_of_both_contracts() {
        assert_eq!(check(GENERATE, &chat(MAX_ELEMENTS)), Ok(()));
        let error = check(GENERATE, &chat(MAX_ELEMENTS + 7)).unwrap_err();
        assert_eq!(error, "Chat.messages has 16391 elements; the maximum for one message is 16384");

        let stopping = proto::Stopping { strings: vec![String::new(); 20_000], ..Default::default() };
        let request = proto::GenerateRequest { stopping: Some(stopping), ..Default::default() };
        assert!(check(GENERATE, &request.encode_to_vec()).unwrap_err().starts_with("Stopping.strings has 20000"));

        let biases = (0..20_000).map(|id| (id, 0.5)).collect();
        let sampling = proto::Sampling { logit_bias: biases, ..Default::default() };
        let request = proto::GenerateRequest { sampling: Some(sampling), ..Default::default() };
        assert!(check(GENERATE, &request.encode_to_vec()).unwrap_err().starts_with("Sampling.logit_bias has 20000"));

        let media = vec![contract::MultimodalInputs::default(); 20_000];
        let request = contract::GenerateRequest { extra_mm_inputs: media, ..Default::default() };
        let error = check(THEIRS, &request.encode_to_vec()).unwrap_err();
        assert!(error.starts_with("GenerateRequest.extra_mm_inputs has 20000"), "{error}");
        let aborted = contract::AbortRequest { request_ids: vec![String::new(); 20_000] };
        assert!(check("/vllm.grpc.engine.VllmEngine/Abort", &aborted.encode_to_vec()).is_err());

        // The field counts over the whole message, however its parts are spread.
        let halves = [chat(MAX_ELEMENTS / 2), chat(MAX_ELEMENTS / 2 + 1)].concat();
        assert!(check(GENERATE, &halves).is_err());
    }

    #[test]
    fn numbers_are_counted_packed_and_unpacked() {
        let path = "/ostinato.v1.Ostinato/Detokenize";
        let ids = |count| proto::DetokenizeRequest { token_ids: vec![300; count], ..Default::default() };
        assert_eq!(check(path, &ids(MAX_ELEMENTS * 2).encode_to_vec()), Ok(()));
        let whole = |bytes: &[u8]| schema().check(path, [bytes].into_iter()).map_err(|refusal| refusal.to_string());
        assert_eq!(whole(&ids(MAX_NUMBERS).encode_to_vec()), Ok(()));
        let error = "DetokenizeRequest.token_ids has 4194305 elements; the maximum for one message is 4194304";
        assert_eq!(whole(&ids(MAX_NUMBERS + 1).encode_to_vec()), Err(error.to_owned()));
        // Field 2, one varint each.
        assert_eq!(whole(&[0x10, 0x05].repeat(MAX_NUMBERS + 1)), Err(error.to_owned()));
    }

    /// Text is never read as a message, whatever it says; and no bytes end the scan in a panic.
    #[test]
    fn text_is_skipped_and_noise_is_counted_as_far_as_it_goes() {
        // As the elements of field 1, each empty.
        let text = "\n\0".repeat(50_000);
        let request = proto::GenerateRequest { prompt: Some(Prompt::Text(text)), ..Default::default() };
        assert_eq!(check(GENERATE, &request.encode_to_vec()), Ok(()));
        let mut cut = chat(100);
        cut.truncate(cut.len() - 20);
        assert_eq!(check(GENERATE, &cut), Ok(()));
        let mut seed = 1u64;
        for length in 0..500 {
            let noise: Vec<u8> = (0..length)
                .map(|_| {
                    seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (seed >> 56) as u8
                })
                .collect();
            let _ = check(GENERATE, &noise);
            let _ = check(THEIRS, &noise);
        }
        assert!(schema().has(GENERATE) && !schema().has("/grpc.health.v1.Health/Check"));
        assert_eq!(check("/grpc.health.v1.Health/Check", &chat(50_000)), Ok(()));
    }
}
