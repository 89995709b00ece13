//! Compiles GLSL to SPIR-V and generates Rust code from the SPIR-V. Each `shaders/**/*.comp` becomes one SPIR-V module
//! per row that names it in `shaders/permutations.txt` (or one module if no row does), and one Rust struct for its
//! push-constant block. The layout is written once, in the shader; the Rust struct is read from the compiled module by
//! reflection. The modules are embedded deflated and without names.

use glslang::include::{IncludeHandler, IncludeResult, IncludeType};
use rspirv::binary::{Consumer, ParseAction};
use rspirv::dr::{Instruction, ModuleHeader, Operand};
use rspirv::spirv::{Decoration, Op, StorageClass};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// One shader variant: a row of `permutations.txt`, `name = folder/file.comp DEFINE=VALUE …`.
struct Variant {
    name: String,
    file: PathBuf,
    defines: Vec<(String, String)>,
}

/// The interface of a shader, reflected from its SPIR-V.
#[derive(Debug, PartialEq)]
struct Reflection {
    /// Name, byte offset and kind of each push-constant member.
    fields: Vec<(String, u32, Kind)>,
    push_bytes: u32,
    /// Name and default value of each specialization constant, by its id.
    constants: BTreeMap<u32, (String, u32)>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Read,
    Write,
    ReadWrite,
    U32,
    F32,
}

pub fn compile() {
    println!("cargo:rerun-if-changed=shaders");
    let root = PathBuf::from("shaders");
    let mut files = Vec::new();
    walk(&root, &mut files);
    files.sort();
    let variants = variants(&root, &files);
    let mut out = String::from("// Written by build/shaders.rs from shaders/.\n\n");
    let mut table = String::new();
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    let mut seen: BTreeMap<PathBuf, Reflection> = BTreeMap::new();
    for variant in &variants {
        let words = compile_one(&root, variant);
        let reflection = reflect(&variant.file, &words);
        let words = without_names(&words);
        for word in &words {
            for byte in word.to_le_bytes() {
                hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
            }
        }
        let path =
            PathBuf::from(std::env::var("OUT_DIR").expect("cargo sets OUT_DIR")).join(format!("{}.spv", variant.name));
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        std::fs::write(&path, crate::demo::deflated(&bytes)).expect("OUT_DIR is writable");
        let constants: Vec<String> =
            reflection.constants.iter().map(|(id, (name, _))| format!("({id}, {name:?})")).collect();
        let fields: Vec<String> = reflection
            .fields
            .iter()
            .map(|(name, offset, kind)| {
                format!("ArgField {{ name: {name:?}, offset: {offset}, bytes: {} }}", bytes_of(*kind))
            })
            .collect();
        writeln!(
            table,
            "    Shader {{ name: {:?}, source: {:?}, spirv: include_bytes!(concat!(env!(\"OUT_DIR\"), \"/{}.spv\")), push_bytes: {}, fields: &[{}], constants: &[{}], matrices: {} }},",
            variant.name,
            variant.file.display().to_string(),
            variant.name,
            reflection.push_bytes,
            fields.join(", "),
            constants.join(", "),
            multiplies_matrices(&words),
        )
        .expect("writing to a string");
        match seen.get_mut(&variant.file) {
            None => {
                seen.insert(variant.file.clone(), reflection);
            }
            // A variant may have further constants after those of the others; a pipeline ignores values of constants
            // that its shader does not have.
            Some(most) => {
                let same = most.constants.iter().zip(&reflection.constants).all(|(a, b)| a == b);
                assert!(
                    same && most.fields == reflection.fields && most.push_bytes == reflection.push_bytes,
                    "{}: variant {} has another argument block or other constants than the other variants of its file",
                    variant.file.display(),
                    variant.name
                );
                if reflection.constants.len() > most.constants.len() {
                    *most = reflection;
                }
            }
        }
    }
    for (file, reflection) in &seen {
        write_structs(&mut out, &stem(file), file, reflection);
    }
    writeln!(out, "/// Every compiled shader, ordered by name.\npub static SHADERS: &[Shader] = &[\n{table}];\n")
        .expect("writing to a string");
    writeln!(
        out,
        "/// Hash of all compiled shaders: the key of pipeline caches.\npub const SHADER_SET: u64 = {hash:#x};"
    )
    .expect("writing to a string");
    let path = PathBuf::from(std::env::var("OUT_DIR").expect("cargo sets OUT_DIR")).join("shaders.rs");
    std::fs::write(path, out).expect("OUT_DIR is writable");
}

/// Returns whether a module declares the capability `CooperativeMatrixKHR`.
fn multiplies_matrices(words: &[u32]) -> bool {
    const OP_CAPABILITY: u32 = 17;
    const COOPERATIVE_MATRIX: u32 = 6022;
    let mut at = 5;
    // SPIR-V puts all capabilities directly after the five-word header.
    while at + 1 < words.len() && words[at] & 0xffff == OP_CAPABILITY {
        if words[at + 1] == COOPERATIVE_MATRIX {
            return true;
        }
        at += (words[at] >> 16) as usize;
    }
    false
}

fn bytes_of(kind: Kind) -> u32 {
    match kind {
        Kind::Read | Kind::Write | Kind::ReadWrite => 8,
        Kind::U32 | Kind::F32 => 4,
    }
}

fn walk(folder: &Path, files: &mut Vec<PathBuf>) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let path = entry.path();
        if path.is_dir() {
            walk(&path, files);
        } else if path.extension().is_some_and(|e| e == "comp") {
            files.push(path);
        }
    }
}

fn stem(path: &Path) -> String {
    path.file_stem().expect("a shader has a name").to_string_lossy().into_owned()
}

fn variants(root: &Path, files: &[PathBuf]) -> Vec<Variant> {
    let text = std::fs::read_to_string(root.join("permutations.txt")).unwrap_or_default();
    let mut variants = Vec::new();
    for line in text.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with('#')) {
        let (name, rest) = line.split_once('=').unwrap_or_else(|| panic!("permutations.txt: no '=' in \"{line}\""));
        let mut words = rest.split_whitespace();
        let file = root.join(words.next().unwrap_or_else(|| panic!("permutations.txt: no file in \"{line}\"")));
        assert!(files.contains(&file), "permutations.txt: {} does not exist", file.display());
        let defines = words
            .map(|w| {
                let (k, v) = w.split_once('=').unwrap_or((w, "1"));
                (k.to_owned(), v.to_owned())
            })
            .collect();
        variants.push(Variant { name: name.trim().to_owned(), file, defines });
    }
    for file in files {
        if !variants.iter().any(|v| v.file == *file) {
            variants.push(Variant { name: stem(file), file: file.clone(), defines: Vec::new() });
        }
    }
    variants.sort_by(|a, b| a.name.cmp(&b.name));
    for pair in variants.windows(2) {
        assert!(pair[0].name != pair[1].name, "two shaders are called {}", pair[0].name);
    }
    variants
}

struct Includes {
    root: PathBuf,
}

impl IncludeHandler for Includes {
    fn include(&mut self, _: IncludeType, header: &str, _: &str, _: usize) -> Option<IncludeResult> {
        let data = std::fs::read_to_string(self.root.join("include").join(header)).ok()?;
        Some(IncludeResult { name: header.to_owned(), data })
    }
}

fn compile_one(root: &Path, variant: &Variant) -> Vec<u32> {
    let compiler = glslang::Compiler::acquire().expect("glslang starts");
    let text = std::fs::read_to_string(&variant.file).unwrap_or_else(|e| panic!("{}: {e}", variant.file.display()));
    let fail = |e: &dyn std::fmt::Display| -> ! { panic!("{} ({}): {e}", variant.file.display(), variant.name) };
    let source = glslang::ShaderSource::from(text);
    let options = glslang::CompilerOptions {
        source_language: glslang::SourceLanguage::GLSL,
        target: glslang::Target::Vulkan {
            version: glslang::VulkanVersion::Vulkan1_3,
            spirv_version: glslang::SpirvVersion::SPIRV1_6,
        },
        version_profile: None,
        messages: glslang::ShaderMessage::DEFAULT,
    };
    let defines: Vec<(&str, Option<&str>)> =
        variant.defines.iter().map(|(k, v)| (k.as_str(), Some(v.as_str()))).collect();
    let mut includes = Includes { root: root.to_owned() };
    let input = glslang::ShaderInput::new(
        &source,
        glslang::ShaderStage::Compute,
        &options,
        Some(&defines[..]),
        Some(&mut includes),
    )
    .unwrap_or_else(|e| fail(&e));
    let shader = compiler.create_shader(input).unwrap_or_else(|e| fail(&e));
    let mut program = compiler.create_program();
    program.add_shader(&shader);
    program.compile(glslang::ShaderStage::Compute).unwrap_or_else(|e| fail(&e))
}

/// Returns a module without the instructions that only describe its source, an eighth of what is embedded: the names of
/// variables and members, and the source's language and extensions.
fn without_names(words: &[u32]) -> Vec<u32> {
    const HEADER_WORDS: usize = 5;
    const DESCRIBING: [Op; 4] = [Op::Source, Op::SourceExtension, Op::Name, Op::MemberName];
    let (header, mut rest) = words.split_at(HEADER_WORDS);
    let mut kept = header.to_vec();
    while let Some(first) = rest.first() {
        // The first word of an instruction holds its length in words above its opcode.
        let (instruction, behind) = rest.split_at((first >> 16) as usize);
        if !DESCRIBING.iter().any(|op| *op as u32 == first & 0xffff) {
            kept.extend_from_slice(instruction);
        }
        rest = behind;
    }
    kept
}

fn reflect(file: &Path, words: &[u32]) -> Reflection {
    let mut module = Module::default();
    match rspirv::binary::parse_words(words, &mut module) {
        Ok(()) | Err(rspirv::binary::ParseState::ConsumerStopRequested) => {}
        Err(e) => panic!("{}: {e:?}", file.display()),
    }
    let names = names(&module);
    let mut fields = Vec::new();
    let mut push_bytes = 0;
    let find = |id: u32| module.types_global_values.iter().find(|i| i.result_id == Some(id));
    for variable in module.types_global_values.iter().filter(|i| i.class.opcode == Op::Variable) {
        if !matches!(variable.operands.first(), Some(Operand::StorageClass(StorageClass::PushConstant))) {
            continue;
        }
        let pointer = find(variable.result_type.expect("a variable has a type")).expect("its type is declared");
        let block = id_of(&pointer.operands[1]);
        let members = &find(block).expect("the block is declared").operands;
        for (index, member) in members.iter().enumerate() {
            let index = index as u32;
            let name = names
                .get(&(block, Some(index)))
                .unwrap_or_else(|| panic!("{}: argument {index} has no name", file.display()))
                .clone();
            let offset = member_offset(&module, block, index);
            let declared = find(id_of(member)).expect("the member's type is declared");
            let kind = match declared.class.opcode {
                Op::TypePointer => pointee_access(&module, id_of(&declared.operands[1])),
                Op::TypeInt => Kind::U32,
                Op::TypeFloat => Kind::F32,
                other => panic!(
                    "{}: argument {name} is {other:?}; only buffer references, uint and float are arguments",
                    file.display()
                ),
            };
            push_bytes = push_bytes.max(offset + bytes_of(kind));
            fields.push((name, offset, kind));
        }
    }
    assert!(push_bytes <= 128, "{}: {push_bytes} bytes of arguments, drivers promise 128", file.display());
    let mut constants = BTreeMap::new();
    for annotation in &module.annotations {
        if annotation.class.opcode == Op::Decorate
            && matches!(annotation.operands.get(1), Some(Operand::Decoration(Decoration::SpecId)))
        {
            let target = id_of(&annotation.operands[0]);
            let Some(Operand::LiteralBit32(id)) = annotation.operands.get(2) else { continue };
            // The workgroup size's constant has no name in the SPIR-V, so it is called "threads".
            let name =
                names.get(&(target, None)).filter(|n| !n.is_empty()).cloned().unwrap_or_else(|| "threads".to_owned());
            let default = match find(target).and_then(|i| i.operands.first().cloned()) {
                Some(Operand::LiteralBit32(value)) => value,
                _ => 0,
            };
            constants.insert(*id, (name.to_lowercase(), default));
        }
    }
    for (expected, id) in constants.keys().enumerate() {
        assert!(
            expected as u32 == *id,
            "{}: specialization ids have a gap before {id} (an unused constant?)",
            file.display()
        );
    }
    Reflection { fields, push_bytes, constants }
}

/// The instructions of a module that describe its interface.
#[derive(Default)]
struct Module {
    debug_names: Vec<Instruction>,
    annotations: Vec<Instruction>,
    types_global_values: Vec<Instruction>,
}

impl Consumer for Module {
    fn initialize(&mut self) -> ParseAction {
        ParseAction::Continue
    }
    fn finalize(&mut self) -> ParseAction {
        ParseAction::Continue
    }
    fn consume_header(&mut self, _: ModuleHeader) -> ParseAction {
        ParseAction::Continue
    }
    fn consume_instruction(&mut self, instruction: Instruction) -> ParseAction {
        match instruction.class.opcode {
            Op::Name | Op::MemberName => self.debug_names.push(instruction),
            Op::Decorate | Op::MemberDecorate => self.annotations.push(instruction),
            // Functions follow all types and constants, so the rest of the module is not needed.
            Op::Function => return ParseAction::Stop,
            _ => self.types_global_values.push(instruction),
        }
        ParseAction::Continue
    }
}

fn id_of(operand: &Operand) -> u32 {
    match operand {
        Operand::IdRef(id) => *id,
        other => panic!("expected an id, found {other:?}"),
    }
}

fn names(module: &Module) -> BTreeMap<(u32, Option<u32>), String> {
    let mut names = BTreeMap::new();
    for name in &module.debug_names {
        match (&name.operands[..], name.class.opcode) {
            ([Operand::IdRef(id), Operand::LiteralString(text)], Op::Name) => {
                names.insert((*id, None), text.clone());
            }
            ([Operand::IdRef(id), Operand::LiteralBit32(member), Operand::LiteralString(text)], Op::MemberName) => {
                names.insert((*id, Some(*member)), text.clone());
            }
            _ => {}
        }
    }
    names
}

fn member_offset(module: &Module, block: u32, member: u32) -> u32 {
    for annotation in &module.annotations {
        if let [
            Operand::IdRef(id),
            Operand::LiteralBit32(index),
            Operand::Decoration(Decoration::Offset),
            Operand::LiteralBit32(offset),
        ] = &annotation.operands[..]
            && *id == block
            && *index == member
        {
            return *offset;
        }
    }
    panic!("member {member} has no offset")
}

/// Returns whether a shader reads, writes, or reads and writes a buffer reference. The GLSL qualifiers `readonly` and
/// `writeonly` on a buffer reference decorate the members of its block.
fn pointee_access(module: &Module, block: u32) -> Kind {
    let has = |decoration: Decoration| {
        module.annotations.iter().any(|a| {
            a.class.opcode == Op::MemberDecorate
                && matches!(a.operands.first(), Some(Operand::IdRef(id)) if *id == block)
                && matches!(a.operands.get(2), Some(Operand::Decoration(d)) if *d == decoration)
        })
    };
    match (has(Decoration::NonWritable), has(Decoration::NonReadable)) {
        (true, _) => Kind::Read,
        (false, true) => Kind::Write,
        (false, false) => Kind::ReadWrite,
    }
}

fn camel(stem: &str) -> String {
    stem.split('_').map(|part| part[..1].to_uppercase() + &part[1..]).collect()
}

fn write_structs(out: &mut String, stem: &str, file: &Path, reflection: &Reflection) {
    let name = camel(stem);
    let mut text = String::new();
    let w = &mut text;
    let _ = writeln!(w, "/// Argument block of `{}`.", file.display());
    let _ = writeln!(w, "#[derive(Clone, Copy, Debug)]\npub struct {name}Args {{");
    for (field, _, kind) in &reflection.fields {
        let (doc, ty) = match kind {
            Kind::Read => ("Read.", "Range"),
            Kind::Write => ("Written.", "Range"),
            Kind::ReadWrite => ("Read and written.", "Range"),
            Kind::U32 => ("Value.", "u32"),
            Kind::F32 => ("Value.", "f32"),
        };
        let _ = writeln!(w, "    /// {doc}\n    pub {field}: {ty},");
    }
    let _ = writeln!(
        w,
        "}}\n\nimpl {name}Args {{\n    /// The block's fields in order.\n    pub fn into_args(self) -> Vec<Arg> {{\n        vec!["
    );
    for (field, _, kind) in &reflection.fields {
        let value = match kind {
            Kind::Read => format!("Arg::Buffer(self.{field}, Access::Read)"),
            Kind::Write => format!("Arg::Buffer(self.{field}, Access::Write)"),
            Kind::ReadWrite => format!("Arg::Buffer(self.{field}, Access::ReadWrite)"),
            Kind::U32 => format!("Arg::U32(self.{field})"),
            Kind::F32 => format!("Arg::F32(self.{field})"),
        };
        let _ = writeln!(w, "            {value},");
    }
    let _ = writeln!(
        w,
        "        ]\n    }}\n\n    /// The fields from a call's argument list, in the block's order.\n    pub fn from_args(args: &[Arg]) -> {name}Args {{\n        {name}Args {{"
    );
    for (index, (field, _, kind)) in reflection.fields.iter().enumerate() {
        let read = match kind {
            Kind::Read | Kind::Write | Kind::ReadWrite => "range",
            Kind::U32 => "u32",
            Kind::F32 => "f32",
        };
        let _ = writeln!(w, "            {field}: args[{index}].{read}(),");
    }
    let _ = writeln!(w, "        }}\n    }}\n}}\n");
    let _ = writeln!(w, "/// Specialization constants of `{}`, by id.", file.display());
    let _ = writeln!(w, "#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]\npub struct {name}Constants {{");
    for (id, (constant, default)) in &reflection.constants {
        let _ = writeln!(w, "    /// Id {id}, default {default}.\n    pub {constant}: u32,");
    }
    let _ = writeln!(
        w,
        "}}\n\nimpl {name}Constants {{\n    /// The values in the order of their ids.\n    pub fn into_values(self) -> Vec<u32> {{\n        vec!["
    );
    for (constant, _) in reflection.constants.values() {
        let _ = writeln!(w, "            self.{constant},");
    }
    let _ = writeln!(
        w,
        "        ]\n    }}\n\n    /// The values of a call.\n    pub fn from_values(values: &[u32]) -> {name}Constants {{\n        {name}Constants {{"
    );
    for (index, (constant, _)) in reflection.constants.values().enumerate() {
        let _ = writeln!(w, "            {constant}: values[{index}],");
    }
    let _ = writeln!(w, "        }}\n    }}\n}}\n");
    out.push_str(&text);
}
