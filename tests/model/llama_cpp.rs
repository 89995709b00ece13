//! Goal: a GGUF file that llama.cpp's converter and quantiser made from the demo model gives what llama.cpp draws from
//! it. Method: `tests/fixtures/llama.cpp` has the file, the logits after a prompt, and two stories: one drawn from the
//! file widened to f32, in f32, and one drawn from the file itself, for which llama.cpp rounds the inputs of products to
//! 8 bits. Here products are in f32, with scales rounded to f16.
//!
//! Two programs that round differently may differ at a near-tie. So each step of a story is drawn after the story's own
//! tokens before it; where another token is drawn, it must be the story's second-best, and the two logits must be closer
//! than the roundings can account for.

use super::quantised::{DIVERGENCE, divergence, draw, restore, start};
use crate::common::Vulkan;
use crate::harness::models::{fixture, generate, request};
use ostinato::host::Host;
use ostinato::model::gguf::write::{FileType, convert};
use safetensors::SafeTensors;
use serde_json::Value;
use std::path::Path;

/// The maximum difference of a logit from llama.cpp's, because scales are rounded to f16. The logits' standard
/// deviation is 3.
const ROUNDING: f64 = 8e-3;

/// A greedy story.
struct Story {
    tokens: Vec<u32>,
    /// The best minus the second-best logit, by step.
    margins: Vec<f64>,
    second: Vec<u32>,
}

impl Story {
    fn read(json: &Value) -> Story {
        let list = |key: &str| json[key].as_array().unwrap_or_else(|| panic!("no {key}"));
        let ids = |key: &str| list(key).iter().map(|id| id.as_u64().expect("an id") as u32).collect();
        let margins = list("margins").iter().map(|margin| margin.as_f64().expect("a number")).collect();
        Story { tokens: ids("tokens"), margins, second: ids("second") }
    }

    /// Draws every step of the story. Returns the steps at which another token was drawn.
    fn retell(&self, host: &Host, prompt: &[u32], doubt: f64) -> Vec<usize> {
        let replica = host.replicas().next().expect("one model");
        let (mut at, mut others) = (0, Vec::new());
        while at < self.tokens.len() {
            let begun = [prompt, &self.tokens[..at]].concat();
            let drawn = generate(&replica, request(&begun, (self.tokens.len() - at) as u32)).tokens;
            let Some(apart) = (at..self.tokens.len()).find(|step| drawn[step - at] != self.tokens[*step]) else {
                break;
            };
            let (found, wanted, margin) = (drawn[apart - at], self.tokens[apart], self.margins[apart]);
            assert_eq!(
                found, self.second[apart],
                "step {apart}: not among llama.cpp's two best tokens, the best is {wanted}"
            );
            assert!(margin < doubt, "step {apart}: {found}, llama.cpp draws {wanted}, {margin} ahead");
            others.push(apart);
            at = apart + 1;
        }
        others
    }
}

#[test]
fn llama_cpps_file_tells_llama_cpps_story() {
    let json = std::fs::read(fixture("llama.cpp/story.json")).expect("the fixture");
    let json: Value = serde_json::from_slice(&json).expect("JSON");
    let prompt: Vec<u32> = serde_json::from_value(json["prompt"].clone()).expect("ids");
    let expected = &json["files"]["Q4_K_M"];
    let vulkan = Vulkan::shared();
    let host = start(&vulkan, &fixture("llama.cpp/demo-Q4_K_M.gguf"), None, &[]);

    let bytes = std::fs::read(fixture("llama.cpp/logits.safetensors")).expect("the fixture");
    let tensors = SafeTensors::deserialize(&bytes).expect("safetensors");
    let wanted = tensors.tensor("Q4_K_M").expect("logits");
    let wanted: Vec<f32> = wanted.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    let compare = |host: &Host, what: &str, limit: f64| {
        let (_, logits) = draw(host, &prompt, 1);
        let apart = divergence(&logits, std::slice::from_ref(&wanted));
        let most = logits[0].iter().zip(&wanted).map(|(f, w)| f64::from((f - w).abs())).fold(0.0, f64::max);
        println!("{what}: divergence after the prompt {apart:.1e}, largest difference {most:.1e}");
        assert!(apart <= DIVERGENCE && most <= limit, "{what}: {apart:e}, {most:e}");
    };
    compare(&host, "codes", ROUNDING);
    // The file's values in f32, where only the order of sums differs.
    let folder = tempfile::tempdir().expect("a folder");
    restore(&fixture("llama.cpp/demo-Q4_K_M.gguf"), folder.path());
    compare(&start(&vulkan, folder.path(), None, &[]), "numbers", ROUNDING / 20.0);

    // Each of two logits may differ by as much. llama.cpp's own rounding was measured after the prompt.
    let rounding = expected["rounding"].as_f64().expect("a number");
    for (json, logit, most_ties) in [(&expected["widened"], ROUNDING, 1), (expected, ROUNDING + rounding, 16)] {
        let (story, doubt) = (Story::read(json), 2.0 * logit);
        let others = story.retell(&host, &prompt, doubt);
        let ties = story.margins.iter().filter(|margin| **margin < doubt).count();
        println!("logits within {logit:.3}: other tokens at steps {others:?}, near-ties {ties}");
        assert!(story.tokens.len() == 64 && ties <= most_ties, "{ties} near-ties in {} steps", story.tokens.len());
    }
}

#[test]
fn a_file_in_q8_0_tells_the_story_of_llama_cpps() {
    let json = std::fs::read(fixture("llama.cpp/story.json")).expect("the fixture");
    let json: Value = serde_json::from_slice(&json).expect("JSON");
    let prompt: Vec<u32> = serde_json::from_value(json["prompt"].clone()).expect("ids");
    let expected = &json["files"]["Q8_0"];
    // Written here: the codes are not llama.cpp's everywhere, as they are chosen for the scale rounded to f16.
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("demo.gguf");
    let demo = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/demo/model"));
    convert(demo, &file, FileType::from_name("Q8_0").expect("a type"), 2).expect("converted");
    let host = start(&Vulkan::shared(), &file, None, &[]);
    let doubt = 2.0 * expected["rounding"].as_f64().expect("a number");
    for json in [&expected["widened"], expected] {
        let others = Story::read(json).retell(&host, &prompt, doubt);
        println!("other tokens at steps {others:?}");
    }
}
