//! A simulated processor for programs in PTX: the instructions that `wgmma`, `flash_wgmma`, `skinny_codes.ptx` and
//! `expert_skinny.codes.ptx` consist of,
//! for tests without a GPU. What is asynchronous on the device happens as late as its rules allow: a bulk copy when no warp can
//! go on without it, and a group of products or of other copies when it is waited for. A program that reads or overwrites
//! something too early then computes something else. Loads happen at once, although on the device they may still be on their
//! way when the warp begins a bulk copy to where they read: a fence has to stand between them, and a copy without one ends the
//! test. Not here: instructions that no program uses; they end the test too.

use crate::harness::Cases;
use half::{bf16, f16};
use ostinato::kernels::host_memory::HostMemory;
use ostinato::kernels::programs;
use ostinato::kernels::ptx::PtxProgram;
use ostinato::kernels::recording::{Arg, Call, Op};
use ostinato::kernels::shaders::find;
use ostinato::quant::number::Number;
use std::cell::Cell;
use std::collections::{BTreeSet, HashMap, VecDeque};

/// The number of lanes of a warp.
const LANES: usize = 32;
/// Where shared memory that a program may use begins: not aligned to 1,024, so that the program has to do that.
const SHARED_AT: u64 = 1040;

/// The values of a register in the lanes of a warp.
type Values = [u64; LANES];
/// Whether each lane takes part.
type Mask = [bool; LANES];

/// An instruction.
#[derive(Debug)]
struct Instruction {
    /// The predicate's register, and the value for which the instruction is carried out.
    predicate: Option<(usize, bool)>,
    /// The operation's name, and its parts.
    name: String,
    operands: Vec<Operand>,
}

#[derive(Clone, Debug)]
enum Operand {
    Register(usize),
    Special(String),
    Number(u64),
    Label(String),
    /// A register plus a number of bytes; without a register, of the argument block or of shared memory.
    Address(Option<usize>, u64),
    List(Vec<usize>),
}

struct Warp {
    number: u32,
    at: usize,
    registers: Vec<Values>,
    active: Mask,
    /// Where lanes that have gone another way join again.
    join: Option<usize>,
    /// The named barrier at which the warp waits, and the barrier's turn.
    barrier: Option<(u64, u32)>,
    /// Products, of the groups that are committed and of the one that is not.
    groups: VecDeque<Vec<Product>>,
    open: Vec<Product>,
    /// Copies of 16 bytes, likewise: destination, source and the number of bytes that are not zero.
    copy_groups: VecDeque<Vec<[u64; 3]>>,
    open_copies: Vec<[u64; 3]>,
    /// The 16 bytes of shared memory each that the warp has read since its last fence between loads and bulk copies.
    read: BTreeSet<u64>,
    done: bool,
}

/// A product that has not happened yet.
#[derive(Clone, Copy)]
struct Product {
    /// The instruction.
    at: usize,
    /// The descriptor of A, if A is not in registers.
    a: Option<u64>,
    /// The descriptor of B.
    b: u64,
    /// Whether it adds to the sums.
    adds: bool,
}

#[derive(Debug)]
struct Barrier {
    count: i64,
    pending: i64,
    bytes: i64,
    phase: u64,
}

impl Barrier {
    fn check(&mut self) {
        assert!(self.pending >= 0, "{self:?}: too many arrivals");
        if self.pending == 0 && self.bytes == 0 {
            self.phase += 1;
            self.pending = self.count;
        }
    }
}

/// A bulk copy that has not happened yet: destination, source, bytes and barrier.
type Copy = [u64; 4];

/// The memory of the device: the address of each buffer, and its bytes.
type Memory = Vec<(u64, Vec<u8>)>;

/// A launch of a program.
struct Launch<'a> {
    text: &'a str,
    groups: u32,
    threads: u32,
    shared_bytes: u32,
    args: &'a [u8],
}

/// Runs the programs of cases, whose texts `change` may change, one after the other, and compares with the reference.
pub fn agree(cases: &Cases, change: impl Fn(&str) -> String) {
    let mut memory = cases.before();
    for op in &cases.recording.ops {
        let Op::Call(call) = op else { panic!("{op:?}") };
        memory = simulate(call, &memory, &change);
    }
    cases.compare(&cases.recording, &cases.reference(), &memory, "the simulated processor");
}

/// Requires that programs with `wrong` in the place of `right` do not agree with the reference, for each pair.
pub fn notices(cases: &Cases, changes: &[(&str, &str)]) {
    for (right, wrong) in changes {
        let found = Cell::new(false);
        let change = |text: &str| {
            found.set(found.get() || text.contains(right));
            text.replace(right, wrong)
        };
        let run = std::panic::AssertUnwindSafe(|| agree(cases, change));
        assert!(std::panic::catch_unwind(run).is_err(), "{wrong} is not noticed");
        assert!(found.get(), "the text has no {right}");
    }
}

/// Carries out a call, whose program's text `change` may change. Returns the memory after it.
pub fn simulate(call: &Call, memory: &HostMemory, change: impl Fn(&str) -> String) -> HostMemory {
    let base = |buffer: usize| (buffer as u64 + 1) << 32;
    let shader = find(call.kernel);
    let mut args = vec![0; shader.push_bytes as usize];
    for (arg, field) in call.args.iter().zip(shader.fields) {
        let bytes = match arg {
            Arg::Buffer(range, _) | Arg::Carried(range, _) => {
                (base(range.buffer.0 as usize) + range.offset).to_le_bytes().to_vec()
            }
            Arg::F32(value) => value.to_le_bytes().to_vec(),
            other => other.u32().to_le_bytes().to_vec(),
        };
        args[field.offset as usize..][..bytes.len()].copy_from_slice(&bytes);
    }
    let contents = memory.buffers.iter().map(|words| bytemuck::cast_slice(words).to_vec());
    let mut memory: Memory = contents.enumerate().map(|(buffer, bytes)| (base(buffer), bytes)).collect();
    let program = programs::program(call.kernel, &call.constants);
    let [groups, 1, 1] = call.groups else { panic!("{:?} workgroups", call.groups) };
    let PtxProgram { threads, shared_bytes, .. } = program;
    launch(&Launch { text: &change(&program.text), groups, threads, shared_bytes, args: &args }, &mut memory);
    let words = |bytes: &[u8]| bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    HostMemory { buffers: memory.iter().map(|(_, bytes)| words(bytes)).collect() }
}

/// Carries out a launch, one workgroup after the other.
fn launch(launch: &Launch<'_>, memory: &mut Memory) {
    let program = Program::read(launch.text);
    for group in 0..launch.groups {
        let mut processor = Processor {
            program: &program,
            launch,
            group,
            memory,
            shared: vec![0xff; SHARED_AT as usize + launch.shared_bytes as usize],
            barriers: HashMap::new(),
            named: HashMap::new(),
            copies: VecDeque::new(),
        };
        processor.run();
    }
}

struct Program {
    code: Vec<Instruction>,
    labels: HashMap<String, usize>,
    registers: usize,
}

impl Program {
    fn read(text: &str) -> Program {
        let body = &text[text.find('{').expect("a body") + 1..text.rfind('}').expect("a body")];
        let (mut code, mut labels, mut names) = (Vec::new(), HashMap::new(), HashMap::new());
        for line in body.lines() {
            let line = line.split("//").next().unwrap_or_default().trim();
            if line.is_empty() || line.starts_with(".reg") || line.starts_with(".pragma") {
                continue;
            }
            if let Some(label) = line.strip_suffix(':') {
                labels.insert(label.to_owned(), code.len());
                continue;
            }
            let mut line = line.trim_end_matches(';');
            let mut register = |name: &str| {
                let next = names.len();
                *names.entry(name.to_owned()).or_insert(next)
            };
            let mut predicate = None;
            if let Some(rest) = line.strip_prefix('@') {
                let (name, after) = rest.split_once(' ').expect("an instruction");
                predicate = Some((register(name.trim_start_matches('!')), !name.starts_with('!')));
                line = after;
            }
            let (name, rest) = line.split_once(' ').unwrap_or((line, ""));
            let operands = split(rest).iter().map(|operand| operand_of(operand, &mut register)).collect();
            code.push(Instruction { predicate, name: name.to_owned(), operands });
        }
        Program { code, labels, registers: names.len() }
    }
}

/// Splits operands at commas outside of brackets.
fn split(text: &str) -> Vec<String> {
    let (mut parts, mut depth) = (vec![String::new()], 0);
    for c in text.chars() {
        depth += i32::from("{[".contains(c)) - i32::from("}]".contains(c));
        match c {
            ',' | '|' if depth == 0 => parts.push(String::new()),
            c => parts.last_mut().expect("a part").push(c),
        }
    }
    parts.iter().map(|part| part.trim().to_owned()).filter(|part| !part.is_empty()).collect()
}

fn operand_of(text: &str, register: &mut impl FnMut(&str) -> usize) -> Operand {
    const SPECIAL: [&str; 4] = ["%tid.x", "%ctaid.x", "%nctaid.x", "shared"];
    if let Some(inner) = text.strip_prefix('[') {
        let inner = inner.trim_end_matches(']');
        let (base, offset) = inner.split_once('+').unwrap_or((inner, "0"));
        let base = base.starts_with('%').then(|| register(base));
        return Operand::Address(base, offset.parse().expect("an offset"));
    }
    if let Some(inner) = text.strip_prefix('{') {
        return Operand::List(inner.trim_end_matches('}').split(',').map(|name| register(name.trim())).collect());
    }
    if SPECIAL.contains(&text) {
        return Operand::Special(text.to_owned());
    }
    if text.starts_with('%') {
        return Operand::Register(register(text));
    }
    let hexadecimal = text.strip_prefix("0x").or_else(|| text.strip_prefix("0f"));
    let number = hexadecimal.map_or_else(|| text.parse().ok(), |digits| u64::from_str_radix(digits, 16).ok());
    number.map_or_else(|| Operand::Label(text.to_owned()), Operand::Number)
}

struct Processor<'a> {
    program: &'a Program,
    launch: &'a Launch<'a>,
    group: u32,
    memory: &'a mut Memory,
    shared: Vec<u8>,
    barriers: HashMap<u64, Barrier>,
    /// The warps that have arrived at each named barrier, and the barrier's turn.
    named: HashMap<u64, (BTreeSet<u32>, u32)>,
    copies: VecDeque<Copy>,
}

impl Processor<'_> {
    fn run(&mut self) {
        let warp = |number| Warp {
            number,
            at: 0,
            registers: vec![[0; LANES]; self.program.registers],
            active: [true; LANES],
            join: None,
            barrier: None,
            groups: VecDeque::new(),
            open: Vec::new(),
            copy_groups: VecDeque::new(),
            open_copies: Vec::new(),
            read: BTreeSet::new(),
            done: false,
        };
        let mut warps: Vec<Warp> = (0..self.launch.threads / LANES as u32).map(warp).collect();
        while warps.iter().any(|warp| !warp.done) {
            let mut moved = false;
            for warp in warps.iter_mut().filter(|warp| !warp.done) {
                while !warp.done && self.step(warp) {
                    moved = true;
                }
            }
            if moved {
                continue;
            }
            let waits = || warps.iter().filter(|w| !w.done).map(|w| (w.number, &self.program.code[w.at].name));
            let Some([to, from, bytes, barrier]) = self.copies.pop_front() else {
                panic!("no warp goes on: {:?}", waits().collect::<Vec<_>>())
            };
            let content = self.global(from, bytes as usize).to_vec();
            self.shared(to, bytes).copy_from_slice(&content);
            let barrier = self.barriers.get_mut(&barrier).expect("a barrier");
            barrier.bytes -= bytes as i64;
            barrier.check();
        }
        assert!(self.copies.is_empty(), "copies are on their way at the end");
    }

    /// Returns bytes of shared memory, of which none is a barrier's.
    fn shared(&mut self, at: u64, bytes: u64) -> &mut [u8] {
        let barrier = (at & !7..at + bytes).step_by(8).find(|at| self.barriers.contains_key(at));
        assert_eq!(barrier, None, "{bytes} bytes at {at:#x} are a barrier's");
        &mut self.shared[at as usize..(at + bytes) as usize]
    }

    fn global(&mut self, address: u64, bytes: usize) -> &mut [u8] {
        let found = self
            .memory
            .iter_mut()
            .find(|(base, content)| *base <= address && address + bytes as u64 <= base + content.len() as u64);
        let (base, content) = found.unwrap_or_else(|| panic!("{bytes} bytes at {address:#x} are in no buffer"));
        let at = (address - *base) as usize;
        &mut content[at..at + bytes]
    }

    /// Carries out the warp's next instruction. Returns false if it waits.
    fn step(&mut self, warp: &mut Warp) -> bool {
        if warp.join == Some(warp.at) {
            (warp.active, warp.join) = ([true; LANES], None);
        }
        let program = self.program;
        let instruction = &program.code[warp.at];
        let mut mask = warp.active;
        if let Some((register, wanted)) = instruction.predicate {
            for (lane, takes) in mask.iter_mut().enumerate() {
                *takes &= (warp.registers[register][lane] != 0) == wanted;
            }
        }
        let name = instruction.name.as_str();
        let operands = &instruction.operands;
        match name {
            "bra" => {
                let Operand::Label(label) = &operands[0] else { panic!("{instruction:?}") };
                let to = program.labels[label];
                if mask == warp.active {
                    warp.at = to;
                } else {
                    if mask.contains(&true) {
                        assert!(to > warp.at && warp.join.is_none(), "{instruction:?}: lanes part");
                        warp.join = Some(to);
                        (0..LANES).for_each(|lane| warp.active[lane] &= !mask[lane]);
                    }
                    warp.at += 1;
                }
                return true;
            }
            "ret" => {
                warp.done = true;
                assert!(warp.groups.iter().all(Vec::is_empty), "products are on their way at the end");
                assert!(
                    warp.copy_groups.is_empty() && warp.open_copies.is_empty(),
                    "copies are on their way at the end"
                );
                return true;
            }
            "bar.sync" => {
                let number = self.value(warp, &operands[0])[0];
                let warps = match operands.get(1) {
                    Some(count) => self.value(warp, count)[0] / LANES as u64,
                    None => u64::from(self.launch.threads) / LANES as u64,
                };
                let (arrived, turn) = self.named.entry(number).or_default();
                match warp.barrier {
                    Some((_, old)) if old == *turn => return false,
                    Some(_) => warp.barrier = None,
                    None => {
                        arrived.insert(warp.number);
                        if arrived.len() as u64 == warps {
                            arrived.clear();
                            *turn += 1;
                        } else {
                            warp.barrier = Some((number, *turn));
                            return true;
                        }
                    }
                }
            }
            _ if name.starts_with("mbarrier.try_wait.parity") => {
                let (at, parity) = (self.address(warp, &operands[1])[0], self.value(warp, &operands[2])[0]);
                if self.barriers[&at].phase % 2 == parity {
                    return false;
                }
                set(warp, &operands[0], [1; LANES], mask);
            }
            _ => self.simple(warp, name, operands, mask),
        }
        warp.at += 1;
        true
    }

    fn value(&self, warp: &Warp, operand: &Operand) -> Values {
        match operand {
            Operand::Register(register) => warp.registers[*register],
            Operand::Number(number) => [*number; LANES],
            Operand::Special(name) => match name.as_str() {
                "%tid.x" => std::array::from_fn(|lane| u64::from(warp.number) * LANES as u64 + lane as u64),
                "%ctaid.x" => [u64::from(self.group); LANES],
                "%nctaid.x" => [u64::from(self.launch.groups); LANES],
                _ => [SHARED_AT; LANES],
            },
            other => panic!("{other:?} has no value"),
        }
    }

    fn address(&self, warp: &Warp, operand: &Operand) -> Values {
        let Operand::Address(base, offset) = operand else { panic!("{operand:?} is no address") };
        base.map_or([0; LANES], |base| warp.registers[base]).map(|value| value.wrapping_add(*offset))
    }

    fn simple(&mut self, warp: &mut Warp, name: &str, operands: &[Operand], mask: Mask) {
        let parts: Vec<&str> = name.split('.').collect();
        let lanes = || (0..LANES).filter(|lane| mask[*lane]);
        let of = |i: usize| self.value(warp, &operands[i]);
        match (parts[0], &parts[1..]) {
            ("fence", ["proxy", "async", ..]) => {
                if mask.contains(&true) {
                    warp.read.clear();
                }
            }
            ("fence" | "setmaxnreg" | "createpolicy", _) | ("bar", ["warp", ..]) | ("wgmma", ["fence", ..]) => {}
            ("trap", _) => assert!(!mask.contains(&true), "a wait was given up"),
            ("elect", _) => {
                let first = lanes().next();
                set(warp, &operands[1], std::array::from_fn(|lane| u64::from(Some(lane) == first)), mask);
            }
            ("ld", ["param", kind]) => {
                let (at, bytes) = (self.address(warp, &operands[1])[0] as usize, if *kind == "u64" { 8 } else { 4 });
                let mut word = [0; 8];
                word[..bytes].copy_from_slice(&self.launch.args[at..at + bytes]);
                set(warp, &operands[0], [u64::from_le_bytes(word); LANES], mask);
            }
            ("ld" | "st", [space, ..]) => {
                let (list, address) = match parts[0] {
                    "ld" => (&operands[0], &operands[1]),
                    _ => (&operands[1], &operands[0]),
                };
                let list = match list {
                    Operand::List(list) => list.clone(),
                    Operand::Register(register) => vec![*register],
                    other => panic!("{other:?}"),
                };
                let at = self.address(warp, address);
                for lane in lanes() {
                    assert!(at[lane].is_multiple_of(4 * list.len() as u64), "{name} at {:#x}", at[lane]);
                    if (parts[0], *space) == ("ld", "shared") {
                        warp.read.insert(at[lane] / 16);
                    }
                    for (i, register) in (0..).zip(&list) {
                        let word = match *space {
                            "shared" => self.shared(at[lane] + 4 * i, 4),
                            _ => self.global(at[lane] + 4 * i, 4),
                        };
                        match parts[0] {
                            "ld" => {
                                let word = u32::from_le_bytes(word.try_into().expect("four bytes"));
                                warp.registers[*register][lane] = word.into();
                            }
                            _ => word.copy_from_slice(&(warp.registers[*register][lane] as u32).to_le_bytes()),
                        }
                    }
                }
            }
            ("atom", ["global", "add", "u32"]) => {
                let (at, added) = (self.address(warp, &operands[1]), of(2));
                for lane in lanes() {
                    let word = self.global(at[lane], 4);
                    let before = u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
                    word.copy_from_slice(&before.wrapping_add(added[lane] as u32).to_le_bytes());
                    set(warp, &operands[0], std::array::from_fn(|_| u64::from(before)), {
                        let mut own = [false; LANES];
                        own[lane] = true;
                        own
                    });
                }
            }
            ("red", ["shared", "or", "b32"]) => {
                let (at, bits) = (self.address(warp, &operands[0]), of(1));
                for lane in lanes() {
                    let word = self.shared(at[lane], 4);
                    let before = u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
                    word.copy_from_slice(&(before | bits[lane] as u32).to_le_bytes());
                }
            }
            ("mbarrier", ["init", ..]) => {
                let (at, count) = (self.address(warp, &operands[0]), of(1));
                for lane in lanes() {
                    assert!(at[lane].is_multiple_of(8) && at[lane] + 8 <= self.shared.len() as u64, "{:#x}", at[lane]);
                    let count = count[lane] as i64;
                    self.barriers.insert(at[lane], Barrier { count, pending: count, bytes: 0, phase: 0 });
                }
            }
            ("mbarrier", ["arrive", rest @ ..]) => {
                let expects = rest[0] == "expect_tx";
                let at = self.address(warp, &operands[1]);
                let bytes = if expects { of(2) } else { [0; LANES] };
                for lane in lanes() {
                    let barrier = self.barriers.get_mut(&at[lane]).expect("a barrier");
                    barrier.pending -= 1;
                    barrier.bytes += bytes[lane] as i64;
                    barrier.check();
                }
            }
            ("cp", ["async", "cg", ..]) => {
                let [to, from] = [0, 1].map(|i| self.address(warp, &operands[i]));
                let used = operands.get(3).map_or([16; LANES], |_| of(3));
                for lane in lanes() {
                    assert!([to[lane], from[lane]].iter().all(|n| n.is_multiple_of(16)), "{name}");
                    warp.open_copies.push([to[lane], from[lane], used[lane]]);
                }
            }
            ("cp", ["async", "commit_group"]) => {
                let group = std::mem::take(&mut warp.open_copies);
                warp.copy_groups.push_back(group);
            }
            ("cp", ["async", "wait_group"]) => {
                let left = of(0)[0] as usize;
                while warp.copy_groups.len() > left {
                    for [to, from, used] in warp.copy_groups.pop_front().expect("a group") {
                        let mut content = vec![0; 16];
                        // What is not copied is not read.
                        if used > 0 {
                            content[..used as usize].copy_from_slice(self.global(from, used as usize));
                        }
                        self.shared(to, 16).copy_from_slice(&content);
                    }
                }
            }
            ("cp", ["async", "bulk", ..]) => {
                let [to, from, barrier] = [0, 1, 3].map(|i| self.address(warp, &operands[i]));
                let bytes = of(2);
                for lane in lanes() {
                    let copy = [to[lane], from[lane], bytes[lane], barrier[lane]];
                    assert!(copy[2] > 0 && copy[..3].iter().all(|n| n.is_multiple_of(16)), "a copy of {copy:?}");
                    let overwritten = warp.read.range(copy[0] / 16..(copy[0] + copy[2]) / 16).next();
                    assert_eq!(overwritten, None, "a copy of {copy:?} to what may not be read yet");
                    self.copies.push_back(copy);
                }
            }
            ("wgmma", ["mma_async", ..]) => {
                assert_eq!(mask, [true; LANES], "a product of some lanes");
                let a = matches!(operands[1], Operand::Register(_)).then(|| of(1)[0]);
                warp.open.push(Product { at: warp.at, a, b: of(2)[0], adds: of(3)[0] != 0 });
            }
            ("wgmma", ["commit_group", ..]) => {
                let group = std::mem::take(&mut warp.open);
                warp.groups.push_back(group);
            }
            ("wgmma", ["wait_group", ..]) => {
                let left = of(0)[0] as usize;
                while warp.groups.len() > left {
                    let group = warp.groups.pop_front().expect("a group");
                    group.into_iter().for_each(|product| self.multiply(warp, product));
                }
            }
            ("mma", ["sync", "aligned", ..]) => {
                assert_eq!(mask, [true; LANES], "a product of some lanes");
                multiply_at_once(warp, name, operands);
            }
            ("mov", ["b32"]) if matches!(operands[0], Operand::List(_)) => {
                let (Operand::List(halves), whole) = (&operands[0], of(1)) else { panic!("{operands:?}") };
                for (at, half) in (0..).zip(halves) {
                    for lane in lanes() {
                        warp.registers[*half][lane] = whole[lane] >> (16 * at) & 0xffff;
                    }
                }
            }
            _ => {
                let value = self.computed(warp, name, &parts, operands);
                set(warp, &operands[0], value, mask);
            }
        }
    }

    fn computed(&self, warp: &Warp, name: &str, parts: &[&str], operands: &[Operand]) -> Values {
        let of = |i: usize| self.value(warp, &operands[i]);
        let each = |f: &dyn Fn(usize) -> u64| -> Values { std::array::from_fn(f) };
        let kind = *parts.last().expect("a kind");
        let float = |i: usize| of(i).map(|bits| f32::from_bits(bits as u32));
        let floats = |f: &dyn Fn(usize) -> f32| each(&|lane| f(lane).to_bits().into());
        match (parts[0], kind) {
            ("shfl", _) => match parts[2] {
                "idx" => each(&|lane| of(1)[of(2)[lane] as usize]),
                _ => each(&|lane| of(1)[lane ^ of(2)[0] as usize]),
            },
            ("vote", "b32") => {
                let votes = (0..LANES).filter(|lane| warp.active[*lane] && of(1)[*lane] != 0);
                [votes.map(|lane| 1 << lane).sum(); LANES]
            }
            ("vote", _) => [u64::from((0..LANES).any(|lane| warp.active[lane] && of(1)[lane] != 0)); LANES],
            ("redux", "s32") => [of(1).into_iter().sum::<u64>() & 0xffff_ffff; LANES],
            ("redux", _) if parts[2] == "min" => [of(1).into_iter().min().expect("lanes"); LANES],
            ("redux", _) => [of(1).into_iter().max().expect("lanes"); LANES],
            ("lop3", _) => {
                let (a, b, c, table) = (of(1), of(2), of(3), of(4)[0]);
                each(&|lane| {
                    let bit = |at: u32| {
                        let index = (a[lane] >> at & 1) << 2 | (b[lane] >> at & 1) << 1 | c[lane] >> at & 1;
                        (table >> index & 1) << at
                    };
                    (0..32).map(bit).sum()
                })
            }
            ("match", _) => {
                let words = of(1);
                each(&|lane| (0..LANES).filter(|other| words[*other] == words[lane]).map(|other| 1 << other).sum())
            }
            ("popc", _) => of(1).map(|word| (word as u32).count_ones().into()),
            ("selp", _) => each(&|lane| if of(3)[lane] != 0 { of(1)[lane] } else { of(2)[lane] }),
            ("setp", "f32") => {
                assert_eq!(parts[1], "lt", "{name} is not simulated");
                each(&|lane| u64::from(float(1)[lane] < float(2)[lane]))
            }
            ("setp", _) => {
                let signed = |bits: u64| if kind == "s32" { i64::from(bits as u32 as i32) } else { bits as u32 as i64 };
                let (a, b) = (of(1).map(signed), of(2).map(signed));
                let too = if parts[2] == "and" { of(3) } else { [1; LANES] };
                each(&|lane| {
                    too[lane]
                        & u64::from(match parts[1] {
                            "eq" => a[lane] == b[lane],
                            "ne" => a[lane] != b[lane],
                            "le" => a[lane] <= b[lane],
                            "ge" => a[lane] >= b[lane],
                            "lt" => a[lane] < b[lane],
                            "gt" => a[lane] > b[lane],
                            other => panic!("setp.{other}"),
                        })
                })
            }
            ("cvt", "s32") => floats(&|lane| of(1)[lane] as u32 as i32 as f32),
            ("cvt", "e4m3x2") => each(&|lane| {
                let number = |at: u32| Number::E4m3.table()[usize::from((of(1)[lane] >> at) as u8)];
                let half = |at: u32| u64::from(f16::from_f32(number(at)).to_bits());
                half(0) | half(8) << 16
            }),
            ("cvt", "f16") => {
                let half = |lane: usize| f16::from_bits(of(1)[lane] as u16);
                floats(&|lane| half(lane).to_f32())
            }
            ("fma" | "mul", "f16x2") => {
                let (a, b) = (of(1), of(2));
                let c = operands.get(3).map_or([0; LANES], |_| of(3));
                each(&|lane| {
                    let half = |bits: u64, at: u32| f64::from(f16::from_bits((bits >> at) as u16).to_f32());
                    // A product of two f16 is exact in f64, and a sum with a third is rounded once more than on the device in
                    // cases that no weights have.
                    let value = |at: u32| match parts[0] {
                        "fma" => half(a[lane], at) * half(b[lane], at) + half(c[lane], at),
                        _ => half(a[lane], at) * half(b[lane], at),
                    };
                    let bits = |at: u32| u64::from(f16::from_f64(value(at)).to_bits());
                    bits(0) | bits(16) << 16
                })
            }
            ("prmt", _) => {
                let (a, b, selector) = (of(1), of(2), of(3));
                each(&|lane| {
                    let bytes = a[lane] & 0xffff_ffff | b[lane] << 32;
                    let byte = |of: u64| match (bytes >> (8 * (of & 7)) & 255, of & 8) {
                        (byte, 0) => byte,
                        // The sign of the byte.
                        (byte, _) => {
                            if byte & 128 != 0 {
                                255
                            } else {
                                0
                            }
                        }
                    };
                    (0..4).map(|i| byte(selector[lane] >> (4 * i)) << (8 * i)).sum()
                })
            }
            ("cvt", "u32") if parts[2] == "f32" => {
                let number = of(1);
                floats(&|lane| number[lane] as u32 as f32)
            }
            ("cvt", "f32") => {
                let half = |i: usize, lane: usize| {
                    let value = float(i)[lane];
                    u64::from(if parts.contains(&"f16x2") {
                        f16::from_f32(value).to_bits()
                    } else {
                        bf16::from_f32(value).to_bits()
                    })
                };
                each(&|lane| half(1, lane) << 16 | half(2, lane))
            }
            ("mov", "f32" | "b32" | "u32" | "u64") | ("cvt", "u32") => of(1),
            (operation, "f32") => {
                let (a, b) = (float(1), operands.get(2).map_or([0.0; LANES], |_| float(2)));
                floats(&|lane| match operation {
                    "add" => a[lane] + b[lane],
                    "sub" => a[lane] - b[lane],
                    "rcp" => 1.0 / a[lane],
                    "abs" => a[lane].abs(),
                    "neg" => -a[lane],
                    "rsqrt" => 1.0 / a[lane].sqrt(),
                    "mul" => a[lane] * b[lane],
                    "min" => a[lane].min(b[lane]),
                    "max" => a[lane].max(b[lane]),
                    "fma" => a[lane].mul_add(b[lane], float(3)[lane]),
                    "div" => a[lane] / b[lane],
                    "ex2" => a[lane].exp2(),
                    _ => panic!("{name} is not simulated"),
                })
            }
            (operation, _) => {
                let wide = kind.ends_with("64") || parts[1] == "wide";
                let (a, b, c) = (of(1), of(2), operands.get(3).map_or([0; LANES], |_| of(3)));
                each(&|lane| {
                    let (a, b, c) = (a[lane], b[lane], c[lane]);
                    let value = match (operation, parts[1]) {
                        ("mul", "wide") => (a & 0xffff_ffff) * (b & 0xffff_ffff),
                        ("add", _) => a.wrapping_add(b),
                        ("sub", _) => a.wrapping_sub(b),
                        ("mul", "lo") => a.wrapping_mul(b),
                        ("mad", "lo") => a.wrapping_mul(b).wrapping_add(c),
                        ("div", _) => a / b,
                        ("min", _) => a.min(b),
                        ("max", _) => a.max(b),
                        ("and", _) => a & b,
                        ("or", _) => a | b,
                        ("xor", _) => a ^ b,
                        ("shr", _) => a >> b,
                        ("shl", _) => a << b,
                        ("bfe", _) => a >> b & ((1 << c) - 1),
                        _ => panic!("{name} is not simulated"),
                    };
                    if wide { value } else { value & 0xffff_ffff }
                })
            }
        }
    }

    /// Adds a warp's part of a product, 16 rows of A by N columns of B from shared memory.
    fn multiply(&mut self, warp: &mut Warp, product: Product) {
        let instruction = &self.program.code[product.at];
        let Operand::List(sums) = &instruction.operands[0] else { panic!("{instruction:?}") };
        let n = sums.len() * 2;
        let kind = instruction.name.rsplit('.').next().expect("a kind");
        let depth = if kind == "e4m3" { 32 } else { 16 };
        let shape = format!("m64n{n}k{depth}.f32.{kind}.{kind}");
        assert!(instruction.name.contains(&shape), "{instruction:?}");
        let number = |bytes: &[u8]| match kind {
            "e4m3" => Number::E4m3.table()[usize::from(bytes[0])],
            "bf16" => bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
            "f16" => f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
            other => panic!("products of {other}"),
        };
        // The last operands say whether A in shared memory and B are transposed.
        let flag = |back: usize| {
            let at = instruction.operands.len() - back;
            matches!(instruction.operands[at], Operand::Number(1)) && instruction.operands.len() > 6
        };
        let size = 32 / depth;
        let mut rows = vec![vec![0f32; depth]; 16];
        match (product.a, &instruction.operands[1]) {
            (Some(a), _) => {
                assert!(!flag(2), "a transposed A");
                for (row, values) in rows.iter_mut().enumerate() {
                    let at = warp.number as usize % 4 * 16 + row;
                    for (k, value) in values.iter_mut().enumerate() {
                        let place = place(a, false, at, k, size);
                        *value = number(&self.shared[place..place + size]);
                    }
                }
            }
            (None, Operand::List(a)) => {
                for lane in 0..LANES {
                    let (g, t) = (lane / 4, lane % 4);
                    for (register, (row, word)) in a.iter().zip([(g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4)]) {
                        let word_bytes = (warp.registers[*register][lane] as u32).to_le_bytes();
                        for (i, bytes) in word_bytes.chunks_exact(size).enumerate() {
                            rows[row][word * 4 / size + i] = number(bytes);
                        }
                    }
                }
            }
            _ => panic!("{instruction:?}"),
        }
        let transposed = flag(1);
        for col in 0..n {
            let column: Vec<f32> = (0..depth)
                .map(|k| {
                    let place = place(product.b, transposed, col, k, size);
                    number(&self.shared[place..place + size])
                })
                .collect();
            for (row, values) in rows.iter().enumerate() {
                let dot: f32 = values.iter().zip(&column).map(|(a, b)| a * b).sum();
                let lane = row % 8 * 4 + col % 8 / 2;
                let register = sums[col / 8 * 4 + row / 8 * 2 + col % 2];
                let before = if product.adds { f32::from_bits(warp.registers[register][lane] as u32) } else { 0.0 };
                warp.registers[register][lane] = (before + dot).to_bits().into();
            }
        }
    }
}

/// Sets the sums of a product of 16 rows of A by 8 columns of B, both in registers: `mma`.
fn multiply_at_once(warp: &mut Warp, name: &str, operands: &[Operand]) {
    let list = |i: usize| match &operands[i] {
        Operand::List(list) => list.clone(),
        other => panic!("{other:?} of {name}"),
    };
    let [sums, a, b, before] = [0, 1, 2, 3].map(list);
    let integers = match name {
        "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32" => true,
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" => false,
        _ => panic!("{name} is not simulated"),
    };
    // The numbers of a register of A or B, in f64: sums of these are exact.
    let numbers = |register: usize, lane: usize, signed: bool| -> Vec<f64> {
        let bytes = (warp.registers[register][lane] as u32).to_le_bytes();
        match integers {
            true if signed => bytes.iter().map(|byte| f64::from(*byte as i8)).collect(),
            true => bytes.iter().map(|byte| f64::from(*byte)).collect(),
            false => bytes.chunks(2).map(|b| f64::from(f16::from_le_bytes([b[0], b[1]]).to_f32())).collect(),
        }
    };
    let mut results = Vec::new();
    for lane in 0..LANES {
        let (g, t) = (lane / 4, lane % 4);
        let sum = |row: usize, col: usize| -> f64 {
            let lanes = (0..4).flat_map(|u| [0, 1].map(|half| (u, half)));
            let terms = lanes.flat_map(|(u, half)| {
                let left = numbers(a[2 * half + row / 8], row % 8 * 4 + u, false);
                let right = numbers(b[half], col * 4 + u, true);
                left.into_iter().zip(right).map(|(x, y)| x * y)
            });
            terms.sum()
        };
        for (i, (row, col)) in [(g, 2 * t), (g, 2 * t + 1), (g + 8, 2 * t), (g + 8, 2 * t + 1)].into_iter().enumerate()
        {
            let old = warp.registers[before[i]][lane] as u32;
            results.push((
                sums[i],
                lane,
                match integers {
                    true => (sum(row, col) as i32).wrapping_add(old as i32) as u32,
                    false => (sum(row, col) as f32 + f32::from_bits(old)).to_bits(),
                },
            ));
        }
    }
    for (register, lane, value) in results {
        warp.registers[register][lane] = value.into();
    }
}

/// Returns the place in shared memory of an operand's number in row (of A) or column (of B) `index` and at depth `k`, by the
/// operand's descriptor. Transposed, rows or columns are contiguous, otherwise the depth.
fn place(descriptor: u64, transposed: bool, index: usize, k: usize, size: usize) -> usize {
    let field = |shift: u32| ((descriptor >> shift & 0x3fff) << 4) as usize;
    let (start, leading, strided) = (field(0), field(16), field(32));
    let eight = 16 / size;
    match (descriptor >> 62, transposed) {
        // 8 rows of 16 bytes are contiguous.
        (0, false) => start + index / 8 * strided + index % 8 * 16 + k / eight * leading + k % eight * size,
        // Rows of 128 bytes with the 128-byte swizzle; 8 rows are 1,024 bytes.
        (1, false) => {
            assert_eq!(strided, 1024, "a descriptor of {descriptor:#x}");
            let at = start + index / 8 * strided + index % 8 * 128 + k * size;
            at ^ (at >> 7 & 7) << 4
        }
        // 64 numbers of 8 depths, swizzled likewise.
        (1, true) => {
            let at = start + index / 64 * leading + index % 64 * size + k / 8 * strided + k % 8 * 128;
            at ^ (at >> 7 & 7) << 4
        }
        _ => panic!("a descriptor of {descriptor:#x}"),
    }
}

/// Sets a register in the lanes that take part.
fn set(warp: &mut Warp, operand: &Operand, values: Values, mask: Mask) {
    let Operand::Register(register) = operand else { panic!("{operand:?} is no register") };
    for lane in (0..LANES).filter(|lane| mask[*lane]) {
        warp.registers[*register][lane] = values[lane];
    }
}
