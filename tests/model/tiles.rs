//! Goal: prompts' attention in tiles without matrix units (`flash_f32`), as GPUs use it with row-major weights, draws what the
//! row-by-row kernel draws. Method: models whose attention has windows, soft caps and sinks, with caches of f16 and of codes; a
//! long prompt in several chunks, then decode steps behind it. Both kernels read the same cache and compute in f32, so that
//! logits differ by the order of sums only.

use crate::common::{Driver, Vulkan};
use crate::quantised::{divergence, draw};
use ostinato::config::{Config, KvFormat, Model};
use ostinato::gpu::devices::start_with;
use ostinato::host::progress::Quiet;
use std::path::Path;

/// The mean divergence of logits that sums in another order may have; a code of a cache may be rounded to its neighbour.
const DIVERGENCE: f64 = 1e-8;
const OF_CODES: f64 = 1e-6;

#[test]
fn tiles_in_f32_draw_what_rows_draw() {
    let vulkan = Vulkan::shared();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/families");
    let prompt: Vec<u32> = (0..150).map(|i| i * 7 % 47 + 3).collect();
    for (name, format) in [
        ("gemma2-old", KvFormat::F16),
        ("gptoss-mxfp4", KvFormat::F16),
        ("mistral-window", KvFormat::Int8),
        ("gemma3-text", KvFormat::Int8),
        ("mistral-nemo", KvFormat::F16),
    ] {
        let drawn = ["flash_f32=0", "flash_f32=1"].map(|tune| {
            let mut model = Model::new("tiles", folder.join(name), Some(vulkan.adapter(Driver::Lavapipe).selector()));
            (model.kv_format, model.context) = (Some(format), Some(256));
            let mut config = Config { models: vec![model], ..Config::default() };
            config.runtime.tune = vec![tune.to_owned()];
            let host = start_with(&vulkan.devices, &config, &Quiet).unwrap_or_else(|e| panic!("{name}: {e:?}"));
            draw(&host, &prompt, 12)
        });
        let [(wanted, rows), (found, tiles)] = drawn;
        let apart = divergence(&tiles, &rows);
        println!("{name} {format:?}: divergence {apart:.1e}");
        assert_eq!(found, wanted, "{name}");
        let most = if format == KvFormat::Int8 { OF_CODES } else { DIVERGENCE };
        assert!(apart <= most, "{name}: {apart:e}");
        assert_ne!(tiles, rows, "{name}: both took the same kernel");
    }
}
