//! Goal: the programs in PTX are assembled by NVIDIA's own assembler and compute their `reference()`, and the reference and
//! the packing before it match the formula. Method: ptxas of the tests' Python packages assembles each tile with each
//! epilogue; a simulated processor (`ptx.rs`) runs them, and so does a GPU of compute capability 9.0
//! (`OSTINATO_TEST_GPU`), with awkward shapes, with fewer workgroups than tiles, and with the number of rows in memory.
//! The selected drivers run `pack_rows`. Of each kind of program, those are tested that bring a new tile, epilogue or format,
//! and all of them with `OSTINATO_TEST_EVERY_CASE`.

use crate::assembler::Assembler;
use crate::common::{Driver, Vulkan};
use crate::harness::{Bench, Cases, Expect, POISON, Random, every_case};
use crate::ptx;
use ostinato::kernels::gemm::Activations;
use ostinato::kernels::gemm::tiled::{Packed, PackedOrder, pack_rows, pack_sorted, swizzled_index};
use ostinato::kernels::gemm::wgmma::probe::{WgmmaProbe, probe, sized};
use ostinato::kernels::gemm::wgmma::{WgmmaTile, WgmmaVariant, constants_of, text, variant_of};
use ostinato::kernels::host_memory::HostMemory;
use ostinato::kernels::interpreter;
use ostinato::kernels::moe::{ExpertPart, NOBODY, Sorted};
use ostinato::kernels::recording::{Op, Recording};
use ostinato::kernels::{codes_word, format_word};
use ostinato::memory::pack::{Format, fragment_index};
use ostinato::quant::number::Number;
use ostinato::quant::{Codes, Minimum};
use std::cell::Cell;
use std::collections::HashSet;

/// Every tile that `wgmma::choose` knows, and every other combination that can be configured, but for the stages.
const TILES: [[u32; 4]; 20] = [
    [2, 1, 256, 4],
    [2, 2, 128, 4],
    [2, 1, 128, 6],
    [3, 1, 128, 5],
    [3, 1, 64, 6],
    [1, 1, 64, 12],
    [1, 1, 128, 8],
    [2, 1, 64, 8],
    [2, 2, 64, 5],
    [1, 2, 128, 6],
    [1, 1, 256, 4],
    [1, 2, 64, 8],
    [1, 3, 64, 6],
    [3, 1, 32, 7],
    [2, 1, 32, 10],
    [1, 1, 32, 17],
    [2, 2, 32, 6],
    [1, 2, 32, 8],
    [1, 3, 32, 7],
    [1, 4, 32, 6],
];
/// The number of an epilogue: GeGLU, the clamped unit with a limit of 7, and squared ReLU.
const GELU: u32 = 3;
const CLAMPED: u32 = 4 | 0x40e0_0000;
const SQUARED: u32 = 5;
/// Bias, epilogue and whether y is packed.
const EPILOGUES: [[u32; 3]; 9] =
    [[0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 1, 0], [0, 2, 0], [0, 2, 1], [1, GELU, 1], [1, CLAMPED, 1], [1, SQUARED, 0]];

/// Formats of weights: of each number of bits and kind of number, with and without minimums, by groups of each size.
const FORMATS: [Codes; 12] = [
    codes(2, 16, Number::Affine, Minimum::Stored),
    codes(3, 16, Number::Affine, Minimum::Zero { halves: 8 }),
    codes(4, 32, Number::Affine, Minimum::Stored),
    codes(4, 128, Number::Affine, Minimum::Zero { halves: 16 }),
    codes(4, 32, Number::Affine, Minimum::Zero { halves: 15 }),
    codes(4, 32, Number::E2m1, Minimum::Zero { halves: 0 }),
    codes(4, 16, Number::E2m1, Minimum::Zero { halves: 0 }),
    codes(5, 32, Number::Affine, Minimum::Stored),
    codes(6, 16, Number::Affine, Minimum::Zero { halves: 64 }),
    codes(8, 64, Number::Affine, Minimum::Zero { halves: 256 }),
    codes(8, 128, Number::E4m3, Minimum::Zero { halves: 0 }),
    codes(8, 32, Number::E5m2, Minimum::Zero { halves: 0 }),
];

const fn codes(bits: u32, group: u32, number: Number, minimum: Minimum) -> Codes {
    Codes { bits, group, number, minimum }
}

fn constants(tile: [u32; 4], epilogue: [u32; 3]) -> Vec<u32> {
    tile.into_iter().chain(epilogue).chain([0, 0, 0, 1, 0]).collect()
}

/// Returns the constants for weights of codes, with as many stages as fit; `None` if no two do.
fn coded(tile: [u32; 4], epilogue: [u32; 3], codes: Codes, experts: u32) -> Option<Vec<u32>> {
    let [groups, blocks, tokens, stages] = tile;
    let codes = codes_word(Format::Codes(codes));
    let tile = WgmmaTile { groups, blocks, tokens, stages, splits: 1 }.for_format(codes, false, false)?;
    Some([groups, blocks, tokens, tile.stages].into_iter().chain(epilogue).chain([codes, experts, 0, 1, 0]).collect())
}

/// Returns the constants of every tile for rows in e4m3, with each epilogue in turn, and of two for experts.
fn e4m3() -> Vec<Vec<u32>> {
    let word = codes_word(Format::Codes(codes(8, 128, Number::E4m3, Minimum::Zero { halves: 0 })));
    let made = |[groups, blocks, tokens, stages]: [u32; 4], epilogue: [u32; 3], experts: u32| {
        let tile = WgmmaTile { groups, blocks, tokens, stages, splits: 1 }.for_format(word, true, false)?;
        Some(
            [groups, blocks, tokens, tile.stages].into_iter().chain(epilogue).chain([word, experts, 1, 1, 0]).collect(),
        )
    };
    let plain = TILES.into_iter().zip(EPILOGUES.into_iter().cycle());
    let mut all: Vec<Vec<u32>> = plain.filter_map(|(tile, epilogue)| made(tile, epilogue, 0)).collect();
    all.extend(EPILOGUES.into_iter().filter_map(|epilogue| made([2, 1, 256, 4], epilogue, 0)));
    all.extend(made([2, 1, 128, 3], [1, 0, 0], 1));
    all.extend(made([3, 1, 64, 4], [0, CLAMPED, 1], 1));
    all.extend(made([2, 1, 128, 3], [0, 2, 0], 1));
    all
}

/// Returns the constants of every kind of program beyond those of [`TILES`] with [`EPILOGUES`]: of codes, and of experts.
fn further() -> Vec<Vec<u32>> {
    let mut all = Vec::new();
    for (index, format) in FORMATS.into_iter().enumerate() {
        for (tile, epilogue, experts) in [
            (TILES[index % 3], EPILOGUES[index % EPILOGUES.len()], 0),
            (TILES[3 + index % (TILES.len() - 3)], EPILOGUES[(index + 3) % EPILOGUES.len()], 0),
            ([2, 1, 128, 3], [1, 0, 0], 1),
            ([3, 1, 64, 4], [0, CLAMPED, 1], 1),
            ([2, 1, 64, 4], [0, SQUARED, 0], 1),
        ] {
            all.extend(coded(tile, epilogue, format, experts));
        }
    }
    for (tile, epilogue) in TILES
        .into_iter()
        .zip([[0, 0, 0], [1, 0, 0], [0, 2, 1], [1, CLAMPED, 1], [0, GELU, 0], [0, SQUARED, 0]].into_iter().cycle())
    {
        all.push(tile.into_iter().chain(epilogue).chain([0, 1, 0, 1, 0]).collect());
    }
    all
}

/// Returns the constants of every tile for weights in f16, with each epilogue in turn and shared columns where they are
/// possible, and of two for experts.
fn halves() -> Vec<Vec<u32>> {
    let word = format_word(Format::F16);
    let unpacked = EPILOGUES.into_iter().filter(|[.., packed]| *packed == 0);
    let plain = TILES.into_iter().zip(unpacked.cycle()).enumerate().map(|(index, (tile, epilogue))| {
        let splits = 1 + index as u32 % 3;
        tile.into_iter().chain(epilogue).chain([word, 0, 0, splits, 0]).collect()
    });
    let experts = [([2, 1, 128, 3], [1, 0, 0]), ([3, 1, 64, 4], [0, CLAMPED, 0])];
    let experts = experts.map(|(tile, epilogue)| tile.into_iter().chain(epilogue).chain([word, 1, 0, 1, 0]).collect());
    plain.chain(experts).filter(|constants: &Vec<u32>| variant_of(constants).is_possible()).collect()
}

/// Returns these constants with another number of workgroups that share a tile, and another part of a norm.
fn with(constants: &[u32], splits: u32, fold: u32) -> Vec<u32> {
    constants[..10].iter().copied().chain([splits, fold]).collect()
}

/// Returns constants of every kind for tiles whose columns several workgroups share: each epilogue, number of warpgroups and
/// kind of weights.
fn shared() -> Vec<Vec<u32>> {
    let plain = TILES.into_iter().zip(EPILOGUES.into_iter().cycle());
    let plain = plain.map(|(tile, epilogue)| constants(tile, epilogue));
    let codes = FORMATS.into_iter().enumerate();
    let codes = codes.filter_map(|(index, format)| coded(TILES[index + 2], EPILOGUES[index % 6], format, 0));
    let all = plain.chain(codes).zip((2..=4).cycle()).map(|(constants, splits)| with(&constants, splits, 0));
    all.filter(|constants| variant_of(constants).is_possible()).collect()
}

/// Returns constants of every kind for products into which a norm is folded: each tile, epilogue and kind of weights, alone and
/// with columns that several workgroups share.
fn folded() -> Vec<Vec<u32>> {
    let mut all = Vec::new();
    let mut add = |constants: &[u32], splits: u32, fold: u32| {
        let constants = with(constants, splits, fold);
        let variant = variant_of(&constants);
        let tile = variant.tile.for_format(variant.codes, false, true);
        let variant = tile.map(|tile| WgmmaVariant { tile, ..variant });
        all.extend(variant.filter(|variant| !variant.experts && variant.is_possible()));
    };
    for (index, tile) in TILES.into_iter().enumerate() {
        let format = FORMATS[index % FORMATS.len()];
        for (epilogue, fold) in
            EPILOGUES.map(|epilogue| (epilogue, 1)).into_iter().chain([([0, 1, 0], 2), ([1, 1, 0], 2)])
        {
            let splits = 1 + index as u32 % 3;
            add(&constants(tile, epilogue), splits, fold);
            if let Some(coded) = coded(tile, epilogue, format, 0) {
                add(&coded, 1 + (index as u32 + 1) % 3, fold);
            }
        }
    }
    all.into_iter().map(constants_of).collect()
}

/// Returns the constants of every tile with every epilogue.
fn plain() -> Vec<Vec<u32>> {
    TILES.into_iter().flat_map(|tile| EPILOGUES.map(|epilogue| constants(tile, epilogue))).collect()
}

/// Returns the constants that bring a tile, an epilogue, a format or another value that none before them has. All combinations
/// take minutes.
fn some(all: Vec<Vec<u32>>) -> Vec<Vec<u32>> {
    let mut seen = HashSet::new();
    let mut new = |constants: &Vec<u32>| {
        let parts = [&constants[..3], &constants[4..7]].into_iter().chain(constants[7..].chunks(1));
        let new: Vec<bool> = parts.enumerate().map(|(at, part)| seen.insert((at, part.to_vec()))).collect();
        new.contains(&true)
    };
    all.into_iter().filter(|constants| every_case() || new(constants)).collect()
}

#[test]
fn every_program_is_assembled_without_spilling() {
    let assembler = Assembler::new();
    for constants in [plain(), further(), e4m3(), halves(), shared(), folded()].into_iter().flat_map(some) {
        let variant = variant_of(&constants);
        assert!(variant.is_possible(), "{variant:?}");
        assembler.require(&format!("{variant:?}"), &text::text(&variant));
    }
}

#[test]
fn every_possible_tile_is_tested() {
    for (groups, blocks, tokens) in
        (1..=4).flat_map(|g| (1..=4).flat_map(move |b| [32, 64, 128, 256].map(|t| (g, b, t))))
    {
        let possible = WgmmaTile { groups, blocks, tokens, stages: 2, splits: 1 }.is_possible();
        let tested = TILES.iter().any(|[g, b, t, _]| (*g, *b, *t) == (groups, blocks, tokens));
        assert_eq!(possible, tested, "{groups}/{blocks}/{tokens}");
    }
}

#[test]
fn the_assembler_refuses_a_wrong_program() {
    let right = text::text(&variant_of(&constants([1, 1, 64, 4], [0, 0, 0])));
    let (done, said) = Assembler::new().assemble(&right.replace("m64n64k16", "m64n65k16"));
    assert!(!done, "{said}");
}

/// Goal: the reference is the formula. Method: one product whose operands are unpacked here.
#[test]
fn the_reference_is_the_formula() {
    let (rows, n, k) = (9, 128, 192);
    let made = sized(&constants([1, 1, 64, 2], [0, 2, 1]), rows, (n, k), 4);
    let mut after = made.memory.clone();
    interpreter::run(&made.recording, &mut after);
    let range = |name: &str| {
        let at = made.recording.buffers.iter().position(|b| b.name == format!("probe.{name}")).expect("a buffer");
        let mut copy = made.recording.clone();
        copy.buffer(&format!("probe.{name}"), made.recording.buffers[at].bytes)
    };
    let [weight, x, y] = ["weight", "x", "y"].map(range);
    let number = |range, at: usize| f64::from(after.weight(Format::Bf16, range, at as u32));
    for row in 0..rows {
        for output in 0..n / 2 {
            let dot = |r: u32| -> f64 {
                let terms =
                    (0..k).map(|c| number(weight, fragment_index(r, c, k)) * number(x, swizzled_index(row, c, 64)));
                terms.sum()
            };
            let (gate, up) = (dot(2 * output), dot(2 * output + 1));
            let wanted = gate / (1.0 + (-gate).exp()) * up;
            let found = number(y, swizzled_index(row, output, 64));
            assert!((found - wanted).abs() <= 2f64.powi(-8) * wanted.abs() + 1e-30, "{found} is not {wanted}");
        }
    }
}

#[test]
fn pack_rows_packs_for_wgmma() {
    let mut cases = Cases::new("pack_rows.swizzled");
    let mut random = Random(81);
    let mut made = Vec::new();
    for (k, rows, used, norm) in
        [(64, 64, 64, false), (192, 64, 7, true), (1024, 128, 65, true), (320, 192, 130, false)]
    {
        cases.case(format!("{k}.{used}of{rows}"));
        let stride = k + 8;
        let values = random.floats((rows * stride) as usize);
        let x = Activations { range: cases.floats("x", &values), stride };
        let norm = norm.then(|| (cases.floats("norm", &random.floats(k as usize)), 1e-3));
        let expect = if norm.is_some() { Expect::Bfloats(2f32.powi(-7)) } else { Expect::Exact };
        let count = cases.words("chunk", &[POISON, POISON, used, POISON]);
        let pair = [PackedOrder::Swizzled, PackedOrder::Fragments].map(|order| {
            let range = cases.output(&format!("{order:?}"), Packed::bytes(rows, k) as usize / 4, expect);
            let packed = Packed { range, cols: k, order };
            cases.recording.call(pack_rows("pack".to_owned(), x, norm, packed, rows, Some(count)));
            packed
        });
        made.push((pair, rows));
    }
    let reference = cases.reference();
    for ([swizzled, fragments], rows) in made {
        for (row, col) in (0..rows).flat_map(|row| (0..swizzled.cols).map(move |col| (row, col))) {
            let [a, b] =
                [swizzled, fragments].map(|packed| reference.u16(packed.range, packed.index(row, col, rows) as u32));
            assert_eq!(a, b, "row {row}, column {col}");
        }
    }
    let vulkan = Vulkan::new();
    for driver in Driver::all() {
        cases.check(&Bench::new(&vulkan, *driver), &reference);
    }
}

#[test]
fn pack_rows_packs_numbers_in_e4m3_with_a_scale_for_each_row() {
    let mut cases = Cases::new("pack_rows.e4m3");
    let mut random = Random(82);
    let mut made = Vec::new();
    for (k, rows, used, norm) in
        [(128, 64, 64, false), (256, 64, 7, true), (1024, 128, 65, true), (384, 192, 130, false)]
    {
        cases.case(format!("{k}.{used}of{rows}"));
        let stride = k + 8;
        let mut values = random.floats((rows * stride) as usize);
        // Rows of different sizes, one of zeros, and numbers in a row that are subnormal in e4m3.
        for (at, value) in (0..).zip(&mut values) {
            let (row, col) = (at / stride, at % stride);
            *value = if row == 3 { 0.0 } else { *value * 2f32.powi(row as i32 % 40 - 20) };
            *value *= if col % 5 == 0 { 2f32.powi(-(col as i32 % 17)) } else { 1.0 };
        }
        let x = Activations { range: cases.floats("x", &values), stride };
        let norm = norm.then(|| (cases.floats("norm", &random.floats(k as usize)), 1e-3));
        let count = cases.words("chunk", &[POISON, POISON, used, POISON]);
        let codes = rows * k / 4;
        let expect = match norm {
            Some(_) => Expect::CodePages { words: codes + rows, codes, limit: 0.0 },
            None => Expect::Exact,
        };
        let range = cases.output("packed", (codes + rows) as usize, expect);
        let packed = Packed { range, cols: k, order: PackedOrder::E4m3 };
        cases.recording.call(pack_rows("pack".to_owned(), x, norm, packed, rows, Some(count)));
        made.push((packed, values, stride, (rows, used), norm.is_some()));
    }
    // All rows in use, of which one has numbers that are none.
    cases.case("all".to_owned());
    let mut values = random.floats(64 * 136);
    (values[5 * 136], values[6 * 136 + 9]) = (f32::INFINITY, f32::NAN);
    let x = Activations { range: cases.floats("x", &values), stride: 136 };
    let range = cases.output("packed", 64 * 33, Expect::Exact);
    let packed = Packed { range, cols: 128, order: PackedOrder::E4m3 };
    cases.recording.call(pack_rows("pack".to_owned(), x, None, packed, 64, None));
    let all = packed;
    // Rows of experts: slots name a row's choice, or nobody, and a tile without an expert is left as it is.
    for chosen in [8, 1] {
        cases.case(format!("{chosen} chosen"));
        let x = Activations { range: cases.floats("x", &random.floats(64 * 136)), stride: 136 };
        let tiles = cases.words("tiles", &[3, NOBODY, 0, 2]);
        let slots = (0..64).map(|i| if i % 7 == 5 { NOBODY } else { i * 11 % (64 * chosen) }).collect::<Vec<u32>>();
        let slots = cases.words("slots", &slots);
        let sorted = Sorted { tiles, slots, tile: 16, most: 4, chosen, part: ExpertPart::ALL };
        let range = cases.output("packed", 64 * 33, Expect::Exact);
        let packed = Packed { range, cols: 128, order: PackedOrder::E4m3 };
        cases.recording.call(pack_sorted("pack".to_owned(), x, None, packed, &sorted));
    }
    let reference = cases.reference();
    for row in [5, 6] {
        let codes = (0..128).map(|col| reference.u8(all.range, all.index(row, col, 64) as u32));
        assert_eq!(codes.filter(|code| *code == 0x7f).count(), 1, "row {row}");
    }
    for (packed, values, stride, (rows, used), norm) in made {
        let scale = |row| reference.f32(packed.scales(rows), row);
        for (row, col) in (0..rows).flat_map(|row| (0..packed.cols).map(move |col| (row, col))) {
            let code = reference.u8(packed.range, packed.index(row, col, rows) as u32);
            let found = Number::E4m3.table()[usize::from(code)] * scale(row);
            let wanted = if row < used { values[(row * stride + col) as usize] } else { 0.0 };
            // Half a unit of a mantissa of three bits, or half of the smallest number.
            let most = (wanted.abs() / 16.0).max(scale(row) / 1024.0);
            assert!(norm || (found - wanted).abs() <= most, "row {row}, column {col} is {found}, not {wanted}");
        }
    }
    let vulkan = Vulkan::new();
    for driver in Driver::all() {
        cases.check(&Bench::new(&vulkan, *driver), &reference);
    }
}

/// Runs a probe's program, whose text `change` may change, on the simulated processor.
fn simulate(probe: &WgmmaProbe, change: impl Fn(&str) -> String) -> HostMemory {
    let Op::Call(call) = &probe.recording.ops[0] else { panic!("a probe is one call") };
    ptx::simulate(call, &probe.memory, change)
}

/// Checks that the programs of calls with these constants give the reference's results on the simulated processor.
fn agree(all: impl IntoIterator<Item = Vec<u32>>) {
    for constants in all {
        let probe = probe(&constants, 3);
        assert_eq!(probe.difference(&simulate(&probe, str::to_owned)), None, "{constants:?}");
    }
}

#[test]
fn every_tile_and_epilogue_matches_its_reference_on_a_simulated_processor() {
    agree(some(plain()));
}

#[test]
fn codes_and_experts_match_their_reference_on_a_simulated_processor() {
    agree(some(further()).into_iter().chain(some(e4m3())).chain(some(halves())));
}

#[test]
fn tiles_that_are_shared_match_their_reference_on_a_simulated_processor() {
    agree(some(shared()));
    // The last share has more steps, or a stage that is not full; and a second call finds the counters at zero.
    for (constants, splits, k) in [(constants(TILES[7], [0, 1, 0]), 3, 704), (constants(TILES[5], [1, 0, 0]), 4, 256)] {
        let constants = with(&constants, splits, 0);
        let mut made = sized(&constants, 70, (208, k), 0);
        let found = simulate(&made, str::to_owned);
        assert_eq!(made.difference(&found), None, "{constants:?}");
        made.memory = found;
        assert_eq!(made.difference(&simulate(&made, str::to_owned)), None, "{constants:?}, again");
    }
}

#[test]
fn folded_norms_match_their_reference_on_a_simulated_processor() {
    agree(some(folded()));
    // Rows that are not multiples of tiles, and more squares than a thread has in flight.
    for (rows, (n, k), fold) in [(9, (128, 192), 2), (64, (192, 2112), 1), (129, (320, 1600), 1), (70, (1088, 64), 2)] {
        for tile in [TILES[4], TILES[6], TILES[15]] {
            let constants = with(&constants(tile, [1, fold - 1, 0]), 1, fold);
            let probe = sized(&constants, rows, (n, k), if rows == 70 { 0 } else { 2 });
            assert_eq!(probe.difference(&simulate(&probe, str::to_owned)), None, "{rows} rows, {constants:?}");
        }
    }
}

#[test]
fn awkward_shapes_match_their_reference_on_a_simulated_processor() {
    for (rows, shape) in
        [(1, (16, 64)), (7, (208, 320)), (64, (80, 128)), (65, (256, 192)), (300, (128, 64)), (257, (48, 448))]
    {
        for (tile, processors) in [(TILES[0], 132), (TILES[1], 2), (TILES[5], 0)] {
            let probe = sized(&constants(tile, [0, 1, 0]), rows, shape, processors);
            let found = simulate(&probe, str::to_owned);
            assert_eq!(probe.difference(&found), None, "{rows} rows of {shape:?} with {tile:?}");
        }
    }
}

/// Goal: the simulation notices what is read or overwritten too early. Method: programs that wait less than they must.
#[test]
fn the_simulated_processor_notices_a_missing_wait() {
    let probe = probe(&constants([1, 1, 64, 4], [0, 0, 0]), 2);
    for (right, wrong) in [
        // A place is left while it is still read.
        ("wgmma.wait_group.sync.aligned 1;", "wgmma.wait_group.sync.aligned 2;"),
        // The sums are stored before they are complete.
        ("wgmma.wait_group.sync.aligned 0;", "wgmma.wait_group.sync.aligned 1;"),
        // The descriptor is that of the columns before.
        ("add.u64 %l1, %l0, 2;", "add.u64 %l1, %l0, 0;"),
    ] {
        let found = Cell::new(false);
        let change = |text: &str| {
            found.set(text.contains(right));
            text.replace(right, wrong)
        };
        let run = std::panic::AssertUnwindSafe(|| probe.difference(&simulate(&probe, change)));
        // A panic is the processor's own complaint.
        assert!(std::panic::catch_unwind(run).map_or(true, |found| found.is_some()), "{wrong} is not noticed");
        assert!(found.get(), "the text has no {right}");
    }
}

/// Runs probes on the selected GPU, which must take programs in PTX.
fn run(probes: &[(String, WgmmaProbe)]) {
    let vulkan = Vulkan::new();
    let bench = Bench::new(&vulkan, Driver::Gpu);
    bench.device.takes_ptx().expect("programs in PTX");
    let failed: Vec<String> = probes
        .iter()
        .filter_map(|(name, probe)| {
            let found = bench.run(&probe.recording, &probe.memory);
            probe.difference(&found).map(|why| format!("{name}: {why}"))
        })
        .collect();
    assert!(failed.is_empty(), "{} of {} differ:\n{}", failed.len(), probes.len(), failed.join("\n"));
}

#[test]
#[ignore = "needs a GPU of compute capability 9.0 (OSTINATO_TEST_GPU)"]
fn every_tile_and_epilogue_matches_its_reference() {
    let mut probes = Vec::new();
    for tile in TILES {
        for epilogue in EPILOGUES {
            let constants = constants(tile, epilogue);
            probes.push((format!("{constants:?}"), probe(&constants, 132)));
        }
    }
    run(&probes);
}

#[test]
#[ignore = "needs a GPU of compute capability 9.0 (OSTINATO_TEST_GPU)"]
fn tiles_that_are_shared_match_their_reference() {
    run(&shared().into_iter().map(|constants| (format!("{constants:?}"), probe(&constants, 132))).collect::<Vec<_>>());
}

#[test]
#[ignore = "needs a GPU of compute capability 9.0 (OSTINATO_TEST_GPU)"]
fn folded_norms_match_their_reference() {
    run(&folded().into_iter().map(|constants| (format!("{constants:?}"), probe(&constants, 132))).collect::<Vec<_>>());
}

#[test]
#[ignore = "needs a GPU of compute capability 9.0 (OSTINATO_TEST_GPU)"]
fn awkward_shapes_match_their_reference() {
    let mut probes = Vec::new();
    let mut add = |tile, epilogue, rows, shape, processors| {
        let constants = constants(tile, epilogue);
        let name = format!("{constants:?}, {rows} rows of {shape:?} on {processors}");
        probes.push((name, sized(&constants, rows, shape, processors)));
    };
    for rows in [1, 7, 8, 9, 63, 64, 65, 100, 127, 128, 129, 200, 255, 256, 257, 300] {
        for (tile, processors) in [(TILES[0], 132), (TILES[1], 3), (TILES[5], 0)] {
            add(tile, [0, 1, 0], rows, (208, 320), processors);
            add(tile, [0, 2, 1], rows, (256, 64), processors);
        }
    }
    for rows in [2047, 4096] {
        for tile in [TILES[0], TILES[1], TILES[6]] {
            add(tile, [1, 0, 0], rows, (80, 192), 5);
            add(tile, [0, 2, 1], rows, (128, 128), 0);
        }
    }
    // More columns than any other product has here, and one tile for many processors.
    add(TILES[0], [0, 0, 0], 256, (256, 12_288), 132);
    run(&probes);
}

/// Goal: launches are ordered with dispatches. Method: rows are packed by a dispatch, multiplied twice, the second time
/// with what the first left, and the whole recording is repeated.
#[test]
#[ignore = "needs a GPU of compute capability 9.0 (OSTINATO_TEST_GPU)"]
fn launches_and_dispatches_are_ordered_by_barriers() {
    let vulkan = Vulkan::new();
    let bench = Bench::new(&vulkan, Driver::Gpu);
    let made = sized(&constants(TILES[0], [0, 1, 0]), 512, (1024, 1024), 132);
    let mut recording = Recording { name: "chain".to_owned(), ..made.recording.clone() };
    let mut memory = made.memory.clone();
    let stride = 1024 + 8;
    let y = recording.buffer("probe.y", 512 * stride * 4);
    let x = recording.buffer("probe.x", Packed::bytes(512, 1024));
    let packed = Packed { range: x, cols: 1024, order: PackedOrder::Swizzled };
    let ones = recording.buffer("ones", 1024 * 4);
    memory.buffers.push(vec![1f32.to_bits(); 1024]);
    for _ in 0..2 {
        let rows = Activations { range: y, stride: stride as u32 };
        recording.call(pack_rows("pack".to_owned(), rows, Some((ones, 1e-6)), packed, 512, None));
        recording.ops.push(made.recording.ops[0].clone());
    }
    let mut wanted = memory.clone();
    interpreter::run(&recording, &mut wanted);
    for _ in 0..8 {
        let found = bench.run(&recording, &memory);
        for (row, col) in (0..512).flat_map(|row| (0..1024).map(move |col| (row, col))) {
            let at = row * stride as u32 + col;
            let (wanted, found) = (wanted.f32(y, at), found.f32(y, at));
            assert!((wanted - found).abs() <= 0.05, "row {row}, column {col} is {found}, not {wanted}");
        }
    }
}
