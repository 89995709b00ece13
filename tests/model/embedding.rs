//! Goal: the vector of a prompt equals transformers' hidden states, however it is pooled, and does not depend on how the
//! prompt is split into chunks, on other sequences in the batch or on the prefix cache. Method: a committed checkpoint
//! with hidden states from transformers; checkpoints of several families, whose logits follow from the pooled state.

use crate::common::{Driver, Vulkan};
use crate::gguf_families::restored;
use crate::harness::models::{expected, fixture, generate, idle, request, submit};
use crate::scoring::serve;
use crossbeam_channel::Receiver;
use ostinato::config::{Config, KvFormat, Model};
use ostinato::engine::request::{Event, FinishReason, Finished, Limits, Request, Started};
use ostinato::gpu::devices::start_with;
use ostinato::host::Host;
use ostinato::host::progress::Quiet;
use ostinato::model::checkpoint::Checkpoint;
use ostinato::model::embedding::{Embedding, Pooling};
use ostinato::replica::Replica;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

fn ask(id: &str, prompt: &[u32], pooling: Pooling) -> Request {
    Request { id: id.to_owned(), pooling: Some(pooling), ..request(prompt, 1) }
}

/// What an embedded prompt returned.
struct Embedded {
    started: Started,
    vector: Box<[f32]>,
    finished: Finished,
}

/// Receives all events of an embedded prompt.
fn embedded(events: &Receiver<Event>) -> Embedded {
    let (mut started, mut vector) = (None, None);
    loop {
        match events.recv_timeout(Duration::from_secs(120)).expect("the request goes on") {
            Event::Started(event) => started = Some(*event),
            Event::Embedding(values) => assert!(vector.replace(values).is_none(), "two vectors"),
            Event::Finished(finished) => {
                assert_eq!(finished.reason, FinishReason::Embedded);
                assert_eq!(finished.output_tokens, 0);
                let (started, vector) = (started.expect("it started"), vector.expect("it has a vector"));
                return Embedded { started, vector, finished: *finished };
            }
            other => panic!("{other:?} of a prompt that is embedded"),
        }
    }
}

fn embed(replica: &Replica, request: Request) -> Embedded {
    embedded(&submit(replica, request))
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

/// Returns 1 minus the cosine, and the relative difference.
fn apart(found: &[f32], wanted: &[f32]) -> (f64, f64) {
    let square: f64 = found.iter().zip(wanted).map(|(f, w)| f64::from(f - w).powi(2)).sum();
    let wanted_square = dot(wanted, wanted);
    (1.0 - dot(found, wanted) / (dot(found, found) * wanted_square).sqrt(), (square / wanted_square).sqrt())
}

fn near(found: &[f32], wanted: &[f32], relative: f64, what: &str) {
    let (angle, difference) = apart(found, wanted);
    println!("{what}: 1 - cosine {angle:.1e}, relative difference {difference:.1e} of {relative:.0e}");
    assert!(angle <= 1e-6_f64.max(relative * relative) && difference <= relative, "{what}: {angle}, {difference}");
}

const POOLINGS: [(Pooling, &str); 3] = [(Pooling::Last, "last"), (Pooling::First, "first"), (Pooling::Mean, "mean")];

/// A vector of each prompt.
type Vectors = Vec<Vec<f32>>;

/// The prompts of a fixture, and transformers' vectors of each by pooling.
fn known(name: &str) -> (Vec<Vec<u32>>, [(Pooling, Vectors); 3]) {
    let folder = fixture(name);
    let text = std::fs::read_to_string(folder.join("expected.json")).unwrap();
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    let prompts: Vec<Vec<u32>> = serde_json::from_value(json["prompts"].clone()).unwrap();
    let bytes = std::fs::read(folder.join("expected.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let vectors = POOLINGS.map(|(pooling, key)| {
        let tensor = tensors.tensor(key).unwrap();
        let values: Vec<f32> =
            tensor.data().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        (pooling, values.chunks_exact(tensor.shape()[1]).map(<[f32]>::to_vec).collect())
    });
    (prompts, vectors)
}

#[test]
fn vectors_are_those_of_transformers() {
    let vulkan = Vulkan::shared();
    let name = "embeddings/qwen3";
    let (prompts, vectors) = known(name);
    for chunk in [256, 24] {
        let host = serve(&vulkan, name, |model, _| model.prefill_chunk = Some(chunk));
        let model = &host.models()[0];
        let says = &model.info.embedding;
        assert_eq!((says.pooling, says.normalize, says.declared, says.size), (Pooling::Last, true, true, 72));
        let replica = &model.replicas[0];
        for (pooling, wanted) in &vectors {
            // All of a kind at once, so that prompts share steps; each alone; and each again, when its pages are there.
            let ask = |index: usize| ask(&format!("{index}"), &prompts[index], *pooling);
            let together: Vec<_> = (0..prompts.len()).map(|index| submit(replica, ask(index))).collect();
            for (index, events) in together.iter().enumerate() {
                let what = format!("{pooling:?} of {} tokens, chunks of {chunk}", prompts[index].len());
                let found = embedded(events);
                near(&found.vector, &wanted[index], 2e-6, &what);
                assert_eq!(found.finished.prompt_tokens as usize, prompts[index].len());
                idle(replica);
                assert!(replica.forget_prompts());
                let alone = embed(replica, ask(index));
                near(&alone.vector, &found.vector, 1e-6, &format!("{what}, alone"));
                let again = embed(replica, ask(index));
                near(&again.vector, &alone.vector, 1e-6, &format!("{what}, again"));
                // Only the state of the last token can follow pages that were found.
                let reusable = (prompts[index].len() as u32 - 1) / 16 * 16;
                let cached = if *pooling == Pooling::Last { reusable } else { 0 };
                assert_eq!(again.started.cached_tokens, cached, "{what}");
            }
        }
        idle(replica);
    }
}

/// The fixtures whose tokens see later ones.
const BOTH_SIDES: [&str; 2] = ["embeddings/gemma3", "embeddings/gemma3-bias"];

/// Serves a checkpoint on a driver.
fn serve_path(vulkan: &Vulkan, driver: Driver, path: &Path, change: impl FnOnce(&mut Model, &mut Config)) -> Host {
    let mut model = Model::new("m", path, Some(vulkan.adapter(driver).selector()));
    model.slots = Some(4);
    let mut config = Config::default();
    change(&mut model, &mut config);
    config.models = vec![model];
    start_with(&vulkan.devices, &config, &Quiet).unwrap_or_else(|e| panic!("{}: {e:?}", path.display()))
}

/// Serves a checkpoint without rounding of activations, keys or values.
fn exact(model: &mut Model, config: &mut Config) {
    model.kv_format = Some(KvFormat::F32);
    config.runtime.tune = vec!["fragments=0".into()];
}

/// Returns the tensor `vector` of a fixture: the vectors of its prompts behind all modules.
fn wanted_vectors(name: &str) -> Vectors {
    let bytes = std::fs::read(fixture(name).join("expected.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let tensor = tensors.tensor("vector").unwrap();
    let values: Vec<f32> = tensor.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    values.chunks_exact(tensor.shape()[1]).map(<[f32]>::to_vec).collect()
}

/// Returns what a model's modules make of a pooled state, scaled to unit length.
fn projected(embedding: &Embedding, pooled: &[f32]) -> Vec<f32> {
    let vector = embedding.project(vec![pooled.to_vec()]).remove(0);
    let length = dot(&vector, &vector).sqrt();
    vector.into_iter().map(|value| (f64::from(value) / length) as f32).collect()
}

/// Checks all vectors of a fixture on a model: all prompts at once, each alone, and each again. Differences of hidden states
/// are at most `relative` of them, those of vectors at most `absolute`.
fn check_both_sides(host: &Host, name: &str, most: usize, (relative, absolute): (f64, f32), what: &str) {
    let (prompts, vectors) = known(name);
    let wanted_vectors = wanted_vectors(name);
    let model = &host.models()[0];
    let replica = &model.replicas[0];
    let served: Vec<usize> = (0..prompts.len()).filter(|index| prompts[*index].len() <= most).collect();
    for (pooling, wanted) in &vectors {
        let ask = |index: usize| ask(&format!("{index}"), &prompts[index], *pooling);
        let together: Vec<_> = served.iter().map(|index| submit(replica, ask(*index))).collect();
        for (index, events) in served.iter().zip(&together) {
            let index = *index;
            let what = format!("{name}, {pooling:?} of {} tokens, {what}", prompts[index].len());
            let found = embedded(events);
            near(&found.vector, &wanted[index], relative, &what);
            if *pooling == Pooling::Mean {
                let vector = projected(&model.info.embedding, &found.vector);
                for (found, wanted) in vector.iter().zip(&wanted_vectors[index]) {
                    assert!((found - wanted).abs() <= absolute, "{what}: {found} instead of {wanted}");
                }
                assert_eq!(vector.len(), wanted_vectors[index].len());
            }
        }
        idle(replica);
        for index in &served {
            let what = format!("{name}, {pooling:?} of {} tokens, {what}", prompts[*index].len());
            for turn in ["alone", "again"] {
                let alone = embed(replica, ask(*index));
                near(&alone.vector, &wanted[*index], relative, &format!("{what}, {turn}"));
                assert_eq!(alone.started.cached_tokens, 0, "{what}");
            }
        }
    }
    idle(replica);
}

/// Goal: vectors of models whose tokens see later ones are those of transformers, with windows that hide tokens on both
/// sides, alone and beside other prompts, in one large step and in steps that hold few prompts, and with few pages. Such a
/// model draws no tokens, finds no prefixes, and refuses prompts that are longer than a step with both numbers.
#[test]
fn tokens_that_see_later_ones_give_the_vectors_of_transformers() {
    let vulkan = Vulkan::shared();
    for name in BOTH_SIDES {
        let host = serve_path(&vulkan, Driver::first(), &fixture(name), exact);
        let (model, size) = (&host.models()[0], wanted_vectors(name)[0].len() as u32);
        let says = &model.info.embedding;
        assert_eq!((says.pooling, says.normalize, says.declared), (Pooling::Mean, true, true));
        assert_eq!((says.size, says.dense.len(), model.info.context, model.draws()), (size, 2, 256, false));
        check_both_sides(&host, name, 256, (2e-6, 1e-5), "one step");
        drop(host);
        // A chunk is the longest prompt; all of the others do not fit in one.
        let host = serve_path(&vulkan, Driver::first(), &fixture(name), |model, config| {
            exact(model, config);
            model.prefill_chunk = Some(72);
            model.kv_pages = Some(6);
        });
        check_both_sides(&host, name, 72, (2e-6, 1e-5), "chunks of 72");
        let replica = &host.models()[0].replicas[0];
        let (prompts, _) = known(name);
        let sink = || Box::new(|_| Ok(()));
        let refused = replica.submit(ask("long", &prompts[5], Pooling::Mean), sink()).unwrap_err().to_string();
        assert_eq!(refused, "130 prompt tokens and 0 to generate exceed the context of 72");
        let refused = replica.submit(request(&prompts[1], 1), sink()).unwrap_err().to_string();
        let wanted = "the model gives embeddings only: its attention is not causal, so that it draws no tokens";
        assert_eq!(refused, wanted);
    }
}

/// Goal: a decoder of another family whose configuration says `is_causal: false` does the same, with and without windows.
#[test]
fn decoders_that_are_not_causal_give_the_vectors_of_transformers() {
    let vulkan = Vulkan::shared();
    for (name, pooling, window) in
        [("embeddings/qwen2-both", Pooling::Last, None), ("embeddings/mistral-both", Pooling::Mean, Some(12))]
    {
        let checkpoint = Checkpoint::open(&fixture(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!((checkpoint.config.causal, checkpoint.config.attention(0).window), (false, window), "{name}");
        let host = serve_path(&vulkan, Driver::first(), &fixture(name), exact);
        let model = &host.models()[0];
        let says = &model.info.embedding;
        assert_eq!((says.pooling, says.declared, says.dense.len(), model.draws()), (pooling, true, 0, false), "{name}");
        check_both_sides(&host, name, 256, (2e-6, 1e-5), "one step");
        drop(host);
        let host = serve_path(&vulkan, Driver::first(), &fixture(name), |model, config| {
            exact(model, config);
            model.prefill_chunk = Some(72);
        });
        check_both_sides(&host, name, 72, (2e-6, 1e-5), "chunks of 72");
    }
}

#[test]
fn tokens_that_see_later_ones_do_so_in_fragments_with_codes_and_on_another_driver() {
    let vulkan = Vulkan::shared();
    let name = BOTH_SIDES[0];
    // Activations, keys, values and weights of the softmax are rounded to 16 bits.
    let rounded = |model: &mut Model, config: &mut Config| {
        model.kv_format = Some(KvFormat::F16);
        config.runtime.tune = vec!["fragments=1".into()];
    };
    let host = serve_path(&vulkan, Driver::first(), &fixture(name), rounded);
    check_both_sides(&host, name, 256, (2e-2, 1e-2), "in fragments");
    let codes = |model: &mut Model, config: &mut Config| {
        exact(model, config);
        model.kv_format = Some(KvFormat::Int8);
    };
    let host = serve_path(&vulkan, Driver::first(), &fixture(name), codes);
    check_both_sides(&host, name, 256, (3e-2, 2e-2), "with codes");
    if let Some(other) = Driver::all().last().filter(|driver| **driver != Driver::first()) {
        let host = serve_path(&vulkan, *other, &fixture(name), exact);
        check_both_sides(&host, name, 72, (2e-6, 1e-5), "on another driver");
    }
}

/// Goal: a GGUF file that llama.cpp's converter made, with its dense modules, gives the same vectors.
#[test]
fn a_gguf_file_whose_tokens_see_later_ones_gives_the_vectors_of_transformers() {
    let vulkan = Vulkan::shared();
    let name = BOTH_SIDES[0];
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("gemma3.gguf");
    std::fs::write(&file, restored("embeddings", "embeddings", "gemma3")).expect("written");
    let host = serve_path(&vulkan, Driver::first(), &file, exact);
    let says = &host.models()[0].info.embedding;
    assert_eq!((says.pooling, says.normalize, says.declared, says.dense.len()), (Pooling::Mean, true, true, 2));
    check_both_sides(&host, name, 256, (2e-6, 1e-5), "GGUF");
}

/// Returns why a checkpoint does not start.
fn why_not(vulkan: &Vulkan, path: &Path, change: &dyn Fn(&mut Model)) -> String {
    let mut model = Model::new("m", path, Some(vulkan.adapter(Driver::first()).selector()));
    change(&mut model);
    let config = Config { models: vec![model], ..Config::default() };
    match start_with(&vulkan.devices, &config, &Quiet) {
        Ok(_) => panic!("{} starts", path.display()),
        Err(error) => format!("{error:?}"),
    }
}

/// Goal: files of dense modules that are missing, cut, of another shape or of other numbers are refused by name.
#[test]
fn files_of_dense_modules_that_are_wrong_are_refused() {
    let vulkan = Vulkan::shared();
    let dense = |module: &str| std::fs::read(fixture(BOTH_SIDES[0]).join(module).join("model.safetensors")).unwrap();
    let refused = |file: Option<Vec<u8>>| {
        let folder = tempfile::tempdir().expect("a folder");
        for entry in ["", "1_Pooling", "2_Dense", "3_Dense"] {
            let (from, to) = (fixture(BOTH_SIDES[0]).join(entry), folder.path().join(entry));
            std::fs::create_dir_all(&to).unwrap();
            let files = std::fs::read_dir(from).unwrap().map(|entry| entry.unwrap().path());
            for file in files.filter(|path| path.is_file()) {
                std::fs::copy(&file, to.join(file.file_name().unwrap())).unwrap();
            }
        }
        let path = folder.path().join("2_Dense/model.safetensors");
        match file {
            Some(bytes) => std::fs::write(path, bytes).unwrap(),
            None => std::fs::remove_file(path).unwrap(),
        }
        why_not(&vulkan, folder.path(), &|_| ())
    };
    let own = dense("2_Dense");
    let missing = refused(None);
    assert!(missing.contains("2_Dense: tensor linear.weight is missing, must have shape [56, 48]"), "{missing}");
    let shape = refused(Some(dense("3_Dense")));
    assert!(shape.contains("tensor linear.weight has shape [48, 56], must have [56, 48]"), "{shape}");
    let cut = refused(Some(own[..own.len() - 4].to_vec()));
    assert!(cut.contains("2_Dense: tensor linear.weight cannot be read"), "{cut}");
    let header = refused(Some(vec![255; 64]));
    assert!(header.contains("2_Dense: tensor linear.weight cannot be read"), "{header}");
    let text = String::from_utf8_lossy(&own[8..200]).into_owned();
    let at = 8 + text.find("\"F32\"").expect("the type is in the header");
    let integers = [&own[..at], b"\"I32\"", &own[at + 5..]].concat();
    let integers = refused(Some(integers));
    assert!(integers.contains("numbers of type I32 are not supported"), "{integers}");
}

/// Goal: what such a model cannot be asked for is refused before anything is loaded, with both numbers.
#[test]
fn contexts_longer_than_a_chunk_and_drafts_are_refused_where_tokens_see_later_ones() {
    let vulkan = Vulkan::shared();
    let refused = |change: &dyn Fn(&mut Model)| why_not(&vulkan, &fixture(BOTH_SIDES[0]), change);
    let long = refused(&|model| (model.context, model.prefill_chunk) = (Some(200), Some(100)));
    assert!(long.contains("context is 200") && long.contains("at most 100 tokens"), "{long}");
    let drafts = refused(&|model| model.draft = Some(ostinato::config::Draft::Lookup));
    assert!(drafts.contains("it draws no tokens"), "{drafts}");
}

#[test]
fn vectors_beside_generation_are_those_of_transformers() {
    let vulkan = Vulkan::shared();
    let name = "embeddings/qwen3";
    let (prompts, vectors) = known(name);
    // Pages for 11 times 16 tokens: prompts wait for pages of sequences that decode, and their chunks alternate with steps.
    let host = serve(&vulkan, name, |model, _| {
        model.kv_pages = Some(11);
        model.context = Some(16 * 11);
        model.prefill_chunk = Some(16);
    });
    let replica = &host.replicas().next().unwrap();
    let wanted = generate(replica, request(&prompts[2], 100)).tokens;
    let beside: Vec<_> = (0..2)
        .map(|index| {
            let limits = Limits { max_tokens: Some(100), ignore_eos: true, ..Limits::default() };
            let id = format!("beside {index}");
            submit(replica, Request { id, limits, cache_salt: index.to_string(), ..request(&prompts[2], 100) })
        })
        .collect();
    let asked: Vec<_> = vectors
        .iter()
        .flat_map(|(pooling, wanted)| wanted.iter().enumerate().map(move |(index, wanted)| (pooling, index, wanted)))
        .map(|(pooling, index, wanted)| {
            let request = Request {
                // A higher priority, so that prompts come between the steps.
                priority: (index % 2) as i32,
                ..ask(&format!("{pooling:?} {index}"), &prompts[index], *pooling)
            };
            (submit(replica, request), wanted, format!("{pooling:?} of {} tokens", prompts[index].len()))
        })
        .collect();
    for (events, wanted, what) in asked {
        near(&embedded(&events).vector, wanted, 2e-6, &what);
    }
    for events in &beside {
        assert_eq!(crate::harness::models::collect(events).tokens, wanted, "what is drawn beside");
    }
    // The whole context may be a prompt, and no more.
    let whole: Vec<u32> = prompts[5].iter().chain(&prompts[5]).copied().take(16 * 11).collect();
    embed(replica, ask("whole", &whole, Pooling::Mean));
    let longer = [&whole[..], &[1]].concat();
    let sink = Box::new(|_| Ok(()));
    let refused = replica.submit(ask("longer", &longer, Pooling::Mean), sink).unwrap_err().to_string();
    assert_eq!(refused, "177 prompt tokens and 0 to generate exceed the context of 176");
    idle(replica);
}

/// Goal: the last state of a language model of any family is what its head reads: the products with the rows of the
/// head are transformers' logits. Hybrids and mixtures of experts included.
#[test]
fn the_last_state_gives_the_logits() {
    let vulkan = Vulkan::shared();
    for name in ["qwen3-deep", "llama-f32", "moe-top2", "hybrid-long", "hybrid-two"] {
        let host = serve(&vulkan, name, |_, _| {});
        let replica = &host.replicas().next().unwrap();
        let expected = expected(name);
        let found = embed(replica, ask("a", &expected.prompt, Pooling::Last));
        let tensors = head(name);
        let logits = &expected.logits[0];
        assert_eq!(logits.0, 0);
        let computed: Vec<f32> =
            tensors.chunks_exact(found.vector.len()).map(|row| dot(row, &found.vector) as f32).collect();
        near(&computed, &logits.1, 3e-5, name);
        idle(replica);
    }
}

/// Returns the head's matrix `[vocab, hidden]` of a checkpoint, or its embedding if the two are tied.
fn head(name: &str) -> Vec<f32> {
    let mut tied = None;
    for entry in std::fs::read_dir(fixture(name)).unwrap() {
        let path = entry.unwrap().path();
        let file = path.file_name().unwrap().to_string_lossy().into_owned();
        if !(file.starts_with("model") && file.ends_with(".safetensors")) {
            continue;
        }
        let bytes = std::fs::read(&path).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        for (key, tensor) in tensors.tensors() {
            let values = || -> Vec<f32> {
                let data = tensor.data();
                match tensor.dtype() {
                    safetensors::Dtype::F32 => {
                        data.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
                    }
                    safetensors::Dtype::F16 => {
                        data.chunks_exact(2).map(|b| half::f16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
                    }
                    _ => data
                        .chunks_exact(2)
                        .map(|b| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16))
                        .collect(),
                }
            };
            if key == "lm_head.weight" {
                return values();
            }
            if key.ends_with("embed_tokens.weight") {
                tied = Some(values());
            }
        }
    }
    tied.expect("a checkpoint has an embedding")
}

/// Goal: with the only token drawn among two, its log probabilities are those among the two.
#[test]
fn probabilities_among_allowed_tokens_are_transformers() {
    let vulkan = Vulkan::shared();
    for name in ["qwen3-deep", "llama-f32"] {
        let host = serve(&vulkan, name, |_, _| {});
        let replica = &host.replicas().next().unwrap();
        let expected = expected(name);
        let logits = &expected.logits[0].1;
        for pair in [[3, 4], [40, 7], [200, 33]] {
            let mut mask = vec![0u32; logits.len().div_ceil(32)];
            pair.iter().for_each(|token: &usize| mask[token / 32] |= 1 << (token % 32));
            let asked = Request { logprobs: Some(2), allowed: Some(Arc::from(mask)), ..request(&expected.prompt, 1) };
            let drawn = generate(replica, asked);
            let top = &drawn.drawn[0].logprobs.as_ref().unwrap().top;
            let found = |token: usize| top.iter().find(|(id, _)| *id as usize == token).expect("it is allowed").1;
            let difference = f64::from(logits[pair[0]] - logits[pair[1]]);
            let wanted = 1.0 / (1.0 + (-difference).exp());
            let probability = f64::from(found(pair[0])).exp();
            println!("{name}: {probability} instead of {wanted}");
            assert!((probability - wanted).abs() < 2e-5, "{name}: {probability} instead of {wanted}");
            assert_eq!(top.len(), 2);
        }
        idle(replica);
    }
}
