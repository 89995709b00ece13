//! Goal: the stages between products (`add_branch`, `norm_heads`, `gate_rows`, `bound_logits`), those of embedded prompts
//! (`row_scales`, `pool_rows`), the gated linear units and the factor of
//! embeddings match their references, and the references match the formulas. Method: awkward widths, with and without
//! weights, on both CPU drivers; words that must not be written must stay unchanged.

use crate::common::{Driver, Vulkan};
use crate::harness::{Bench, Cases, Expect, POISON, Random};
use ostinato::kernels::attention::latent::{LatentShape, latent_rows, latent_values};
use ostinato::kernels::gemm::{Activations, Epilogue, GemvConfig, Glu, Matrix, Product};
use ostinato::kernels::host_memory::HostMemory;
use ostinato::kernels::shaders::{PoolRowsArgs, RowScalesArgs};
use ostinato::kernels::stream::{
    Beside, Branch, BranchFlow, add_branch, bound_logits, gate_rows, norm_and_add, norm_groups, norm_heads, norm_with,
    pool_rows, pool_words, row_scales,
};
use ostinato::kernels::tags::{Flow, tagged};
use ostinato::memory::pack::Format;

const LIMIT: f32 = 2e-6;
/// The lowest bits of tagged words hold their tag.
const TAGGED_LIMIT: f32 = 2e-5;
const EPSILON: f32 = 1e-5;

/// Runs the cases on every driver and compares with the reference.
fn check(cases: &Cases, reference: &HostMemory) {
    let vulkan = Vulkan::new();
    for driver in Driver::all() {
        cases.check(&Bench::new(&vulkan, *driver), reference);
    }
}

/// Returns rows of `width` values, padded with `padding` to `stride`.
fn rows(random: &mut Random, rows: u32, width: u32, stride: u32, padding: f32) -> Vec<f32> {
    (0..rows * stride).map(|i| if i % stride < width { random.float() * 2.0 } else { padding }).collect()
}

fn near(found: f32, wanted: f64, what: &str) {
    assert!((f64::from(found) - wanted).abs() <= 1e-5 * (1.0 + wanted.abs()), "{what}: {found} instead of {wanted}");
}

fn rms(values: &[f32]) -> f64 {
    (values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / values.len() as f64 + f64::from(EPSILON)).sqrt()
}

/// Runs `add_branch` with widths of one to several values per invocation. With tags, its operands have those of `tags`.
fn branches(tags: BranchFlow, widths: &[u32]) {
    let BranchFlow { flow, beside: beside_flow } = tags;
    let tagged_words = flow != Flow::NONE;
    let mut cases = Cases::new(if tagged_words { "add_branch.tagged" } else { "add_branch" });
    let mut random = Random(71);
    let mut made = Vec::new();
    let put = |values: Vec<f32>, tag: u32| -> Vec<f32> {
        values.into_iter().map(|v| if tagged_words { f32::from_bits(tagged(v, tag)) } else { v }).collect()
    };
    for (index, width) in widths.iter().copied().enumerate() {
        for norms in [0, 1, 3] {
            cases.case(format!("{width} norms={norms}"));
            let (count, stride) = (1 + 2 * index as u32, width.next_multiple_of(32));
            let x = put(rows(&mut random, count, width, stride, 0.0), flow.input);
            let other = put(rows(&mut random, count, width, stride, 0.0), beside_flow.input);
            let y = put(rows(&mut random, count, width, stride, f32::from_bits(POISON)), flow.old);
            let weights: Vec<Vec<f32>> = (0..norms)
                .map(|_| (0..stride).map(|i| if i < width { 1.0 + random.float() } else { 0.0 }).collect())
                .collect();
            let of = |range| Activations { range, stride };
            let (x_range, y_range) = (cases.floats("x", &x), cases.floats("y", &y));
            let names = ["norm", "beside_norm", "sum_norm"];
            let ranges: Vec<_> = weights.iter().zip(names).map(|(norm, name)| cases.floats(name, norm)).collect();
            let beside = (norms == 3).then(|| Beside {
                x: of(cases.floats("beside", &other)),
                norm: ranges[1],
                sum_norm: ranges[2],
            });
            let fault = cases.words("fault", &[0; 2]);
            cases.expect(y_range, if tagged_words { Expect::Tagged(TAGGED_LIMIT) } else { Expect::Floats(LIMIT) });
            let scale = if index % 2 == 0 { 1.0 } else { 0.22 };
            let factor = (index % 2 == 1).then_some(0.6f32);
            let factor_range = factor.map(|factor| cases.floats("factor", &[factor, f32::NAN]));
            let branch = Branch { x: of(x_range), norm: ranges.first().copied(), beside, epsilon: EPSILON, scale };
            let size = (count, width);
            cases.recording.call(add_branch("add".to_owned(), size, branch, (of(y_range), factor_range), tags, fault));
            made.push((y_range, [y, x, other], weights, (count, width, stride), (scale, factor.unwrap_or(1.0))));
        }
    }
    let reference = cases.reference();
    for (range, [y, x, other], weights, (count, width, stride), (scale, factor)) in made {
        for row in 0..count {
            let line = |values: &[f32]| values[(row * stride) as usize..][..width as usize].to_vec();
            let normed = |values: Vec<f32>, weights: &[f32]| -> Vec<f32> {
                let divisor = rms(&values) as f32;
                values.iter().zip(weights).map(|(value, weight)| value / divisor * weight).collect()
            };
            let mut branch = line(&x);
            if let [first, rest @ ..] = &weights[..] {
                branch = normed(branch, first);
                if let [second, third] = rest {
                    let other = normed(line(&other), second);
                    branch = normed(branch.iter().zip(other).map(|(a, b)| a + b).collect(), third);
                }
            }
            for (i, branch) in (0..).zip(branch) {
                let at = row * stride + i;
                let sum = f64::from(y[at as usize]) + f64::from(branch) * f64::from(scale);
                near(reference.f32(range, at), sum * f64::from(factor), "y");
                assert!(!tagged_words || flow.output == Some(reference.u32(range, at) % 128), "the tag of y");
            }
        }
    }
    check(&cases, &reference);
}

#[test]
fn branches_are_added_with_and_without_norms() {
    branches(BranchFlow::NONE, &[8, 40, 96, 1000, 5376]);
}

#[test]
fn tagged_branches_are_added_to_a_tagged_stream() {
    let read = Flow { input_carried: true, ..Flow::NONE };
    let flow = Flow { input: 5, old: 9, output: Some(10), ..read };
    branches(BranchFlow { flow, beside: Flow { input: 77, ..read } }, &[32, 96, 160, 1056, 5376]);
}

#[test]
fn parts_of_rows_are_normed_in_place() {
    let mut cases = Cases::new("norm_heads");
    let mut random = Random(72);
    let mut made = Vec::new();
    for (first, parts, width) in [(0, 1, 40), (8, 3, 24), (16, 2, 128), (0, 1, 1000)] {
        for weighted in [false, true] {
            cases.case(format!("{parts} of {width} from {first} weighted={weighted}"));
            let (count, stride) = (3, first + parts * width + 8);
            let x: Vec<f32> = (0..count * stride).map(|_| random.float() * 3.0).collect();
            let weights: Vec<f32> = (0..width).map(|_| 1.0 + random.float()).collect();
            let range = cases.floats("x", &x);
            let norm = weighted.then(|| cases.floats("norm", &weights));
            cases.expect(range, Expect::Floats(LIMIT));
            let of = Activations { range, stride };
            cases.recording.call(norm_heads("norm".to_owned(), count, of, (first, parts, width), (norm, EPSILON)));
            made.push((range, x, weighted.then_some(weights), (first, parts, width), (count, stride)));
        }
    }
    let reference = cases.reference();
    for (range, x, weights, (first, parts, width), (count, stride)) in made {
        for (row, at) in (0..count).flat_map(|row| (0..stride).map(move |at| (row, at))) {
            let index = row * stride + at;
            let value = f64::from(x[index as usize]);
            let wanted = match at.checked_sub(first).filter(|at| *at < parts * width) {
                None => value,
                Some(at) => {
                    let part = &x[(row * stride + first + at / width * width) as usize..][..width as usize];
                    let weight = weights.as_ref().map_or(1.0, |weights| f64::from(weights[(at % width) as usize]));
                    value / rms(part) * weight
                }
            };
            near(reference.f32(range, index), wanted, "x");
        }
    }
    check(&cases, &reference);
}

/// Goal: the mean of a norm is that of the normed part and of further floats of its row.
#[test]
fn parts_of_rows_are_normed_together_with_further_floats() {
    let mut cases = Cases::new("norm_with");
    let mut random = Random(73);
    let mut made = Vec::new();
    for (own, further, stride) in
        [((0, 40), (40, 24), 64), ((8, 24), (80, 200), 288), ((300, 128), (0, 300), 432), ((0, 48), (96, 0), 96)]
    {
        cases.case(format!("{own:?} with {further:?}"));
        let count = 3;
        let x: Vec<f32> = (0..count * stride).map(|_| random.float() * 3.0).collect();
        let weights: Vec<f32> = (0..own.1).map(|_| 1.0 + random.float()).collect();
        let (range, norm) = (cases.floats("x", &x), (Some(cases.floats("norm", &weights)), EPSILON));
        cases.expect(range, Expect::Floats(LIMIT));
        cases.recording.call(norm_with("norm".to_owned(), count, Activations { range, stride }, own, further, norm));
        made.push((range, x, weights, own, further, (count, stride)));
    }
    let reference = cases.reference();
    for (range, x, weights, (first, width), (other, others), (count, stride)) in made {
        for (row, at) in (0..count).flat_map(|row| (0..stride).map(move |at| (row, at))) {
            let line = &x[(row * stride) as usize..][..stride as usize];
            let value = f64::from(line[at as usize]);
            let wanted = match at.checked_sub(first).filter(|at| *at < width) {
                None => value,
                Some(at) => {
                    let part = |first: u32, count: u32| &line[first as usize..(first + count) as usize];
                    let all = [part(first, width), part(other, others)].concat();
                    value / rms(&all) * f64::from(weights[at as usize])
                }
            };
            near(reference.f32(range, row * stride + at), wanted, "x");
        }
    }
    check(&cases, &reference);
}

#[test]
fn runs_of_normed_rows_are_summed() {
    let mut cases = Cases::new("pool_rows");
    let mut random = Random(74);
    let mut made = Vec::new();
    // Rows of the step and the most it can have, columns, and the pooled runs of rows.
    let shapes = [
        (1u32, 1, 8u32, vec![(0, 1)]),
        (37, 64, 72, vec![(0, 5), (5, 1), (36, 1)]),
        (130, 160, 1000, vec![(0, 130), (64, 3)]),
    ];
    for (rows_used, most, width, runs) in shapes {
        cases.case(format!("{width} rows={rows_used}"));
        let (stride, prompts, first) = (width.next_multiple_of(32), 4, 3);
        let x = rows(&mut random, most, width, stride, 0.0);
        let weights: Vec<f32> = (0..width).map(|_| 1.0 + random.float()).collect();
        let mut words = vec![runs.len() as u32, first];
        words.extend(runs.iter().flat_map(|(from, count)| [*from, *count]));
        words.resize(pool_words(prompts) as usize, 77);
        let (x_range, norm) = (cases.floats("x", &x), cases.floats("norm", &weights));
        let (pool, chunk) = (cases.words("pool", &words), cases.words("chunk", &[1, 0, rows_used, 0]));
        let scales = cases.output("scales", most as usize, Expect::Floats(LIMIT));
        let pooled = cases.output("pooled", ((first + prompts) * stride) as usize, Expect::Floats(1e-5));
        let (columns, x_stride, pooled_stride) = (width, stride, stride);
        let args = RowScalesArgs { x: x_range, chunk, scales, columns, x_stride, epsilon: EPSILON };
        cases.recording.call(row_scales("row_scales".to_owned(), (most, width), args));
        let args = PoolRowsArgs { x: x_range, scales, norm, pool, pooled, columns, x_stride, pooled_stride };
        cases.recording.call(pool_rows("pool_rows".to_owned(), prompts, args));
        made.push((pooled, x, weights, runs, (width, stride, first)));
    }
    let reference = cases.reference();
    for (pooled, x, weights, runs, (width, stride, first)) in made {
        for (index, (from, count)) in runs.iter().enumerate() {
            for i in 0..width {
                let normed = |row: u32| {
                    let row = &x[(row * stride) as usize..][..width as usize];
                    f64::from(row[i as usize]) / rms(row) * f64::from(weights[i as usize])
                };
                let wanted = (*from..from + count).map(normed).sum();
                near(reference.f32(pooled, (first + index as u32) * stride + i), wanted, "pooled");
            }
        }
    }
    check(&cases, &reference);
}

#[test]
fn logits_are_scaled_and_bounded() {
    let mut cases = Cases::new("bound_logits");
    let mut random = Random(73);
    let mut made = Vec::new();
    for (columns, scale, cap) in [(257, 0.125, None), (100, 1.0, Some(30.0)), (513, 0.5, Some(2.0))] {
        cases.case(format!("{columns} {scale} {cap:?}"));
        let (count, stride) = (2, columns + 7);
        let mut logits: Vec<f32> = (0..count * stride).map(|_| random.float() * 60.0).collect();
        // Values whose exponential overflows, and infinity.
        logits[..4].copy_from_slice(&[1e6, -1e6, f32::INFINITY, 0.0]);
        let range = cases.floats("logits", &logits);
        cases.expect(range, Expect::Floats(2e-6));
        let of = Activations { range, stride };
        cases.recording.call(bound_logits("bound".to_owned(), (count, columns), of, scale, cap));
        made.push((range, logits, (columns, scale, cap), stride));
    }
    let reference = cases.reference();
    for (range, logits, (columns, scale, cap), stride) in made {
        for (index, logit) in (0..).zip(logits) {
            let z = f64::from(logit) * f64::from(scale);
            let bounded = cap.map_or(z, |cap| f64::from(cap) * (z / f64::from(cap)).tanh());
            let wanted = if index % stride < columns { bounded } else { f64::from(logit) };
            let found = reference.f32(range, index);
            assert!(
                f64::from(found) == wanted || (f64::from(found) - wanted).abs() <= 1e-5 * wanted.abs(),
                "{found} {wanted}"
            );
        }
    }
    check(&cases, &reference);
}

/// Goal: the gated linear units, in the kernel for row-major weights; the other kernels include the same functions.
#[test]
fn gated_linear_units_match_their_formulas() {
    let mut cases = Cases::new("glu");
    let mut random = Random(74);
    let mut made = Vec::new();
    // W has one column, so that the products are its values times x; pairs beyond the clamps of ±7 are among them.
    let pairs: Vec<f32> = (0..128)
        .map(|i| if i < 8 { [9.0, 8.5, -9.0, -8.0, 30.0, 1.0, 0.5, -30.0][i] } else { random.float() * 5.0 })
        .collect();
    for glu in [Glu::Silu, Glu::GeluTanh, Glu::Clamped { limit: 7f32.to_bits() }] {
        cases.case(format!("{glu:?}"));
        let weight: Vec<f32> = pairs.iter().flat_map(|value| [*value, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]).collect();
        let range = cases.weights("weight", Format::F32, &weight);
        let x = cases.floats("x", &[1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
        let y = cases.output("y", 64, Expect::Floats(2e-6));
        let product = Product {
            label: "product".to_owned(),
            weight: Matrix { range, format: Format::F32, rows: 128, cols: 1 },
            x: Activations { range: x, stride: 8 },
            norm: None,
            bias: None,
            epilogue: Epilogue::Gated(glu),
            y: Activations { range: y, stride: 64 },
        };
        cases.recording.call(product.gemv(1, GemvConfig { threads: 32, weight_rows: 2, batch: 1 }));
        made.push((glu, y));
    }
    let reference = cases.reference();
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    for (glu, y) in made {
        for (at, pair) in (0..).zip(pairs.chunks_exact(2)) {
            let (gate, up) = (f64::from(pair[0]), f64::from(pair[1]));
            let wanted = match glu {
                Glu::Silu => gate * sigmoid(gate) * up,
                Glu::GeluTanh => {
                    let inner = (2.0 / std::f64::consts::PI).sqrt() * (gate + 0.044715 * gate * gate * gate);
                    0.5 * gate * (1.0 + inner.tanh()) * up
                }
                Glu::Clamped { .. } => {
                    let (gate, up) = (gate.min(7.0), up.clamp(-7.0, 7.0));
                    (up + 1.0) * gate * sigmoid(1.702 * gate)
                }
            };
            near(reference.f32(y, at), wanted, &format!("{glu:?}({gate}, {up})"));
        }
    }
    check(&cases, &reference);
}

/// Goal: each group of columns has the norm of its own mean, with its own weights, also where words carry tags.
#[test]
fn groups_of_columns_are_normed() {
    let mut cases = Cases::new("norm_groups");
    let mut random = Random(76);
    let mut made = Vec::new();
    for (index, (groups, width)) in [(1, 40), (8, 16), (3, 512), (2, 2048), (5, 132)].into_iter().enumerate() {
        let flow = Flow { input_carried: true, input: 9, old: 8, output: Some(10) };
        let flow = if index % 2 == 1 { flow } else { Flow::NONE };
        cases.case(format!("{groups} of {width}, {flow:?}"));
        let (rows, stride, other) = (3u32, groups * width + 8, groups * width + 32);
        let x: Vec<f32> = (0..rows * stride).map(|i| random.float() * (1 + i / width % 7) as f32).collect();
        let weights: Vec<f32> = (0..groups * width).map(|_| 1.0 + random.float()).collect();
        let words: Vec<u32> = match index % 2 {
            1 => x.iter().map(|value| tagged(*value, 9)).collect(),
            _ => x.iter().map(|value| value.to_bits()).collect(),
        };
        let (range, norm) = (cases.words("x", &words), cases.floats("norm", &weights));
        let y = cases.words("y", &vec![0; (rows * other) as usize]);
        let limit = if index % 2 == 1 { TAGGED_LIMIT } else { LIMIT };
        cases.expect(y, Expect::Floats(limit));
        let ends = (Activations { range, stride }, Activations { range: y, stride: other });
        let fault = cases.words("fault", &[0, 0]);
        let call = norm_groups("norm".to_owned(), rows, (groups, width), ends, (norm, EPSILON), (flow, fault));
        cases.recording.call(call);
        let values: Vec<f32> = words.into_iter().map(f32::from_bits).collect();
        made.push(((groups, width), (values, weights), (y, stride, other), limit));
    }
    let reference = cases.reference();
    for ((groups, width), (x, weights), (y, stride, other), limit) in made {
        for (row, group) in (0..3).flat_map(|row| (0..groups).map(move |group| (row, group))) {
            let own = &x[(row * stride + group * width) as usize..][..width as usize];
            let mean = own.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / f64::from(width);
            for (i, value) in (0..).zip(own) {
                let weight = f64::from(weights[(group * width + i) as usize]);
                let wanted = f64::from(*value) / (mean + f64::from(EPSILON)).sqrt() * weight;
                let found = f64::from(reference.f32(y, row * other + group * width + i));
                let near = (found - wanted).abs() <= f64::from(limit) * (1e-3 + wanted.abs());
                assert!(near, "{found:e} instead of {wanted:e}: group {group} of {width}, row {row}, column {i}");
            }
        }
    }
    check(&cases, &reference);
}

#[test]
fn normed_parts_and_other_rows_are_added() {
    let mut cases = Cases::new("norm_and_add");
    let mut random = Random(74);
    let mut made = Vec::new();
    for (parts, width) in [(1, 40), (5, 16), (3, 256)] {
        cases.case(format!("{parts} of {width}"));
        let (count, stride, other) = (3, parts * width + 8, parts * width + 32);
        let x: Vec<f32> = (0..count * stride).map(|_| random.float() * 3.0).collect();
        let y: Vec<f32> = (0..count * other).map(|_| random.float()).collect();
        let weights: Vec<f32> = (0..width).map(|_| 1.0 + random.float()).collect();
        let (range, norm) = (cases.floats("x", &x), cases.floats("norm", &weights));
        let added = (Activations { range: cases.floats("y", &y), stride: other }, 0.7);
        cases.expect(range, Expect::Floats(LIMIT));
        let (of, parts) = (Activations { range, stride }, (0, parts, width));
        cases.recording.call(norm_and_add("norm".to_owned(), count, of, parts, (Some(norm), EPSILON), added));
        made.push((range, x, y, weights, (count, stride, other), parts));
    }
    let reference = cases.reference();
    for (range, x, y, weights, (count, stride, other), (_, parts, width)) in made {
        for (row, at) in (0..count).flat_map(|row| (0..parts * width).map(move |at| (row, at))) {
            let part = &x[(row * stride + at / width * width) as usize..][..width as usize];
            let normed = f64::from(part[(at % width) as usize]) / rms(part) * f64::from(weights[(at % width) as usize]);
            let wanted = (normed + 0.7 * f64::from(y[(row * other + at) as usize])) / 2f64.sqrt();
            near(reference.f32(range, row * stride + at), wanted, "x");
        }
    }
    check(&cases, &reference);
}

#[test]
fn rows_are_gated_by_their_part_of_other_rows() {
    let mut cases = Cases::new("gate_rows");
    let mut random = Random(75);
    let mut made = Vec::new();
    for (width, first) in [(16, 0), (16, 32), (200, 8)] {
        cases.case(format!("{width} from {first}"));
        let (count, stride, other) = (3, width + 8, first + width + 16);
        let x: Vec<f32> = (0..count * stride).map(|_| random.float() * 3.0).collect();
        let y: Vec<f32> = (0..count * other).map(|_| random.float()).collect();
        let range = cases.floats("x", &x);
        let from = (Activations { range: cases.floats("y", &y), stride: other }, first);
        cases.expect(range, Expect::Floats(LIMIT * 4.0));
        let call = gate_rows("gate".to_owned(), (count, width), Activations { range, stride }, from, Glu::GeluTanh);
        cases.recording.call(call);
        made.push((range, x, y, (count, stride, other), (width, first)));
    }
    let reference = cases.reference();
    for (range, x, y, (count, stride, other), (width, first)) in made {
        for (row, at) in (0..count).flat_map(|row| (0..stride).map(move |at| (row, at))) {
            let value = f64::from(x[(row * stride + at) as usize]);
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (value + 0.044715 * value.powi(3));
            let wanted = match at < width {
                true => 0.5 * value * (1.0 + inner.tanh()) * f64::from(y[(row * other + first + at) as usize]),
                false => value,
            };
            near(reference.f32(range, row * stride + at), wanted, "x");
        }
    }
    check(&cases, &reference);
}

#[test]
fn queries_meet_the_latent_vector_and_values_are_made_of_it() {
    let mut cases = Cases::new("latent");
    let mut random = Random(76);
    let mut made = Vec::new();
    for (heads, rope, nope, rank, values) in [(1, 8, 8, 16, 8), (5, 16, 24, 40, 32), (3, 64, 128, 512, 128)] {
        let shape = LatentShape { heads, rope, nope, rank, values };
        cases.case(format!("{shape:?}"));
        let (rows, dim, first) = (3, rope + rank, 24);
        let mut floats = |count: u32| -> Vec<f32> { (0..count).map(|_| random.float()).collect() };
        let (q_stride, k_stride, y_stride) = (heads * (rope + nope) + 8, first + dim + 8, (heads + 2) * dim + 16);
        let (q, k) = (floats(rows * q_stride), floats(rows * k_stride));
        let (keys, outputs) = (floats(heads * nope * rank), floats(heads * values * rank));
        let of = |range, stride| Activations { range, stride };
        let (q_range, k_range) = (of(cases.floats("q", &q), q_stride), of(cases.floats("k", &k), k_stride));
        let y = of(cases.output("y", (rows * y_stride) as usize, Expect::Floats(LIMIT * 16.0)), y_stride);
        let weights = cases.floats("keys", &keys);
        let call = latent_rows("rows".to_owned(), shape, rows, q_range, (k_range, first), weights, y);
        cases.recording.call(call);
        let v_stride = heads * values + 8;
        let v = of(cases.output("v", (rows * v_stride) as usize, Expect::Floats(LIMIT * 64.0)), v_stride);
        let weights = cases.floats("values", &outputs);
        cases.recording.call(latent_values("values".to_owned(), shape, rows, y, weights, v));
        made.push((shape, (q, q_stride), (k, k_stride), keys, outputs, y, v));
    }
    let reference = cases.reference();
    for (shape, (q, q_stride), (k, k_stride), keys, outputs, y, v) in made {
        let LatentShape { heads, rope, nope, rank, values } = shape;
        let dim = rope + rank;
        for (row, h) in (0..3).flat_map(|row| (0..heads).map(move |h| (row, h))) {
            let query = &q[(row * q_stride + h * (rope + nope)) as usize..][..(rope + nope) as usize];
            let found = |i: u32| f64::from(reference.f32(y.range, row * y.stride + h * dim + i));
            for i in 0..rope {
                near(found(i) as f32, f64::from(query[i as usize]), "the rotated part");
            }
            for j in 0..rank {
                let weight = |i: u32| f64::from(keys[((h * nope + i) * rank + j) as usize]);
                let wanted = (0..nope).map(|i| weight(i) * f64::from(query[(rope + i) as usize])).sum();
                near(found(rope + j) as f32, wanted, "the query");
            }
            for r in 0..values {
                let weight = |i: u32| f64::from(outputs[((h * values + r) * rank + i) as usize]);
                let wanted: f64 = (0..rank).map(|i| weight(i) * found(rope + i)).sum();
                near(reference.f32(v.range, row * v.stride + h * values + r), wanted, "the value");
            }
        }
        for (row, i) in (0..3).flat_map(|row| (0..dim).map(move |i| (row, i))) {
            let wanted = f64::from(k[(row * k_stride + 24 + i) as usize]);
            for part in [0, 1] {
                near(reference.f32(y.range, row * y.stride + (heads + part) * dim + i), wanted, "the key");
            }
        }
    }
    check(&cases, &reference);
}
