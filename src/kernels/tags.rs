//! Tagged activations, the host half of `tags.glsl`: the generation numbers of a recording's buffers, the tagged
//! operands of a call, the call that clears tags at the start of a step, and a check that no reader can mistake a stale
//! word for a new one. Not here: where barriers are needed (`barriers`).

use super::barriers;
use super::host_memory::HostMemory;
use super::recording::{Access, Arg, BufferId, Call, Op, Range, Recording};
use super::shaders::{self, ClearTagsArgs, ClearTagsConstants};
use std::collections::{HashMap, HashSet};

/// The number of low bits of a word that hold its tag.
pub const TAG_BITS: u32 = 7;
/// The bits of a word that hold its tag.
pub const TAG_MASK: u32 = (1 << TAG_BITS) - 1;

/// The number of bits of a tag argument below the call's number.
pub const CALL_SHIFT: u32 = 8;

/// The maximum number of buffers that one `clear_tags` call can clear.
pub const MOST_CLEARED: usize = 10;

/// Returns the word of generation `tag` whose float value is nearest to `value`. Only the low [`TAG_BITS`] bits of
/// `tag` count.
pub fn tagged(value: f32, tag: u32) -> u32 {
    let tag = tag & TAG_MASK;
    let bits = value.to_bits();
    let mut magnitude = bits & 0x7fff_ffff;
    if magnitude < 0x7f80_0000 {
        magnitude = (magnitude + (1 << (TAG_BITS - 1))).max(tag) - tag;
    }
    bits & 0x8000_0000 | magnitude & !TAG_MASK | tag
}

/// Counts the writes of a recording to each of its tagged buffers.
#[derive(Clone, Debug, Default)]
pub struct Generations {
    written: HashMap<BufferId, u32>,
}

impl Generations {
    /// Creates generations in which the words of `range`'s buffer already have a tag.
    pub fn beginning(range: Range, tag: u32) -> Generations {
        // `tag_of` gives a count of at most TAG_MASK back unchanged.
        Generations { written: HashMap::from([(range.buffer, tag)]) }
    }

    /// Returns the tag of the current contents of `range`'s buffer; 0, which no write uses, before the first write.
    pub fn now(&self, range: Range) -> u32 {
        self.written.get(&range.buffer).map_or(0, |count| tag_of(*count))
    }

    /// Counts a write to `range`'s buffer and returns its tag.
    pub fn next(&mut self, range: Range) -> u32 {
        let count = self.written.entry(range.buffer).or_default();
        *count += 1;
        tag_of(*count)
    }
}

/// Returns the tag of a recording's `count`-th write to a buffer. Only the first write uses tag 1, so that a reader
/// that polls for it does not mistake the last write of an earlier step for the new one, even if the buffer is not
/// cleared (given at least two writes per step).
fn tag_of(count: u32) -> u32 {
    if count == 1 { 1 } else { 2 + (count - 2) % (TAG_MASK - 1) }
}

/// The tagged operands of a call and their tags.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flow {
    /// Whether the input is tagged.
    pub input_carried: bool,
    /// The tag of the input.
    pub input: u32,
    /// The tag of the output before the call.
    pub old: u32,
    /// The tag of the output, if the output is tagged. The input is tagged then, too, if the kernel has one.
    pub output: Option<u32>,
}

impl Flow {
    /// No operand is tagged.
    pub const NONE: Flow = Flow { input_carried: false, input: 0, old: 0, output: None };

    /// The value of a kernel's constant TAGGED.
    pub fn code(&self) -> u32 {
        match (self.input_carried, self.output) {
            (_, Some(_)) => 3,
            (true, None) => 1,
            (false, None) => 0,
        }
    }

    /// Marks a call's accesses to its tagged input and output.
    pub fn mark(&self, mut call: Call, input: Range, output: Range) -> Call {
        if self.input_carried {
            call = call.carry(input);
        }
        if self.output.is_some() {
            call = call.carry(output);
        }
        call
    }
}

/// Returns the call that zeroes tagged buffers.
///
/// # Panics
/// If there are more than [`MOST_CLEARED`] buffers, or the size of one is not a multiple of 16 bytes.
pub fn clear_tags(label: String, buffers: &[Range]) -> Call {
    assert!(buffers.len() <= MOST_CLEARED, "{} tagged buffers, at most {MOST_CLEARED} can be cleared", buffers.len());
    let threads = 128;
    let range = |at: usize| buffers.get(at).copied().unwrap_or(buffers[0].none());
    let words = |at: usize| {
        let bytes = buffers.get(at).map_or(0, |range| range.bytes);
        assert!(bytes.is_multiple_of(16), "a tagged buffer of {bytes} bytes");
        (bytes / 16) as u32
    };
    let args = ClearTagsArgs {
        a: range(0),
        b: range(1),
        c: range(2),
        d: range(3),
        e: range(4),
        f: range(5),
        g: range(6),
        h: range(7),
        i: range(8),
        j: range(9),
        a_words: words(0),
        b_words: words(1),
        c_words: words(2),
        d_words: words(3),
        e_words: words(4),
        f_words: words(5),
        g_words: words(6),
        h_words: words(7),
        i_words: words(8),
        j_words: words(9),
    };
    let most = (0..buffers.len()).map(words).max().unwrap_or(0);
    Call {
        kernel: "clear_tags",
        label,
        constants: ClearTagsConstants { threads }.into_values(),
        args: args.into_args(),
        groups: [most.div_ceil(threads), buffers.len() as u32, 1],
    }
}

pub(super) fn reference_clear_tags(call: &Call, memory: &mut HostMemory) {
    let a = ClearTagsArgs::from_args(&call.args);
    let buffers = [
        (a.a, a.a_words),
        (a.b, a.b_words),
        (a.c, a.c_words),
        (a.d, a.d_words),
        (a.e, a.e_words),
        (a.f, a.f_words),
        (a.g, a.g_words),
        (a.h, a.h_words),
        (a.i, a.i_words),
        (a.j, a.j_words),
    ];
    for (range, words) in buffers {
        (0..words * 4).for_each(|word| memory.set_u32(range, word, 0));
    }
}

/// The names of the arguments that hold a tag that the call polls for.
const AWAITED: [&str; 7] = ["x_tag", "beside_tag", "qkv_tag", "logits_tag", "shared_tag", "old_tag", "o_tag"];

/// Puts each call's number (its position among the recording's operations, starting at 1) into the upper bits of the
/// tags that it polls for, so that the fault word names the call that polled too long. In a recording that exchanges words
/// with other devices, time in which it waits for them does not count as polling.
pub fn number_calls(recording: &mut Recording) {
    let devices = recording.ops.iter().any(|op| matches!(op, Op::Call(call) if call.kernel == "all_reduce"));
    for (op, number) in recording.ops.iter_mut().zip(1u32..) {
        let Op::Call(call) = op else { continue };
        if !call.args.iter().any(|arg| matches!(arg, Arg::Carried(..))) {
            continue;
        }
        let constants = shaders::find(call.kernel).constants;
        if let Some((id, _)) = constants.iter().find(|(_, name)| *name == "devices") {
            call.constants[*id as usize] = u32::from(devices);
        }
        for (arg, field) in call.args.iter_mut().zip(shaders::find(call.kernel).fields) {
            if let Arg::U32(tag) = arg
                && AWAITED.contains(&field.name)
            {
                *tag = (*tag & TAG_MASK) | number << CALL_SHIFT;
            }
        }
    }
}

/// A place at which a call polls for tagged words that another call writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Poll {
    /// The call's number (`number_calls`).
    pub number: u32,
    /// The name of the argument that holds the tag, for example `x_tag`.
    pub tag: &'static str,
}

/// Returns the places at which the calls of a recording poll and can be broken ([`break_poll`]), in the order of the calls. Not
/// among them are the splits' partial results, which attention writes and reads within one call, and the first words of a
/// buffer, if no barrier separates them from those of an earlier step.
pub fn polls(recording: &Recording) -> Vec<Poll> {
    let mut polls = Vec::new();
    let all = polled(recording, &mut |polled| {
        if !polled.states.contains(&Held::Unknown) {
            polls.push(Poll { number: polled.number, tag: polled.tag });
        }
        Ok(())
    });
    assert_eq!(all, Ok(()), "the visitor accepts everything");
    polls
}

/// Makes a call poll for words that are never written: an injected fault, for tests. Returns why that is impossible, if it
/// is: the polled buffer may hold words of an earlier step, which can have any tag, or all tags occur in it.
pub fn break_poll(recording: &Recording, poll: Poll) -> Result<Recording, String> {
    let mut never = None;
    polled(recording, &mut |polled| {
        if (polled.number, polled.tag) != (poll.number, poll.tag) {
            return Ok(());
        }
        let name = &recording.decl(polled.buffer).name;
        if polled.states.contains(&Held::Unknown) {
            return Err(format!("\"{}\" cannot be broken: \"{name}\" may hold any tag", polled.call.label));
        }
        let tag = never_written(&written(recording, polled.buffer));
        never = Some(tag.ok_or_else(|| {
            format!("\"{}\" cannot be broken: a step writes \"{name}\" with every tag", polled.call.label)
        })?);
        Ok(())
    })?;
    let never = never.ok_or_else(|| format!("call {} of \"{}\" has no {}", poll.number, recording.name, poll.tag))?;
    let mut broken = recording.clone();
    let Op::Call(call) = &mut broken.ops[poll.number as usize - 1] else { unreachable!("only calls poll") };
    let fields = shaders::find(call.kernel).fields;
    let (tag, _) = call.args.iter_mut().zip(fields).find(|(_, field)| field.name == poll.tag).expect("found above");
    *tag = Arg::U32((tag.u32() & !TAG_MASK) | never);
    Ok(broken)
}

/// Returns a tag that is none of `written`, and not that of cleared words.
fn never_written(written: &HashSet<u32>) -> Option<u32> {
    (1..=TAG_MASK).rev().find(|tag| !written.contains(tag))
}

/// Returns all tags that words of a buffer have in a recording: those that the recording writes, and the tag of the
/// words before it.
fn written(recording: &Recording, buffer: BufferId) -> HashSet<u32> {
    let calls = recording.ops.iter().filter_map(|op| match op {
        Op::Call(call) => Some(call),
        _ => None,
    });
    let before = recording.tagged_inputs.iter().copied();
    calls.flat_map(carried_writes).chain(before).filter(|(of, _)| *of == buffer).map(|(_, tag)| tag).collect()
}

/// Returns the tag of a buffer's words at the end of a recording, if they are tagged.
pub fn last_tag(recording: &Recording, buffer: &str) -> Option<u32> {
    let calls = recording.ops.iter().filter_map(|op| match op {
        Op::Call(call) => Some(call),
        _ => None,
    });
    let written = calls.flat_map(carried_writes).filter(|(of, _)| recording.decl(*of).name == buffer);
    written.last().map(|(_, tag)| tag)
}

/// Returns the tag that an argument of a call holds.
fn tag_argument(call: &Call, name: &str) -> Option<u32> {
    let at = shaders::find(call.kernel).fields.iter().position(|field| field.name == name)?;
    Some(call.args[at].u32() & TAG_MASK)
}

/// Returns the tagged buffers that a call accesses, except those of the splits' partial results, and the names of their
/// arguments.
fn carried(call: &Call, access: fn(Access) -> bool) -> impl Iterator<Item = (BufferId, &'static str)> {
    let scratch = |name: &str| matches!(name, "partials" | "counters");
    call.args.iter().zip(shaders::find(call.kernel).fields).filter_map(move |(arg, field)| match arg {
        Arg::Carried(range, found) if range.bytes > 0 && access(*found) && !scratch(field.name) => {
            Some((range.buffer, field.name))
        }
        _ => None,
    })
}

/// Returns the tagged buffers that a call writes, with the tags.
fn carried_writes(call: &Call) -> impl Iterator<Item = (BufferId, u32)> {
    carried(call, Access::writes).filter_map(|(buffer, name)| {
        let tag = match name {
            "o" => tag_argument(call, "o_tag"),
            "x" if call.kernel.starts_with("embed_rows") => tag_argument(call, "x_tag"),
            _ => tag_argument(call, "y_tag"),
        };
        Some((buffer, tag?))
    })
}

/// The generation of a buffer's words, as [`polled`] tracks it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Held {
    /// Written by an earlier region, or never written: the tag can be any but 1, which only first writes use.
    Unknown,
    /// Written by this recording.
    Tag(u32),
}

/// A call that polls, and the contents that it may find.
struct Polled<'a> {
    number: u32,
    call: &'a Call,
    /// The name of the argument that holds the tag.
    tag: &'static str,
    buffer: BufferId,
    awaited: u32,
    /// The possible contents of the buffer while the call polls, the newest last: those at the last barrier and
    /// everything written since.
    states: &'a [Held],
}

/// Checks that every reader of tagged words can distinguish the words that it polls for from all others that the buffer
/// may hold while it polls. Returns a description of the first reader that cannot.
///
/// The splits' partial results (`attention.partials`), which attention writes and reads within one call, are not
/// checked. They are not cleared either, and until the step's first layer has written them they have the last layer's tag
/// of the step before. So a workgroup looks at them only after it has found tagged words of its own layer's qkv.
pub fn check(recording: &Recording) -> Result<(), String> {
    polled(recording, &mut |polled| {
        let Some((last, others)) = polled.states.split_last() else { return Ok(()) };
        let stale = |state: &Held| match state {
            Held::Unknown => polled.awaited != 1,
            Held::Tag(tag) => *tag == polled.awaited,
        };
        if *last != Held::Tag(polled.awaited) || others.iter().any(stale) {
            return Err(format!(
                "\"{}\" waits for tag {} of \"{}\", which may hold {:?} meanwhile",
                polled.call.label,
                polled.awaited,
                recording.decl(polled.buffer).name,
                polled.states
            ));
        }
        Ok(())
    })
}

/// Calls `visit` for every place at which a call polls, in order, until it returns an error.
fn polled(recording: &Recording, visit: &mut dyn FnMut(&Polled<'_>) -> Result<(), String>) -> Result<(), String> {
    let needed = barriers::derive(&recording.ops);
    let before = recording.tagged_inputs.iter().map(|(buffer, tag)| (*buffer, vec![Held::Tag(*tag)]));
    let mut held: HashMap<BufferId, Vec<Held>> = before.collect();
    for ((op, barrier), number) in recording.ops.iter().zip(needed).zip(1u32..) {
        if barrier {
            for states in held.values_mut() {
                *states = states.last().copied().into_iter().collect();
            }
        }
        for touch in op.touches().iter().filter(|touch| !touch.carried && touch.access.writes()) {
            let cleared = matches!(op, Op::Call(call) if call.kernel == "clear_tags");
            held.insert(touch.range.buffer, vec![if cleared { Held::Tag(0) } else { Held::Unknown }]);
        }
        let Op::Call(call) = op else { continue };
        // The tagged inputs, and the output if there is a residual.
        for (buffer, name) in carried(call, Access::reads) {
            let tag = match name {
                "qkv" => "qkv_tag",
                "logits" => "logits_tag",
                "beside" => "beside_tag",
                "shared_weight" => "shared_tag",
                "y" => "old_tag",
                _ => "x_tag",
            };
            let Some(awaited) = tag_argument(call, tag) else { continue };
            let states = held.entry(buffer).or_insert_with(|| vec![Held::Unknown]);
            // Products without a residual, the first stage of experts and sums that replace y do not read it.
            let replaces = shaders::find(call.kernel)
                .constants
                .iter()
                .zip(&call.constants)
                .any(|((_, of), value)| ["epilogue", "add"].contains(of) && *value != 1);
            // The parts of one product add to the same generation: a part after the first finds that generation already
            // present.
            let own = tag_argument(call, "y_tag");
            let states = match states.split_last() {
                Some((newest, before)) if name == "y" && own.is_some_and(|own| *newest == Held::Tag(own)) => before,
                _ => &states[..],
            };
            if name == "y" && replaces {
                continue;
            }
            visit(&Polled { number, call, tag, buffer, awaited, states })?;
        }
        for (buffer, made) in carried_writes(call) {
            let states = held.entry(buffer).or_insert_with(|| vec![Held::Unknown]);
            // The parts of one product write the same generation.
            if states.last() != Some(&Held::Tag(made)) {
                states.push(Held::Tag(made));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tagged_word_is_near_its_value_and_has_its_tag() {
        for bits in (0..=u32::MAX).step_by(65_537) {
            let value = f32::from_bits(bits);
            for tag in [0, 1, 63, 64, 127] {
                let word = tagged(value, tag);
                assert_eq!(word & TAG_MASK, tag);
                let near = f32::from_bits(word);
                if value.is_finite() && value.abs() < 1e38 {
                    let limit = f64::from(value.abs()) * 2f64.powi(-17) + 2e-43;
                    assert!((f64::from(near) - f64::from(value)).abs() <= limit, "{value:e} became {near:e}");
                } else if value.is_nan() {
                    assert!(near.is_nan() || near.is_infinite());
                }
            }
        }
    }

    #[test]
    fn a_tag_that_is_never_written_is_no_tag_of_cleared_words_and_may_not_exist() {
        let most: HashSet<u32> = (0..=TAG_MASK).filter(|tag| *tag != 40).collect();
        assert_eq!(never_written(&most), Some(40));
        assert_eq!(never_written(&(1..=TAG_MASK).collect()), None);
    }

    #[test]
    fn consecutive_writes_differ_also_from_one_step_to_the_next() {
        for writes in 2..600 {
            let tags: Vec<u32> = (1..=writes).map(tag_of).collect();
            assert!(tags.iter().all(|tag| (1..=TAG_MASK).contains(tag)));
            assert!(tags.windows(2).all(|pair| pair[0] != pair[1]));
            assert_ne!(tags.last(), tags.first(), "{writes} writes a step");
        }
    }
}
